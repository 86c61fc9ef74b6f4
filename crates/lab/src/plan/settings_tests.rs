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
    assert_eq!(a.differences(&b), ["device", "iothread", "queues"]);
}

/// One of two servers, devices or kinds of storage has settings that the other lacks.
#[test]
fn a_key_that_implies_others_is_one_difference() {
    let vhost = Settings {
        device: Device::VhostUserBlk,
        ..Settings::default()
    };
    for (key, value) in [
        ("server", "qemu-storage-daemon"),
        ("server", "/run/x.sock"),
        ("device", "virtio-blk"),
        ("device", "host"),
        ("backing", "null"),
        ("backing", "rbd:pool/image"),
        ("client", "ring"),
        ("format", "qcow2"),
    ] {
        let mut other = vhost.clone();
        other.set(key, value).unwrap();
        assert_eq!(vhost.differences(&other), [key], "{value}");
    }
}

proptest::proptest! {
    /// Otherwise two configurations would count as the same, and one would be left out.
    #[test]
    fn what_differs_at_all_has_a_difference(one in any_settings(), other in any_settings()) {
        let same = KEYS.into_iter().all(|key| one.get(key) == other.get(key));
        assert_eq!(one.differences(&other).is_empty(), same, "{one:?} {other:?}");
    }
}

fn any_settings() -> impl proptest::strategy::Strategy<Value = Settings> {
    use proptest::sample::select;
    use proptest::strategy::Strategy;
    let words = (
        select(&["virtio-blk", "virtio-scsi", "ide", "host", "vhost-user-blk"][..]),
        select(&["ringdisk", "qemu-storage-daemon", "/x.sock"][..]),
        select(&["file", "ram", "zram", "null", "/d/", "/dev/sdb", "rbd:p/i"][..]),
        select(&["off", "on"][..]),
        select(&["raw", "qcow2"][..]),
        select(&["blkio", "ring"][..]),
        select(&["off", "on", "2"][..]),
    );
    words.prop_map(
        |(device, server, backing, krbd, format, client, iothread)| {
            let mut settings = Settings::default();
            for (key, value) in [
                ("device", device),
                ("server", server),
                ("backing", backing),
                ("krbd", krbd),
                ("format", format),
                ("client", client),
                ("iothread", iothread),
            ] {
                settings.set(key, value).unwrap();
            }
            settings
        },
    )
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
