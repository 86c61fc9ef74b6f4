//! Both ends of the socket: our client on our server, and each on something that misbehaves.

use crate::support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::support::{FakeDisks, Server};
use control::{
    Client, ClientError, Command, ErrorClass, EventHub, Limits, RingdiskAttach, serve_socket,
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Far longer than anything here takes.
const PLENTY: Duration = Duration::from_secs(60);

#[test]
fn client_gets_replies() {
    let server = Server::start();
    let mut client = Client::connect(server.path(), PLENTY).unwrap();
    let package = &client.greeting()["version"]["package"];
    assert!(package.as_str().unwrap().starts_with("ringdisk "));

    let attach = RingdiskAttach {
        disk: "vm1".into(),
        directory: None,
        unless_left: None,
    };
    let reply = client.execute(&Command::RingdiskAttach(attach)).unwrap();
    assert_eq!(reply["socket"], "/run/vm1.sock");

    let error = client
        .call("x-ringdisk-detach", json!({ "id": "vm9" }))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "x-ringdisk-detach: there is no disk 'vm9'"
    );
    let ClientError::Refused { error, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(error.class, ErrorClass::DeviceNotFound);
    // And the conversation goes on.
    assert_eq!(
        client.call("query-block-exports", json!({})).unwrap(),
        json!([])
    );
}

#[test]
fn every_client_gets_every_event() {
    let server = Server::start();
    let mut clients: Vec<_> = (0..3)
        .map(|_| Client::connect(server.path(), PLENTY).unwrap())
        .collect();
    clients[0]
        .call("block-export-del", json!({ "id": "e1" }))
        .unwrap();
    for client in &mut clients {
        let event = client.event(PLENTY).unwrap().unwrap();
        assert_eq!(event["event"], "BLOCK_EXPORT_DELETED");
        assert_eq!(event["data"], json!({ "id": "e1" }));
        assert!(event["timestamp"]["seconds"].as_u64().unwrap() > 1_000_000_000);
        assert_eq!(client.event(Duration::from_millis(1)).unwrap(), None);
        client.call("query-block-exports", json!({})).unwrap();
    }
}

#[test]
fn delayed_events_are_delivered() {
    let server = Server::start();
    let mut client = Client::connect(server.path(), PLENTY).unwrap();
    for reason in ["first", "second", "third"] {
        server.hub().emit(&support::io_error(reason));
    }
    let mut reasons = Vec::new();
    while reasons.last().is_none_or(|reason| reason != "third") {
        let event = client.event(PLENTY).unwrap().expect("the last is not lost");
        reasons.push(event["data"]["reason"].as_str().unwrap().to_owned());
    }
    assert_eq!(reasons[0], "first");
}

#[test]
fn closing_the_hub_ends_the_sessions_after_their_last_event() {
    let server = Server::start();
    let mut client = Client::connect(server.path(), PLENTY).unwrap();
    server.hub().emit(&support::io_error("last"));
    server.hub().close();
    assert!(client.event(PLENTY).unwrap().is_some());
    let error = client.event(PLENTY).unwrap_err();
    assert!(matches!(error, ClientError::HungUp(_)), "{error}");
    server.join();
}

#[test]
fn client_disconnect_mid_message_leaves_nothing() {
    let server = Server::start();
    let mut stream = UnixStream::connect(server.path()).unwrap();
    stream.write_all(b"{\"execute\": \"qmp_cap").unwrap();
    drop(stream);
    server.hub().close();
    server.join();
}

#[test]
fn a_client_that_leaves_before_the_greeting_is_no_error() {
    let (client, socket) = UnixStream::pair().unwrap();
    drop(client);
    let hub = EventHub::new();
    let events = hub.subscribe().unwrap();
    serve_socket(&socket, &events, &FakeDisks::default()).unwrap();
}

#[test]
fn malformed_commands_are_answered() {
    let server = Server::start();
    let mut stream = UnixStream::connect(server.path()).unwrap();
    let mut replies = BufReader::new(stream.try_clone().unwrap()).lines();
    let mut reply =
        move || -> Value { serde_json::from_str(&replies.next().unwrap().unwrap()).unwrap() };
    assert!(reply()["QMP"].is_object());
    // More answers than a socket holds: they are sent as they arise, and read meanwhile.
    let sender = thread::spawn(move || {
        stream.write_all(&b"}".repeat(20_000)).unwrap();
        let long = [&b"\""[..], &b"x".repeat(Limits::COMMAND.bytes), b"\n"].concat();
        stream.write_all(&long).unwrap();
        stream
            .write_all(b"{\"execute\":\"qmp_capabilities\",\"id\":7}")
            .unwrap();
        stream
    });
    for _ in 0..20_001 {
        assert_eq!(reply()["error"]["class"], "GenericError");
    }
    assert_eq!(reply(), json!({ "id": 7, "return": {} }));
    drop(sender.join().unwrap());
}

#[test]
fn missing_server_error_gives_next_step() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("control.sock");
    let says = |says: &str| {
        let error = Client::connect(&path, PLENTY).err().unwrap().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        assert!(error.contains(says), "{error}");
    };
    says("check that `ringdisk serve` runs with --control");
    drop(UnixListener::bind(&path).unwrap());
    says("no process listens");
    fs::remove_file(&path).unwrap();
    fs::write(&path, "").unwrap();
    says("no process listens");

    let long = directory.path().join("x".repeat(200));
    let error = Client::connect(&long, PLENTY).err().unwrap();
    assert!(matches!(error, ClientError::Io { .. }), "{error}");

    let closed = directory.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    if fs::read_dir(&closed).is_ok() {
        return println!("skipped: sockets_without_a_server_are_named: root may use any socket");
    }
    let error = Client::connect(closed.join("s"), PLENTY).err().unwrap();
    assert!(matches!(error, ClientError::Denied(_)), "{error}");
}

