//! A client that sends what it likes.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use testkit::driver::{Device, DeviceConfig, HANG};

use super::Served;
use crate::support::{Disk, wait_until};

/// A connection with short headers and simple replies.
pub struct Client(UnixStream);

impl Client {
    /// Before any option.
    pub fn greeted(socket: &Path) -> Self {
        Self::greeted_by(UnixStream::connect(socket).unwrap())
    }

    /// The same at a TCP port.
    pub fn greeted_at(address: &str) -> Self {
        let stream = OwnedFd::from(TcpStream::connect(address).unwrap());
        Self::greeted_by(stream.into())
    }

    fn greeted_by(mut stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(HANG)).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        Self(stream)
    }

    /// Uses an export, by its name only.
    pub fn connect(socket: &Path, export: &str) -> Self {
        let mut client = Self::greeted(socket);
        client.option(1, export.as_bytes());
        client.0.read_exact(&mut [0; 10]).unwrap();
        client
    }

    /// Sends an option.
    pub fn option(&mut self, option: u32, data: &[u8]) {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.0.write_all(&bytes).unwrap();
    }

    /// The type of the next reply to an option, and its data.
    pub fn option_reply(&mut self) -> (u32, Vec<u8>) {
        let mut header = [0; 20];
        self.0.read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        let mut data = vec![0; word(16) as usize];
        self.0.read_exact(&mut data).unwrap();
        (word(12), data)
    }

    /// Another handle of the same connection.
    pub fn stream(&self) -> UnixStream {
        self.0.try_clone().unwrap()
    }

    pub fn header(kind: u16, cookie: u64, at: u64, len: u32) -> Vec<u8> {
        Self::header_with(0, kind, cookie, at, len)
    }

    pub fn header_with(flags: u16, kind: u16, cookie: u64, at: u64, len: u32) -> Vec<u8> {
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(at.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes
    }

    /// The names of all exports; `None` if the server does not answer now.
    pub fn list(socket: &Path) -> Option<Vec<String>> {
        let mut stream = UnixStream::connect(socket).ok()?;
        stream.set_read_timeout(Some(HANG)).unwrap();
        let mut hello = 3u32.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT");
        hello.extend([0, 0, 0, 3, 0, 0, 0, 0]);
        stream.read_exact(&mut [0; 18]).ok()?;
        stream.write_all(&hello).ok()?;
        let mut names = Vec::new();
        loop {
            let mut header = [0; 20];
            stream.read_exact(&mut header).ok()?;
            let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            let mut data = vec![0; word(16) as usize];
            stream.read_exact(&mut data).ok()?;
            match word(12) {
                1 => return Some(names),
                2 => names.push(String::from_utf8(data[4..].to_vec()).unwrap()),
                other => panic!("reply of type {other}"),
            }
        }
    }

    /// Sends a read, as far as the socket takes it.
    pub fn try_read(&mut self, cookie: u64, at: u64, len: u32) {
        self.0.set_nonblocking(true).unwrap();
        match self.0.write(&Self::header(0, cookie, at, len)) {
            Ok(_) => {}
            Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
        }
        self.0.set_nonblocking(false).unwrap();
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    /// The error and the cookie of the next reply.
    pub fn reply(&mut self) -> (u32, u64) {
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        (error, u64::from_be_bytes(reply[8..].try_into().unwrap()))
    }

    pub fn read(&mut self, cookie: u64, at: u64, len: u32) -> Vec<u8> {
        self.send(&Self::header(0, cookie, at, len));
        assert_eq!(self.reply(), (0, cookie));
        let mut bytes = vec![0; len as usize];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Returns the error.
    pub fn write(&mut self, cookie: u64, at: u64, bytes: &[u8]) -> u32 {
        self.send(&Self::header(1, cookie, at, bytes.len() as u32));
        self.send(bytes);
        let (error, replied) = self.reply();
        assert_eq!(replied, cookie);
        error
    }

    /// Asserts that the server has ended the connection, or does.
    pub fn expect_end(mut self) {
        let mut bytes = Vec::new();
        match self.0.read_to_end(&mut bytes) {
            Ok(_) => {}
            Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset),
        }
    }
}

/// After each of these, the next request is found and answered.
#[test]
fn bad_requests_are_answered() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm"]);
    let mut client = Client::connect(&served.nbd(), "vm");
    assert_eq!(client.write(1, 0, &[1; 4096]), 1);
    for (kind, at, len) in [
        (0, 1, 512),
        (0, 16 << 20, 512),
        (0, 0, 0),
        (9, 0, 512),
        (7, 0, 512),
    ] {
        client.send(&Client::header(kind, 2, at, len));
        assert_eq!(client.reply(), (22, 2), "{kind}");
    }
    client.send(&Client::header(5, 3, 0, 16 << 20));
    assert_eq!(client.reply(), (0, 3));
    client.send(&Client::header(3, 4, 0, 0));
    assert_eq!(client.reply(), (0, 4));
    assert_eq!(client.read(5, 512, 512), crate::support::content(1, 512));
    let mut broken = Client::connect(&served.nbd(), "vm");
    broken.send(&[0x55; 28]);
    broken.expect_end();
    served
        .server
        .wait_for_log(&["NBD", "disconnected", "0x55555555"]);
}

