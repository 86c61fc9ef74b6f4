//! Reads plans in TOML. Every error has its line.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;
use toml::de::DeTable;

use super::blame;
use super::claims::claim;
use super::cpus::{CpuList, Cpus};
use super::guests;
use super::settings::{self, Settings};
use super::units::{number, share, size, switch, time};
use super::values::{
    Entry, Mistake, Parsed, absolute, between, entries, host, line, one, pairs, single, table,
    tables, values, word,
};
use super::words::{Against, Device, Format, GuestKind, Interleave, Metric, Until, not_one_of};
use super::workload::{self, Profile, Workload};
use super::{CASES_MAX, Case, Plan, Ssh, WORKLOADS_MAX};

/// The largest plan or job file.
const BYTES_MAX: u64 = 1 << 20;

/// An error in a plan.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{}, line {line}: {problem}", file.display())]
pub struct PlanError {
    /// The plan.
    pub file: PathBuf,
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong, and what is allowed.
    pub problem: String,
}

const KEYS: [&str; 14] = [
    "name",
    "title",
    "guest",
    "budget",
    "blocks",
    "seed",
    "margin",
    "effect",
    "noise",
    "compare",
    "interleave",
    "until",
    "metric",
    "patience",
];
const TABLES: [&str; 9] = [
    "storage", "cpus", "config", "fio", "case", "workload", "exclude", "claim", "ssh",
];

/// Reads and checks a plan.
pub fn plan(file: &Path, text: &str, jobs: Jobs) -> Result<Plan, PlanError> {
    parse(file, text, jobs).map_err(|Mistake { at, problem }| PlanError {
        file: file.into(),
        line: 1 + text.bytes().take(at).filter(|&byte| byte == b'\n').count(),
        problem,
    })
}

/// Returns the text of the job file with this name.
pub type Jobs<'a> = &'a dyn Fn(&str) -> Result<String, String>;

fn parse(file: &Path, text: &str, jobs: Jobs) -> Parsed<Plan> {
    if text.len() as u64 > BYTES_MAX {
        return Err(Mistake::new(
            0..0,
            format!("a plan must not have more than {BYTES_MAX} bytes"),
        ));
    }
    let root = DeTable::parse(text).map_err(|e| {
        let at = e.span().map_or(0, |span| span.start);
        Mistake::new(at..at, e.message().trim())
    })?;
    let root = root.get_ref();
    let mut plan = empty(file);
    let mut compare = None;
    for (key, value) in root {
        let name = key.get_ref().as_ref();
        let text = || one(name, value);
        let fail = |problem| Mistake::new(value.span(), format!("{name}: {problem}"));
        match name {
            "name" => plan.name = word(&text()?).map_err(fail)?,
            "title" => plan.title = line(text()?).map_err(fail)?,
            "guest" => plan.guest = text()?.parse().map_err(fail)?,
            "budget" => plan.budget = time(&text()?).map_err(fail)?,
            "blocks" => plan.blocks_max = number(&text()?, 1, 1000).map_err(fail)?,
            "seed" => plan.seed = Some(number(&text()?, 0, i64::MAX as u64).map_err(fail)?),
            "margin" => plan.margin = share(&text()?).map_err(fail)?,
            "effect" => plan.effect = share(&text()?).map_err(fail)?,
            "noise" => plan.noise = share(&text()?).map_err(fail)?,
            "compare" => compare = Some(text()?.parse::<Against>().map_err(fail)?),
            "interleave" => plan.interleave = text()?.parse().map_err(fail)?,
            "until" => plan.until = text()?.parse().map_err(fail)?,
            "metric" => plan.metric = text()?.parse().map_err(fail)?,
            "patience" => plan.patience = between(&text()?, 0.0, 3600.0).map_err(fail)?,
            _ if TABLES.contains(&name) => {} // below
            _ => {
                let known: Vec<_> = KEYS.into_iter().chain(TABLES).collect();
                return Err(Mistake::new(key.span(), not_one_of(name, &known)));
            }
        }
    }
    if let Some(storage) = table(root, "storage")? {
        read_storage(&mut plan, storage)?;
    }
    if let Some(cpus) = table(root, "cpus")? {
        plan.cpus = read_cpus(cpus)?;
    }
    let explicit = cases(&mut plan, root)?;
    plan.workloads = workloads(&mut plan, root, jobs)?;
    plan.against = compare.unwrap_or(if explicit {
        Against::First
    } else {
        Against::OneFactor
    });
    plan.contrasts = Plan::pair(&plan.cases, plan.against);
    for (number, (entries, span)) in tables(root, "claim")?.into_iter().enumerate() {
        plan.claims.push(claim(&plan, number, &entries, span)?);
    }
    if let Some(ssh) = table(root, "ssh")? {
        plan.ssh = Some(read_ssh(ssh, key_span(root, "ssh"))?);
    }
    check(&plan, root)?;
    Ok(plan)
}

