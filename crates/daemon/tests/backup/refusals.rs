//! What cannot end as a success is refused when it begins.

use serde_json::{Value, json};

use super::{DISK_BYTES, Served, run, text};

#[test]
fn a_backup_that_begins_can_end() {
    let Some(served) = Served::start("a_backup_that_begins_can_end", &[]) else {
        return;
    };
    let begin = |bitmap: &str| ["backup", "begin", "b", "--bitmap", bitmap].map(str::to_owned);
    let refused = |bitmap: &str, words: &str| {
        let arguments = begin(bitmap);
        served.refused(&arguments.each_ref().map(String::as_str), words);
    };
    refused("", "Bitmap name cannot be empty");
    refused(&"x".repeat(1020), "choose a name of at most 953 bytes");
    served.done(&["bitmap", "add", "b", "backup-backup-m"]);
    refused("m", "has a bitmap 'backup-backup-m'; choose another id");
    // A new bitmap, one that records during the backup, and one with the checkpoint.
    for i in 1..254 {
        served.done(&["bitmap", "add", "b", &format!("b{i}")]);
    }
    refused("n", "cannot have another bitmap");
    served.done(&["bitmap", "remove", "b", "b1"]);
    for _ in 0..2 {
        served.done(&["backup", "begin", "b", "--bitmap", "n"]);
        served.done(&["backup", "end"]);
    }
    assert_eq!(
        served.done(&["bitmap", "list", "b"])["b"]
            .as_array()
            .unwrap()
            .len(),
        254
    );
}

/// The bitmap that a full backup creates when it succeeds has its place until then.
#[test]
fn an_open_backup_reserves_its_bitmap() {
    let Some(served) = Served::start("an_open_backup_reserves_its_bitmap", &[]) else {
        return;
    };
    let path = served.path("control.qmp");
    let mut qmp = control::Client::connect(path, std::time::Duration::from_secs(60)).unwrap();
    let mut add = |disk: &str, name: &str, granularity: u32| {
        let bitmap = json!({ "node": disk, "name": name, "granularity": granularity });
        qmp.call("block-dirty-bitmap-add", bitmap)
            .map_err(|e| e.to_string())
    };
    let words = "cannot have another bitmap while backup 'backup' is open";
    // The backup has three of 256.
    for i in 0..253 {
        add("a", &format!("b{i}"), 65536).unwrap();
    }
    served.done(&["backup", "begin", "a", "--bitmap", "n"]);
    let refused = add("a", "last", 65536).unwrap_err();
    assert!(refused.contains(words), "{refused}");
    served.done(&["backup", "end"]);
    add("a", "last", 65536).unwrap();
    let listed = served.done(&["bitmap", "list", "a"]);
    assert_eq!(listed["a"].as_array().unwrap().len(), 255);

    // The two of 2 MiB, and 64 bytes for the checkpoint, are most of the rest of 128 MiB.
    let file = served.path("c.raw");
    let large = std::fs::File::create(&file).unwrap();
    large.set_len(1 << 40).unwrap();
    let disk = format!("{},socket={}", text(&file), text(&served.path("c.sock")));
    served.done(&["attach", &disk]);
    for (i, granularity) in [4096, 4096, 4096, 8192, 16384, 65536]
        .into_iter()
        .enumerate()
    {
        add("c", &format!("b{i}"), granularity).unwrap();
    }
    served.done(&["backup", "begin", "c", "--bitmap", "n"]);
    let refused = add("c", "last", 65536).unwrap_err();
    assert!(refused.contains(words), "{refused}");
    served.done(&["backup", "end"]);
    add("c", "last", 65536).unwrap();
}

#[test]
fn bitmaps_of_open_backups_are_not_exported() {
    let Some(served) = Served::start("bitmaps_of_open_backups_are_not_exported", &[]) else {
        return;
    };
    served.done(&["bitmap", "add", "a", "n"]);
    served.done(&["backup", "begin", "a", "b", "--bitmap", "n"]);
    for bitmap in ["n", "backup-backup-n"] {
        served.refused(
            &[
                "export",
                "a",
                "--name",
                "z",
                "--writable",
                "--bitmap",
                bitmap,
            ],
            "is currently in use by another operation and cannot be used: backup 'backup' is open",
        );
    }
    served.done(&["backup", "end"]);
    served.done(&["export", "a", "--name", "z", "--writable", "--bitmap", "n"]);
}

/// Names may be longer than ids, and have other characters.
#[test]
fn every_name_can_be_exported() {
    let Some(served) = Served::start("every_name_can_be_exported", &[]) else {
        return;
    };
    let id = format!("nightly {}", "x".repeat(60));
    served.done(&["backup", "begin", "a", "--id", &id]);
    served.copy(&format!("a-{}", id.replace(' ', "%20")));
    served.done(&["backup", "end", "--id", &id]);
    served.done(&["export", "a", "--name", "a b"]);
    served.copy("a%20b");
    served.done(&["export", "a", "--name", "a b", "--remove"]);
}

