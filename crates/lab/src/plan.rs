//! A plan: which configurations are measured under which loads, what is compared, and what others have published.

pub mod backing;
pub mod ceph;
pub mod changes;
pub mod cpus;
mod guests;
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

pub use backing::Backing;
pub use parse::PlanError;
pub use settings::{IoThread, Server, Settings};
pub use workload::Workload;

use cpus::Cpus;
use words::{Against, Expect, GuestKind, Interleave, Metric, Until};

/// Most configurations, loads and pairs of a plan: a mistake in a list is more likely than such a wish.
pub const CASES_MAX: usize = 256;
/// See [`CASES_MAX`].
pub const WORKLOADS_MAX: usize = 1024;
/// Most rates that a search finds for a load.
pub const RATES_MAX: usize = 9;

/// A plan, complete and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// A word, for folders.
    pub name: String,
    /// A line for people.
    pub title: String,
    /// Where the load runs.
    pub guest: GuestKind,
    /// How long all of it may take.
    pub budget: Duration,
    /// Repeats of each configuration, at most. A repeat of all of them is a block.
    pub blocks_max: u32,
    /// For the order of the runs; `None` takes one and records it.
    pub seed: Option<u64>,
    /// Gains smaller than this are no difference.
    pub margin: f64,
    /// The effect that is to be found, and the noise of a run that is expected: for the estimate of the time.
    pub effect: f64,
    /// See `effect`.
    pub noise: f64,
    /// Bytes of each disk that the lab makes.
    pub size: u64,
    /// Where it makes them; `None` is beside the result.
    pub directory: Option<PathBuf>,
    /// Whether it also creates the disks that configurations name, and removes them.
    pub create: bool,
    /// How long a run counts.
    pub runtime: Duration,
    /// How long it runs before.
    pub ramp: Duration,
    /// The configurations.
    pub cases: Vec<Case>,
    /// The loads.
    pub workloads: Vec<Workload>,
    /// Which is compared with which: indexes of cases, from and to.
    pub contrasts: Vec<(usize, usize)>,
    /// How the comparisons were chosen.
    pub against: Against,
    /// Where the sweep asks for more than can be configured, and was left out.
    pub left_out: Vec<String>,
    /// What others have published of this.
    pub claims: Vec<Claim>,
    /// What a block repeats for each configuration.
    pub interleave: Interleave,
    /// When a run ends.
    pub until: Until,
    /// What verdicts are about.
    pub metric: Metric,
    /// The CPUs of servers and of the load, unless a configuration has others.
    pub cpus: Cpus,
    /// Whether each disk is brought into the same state before each sample: nothing left to be written back, and
    /// resident in the page cache, or with O_DIRECT absent from it.
    pub settle: bool,
    /// How long a sample waits for a machine on which nothing else runs.
    pub patience: Duration,
    /// A guest of one's own.
    pub ssh: Option<Ssh>,
    /// Job files that it names, with their texts.
    pub jobs: BTreeMap<String, String>,
}

/// A selection of cases or loads: `iodepth=1,32`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter {
    /// What is looked at.
    pub key: String,
    /// The values of which one is wanted.
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

/// A configuration by its name.
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

/// A published figure that the plan looks at again.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// Who, and when.
    pub source: String,
    /// What was published.
    pub figure: String,
    /// Settings and loads for which it is said, on the side compared with.
    pub from: Vec<(String, String)>,
    /// The same on the other side.
    pub to: Vec<(String, String)>,
    /// Loads that it is about; empty is all.
    pub at: Vec<(String, String)>,
    /// What happens.
    pub expect: Expect,
    /// Why this cannot be tested with this plan on any host like this one.
    pub untestable: Option<String>,
}

/// How a guest of one's own is booted and reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ssh {
    /// A disk image that boots; never written to. `None` if the guest already runs.
    pub image: Option<PathBuf>,
    /// The user to log in as.
    pub user: String,
    /// A private key.
    pub key: Option<PathBuf>,
    /// Host of a guest that already runs.
    pub host: Option<String>,
    /// Its port.
    pub port: u16,
    /// The disks in the guest that are tested, in order.
    pub disks: Vec<String>,
    /// Whether commands are for a Windows guest.
    pub windows: bool,
}

