//! Clients that attack the server, and those that use it meanwhile.

use std::fs;
use std::io::Read;
use std::net::Shutdown;

use serde_json::json;
use testkit::driver::{Device, DeviceConfig, HANG};

use super::raw::Client;
use super::{Served, have, run, text};
use crate::support::{DISK_BYTES, Disk, content};

const MIB: usize = 1 << 20;

/// Types of replies to options.
const ACK: u32 = 1;
const INVALID: u32 = 3 | 1 << 31;
const UNKNOWN: u32 = 6 | 1 << 31;
const TOO_BIG: u32 = 9 | 1 << 31;

const LIST: u32 = 3;
const INFO: u32 = 6;
const STRUCTURED_REPLY: u32 = 8;
const LIST_META_CONTEXT: u32 = 9;

/// Options of one handshake: three for each of the exports that there may be, and some others.
const OPTIONS: usize = 3 * 4096 + 256;

/// The data of an option that begins with a name.
fn named(name: &[u8], rest: &[u8]) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes(), name, rest].concat()
}

/// Each is refused, and then the same client is served.
#[test]
fn options_beyond_the_limits_are_refused() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm"]);
    let mut client = Client::greeted(&served.nbd());
    client.option(STRUCTURED_REPLY, &[]);
    assert_eq!(client.option_reply().0, ACK);
    let queries = |count: u32| {
        let one = named(b"base:", &[]);
        let all = one.repeat(count as usize);
        named(b"vm", &[&count.to_be_bytes()[..], &all].concat())
    };
    for (option, data, expected) in [
        (INFO, named(&[b'x'; 4096], &[0; 2]), UNKNOWN),
        (INFO, named(&[b'x'; 4097], &[0; 2]), INVALID),
        (INFO, named(b"vm", &[0xff; 2]), INVALID),
        (INFO, vec![0xff; 4], INVALID),
        (INFO, vec![0; 64 << 10], TOO_BIG),
        (LIST, vec![0; 4], INVALID),
        (LIST_META_CONTEXT, queries(10_000), TOO_BIG),
        (LIST_META_CONTEXT, queries(65), TOO_BIG),
        (
            LIST_META_CONTEXT,
            named(b"vm", &10_000u32.to_be_bytes()),
            TOO_BIG,
        ),
        (LIST_META_CONTEXT, named(b"vm", &[0, 0, 0, 2]), INVALID),
    ] {
        client.option(option, &data);
        let (kind, message) = client.option_reply();
        assert_eq!(kind, expected, "{option} {}: {message:?}", data.len());
    }
    client.option(LIST, &[]);
    assert_eq!(client.option_reply(), (2, named(b"vm", &[])));
    assert_eq!(client.option_reply().0, ACK);
}

/// Names that clients choose are in lines of the log, in errors of commands and on terminals. None of these has more lines than
/// ringdisk writes, or controls anything.
#[test]
fn names_forge_no_lines() {
    let served = Served::start(Disk::new(), "");
    let name =
        "x\n<0>2026-01-01T00:00:00.000000Z ERROR disk vm: forged\u{1b}[2J\r\u{9b}31m\u{202e}";
    let shown =
        r"x\n<0>2026-01-01T00:00:00.000000Z ERROR disk vm: forged\u{1b}[2J\r\u{9b}31m\u{202e}";
    let mut client = Client::greeted(&served.nbd());
    client.option(1, name.as_bytes());
    client.expect_end();
    let server = &served.server;
    server.wait_for_log(&[&format!("the client asked for export '{shown}'")]);
    served.done(&["export", "vm", "--name", name]);
    server.wait_for_log(&[&format!("exported as '{shown}'")]);
    served.refused(&["export", "vm", "--name", name], shown);
    let output = served.ringdisk(&["export", "vm", "--name", name]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error.lines().count(), 1, "{error}");
    let arguments = json!({ "id": name });
    let mut qmp = control::Client::connect(served.path("control.qmp"), HANG).unwrap();
    let error = qmp
        .call("block-export-del", json!({ "id": "none" }))
        .unwrap_err();
    assert!(error.to_string().contains("none"), "{error}");
    let error = qmp.call("block-export-del", arguments).unwrap_err();
    assert!(error.to_string().contains(r"x\n<0>2026"), "{error}");
}

