//! What is measured for a disk: its own configuration, and others to compare it with.

use std::fmt;
use std::time::Duration;

use ::lab::measured::Comparison as Compared;
use ::lab::plan::workload::Workload;
use ::lab::plan::{Backing, Settings};
use advisor::rules::{Contrast, Rule, Severity};

use super::configuration::Configuration;
use super::loads::{LOADS, PRELOAD, candidates, load_of, pattern_keys};
use super::scratch::Scratch;

/// The maximum number of loads in a plan: each costs its time in every configuration.
const LOADS_MAX: usize = 4;

/// The name of the configuration that the disk has now.
pub const NOW: &str = "now";
pub const TOGETHER: &str = "all together";
pub const RINGDISK: &str = "ringdisk";

/// Where the load runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// In guests of the lab.
    Guests,
    /// At the sockets of qemu-storage-daemon and ringdisk, where guests would run without KVM.
    Servers,
}

/// A finding, and the comparison that its rule asks for.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// Identifies the finding for the caller.
    pub finding: usize,
    pub rule: &'a Rule,
}

/// A disk's plan.
#[derive(Clone, Debug)]
pub struct Target {
    /// The VM and the disk; several if the same measurement holds for all of them.
    pub disks: Vec<String>,
    pub scratch: Scratch,
    pub load: Load,
    pub(super) now: Configuration,
    pub(super) cases: Vec<Case>,
    /// Several changes at once: their names, and their cases.
    pub(super) bundles: Vec<(&'static str, usize)>,
    pub(super) loads: Vec<Workload>,
    /// The configurations that cannot be measured, with the reasons.
    pub left_out: Vec<String>,
}

/// A configuration beside the disk's own.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub(super) settings: Settings,
    /// What it is compared with: another case, or the disk's own configuration.
    base: Option<usize>,
    /// What changes from there; none for a case that others are compared with, and for several changes at once.
    change: Option<Change>,
    /// The findings that the change is about.
    pub findings: Vec<usize>,
    /// Whether a rule advises the change; notes do not.
    is_advised: bool,
    /// The names of the loads that the rules are about.
    pub loads: Vec<String>,
}

/// The change that a rule advises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    axis: String,
    from: String,
    to: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} → {}", self.axis, self.from, self.to)
    }
}

/// A comparison whose gain is reported.
pub struct Comparison<'a> {
    /// The rules, or [`TOGETHER`] or [`RINGDISK`].
    pub name: &'a str,
    /// What changes, if it is one setting.
    pub change: Option<&'a Change>,
    /// The names of the cases.
    pub from: &'a str,
    pub to: &'a str,
    pub findings: &'a [usize],
    pub loads: &'a [String],
}

impl Target {
    /// Adds the comparison for a finding, and a load for it.
    ///
    /// # Errors
    /// The lab cannot make the comparison.
    pub fn add(&mut self, asked: &Asked, contrast: &Contrast) -> Result<(), String> {
        let load = self.load_for(contrast)?;
        let mut problem = None;
        for to in contrast.to.split('|') {
            let mut with_case = self.clone();
            with_case.add_load(&load);
            // A rule about any load shows most with one request in flight, or with many.
            if String::from(contrast.pattern.clone()) == "any" {
                with_case.add_load(&load_of(&LOADS[1]));
            }
            match with_case.add_change(asked, contrast, to, &load) {
                Ok(()) => {
                    *self = with_case;
                    return Ok(());
                }
                Err(why) => {
                    problem.get_or_insert(why);
                }
            }
        }
        Err(problem.unwrap_or_else(|| "its rule names no value".into()))
    }

    fn add_change(
        &mut self,
        asked: &Asked,
        contrast: &Contrast,
        to: &str,
        load: &Workload,
    ) -> Result<(), String> {
        let base = self.base(contrast)?;
        let before = self.settings(base).clone();
        let mut settings = before.clone();
        settings.set(&contrast.axis, to)?;
        self.scratch.take_volumes(settings.volumes)?;
        let change = Change {
            axis: contrast.axis.clone(),
            from: before.value(&contrast.axis),
            to: to.to_owned(),
        };
        let is_advised = asked.rule.severity != Severity::Info;
        let same = |case: &Case| case.settings.differences(&settings).is_empty();
        if before.differences(&settings).is_empty() {
            return Err(format!("{} has {to} already", contrast.axis));
        }
        let place = self.cases.iter().position(same);
        match place.and_then(|place| self.cases.get_mut(place)) {
            Some(known) if known.findings.is_empty() => {
                known.name.clone_from(&asked.rule.id);
                (known.base, known.change) = (base, Some(change));
                known.findings = vec![asked.finding];
                known.is_advised = is_advised;
                known.loads = vec![load.name.clone()];
            }
            Some(known) if known.change.as_ref() == Some(&change) => {
                known.name += &format!(", {}", asked.rule.id);
                known.findings.push(asked.finding);
                known.is_advised |= is_advised;
                known.loads.push(load.name.clone());
            }
            Some(known) => {
                return Err(format!(
                    "its configuration is that of {}, compared with another one",
                    known.name
                ));
            }
            None => self.cases.push(Case {
                name: asked.rule.id.clone(),
                settings,
                base,
                change: Some(change),
                findings: vec![asked.finding],
                is_advised,
                loads: vec![load.name.clone()],
            }),
        }
        // The disk's own configuration is the plan's first case.
        let from = base.map_or(0, |base| base + 1);
        let to = place.unwrap_or(self.cases.len() - 1) + 1;
        let found = Compared::of(&self.parse()?, from, to, 0, "kvm");
        match found {
            Some(found) if found.axis == contrast.axis => Ok(()),
            _ => Err(format!(
                "{} cannot change alone in the lab's configuration of this disk",
                contrast.axis
            )),
        }
    }