fn empty(file: &Path) -> Plan {
    let stem = file
        .file_stem()
        .map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    Plan {
        name: word(&stem).unwrap_or_else(|_| "plan".into()),
        title: String::new(),
        guest: GuestKind::Linux,
        budget: Duration::from_secs(3600),
        blocks_max: 30,
        seed: None,
        margin: 0.03,
        effect: 0.05,
        noise: 0.05,
        size: 1 << 30,
        directory: None,
        create: false,
        runtime: Duration::from_secs(10),
        ramp: Duration::from_secs(2),
        cases: Vec::new(),
        workloads: Vec::new(),
        contrasts: Vec::new(),
        against: Against::OneFactor,
        left_out: Vec::new(),
        claims: Vec::new(),
        interleave: Interleave::Boots,
        until: Until::Decided,
        metric: Metric::Speed,
        cpus: Cpus::default(),
        settle: false,
        patience: Duration::ZERO,
        ssh: None,
        jobs: BTreeMap::new(),
    }
}

fn read_storage(plan: &mut Plan, table: &DeTable) -> Parsed<()> {
    for (key, value) in table {
        let name = key.get_ref().as_ref();
        let text = one(name, value)?;
        let fail = |problem: String| Mistake::new(value.span(), format!("{name}: {problem}"));
        match name {
            "size" => {
                plan.size = size(&text).map_err(fail)?;
                if plan.size < 16 << 20 || !plan.size.is_multiple_of(1 << 20) {
                    return Err(fail("not a whole number of MiB, from 16M".into()));
                }
            }
            "settle" => plan.settle = switch(&text).map_err(fail)?,
            "create" => plan.create = switch(&text).map_err(fail)?,
            "directory" => plan.directory = Some(absolute(&text).map_err(fail)?),
            _ => {
                return Err(Mistake::new(
                    key.span(),
                    not_one_of(name, &["size", "settle", "create", "directory"]),
                ));
            }
        }
    }
    Ok(())
}

fn read_cpus(table: &DeTable) -> Parsed<Cpus> {
    let mut cpus = Cpus {
        server: vec![0],
        load: vec![1],
        vcpu: Vec::new(),
    };
    for (key, value) in table {
        let name = key.get_ref().as_ref();
        let fail = |problem: String| Mistake::new(value.span(), format!("{name}: {problem}"));
        let list: CpuList = one(name, value)?.parse().map_err(fail)?;
        match name {
            "server" => cpus.server = list.to_vec(),
            "load" => cpus.load = list.to_vec(),
            _ => {
                return Err(Mistake::new(
                    key.span(),
                    not_one_of(name, &["server", "load"]),
                ));
            }
        }
    }
    Ok(cpus)
}

