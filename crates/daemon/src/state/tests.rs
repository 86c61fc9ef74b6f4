//! What a state file says, and how it applies to a configuration.

use super::*;
use proptest::prelude::*;

fn disk(text: &str) -> DiskSpec {
    text.parse().unwrap()
}

fn overrides() -> Overrides {
    let mut limits = ThrottleLimits::NONE;
    limits.iops_total.average = 100;
    Overrides {
        disks: vec![
            DiskOverride {
                disk: disk("/vms/b,,2.raw,name=b,iops=7,cache=writeback"),
                configured: Some(disk("/vms/b.raw")),
            },
            DiskOverride {
                disk: disk("/vms/new.qcow2,queues=3,iothreads=0,2,l2-cache-size=4M"),
                configured: None,
            },
        ],
        detached: vec![disk("/vms/gone.raw")],
        nodes: vec![NodeOverride {
            disk: disk("/vms/x.raw,name=top"),
            child: Some("below".into()),
        }],
        exports: vec![ExportOverride {
            node: "top".into(),
            spec: ExportSpec {
                logical_block: Some(4096),
                ..ExportSpec::from(&disk(
                    "null:512,name=e,socket=/run/e.sock,socket-mode=0660,queues=2,queue-size=128,\
                     iothreads=t,readonly=on,cache=directsync",
                ))
            },
        }],
        groups: vec![("g".into(), limits)],
        threads: vec![("t".into(), ThreadSpec::default())],
        remembered: [
            ("b", Some(4), Some(false)),
            ("e", None, Some(true)),
            ("new", Some(16), None),
        ]
        .map(|(id, queues, write_cache)| {
            let remembered = Remembered {
                queues,
                write_cache,
                socket: (id != "e").then(|| format!("/run/{id}.sock").into()),
                file: None,
            };
            (id.to_owned(), remembered)
        })
        .into(),
        left: LeftFiles::default(),
    }
}

#[test]
fn state_file_reads_back_as_written() {
    let text = overrides().text();
    let mut read = Overrides::parse(text.as_bytes()).unwrap();
    read.add_queues(overrides().queues()).unwrap();
    read.add_sockets(overrides().sockets());
    assert_eq!(read, overrides(), "{text}");
}

/// The previous version accepts no other keys.
#[test]
fn state_file_has_only_keys_that_the_previous_version_knows() {
    let text = overrides().text();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let keys: Vec<_> = value.as_object().unwrap().keys().collect();
    let known = [
        "disks",
        "exports",
        "gone",
        "iothreads",
        "nodes",
        "throttle-groups",
        "version",
        "write-caches",
    ];
    assert_eq!(keys, known);
}

/// Files of versions that wrote every number of queues: a detached disk whose configuration has none stays detached, and
/// disks keep their numbers, whatever the default is now.
#[test]
fn numbers_of_queues_of_older_versions_are_defaults() {
    let old = overrides()
        .text()
        .replace("\"/vms/gone.raw\"", "\"file=/vms/gone.raw,name=gone\"");
    let mut old: serde_json::Value = serde_json::from_str(&old).unwrap();
    old["gone"][0] = "file=/vms/gone.raw,name=gone,queues=3".into();
    old["disks"][0]["disk"] = "file=/vms/b.raw,name=b,queues=5,iops=7".into();
    old["disks"][0]["instead-of"] = "file=/vms/b.raw,name=b,queues=5".into();
    let old = Overrides::parse(old.to_string().as_bytes()).unwrap();

    let configured = ["/vms/b.raw", "/vms/gone.raw"].map(disk);
    let told_apart = old.clone().with_default_queues(&configured);
    let start = told_apart.apply(&configured);
    assert_eq!(start.disks, [disk("/vms/b.raw,iops=7")]);
    assert!(start.outdated.is_empty(), "{start:?}");
    let queues = |id: &str| told_apart.remembered.get(id).and_then(|it| it.queues);
    assert_eq!((queues("b"), queues("gone")), (Some(5), Some(3)));
    assert_eq!(told_apart.remembered["b"].write_cache, Some(false));

    // Where the operator has written a number, it counts.
    let configured = ["/vms/b.raw,queues=5", "/vms/gone.raw,queues=2"].map(disk);
    let told_apart = old.with_default_queues(&configured);
    let start = told_apart.apply(&configured);
    assert_eq!(start.disks[0].queues, Some(5));
    assert_eq!(start.disks[1].name, "gone");
}

