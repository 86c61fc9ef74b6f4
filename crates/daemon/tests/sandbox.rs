//! The sandbox of a serving ringdisk: it covers all threads, and permits only what ringdisk needs.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output};

use crate::support::{Disk, content};
use tempfile::TempDir;
use testkit::driver::{Device, DeviceConfig};
use testkit::server::Server;

/// A field of the status of each thread of a process.
fn of_all_threads(server: &Server, field: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    let status = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("status")).unwrap());
    let value = |status: String| {
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        line.unwrap().trim().to_owned()
    };
    status.map(value).collect()
}

struct Setup {
    control: String,
    dir: TempDir,
    disk: Disk,
}

impl Setup {
    fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self {
            control: dir.path().join("control").display().to_string(),
            dir,
            disk: Disk::new(),
        }
    }

    fn serve(&self, options: &str, arguments: &[&str]) -> Server {
        let disk = self.disk.argument(options);
        let mut all = vec![disk.as_str(), "--control", &self.control];
        all.extend(arguments);
        Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &all).unwrap()
    }

    fn attach(&self, file: &Path, socket: &Path) -> Output {
        Command::new(env!("CARGO_BIN_EXE_ringdisk"))
            .arg("attach")
            .arg(format!(
                "file={},socket={}",
                file.display(),
                socket.display()
            ))
            .args(["--control", &self.control])
            .output()
            .unwrap()
    }
}

fn reads(server: &Server) {
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].read(9, 4096).unwrap(), content(9, 4096));
    assert_eq!(device.queues[0].write(9, &content(9, 4096)), 0);
}

#[test]
fn all_threads_are_sandboxed() {
    let bench = Setup::new();
    let server = bench.serve("queues=2", &["--metrics", "127.0.0.1:0"]);
    reads(&server);
    let seccomp = of_all_threads(&server, "Seccomp:");
    let new_privileges = of_all_threads(&server, "NoNewPrivs:");
    let calls = server.wait_for_log(&["sandbox:", "system calls"]);
    if calls.contains("not restricted") {
        println!("skipped: all_threads_are_sandboxed: {calls}");
        return;
    }
    assert!(seccomp.len() > 4, "{seccomp:?}");
    assert!(seccomp.iter().all(|s| s == "2"), "{seccomp:?}");
    assert!(
        new_privileges.iter().all(|n| n == "1"),
        "{new_privileges:?}"
    );
    // chown, dac_override, dac_read_search, fowner, net_bind_service (for the metrics), ipc_lock.
    let allowed = 1u64 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 10 | 1 << 14;
    for field in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"] {
        for set in of_all_threads(&server, field) {
            let set = u64::from_str_radix(&set, 16).unwrap();
            assert_eq!(set & !allowed, 0, "{field} {set:x}");
        }
    }
    // Including a thread that starts later.
    let added = Command::new(env!("CARGO_BIN_EXE_ringdisk"))
        .args(["stats", "--seconds", "0", "--control", &bench.control])
        .output();
    drop(added);
    let seccomp = of_all_threads(&server, "Seccomp:");
    assert!(seccomp.iter().all(|s| s == "2"), "{seccomp:?}");
}

#[test]
fn sandbox_off_restricts_nothing() {
    let bench = Setup::new();
    let server = bench.serve("", &["--sandbox", "off"]);
    reads(&server);
    assert!(of_all_threads(&server, "Seccomp:").iter().all(|s| s == "0"));
    let elsewhere = Disk::new();
    let attached = bench.attach(&elsewhere.file, &elsewhere.socket);
    assert!(attached.status.success(), "{attached:?}");
}

