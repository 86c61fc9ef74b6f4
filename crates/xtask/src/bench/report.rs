//! What a run yields: the samples, and the tables of closed loops.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::Context;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::instructions::Instructions;
use super::machine::Machine;
use super::open_loop::Measured;
use super::plan::{Cell, Limit, Metric, TARGETS, Target};
use super::words::{Client, Server, short};
use harness::spread::Spread;
use lab::client::Sample;

/// A whole run.
#[derive(Serialize, Deserialize)]
pub struct Report {
    pub machine: Machine,
    pub seed: u64,
    pub rounds: usize,
    pub runtime_s: f64,
    pub cells: Vec<CellResult>,
    pub instructions: Vec<Instructions>,
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "with_requests"
    )]
    pub open_loop: Vec<Measured>,
    /// Backings and settings that could not be measured here, with the reason.
    pub skipped: Vec<String>,
    pub failures: Vec<String>,
}

/// All samples of a cell.
#[derive(Serialize, Deserialize)]
pub struct CellResult {
    #[serde(flatten)]
    pub cell: Cell,
    pub records: Vec<Record>,
}

#[derive(Clone, Serialize, Deserialize)]
pub struct Record {
    pub round: usize,
    pub server: Server,
    /// None for the host.
    pub client: Option<Client>,
    #[serde(flatten)]
    pub sample: Sample,
}

/// Earlier runs also have samples of disks without I/O, which this program no longer takes.
fn with_requests<'de, D: Deserializer<'de>>(samples: D) -> Result<Vec<Measured>, D::Error> {
    let samples: Vec<serde_json::Value> = Vec::deserialize(samples)?;
    let with_requests = samples.into_iter().filter(|it| it["part"] != "idle");
    let read = |it| serde_json::from_value(it).map_err(D::Error::custom);
    with_requests.map(read).collect()
}

impl Report {
    pub fn new(seed: u64, rounds: usize, runtime_s: f64) -> Report {
        Report {
            machine: Machine::here(),
            seed,
            rounds,
            runtime_s,
            cells: Vec::new(),
            instructions: Vec::new(),
            open_loop: Vec::new(),
            skipped: Vec::new(),
            failures: Vec::new(),
        }
    }

    pub fn write_json(&self, path: &Path) -> anyhow::Result<()> {
        fs::write(path, serde_json::to_string_pretty(self)?)
            .with_context(|| format!("writing {}", path.display()))
    }

    /// What a picture says of a run.
    pub fn conditions(&self) -> String {
        let machine = &self.machine;
        format!(
            "medians of {} interleaved rounds, whiskers: least and most; {}, Linux {}, {}, {}",
            self.rounds, machine.cpu, machine.kernel, machine.qemu_storage_daemon, machine.fio
        )
    }

    /// The closed loops as text.
    pub fn write_cells(&self, out: &mut String) -> std::fmt::Result {
        if self.cells.iter().any(|it| !it.cell.setting.is_default()) {
            writeln!(
                out,
                "all servers of a row have the same setting; each has one I/O thread on its core, which serves all queues: \
                 qemu-storage-daemon 10 maps no queues of an export to threads"
            )?;
        }
        for cells in self.cells.chunk_by(|a, b| a.cell.backing == b.cell.backing) {
            self.write_backing(out, cells)?;
            self.write_settings(out, cells)?;
        }
        Ok(())
    }

    fn write_backing(&self, out: &mut String, cells: &[CellResult]) -> std::fmt::Result {
        let servers = servers_of(cells);
        let others = servers.iter().filter(|server| **server != Server::Ringdisk);
        let others: Vec<Server> = others
            .copied()
            .filter(|_| servers.contains(&Server::Ringdisk))
            .collect();

        let setting_width = setting_width(cells);
        writeln!(out, "\n{}", cells[0].cell.backing)?;
        write!(out, "{:28}{:setting_width$}", "", "")?;
        for group in ["kIOPS", "p50/p99 us", "server CPU us/IO"] {
            let width = group_width(group, servers.len());
            write!(out, " | {group:^width$}")?;
        }
        for other in &others {
            write!(out, " | {:^31}", format!("ringdisk / {other}"))?;
        }
        write!(
            out,
            "\n{:18} {:setting_width$}{:9}",
            "workload",
            if setting_width > 0 { "setting" } else { "" },
            "client"
        )?;
        for group in ["kIOPS", "p50/p99 us", "server CPU us/IO"] {
            write!(out, " |")?;
            for server in &servers {
                let width = column_width(group);
                write!(out, " {:>width$.width$}", server.to_string())?;
            }
        }
        for _ in &others {
            write!(out, " | {:15} {:15}", "IOPS", "CPU per IO")?;
        }
        writeln!(out)?;

        for result in cells {
            for client in &result.cell.clients {
                self.write_row(out, result, *client, setting_width, &servers, &others)?;
            }
        }
        Ok(())
    }

