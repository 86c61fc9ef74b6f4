//! What must be true of any bytes that a client sends. Shared by the fuzz target and the property tests.

use nbd::{
    BlockSizes, Command, ExportInfo, Exports, GREETING, Handshake, ListedExport, Mode,
    OPTION_BYTES_MAX, PAYLOAD_BYTES_MAX, RequestHeader, Step, Tls, flags,
};

/// Two exports, one of which is read-only.
pub struct Two;

pub fn export(name: &str) -> ExportInfo {
    let read_only = match name {
        "disk" => flags::SEND_TRIM | flags::SEND_WRITE_ZEROES | flags::SEND_FAST_ZERO,
        _ => flags::READ_ONLY,
    };
    ExportInfo {
        name: name.to_owned(),
        description: "a disk".to_owned(),
        size: 1 << 30,
        flags: flags::HAS_FLAGS | flags::SEND_FLUSH | flags::SEND_FUA | read_only,
        blocks: BlockSizes {
            minimum: 512,
            preferred: 4096,
            maximum: PAYLOAD_BYTES_MAX,
        },
        bitmaps: match name {
            "disk" => vec!["nightly".into(), "a:b".into()],
            _ => Vec::new(),
        },
    }
}

impl Exports for Two {
    fn next(&self, after: Option<&str>) -> Option<ListedExport> {
        let mut names = ["disk", "image"].into_iter();
        let name = names.find(|name| after.is_none_or(|after| *name > after))?;
        Some(ListedExport {
            key: name.into(),
            name: name.into(),
            description: export(name).description,
        })
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        matches!(name, "disk" | "image").then(|| export(name))
    }
}

/// Runs a handshake and the requests after it. The first byte decides how many of the others arrive at once, and whether the
/// server requires TLS, whose bytes are left out.
pub fn session(bytes: &[u8]) {
    let [chunk, bytes @ ..] = bytes else {
        return;
    };
    let mut tls = if chunk & 0x80 == 0 {
        Tls::Required
    } else {
        Tls::Off
    };
    let chunk = usize::from(chunk & 0x7f).max(1);
    let mut handshake = Handshake::new(tls);
    let mut out = GREETING.to_vec();
    // What has arrived grows only when the handshake asks for more.
    let (mut start, mut end) = (0, 0);
    let negotiated = loop {
        let before = out.len();
        let begins = handshake.asks_to_begin(&bytes[start..end]);
        let Ok((used, step)) = handshake.advance(&bytes[start..end], &Two, &mut out) else {
            return;
        };
        assert!(used <= end - start);
        assert!(begins || !matches!(step, Step::Ready(_)), "unannounced");
        // A reply is never much longer than what the client asked for.
        assert!(out.len() - before <= 2 * OPTION_BYTES_MAX, "{}", out.len());
        start += used;
        match step {
            Step::Continue if used == 0 => {
                assert!(end - start < OPTION_BYTES_MAX + 16, "it waits for ever");
                if end == bytes.len() {
                    return;
                }
                end = bytes.len().min(end + chunk);
            }
            Step::Continue | Step::More => {}
            Step::End => return,
            Step::StartTls => {
                assert_eq!(tls, Tls::Required);
                tls = Tls::On;
                handshake = handshake.protected();
            }
            Step::Ready(negotiated) => break negotiated,
        }
    };
    assert_ne!(tls, Tls::Required);
    assert!(negotiated.contexts.is_empty() || negotiated.mode > Mode::Simple);
    requests(&bytes[start..], negotiated.mode, &negotiated.export);
}

fn requests(mut bytes: &[u8], mode: Mode, export: &ExportInfo) {
    while let Ok(Some(header)) = RequestHeader::parse(bytes, mode) {
        bytes = &bytes[RequestHeader::bytes(mode)..];
        let Ok(payload) = header.payload(mode) else {
            return;
        };
        assert!(payload <= PAYLOAD_BYTES_MAX);
        match header.command(mode, export, true) {
            Ok(command) => sound(command, payload, export),
            Err(refusal) => assert!(!refusal.message.is_empty()),
        }
        bytes = bytes.get(payload as usize..).unwrap_or_default();
    }
}

fn sound(command: Command, payload: u32, export: &ExportInfo) {
    let (at, len, changes) = match command {
        Command::Flush | Command::Disconnect => return,
        Command::Read { at, len, .. } => {
            assert!(len <= PAYLOAD_BYTES_MAX);
            (at, u64::from(len), false)
        }
        Command::Write { at, len, .. } => {
            assert_eq!(len, payload);
            (at, u64::from(len), true)
        }
        Command::Trim { at, len, .. } | Command::WriteZeroes { at, len, .. } => (at, len, true),
        Command::Cache { at, len } | Command::BlockStatus { at, len, .. } => (at, len, false),
    };
    assert!(len > 0 && at.checked_add(len).is_some_and(|end| end <= export.size));
    assert!(!changes || !export.is_read_only());
    if !matches!(command, Command::BlockStatus { .. }) {
        assert_eq!((at | len) % 512, 0);
    }
}
