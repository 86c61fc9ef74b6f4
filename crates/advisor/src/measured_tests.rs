use super::*;

const RESULT: &str = r#"{ "recipe": "aio", "axis": "iothread", "from": "off", "to": "on", "scope": "guest",
    "storage": "block", "allocation": "full", "accelerator": "kvm",
    "pattern": { "rw": "randread", "bs": "4k", "iodepth": "1" },
    "with": { "device": "virtio-blk", "cache": "none", "aio": "native" },
    "load": "randread 4k, depth 1", "metric": "iops",
    "gain-percent": 25.0, "interval-percent": [0.0, 100.0], "verdict": "gain" }"#;

const RULE: &str = r#"recipe = "aio"
    axis = "iothread"
    from = "off"
    to = "on|4"
    pattern = "rw=randread|read bs<=16k iodepth=1"
    with = { cache = "none" }"#;

fn measured(result: &str) -> Measured {
    let mut measured = Measured::default();
    let file =
        format!(r#"{{ "format": "{FORMAT}", "fingerprint": "here", "results": [ {result} ] }}"#);
    assert_eq!(measured.add("a", &file, "here"), Ok(Added::Results(1)));
    measured
}

fn rule(text: &str) -> Contrast {
    let contrast: Contrast = toml::from_str(text).unwrap();
    contrast.check().unwrap();
    contrast
}

fn disk(storage: &str) -> Subject {
    Subject {
        storage: vec![storage.into()],
        device: None,
        settings: BTreeMap::from([("iothread", "off".into()), ("device", "virtio-blk".into())]),
    }
}

fn joined(result: &str, rule_text: &str, subject: &Subject) -> usize {
    measured(result).join(&rule(rule_text), subject).len()
}

/// Each word that is changed alone makes the result belong to nothing.
#[test]
fn every_part_of_the_context_is_compared() {
    assert_eq!(joined(RESULT, RULE, &disk("block")), 1);
    assert_eq!(joined(RESULT, RULE, &disk("rbd")), 0);
    assert_eq!(
        joined(RESULT, RULE, &Subject::default()),
        0,
        "about no disk"
    );
    for (word, other) in [
        ("\"axis\": \"iothread\"", "\"axis\": \"queues\""),
        ("\"from\": \"off\"", "\"from\": \"2\""),
        ("\"to\": \"on\"", "\"to\": \"8\""),
        ("\"scope\": \"guest\"", "\"scope\": \"host\""),
        ("\"storage\": \"block\"", "\"storage\": \"file\""),
        ("\"full\"", "\"thin\""),
        ("\"full\"", "\"unknown\""),
        ("\"kvm\"", "\"tcg\""),
        ("\"kvm\"", "\"none\""),
        ("\"randread\"", "\"randwrite\""),
        ("\"bs\": \"4k\"", "\"bs\": \"64k\""),
        ("\"iodepth\": \"1\"", "\"iodepth\": \"2\""),
        (
            "\"iodepth\": \"1\"",
            "\"iodepth\": \"1\", \"once\": \"64k\"",
        ),
        ("\"cache\": \"none\"", "\"cache\": \"writeback\""),
        ("\"cache\": \"none\",", ""),
        ("\"aio\": \"native\"", "\"iops\": \"500\""),
    ] {
        let changed = RESULT.replacen(word, other, 1);
        assert_ne!(changed, RESULT, "{word}");
        assert_eq!(
            joined(&changed, RULE, &disk("block")),
            0,
            "{word} as {other}"
        );
    }
    // What a rule need not name.
    let free = RESULT
        .replace("native", "io_uring")
        .replace("\"recipe\": \"aio\"", "\"recipe\": \"mine\"");
    assert_eq!(joined(&free, RULE, &disk("block")), 1);
}

#[test]
fn a_result_is_of_the_value_that_the_disk_has() {
    let mut two = disk("block");
    two.settings.insert("iothread", "on".into());
    assert_eq!(joined(RESULT, RULE, &two), 0);
}

#[test]
fn the_opposite_change_has_the_inverse_gain() {
    let back = RULE
        .replace("from = \"off\"", "from = \"on\"")
        .replace("to = \"on|4\"", "to = \"off\"");
    let mut subject = disk("block");
    subject.settings.insert("iothread", "on".into());
    let gains = measured(RESULT).join(&rule(&back), &subject);
    let [gain] = &gains[..] else {
        panic!("{gains:?}");
    };
    assert!((gain.percent + 20.0).abs() < 1e-9, "{gain:?}");
    assert!(
        (gain.interval[0] + 50.0).abs() < 1e-9 && gain.interval[1].abs() < 1e-9,
        "{gain:?}"
    );
    assert_eq!(gain.verdict, "loss");
    let nothing = RESULT.replace("[0.0, 100.0]", "[-100.0, 100.0]");
    assert_eq!(joined(&nothing, &back, &subject), 0, "1/0");
}

#[test]
fn figures_of_emulated_guests_are_shown_only_if_wanted() {
    let mut measured = measured(&RESULT.replace("kvm", "tcg"));
    assert!(measured.join(&rule(RULE), &disk("block")).is_empty());
    measured.emulated = true;
    assert_eq!(measured.join(&rule(RULE), &disk("block")).len(), 1);
}

#[test]
fn a_setting_of_the_host_may_be_measured_without_a_guest() {
    let host = RESULT
        .replace("\"guest\"", "\"host\"")
        .replace("kvm", "none")
        .replace("iothread", "host-scheduler")
        .replace("\"off\"", "\"bfq\"")
        .replace("\"on\"", "\"none\"")
        .replace("\"allocation\"", "\"place\": \"/dev/sda\", \"allocation\"");
    let rule = "recipe = \"r\"\naxis = \"host-scheduler\"\nfrom = \"bfq\"\nto = \"none\"\nscope = \"host\"\npattern = \"any\"";
    let mut device = Subject {
        storage: vec!["block".into()],
        device: Some("sda".into()),
        settings: BTreeMap::from([("host-scheduler", "bfq".to_owned())]),
    };
    assert_eq!(joined(&host, rule, &device), 1);
    assert_eq!(joined(&host.replace("/sda", "/sdb"), rule, &device), 0);
    assert_eq!(
        joined(&host, &rule.replace("\"host\"", "\"guest\""), &device),
        0
    );
    let kvm_only = format!("{rule}\naccelerator = \"kvm\"");
    assert_eq!(joined(&host, &kvm_only, &device), 0);
    device.settings.insert("host-scheduler", "kyber".into());
    assert_eq!(joined(&host, rule, &device), 0);
}

#[test]
fn the_speed_of_a_guest_is_that_of_a_disk_like_this() {
    let result = RESULT
        .replace("iothread", "host")
        .replace("\"off\"", "\"guest\"")
        .replace("\"on\"", "\"host\"");
    let measured = measured(&result);
    let percent = |subject: &Subject| measured.of_host_percent(subject);
    assert_eq!(percent(&disk("block")), Some(80));
    assert_eq!(percent(&disk("file")), None);
    let mut other = disk("block");
    other.settings.insert("device", "ide".into());
    assert_eq!(percent(&other), None);
}

#[test]
fn files_without_context_are_told_apart() {
    let mut measured = Measured::default();
    let old = r#"{ "format": "ringdisk-measured-1", "fingerprint": "here", "results": [ { "axis": "cache" } ] }"#;
    assert_eq!(measured.add("a", old, "here"), Ok(Added::OldFormat));
    let other = old.replace("measured-1", "measured-9");
    assert!(
        measured
            .add("a", &other, "here")
            .unwrap_err()
            .contains(FORMAT)
    );
    let without = r#"{ "format": "ringdisk-measured-2", "fingerprint": "here", "results": [ { "recipe": "a" } ] }"#;
    assert!(
        measured
            .add("a", without, "here")
            .unwrap_err()
            .contains("missing field")
    );
}
