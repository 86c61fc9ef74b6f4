//! Lists of CPUs in the syntax of the kernel and taskset: `0,2,4-7`.

use std::fmt;
use std::str::FromStr;

use rustix::thread::{CpuSet, sched_getaffinity};
use tracing::warn;

/// CPUs in ascending order. An empty list means all CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cpus(Vec<usize>);

impl Cpus {
    /// Only the `i`-th CPU, counted round the list; the empty list if this one is empty.
    pub fn turn(&self, i: usize) -> Self {
        match self.0.len() {
            0 => Self::default(),
            n => Self(vec![self.0[i % n]]),
        }
    }

    /// Without the CPUs on which this process may not run, which are logged. If none is left, the list is empty: all CPUs.
    pub fn usable(self, key: &str) -> Self {
        let Ok(allowed) = sched_getaffinity(None) else {
            return self;
        };
        let (usable, gone): (Vec<_>, Vec<_>) = self.iter().partition(|&cpu| allowed.is_set(cpu));
        if !gone.is_empty() {
            let instead = match usable.is_empty() {
                true => "its threads may run on every CPU of this process",
                false => "the others are used",
            };
            let gone = Self(gone);
            warn!("{key}: this process may not run on CPU {gone}: {instead}");
        }
        Self(usable)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().copied()
    }
}

impl FromIterator<usize> for Cpus {
    fn from_iter<T: IntoIterator<Item = usize>>(cpus: T) -> Self {
        let mut cpus: Vec<_> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }
}

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "'{text}' is not a list of CPUs below {}, as in 0,2,4-7",
                CpuSet::MAX_CPU
            )
        };
        let number = |text: &str| match text.parse::<usize>() {
            Ok(n) if n < CpuSet::MAX_CPU => Ok(n),
            _ => Err(bad()),
        };
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(bad());
            }
            cpus.extend(first..=last);
        }
        Ok(cpus.into_iter().collect())
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.0.chunk_by(|a, b| a + 1 == *b);
        for (i, run) in runs.enumerate() {
            let comma = if i > 0 { "," } else { "" };
            match run {
                [only] => write!(f, "{comma}{only}")?,
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written() {
        for (text, written) in [
            ("0", "0"),
            ("0,2,4-7", "0,2,4-7"),
            ("3,1,2", "1-3"),
            ("5,5", "5"),
        ] {
            assert_eq!(text.parse::<Cpus>().unwrap().to_string(), written);
        }
        for text in ["", "a", "3-1", "1,", "99999", "-1", "0-99999"] {
            assert!(text.parse::<Cpus>().is_err(), "{text}");
        }
    }

    #[test]
    fn threads_take_turns() {
        let cpus: Cpus = "2-3".parse().unwrap();
        assert_eq!(cpus.turn(0).to_string(), "2");
        assert_eq!(cpus.turn(3).to_string(), "3");
        assert!(Cpus::default().turn(1).is_empty());
    }
}
