//! Fixes: settings that rules name. Each front-end writes them in its own syntax with as few changed bytes as possible.

#[cfg(test)]
mod tests;
mod unknown;

pub use unknown::Question;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

use crate::facts::Facts;
use crate::hits::{Hit, hits};
use crate::input::{Input, ReadError, Surroundings};
use crate::model::Vm;
use crate::parsed::ParsedInput;
use crate::read::read;
use crate::rules::{Rule, Rules, Severity};
use crate::target::{Edits, Target};
use crate::text::{Changes, Edit, Source, apply};

/// The maximum number of times that an input is changed and checked again. Each round changes one setting of every disk
/// that needs it, and a disk has about a dozen. Findings that are left after that are reported.
const ROUNDS_MAX: usize = 64;

/// Selects the findings to fix.
#[derive(Clone, Copy, Default)]
pub struct Wanted<'a> {
    /// Rules to skip.
    pub ignore: &'a [String],
    /// Rules to fix although they lower durability, are notes, or depend on unknown facts.
    pub also: &'a [String],
}

/// An input after its fixes.
#[derive(Debug)]
pub struct Fixed {
    /// The input, read again.
    pub input: Input,
    pub done: Vec<Change>,
    /// Findings whose fix was not made.
    pub left: Vec<Unfixed>,
    /// Findings other than notes that have no fix, or one that the user must ask for.
    pub others: Vec<Unfixed>,
    /// The number of times that the text was changed and read again.
    pub rounds: usize,
}

/// A change that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub rule: String,
    /// The VM and the disk.
    pub place: String,
    /// What the input and the facts do not say, and on which the change depends.
    pub unknown: Option<Question>,
    /// Whether the finding exists only since another change.
    pub is_consequence: bool,
}

/// A finding that was not fixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfixed {
    pub rule: String,
    /// The VM and the disk.
    pub place: String,
    pub reason: String,
}

/// Applies the fixes of all findings, and of findings that these changes cause.
///
/// # Errors
/// The changed text cannot be read again, which is a bug.
pub fn fix(
    input: Input,
    rules: &Rules,
    facts: Option<&Facts>,
    wanted: Wanted<'_>,
) -> Result<Fixed, ReadError> {
    // After a change, the whole text is read again. With one text per VM, the work stays proportional to its size.
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
    let mut others = Vec::new();
    let mut rounds = 0;
    for (vm, machine) in input.vms.iter().zip(machines) {
        let mut fixed = fix_text(machine, rules, facts, wanted)?;
        done.append(&mut fixed.done);
        left.append(&mut fixed.left);
        others.append(&mut fixed.others);
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
        others,
        rounds,
    })
}

/// Splits an input into one input per VM; `None` if it has only one VM, or if their texts overlap.
pub fn machines(input: &Input) -> Option<Vec<Input>> {
    let [source] = input.sources.as_slice() else {
        return None;
    };
    let are_separate = |pair: &[Vm]| pair[0].span.end <= pair[1].span.start;
    if input.vms.len() < 2 || !input.vms.windows(2).all(are_separate) {
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

/// Fixes a text with few VMs, in rounds. A round makes all changes that do not overlap, and then the text is checked again:
/// the work grows with the number of disks, not with its square.
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
        others: Vec::new(),
        rounds: 0,
    };
    let mut first: Option<HashSet<(String, String)>> = None;
    loop {
        let input = with_facts(&fixed.input, facts);
        let hits = hits(&input, rules, facts, wanted.ignore).hits;
        let (sources, left) = if fixed.rounds < ROUNDS_MAX {
            let (sources, mut done, left) = round(&input, &hits, facts, wanted);
            let key = |hit: &Hit<'_>| (hit.rule.id.clone(), hit.place(&input));
            let first = first.get_or_insert_with(|| hits.iter().map(key).collect());
            for change in &mut done {
                let key = (change.rule.clone(), change.place.clone());
                change.is_consequence = !first.contains(&key);
            }
            fixed.done.extend(done);
            (sources, left)
        } else {
            let reason = format!("the finding remains after {ROUNDS_MAX} changes");
            let remaining = hits.iter().filter(|hit| is_wanted(hit.rule, wanted));
            let remaining = remaining.map(|hit| unfixed(hit, &input, reason.clone()));
            (None, remaining.collect())
        };
        fixed.left = left;
        let Some(sources) = sources else {
            fixed.others = others(&hits, &input, wanted);
            return Ok(fixed);
        };
        fixed.input = reread(&input, sources)?;
        fixed.rounds += 1;
    }
}

/// The findings, other than notes, that no fix was tried for.
fn others(hits: &[Hit<'_>], input: &Input, wanted: Wanted<'_>) -> Vec<Unfixed> {
    let others = hits
        .iter()
        .filter(|hit| hit.rule.severity != Severity::Info && !is_wanted(hit.rule, wanted));
    let reason = |rule: &Rule| match rule.fix.is_empty() {
        true => format!("it has no automatic fix; {}", rule.advice),
        false => format!("less durable; --fix-rule {} changes it", rule.id),
    };
    others
        .map(|hit| unfixed(hit, input, reason(hit.rule)))
        .collect()
}

/// Whether `--fix` fixes a finding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Remedy {
    /// There is no automatic fix.
    #[default]
    None,
    Fix,
    /// `--fix-rule` does, for this reason.
    Named(String),
    /// The fix is refused, for this reason.
    Refused(String),
}

