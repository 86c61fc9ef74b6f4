use std::collections::BTreeSet;
use std::fs::{self, File};
use std::slice;

use image::Format;

use super::*;
use crate::config::disk_keys::{DISK_KEYS, changed, effect_of_reload};
use crate::config::file_keys::{EXPORT_KEYS, TOP_KEYS};
use crate::config::spec::FileSpec;
use crate::inherited::{InheritedDisk, NbdService};
use crate::state::Overrides;

fn disk(text: &str) -> DiskSpec {
    text.parse().unwrap()
}

fn config(disks: &[DiskSpec]) -> Config {
    Config {
        disks: disks.into(),
        ..Config::default()
    }
}

fn read(text: &str) -> Config {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.toml");
    fs::write(&path, text).unwrap();
    Config::read(&path).unwrap()
}

/// From a process that has this configured.
fn parts(configured: &[DiskSpec]) -> InheritedParts {
    let each = configured.iter().map(|spec| {
        let inherited = InheritedDisk {
            spec: spec.clone(),
            configured: Some(spec.clone()),
            file: None,
        };
        (spec.name.clone(), inherited)
    });
    InheritedParts {
        disks: each.collect(),
        overrides: Some(Overrides::default()),
        knows_default_queues: true,
        ..InheritedParts::default()
    }
}

fn carry(parts: InheritedParts, config: &Config) -> Config {
    Inherited::new(parts).carry(config)
}

/// Another value for each key of a disk.
const DISK_VALUES: &[(&str, &str)] = &[
    ("file", "/vms/b.raw"),
    ("format", "qcow2"),
    ("data-file", "/vms/d.raw"),
    ("socket", "/run/other.sock"),
    ("socket-mode", "0600"),
    ("socket-group", "7"),
    ("socket-owner", "7"),
    ("cache", "writeback"),
    ("aio", "threads"),
    ("queues", "3"),
    ("queue-size", "64"),
    ("readonly", "on"),
    ("serial", "other"),
    ("discard", "ignore"),
    ("detect-zeroes", "on"),
    ("rerror", "stop"),
    ("werror", "stop"),
    ("l2-cache-size", "4M"),
    ("logical-block-size", "4096"),
    ("physical-block-size", "512"),
    ("fixed-buffers", "on"),
    ("lock", "running"),
    ("iothreads", "0"),
    ("throttle-group", "g"),
    ("domain", "vm"),
    ("target", "vda"),
];

/// Keys of which a guest notices nothing, and the socket, at which it has to connect again.
const AT_ONCE: &[&str] = &["socket", "iothreads", "throttle-group", "domain", "target"];

/// A disk has another name, or is in a Ceph cluster, where no upgrade is possible.
const OTHER: &[&str] = &["name", "conf", "id", "keyring", "cluster", "connections"];

#[test]
fn every_key_of_a_disk_is_applied_or_stays_a_difference() {
    let all: BTreeSet<_> = DISK_KEYS.iter().map(|key| key.name()).collect();
    let tested = DISK_VALUES.iter().map(|(key, _)| *key);
    assert_eq!(
        tested.chain(OTHER.iter().copied()).collect::<BTreeSet<_>>(),
        all
    );
    let before = disk("/vms/a.raw,name=a,socket=/run/a.sock,queues=2");
    for (key, value) in DISK_VALUES {
        let key = DISK_KEYS.iter().find(|k| k.name() == *key).unwrap();
        let mut now = before.clone();
        key.set(&mut now, value).unwrap();
        now.name = "a".into();
        assert_eq!(changed(&before, &now), [key.name()]);
        let carried = carry(
            parts(slice::from_ref(&before)),
            &config(slice::from_ref(&now)),
        )
        .disks;
        if AT_ONCE.contains(&key.name()) {
            assert_eq!(carried, [now]);
        } else {
            assert_eq!(carried, slice::from_ref(&before), "{}", key.name());
            assert!(effect_of_reload(&carried[0], &now).is_some());
        }
    }
    let limited = disk("/vms/a.raw,name=a,socket=/run/a.sock,queues=2,iops=7");
    let carried = carry(parts(&[before]), &config(slice::from_ref(&limited)));
    assert_eq!(carried.disks, [limited]);
}

