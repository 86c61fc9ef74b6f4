//! Any bytes, and valid messages in any order with any damage.

use std::{fs, path::Path};

use proptest::collection::vec;
use proptest::prelude::*;

use crate::checks;

fn message(option: u32, data: Vec<u8>) -> Vec<u8> {
    let len = (data.len() as u32).to_be_bytes();
    [&b"IHAVEOPT"[..], &option.to_be_bytes(), &len, &data].concat()
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        Just(b"disk".to_vec()),
        Just(b"image".to_vec()),
        vec(any::<u8>(), 0..9)
    ]
}

fn counted(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes()[..], bytes].concat()
}

fn option() -> impl Strategy<Value = Vec<u8>> {
    let plain = (0..13u32).prop_map(|option| message(option, Vec::new()));
    let info = (6..8u32, name(), vec(0..5u16, 0..4)).prop_map(|(option, name, infos)| {
        let count = (infos.len() as u16).to_be_bytes();
        let infos: Vec<_> = infos.into_iter().flat_map(u16::to_be_bytes).collect();
        message(option, [counted(&name), count.to_vec(), infos].concat())
    });
    let query = prop_oneof![
        Just(b"base:allocation".to_vec()),
        Just(b"qemu:".to_vec()),
        vec(any::<u8>(), 0..20)
    ];
    let contexts = (9..11u32, name(), vec(query, 0..4)).prop_map(|(option, name, queries)| {
        let count = (queries.len() as u32).to_be_bytes();
        let queries: Vec<_> = queries.iter().flat_map(|query| counted(query)).collect();
        message(option, [counted(&name), count.to_vec(), queries].concat())
    });
    prop_oneof![plain, info, contexts]
}

fn request() -> impl Strategy<Value = Vec<u8>> {
    let magic = prop_oneof![Just(0x2560_9513u32), Just(0x21e4_1c71u32)];
    let number = || prop_oneof![(0..1u64 << 21).prop_map(|n| n << 9), any::<u64>()];
    let fields = (magic, 0..64u16, 0..9u16, number(), number());
    fields.prop_map(|(magic, flags, kind, offset, len)| {
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(7u64.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        match magic {
            0x2560_9513 => bytes.extend((len as u32).to_be_bytes()),
            _ => bytes.extend(len.to_be_bytes()),
        }
        bytes
    })
}

#[test]
fn seeds_pass_the_checks() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/nbd");
    let seeds: Vec<_> = fs::read_dir(seeds).unwrap().collect();
    assert!(seeds.len() > 3);
    for seed in seeds {
        checks::session(&fs::read(seed.unwrap().path()).unwrap());
    }
}

proptest! {
    #[test]
    fn any_bytes_are_handled(bytes in vec(any::<u8>(), 0..400)) {
        checks::session(&bytes);
    }

    #[test]
    fn damaged_sessions_are_handled(
        chunk in any::<u8>(),
        flags in 0..5u32,
        options in vec(option(), 0..8),
        requests in vec(request(), 0..8),
        damage in proptest::option::of((any::<prop::sample::Index>(), any::<u8>())),
    ) {
        let go = message(7, [counted(b"disk"), vec![0, 0]].concat());
        let mut bytes = vec![chunk];
        bytes.extend(flags.to_be_bytes());
        bytes.extend(options.concat());
        bytes.extend(go);
        bytes.extend(requests.concat());
        if let Some((at, with)) = damage {
            let at = at.index(bytes.len());
            bytes[at] ^= with;
        }
        checks::session(&bytes);
    }
}
