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
        ("backing", "/mnt/test/"),
        ("prefill", "off"),
        ("cluster-size", "128k"),
        ("extended-l2", "on"),
        ("backing-files", "2"),
        ("active", "1"),
        ("neighbour", "128"),
        ("vcpu-cpus", "1,3"),
        ("server-cpus", "0,2"),
        ("load-cpus", "1"),
        ("machine", "pc"),
        ("hugepages", "on"),
        ("cpu", "max,x2apic=off"),
        ("vcpus", "4"),
        ("memory", "1G"),
        ("scheduler", "none"),
        ("file-system", "xfs"),
        ("host-scheduler", "mq-deadline"),
        ("host-read-ahead", "0"),
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
    let polling = Settings {
        iothread: IoThread::One,
        ..Settings::default()
    };
    assert_eq!(Settings::default().differences(&polling), ["iothread"]);
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
    for (key, value, word) in [
        ("poll-max-us", "0", "iothread=on"),
        ("server-cpus", "0", "iothread=on"),
        ("iops", "10", "qemu-storage-daemon"),
        ("fixed-buffers", "on", "ringdisk"),
    ] {
        let mut settings = Settings::default();
        settings.set(key, value).unwrap();
        let problem = settings.check().unwrap_err();
        assert!(problem.contains(word), "{key}: {problem}");
    }
    let mut ram = Settings {
        backing: Backing::Ram,
        ..Settings::default()
    };
    ram.set("host-read-ahead", "128k").unwrap();
    assert!(ram.check().unwrap_err().contains("block device"));
    assert_eq!(Settings::default().check(), Ok(()));
}
