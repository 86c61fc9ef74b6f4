//! `ringdisk check`: reads configurations and prints what slows down their disks. The crate `advisor` has the rules.

mod in_place;
mod measure;
pub mod moved;

use std::fs;
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

use ::lab::measured;
use advisor::check::{add_measured, check, check_host};
use advisor::convert::{self, Direction};
use advisor::facts::{self, Facts};
use advisor::fix::{self, Change, Fixed, Unfixed, Wanted};
use advisor::input::{Input, Kind, Surroundings};
use advisor::measured::{Added, Measured};
use advisor::model::Table;
use advisor::read::read;
use advisor::report::{self, Report};
use advisor::rules::Rules;
use advisor::steps;
use advisor::text::{BYTES_MAX, Source};

use in_place::InPlace;
use measure::Outcome;

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk check vm1.xml                         a libvirt domain
  virsh dumpxml vm1 | ringdisk check -
  ringdisk check /etc/pve/qemu-server/*.conf     Proxmox, with /etc/pve/storage.cfg
  ringdisk check -- qemu-system-x86_64 -drive file=a.raw,if=virtio
  ringdisk check --pid 4711                      a QEMU that runs
  ringdisk check --host vm1.xml                  with facts about this host
  ringdisk check --collect > facts.json          on that host; then: --facts facts.json
  ringdisk check --fix vm1.xml | patch vm1.xml
  ringdisk check --explain no-iothread
  ringdisk check --measure vm1.xml --budget 20m  measures the findings beside the VM's disks
  ringdisk check --plan vm1.xml > plan.toml      only the plan, for 'ringdisk lab run' on the VM's host
  ringdisk check --steps before.sh after.sh      what changed, and whether it is one factor

A comment 'ringdisk: ignore RULE because ...' in the file suppresses a finding.
Exit codes: 0 no findings or only notes, 1 findings, 2 some input cannot be read.")]
pub struct Args {
    /// libvirt domains, QEMU command lines, Proxmox VMs or ringdisk.toml; - reads standard input
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// A QEMU command line
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
    /// The process id of a running QEMU
    #[arg(long, value_name = "PID")]
    pid: Vec<u32>,
    /// Collect facts about this host; without files, check the host alone
    #[arg(long)]
    host: bool,
    /// Facts about another host, collected there with --collect
    #[arg(long, value_name = "FILE", conflicts_with = "host")]
    facts: Option<PathBuf>,
    /// Print facts about this host and about the disks in the given files as JSON
    #[arg(long)]
    collect: bool,
    /// Proxmox's storages [default: storage.cfg in the directory above the VM's]
    #[arg(long, value_name = "FILE")]
    storage_cfg: Option<PathBuf>,
    /// Results of 'ringdisk lab': a file or a directory [default: the stored results of this host]
    #[arg(long, value_name = "PATH")]
    measured: Vec<PathBuf>,
    /// Ignore this rule
    #[arg(long, value_name = "RULE")]
    ignore: Vec<String>,
    /// Also show notes: disputed, outdated or conditional advice
    #[arg(long)]
    notes: bool,
    /// Print JSON
    #[arg(long, group = "form")]
    json: bool,
    /// Print SARIF 2.1.0
    #[arg(long, group = "form")]
    sarif: bool,
    /// Print Markdown
    #[arg(long, group = "form")]
    markdown: bool,
    /// Explain a rule: conditions, costs and evidence
    #[arg(long, value_name = "RULE")]
    explain: Option<String>,
    /// List all rules
    #[arg(long)]
    rules: bool,
    /// Print a patch that fixes the findings
    #[arg(long)]
    fix: bool,
    /// Change the files instead of printing a patch. Asks first if a change depends on unknown facts. Refuses files with
    /// several hard links
    #[arg(long, requires = "fix")]
    in_place: bool,
    /// Do not ask before files are changed, or scratch disks are created
    #[arg(long)]
    yes: bool,
    /// Also fix this rule, although it lowers durability or is a note
    #[arg(long, value_name = "RULE", requires = "fix")]
    fix_rule: Vec<String>,
    /// With --to ringdisk: a new file for ringdisk's configuration of the disks, as in /etc/ringdisk/disks.d/vm1.toml. Without
    /// it, libvirt's domains name their disks in their metadata, for the hook
    #[arg(long, value_name = "FILE", requires = "to")]
    config: Option<PathBuf>,
    /// Move disks to ringdisk, or back to QEMU
    #[arg(long, value_name = "WHERE", requires = "fix")]
    to: Option<To>,
    /// With --to qemu: the control socket of the ringdisk that is asked which file each disk has; default: control.qmp in
    /// /run/ringdisk
    #[arg(long, value_name = "PATH", requires = "to")]
    control: Option<PathBuf>,
    /// Compare the files as consecutive steps of a tuning
    #[arg(long)]
    steps: bool,
    #[command(flatten)]
    measure: measure::Args,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum To {
    Ringdisk,
    Qemu,
}

/// The result of a check; it decides the exit code.
pub enum CheckResult {
    Clean,
    Findings,
}

/// # Errors
/// Some input cannot be read. The rest is reported before.
pub fn run(args: &Args) -> Result<CheckResult, String> {
    let rules = Rules::built_in().map_err(|e| e.to_string())?;
    check_rule_names(args, &rules)?;
    if let Some(rule) = args.explain.as_deref().and_then(|id| rules.get(id)) {
        print(&report::explain(rule, &rules));
        return Ok(CheckResult::Clean);
    }
    if args.rules {
        if args.json {
            print(&format!("{}\n", report::list_json(&rules)));
        } else {
            print(&report::list(&rules));
        }
        return Ok(CheckResult::Clean);
    }
    let (mut inputs, mut failures) = inputs(args);
    if args.collect {
        let facts = facts::collect::collect(&disks(&inputs));
        print(&format!(
            "{}\n",
            serde_json::to_string_pretty(&facts).map_err(|e| e.to_string())?
        ));
        return finish(CheckResult::Clean, failures);
    }
    if inputs.is_empty() && !args.host && args.facts.is_none() {
        if !failures.is_empty() {
            return finish(CheckResult::Clean, failures);
        }
        return Err("nothing to check; name a file, - for standard input, --pid, --host, or a command after --".into());
    }
    let mut notes = Vec::new();
    let facts = match facts(args, &inputs, &mut notes) {
        Ok(facts) => facts,
        Err(problem) => {
            failures.push(problem);
            None
        }
    };
    let facts = facts.as_ref();
    if args.steps {
        let steps = steps::steps(inputs, &rules, facts, &args.ignore);
        if args.json {
            print(&format!("{}\n", serde_json::json!(steps)));
        } else {
            print(&steps::text(&steps));
        }
        let is_clean = steps.iter().all(|step| !step.confounded);
        return finish(result(is_clean), failures);
    }
    if args.fix {
        let result = fix(args, inputs, &rules, facts)?;
        return finish(result, failures);
    }
    let measured = measured(args, facts, &mut notes, &mut failures);
    let mut report = Report::default();
    for input in &mut inputs {
        input.vms.iter_mut().for_each(|vm| measured.describe(vm));
        let checked = check(input, &rules, facts, &args.ignore);
        report.add(input, checked);
    }
    report.notes.extend(notes);
    if let Some(facts) = facts {
        let totals = totals(&inputs, facts);
        report.absorb(check_host(facts, totals, &rules, &args.ignore));
    }
    add_measured(&mut report.findings, &measured, &rules);
    if !args.measure.is_wanted() {
        print_report(args, &report, &rules, None);
        return finish(result(report.is_clean()), failures);
    }
    let context = measure::Context {
        inputs: &inputs,
        rules: &rules,
        facts,
        notes: args.notes,
        ask: !args.yes,
    };
    if let Some(outcome) = measure::run(&args.measure, &context, &mut report)? {
        print_report(args, &report, &rules, Some(&outcome));
        failures.extend(outcome.failure());
    }
    finish(result(report.is_clean()), failures)
}

fn check_rule_names(args: &Args, rules: &Rules) -> Result<(), String> {
    let named = args
        .ignore
        .iter()
        .chain(&args.fix_rule)
        .chain(&args.explain);
    for id in named {
        if rules.get(id).is_none() {
            let like = rules.like(id);
            let hint = if like.is_empty() {
                "see --rules".into()
            } else {
                format!("did you mean {}?", like.join(", "))
            };
            return Err(format!("there is no rule '{id}'; {hint}"));
        }
    }
    Ok(())
}

fn result(is_clean: bool) -> CheckResult {
    if is_clean {
        CheckResult::Clean
    } else {
        CheckResult::Findings
    }
}

/// Reads the results of `ringdisk lab`: the files that the user names, or the stored ones.
fn measured(
    args: &Args,
    facts: Option<&Facts>,
    notes: &mut Vec<String>,
    failures: &mut Vec<String>,
) -> Measured {
    let mut measured = Measured::default();
    let fingerprint = facts.map_or_else(facts::collect::fingerprint, |facts| {
        facts.fingerprint.clone()
    });
    // The folders do not exist before the lab's first run.
    let mut stored = measured::folders();
    stored.retain(|folder| folder.is_dir());
    let is_default = args.measured.is_empty();
    let folders = if is_default { &stored } else { &args.measured };
    for path in results(folders) {
        match text(&path)
            .and_then(|text| measured.add(&path.display().to_string(), &text, &fingerprint))
        {
            Ok(Added::Results(_)) => {}
            Ok(Added::OtherHost(_)) if is_default => {}
            Ok(Added::OtherHost(other)) => notes.push(format!(
                "{}: measured on another host ({other})",
                path.display()
            )),
            Ok(Added::OldFormat) => notes.push(format!(
                "{}: an older ringdisk wrote it without saying on what the figures were measured, so they belong to \
                 no finding; 'ringdisk lab report RESULT' writes it again",
                path.display()
            )),
            // The user did not name the file.
            Err(problem) if is_default => notes.push(problem),
            Err(problem) => failures.push(problem),
        }
    }
    measured
}

fn print_report(args: &Args, report: &Report, rules: &Rules, outcome: Option<&Outcome>) {
    if args.json {
        let mut json = report::json(report, rules);
        if let Some(outcome) = outcome {
            json["measurement"] = outcome.json(&report.findings);
        }
        print(&format!("{json}\n"));
    } else if args.sarif {
        let version = env!("CARGO_PKG_VERSION");
        print(&format!("{}\n", report::sarif(report, rules, version)));
    } else if args.markdown {
        print(&report::markdown(report, rules, args.notes));
    } else {
        print(&report::text(report, rules, args.notes));
        if let Some(outcome) = outcome {
            print(&outcome.text(&report.findings));
        }
    }
}

/// Ignores errors: a reader such as `head` may close the pipe.
fn print(text: &str) {
    let _ = io::stdout().lock().write_all(text.as_bytes());
}

fn finish(result: CheckResult, failures: Vec<String>) -> Result<CheckResult, String> {
    if failures.is_empty() {
        return Ok(result);
    }
    Err(failures.join("\nringdisk: "))
}

/// Reads a text, up to the maximum size.
fn text(path: &Path) -> Result<String, String> {
    let fail = |e: io::Error| {
        format!(
            "{}: cannot be read: {e}{}",
            path.display(),
            next_step(path, &e)
        )
    };
    let mut bytes = Vec::new();
    let limit = BYTES_MAX as u64 + 1;
    match path.to_str() {
        Some("-") => io::stdin()
            .take(limit)
            .read_to_end(&mut bytes)
            .map_err(fail)?,
        _ => fs::File::open(path)
            .map_err(fail)?
            .take(limit)
            .read_to_end(&mut bytes)
            .map_err(fail)?,
    };
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        let line = 1 + e.as_bytes()[..at]
            .iter()
            .filter(|byte| **byte == b'\n')
            .count();
        format!(
            "{}:{line}: is not UTF-8 text, and therefore not a configuration; name the VM's configuration, not its \
             image",
            path.display()
        )
    })
}

/// Advice about a file that cannot be read.
fn next_step(path: &Path, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            match path.components().count() {
                // As in `ringdisk check vm1`.
                1 if path.extension().is_none() => {
                    format!("; for a libvirt domain, run: virsh dumpxml {name} | ringdisk check -")
                }
                _ => "; to list configurations, run: ls /etc/libvirt/qemu/*.xml /etc/pve/qemu-server/*.conf".into(),
            }
        }
        io::ErrorKind::PermissionDenied => {
            "; run ringdisk as root, or: sudo cat FILE | ringdisk check -".into()
        }
        io::ErrorKind::IsADirectory => format!("; name its files: {}/*", path.display()),
        _ => String::new(),
    }
}

fn inputs(args: &Args) -> (Vec<Input>, Vec<String>) {
    let (mut inputs, mut failures) = (Vec::new(), Vec::new());
    let mut add = |input: Result<Input, String>| match input {
        Ok(input) => inputs.push(input),
        Err(problem) => failures.push(problem),
    };
    for path in &args.files {
        let name = if path == Path::new("-") {
            "(standard input)".into()
        } else {
            path.display().to_string()
        };
        add(text(path)
            .and_then(|text| one(args, path, Source::new(name, text), Surroundings::default())));
    }
    for pid in &args.pid {
        add(running(*pid)
            .and_then(|(source, surroundings)| one(args, Path::new("/"), source, surroundings)));
    }
    if !args.command.is_empty() {
        let source = Source::new("(command line)", advisor::command_line(&args.command));
        let surroundings = Surroundings {
            name: Some("command line".into()),
            ..Surroundings::default()
        };
        add(one(args, Path::new("."), source, surroundings));
    }
    (inputs, failures)
}

fn one(
    args: &Args,
    path: &Path,
    source: Source,
    mut surroundings: Surroundings,
) -> Result<Input, String> {
    let directory = path.parent().unwrap_or(Path::new(""));
    let storages = args.storage_cfg.clone().or_else(|| {
        let default = directory.join("../storage.cfg");
        default.is_file().then_some(default)
    });
    if let Some(storages) = storages {
        surroundings.storages = Some(Source::new(
            storages.display().to_string(),
            text(&storages)?,
        ));
    }
    for name in advisor::read::files_named(&source.text) {
        // Like QEMU, relative to the working directory. The reader notes files that are missing here.
        if Path::new(&name).is_file()
            && let Ok(text) = text(Path::new(&name))
        {
            surroundings.files.push(Source::new(name, text));
        }
    }
    read(source, surroundings).map_err(|e| e.to_string())
}

/// The command line of a process, and its allocator.
fn running(pid: u32) -> Result<(Source, Surroundings), String> {
    let path = format!("/proc/{pid}/cmdline");
    let bytes = fs::read(&path).map_err(|e| {
        let next = match e.kind() {
            io::ErrorKind::NotFound => "; the process does not exist: pgrep -a qemu lists QEMU's",
            io::ErrorKind::PermissionDenied => "; run it as root",
            _ => "",
        };
        format!("{path}: cannot be read: {e}{next}")
    })?;
    let arguments: Vec<String> = bytes
        .split(|byte| *byte == 0)
        .map(|argument| String::from_utf8_lossy(argument).into_owned())
        .collect();
    let arguments = arguments
        .strip_suffix(&[String::new()])
        .unwrap_or(&arguments);
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok();
    let malloc = maps.map(|maps| match () {
        () if maps.contains("libtcmalloc") => "tcmalloc",
        () if maps.contains("libjemalloc") => "jemalloc",
        () => "glibc",
    });
    let command_line = advisor::command_line(arguments);
    if !advisor::is_qemu(&command_line) {
        let program = arguments.first().map_or("", String::as_str);
        return Err(format!(
            "process {pid} is {program:?}, not QEMU: pgrep -a qemu lists QEMU's"
        ));
    }
    let surroundings = Surroundings {
        malloc,
        name: Some(format!("pid {pid}")),
        ..Surroundings::default()
    };
    Ok((
        Source::new(format!("(process {pid})"), command_line),
        surroundings,
    ))
}

/// The paths of all disks.
fn disks(inputs: &[Input]) -> Vec<String> {
    let disks = inputs
        .iter()
        .flat_map(|input| &input.vms)
        .flat_map(|vm| &vm.disks);
    disks
        .map(|disk| disk.file.clone())
        .filter(|file| file.starts_with('/'))
        .collect()
}

fn facts(args: &Args, inputs: &[Input], notes: &mut Vec<String>) -> Result<Option<Facts>, String> {
    match &args.facts {
        Some(path) => {
            let (facts, said) = Facts::parse(&path.display().to_string(), &text(path)?)
                .map_err(|e| e.to_string())?;
            notes.extend(said);
            Ok(Some(facts))
        }
        None => Ok((args.host || args.measure.needs_host())
            .then(|| facts::collect::collect(&disks(inputs)))),
    }
}

/// Properties of the host that follow from all inputs.
fn totals(inputs: &[Input], facts: &Facts) -> Table {
    let mut table = Table::default();
    let machines = inputs.iter().flat_map(|input| &input.vms);
    let memory = machines
        .filter_map(|vm| vm.table.number("vm.memory"))
        .fold(0, u64::saturating_add);
    table.derive("host.vms-memory", memory, "the sum of the inputs");
    if let Some(host) = facts.table().number("host.memory") {
        table.derive(
            "host.overcommitted",
            memory > host && inputs.len() > 1,
            "compared with the host's memory",
        );
    }
    table
}

/// The results files at these paths and in these directories.
fn results(paths: &[PathBuf]) -> Vec<PathBuf> {
    let files = |path: &PathBuf| {
        if path.is_dir() {
            measured::files(path)
        } else {
            vec![path.clone()]
        }
    };
    paths.iter().flat_map(files).collect()
}

fn fix(
    args: &Args,
    inputs: Vec<Input>,
    rules: &Rules,
    facts: Option<&Facts>,
) -> Result<CheckResult, String> {
    let before = inputs.clone();
    let mut messages = Vec::new();
    let mut uncertain = 0;
    let mut remain = false;
    let mut in_place = InPlace::default();
    if args.config.is_some() && !matches!(args.to, Some(To::Ringdisk)) {
        return Err("--config needs --to ringdisk".into());
    }
    let after = match args.to {
        Some(to) => {
            let direction = match to {
                To::Ringdisk if args.config.is_some() => Direction::ToRingdisk,
                To::Ringdisk => Direction::ToMetadata,
                To::Qemu => Direction::ToQemu,
            };
            let converted = convert::convert(inputs, direction)?;
            messages = converted.messages;
            messages.extend(moved::check(
                args.control.as_deref(),
                args.in_place,
                &converted.moved,
            )?);
            let is_libvirt = before.iter().any(|input| input.kind == Kind::Libvirt);
            if let Some(config) = converted.config {
                stage_config(args, &config, &mut in_place, &mut messages)?;
            } else if matches!(to, To::Ringdisk) && is_libvirt {
                messages.push(
                    "the disks are in the domain's <metadata>, from which the hook of ringdisk's package serves them \
                     while the VM runs; with --config FILE, ringdisk's configuration has them instead"
                        .into(),
                );
            }
            converted.inputs
        }
        None => {
            let wanted = Wanted {
                ignore: &args.ignore,
                also: &args.fix_rule,
            };
            let mut after = Vec::new();
            for input in inputs {
                let fixed = fix::fix(input, rules, facts, wanted).map_err(|e| e.to_string())?;
                uncertain += describe_fix(&fixed, &mut messages);
                remain |= !(fixed.left.is_empty() && fixed.others.is_empty());
                after.push(fixed.input);
            }
            after
        }
    };
    for line in &messages {
        eprintln!("ringdisk: {line}");
    }
    if args.in_place && uncertain > 0 && !args.yes {
        confirm(uncertain)?;
    }
    let mut changed = false;
    for (before, after) in before.iter().zip(&after) {
        let patch = fix::patch(before, after);
        changed |= !patch.is_empty();
        if !args.in_place {
            print(&patch);
            continue;
        }
        for (before, after) in before.sources.iter().zip(&after.sources) {
            if before.text != after.text {
                in_place.change(&after.name, &before.text, &after.text)?;
            }
        }
    }
    for name in in_place.commit()? {
        eprintln!("ringdisk: {name}: changed");
    }
    Ok(result(!changed && !remain))
}

/// Creates the configuration that serves converted disks at the commit of `in_place`, or prints it.
fn stage_config(
    args: &Args,
    config: &str,
    in_place: &mut InPlace,
    messages: &mut Vec<String>,
) -> Result<(), String> {
    match &args.config {
        // Staged first, so that it exists before the VM's configuration needs it.
        Some(path) if args.in_place => in_place.create(path, config),
        None if args.in_place => Err(
            "no file was changed: the VM needs ringdisk's configuration to start; name its file with --config FILE, as \
             in /etc/ringdisk/disks.d/VM.toml"
                .into(),
        ),
        path => {
            // 'patch' refuses absolute names.
            let name = match path.as_deref() {
                Some(path) if path.is_absolute() => path.file_name(),
                path => path.map(Path::as_os_str),
            };
            let name = name.map(|name| name.to_string_lossy());
            let name = name.as_deref().unwrap_or("ringdisk.toml");
            messages.push(format!("a {name} with these disks:"));
            print(&convert::as_new_file(name, config));
            Ok(())
        }
    }
}

/// Describes what was fixed and what was not. Returns the number of changes that depend on unknown facts.
fn describe_fix(fixed: &Fixed, messages: &mut Vec<String>) -> usize {
    let mut uncertain = 0;
    for change in &fixed.done {
        let Change { rule, place, .. } = change;
        if change.is_consequence {
            messages.push(format!(
                "{place}: {rule} is fixed as well: another change makes it apply"
            ));
        }
        if let Some(unknown) = &change.unknown {
            uncertain += 1;
            messages.push(format!("{place}: {rule}: unknown {}", unknown.text));
        }
    }
    for left in fixed.left.iter().chain(&fixed.others) {
        let Unfixed {
            rule,
            place,
            reason,
        } = left;
        messages.push(format!("{place}: {rule} is not fixed: {reason}"));
    }
    uncertain
}

/// Asks on the terminal whether to change the files. Without a terminal, refuses.
fn confirm(uncertain: usize) -> Result<(), String> {
    let changes = match uncertain {
        1 => "1 change depends".to_owned(),
        count => format!("{count} changes depend"),
    };
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Err(format!(
            "no file was changed: {changes} on unknown facts (above); collect them with --host on the VM's host, or \
             use --yes"
        ));
    }
    eprint!("ringdisk: {changes} on unknown facts (above). Change the files? [y/N] ");
    let mut answer = String::new();
    io::stdin()
        .read_line(&mut answer)
        .map_err(|e| format!("no file was changed: the answer cannot be read: {e}"))?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err("no file was changed".into()),
    }
}