/// A header and its payload arrive byte by byte, or many requests at once; the replies are the same.
#[test]
fn requests_arrive_in_any_pieces() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm", "--writable"]);
    let mut client = Client::connect(&served.nbd(), "vm");
    let mut all = Vec::new();
    for i in 0..100u64 {
        all.extend(Client::header(1, i, i * 4096, 4096));
        all.extend([i as u8; 4096]);
    }
    for chunk in [all.len(), 40_000, 4096 + 27, 1000] {
        let mut cookies = Vec::new();
        std::thread::scope(|threads| {
            let mut sender = client.0.try_clone().unwrap();
            let all = &all;
            threads.spawn(move || {
                for bytes in all.chunks(chunk) {
                    sender.write_all(bytes).unwrap();
                }
            });
            for _ in 0..100 {
                let (error, cookie) = client.reply();
                assert_eq!(error, 0);
                cookies.push(cookie);
            }
        });
        cookies.sort_unstable();
        assert_eq!(cookies, (0..100).collect::<Vec<_>>());
    }
    for i in 0..100u64 {
        assert_eq!(client.read(i, i * 4096, 4096), [i as u8; 4096]);
    }
}

/// One client asks for much and reads nothing, one says nothing, one asks for a handshake without end: nobody else waits.
#[test]
fn clients_that_do_not_read_delay_nobody() {
    let served = Served::start(Disk::new(), "iothreads=0");
    served.done(&["export", "vm"]);
    let mut greedy = Client::connect(&served.nbd(), "vm");
    for cookie in 0..500 {
        greedy.try_read(cookie, 0, 1 << 20);
    }
    let silent = UnixStream::connect(served.nbd()).unwrap();
    let mut device = Device::connect(&served.disk.socket, &DeviceConfig::default()).unwrap();
    let mut client = Client::connect(&served.nbd(), "vm");
    for i in 0..100 {
        device.queues[0].read(i * 8, 4096).unwrap();
        client.read(i, i * 4096, 4096);
    }
    // Its handshake takes too long.
    let log = ["NBD", "disconnected", "it has negotiated nothing for 10 s"];
    served.server.wait_for_log(&log);
    drop(silent);
    client.read(7, 0, 4096);
}

/// More clients than there may be wait until others leave. Listing the exports needs no place.
#[test]
fn more_clients_wait() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm"]);
    let mut clients: Vec<_> = (0..100)
        .map(|_| Client::connect(&served.nbd(), "vm"))
        .collect();
    let ask = || {
        let mut client = Client::greeted(&served.nbd());
        client.option(1, b"vm");
        client
    };
    let waiting = |client: &Client| {
        let stream = client.stream();
        stream.set_nonblocking(true).unwrap();
        let nothing = (&stream).read(&mut [0; 10]);
        assert_eq!(nothing.unwrap_err().kind(), ErrorKind::WouldBlock);
        stream.set_nonblocking(false).unwrap();
    };
    let leaves = ask();
    served
        .server
        .wait_for_log(&["NBD", "waits until one of 100 clients leaves"]);
    // Which of them the server sees first is not known.
    let mut both = vec![ask(), ask()];
    assert_eq!(Client::list(&served.nbd()), Some(vec!["vm".into()]));
    waiting(&leaves);
    // It does not keep its place in the queue.
    drop(leaves);
    for client in &mut clients {
        client.read(1, 0, 512);
    }
    both.iter().for_each(waiting);
    drop(clients.pop());
    let mut first = take_answered(&mut both);
    let second = both.remove(0);
    first.stream().read_exact(&mut [0; 10]).unwrap();
    first.read(1, 0, 512);
    waiting(&second);
    // The export is what it is when there is a place.
    served.done(&["export", "vm", "--remove", "--force"]);
    second.expect_end();
}

