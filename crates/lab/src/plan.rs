//! A plan: the configurations, the loads, the comparisons, and published claims.

pub mod backing;
mod blame;
pub mod ceph;
pub mod changes;
pub mod claims;
pub mod cpu_model;
pub mod cpus;
mod guests;
pub mod host_queue;
pub mod image;
mod parse;
pub mod settings;
pub mod sockets;
pub mod units;
mod values;
pub mod words;
pub mod workload;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use backing::{Backing, Name};
pub use claims::Claim;
pub use parse::PlanError;
pub use settings::{IoThread, Server, Settings};
pub use workload::Workload;

use cpus::Cpus;
use words::{Against, Device, GuestKind, Interleave, Metric, Until};

/// The maximum number of configurations: more are probably an error in a list.
pub const CASES_MAX: usize = 256;
/// The maximum number of loads.
pub const WORKLOADS_MAX: usize = 1024;
/// The maximum number of rates that a search finds for a load.
pub const RATES_MAX: usize = 9;

/// A plan that has been checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The name, a word that can be the name of a folder.
    pub name: String,
    /// The title, one line.
    pub title: String,
    /// Where the load runs.
    pub guest: GuestKind,
    /// The time that the plan may take.
    pub budget: Duration,
    /// The maximum number of blocks. A block runs each configuration once.
    pub blocks_max: u32,
    /// The seed for the order of the runs; `None` chooses one, which the journal records.
    pub seed: Option<u64>,
    /// Gains smaller than this count as none.
    pub margin: f64,
    /// The effect that is to be found, for the estimate of the time.
    pub effect: f64,
    /// The expected noise of a run, for the estimate of the time.
    pub noise: f64,
    /// The size in bytes of each disk that the lab creates.
    pub size: u64,
    /// The folder for these disks; `None` is the result's folder.
    pub directory: Option<PathBuf>,
    /// Whether the lab creates the disks that configurations name, and removes them at the end.
    pub create: bool,
    /// The measured time of a run.
    pub runtime: Duration,
    /// The time before it.
    pub ramp: Duration,
    /// The configurations.
    pub cases: Vec<Case>,
    /// The loads.
    pub workloads: Vec<Workload>,
    /// The comparisons, as pairs of indexes of cases: from and to.
    pub contrasts: Vec<(usize, usize)>,
    /// The rule for the comparisons.
    pub against: Against,
    /// Combinations of the sweep that cannot be configured, with the reasons.
    pub left_out: Vec<String>,
    /// Published claims.
    pub claims: Vec<Claim>,
    /// What a block repeats for each configuration.
    pub interleave: Interleave,
    /// When a run ends.
    pub until: Until,
    /// The figure of the verdicts.
    pub metric: Metric,
    /// The CPUs of servers and of the load, unless a configuration has others.
    pub cpus: Cpus,
    /// Whether each disk is brought into the same state before each sample: written back, and completely in the page
    /// cache or, with O_DIRECT, not in it.
    pub settle: bool,
    /// How long a sample waits until nothing else runs on the machine.
    pub patience: Duration,
    /// A guest of the user's.
    pub ssh: Option<Ssh>,
    /// The job files that the plan names, with their texts.
    pub jobs: BTreeMap<String, String>,
}

/// A selection of cases or loads: `iodepth=1,32`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter {
    /// The key to compare.
    pub key: String,
    /// The values to select.
    pub values: Vec<String>,
}

impl std::str::FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((key, values)) if !key.is_empty() && !values.is_empty() => Ok(Self {
                key: key.into(),
                values: values.split(',').map(str::to_owned).collect(),
            }),
            _ => Err(format!("'{text}' is not KEY=VALUE[,VALUE]")),
        }
    }
}

/// A named configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// A name, unique in the plan.
    pub name: String,
    /// The name of its `[[case]]`, which the values of all axes follow in `name`.
    pub base: String,
    /// Its values of all axes, such as `iops=500 aio=native`; empty without axes.
    pub point: String,
    /// The configuration.
    pub settings: Settings,
}

/// How a guest of the user's is booted and reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ssh {
    /// A disk image to boot, which is never written to; `None` if the guest already runs.
    pub image: Option<PathBuf>,
    /// The user to log in as.
    pub user: String,
    /// A private key.
    pub key: Option<PathBuf>,
    /// The host name of a guest that already runs.
    pub host: Option<String>,
    /// The port of its SSH server.
    pub port: u16,
    /// The disks in the guest to measure.
    pub disks: Vec<String>,
    /// Whether the guest runs Windows.
    pub windows: bool,
}

impl Case {
    /// Whether the case has all of these settings. The key `case` is its name.
    pub fn matches(&self, wanted: &[(String, String)]) -> bool {
        wanted.iter().all(|(key, value)| match key.as_str() {
            "case" => &self.name == value,
            _ => &self.settings.get(key) == value,
        })
    }
}

