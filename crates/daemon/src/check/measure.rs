//! `ringdisk check --measure`: measures each finding on this host, with a scratch disk beside the VM's own.

mod configuration;
mod derive;
mod device;
mod folder;
mod loads;
mod outcome;
mod scratch;
mod target;
#[cfg(test)]
mod tests;
mod text;

use std::collections::BTreeMap;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use ::lab::analysis::Analysis;
use ::lab::commands::stop_on_signals;
use ::lab::guest::{Accel, Stop};
use ::lab::plan::units::{size_text, time};
use ::lab::report as lab_report;
use ::lab::run::progress::Display;
use ::lab::run::trial::accel_of_guests;
use ::lab::run::{self, Options};
use advisor::check::Finding;
use advisor::convert;
use advisor::facts::Facts;
use advisor::fix::{self, Wanted};
use advisor::input::Input;
use advisor::model::{Disk, Vm};
use advisor::report::Report;
use advisor::rules::{Rules, Severity};
use advisor::text::printable;

use configuration::{Configuration, Host};
use derive::{NotMeasured, Subject, add_finding, targets};
use device::check_device;
use folder::Folder;
pub use outcome::Outcome;
use scratch::{Place, Scratch};
use target::{Asked, Load, Target};

#[derive(clap::Args, Default)]
#[group(skip)]
pub struct Args {
    /// Measure the findings with guests of the lab, on a scratch disk beside the VM's. Implies --host
    #[arg(long, conflicts_with_all = ["fix", "collect", "steps", "explain", "rules"])]
    measure: bool,
    /// Only write the lab's plan that --measure would run, to standard output or a file
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    #[arg(conflicts_with_all = ["fix", "collect", "steps", "explain", "rules"])]
    plan: Option<PathBuf>,
    /// The time for all measurements together, as in 20m. The first block of each disk runs in any case
    #[arg(long, value_name = "TIME", default_value = "20m")]
    budget: String,
    /// The place for scratch disks: a directory, rbd:POOL/IMAGE, /dev/GROUP/VOLUME, or a device [default: beside the disk].
    /// '{volume}' in the name of an image or a volume becomes a number: rules about several volumes need one for each
    #[arg(long, value_name = "PLACE")]
    scratch: Option<String>,
    /// Measure only this disk, as in vda or 'vm1 vda'; repeatable
    #[arg(long, value_name = "DISK")]
    disk: Vec<String>,
    /// The folder for the results of the lab [default: lab-check-VM-DISK in the current directory]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Where KVM does not work, measure with emulated guests. The figures say nothing about this host and are not stored
    #[arg(long)]
    accept_emulation: bool,
    /// Overwrite the device that --scratch names, without asking
    #[arg(long, requires = "scratch")]
    overwrite: bool,
}

impl Args {
    pub fn is_wanted(&self) -> bool {
        self.measure || self.plan.is_some()
    }

    /// Whether facts about this host are needed: the measurement runs on it.
    pub fn needs_host(&self) -> bool {
        self.measure && self.plan.is_none()
    }
}

/// What is measured.
pub struct Context<'a> {
    pub inputs: &'a [Input],
    pub rules: &'a Rules,
    pub facts: Option<&'a Facts>,
    /// Whether notes are measured too.
    pub notes: bool,
    /// Whether to ask before something is created.
    pub ask: bool,
}

/// The plans, and the findings that none of them measures.
#[derive(Default)]
struct Plans {
    targets: Vec<Target>,
    not_measured: Vec<NotMeasured>,
}

/// How the guests run.
#[derive(Clone, Debug)]
struct Means {
    load: Load,
    accel: Accel,
    /// Why KVM does not work here.
    without_kvm: String,
}

