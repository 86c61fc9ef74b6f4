//! `ringdisk backup copy`.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::checkpoints::stop;
use super::failures::bits;
use super::{BINARY, BLOCK, DISK_BYTES, Served, numbers, run, text, write};
use crate::nbd::raw::Client;

const KEY: &str = "x-ringdisk-checkpoint";

fn of(copied: &Value) -> (&str, &Value, String) {
    let disk = &copied["disks"][0];
    let checkpoint = copied[KEY].as_str().unwrap().to_owned();
    (
        disk["mode"].as_str().unwrap(),
        &disk["x-ringdisk-full"],
        checkpoint,
    )
}

/// The content of a copy, which is that of the disk.
#[track_caller]
fn check(served: &Served, format: &str, file: &str) {
    served.done(&["export", "b", "--name=now"]);
    let uri = served.uri("now");
    run(
        "qemu-img",
        &["compare", "-f", format, "-F", "raw", file, &uri],
    );
    served.done(&["export", "now", "--remove", "--force"]);
}

#[test]
fn copies_of_both_formats_are_the_disk() {
    let Some(served) = Served::start("copies_of_both_formats_are_the_disk", &[]) else {
        return;
    };
    let mut device = served.connect("b");
    for (format, queue) in [("raw", 0), ("qcow2", 1)] {
        let format_option = format!("--format={format}");
        let path = |name: &str| text(&served.path(&format!("{name}.{format}"))).to_owned();
        let copy = |to: &str, more: &[&str]| {
            let to = format!("--to={to}");
            let fixed = ["backup", "copy", "b", &to, &format_option, "--bitmap=n"];
            served.done(&[&fixed[..], more].concat())
        };
        for block in 0..100 {
            write(&mut device, queue, block * 37, 1 + block);
        }
        let full = path("full");
        let copied = copy(&full, &[]);
        let (mode, why, checkpoint) = of(&copied);
        assert_eq!((mode, why), ("full", &json!("wanted")));
        check(&served, format, &full);
        // Data and zeroes change, the latter over data of the copy.
        for block in 50..60 {
            write(&mut device, queue, block * 37, 0);
            write(&mut device, queue, 7000 + block, block);
        }
        served.done(&["export", "b", "--name=zero", "--writable"]);
        let zero = ["-f", "raw", "-c", "write -z 148k 8M", &served.uri("zero")].map(str::to_owned);
        run("qemu-io", &zero.each_ref().map(String::as_str));
        served.done(&["export", "zero", "--remove", "--force"]);
        let since = format!("--since={checkpoint}");
        let base = format!("--base={full}");
        let (to, mut more) = (path("one"), vec![&*since]);
        let to = if format == "raw" { &full } else { &to };
        if format == "qcow2" {
            more.push(&base);
        }
        let copied = copy(to, &more);
        let (mode, why, second) = of(&copied);
        assert_eq!((mode, why), ("incremental", &Value::Null));
        assert!(copied["disks"][0]["copied"].as_u64().unwrap() < DISK_BYTES / 4);
        check(&served, format, to);
        // The first checkpoint is not that of the bitmap any more.
        write(&mut device, queue, 9000, 5);
        let (to, mut more) = (path("two"), vec![&*since]);
        let to = if format == "raw" { &full } else { &to };
        if format == "qcow2" {
            more.push(&base);
        }
        let copied = copy(to, &more);
        let (mode, why, third) = of(&copied);
        assert_eq!((mode, why), ("full", &json!("other-checkpoint")));
        assert!(third != second && second != checkpoint);
        check(&served, format, to);
        served.done(&["bitmap", "remove", "b", "n"]);
    }
    assert_eq!(served.done(&["backup", "list"]), json!([]));
}