/// A disk beside another can be attached; elsewhere only where the operator allows it.
#[test]
fn disks_are_attached_only_from_allowed_directories() {
    let (bench, elsewhere) = (Setup::new(), Disk::new());
    let beside = bench.disk.file.with_file_name("beside.raw");
    fs::copy(&bench.disk.file, &beside).unwrap();
    let socket = beside.with_extension("sock");
    {
        let server = bench.serve("", &[]);
        let attached = bench.attach(&beside, &socket);
        assert!(attached.status.success(), "{attached:?}");
        let refused = bench.attach(&elsewhere.file, &bench.dir.path().join("s"));
        let error = String::from_utf8_lossy(&refused.stderr).into_owned();
        let files = server.wait_for_log(&["sandbox:", "files"]);
        if files.contains("not restricted") {
            return println!("skipped: disks_are_attached_only_from_allowed_directories: {files}");
        }
        let directory = elsewhere.file.parent().unwrap().display();
        assert!(!refused.status.success());
        assert!(
            error.contains(&format!("--allow-dir {directory}")),
            "{error}"
        );
        // An allowed disk file with a socket path that is not allowed.
        let third = beside.with_file_name("third.raw");
        fs::copy(&beside, &third).unwrap();
        let refused = bench.attach(&third, &elsewhere.socket);
        let error = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            !refused.status.success() && error.contains("--allow-dir"),
            "{error}"
        );
        let replaced = Command::new(env!("CARGO_BIN_EXE_ringdisk"))
            .args(["replace", "beside"])
            .arg(&elsewhere.file)
            .args(["--control", &bench.control])
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&replaced.stderr).into_owned();
        assert!(
            !replaced.status.success() && error.contains("--allow-dir"),
            "{error}"
        );
        reads(&server);
    }
    let directory = elsewhere.file.parent().unwrap().display().to_string();
    let server = bench.serve("", &["--allow-dir", &directory]);
    let attached = bench.attach(&elsewhere.file, &elsewhere.socket);
    assert!(attached.status.success(), "{attached:?}");
    reads(&server);
    let missing = Server::ringdisk(
        env!("CARGO_BIN_EXE_ringdisk"),
        &["null:1M", "--allow-dir", "/there/is/none"],
    );
    let error = missing.err().unwrap().to_string();
    assert!(error.contains("--allow-dir /there/is/none"), "{error}");
}

/// Images may build on files of an `--allow-backing` directory, and no disk may write there.
#[test]
fn directories_of_backing_files_are_read_only() {
    let (bench, templates) = (Setup::new(), Disk::new());
    let directory = templates.file.parent().unwrap().display().to_string();
    let overlay = bench.dir.path().join("overlay.qcow2");
    let create = format!(
        "create -q -f qcow2 -F raw -b {} overlay.qcow2",
        templates.file.display()
    );
    testkit::qemu_img::img(bench.dir.path(), &create);
    let socket = bench.dir.path().join("overlay.sock");
    let image = format!("file={},socket={}", overlay.display(), socket.display());
    let server = bench.serve("", &[&image, "--allow-backing", &directory]);
    let mut device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].read(9, 4096).unwrap(), content(9, 4096));
    let files = server.wait_for_log(&["sandbox:", "files"]);
    if files.contains("not restricted") {
        return println!("skipped: directories_of_backing_files_are_read_only: {files}");
    }
    let other = templates.file.with_file_name("other.raw");
    fs::copy(&templates.file, &other).unwrap();
    let refused = bench.attach(&other, &bench.dir.path().join("s"));
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && error.contains(&format!("--allow-dir {directory}")),
        "{error}"
    );
}

/// A core dump contains no guest memory.
#[test]
fn guest_memory_is_not_dumped() {
    let bench = Setup::new();
    let server = bench.serve("", &[]);
    let _device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    let maps = fs::read_to_string(format!("/proc/{}/smaps", server.pid())).unwrap();
    let (mut guest, mut of_guest) = (false, 0);
    for line in maps.lines() {
        if line.contains("/memfd:guest") {
            guest = true;
        } else if let Some(flags) = line.strip_prefix("VmFlags:")
            && std::mem::take(&mut guest)
        {
            of_guest += 1;
            assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
        }
    }
    assert!(of_guest > 0, "{maps}");
}

