//! The tables that plans of the lab measure: runs `ringdisk lab run bench-…` and reads its results into the bench's report.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use clap::ValueEnum;
use lab::client::Sample;
use lab::journal::{self, Journal};
use lab::plan::words::Device;
use lab::plan::{Case, Workload as LabLoad};

use super::Bench;
use super::open_loop::{self, Load, Measured, Part};
use super::plan::Cell;
use super::report::{CellResult, Record, Report};
use super::setting::{Aio, Cache, POLL_MAX_US, Poll, Ring, Setting};
use super::words::{Backing, Client, Rw, Server, Workload};

/// What the command line changes of a plan, as arguments of `ringdisk lab run`.
#[derive(Clone, Default)]
pub struct Changes(Vec<String>);

impl Changes {
    /// What all plans have in common.
    pub fn of(bench: &Bench) -> anyhow::Result<Changes> {
        let args = &bench.args;
        let mut changes = Changes::default();
        changes.set("seed", args.seed);
        if args.rounds.is_some() || args.quick {
            changes.set("blocks", bench.rounds());
        }
        if args.runtime.is_some() || args.quick {
            changes.set("fio.runtime", format!("{}s", bench.runtime()));
        }
        if args.warmup.is_some() {
            changes.set("fio.ramp", format!("{}s", bench.warmup()));
        }
        if args.patience > 0.0 {
            changes.set("patience", format!("{}s", args.patience));
        }
        let folder = std::path::absolute(&bench.dir)?;
        changes.set("storage.directory", folder.display());
        if !args.servers.is_empty() {
            let named = args.servers.iter().copied();
            let baseline = args.baseline.as_ref().map(|_| Server::Baseline);
            let names: Vec<&str> = named.chain(baseline).map(case).collect();
            changes.only("case", names.join(","));
        }
        Ok(changes)
    }

    /// Replaces a value of the plan.
    pub fn set(&mut self, key: &str, value: impl ToString) {
        self.0
            .extend(["--set".into(), format!("{key}={}", value.to_string())]);
    }

    /// Selects cases or loads.
    pub fn only(&mut self, key: &str, values: String) {
        self.0.extend(["--only".into(), format!("{key}={values}")]);
    }

    /// Replaces a value with a list, unless that is empty.
    fn set_list<T>(&mut self, key: &str, values: &[T], word: impl Fn(&T) -> String) {
        if !values.is_empty() {
            let words: Vec<String> = values.iter().map(word).collect();
            self.set(key, words.join(","));
        }
    }
}

impl Bench {
    /// `ringdisk lab run` of a plan that ships.
    pub fn lab(&self, plan: &str, result: &Path, changes: &Changes) -> Command {
        let mut command = Command::new(&self.programs.lab);
        command.args(["lab", "run", plan, "--output"]).arg(result);
        command.arg("--ringdisk").arg(&self.programs.ringdisk);
        if let Some(baseline) = &self.args.baseline {
            command.arg("--baseline").arg(baseline);
        }
        command.args(&changes.0);
        command
    }
}

/// Runs the plans of `--plan`; the lab prints their tables.
pub fn by_name(bench: &Bench) -> anyhow::Result<()> {
    let mut changes = Changes::of(bench)?;
    for change in &bench.args.set {
        changes.0.extend(["--set".to_owned(), change.clone()]);
    }
    for plan in &bench.args.plan {
        if bench.interrupted() {
            bail!("interrupted");
        }
        let folder = new_folder(bench, plan)?;
        let status = bench
            .lab(plan, &folder, &changes)
            .status()
            .with_context(|| format!("starting {}", bench.programs.lab.display()))?;
        if !status.success() {
            bail!("{plan}: {status}");
        }
    }
    Ok(())
}

