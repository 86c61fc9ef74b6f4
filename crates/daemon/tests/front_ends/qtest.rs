//! QEMU's own test of vhost-user-blk servers, which drives the device of a QEMU that runs no guest.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use testkit::unpacked::{QTEST, QTEST_RELEASE, Unpacked};

/// The test starts this as qemu-storage-daemon. Each of its exports has a listening socket, as a descriptor: ringdisk makes
/// its own at the same path.
const SERVER: &str = r#"#!/bin/sh
set -eu
disks=
for word; do
    case $word in
    driver=file,node-name=*) file=${word##*filename=} ;;
    type=vhost-user-blk,*)
        id=${word##*,id=} fd=${word##*addr.str=} queues=${word##*num-queues=}
        inode=$(readlink "/proc/$$/fd/${fd%%,*}" | tr -cd 0-9)
        socket=$(awk -v inode="$inode" '$7 == inode { print $8; exit }' /proc/net/unix)
        rm "$socket"
        disks="$disks name=${id%%,*},file=$PWD/$file,format=raw,queues=$queues,socket=$socket"
        ;;
    esac
done
exec "$RINGDISK" serve $disks >> ringdisk.log 2>&1
"#;

/// The test starts this as QEMU. Its sockets are ready when ringdisk listens beside the test.
const QEMU: &str = r#"#!/bin/sh
for word; do
    case $word in
    socket,id=char*)
        socket=${word##*,path=}
        until [ "$(grep -c "00010000 .* $socket\$" /proc/net/unix)" -ge 2 ]; do sleep 0.05; done
        ;;
    esac
done
exec "$QTEST_QEMU" -nodefaults -L /usr/share/seabios -L /usr/share/qemu "$@"
"#;

/// The names of its tests, of which some need a second disk or several queues.
const CASES: [&str; 6] = [
    "basic",
    "hotplug",
    "idx",
    "indirect",
    "multiqueue",
    "nxvirtq",
];

#[test]
fn qemus_own_cases_pass() {
    let qtest = match Unpacked::find(QTEST, QTEST_RELEASE) {
        Ok(qtest) => qtest,
        Err(e) => {
            println!("skipped: qemus_own_cases_pass: {e}");
            return;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let script = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        path
    };
    let server = script("server", SERVER);
    let qemu = script("qemu-system-x86_64", QEMU); // the test reads the architecture from the name
    let run = |arguments: &[&str]| {
        let mut command = Command::new(qtest.program("qos-test"));
        command.args(arguments).current_dir(folder.path());
        command
            .env("TMPDIR", folder.path())
            .env("RUNTIME_DIRECTORY", folder.path());
        command
            .env("QTEST_QEMU_BINARY", &qemu)
            .env("QTEST_QEMU", qtest.program("qemu-system-x86_64"));
        command.env("QTEST_QEMU_STORAGE_DAEMON_BINARY", &server);
        let output = command
            .env("RINGDISK", Path::new(env!("CARGO_BIN_EXE_ringdisk")))
            .output()
            .unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        (output.status.success(), text.into_owned())
    };

    let (listed, text) = run(&["-l"]);
    assert!(listed, "{text}");
    let is_ours = |line: &&str| line.starts_with('/') && line.contains("/vhost-user-blk");
    let paths: Vec<&str> = text.lines().filter(is_ours).collect();
    let mut names: Vec<_> = paths
        .iter()
        .filter_map(|path| path.rsplit('/').next())
        .collect();
    names.sort();
    assert_eq!(names, CASES, "{text}");

    let arguments: Vec<&str> = paths.iter().flat_map(|path| ["-p", *path]).collect();
    let (passed, text) = run(&arguments);
    let log = fs::read_to_string(folder.path().join("ringdisk.log")).unwrap_or_default();
    assert!(passed, "{text}\n{log}");
    for path in paths {
        let is_result = |line: &str| line.starts_with("ok ") && line.ends_with(path);
        assert!(text.lines().any(is_result), "{path}: {text}\n{log}");
    }
}
