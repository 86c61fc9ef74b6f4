//! Sessions of servers, right and wrong ones.

use super::check::{check, session};
use super::*;

const SEEDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/nbd_client");

fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut reply = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    for word in [option, kind, data.len() as u32] {
        reply.extend(word.to_be_bytes());
    }
    [reply, data.to_vec()].concat()
}

fn chunk(flags: u16, kind: u16, cookie: u64, data: &[u8]) -> Vec<u8> {
    let mut chunk = STRUCTURED_MAGIC.to_be_bytes().to_vec();
    chunk.extend(flags.to_be_bytes());
    chunk.extend(kind.to_be_bytes());
    chunk.extend(cookie.to_be_bytes());
    chunk.extend((data.len() as u32).to_be_bytes());
    [chunk, data.to_vec()].concat()
}

/// A handshake with this many contexts, and what the client asks for then: a bit for each turn.
fn greeted(contexts: u8, turns: u8) -> Vec<u8> {
    // The number of contexts is the remainder.
    let choice =
        (turns << 2..=u8::MAX).find(|choice| choice % 3 == contexts && choice >> 2 == turns);
    let mut all = vec![choice.unwrap()];
    all.extend(b"NBDMAGICIHAVEOPT\0\x03");
    all.extend(option_reply(OPT_STRUCTURED_REPLY, REP_ACK, &[]));
    if contexts > 0 {
        let names = ["base:allocation", "qemu:dirty-bitmap:b"];
        for (id, name) in (1_u32..).zip(&names[..usize::from(contexts)]) {
            let data = [&id.to_be_bytes()[..], name.as_bytes()].concat();
            all.extend(option_reply(OPT_SET_META_CONTEXT, REP_META_CONTEXT, &data));
        }
        all.extend(option_reply(OPT_SET_META_CONTEXT, REP_ACK, &[]));
    }
    let info = [&[0, 0][..], &(1_u64 << 20).to_be_bytes(), &[0, 1]].concat();
    all.extend(option_reply(OPT_GO, REP_INFO, &info));
    all.extend(option_reply(OPT_GO, REP_ACK, &[]));
    all
}

fn data(at: u64, bytes: usize) -> Vec<u8> {
    [&at.to_be_bytes()[..], &vec![7; bytes]].concat()
}

fn hole(at: u64, bytes: u32) -> Vec<u8> {
    [&at.to_be_bytes()[..], &bytes.to_be_bytes()].concat()
}

fn done(cookies: std::ops::Range<u64>) -> Vec<u8> {
    cookies
        .flat_map(|cookie| chunk(1, CHUNK_NONE, cookie, &[]))
        .collect()
}

/// Sessions of servers: correct ones, with data in any order, and those whose names say what is wrong.
fn sessions() -> Vec<(&'static str, Vec<u8>, bool)> {
    [reading_sessions(), other_sessions()].concat()
}

fn reading_sessions() -> Vec<(&'static str, Vec<u8>, bool)> {
    let reads = |first: Vec<u8>| {
        let others = (2..5).flat_map(|cookie| chunk(1, CHUNK_DATA, cookie, &data(4096, 600)));
        [greeted(0, 0), first, others.collect(), done(5..8)].concat()
    };
    vec![
        (
            "read",
            reads(chunk(1, CHUNK_DATA, 1, &data(4096, 600))),
            true,
        ),
        (
            "read-backwards",
            reads(
                [
                    chunk(0, CHUNK_DATA, 1, &data(4396, 300)),
                    chunk(0, CHUNK_HOLE, 1, &hole(4096, 100)),
                    chunk(1, CHUNK_DATA, 1, &data(4196, 200)),
                ]
                .concat(),
            ),
            true,
        ),
        (
            "read-twice-the-same",
            reads(
                [
                    chunk(0, CHUNK_DATA, 1, &data(4096, 300)),
                    chunk(1, CHUNK_DATA, 1, &data(4096, 300)),
                ]
                .concat(),
            ),
            false,
        ),
        (
            "read-overlaps",
            reads(
                [
                    chunk(0, CHUNK_DATA, 1, &data(4096, 400)),
                    chunk(1, CHUNK_HOLE, 1, &hole(4300, 200)),
                ]
                .concat(),
            ),
            false,
        ),
        (
            "read-outside",
            reads(chunk(1, CHUNK_DATA, 1, &data(0, 600))),
            false,
        ),
        (
            "read-empty-chunk",
            reads(
                [
                    chunk(0, CHUNK_HOLE, 1, &hole(4096, 0)),
                    chunk(1, CHUNK_DATA, 1, &data(4096, 600)),
                ]
                .concat(),
            ),
            false,
        ),
        (
            "read-error",
            reads(chunk(1, CHUNK_ERROR | 1, 1, &[0, 0, 0, 5, 0, 0])),
            false,
        ),
    ]
}

