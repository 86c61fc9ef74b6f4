//! `backup begin` that is interrupted or gets no answer: guests thaw first, and no backup stays open.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::driver::HANG;

use super::Served;
use super::failures::{Answer, answer, answer_without, begin_at, fake_agent};

/// What a server answers to a command of a connection, by the number of that.
type ServerAnswer = fn(usize, &str) -> Option<Value>;

const THAW: &str = "guest-fsfreeze-thaw";
const SETUP: &str = "backup-access-setup";
const EXPORT: &str = "block-export-add";
const TEARDOWN: &str = "backup-access-teardown";

/// A server that speaks QMP. Names what it gets, each before it answers.
fn fake_server(path: &Path, answer: ServerAnswer, got: SyncSender<String>) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        for (number, socket) in listener.incoming().enumerate() {
            let (mut socket, got) = (socket.unwrap(), got.clone());
            thread::spawn(move || {
                let lines = BufReader::new(socket.try_clone().unwrap()).lines();
                let greeting = json!({ "QMP": { "version": {}, "capabilities": [] } });
                writeln!(socket, "{greeting}").unwrap();
                for line in lines.map_while(Result::ok) {
                    let command: Value = serde_json::from_str(&line).unwrap();
                    let name = command["execute"].as_str().unwrap();
                    if name == TEARDOWN {
                        let mut given = command["arguments"].clone();
                        let token = given["x-ringdisk-token"].take();
                        let all = json!({ "target-id": "backup", "success": false, "x-ringdisk-token": null });
                        assert_eq!(given, all);
                        assert!(token.is_string());
                    }
                    // The test may have ended.
                    let _ = got.send(name.to_owned());
                    if let Some(mut reply) = answer(number, name) {
                        reply["id"] = command["id"].clone();
                        let _ = writeln!(socket, "{reply}");
                    }
                }
            });
        }
    });
}

/// What a server answers that does all.
fn does_all(name: &str) -> Option<Value> {
    let result = match name {
        "x-ringdisk-nbd" => json!({ "address": "/nbd.sock", "exports": [] }),
        "x-ringdisk-backups" => json!([]),
        SETUP => json!([{ "node-name": "a-backup", "device": "a", "size": 512 }]),
        _ => json!({}),
    };
    Some(json!({ "return": result }))
}

fn all_but(silent: &str, name: &str) -> Option<Value> {
    does_all(name).filter(|_| name != silent)
}

fn refusal(text: &str) -> Option<Value> {
    Some(json!({ "error": { "class": "GenericError", "desc": text } }))
}

/// A case of a command that gets this far.
struct Case {
    server: ServerAnswer,
    agent: Answer,
    /// A signal follows this.
    last: Option<&'static str>,
    /// What the agent and the server get after `last`, without the commands before a setup.
    then: &'static [&'static str],
    /// What the command says.
    words: &'static [&'static str],
}