/// Another value for each key at the top, and whether it stays with the NBD server.
const TOP_VALUES: &[(&str, &str, bool)] = &[
    ("iothreads", "3", false),
    ("cpus", "'0'", false),
    ("poll-max-us", "7", false),
    ("poll-cpu", "7", false),
    ("control", "'/run/other.qmp'", false),
    ("metrics", "'127.0.0.1:7'", false),
    ("nbd", "'/run/other.nbd'", true),
    ("nbd-tls", "'/etc/other'", true),
    ("nbd-tls-verify-peer", "false", true),
    ("allow-backing", "'/other'", false),
    ("sandbox", "'off'", false),
    ("allow-dir", "'/other'", false),
    ("user", "'other'", false),
    ("fleece", "'/other'", false),
    ("state", "'/other'", false),
];

fn nbd_of(config: &Config) -> (Option<NbdService>, Option<NbdConfig>) {
    let listener = File::open("/dev/null").unwrap().into();
    let service = NbdService {
        address: config.nbd.clone().unwrap(),
        listener,
        tls: None,
        exports: config.exports.clone(),
    };
    (Some(service), Some(config.nbd_config()))
}

#[test]
fn every_key_at_the_top_is_applied_or_stays_a_difference() {
    let all: BTreeSet<_> = TOP_KEYS.iter().map(|top| top.key.name).collect();
    let tested = TOP_VALUES.iter().map(|(key, ..)| *key);
    assert_eq!(tested.collect::<BTreeSet<_>>(), all);
    let nbd = "nbd = '/run/nbd.sock'\n";
    let before = read(nbd);
    for (key, value, stays) in TOP_VALUES {
        let others = if *key == "nbd" { "" } else { nbd };
        let now = read(&format!("{others}{key} = {value}\n"));
        let top = TOP_KEYS.iter().find(|top| top.key.name == *key).unwrap();
        assert!((top.differs)(&before, &now), "{key}");
        let (nbd, nbd_config) = nbd_of(&before);
        let from = InheritedParts {
            nbd,
            nbd_config,
            ..parts(&[])
        };
        let carried = carry(from, &now);
        assert_eq!((top.differs)(&carried, &now), *stays, "{key}");
    }
}

#[test]
fn every_key_of_an_export_stays_a_difference() {
    let values = [
        ("disk", "'b'"),
        ("name", "'other'"),
        ("description", "'other'"),
        ("writable", "true"),
        ("bitmaps", "'other'"),
    ];
    let all: BTreeSet<_> = EXPORT_KEYS.iter().map(|key| key.key.name).collect();
    assert_eq!(
        values.iter().map(|(key, _)| *key).collect::<BTreeSet<_>>(),
        all
    );
    let file = |export: &str| {
        let disks = "[[disk]]\nfile = '/vms/a.raw'\n[[disk]]\nfile = '/vms/b.raw'\n";
        read(&format!(
            "nbd = '/run/nbd.sock'\n{disks}[[export]]\n{export}"
        ))
    };
    let before = file("disk = 'a'\n");
    for (key, value) in values.into_iter().chain([("iops", "7")]) {
        let disk = if key == "disk" { "" } else { "disk = 'a'\n" };
        let now = file(&format!("{disk}{key} = {value}\n"));
        assert_ne!(now.exports, before.exports, "{key}");
        for is_older in [false, true] {
            let (nbd, nbd_config) = nbd_of(&before);
            let from = InheritedParts {
                nbd,
                nbd_config: nbd_config.filter(|_| !is_older),
                ..parts(&before.disks)
            };
            let carried = carry(from, &now);
            // Of an older version, the same export is not known under another name.
            let known = !is_older || carried.exports.len() == 1;
            let expected = if known { &before.exports[..] } else { &[] };
            assert_eq!(carried.exports, expected, "{key}");
        }
    }
    // Without a server that is handed over, this process exports what is configured now.
    assert_eq!(carry(parts(&[]), &before), before);
}

