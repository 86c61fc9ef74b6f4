//! Errors of QMP commands: their class, and a description that names the object and the reason.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use testkit::driver::Device;
use testkit::server::Server;

use super::qemu_client::{export, file_node, two_queues};
use super::server::{Controlled, QemuClient, verify};
use crate::support::serve_all;

const MIB: u64 = 1 << 20;

const GENERIC: &str = "GenericError";
const NOT_FOUND: &str = "DeviceNotFound";

/// A ringdisk with a disk: node `vm1`, export `e1`, I/O thread `io1` and throttle group `g1`.
struct Setup {
    ringdisk: Controlled,
    qemu: QemuClient,
    file: PathBuf,
    /// The file of a second disk, which is not in use.
    other: PathBuf,
    socket: PathBuf,
    not_a_socket: PathBuf,
    /// Serves locked.raw at holder.sock.
    _holder: Server,
}

#[test]
fn errors_have_a_class_and_a_reason() {
    let Some(mut setup) = Setup::new("errors_have_a_class_and_a_reason") else {
        return;
    };
    setup.refuse(
        "no-such-command",
        "CommandNotFound",
        [(json!({}), &["no-such-command"])],
    );
    setup.node_errors();
    setup.export_errors();
    setup.resize_and_throttle_errors();
    setup.object_errors();
    setup.ringdisk_errors();
    // On a node of its own, errors of the export itself show.
    let second = file_node("vm2", &setup.other);
    setup.qemu.call("blockdev-add", second);
    let valid = export("e2", "vm2", &setup.path("vm2.sock"));
    setup.export_option_errors(&valid);
    setup.assert_unchanged(valid);
}

