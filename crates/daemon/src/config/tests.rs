use super::*;

fn parse(text: &str) -> Config {
    match Config::parse(text) {
        Ok(config) => config,
        Err(mistake) => panic!("{}", mistake.problem),
    }
}

#[test]
fn complete_file_is_parsed() {
    let config = parse(
        r#"
        iothreads = 4
        cpus = "0-3"
        poll-max-us = 50
        control = "/run/ringdisk/control.qmp"
        metrics = "127.0.0.1:9747"

        [[iothread]]
        id = "fast"
        cpus = "2"

        [[throttle-group]]
        name = "bronze"
        iops = 10_000
        bps-max = "100M"
        bps = "50M"

        [[disk]]
        file = "/dev/vg0/vm1"
        queues = 4
        readonly = true
        iothreads = [0, 2, "fast"]
        throttle-group = "bronze"

        [[disk]]
        name = "other"
        file = "/vms/a,b.raw"
        queues = 3
        iothread-vq-mapping = [
            { iothread = "fast", vqs = [2, 0] },
            { iothread = "0", vqs = [1] },
        ]
        "#,
    );
    assert_eq!(config.iothreads, Some(4));
    assert_eq!(config.threads[0].0, "fast");
    assert_eq!(config.threads[0].1.polling.max, Duration::from_micros(50));
    assert_eq!(config.groups[0].1.iops_total.average, 10_000);
    assert_eq!(config.groups[0].1.bps_total.max, 100 << 20);
    let [first, second] = &config.disks[..] else {
        panic!("{config:?}")
    };
    assert_eq!((first.name.as_str(), first.read_only), ("vm1", true));
    assert_eq!(first.iothreads, ["0", "2", "fast"]);
    assert_eq!(second.file, spec::FileSpec::Path("/vms/a,b.raw".into()));
    assert_eq!(second.iothreads, ["fast", "0", "fast"]);
    assert_eq!(parse(""), Config::default());
}

/// The file that the package installs configures no disk, allows them anywhere, and its commented examples are valid.
#[test]
fn installed_file_configures_no_disk_until_uncommented() {
    let example = include_str!("../../../../packaging/ringdisk.toml");
    let anywhere = Config {
        allow: vec!["/".into()],
        ..Config::default()
    };
    assert_eq!(parse(example), anywhere);
    let uncommented: String = example
        .lines()
        .filter_map(|line| match line.strip_prefix('#') {
            Some(prose) if prose.is_empty() || prose.starts_with(' ') => None,
            line => Some(format!("{}\n", line.unwrap_or_default())),
        })
        .collect();
    let config = parse(&uncommented);
    assert_eq!((config.disks.len(), config.groups.len()), (2, 1));
    assert_eq!((config.threads.len(), config.iothreads), (1, Some(2)));
    assert_eq!((config.exports.len(), config.nbd.is_some()), (1, true));
}

#[test]
fn documented_polling_defaults_are_true() {
    let default = |name: &str| {
        let key = TOP_KEYS.iter().find(|top| top.key.name == name);
        key.unwrap().key.default.unwrap().parse::<u64>().unwrap()
    };
    let polling = Config::default().polling();
    assert_eq!(polling.max, Duration::from_micros(default("poll-max-us")));
    assert_eq!(u64::from(polling.cpu), default("poll-cpu"));
}

#[test]
fn error_names_line_and_key() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ringdisk.toml");
    for (text, line, says) in [
        ("iothreads = 1\n\nthreads = 2\n", 3, "no key 'threads'"),
        ("iothreads = 0", 1, "1 to 256"),
        ("iothreads =", 1, ""),
        ("poll-max-us = 1.5", 1, "whole number"),
        ("cpus = \"a\"", 1, "0,2,4-7"),
        ("metrics = \"here\"", 1, "metrics"),
        ("[disk]\nfile = \"a.raw\"", 1, "[[disk]]"),
        ("[[disk]]\nname = \"a\"", 1, "no file"),
        ("[[disk]]\nfile = \"a.raw\"\ncach = \"none\"", 3, "'cach'"),
        (
            "[[disk]]\nfile = \"a.raw\"\nqueues = \"two\"",
            3,
            "1 to 256",
        ),
        (
            "[[disk]]\nfile = \"a.raw\"\nqueues = [[1]]",
            3,
            "within a list",
        ),
        (
            "[[disk]]\nfile = \"a.raw\"\niops-max = 5",
            1,
            "needs a limit",
        ),
        (
            "[[disk]]\nfile = \"a.raw\"\niops-rd = \"x\"",
            3,
            "operations",
        ),
        (
            "[[disk]]\nfile = \"a.raw\"\nthrottle-group = \"b\"",
            3,
            "no [[throttle-group]]",
        ),
        (
            "[[disk]]\nfile = \"a.raw\"\n[[disk]]\nfile = \"b/a.raw\"",
            3,
            "already",
        ),
        (
            "[[disk]]\nfile = \"a.raw\"\niothreads = [\"0\", \"fast\"]",
            3,
            "no [[iothread]] with id = \"fast\"",
        ),
        (
            "[[disk]]\nfile = \"a.raw\"\niothread-vq-mapping = [{ iothread = \"fast\" }]",
            3,
            "no [[iothread]] with id = \"fast\"",
        ),
        ("[[iothread]]\ncpus = \"1\"", 1, "needs an id"),
        ("[[iothread]]\nid = \"iothread1\"", 2, "of the pool"),
        (
            "[[iothread]]\nid = \"a\"\n[[iothread]]\nid = \"a\"",
            3,
            "two [[iothread]]",
        ),
        ("[[throttle-group]]\niops = 1", 1, "needs a name"),
        (
            "[[throttle-group]]\nname = \"a\"\nburst = 1",
            3,
            "iops_size",
        ),
        (
            "[[disk]]\nfile = \"a.raw\"\nqueues = 2\n[[disk.iothread-vq-mapping]]\niothread = \"0\"\nvqs = [0]",
            4,
            "queue 1 has no thread",
        ),
    ] {
        fs::write(&path, text).unwrap();
        let error = Config::read(&path).unwrap_err().to_string();
        let at = format!("ringdisk.toml, line {line}: ");
        assert!(
            error.contains(&at) && error.contains(says),
            "{text}: {error}"
        );
    }
}

