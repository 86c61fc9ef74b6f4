//! Journals of a ringdisk that ran as another user.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use testkit::driver::{Device, DeviceConfig};
use testkit::server::Server;

use super::{Image, verify, write};
use crate::support::content;

/// Starting again as another user reports the journal and loses nothing.
#[test]
fn journal_of_another_user_is_reported() {
    let test = "journal_of_another_user_is_reported";
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: {test}: needs root");
    }
    let Some(image) = Image::new(test, "") else {
        return;
    };
    let start = |user: &[&str]| image.serve("runtime", user);
    let nobody = ["--user", "nobody"];
    let server = start(&nobody).unwrap();
    write(&server);
    server.signal(Signal::KILL);
    drop(server);
    let refused = start(&[]).err().unwrap().to_string();
    assert!(refused.contains("journals-nobody"), "{refused}");
    assert!(refused.contains("ran as another user"), "{refused}");
    let server = start(&nobody).unwrap();
    server.wait_for_log(&["from the journal of a killed process"]);
    verify(&server);
    server.signal(Signal::KILL);
    drop(server);
    // Root has created it for a user who opens it as well.
    let journal = image.journal("runtime/journals-nobody");
    assert_eq!(fs::metadata(&journal).unwrap().uid(), 65534);
    // A journal that cannot be opened is not skipped.
    let elsewhere = image.file.with_file_name("elsewhere");
    fs::rename(&journal, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &journal).unwrap();
    let refused = start(&nobody).err().unwrap().to_string();
    assert!(refused.contains("cannot be opened"), "{refused}");
}

/// The same where the sandbox allows neither process to look at the other's journals.
#[test]
fn journal_of_another_user_is_found_from_the_sandbox() {
    let test = "journal_of_another_user_is_found_from_the_sandbox";
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: {test}: needs root");
    }
    let users: [&[&str]; 2] = [&[], &["--user", "nobody"]];
    for (before, now) in [(0, 1), (1, 0)] {
        let Some(image) = Image::new(test, "") else {
            return;
        };
        let place = tempfile::tempdir().unwrap();
        let runtime = place.path().join("run").display().to_string();
        let server = image.serve(&runtime, users[before]).unwrap();
        write(&server);
        server.signal(Signal::KILL);
        drop(server);
        let refused = image.serve(&runtime, users[now]).err().unwrap();
        assert!(
            refused.to_string().contains("ran as another user"),
            "{refused}"
        );
        let server = image.serve(&runtime, users[before]).unwrap();
        server.wait_for_log(&["from the journal of a killed process"]);
        verify(&server);
    }
}

/// A journal that the user of `--user` cannot look for may be there: the image is not served without it.
#[test]
fn journal_in_a_closed_directory_is_not_skipped() {
    let test = "journal_in_a_closed_directory_is_not_skipped";
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: {test}: needs root");
    }
    let Some(image) = Image::new(test, "") else {
        return;
    };
    let place = image.file.parent().unwrap();
    let path = |name: &str| place.join(name);
    let mode = |place: &Path, mode| {
        fs::set_permissions(place, PermissionsExt::from_mode(mode)).unwrap();
    };
    mode(place, 0o755);
    for own in [place, &image.file] {
        chown(own, Some(65534), None).unwrap();
    }
    let nobody = ["--user", "nobody"];
    // Root's, as it was before.
    let runtime = path("runtime");
    fs::create_dir(&runtime).unwrap();
    let server = image.serve("runtime", &nobody).unwrap();
    write(&server);
    server.signal(Signal::KILL);
    drop(server);

    mode(&runtime, 0o700);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    let control = path("c.qmp").display().to_string();
    command.args(["serve", "--json", "--allow-dir"]).arg(place);
    command.args(nobody).args(["--control", &control]);
    command.env("RUNTIME_DIRECTORY", &runtime);
    let mut server = Server::ringdisk_command(command).unwrap();
    let attach = |more: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(["attach", &format!("{}{more}", image.argument())]);
        let output = command.args(["--control", &control]).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        (output.status.success(), text)
    };
    fs::remove_file(&image.disk.socket).unwrap();
    for more in ["", ",readonly=on"] {
        let (done, text) = attach(more);
        assert!(!done && text.contains("cannot be seen"), "{text}");
    }
    mode(&runtime, 0o711);
    let (done, text) = attach("");
    assert!(done, "{text}");
    server.wait_for_log(&["from the journal of a killed process"]);
    let mut device = Device::connect(&image.disk.socket, &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].read(9, 4096).unwrap(), content(9, 4096));
    drop(device);
    assert!(server.terminate().unwrap().success());
}

/// The directory of the other user is newer than the sandbox of this process, which sees that the journal is there.
#[test]
fn journal_in_a_newer_directory_is_not_skipped() {
    let test = "journal_in_a_newer_directory_is_not_skipped";
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: {test}: needs root");
    }
    let Some(image) = Image::new(test, "") else {
        return;
    };
    let place = tempfile::tempdir().unwrap();
    let runtime = place.path().join("run").display().to_string();
    let control = image.file.with_file_name("c.qmp");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    command.args(["serve", "--json", "--allow-dir"]);
    command.arg(image.file.parent().unwrap());
    command.arg("--control").arg(&control);
    command.env("RUNTIME_DIRECTORY", &runtime);
    let mut first = Server::ringdisk_command(command).unwrap();
    let nobody = ["--user", "nobody"];
    let server = image.serve(&runtime, &nobody).unwrap();
    write(&server);
    server.signal(Signal::KILL);
    drop(server);
    for more in ["", ",readonly=on"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(["attach", &format!("{}{more}", image.argument())]);
        let output = command.arg("--control").arg(&control).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("journals-nobody"), "{said}");
        assert!(said.contains("this process cannot read that"), "{said}");
    }
    assert!(first.terminate().unwrap().success());
    let server = image.serve(&runtime, &nobody).unwrap();
    server.wait_for_log(&["from the journal of a killed process"]);
    verify(&server);
}

/// Anyone can guess a journal's file name and put a forged journal into their own directory: only the number stored in
/// the image makes a journal belong to it.
#[test]
fn forged_journal_of_another_user_is_ignored() {
    let test = "forged_journal_of_another_user_is_ignored";
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: {test}: needs root");
    }
    let Some(image) = Image::new(test, "") else {
        return;
    };
    let mut server = image.serve("runtime", &[]).unwrap();
    write(&server);
    let journal = image.journal("runtime/journals");
    let directory = image.file.with_file_name("runtime/journals-nobody");
    fs::create_dir(&directory).unwrap();
    let made_up = directory.join(journal.file_name().unwrap());
    fs::copy(&journal, &made_up).unwrap();
    // From here on, the image says that it has no journal.
    assert!(server.terminate().unwrap().success());
    let server = image.serve("runtime", &[]).unwrap();
    server.wait_for_log(&["WARN", "journals-nobody", "not that of this image"]);
    write(&server);
    // And now that it has another journal.
    server.signal(Signal::KILL);
    drop(server);
    let server = image.serve("runtime", &[]).unwrap();
    server.wait_for_log(&["WARN", "journals-nobody", "not that of this image"]);
    verify(&server);
}
