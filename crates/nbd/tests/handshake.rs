//! The handshake: what is negotiated, and how what is not is refused.

use nbd::{
    BASE_ALLOCATION, Context, DEPTH, ExportInfo, Exports, GREETING, Handshake, HandshakeError,
    ListedExport, Mode, NAME_BYTES_MAX, Negotiated, OPTIONS_MAX, Step, Tls,
};

use crate::checks::Two;

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u32).to_be_bytes();
    [&b"IHAVEOPT"[..], &number.to_be_bytes(), &len, data].concat()
}

fn counted(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

fn go(name: &str) -> Vec<u8> {
    option(7, &[counted(name), vec![0, 0]].concat())
}

fn contexts(number: u32, export: &str, queries: &[&str]) -> Vec<u8> {
    let count = (queries.len() as u32).to_be_bytes().to_vec();
    let queries: Vec<u8> = queries.iter().flat_map(|query| counted(query)).collect();
    option(number, &[counted(export), count, queries].concat())
}

/// The types of the replies in `out`, without those of an export that was asked for by name only.
fn types(mut out: &[u8]) -> Vec<u32> {
    let mut types = Vec::new();
    while let Some((header, rest)) = out.split_at_checked(20) {
        assert_eq!(header[..8], 0x0003_e889_0455_65a9u64.to_be_bytes());
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        types.push(word(12));
        out = &rest[word(16) as usize..];
    }
    types
}

/// Runs a handshake; returns the types of all replies, and what was negotiated.
fn run(client: &[u8]) -> (Vec<u32>, Option<Box<Negotiated>>) {
    let mut handshake = Handshake::default();
    let (mut client, mut out) = (client, Vec::new());
    loop {
        let (used, step) = handshake.advance(client, &Two, &mut out).unwrap();
        client = &client[used..];
        match step {
            Step::Ready(negotiated) => return (types(&out), Some(negotiated)),
            Step::End => return (types(&out), None),
            Step::Continue if used == 0 => return (types(&out), None),
            Step::Continue | Step::More => {}
            Step::StartTls => unreachable!("this server has no TLS"),
        }
    }
}

const FLAGS: [u8; 4] = [0, 0, 0, 3];
const ACK: u32 = 1;
const SERVER: u32 = 2;
const INFO: u32 = 3;
const CONTEXT: u32 = 4;
const fn error(number: u32) -> u32 {
    number | 1 << 31
}

#[test]
fn greeting_is_fixed_newstyle() {
    assert_eq!(&GREETING, b"NBDMAGICIHAVEOPT\0\x03");
}

/// As libnbd 1.14 does.
#[test]
fn structured_replies_and_contexts_are_negotiated() {
    let client = [
        &FLAGS[..],
        &option(8, &[]),
        &contexts(10, "disk", &["base:allocation"]),
        &option(7, b"\0\0\0\x04disk\0\x01\0\x03"),
    ];
    let (replies, negotiated) = run(&client.concat());
    assert_eq!(replies, [ACK, CONTEXT, ACK, INFO, INFO, ACK]);
    let negotiated = negotiated.unwrap();
    assert_eq!(negotiated.mode, Mode::Structured);
    assert_eq!(negotiated.contexts, [BASE_ALLOCATION]);
}

/// As QEMU 10 does: extended headers come first, and are enough.
#[test]
fn extended_headers_are_negotiated() {
    let client = [
        &FLAGS[..],
        &option(11, &[]),
        &contexts(10, "disk", &["qemu:allocation-depth", "base:allocation"]),
        &go("disk"),
    ];
    let (replies, negotiated) = run(&client.concat());
    assert_eq!(replies, [ACK, CONTEXT, CONTEXT, ACK, INFO, INFO, ACK]);
    let negotiated = negotiated.unwrap();
    assert_eq!(negotiated.mode, Mode::Extended);
    assert_eq!(negotiated.contexts, [BASE_ALLOCATION, DEPTH]);
}

/// Clients such as old kernels' nbd-client ask by name only; the reply has no header, and zeroes unless they are not wanted.
#[test]
fn export_name_has_a_bare_reply() {
    for (flags, len) in [([0, 0, 0, 1], 134), (FLAGS, 10)] {
        let client = [&flags[..], &option(1, b"disk")].concat();
        let mut handshake = Handshake::default();
        let mut out = Vec::new();
        let (used, _) = handshake.advance(&client, &Two, &mut out).unwrap();
        let ready = handshake.advance(&client[used..], &Two, &mut out);
        assert!(matches!(ready, Ok((_, Step::Ready(_)))));
        assert_eq!(out.len(), len);
        assert_eq!(out[..8], (1u64 << 30).to_be_bytes());
    }
    let client = [&FLAGS[..], &option(1, b"none")].concat();
    let mut handshake = Handshake::default();
    let (used, _) = handshake.advance(&client, &Two, &mut Vec::new()).unwrap();
    let refused = handshake.advance(&client[used..], &Two, &mut Vec::new());
    assert!(matches!(refused, Err(HandshakeError::NoExport(name, _)) if name == "none"));
    // Neither this reply nor NBD_OPT_EXPORT_NAME knows extended headers.
    let mut handshake = Handshake::default();
    handshake.advance(&FLAGS, &Two, &mut Vec::new()).unwrap();
    let extended = handshake.advance(&option(11, &[]), &Two, &mut Vec::new());
    assert_eq!(extended.unwrap().1, Step::Continue);
    let refused = handshake.advance(&option(1, b"disk"), &Two, &mut Vec::new());
    assert!(matches!(refused, Err(HandshakeError::NoExport(name, _)) if name == "disk"));
}

#[test]
fn errors_are_answered_and_the_handshake_goes_on() {
    let long = option(6, &vec![0; 40_000]);
    let many = contexts(9, "disk", &["a"; 65]);
    let client = [
        &FLAGS[..],
        &option(99, b"unknown"),
        &go("none"),
        &option(3, b"data"),
        &contexts(10, "disk", &["base:allocation"]),
        &long,
        &option(8, &[]),
        &many,
        &option(8, &[]),
        &option(11, &[]),
        &option(8, &[]),
        &option(5, &[]),
        &option(7, b"\0\0\0\x09disk\0\0"),
        &option(3, &[]),
        &option(2, &[]),
    ];
    let (replies, negotiated) = run(&client.concat());
    let expected = [
        error(1),
        error(6),
        error(3),
        error(3),
        error(9),
        ACK,
        error(9),
        error(3),
        ACK,
        error(10),
        error(2),
        error(3),
        SERVER,
        SERVER,
        ACK,
        ACK,
    ];
    assert_eq!(replies, expected);
    assert_eq!(negotiated, None);
}

/// Contexts are listed by namespace, and chosen only by their whole names.
#[test]
fn contexts_are_listed_and_chosen() {
    let cases: [(u32, &[&str], usize); 12] = [
        (9, &[], 4),
        (9, &["qemu:"], 3),
        (9, &["qemu:dirty-bitmap:"], 2),
        (9, &["qemu:dirty-bitmap:a:"], 0),
        (9, &["qemu:dirty-bitmap:nightly", "qemu:dirty"], 1),
        (10, &["qemu:dirty-bitmap:"], 0),
        (10, &["qemu:dirty-bitmap:none"], 0),
        (10, &["qemu:dirty-bitmap:a:b"], 1),
        (9, &["base:", "base:allocation"], 1),
        (10, &[], 0),
        (10, &["qemu:"], 0),
        (10, &["base:allocation", "qemu:allocation-depth"], 2),
    ];
    for (number, queries, count) in cases {
        let client = [
            &FLAGS[..],
            &option(8, &[]),
            &contexts(number, "disk", queries),
        ];
        let (replies, _) = run(&client.concat());
        let found = replies.iter().filter(|kind| **kind == CONTEXT).count();
        assert_eq!(found, count, "{number} {queries:?}");
    }
}

/// Only the export that has the bitmap offers it.
#[test]
fn bitmaps_are_chosen_by_name() {
    let chosen = |export: &str| {
        let queries = ["qemu:dirty-bitmap:a:b", "base:allocation"];
        let client = [
            &FLAGS[..],
            &option(8, &[]),
            &contexts(10, export, &queries),
            &go(export),
        ];
        run(&client.concat()).1.unwrap().contexts
    };
    let bitmap = Context::of_bitmap(1);
    assert_eq!(chosen("disk"), [BASE_ALLOCATION, bitmap]);
    assert_eq!(chosen("image"), [BASE_ALLOCATION]);
    assert_eq!(bitmap.bitmap(), Some(1));
    assert_eq!(DEPTH.bitmap(), None);
}

/// Contexts belong to the export that they were chosen for.
#[test]
fn contexts_of_another_export_do_not_count() {
    let client = [
        &FLAGS[..],
        &option(8, &[]),
        &contexts(10, "image", &["base:allocation"]),
        &go("disk"),
    ];
    let (_, negotiated) = run(&client.concat());
    assert!(negotiated.unwrap().contexts.is_empty());
}

#[test]
fn endless_negotiation_ends() {
    let mut handshake = Handshake::default();
    let mut out = Vec::new();
    handshake.advance(&FLAGS, &Two, &mut out).unwrap();
    let list = option(3, &[]);
    let list_all = |handshake: &mut Handshake, out: &mut Vec<u8>| {
        let (used, step) = handshake.advance(&list, &Two, out)?;
        assert_eq!((used, step), (list.len(), Step::More));
        handshake.advance(&[], &Two, out)
    };
    for _ in 0..OPTIONS_MAX {
        list_all(&mut handshake, &mut out).unwrap();
    }
    let end = list_all(&mut handshake, &mut out);
    assert_eq!(end, Err(HandshakeError::TooMany(OPTIONS_MAX)));
    // Few options with much data, which is skipped. Before TLS, much less is enough.
    for (tls, most) in [(Tls::Off, 64 << 20), (Tls::Required, 64 << 10)] {
        let mut handshake = Handshake::new(tls);
        handshake.advance(&FLAGS, &Two, &mut out).unwrap();
        let (long, data) = (option(99, &vec![0; 1 << 20]), vec![0; 1 << 20]);
        let mut taken = 0;
        let end = loop {
            out.clear();
            match handshake.advance(&long[..16], &Two, &mut out) {
                Ok((used, _)) => taken += used,
                Err(end) => break end,
            }
            taken += handshake.advance(&data, &Two, &mut out).unwrap().0;
        };
        assert!(matches!(end, HandshakeError::TooMuch(_)), "{end}");
        assert!(taken <= most, "{taken}");
    }
    let mut handshake = Handshake::new(Tls::Required);
    handshake.advance(&FLAGS, &Two, &mut out).unwrap();
    let end = (0..100).find_map(|_| handshake.advance(&list, &Two, &mut out).err());
    assert!(matches!(end, Some(HandshakeError::TooMany(_))), "{end:?}");
}

/// Before a client may use an export, it may have to wait: the server sees the message that asks for it.
#[test]
fn the_last_option_is_seen_before_it_is_answered() {
    let mut handshake = Handshake::default();
    let mut out = Vec::new();
    assert!(!handshake.asks_to_begin(&[&FLAGS[..], &go("disk")].concat()));
    handshake.advance(&FLAGS, &Two, &mut out).unwrap();
    let go = go("disk");
    assert!(!handshake.asks_to_begin(&go[..go.len() - 1]));
    assert!(!handshake.asks_to_begin(&option(3, &[])));
    assert!(!handshake.asks_to_begin(&option(6, &go[16..])));
    assert!(handshake.asks_to_begin(&go));
    assert!(handshake.asks_to_begin(&option(1, b"disk")));
    let step = handshake.advance(&go, &Two, &mut out).unwrap().1;
    assert!(matches!(step, Step::Ready(_)), "{step:?}");
}

/// Before TLS, nothing is told and nothing is negotiated; and nothing from before it is used afterwards.
#[test]
fn tls_comes_first() {
    const TLS_REQUIRED: u32 = 5 | 1 << 31;
    const INVALID: u32 = 3 | 1 << 31;
    let mut handshake = Handshake::new(Tls::Required);
    let mut out = Vec::new();
    let mut send = |handshake: &mut Handshake, bytes: &[u8]| {
        out.clear();
        let step = handshake.advance(bytes, &Two, &mut out).unwrap();
        assert_eq!(step.0, bytes.len());
        (types(&out), step.1)
    };
    send(&mut handshake, &FLAGS);
    for (bytes, expected) in [
        (option(3, &[]), TLS_REQUIRED),
        (option(8, &[]), TLS_REQUIRED),
        (option(11, &[]), TLS_REQUIRED),
        (contexts(10, "disk", &["base:allocation"]), TLS_REQUIRED),
        (go("disk"), TLS_REQUIRED),
        (option(5, &[0]), INVALID),
    ] {
        let refused = (vec![expected], Step::Continue);
        assert_eq!(send(&mut handshake, &bytes), refused);
    }
    let began = (vec![ACK], Step::StartTls);
    assert_eq!(send(&mut handshake, &option(5, &[])), began);
    let mut handshake = handshake.protected();
    let again = (vec![INVALID], Step::Continue);
    assert_eq!(send(&mut handshake, &option(5, &[])), again);
    let (_, step) = send(&mut handshake, &go("disk"));
    let Step::Ready(negotiated) = step else {
        panic!("{step:?}");
    };
    assert_eq!(
        (negotiated.mode, negotiated.contexts),
        (Mode::Simple, vec![])
    );

    let mut handshake = Handshake::new(Tls::Required);
    handshake.advance(&FLAGS, &Two, &mut Vec::new()).unwrap();
    let mut out = Vec::new();
    let refused = handshake.advance(&option(1, b"disk"), &Two, &mut out);
    assert!(matches!(refused, Err(HandshakeError::NoExport(..))));
    assert_eq!(out, []);
    // A server without TLS.
    assert_eq!(
        run(&[&FLAGS[..], &option(5, &[])].concat()).0,
        [2 | 1 << 31]
    );
}

#[test]
fn exports_are_listed_with_their_descriptions() {
    let mut out = Vec::new();
    let client = [&FLAGS[..], &option(3, &[])].concat();
    let mut handshake = Handshake::default();
    let mut rest = &client[..];
    let mut step = Step::Continue;
    while !rest.is_empty() || step == Step::More {
        let used;
        (used, step) = handshake.advance(rest, &Two, &mut out).unwrap();
        rest = &rest[used..];
    }
    for name in ["disk", "image"] {
        let description = Two.find(name).unwrap().description;
        assert!(!description.is_empty());
        let listed = [counted(name), description.into_bytes()].concat();
        let header = [3, SERVER, listed.len() as u32]
            .map(u32::to_be_bytes)
            .concat();
        let reply = [header, listed].concat();
        assert!(out.windows(reply.len()).any(|part| part == reply), "{name}");
    }
}

/// Many exports with long names, some of which come and go while they are listed.
struct Many(std::cell::RefCell<std::collections::BTreeMap<String, String>>);

impl Exports for Many {
    fn next(&self, after: Option<&str>) -> Option<ListedExport> {
        let all = self.0.borrow();
        let mut later = all
            .iter()
            .filter(|(key, _)| after.is_none_or(|after| key.as_str() > after));
        let (key, name) = later.next()?;
        Some(ListedExport {
            key: key.clone(),
            name: name.clone(),
            description: String::new(),
        })
    }

    fn find(&self, _: &str) -> Option<ExportInfo> {
        None
    }
}

/// However many exports there are, a part of the list is small, and all parts together have each export that was there all
/// the time once. The next option is answered after the list.
#[test]
fn long_lists_are_sent_in_parts() {
    let name = |i: usize| format!("{i:04}{}", "x".repeat(NAME_BYTES_MAX - 4));
    let all = (0..1000).map(|i| (format!("{i:04}"), name(i)));
    let exports = Many(std::cell::RefCell::new(all.collect()));
    let client = [&FLAGS[..], &option(3, &[]), &option(2, &[])].concat();
    let mut handshake = Handshake::default();
    let (mut rest, mut names, mut parts) = (&client[..], Vec::new(), 0);
    loop {
        let mut out = Vec::new();
        assert!(!handshake.asks_to_begin(rest));
        let (used, step) = handshake.advance(rest, &exports, &mut out).unwrap();
        rest = &rest[used..];
        assert!(out.len() <= 80 << 10, "{}", out.len());
        let mut replies = &out[..];
        while let Some((header, after)) = replies.split_at_checked(20) {
            let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            let (data, others) = after.split_at(word(16) as usize);
            replies = others;
            match (word(8), word(12)) {
                (3, SERVER) => names.push(String::from_utf8(data[4..].to_vec()).unwrap()),
                (3, 1) => assert_eq!(rest, option(2, &[])),
                (2, 1) => assert!(rest.is_empty()),
                other => panic!("{other:?}"),
            }
        }
        parts += usize::from(!out.is_empty());
        // The last one that was listed, and one that is still to come.
        if parts == 2 {
            let last = names.last().unwrap()[..4].to_owned();
            exports.0.borrow_mut().remove(&last);
            exports.0.borrow_mut().remove("0998");
        }
        if step == Step::End {
            break;
        }
    }
    let expected = (0..1000).filter(|&i| i != 998).map(name);
    assert!(names.iter().eq(&expected.collect::<Vec<_>>()));
    assert!(parts > 50, "{parts}");
}
