//! What real clients send, recorded from ringdisk's socket: see `transcripts/README.md`.

use nbd::{BASE_ALLOCATION, Command, Handshake, Mode, Negotiated, RequestHeader, Step};

use crate::checks::Two;

/// Runs a client's bytes; returns what was negotiated, and the requests.
fn run(mut bytes: &[u8]) -> (Option<Negotiated>, Vec<Command>) {
    let mut handshake = Handshake::default();
    let negotiated = loop {
        let (used, step) = handshake.advance(bytes, &Two, &mut Vec::new()).unwrap();
        bytes = &bytes[used..];
        match step {
            Step::Ready(negotiated) => break *negotiated,
            Step::Continue if used > 0 => {}
            Step::More => {}
            _ => return (None, Vec::new()),
        }
    };
    let (mode, mut commands) = (negotiated.mode, Vec::new());
    while let Some(header) = RequestHeader::parse(bytes, mode).unwrap() {
        let payload = header.payload(mode).unwrap() as usize;
        bytes = &bytes[RequestHeader::bytes(mode) + payload..];
        commands.push(header.command(mode, &negotiated.export, true).unwrap());
    }
    assert!(bytes.is_empty());
    (Some(negotiated), commands)
}

#[test]
fn qemu_img_maps_extent_by_extent() {
    let (negotiated, commands) = run(include_bytes!("transcripts/qemu-img-10.0.2-map.bin"));
    let negotiated = negotiated.unwrap();
    assert_eq!(negotiated.mode, Mode::Extended);
    assert_eq!(negotiated.contexts, [BASE_ALLOCATION]);
    let (last, statuses) = commands.split_last().unwrap();
    assert_eq!(*last, Command::Disconnect);
    let is_status = |command: &Command| matches!(command, Command::BlockStatus { one: true, .. });
    assert!(!statuses.is_empty() && statuses.iter().all(is_status));
}

/// QEMU's write has no NBD_CMD_FLAG_PAYLOAD_LEN, although its headers are extended.
#[test]
fn qemu_io_writes_through() {
    let (negotiated, commands) = run(include_bytes!("transcripts/qemu-io-10.0.2.bin"));
    assert_eq!(negotiated.unwrap().mode, Mode::Extended);
    let (at, len, fua) = (0, 4096, true);
    assert_eq!(commands, [Command::Write { at, len, fua }]);
}

#[test]
fn nbdcopy_asks_for_extents_and_reads() {
    let (negotiated, commands) = run(include_bytes!("transcripts/nbdcopy-1.14.2.bin"));
    let negotiated = negotiated.unwrap();
    assert_eq!(negotiated.mode, Mode::Structured);
    assert_eq!(negotiated.contexts, [BASE_ALLOCATION]);
    assert!(matches!(
        commands[0],
        Command::BlockStatus { one: false, .. }
    ));
    let (last, reads) = commands[1..].split_last().unwrap();
    assert_eq!(*last, Command::Disconnect);
    let is_read = |command: &Command| matches!(command, Command::Read { len: 262_144, .. });
    assert!(reads.len() > 1 && reads.iter().all(is_read));
}

#[test]
fn nbd_client_lists_and_leaves() {
    let (negotiated, _) = run(include_bytes!("transcripts/nbd-client-3.24-list.bin"));
    assert_eq!(negotiated, None);
}