impl Plan {
    /// Reads a plan. `file` is for messages; job files are read from its folder.
    ///
    /// # Errors
    /// The first error in the plan, with its line and the nearest allowed word.
    pub fn parse(file: &std::path::Path, text: &str) -> Result<Plan, PlanError> {
        parse::plan(file, text, &|name| parse::read_job(file, name))
    }

    /// Reads a plan from a journal, which also has the job files. Reads no file.
    ///
    /// # Errors
    /// As [`Plan::parse`].
    pub fn recorded(
        file: &std::path::Path,
        text: &str,
        jobs: &BTreeMap<String, String>,
    ) -> Result<Plan, PlanError> {
        parse::plan(file, text, &|name| {
            let found = jobs.get(name).cloned();
            found.ok_or_else(|| format!("the text of {name} was not recorded"))
        })
    }

    /// The plan without these cases, which cannot run here, and without their comparisons. In a ladder, the case after a
    /// missing one is compared with the one before it; if the first value of an axis is missing, the others are compared
    /// with the next one.
    #[must_use]
    pub fn without(&self, names: &[String]) -> Plan {
        let kept: Vec<usize> = (0..self.cases.len())
            .filter(|index| !names.contains(&self.cases[*index].name))
            .collect();
        let mut plan = self.clone();
        plan.cases = kept
            .iter()
            .map(|index| self.cases[*index].clone())
            .collect();
        plan.contrasts = Self::pair(&plan.cases, self.against);
        plan
    }

    /// The part of the plan that all of the filters select.
    ///
    /// # Errors
    /// As [`Plan::selected`].
    pub fn selected_by(&self, filters: &[Filter]) -> Result<Plan, String> {
        filters
            .iter()
            .try_fold(self.clone(), |plan, filter| plan.selected(filter))
    }

    /// The part of the plan that a filter selects: cases or loads with one of the values. Keys are `case`, `workload`, and
    /// all keys of configurations and loads.
    ///
    /// # Errors
    /// The filter selects nothing, or its key is unknown.
    pub fn selected(&self, filter: &Filter) -> Result<Plan, String> {
        let Filter { key, values } = filter;
        let mut plan = self.clone();
        let is_case = key == "case" || settings::KEYS.contains(&key.as_str());
        if !is_case && key != "workload" && !workload::KEYS.contains(&key.as_str()) {
            let mut known = vec!["case", "workload"];
            known.extend(settings::KEYS);
            known.extend(workload::KEYS);
            return Err(words::not_one_of(key, &known));
        }
        let of_case = |case: &Case| match key.as_str() {
            "case" if values.contains(&case.base) => case.base.clone(),
            "case" => case.name.clone(),
            _ => case.settings.get(key),
        };
        let of_load = |load: &Workload| match key.as_str() {
            "workload" => load.name.clone(),
            _ => load.get(key),
        };
        let there: Vec<String> = match is_case {
            true => self.cases.iter().map(of_case).collect(),
            false => self.workloads.iter().map(of_load).collect(),
        };
        match is_case {
            true => {
                let dropped = self
                    .cases
                    .iter()
                    .filter(|case| !values.contains(&of_case(case)));
                let dropped: Vec<String> = dropped.map(|case| case.name.clone()).collect();
                plan = plan.without(&dropped);
            }
            false => plan
                .workloads
                .retain(|load| values.contains(&of_load(load))),
        }
        if plan.cases.is_empty() || plan.workloads.is_empty() {
            let mut there: Vec<&str> = there.iter().map(String::as_str).collect();
            there.dedup();
            return Err(format!(
                "no part of the plan has {key}={}; there are {}",
                values.join(","),
                there.join(", ")
            ));
        }
        Ok(plan)
    }

    /// Whether a comparison of the plan is the claim's.
    pub fn tests(&self, claim: &Claim) -> bool {
        self.contrasts_of(claim).next().is_some()
    }

    /// The comparisons that the claim is about.
    pub fn contrasts_of(&self, claim: &Claim) -> impl Iterator<Item = (usize, usize)> {
        self.contrasts.iter().copied().filter(|&(from, to)| {
            let mut loads = self.workloads.iter();
            loads.any(|load| claim.is_about_either(&self.cases[from], &self.cases[to], load))
        })
    }

    /// The number of comparisons that the claim is about, each under each of its loads.
    pub fn comparisons_of(&self, claim: &Claim) -> usize {
        let loads = |&(from, to): &(usize, usize)| {
            let (from, to) = (&self.cases[from], &self.cases[to]);
            let is_about = |load: &&Workload| claim.is_about_either(from, to, load);
            self.workloads.iter().filter(is_about).count()
        };
        self.contrasts.iter().map(loads).sum()
    }

