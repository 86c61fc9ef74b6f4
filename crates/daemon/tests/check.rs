//! `ringdisk check` as people and scripts run it: its output and its exit code.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Output};

fn check(arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    // No lab results exist here.
    command.env("XDG_STATE_HOME", "/nonexistent");
    let Output {
        status,
        stdout,
        stderr,
    } = command.arg("check").args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

#[test]
fn unreadable_input_is_not_reported_as_ok() {
    let (code, out, error) = check(&["/nonexistent/vm.xml"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(
        error.contains("/nonexistent/vm.xml: cannot be read"),
        "{error}"
    );

    let dir = tempfile::tempdir().unwrap();
    let cut_off = dir.path().join("cut-off.xml");
    fs::write(&cut_off, "<domain").unwrap();
    let (code, out, error) = check(&[cut_off.to_str().unwrap()]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(error.contains("cut-off.xml:1:1: is not XML"), "{error}");
}

/// What is not read is not reported as free of findings, and the reason is the true one.
#[test]
fn variable_programs_and_missing_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("vm.sh");
    for (program, place) in [("$QEMU", "2:6"), ("\"${QEMU:-qemu-kvm}\"", "2:6")] {
        let text = format!("QEMU=kvm\nsudo {program} -m 1G -drive file=a.raw,if=virtio\n");
        fs::write(&script, text).unwrap();
        let (code, out, error) = check(&[script.to_str().unwrap()]);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{error}");
        for part in [place, "is a variable", "QEMU", "--pid"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
    fs::write(
        &script,
        "qemu-system-x86_64 -readconfig /nonexistent/vm.conf\n",
    )
    .unwrap();
    let (_, out, _) = check(&[script.to_str().unwrap()]);
    assert!(!out.contains("nothing that costs performance"), "{out}");
    assert!(
        out.contains("skipped: ") && out.contains("/nonexistent/vm.conf"),
        "{out}"
    );
    // Other texts that begin with a variable are something else.
    fs::write(&script, "$EDITOR notes\n").unwrap();
    let (_, _, error) = check(&[script.to_str().unwrap()]);
    assert!(error.contains("is not a libvirt domain"), "{error}");
}

#[test]
fn exit_code_tells_findings_from_errors() {
    let slow = [
        "--",
        "qemu-system-x86_64",
        "-drive",
        "file=a.raw,if=virtio,aio=native",
    ];
    let (code, out, _) = check(&slow);
    assert_eq!(code, Some(1));
    assert!(out.contains("aio-native-buffered"), "{out}");
    let json = check(&[&["--json"][..], &slow].concat()).1;
    assert!(
        serde_json::from_str::<serde_json::Value>(&json).is_ok(),
        "{json}"
    );

    let (code, _, error) = check(&["--explain", "no-such-rule"]);
    assert_eq!(code, Some(2));
    assert!(error.contains("--rules"), "{error}");
}

/// A missing folder of lab results is not an error.
#[test]
fn missing_lab_results_are_not_mentioned() {
    let (_, out, error) = check(&["--", "qemu-system-x86_64", "-drive", "file=a.raw,if=ide"]);
    assert!(out.contains("emulated-bus"), "{out}");
    assert!(
        !out.contains("nonexistent") && error.is_empty(),
        "{out}{error}"
    );
}

/// A change that may keep a machine from starting is labelled as such, and is only written to a file when the user
/// confirms it.
#[test]
fn unknown_facts_are_reported_and_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vm.sh");
    let text = "qemu-system-x86_64 -accel kvm -machine q35 -object iothread,id=i0 \
        -drive file=/vms/a.img,format=raw,if=none,id=a,discard=unmap -device virtio-blk-pci,drive=a,iothread=i0\n";
    fs::write(&file, text).unwrap();
    let name = file.to_str().unwrap();

    let (code, patch, error) = check(&["--fix", name]);
    assert_eq!(code, Some(1), "{error}");
    assert_eq!(patch, "", "a wrong answer would harm data");
    for part in [
        "cache-host-page is not fixed: unknown whether /vms/a.img is on a file system with checksums",
        "--fix-rule cache-host-page",
    ] {
        assert!(error.contains(part), "{error}");
    }

    let named = ["--fix", "--fix-rule", "cache-host-page", name];
    let (code, patch, error) = check(&named);
    assert_eq!(code, Some(1), "{error}");
    assert!(patch.contains("cache=none"), "{patch}");
    for part in [
        "cache-host-page: unknown whether /vms/a.img is on a file system with checksums",
        "whether the file system of /vms/a.img supports O_DIRECT",
        "aio-threads-file is not fixed: unknown whether QEMU is another version than 7.1",
        "whether the host's kernel allows QEMU to use io_uring",
    ] {
        assert!(error.contains(part), "{error}");
    }

    let in_place = [&named[..], &["--in-place"]].concat();
    let (code, _, error) = check(&in_place);
    assert_eq!(code, Some(2), "{error}");
    assert!(
        error.contains("no file was changed: 1 change depends") && error.contains("--yes"),
        "{error}"
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), text);

    let (code, _, error) = check(&[&in_place[..], &["--yes"]].concat());
    assert_eq!(code, Some(1), "{error}");
    assert!(
        fs::read_to_string(&file).unwrap().contains("cache=none"),
        "{error}"
    );
}

/// `--fix` says of each finding why it stays, and fails while one does.
#[test]
fn findings_that_stay_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vm.conf");
    let text = "boot: order=scsi0\ncores: 4\ncpu: x86-64-v2-AES\nmemory: 4096\nname: a\nostype: l26\nscsihw: \
        virtio-scsi-single\nscsi0: local-lvm:vm-1-disk-0,discard=on,iothread=1,iops_rd=300,iops_wr=300,size=8G\n";
    fs::write(&file, text).unwrap();
    let name = file.to_str().unwrap();
    let (code, out, _) = check(&[name]);
    assert_eq!(code, Some(1), "{out}");
    assert!(
        out.contains("limit-low") && out.contains("300 requests"),
        "{out}"
    );
    let (code, patch, error) = check(&["--fix", name]);
    assert_eq!((code, patch.as_str()), (Some(1), ""), "{error}");
    assert!(
        error.contains("limit-low is not fixed: it has no automatic fix"),
        "{error}"
    );
}

#[test]
fn rules_are_listed_as_json() {
    let (code, out, error) = check(&["--rules", "--json"]);
    assert_eq!(code, Some(0), "{error}");
    let rules: serde_json::Value = serde_json::from_str(&out).unwrap();
    let rules = rules.as_array().unwrap();
    assert!(rules.len() > 50);
    assert!(rules.iter().any(|rule| rule["id"] == "cache-unsafe"));
}

/// Facts known about the host are not asked for.
#[test]
fn known_facts_are_not_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let [file, facts] = ["vm.sh", "facts.json"].map(|name| dir.path().join(name));
    let text = "qemu-system-x86_64 -accel kvm -machine q35 -object iothread,id=i0 \
        -drive file=/vms/a.img,format=raw,if=none,id=a,discard=unmap -device virtio-blk-pci,drive=a,iothread=i0\n";
    fs::write(&file, text).unwrap();
    let known = r#"{ "format": "ringdisk-facts-1", "name": "h", "host": { "io-uring": "on", "qemu": "9.0.0" },
        "files": { "/vms/a.img": { "kind": "file", "fs": "xfs", "direct": "yes" } } }"#;
    fs::write(&facts, known).unwrap();
    let [file, facts] = [&file, &facts].map(|path| path.to_str().unwrap());
    let (code, _, error) = check(&["--fix", "--in-place", "--facts", facts, file]);
    assert_eq!(code, Some(1), "{error}");
    assert!(!error.contains("unknown"), "{error}");
    assert!(fs::read_to_string(file).unwrap().contains("aio=io_uring"));
}

