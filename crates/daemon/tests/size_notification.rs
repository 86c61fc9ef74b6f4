//! A disk that becomes larger while nobody listens: QEMU reads the size once, and drops what it is told while the VM is
//! paused or its driver is not up.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::frontend::BackendChannel;
use testkit::frontend::message::BACKEND_CONFIG_CHANGE;
use testkit::server::Server;

use super::support::Disk;

const MIB: u64 = 1 << 20;

struct Served {
    disk: Disk,
    control: PathBuf,
    server: Server,
}

impl Served {
    fn start() -> Self {
        Self::serve(Disk::new())
    }

    fn serve(disk: Disk) -> Self {
        let control = disk.file.with_extension("qmp");
        let control_argument = format!("--control={}", control.display());
        let arguments = [disk.argument("name=disk"), control_argument];
        let server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &arguments).unwrap();
        Self {
            disk,
            control,
            server,
        }
    }

    fn resize(&self, mib: u64) {
        let mut client = control::Client::connect(&self.control, HANG).unwrap();
        let arguments = json!({ "id": "disk", "size": mib * MIB });
        client.call("x-ringdisk-resize", arguments).unwrap();
    }

    fn connect(&self) -> (Device, BackendChannel) {
        let mut device = Device::connect(&self.disk.socket, &DeviceConfig::default()).unwrap();
        let channel = device.frontend.open_backend_channel().unwrap();
        (device, channel)
    }
}

/// Waits for the announcement.
fn told(channel: &mut BackendChannel) {
    assert_eq!(channel.next(HANG).unwrap().0, BACKEND_CONFIG_CHANGE);
}

/// Nothing was announced: all that was is there, once the device has answered something.
fn not_told(device: &mut Device, channel: &mut BackendChannel) {
    device.frontend.features().unwrap();
    let next = channel.next(Duration::from_millis(1));
    assert!(next.is_err(), "{next:?}");
}

fn size_mib(device: &mut Device) -> u64 {
    device.config().unwrap().capacity * 512 / MIB
}

/// A file that was cut is not made long again, as if it held what it did: the disk is not what it was, and who asks is told.
#[test]
fn truncated_file_is_reported_and_not_extended() {
    let served = Served::start();
    let (mut device, _) = served.connect();
    let file = std::fs::File::options().write(true).open(&served.disk.file);
    file.unwrap().set_len(10 * MIB).unwrap();
    let mut client = control::Client::connect(&served.control, HANG).unwrap();
    for arguments in [
        json!({ "id": "disk" }),
        json!({ "id": "disk", "size": 12 * MIB }),
        json!({ "id": "disk", "size": 16 * MIB }),
        json!({ "id": "disk", "size": 20 * MIB }),
    ] {
        let refused = client.call("x-ringdisk-resize", arguments).unwrap_err();
        let refused = refused.to_string();
        println!("{refused}");
        for word in ["disk disk", "only 10M", "the disk 16M"] {
            assert!(refused.contains(word), "{word}: {refused}");
        }
    }
    let length = std::fs::metadata(&served.disk.file).unwrap().len();
    assert_eq!(length, 10 * MIB);
    assert_eq!(size_mib(&mut device), 16);
}

/// It is announced again when the queues start, until the front-end has read it, and then no more.
#[test]
fn new_size_is_announced_until_it_is_read() {
    let served = Served::start();
    let (mut device, mut channel) = served.connect();
    assert_eq!(size_mib(&mut device), 16);
    for (round, mib) in [(0, 20), (1, 24)] {
        let bases = device.pause(false).unwrap();
        served.resize(mib);
        // Which QEMU drops.
        told(&mut channel);
        let bases = match round {
            0 => bases,
            // The next time, the guest is reset meanwhile, and its firmware does not stay for long.
            _ => {
                device.frontend.reset_device().unwrap();
                device.frontend.set_features(device.features).unwrap();
                device.start_queue(0, 0).unwrap();
                told(&mut channel);
                device.pause(false).unwrap()
            }
        };
        device.go_on(&bases).unwrap();
        told(&mut channel);
        assert_eq!(size_mib(&mut device), mib);
        for _ in 0..2 {
            let bases = device.pause(false).unwrap();
            device.go_on(&bases).unwrap();
            let memory = device.memory.clone();
            device
                .frontend
                .rem_mem_reg(&memory.regions()[Device::HIGH])
                .unwrap();
            device
                .frontend
                .add_mem_reg(&memory.regions()[Device::HIGH])
                .unwrap();
            not_told(&mut device, &mut channel);
        }
        let last = (mib * MIB - 4096) / 512;
        assert_eq!(device.queues[0].run(Op::Read, last, 4096), 0);
    }
}

/// A front-end reads the size before its queues start, and has nothing to be told then. One that connects to another process
/// may have read another size long ago.
#[test]
fn size_that_was_read_is_not_announced_again() {
    let mut served = Served::start();
    let (mut device, mut channel) = served.connect();
    assert_eq!(size_mib(&mut device), 16);
    restart(&mut device);
    not_told(&mut device, &mut channel);
    drop((device, channel));

    // The same front-end, once more: it does not read it again.
    let (mut device, mut channel) = served.connect();
    restart(&mut device);
    not_told(&mut device, &mut channel);
    drop((device, channel));
    served.resize(20);
    let (mut device, mut channel) = served.connect();
    restart(&mut device);
    told(&mut channel);
    // What lies behind it is not the size.
    device.frontend.config(8, 8).unwrap();
    restart(&mut device);
    told(&mut channel);
    assert_eq!(size_mib(&mut device), 20);
    drop((device, channel));

    assert!(served.server.terminate().unwrap().success());
    let served = Served::serve(served.disk);
    let (mut device, mut channel) = served.connect();
    restart(&mut device);
    told(&mut channel);
}

/// Has the queues start while the device may tell of something.
fn restart(device: &mut Device) {
    let bases = device.pause(false).unwrap();
    device.go_on(&bases).unwrap();
}
