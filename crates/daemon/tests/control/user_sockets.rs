//! Sockets of a ringdisk that root starts and that then becomes another user, at their default place.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::driver::{Device, DeviceConfig};
use testkit::server::{Server, wait_for_exit};

use super::server::{CommandOutput, verify};
use crate::support::content;

const NOBODY: u32 = 65534;

/// With a `/run` of its own, as at the first start of a host.
#[test]
fn a_user_keeps_the_place_of_its_sockets() {
    let test = "a_user_keeps_the_place_of_its_sockets";
    let mounts = || {
        let tried = Command::new("unshare").args(["-m", "true"]).status();
        tried.is_ok_and(|status| status.success())
    };
    if !rustix::process::geteuid().is_root() || !mounts() {
        return println!("skipped: {test}: needs root, who may mount");
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["v.raw", "away", "late"] {
        fs::write(path(name), content(0, 1 << 20)).unwrap();
        chown(path(name), Some(NOBODY), None).unwrap();
    }
    let place = dir.path().display();
    let (control, config) = (path("c.qmp"), path("ringdisk.toml"));
    let write = |cache: &str| {
        let text = format!(
            "user = \"nobody\"\ncontrol = \"{place}/c.qmp\"\n[[disk]]\nfile = \"{place}/v.raw\"\ncache = \"{cache}\"\n\
             [[disk]]\nfile = \"{place}/q.raw\"\n[[disk]]\nfile = \"{place}/r.raw\"\n"
        );
        fs::write(&config, text).unwrap();
    };
    write("none");
    let mut command = Command::new("unshare");
    let inside = "mount --make-rprivate / && mount -t tmpfs none /run && exec \"$0\" serve --json --config \"$1\"";
    command.args(["-m", "sh", "-c", inside, env!("CARGO_BIN_EXE_ringdisk")]);
    command.arg(&config).env_remove("RUNTIME_DIRECTORY");
    let mut server = Server::ringdisk_command(command).unwrap();
    let first = server.pid();
    let socket = |pid: u32, name: &str| {
        // The process has mounted it.
        let root = PathBuf::from(format!("/proc/{pid}")).join("root");
        root.join(format!("run/ringdisk/{name}.sock"))
    };
    let groups = fs::read_to_string("/etc/group").unwrap();
    let has_qemu = ["qemu:", "kvm:"]
        .iter()
        .any(|name| groups.lines().any(|line| line.starts_with(name)));
    let reload = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        CommandOutput::of(command.arg("reload").arg("--control").arg(&control))
    };

    // The directory is root's, as it may be that of others. An absent disk comes back, and its socket is where VMs look for it.
    let mut device = Device::connect(socket(first, "v"), &DeviceConfig::default()).unwrap();
    for name in ["q", "r"] {
        let refused = UnixStream::connect(socket(first, name)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    }
    fs::rename(path("away"), path("q.raw")).unwrap();
    assert_eq!(reload().code, Some(0));
    server.wait_for_log(&["disk q: can be served now, and is"]);
    drop(Device::connect(socket(first, "q"), &DeviceConfig::default()).unwrap());
    if has_qemu {
        server.wait_for_log(&["WARN", "user nobody is not a member of group"]);
    }

    // A disk that would need a new socket is left as it is.
    write("writeback");
    reload().assert_fails(1, &["v.sock", "choose a directory"]);
    verify(&mut device.queues[0]);
    write("none");
    fs::remove_file(socket(first, "v")).unwrap();
    let unreachable = reload();
    assert!(
        unreachable.out.contains("cannot be created again"),
        "{unreachable:?}"
    );
    verify(&mut device.queues[0]);
    drop(device);

    // The process of an upgrade makes them, too. It sees what the command sees.
    let mut upgrade = Command::new("nsenter");
    upgrade.args(["-t", &first.to_string(), "-m"]);
    upgrade.args([
        env!("CARGO_BIN_EXE_ringdisk"),
        "upgrade",
        "--json",
        "--control",
    ]);
    let upgraded = CommandOutput::of(upgrade.arg(&control));
    assert_eq!(upgraded.code, Some(0), "{upgraded:?}");
    let reply: Value = serde_json::from_str(&upgraded.out).unwrap();
    let next = Running(reply["pid"].as_u64().unwrap() as u32);
    assert!(server.ended().unwrap().success(), "{}", server.log());
    fs::rename(path("late"), path("r.raw")).unwrap();
    assert_eq!(reload().code, Some(0));
    server.wait_for_log(&["disk r: can be served now, and is"]);
    let mut device = Device::connect(socket(next.0, "r"), &DeviceConfig::default()).unwrap();
    verify(&mut device.queues[0]);
}

/// A process that is no child.
struct Running(u32);

impl Drop for Running {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.0 as i32);
        if pid.is_some_and(|pid| kill_process(pid, Signal::KILL).is_ok()) {
            wait_for_exit(self.0);
        }
    }
}
