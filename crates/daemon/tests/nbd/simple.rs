//! Clients with simple replies, such as the kernel's: a reply is a header and all of its data, whatever else is in flight and
//! in however many pieces the server reads it.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;

use testkit::driver::{Device, DeviceConfig};
use testkit::random::Random;

use super::raw::Client;
use super::{Served, have, run, text};
use crate::support::Disk;

const MIB: usize = 1 << 20;
const DISK: usize = 64 * MIB;

/// A disk of 64 MiB in which no two sectors are alike.
fn large() -> (Disk, Vec<u8>) {
    let disk = Disk::new();
    let words = (0..DISK as u64 / 8).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    let bytes: Vec<u8> = words.flatten().collect();
    fs::write(&disk.file, &bytes).unwrap();
    (disk, bytes)
}

/// Sends rounds of requests, most of them short and some long, and checks that each is answered once, with its own data.
/// With `others`, there are also flushes, writes of what is there, and reads that are refused.
#[track_caller]
fn pipeline(client: &mut Client, content: &[u8], seed: u64, others: bool) {
    let mut random = Random(seed);
    for _ in 0..12 {
        let mut sent = BTreeMap::new();
        let mut bytes = Vec::new();
        let count = 8 + random.below(24);
        for cookie in 0..count {
            let len = match random.below(8) {
                0 => (1 + random.below(4) as usize) * MIB,
                _ => 512 << random.below(5),
            };
            let at = random.below((DISK - len) as u64 / 512) * 512;
            let (kind, at, len) = match random.below(8) {
                0 if others => (3, 0, 0),
                1 if others => (0, DISK as u64, 512),
                2 if others => (1, at, 512),
                _ => (0, at, len),
            };
            bytes.extend(Client::header(kind, cookie, at, len as u32));
            if kind == 1 {
                bytes.extend(&content[at as usize..at as usize + len]);
            }
            sent.insert(cookie, (kind, at, len));
        }
        client.send(&bytes);
        while !sent.is_empty() {
            let (error, cookie) = client.reply();
            let (kind, at, len) = sent.remove(&cookie).expect("sent, and not answered before");
            if kind == 0 && at == DISK as u64 {
                assert_eq!(error, 22);
                continue;
            }
            assert_eq!(error, 0, "{kind} {at} {len}");
            if kind == 0 {
                let mut data = vec![0; len];
                client.stream().read_exact(&mut data).unwrap();
                let at = at as usize;
                assert!(data == content[at..at + len], "{len} bytes at {at} differ");
            }
        }
    }
}

/// The same with libnbd, which is told not to ask for structured replies.
#[track_caller]
fn pipeline_with_libnbd(uri: &str, content: &Path, seed: u64) {
    if have(&["python3", "nbdinfo"], "pipelined reads with libnbd") {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nbd/pipelined.py");
        let seed = seed.to_string();
        let differ = run("python3", &[script, uri, text(content), &seed, "6", "4"]);
        assert_eq!(differ.trim(), "0", "reads differ");
    }
}

/// Reads of a backup are always limited to its share of the storage, and longer ones are served in pieces.
#[test]
fn simple_replies_of_a_backup_are_whole() {
    let (disk, content) = large();
    let served = Served::start(disk, "");
    let expected = served.path("expected");
    fs::write(&expected, &content).unwrap();
    served.done(&["backup", "begin", "vm"]);
    // What the guest overwrites comes from the fleece.
    let mut guest = Device::connect(&served.disk.socket, &DeviceConfig::default()).unwrap();
    for at in (0..DISK / 2).step_by(MIB) {
        assert_eq!(guest.queues[0].write(at as u64 / 512, &[0xa5; 8192]), 0);
    }
    for seed in 1..=6 {
        let mut client = Client::connect(&served.nbd(), "vm-backup");
        pipeline(&mut client, &content, seed, false);
    }
    pipeline_with_libnbd(&served.uri("vm-backup"), &expected, 1);
    served.done(&["backup", "end"]);
}

/// So are those of an export whose disk a guest uses.
#[test]
fn simple_replies_beside_a_guest_are_whole() {
    let (disk, content) = large();
    let served = Served::start(disk, "cache=writeback");
    served.done(&["export", "vm", "--writable"]);
    let _guest = Device::connect(&served.disk.socket, &DeviceConfig::default()).unwrap();
    for seed in 1..=6 {
        let mut client = Client::connect(&served.nbd(), "vm");
        pipeline(&mut client, &content, seed, true);
    }
    let file = served.disk.file.clone();
    pipeline_with_libnbd(&served.uri("vm"), &file, 2);
}

/// Other clients have taken all memory that is shared: long reads are served in pieces, with the memory of the connection.
#[test]
fn simple_replies_without_memory_are_whole() {
    let (disk, content) = large();
    let served = Served::start(disk, "cache=writeback");
    served.done(&["export", "vm", "--writable"]);
    let mut greedy = Vec::new();
    for _ in 0..10 {
        let mut client = Client::connect(&served.nbd(), "vm");
        for cookie in 0..60 {
            client.send(&Client::header(0, cookie, 0, 1 << 20));
        }
        greedy.push(client);
    }
    // A read in one piece, which structured replies can ask for, is refused once the memory is used up.
    let mut probe = Structured::connect(&served.nbd());
    while !probe.is_refused(4 << 20) {}
    for seed in 1..=6 {
        let mut client = Client::connect(&served.nbd(), "vm");
        pipeline(&mut client, &content, seed, true);
    }
    let file = served.disk.file.clone();
    pipeline_with_libnbd(&served.uri("vm"), &file, 3);
    drop(greedy);
}

/// A client with structured replies.
struct Structured(Client);

impl Structured {
    fn connect(socket: &Path) -> Self {
        let mut client = Client::greeted(socket);
        client.option(8, &[]);
        assert_eq!(client.option_reply().0, 1);
        client.option(1, b"vm");
        client.stream().read_exact(&mut [0; 10]).unwrap();
        Self(client)
    }

    /// Whether a read that must be answered in one chunk is refused, because there is no memory for it.
    fn is_refused(&mut self, len: u32) -> bool {
        let dont_fragment = 1 << 2;
        self.0
            .send(&Client::header_with(dont_fragment, 0, 7, 0, len));
        let mut header = [0; 20];
        self.0.stream().read_exact(&mut header).unwrap();
        let is_error = header[6] & 0x80 != 0;
        let rest = u32::from_be_bytes(header[16..].try_into().unwrap());
        let mut data = vec![0; rest as usize];
        self.0.stream().read_exact(&mut data).unwrap();
        is_error
    }
}
