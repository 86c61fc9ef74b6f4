//! Backups that begin and end while other commands change bitmaps of the same disk.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use control::Client;
use serde_json::{Value, json};
use testkit::driver::HANG;

use super::failures::bits;
use super::{Served, write};

/// Begins and fails backups of disk `a` with bitmap `n`, while another client clears the bitmap `cleared` without end.
/// Calls `before` and `open` in each round.
fn backups_beside_clears(
    served: &Served,
    cleared: &str,
    rounds: usize,
    mut before: impl FnMut(),
    open: impl Fn(&mut Client),
) {
    struct Done<'a>(&'a AtomicBool);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }
    let connect = || Client::connect(served.path("control.qmp"), HANG).unwrap();
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = connect();
            while !is_done.load(Relaxed) {
                // It may be refused.
                let bitmap = json!({ "node": "a", "name": cleared });
                let _ = client.call("block-dirty-bitmap-clear", bitmap);
            }
        });
        let _done = Done(&is_done);
        let mut client = connect();
        for _ in 0..rounds {
            before();
            let disk = json!({ "device": "a", "bitmap-mode": "use", "bitmap-name": "n" });
            let begin = json!({ "target-id": "backup", "devices": [disk] });
            client.call("backup-access-setup", begin).unwrap();
            open(&mut client);
            let end = json!({ "target-id": "backup", "success": false });
            client.call("backup-access-teardown", end).unwrap();
        }
    });
}

/// The temporary bitmap of a backup does not come back after its end, and a resize waits for its turn.
#[test]
fn backup_ends_while_bitmaps_change() {
    let Some(served) = Served::start("backup_ends_while_bitmaps_change", &[]) else {
        return;
    };
    served.done(&["bitmap", "add", "a", "other"]);
    served.done(&["bitmap", "add", "a", "n", "--persistent"]);
    let mut rounds = 0;
    let grow = || {
        rounds += 1;
        if rounds % 20 == 0 {
            served.done(&["resize", "a", &format!("{}M", 1024 + rounds / 20)]);
        }
    };
    backups_beside_clears(&served, "other", 400, grow, |_| {});
    let listed = served.done(&["bitmap", "list", "a"]);
    assert_eq!(listed["a"].as_array().unwrap().len(), 2, "{listed}");
}

/// A command that has waited until a backup has begun does not change the bitmap of that.
#[test]
fn commands_that_wait_spare_the_bitmap_of_a_backup() {
    let Some(served) = Served::start("commands_that_wait_spare_the_bitmap_of_a_backup", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    served.done(&["bitmap", "add", "a", "n", "--persistent"]);
    let compare = |client: &mut Client| {
        let info = client.call("query-pbs-bitmap-info", json!({})).unwrap();
        let copied = info[0]["dirty"].as_u64().unwrap();
        assert!(bits(&served, "a", "n") >= copied, "{info}");
    };
    backups_beside_clears(&served, "n", 100, || write(&mut device, 0, 0, 1), compare);
    assert_eq!(served.done(&["backup", "list"]), Value::Array(Vec::new()));
}

/// Disk `a` in a backup `b-c` and disk `a-b` in a backup `c` would both be `a-b-c`: the client of one would copy the other.
#[test]
fn names_of_disks_in_backups_are_of_one_disk() {
    let test = "names_of_disks_in_backups_are_of_one_disk";
    let Some(served) = Served::start(test, &[]) else {
        return;
    };
    let attach = |name: &str| {
        let file = served.path(&format!("{name}.raw"));
        fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
        let socket = served.path(&format!("{name}.sock"));
        format!("{},name={name},socket={}", file.display(), socket.display())
    };
    served.done(&["attach", &attach("a-b")]);
    let mut clients = [(); 2].map(|()| Client::connect(served.path("control.qmp"), HANG).unwrap());
    let end = |id: &str| json!({ "target-id": id, "success": false });
    for _ in 0..30 {
        let begun: Vec<bool> = thread::scope(|scope| {
            let pairs = [("a", "b-c"), ("a-b", "c")].into_iter().zip(&mut clients);
            let threads: Vec<_> = pairs
                .map(|((disk, id), client)| {
                    scope.spawn(move || {
                        let devices = json!([{ "device": disk }]);
                        let begin = json!({ "target-id": id, "devices": devices });
                        client.call("backup-access-setup", begin).is_ok()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(begun.iter().filter(|begun| **begun).count(), 1, "{begun:?}");
        let id = if begun[0] { "b-c" } else { "c" };
        clients[0].call("backup-access-teardown", end(id)).unwrap();
    }

    // Nor can a disk have the name while the backup is open.
    let begin = json!({ "target-id": "x", "devices": [{ "device": "a" }] });
    clients[0].call("backup-access-setup", begin).unwrap();
    let late = attach("a-x");
    let refused = served.ringdisk(&["attach", &late]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && said.contains("open backup 'x'"),
        "{said}"
    );
    clients[0].call("backup-access-teardown", end("x")).unwrap();
    served.done(&["attach", &late]);
}