#[test]
fn later_configuration_overrides_the_state() {
    let overrides = overrides();
    let configured = ["/vms/a.raw", "/vms/b.raw", "/vms/gone.raw"].map(disk);
    let start = overrides.apply(&configured);
    let names = |disks: &[DiskSpec]| disks.iter().map(|d| d.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&start.disks), ["a", "b"]);
    assert_eq!(start.disks[1], overrides.disks[0].disk);
    assert_eq!(names(&start.attached), ["new"]);
    assert!(start.outdated.is_empty());

    // Another configured key changes neither the file nor the limits.
    let later = ["/vms/b.raw,queues=9", "/vms/b.raw,format=raw,iops=8"].map(disk);
    let start = later
        .each_ref()
        .map(|b| overrides.apply(std::slice::from_ref(b)));
    assert_eq!(
        start[0].disks,
        [disk("/vms/b,,2.raw,name=b,queues=9,iops=7")]
    );
    assert_eq!(start[1].disks, later[1..]);
    assert_eq!(start[0].outdated, ["b"]);

    let later = ["/x/b.raw,queues=9", "/vms/gone.raw,queues=9", "/x/new.raw"].map(disk);
    let start = overrides.apply(&later);
    let limited = disk("/x/b.raw,queues=9,iops=7");
    assert_eq!(start.disks[0], limited);
    assert_eq!(start.disks[1..], later[1..]);
    assert!(start.attached.is_empty());
    assert_eq!(start.outdated, ["b", "new"]);
}

#[test]
fn invalid_state_is_refused() {
    let text = overrides().text();
    for (from, to, says) in [
        ("\"version\": 1", "\"version\": 2", "version 2"),
        ("\"gone\"", "\"going\"", "unknown field"),
        ("queues=3", "queues=0", "1 to 256"),
        ("\"iops\"", "\"iopz\"", "no limit 'iopz'"),
        ("\"top\"", "\"../top\"", "not a letter"),
        (",socket=/run/e.sock", "", "no socket"),
        ("4096", "4095", "logical-block-size"),
        (
            "\"poll-max-us\": 100",
            "\"poll-max-us\": 99999999",
            "poll-max-us",
        ),
        (
            "\"poll-max-us\": 100",
            "\"poll-max-us\": 100, \"poll-cpu\": 0",
            "poll-cpu",
        ),
    ] {
        assert!(text.contains(from), "{from}: {text}");
        let error = Overrides::parse(text.replace(from, to).as_bytes()).unwrap_err();
        assert!(error.contains(says), "{to}: {error}");
    }
    for len in 0..text.trim_end().len() {
        assert!(Overrides::parse(&text.as_bytes()[..len]).is_err(), "{len}");
    }
}

/// The seeds of fuzzing, which include its findings.
#[test]
fn fuzzing_seeds_are_valid() {
    let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/state");
    let mut valid = 0;
    for file in std::fs::read_dir(seeds).unwrap() {
        let path = file.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        Overrides::check(&bytes);
        match Overrides::parse(&bytes) {
            Ok(_) => valid += 1,
            Err(e) => println!("{}: {e}", path.display()),
        }
    }
    assert!(valid >= 3);
}

proptest! {
    #[test]
    fn no_bytes_panic(at in 0_usize..2000, to in any::<u8>(), cut in 0_usize..2000) {
        let mut bytes = overrides().text().into_bytes();
        let len = bytes.len();
        bytes[at % len] = to;
        bytes.remove(cut % len);
        Overrides::check(&bytes);
    }
}

/// What is of a configured disk, or of its file, does not keep it from being served.
#[test]
fn only_what_has_another_file_is_in_the_way() {
    let null = |text: &str| ExportSpec::from(&disk(&format!("null:512,{text}")));
    let of = |node: &str, socket: &str| ExportOverride {
        node: node.into(),
        spec: null(&format!("name=e,socket={socket}")),
    };
    let state = |attached: &[&str], exports: Vec<ExportOverride>| Overrides {
        disks: attached
            .iter()
            .map(|text| DiskOverride {
                disk: disk(text),
                configured: None,
            })
            .collect(),
        nodes: vec![NodeOverride {
            disk: disk("/vms/a.raw,name=n"),
            child: None,
        }],
        exports,
        ..Overrides::default()
    };
    let a = disk("/vms/a.raw,socket=/run/1");
    for (attached, exports, other) in [
        (&["/vms/b.raw,name=a,socket=/run/2"][..], vec![], Some("a")),
        (&["/vms/b.raw,socket=/run/1"], vec![], Some("b")),
        (&["/vms/a.raw,socket=/run/2"], vec![], None),
        (&["/vms/a.raw,name=b,socket=/run/1"], vec![], None),
        (&["/vms/b.raw,socket=/run/2"], vec![], None),
        (&[], vec![of("x", "/run/1")], Some("e")),
        (&[], vec![of("a", "/run/1")], None),
        (&[], vec![of("n", "/run/1")], None),
    ] {
        let state = state(attached, exports);
        assert_eq!(state.conflict_with(&a), other, "{state:?}");
    }
}
