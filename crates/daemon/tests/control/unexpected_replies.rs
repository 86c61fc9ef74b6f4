//! The control socket belongs to another version, or to another program: what it returns is not what the subcommands know.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::server::CommandOutput;

/// What the command returns of which it is the turn, and its name.
type Wrong = Arc<Mutex<(&'static str, Value)>>;

/// Answers like a ringdisk, except for one command.
fn answer(stream: UnixStream, wrong: &Wrong) -> std::io::Result<()> {
    let mut to = stream.try_clone()?;
    let version = json!({ "QMP": { "version": {}, "capabilities": [] } });
    writeln!(to, "{version}")?;
    for line in BufReader::new(stream).lines() {
        let message: Value = serde_json::from_str(&line?)?;
        let command = message["execute"].as_str().unwrap();
        let disk = json!({ "name": "d", "device": "d", "node-name": "d", "size": 4096 });
        let (name, value) = wrong.lock().unwrap().clone();
        let result = match command {
            command if command == name => value,
            "x-ringdisk-stats" => json!({ "disks": [disk], "iothreads": [] }),
            "x-ringdisk-nbd" => json!({ "address": "/nbd.sock", "tls": false, "exports": [] }),
            "backup-access-setup" => json!([disk]),
            "x-ringdisk-backups" => json!([{ "id": "backup", "devices": [disk] }]),
            _ => json!({}),
        };
        writeln!(to, "{}", json!({ "return": result, "id": message["id"] }))?;
    }
    Ok(())
}

fn serve(control: &Path) -> Wrong {
    let listener = UnixListener::bind(control).unwrap();
    let wrong = Wrong::new(Mutex::new(("", Value::Null)));
    let its = wrong.clone();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let its = its.clone();
            std::thread::spawn(move || answer(client.unwrap(), &its));
        }
    });
    wrong
}

#[test]
fn unexpected_replies_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let control = dir.path().join("control.qmp");
    let wrong = serve(&control);
    let simple = || vec![json!(5), json!("x"), json!(null), json!([]), json!([5])];
    let of_list = || vec![json!(5), json!("x"), json!(null), json!({}), json!([5])];
    let with = |key: &str| {
        let nested = [json!(5), json!({}), json!([5]), json!(["x"])].map(|it| json!({ key: it }));
        [simple(), nested.to_vec(), vec![json!({})]].concat()
    };
    let (stats, nbd) = (with("disks"), with("exports"));
    let copy = dir.path().join("copy.raw").display().to_string();
    let copy = ["backup", "copy", "d", "--to", &copy];
    let backups = [of_list(), vec![json!([{}]), json!([{ "devices": [5] }])]].concat();
    let all: [(&[&str], _, _); 21] = [
        (&["list"], "x-ringdisk-stats", stats.clone()),
        (&["list", "--explain"], "x-ringdisk-explain", of_list()),
        (&["stats"], "x-ringdisk-stats", stats.clone()),
        (&["attach", "d.raw"], "x-ringdisk-attach", with("paste")),
        (
            &["resize", "d", "1G"],
            "x-ringdisk-resize",
            [simple(), vec![json!({}), json!({ "size": "1G" })]].concat(),
        ),
        (&["resize", "d", "+1G"], "x-ringdisk-stats", stats.clone()),
        (&["resume", "d"], "x-ringdisk-stats", stats),
        (&["reload"], "x-ringdisk-reload", simple()),
        (&["export"], "x-ringdisk-nbd", nbd.clone()),
        (&["export", "d"], "x-ringdisk-nbd", nbd.clone()),
        (&["export", "d", "--remove"], "x-ringdisk-nbd", nbd.clone()),
        (
            &["export", "d", "--listen", "/s"],
            "x-ringdisk-nbd",
            nbd.clone(),
        ),
        (&["bitmap", "list"], "query-named-block-nodes", of_list()),
        (
            &["bitmap", "list", "d"],
            "query-named-block-nodes",
            of_list(),
        ),
        (&["backup", "list"], "x-ringdisk-backups", backups.clone()),
        (
            &["backup", "end", "--failed"],
            "x-ringdisk-backups",
            backups.clone(),
        ),
        (&["backup", "begin", "d"], "x-ringdisk-nbd", nbd.clone()),
        (&["backup", "begin", "d"], "backup-access-setup", of_list()),
        (&copy, "x-ringdisk-nbd", nbd),
        (&copy, "backup-access-setup", of_list()),
        (
            &[&copy[..], &["--open"]].concat(),
            "x-ringdisk-backups",
            backups,
        ),
    ];
    for (arguments, command, replies) in all {
        for reply in replies {
            *wrong.lock().unwrap() = (command, reply.clone());
            let mut ringdisk = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
            ringdisk.args(arguments).arg("--control").arg(&control);
            let ran = CommandOutput::of(ringdisk.current_dir(dir.path()));
            println!("{arguments:?}: {reply}");
            ran.assert_fails(1, &[&format!("{command} returns {reply}")]);
        }
    }
}
