use super::*;
use crate::qcow2::types::{HostCluster, HostOffset};

fn geometry(extended: bool, version: u32) -> Geometry {
    Geometry {
        cluster_bits: 16,
        refcount_order: 4,
        extended,
        version,
        external: false,
    }
}

#[test]
fn entry_round_trips() {
    let g = geometry(false, 3);
    for word in [0, 1, 0x5_0000, COPIED | 0x5_0000, COPIED | 0x5_0001] {
        let entry = Entry::decode(&g, word, 0).unwrap();
        assert_eq!(entry.encode(&g)[0], word, "{word:x}");
    }
    let g = geometry(true, 3);
    for (word, bitmap) in [
        (0, 0xffff_ffff_0000_0000),
        (COPIED | 0x5_0000, 0xf0_0000_0001),
    ] {
        let entry = Entry::decode(&g, word, bitmap).unwrap();
        assert_eq!(entry.encode(&g), [word, bitmap]);
    }
}

#[test]
fn entries_that_cannot_be() {
    let g = geometry(false, 3);
    for word in [
        0x200,
        COPIED,
        1 << 56,
        COPIED | 0x1_0002,
        COPIED | COMPRESSED,
    ] {
        assert_eq!(Entry::decode(&g, word, 0), Err(BadEntry), "{word:x}");
    }
    assert_eq!(Entry::decode(&geometry(false, 2), 1, 0), Err(BadEntry));
    let g = geometry(true, 3);
    for (word, bitmap) in [(1, 0), (0, 1), (COPIED | 0x1_0000, 1 << 32 | 1)] {
        assert_eq!(Entry::decode(&g, word, bitmap), Err(BadEntry), "{word:x}");
    }
    for entry in [1, 0x200, 1 << 56, COPIED] {
        assert_eq!(table_at(&g, entry), Err(BadEntry), "{entry:x}");
    }
}

#[test]
fn runs_end_where_the_kind_changes() {
    let g = geometry(true, 3);
    let entry = Entry::decode(&g, COPIED | 0x5_0000, 0b1100 << 32 | 0b0011).unwrap();
    assert_eq!(
        entry.at(&g, 100),
        (Kind::Data(HostOffset::new(0x5_0000 + 100)), 4096 - 100)
    );
    assert_eq!(entry.at(&g, 4096), (Kind::Zero, 4096));
    assert_eq!(entry.at(&g, 8192 + 1), (Kind::Hole, 65536 - 8193));
    assert!(entry.in_place(0b11));
    assert!(!entry.in_place(0b111));
}

#[test]
fn compressed_data_ends_with_a_sector() {
    let g = geometry(false, 3);
    let word = COMPRESSED | 3 << 54 | 0x1_ff10;
    let Ok(Entry::Compressed(c)) = Entry::decode(&g, word, 0) else {
        panic!("compressed");
    };
    assert_eq!(
        (c.at.bytes(), c.len),
        (0x1_ff10, 0x1_fe00 + 4 * 512 - 0x1_ff10)
    );
    let first = HostCluster::new(1);
    assert_eq!(c.clusters(&g), Run { first, clusters: 2 });
    assert_eq!(Entry::Compressed(c).encode(&g)[0], word);
}
