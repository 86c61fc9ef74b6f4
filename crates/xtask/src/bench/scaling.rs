//! What more queues, cores and disks cost per I/O on the null disk: `--scaling`.
//!
//! On two cores there is no room for a second server beside its client, so each core gets an I/O thread and the thread
//! of the client that drives its queue, which take turns: the client sleeps. One such pair is what two are measured by.
//! Two servers of one queue each, which share nothing, show what the machine gives: cores that share caches, or a
//! hypervisor's scheduler, give less than twice as much.
//!
//! The disks are served by two threads on the server's core, as queues of one disk are; each queue has the same depth, so
//! that what is compared is the work of one request and not the share of a notification in it.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use harness::random::mix;
use serde::{Deserialize, Serialize};

use super::instructions::{self, Instructions};
use super::neighbours::{Serving, finish, start, verdict};
use super::plan::{Client, Server, Workload};
use super::report::{Report, short};
use super::server::{CLIENT_CPU, Programs, SERVER_CPU};
use super::setting::Setting;
use harness::cpu;
use harness::spread::Spread;
use lab::client::{Job, Sample};

/// Disks beside each other, and the queues of each.
const DISKS: usize = 32;
const QUEUES: u16 = 4;

/// What two threads may cost per I/O, times one: 1.8 times the work in twice the time.
const CORES_RATIO_MAX: f64 = 1.0 / 0.9;

/// What an I/O on one of many disks may cost, times one on a lone disk.
const DISKS_RATIO_MAX: f64 = 1.15;

/// One sample.
#[derive(Serialize, Deserialize)]
pub struct Scaled {
    pub layout: Layout,
    pub server: Server,
    pub client: Client,
    /// Of each queue.
    pub depth: usize,
    pub round: usize,
    #[serde(flatten)]
    pub sample: Sample,
}

/// Who shares what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// One queue, one I/O thread, on the core of its client.
    OneCore,
    /// A disk with two queues, each with its I/O thread and its client's thread on a core.
    TwoCores,
    /// Two servers with a disk of one queue, each on the core of its client.
    TwoServers,
    /// A disk with four queues on two I/O threads on one core.
    OneDisk,
    /// As many as [`DISKS`] of these.
    BusyDisks,
    /// The same, but only one of them has I/O.
    QuietDisks,
}

/// What is measured.
pub struct Plan<'a> {
    pub programs: &'a Programs,
    pub dir: &'a Path,
    pub rounds: usize,
    pub warmup_s: f64,
    pub runtime_s: f64,
    pub patience_s: f64,
    pub depth: usize,
    pub clients: Vec<Client>,
}

/// Measures all layouts in turn, round after round; all goes into `report`.
pub fn measure(plan: &Plan, interrupted: &AtomicBool, report: &mut Report) -> anyhow::Result<()> {
    let servers = plan.servers();
    for round in 0..plan.rounds {
        let mut turns = Vec::new();
        for server in servers.keys() {
            let cores = [Layout::OneCore, Layout::TwoCores, Layout::TwoServers];
            turns.extend(cores.map(|layout| (*server, layout, Client::Ring)));
            for client in &plan.clients {
                let disks = [Layout::OneDisk, Layout::BusyDisks, Layout::QuietDisks];
                turns.extend(disks.map(|layout| (*server, layout, *client)));
            }
        }
        turns.sort_by_key(|&(server, layout, client)| {
            let turn = (server as u64) << 16 | (layout as u64) << 8 | client as u64;
            mix(turn ^ (round as u64) << 32)
        });
        for (server, layout, client) in turns {
            if interrupted.load(Ordering::Relaxed) {
                report.skipped.push("the rest: interrupted".into());
                return Ok(());
            }
            cpu::wait_for_quiet(Duration::from_secs_f64(plan.patience_s))?;
            let sample = plan.sample(servers[&server], layout, client, round)?;
            report.scaling.push(Scaled {
                layout,
                server,
                client,
                depth: plan.depth,
                round,
                sample,
            });
        }
    }
    Ok(())
}

/// Counts instructions per I/O with more and more queues on one I/O thread.
pub fn count(plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    for (server, binary) in &plan.servers() {
        for (disks, queues) in [(1, 1), (1, QUEUES / 2), (DISKS, QUEUES / 2)] {
            eprintln!("{server}: counting instructions of {disks} x {queues} queues ...");
            report
                .instructions
                .push(plan.instructions(*server, binary, disks, queues)?);
        }
    }
    Ok(())
}

