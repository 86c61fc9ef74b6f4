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

/// The size of a file that holds any content of a qcow2 disk of `size` bytes with these options.
pub fn fully_allocated_size(options: &str, size: u64) -> u64 {
    let size = size.to_string();
    let args = ["measure", "-O", "qcow2", "-o", options, "--size", &size];
    let (code, text) = command("qemu-img", &args, Path::new("/"));
    assert_eq!(code, Some(0), "qemu-img {args:?}: {text}");
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix("fully allocated size: "));
    line.unwrap().parse().unwrap()
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

/// The ranges of a disk that are dirty in a bitmap that is stored in its image, as QEMU reads it.
pub fn dirty(directory: &Path, file: &str, bitmap: &str) -> Vec<Range<u64>> {
    #[derive(Deserialize)]
    struct Extent {
        start: u64,
        length: u64,
        data: bool,
    }
    let socket = directory.join("nbd");
    let socket = socket.to_str().expect("a path of a test");
    let options = ["-r", "-f", "qcow2", "--fork", "--pid-file", "nbd.pid"];
    let serve = [&options[..], &["-B", bitmap, "-k", socket, file]].concat();
    let (code, text) = command("qemu-nbd", &serve, directory);
    assert_eq!(code, Some(0), "qemu-nbd {serve:?}: {text}");
    let pid = std::fs::read_to_string(directory.join("nbd.pid")).expect("qemu-nbd writes it");
    let nbd = format!(
        "driver=nbd,server.type=unix,server.path={socket},x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}"
    );
    let args = ["map", "--output=json", "--image-opts", &nbd];
    let (code, text) = command("qemu-img", &args, directory);
    assert_eq!(code, Some(0), "qemu-img map {nbd}: {text}");
    let extents: Vec<Extent> = serde_json::from_str(&text).expect("qemu-img prints JSON");
    // It exits when its client has left, and has the image locked until then.
    while Path::new("/proc").join(pid.trim()).exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // Dirty parts are shown as holes.
    let dirty = extents.into_iter().filter(|extent| !extent.data);
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for Extent { start, length, .. } in dirty {
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end += length,
            _ => ranges.push(start..start + length),
        }
    }
    ranges
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
