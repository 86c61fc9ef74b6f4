use std::fmt;
use std::ops::{Add, AddAssign, Sub};

/// Bytes in a virtio-blk sector, independent of the disk's block size (virtio 1.3 §5.2.4).
pub const SECTOR_BYTES: u64 = 512;

/// A position on the guest's disk in 512-byte sectors, as the guest sent it: any value is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sector(pub u64);

impl Sector {
    /// The same position in bytes, or `None` if it exceeds 64 bits.
    #[inline]
    pub fn offset(self) -> Option<GuestOffset> {
        self.0.checked_mul(SECTOR_BYTES).map(GuestOffset)
    }
}

/// A position on the guest's disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GuestOffset(pub u64);

/// A position in a host file or block device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileOffset(pub u64);

impl GuestOffset {
    /// The byte before; not for offset 0.
    #[inline]
    pub fn before(self) -> Self {
        Self(self.0 - 1)
    }

    /// Rounds down to a multiple of `unit`, a power of two.
    #[inline]
    pub fn down_to(self, unit: u64) -> Self {
        Self(self.0 & !(unit - 1))
    }

    /// Rounds up to a multiple of `unit`, a power of two.
    #[inline]
    pub fn up_to(self, unit: u64) -> Self {
        Self((self.0 + (unit - 1)) & !(unit - 1))
    }
}

/// Lets a length be added to an offset, and two offsets be subtracted.
macro_rules! distance {
    ($offset:ident) => {
        impl Add<u64> for $offset {
            type Output = Self;

            #[inline]
            fn add(self, bytes: u64) -> Self {
                Self(self.0 + bytes)
            }
        }

        impl AddAssign<u64> for $offset {
            #[inline]
            fn add_assign(&mut self, bytes: u64) {
                self.0 += bytes;
            }
        }

        impl Sub for $offset {
            type Output = u64;

            #[inline]
            fn sub(self, before: Self) -> u64 {
                self.0 - before.0
            }
        }
    };
}

distance!(GuestOffset);
distance!(FileOffset);

impl fmt::Display for Sector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sector {}", self.0)
    }
}

impl fmt::Display for FileOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {}", self.0)
    }
}

/// Parses a size in QEMU's notation: a number of bytes, with an optional suffix `k`, `M`, `G`, `T` or `P`
/// (powers of 1024, either case).
///
/// # Errors
/// The text is not a size; the error is a sentence that says why.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" | "B" | "b" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        "p" | "P" => 50,
        other => {
            return Err(format!(
                "'{other}' is no unit of size; use k, M, G, T or P, as in 64G"
            ));
        }
    };
    // Rust's numbers may have a sign.
    let number = digits.parse::<u64>().ok();
    let number = number.filter(|_| !digits.starts_with('+'));
    number
        .ok_or_else(|| format!("'{text}' is no size; write a whole number and a unit, as in 64G"))?
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("'{text}' is more than 64 bits of bytes"))
}

/// Formats a size in the largest unit that leaves a whole number: `65536` becomes `64k`.
pub fn format_size(bytes: u64) -> String {
    let units = [(50, 'P'), (40, 'T'), (30, 'G'), (20, 'M'), (10, 'k')];
    for (shift, unit) in units {
        if bytes != 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_back_as_written() {
        for text in ["0", "512", "64k", "10G", "3T", "1025M"] {
            assert_eq!(format_size(parse_size(text).unwrap()), text);
        }
        assert_eq!(parse_size("1K"), Ok(1024));
    }

    #[test]
    fn invalid_sizes_are_refused() {
        for text in ["", "G", "-1", "1.5G", "12Q", "99999999P", "1 G", "+1G"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sector_beyond_64_bits_has_no_offset() {
        assert_eq!(Sector(3).offset(), Some(GuestOffset(1536)));
        assert_eq!(Sector(u64::MAX / 512 + 1).offset(), None);
    }
}