/// Measures the closed loops.
pub fn closed(bench: &Bench) -> anyhow::Result<Report> {
    let args = &bench.args;
    let mut report = bench.new_report();
    let all = [Backing::Null, Backing::Cache, Backing::Zram, Backing::Disk];
    for backing in all {
        if !args.only.is_empty() && !args.only.contains(&backing) {
            continue;
        }
        let mut changes = Changes::of(bench)?;
        let random = args.targets || args.quick;
        match &args.rw[..] {
            [] if random => changes.only("rw", "randread,randwrite".into()),
            [] => {}
            named => changes.only("rw", words(named, |rw| rw_word(*rw))),
        }
        if !args.depth.is_empty() {
            changes.only("iodepth", words(&args.depth, usize::to_string));
        }
        if backing == Backing::Disk {
            changes.set("storage.size", format!("{}G", args.size));
        }
        changes.set_list("config.client", &args.client, Client::to_string);
        changes.set_list("config.aio", &args.aio, Aio::to_string);
        changes.set_list("config.cache", &args.cache, Cache::to_string);
        changes.set_list("config.queues", &args.queues, u16::to_string);
        changes.set_list("config.poll-max-us", &args.poll, |it| {
            it.max_us().to_string()
        });
        changes.set_list("config.ring", &args.ring, |it| match it {
            Ring::Split => "split".into(),
            Ring::Packed => "packed".into(),
        });
        let plan = match backing {
            Backing::Null => "bench-null",
            Backing::Cache => "bench-page-cache",
            Backing::Zram => "bench-zram",
            Backing::Disk => "bench-disk",
        };
        if let Some(journal) = run(bench, plan, &changes, &mut report)? {
            add_closed(&mut report, &journal, backing, bench);
            bench.save(&report)?;
        }
    }
    Ok(report)
}

/// Measures the parts of the open loop that the command line selects.
pub fn open_loop(bench: &Bench) -> anyhow::Result<Report> {
    let args = &bench.args;
    let part = |part| args.open_loop.has(part);
    let or = |default: &[Backing]| match &args.only[..] {
        [] => default.to_vec(),
        named => named.to_vec(),
    };
    let mut report = bench.new_report();
    let disk = &[Backing::Disk][..];
    if part(Part::Rates) {
        let all = &[Backing::Disk, Backing::Zram, Backing::Cache][..];
        let rates = Plan::Rates {
            rates: &args.open_loop.rate,
            arrivals: args.open_loop.arrivals,
        };
        for backing in or(if args.quick { disk } else { all }) {
            open(bench, rates, backing, &mut report)?;
        }
    }
    for (wanted, plan) in [
        (Part::Think, Plan::Think),
        (Part::Throttle, Plan::Throttle),
        (Part::Bursts, Plan::Bursts),
    ] {
        if part(wanted) {
            for backing in or(disk) {
                open(bench, plan, backing, &mut report)?;
            }
        }
    }
    if part(Part::Disks) && or(disk).contains(&Backing::Disk) {
        open(bench, Plan::Disks, Backing::Disk, &mut report)?;
    }
    Ok(report)
}

/// Measures a part of the open loop.
fn open(bench: &Bench, plan: Plan, backing: Backing, report: &mut Report) -> anyhow::Result<()> {
    let args = &bench.args;
    let mut changes = Changes::of(bench)?;
    if let Plan::Rates { rates, arrivals } = plan {
        if !rates.is_empty() {
            changes.set("fio.rate", words(rates, u32::to_string));
        }
        changes.set("fio.arrival", arrivals);
        if !args.rw.is_empty() {
            changes.only("rw", words(&args.rw, |rw| rw_word(*rw)));
        }
        if let Some(depth) = args.depth.first() {
            changes.set("fio.iodepth", depth);
        }
    } else {
        match backing {
            Backing::Disk => {}
            Backing::Zram => changes.set("config.backing", "zram"),
            Backing::Cache | Backing::Null => bail!(
                "{} has no plan for {backing}; 'ringdisk lab recipes {}' prints one that you can change",
                plan.name(Backing::Disk),
                plan.name(Backing::Disk)
            ),
        }
        changes.set_list("fio.rw", &args.rw, |rw| rw_word(*rw));
        if matches!(plan, Plan::Throttle) && !args.depth.is_empty() {
            changes.only("iodepth", words(&args.depth, usize::to_string));
        }
    }
    if backing == Backing::Disk && !matches!(plan, Plan::Disks) {
        changes.set("storage.size", format!("{}G", args.size));
    }
    changes.set_list("config.client", &args.client, Client::to_string);
    if let Some(journal) = run(bench, plan.name(backing), &changes, report)? {
        add_open(report, &journal, backing, plan);
        bench.save(report)?;
    }
    Ok(())
}