/// The same of block status, and of servers without structured replies.
fn other_sessions() -> Vec<(&'static str, Vec<u8>, bool)> {
    let statuses = |first: Vec<u8>| {
        let reads = (2..5).flat_map(|cookie| chunk(1, CHUNK_DATA, cookie, &data(4096, 600)));
        [greeted(2, 1), first, reads.collect(), done(5..8)].concat()
    };
    let extents_from = |id: u32, bytes: u32| {
        let words = [id, bytes, 0, 8192, 3];
        words.map(u32::to_be_bytes).concat()
    };
    let extents = |id: u32| extents_from(id, 4096);
    let refused = option_reply(OPT_STRUCTURED_REPLY, REP_ERROR | 1, b"no");
    vec![
        (
            "status",
            statuses(
                [
                    chunk(0, CHUNK_STATUS, 1, &extents(2)),
                    chunk(1, CHUNK_STATUS, 1, &extents(1)),
                ]
                .concat(),
            ),
            true,
        ),
        (
            "status-twice",
            statuses(
                [
                    chunk(0, CHUNK_STATUS, 1, &extents(1)),
                    chunk(0, CHUNK_STATUS, 1, &extents(1)),
                    chunk(1, CHUNK_STATUS, 1, &extents(2)),
                ]
                .concat(),
            ),
            false,
        ),
        (
            "status-of-nothing",
            statuses(
                [
                    chunk(0, CHUNK_STATUS, 1, &extents(1)),
                    chunk(1, CHUNK_STATUS, 1, &extents_from(2, 0)),
                ]
                .concat(),
            ),
            false,
        ),
        (
            "status-of-one",
            statuses(chunk(1, CHUNK_STATUS, 1, &extents(1))),
            false,
        ),
        (
            "no-structured-replies",
            [vec![0], b"NBDMAGICIHAVEOPT\0\x03".to_vec(), refused].concat(),
            false,
        ),
    ]
}

/// `RINGDISK_WRITE_SEEDS=1` writes the seeds.
#[test]
fn replies_are_taken_or_refused() {
    for (name, bytes, is_right) in sessions() {
        check(&bytes);
        let result = session(&bytes, 0);
        assert_eq!(result.is_ok(), is_right, "{name}: {result:?}");
        let seed = format!("{SEEDS}/{name}");
        if std::env::var_os("RINGDISK_WRITE_SEEDS").is_some() {
            std::fs::create_dir_all(SEEDS).unwrap();
            std::fs::write(&seed, &bytes).unwrap();
        }
        assert!(std::fs::read(&seed).unwrap() == bytes, "{seed}");
    }
    for seed in std::fs::read_dir(SEEDS).unwrap() {
        check(&std::fs::read(seed.unwrap().path()).unwrap());
    }
}

/// Every prefix of a session, and sessions with a byte changed: nothing panics, and no read is accepted of which a part
/// is missing.
#[test]
fn broken_replies_are_refused() {
    for (_, bytes, _) in sessions() {
        for at in (0..bytes.len()).step_by(7) {
            check(&bytes[..at]);
            let mut changed = bytes.clone();
            changed[at] ^= 1 << (at % 8);
            check(&changed);
        }
    }
}
