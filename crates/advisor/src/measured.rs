//! Results of `ringdisk lab` on this host. They replace the gain that a rule expects.
//!
//! A file is JSON. `ringdisk lab` writes one for each run, and `ringdisk check --measured` reads files and directories
//! of such files:
//!
//! ```json
//! { "format": "ringdisk-measured-1",
//!   "fingerprint": "host1 / Some CPU",
//!   "results": [
//!     { "recipe": "aio-iothread", "axis": "iothread", "from": "off", "to": "on",
//!       "scope": "guest", "storage": "block", "allocation": "full",
//!       "load": "randread 4k depth 1", "metric": "iops",
//!       "gain-percent": 12.1, "interval-percent": [9.0, 15.2], "verdict": "gain" } ] }
//! ```
//!
//! - `fingerprint` is that of the [facts](crate::facts::Facts): results of other hosts are skipped.
//! - `axis`, `from` and `to` use the terms of the lab's plans; the other axes are equal on both sides.
//! - `scope` is `guest` or `host`: whose setting `axis` is. `storage` is a word of the property `disk.protocol`, or `ram`
//!   or `zram`. `allocation` is `full` or `thin`. A finding shows a result only if all three are as its rule and its disk
//!   have them; a result without them belongs to no finding.
//! - `gain-percent` is by how much `to` is better than `from`: more IOPS or bytes per second, less latency or CPU.
//! - `interval-percent` is its confidence interval (95 %).
//! - `verdict` is `gain`, `loss`, `equivalent` or `undecided`.
//! - The axis `host` compares a guest with the host itself: `from` is `guest`, and `gain-percent` is by how much the
//!   host is faster.

use serde::{Deserialize, Serialize};

use crate::rules;
use crate::text::printable;

/// The format of a results file.
pub const FORMAT: &str = "ringdisk-measured-1";

/// The maximum size of a results file.
pub const BYTES_MAX: usize = 64 << 20;

/// The maximum number of results shown with a finding.
const SHOWN_MAX: usize = 64;

#[derive(Deserialize)]
struct File {
    format: String,
    #[serde(default)]
    fingerprint: String,
    results: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Entry {
    recipe: String,
    axis: String,
    from: String,
    to: String,
    #[serde(default)]
    scope: String,
    #[serde(default)]
    storage: String,
    #[serde(default)]
    allocation: String,
    #[serde(default)]
    load: String,
    #[serde(default)]
    metric: String,
    gain_percent: f64,
    interval_percent: [f64; 2],
    #[serde(default)]
    verdict: String,
}

/// Results of this host.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    results: Vec<(Contrast, Gain)>,
}

#[derive(Clone, Debug, PartialEq)]
struct Contrast {
    recipe: String,
    axis: String,
    from: String,
    to: String,
    scope: String,
    storage: String,
    allocation: String,
}

/// The measured effect of a change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gain {
    pub load: String,
    /// `iops`, `latency`, …
    pub metric: String,
    /// The improvement in percent.
    pub percent: f64,
    /// The 95 % confidence interval of `percent`.
    pub interval: [f64; 2],
    /// `gain`, `loss`, `equivalent` or `undecided`.
    pub verdict: String,
}

impl std::fmt::Display for Gain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [low, high] = self.interval;
        write!(f, "{:+.0} % [{low:.0}, {high:.0}]", self.percent)
    }
}