/// A guest has its disk at the socket, whatever the name is.
#[test]
fn renamed_new_and_detached_disks() {
    let before = disk("/vms/a.raw,name=a,socket=/run/a.sock,queues=2");
    let renamed = disk("/vms/a.raw,name=x,socket=/run/a.sock,queues=3");
    let carried = carry(
        parts(slice::from_ref(&before)),
        &config(slice::from_ref(&renamed)),
    );
    let expected = DiskSpec {
        queues: Some(2),
        ..renamed.clone()
    };
    assert_eq!(carried.disks, [expected]);
    // The other one is still there.
    let both = config(&[
        disk("/vms/a.raw,name=a,socket=/run/b.sock"),
        renamed.clone(),
    ]);
    assert_eq!(
        carry(parts(slice::from_ref(&before)), &both).disks[1],
        renamed
    );

    let new = config(&[disk("/vms/new.raw")]);
    assert_eq!(carry(parts(slice::from_ref(&before)), &new), new);

    let mut from = parts(&[]);
    from.overrides
        .as_mut()
        .unwrap()
        .detached
        .push(before.clone());
    let now = DiskSpec {
        serial: "new".into(),
        ..before.clone()
    };
    assert_eq!(carry(from, &config(&[now])).disks, slice::from_ref(&before));

    // A process that took over from nobody.
    let all = config(&[before]);
    assert_eq!(Inherited::default().carry(&all), all);
}

/// Versions that gave every disk a number of queues have written their default.
#[test]
fn default_number_of_queues_of_an_older_version_is_no_difference() {
    let before = disk("/vms/a.raw,name=a,socket=/run/a.sock,queues=2");
    let now = DiskSpec {
        queues: None,
        ..before.clone()
    };
    let older = || {
        let mut parts = parts(slice::from_ref(&before));
        parts.knows_default_queues = false;
        parts
    };
    assert_eq!(
        carry(older(), &config(slice::from_ref(&now))).disks,
        slice::from_ref(&now)
    );
    assert_eq!(
        carry(parts(slice::from_ref(&before)), &config(&[now])).disks,
        slice::from_ref(&before)
    );
    let other = DiskSpec {
        queues: Some(3),
        ..before.clone()
    };
    assert_eq!(carry(older(), &config(&[other])).disks, [before]);
}

/// The older version has passed on a disk without `data-file`, and the data file that its image names.
#[test]
fn data_file_that_an_older_version_has_open_may_be_named_now() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let files = ["i.qcow2", "d1.raw"].map(|name| File::create(path(name)).unwrap().into());
    File::create(path("d2.raw")).unwrap();
    let disk = |file: &str, data_file: Option<&str>| DiskSpec {
        format: Some(Format::Qcow2),
        data_file: data_file.map(path),
        ..DiskSpec::new("i".into(), FileSpec::Path(path(file)))
    };
    let before = disk("i.qcow2", None);
    let inherited = Inherited::new(InheritedParts {
        files: files.into(),
        ..parts(slice::from_ref(&before))
    });
    for (file, data_file, same) in [
        ("i.qcow2", "d1.raw", true),
        ("i.qcow2", "d2.raw", false),
        ("i.qcow2", "d3.raw", false),
        ("other.qcow2", "d1.raw", false),
    ] {
        let named = disk(file, Some(data_file));
        let expected = if same { &named } else { &before }.clone();
        let carried = inherited.carry(&config(slice::from_ref(&named)));
        assert_eq!(carried.disks, slice::from_ref(&expected));
        assert_eq!(inherited.on_its_file(named), expected);
    }
}

/// The name of a served disk goes to another one, which is not served: no VM gets the disk of another.
#[test]
fn a_disk_whose_name_was_given_away_stays_at_its_socket() {
    let before = disk("/vms/a.raw,name=a,socket=/run/1.sock,queues=2");
    let now = disk("/vms/b.raw,name=a,socket=/run/2.sock,queues=2");
    let carried = carry(
        parts(slice::from_ref(&before)),
        &config(slice::from_ref(&now)),
    );
    assert_eq!(carried.disks, [before]);
}