/// The data of an option that names an export.
fn named(export: &str) -> Vec<u8> {
    let name = export.as_bytes();
    [&(name.len() as u32).to_be_bytes(), name, &[0; 2]].concat()
}

const GO: u32 = 7;
const UNKNOWN: u32 = 6 | 1 << 31;
const SHUTDOWN: u32 = 7 | 1 << 31;

/// A client begins when it has all of its connections, so many of them would wait for each other: only the first 25 clients
/// are told that they may open more than one.
#[test]
fn few_clients_may_open_several_connections() {
    const CAN_MULTI_CONN: u16 = 1 << 8;
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm"]);
    let connect = || {
        let mut client = Client::greeted(&served.nbd());
        client.option(1, b"vm");
        let mut export = [0; 10];
        client.0.read_exact(&mut export).unwrap();
        let flags = u16::from_be_bytes([export[8], export[9]]);
        (client, flags & CAN_MULTI_CONN != 0)
    };
    let mut clients = Vec::new();
    for number in 0..30 {
        let (client, may_open_more) = connect();
        assert_eq!(may_open_more, number < 25, "{number}");
        clients.push(client);
    }
    clients.truncate(10);
    wait_until("places that are free", || {
        served.done(&["export"])[0]["clients"] == 10
    });
    wait_until("the flag", || connect().1);
}

/// Peers that have asked for an export once are in the handshake like all others if there is none of this name.
#[test]
fn peers_without_an_export_make_room_for_others() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm"]);
    let peers: Vec<_> = (0..64)
        .map(|_| {
            let mut peer = Client::greeted(&served.nbd());
            peer.option(GO, &named("none"));
            assert_eq!(peer.option_reply().0, UNKNOWN);
            peer
        })
        .collect();
    let mut client = Client::connect(&served.nbd(), "vm");
    client.read(1, 0, 512);
    let line = "was disconnected: 64 peers are in the handshake, and it came first";
    served.server.wait_for_log(&["NBD", line]);
    drop(peers);
}

/// They have no places in the handshake. Beyond their limit, they are told why they get none.
#[test]
fn clients_that_wait_keep_nobody_out() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm"]);
    let clients: Vec<_> = (0..100)
        .map(|_| Client::connect(&served.nbd(), "vm"))
        .collect();
    let ask = || {
        let mut client = Client::greeted(&served.nbd());
        client.option(GO, &named("vm"));
        client
    };
    let mut waiting: Vec<_> = (0..256).map(|_| ask()).collect();
    assert_eq!(Client::list(&served.nbd()), Some(vec!["vm".into()]));
    // Whichever is seen last is told.
    waiting.push(ask());
    let mut refused = take_answered(&mut waiting);
    let (kind, text) = refused.option_reply();
    let text = String::from_utf8(text).unwrap();
    assert_eq!(kind, SHUTDOWN, "{text}");
    assert!(text.contains("too many clients: 100 clients use"), "{text}");
    refused.expect_end();
    let log = ["NBD", "disconnected", "256 wait until one of them leaves"];
    served.server.wait_for_log(&log);
    // The oldest form of the option has no reply for errors.
    let mut old = Client::greeted(&served.nbd());
    old.option(1, b"vm");
    old.expect_end();
    // The others get the places.
    drop(clients);
    let mut next = take_answered(&mut waiting);
    while next.option_reply().0 != 1 {}
    next.read(1, 0, 512);
}

/// Waits until one has an answer, which is returned.
fn take_answered(clients: &mut Vec<Client>) -> Client {
    let mut found = None;
    wait_until("an answer", || {
        found = clients.iter().position(|client| {
            let mut ready = [PollFd::new(&client.0, PollFlags::IN)];
            poll(&mut ready, Some(&Timespec::default())).unwrap() > 0
        });
        found.is_some()
    });
    clients.swap_remove(found.unwrap())
}
