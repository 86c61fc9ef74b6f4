//! Header, payload and descriptors of one message. Input: the header, the number of descriptors, the payload.

use std::fs::File;
use std::os::fd::OwnedFd;

use super::{Input, Seeds};

pub fn check(data: &[u8]) {
    let mut input = Input(data);
    let header: [u8; 12] = input.bytes();
    let n_fds = usize::from(input.u8() % 34);
    let null = File::open("/dev/null").expect("there is /dev/null");
    let fd = |_| OwnedFd::from(null.try_clone().expect("there are descriptors"));
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("4 bytes"));

    // What the socket delivers is as long as the header says, if that is allowed at all.
    let mut payload = input.0.to_vec();
    payload.resize(word(8).min(4096) as usize, 0);
    let accepted = guest::accepts_message(header, &payload, (0..n_fds).map(fd).collect());

    let (request, flags, len) = (word(0), word(4), payload.len());
    let header_is_good = flags & 7 == 1 && word(8) <= 8 + 32 * 32;
    let expected = header_is_good && is_legal(request, &payload, n_fds);
    assert_eq!(
        accepted, expected,
        "message {request} with flags {flags:#x}, {len} bytes and {n_fds} descriptors"
    );
}

/// What the specification asks of a message's payload and descriptors ("Front-end message types").
fn is_legal(request: u32, payload: &[u8], n_fds: usize) -> bool {
    let word = |at: usize| u32::from_ne_bytes(payload[at..at + 4].try_into().expect("4 bytes"));
    match (request, payload.len()) {
        // Queries and commands without a payload.
        (1 | 3 | 4 | 15 | 17 | 34 | 36 | 40, 0) => n_fds == 0,
        // One 64-bit number, or a ring and a number.
        (2 | 8 | 10 | 11 | 16 | 39, 8) => n_fds == 0,
        // Where the dirty log is, and what to tell of it.
        (6, 16) => n_fds == 1,
        (7, 0) => n_fds == 1,
        // An inflight description.
        (31, 24) => n_fds == 0,
        (32, 24) => n_fds == 1,
        (18, 8) => n_fds == 0 && word(4) <= 1,
        (12..=14, 8) => n_fds == usize::from(word(0) & 0x100 == 0),
        (9, 40) => n_fds == 0,
        (21, 0) => n_fds == 1,
        (37, 40) => n_fds == 1,
        (38, 40) => n_fds <= 1,
        (5, len @ 8..) => {
            let regions = word(0) as usize;
            regions <= 32 && n_fds == regions && len == 8 + 32 * regions
        }
        (24 | 25, len @ 12..) => {
            let (offset, window) = (word(0) as usize, word(4) as usize);
            n_fds == 0 && window <= 256 && len >= 12 + window && offset + window <= 0x1000
        }
        _ => false,
    }
}

pub fn seeds() -> Seeds {
    let message = |request: u32, n_fds: u8, payload: &[u8]| {
        let mut bytes = Vec::new();
        for word in [request, 1, payload.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.push(n_fds);
        bytes.extend(payload);
        bytes
    };
    let table = [&2u64.to_ne_bytes()[..], &[7; 64]].concat();
    let window = [32u32, 1, 0].map(u32::to_ne_bytes).concat();
    vec![
        ("get_features", message(1, 0, &[])),
        ("set_features", message(2, 0, &[0x40; 8])),
        ("set_mem_table", message(5, 2, &table)),
        ("set_log_base", message(6, 1, &[1; 16])),
        ("set_log_fd", message(7, 1, &[])),
        ("set_vring_addr", message(9, 0, &[0; 40])),
        ("set_vring_kick", message(12, 1, &1u64.to_ne_bytes())),
        ("no_kick", message(12, 0, &0x101u64.to_ne_bytes())),
        (
            "set_vring_enable",
            message(18, 0, &[0, 0, 0, 0, 1, 0, 0, 0]),
        ),
        ("set_config", message(25, 0, &[&window[..], &[1]].concat())),
        (
            "set_config_longer",
            message(25, 0, &[&window[..], &[1; 256]].concat()),
        ),
        ("get_inflight_fd", message(31, 0, &[0; 24])),
        ("set_inflight_fd", message(32, 1, &[0; 24])),
        ("add_mem_reg", message(37, 1, &[0; 40])),
        ("rem_mem_reg", message(38, 1, &[0; 40])),
    ]
}