const CASES: [Case; 8] = [
    // The setup is not answered.
    Case {
        server: |_, name| all_but(SETUP, name),
        agent: answer,
        last: Some(SETUP),
        then: &[THAW, TEARDOWN],
        words: &["interrupted; no backup is open"],
    },
    // It had begun nothing, or begins nothing any more.
    Case {
        server: |_, name| match name {
            TEARDOWN => refusal("there is no backup"),
            name => all_but(SETUP, name),
        },
        agent: answer,
        last: Some(SETUP),
        then: &[THAW, TEARDOWN],
        words: &["interrupted; no backup is open"],
    },
    // A guest does not thaw.
    Case {
        server: |_, name| does_all(name),
        agent: |command| answer_without(THAW, command),
        last: Some(THAW),
        then: &[TEARDOWN],
        words: &[
            "the file systems may still be frozen: interrupted",
            "a guest has not confirmed that it has thawed; no backup is open",
        ],
    },
    Case {
        server: |_, name| does_all(name),
        agent: |command| match command["execute"].as_str() {
            Some(THAW) => refusal("it is busy").map(|refusal| refusal.to_string()),
            _ => answer(command),
        },
        last: None,
        then: &[SETUP, THAW, TEARDOWN],
        words: &[
            "the file systems may still be frozen: it is busy",
            "a guest has not confirmed that it has thawed; no backup is open",
        ],
    },
    // The guest has not waited for the moment.
    Case {
        server: |_, name| does_all(name),
        agent: |command| match command["execute"].as_str() {
            Some(THAW) => Some(json!({ "return": 0 }).to_string()),
            _ => answer(command),
        },
        last: None,
        then: &[SETUP, THAW, TEARDOWN],
        words: &[
            "the guest has thawed before the moment of the backup; try again; no backup is open",
        ],
    },
    // It is not exported.
    Case {
        server: |_, name| all_but(EXPORT, name),
        agent: answer,
        last: Some(EXPORT),
        then: &[TEARDOWN],
        words: &["interrupted; no backup is open"],
    },
    Case {
        server: |_, name| match name {
            EXPORT => refusal("it cannot be exported"),
            name => does_all(name),
        },
        agent: answer,
        last: None,
        then: &[SETUP, THAW, EXPORT, TEARDOWN],
        words: &["it cannot be exported; no backup is open"],
    },
    // What the server refuses is not this command's.
    Case {
        server: |_, name| match name {
            SETUP => refusal("there is a backup 'backup' already"),
            name => does_all(name),
        },
        agent: answer,
        last: None,
        then: &[SETUP, THAW],
        words: &["there is a backup 'backup' already"],
    },
];

/// Waits until this name has arrived.
fn wait_for(names: &Receiver<String>, last: &str) {
    while names.recv_timeout(HANG).unwrap() != last {}
}

#[test]
fn an_interrupted_begin_is_undone() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (number, case) in CASES.into_iter().enumerate() {
        let paths = ["server", "agent"].map(|name| dir.path().join(format!("{name}{number}")));
        let (sender, names) = sync_channel(64);
        fake_server(&paths[0], case.server, sender.clone());
        fake_agent(&paths[1], case.agent, sender);
        let child = begin_at(&paths[0], &paths[1..]);
        if let Some(last) = case.last {
            wait_for(&names, last);
            kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        } else {
            wait_for(&names, "guest-fsfreeze-freeze");
        }
        let began = Instant::now();
        let output = child.wait_with_output().unwrap();
        assert!(began.elapsed() < Duration::from_secs(15), "case {number}");
        assert_eq!(output.status.code(), Some(1), "case {number}: {output:?}");
        let text = String::from_utf8_lossy(&output.stderr);
        for words in case.words {
            assert!(text.contains(words), "case {number}: {text}");
        }
        let got: Vec<_> = names.try_iter().collect();
        let ours = got.iter().filter(|name| *name != "qmp_capabilities");
        let ours: Vec<_> = ours.map(String::as_str).collect();
        assert_eq!(ours, case.then, "case {number}");
    }
}

/// If the server says nothing, the message names the command that ends what may be open.
#[test]
fn an_unconfirmed_end_is_named() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let control = dir.path().join("con trol");
    let (sender, names) = sync_channel(64);
    let silent = |number, name: &str| all_but(SETUP, name).filter(|_| number == 0);
    fake_server(&control, silent, sender);
    let child = begin_at(&control, &[]);
    wait_for(&names, SETUP);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr);
    let command = format!(
        "the backup may be open, and could not be ended ({control}: no answer within 10 s; the server is busy or stuck, its log \
         may tell); to end it, run: ringdisk backup end --id=backup --failed --control='{control}'",
        control = control.display()
    );
    assert!(text.contains(&command), "{text}");
}

/// A connection that has negotiated.
fn negotiated(served: &Served) -> UnixStream {
    let mut socket = UnixStream::connect(served.path("control.qmp")).unwrap();
    let mut lines = BufReader::new(socket.try_clone().unwrap()).lines();
    lines.next().unwrap().unwrap();
    writeln!(socket, "{}", json!({ "execute": "qmp_capabilities" })).unwrap();
    lines.next().unwrap().unwrap();
    socket
}