/// A file named by a symlink is changed at its target, and keeps its mode.
#[test]
fn in_place_change_keeps_the_symlink_and_mode() {
    let dir = tempfile::tempdir().unwrap();
    let [file, link] = ["vm.sh", "link.sh"].map(|name| dir.path().join(name));
    let text = "qemu-system-x86_64 -accel kvm -object iothread,id=spare -drive \
                file=/vms/a.img,format=raw,if=none,id=a,cache=unsafe -device virtio-blk-pci,drive=a\n";
    fs::write(&file, text).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o750)).unwrap();
    symlink("vm.sh", &link).unwrap();
    let (code, _, error) = check(&["--fix", "--in-place", "--yes", link.to_str().unwrap()]);
    assert_eq!(code, Some(1), "{error}");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(!fs::read_to_string(&file).unwrap().contains("unsafe"));
    let mode = fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o750);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

/// The change replaces the file, so another hard link would keep the old text.
#[test]
fn file_with_hard_links_is_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let [file, other] = ["vm.sh", "other.sh"].map(|name| dir.path().join(name));
    let text = "qemu-system-x86_64 -accel kvm -object iothread,id=spare -drive \
                file=/vms/a.img,format=raw,if=none,id=a,cache=unsafe -device virtio-blk-pci,drive=a\n";
    fs::write(&file, text).unwrap();
    fs::hard_link(&file, &other).unwrap();
    let change = || check(&["--fix", "--in-place", "--yes", file.to_str().unwrap()]);
    let (code, _, error) = change();
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("vm.sh: has 2 hard links"), "{error}");
    assert!(error.contains("no file was changed"), "{error}");
    assert_eq!(fs::read_to_string(&file).unwrap(), text);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);

    fs::remove_file(other).unwrap();
    let (code, _, error) = change();
    assert_eq!(code, Some(1), "{error}");
    assert!(!fs::read_to_string(&file).unwrap().contains("unsafe"));
}

