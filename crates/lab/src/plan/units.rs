//! Sizes, times, shares, numbers and switches in plans.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Bytes: `512`, `0.5k`, `4k`, `1.5M`, `2G`; powers of 1024 as in QEMU and fio.
///
/// # Errors
/// It is invalid.
pub fn size(text: &str) -> Result<u64, String> {
    let problem = || format!("'{text}' is not a size, such as 512, 4k, 1M or 2G");
    let shift = match text.chars().last().map(|c| c.to_ascii_lowercase()) {
        Some('k') => 10,
        Some('m') => 20,
        Some('g') => 30,
        Some('t') => 40,
        _ => 0,
    };
    let number = if shift == 0 {
        text
    } else {
        &text[..text.len() - 1]
    };
    let plain = number.chars().all(|c| c.is_ascii_digit() || c == '.');
    let value: f64 = number.parse().map_err(|_| problem())?;
    let bytes = value * (1_u64 << shift) as f64;
    if plain && bytes.fract() == 0.0 && (1.0..=2_f64.powi(60)).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err(problem())
    }
}

/// A size in the syntax of fio and QEMU, exactly.
pub fn size_text(bytes: u64) -> String {
    for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "k")] {
        if bytes > 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// A time: `20us`, `500ms`, `10s`, `30m`, `2h`; a plain number is seconds.
///
/// # Errors
/// It is not a time, or is longer than a month.
pub fn time(text: &str) -> Result<Duration, String> {
    let problem = || format!("'{text}' is not a time, such as 10s, 30m or 2h");
    let units = [
        ("us", 1e-6),
        ("ms", 0.001),
        ("s", 1.0),
        ("m", 60.0),
        ("h", 3600.0),
        ("d", 86_400.0),
    ];
    let (number, unit) = units
        .into_iter()
        .find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, seconds)))
        .unwrap_or((text, 1.0));
    let plain = number.chars().all(|c| c.is_ascii_digit() || c == '.');
    let seconds = number.parse::<f64>().map_err(|_| problem())? * unit;
    if plain && (0.0..=31.0 * 86_400.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(problem())
    }
}

/// A time such as `45 s`, `12 min` or `3.5 h`.
pub fn time_text(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        ..10.0 => format!("{seconds:.1} s"),
        ..120.0 => format!("{seconds:.0} s"),
        ..7200.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

/// A share: `3%` or `0.03`.
///
/// # Errors
/// It is not a share, or not between 0.1 % and 90 %.
pub fn share(text: &str) -> Result<f64, String> {
    let problem = || format!("'{text}' is not a share between 0.1% and 90%, such as 3%");
    let (number, scale) = match text.strip_suffix('%') {
        Some(number) => (number.trim_end(), 0.01),
        None => (text, 1.0),
    };
    let value = number.parse::<f64>().map_err(|_| problem())? * scale;
    if (0.001..=0.9).contains(&value) {
        Ok(value)
    } else {
        Err(problem())
    }
}

/// Parses a value or `default`.
///
/// # Errors
/// It is neither `default` nor valid for `parse`.
pub fn default_or<T>(
    value: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, String> {
    if value == "default" {
        return Ok(None);
    }
    parse(value)
        .map(Some)
        .map_err(|problem| format!("{problem}; or default"))
}

/// Parses a number from `min` to `max`.
///
/// # Errors
/// It is not such a number.
pub fn number<T: FromStr + PartialOrd + fmt::Display>(
    value: &str,
    min: T,
    max: T,
) -> Result<T, String> {
    let number = value.parse().ok().filter(|n| (&min..=&max).contains(&n));
    number.ok_or_else(|| format!("'{value}' is not a number from {min} to {max}"))
}

/// Parses `on` or `off`.
///
/// # Errors
/// It is neither.
pub fn switch(value: &str) -> Result<bool, String> {
    match value {
        "on" | "true" => Ok(true),
        "off" | "false" => Ok(false),
        _ => Err(format!("'{value}' is neither on nor off")),
    }
}

/// A switch as a plan writes it.
pub fn on_off(value: bool) -> String {
    if value { "on" } else { "off" }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_times_and_shares_are_read_as_people_write_them() {
        assert_eq!(size("0.5k"), Ok(512));
        assert_eq!(size("4K"), Ok(4096));
        assert_eq!(size("2G"), Ok(2 << 30));
        for wrong in ["", "k", "0", "-4k", "0.3", "4kb", "1e3", "nan", "99999999T"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert_eq!(size_text(131_072), "128k");
        assert_eq!(size_text(512), "512");
        assert_eq!(time("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(time("250ms"), Ok(Duration::from_millis(250)));
        for wrong in ["", "s", "-1s", "400d", "1y", "inf"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
        assert_eq!(share("3%"), Ok(0.03));
        assert!(share("0").is_err() && share("300%").is_err());
    }
}
