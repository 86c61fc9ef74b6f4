use super::*;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use testkit::server::Server;
use testkit::vm::find_program;

/// The package of the program as the tests have built it is unpacked like an installation, and its service is started
/// as the unit starts it. What needs root and a running systemd is looked at without running it.
#[test]
fn the_package_serves_when_it_is_installed() {
    const TEST: &str = "the_package_serves_when_it_is_installed";
    // <target>/debug/deps/xtask-...
    let test = std::env::current_exe().unwrap();
    let built = test.parent().and_then(Path::parent).unwrap();
    let profile = match built.file_name().and_then(|name| name.to_str()) {
        Some("debug") => "dev",
        Some(profile) => profile,
        None => unreachable!("the test is in a directory"),
    };
    if let Err(error) = packages::deb::program() {
        return println!("skipped: {TEST}: {error:#}");
    }
    if find_program("dpkg-deb").is_none() {
        return println!("skipped: {TEST}: dpkg-deb is missing");
    }
    if !built.join("ringdisk").is_file() {
        let built = built.display();
        return println!(
            "skipped: {TEST}: ringdisk is not built in {built}; --workspace builds it"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let package = pack(built, profile, folder.path(), &["--fast", "--no-strip"]).unwrap();

    let (root, control) = (folder.path().join("root"), folder.path().join("control"));
    let deb = |what: &str, to: &Path| {
        checked(Command::new("dpkg-deb").arg(what).arg(&package).arg(to));
    };
    deb("--extract", &root);
    deb("--control", &control);
    has_what_belongs_in_it(&root);
    leaves_the_configuration_and_running_disks_alone(&control);
    needs_the_allocator_that_it_is_linked_with(&root, &control);
    the_example_serves(&root, folder.path());
    systemd_understands_it(&root, folder.path());
}

fn has_what_belongs_in_it(root: &Path) {
    for (path, mode) in [
        ("usr/bin/ringdisk", 0o755),
        ("usr/lib/systemd/system/ringdisk.service", 0o644),
        ("usr/lib/sysusers.d/ringdisk.conf", 0o644),
        ("etc/ringdisk/ringdisk.toml", 0o644),
        ("usr/share/doc/ringdisk/copyright", 0o644),
        ("usr/share/doc/ringdisk/operations.md", 0o644),
        ("usr/share/man/man1/ringdisk.1.gz", 0o644),
        ("usr/share/man/man1/ringdisk-serve.1.gz", 0o644),
        ("usr/share/bash-completion/completions/ringdisk", 0o644),
        ("usr/share/fish/vendor_completions.d/ringdisk.fish", 0o644),
        ("usr/share/zsh/vendor-completions/_ringdisk", 0o644),
    ] {
        let there = fs::metadata(root.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
        assert_eq!(there.permissions().mode() & 0o7777, mode, "{path}");
    }
}

fn leaves_the_configuration_and_running_disks_alone(control: &Path) {
    let read = |name: &str| fs::read_to_string(control.join(name)).unwrap();
    assert_eq!(read("conffiles").trim(), "/etc/ringdisk/ringdisk.toml");
    let (postinst, prerm) = (read("postinst"), read("prerm"));
    assert!(postinst.contains("systemd-sysusers"), "{postinst}");
    assert!(postinst.contains("deb-systemd-invoke start"), "{postinst}");
    // An upgrade runs `prerm upgrade` and `postinst configure VERSION`.
    assert!(!postinst.contains("restart"), "{postinst}");
    assert!(prerm.contains("\"$1\" = remove ]"), "{prerm}");
    for script in ["postinst", "prerm", "postrm"] {
        checked(Command::new("sh").arg("-n").arg(control.join(script)));
    }
}

/// `cargo xtask test` tests a program with tcmalloc, `cargo test` one without.
fn needs_the_allocator_that_it_is_linked_with(root: &Path, control: &Path) {
    let linked = checked(Command::new("ldd").arg(root.join("usr/bin/ringdisk")));
    let linked = String::from_utf8_lossy(&linked.stdout).into_owned();
    let control = fs::read_to_string(control.join("control")).unwrap();
    let depends = control.lines().find(|line| line.starts_with("Depends:"));
    let (linked, depends) = (linked.contains("libtcmalloc"), depends.unwrap());
    assert_eq!(
        linked,
        depends.contains("libtcmalloc-minimal4"),
        "{depends}"
    );
}

/// A command of the unit, with the paths of the unpacked package, and the directories that systemd makes.
fn of_the_unit(key: &str, root: &Path, folder: &Path) -> Command {
    let unit = fs::read_to_string(root.join("usr/lib/systemd/system/ringdisk.service")).unwrap();
    let line = unit.lines().find_map(|line| line.strip_prefix(key));
    let mut words = line.unwrap().split(' ');
    let inside = |path: &str| root.join(path.trim_start_matches('/'));
    let mut command = Command::new(inside(words.next().unwrap()));
    command.args(words.map(|word| match word.starts_with('/') {
        true => inside(word),
        false => word.into(),
    }));
    command
        .arg("--json")
        .env("RUNTIME_DIRECTORY", folder.join("run"))
        .env("STATE_DIRECTORY", folder.join("state"));
    command
}

fn the_example_serves(root: &Path, folder: &Path) {
    let run = folder.join("run");
    let start = || Server::ringdisk_command(of_the_unit("ExecStart=", root, folder)).unwrap();
    let mut server = start();
    assert!(server.sockets.is_empty(), "the example has a disk in it");
    assert!(run.join("control.qmp").exists());
    let added = root.join("etc/ringdisk/ringdisk.toml");
    let socket = run.join("added.sock");
    fs::write(&added, "[[disk]]\nname = \"added\"\nfile = \"null:1G\"\n").unwrap();
    server.signal(Signal::HUP);
    while !socket.exists() {
        assert!(server.is_running(), "{}", server.log());
        thread::sleep(Duration::from_millis(5));
    }
    let binary = root.join("usr/bin/ringdisk");
    let ringdisk = |arguments: &[&str]| {
        let mut command = Command::new(&binary);
        command.args(arguments).env("RUNTIME_DIRECTORY", &run);
        String::from_utf8(checked(&mut command).stdout).unwrap()
    };
    ringdisk(&["attach", "null:1G,name=later"]);
    // As dpkg puts another program in its place.
    let new = folder.join("new");
    fs::copy(&binary, &new).unwrap();
    fs::rename(&new, &binary).unwrap();
    let reloaded = checked(&mut of_the_unit("ExecReload=", root, folder));
    let reply: serde_json::Value = serde_json::from_slice(&reloaded.stdout).unwrap();
    let pid = i32::try_from(reply["pid"].as_u64().unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    assert!(server.ended().unwrap().success(), "{}", server.log());
    assert_eq!(reply["disks"], 2, "{reply}");
    // The same program once more: its configuration is read anew, which has lost a disk.
    fs::write(&added, "").unwrap();
    checked(&mut of_the_unit("ExecReload=", root, folder));
    let listed = ringdisk(&["list", "--json"]);
    assert!(
        listed.contains("later") && !listed.contains("added"),
        "{listed}"
    );
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    while run.join("control.qmp").exists() {
        thread::sleep(Duration::from_millis(5));
    }
    let mut server = start();
    assert!(ringdisk(&["list", "--json"]).contains("later"));
    assert!(server.terminate().unwrap().success(), "{}", server.log());
}

fn systemd_understands_it(root: &Path, folder: &Path) {
    if find_program("systemd-analyze").is_none() {
        return println!("skipped: systemd_understands_it: systemd-analyze is missing");
    }
    let unit = fs::read_to_string(root.join("usr/lib/systemd/system/ringdisk.service")).unwrap();
    let binary = root.join("usr/bin/ringdisk");
    let unit = unit.replace("/usr/bin/ringdisk", &binary.display().to_string());
    let path = folder.join("ringdisk.service");
    fs::write(&path, unit).unwrap();
    let analyze =
        |arguments: &[&str]| checked(Command::new("systemd-analyze").args(arguments).arg(&path));
    let verified = analyze(&[
        "verify",
        "--man=no",
        "--generators=no",
        "--recursive-errors=no",
    ]);
    // What it does not know is ignored with a warning.
    let warnings = String::from_utf8_lossy(&verified.stderr).into_owned();
    assert!(!warnings.contains("ringdisk.service"), "{warnings}");
}

fn checked(command: &mut Command) -> Output {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    output
}