    /// The case from which a comparison starts: the disk's own configuration, unless the rule needs other settings on both
    /// sides.
    fn base(&mut self, contrast: &Contrast) -> Result<Option<usize>, String> {
        let mut settings = self.now.settings.clone();
        let mut differs = Vec::new();
        // The step from some libraries to more: both sides have the former.
        let libraries = (contrast.axis == PRELOAD).then_some((&contrast.axis, &contrast.from));
        for (key, values) in contrast.with.iter().chain(libraries) {
            let value = settings.value(key);
            if !values.split('|').any(|one| one == value) {
                let first = values.split('|').next().unwrap_or_default();
                settings.set(key, first)?;
                differs.push(format!("{key}={first}"));
            }
        }
        if self.now.settings.differences(&settings).is_empty() {
            return Ok(None);
        }
        let known = self
            .cases
            .iter()
            .position(|case| case.settings.differences(&settings).is_empty());
        if known.is_some() {
            return Ok(known);
        }
        self.cases.push(Case {
            name: format!("{NOW} with {}", differs.join(" ")),
            settings,
            base: None,
            change: None,
            findings: Vec::new(),
            is_advised: false,
            loads: Vec::new(),
        });
        Ok(Some(self.cases.len() - 1))
    }

    fn settings(&self, case: Option<usize>) -> &Settings {
        let case = case.and_then(|case| self.cases.get(case));
        case.map_or(&self.now.settings, |case| &case.settings)
    }