/// What `--fix` would do about each finding of an input to which its facts have been added.
pub(crate) fn remedies(input: &Input, hits: &[Hit<'_>], facts: Option<&Facts>) -> Vec<Remedy> {
    let parsed = ParsedInput::new(input);
    let remedy = |hit: &Hit<'_>| {
        let Hit { rule, vm, disk } = *hit;
        if rule.fix.is_empty() {
            return Remedy::None;
        }
        let tried = try_fix(&parsed, &parsed.target(vm, disk), rule, facts);
        parsed.round.undo(vm);
        match tried {
            Err(reason) => Remedy::Refused(reason),
            Ok(_) if rule.lowers_durability => Remedy::Named("less durable".into()),
            Ok(_) if rule.severity == Severity::Info => Remedy::Named("a note".into()),
            Ok((
                _,
                Some(Question {
                    text,
                    may_harm: true,
                }),
            )) => Remedy::Named(format!("unknown {text}")),
            Ok(_) => Remedy::Fix,
        }
    };
    hits.iter().map(remedy).collect()
}

/// The edits of a rule's fix, and the question on which they depend.
fn try_fix(
    parsed: &ParsedInput<'_>,
    target: &Target<'_>,
    rule: &Rule,
    facts: Option<&Facts>,
) -> Result<(Vec<Edit>, Option<Question>), String> {
    let round = &parsed.round;
    round.begin(target.vm);
    let threads = round.threads(target.vm);
    let edits = rule_edits(parsed, target, rule)?;
    if edits.is_empty() && round.threads(target.vm) == threads {
        return Err("the change would have no effect".into());
    }
    Ok((edits, unknown::of(target, &rule.fix, facts)?))
}

/// The input with the facts of its host added.
fn with_facts<'a>(input: &'a Input, facts: Option<&Facts>) -> Cow<'a, Input> {
    let mut input = Cow::Borrowed(input);
    if let Some(facts) = facts {
        let vms = &mut input.to_mut().vms;
        vms.iter_mut().for_each(|vm| facts.join(vm));
    }
    input
}

fn unfixed(hit: &Hit<'_>, input: &Input, reason: String) -> Unfixed {
    Unfixed {
        rule: hit.rule.id.clone(),
        place: hit.place(input),
        reason,
    }
}

/// Makes all changes that can be made together. Returns the new texts (none if nothing changes), the changes made, and the
/// findings left.
fn round(
    input: &Input,
    hits: &[Hit<'_>],
    facts: Option<&Facts>,
    wanted: Wanted<'_>,
) -> (Option<Vec<Source>>, Vec<Change>, Vec<Unfixed>) {
    let parsed = ParsedInput::new(input);
    let round = &parsed.round;
    let mut changes = Changes::default();
    let (mut done, mut left) = (Vec::new(), Vec::new());
    // At most one change per disk and round, and either changes of its disks or one change of the VM: each change sees the
    // result of the one before.
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
        let named = wanted.also.contains(&rule.id);
        let fixed = try_fix(&parsed, &parsed.target(vm, disk), rule, facts);
        let fixed = fixed.and_then(|(edits, unknown)| match unknown {
            Some(Question { text, may_harm: true }) if !named => Err(format!(
                "unknown {text}; collect the facts with --host on the VM's host, or name the rule with --fix-rule {}",
                rule.id
            )),
            unknown => Ok((edits, unknown)),
        });
        let (edits, unknown) = match fixed {
            Ok(fixed) => fixed,
            Err(reason) => {
                round.undo(vm);
                left.push(unfixed(hit, input, reason));
                continue;
            }
        };
        if !changes.add(edits) {
            // It overlaps another change; the next round tries it again.
            round.undo(vm);
            continue;
        }
        done.push(Change {
            rule: rule.id.clone(),
            place: hit.place(input),
            unknown,
            is_consequence: false,
        });
        machines.insert(vm, disk.is_none());
        disks.extend(disk.map(|disk| (vm, disk)));
    }
    for vm in machines.into_keys() {
        let moved = round.moved(vm);
        if !moved.is_empty()
            && let Ok(edits) = parsed.keep_boot_order(vm, &moved)
            && !changes.add(edits)
        {
            // No other change touches the boot order. If one does, change nothing rather than boot from another disk.
            let left = Unfixed {
                rule: "emulated-bus".into(),
                place: String::new(),
                reason: "the boot order cannot be kept".into(),
            };
            return (None, Vec::new(), vec![left]);
        }
        if let Some(count) = round.threads(vm)
            && let Ok(edits) = parsed.count_threads(vm, count)
        {
            let added = changes.add(edits);
            debug_assert!(added, "nothing else changes the number of threads");
        }
    }
    left.dedup();
    let sources = if changes.is_empty() {
        None
    } else {
        changes.apply(&input.sources)
    };
    (sources, done, left)
}

fn is_wanted(rule: &Rule, wanted: Wanted<'_>) -> bool {
    let named = wanted.also.contains(&rule.id);
    !rule.fix.is_empty() && (named || (!rule.lowers_durability && rule.severity != Severity::Info))
}

/// The edits for all settings of a rule; none if the text would stay the same.
fn rule_edits(parsed: &ParsedInput<'_>, target: &Target<'_>, rule: &Rule) -> Edits {
    let mut edits = Vec::new();
    for setting in &rule.fix {
        edits.extend(parsed.edits(target, *setting)?);
    }
    let changes = |edit: &Edit| {
        let source = target.input.sources.get(usize::from(edit.span.source));
        let now = source.and_then(|source| source.text.get(edit.span.range()));
        now != Some(edit.text.as_str())
    };
    if !edits.iter().any(changes) {
        edits.clear();
    }
    Ok(edits)
}

/// Reads an input again after its texts have changed.
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