    fn write_row(
        &self,
        out: &mut String,
        result: &CellResult,
        client: Client,
        setting_width: usize,
        servers: &[Server],
        others: &[Server],
    ) -> std::fmt::Result {
        let workload = &result.cell.workload;
        let name = format!(
            "{}k {} {}",
            workload.block >> 10,
            workload.rw(),
            workload.depth
        );
        let setting = result.cell.setting.to_string();
        write!(out, "{name:18} {setting:setting_width$}{client:9}")?;
        let cell = |server, width: usize, text: &dyn Fn(Side) -> Option<String>| {
            let text = text(result.side(server, client)).unwrap_or("-".into());
            format!(" {text:>width$}")
        };
        write!(out, " |")?;
        for server in servers {
            let text = cell(*server, 10, &|side| {
                Some(short(side.spread(|s| s.iops)?.median / 1e3))
            });
            out.push_str(&text);
        }
        write!(out, " |")?;
        for server in servers {
            let text = cell(*server, 11, &|side| {
                let (p50, p99) = (side.spread(|s| s.p50_us)?, side.spread(|s| s.p99_us)?);
                Some(format!("{}/{}", short(p50.median), short(p99.median)))
            });
            out.push_str(&text);
        }
        write!(out, " |")?;
        for server in servers {
            let text = cell(*server, 10, &|side| {
                Some(short(side.spread(|s| s.cpu_us_per_io)?.median))
            });
            out.push_str(&text);
        }
        for other in others {
            let ratio = |metric: fn(&Sample) -> f64| {
                let ratio = result.compare(Server::Ringdisk, *other, client, |ours, theirs| {
                    metric(ours) / metric(theirs)
                });
                ratio.map_or("-".into(), |r| {
                    format!("{:.2} [{:.2}..{:.2}]", r.median, r.min, r.max)
                })
            };
            write!(
                out,
                " | {:15} {:15}",
                ratio(|s| s.iops),
                ratio(|s| s.cpu_us_per_io)
            )?;
        }
        let notes = result.notes(client).join(", ");
        if !notes.is_empty() {
            write!(out, " | {notes}")?;
        }
        writeln!(out)
    }

    /// Each server against itself in the first setting of its workload.
    fn write_settings(&self, out: &mut String, cells: &[CellResult]) -> std::fmt::Result {
        let width = setting_width(cells);
        let mut title = "IOPS and CPU per I/O of a setting over those of the first";
        for group in cells.chunk_by(|a, b| a.cell.workload == b.cell.workload) {
            let [first, rest @ ..] = group else { continue };
            for result in rest {
                for (client, server) in result.contestants() {
                    let ratio = |metric: fn(&Sample) -> f64| {
                        let (ours, theirs) = ((result, server), (first, server));
                        let ratio = ratio(ours, theirs, client, |a, b| metric(a) / metric(b))?;
                        Some(format!(
                            "{:.2} [{:.2}..{:.2}]",
                            ratio.median, ratio.min, ratio.max
                        ))
                    };
                    let (Some(iops), Some(cpu)) = (ratio(|s| s.iops), ratio(|s| s.cpu_us_per_io))
                    else {
                        continue;
                    };
                    if !title.is_empty() {
                        writeln!(out, "{title}")?;
                        title = "";
                    }
                    let Cell {
                        workload, setting, ..
                    } = &result.cell;
                    let (workload, setting) = (workload.to_string(), setting.to_string());
                    writeln!(
                        out,
                        "{workload:24} {setting:width$}{client:9} {server:10} | {iops:18} {cpu:18}"
                    )?;
                }
            }
        }
        Ok(())
    }