impl Plan<'_> {
    fn servers(&self) -> BTreeMap<Server, &Path> {
        let Programs {
            ringdisk, baseline, ..
        } = self.programs;
        let baseline = baseline.as_deref().map(|it| (Server::Baseline, it));
        baseline
            .into_iter()
            .chain([(Server::Ringdisk, ringdisk.as_path())])
            .collect()
    }

    fn sample(
        &self,
        binary: &Path,
        layout: Layout,
        client: Client,
        round: usize,
    ) -> anyhow::Result<Sample> {
        let both = [SERVER_CPU, CLIENT_CPU];
        // A server's name, disks, those with I/O, queues of each, its cores, and its client's.
        type Pair<'a> = (&'a str, usize, usize, u16, &'a [usize], &'a [usize]);
        let apart = |disks, driven| -> Pair {
            let (server, client) = (&both[..1], &both[1..]);
            ("disks", disks, driven, QUEUES, server, client)
        };
        let pairs: Vec<Pair> = match layout {
            Layout::OneCore => vec![("first", 1, 1, 1, &both[..1], &both[..1])],
            Layout::TwoCores => vec![("both", 1, 1, 2, &both, &both)],
            Layout::TwoServers => vec![
                ("first", 1, 1, 1, &both[..1], &both[..1]),
                ("second", 1, 1, 1, &both[1..], &both[1..]),
            ],
            Layout::OneDisk => vec![apart(1, 1)],
            Layout::BusyDisks => vec![apart(DISKS, DISKS)],
            Layout::QuietDisks => vec![apart(DISKS, 1)],
        };
        let mut running = Vec::new();
        for (i, (name, disks, driven, queues, server_cpus, client_cpus)) in
            pairs.into_iter().enumerate()
        {
            let serving = Serving {
                name,
                queues,
                iothreads: usize::from(queues.min(2)),
                cpus: server_cpus,
            };
            let files = vec!["null:64G".to_owned(); disks];
            let server = serving.start(binary, self.programs, self.dir, &files)?;
            let job = Job {
                sockets: server.sockets.clone(),
                driven,
                queues,
                client,
                server_pid: server.pid(),
                cpus: client_cpus.to_vec(),
                seed: (round * 2 + i) as u64,
                ..self.job()
            };
            let client = start(self.programs, &job)?;
            running.push((server, client));
        }
        let samples: Vec<Sample> = running
            .into_iter()
            .map(|(_server, client)| finish(client))
            .collect::<Result<_, _>>()?;
        together(&samples).context("no server was measured")
    }

    /// On one I/O thread, since one thread is stepped.
    fn instructions(
        &self,
        server: Server,
        binary: &Path,
        disks: usize,
        queues: u16,
    ) -> anyhow::Result<Instructions> {
        let serving = Serving {
            name: "stepped",
            queues,
            iothreads: 1,
            cpus: &[SERVER_CPU],
        };
        let files = vec!["null:64G".to_owned(); disks];
        let running = serving.start(binary, self.programs, self.dir, &files)?;
        let job = Job {
            sockets: running.sockets.clone(),
            driven: disks,
            queues,
            client: Client::RingPoll,
            server_pid: running.pid(),
            cpus: vec![CLIENT_CPU],
            ..self.job()
        };
        let job = instructions::job(job, self.dir);
        let client = start(self.programs, &job)?;
        Ok(Instructions {
            server,
            setting: Setting {
                queues,
                ..Setting::default()
            },
            disks,
            depth: self.depth,
            per_io: instructions::per_io(running.pid(), &job, client, finish)?,
        })
    }

    fn job(&self) -> Job {
        Job {
            sockets: Vec::new(),
            driven: 1,
            queues: 1,
            packed: false,
            client: Client::Ring,
            queue_size: lab::client::RING_QUEUE_SIZE,
            pace: None,
            schedule_seed: 0,
            latencies: false,
            access: Workload {
                write: false,
                sequential: false,
                block: 4 << 10,
                depth: self.depth,
            },
            warmup_s: self.warmup_s,
            runtime_s: self.runtime_s,
            cooldown_s: 0.0,
            idle_s: None,
            server_pid: 0,
            // It has pinned its threads itself, and nothing of the kernel's works for a null disk.
            server_cpu: None,
            cpus: Vec::new(),
            mark: None,
            once: 0,
            seed: 1,
        }
    }
}

