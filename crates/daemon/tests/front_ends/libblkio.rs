//! QEMU's `virtio-blk-vhost-user` block driver, which uses libblkio.

use std::path::Path;
use std::process::Command;

use testkit::compatibility::Record;
use testkit::qemu::Release;

use crate::support::{DISK_BYTES, Disk, content, serve_all};

const MIB: u64 = 1 << 20;

fn run(release: &Release, program: &str, args: &[&str]) -> String {
    let mut command = Command::new(release.program(program));
    let output = command.args(args).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {text}");
    text.into_owned()
}

/// The driver's writes reach the file, and the driver reads what the file holds.
fn run_on(release: &Release, test: &str) {
    let mut record = Record::new(
        "QEMU's virtio-blk-vhost-user (libblkio)",
        &format!("{} ({})", release.version, release.name),
    );
    let disk = Disk::new();
    let server = serve_all(&[disk.argument("queues=2")]);
    let socket = server.socket().display();
    let served = format!("driver=virtio-blk-vhost-user,path={socket},cache.direct=on");
    let io = |commands: &[&str]| {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let args: Vec<_> = ["--image-opts", &served]
            .into_iter()
            .chain(commands)
            .collect();
        run(release, "qemu-io", &args);
    };
    let local = |path: &Path| {
        let path = path.display();
        format!("driver=raw,file.driver=file,file.filename={path},file.locking=off")
    };
    let compare = |path: &Path| {
        let text = run(
            release,
            "qemu-img",
            &["compare", "--image-opts", &served, &local(path)],
        );
        assert!(text.contains("identical"), "{text}");
    };

    record.step("qemu-img compare", || compare(&disk.file));
    record.step("qemu-io write, read", || {
        io(&[
            "write -P 0x5a 1M 2M",
            "write -P 0xa5 5121k 3584",
            "read -P 0x5a 1M 2M",
            "flush",
        ]);
        assert_eq!(
            disk.bytes(2 * MIB / 512, MIB as usize),
            [0x5a; MIB as usize]
        );
        assert_eq!(disk.bytes(5121 * 2, 3584), [0xa5; 3584]);
        assert_eq!(
            disk.bytes(8 * MIB / 512, 4096),
            content(8 * MIB / 512, 4096)
        );
        io(&["read -P 0xa5 5121k 3584", "read -P 0x5a 1M 2M"]);
    });
    record.step("many requests at a time", || {
        let at = |n: u64| 12 * MIB + n * 64 * 1024;
        let writes = (0..32).map(|n| format!("aio_write -P {} {} 64k", n + 1, at(n)));
        let commands: Vec<_> = writes.chain(["aio_flush".into()]).collect();
        io(&commands.iter().map(String::as_str).collect::<Vec<_>>());
        for n in 0..32 {
            assert_eq!(disk.bytes(at(n) / 512, 65536), [n as u8 + 1; 65536]);
        }
    });
    record.step("write zeroes, discard", || {
        io(&[
            "write -z 1M 64k",
            "write -z -u 2M 64k",
            "discard 4M 1M",
            "flush",
        ]);
        assert_eq!(disk.bytes(MIB / 512, 65536), [0; 65536]);
        assert_eq!(disk.bytes(2 * MIB / 512, 65536), [0; 65536]);
    });
    record.step("qemu-img convert, to it and from it", || {
        let other = disk.file.with_file_name("other.raw");
        std::fs::write(&other, content(3, DISK_BYTES as usize)).unwrap();
        let there = ["convert", "-n", "--image-opts", "--target-image-opts"];
        run(
            release,
            "qemu-img",
            &[&there[..], &[&local(&other), &served]].concat(),
        );
        compare(&other);
        assert_eq!(
            std::fs::read(&disk.file).unwrap(),
            content(3, DISK_BYTES as usize)
        );
    });
    println!("{test}: QEMU {}", release.version);
}

#[test]
fn qemu_io_and_qemu_img() {
    let test = "qemu_io_and_qemu_img";
    for name in ["debian-13", "debian-unstable"] {
        match Release::find(name) {
            Ok(release) => run_on(&release, test),
            Err(error) => println!("skipped: {test}: {error:#}"),
        }
    }
}