    /// What is wanted of the closed loops, and whether it was reached.
    pub fn write_targets(&self, out: &mut String) -> std::fmt::Result {
        let verdicts: Vec<Verdict> = self.cells.iter().flat_map(CellResult::verdicts).collect();
        if verdicts.is_empty() {
            return Ok(());
        }
        let reached = verdicts.iter().filter(|verdict| verdict.reached).count();
        writeln!(out, "\ntargets: {reached} of {} reached", verdicts.len())?;
        for verdict in &verdicts {
            let word = match (verdict.reached, verdict.in_every_round) {
                (true, true) => "reached",
                (true, false) => "reached?",
                (false, _) => "MISSED",
            };
            writeln!(out, "{word:8} {}", verdict.text)?;
        }
        Ok(())
    }
}

/// Whether a target holds in a cell.
struct Verdict {
    reached: bool,
    in_every_round: bool,
    text: String,
}

impl CellResult {
    pub fn new(cell: &Cell) -> CellResult {
        CellResult {
            cell: cell.clone(),
            records: Vec::new(),
        }
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let targets = TARGETS.iter().filter(|target| target.is_about(&self.cell));
        let ours = [Server::Ringdisk, Server::RingdiskFixed];
        targets
            .flat_map(|target| ours.map(|ours| (target, ours)))
            .flat_map(|(target, ours)| {
                let clients = self.cell.clients.iter();
                clients.filter_map(move |client| self.verdict(target, ours, *client))
            })
            .collect()
    }

    /// None if the target is not about this client or a contestant is missing.
    fn verdict(&self, target: &Target, ours: Server, client: Client) -> Option<Verdict> {
        if !target.is_for(client) {
            return None;
        }
        let (value, what) = match target.metric {
            Metric::Iops(other) => (
                self.compare(ours, other, client, |a, b| a.iops / b.iops),
                format!("IOPS / {other}'s"),
            ),
            Metric::Cpu(other) => {
                let ratio = |a: &Sample, b: &Sample| a.cpu_us_per_io / b.cpu_us_per_io;
                let ratio = self.compare(ours, other, client, ratio);
                (ratio, format!("CPU per I/O / {other}'s"))
            }
            Metric::CpuUs => (
                self.side(ours, client).spread(|s| s.cpu_us_per_io),
                "CPU per I/O, us".to_string(),
            ),
            Metric::LatencyOver(other) => (
                self.compare(ours, other, client, |a, b| a.mean_us - b.mean_us),
                format!("mean latency over {other}'s, us"),
            ),
        };
        let value = value?;
        let limit = match target.limit {
            Limit::AtLeast(limit) => format!("at least {limit}"),
            Limit::AtMost(limit) => format!("at most {limit}"),
        };
        Some(Verdict {
            reached: target.limit.holds(value.median),
            in_every_round: target.limit.holds(value.min) && target.limit.holds(value.max),
            text: format!(
                "{:8} {:10} {:24} {client:9} {what:32} {:>7} [{}..{}], wanted {limit}",
                ours.to_string(),
                self.cell.backing.to_string(),
                self.cell.workload.to_string(),
                short(value.median),
                short(value.min),
                short(value.max),
            ),
        })
    }

    /// The samples of one contestant. The host has no client, and stands beside each of them.
    pub fn side(&self, server: Server, client: Client) -> Side<'_> {
        let client = (server != Server::Host).then_some(client);
        let records = self
            .records
            .iter()
            .filter(|record| record.server == server && record.client == client);
        Side {
            records: records.collect(),
        }
    }

    /// One contestant against another, round by round.
    pub fn compare(
        &self,
        ours: Server,
        other: Server,
        client: Client,
        f: impl Fn(&Sample, &Sample) -> f64,
    ) -> Option<Spread> {
        ratio((self, ours), (self, other), client, f)
    }

    /// Who took part, the host aside.
    fn contestants(&self) -> Vec<(Client, Server)> {
        let clients = self.cell.clients.iter();
        let servers = servers_in(self.records.iter());
        clients
            .flat_map(|client| servers.iter().map(|server| (*client, *server)))
            .filter(|(_, server)| *server != Server::Host)
            .collect()
    }

    /// What makes a row less than trustworthy.
    fn notes(&self, client: Client) -> Vec<String> {
        let mut notes = Vec::new();
        let records = || {
            self.records
                .iter()
                .filter(|record| record.client.is_none_or(|it| it == client))
        };
        let mut note = |limit: f64, what: &str, metric: fn(&Sample) -> f64| {
            // The worst contestant's median: one bad round does not move a median.
            let medians = servers_in(records()).into_iter().filter_map(|server| {
                let spread = Spread::of(
                    records()
                        .filter(|r| r.server == server)
                        .map(|r| metric(&r.sample)),
                )?;
                Some((spread.median, server))
            });
            if let Some((value, server)) = medians.max_by(|a, b| a.0.total_cmp(&b.0))
                && value > limit
            {
                notes.push(format!("{what} {:.0} % ({server})", value * 100.0));
            }
        };
        if client.sleeps() {
            note(0.95, "client's core full", |s| s.client_core);
        }
        note(0.10, "other work on the machine", |s| s.others_cores);
        note(0.02, "time stolen", |s| s.stolen_cores);
        notes
    }
}

