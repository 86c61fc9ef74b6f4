//! A guest's flushes, counted at the underlying device.

use super::*;

#[test]
fn guest_flushes_reach_the_block_device() {
    let Some(backing) = LoopDevice::new() else {
        return;
    };
    for cache in ["none", "writeback"] {
        let socket = backing.dir.path().join("disk.sock");
        let arg = format!(
            "file={},socket={}",
            backing.device.display(),
            socket.display()
        );
        let mut server = serve_all(&[format!("{arg},format=raw,cache={cache}")]);
        let mut device = connect(&server, DeviceConfig::default());
        assert_eq!(
            device.config().unwrap().wce,
            1,
            "completed writes are in a cache, and the guest must know"
        );
        let flushes = backing.count(|| flush_after_each_write(&mut device.queues[0]));
        assert!(
            flushes >= 50,
            "block device, cache={cache}: 50 guest flushes, {flushes} on the device beneath"
        );

        // After the guest has switched the cache off, each write is durable on completion.
        device
            .frontend
            .set_config(DiskConfig::WCE_AT, &[0])
            .unwrap();
        assert_eq!(device.config().unwrap().wce, 0);
        let flushes = backing.count(|| write_only(&mut device.queues[0]));
        assert!(
            flushes >= 50,
            "block device, cache={cache}, wce=0: 50 writes, {flushes} flushes beneath"
        );
        device
            .frontend
            .set_config(DiskConfig::WCE_AT, &[1])
            .unwrap();
        assert_eq!(device.config().unwrap().wce, 1);
        drop(device);

        // A guest that accepts neither FLUSH nor CONFIG_WCE relies on that (virtio 1.3 §5.2.5.2).
        let features = !(1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_CONFIG_WCE);
        let mut device = connect(
            &server,
            DeviceConfig {
                features,
                ..DeviceConfig::default()
            },
        );
        let flushes = backing.count(|| write_only(&mut device.queues[0]));
        assert!(
            flushes >= 50,
            "block device, cache={cache}, FLUSH not negotiated: 50 writes, {flushes} flushes"
        );
        assert!(server.terminate().unwrap().success());
    }
}

#[test]
fn guest_flushes_reach_the_device_under_the_file_system() {
    let Some(backing) = LoopDevice::new() else {
        return;
    };
    let Some(mount) = backing.mount() else { return };
    let file = mount.join("disk.raw");
    std::fs::write(&file, content(0, 8 << 20)).unwrap();
    for cache in ["none", "writeback"] {
        let socket = backing.dir.path().join("disk.sock");
        let mut server = serve_all(&[format!(
            "file={},socket={},cache={cache}",
            file.display(),
            socket.display()
        )]);
        let mut device = connect(&server, DeviceConfig::default());
        let flushes = backing.count(|| flush_after_each_write(&mut device.queues[0]));
        assert!(
            flushes >= 50,
            "file, cache={cache}: 50 guest flushes, {flushes} on the device beneath"
        );
        assert!(server.terminate().unwrap().success());
    }
}

fn flush_after_each_write(queue: &mut Queue) {
    for round in 0..50 {
        assert_eq!(queue.write(round * 8, &content(round + 7, 4096)), OK);
        assert_eq!(queue.run(Op::Flush, 0, 0), OK);
    }
}

fn write_only(queue: &mut Queue) {
    for round in 0..50 {
        assert_eq!(queue.write(round * 8, &content(round + 9, 4096)), OK);
    }
}
