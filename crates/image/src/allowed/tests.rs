use std::fs;
use std::os::unix::fs::symlink;

use super::*;

struct Fixture {
    root: tempfile::TempDir,
}

impl Fixture {
    /// Makes `images/vm` with `a`, `images/base` with `b`, and `secret` next to `images`.
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        for directory in ["images/vm", "images/base"] {
            fs::create_dir_all(root.path().join(directory)).unwrap();
        }
        for file in ["images/vm/a", "images/base/b", "secret"] {
            fs::write(root.path().join(file), file).unwrap();
        }
        Self { root }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path().canonicalize().unwrap().join(path)
    }

    /// Opens a file that an image in `images/vm` names; returns its content, which is its path.
    fn open(&self, allowed: &[&str], name: &str) -> Result<String, String> {
        let directories =
            AllowedDirectories::new(allowed.iter().map(|path| self.path(path))).unwrap();
        let passed = directories.open_reference(&self.path("images/vm"), name, false);
        let passed = passed.map_err(|error| error.to_string())?;
        let mut text = String::new();
        io::Read::read_to_string(&mut fs::File::from(passed.fd), &mut text).unwrap();
        Ok(text)
    }
}

#[test]
fn names_resolve_below_allowed_directories() {
    let fixture = Fixture::new();
    let own = ["images/vm"];
    assert_eq!(fixture.open(&own, "a").unwrap(), "images/vm/a");
    assert_eq!(fixture.open(&own, "file:./a").unwrap(), "images/vm/a");
    let absolute = fixture.path("images/vm/a");
    assert_eq!(
        fixture.open(&own, absolute.to_str().unwrap()).unwrap(),
        "images/vm/a"
    );
    for allowed in [
        &["images"][..],
        &["images/base"],
        &["images/vm", "images/base"],
    ] {
        assert_eq!(fixture.open(allowed, "../base/b").unwrap(), "images/base/b");
    }
    symlink("../base/b", fixture.path("images/vm/link")).unwrap();
    assert_eq!(fixture.open(&["images"], "link").unwrap(), "images/base/b");
    // What counts is the target of a link, not how the link is written.
    symlink(
        fixture.path("images/base/b"),
        fixture.path("images/vm/absolute"),
    )
    .unwrap();
    for allowed in [&["images"][..], &["images/vm", "images/base"]] {
        assert_eq!(fixture.open(allowed, "absolute").unwrap(), "images/base/b");
    }
    let error = fixture.open(&own, "absolute").unwrap_err();
    let target = fixture.path("images/base/b").display().to_string();
    assert!(
        error.contains(&format!("which leads to '{target}'")),
        "{error}"
    );
}

#[test]
fn paths_outside_are_refused() {
    let fixture = Fixture::new();
    symlink("../../secret", fixture.path("images/vm/relative")).unwrap();
    symlink(fixture.path("secret"), fixture.path("images/vm/absolute")).unwrap();
    symlink("..", fixture.path("images/vm/up")).unwrap();
    let secret = fixture.path("secret");
    for name in [
        "../../secret",
        "relative",
        "absolute",
        "up/../secret",
        "../base/b",
        "/etc/passwd",
        secret.to_str().unwrap(),
        "../vm/../../secret",
    ] {
        let error = fixture.open(&["images/vm"], name).unwrap_err();
        assert!(error.contains("none of the directories"), "{name}: {error}");
    }
}

#[test]
fn only_files_and_devices_are_opened() {
    let fixture = Fixture::new();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        fixture.path("images/vm/pipe"),
        FileType::Fifo,
        Mode::RUSR,
        0,
    )
    .unwrap();
    for (name, says) in [
        ("nbd://host/disk", "not a file"),
        ("json:{\"driver\":\"file\"}", "not a file"),
        ("rbd:pool/disk", "not a file"),
        ("", "not a file"),
        ("pipe", "neither a file"),
        (".", "none of the directories"),
        ("missing", "restore the file"),
    ] {
        let error = fixture.open(&["images/vm"], name).unwrap_err();
        assert!(error.contains(says), "{name}: {error}");
    }
    // A colon after a slash is part of a name.
    fs::write(fixture.path("images/vm/a:b"), "colon").unwrap();
    assert_eq!(fixture.open(&["images/vm"], "./a:b").unwrap(), "colon");
}

/// As in `/dev/VG`, which the operator names, and whose entries lead to `../dm-3`.
#[test]
fn links_of_root_lead_to_devices() {
    use std::os::unix::fs::{PermissionsExt, chown};
    let test = "links_of_root_lead_to_devices";
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: {test}: needs root");
    }
    let fixture = Fixture::new();
    let (dev, vg) = (fixture.path("images"), fixture.path("images/vm"));
    // An unused loop device can be opened.
    let (kind, mode) = (FileType::BlockDevice, Mode::RUSR | Mode::WUSR);
    let number = rustix::fs::makedev(7, 255);
    rustix::fs::mknodat(rustix::fs::CWD, dev.join("dm-3"), kind, mode, number).unwrap();
    if let Err(e) = fs::File::open(dev.join("dm-3")) {
        return println!("skipped: {test}: {e}");
    }
    symlink("../dm-3", vg.join("lv")).unwrap();
    symlink("../../secret", vg.join("file")).unwrap();
    symlink("../dm-3", vg.join("tenants")).unwrap();
    rustix::fs::chownat(
        rustix::fs::CWD,
        vg.join("tenants"),
        Some(rustix::fs::Uid::from_raw(65534)),
        None,
        rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
    )
    .unwrap();
    let open = |directories: AllowedDirectories, name: &str| {
        let opened = directories.open_reference(&vg, name, false);
        opened
            .map(|opened| opened.identity)
            .map_err(|e| e.to_string())
    };
    let named = || AllowedDirectories::new([&vg]).unwrap();
    assert_eq!(open(named(), "lv"), Ok((u64::MAX, number)));
    let path = vg.join("lv").display().to_string();
    assert_eq!(open(named(), &path), Ok((u64::MAX, number)));
    for name in ["file", "tenants", "../dm-3"] {
        let refused = open(named(), name).unwrap_err();
        assert!(refused.contains("none of the directories"), "{refused}");
    }
    // Not by default, in the directory of an image.
    let beside = AllowedDirectories::of_image(&vg.join("a")).unwrap();
    assert!(open(beside, "lv").is_err());
    // Nor where others can make links.
    fs::set_permissions(&vg, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(open(named(), "lv").is_err());
    fs::set_permissions(&vg, fs::Permissions::from_mode(0o755)).unwrap();
    chown(&vg, Some(65534), None).unwrap();
    assert!(open(named(), "lv").is_err());
}
