//! QEMU's own client library, which this project did not write, on our server.

use std::path::Path;
use std::process::Command;

use crate::support::Server;
use serde_json::{Value, json};

#[test]
fn qemu_client_library_works() {
    let python = match testkit::python::QMP.python() {
        Ok(python) => python,
        Err(missing) => {
            return println!("skipped: qemu_client_library_works: {missing}");
        }
    };
    let server = Server::start();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/qemu_qmp.py");
    let output = Command::new(python)
        .arg(script)
        .arg(server.path())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let found: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let export = json!({
        "id": "e1",
        "node-name": "vm1",
        "shutting-down": false,
        "type": "vhost-user-blk",
    });
    let timestamp = ["microseconds", "seconds"];
    let expected = json!([
        ["capabilities", []],
        ["version", 10],
        ["exports", [export]],
        ["event", ["BLOCK_EXPORT_DELETED", { "id": "e1" }, timestamp]],
        ["exports", []],
        ["error", ["CommandNotFound", "The command no-such-command has not been found; query-commands lists those that there are"]],
        ["error", ["GenericError", "Parameter 'node-name' is missing"]],
        ["error", ["GenericError", "there is no node 'nobody'"]],
        ["error", ["DeviceNotFound", "there is no disk 'nobody'"]],
        ["nodes", [50, "vm1", true]],
        ["undescribed", []],
        ["done", true],
    ]);
    assert_eq!(Value::from(found), expected, "{errors}");
}
