//! Fixes: settings that rules name, which every front-end writes in its own syntax, as few bytes as it can.

#[cfg(test)]
mod tests;
mod unknown;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::str::FromStr;

use crate::check::{Hit, hits};
use crate::facts::Facts;
use crate::input::{Input, Kind, ReadError, Surroundings, read};
use crate::model::{Disk, Vm};
use crate::round::Round;
use crate::rules::{Rule, Rules, Severity};
use crate::text::{Changes, Edit, Source, apply};
use crate::{libvirt, proxmox, qemu, ringdisk};

/// How often an input is changed and checked again, at most. Each time all its disks are changed that need it, one setting
/// each; a disk has about a dozen. What is still found then is told.
const ROUNDS_MAX: usize = 64;

/// What a fix does, in no syntax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// The disk goes to a virtio bus.
    Virtio,
    /// This cache mode.
    Cache(&'static str),
    /// The cache mode that is as durable, with O_DIRECT.
    CacheDirect,
    /// This way to the kernel.
    Aio(&'static str),
    /// An I/O thread of its own: one that is defined and not used, or a new one.
    OwnThread,
    /// The I/O thread that the disk names is defined.
    DefineThread,
    /// I/O threads that nothing uses go.
    TrimThreads,
    /// Every disk has its SCSI controller.
    SingleController,
    /// As many queues as vCPUs.
    QueuesAsVcpus,
    /// Queues take turns over their threads.
    EvenMapping,
    /// Discards reach the storage.
    Discard,
    /// Something given goes: `ioeventfd`, `x-data-plane`, `scsi`, `iothread`.
    Remove(&'static str),
    /// Other processes may map the guest's memory.
    SharedMemory,
    /// QEMU connects again to the disk's server.
    Reconnect,
    /// The cache of a qcow2 image's tables holds all of them.
    L2Cache,
}

impl FromStr for Setting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "bus=virtio" => Self::Virtio,
            "cache=none" => Self::Cache("none"),
            "cache=writeback" => Self::Cache("writeback"),
            "cache=direct" => Self::CacheDirect,
            "aio=native" => Self::Aio("native"),
            "aio=threads" => Self::Aio("threads"),
            "aio=io_uring" => Self::Aio("io_uring"),
            "iothread=own" => Self::OwnThread,
            "define-thread" => Self::DefineThread,
            "trim-threads" => Self::TrimThreads,
            "controller=single" => Self::SingleController,
            "queues=vcpus" => Self::QueuesAsVcpus,
            "mapping=even" => Self::EvenMapping,
            "discard=unmap" => Self::Discard,
            "remove=ioeventfd" => Self::Remove("ioeventfd"),
            "remove=x-data-plane" => Self::Remove("x-data-plane"),
            "remove=scsi" => Self::Remove("scsi"),
            "remove=iothread" => Self::Remove("iothread"),
            "memory=shared" => Self::SharedMemory,
            "reconnect" => Self::Reconnect,
            "l2-cache=needed" => Self::L2Cache,
            _ => return Err(format!("there is no setting '{text}'")),
        })
    }
}

/// What is set where.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// The input.
    pub input: &'a Input,
    /// What it has in common with other changes.
    pub round: &'a Round<'a>,
    /// Number of its machine.
    pub vm: usize,
    /// Number of its disk.
    pub disk: Option<usize>,
}

/// The changes for a setting; why there are none.
pub type Edits = Result<Vec<Edit>, String>;

impl<'a> Target<'a> {
    /// A machine, or one of its disks.
    pub fn new(round: &'a Round<'a>, vm: usize, disk: Option<usize>) -> Self {
        Self {
            input: round.input,
            round,
            vm,
            disk,
        }
    }

    fn edits(&self, setting: Setting) -> Edits {
        if let (Setting::Virtio | Setting::SingleController, Ok(disk)) = (setting, self.disk()) {
            let os = self.vm()?.table.word("vm.os");
            let is_virtio = disk
                .table
                .word("disk.bus")
                .is_some_and(|bus| bus.starts_with("virtio"));
            if !is_virtio && matches!(os, Some("windows" | "other")) {
                return Err("the guest may have no virtio driver".into());
            }
        }
        match self.input.kind {
            Kind::Libvirt => libvirt::edits(self, setting),
            Kind::Qemu => qemu::edits(self, setting),
            Kind::Proxmox => proxmox::edits(self, setting),
            Kind::Ringdisk => ringdisk::edits(self, setting),
        }
    }

    /// The machine.
    pub fn vm(&self) -> Result<&'a Vm, String> {
        self.input
            .vms
            .get(self.vm)
            .ok_or_else(|| "there is no such machine".into())
    }

    /// The disk.
    pub fn disk(&self) -> Result<&'a Disk, String> {
        let disk = self.disk.and_then(|disk| self.vm().ok()?.disks.get(disk));
        disk.ok_or_else(|| "it is no matter of one disk".into())
    }
}