impl Setup {
    fn new(test: &str) -> Option<Self> {
        let ringdisk = Controlled::start(&[]);
        let mut qemu = QemuClient::connect(test, &ringdisk.control)?;
        let file = ringdisk.file("vm1.raw", 16 * MIB);
        let other = ringdisk.file("vm2.raw", 16 * MIB);
        let socket = ringdisk.path("vm1.sock");
        qemu.call("blockdev-add", file_node("vm1", &file));
        qemu.call("block-export-add", export("e1", "vm1", &socket));
        qemu.call("object-add", json!({ "qom-type": "iothread", "id": "io1" }));
        qemu.call("object-add", group());
        let holder = serve_all(&[format!(
            "file={},socket={}",
            ringdisk.file("locked.raw", MIB).display(),
            ringdisk.path("holder.sock").display()
        )]);
        let not_a_socket = ringdisk.path("not-a-socket");
        fs::write(&not_a_socket, "").unwrap();
        Some(Self {
            ringdisk,
            qemu,
            file,
            other,
            socket,
            not_a_socket,
            _holder: holder,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.ringdisk.path(name)
    }

    /// Expects an error of this class for each of the arguments, with all of the words in its description.
    fn refuse<'a, W: AsRef<[&'a str]>>(
        &mut self,
        command: &str,
        class: &str,
        cases: impl IntoIterator<Item = (Value, W)>,
    ) {
        for (arguments, words) in cases {
            let words = words.as_ref();
            self.qemu.assert_refused(command, arguments, class, words);
        }
    }

    fn node_errors(&mut self) {
        let nobody = json!({ "node-name": "nobody" });
        self.refuse("blockdev-del", NOT_FOUND, [(nobody, ["nobody"])]);
        let cases = [
            (json!({ "node-name": 7 }), &["node-name", "string"][..]),
            (json!({}), &["node-name", "missing"]),
            (json!({ "node-name": "vm1", "x": 1 }), &["'x'"]),
            (json!({ "node-name": "vm1" }), &["vm1", "in use", "e1"]),
        ];
        self.refuse("blockdev-del", GENERIC, cases);

        let (locked, absent) = (self.path("locked.raw"), self.path("absent.raw"));
        let null = |name: &str| json!({ "driver": "null-co", "node-name": name });
        let cases = [
            (file_node("vm1", &self.other), &["vm1", "already"][..]),
            (
                file_node("again", &self.file),
                &["vm1.raw", "disk 'vm1'", "detach"],
            ),
            (
                file_node("held", &locked),
                &["locked.raw", "another process"],
            ),
            (file_node("none", &absent), &["absent.raw", "no such file"]),
            (
                json!({ "driver": "vmdk", "node-name": "q" }),
                &["driver", "vmdk"],
            ),
            (null("9"), &["node-name"]),
            (with(&null("n"), json!({ "size": 7 })), &["size"]),
            (json!({ "driver": "null-co" }), &["node-name"]),
        ];
        self.refuse("blockdev-add", GENERIC, cases);
        let raw = json!({ "driver": "raw", "node-name": "r", "file": "nobody" });
        self.refuse("blockdev-add", NOT_FOUND, [(raw, ["nobody"])]);
    }

    fn export_errors(&mut self) {
        let nobody = export("e2", "nobody", &self.socket);
        self.refuse("block-export-add", NOT_FOUND, [(nobody, ["nobody"])]);
        let other = self.path("other.sock");
        let cases = [
            (export("e1", "vm1", &self.socket), &["e1", "already"][..]),
            (
                export("e2", "vm1", &self.socket),
                &["e1", "e2", "same socket"],
            ),
            (export("e2", "vm1", &other), &["vm1", "in use", "e1"]),
        ];
        self.refuse("block-export-add", GENERIC, cases);
        let cases = [
            (json!({ "id": "nobody" }), &["nobody"][..]),
            (json!({ "id": "e1", "mode": "soft" }), &["mode", "soft"]),
        ];
        self.refuse("block-export-del", GENERIC, cases);
    }

    fn export_option_errors(&mut self, valid: &Value) {
        let unix = |path: &Path| json!({ "addr": { "type": "unix", "path": path } });
        let too_long = "/".to_owned() + &"x".repeat(107);
        let cases = [
            (
                unix(&self.not_a_socket),
                &["not-a-socket", "not a socket"][..],
            ),
            (
                json!({ "addr": { "type": "inet", "path": "x" } }),
                &["addr", "inet"],
            ),
            (unix(Path::new(&too_long)), &["107"]),
            (unix(&self.path("holder.sock")), &["live server"]),
            (json!({ "iothread": "nobody" }), &["nobody", "io1"]),
            (json!({ "iothread": ["io1", "nobody"] }), &["nobody"]),
            (json!({ "num-queues": 0 }), &["num-queues", "256"]),
            (json!({ "num-queues": 257 }), &["num-queues", "256"]),
            (json!({ "num-queues": "two" }), &["num-queues"]),
            (
                json!({ "logical-block-size": 1024 }),
                &["logical-block-size", "4096"],
            ),
            (json!({ "type": "fuse" }), &["type", "fuse"]),
            (json!({ "type": "nbd" }), &["addr"]),
            (json!({ "id": "9" }), &["id"]),
        ];
        let cases = cases.map(|(changes, words)| (with(valid, changes), words));
        self.refuse("block-export-add", GENERIC, cases);
    }

    fn resize_and_throttle_errors(&mut self) {
        let nobody = json!({ "node-name": "nobody", "size": MIB });
        self.refuse("block_resize", NOT_FOUND, [(nobody, ["nobody"])]);
        let size = |size: u64| json!({ "node-name": "vm1", "size": size });
        let cases = [
            (json!({ "size": MIB }), &["device", "node-name"][..]),
            (size(MIB), &["16M", "shorter"]),
            (json!({ "node-name": "vm1", "size": -1 }), &["size"]),
            (size(17 * MIB + 1), &["multiple of 512"]),
            (size(u64::MAX - 511), &["vm1", "longer"]),
        ];
        self.refuse("block_resize", GENERIC, cases);

        let limits = json!({
            "id": "e1", "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0,
        });
        let nobody = with(&limits, json!({ "id": "nobody" }));
        self.refuse("block_set_io_throttle", NOT_FOUND, [(nobody, ["nobody"])]);
        let cases = [
            (json!({ "id": "e1" }), ["bps"]),
            (with(&limits, json!({ "bps": 5, "bps_rd": 5 })), ["bps"]),
            (with(&limits, json!({ "group": "none" })), ["group 'none'"]),
        ];
        self.refuse("block_set_io_throttle", GENERIC, cases);
    }

    fn object_errors(&mut self) {
        let iothread = |id: &str| json!({ "qom-type": "iothread", "id": id });
        let cases = [
            (iothread("io1"), ["io1", "already"]),
            (iothread("iothread0"), ["iothread0", "already"]),
            (group(), ["g1", "already"]),
            (
                json!({ "qom-type": "secret", "id": "s" }),
                ["qom-type", "secret"],
            ),
        ];
        self.refuse("object-add", GENERIC, cases);
        let cases = [
            (json!({ "id": "nobody" }), &["nobody"][..]),
            (json!({ "id": "iothread0" }), &["iothread0", "pool"]),
        ];
        self.refuse("object-del", GENERIC, cases);
    }

    fn ringdisk_errors(&mut self) {
        let invalid = json!({ "disk": "cach=none" });
        self.refuse("x-ringdisk-attach", GENERIC, [(invalid, ["cach"])]);
        let nobody = json!({ "id": "nobody" });
        self.refuse("x-ringdisk-detach", NOT_FOUND, [(nobody, ["nobody"])]);
        self.refuse("x-ringdisk-reload", GENERIC, [(json!({}), ["--config"])]);
        let absent = json!({ "id": "e1", "file": self.path("absent.raw") });
        self.refuse("x-ringdisk-replace", GENERIC, [(absent, ["absent.raw"])]);
    }

    /// None of the refused commands has left anything behind: the valid export can be added, and both disks work.
    fn assert_unchanged(mut self, valid: Value) {
        self.qemu.call("block-export-add", valid);
        let nodes = self.qemu.call("query-named-block-nodes", json!({}));
        assert_eq!(nodes.as_array().unwrap().len(), 2, "{nodes}");
        let length = File::open(&self.file).unwrap().metadata().unwrap().len();
        assert_eq!(length, 16 * MIB);
        for socket in [self.socket.clone(), self.path("vm2.sock")] {
            verify(&mut Device::connect(socket, &two_queues()).unwrap().queues[0]);
        }
        assert!(fs::metadata(&self.not_a_socket).unwrap().is_file());
    }
}

fn group() -> Value {
    json!({ "qom-type": "throttle-group", "id": "g1", "limits": { "iops-total": 5 } })
}

/// `options` with some of them changed.
fn with(options: &Value, changes: Value) -> Value {
    let mut options = options.clone();
    for (key, value) in changes.as_object().unwrap() {
        options[key] = value.clone();
    }
    options
}
