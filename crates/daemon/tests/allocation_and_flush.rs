//! How zeroes and discards change the space that a file takes, and when flushes reach the storage.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use testkit::driver::{Device, DeviceConfig, DiskConfig, Op, Queue};
use virtio_bindings::virtio_blk::*;

use crate::support::loop_device::LoopDevice;
use crate::support::{content, serve, serve_all};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const MIB: u64 = 1 << 20;

#[test]
fn write_zeroes_allocates_as_configured() {
    for (options, found, freed) in [
        ("detect-zeroes=off", false, false),
        ("detect-zeroes=on", true, false),
        ("detect-zeroes=on,discard=ignore", true, false),
        ("detect-zeroes=unmap", true, true),
        ("detect-zeroes=unmap,discard=ignore", true, false),
        ("detect-zeroes=unmap,cache=writeback", true, true),
    ] {
        let (mut server, disk) = serve(options);
        let mut device = Device::connect(&disk.socket, &DeviceConfig::default()).unwrap();
        let queue = &mut device.queues[0];
        let allocated = || fs::metadata(&disk.file).unwrap().blocks() * 512;
        // Delayed allocation has happened after this.
        File::open(&disk.file).unwrap().sync_all().unwrap();
        let before = allocated();

        // The last byte of each request differs, so the request is not all zeroes.
        let mut data = vec![0; 128 << 10];
        *data.last_mut().unwrap() = 1;
        write_mib(queue, 2 * MIB, &data);
        flush(queue);
        assert!(
            allocated() >= before,
            "{options}: what is not zero was given back"
        );
        assert_eq!(queue.read(2 * MIB / 512, data.len()).unwrap(), data);

        write_mib(queue, 4 * MIB, &vec![0; 128 << 10]);
        flush(queue);
        let lost = before.saturating_sub(allocated());
        if freed {
            assert_eq!(lost, MIB, "{options}")
        } else {
            assert_eq!(lost, 0, "{options}")
        }
        // Zeroed and unwritten space reads as a hole, even where it stays allocated.
        assert_eq!(hole(&disk.file, 4 * MIB) == 4 * MIB, found, "{options}");
        assert_eq!(queue.read(4 * MIB / 512, 4096).unwrap(), [0; 4096]);
        for at in [4 * MIB / 512 - 8, 5 * MIB / 512] {
            let beside = queue.read(at, 4096).unwrap();
            assert!(
                beside == content(at, 4096),
                "{options}: too much was zeroed"
            );
        }
        assert!(server.terminate().unwrap().success());
    }
}

/// Writing zeroes does not allocate space that was never written.
#[test]
fn sparse_disk_stays_sparse() {
    let (_server, disk) = serve("detect-zeroes=unmap");
    let sparse = disk.file.with_extension("sparse");
    File::create(&sparse).unwrap().set_len(16 * MIB).unwrap();
    let socket = disk.socket.with_extension("2");
    let argument = format!(
        "file={},format=raw,socket={},detect-zeroes=unmap",
        sparse.display(),
        socket.display()
    );
    let _sparse_server = serve_all(&[argument]);
    let mut device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
    write_mib(&mut device.queues[0], 0, &vec![0; 128 << 10]);
    flush(&mut device.queues[0]);
    assert_eq!(fs::metadata(&sparse).unwrap().blocks(), 0);
}

#[test]
fn discards_free_space_where_enabled() {
    for (options, freed) in [("discard=unmap", true), ("discard=ignore", false)] {
        let (_server, disk) = serve(options);
        let mut device = Device::connect(&disk.socket, &DeviceConfig::default()).unwrap();
        let queue = &mut device.queues[0];
        File::open(&disk.file).unwrap().sync_all().unwrap();
        let before = fs::metadata(&disk.file).unwrap().blocks();
        let status = queue.run(Op::Discard, 2048, MIB as u32);
        assert_eq!(status == OK, freed, "{options}");
        flush(queue);
        let lost = before.saturating_sub(fs::metadata(&disk.file).unwrap().blocks());
        assert_eq!(lost, if freed { MIB / 512 } else { 0 }, "{options}");
    }
}

/// The guest switches the write cache while its queues run. Flushes are counted on a file system made for this test,
/// which itself flushes now and then.
#[test]
fn write_cache_follows_the_guests_last_setting() {
    let Some(backing) = LoopDevice::new() else {
        return;
    };
    let Some(mount) = backing.mount() else {
        return;
    };
    let file = mount.join("disk.raw");
    fs::write(&file, content(0, 8 << 20)).unwrap();
    File::open(&file).unwrap().sync_all().unwrap();
    for (cache, at_first) in [
        ("none", true),
        ("writeback", true),
        ("directsync", false),
        ("writethrough", false),
    ] {
        let socket = backing.dir.path().join("disk.sock");
        let (file, at) = (file.display(), socket.display());
        let mut server = serve_all(&[format!("file={file},socket={at},cache={cache},queues=2")]);
        let config = DeviceConfig {
            queues: 2,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(&socket, &config).unwrap();
        for on in [at_first, !at_first, at_first, !at_first, true] {
            let byte = u8::from(on);
            device
                .frontend
                .set_config(DiskConfig::WCE_AT, &[byte])
                .unwrap();
            assert_eq!(device.config().unwrap().wce, byte);
            for queue in &mut device.queues {
                let flushes = backing.count(|| write_each(queue, false));
                if on {
                    assert!(flushes < WRITES / 2, "cache={cache}, on: {flushes} flushes")
                } else {
                    assert!(flushes >= WRITES, "cache={cache}, off: {flushes} flushes")
                }
            }
        }
        let flushes = backing.count(|| write_each(&mut device.queues[0], true));
        assert!(
            flushes >= WRITES,
            "cache={cache}: {flushes} flushes for {WRITES}"
        );
        assert!(server.terminate().unwrap().success());
    }
}

/// `cache=unsafe` never flushes: neither for the guest, nor with the write cache off, nor at shutdown.
#[test]
fn cache_unsafe_never_flushes() {
    let Some(backing) = LoopDevice::new() else {
        return;
    };
    let socket = backing.dir.path().join("disk.sock");
    let argument = format!(
        "file={},format=raw,socket={},cache=unsafe",
        backing.device.display(),
        socket.display()
    );
    let flushes = backing.count(|| {
        let mut server = serve_all(&[argument]);
        let mut device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
        write_each(&mut device.queues[0], true);
        device
            .frontend
            .set_config(DiskConfig::WCE_AT, &[0])
            .unwrap();
        write_each(&mut device.queues[0], true);
        drop(device);
        assert!(server.terminate().unwrap().success());
    });
    assert_eq!(flushes, 0);
}

const WRITES: u64 = 50;

/// Overwrites existing data, with a flush after each write if `flushed`.
fn write_each(queue: &mut Queue, flushed: bool) {
    for n in 0..WRITES {
        assert_eq!(queue.write(n * 8, &content(n + 7, 4096)), OK);
        if flushed {
            flush(queue);
        }
    }
}

/// Writes one MiB in pieces.
fn write_mib(queue: &mut Queue, at: u64, piece: &[u8]) {
    for n in 0..MIB / piece.len() as u64 {
        assert_eq!(
            queue.write(at / 512 + n * piece.len() as u64 / 512, piece),
            OK
        );
    }
}

fn flush(queue: &mut Queue) {
    assert_eq!(queue.run(Op::Flush, 0, 0), OK);
}

/// The offset of the next hole in a file.
fn hole(file: &Path, from: u64) -> u64 {
    let file = File::open(file).unwrap();
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(from)).unwrap()
}