#[test]
fn silent_server_times_out() {
    let (path, _directory) = impostor(|mut stream| {
        // Until the client has gone.
        let _ = stream.read(&mut [0]);
    });
    let error = Client::connect(&path, Duration::from_millis(50)).err();
    let error = error.unwrap().to_string();
    assert!(error.contains("no answer within 0.05 s"), "{error}");
}

#[test]
fn server_with_full_queue_times_out() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("full.sock");
    let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
    let (family, kind) = (
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
    );
    let socket = rustix::net::socket(family, kind, None).unwrap();
    rustix::net::bind(&socket, &address).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let _first = UnixStream::connect(&path).unwrap();
    let error = Client::connect(&path, Duration::from_millis(50)).err();
    let error = error.unwrap();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
}

#[test]
fn non_qmp_server_is_reported() {
    for (greeting, says) in [
        ("SSH-2.0-x\r\n", "not a QMP server"),
        ("{\"hello\": 1}", "it greets with {\"hello\":1}"),
        ("[{\"QMP\": {}}]", "it greets with [{"),
        ("}", "no matching opening bracket"),
        ("", "has hung up"),
        ("{\"QMP\": {}} {\"id\": 99, \"return\": {}}", "is answered"),
        (
            "{\"QMP\": {}} {\"error\": {\"class\": \"New\", \"desc\": \"no\"}}",
            "qmp_capabilities: no",
        ),
    ] {
        let (path, _directory) = impostor(move |mut stream| {
            stream.write_all(greeting.as_bytes()).unwrap();
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let error = Client::connect(&path, PLENTY).err().unwrap().to_string();
        assert!(error.contains(says), "{greeting}: {error}");
    }
}

/// A server that treats its only client as `answer` says.
fn impostor(answer: impl FnOnce(UnixStream) + Send + 'static) -> (PathBuf, TempDir) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("impostor.sock");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || answer(listener.accept().unwrap().0));
    (path, directory)
}
