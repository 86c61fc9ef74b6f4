//! Derives targets from findings: a configuration like that of the disk now, and one for each change.

use ::lab::plan::Settings;
use ::lab::plan::settings::OF_GUESTS;
use advisor::rules::{Allocation, Contrast, Measurement};

use super::configuration::Configuration;
use super::loads::{LOADS, PRELOAD, library, load_of};
use super::scratch::Scratch;
use super::target::{Asked, Load, Target};

/// A finding that is not measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotMeasured {
    pub finding: usize,
    pub why: String,
}

/// What a disk's plans are made from.
pub struct Subject<'a> {
    /// The VM and the disk.
    pub label: &'a str,
    pub now: &'a Configuration,
    pub scratch: &'a Scratch,
    pub load: Load,
    /// Whether ringdisk can serve the disk, or why not; `None` if it does already.
    pub moves: Option<Result<(), String>>,
    /// The disk after all fixes, if the lab has such a disk.
    pub fixed: Option<Configuration>,
}

impl Subject<'_> {
    /// A comparison with the value that the fix chooses, if the rule allows several.
    fn as_fixed(&self, mut contrast: Contrast) -> Contrast {
        let chosen = self.fixed.as_ref().map(|its| its.value(&contrast.axis));
        let is_allowed = |value: &String| contrast.to.split('|').any(|one| one == value);
        if let Some(chosen) = chosen.filter(is_allowed) {
            contrast.to = chosen;
        }
        contrast
    }
}

/// The plans for the findings about a disk: one for full disks, and one for empty ones if a rule is about writes that
/// allocate.
pub fn targets(subject: &Subject, asked: &[Asked]) -> (Vec<Target>, Vec<NotMeasured>) {
    let mut not_measured = Vec::new();
    let (mut full, mut thin) = (Vec::new(), Vec::new());
    for one in asked {
        let refused = |why: String| NotMeasured {
            finding: one.finding,
            why,
        };
        match &one.rule.measurement {
            Measurement::None(why) => not_measured.push(refused(why.clone())),
            Measurement::By(contrast) => match comparable(contrast, subject.load)
                .map(|contrast| subject.as_fixed(contrast))
            {
                Err(why) => not_measured.push(refused(why)),
                Ok(its) if its.allocation == Allocation::Thin => thin.push((one, its)),
                Ok(its) => full.push((one, its)),
            },
        }
    }
    let mut targets = Vec::new();
    for (asked, prefill) in [(full, "on"), (thin, "off")] {
        let mut builder = Builder::new(subject, prefill);
        builder.prepare(&asked, &mut not_measured);
        if let Some(target) = builder.finish(subject, &mut not_measured) {
            targets.push(target);
        }
    }
    (targets, not_measured)
}

/// A rule's comparison in the words of a plan, in which a library is a file.
///
/// # Errors
/// It cannot be made beside a disk.
fn comparable(contrast: &Contrast, load: Load) -> Result<Contrast, String> {
    if contrast.axis == "backing" {
        return Err(format!(
            "it compares two kinds of storage; name both in a plan of your own: ringdisk lab recipes {}",
            contrast.recipe
        ));
    }
    let without_guest = contrast.accelerators().split('|').any(|one| one == "none");
    if load == Load::Servers && !without_guest {
        return Err("it needs a guest, and KVM does not work here".into());
    }
    let mut contrast = contrast.clone();
    if contrast.axis == PRELOAD {
        for names in [&mut contrast.from, &mut contrast.to] {
            let files = names.split('|').map(|name| library(&contrast.recipe, name));
            *names = files.collect::<Result<Vec<_>, _>>()?.join("|");
        }
    }
    Ok(contrast)
}

struct Builder<'a> {
    now: Configuration,
    prefill: &'static str,
    /// The comparisons that start from `now`.
    comparisons: Vec<(&'a Asked<'a>, &'a Contrast)>,
    scratch: &'a Scratch,
    load: Load,
}

impl<'a> Builder<'a> {
    fn new(subject: &Subject<'a>, prefill: &'static str) -> Self {
        let mut now = subject.now.clone();
        if subject.load == Load::Servers {
            now = without_guest(now);
        }
        Self {
            now,
            prefill,
            comparisons: Vec::new(),
            scratch: subject.scratch,
            load: subject.load,
        }
    }