impl Case {
    /// Whether it has all of these settings; `case` is its name.
    pub fn matches(&self, wanted: &[(String, String)]) -> bool {
        wanted.iter().all(|(key, value)| match key.as_str() {
            "case" => &self.name == value,
            _ => &self.settings.get(key) == value,
        })
    }
}

impl Claim {
    /// Whether it says something of this comparison under this load.
    pub fn is_about(&self, from: &Case, to: &Case, workload: &Workload) -> bool {
        let at = |(key, value): &(String, String)| match key.as_str() {
            "workload" => &workload.name == value,
            _ => &workload.get(key) == value,
        };
        from.matches(&self.from) && to.matches(&self.to) && self.at.iter().all(at)
    }
}

impl Plan {
    /// Reads a plan. `file` is for messages, and where job files that it names are looked for.
    ///
    /// # Errors
    /// The first mistake: its line, and the nearest allowed word.
    pub fn parse(file: &std::path::Path, text: &str) -> Result<Plan, PlanError> {
        parse::plan(file, text, &|name| parse::read_job(file, name))
    }

    /// Reads a plan that was recorded with the job files that it names: no file is read.
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

    /// The plan without these cases, which cannot be measured here. Comparisons with them fall away; in a ladder, the
    /// case after one that is missing is compared with the one before it.
    #[must_use]
    pub fn without(&self, names: &[String]) -> Plan {
        let kept: Vec<usize> = (0..self.cases.len())
            .filter(|index| !names.contains(&self.cases[*index].name))
            .collect();
        let place = |index: &usize| kept.iter().position(|old| old == index);
        let mut plan = self.clone();
        plan.cases = kept
            .iter()
            .map(|index| self.cases[*index].clone())
            .collect();
        plan.contrasts = match self.against {
            Against::OneFactor => self
                .contrasts
                .iter()
                .filter_map(|(from, to)| Some((place(from)?, place(to)?)))
                .collect(),
            against => Self::pair(&plan.cases, against),
        };
        plan
    }

    /// The plan with what all of the filters select.
    ///
    /// # Errors
    /// As [`Plan::selected`].
    pub fn selected_by(&self, filters: &[Filter]) -> Result<Plan, String> {
        filters
            .iter()
            .try_fold(self.clone(), |plan, filter| plan.selected(filter))
    }

    /// The plan with the cases and loads that a filter selects. `case`, `workload` and every key of a configuration or a
    /// load may be named; a case or load that has a named key must have one of the values.
    ///
    /// # Errors
    /// Nothing is left, or no case and no load has the key.
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
                "nothing of the plan has {key}={}; there are {}",
                values.join(","),
                there.join(", ")
            ));
        }
        Ok(plan)
    }

    /// The plan with a load at each of these rates, instead of one whose rates are to be searched for.
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
        plan
    }

    /// The CPUs of a configuration.
    pub fn cpus(&self, settings: &Settings) -> Cpus {
        let own = |cpus: &Option<cpus::CpuList>| cpus.as_ref().map(cpus::CpuList::to_vec);
        Cpus {
            server: own(&settings.server_cpus).unwrap_or_else(|| self.cpus.server.clone()),
            load: own(&settings.load_cpus).unwrap_or_else(|| self.cpus.load.clone()),
        }
    }

    /// A run with all that belongs to it, without the boot of its guest.
    pub fn run_time(&self) -> Duration {
        self.ramp + self.runtime
    }

    /// Which cases are compared, for cases that are already there.
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
        }
    }

    /// Whether two differ in one setting, and no other case with only that setting changed lies before `from`: each
    /// value of an axis is compared with the axis' first.
    fn is_one_factor(cases: &[Case], from: usize, to: usize) -> bool {
        let differ = |a: usize, b: usize| cases[a].settings.differences(&cases[b].settings);
        let [axis] = differ(from, to)[..] else {
            return false;
        };
        (0..from).all(|earlier| differ(earlier, to) != [axis])
    }
}