/// Two disks of a backup that has begun.
#[test]
fn an_open_backup_is_copied_and_ended() {
    let Some(served) = Served::start("an_open_backup_is_copied_and_ended", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    write(&mut device, 0, 3, 7);
    served.done(&["backup", "begin", "a", "b"]);
    write(&mut device, 0, 3, 8);
    let [a, b] = ["a", "b"].map(|name| served.path(&format!("{name}-copy")));
    let to = [&a, &b].map(|file| format!("--to={}", text(file)));
    served.refused(
        &["backup", "copy", "a", &to[0], "--open", "--id=other"],
        "there is no backup 'other'",
    );
    served.done(&["backup", "copy", "a", "b", &to[0], &to[1], "--open"]);
    assert_eq!(fs::read(a).unwrap()[3 * 4096], 7);
    assert_eq!(fs::metadata(b).unwrap().len(), DISK_BYTES);
    assert_eq!(served.done(&["backup", "list"]), json!([]));
}

/// What is wrong is noticed before anything is copied.
#[test]
fn an_open_backup_outlives_a_mistake_in_the_destination() {
    let test = "an_open_backup_outlives_a_mistake_in_the_destination";
    let Some(served) = Served::start(test, &[]) else {
        return;
    };
    let mut device = served.connect("a");
    write(&mut device, 0, 3, 7);
    let [one, two, missing] = ["one", "two", "missing/two"].map(|name| served.path(name));
    let to = [&one, &two, &missing].map(|file| format!("--to={}", text(file)));
    let backups = || served.done(&["backup", "list"])[0]["id"].clone();
    let stays_open = |more: &[&str], words: &str| {
        let copy = ["backup", "copy", "a", "b", "--open"];
        let output = served.ringdisk(&[&copy[..], more].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_ne!(output.status.code(), Some(0), "{more:?}");
        assert!(said.contains(words), "{said}");
        assert!(
            said.contains("nothing was copied, and the backup stays open"),
            "{said}"
        );
        assert!(!said.contains("no backup is open"), "{said}");
        assert_eq!(backups(), "backup", "{more:?}");
        assert!(!served.path("one.partial").exists(), "{more:?}");
    };
    served.done(&["backup", "begin", "a", "b", "--bitmap=n"]);
    fs::write(&two, "of another backup").unwrap();
    stays_open(&[&to[0], &to[1]], "it exists; name a new file");
    let images = [&*to[0], &to[1], "--format=qcow2"];
    stays_open(&images, "it exists; name a new file");
    stays_open(&[&to[0], &to[2]], "No such file");
    // It would end with success for the other disk as well, whose bitmap would go on without a copy.
    let output = served.ringdisk(&["backup", "copy", "a", "--open", &to[0]]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("b: the backup has this disk too, 2 in all"),
        "{said}"
    );
    assert_eq!(backups(), "backup");
    assert_eq!(fs::read(&two).unwrap(), b"of another backup");
    fs::remove_file(&two).unwrap();
    let copied = served.done(&["backup", "copy", "a", "b", &to[0], &to[1], "--open"]);
    assert_eq!(of(&copied).0, "full");

    // An increment updates the files that are there.
    let since = format!("--since={}", of(&copied).2);
    served.done(&["backup", "begin", "a", "b", "--bitmap=n", &since]);
    let right = fs::read(&two).unwrap();
    fs::remove_file(&two).unwrap();
    stays_open(&[&to[0], &to[1]], "No such file");
    fs::write(&two, [&right[..], &[0; 512]].concat()).unwrap();
    stays_open(&[&to[0], &to[1]], "larger than the disk");
    fs::write(&two, &right).unwrap();
    assert!(!served.path("one.updating").exists());
    let copied = served.done(&["backup", "copy", "a", "b", &to[0], &to[1], "--open"]);
    assert_eq!(of(&copied).0, "incremental");
}

/// The changes stay in the bitmap, and no backup stays open.
#[test]
fn copies_that_fail_lose_no_changes() {
    let Some(served) = Served::start("copies_that_fail_lose_no_changes", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    let file = served.path("copy.raw");
    let to = format!("--to={}", text(&file));
    let first = served.done(&["backup", "copy", "a", &to, "--bitmap=n"]);
    let since = format!("--since={}", first[KEY].as_str().unwrap());
    for block in 0..2000 {
        write(&mut device, 0, block, 1);
    }
    let dirty = bits(&served, "a", "n");
    served.refused(&["backup", "copy", "a", &to, "--bitmap=n"], "it exists");
    let own = format!("--to={}", text(&served.path("a.raw")));
    let update = ["backup", "copy", "a", "--bitmap=n", &since];
    served.refused(&[&update[..], &[&own]].concat(), "another program uses it");
    let missing = format!("--to={}/missing/c", text(&served.path("")));
    served.refused(&["backup", "copy", "a", &missing], "No such file");
    assert_eq!(served.done(&["backup", "list"]), json!([]));

    // A signal while it copies.
    let slow = served.path("slow.raw");
    let mut command = Command::new(BINARY);
    command.args(["backup", "copy", "a", "--bps=4k", "--to"]);
    command.arg(&slow).arg("--control");
    command.arg(served.path("control.qmp"));
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    let partial = served.path("slow.raw.partial");
    crate::support::wait_until("the copy begins", || partial.exists());
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("interrupted; no backup is open"), "{said}");
    assert!(!partial.exists() && !slow.exists());
    assert_eq!(served.done(&["backup", "list"]), json!([]));
    assert_eq!(bits(&served, "a", "n"), dirty);

    // A signal while it waits for the places of others.
    served.done(&["export", "b", "--name=others"]);
    let others: Vec<_> = (0..100)
        .map(|_| Client::connect(&served.path("nbd.sock"), "others"))
        .collect();
    let mut command = Command::new(BINARY);
    command.args(["backup", "copy", "a", "--bitmap=n", &since, "--to"]);
    command.arg(&file).arg("--control");
    command.arg(served.path("control.qmp"));
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let log = ["NBD", "waits until one of 100 clients leaves"];
    served.server.wait_for_log(&log);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    crate::support::wait_until("its end", || child.try_wait().unwrap().is_some());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("interrupted; no backup is open"), "{said}");
    assert_eq!(served.done(&["backup", "list"]), json!([]));
    assert_eq!(bits(&served, "a", "n"), dirty);
    drop(others);
    served.done(&["export", "others", "--remove", "--force"]);

    // The copy is complete, and the backup cannot end.
    let records = fs::read_dir(served.path("state")).unwrap();
    let records = records.map(|record| record.unwrap().path());
    let blocked: Vec<_> = records
        .filter(|path| path.extension().is_some_and(|is| is == "bitmaps"))
        .map(|path| path.with_extension("new"))
        .collect();
    blocked
        .iter()
        .for_each(|path| fs::create_dir(path).unwrap());
    let output = served.ringdisk(&[&update[..], &[&to]].concat());
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert_eq!(
        fs::read(&file).unwrap(),
        fs::read(served.path("a.raw")).unwrap()
    );
    blocked
        .iter()
        .for_each(|path| fs::remove_dir(path).unwrap());
    // It is not the state of the last checkpoint any more.
    let mark = served.path("copy.raw.updating");
    assert!(String::from_utf8_lossy(&output.stderr).contains("copy.raw.updating: remove it if"));
    let ended = served.done(&["backup", "end"]);
    assert_eq!(bits(&served, "a", "n"), 0);
    // The user knows the checkpoint.
    fs::remove_file(&mark).unwrap();
    let since = format!("--since={}", ended[KEY].as_str().unwrap());
    let copied = served.done(&["backup", "copy", "a", "--bitmap=n", &since, &to]);
    assert_eq!(of(&copied).0, "incremental");
    let output = served.ringdisk(&["backup", "copy", "a", "b", &to]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

/// Only another copy that runs keeps the file.
#[test]
fn a_file_that_a_killed_copy_left_is_replaced() {
    let test = "a_file_that_a_killed_copy_left_is_replaced";
    let Some(served) = Served::start(test, &[]) else {
        return;
    };
    let mut device = served.connect("a");
    for block in 0..2000 {
        write(&mut device, 0, block, 1);
    }
    let (file, partial) = (served.path("slow.raw"), served.path("slow.raw.partial"));
    let to = format!("--to={}", text(&file));
    let mut command = Command::new(BINARY);
    command.args(["backup", "copy", "a", "--bps=4k", &to, "--control"]);
    let mut child = command.arg(served.path("control.qmp")).spawn().unwrap();
    crate::support::wait_until("the copy begins", || partial.exists());
    let other = ["backup", "copy", "b", "--id=other", &to];
    served.refused(&other, "another copy writes it");
    child.kill().unwrap();
    child.wait().unwrap();
    // It may have another name, and another process may have it open.
    fs::set_permissions(&partial, fs::Permissions::from_mode(0o666)).unwrap();
    fs::hard_link(&partial, served.path("other")).unwrap();
    let before = fs::metadata(&partial).unwrap().len();
    served.done(&["backup", "end", "--failed"]);
    served.done(&["backup", "copy", "a", &to]);
    assert!(file.exists() && !partial.exists());
    let [copy, old] = [&file, &served.path("other")].map(|path| fs::metadata(path).unwrap());
    assert_eq!((copy.mode() & 0o777, copy.nlink()), (0o600, 1));
    assert_eq!((old.nlink(), old.len()), (1, before));
}

#[test]
fn a_name_is_no_protocol() {
    let Some(served) = Served::start("a_name_is_no_protocol", &[]) else {
        return;
    };
    for name in ["file:x.qcow2", "vm:1.qcow2"] {
        let mut command = Command::new(BINARY);
        command.args(["backup", "copy", "b", "--format=qcow2", "--to", name]);
        command.arg("--control").arg(served.path("control.qmp"));
        let output = command.current_dir(served.path("")).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        check(&served, "qcow2", text(&served.path(name)));
    }
}

/// An increment without the file below it would be an image of the changes alone.
#[test]
fn an_open_increment_needs_its_base() {
    let Some(served) = Served::start("an_open_increment_needs_its_base", &[]) else {
        return;
    };
    let mut device = served.connect("b");
    for block in 0..32 {
        write(&mut device, 0, block, 1);
    }
    let [full, one] = ["full", "one"].map(|name| text(&served.path(name)).to_owned());
    let [to_full, to_one] = [&full, &one].map(|file| format!("--to={file}"));
    let image = ["backup", "copy", "b", "--format=qcow2"];
    let copied = served.done(&[&image[..], &[&to_full, "--bitmap=n"]].concat());
    let since = format!("--since={}", of(&copied).2);
    write(&mut device, 0, 40, 2);
    served.done(&["export", "b", "--name=zero", "--writable"]);
    let zero = ["-f", "raw", "-c", "write -z 0 64k", &served.uri("zero")];
    run("qemu-io", &zero);
    served.done(&["export", "zero", "--remove", "--force"]);
    served.done(&["backup", "begin", "b", "--bitmap=n", &since]);
    let dirty = bits(&served, "b", "n");
    let open = [&image[..], &[&to_one, "--open"]].concat();
    let base = format!("--base={full}");
    for more in [&[][..], &[&*base, &*base]] {
        let output = served.ringdisk(&[&open[..], more].concat());
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("--base: once for each disk"), "{said}");
        assert!(!served.path("one").exists() && !served.path("one.partial").exists());
    }
    // It is still open, and nothing is lost.
    assert_eq!(bits(&served, "b", "n"), dirty);
    let copied = served.done(&[&open[..], &[&*base]].concat());
    assert_eq!(of(&copied).0, "incremental");
    check(&served, "qcow2", &one);
    // A full backup has nothing below it.
    let output = served.ringdisk(&[&image[..], &["--to=new", &base]].concat());
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn two_disks_are_not_copied_to_one_file() {
    let Some(served) = Served::start("two_disks_are_not_copied_to_one_file", &[]) else {
        return;
    };
    let path = |name: &str| text(&served.path(name)).to_owned();
    fs::create_dir(path("d")).unwrap();
    fs::write(path("old"), "old").unwrap();
    std::os::unix::fs::symlink("old", path("link")).unwrap();
    fs::hard_link(path("old"), path("hard")).unwrap();
    for [a, b] in [
        ["new", "new"],
        ["new", "d/../new"],
        ["new.partial", "new"],
        ["old", "link"],
        ["hard", "old"],
    ] {
        let [a, b] = [a, b].map(|name| format!("--to={}", path(name)));
        let output = served.ringdisk(&["backup", "copy", "a", "b", &a, &b, "--bitmap=n"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{a} {b}: {said}");
        assert!(said.contains("for two disks"), "{said}");
    }
    assert_eq!(fs::read(path("old")).unwrap(), b"old");
    assert!(!served.path("new").exists());
    assert_eq!(served.done(&["backup", "list"]), json!([]));
}

/// The bitmap of an older image that is put back has the same checkpoint, and no changes.
#[test]
fn an_unfinished_update_is_followed_by_a_full_copy() {
    let test = "an_unfinished_update_is_followed_by_a_full_copy";
    let Some(mut served) = Served::start(test, &[]) else {
        return;
    };
    let [image, old, file] = ["b.qcow2", "old.qcow2", "copy.raw"].map(|name| served.path(name));
    let mark = served.path("copy.raw.updating");
    let to = format!("--to={}", text(&file));
    let first = of(&served.done(&["backup", "copy", "b", &to, "--bitmap=n"])).2;
    assert!(!mark.exists());
    let since = format!("--since={first}");
    stop(&mut served, false);
    fs::copy(&image, &old).unwrap();
    served.restart();
    let mut device = served.connect("b");
    for block in 0..2000 {
        write(&mut device, 0, block, 1);
    }
    // By another name of the same file.
    std::os::unix::fs::symlink(&file, served.path("link")).unwrap();
    let link = format!("--to={}", text(&served.path("link")));
    let before = fs::read(&file).unwrap();
    let mut command = Command::new(BINARY);
    command.args(["backup", "copy", "b", "--bps=256k", "--bitmap=n", &since]);
    command.arg(&link).arg("--control");
    command.arg(served.path("control.qmp"));
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    crate::support::wait_until("a part is copied", || fs::read(&file).unwrap() != before);
    assert!(mark.exists());
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(mark.exists());

    drop(device);
    stop(&mut served, false);
    fs::copy(&old, &image).unwrap();
    served.restart();
    let copied = served.done(&["backup", "copy", "b", &link, "--bitmap=n", &since]);
    let (mode, why, second) = of(&copied);
    assert_eq!((mode, why), ("full", &json!("unfinished-update")));
    assert!(!mark.exists() && served.path("link").is_symlink());
    check(&served, "raw", text(&file));
    // Then it is incremental again.
    let since = format!("--since={second}");
    let mut device = served.connect("b");
    write(&mut device, 0, 77, 3);
    let copied = served.done(&["backup", "copy", "b", &to, "--bitmap=n", &since]);
    assert_eq!(of(&copied).0, "incremental");
    assert!(!mark.exists());
    check(&served, "raw", text(&file));
}

/// Also with an open backup, and if the file is gone.
#[test]
fn marked_files_are_copied_in_full() {
    let Some(served) = Served::start("marked_files_are_copied_in_full", &[]) else {
        return;
    };
    let mut device = served.connect("b");
    write(&mut device, 0, 5, 1);
    let file = served.path("copy.raw");
    let mark = served.path("copy.raw.updating");
    let to = format!("--to={}", text(&file));
    let first = of(&served.done(&["backup", "copy", "b", &to, "--bitmap=n"])).2;
    // What the bitmap does not know.
    fs::write(&file, vec![9; DISK_BYTES as usize]).unwrap();
    fs::write(&mark, "").unwrap();
    served.done(&[
        "backup",
        "begin",
        "b",
        "--bitmap=n",
        &format!("--since={first}"),
    ]);
    let copied = served.done(&["backup", "copy", "b", &to, "--open"]);
    let (mode, why, second) = of(&copied);
    assert_eq!((mode, why), ("full", &json!("unfinished-update")));
    assert!(!mark.exists());
    check(&served, "raw", text(&file));
    // The user has removed the file, and not its mark.
    fs::remove_file(&file).unwrap();
    fs::write(&mark, "").unwrap();
    let since = format!("--since={second}");
    let copied = served.done(&["backup", "copy", "b", &to, "--bitmap=n", &since]);
    assert_eq!(of(&copied).0, "full");
    assert!(!mark.exists());
    let since = format!("--since={}", of(&copied).2);
    write(&mut device, 0, 6, 1);
    let copied = served.done(&["backup", "copy", "b", &to, "--bitmap=n", &since]);
    assert_eq!(of(&copied).0, "incremental");
    check(&served, "raw", text(&file));
}

/// The file with the last backup was cut off: an increment brings back what is missing, though it has not changed.
#[test]
fn an_increment_completes_a_file_that_was_cut_off() {
    let test = "an_increment_completes_a_file_that_was_cut_off";
    let Some(served) = Served::start(test, &[]) else {
        return;
    };
    for disk in ["a", "b"] {
        let mut device = served.connect(disk);
        for block in (0..DISK_BYTES / BLOCK).step_by(256) {
            write(&mut device, 0, block, block);
        }
        let file = served.path("copy.raw");
        let to = format!("--to={}", text(&file));
        let copied = served.done(&["backup", "copy", disk, &to, "--bitmap=n"]);
        let cut = fs::File::options().write(true).open(&file).unwrap();
        cut.set_len(DISK_BYTES / 4 + 12345).unwrap();
        write(&mut device, 0, 1, 1);
        let since = format!("--since={}", of(&copied).2);
        let copied = served.done(&["backup", "copy", disk, &to, "--bitmap=n", &since]);
        assert_eq!(of(&copied).0, "incremental");
        let now = numbers(&fs::read(&file).unwrap());
        for (block, &found) in (0..).zip(&now) {
            let expected = if block % 256 == 0 {
                block
            } else {
                u64::from(block == 1)
            };
            assert_eq!(found, expected, "{disk}: {block}");
        }
        fs::remove_file(&file).unwrap();
    }
}
