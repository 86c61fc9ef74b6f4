//! Sockets of a ringdisk that root starts and that then becomes another user, at their default place.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::process::Command;

use testkit::driver::{Device, DeviceConfig};
use testkit::server::Server;

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
    for name in ["v.raw", "away"] {
        fs::write(path(name), content(0, 1 << 20)).unwrap();
        chown(path(name), Some(NOBODY), None).unwrap();
    }
    let place = dir.path().display();
    let (control, config) = (path("c.qmp"), path("ringdisk.toml"));
    let write = |cache: &str| {
        let text = format!(
            "user = \"nobody\"\ncontrol = \"{place}/c.qmp\"\n[[disk]]\nfile = \"{place}/v.raw\"\ncache = \"{cache}\"\n\
             [[disk]]\nfile = \"{place}/q.raw\"\n"
        );
        fs::write(&config, text).unwrap();
    };
    write("none");
    let mut command = Command::new("unshare");
    let inside = "mount --make-rprivate / && mount -t tmpfs none /run && exec \"$0\" serve --json --config \"$1\"";
    command.args(["-m", "sh", "-c", inside, env!("CARGO_BIN_EXE_ringdisk")]);
    command.arg(&config).env_remove("RUNTIME_DIRECTORY");
    let mut server = Server::ringdisk_command(command).unwrap();
    let socket = |name: &str| {
        let pid = server.pid();
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
    let mut device = Device::connect(socket("v"), &DeviceConfig::default()).unwrap();
    fs::rename(path("away"), path("q.raw")).unwrap();
    assert_eq!(reload().code, Some(0));
    server.wait_for_log(&["q.sock", "directory of that user", "restart"]);
    if has_qemu {
        server.wait_for_log(&["WARN", "user nobody is not a member of group"]);
    }

    // A disk that would need a new socket is left as it is.
    write("writeback");
    reload().assert_fails(1, &["v.sock", "choose a directory"]);
    verify(&mut device.queues[0]);
    write("none");
    fs::remove_file(socket("v")).unwrap();
    let unreachable = reload();
    assert!(
        unreachable.out.contains("cannot be created again"),
        "{unreachable:?}"
    );
    verify(&mut device.queues[0]);
    drop(device);
    assert!(server.terminate().unwrap().success(), "{}", server.log());
}
