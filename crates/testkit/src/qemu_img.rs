//! qemu-img and qemu-io, the reference for what is correct.

use std::ops::Range;
use std::path::Path;
use std::process::Command;

use serde::Deserialize;

/// Whether qemu-img is installed; if not, prints that the test is skipped.
pub fn is_there(test: &str) -> bool {
    let found = Command::new("qemu-img").arg("--version").output();
    let found = found.is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: {test}: there is no qemu-img");
    }
    found
}

fn command(program: &str, args: &[&str], directory: &Path) -> (Option<i32>, String) {
    let output = Command::new(program)
        .args(args)
        .current_dir(directory)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text.into_owned())
}

/// Runs `qemu-img` with these words as arguments, in this directory.
pub fn img(directory: &Path, args: &str) {
    let args: Vec<&str> = args.split_whitespace().collect();
    let (code, text) = command("qemu-img", &args, directory);
    assert_eq!(code, Some(0), "qemu-img {args:?}: {text}");
}

/// Runs `qemu-io` on a file with these commands.
pub fn io(directory: &Path, file: &str, options: &[&str], commands: &[String]) {
    let mut args = options.to_vec();
    args.push(file);
    for command in commands {
        args.extend(["-c", command.as_str()]);
    }
    let (code, text) = command("qemu-io", &args, directory);
    assert_eq!(code, Some(0), "qemu-io {args:?}: {text}");
}

/// Asserts that QEMU is refused the lock that it needs to write to a file.
pub fn is_locked(directory: &Path, file: &str, format: &str) {
    let args = ["-f", format, file, "-c", "write -q 0 512"];
    let (code, text) = command("qemu-io", &args, directory);
    let refused = code != Some(0) && text.contains("lock");
    assert!(refused, "{file} could be written: {code:?} {text}");
}

/// Checks an image: no errors, and no leaks unless they are allowed.
pub fn check(directory: &Path, file: &str, leaks: bool) {
    let (code, text) = command("qemu-img", &["check", "-f", "qcow2", file], directory);
    let fine = code == Some(0) || leaks && code == Some(3);
    assert!(fine, "qemu-img check {file}: {code:?} {text}");
}

/// The exit status of `qemu-img check`.
pub fn check_code(directory: &Path, file: &str) -> Option<i32> {
    command("qemu-img", &["check", "-f", "qcow2", file], directory).0
}

/// The content of a disk, as qemu-img reads it.
pub fn content(directory: &Path, file: &str, format: &str) -> Vec<u8> {
    img(
        directory,
        &format!("convert -f {format} -O raw {file} content.out"),
    );
    let out = directory.join("content.out");
    let content = std::fs::read(&out).unwrap();
    std::fs::remove_file(out).unwrap();
    content
}

/// The ranges of a disk that are data in this image itself, not in its backing files.
pub fn data(directory: &Path, file: &str) -> Vec<Range<u64>> {
    #[derive(Deserialize)]
    struct Extent {
        start: u64,
        length: u64,
        depth: u64,
        data: bool,
    }
    let args = ["map", "--output=json", "-f", "qcow2", file];
    let (code, text) = command("qemu-img", &args, directory);
    assert_eq!(code, Some(0), "qemu-img map {file}: {text}");
    let extents: Vec<Extent> = serde_json::from_str(&text).unwrap();
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for extent in extents.iter().filter(|e| e.depth == 0 && e.data) {
        let range = extent.start..extent.start + extent.length;
        match ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => ranges.push(range),
        }
    }
    ranges
}
