//! The samples as Markdown tables, and what they say of the goals.

use std::cmp::Reverse;
use std::fmt::{self, Write};

use super::{Cell, Load, Measured};
use crate::bench::plan::{Limit, verdict};
use crate::bench::words::{Server, short};
use harness::spread::Spread;
use lab::client::Sample;

/// Of the requests that were due, this share may be unsent at the end of the window: chance, not a server that cannot
/// follow.
const UNSENT_SHARE_MAX: f64 = 0.02;

/// All samples of one cell.
pub struct Row<'a> {
    pub cell: Cell,
    pub samples: Vec<&'a Measured>,
}

/// The cells of `samples` in the order of the plan.
pub fn rows(samples: &[Measured]) -> Vec<Row<'_>> {
    let mut rows: Vec<Row> = Vec::new();
    for it in samples {
        match rows.iter_mut().find(|row| row.cell == it.cell) {
            Some(row) => row.samples.push(it),
            None => rows.push(Row {
                cell: it.cell,
                samples: vec![it],
            }),
        }
    }
    // The real disk first.
    rows.sort_by_key(|row| {
        (
            row.cell.load.order(),
            Reverse(row.cell.backing),
            row.cell.write,
        )
    });
    rows
}

impl Load {
    /// The part, and the place in it.
    fn order(self) -> (usize, u64, u64) {
        match self {
            Load::Rates { per_second, .. } => (0, 0, per_second.into()),
            Load::Think { pause_us } => (1, 0, pause_us),
            Load::Throttle { limit, depth } => (2, limit.into(), depth as u64),
            Load::Disks { iothreads, .. } => (3, 0, iothreads as u64),
            Load::Bursts { requests } => (5, 0, requests as u64),
        }
    }
}

type Metric = fn(&Sample) -> f64;

impl Row<'_> {
    pub fn spread(&self, server: Server, metric: Metric) -> Option<Spread> {
        let its = self.samples.iter().filter(|it| it.server == server);
        Spread::of(its.map(|it| metric(&it.sample)))
    }

    fn median(&self, server: Server, metric: Metric) -> Option<f64> {
        Some(self.spread(server, metric)?.median)
    }

    /// ringdisk's over another's, round by round.
    fn ratio(&self, other: Server, metric: Metric) -> Option<Spread> {
        let of = |server| self.samples.iter().filter(move |it| it.server == server);
        let pairs = of(Server::Ringdisk).filter_map(|ours| {
            let theirs = of(other).find(|it| it.round == ours.round)?;
            let ratio = metric(&ours.sample) / metric(&theirs.sample);
            ratio.is_finite().then_some(ratio)
        });
        Spread::of(pairs)
    }

    /// The engine of qemu-storage-daemon whose median is less.
    fn better_qsd(&self, metric: Metric) -> Option<Server> {
        let engines = [Server::QsdNative, Server::Qsd].into_iter();
        let medians = engines.filter_map(|it| Some((it, self.median(it, metric)?)));
        let least = medians.min_by(|a, b| a.1.total_cmp(&b.1));
        least.map(|(server, _)| server)
    }

    /// The share of the requests due that could not be sent.
    fn unsent_share(&self, server: Server) -> f64 {
        let its = self.samples.iter().filter(|it| it.server == server);
        let shares = its
            .map(|it| it.sample.unsent as f64 / (it.sample.unsent + it.sample.ios).max(1) as f64);
        Spread::of(shares).map_or(0.0, |it| it.median)
    }

    fn falls_behind(&self, server: Server) -> bool {
        self.unsent_share(server) > UNSENT_SHARE_MAX
    }
}