/// Writes the plan, or measures and adds the results to the findings. Returns `None` if it only wrote the plan.
///
/// # Errors
/// Nothing can be measured, or the user does not agree.
pub fn run(
    args: &Args,
    context: &Context<'_>,
    report: &mut Report,
) -> Result<Option<Outcome>, String> {
    let budget = time(&args.budget).map_err(|e| format!("--budget: {e}"))?;
    let stop = stop_on_signals().map_err(|e| e.problem)?;
    let means = means(args, &stop);
    let plans = plans(args, context, &report.findings, &means)?;
    let each = budget / u32::try_from(plans.targets.len().max(1)).unwrap_or(u32::MAX);
    if let Some(file) = &args.plan {
        return write_plan(file, &plans, report, each).map(|()| None);
    }
    if plans.targets.is_empty() {
        return nothing(args, &plans, report, &means).map(Some);
    }
    for target in &plans.targets {
        if let Place::Device(path) = &target.scratch.place {
            check_device(path, &disks_of_vms(context))?;
        }
    }
    agree(args, context, &plans.targets, each, &means)?;
    let mut outcome = Outcome::new(plans.not_measured, means.accel, means.load);
    for target in plans.targets {
        if stop.is_wanted() {
            outcome.skip(target, "interrupted".into());
            continue;
        }
        let began = Instant::now();
        match measure(args, &target, each, &means, &stop) {
            Ok((folder, journal)) => {
                let is_complete = !stop.is_wanted();
                let analysis = Analysis::of(&journal);
                outcome.add(target, &folder, &analysis, began.elapsed(), is_complete);
            }
            Err(why) => outcome.skip(target, why),
        }
    }
    outcome.add_to(&mut report.findings);
    Ok(Some(outcome))
}

/// A plan is written for the VM's host, on which KVM works; it is measured with what works here.
fn means(args: &Args, stop: &Stop) -> Means {
    let (accel, why) = if args.plan.is_some() {
        (Accel::Kvm, None)
    } else {
        accel_of_guests(stop)
    };
    Means {
        load: match accel {
            Accel::Tcg if !args.accept_emulation => Load::Servers,
            Accel::Kvm | Accel::Tcg => Load::Guests,
        },
        accel,
        without_kvm: why.map_or_else(String::new, |why| format!("KVM does not work here ({why})")),
    }
}

/// Derives a plan for each disk with findings. Equal plans become one. None uses a disk of a VM.
fn plans(
    args: &Args,
    context: &Context<'_>,
    findings: &[Finding],
    means: &Means,
) -> Result<Plans, String> {
    let mut plans = Plans::default();
    let mut disks_seen = Vec::new();
    let mut taken = vec![false; findings.len()];
    for input in context.inputs {
        let is_found = |finding: &Finding| is_of(finding, input);
        if !findings.iter().any(is_found) && args.disk.is_empty() {
            continue;
        }
        let converted = Converted::of(input, context);
        for (number, vm) in input.vms.iter().enumerate() {
            // The findings about the VM are measured with its first disk that can be measured.
            let mut of_vm = true;
            for (place, disk) in vm.disks.iter().enumerate() {
                let label = label(vm, disk);
                disks_seen.push(label.clone());
                if !is_selected(args, &label, &printable(&disk.name)) {
                    continue;
                }
                let is_served = disk.table.word("disk.bus") == Some("vhost-user-blk");
                let after = After {
                    moves: (!is_served).then(|| converted.moves(number, place)),
                    fixed: converted.fixed(number, place, &host(args, means)),
                };
                let asked = asked(context, findings, input, number, disk, of_vm);
                let found = of_disk(args, (vm, disk), &label, &asked, after, means);
                of_vm &= found.targets.is_empty();
                for one in &asked {
                    taken[one.finding] = true;
                }
                plans.add(found);
            }
        }
    }
    let unknown = args.disk.iter().find(|wanted| {
        !disks_seen
            .iter()
            .any(|label| label == *wanted || label.ends_with(&format!(" {wanted}")))
    });
    if let Some(unknown) = unknown {
        return Err(format!(
            "--disk {unknown}: there is no such disk; there are {}",
            disks_seen.join(", ")
        ));
    }
    plans.of_devices(context, findings, &mut taken);
    plans.not_measured.retain({
        // A finding about the VM was asked for with several disks.
        let targets = plans.targets.clone();
        move |one| !targets.iter().any(|target| target.measures(one.finding))
    });
    plans.not_measured.sort_by_key(|one| one.finding);
    plans.not_measured.dedup_by_key(|one| one.finding);
    let files = disks_of_vms(context);
    for target in &plans.targets {
        target.refuse_disks(&files)?;
    }
    Ok(plans)
}

