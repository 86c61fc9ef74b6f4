mod service;

use super::*;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;
use testkit::vm::find_program;

/// Packages the program that was built for the tests, checks the package's contents, and installs it in a guest.
#[test]
fn the_installed_package_serves_disks() {
    const TEST: &str = "the_installed_package_serves_disks";
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
        // Fast to pack, and fast to unpack in an emulated guest.
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
    check_files(&root);
    check_scripts(&control);
    check_allocator(&root, &control);
    check_apparmor(&root, &control);
    service::install_and_use(built, &package, &newer, folder.path());
}

/// The same for two packages that were built before: what `cargo xtask release` runs.
#[test]
fn released_packages_follow_each_other() {
    let package = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let (Some(old), Some(new)) = (
        package("RINGDISK_OLD_PACKAGE"),
        package("RINGDISK_NEW_PACKAGE"),
    ) else {
        // A part of another command, which is not missing here.
        return;
    };
    let test = std::env::current_exe().unwrap();
    let built = test.parent().and_then(Path::parent).unwrap();
    let folder = tempfile::tempdir().unwrap();
    service::install_and_use(built, &old, &new, folder.path());
}

const LIBVIRT_HOOK: &str = "etc/libvirt/hooks/qemu.d/ringdisk";
const APPARMOR_RULE: &str = "etc/apparmor.d/abstractions/libvirt-qemu.d/ringdisk";

fn check_files(root: &Path) {
    for (path, mode) in [
        ("usr/bin/ringdisk", 0o755),
        ("usr/lib/systemd/system/ringdisk.service", 0o644),
        ("usr/lib/sysusers.d/ringdisk.conf", 0o644),
        ("etc/ringdisk/ringdisk.toml", 0o644),
        (APPARMOR_RULE, 0o644),
        (LIBVIRT_HOOK, 0o755),
        ("usr/share/doc/ringdisk/copyright", 0o644),
        ("usr/share/doc/ringdisk/getting-started.md", 0o644),
        ("usr/share/doc/ringdisk/operating/configuration.md", 0o644),
        ("usr/share/man/man1/ringdisk.1.gz", 0o644),
        ("usr/share/man/man1/ringdisk-serve.1.gz", 0o644),
        ("usr/share/bash-completion/completions/ringdisk", 0o644),
        ("usr/share/fish/vendor_completions.d/ringdisk.fish", 0o644),
        ("usr/share/zsh/vendor-completions/_ringdisk", 0o644),
    ] {
        let file = fs::metadata(root.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
        assert_eq!(file.permissions().mode() & 0o7777, mode, "{path}");
    }
}

/// The scripts keep the user's configuration, and an upgrade does not stop running disks.
fn check_scripts(control: &Path) {
    let read = |name: &str| fs::read_to_string(control.join(name)).unwrap();
    let kept = read("conffiles");
    let kept: Vec<_> = kept.lines().collect();
    let rule = format!("/{APPARMOR_RULE}");
    let hook = format!("/{LIBVIRT_HOOK}");
    assert_eq!(
        kept,
        ["/etc/ringdisk/ringdisk.toml", rule.as_str(), hook.as_str()]
    );
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

/// AppArmor accepts the rule, both where libvirt includes its directory and through the line that postinst adds.
fn check_apparmor(root: &Path, control: &Path) {
    if find_program("apparmor_parser").is_none() {
        return println!("skipped: check_apparmor: apparmor_parser is missing");
    }
    let base = root.join("etc/apparmor.d");
    let postinst = fs::read_to_string(control.join("postinst")).unwrap();
    let mut quoted = postinst.split('\'');
    let line = quoted.find(|text| text.starts_with("include if exists"));
    let additions = base.join("local/abstractions/libvirt-qemu");
    fs::create_dir_all(additions.parent().unwrap()).unwrap();
    fs::write(&additions, format!("{}\n", line.unwrap())).unwrap();
    let profile = base.join("profile");
    for include in [
        "abstractions/libvirt-qemu.d",
        "local/abstractions/libvirt-qemu",
    ] {
        fs::write(
            &profile,
            format!("profile vm {{\n  include <{include}>\n}}\n"),
        )
        .unwrap();
        let parse = |option: &str| {
            let mut parser = Command::new("apparmor_parser");
            parser.args(["--skip-kernel-load", "--skip-cache", option, "--base"]);
            checked(parser.args([&base, &profile]))
        };
        parse("--quiet");
        let read = String::from_utf8(parse("--preprocess").stdout).unwrap();
        assert!(read.contains("/run/ringdisk/*.sock rw,"), "{read}");
    }
}

/// The package depends on tcmalloc if the program is linked with it: `cargo xtask test` builds it with tcmalloc, and
/// `cargo test` without.
fn check_allocator(root: &Path, control: &Path) {
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
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    output
}