/// Adds the cases of `[config]` and `[[case]]`: each case with each combination of the axes. Returns whether the plan has
/// any `[[case]]`.
fn cases(plan: &mut Plan, root: &DeTable) -> Parsed<bool> {
    let common = match table(root, "config")? {
        Some(table) => entries(table)?,
        None => Vec::new(),
    };
    let excludes: Vec<Vec<(String, String)>> = tables(root, "exclude")?
        .into_iter()
        .map(|(entries, _)| pairs(&entries, &settings::KEYS))
        .collect::<Parsed<_>>()?;
    let (bases, explicit) = bases(root)?;
    for (name, own, span) in &bases {
        // A value in a case overrides the common one.
        let is_own = |entry: &&Entry| !own.iter().any(|mine| mine.key == entry.key);
        let axes: Vec<&Entry> = common
            .iter()
            .filter(is_own)
            .chain(own.iter().filter(|entry| entry.key != "name"))
            .collect();
        let varied: Vec<&str> = axes
            .iter()
            .filter(|axis| axis.values.len() > 1)
            .map(|axis| axis.key)
            .collect();
        let mut product = vec![Settings {
            device: guests::default_device(plan.guest),
            ..Settings::default()
        }];
        for axis in &axes {
            product = multiply(
                &product,
                axis,
                settings::KEYS.contains(&axis.key),
                &settings::KEYS,
                CASES_MAX,
                |s, value| s.set(axis.key, value),
            )?;
        }
        for settings in product {
            let label = varied
                .iter()
                .map(|key| format!("{key}={}", settings.get(key)))
                .collect::<Vec<_>>()
                .join(" ");
            let full = match (name, label.is_empty()) {
                (Some(name), true) => name.clone(),
                (Some(name), false) => format!("{name} {label}"),
                (None, true) => settings.label(),
                (None, false) => label.clone(),
            };
            let case = Case {
                name: full,
                base: name.clone().unwrap_or_default(),
                point: label,
                settings,
            };
            if excludes.iter().any(|exclude| case.matches(exclude)) {
                continue;
            }
            if let Err(problem) = case.settings.check() {
                if varied.is_empty() {
                    let place = blame::setting(root, plan, &case, &problem, Settings::check);
                    let problem = format!("{}: {problem}", case.name);
                    return Err(Mistake::new(place.unwrap_or_else(|| span.clone()), problem));
                }
                plan.left_out.push(format!("{}: {problem}", case.name));
                continue;
            }
            let same = plan
                .cases
                .iter()
                .find(|other| other.settings.differences(&case.settings).is_empty());
            match same {
                // A second case with the very same settings was written to find the noise.
                Some(same)
                    if !explicit || same.base == case.base || same.settings != case.settings =>
                {
                    plan.left_out
                        .push(format!("{}: is the same as {} here", case.name, same.name));
                }
                _ => plan.cases.push(case),
            }
        }
    }
    Ok(explicit)
}

/// A `[[case]]`: its name, its entries, and its place.
type Base<'a> = (Option<String>, Vec<Entry<'a>>, Range<usize>);

/// Each `[[case]]`, or one for `[config]` without any; and whether there are any.
fn bases<'a>(root: &'a DeTable) -> Parsed<(Vec<Base<'a>>, bool)> {
    let named = tables(root, "case")?;
    let explicit = !named.is_empty();
    let mut bases = Vec::new();
    for (number, (own, span)) in named.into_iter().enumerate() {
        let name = own.iter().find(|entry| entry.key == "name");
        let name = match name {
            Some(entry) => {
                line(single(entry)?).map_err(|problem| Mistake::new(entry.span.clone(), problem))?
            }
            None => format!("case {}", number + 1),
        };
        bases.push((Some(name), own, span));
    }
    if bases.is_empty() {
        let of_config = root.iter().find(|(key, _)| key.get_ref() == "config");
        let span = of_config.map_or(0..0, |(key, _)| key.span());
        bases.push((None, Vec::new(), span));
    }
    Ok((bases, explicit))
}

/// The loads of `[fio]` and `[[workload]]`.
fn workloads(plan: &mut Plan, root: &DeTable, jobs: Jobs) -> Parsed<Vec<Workload>> {
    let common = match table(root, "fio")? {
        Some(table) => entries(table)?,
        None => Vec::new(),
    };
    let named = tables(root, "workload")?;
    let mut sets: Vec<Vec<Entry>> = named.into_iter().map(|(own, _)| own).collect();
    if sets.is_empty() {
        sets.push(Vec::new());
    }
    let mut known = workload::KEYS.to_vec();
    known.extend(["runtime", "ramp", "profile", "job", "name"]);
    let mut all: Vec<Workload> = Vec::new();
    for own in &sets {
        let is_own = |entry: &&Entry| !own.iter().any(|mine| mine.key == entry.key);
        let mut product = vec![Workload::default()];
        let mut rest = Vec::new();
        for axis in common.iter().filter(is_own).chain(own.iter()) {
            let fail = |problem: String| {
                Mistake::new(axis.span.clone(), format!("{}: {problem}", axis.key))
            };
            match axis.key {
                "runtime" => plan.runtime = between(&single(axis)?, 0.1, 86_400.0).map_err(fail)?,
                "ramp" => plan.ramp = between(&single(axis)?, 0.0, 86_400.0).map_err(fail)?,
                "name" => product.iter_mut().try_for_each(|load| {
                    load.name = line(single(axis)?).map_err(fail)?;
                    Ok(())
                })?,
                "profile" => {
                    let profiles = axis.values.iter().map(|(name, span)| {
                        Profile::of(name).map_err(|problem| Mistake::new(span.clone(), problem))
                    });
                    let profiles: Vec<_> = profiles.collect::<Parsed<_>>()?;
                    product = profiles.iter().flat_map(Profile::workloads).collect();
                }
                "job" => {
                    let name = single(axis)?;
                    let job = jobs(&name).map_err(fail)?;
                    plan.jobs.insert(name.clone(), job.clone());
                    product = vec![Workload {
                        name: name.clone(),
                        job: Some(job),
                        ..Workload::default()
                    }];
                }
                _ => rest.push(axis),
            }
        }
        let settled: Vec<String> = product
            .iter()
            .map(|load| load.name.clone())
            .filter(|name| !name.is_empty())
            .collect();
        for axis in &rest {
            product = multiply(
                &product,
                axis,
                workload::KEYS.contains(&axis.key),
                &known,
                WORKLOADS_MAX,
                |load, value| load.set(axis.key, value),
            )?;
        }
        let varied: Vec<&str> = rest
            .iter()
            .filter(|axis| axis.values.len() > 1)
            .map(|axis| axis.key)
            .collect();
        for mut load in product {
            if settled.contains(&load.name) {
                for key in &varied {
                    load.name += &format!(", {key} {}", load.get(key));
                }
            }
            let load = load.named();
            if all.iter().any(|other| other.name == load.name) {
                let mut entries = rest.iter().copied().chain(own);
                let span = entries.next().map_or(0..0, |entry| entry.span.clone());
                return Err(Mistake::new(
                    span,
                    format!("two loads are '{}'; give them names", load.name),
                ));
            }
            all.push(load);
        }
    }
    Ok(all)
}

