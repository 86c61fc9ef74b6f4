//! `ringdisk check`: what slows a VM's disk. Reads files and prints; what there is to know is in the crate `advisor`.

mod in_place;

use std::fs;
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

use ::lab::measured;
use advisor::check::{check, check_host};
use advisor::convert::{self, Direction};
use advisor::facts::{self, Facts};
use advisor::fix::{self, Change, Wanted};
use advisor::input::{Input, Surroundings, read};
use advisor::measured::{Added, Measured};
use advisor::model::{Origin, Table};
use advisor::report::{self, Report};
use advisor::rules::Rules;
use advisor::steps;
use advisor::text::{BYTES_MAX, Source};

use in_place::InPlace;

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk check vm1.xml                         a libvirt domain
  virsh dumpxml vm1 | ringdisk check -
  ringdisk check /etc/pve/qemu-server/*.conf     Proxmox, with /etc/pve/storage.cfg
  ringdisk check -- qemu-system-x86_64 -drive file=a.raw,if=virtio
  ringdisk check --pid 4711                      a QEMU that runs
  ringdisk check --host vm1.xml                  with what is known of this host
  ringdisk check --collect > facts.json          on that host; then: --facts facts.json
  ringdisk check --fix vm1.xml | patch vm1.xml
  ringdisk check --explain no-iothread
  ringdisk check --steps before.sh after.sh      what changed, and whether it is one factor

A comment 'ringdisk: ignore RULE because ...' in the file takes a finding back.
Exit codes: 0 clean, 1 findings (notes are none), 2 something cannot be read.")]
pub struct Args {
    /// libvirt domains, QEMU command lines, Proxmox VMs, ringdisk.toml; - is standard input
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// A command line
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
    /// A QEMU that runs
    #[arg(long, value_name = "PID")]
    pid: Vec<u32>,
    /// Look at this host; alone, check it
    #[arg(long)]
    host: bool,
    /// Facts of another host, as --collect wrote them there
    #[arg(long, value_name = "FILE", conflicts_with = "host")]
    facts: Option<PathBuf>,
    /// Write the facts of this host, and of the disks of the files given, as JSON
    #[arg(long)]
    collect: bool,
    /// Storages of Proxmox; default: storage.cfg in the directory above the VM's
    #[arg(long, value_name = "FILE")]
    storage_cfg: Option<PathBuf>,
    /// Results of 'ringdisk lab': a file, or a directory of them; default: those that it keeps of this host
    #[arg(long, value_name = "PATH")]
    measured: Vec<PathBuf>,
    /// A rule that is not asked
    #[arg(long, value_name = "RULE")]
    ignore: Vec<String>,
    /// Show notes too: what depends, and what is of the past
    #[arg(long)]
    notes: bool,
    /// Answer in JSON
    #[arg(long, group = "form")]
    json: bool,
    /// Answer in SARIF 2.1.0
    #[arg(long, group = "form")]
    sarif: bool,
    /// Answer in Markdown
    #[arg(long, group = "form")]
    markdown: bool,
    /// Say all that a rule knows
    #[arg(long, value_name = "RULE")]
    explain: Option<String>,
    /// List all rules
    #[arg(long)]
    rules: bool,
    /// Print a patch that fixes what can be fixed
    #[arg(long)]
    fix: bool,
    /// Change the files instead, none of which may have other hard links; asks first if a change depends on what is not
    /// known
    #[arg(long, requires = "fix")]
    in_place: bool,
    /// Change them without asking
    #[arg(long, requires = "in_place")]
    yes: bool,
    /// Fix also by this rule, which lowers durability or is a note
    #[arg(long, value_name = "RULE", requires = "fix")]
    fix_rule: Vec<String>,
    /// With --to ringdisk: the file for ringdisk's configuration, which must not be there yet
    #[arg(long, value_name = "FILE", requires = "in_place")]
    config: Option<PathBuf>,
    /// Bring disks to ringdisk, or back to QEMU
    #[arg(long, value_name = "WHERE", requires = "fix")]
    to: Option<To>,
    /// Compare the files as steps of a tuning
    #[arg(long)]
    steps: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum To {
    Ringdisk,
    Qemu,
}

/// What there was.
pub enum Outcome {
    Clean,
    Findings,
}

/// Checks.
///
/// # Errors
/// Something cannot be read; all that can is reported before.
pub fn run(args: &Args) -> Result<Outcome, String> {
    let rules = Rules::built_in().map_err(|e| e.to_string())?;
    for id in args
        .ignore
        .iter()
        .chain(&args.fix_rule)
        .chain(&args.explain)
    {
        if rules.get(id).is_none() {
            let like = rules.like(id);
            let hint = if like.is_empty() {
                "see --rules".into()
            } else {
                format!("is it {}?", like.join(", "))
            };
            return Err(format!("there is no rule '{id}'; {hint}"));
        }
    }
    if let Some(rule) = args.explain.as_deref().and_then(|id| rules.get(id)) {
        print(&report::explain(rule, &rules));
        return Ok(Outcome::Clean);
    }
    if args.rules {
        print(&report::list(&rules));
        return Ok(Outcome::Clean);
    }
    let (mut inputs, mut failures) = inputs(args);
    if args.collect {
        let facts = facts::collect::collect(&disks(&inputs));
        print(&format!(
            "{}\n",
            serde_json::to_string_pretty(&facts).map_err(|e| e.to_string())?
        ));
        return finish(Outcome::Clean, failures);
    }
    if inputs.is_empty() && !args.host && args.facts.is_none() {
        if !failures.is_empty() {
            // Of what could not be read, nothing can be said to be well.
            return finish(Outcome::Clean, failures);
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
        match args.json {
            true => print(&format!("{}\n", serde_json::json!(steps))),
            false => print(&steps::text(&steps)),
        }
        let clean = steps.iter().all(|step| !step.confounded);
        return finish(
            if clean {
                Outcome::Clean
            } else {
                Outcome::Findings
            },
            failures,
        );
    }
    if args.fix {
        let outcome = fix(args, inputs, &rules, facts)?;
        return finish(outcome, failures);
    }
    let mut measured = Measured::default();
    let fingerprint = facts.map_or_else(facts::collect::fingerprint, |facts| {
        facts.fingerprint.clone()
    });
    // There is none before the first run.
    let mut found = measured::folders();
    found.retain(|folder| folder.is_dir());
    let by_itself = args.measured.is_empty();
    let measured_in = if by_itself { &found } else { &args.measured };
    for path in results(measured_in) {
        match text(&path)
            .and_then(|text| measured.add(&path.display().to_string(), &text, &fingerprint))
        {
            Ok(Added::Results(_)) => {}
            Ok(Added::OtherHost(_)) if by_itself => {}
            Ok(Added::OtherHost(other)) => notes.push(format!(
                "{}: measured on another host ({other})",
                path.display()
            )),
            // Nobody named it.
            Err(problem) if by_itself => notes.push(problem),
            Err(problem) => failures.push(problem),
        }
    }
    let mut report = Report::default();
    for input in &mut inputs {
        let checked = check(input, &rules, facts, &args.ignore);
        report.add(input, checked);
    }
    report.notes.extend(notes);
    if let Some(facts) = facts {
        report.absorb(check_host(
            facts,
            together(&inputs, facts, &measured),
            &rules,
            &args.ignore,
        ));
    }
    measured.join(&mut report.findings, &rules);
    print(&match (args.json, args.sarif, args.markdown) {
        (true, ..) => format!("{}\n", report::json(&report, &rules)),
        (_, true, _) => format!(
            "{}\n",
            report::sarif(&report, &rules, env!("CARGO_PKG_VERSION"))
        ),
        (.., true) => report::markdown(&report, &rules, args.notes),
        _ => report::text(&report, &rules, args.notes),
    });
    finish(
        if report.is_clean() {
            Outcome::Clean
        } else {
            Outcome::Findings
        },
        failures,
    )
}

/// A reader that has had enough closes the pipe; that is no failure.
fn print(text: &str) {
    let _ = io::stdout().lock().write_all(text.as_bytes());
}

fn finish(outcome: Outcome, failures: Vec<String>) -> Result<Outcome, String> {
    match failures.is_empty() {
        true => Ok(outcome),
        false => Err(failures.join("\nringdisk: ")),
    }
}

/// Reads a text, no more of it than is allowed.
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
            "{}:{line}: is no UTF-8 text, so it is no configuration; name the file that describes the machine, not its \
             image",
            path.display()
        )
    })
}

/// What to do about a file that cannot be read.
fn next_step(path: &Path, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            match path.components().count() {
                // As in `ringdisk check vm1`.
                1 if path.extension().is_none() => {
                    format!("; of a libvirt domain: virsh dumpxml {name} | ringdisk check -")
                }
                _ => "; see what there is: ls /etc/libvirt/qemu/*.xml /etc/pve/qemu-server/*.conf".into(),
            }
        }
        io::ErrorKind::PermissionDenied => {
            "; run it as root, or let root write it to standard output: sudo cat FILE | ringdisk check -".into()
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
        let beside = directory.join("../storage.cfg");
        beside.is_file().then_some(beside)
    });
    if let Some(storages) = storages {
        surroundings.storages = Some(Source::new(
            storages.display().to_string(),
            text(&storages)?,
        ));
    }
    for name in advisor::input::files_named(&source.text) {
        // As QEMU does: relative to where one is. What cannot be read gets a note.
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
            io::ErrorKind::NotFound => "; there is no such process: pgrep -a qemu lists QEMU's",
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

/// What is behind all disks.
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
        None => Ok(args.host.then(|| facts::collect::collect(&disks(inputs)))),
    }
}

/// What only all inputs together say of a host.
fn together(inputs: &[Input], facts: &Facts, measured: &Measured) -> Table {
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
    if let Some(percent) = measured.of_host_percent() {
        table.set(
            "measured.of-host-percent",
            percent,
            Origin::Fact("results of ringdisk lab".into()),
        );
    }
    table
}

/// Files of results: those named, and those in directories.
fn results(paths: &[PathBuf]) -> Vec<PathBuf> {
    let named = |path: &PathBuf| match path.is_dir() {
        true => measured::files(path),
        false => vec![path.clone()],
    };
    paths.iter().flat_map(named).collect()
}

fn fix(
    args: &Args,
    inputs: Vec<Input>,
    rules: &Rules,
    facts: Option<&Facts>,
) -> Result<Outcome, String> {
    let before = inputs.clone();
    let mut said = Vec::new();
    let mut uncertain = 0;
    let mut in_place = InPlace::default();
    match (args.to, args.in_place, &args.config) {
        (Some(To::Ringdisk), true, None) => {
            return Err(
                "no file was changed: say with --config FILE where ringdisk's configuration \
                 goes, without which the machine does not start"
                    .into(),
            );
        }
        (Some(To::Ringdisk), ..) | (_, _, None) => {}
        _ => return Err("--config is for --to ringdisk".into()),
    }
    let after = match args.to {
        Some(to) => {
            let direction = match to {
                To::Ringdisk => Direction::ToRingdisk,
                To::Qemu => Direction::ToQemu,
            };
            let converted = convert::convert(inputs, direction)?;
            said = converted.said;
            if let Some(config) = converted.config {
                match &args.config {
                    // Put into force before the machine needs it.
                    Some(path) => in_place.create(path, &config)?,
                    None => {
                        said.push("a ringdisk.toml with these disks:".into());
                        print(&convert::as_new_file(&config));
                    }
                }
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
                for change in &fixed.done {
                    if let Some(unknown) = &change.unknown {
                        uncertain += 1;
                        let Change { rule, place, .. } = change;
                        said.push(format!("{place}: {rule}: it is not known {unknown}"));
                    }
                }
                for (rule, place, why) in &fixed.left {
                    said.push(format!("{place}: {rule} is left: {why}"));
                }
                after.push(fixed.input);
            }
            after
        }
    };
    for line in &said {
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
    Ok(if changed {
        Outcome::Findings
    } else {
        Outcome::Clean
    })
}

/// Asks on the terminal whether the files are to be changed; where there is none, they are not.
fn confirm(uncertain: usize) -> Result<(), String> {
    let changes = match uncertain {
        1 => "1 change depends".to_owned(),
        count => format!("{count} changes depend"),
    };
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Err(format!(
            "no file was changed: {changes} on what is not known (above); find it out with --host on the machine's \
             host, or say --yes"
        ));
    }
    eprint!("ringdisk: {changes} on what is not known (above). Change the files? [y/N] ");
    let mut answer = String::new();
    io::stdin()
        .read_line(&mut answer)
        .map_err(|e| format!("no file was changed: the answer cannot be read: {e}"))?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err("no file was changed".into()),
    }
}