/// The samples as text.
pub fn write(out: &mut String, samples: &[Measured]) -> fmt::Result {
    if samples.is_empty() {
        return Ok(());
    }
    let rows = rows(samples);
    let mut verdicts = String::new();
    for rows in rows.chunk_by(|a, b| a.cell.load.order().0 == b.cell.load.order().0) {
        let servers = servers_of(rows);
        let load = rows[0].cell.load;
        writeln!(out, "\n### {}\n", load.title())?;
        write_cpu(out, rows, &servers)?;
        write_latencies(out, rows, &servers)?;
        write_polling(out, rows, &servers)?;
        for row in rows {
            for goal in goals(row.cell.load) {
                goal.judge(&mut verdicts, row)?;
            }
        }
    }
    if !verdicts.is_empty() {
        writeln!(out, "\n{}", verdicts.trim_end())?;
    }
    write_notes(out, &rows)
}

fn servers_of(rows: &[Row]) -> Vec<Server> {
    let samples = rows.iter().flat_map(|row| &row.samples);
    let mut servers: Vec<Server> = samples.map(|it| it.server).collect();
    servers.sort();
    servers.dedup();
    servers
}

/// A line of a table.
fn line(out: &mut String, first: &str, cells: &[String]) -> fmt::Result {
    writeln!(out, "| {first} | {} |", cells.join(" | "))
}

fn head(out: &mut String, first: &str, cells: &[String]) -> fmt::Result {
    line(out, first, cells)?;
    writeln!(out, "|---|{}", "---|".repeat(cells.len()))
}

fn names(servers: &[Server]) -> Vec<String> {
    servers.iter().map(Server::to_string).collect()
}

fn text(spread: Option<Spread>) -> String {
    spread.map_or(String::new(), |it| {
        format!("{:.2} ({:.2} to {:.2})", it.median, it.min, it.max)
    })
}

const CPU_US: Metric = |it| it.cpu_us_per_io;
const CORE: Metric = |it| it.server_core * 100.0;
const MEAN: Metric = |it| it.mean_us;
const P99: Metric = |it| it.p99_us;
const IOPS: Metric = |it| it.iops;

impl Load {
    fn title(self) -> &'static str {
        match self {
            Load::Rates { .. } => "Open loop",
            Load::Think { .. } => "Closed loop at depth 1 with a think time",
            Load::Throttle { .. } => "Limited disk, closed loop",
            Load::Disks { .. } => "Many disks, open loop",
            Load::Bursts { .. } => "Bursts after 100 ms of silence",
        }
    }

    /// What its CPU time is given per, and the unit.
    fn cpu(self) -> (&'static str, Metric) {
        match self {
            Load::Disks { .. } => ("server CPU, % of a core", CORE),
            _ => ("server CPU per I/O, µs", CPU_US),
        }
    }
}

fn write_cpu(out: &mut String, rows: &[Row], servers: &[Server]) -> fmt::Result {
    let (what, metric) = rows[0].cell.load.cpu();
    let beside = |server: Server| servers.contains(&server) && servers.contains(&Server::Ringdisk);
    let others: Vec<Server> = [Server::RingdiskNoPolling, Server::Baseline]
        .into_iter()
        .filter(|it| beside(*it))
        .collect();
    let with_qsd = beside(Server::Qsd) || beside(Server::QsdNative);
    let mut cells = names(servers);
    cells.extend(others.iter().map(|it| format!("ringdisk / {it}")));
    if with_qsd {
        cells.push("ringdisk / better qsd".into());
    }
    head(out, what, &cells)?;
    for row in rows {
        let medians = servers.iter().map(|it| row.median(*it, metric));
        let mut cells: Vec<String> = medians.map(|it| it.map_or(String::new(), short)).collect();
        cells.extend(others.iter().map(|it| text(row.ratio(*it, metric))));
        if with_qsd {
            let better = row.better_qsd(metric);
            cells.push(text(better.and_then(|it| row.ratio(it, metric))));
        }
        line(out, &row.cell.to_string(), &cells)?;
    }
    Ok(())
}