/// The machine's and ringdisk's configuration change together: with only one of the two, the machine would not start.
#[test]
fn in_place_change_writes_both_files_or_neither() {
    let dir = tempfile::tempdir().unwrap();
    let [file, config] = ["vm.sh", "ringdisk.toml"].map(|name| dir.path().join(name));
    let text = "qemu-system-x86_64 -accel kvm -drive file=/vms/a.img,format=raw,if=none,id=a \
                -device virtio-blk-pci,drive=a\n";
    fs::write(&file, text).unwrap();
    let name = file.to_str().unwrap();
    let there = |config: &[&str]| {
        check(
            &[
                &["--fix", "--to", "ringdisk", "--in-place", "--yes", name],
                config,
            ]
            .concat(),
        )
    };
    let unchanged = || assert_eq!(fs::read_to_string(&file).unwrap(), text);

    let (code, _, error) = there(&[]);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("--config FILE"), "{error}");
    unchanged();

    let path = config.to_str().unwrap();
    fs::write(&config, "# mine\n").unwrap();
    let (code, _, error) = there(&["--config", path]);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("already exists"), "{error}");
    unchanged();

    let nowhere = dir.path().join("none/ringdisk.toml");
    let (code, _, error) = there(&["--config", nowhere.to_str().unwrap()]);
    assert_eq!(code, Some(2), "{error}");
    unchanged();

    fs::remove_file(&config).unwrap();
    let (code, _, error) = there(&["--config", path]);
    assert_eq!(code, Some(1), "{error}");
    let disk = fs::read_to_string(&config).unwrap();
    assert!(disk.contains("file = \"/vms/a.img\""), "{disk}");
    let machine = fs::read_to_string(&file).unwrap();
    assert!(machine.contains("vhost-user-blk-pci"), "{machine}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}
