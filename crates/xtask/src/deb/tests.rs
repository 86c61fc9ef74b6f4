mod service;

use super::*;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;
use testkit::vm::find_program;

/// The package of the program as the tests have built it has in it what belongs there, and its service is what the unit
/// says.
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
    let version = |number: &str, output: &str| {
        let number = format!("--deb-version={number}");
        // Quick to pack, and quick to unpack where a processor is slow.
        let gzip = ["--compress-type=gz", "--compress-system", "--fast"];
        let options = [&gzip[..], &["--strip", &number]].concat();
        pack(built, profile, &folder.path().join(output), &options).unwrap()
    };
    let (package, newer) = (version("0.1.0-1", "old"), version("0.2.0-1", "new"));

    let (root, control) = (folder.path().join("root"), folder.path().join("control"));
    let deb = |what: &str, to: &Path| {
        checked(Command::new("dpkg-deb").arg(what).arg(&package).arg(to));
    };
    deb("--extract", &root);
    deb("--control", &control);
    has_what_belongs_in_it(&root);
    leaves_the_configuration_and_running_disks_alone(&control);
    needs_the_allocator_that_it_is_linked_with(&root, &control);
    service::is_what_the_unit_says(built, &package, &newer, folder.path());
}

fn has_what_belongs_in_it(root: &Path) {
    for (path, mode) in [
        ("usr/bin/ringdisk", 0o755),
        ("usr/lib/systemd/system/ringdisk.service", 0o644),
        ("usr/lib/sysusers.d/ringdisk.conf", 0o644),
        ("etc/ringdisk/ringdisk.toml", 0o644),
        ("usr/share/doc/ringdisk/copyright", 0o644),
        ("usr/share/doc/ringdisk/getting-started.md", 0o644),
        ("usr/share/doc/ringdisk/operating/configuration.md", 0o644),
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

fn checked(command: &mut Command) -> Output {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    output
}
