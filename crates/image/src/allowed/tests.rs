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