/// Combines every item with every value of an axis.
fn multiply<T: Clone>(
    items: &[T],
    axis: &Entry,
    is_known: bool,
    known: &[&str],
    max: usize,
    set: impl Fn(&mut T, &str) -> Result<(), String>,
) -> Parsed<Vec<T>> {
    if !is_known {
        return Err(Mistake::new(axis.span.clone(), not_one_of(axis.key, known)));
    }
    if items.len() * axis.values.len() > max {
        return Err(Mistake::new(
            axis.span.clone(),
            format!("with {}, there are more than {max} combinations", axis.key),
        ));
    }
    let mut product = Vec::new();
    for item in items {
        for (value, span) in &axis.values {
            let mut item = item.clone();
            set(&mut item, value).map_err(|problem| {
                Mistake::new(span.clone(), format!("{}: {problem}", axis.key))
            })?;
            product.push(item);
        }
    }
    Ok(product)
}

fn read_ssh(table: &DeTable, span: Range<usize>) -> Parsed<Ssh> {
    let known = ["image", "user", "key", "host", "port", "disks", "os"];
    let mut ssh = Ssh {
        image: None,
        user: "root".into(),
        key: None,
        host: None,
        port: 22,
        disks: Vec::new(),
        windows: false,
    };
    for (key, value) in table {
        let name = key.get_ref().as_ref();
        let fail = |problem: String| Mistake::new(value.span(), format!("{name}: {problem}"));
        let text = || one(name, value);
        match name {
            "image" => ssh.image = Some(absolute(&text()?).map_err(fail)?),
            "key" => ssh.key = Some(absolute(&text()?).map_err(fail)?),
            "user" => ssh.user = word(&text()?).map_err(fail)?,
            "host" => ssh.host = Some(host(&text()?).map_err(fail)?),
            "port" => ssh.port = number(&text()?, 1, 65_535).map_err(fail)?,
            "os" => {
                ssh.windows = match text()?.as_str() {
                    "linux" => false,
                    "windows" => true,
                    other => return Err(fail(not_one_of(other, &["linux", "windows"]))),
                }
            }
            "disks" => {
                ssh.disks = values(name, value)?
                    .into_iter()
                    .map(|(text, _)| text)
                    .collect()
            }
            _ => return Err(Mistake::new(key.span(), not_one_of(name, &known))),
        }
    }
    if ssh.image.is_none() == ssh.host.is_none() {
        return Err(Mistake::new(
            span,
            "[ssh] needs either image, which is booted, or host, which already runs",
        ));
    }
    Ok(ssh)
}

/// The smallest depth of an open loop.
const DEPTH_OPEN: u32 = 8;

/// The place of a key of the plan, such as the name of a table.
fn key_span(root: &DeTable, name: &str) -> Range<usize> {
    let found = root.iter().find(|(key, _)| key.get_ref() == name);
    found.map_or(0..0, |(key, _)| key.span())
}