fn write_latencies(out: &mut String, rows: &[Row], servers: &[Server]) -> fmt::Result {
    let what = match rows[0].cell.load {
        Load::Think { .. } | Load::Throttle { .. } => "done per second; mean, p50, p99, µs",
        Load::Bursts { .. } => "first answer: mean, p50, p99, µs",
        _ => "latency: mean, p50, p99, µs",
    };
    writeln!(out)?;
    head(out, what, &names(servers))?;
    for row in rows {
        let cells: Vec<String> = servers.iter().map(|it| latency(row, *it)).collect();
        line(out, &row.cell.to_string(), &cells)?;
    }
    Ok(())
}

fn latency(row: &Row, server: Server) -> String {
    let metrics: [Metric; 4] = [IOPS, MEAN, |it| it.p50_us, P99];
    let Some(iops) = row.median(server, IOPS) else {
        return String::new();
    };
    if row.falls_behind(server) {
        // How late the requests are then depends on the length of the window.
        return format!("does {iops:.0}/s");
    }
    let medians = metrics.map(|metric| row.median(server, metric).unwrap_or(f64::NAN));
    let [_, mean, p50, p99] = medians.map(short);
    match row.cell.load {
        Load::Think { .. } | Load::Throttle { .. } => format!("{iops:.0}/s; {mean}, {p50}, {p99}"),
        _ => format!("{mean}, {p50}, {p99}"),
    }
}

/// What ringdisks say of their polling, warm-up included. A thread that is preempted while it polls seems to poll for longer
/// than it has run.
fn write_polling(out: &mut String, rows: &[Row], servers: &[Server]) -> fmt::Result {
    let known = |server: &Server| {
        let mut samples = rows.iter().flat_map(|row| &row.samples);
        samples.any(|it| it.server == *server && it.polling.is_some_and(|it| it.polls > 0))
    };
    let servers: Vec<Server> = servers.iter().copied().filter(known).collect();
    if servers.is_empty() {
        return Ok(());
    }
    let what = "time spent polling over the threads' CPU time, share of the polls that hit";
    writeln!(out)?;
    head(out, what, &names(&servers))?;
    for row in rows {
        let cells: Vec<String> = servers.iter().map(|it| polling(row, *it)).collect();
        line(out, &row.cell.to_string(), &cells)?;
    }
    Ok(())
}

fn polling(row: &Row, server: Server) -> String {
    let its = || row.samples.iter().filter(|it| it.server == server);
    let median = |figure: &dyn Fn(&Measured) -> Option<f64>| {
        let spread = Spread::of(its().filter_map(|it| figure(it)));
        spread.map_or(f64::NAN, |it| it.median)
    };
    let share = |part: u64, all: u64| part as f64 / all.max(1) as f64;
    let cpu = median(&|it| it.polling.map(|p| 100.0 * share(p.polled_ns, p.cpu_ns)));
    let hit = median(&|it| it.polling.map(|p| 100.0 * share(p.polls_hit, p.polls)));
    format!("{cpu:.0} %, {hit:.0} %")
}

/// A figure that ringdisk promises here, beside another server's.
struct Goal {
    what: &'static str,
    metric: Metric,
    over: Over,
    limit: Limit,
}

#[derive(Clone, Copy, PartialEq)]
enum Over {
    NoPolling,
    BetterQsd,
}

fn goals(load: Load) -> Vec<Goal> {
    let goal = |what, metric, over, limit| Goal {
        what,
        metric,
        over,
        limit,
    };
    let qsd = |what, metric, most| goal(what, metric, Over::BetterQsd, Limit::AtMost(most));
    let latencies = || [qsd("mean latency", MEAN, 1.0), qsd("p99", P99, 1.0)];
    match load {
        Load::Rates { .. } => {
            let [mean, p99] = latencies();
            let without = Limit::AtMost(1.1);
            vec![
                goal("CPU per I/O", CPU_US, Over::NoPolling, without),
                qsd("CPU per I/O", CPU_US, 0.8),
                mean,
                p99,
            ]
        }
        Load::Think { pause_us: 0 } => {
            vec![goal("IOPS", IOPS, Over::BetterQsd, Limit::AtLeast(1.9))]
        }
        Load::Think { .. } => vec![
            qsd("CPU per I/O", CPU_US, 1.0),
            qsd("mean latency", MEAN, 1.0),
        ],
        Load::Throttle { .. } => vec![qsd("CPU per I/O", CPU_US, 0.6)],
        Load::Disks { .. } => vec![qsd("CPU", CORE, 0.5)],
        Load::Bursts { .. } => vec![qsd("first answer, mean", MEAN, 1.0)],
    }
}

