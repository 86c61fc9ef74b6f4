//! Limits of disks and of groups of disks, as `key=value` pairs with QEMU's names.

use block::{Rate, ThrottleError, ThrottleLimits, parse_size};

/// The keys of one kind of traffic: its average, its burst, and how long the burst may last.
struct Keys {
    average: &'static str,
    max: &'static str,
    max_length: &'static str,
    rate: fn(&mut ThrottleLimits) -> &mut Rate,
}

/// The keys that begin with the name of an average.
macro_rules! keys {
    ($average:literal, $rate:ident) => {
        Keys {
            average: $average,
            max: concat!($average, "_max"),
            max_length: concat!($average, "_max_length"),
            rate: |limits| &mut limits.$rate,
        }
    };
}

const KINDS: [Keys; 6] = [
    keys!("bps", bps_total),
    keys!("bps_rd", bps_read),
    keys!("bps_wr", bps_write),
    keys!("iops", iops_total),
    keys!("iops_rd", iops_read),
    keys!("iops_wr", iops_write),
];

const SIZE: &str = "iops_size";

/// All keys.
pub fn keys() -> impl Iterator<Item = &'static str> {
    let each = KINDS.iter();
    each.flat_map(|keys| [keys.average, keys.max, keys.max_length])
        .chain([SIZE])
}

/// The key that `text` names; `-` and `_` are interchangeable.
pub fn key(text: &str) -> Option<&'static str> {
    keys().find(|key| text.len() == key.len() && text.replace('-', "_") == *key)
}

/// Replaces each of the `limits` for which `value` returns a number.
///
/// # Errors
/// `value` fails.
pub fn change<E>(
    limits: &mut ThrottleLimits,
    mut value: impl FnMut(&'static str) -> Result<Option<u64>, E>,
) -> Result<(), E> {
    for keys in &KINDS {
        let rate = (keys.rate)(limits);
        for (key, field) in [
            (keys.average, &mut rate.average),
            (keys.max, &mut rate.max),
            (keys.max_length, &mut rate.max_length),
        ] {
            if let Some(value) = value(key)? {
                *field = value;
            }
        }
    }
    if let Some(value) = value(SIZE)? {
        limits.iops_size = value;
    }
    Ok(())
}

/// Parses a limit. Bytes may have a unit, as in `100M`; seconds and operations have none.
///
/// # Errors
/// The text is not such a number.
pub fn parse(key: &str, text: &str) -> Result<u64, String> {
    match text.parse() {
        _ if key.ends_with("_length") => match text.parse() {
            Ok(seconds) if seconds > 0 => Ok(seconds),
            _ => Err(format!("'{text}' is not a number of seconds of at least 1")),
        },
        _ if key.starts_with("bps") || key == SIZE => parse_size(text),
        Ok(operations) => Ok(operations),
        Err(_) => Err(format!("'{text}' is not a number of operations per second")),
    }
}

/// The limits that are set, as pairs.
pub fn pairs(limits: &ThrottleLimits) -> Vec<(&'static str, u64)> {
    let mut limits = *limits;
    let mut pairs = Vec::new();
    for keys in &KINDS {
        let rate = *(keys.rate)(&mut limits);
        if rate.average > 0 {
            pairs.push((keys.average, rate.average));
        }
        if rate.max > 0 {
            pairs.extend([(keys.max, rate.max), (keys.max_length, rate.max_length)]);
        }
    }
    if limits.iops_size > 0 {
        pairs.push((SIZE, limits.iops_size));
    }
    pairs
}

/// The meaning of a limit, as in [`Key::about`](super::keys::Key::about).
fn about(key: &str) -> &'static str {
    match key {
        SIZE => "bytes per operation: a longer request counts as several operations",
        _ if key.ends_with("_length") => "seconds that a burst may last, default 1",
        _ if key.ends_with("_max") => "the same during a burst",
        _ if key.starts_with("bps") => "bytes per second, on average",
        _ => "operations per second, on average",
    }
}

/// The limits by meaning, with the names that they have in the documentation.
pub fn by_meaning() -> Vec<(&'static str, Vec<String>)> {
    let mut all: Vec<(&str, Vec<String>)> = Vec::new();
    let (averages, bursts): (Vec<_>, Vec<_>) = keys().partition(|key| !key.contains("_max"));
    for key in averages.into_iter().chain(bursts) {
        let name = key.replace('_', "-");
        match all.iter_mut().find(|(meaning, _)| *meaning == about(key)) {
            Some((_, names)) => names.push(name),
            None => all.push((about(key), vec![name])),
        }
    }
    all
}

/// The key that an error is about.
pub fn key_of(error: &ThrottleError) -> &'static str {
    match error {
        ThrottleError::TotalAndPart(kind)
        | ThrottleError::BurstWithoutLimit(kind)
        | ThrottleError::BurstBelowLimit(kind)
        | ThrottleError::LengthWithoutBurst(kind)
        | ThrottleError::TooLarge(kind, _) => kind,
        ThrottleError::SizeWithoutIops => SIZE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_read_back_as_written() {
        let mut limits = ThrottleLimits::NONE;
        let wanted = [("bps_wr", 7), ("iops", 1000), ("iops_max", 2000)];
        let value = |key| Ok::<_, ()>(wanted.iter().find(|(k, _)| *k == key).map(|(_, n)| *n));
        change(&mut limits, value).unwrap();
        assert_eq!(
            pairs(&limits),
            [
                ("bps_wr", 7),
                ("iops", 1000),
                ("iops_max", 2000),
                ("iops_max_length", 1)
            ]
        );
        assert_eq!(limits.check(), Ok(()));
    }

    #[test]
    fn keys_are_found_in_both_spellings() {
        assert_eq!(key("iops-rd-max-length"), Some("iops_rd_max_length"));
        assert_eq!(key("iops_size"), Some("iops_size"));
        assert_eq!(key("iops-total"), None);
        assert_eq!(keys().count(), 19);
        assert!(parse("bps_max_length", "0").is_err());
        assert_eq!(parse("bps", "100M"), Ok(100 << 20));
        assert_eq!(parse("iops", "5000"), Ok(5000));
        assert!(parse("iops", "5k").is_err(), "1000 or 1024?");
    }
}
