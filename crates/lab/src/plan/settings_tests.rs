use super::*;

#[test]
fn every_key_reads_back_what_was_set() {
    let values = [
        ("device", "vhost-user-blk"),
        ("server", "qemu-storage-daemon"),
        ("cache", "writeback"),
        ("aio", "io_uring"),
        ("iothread", "4"),
        ("queues", "4"),
        ("queue-size", "128"),
        ("format", "qcow2"),
        ("backing", "ram"),
        ("prefill", "off"),
        ("cluster-size", "128k"),
        ("extended-l2", "on"),
        ("backing-files", "2"),
        ("active", "1"),
        ("neighbour", "128"),
        ("server-cpus", "0,2"),
        ("load-cpus", "1"),
        ("machine", "pc"),
        ("hugepages", "on"),
        ("vcpus", "4"),
        ("memory", "1G"),
        ("scheduler", "none"),
        ("guests", "3"),
        ("volumes", "2"),
        ("qemu", "/opt/qemu"),
        ("preload", "/lib/tc.so"),
    ];
    let mut settings = Settings::default();
    for (key, value) in values {
        settings.set(key, value).unwrap();
        assert_eq!(settings.get(key), value, "{key}");
    }
    assert!(
        settings
            .set("cach", "none")
            .unwrap_err()
            .contains("'cache'")
    );
}

#[test]
fn what_means_nothing_is_no_difference() {
    let mut a = Settings {
        device: Device::Ide,
        machine: Machine::Pc,
        ..Settings::default()
    };
    let b = Settings {
        iothread: IoThread::One,
        queues: Some(4),
        ..a.clone()
    };
    assert!(a.differences(&b).is_empty());
    a.device = Device::VirtioBlk;
    assert_eq!(
        a.differences(&b),
        ["device", "iothread", "queues", "queue-size"]
    );
}

#[test]
fn what_cannot_be_configured_is_refused_with_the_way_out() {
    let native = Settings {
        aio: Some(Aio::Native),
        cache: Cache::Writeback,
        ..Settings::default()
    };
    assert!(native.check().unwrap_err().contains("cache=none"));
    let mapping = Settings {
        iothread: IoThread::Mapping(4),
        ..Settings::default()
    };
    assert!(mapping.check().unwrap_err().contains("queues=4"));
    let ide = Settings {
        device: Device::Ide,
        ..Settings::default()
    };
    assert!(ide.check().unwrap_err().contains("machine=pc"));
    assert_eq!(Settings::default().check(), Ok(()));
}
