//! Names that nothing else has, and short ones for long ones.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// 16 hexadecimal digits.
pub fn token() -> String {
    format!("{:016x}", random())
}

/// A number that does not repeat, nor can be foretold.
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// 16 hexadecimal digits for any bytes: FNV-1a, 64 bits.
pub fn hash(bytes: &[u8]) -> String {
    let add = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, add))
}