/// Programs open the URIs that are printed, whatever the names.
#[test]
fn printed_uris_can_be_opened() {
    let Some(served) = Served::start("printed_uris_can_be_opened", &[]) else {
        return;
    };
    let path = served.path("control.qmp");
    let mut qmp = control::Client::connect(path, std::time::Duration::from_secs(60)).unwrap();
    let opened = |uri: &Value| {
        let uri = uri.as_str().unwrap();
        let info: Value = serde_json::from_str(&run("nbdinfo", &["--json", uri])).unwrap();
        assert_eq!(info["exports"][0]["export-size"], DISK_BYTES, "{uri}");
        // QEMU 10.0 decodes queries twice, so it can open no URI of such a socket.
        if ["%25", "%26"]
            .iter()
            .any(|code| uri.split('?').nth(1).unwrap().contains(code))
        {
            return;
        }
        let info = run("qemu-img", &["info", "--output=json", "-f", "raw", uri]);
        let info: Value = serde_json::from_str(&info).unwrap();
        assert_eq!(info["virtual-size"], DISK_BYTES, "{uri}");
    };
    let names = ["a b", "100%25", "a?b=c&d;e+f", "x#y", "\u{e4}/:@", "a\"'b"];
    for socket in ["n b#?=;\u{e4}.sock", "n 100%20&+.sock"] {
        qmp.call("nbd-server-stop", json!({})).unwrap();
        let socket = served.path(socket);
        let listen = format!("--listen={}", text(&socket));
        for name in names {
            let exported = served.done(&["export", "b", "--name", name, &listen]);
            opened(&exported["uri"]);
            let begun = served.done(&["backup", "begin", "a", "--id", name]);
            opened(&begun[0]["uri"]);
            let list = served.done(&["export"]);
            let mut uris = list.as_array().unwrap().iter().map(|export| &export["uri"]);
            assert!(uris.any(|uri| *uri == begun[0]["uri"]), "{list}");
            served.done(&["backup", "end", "--id", name]);
        }
    }
}

/// They would break tables and the commands that messages name.
#[test]
fn ids_that_programs_misread_are_refused() {
    let Some(served) = Served::start("ids_that_programs_misread_are_refused", &[]) else {
        return;
    };
    for id in ["a\nb", "a\tb", "\u{1b}[31m", "\u{202e}", "x/../y", "x/."] {
        served.refused(
            &["backup", "begin", "a", "--id", id],
            &format!("{id:?} cannot be the id of a backup"),
        );
    }
    // As in QEMU, names of exports have any characters.
    served.done(&["export", "a", "--name", "a\nb"]);
    let list = served.ringdisk(&["export"]).stdout;
    let list = String::from_utf8(list).unwrap();
    assert_eq!(list.lines().count(), 2, "{list}");
    assert!(list.contains("nbd+unix:///a%0Ab?socket="), "{list}");
}

/// A backup's node has its bitmap, which may be named with that node or the disk's.
#[test]
fn bitmaps_are_named_with_their_node() {
    let Some(served) = Served::start("bitmaps_are_named_with_their_node", &[]) else {
        return;
    };
    let path = served.path("control.qmp");
    let mut qmp = control::Client::connect(path, std::time::Duration::from_secs(60)).unwrap();
    qmp.call(
        "block-dirty-bitmap-add",
        json!({ "node": "a", "name": "n" }),
    )
    .unwrap();
    let device = json!({ "device": "a", "bitmap-mode": "use", "bitmap-name": "n" });
    qmp.call(
        "backup-access-setup",
        json!({ "target-id": "p", "devices": [device] }),
    )
    .unwrap();
    let mut export = |id: &str, more: Value| {
        let mut arguments = json!({ "type": "nbd", "id": id, "node-name": "a-p", "name": id });
        let all = arguments.as_object_mut().unwrap();
        all.extend(more.as_object().unwrap().clone());
        qmp.call("block-export-add", arguments)
    };
    for (id, node) in [("x", "a-p"), ("y", "a")] {
        let bitmap = json!({ "node": node, "name": "n" });
        export(id, json!({ "bitmaps": [bitmap] })).unwrap();
    }
    let error = export("z", json!({ "bitmaps": [{ "node": "b", "name": "n" }] })).unwrap_err();
    assert!(
        error.to_string().contains("only bitmaps of that disk"),
        "{error}"
    );
    let error = export("z", json!({ "description": "d".repeat(4097) })).unwrap_err();
    assert!(error.to_string().contains("4097 bytes"), "{error}");
    export("z", json!({ "description": "d".repeat(4096) })).unwrap();
}
