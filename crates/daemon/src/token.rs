//! Names that nothing else has.

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