    /// Completes the disk's configuration with what its findings imply: the values from which their comparisons start.
    fn prepare(
        &mut self,
        asked: &'a [(&'a Asked<'a>, Contrast)],
        not_measured: &mut Vec<NotMeasured>,
    ) {
        for (one, contrast) in asked {
            let wanted = std::iter::once((&contrast.axis, &contrast.from)).chain(&contrast.with);
            let mut now = self.now.clone();
            // Libraries that the disk does not have are on both sides of a comparison, not in its own configuration.
            let is_implied = |key: &str| key != PRELOAD && !self.now.is_known(key);
            let mut implied = wanted.filter(|(key, _)| is_implied(key));
            match implied.try_for_each(|(key, values)| imply(&mut now, key, values)) {
                Ok(()) => {
                    self.now = now;
                    self.comparisons.push((*one, contrast));
                }
                Err(why) => not_measured.push(NotMeasured {
                    finding: one.finding,
                    why,
                }),
            }
        }
    }

    /// The plan, unless it would compare nothing.
    fn finish(mut self, subject: &Subject, not_measured: &mut Vec<NotMeasured>) -> Option<Target> {
        if self.comparisons.is_empty() && (self.load == Load::Guests || self.prefill == "off") {
            return None;
        }
        // The disk of a rule about prefill starts as that rule says.
        if !self.now.is_known("prefill") {
            let _ = self.now.settings.set("prefill", self.prefill);
        }
        let (_, backing) = self.scratch.storage();
        if let Some(backing) = backing
            && let Err(why) = self.now.settings.set("backing", &backing)
        {
            self.refuse_all(&why, not_measured);
            return None;
        }
        let mut target = Target {
            disks: vec![subject.label.to_owned()],
            scratch: self.scratch.clone(),
            load: self.load,
            now: self.now.clone(),
            cases: Vec::new(),
            bundles: Vec::new(),
            loads: Vec::new(),
            left_out: Vec::new(),
        };
        target.loads = vec![load_of(&LOADS[0])];
        if let Err(why) = target.parse() {
            self.refuse_all(&why, not_measured);
            return None;
        }
        target.loads.clear();
        for (one, contrast) in &self.comparisons {
            let added = target.add(one, contrast);
            if let Err(why) = added {
                not_measured.push(NotMeasured {
                    finding: one.finding,
                    why: self.now.explained(why),
                });
            }
        }
        if target.loads.is_empty() {
            target.loads = vec![load_of(&LOADS[0]), load_of(&LOADS[1])];
        }
        target.add_together();
        target.add_ringdisk(subject.moves.as_ref());
        let compares = target.comparisons().next().is_some();
        compares.then_some(target)
    }

    fn refuse_all(&self, why: &str, not_measured: &mut Vec<NotMeasured>) {
        for (one, _) in &self.comparisons {
            not_measured.push(NotMeasured {
                finding: one.finding,
                why: why.to_owned(),
            });
        }
    }
}

/// Gives a setting one of these values, unless it has one of them.
fn imply(now: &mut Configuration, key: &str, values: &str) -> Result<(), String> {
    let value = now.value(key);
    let first = values.split('|').next().unwrap_or_default();
    let is_one = values.split('|').any(|one| one == value);
    now.set(key, if is_one { &value } else { first })
        .map_err(|why| format!("{key}: {why}"))
}

/// The configuration of qemu-storage-daemon, which opens disks as QEMU does, or of ringdisk for its own disks.
fn without_guest(of: Configuration) -> Configuration {
    let mut now = of.clone();
    let server = match of.settings.device {
        ::lab::plan::words::Device::VhostUserBlk => "ringdisk",
        _ => "qemu-storage-daemon",
    };
    let plain = Settings::default();
    let mut reset: Vec<(&str, String)> = OF_GUESTS
        .into_iter()
        .chain(["syntax", "queues", "queue-size", "backing-files"])
        .map(|key| (key, plain.value(key)))
        .collect();
    reset.push(("device", "vhost-user-blk".into()));
    reset.push(("server", server.into()));
    if !["off", "on"].contains(&of.value("iothread").as_str()) {
        reset.push(("iothread", "on".into()));
    }
    for (key, value) in reset {
        let _ = now.settings.set(key, &value);
    }
    now.guest_notes = vec![format!(
        "without a guest: the load runs at the socket of {server}, because KVM does not work here"
    )];
    now
}

/// Adds a finding about the host's device below the scratch disk.
///
/// # Errors
/// The lab cannot measure it here.
pub fn add_finding(target: &mut Target, asked: &Asked) -> Result<(), String> {
    let contrast = match &asked.rule.measurement {
        Measurement::None(why) => return Err(why.clone()),
        Measurement::By(contrast) => &comparable(contrast, target.load)?,
    };
    let mut now = target.now.clone();
    let wanted = std::iter::once((&contrast.axis, &contrast.from));
    for (key, values) in wanted.filter(|(key, _)| !target.now.is_known(key)) {
        imply(&mut now, key, values)?;
    }
    let mut with_finding = target.clone();
    with_finding.rebase(now);
    with_finding.add(asked, contrast)?;
    *target = with_finding;
    Ok(())
}
