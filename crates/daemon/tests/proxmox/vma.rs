//! Reads archives of Proxmox, by their specification, and checks what `vma` checks when it restores one.

use std::collections::BTreeMap;

use md5::{Digest, Md5};

pub struct Contents {
    pub configs: BTreeMap<String, Vec<u8>>,
    pub devices: BTreeMap<String, Vec<u8>>,
}

const CLUSTER: usize = 65536;

fn number(bytes: &[u8]) -> usize {
    bytes
        .iter()
        .fold(0, |all, byte| all << 8 | usize::from(*byte))
}

/// Checks a header's sum, which was made while it was zero.
fn check(header: &[u8], at: usize) {
    let mut without = header.to_vec();
    without[at..at + 16].fill(0);
    assert_eq!(Md5::digest(&without)[..], header[at..at + 16]);
}

pub fn read(archive: &[u8]) -> Contents {
    assert_eq!(archive[..8], *b"VMA\0\0\0\0\x01");
    let uuid = &archive[8..24];
    let field = |at: usize| number(&archive[at..at + 4]);
    let [blobs, blobs_size, header_size] = [48, 52, 56].map(field);
    assert!(blobs >= 12288 && blobs + blobs_size <= header_size);
    assert!(
        [blobs, blobs_size, header_size]
            .iter()
            .all(|size| size % 512 == 0)
    );
    check(&archive[..header_size], 32);
    // The length is little endian.
    let blob = |at: usize| {
        let at = blobs + at;
        let length = usize::from(archive[at]) | usize::from(archive[at + 1]) << 8;
        archive[at + 2..at + 2 + length].to_vec()
    };
    let name = |at: usize| {
        let mut name = blob(at);
        assert_eq!(name.pop(), Some(0));
        String::from_utf8(name).unwrap()
    };
    let mut configs = BTreeMap::new();
    for index in 0..256 {
        let [at, data] = [2044, 3068].map(|table| field(table + index * 4));
        if at != 0 {
            configs.insert(name(at), blob(data));
        }
    }
    // By their numbers: the name, the data, and which clusters have come.
    let mut devices = BTreeMap::new();
    for index in 1..256 {
        let at = 4096 + index * 32;
        let bytes = number(&archive[at + 8..at + 16]);
        if bytes > 0 {
            let clusters = vec![false; bytes.div_ceil(CLUSTER)];
            devices.insert(index, (name(field(at)), vec![0; bytes], clusters));
        }
    }
    let mut rest = &archive[header_size..];
    while !rest.is_empty() {
        let (header, mut data) = rest.split_at(512);
        assert_eq!(header[..6], *b"VMAE\0\0");
        assert_eq!(&header[8..24], uuid);
        check(header, 24);
        let blocks = number(&header[6..8]);
        for info in header[40..].chunks(8) {
            let (mask, index, cluster) =
                (number(&info[..2]), usize::from(info[3]), number(&info[4..]));
            if index == 0 {
                assert_eq!(info, [0; 8]);
                continue;
            }
            let (_, bytes, clusters) = devices.get_mut(&index).unwrap();
            assert!(!std::mem::replace(&mut clusters[cluster], true));
            for bit in (0..16).filter(|bit| mask & 1 << bit != 0) {
                let at = cluster * CLUSTER + bit * 4096;
                let end = bytes.len().min(at + 4096);
                bytes[at..end].copy_from_slice(&data[..end - at]);
                assert!(data[..4096].iter().any(|byte| *byte != 0));
                data = &data[4096..];
            }
        }
        assert_eq!(rest.len() - data.len(), 512 + blocks * 4096);
        rest = data;
    }
    let devices = devices.into_values().map(|(name, bytes, clusters)| {
        assert!(clusters.iter().all(|has_come| *has_come));
        (name, bytes)
    });
    Contents {
        configs,
        devices: devices.collect(),
    }
}