#[test]
fn the_files_beside_it_are_read_too() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ringdisk.toml");
    let beside = directory.path().join("disks.d");
    fs::create_dir(&beside).unwrap();
    let write = |name: &str, text: &str| fs::write(beside.join(name), text).unwrap();
    fs::write(
        &path,
        "nbd = \"/run/n\"\n[[disk]]\nfile = \"a.raw\"\n[[throttle-group]]\nname = \"slow\"\niops = 100\n",
    )
    .unwrap();
    write(
        "20-vm2.toml",
        "[[disk]]\nfile = \"c.raw\"\nthrottle-group = \"slow\"\n[[export]]\ndisk = \"b\"\n",
    );
    write("10-vm1.toml", "[[disk]]\nfile = \"b.raw\"\n");
    for unread in ["10-vm1.toml~", ".10-vm1.toml", "README", "a.toml.dpkg-new"] {
        write(unread, "not TOML");
    }
    let config = Config::read(&path).unwrap();
    let names: Vec<_> = config.disks.iter().map(|disk| disk.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert_eq!(config.exports.len(), 1);

    let error = || Config::read(&path).unwrap_err().to_string();
    write("30.toml", "\n[[disk]]\nfile = \"d.raw\"\nname = \"a\"\n");
    assert!(error().contains("disks.d/30.toml, line 2: "), "{}", error());
    write("30.toml", "user = \"nobody\"\n");
    let says = "30.toml, line 1: user is for all disks";
    assert!(error().contains(says), "{}", error());
    write(
        "30.toml",
        &format!("#{}", " ".repeat(BYTES_MAX as usize - 10)),
    );
    assert!(error().contains("30.toml: is larger than"), "{}", error());
    // A start serves the others, and a reload changes nothing.
    write("30.toml", "\n");
    assert_eq!(Config::read(&path).unwrap(), config);
    let error_of_reload = config.read_again(&path).unwrap_err().to_string();
    let says = "30.toml: is empty";
    assert!(error_of_reload.contains(says), "{error_of_reload}");
    write("30.toml", "# nothing\n");
    assert_eq!(config.read_again(&path).unwrap(), config);
    fs::remove_file(beside.join("30.toml")).unwrap();
    fs::create_dir(beside.join("30.toml")).unwrap();
    assert!(error().contains("30.toml: is not a file"), "{}", error());
    fs::remove_dir(beside.join("30.toml")).unwrap();
    assert_eq!(Config::read(&path).unwrap(), config);
}

#[test]
fn unreadable_and_oversized_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let error = |path: &str| {
        let path = directory.path().join(path);
        Config::read(&path).unwrap_err().to_string()
    };
    assert!(error("absent.toml").contains("absent.toml: cannot be read"));
    let path = directory.path().join("large.toml");
    fs::write(path, " ".repeat(BYTES_MAX as usize + 1)).unwrap();
    assert!(error("large.toml").contains("larger than"));
    fs::write(directory.path().join("bytes.toml"), [0xff, 0xfe]).unwrap();
    assert!(error("bytes.toml").contains("cannot be read"));
}

/// The seeds of fuzzing, which include its findings.
#[test]
fn fuzzing_seeds_are_valid() {
    let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/config");
    let mut sound = 0;
    for file in fs::read_dir(seeds).unwrap() {
        let text = fs::read(file.unwrap().path()).unwrap();
        let text = String::from_utf8_lossy(&text);
        Config::check(&text);
        sound += usize::from(Config::parse(&text).is_ok());
    }
    assert!(sound >= 3);
}

proptest::proptest! {
    #[test]
    fn no_text_panics(text in "(\\[\\[(disk|iothread|throttle-group)\\]\\]\n)?([a-z-]{1,10} ?= ?[^\n]{0,20}\n){0,4}") {
        Config::check(&text);
    }
}

/// A mapping that names queues gives the disk its number of queues: whether a file is valid must not depend on the
/// CPUs of the host.
#[test]
fn mapping_of_queues_gives_their_number() {
    let disk = |vqs: [&str; 2]| {
        let [first, second] = vqs;
        Config::parse(&format!(
            "[[disk]]\nfile = \"a.raw\"\niothread-vq-mapping = [\n{{ iothread = \"0\", vqs = {first} }},\n\
             {{ iothread = \"1\", vqs = {second} }}]\n"
        ))
        .map(|config| config.disks[0].clone())
        .map_err(|mistake| mistake.problem)
    };
    let mapped = disk(["[0, 2, 40]", "[1]"]).unwrap_err();
    assert!(mapped.contains("queue 3 has no thread"), "{mapped}");
    let mapped = disk(["[0, 2]", "[1, 3, 4]"]).unwrap();
    assert_eq!(mapped.queues, Some(5));
    assert_eq!(mapped.iothreads, ["0", "1", "0", "1", "1"]);
    assert!(disk(["[]", "[]"]).unwrap_err().contains("queue 0"));
    assert!(disk(["[0]", "[256]"]).is_err());
}
