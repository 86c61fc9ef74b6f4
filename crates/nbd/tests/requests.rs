//! Requests and replies.

use nbd::{
    BASE_ALLOCATION, BlockStatus, Command, ErrorCode, Mode, PAYLOAD_BYTES_MAX, ProtocolError,
    Replies, RequestHeader, STATE_HOLE, STATE_ZERO,
};

use crate::checks::export;

const FUA: u16 = 1;
const DF: u16 = 4;
const FAST: u16 = 16;
const PAYLOAD_LEN: u16 = 32;

fn request(mode: Mode, flags: u16, kind: u16, offset: u64, len: u64) -> Vec<u8> {
    let magic: u32 = match mode {
        Mode::Extended => 0x21e4_1c71,
        _ => 0x2560_9513,
    };
    let mut bytes = magic.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(9u64.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    match mode {
        Mode::Extended => bytes.extend(len.to_be_bytes()),
        _ => bytes.extend((len as u32).to_be_bytes()),
    }
    bytes
}

fn command(mode: Mode, flags: u16, kind: u16, at: u64, len: u64) -> Result<Command, ErrorCode> {
    let bytes = request(mode, flags, kind, at, len);
    let header = RequestHeader::parse(&bytes, mode).unwrap().unwrap();
    assert_eq!((header.cookie, header.offset), (9, at));
    let command = header.command(mode, &export("disk"), true);
    command.map_err(|refusal| refusal.code)
}

#[test]
fn requests_are_checked() {
    let simple = |flags, kind, at, len| command(Mode::Simple, flags, kind, at, len);
    let at = 4096;
    let whole = false;
    let read = Command::Read {
        at,
        len: 512,
        whole,
    };
    assert_eq!(simple(0, 0, at, 512), Ok(read));
    let fua = true;
    assert_eq!(
        simple(FUA, 1, at, 512),
        Ok(Command::Write { at, len: 512, fua })
    );
    assert_eq!(simple(0, 3, 0, 0), Ok(Command::Flush));
    assert_eq!(simple(0, 2, 0, 0), Ok(Command::Disconnect));
    assert_eq!(
        simple(FUA, 4, at, 1 << 20),
        Ok(Command::Trim {
            at,
            len: 1 << 20,
            fua
        })
    );
    let zeroes = Command::WriteZeroes {
        at,
        len: 512,
        fua: false,
        unmap: true,
        fast: true,
    };
    assert_eq!(simple(FAST, 6, at, 512), Ok(zeroes));

    assert_eq!(simple(0, 0, at, 0), Err(ErrorCode::Invalid));
    assert_eq!(simple(0, 0, at, 511), Err(ErrorCode::Invalid));
    assert_eq!(simple(0, 0, 1, 512), Err(ErrorCode::Invalid));
    assert_eq!(simple(0, 0, 1 << 30, 512), Err(ErrorCode::Invalid));
    assert_eq!(simple(0, 1, 1 << 30, 512), Err(ErrorCode::NoSpace));
    assert_eq!(simple(0, 1, u64::MAX - 511, 512), Err(ErrorCode::NoSpace));
    assert_eq!(simple(0, 0, 0, 64 << 20), Err(ErrorCode::Invalid));
    assert_eq!(simple(0, 8, 0, 512), Err(ErrorCode::Invalid));
    assert_eq!(simple(DF, 0, 0, 512), Err(ErrorCode::Invalid));
    assert_eq!(
        command(Mode::Structured, DF, 0, 0, 64 << 20),
        Err(ErrorCode::Overflow)
    );
    assert_eq!(simple(0, 3, 0, 512), Err(ErrorCode::Invalid));
}

#[test]
fn read_only_exports_are_not_changed() {
    for kind in [1, 4, 6] {
        let bytes = request(Mode::Simple, 0, kind, 0, 512);
        let header = RequestHeader::parse(&bytes, Mode::Simple).unwrap().unwrap();
        let refused = header.command(Mode::Simple, &export("image"), true);
        assert_eq!(refused.unwrap_err().code, ErrorCode::NotPermitted);
    }
}

/// The payload is known before the request is checked, so that the next request is found also after one that is refused.
#[test]
fn payload_is_known_for_every_request() {
    let payload = |mode, flags, kind, len| {
        let bytes = request(mode, flags, kind, 1, len);
        let header = RequestHeader::parse(&bytes, mode).unwrap().unwrap();
        header.payload(mode)
    };
    assert_eq!(payload(Mode::Simple, 0, 1, 100), Ok(100));
    assert_eq!(payload(Mode::Simple, 0, 0, 100), Ok(0));
    assert_eq!(payload(Mode::Extended, 0, 0, 100), Ok(0));
    // As QEMU's client sends it.
    assert_eq!(payload(Mode::Extended, 0, 1, 100), Ok(100));
    assert_eq!(payload(Mode::Extended, PAYLOAD_LEN, 7, 100), Ok(100));
    let long = u64::from(PAYLOAD_BYTES_MAX) + 1;
    assert_eq!(
        payload(Mode::Simple, 0, 1, long),
        Err(ProtocolError::Payload(long))
    );
    assert_eq!(
        payload(Mode::Extended, PAYLOAD_LEN, 1, u64::MAX),
        Err(ProtocolError::Payload(u64::MAX))
    );
    let (at, len, fua) = (0, 512, false);
    let write = Ok(Command::Write { at, len, fua });
    assert_eq!(command(Mode::Extended, 0, 1, 0, 512), write);
    assert_eq!(command(Mode::Extended, PAYLOAD_LEN, 1, 0, 512), write);
    let invalid = Err(ErrorCode::Invalid);
    assert_eq!(command(Mode::Extended, PAYLOAD_LEN, 0, 0, 512), invalid);
}

#[test]
fn headers_arrive_in_pieces() {
    for mode in [Mode::Simple, Mode::Extended] {
        let bytes = request(mode, 0, 0, 0, 512);
        for len in 0..bytes.len() {
            assert_eq!(RequestHeader::parse(&bytes[..len], mode), Ok(None));
        }
        let other = match mode {
            Mode::Extended => Mode::Simple,
            _ => Mode::Extended,
        };
        assert!(RequestHeader::parse(&bytes, other).is_err());
    }
}

/// Byte for byte, as in the specification.
#[test]
fn replies_have_their_layout() {
    let reply = |mode, write: &dyn Fn(&Replies, &mut Vec<u8>)| {
        let mut out = Vec::new();
        write(&Replies { mode }, &mut out);
        out
    };
    let done = |mode| reply(mode, &|r, out| r.done(9, 4096, out));
    assert_eq!(
        done(Mode::Simple),
        b"\x67\x44\x66\x98\0\0\0\0\0\0\0\0\0\0\0\x09"
    );
    assert_eq!(
        done(Mode::Structured),
        b"\x66\x8e\x33\xef\0\x01\0\0\0\0\0\0\0\0\0\x09\0\0\0\0"
    );
    let extended = done(Mode::Extended);
    assert_eq!(
        (extended.len(), &extended[16..24]),
        (32, &4096u64.to_be_bytes()[..])
    );

    let data = reply(Mode::Structured, &|r, out| {
        r.data_header(9, (4096, 8192), 512, true, out)
    });
    assert_eq!(data[4..8], [0, 1, 0, 1]);
    assert_eq!(data[16..20], 520u32.to_be_bytes());
    assert_eq!(data[20..], 8192u64.to_be_bytes());
    // Whatever the part, extended headers repeat the offset of the request.
    let data = reply(Mode::Extended, &|r, out| {
        r.data_header(9, (4096, 8192), 512, false, out)
    });
    assert_eq!(data[16..24], 4096u64.to_be_bytes());
    assert_eq!(data[32..], 8192u64.to_be_bytes());

    let flags = STATE_HOLE | STATE_ZERO;
    let extents = [
        BlockStatus { len: 512, flags: 0 },
        BlockStatus { len: 1024, flags },
    ];
    let status = |mode| {
        reply(mode, &|r, out| {
            r.block_status(9, 0, BASE_ALLOCATION, &extents, true, out)
        })
    };
    let short = status(Mode::Structured);
    assert_eq!(
        short[20..],
        [
            [0, 0, 0, 0],
            [0, 0, 2, 0],
            [0, 0, 0, 0],
            [0, 0, 4, 0],
            [0, 0, 0, 3]
        ]
        .concat()
    );
    let long = status(Mode::Extended);
    assert_eq!(long[6..8], [0, 6]);
    assert_eq!(long[24..32], 40u64.to_be_bytes());
    assert_eq!(long[36..40], 2u32.to_be_bytes());
    assert_eq!(long.len(), 32 + 40);
}
