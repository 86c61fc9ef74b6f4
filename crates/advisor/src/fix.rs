//! Fixes: settings that rules name, which every front-end writes in its own syntax, as few bytes as it can.

mod unknown;

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use crate::check::{Checked, check};
use crate::facts::Facts;
use crate::input::{Input, Kind, ReadError, Surroundings, read};
use crate::rules::{Rule, Rules, Severity};
use crate::text::{Edit, Source, apply};
use crate::{libvirt, proxmox, qemu, ringdisk};

/// Most changes to one input; a machine has far fewer settings.
const CHANGES_MAX: usize = 2000;

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
    /// Number of its machine.
    pub vm: usize,
    /// Number of its disk.
    pub disk: Option<usize>,
}

/// The changes for a setting; why there are none.
pub type Edits = Result<Vec<Edit>, String>;

impl Target<'_> {
    fn edits(&self, setting: Setting) -> Edits {
        match self.input.kind {
            Kind::Libvirt => libvirt::edits(self, setting),
            Kind::Qemu => qemu::edits(self, setting),
            Kind::Proxmox => proxmox::edits(self, setting),
            Kind::Ringdisk => ringdisk::edits(self, setting),
        }
    }

    /// The machine.
    pub fn vm(&self) -> Result<&crate::model::Vm, String> {
        self.input
            .vms
            .get(self.vm)
            .ok_or_else(|| "there is no such machine".into())
    }

    /// The disk.
    pub fn disk(&self) -> Result<&crate::model::Disk, String> {
        let disk = self.disk.and_then(|disk| self.vm().ok()?.disks.get(disk));
        disk.ok_or_else(|| "it is no matter of one disk".into())
    }

    /// An I/O thread that nothing of the machine names, and that can be named without quotes.
    pub fn unused_thread(&self) -> Option<&str> {
        let vm = self.vm().ok()?;
        vm.threads
            .iter()
            .map(|thread| thread.id.as_str())
            .find(|id| is_plain(id) && !vm.uses_thread(id))
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
    for (vm, machine) in input.vms.iter().zip(machines) {
        let mut fixed = fix_text(machine, rules, facts, wanted)?;
        done.append(&mut fixed.done);
        left.append(&mut fixed.left);
        let text = fixed.input.sources.swap_remove(0).text;
        edits.push(Edit::replace(vm.span, text));
    }
    let sources = apply(&input.sources, &edits).unwrap_or_else(|| input.sources.clone());
    let input = reread(&input, sources)?;
    Ok(Fixed { input, done, left })
}

/// Each machine of an input as an input of its own; none if there is one alone, or where they hang together.
pub fn machines(input: &Input) -> Option<Vec<Input>> {
    let [source] = input.sources.as_slice() else {
        return None;
    };
    let apart = |pair: &[crate::model::Vm]| pair[0].span.end <= pair[1].span.start;
    if input.vms.len() < 2 || !input.vms.windows(2).all(apart) {
        return None;
    }
    let one = |vm: &crate::model::Vm| {
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

/// The same for a text with few machines, one change after the other.
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
    };
    // Disks change names and places with a change, so what was tried in vain is known by its place until the next one. A
    // rule may hold of a disk twice, for another reason: two threads that are not defined. But not without end.
    let mut vain: BTreeSet<(String, Option<usize>, Option<usize>, String)> = BTreeSet::new();
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    let disks: usize = fixed.input.vms.iter().map(|vm| vm.disks.len()).sum();
    let times_max = 8 + 2 * disks;
    for _ in 0..CHANGES_MAX {
        let mut input = fixed.input.clone();
        let Checked { findings, .. } = check(&mut input, rules, facts, wanted.ignore);
        let next = findings.iter().find_map(|finding| {
            let rule = rules.get(&finding.rule)?;
            let key = (
                rule.id.clone(),
                finding.vm_index,
                finding.disk_index,
                finding.text.clone(),
            );
            let often = times.get(&rule.id).copied().unwrap_or(0) >= times_max;
            let open = !often && !vain.contains(&key) && is_wanted(rule, wanted);
            open.then_some((rule, finding, key))
        });
        let Some((rule, finding, key)) = next else {
            return Ok(fixed);
        };
        vain.insert(key);
        let Some(vm) = finding.vm_index else {
            continue;
        };
        let target = Target {
            input: &input,
            vm,
            disk: finding.disk_index,
        };
        match all(&target, rule) {
            Ok(sources) => {
                let changed = reread(&input, sources)?;
                fixed.done.push(Change {
                    rule: rule.id.clone(),
                    place: finding.place(),
                    unknown: unknown::of(&target, &rule.fix, facts),
                });
                fixed.input = changed;
                vain.clear();
                *times.entry(rule.id.clone()).or_default() += 1;
            }
            Err(why) => {
                let left = (rule.id.clone(), finding.place(), why);
                if !fixed.left.contains(&left) {
                    fixed.left.push(left);
                }
            }
        }
    }
    Ok(fixed)
}

fn is_wanted(rule: &Rule, wanted: Wanted<'_>) -> bool {
    let named = wanted.also.contains(&rule.id);
    !rule.fix.is_empty() && (named || (!rule.lowers_durability && rule.severity != Severity::Info))
}

/// All settings of a rule, each in the text that the one before left.
fn all(target: &Target<'_>, rule: &Rule) -> Result<Vec<Source>, String> {
    let mut input = target.input.clone();
    for setting in &rule.fix {
        let target = Target {
            input: &input,
            ..*target
        };
        let edits = target.edits(*setting)?;
        let sources = apply(&input.sources, &edits).ok_or("two changes at one place")?;
        input = reread(&input, sources).map_err(|e| format!("it would not be read again: {e}"))?;
    }
    match input
        .sources
        .iter()
        .zip(&target.input.sources)
        .all(|(a, b)| a.text == b.text)
    {
        true => Err("nothing would change".into()),
        false => Ok(input.sources),
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