/// They are disconnected, and others are not.
#[test]
fn handshakes_without_sense_are_ended() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm"]);
    let mut good = Client::connect(&served.nbd(), "vm");
    let header = |option: u32, len: u32| {
        let parts = [&b"IHAVEOPT"[..], &option.to_be_bytes(), &len.to_be_bytes()];
        parts.concat()
    };
    for bytes in [
        // The name is longer than any, or longer than its option, or not the name of an export.
        header(1, 40_000),
        header(1, u32::MAX),
        [header(1, 6), b"vm\0\0\0\0".to_vec()].concat(),
        header(LIST, u32::MAX),
        b"IHAVEOPS\0\0\0\x03\0\0\0\0".to_vec(),
    ] {
        let mut client = Client::greeted(&served.nbd());
        client.send(&bytes);
        client.expect_end();
    }
    // Half a name, and no more.
    let mut client = Client::greeted(&served.nbd());
    client.send(&[header(1, 6), b"v".to_vec()].concat());
    client.stream().shutdown(Shutdown::Write).unwrap();
    client.expect_end();
    // More options than a handshake has, and it reads all replies.
    let mut client = Client::greeted(&served.nbd());
    let mut replies = client.stream();
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = replies.read_to_end(&mut bytes);
        bytes.len()
    });
    let flood = header(LIST, 0).repeat(OPTIONS);
    client.send(&flood);
    // The server may have ended the connection already.
    let _ = std::io::Write::write(&mut client.stream(), &flood);
    // A reply with the name, and one that ends the list.
    assert_eq!(reader.join().unwrap(), OPTIONS * (20 + 6 + 20));
    good.read(1, 0, 512);
    // Later lines about clients are left out.
    served
        .server
        .wait_for_log(&["NBD", "disconnected", "40000 bytes"]);
}

/// As `nbdinfo --list` does, for as many exports as there may be: it asks for each by its name, twice.
#[test]
fn all_exports_can_be_asked_for_in_one_handshake() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm"]);
    let mut client = Client::greeted(&served.nbd());
    client.option(STRUCTURED_REPLY, &[]);
    assert_eq!(client.option_reply().0, ACK);
    client.option(LIST, &[]);
    while client.option_reply().0 != ACK {}
    for _ in 0..4096 {
        for (option, data) in [
            (INFO, named(b"vm", &[0; 2])),
            (LIST_META_CONTEXT, named(b"vm", &[0; 4])),
        ] {
            client.option(option, &data);
            while client.option_reply().0 != ACK {}
        }
    }
    client.option(1, b"vm");
    client.stream().read_exact(&mut [0; 10]).unwrap();
}

/// What a client has not sent completely is not done; what is wrong is refused; the others go on.
#[test]
fn requests_without_sense_are_refused() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm", "--writable"]);
    let mut good = Client::connect(&served.nbd(), "vm");
    let mut client = Client::connect(&served.nbd(), "vm");
    let end = DISK_BYTES;
    let (fua, no_hole, unknown) = (1, 2, 0x8000);
    for (flags, kind, at, len, error) in [
        // FUA belongs to every command.
        (fua, 0, 0, 512, 0),
        (fua, 3, 0, 0, 0),
        (no_hole, 0, 0, 512, 22),
        (no_hole, 1, 0, 512, 22),
        (unknown, 1, 0, 512, 22),
        (unknown, 6, 0, 512, 22),
        (0, 1, end - 512, 1024, 28),
        (0, 1, u64::MAX - 511, 512, 28),
        (0, 1, 256, 512, 22),
        (0, 1, 0, 100, 22),
        (0, 4, end - 512, 1024, 22),
        (0, 6, end, 512, 28),
        (0, 3, 0, 512, 22),
        (0, 0x7fff, 0, 512, 22),
    ] {
        client.send(&Client::header_with(flags, kind, 9, at, len));
        if kind == 1 {
            client.send(&vec![7; len as usize]);
        }
        assert_eq!(client.reply(), (error, 9), "{flags} {kind} {at} {len}");
        if kind == 0 && error == 0 {
            client.stream().read_exact(&mut [0; 512]).unwrap();
        }
    }
    // Half a header; half of the payload of a long write; and then nothing.
    let mut silent = Client::connect(&served.nbd(), "vm");
    silent.send(&Client::header(1, 1, 0, 512)[..14]);
    let mut lost = Client::connect(&served.nbd(), "vm");
    lost.send(&Client::header(1, 1, 0, 16 << 20));
    lost.send(&vec![7; 8 << 20]);
    assert_eq!(good.read(1, 0, 512), content(0, 512));
    drop((silent, lost));
    // Longer than any payload: what follows cannot be found.
    client.send(&Client::header(1, 1, 0, 33 << 20));
    client.expect_end();
    loop {
        let list = served.done(&["export"]);
        if list[0]["clients"] == json!(1) {
            break;
        }
    }
    for at in [0, 8 << 20, end - 512] {
        assert_eq!(good.read(2, at, 512), content(at / 512, 512));
    }
}