/// Parts of the open loop that have plans.
#[derive(Clone, Copy)]
enum Plan<'a> {
    Rates {
        rates: &'a [u32],
        arrivals: lab::plan::words::Arrival,
    },
    Think,
    Throttle,
    Disks,
    Bursts,
}

impl Plan<'_> {
    fn name(self, backing: Backing) -> &'static str {
        match (self, backing) {
            (Plan::Rates { .. }, Backing::Zram) => "bench-rates-zram",
            (Plan::Rates { .. }, Backing::Cache) => "bench-rates-page-cache",
            (Plan::Rates { .. }, Backing::Disk | Backing::Null) => "bench-rates-disk",
            (Plan::Think, _) => "bench-think",
            (Plan::Throttle, _) => "bench-throttle",
            (Plan::Disks, _) => "bench-disks",
            (Plan::Bursts, _) => "bench-bursts",
        }
    }

    fn load(self, case: &Case, load: &LabLoad) -> Load {
        let depth = load.iodepth as usize;
        match self {
            Plan::Rates { .. } => Load::Rates {
                per_second: load.rate.unwrap_or_default(),
                depth,
                arrivals: load.arrival,
            },
            Plan::Think => Load::Think {
                pause_us: load.thinktime_us.unwrap_or_default(),
            },
            Plan::Throttle => Load::Throttle {
                limit: case.settings.iops.unwrap_or_default(),
                depth,
            },
            Plan::Disks => Load::Disks {
                disks: usize::from(case.settings.volumes),
                iothreads: case.settings.get("iothread").parse().unwrap_or(1),
                per_second: load.rate.unwrap_or_default(),
            },
            Plan::Bursts => Load::Bursts {
                requests: load.burst as usize,
            },
        }
    }
}

/// Runs a plan; `None` if nothing of it can be measured here, with the reason in the report.
fn run(
    bench: &Bench,
    plan: &str,
    changes: &Changes,
    report: &mut Report,
) -> anyhow::Result<Option<Journal>> {
    if bench.interrupted() {
        report.skipped.push(format!("{plan}: interrupted"));
        return Ok(None);
    }
    let folder = new_folder(bench, plan)?;
    let status = bench
        .lab(plan, &folder, changes)
        .stdout(Stdio::null())
        .status()
        .with_context(|| format!("starting {}", bench.programs.lab.display()))?;
    if !folder.join("journal.jsonl").exists() {
        report
            .skipped
            .push(format!("{plan}: the lab measured nothing ({status})"));
        return Ok(None);
    }
    let journal = Journal::read(&folder)?;
    for (case, why) in &journal.header.left_out {
        report.skipped.push(format!("{plan}, {case}: {why}"));
    }
    for cell in &journal.cells {
        if let Some(error) = &cell.error {
            let (case, load) = (&cell.case, &cell.workload);
            report
                .failures
                .push(format!("{plan}, {load}, {case}: {error}"));
        }
    }
    Ok(Some(journal))
}

fn new_folder(bench: &Bench, plan: &str) -> anyhow::Result<PathBuf> {
    let folder = bench.dir.join(plan);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    }
    Ok(folder)
}

fn add_closed(report: &mut Report, journal: &Journal, backing: Backing, bench: &Bench) {
    for load in &journal.plan.workloads {
        let mut results: Vec<CellResult> = Vec::new();
        let mut of_host = Vec::new();
        for (server, case, cell, sample) in samples(journal, load) {
            let client = (case.settings.device != Device::Host).then_some(case.settings.client);
            let record = Record {
                round: cell.block as usize,
                server,
                client,
                sample: converted(sample),
            };
            let Some(client) = client else {
                of_host.push(record);
                continue;
            };
            let setting = setting(case, bench);
            let known = results.iter().position(|it| it.cell.setting == setting);
            let place = known.unwrap_or_else(|| {
                results.push(CellResult::new(&Cell {
                    backing,
                    workload: workload(load),
                    setting,
                    clients: Vec::new(),
                }));
                results.len() - 1
            });
            let result = &mut results[place];
            if !result.cell.clients.contains(&client) {
                result.cell.clients.push(client);
            }
            result.records.push(record);
        }
        for result in &mut results {
            result.records.extend(of_host.iter().cloned());
        }
        report.cells.extend(results);
    }
}