/// The files and devices of all disks of all VMs.
fn disks_of_vms(context: &Context<'_>) -> Vec<String> {
    let machines = context.inputs.iter().flat_map(|input| &input.vms);
    let disks = machines.flat_map(|vm| &vm.disks);
    disks.map(|disk| disk.file.clone()).collect()
}

fn label(vm: &Vm, disk: &Disk) -> String {
    format!("{} {}", printable(&vm.name), printable(&disk.name))
        .trim()
        .to_owned()
}

fn is_selected(args: &Args, label: &str, name: &str) -> bool {
    args.disk.is_empty()
        || args
            .disk
            .iter()
            .any(|wanted| wanted == label || wanted == name)
}

/// Whether a finding is about a VM of this input.
fn is_of(finding: &Finding, input: &Input) -> bool {
    let mut names = input.sources.iter().map(|source| printable(&source.name));
    finding.vm_index.is_some() && names.any(|name| name == finding.file)
}

/// The findings about a disk, and with `of_vm` also those about its VM.
fn asked<'a>(
    context: &Context<'a>,
    findings: &[Finding],
    input: &Input,
    vm: usize,
    disk: &Disk,
    of_vm: bool,
) -> Vec<Asked<'a>> {
    let name = printable(&disk.name);
    let is_meant = |finding: &Finding| {
        finding.vm_index == Some(vm)
            && is_of(finding, input)
            && (finding.disk == name || of_vm && finding.disk.is_empty())
            && (context.notes || finding.severity != Severity::Info)
    };
    let meant = findings
        .iter()
        .enumerate()
        .filter(|(_, finding)| is_meant(finding));
    let asked = meant.filter_map(|(finding, found)| {
        let rule = context.rules.get(&found.rule)?;
        Some(Asked { finding, rule })
    });
    asked.collect()
}

/// The host on which the guests run. A plan is for the VM's host, which has the CPUs that the VM needs.
fn host(args: &Args, means: &Means) -> Host {
    let cpus = available_parallelism().map_or(1, usize::from) as u64;
    Host {
        cpus: args.plan.is_none().then_some(cpus),
        accel: means.accel,
    }
}

/// What becomes of a disk.
struct After {
    /// Whether ringdisk can serve it, or why not; `None` if it does already.
    moves: Option<Result<(), String>>,
    /// Its configuration after all fixes.
    fixed: Option<Configuration>,
}

fn of_disk(
    args: &Args,
    (vm, disk): (&Vm, &Disk),
    label: &str,
    asked: &[Asked],
    after: After,
    means: &Means,
) -> Plans {
    if asked.is_empty() {
        return Plans::default();
    }
    let prepared = Configuration::of(vm, disk, &host(args, means)).and_then(|now| {
        let scratch = Scratch::of(&label.replace(' ', "-"), disk, args.scratch.as_deref())?;
        let scratch = scratch.with_size(disk, &now.settings)?;
        Ok((now, scratch))
    });
    let (targets, not_measured) = match prepared {
        Ok((now, scratch)) => {
            let subject = Subject {
                label,
                now: &now,
                scratch: &scratch,
                load: means.load,
                moves: after.moves,
                fixed: after.fixed,
            };
            targets(&subject, asked)
        }
        Err(why) => {
            let refused = asked.iter().map(|one| NotMeasured {
                finding: one.finding,
                // What no plan could measure has a reason of its own.
                why: match &one.rule.measurement {
                    advisor::rules::Measurement::None(own) => own.clone(),
                    advisor::rules::Measurement::By(_) => why.clone(),
                },
            });
            (Vec::new(), refused.collect())
        }
    };
    Plans {
        targets,
        not_measured,
    }
}

