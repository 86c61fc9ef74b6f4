//! qcow2 images on block devices that are full: what a guest and a client see, and that they are used again once they have
//! been extended.

use super::*;
use crate::nbd::raw::Client;
use crate::support::loop_device::LoopDevice;

/// A qcow2 image on a device of this many bytes.
struct FullDevice {
    disk: LoopDevice,
    image: PathBuf,
}

impl FullDevice {
    fn new(disk_bytes: u64, bytes: u64) -> Option<Self> {
        let disk = LoopDevice::new()?;
        disk.resize(bytes);
        let image = disk.device.clone();
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2"]).arg(&image);
        let created = create.arg(disk_bytes.to_string()).status();
        assert!(created.unwrap().success());
        Some(Self { disk, image })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.disk.dir.path().join(name)
    }

    fn serve(&self, options: &str) -> Server {
        let args = [
            format!(
                "file={},name=disk,format=qcow2,socket={},queues=1,{options}",
                self.image.display(),
                self.path("disk.sock").display()
            ),
            format!("--control={}", self.path("control").display()),
            format!("--nbd={}", self.path("nbd").display()),
        ];
        Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &args).unwrap()
    }

    fn control(&self, args: &[&str]) {
        let mut ringdisk = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        ringdisk
            .args(args)
            .arg("--control")
            .arg(self.path("control"));
        let done = ringdisk.output().unwrap();
        assert!(done.status.success(), "{args:?}: {done:?}");
    }

    fn check(&self) {
        let mut check = Command::new("qemu-img");
        let checked = check.args(["check", "-q"]).arg(&self.image).output();
        let checked = checked.unwrap();
        assert!(checked.status.success(), "{checked:?}");
    }
}

/// A write that finds no space follows the policy, and continues after the device was extended: by itself, with a reload,
/// or with `resume`.
#[test]
fn writes_wait_for_a_larger_device() {
    for policy in ["enospc", "retry", "stop", "report"] {
        let Some(full) = FullDevice::new(DISK_BYTES, 1 << 20) else {
            return;
        };
        let mut server = full.serve(&format!("werror={policy}"));
        let mut device = connect(&full.path("disk.sock"));
        submit(&mut device, Op::Write);
        if policy == "report" {
            let ends = finish(&mut device);
            let failed = ends.iter().filter(|&&end| end == IO_ERROR).count();
            assert!(failed > 0 && failed < ends.len(), "{ends:?}");
            full.disk.resize(32 << 20);
            submit(&mut device, Op::Write);
        } else {
            let state = if policy == "stop" { "stopped" } else { "fails" };
            wait_until("writes wait", || {
                stats(&full.path("control"))["storage"] == state
            });
            full.disk.resize(32 << 20);
            if policy == "stop" {
                full.control(&["resume", "disk"]);
            }
        }
        assert_eq!(
            finish(&mut device),
            vec![OK; usize::from(DEPTH)],
            "{policy}"
        );
        // The disk can grow as well, and the image is closed in order.
        full.control(&["resize", "disk", "20M"]);
        assert_eq!(device.queues[0].write(20 << 10, &[7; 4096]), OK);
        for sector in (0..u64::from(DEPTH)).map(|slot| slot * 1024) {
            let read = device.queues[0].read(sector, LEN as usize).unwrap();
            assert_eq!(read, content(sector, LEN as usize), "{policy}");
        }
        drop(device);
        assert!(server.terminate().unwrap().success(), "{policy}");
        full.check();
    }
}

/// A client is told that there is no space, not that the storage is broken.
#[test]
fn clients_are_told_of_a_full_device() {
    let Some(full) = FullDevice::new(DISK_BYTES, 1 << 20) else {
        return;
    };
    let _server = full.serve("werror=enospc");
    full.control(&["export", "disk", "--writable"]);
    let mut client = Client::connect(&full.path("nbd"), "disk");
    let ends: Vec<u32> = (0..32)
        .map(|at| client.write(at, at << 16, &[1; 1 << 16]))
        .collect();
    let written = ends.iter().take_while(|&&end| end == 0).count();
    assert!(written > 4 && written < ends.len(), "{ends:?}");
    assert!(ends[written..].iter().all(|&end| end == 28), "{ends:?}");
    full.disk.resize(32 << 20);
    assert_eq!(client.write(99, 1 << 20, &[1; 1 << 16]), 0);
}

/// The device has the size that `qemu-img measure` tells. Several requests in flight write, discard and zero it without a
/// flush, and each finds space: what others have freed is reclaimed, and awaited.
#[test]
fn requests_in_flight_share_the_last_clusters() {
    let disk_bytes = 4 << 20;
    let bytes = testkit::qemu_img::fully_allocated_size("cluster_size=64k", disk_bytes);
    let Some(full) = FullDevice::new(disk_bytes, bytes) else {
        return;
    };
    let mut server = full.serve("werror=report");
    let mut device = connect(&full.path("disk.sock"));
    let mut random = Random(seed());
    let clusters = disk_bytes >> 16;
    for _ in 0..200 {
        let queue = &mut device.queues[0];
        let slots: Vec<u16> = (0..DEPTH).collect();
        for &slot in &slots {
            let sector = random.below(clusters) * 128;
            let op = match random.below(4) {
                0 => Op::Discard,
                1 => Op::WriteZeroes { unmap: true },
                _ => Op::Write,
            };
            let len = if op == Op::Write { LEN } else { 1 << 16 };
            queue.prepare(slot, op, sector, len);
            if op == Op::Write {
                queue.write_buffer(slot, &content(sector, len as usize));
            }
        }
        queue.submit(&slots);
        assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    }
    drop(device);
    assert!(server.terminate().unwrap().success());
    full.check();
}