impl Measured {
    /// Adds the results of a file, unless they were measured on another host.
    ///
    /// # Errors
    /// The file is not a valid results file.
    pub fn add(&mut self, name: &str, text: &str, fingerprint: &str) -> Result<Added, String> {
        if text.len() > BYTES_MAX {
            return Err(format!("{name}: the file is larger than {BYTES_MAX} bytes"));
        }
        let file: File = serde_json::from_str(text).map_err(|e| {
            format!(
                "{name}:{}:{}: {}",
                e.line(),
                e.column(),
                printable(&e.to_string())
            )
        })?;
        if file.format != FORMAT {
            return Err(format!(
                "{name}:1:1: the format is '{}', and must be '{FORMAT}'",
                printable(&file.format)
            ));
        }
        if file.fingerprint != fingerprint {
            return Ok(Added::OtherHost(printable(&file.fingerprint)));
        }
        let finite = |entry: &Entry| {
            entry.gain_percent.is_finite()
                && entry.interval_percent.iter().all(|end| end.is_finite())
        };
        let before = self.results.len();
        for entry in file.results.into_iter().filter(finite) {
            let contrast = Contrast {
                recipe: entry.recipe,
                axis: entry.axis,
                from: entry.from,
                to: entry.to,
                scope: entry.scope,
                storage: entry.storage,
                allocation: entry.allocation,
            };
            let gain = Gain {
                load: printable(&entry.load),
                metric: printable(&entry.metric),
                percent: entry.gain_percent,
                interval: entry.interval_percent,
                verdict: printable(&entry.verdict),
            };
            self.results.push((contrast, gain));
        }
        Ok(Added::Results(self.results.len() - before))
    }

    /// The results for a change of disks whose storage is one of `protocols`; any storage if there are none.
    pub(crate) fn gains(&self, of: &rules::Contrast, protocols: &[String]) -> Vec<Gain> {
        let is = |found: &Contrast| {
            found.axis == of.axis
                && found.from == of.from
                && found.to == of.to
                && found.scope == of.scope.word()
                && found.allocation == of.allocation.word()
                && (protocols.is_empty() || protocols.contains(&found.storage))
        };
        let gains = self.results.iter().filter(|(found, _)| is(found));
        gains
            .take(SHOWN_MAX)
            .map(|(_, gain)| gain.clone())
            .collect()
    }

    /// The guest's speed in percent of the host's: the median of the results.
    pub fn of_host_percent(&self) -> Option<u64> {
        let mut percents: Vec<f64> = self
            .results
            .iter()
            .filter(|(contrast, _)| contrast.axis == "host" && contrast.from == "guest")
            .map(|(_, gain)| 100.0 / (1.0 + gain.percent / 100.0))
            .filter(|percent| percent.is_finite() && *percent >= 0.0)
            .collect();
        percents.sort_by(f64::total_cmp);
        percents
            .get(percents.len() / 2)
            .map(|percent| percent.round() as u64)
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Added {
    /// The number of results added
    Results(usize),
    /// Nothing: the results are from the host with this fingerprint
    OtherHost(String),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{Allocation, ContrastScope};

    #[test]
    fn a_result_belongs_to_findings_about_the_same_kind_of_storage() {
        let result = |context: &str| {
            format!(
                r#"{{ "format": "ringdisk-measured-1", "fingerprint": "here", "results": [
                    {{ "recipe": "ladder", "axis": "cache", "from": "writeback", "to": "none", {context}
                       "gain-percent": 50.0, "interval-percent": [40.0, 60.0] }} ] }}"#
            )
        };
        let found = |context: &str, of: &rules::Contrast, protocols: &[&str]| {
            let mut measured = Measured::default();
            measured.add("a", &result(context), "here").unwrap();
            let protocols: Vec<String> = protocols.iter().map(|&it| it.to_owned()).collect();
            measured.gains(of, &protocols).len()
        };
        let rule = rules::Contrast {
            axis: "cache".into(),
            from: "writeback".into(),
            to: "none".into(),
            scope: ContrastScope::Guest,
            allocation: Allocation::Full,
        };
        let file = r#""scope": "guest", "storage": "file", "allocation": "full","#;
        assert_eq!(found(file, &rule, &["file"]), 1);
        assert_eq!(found(file, &rule, &["block", "file"]), 1);
        assert_eq!(found(file, &rule, &["rbd"]), 0);
        assert_eq!(found(file, &rule, &[]), 1, "about no disk");
        assert_eq!(found("", &rule, &["file"]), 0, "of unknown storage");
        let thin = rules::Contrast {
            allocation: Allocation::Thin,
            ..rule.clone()
        };
        assert_eq!(found(file, &thin, &["file"]), 0);
        let of_host = rules::Contrast {
            scope: ContrastScope::Host,
            ..rule
        };
        assert_eq!(found(file, &of_host, &["file"]), 0);
    }
}