impl Plans {
    fn add(&mut self, other: Self) {
        for target in other.targets {
            match self.targets.iter_mut().find(|known| known.same_as(&target)) {
                Some(known) => known.merge(target),
                None => self.targets.push(target),
            }
        }
        self.not_measured.extend(other.not_measured);
    }

    /// Adds findings about devices of the host to the plan of a disk whose scratch disk is on the device.
    fn of_devices(&mut self, context: &Context<'_>, findings: &[Finding], taken: &mut [bool]) {
        for (finding, found) in findings.iter().enumerate() {
            let is_shown = context.notes || found.severity != Severity::Info;
            if taken[finding] || !is_shown || found.vm_index.is_some() {
                continue;
            }
            let Some(rule) = context.rules.get(&found.rule) else {
                continue;
            };
            taken[finding] = true;
            let asked = Asked { finding, rule };
            let on_device =
                |target: &&mut Target| !found.disk.is_empty() && target.scratch.is_on(&found.disk);
            let added = match self.targets.iter_mut().find(on_device) {
                Some(target) => add_finding(target, &asked),
                None => Err(match &rule.measurement {
                    advisor::rules::Measurement::None(why) => why.clone(),
                    advisor::rules::Measurement::By(contrast) => format!(
                        "no measured disk is on {}; to measure it alone: ringdisk lab run {}",
                        found.disk, contrast.recipe
                    ),
                }),
            };
            if let Err(why) = added {
                self.not_measured.push(NotMeasured { finding, why });
            }
        }
    }
}

/// An input after its fixes; or why it cannot be fixed.
struct Converted(Result<FixedInput, String>);

struct FixedInput {
    vms: Vec<Vm>,
    /// The disks that ringdisk cannot serve, with the reasons.
    refused: BTreeMap<(usize, usize), String>,
}

impl Converted {
    fn of(input: &Input, context: &Context<'_>) -> Self {
        let fixed = fix::fix(
            input.clone(),
            context.rules,
            context.facts,
            Wanted::default(),
        );
        let fixed = fixed.map(|fixed| FixedInput {
            vms: fixed.input.vms.clone(),
            refused: convert::refused(fixed.input),
        });
        Self(fixed.map_err(|e| e.to_string()))
    }

    /// The configuration of a disk after the fixes, if the lab has such a disk.
    fn fixed(&self, vm: usize, disk: usize, host: &Host) -> Option<Configuration> {
        let vm = self.0.as_ref().ok()?.vms.get(vm)?;
        Configuration::of(vm, vm.disks.get(disk)?, host).ok()
    }

    /// Whether ringdisk can serve a disk.
    ///
    /// # Errors
    /// It cannot, and why.
    fn moves(&self, vm: usize, disk: usize) -> Result<(), String> {
        let fixed = self.0.as_ref().map_err(String::clone)?;
        match fixed.refused.get(&(vm, disk)) {
            None => Ok(()),
            Some(why) if why.is_empty() => Err("QEMU does not serve the disk".into()),
            Some(why) => Err(why.clone()),
        }
    }
}