/// Kibibytes of memory that are in use for clients' payload.
fn payload_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssShmem:"));
    let mut words = line.unwrap().split_whitespace();
    words.nth(1).unwrap().parse().unwrap()
}

/// Many clients ask for much and read nothing. Memory has a limit, and the next client can still send the longest requests.
#[test]
fn memory_for_all_clients_is_limited() {
    let disk = Disk::new();
    let mut bytes: Vec<u8> = (0..64 * MIB).map(|i| (i / 4096 * 7 + i) as u8).collect();
    fs::write(&disk.file, &bytes).unwrap();
    let served = Served::start(disk, "cache=writeback");
    served.done(&["export", "vm", "--writable"]);
    let pid = served.server.pid();
    let idle = payload_kib(pid);
    let greedy: Vec<_> = (0..20)
        .map(|_| {
            let mut client = Client::connect(&served.nbd(), "vm");
            for cookie in 0..4 {
                client.send(&Client::header(0, cookie, 0, 16 << 20));
            }
            client
        })
        .collect();
    while payload_kib(pid) < idle + (200 << 10) {}
    let mut client = Client::connect(&served.nbd(), "vm");
    for at in [0, 32 * MIB] {
        assert!(client.read(1, at as u64, 32 << 20) == bytes[at..at + 32 * MIB]);
        bytes[at..at + 32 * MIB].reverse();
        let new = &bytes[at..at + 32 * MIB];
        assert_eq!(client.write(2, at as u64, new), 0);
        assert_eq!(client.write(3, at as u64 + 4096, &new[4096..8192]), 0);
    }
    // Replies in chunks.
    if have(&["nbdcopy"], "memory_for_all_clients_is_limited") {
        let copy = served.path("copy.raw");
        let arguments = ["--request-size=33554432", "--connections=1"];
        run(
            "nbdcopy",
            &[&arguments[..], &[&served.uri("vm"), text(&copy)]].concat(),
        );
        assert!(fs::read(&copy).unwrap() == bytes);
    }
    let used = payload_kib(pid) - idle;
    // 256 MiB for all, and 1 MiB for each.
    assert!(used < (256 + 24) << 10, "{used} KiB");
    drop(greedy);
    loop {
        let list = served.done(&["export"]);
        if list[0]["clients"] == json!(1) {
            break;
        }
    }
    client.read(4, 0, 32 << 20);
    assert!(payload_kib(pid) - idle < 64 << 10);
}

