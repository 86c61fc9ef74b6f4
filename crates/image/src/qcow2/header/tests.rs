use super::*;

/// A header of version 3 for a disk of 1 MiB, with 64 KiB clusters.
fn header() -> Vec<u8> {
    let mut bytes = vec![0; 65536];
    put32(&mut bytes, 0, MAGIC);
    put32(&mut bytes, 4, 3);
    put32(&mut bytes, 20, 16);
    put64(&mut bytes, 24, 1 << 20);
    put32(&mut bytes, 36, 1);
    put64(&mut bytes, 40, 0x3_0000);
    put64(&mut bytes, 48, 0x1_0000);
    put32(&mut bytes, 56, 1);
    put32(&mut bytes, 96, 4);
    put32(&mut bytes, 100, 104);
    bytes
}

fn extension(bytes: &mut [u8], at: usize, kind: u32, data: &[u8]) -> usize {
    put32(bytes, at, kind);
    put32(bytes, at + 4, data.len() as u32);
    bytes[at + 8..at + 8 + data.len()].copy_from_slice(data);
    at + 8 + data.len().next_multiple_of(8)
}

#[test]
fn header_round_trips() {
    let mut bytes = header();
    let end = extension(&mut bytes, 104, 0xe279_2aca, b"raw");
    put64(&mut bytes, 8, end as u64 + 8);
    put32(&mut bytes, 16, 4);
    bytes[end + 8..end + 12].copy_from_slice(b"base");
    let mut header = Header::parse(&bytes).unwrap();
    assert_eq!(header.backing, Some(("base".into(), Some("raw".into()))));
    assert_eq!((header.size, header.l1_at.bytes()), (1 << 20, 0x3_0000));
    let before = bytes.clone();
    header.put(&mut bytes);
    assert!(bytes == before);
    header.size = 2 << 20;
    assert!(header.set_corrupt());
    header.put(&mut bytes);
    let again = Header::parse(&bytes).unwrap();
    assert!(again.corrupt() && !again.dirty());
    assert_eq!((again.size, again.backing), (2 << 20, header.backing));
}

#[test]
fn invalid_headers_name_the_field() {
    type Change = fn(&mut Vec<u8>);
    let cases: [(&str, Change); 19] = [
        ("not a qcow2", |b| b[0] = 0),
        ("version 4", |b| put32(b, 4, 4)),
        ("cluster_bits", |b| put32(b, 20, 8)),
        ("cluster_bits", |b| put32(b, 20, 63)),
        ("encrypted (LUKS)", |b| put32(b, 32, 2)),
        ("encrypted (AES)", |b| put32(b, 32, 1)),
        ("feature bit 33", |b| put64(b, 72, 1 << 33)),
        ("refcount_order", |b| put32(b, 96, 7)),
        ("header_length", |b| put32(b, 100, 96)),
        ("header_length", |b| put32(b, 100, 1 << 20)),
        ("l1_size", |b| put32(b, 36, 0)),
        ("l1_size", |b| put32(b, 36, u32::MAX)),
        ("l1_table_offset", |b| put64(b, 40, 0x3_0200)),
        ("refcount_table_offset", |b| put64(b, 48, 1 << 60)),
        ("refcount_table_clusters", |b| put32(b, 56, 1 << 20)),
        ("nb_snapshots", |b| put32(b, 60, 65537)),
        ("backing_file_size", |b| {
            put64(b, 8, 512);
            put32(b, 16, 1024);
        }),
        ("backing_file_offset", |b| {
            put64(b, 8, u64::MAX - 2);
            put32(b, 16, 4);
        }),
        ("header extension", |b| {
            extension(b, 104, 0xe279_2aca, b"raw");
            put32(b, 108, u32::MAX);
        }),
    ];
    for (says, change) in cases {
        let mut bytes = header();
        change(&mut bytes);
        let error = Header::parse(&bytes).unwrap_err().to_string();
        assert!(error.contains(says), "{says}: {error}");
    }
}

#[test]
fn features_use_names_from_the_image() {
    let mut bytes = header();
    let mut table = vec![0; 48];
    table[1] = 40;
    table[2..12].copy_from_slice(b"time trave");
    extension(&mut bytes, 104, 0x6803_f857, &table);
    put64(&mut bytes, 72, 1 << 40 | 1 << 41);
    let error = Header::parse(&bytes).unwrap_err().to_string();
    assert!(error.contains("'time trave', feature bit 41"), "{error}");
}