/// Ends a connection. To drop it is not enough: a process that another test is just starting has it open for a moment.
fn hang_up(socket: &UnixStream) {
    socket.shutdown(Shutdown::Both).unwrap();
}

fn setup(id: &str) -> Value {
    let arguments = json!({ "target-id": id, "devices": [{ "device": "a" }] });
    json!({ "execute": SETUP, "arguments": arguments })
}

/// The server begins nothing for a client that has left, and ends what it has begun meanwhile. After it has hung up, a client
/// needs to end only what is open then.
#[test]
fn no_backup_stays_open_without_its_client() {
    let Some(served) = Served::start("no_backup_stays_open_without_its_client", &[]) else {
        return;
    };
    // The server answers late.
    let mut socket = negotiated(&served);
    served.server.signal(Signal::STOP);
    writeln!(socket, "{}", setup("late")).unwrap();
    hang_up(&socket);
    served.server.signal(Signal::CONT);
    let line = "backup 'late': is not open, because its client has left before the reply";
    served.server.wait_for_log(&[line]);
    assert_eq!(served.done(&["backup", "list"]), json!([]));

    // The client leaves at any time.
    let mut client = control::Client::connect(served.path("control.qmp"), HANG).unwrap();
    let mut ended = Vec::new();
    for round in 0..100 {
        let mut socket = negotiated(&served);
        let id = format!("round{round}");
        writeln!(socket, "{}", setup(&id)).unwrap();
        thread::sleep(Duration::from_micros(50 * round));
        hang_up(&socket);
        let arguments = json!({ "target-id": id, "success": false });
        ended.push(client.call(TEARDOWN, arguments));
    }
    let end = Instant::now() + HANG;
    while served.done(&["backup", "list"]) != json!([]) {
        let open = served.done(&["backup", "list"]);
        assert!(Instant::now() < end, "stayed open: {open}; {ended:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A command that undoes what it has begun does not end what another has begun with the same id.
#[test]
fn a_backup_is_ended_by_its_token() {
    let Some(served) = Served::start("a_backup_is_ended_by_its_token", &[]) else {
        return;
    };
    let mut client = control::Client::connect(served.path("control.qmp"), HANG).unwrap();
    let mut begun = setup("b")["arguments"].clone();
    begun["x-ringdisk-token"] = "ours".into();
    client.call(SETUP, begun).unwrap();
    let mut end = |token: &str| {
        let arguments = json!({ "target-id": "b", "success": false, "x-ringdisk-token": token });
        client.call(TEARDOWN, arguments)
    };
    let refused = end("theirs").unwrap_err().to_string();
    assert!(refused.contains("there is no backup 'b'"), "{refused}");
    end("ours").unwrap();
    assert_eq!(served.done(&["backup", "list"]), json!([]));
}

/// Nobody would know where to read it.
#[test]
fn a_backup_whose_uris_cannot_be_printed_is_not_open() {
    let test = "a_backup_whose_uris_cannot_be_printed_is_not_open";
    let Some(served) = Served::start(test, &[]) else {
        return;
    };
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_ringdisk"))
        .args(["backup", "begin", "a", "--id=-my id", "--control"])
        .arg(served.path("control.qmp"))
        .stdout(full)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("could not be printed") && text.contains("no backup is open"),
        "{text}"
    );
    assert_eq!(served.done(&["backup", "list"]), json!([]));
    // A command that a message names can be run as it is printed.
    served.done(&["backup", "begin", "a", "--id=-my id"]);
    let again = served.ringdisk(&["backup", "begin", "a", "--id=-my id"]);
    let text = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(text.contains("ringdisk backup end --id='-my id'"), "{text}");
    served.done(&["backup", "end", "--id=-my id"]);
}