#[test]
fn sockets_get_their_configured_owner() {
    let bench = Setup::new();
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: sockets_get_their_configured_owner: needs root");
    }
    let found = |options: &str| {
        let _server = bench.serve(options, &[]);
        let socket = fs::metadata(&bench.disk.socket).unwrap();
        (
            socket.permissions().mode() & 0o777,
            socket.uid(),
            socket.gid(),
        )
    };
    let groups = fs::read_to_string("/etc/group").unwrap();
    let of_qemu = ["qemu", "kvm"].iter().find_map(|name| {
        let line = groups
            .lines()
            .find(|line| line.starts_with(&format!("{name}:")))?;
        line.split(':').nth(2)?.parse().ok()
    });
    match of_qemu {
        Some(group) => assert_eq!(found(""), (0o660, 0, group)),
        None => assert_eq!(found("").1, 0),
    }
    assert_eq!(found("socket-mode=0606"), (0o606, 0, 0));
    assert_eq!(found("socket-group=nogroup"), (0o660, 0, 65534));
    let all = "socket-owner=nobody,socket-group=4,socket-mode=0620";
    assert_eq!(found(all), (0o620, 65534, 4));
    let refused = |options: &str| {
        let disk = bench.disk.argument(options);
        let served = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &[disk]);
        served.err().unwrap().to_string()
    };
    assert!(refused("socket-group=no-such-group").contains("no-such-group"));
    assert!(refused("socket-mode=rw").contains("0660"));
}

#[test]
fn a_socket_that_qemu_cannot_reach_is_announced() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: a_socket_that_qemu_cannot_reach_is_announced: needs root");
    }
    let place = tempfile::tempdir_in("/run").unwrap();
    let outer = place.path().display();
    let disk = place.path().join("a.raw");
    fs::File::create(&disk)
        .and_then(|file| file.set_len(1 << 20))
        .unwrap();
    let log = |mode: u32| {
        fs::set_permissions(place.path(), fs::Permissions::from_mode(mode)).unwrap();
        let disk = disk.display();
        let argument = format!("file={disk},socket={outer}/a.sock,socket-group=nogroup");
        let mut server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &[argument]).unwrap();
        assert!(server.terminate().unwrap().success());
        server.log()
    };
    let closed = log(0o700);
    assert!(
        closed.contains(&format!("'setfacl -m g:nogroup:x {outer}'")),
        "{closed}"
    );
    let open = log(0o711);
    assert!(!open.contains("setfacl"), "{open}");
}

/// Files that only root may open are served by an unprivileged user without root's rights.
#[test]
fn root_files_are_served_by_an_unprivileged_user() {
    let bench = Setup::new();
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: root_files_are_served_by_an_unprivileged_user: needs root");
    }
    fs::set_permissions(&bench.disk.file, fs::Permissions::from_mode(0o600)).unwrap();
    let mut server = bench.serve("queues=2,aio=threads", &["--user", "nobody"]);
    reads(&server);
    for field in ["Uid:", "Gid:"] {
        let all = of_all_threads(&server, field);
        let nobody = |ids: &String| ids.split_whitespace().all(|id| id == "65534");
        assert!(all.iter().all(nobody), "{all:?}");
    }
    let none = |set: &String| u64::from_str_radix(set, 16).unwrap() == 0;
    assert!(of_all_threads(&server, "CapPrm:").iter().all(none));
    assert!(server.terminate().unwrap().success(), "{}", server.log());
    let root = Server::ringdisk(
        env!("CARGO_BIN_EXE_ringdisk"),
        &["null:1M", "--user", "root"],
    );
    assert!(root.err().unwrap().to_string().contains("is root"));
}

/// A path without a directory is one in the working directory.
#[test]
fn relative_paths_are_in_the_working_directory() {
    let setup = Setup::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    fs::copy(&setup.disk.file, setup.dir.path().join("a.raw")).unwrap();
    command.current_dir(setup.dir.path());
    command.args(["serve", "--json", "file=a.raw,name=a,socket=a.sock"]);
    let mut server = Server::ringdisk_command(command).unwrap();
    assert!(setup.dir.path().join("a.sock").exists());
    assert!(server.terminate().unwrap().success());
}