/// Whether an id means the same wherever it is written.
pub fn is_plain(id: &str) -> bool {
    !id.is_empty()
        && id
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

/// Which findings are fixed.
#[derive(Clone, Copy, Default)]
pub struct Wanted<'a> {
    /// Rules that are left alone.
    pub ignore: &'a [String],
    /// Rules that are fixed although they lower durability.
    pub also: &'a [String],
}

/// An input after its fixes.
#[derive(Debug)]
pub struct Fixed {
    /// It, read again.
    pub input: Input,
    /// What was done.
    pub done: Vec<Change>,
    /// What was not, and why.
    pub left: Vec<(String, String, String)>,
    /// How often the text was changed as a whole.
    pub rounds: usize,
}

/// A change that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The rule that asked for it.
    pub rule: String,
    /// The machine and the disk.
    pub place: String,
    /// What it depends on that the input and the facts do not say; with that the other way, it does harm.
    pub unknown: Option<String>,
}

/// Applies the fixes of all findings; what comes to light by one is fixed too.
///
/// # Errors
/// What was written cannot be read again, which is a mistake of this program.
pub fn fix(
    input: Input,
    rules: &Rules,
    facts: Option<&Facts>,
    wanted: Wanted<'_>,
) -> Result<Fixed, ReadError> {
    // A change is followed by reading all of the text again: each machine has a text of its own meanwhile.
    let Some(machines) = machines(&input) else {
        return fix_text(input, rules, facts, wanted);
    };
    let ignored = input.ignores.iter().map(|ignore| ignore.rule.clone());
    let ignore: Vec<String> = wanted.ignore.iter().cloned().chain(ignored).collect();
    let wanted = Wanted {
        ignore: &ignore,
        ..wanted
    };
    let (mut done, mut left, mut edits) = (Vec::new(), Vec::new(), Vec::new());
    let mut rounds = 0;
    for (vm, machine) in input.vms.iter().zip(machines) {
        let mut fixed = fix_text(machine, rules, facts, wanted)?;
        done.append(&mut fixed.done);
        left.append(&mut fixed.left);
        rounds = rounds.max(fixed.rounds);
        let text = fixed.input.sources.swap_remove(0).text;
        edits.push(Edit::replace(vm.span, text));
    }
    let sources = apply(&input.sources, &edits).unwrap_or_else(|| input.sources.clone());
    let input = reread(&input, sources)?;
    Ok(Fixed {
        input,
        done,
        left,
        rounds,
    })
}

/// Each machine of an input as an input of its own; none if there is one alone, or where they hang together.
pub fn machines(input: &Input) -> Option<Vec<Input>> {
    let [source] = input.sources.as_slice() else {
        return None;
    };
    let apart = |pair: &[Vm]| pair[0].span.end <= pair[1].span.start;
    if input.vms.len() < 2 || !input.vms.windows(2).all(apart) {
        return None;
    }
    let one = |vm: &Vm| {
        let surroundings = Surroundings {
            name: Some(vm.name.clone()),
            ..input.surroundings.clone()
        };
        let text = source.text.get(vm.span.range())?;
        let alone = read(Source::new(&source.name, text), surroundings).ok()?;
        let [same] = alone.vms.as_slice() else {
            return None;
        };
        let is_same = alone.kind == input.kind
            && alone.sources.len() == 1
            && same.name == vm.name
            && same.disks.len() == vm.disks.len();
        is_same.then_some(alone)
    };
    input.vms.iter().map(one).collect()
}

/// The same for a text with few machines, in rounds: all that is found is changed together, as far as changes do not touch
/// each other, and then the text is checked again. So the work grows with the number of disks, and not with its square.
fn fix_text(
    input: Input,
    rules: &Rules,
    facts: Option<&Facts>,
    wanted: Wanted<'_>,
) -> Result<Fixed, ReadError> {
    let mut fixed = Fixed {
        input,
        done: Vec::new(),
        left: Vec::new(),
        rounds: 0,
    };
    loop {
        let input = with_facts(&fixed.input, facts);
        let hits = hits(&input, rules, facts, wanted.ignore).hits;
        let (sources, left) = match fixed.rounds < ROUNDS_MAX {
            true => {
                let (sources, done, left) = round(&input, &hits, facts, wanted);
                fixed.done.extend(done);
                (sources, left)
            }
            false => {
                let why = format!("it is found again after {ROUNDS_MAX} changes");
                let again = hits.iter().filter(|hit| is_wanted(hit.rule, wanted));
                let again = again.map(|hit| (hit.rule.id.clone(), hit.place(&input), why.clone()));
                (None, again.collect())
            }
        };
        fixed.left = left;
        let Some(sources) = sources else {
            return Ok(fixed);
        };
        fixed.input = reread(&input, sources)?;
        fixed.rounds += 1;
    }
}

/// An input with what is known of its host.
fn with_facts<'a>(input: &'a Input, facts: Option<&Facts>) -> Cow<'a, Input> {
    let mut input = Cow::Borrowed(input);
    if let Some(facts) = facts {
        let vms = &mut input.to_mut().vms;
        vms.iter_mut().for_each(|vm| facts.join(vm));
    }
    input
}