    /// The comparisons of the plan, those of the findings first.
    pub fn comparisons(&self) -> impl Iterator<Item = Comparison<'_>> {
        let name = |case: Option<usize>| {
            case.and_then(|case| self.cases.get(case))
                .map_or(NOW, |case| &case.name)
        };
        let of_findings = self.cases.iter().filter(|case| !case.findings.is_empty());
        let of_findings = of_findings.map(move |case| Comparison {
            name: &case.name,
            change: case.change.as_ref(),
            from: name(case.base),
            to: &case.name,
            findings: &case.findings,
            loads: &case.loads,
        });
        let bundles = self.bundles.iter().map(move |(bundle, case)| Comparison {
            name: bundle,
            change: None,
            from: NOW,
            to: name(Some(*case)),
            findings: &[],
            loads: &[],
        });
        of_findings.chain(bundles)
    }

    /// Whether a case measures the finding.
    pub fn measures(&self, finding: usize) -> bool {
        self.cases
            .iter()
            .any(|case| case.findings.contains(&finding))
    }

    /// Refuses to use any of these disks.
    ///
    /// # Errors
    /// The plan would use one, which is a bug, or the place that the user named.
    pub fn refuse_disks(&self, files: &[String]) -> Result<(), String> {
        let plan = self.parse()?;
        for case in &plan.cases {
            let Backing::Named(names) = &case.settings.backing else {
                continue;
            };
            for name in names.all(case.settings.guests, case.settings.volumes) {
                let text = name.to_string();
                let text = text.strip_prefix("rbd:").unwrap_or(&text);
                if files.iter().any(|file| is_same(file, text)) {
                    return Err(format!(
                        "{name} is a disk of a VM, and is not measured; name another --scratch"
                    ));
                }
            }
        }
        Ok(())
    }

    /// A load that a rule is about; one that the plan has, if possible.
    fn load_for(&self, contrast: &Contrast) -> Result<Workload, String> {
        let is_meant = |load: &&Workload| contrast.pattern.holds(&pattern_keys(load));
        if let Some(load) = self.loads.iter().find(is_meant) {
            return Ok(load.clone());
        }
        if self.loads.len() >= LOADS_MAX {
            return Err(format!(
                "its load would be the {}th of the plan; measure it alone: ringdisk lab run {}",
                LOADS_MAX + 1,
                contrast.recipe
            ));
        }
        let found = candidates(&contrast.recipe)
            .into_iter()
            .find(|load| is_meant(&load));
        found.ok_or_else(|| {
            let pattern = String::from(contrast.pattern.clone());
            format!("no load of its recipe matches its pattern '{pattern}'")
        })
    }

    fn add_load(&mut self, load: &Workload) {
        if !self.loads.iter().any(|other| other.name == load.name) {
            self.loads.push(load.clone());
        }
    }

    /// All changes that rules advise at once; of several that change the same setting, the first, which is that of the most severe finding.
    fn together(&self) -> Settings {
        let mut settings = self.now.settings.clone();
        let mut changed: Vec<&str> = Vec::new();
        let advised = self.cases.iter().filter(|case| case.is_advised);
        for change in advised.filter_map(|case| case.change.as_ref()) {
            if !changed.contains(&change.axis.as_str()) {
                let _ = settings.set(&change.axis, &change.to);
                changed.push(&change.axis);
            }
        }
        settings
    }

    pub(super) fn add_together(&mut self) {
        let settings = self.together();
        if self.now.settings.differences(&settings).len() < 2 {
            return;
        }
        self.add_bundle(TOGETHER, settings);
    }

    pub(super) fn add_ringdisk(&mut self, moves: Option<&Result<(), String>>) {
        match moves {
            None => return,
            Some(Err(why)) => {
                return self
                    .left_out
                    .push(format!("with ringdisk: not converted: {why}"));
            }
            Some(Ok(())) => {}
        }
        let mut settings = self.together();
        for (key, value) in [
            ("device", "vhost-user-blk"),
            ("server", "ringdisk"),
            ("aio", "default"),
            ("iothread", "off"),
            // What the VM has is about QEMU's threads.
            ("poll-max-us", "default"),
        ] {
            let _ = settings.set(key, value);
        }
        if !self.now.settings.differences(&settings).is_empty() {
            self.add_bundle(RINGDISK, settings);
        }
    }

    fn add_bundle(&mut self, name: &'static str, settings: Settings) {
        let same = self
            .cases
            .iter()
            .position(|case| case.settings.differences(&settings).is_empty());
        if let Some(same) = same {
            self.bundles.push((name, same));
            return;
        }
        let mut with_case = self.clone();
        with_case.cases.push(Case {
            name: name.to_owned(),
            settings,
            base: None,
            change: None,
            findings: Vec::new(),
            is_advised: false,
            loads: Vec::new(),
        });
        with_case.bundles.push((name, with_case.cases.len() - 1));
        match with_case.parse() {
            Ok(_) => *self = with_case,
            Err(why) => self.left_out.push(format!("{name}: {why}")),
        }
    }

    /// The name of the plan, and of the folder of its result.
    pub fn name(&self) -> String {
        let name = self.scratch.name.replacen("ringdisk-measure", "check", 1);
        match self.now.settings.prefill {
            true => name,
            false => name + "-thin",
        }
    }

    /// The disk's configuration in the lab, for messages.
    pub fn now_text(&self) -> String {
        self.now.settings.label()
    }

    /// How the lab's configuration differs from the disk.
    pub fn notes(&self) -> impl Iterator<Item = &String> {
        let of_disk = self.now.notes.iter().chain(&self.now.guest_notes);
        of_disk.chain(&self.scratch.notes)
    }

    /// What must be equal so that one measurement holds for two disks.
    pub fn same_as(&self, other: &Self) -> bool {
        let text = |target: &Self| {
            let mut nameless = target.clone();
            nameless.disks.clear();
            let text = nameless.text(Duration::ZERO, Duration::ZERO);
            text.replace(&target.scratch.name, "")
                .replace(&target.name(), "")
        };
        let findings = |target: &Self| target.cases.len();
        findings(self) == findings(other) && text(self) == text(other)
    }

    /// Replaces the disk's own configuration by one with more settings, which all cases then have too.
    pub(super) fn rebase(&mut self, now: Configuration) {
        let changed = self.now.settings.differences(&now.settings);
        for case in &mut self.cases {
            for key in &changed {
                let _ = case.settings.set(key, &now.value(key));
            }
        }
        self.now = now;
    }

    /// Adds another disk for which the measurement holds. Its findings are those of the same cases.
    pub fn merge(&mut self, other: Self) {
        self.disks.extend(other.disks);
        let is_new = |why: &String| !self.left_out.contains(why);
        let more: Vec<String> = other.left_out.into_iter().filter(is_new).collect();
        self.left_out.extend(more);
        for (case, others) in self.cases.iter_mut().zip(other.cases) {
            case.findings.extend(others.findings);
        }
    }
}

/// Whether two names are of the same file, device or image.
fn is_same(one: &str, other: &str) -> bool {
    let path = |text: &str| std::fs::canonicalize(text).unwrap_or_else(|_| text.into());
    one == other || path(one) == path(other)
}