/// While a guest uses the disk, clients share a limit of bytes in flight. A client that reads no replies, or disconnects with
/// requests in flight, does not stop the others; the longest requests are served in pieces.
#[test]
fn clients_beside_a_guest_get_their_share() {
    let disk = Disk::new();
    let mut bytes: Vec<u8> = (0..64 * MIB).map(|i| (i / 4096 * 7 + i) as u8).collect();
    fs::write(&disk.file, &bytes).unwrap();
    let served = Served::start(disk, "cache=writeback");
    served.done(&["export", "vm", "--writable"]);
    let mut guest = Device::connect(&served.disk.socket, &DeviceConfig::default()).unwrap();
    let mut greedy: Vec<_> = (0..4)
        .map(|_| {
            let mut client = Client::connect(&served.nbd(), "vm");
            for cookie in 0..64 {
                client.send(&Client::header(0, cookie, cookie << 20, 1 << 20));
            }
            client
        })
        .collect();
    let mut client = Client::connect(&served.nbd(), "vm");
    for round in 0..4 {
        for at in [0, 32 * MIB] {
            bytes[at..at + 32 * MIB].reverse();
            bytes[at] = round;
            let new = &bytes[at..at + 32 * MIB];
            assert_eq!(client.write(1, at as u64, new), 0);
            assert!(client.read(2, at as u64, 32 << 20) == *new);
            let sector = at as u64 / 512 + 8;
            assert_eq!(guest.queues[0].write(sector, &[round; 512]), 0);
            bytes[at + 4096..at + 4608].fill(round);
        }
        greedy.pop();
    }
    if have(&["nbdcopy"], "clients_beside_a_guest_get_their_share") {
        let copy = served.path("copy.raw");
        for request in ["--request-size=33554432", "--request-size=4096"] {
            let uri = served.uri("vm");
            run("nbdcopy", &[request, "--connections=4", &uri, text(&copy)]);
            assert!(fs::read(&copy).unwrap() == bytes);
        }
    }
    drop(guest);
    assert!(client.read(3, 0, 32 << 20) == bytes[..32 * MIB]);
}

/// A client that shuts down its side of the connection gets replies to all that it has sent.
#[test]
fn requests_before_the_end_of_a_connection_are_answered() {
    let disk = Disk::new();
    let bytes: Vec<u8> = (0..64 * MIB).map(|i| (i / 4096 * 7 + i) as u8).collect();
    fs::write(&disk.file, &bytes).unwrap();
    let served = Served::start(disk, "cache=writeback");
    served.done(&["export", "vm"]);
    let _guest = Device::connect(&served.disk.socket, &DeviceConfig::default()).unwrap();
    let mut clients: Vec<_> = (0..3)
        .map(|_| Client::connect(&served.nbd(), "vm"))
        .collect();
    for client in &mut clients {
        for cookie in 0..16 {
            client.send(&Client::header(0, cookie, cookie << 22, 4 << 20));
        }
        client.stream().shutdown(Shutdown::Write).unwrap();
    }
    for client in &mut clients {
        let mut left: Vec<u64> = (0..16).collect();
        while !left.is_empty() {
            let (error, cookie) = client.reply();
            assert_eq!(error, 0);
            left.retain(|&other| other != cookie);
            let mut data = vec![0; 4 << 20];
            client.stream().read_exact(&mut data).unwrap();
            assert!(data == bytes[(cookie as usize) << 22..][..4 << 20]);
        }
    }
    clients.into_iter().for_each(Client::expect_end);
}

/// A client that waits for the limit of its export holds up no client of another export.
#[test]
fn limits_of_an_export_do_not_slow_another() {
    let disk = Disk::new();
    let bytes: Vec<u8> = (0..64 * MIB).map(|i| (i / 4096 * 7 + i) as u8).collect();
    fs::write(&disk.file, &bytes).unwrap();
    let served = Served::start(disk, "cache=writeback");
    let _guest = Device::connect(&served.disk.socket, &DeviceConfig::default()).unwrap();
    served.done(&["export", "vm", "--name=slow", "--bps=4k"]);
    served.done(&["export", "vm"]);
    let mut slow = Client::connect(&served.nbd(), "slow");
    for cookie in 0..64 {
        slow.send(&Client::header(0, cookie, cookie << 16, 64 << 10));
    }
    let mut client = Client::connect(&served.nbd(), "vm");
    for at in [0, 32 * MIB] {
        assert!(client.read(1, at as u64, 32 << 20) == bytes[at..at + 32 * MIB]);
    }
    // It has not got a tenth of what it asked for.
    drop(client);
    served.done(&["export", "vm", "--name=slow", "--remove", "--force"]);
}