impl Goal {
    /// Nothing if a contestant is missing or cannot follow.
    fn judge(&self, out: &mut String, row: &Row) -> fmt::Result {
        let other = match (self.over, self.limit) {
            (Over::NoPolling, _) => Some(Server::RingdiskNoPolling),
            (Over::BetterQsd, Limit::AtMost(_)) => row.better_qsd(self.metric),
            // More is better: the one that is less per I/O in time.
            (Over::BetterQsd, Limit::AtLeast(_)) => row.better_qsd(MEAN),
        };
        let Some((other, spread)) = other.and_then(|it| Some((it, row.ratio(it, self.metric)?)))
        else {
            return Ok(());
        };
        let is_latency = matches!(self.what, "mean latency" | "p99");
        let behind = row.falls_behind(Server::Ringdisk) || row.falls_behind(other);
        if is_latency && behind {
            return Ok(());
        }
        let wanted = match self.limit {
            Limit::AtLeast(limit) => format!("at least {limit}"),
            Limit::AtMost(limit) => format!("at most {limit}"),
        };
        writeln!(
            out,
            "{}{}: {} / {other}'s {}, wanted {wanted}",
            verdict(self.limit.holds(spread.median)),
            row.cell,
            self.what,
            text(Some(spread)),
        )
    }
}