/// One contestant of a cell against one of the same or another cell, round by round.
fn ratio(
    (ours, our_server): (&CellResult, Server),
    (theirs, their_server): (&CellResult, Server),
    client: Client,
    f: impl Fn(&Sample, &Sample) -> f64,
) -> Option<Spread> {
    let theirs = theirs.side(their_server, client);
    let ours = ours.side(our_server, client);
    let pair = |ours: &&Record| {
        let theirs = theirs
            .records
            .iter()
            .find(|record| record.round == ours.round)?;
        Some(f(&ours.sample, &theirs.sample))
    };
    Spread::of(ours.records.iter().filter_map(pair))
}

/// The samples of one contestant in one cell.
pub struct Side<'a> {
    records: Vec<&'a Record>,
}

impl Side<'_> {
    pub fn spread(&self, metric: impl Fn(&Sample) -> f64) -> Option<Spread> {
        Spread::of(self.records.iter().map(|record| metric(&record.sample)))
    }
}

/// Those that have samples, in the order of the enum.
pub fn servers_of(cells: &[CellResult]) -> Vec<Server> {
    servers_in(cells.iter().flat_map(|cell| &cell.records))
}

fn servers_in<'a>(records: impl Iterator<Item = &'a Record>) -> Vec<Server> {
    let mut servers: Vec<Server> = records.map(|record| record.server).collect();
    servers.sort();
    servers.dedup();
    servers
}

/// With a space behind; 0 if there is but the default.
fn setting_width(cells: &[CellResult]) -> usize {
    let widths = cells.iter().map(|it| it.cell.setting.to_string().len());
    widths.max().filter(|&w| w > 0).map_or(0, |w| w + 1)
}

fn column_width(group: &str) -> usize {
    if group.starts_with("p50") { 11 } else { 10 }
}

fn group_width(group: &str, servers: usize) -> usize {
    (column_width(group) + 1) * servers - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::setting::Setting;
    use crate::bench::words::{Backing, Workload};

    fn record(round: usize, server: Server, iops: f64) -> Record {
        let sample = Sample {
            iops,
            ..Sample::default()
        };
        let client = (server != Server::Host).then_some(Client::Blkio);
        Record {
            round,
            server,
            client,
            sample,
        }
    }

    fn disk_at_32(records: Vec<Record>) -> CellResult {
        let workload = Workload {
            write: false,
            sequential: false,
            block: 4096,
            depth: 32,
        };
        let cell = Cell {
            backing: Backing::Disk,
            workload,
            setting: Setting::default(),
            clients: vec![Client::Blkio],
        };
        CellResult { cell, records }
    }

    #[test]
    fn ratios_pair_the_samples_of_one_round() {
        let result = disk_at_32(vec![
            record(0, Server::Ringdisk, 100.0),
            record(1, Server::Qsd, 10.0),
            record(1, Server::Ringdisk, 30.0),
            record(0, Server::Qsd, 50.0),
            // Its partner failed.
            record(2, Server::Ringdisk, 1.0),
        ]);
        let ratio = result.compare(Server::Ringdisk, Server::Qsd, Client::Blkio, |a, b| {
            a.iops / b.iops
        });
        assert_eq!(
            ratio,
            Some(Spread {
                median: 2.5,
                min: 2.0,
                max: 3.0
            })
        );
    }

    #[test]
    fn a_target_is_judged_by_the_median_and_says_when_a_round_differs() {
        let result = disk_at_32(vec![
            record(0, Server::Ringdisk, 96.0),
            record(0, Server::Host, 100.0),
            record(1, Server::Ringdisk, 97.0),
            record(1, Server::Host, 100.0),
            record(2, Server::Ringdisk, 80.0),
            record(2, Server::Host, 100.0),
        ]);
        let verdicts = result.verdicts();
        assert_eq!(verdicts.len(), 1, "only the host takes part");
        assert!(
            verdicts[0].reached && !verdicts[0].in_every_round,
            "{}",
            verdicts[0].text
        );
    }
}
