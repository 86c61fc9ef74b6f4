//! Versions of programs, as far as rules compare them.

use std::fmt;
use std::str::FromStr;

/// `major.minor.micro`; what is not given is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

impl Version {
    /// The first version in a text such as `QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds)`.
    pub fn find(text: &str) -> Option<Self> {
        text.split_whitespace()
            .filter_map(|word| {
                let word = word.trim_start_matches(|c: char| !c.is_ascii_digit());
                word.contains('.').then(|| word.parse().ok()).flatten()
            })
            .next()
    }
}

impl FromStr for Version {
    type Err = ();

    /// Reads the numbers at the beginning: `6.1.0-18-amd64` is 6.1.0.
    fn from_str(text: &str) -> Result<Self, ()> {
        let mut numbers = [0; 3];
        let end = text
            .find(|c: char| !(c.is_ascii_digit() || c == '.'))
            .unwrap_or(text.len());
        let mut any = false;
        for (number, part) in numbers.iter_mut().zip(text[..end].split('.')) {
            if part.is_empty() {
                break;
            }
            *number = part.parse().map_err(drop)?;
            any = true;
        }
        let [major, minor, micro] = numbers;
        any.then_some(Self(major, minor, micro)).ok_or(())
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(major, minor, micro) = self;
        write!(f, "{major}.{minor}")?;
        match micro {
            0 => Ok(()),
            micro => write!(f, ".{micro}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_and_compared() {
        let qemu = Version::find("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)").unwrap();
        assert_eq!(qemu, Version(10, 0, 2));
        assert!(qemu > "9.2".parse().unwrap());
        assert_eq!("6.1.0-18-amd64".parse(), Ok(Version(6, 1, 0)));
        assert_eq!("5".parse(), Ok(Version(5, 0, 0)));
        assert_eq!("".parse::<Version>(), Err(()));
        assert_eq!("99999999999.1".parse::<Version>(), Err(()));
        assert_eq!(Version::find("no version here"), None);
        assert_eq!(Version(9, 0, 0).to_string(), "9.0");
    }
}