/// What makes rows less than trustworthy.
fn write_notes(out: &mut String, rows: &[Row]) -> fmt::Result {
    let limits: [(f64, &str, Metric); 3] = [
        (0.95, "the client's core is full", |it| it.client_core),
        (0.10, "other work on the machine", |it| it.others_cores),
        (0.02, "time stolen", |it| it.stolen_cores),
    ];
    writeln!(out)?;
    for row in rows {
        for (limit, what, metric) in limits {
            let servers = servers_of(std::slice::from_ref(row)).into_iter();
            let medians = servers.filter_map(|it| Some((row.median(it, metric)?, it)));
            let worst = medians.max_by(|a, b| a.0.total_cmp(&b.0));
            if let Some((value, server)) = worst
                && value > limit
            {
                let percent = value * 100.0;
                writeln!(
                    out,
                    "note: {}: {what}, {percent:.0} % of one ({server})",
                    row.cell
                )?;
            }
        }
    }
    Ok(())
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let what = if self.write { "write" } else { "read" };
        match self.load {
            Load::Disks { .. } => write!(f, "{}", self.load),
            _ => write!(f, "{}, {what}, {}", self.backing, self.load),
        }
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Load::Rates { per_second, .. } => write!(f, "{per_second}/s"),
            Load::Think { pause_us } => write!(f, "think {pause_us} µs"),
            Load::Throttle { limit, depth } => write!(f, "{limit} IOPS, depth {depth}"),
            Load::Disks {
                disks,
                iothreads: 1,
                per_second,
            } => write!(f, "{disks} disks, {per_second}/s each, 1 thread"),
            Load::Disks {
                disks,
                iothreads,
                per_second,
            } => write!(f, "{disks} disks, {per_second}/s each, {iothreads} threads"),
            Load::Bursts { requests } if *requests == 1 => write!(f, "1 request"),
            Load::Bursts { requests } => write!(f, "{requests} requests"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::words::{Backing, Client};
    use lab::plan::words::Arrival;

    fn at(per_second: u32) -> Cell {
        Cell {
            backing: Backing::Disk,
            write: false,
            client: Client::Ring,
            load: Load::Rates {
                per_second,
                depth: 32,
                arrivals: Arrival::Poisson,
            },
        }
    }

    fn measured(cell: Cell, server: Server, round: usize, cpu: f64, unsent: u64) -> Measured {
        Measured {
            cell,
            server,
            round,
            sample: Sample {
                iops: 700.0,
                ios: 700,
                mean_us: 200.0,
                p50_us: 190.0,
                p99_us: 400.0,
                cpu_us_per_io: cpu,
                unsent,
                ..Sample::default()
            },
            polling: None,
        }
    }

    fn table(samples: &[Measured]) -> String {
        let mut out = String::new();
        write(&mut out, samples).unwrap();
        out
    }

    #[test]
    fn rates_are_compared_round_by_round_with_the_better_engine() {
        let mut samples = Vec::new();
        for (round, (ours, native, uring)) in [(40.0, 50.0, 60.0), (80.0, 160.0, 90.0)]
            .into_iter()
            .enumerate()
        {
            samples.push(measured(at(1000), Server::Ringdisk, round, ours, 0));
            samples.push(measured(at(1000), Server::QsdNative, round, native, 0));
            samples.push(measured(at(1000), Server::Qsd, round, uring, 0));
        }
        let text = table(&samples);
        // Medians 60, 105 and 75: io_uring, with ratios of 0.67 and 0.89.
        assert!(
            text.contains("| disk, read, 1000/s | 60.0 | 75.0 | 105 | 0.78 (0.67 to 0.89) |"),
            "{text}"
        );
        assert!(
            text.contains("reached: disk, read, 1000/s: CPU per I/O / qsd's 0.78"),
            "{text}"
        );
        assert!(text.contains("| 200, 190, 400 |"), "{text}");
    }

    #[test]
    fn a_server_that_cannot_follow_shows_what_it_does_and_is_not_judged_by_its_latency() {
        let samples = [
            measured(at(64_000), Server::Ringdisk, 0, 4.0, 100),
            measured(at(64_000), Server::Qsd, 0, 8.0, 10),
        ];
        let text = table(&samples);
        assert!(text.contains("| does 700/s | 200, 190, 400 |"), "{text}");
        assert!(text.contains("CPU per I/O / qsd's 0.50"), "{text}");
        assert!(!text.contains("mean latency /"), "{text}");
    }

    #[test]
    fn samples_of_all_parts_keep_their_facts_as_json() {
        let loads = [
            at(100).load,
            Load::Think { pause_us: 20 },
            Load::Throttle {
                limit: 500,
                depth: 32,
            },
            Load::Disks {
                disks: 64,
                iothreads: 2,
                per_second: 100,
            },
            Load::Bursts { requests: 8 },
        ];
        for load in loads {
            let cell = Cell { load, ..at(100) };
            let sample = measured(cell, Server::RingdiskNoPolling, 2, 74.0, 3);
            let text = serde_json::to_string(&sample).unwrap();
            let back: Measured = serde_json::from_str(&text).unwrap();
            assert_eq!(back.cell, cell);
            assert_eq!(serde_json::to_string(&back).unwrap(), text);
        }
    }

    #[test]
    fn rows_go_by_part_and_rate_with_the_disk_first() {
        let cell = |backing, load| Cell {
            backing,
            load,
            ..at(1)
        };
        let samples = [
            cell(Backing::Zram, at(100).load),
            cell(Backing::Disk, Load::Think { pause_us: 0 }),
            cell(Backing::Disk, at(4000).load),
            cell(Backing::Disk, at(100).load),
        ]
        .map(|cell| measured(cell, Server::Ringdisk, 0, 1.0, 0));
        let names: Vec<String> = rows(&samples)
            .iter()
            .map(|it| it.cell.to_string())
            .collect();
        assert_eq!(
            names,
            [
                "disk, read, 100/s",
                "zram, read, 100/s",
                "disk, read, 4000/s",
                "disk, read, think 0 µs"
            ]
        );
    }
}