/// Checks that need the whole plan.
fn check(plan: &Plan, root: &DeTable) -> Parsed<()> {
    if plan.cases.is_empty() {
        let why = plan.left_out.join("; ");
        return Err(Mistake::new(
            key_span(root, "config"),
            format!("no configuration is left to measure: {why}"),
        ));
    }
    for (index, case) in plan.cases.iter().enumerate() {
        let mut before = plan.cases[..index].iter();
        if before.any(|other| other.name == case.name) {
            let second = blame::case_tables(root, &case.base).pop();
            let span = second.map_or_else(|| key_span(root, "case"), |(_, span)| span);
            let problem = format!("two cases are named '{}'", case.name);
            return Err(Mistake::new(span, problem));
        }
        check_case(plan, case, root)?;
    }
    for load in &plan.workloads {
        check_load(plan, load, root)?;
    }
    if (plan.guest == GuestKind::Ssh) != plan.ssh.is_some() {
        return Err(Mistake::new(
            key_span(root, if plan.ssh.is_some() { "ssh" } else { "guest" }),
            "guest = \"ssh\" and a table [ssh] belong together",
        ));
    }
    Ok(())
}

/// Checks a configuration with the plan's guests and loads.
fn check_case(plan: &Plan, case: &Case, root: &DeTable) -> Parsed<()> {
    let or_table =
        |place: Option<Range<usize>>, name| place.unwrap_or_else(|| key_span(root, name));
    if plan.create && !case.settings.backing.is_own() && case.settings.format != Format::Raw {
        let problem = format!(
            "{}: create = true makes raw disks; set format=raw, or backing=/DIRECTORY/ for qcow2 images",
            case.name
        );
        let place = blame::place_of_setting(root, case, "format");
        return Err(Mistake::new(or_table(place, "storage"), problem));
    }
    let job = plan.workloads.iter().find(|load| load.job.is_some());
    if let Some(job) = job
        && case.settings.device == Device::Host
        && case.settings.is_librbd()
    {
        let problem = format!(
            "{}: a job file runs on files and block devices; set krbd=on, or describe the load with rw and bs",
            case.name
        );
        let place = blame::place_of_load(root, job, "job");
        return Err(Mistake::new(or_table(place, "fio"), problem));
    }
    let check = |settings: &Settings, loads: &[Workload]| match plan.guest {
        GuestKind::None => guests::without(settings, loads),
        GuestKind::Linux | GuestKind::Ssh => guests::with(settings, loads, plan.size),
    };
    check(&case.settings, &plan.workloads).map_err(|problem| {
        let place = blame::setting_or_load(root, plan, case, &problem, check);
        match plan.guest {
            GuestKind::None => Mistake::new(or_table(place, "guest"), problem),
            GuestKind::Linux | GuestKind::Ssh => Mistake::new(
                or_table(place, "config"),
                format!("{}: {problem}", case.name),
            ),
        }
    })
}

/// Checks a load with the rest of the plan.
fn check_load(plan: &Plan, load: &Workload, root: &DeTable) -> Parsed<()> {
    let fail = |key: &str, problem: String| {
        let place = blame::place_of_load(root, load, key);
        let place = place.unwrap_or_else(|| key_span(root, "fio"));
        Err(Mistake::new(place, format!("{}: {problem}", load.name)))
    };
    if load.search && load.iodepth.saturating_mul(load.numjobs) < DEPTH_OPEN {
        let problem = format!(
            "rate = \"auto\" needs an iodepth of {DEPTH_OPEN} or more: with fewer requests in flight, a slow disk \
             receives fewer requests, which is not an open loop"
        );
        return fail("rate", problem);
    }
    if load.once > 0 && plan.interleave != Interleave::Loads {
        let problem = "once needs interleave = \"loads\": each sample then has its own start, and an image that is \
             created for it";
        return fail("once", problem.into());
    }
    let sequential = u64::from(load.numjobs) * load.bs;
    if load.job.is_none() && sequential > plan.size {
        let problem = format!("does not fit into disks of {} bytes", plan.size);
        return fail("bs", problem);
    }
    Ok(())
}

/// Reads a job file in the plan's folder.
pub fn read_job(plan: &Path, name: &str) -> Result<String, String> {
    let path = plan.parent().unwrap_or(Path::new("")).join(name);
    let fail = |e| format!("{}: {e}", path.display());
    let mut text = String::new();
    let file = fs::File::open(&path).map_err(fail)?;
    file.take(BYTES_MAX)
        .read_to_string(&mut text)
        .map_err(fail)?;
    match text.lines().any(|line| line.trim_start().starts_with('[')) {
        true => Ok(text),
        false => Err(format!(
            "{}: has no [section], so it is not a fio job file",
            path.display()
        )),
    }
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