/// Writes the plan of the only disk; if it has a second one, which starts with an empty disk, to a file beside the first.
fn write_plan(file: &Path, plans: &Plans, report: &Report, budget: Duration) -> Result<(), String> {
    for line in outcome::not_measured(&plans.not_measured, &report.findings) {
        eprintln!("ringdisk: not measured: {line}");
    }
    let Some(first) = plans.targets.first() else {
        return Err("there is no finding that the lab can measure".into());
    };
    if let several @ [_, _, ..] = &different_disks(&plans.targets)[..] {
        return Err(format!(
            "{} disks have plans of their own; select one with --disk: {}",
            several.len(),
            several.join(", ")
        ));
    }
    let write = |file: &Path, target: &Target| {
        for line in &target.left_out {
            eprintln!("ringdisk: not in the plan: {line}");
        }
        let text = target.text(budget, boot_time(Load::Guests, Accel::Kvm));
        std::fs::write(file, text)
            .map_err(|e| format!("{}: cannot be written: {e}", file.display()))
    };
    if file != Path::new("-") {
        write(file, first)?;
        for target in &plans.targets[1..] {
            let beside = beside(file);
            write(&beside, target)?;
            eprintln!(
                "ringdisk: {} has the comparisons that start with an empty disk: {}",
                beside.display(),
                of_findings(target)
            );
        }
        return Ok(());
    }
    for line in &first.left_out {
        eprintln!("ringdisk: not in the plan: {line}");
    }
    for target in &plans.targets[1..] {
        eprintln!(
            "ringdisk: not in the plan, because it starts with an empty disk: {}; --plan=FILE writes a second plan for it",
            of_findings(target)
        );
    }
    super::print(&first.text(budget, boot_time(Load::Guests, Accel::Kvm)));
    Ok(())
}

/// The disks with plans of their own, quoted. A disk's second plan, which starts with an empty disk, counts with its first.
fn different_disks(targets: &[Target]) -> Vec<String> {
    let mut seen: Vec<&Target> = Vec::new();
    for target in targets {
        let is_same = |other: &&Target| {
            let mut disks = target.disks.iter();
            disks.any(|disk| other.disks.contains(disk))
        };
        if !seen.iter().any(is_same) {
            seen.push(target);
        }
    }
    let label = |target: &&Target| format!("'{}'", target.disks[0]);
    seen.iter().map(label).collect()
}

/// The rules that a plan is about.
fn of_findings(target: &Target) -> String {
    let measured = target.comparisons();
    let names = measured.filter(|comparison| !comparison.findings.is_empty());
    let names: Vec<&str> = names.map(|comparison| comparison.name).collect();
    names.join(", ")
}

/// The file of a disk's second plan: `plan-thin.toml` beside `plan.toml`.
fn beside(file: &Path) -> PathBuf {
    let mut name = file.file_stem().unwrap_or_default().to_owned();
    name.push("-thin");
    if let Some(extension) = file.extension() {
        name.push(".");
        name.push(extension);
    }
    file.with_file_name(name)
}

/// The time that a configuration takes to start.
fn boot_time(load: Load, accel: Accel) -> Duration {
    match (load, accel) {
        (Load::Servers, _) => Duration::from_millis(200),
        (Load::Guests, Accel::Kvm) => Duration::from_secs(3),
        (Load::Guests, Accel::Tcg) => Duration::from_secs(20),
    }
}

/// There is nothing to run: an error if only KVM is missing.
fn nothing(args: &Args, plans: &Plans, report: &Report, means: &Means) -> Result<Outcome, String> {
    if means.load == Load::Servers && !plans.not_measured.is_empty() {
        let lines = outcome::not_measured(&plans.not_measured, &report.findings).join("\n  ");
        let disk = if args.disk.is_empty() {
            ""
        } else {
            " --disk …"
        };
        return Err(format!(
            "{}, and no finding can be measured without a guest:\n  {lines}\nrun this on the VM's \
             host: ringdisk check --measure{disk} FILE; 'ringdisk check --plan FILE' writes the plan for it",
            means.without_kvm
        ));
    }
    Ok(Outcome::new(
        plans.not_measured.clone(),
        means.accel,
        means.load,
    ))
}