    /// Whether any load runs in a guest.
    pub fn has_guests(&self) -> bool {
        let in_guest = |case: &Case| case.settings.device != Device::Host;
        self.guest != GuestKind::None && self.cases.iter().any(in_guest)
    }

    /// A sentence for each of several configurations that no comparison is about. Of these, only the first is measured.
    pub fn uncompared(&self) -> Vec<String> {
        let is_in = |index: usize| {
            let mut pairs = self.contrasts.iter();
            pairs.any(|&(from, to)| from == index || to == index)
        };
        let sentence = |(index, case): (usize, &Case)| {
            let what = if index == 0 { "compared" } else { "measured" };
            format!(
                "not {what}: {}: no comparison is about it; 'compare = \"first\"' compares all with the first",
                case.name
            )
        };
        let cases = self.cases.iter().enumerate();
        let cases = cases.filter(|(index, _)| self.cases.len() > 1 && !is_in(*index));
        cases.map(sentence).collect()
    }

    /// Refuses a plan with several configurations and no comparison: only the first would be measured.
    ///
    /// # Errors
    /// The settings in which the first two differ, and what to do.
    pub fn check_compared(&self) -> Result<(), String> {
        let [first, second, ..] = &self.cases[..] else {
            return Ok(());
        };
        if !self.contrasts.is_empty() {
            return Ok(());
        }
        let differences = first.settings.differences(&second.settings).join(", ");
        Err(format!(
            "none of the {} configurations is compared with another: '{}' and '{}' differ in {differences}. \
             'compare = \"first\"' compares all with the first, also if they differ in several settings",
            self.cases.len(),
            first.name,
            second.name
        ))
    }

    /// The plan with a load at each of these rates, in place of the load whose rates were searched for.
    #[must_use]
    pub fn with_rates(&self, load: &str, rates: &[u32]) -> Plan {
        let mut plan = self.clone();
        plan.workloads = self
            .workloads
            .iter()
            .flat_map(|found| match found.search && found.name == load {
                true => rates.iter().map(|rate| found.at_rate(*rate)).collect(),
                false => vec![found.clone()],
            })
            .collect();
        let more: Vec<usize> = plan
            .claims
            .iter()
            .map(|claim| {
                claim.comparisons + plan.comparisons_of(claim) - self.comparisons_of(claim)
            })
            .collect();
        for (claim, comparisons) in plan.claims.iter_mut().zip(more) {
            claim.comparisons = comparisons;
        }
        plan
    }

    /// The CPUs of a configuration.
    pub fn cpus(&self, settings: &Settings) -> Cpus {
        let own = |cpus: &Option<cpus::CpuList>| cpus.as_ref().map(cpus::CpuList::to_vec);
        Cpus {
            server: own(&settings.pinning.server).unwrap_or_else(|| self.cpus.server.clone()),
            load: own(&settings.pinning.load).unwrap_or_else(|| self.cpus.load.clone()),
            vcpu: own(&settings.pinning.vcpu).unwrap_or_default(),
        }
    }

    /// The time of a run without the boot of its guest.
    pub fn run_time(&self) -> Duration {
        self.ramp + self.runtime
    }

    /// The comparisons of these cases by this rule.
    fn pair(cases: &[Case], against: Against) -> Vec<(usize, usize)> {
        let all = 0..cases.len();
        match against {
            Against::First => all.skip(1).map(|to| (0, to)).collect(),
            Against::Last => all
                .clone()
                .filter_map(|from| {
                    let same = |to: &usize| cases[*to].point == cases[from].point;
                    let to = all.clone().skip(from + 1).rfind(same)?;
                    Some((from, to))
                })
                .collect(),
            Against::Previous => all.skip(1).map(|to| (to - 1, to)).collect(),
            Against::OneFactor => all
                .clone()
                .flat_map(|from| all.clone().skip(from + 1).map(move |to| (from, to)))
                .filter(|&(from, to)| Self::is_one_factor(cases, from, to))
                .collect(),
            Against::FirstAndOneFactor => {
                let others = Self::pair(cases, Against::OneFactor).into_iter();
                let first = Self::pair(cases, Against::First);
                first
                    .into_iter()
                    .chain(others.filter(|&(from, _)| from > 0))
                    .collect()
            }
        }
    }

    /// Whether two cases differ in one setting, and no case before `from` differs from `to` only in that setting: each value
    /// of an axis is compared with the first one.
    fn is_one_factor(cases: &[Case], from: usize, to: usize) -> bool {
        let differ = |a: usize, b: usize| cases[a].settings.differences(&cases[b].settings);
        let [axis] = differ(from, to)[..] else {
            return false;
        };
        (0..from).all(|earlier| differ(earlier, to) != [axis])
    }
}
