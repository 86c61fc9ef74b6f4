//! A disk grows while nobody listens: QEMU reads the size once, and drops notifications while the VM is paused or its
//! driver is not loaded.

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

/// Waits for the notification.
fn expect_notification(channel: &mut BackendChannel) {
    assert_eq!(channel.next(HANG).unwrap().0, BACKEND_CONFIG_CHANGE);
}

/// Asserts that there was no notification: all earlier ones have arrived once the device has answered a message.
fn expect_no_notification(device: &mut Device, channel: &mut BackendChannel) {
    device.frontend.features().unwrap();
    let next = channel.next(Duration::from_millis(1));
    assert!(next.is_err(), "{next:?}");
}

fn size_mib(device: &mut Device) -> u64 {
    device.config().unwrap().capacity * 512 / MIB
}

/// A truncated file is not extended again as if it still had its content: the disk is damaged, and the command says so.
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

/// The notification is repeated when the queues start, until the front-end has read the size.
#[test]
fn new_size_is_announced_until_it_is_read() {
    let served = Served::start();
    let (mut device, mut channel) = served.connect();
    assert_eq!(size_mib(&mut device), 16);
    for (round, mib) in [(0, 20), (1, 24)] {
        let bases = device.pause(false).unwrap();
        served.resize(mib);
        // QEMU drops this one.
        expect_notification(&mut channel);
        let bases = match round {
            0 => bases,
            // In the second round the guest is reset meanwhile, and its firmware uses the disk only briefly.
            _ => {
                device.frontend.reset_device().unwrap();
                device.frontend.set_features(device.features).unwrap();
                device.start_queue(0, 0).unwrap();
                expect_notification(&mut channel);
                device.pause(false).unwrap()
            }
        };
        device.go_on(&bases).unwrap();
        expect_notification(&mut channel);
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
            expect_no_notification(&mut device, &mut channel);
        }
        let last = (mib * MIB - 4096) / 512;
        assert_eq!(device.queues[0].run(Op::Read, last, 4096), 0);
    }
}

/// A front-end reads the size before its queues start, so it needs no notification then. A front-end that reconnects
/// may have read an older size from another process.
#[test]
fn size_that_was_read_is_not_announced_again() {
    let mut served = Served::start();
    let (mut device, mut channel) = served.connect();
    assert_eq!(size_mib(&mut device), 16);
    restart(&mut device);
    expect_no_notification(&mut device, &mut channel);
    drop((device, channel));

    // The same front-end again: it does not read the size.
    let (mut device, mut channel) = served.connect();
    restart(&mut device);
    expect_no_notification(&mut device, &mut channel);
    drop((device, channel));
    served.resize(20);
    let (mut device, mut channel) = served.connect();
    restart(&mut device);
    expect_notification(&mut channel);
    // The fields after the size do not count.
    device.frontend.config(8, 8).unwrap();
    restart(&mut device);
    expect_notification(&mut channel);
    assert_eq!(size_mib(&mut device), 20);
    drop((device, channel));

    assert!(served.server.terminate().unwrap().success());
    let served = Served::serve(served.disk);
    let (mut device, mut channel) = served.connect();
    restart(&mut device);
    expect_notification(&mut channel);
}

/// Restarts the queues, which is when the device may send a notification.
fn restart(device: &mut Device) {
    let bases = device.pause(false).unwrap();
    device.go_on(&bases).unwrap();
}