/// Servers side by side as if they were one. None of nothing.
fn together(samples: &[Sample]) -> Option<Sample> {
    let iops: f64 = samples.iter().map(|sample| sample.iops).sum();
    let weighed = |metric: fn(&Sample) -> f64| -> f64 {
        let each = samples.iter().map(|sample| metric(sample) * sample.iops);
        each.sum::<f64>() / iops
    };
    Some(Sample {
        iops,
        mean_us: weighed(|s| s.mean_us),
        cpu_us_per_io: weighed(|s| s.cpu_us_per_io),
        cpu_user_us_per_io: weighed(|s| s.cpu_user_us_per_io),
        cpu_system_us_per_io: weighed(|s| s.cpu_system_us_per_io),
        switches_per_io: weighed(|s| s.switches_per_io),
        ..samples.first()?.clone()
    })
}

/// The samples as text, with what they say of the targets.
pub fn write(out: &mut String, samples: &[Scaled]) -> fmt::Result {
    let Some(depth) = samples.first().map(|sample| sample.depth) else {
        return Ok(());
    };
    writeln!(out, "\nnull disk, depth {depth} of each queue")?;
    writeln!(
        out,
        "{:34} {:9} {:9} {:>8} {:>12} | beside the first of its kind: {:15} {:15}",
        "", "server", "client", "kIOPS", "CPU us/IO", "IOPS", "CPU per IO"
    )?;
    let mut groups: BTreeMap<_, Vec<&Scaled>> = BTreeMap::new();
    for it in samples {
        let group = (it.layout, it.server, it.client);
        groups.entry(group).or_default().push(it);
    }
    for ((layout, server, client), group) in &groups {
        let spread = |metric: fn(&Sample) -> f64| {
            let spread = Spread::of(group.iter().map(|it| metric(&it.sample)));
            spread.map_or(f64::NAN, |spread| spread.median)
        };
        write!(
            out,
            "{:34} {server:9} {client:9} {:>8} {:>12}",
            layout.to_string(),
            short(spread(|s| s.iops) / 1e3),
            short(spread(|s| s.cpu_us_per_io))
        )?;
        let Some((first, ratio_max)) = layout.measured_by() else {
            writeln!(out)?;
            continue;
        };
        let ratio = |metric: fn(&Sample) -> f64| {
            let firsts = groups.get(&(first, *server, *client))?;
            let pairs = group.iter().filter_map(|it| {
                let first = firsts.iter().find(|first| first.round == it.round)?;
                Some(metric(&it.sample) / metric(&first.sample))
            });
            Spread::of(pairs)
        };
        let text = |spread: Option<Spread>| {
            spread.map_or("-".into(), |s| {
                format!("{:.2} [{:.2}..{:.2}]", s.median, s.min, s.max)
            })
        };
        let cpu = ratio(|s| s.cpu_us_per_io);
        write!(
            out,
            " | {:30} {:15} {:15}",
            "",
            text(ratio(|s| s.iops)),
            text(cpu)
        )?;
        if let (Some(cpu), Some(most)) = (cpu, ratio_max) {
            let verdict = verdict(cpu.median <= most);
            write!(out, " {verdict}at most {most:.2}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}

impl Layout {
    /// What it is compared with, and what it may cost per I/O, times that.
    fn measured_by(self) -> Option<(Layout, Option<f64>)> {
        match self {
            Layout::OneCore | Layout::OneDisk => None,
            Layout::TwoCores => Some((Layout::OneCore, Some(CORES_RATIO_MAX))),
            Layout::TwoServers => Some((Layout::OneCore, None)),
            Layout::BusyDisks | Layout::QuietDisks => {
                Some((Layout::OneDisk, Some(DISKS_RATIO_MAX)))
            }
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Layout::OneCore => f.write_str("1 queue on 1 core"),
            Layout::TwoCores => f.write_str("2 queues on 2 cores"),
            Layout::TwoServers => f.write_str("2 servers of 1 queue on 2 cores"),
            Layout::OneDisk => write!(f, "1 disk of {QUEUES} queues"),
            Layout::BusyDisks => write!(f, "{DISKS} disks of {QUEUES} queues"),
            Layout::QuietDisks => write!(f, "{DISKS} disks of {QUEUES}, 1 has I/O"),
        }
    }
}
