//! A target as a plan of the lab.

use std::path::Path;
use std::time::Duration;

use ::lab::plan::settings::KEYS;
use ::lab::plan::units::time_text;
use ::lab::plan::workload::{self, Workload};
use ::lab::plan::{Plan, Settings};

use super::loads::LOAD_KEYS;
use super::target::{Load, NOW, Target};

/// The time of a sample.
const RUNTIME_MIN: f64 = 1.0;
const RUNTIME_MAX: f64 = 10.0;
/// The length of a title in characters, without an ellipsis.
const TITLE_MAX: usize = 190;
/// The number of blocks that fit into the budget, if possible: few effects are decided with fewer.
const BLOCKS: f64 = 8.0;

impl Target {
    /// The plan, read by the lab.
    ///
    /// # Errors
    /// The lab refuses it.
    pub fn parse(&self) -> Result<Plan, String> {
        let text = self.text(Duration::from_secs(1200), Duration::ZERO);
        Plan::parse(Path::new("check.toml"), &text).map_err(|error| error.problem)
    }

    /// The plan for so much time, in which a configuration takes `boot` to start.
    pub fn text(&self, budget: Duration, boot: Duration) -> String {
        let (storage, _) = self.scratch.storage();
        let mut text = format!(
            "# Derived from the findings of 'ringdisk check' about {}.\n",
            self.disks.join(", ")
        );
        for note in self.notes() {
            text += &format!("# {}\n", note.replace(char::is_control, " "));
        }
        let pairs = |pairs: &[(&str, String)]| {
            let lines = pairs
                .iter()
                .map(|(key, value)| format!("{key} = {}\n", quoted(value)));
            lines.collect::<String>()
        };
        let mut head = vec![
            ("name", self.name()),
            ("title", title(&self.disks)),
            ("compare", "first-and-one-factor".into()),
            ("budget", format!("{}s", budget.as_secs())),
        ];
        if self.load == Load::Servers {
            head.push(("guest", "none".into()));
        }
        text += &pairs(&head);
        text += &format!("\n[storage]\n{}", pairs(&storage));
        let plain = Settings::default();
        let mut common = vec![("device", self.now.value("device"))];
        let changed = |key: &&str| {
            *key != "device"
                && self.now.settings.get(key) != "-"
                && self.now.value(key) != plain.value(key)
        };
        let keys = KEYS.into_iter().filter(changed);
        common.extend(keys.map(|key| (key, self.now.value(key))));
        text += &format!("\n[config]\n{}", pairs(&common));
        text += &format!("\n[[case]]\nname = \"{NOW}\"\n");
        for case in &self.cases {
            let is_changed = |key: &&str| case.settings.value(key) != self.now.value(key);
            let changes: Vec<(&str, String)> = KEYS
                .into_iter()
                .filter(is_changed)
                .map(|key| (key, case.settings.value(key)))
                .collect();
            text += &format!(
                "\n[[case]]\nname = {}\n{}",
                quoted(&case.name),
                pairs(&changes)
            );
        }
        let [runtime, ramp] = self
            .times(budget, boot)
            .map(|time| format!("{}ms", time.as_millis()));
        text += &format!("\n[fio]\nruntime = \"{runtime}\"\nramp = \"{ramp}\"\n");
        for load in &self.loads {
            let standard = Workload {
                rw: load.rw,
                ..Workload::default()
            };
            let keys = workload::KEYS.into_iter().filter(|key| {
                let value = load.get(key);
                value != "-" && (LOAD_KEYS.contains(key) || value != standard.get(key))
            });
            let keys: Vec<(&str, String)> = keys.map(|key| (key, load.get(key))).collect();
            text += &format!("\n[[workload]]\n{}", pairs(&keys));
        }
        text
    }

    /// The measured time of a sample, and the time before it.
    fn times(&self, budget: Duration, boot: Duration) -> [Duration; 2] {
        let each = budget.as_secs_f64() / BLOCKS / self.starts() - boot.as_secs_f64();
        let share = each / self.loads.len().max(1) as f64;
        let runtime = (share * 0.8).clamp(RUNTIME_MIN, RUNTIME_MAX);
        let ramp = (runtime * 0.25).min(1.0);
        [runtime, ramp].map(|seconds| Duration::from_millis((seconds * 10.0).round() as u64 * 100))
    }

    /// How often a configuration starts in a block: the first runs twice.
    fn starts(&self) -> f64 {
        self.cases.len() as f64 + 2.0
    }

    /// The time of a block, without the time to fill disks.
    pub(super) fn block(&self, budget: Duration, boot: Duration) -> Duration {
        let sample: Duration = self.times(budget, boot).into_iter().sum();
        let loads = u32::try_from(self.loads.len().max(1)).unwrap_or(u32::MAX);
        (boot + sample.saturating_mul(loads)).mul_f64(self.starts())
    }

    /// A description of what is going to be created, and of the time. A configuration takes `boot` to start.
    pub fn summary(&self, budget: Duration, boot: Duration) -> String {
        let names: Vec<&str> = self
            .comparisons()
            .map(|comparison| comparison.name)
            .collect();
        let loads: Vec<&str> = self.loads.iter().map(|load| load.name.as_str()).collect();
        let block = self.block(budget, boot);
        let time = if block > budget {
            format!(
                "for about {}: its first block runs in any case, although its share of --budget is {}",
                time_text(Duration::from_secs(block.as_secs() + 1)),
                time_text(budget)
            )
        } else {
            format!("for at most {}", time_text(budget))
        };
        format!(
            "{}: measures {} ({}) {time}",
            self.disks.join(", "),
            names.join("; "),
            loads.join("; ")
        )
    }
}

/// The title of the plan. A plan's title is limited, and a VM may have many disks.
fn title(disks: &[String]) -> String {
    let whole = format!("The findings about {}", disks.join(", "));
    match whole.char_indices().nth(TITLE_MAX) {
        Some((end, _)) => format!("{}…", &whole[..end]),
        None => whole,
    }
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn title_of_many_disks_is_short_enough_for_a_plan() {
        let disks: Vec<String> = (0..42).map(|n| format!("vm1 disk{n}")).collect();
        let text = format!("title = {}\n", quoted(&title(&disks)));
        let plan = Plan::parse(Path::new("p.toml"), &text);
        assert!(plan.is_ok_and(|plan| plan.title.ends_with('…')));
        assert_eq!(title(&disks[..1]), "The findings about vm1 disk0");
    }
}