/// What is not fixed: the rule, where, and why.
type Left = Vec<(String, String, String)>;

/// Fixes what is found as far as it can be done at once: the texts, or none if nothing changes, what was done, and what is
/// left.
fn round(
    input: &Input,
    hits: &[Hit<'_>],
    facts: Option<&Facts>,
    wanted: Wanted<'_>,
) -> (Option<Vec<Source>>, Vec<Change>, Left) {
    let round = Round::new(input);
    let mut changes = Changes::default();
    let (mut done, mut left) = (Vec::new(), Left::new());
    // One change of a disk at a time, and of a machine as a whole: each sees what the one before has left.
    let mut disks: HashSet<(usize, usize)> = HashSet::new();
    let mut machines: BTreeMap<usize, bool> = BTreeMap::new();
    for hit in hits {
        let Hit { rule, vm, disk } = *hit;
        let waits = match (disk, machines.get(&vm)) {
            (_, Some(true)) => true,
            (Some(disk), _) => disks.contains(&(vm, disk)),
            (None, changed) => changed.is_some(),
        };
        if waits || !is_wanted(rule, wanted) {
            continue;
        }
        round.begin(vm);
        let threads = round.threads(vm);
        let target = Target::new(&round, vm, disk);
        let edits = all(&target, rule).and_then(|edits| {
            match edits.is_empty() && round.threads(vm) == threads {
                true => Err("nothing would change".into()),
                false => Ok(edits),
            }
        });
        let edits = match edits {
            Ok(edits) => edits,
            Err(why) => {
                round.undo(vm);
                left.push((rule.id.clone(), hit.place(input), why));
                continue;
            }
        };
        if !changes.add(edits) {
            // Another change is in the way; the next round comes back to this one.
            round.undo(vm);
            continue;
        }
        done.push(Change {
            rule: rule.id.clone(),
            place: hit.place(input),
            unknown: unknown::of(&target, &rule.fix, facts),
        });
        machines.insert(vm, disk.is_none());
        disks.extend(disk.map(|disk| (vm, disk)));
    }
    for vm in machines.into_keys() {
        let moved = round.moved(vm);
        if !moved.is_empty()
            && let Ok(edits) = libvirt::keep_boot_order(&Target::new(&round, vm, None), &moved)
            && !changes.add(edits)
        {
            // Nothing else changes these places; if it does, nothing is better than another disk.
            let why = "its boot order cannot be kept".to_owned();
            return (
                None,
                Vec::new(),
                vec![("emulated-bus".into(), String::new(), why)],
            );
        }
        if let Some(count) = round.threads(vm)
            && let Ok(edits) = libvirt::count_threads(&Target::new(&round, vm, None), count)
        {
            let added = changes.add(edits);
            debug_assert!(added, "nothing else changes the number of threads");
        }
    }
    left.dedup();
    let sources = match changes.is_empty() {
        true => None,
        false => changes.apply(&input.sources),
    };
    (sources, done, left)
}

fn is_wanted(rule: &Rule, wanted: Wanted<'_>) -> bool {
    let named = wanted.also.contains(&rule.id);
    !rule.fix.is_empty() && (named || (!rule.lowers_durability && rule.severity != Severity::Info))
}

/// The edits for all settings of a rule; none if they would change nothing.
fn all(target: &Target<'_>, rule: &Rule) -> Edits {
    let mut edits = Vec::new();
    for setting in &rule.fix {
        edits.extend(target.edits(*setting)?);
    }
    let changes = |edit: &Edit| {
        let source = target.input.sources.get(usize::from(edit.span.source));
        let now = source.and_then(|source| source.text.get(edit.span.range()));
        now != Some(edit.text.as_str())
    };
    match edits.iter().any(changes) {
        true => Ok(edits),
        false => Ok(Vec::new()),
    }
}

/// Reads an input again after its texts were changed.
pub fn reread(input: &Input, sources: Vec<Source>) -> Result<Input, ReadError> {
    let mut surroundings = input.surroundings.clone();
    let mut sources = sources.into_iter();
    let main = sources.next().unwrap_or_else(|| Source::new("", ""));
    for source in sources {
        if let Some(file) = surroundings
            .files
            .iter_mut()
            .find(|file| file.name == source.name)
        {
            *file = source;
        }
    }
    read(main, surroundings)
}

/// A unified patch from one state of an input to another.
pub fn patch(before: &Input, after: &Input) -> String {
    let mut patch = String::new();
    for (before, after) in before.sources.iter().zip(&after.sources) {
        if before.text == after.text {
            continue;
        }
        let diff = similar::TextDiff::from_lines(&before.text, &after.text);
        let mut unified = diff.unified_diff();
        unified.context_radius(3).header(&before.name, &after.name);
        patch.push_str(&unified.to_string());
    }
    patch
}