/// Asks before something is created or overwritten.
fn agree(
    args: &Args,
    context: &Context<'_>,
    targets: &[Target],
    each: Duration,
    means: &Means,
) -> Result<(), String> {
    match (means.load, means.accel) {
        (Load::Servers, _) => eprintln!(
            "ringdisk: {}: findings that need a guest are not measured",
            means.without_kvm
        ),
        (Load::Guests, Accel::Tcg) => eprintln!(
            "ringdisk: {}, so guests run under emulation: the figures say nothing about this host, and are not stored",
            means.without_kvm
        ),
        (Load::Guests, Accel::Kvm) => {}
    }
    let mut overwritten = Vec::new();
    for target in targets {
        let boot = boot_time(means.load, means.accel);
        eprintln!("ringdisk: {}", target.summary(each, boot));
        let (what, size) = (target.scratch.text(), size_text(target.scratch.size));
        match &target.scratch.place {
            Place::Device(_) => overwritten.push(what),
            _ => eprintln!("ringdisk: creates {what} with {size}, and removes it at the end"),
        }
    }
    let can_ask = io::stdin().is_terminal() && io::stderr().is_terminal();
    if !overwritten.is_empty() && !args.overwrite {
        let list = overwritten.join(", ");
        if !can_ask {
            return Err(format!(
                "this OVERWRITES {list}; to allow that, use --overwrite"
            ));
        }
        let question = format!(
            "This OVERWRITES {list}. All data there will be lost. Type 'overwrite' to continue: "
        );
        return ask(&question, "overwrite");
    }
    if !context.ask || !overwritten.is_empty() {
        return Ok(());
    }
    if !can_ask {
        return Err("nothing was created: there is no terminal to ask on; use --yes".into());
    }
    ask("Continue? [y/N] ", "y")
}

fn ask(question: &str, yes: &str) -> Result<(), String> {
    eprint!("ringdisk: {question}");
    let _ = io::stderr().flush();
    let mut line = String::new();
    let read = io::stdin().lock().read_line(&mut line);
    match read {
        Ok(_) if line.trim().eq_ignore_ascii_case(yes) || (yes == "y" && line.trim() == "yes") => {
            Ok(())
        }
        _ => Err("cancelled; nothing was created".into()),
    }
}

/// Runs a plan, and writes the lab's report. The scratch disk is removed in any case.
fn measure(
    args: &Args,
    target: &Target,
    budget: Duration,
    means: &Means,
    stop: &Stop,
) -> Result<(PathBuf, ::lab::journal::Journal), String> {
    let folder = args
        .output
        .as_ref()
        .map_or_else(PathBuf::new, PathBuf::clone);
    let folder = free_folder(&folder.join(format!("lab-{}", target.name())));
    let text = target.text(budget, boot_time(means.load, means.accel));
    let _scratch = target.scratch.directory().map(Folder::create).transpose()?;
    let ringdisk = std::env::current_exe().map_err(|e| format!("finding this program: {e}"))?;
    let options = Options {
        folder: folder.clone(),
        ringdisk,
        accel: means.accel,
        resume: false,
        file: format!("{}.toml", target.name()).into(),
        budget: None,
        only: Vec::new(),
        profile: false,
    };
    let plan = ::lab::plan::Plan::parse(&options.file, &text).map_err(|e| e.to_string())?;
    let mut display = Display::new(&plan);
    let journal = run::run(&text, &options, stop, &mut display);
    drop(display);
    let journal = journal.map_err(|e| format!("{e:#}"))?;
    lab_report::write(&Analysis::of(&journal), &folder).map_err(|e| format!("{e:#}"))?;
    Ok((folder, journal))
}

/// The first of FOLDER, FOLDER-2, FOLDER-3 … that does not exist.
fn free_folder(folder: &Path) -> PathBuf {
    let numbered = (2..).map(|number: u64| PathBuf::from(format!("{}-{number}", folder.display())));
    let mut all = std::iter::once(folder.to_owned()).chain(numbered);
    all.find(|path| !path.exists())
        .unwrap_or_else(|| folder.to_owned())
}
