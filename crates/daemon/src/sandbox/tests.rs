use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::mpsc;
use std::thread;

use super::*;

/// Runs the next test in a process of its own, because a sandbox cannot be left.
#[test]
fn sandbox_refuses_everything_else() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "sandbox::tests::inside",
            "--exact",
            "--ignored",
            "--nocapture",
        ])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success());
    assert!(text.contains("1 passed"), "it was not run");
    if let Some(skipped) = text.lines().find(|line| line.starts_with("skipped")) {
        println!("{skipped}");
    } else {
        assert!(text.contains("all was refused"));
    }
}

#[test]
#[ignore = "for a process of its own; the test above runs it"]
#[expect(unsafe_code, reason = "to ask for memory that can be executed")]
fn inside() {
    let (mine, others) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let disk = mine.path().join("d.raw");
    let secret = others.path().join("secret.raw");
    for file in [&disk, &secret] {
        fs::write(file, [7; 512]).unwrap();
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // A thread that runs before the seal, as I/O threads do.
    let (go, wait) = mpsc::channel::<()>();
    let options = SandboxOptions {
        mode: Mode::On,
        ..SandboxOptions::default()
    };
    let spec: DiskSpec = format!("file={},socket={}/s", disk.display(), mine.path().display())
        .parse()
        .unwrap();
    let sandbox = match Sandbox::enter(&options, None, &[spec], &[], &[], &[]) {
        Err(e @ SandboxError::Missing(..)) => return println!("skipped: {e}"),
        entered => entered.unwrap(),
    };
    let open_before = File::open(&disk).unwrap();
    let earlier = thread::spawn(move || {
        wait.recv().unwrap();
        (TcpStream::connect(address), File::open("/etc/passwd"))
    });
    sandbox.seal().unwrap();

    serving_disks_still_works(&sandbox, &disk, mine.path());
    drop(open_before);
    let outside = sandbox.check_file(&FileSpec::Path(secret.clone()));
    assert!(outside.unwrap_err().to_string().contains("--allow-dir"));
    assert!(sandbox.check_socket(&others.path().join("t")).is_err());

    // Everything else is refused.
    let refused = |what: &str, kind: Option<ErrorKind>| {
        assert_eq!(kind, Some(ErrorKind::PermissionDenied), "{what}");
    };
    let open = |path: &Path| File::open(path).err().map(|e| e.kind());
    refused("a disk elsewhere", open(&secret));
    refused("a file of the system", open(Path::new("/etc/passwd")));
    refused(
        "the environment of another process",
        open(Path::new("/proc/1/environ")),
    );
    let create = |path: &Path| File::create(path).err().map(|e| e.kind());
    refused("a new file", create(&others.path().join("new")));
    refused(
        "a new file in the directory of a disk",
        create(&mine.path().join("new")),
    );
    refused(
        "a link away",
        fs::hard_link(&disk, mine.path().join("l"))
            .err()
            .map(|e| e.kind()),
    );
    let started = Command::new("/bin/true").status();
    refused("a program", started.err().map(|e| e.kind()));
    let connected = TcpStream::connect(address);
    refused("a TCP connection", connected.err().map(|e| e.kind()));
    let bound = TcpListener::bind("127.0.0.1:0");
    refused("a TCP port", bound.err().map(|e| e.kind()));
    let bound = UdpSocket::bind("127.0.0.1:0");
    refused("a UDP port", bound.err().map(|e| e.kind()));
    let parent = rustix::process::getppid().unwrap();
    let killed = rustix::process::test_kill_process(parent);
    assert_eq!(
        killed,
        Err(rustix::io::Errno::PERM),
        "a signal to another process"
    );
    // SAFETY: memory of the kernel's choice, if it were given.
    let mapped = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            4096,
            rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::EXEC,
            rustix::mm::MapFlags::PRIVATE,
        )
    };
    assert_eq!(mapped.err(), Some(rustix::io::Errno::PERM), "new code");
    go.send(()).unwrap();
    let (connected, opened) = earlier.join().unwrap();
    refused(
        "a TCP connection of an earlier thread",
        connected.err().map(|e| e.kind()),
    );
    refused(
        "a file of an earlier thread",
        opened.err().map(|e| e.kind()),
    );
    println!("all was refused");
}

fn serving_disks_still_works(sandbox: &Sandbox, disk: &Path, directory: &Path) {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(disk)
        .unwrap();
    file.write_all(&[8; 512]).unwrap();
    file.sync_all().unwrap();
    file.set_len(1024).unwrap();
    UnixStream::pair().unwrap();
    thread::spawn(|| fs::read_dir("/sys/devices").unwrap().count())
        .join()
        .unwrap();
    assert_eq!(sandbox.check_file(&FileSpec::Path(disk.into())), Ok(()));
    assert_eq!(sandbox.check_socket(&directory.join("t")), Ok(()));
}

#[test]
fn modes_are_parsed() {
    assert_eq!("auto".parse(), Ok(Mode::Auto));
    assert!("yes".parse::<Mode>().unwrap_err().contains("auto, on, off"));
}

/// A directory that the operator has named and that is not there does not open all others.
#[test]
fn a_missing_directory_allows_no_others() {
    let paths = |configured: &[&str]| {
        let options = SandboxOptions {
            configured: configured.iter().map(Into::into).collect(),
            ..SandboxOptions::default()
        };
        super::paths(&options, None, &[], &[], &[], &[]).unwrap()
    };
    assert!(paths(&[]).anywhere);
    assert!(paths(&["/"]).anywhere);
    assert!(!paths(&["/there/is/none"]).anywhere);
}