fn add_open(report: &mut Report, journal: &Journal, backing: Backing, plan: Plan) {
    for load in &journal.plan.workloads {
        for (server, case, cell, sample) in samples(journal, load) {
            report.open_loop.push(Measured {
                cell: open_loop::Cell {
                    backing,
                    write: load.rw.writes(),
                    client: case.settings.client,
                    load: plan.load(case, load),
                },
                server,
                round: cell.block as usize,
                sample: converted(sample),
                polling: sample.polling,
            });
        }
    }
}

/// The samples of a load, without those of the lab's second run of the first case.
fn samples<'a>(
    journal: &'a Journal,
    load: &'a LabLoad,
) -> impl Iterator<Item = (Server, &'a Case, &'a journal::Cell, &'a journal::Sample)> {
    let its = journal.cells.iter().filter(|cell| !cell.twin);
    its.filter(|cell| cell.workload == load.name)
        .filter_map(|cell| {
            let case = journal.plan.cases.iter().find(|it| it.name == cell.case)?;
            let server = SERVERS
                .into_iter()
                .find(|it| self::case(*it) == case.base)?;
            Some((server, case, cell, cell.sample.as_ref()?))
        })
}

const SERVERS: [Server; 7] = [
    Server::Ringdisk,
    Server::RingdiskFixed,
    Server::RingdiskNoPolling,
    Server::Baseline,
    Server::Qsd,
    Server::QsdNative,
    Server::Host,
];

/// What the plans call a contestant.
fn case(server: Server) -> &'static str {
    match server {
        Server::Ringdisk => "ringdisk",
        Server::RingdiskFixed => "ringdisk-fixed",
        Server::RingdiskNoPolling => "ringdisk-no-polling",
        Server::Baseline => "baseline",
        Server::Qsd => "qemu-storage-daemon",
        Server::QsdNative => "qemu-storage-daemon-native",
        Server::Host => "fio",
    }
}

fn workload(load: &LabLoad) -> Workload {
    Workload {
        write: load.rw.writes(),
        sequential: load.sequential(),
        block: load.bs as usize,
        depth: load.iodepth as usize,
    }
}

/// What the command line varies.
fn setting(case: &Case, bench: &Bench) -> Setting {
    let args = &bench.args;
    let of = |key: &str| case.settings.get(key);
    let poll = match of("poll-max-us").parse() {
        Ok(0) => Some(Poll::Off),
        Ok(POLL_MAX_US) => Some(Poll::On),
        _ => None,
    };
    Setting {
        aio: parsed(&args.aio, &of("aio")),
        cache: parsed(&args.cache, &of("cache")),
        queues: case.settings.queues.unwrap_or(1),
        poll: poll.filter(|_| !args.poll.is_empty()),
        ring: parsed(&args.ring, &of("ring")).unwrap_or(Ring::Split),
    }
}

fn parsed<T: ValueEnum>(asked: &[T], word: &str) -> Option<T> {
    (!asked.is_empty())
        .then(|| T::from_str(word, false).ok())
        .flatten()
}

fn converted(sample: &journal::Sample) -> Sample {
    let cpu_us = sample.cpu_us.unwrap_or_default();
    Sample {
        iops: sample.iops,
        ios: sample.latencies.requests(),
        mean_us: sample.mean_ns / 1000.0,
        p50_us: sample.percentile_us(0.50),
        p99_us: sample.percentile_us(0.99),
        max_us: sample.percentile_us(1.0),
        cpu_us_per_io: cpu_us,
        switches_per_io: sample.switches.unwrap_or_default(),
        server_core: cpu_us * sample.iops / 1e6,
        client_core: sample.client_cpu.unwrap_or_default(),
        unsent: sample.unsent.unwrap_or_default(),
        ..Sample::default()
    }
}

fn rw_word(rw: Rw) -> String {
    let value = rw.to_possible_value();
    value.map_or_else(String::new, |it| it.get_name().to_owned())
}

fn words<T>(values: &[T], word: impl Fn(&T) -> String) -> String {
    let words: Vec<String> = values.iter().map(word).collect();
    words.join(",")
}
