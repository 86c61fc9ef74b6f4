//! `ringdisk stats`: what the disks do, over a second.

use std::thread;
use std::time::Duration;

use datapath::Histogram;
use serde_json::Value;

use super::rates::{Rates, Sample};
use super::{CommandLineError, CommandResult, Connection, answer, row, table};

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk stats
  ringdisk stats vm2 --seconds 10 --json | jq '.[].read.iops'

ERRORS  requests that failed with an error for the VM
STALLED requests that storage failed to serve, and that wait until it works again
DEPTH   mean number of requests in flight
P99     time that 99 % of the requests do not exceed, from the VM's ring to the VM's ring
CPU/IO  CPU time of the I/O threads for each request; disks that share a thread share its time by their requests
WAIT, IMAGE, ENGINE, BACK
        where the time goes, in percent: waiting for a limit or a turn; reading tables or clusters of the image that
        are not in memory; in the engine and the storage below; on the way back to the VM

Below the table: the time that all I/O threads together polled, if they did (--poll-max-us, --poll-cpu).
Latencies are measured during this command and for two minutes afterwards; always with 'ringdisk serve --metrics'.
With --json, 'total' contains all counters and histograms since the disk was first served.")]
pub struct StatsArgs {
    /// Names of disks; default: all
    names: Vec<String>,
    /// Length of the measurement in seconds
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    #[command(flatten)]
    connection: Connection,
}

/// Checks that a disk is not one that is to be served and cannot be.
pub(super) fn check_present(answer: &Value, name: &str) -> CommandResult {
    let mut disks = answer["disks"].as_array().into_iter().flatten();
    let absent = disks.find(|disk| disk["name"] == *name && disk["storage"] == "absent");
    match absent.map(|disk| disk["problem"].as_str().unwrap_or_default()) {
        Some(problem) => Err(CommandLineError::Absent(name.into(), problem.into())),
        None => Ok(()),
    }
}

pub fn stats(args: &StatsArgs) -> CommandResult {
    let mut client = args.connection.open()?;
    let first = answer(&mut client)?;
    for name in &args.names {
        let disks = first["disks"].as_array().into_iter().flatten();
        if !disks.clone().any(|disk| disk["name"] == **name) {
            let names = disks.filter_map(|disk| disk["name"].as_str());
            let names: Vec<_> = names.collect();
            let there = if names.is_empty() {
                "none".into()
            } else {
                names.join(", ")
            };
            return Err(CommandLineError::NoDisk(name.clone(), there));
        }
        check_present(&first, name)?;
    }
    let first = Sample::new(&first);
    thread::sleep(Duration::from_secs(args.seconds));
    let second = Sample::new(&answer(&mut client)?);
    let mut rates = second.since(&first);
    rates.retain(|disk| args.names.is_empty() || args.names.contains(&disk.name));
    let json: Value = rates.iter().map(Rates::to_json).collect();
    let mut rows = vec![row(HEADINGS)];
    rows.extend(rates.iter().map(cells));
    let mut text = if rates.is_empty() {
        "no disk is served; 'ringdisk attach FILE' serves one".into()
    } else {
        table(&rows)
    };
    if let Some(polling) = second.polling_since(&first) {
        text = format!("{}\n\n{polling}", text.trim_end());
    }
    args.connection.say(&json, &text);
    Ok(())
}

/// Over the columns of [`cells`].
pub const HEADINGS: [&str; 16] = [
    "NAME", "READ/S", "WRITE/S", "READ", "WRITE", "ERRORS", "STALLED", "DEPTH", "P50", "P99",
    "P99.9", "CPU/IO", "WAIT", "IMAGE", "ENGINE", "BACK",
];

/// A line of the table.
pub fn cells(disk: &Rates) -> Vec<String> {
    let done = &disk.done;
    let rate = |n: u64| count(disk.per_second(n));
    let bandwidth = |n: u64| format!("{}B/s", scaled(disk.per_second(n)));
    let percentile = |p| time_of(&disk.latency.total, p);
    let parts = match disk.parts() {
        Some(parts) => parts.map(|part| format!("{part:.0}%")),
        None => [const { String::new() }; 4].map(|_| "-".into()),
    };
    let mut cells = vec![
        disk.name.clone(),
        rate(done.read.operations),
        rate(done.write.operations),
        bandwidth(done.read.bytes),
        bandwidth(done.write.bytes),
        count(done.kinds().iter().map(|(_, r)| r.errors).sum::<u64>() as f64),
        count(done.stalled as f64),
        format!("{:.1}", disk.depth),
        percentile(50.0),
        percentile(99.0),
        percentile(99.9),
        disk.cpu_ns.map_or("-".into(), time),
    ];
    cells.extend(parts);
    cells
}

fn time_of(histogram: &Histogram, percent: f64) -> String {
    let ns = histogram.percentile_ns(percent);
    ns.map_or("-".into(), |ns| time(ns as f64))
}

/// Nanoseconds, in three digits or so.
pub fn time(ns: f64) -> String {
    match ns {
        ns if ns < 9_950.0 => format!("{:.1}us", ns / 1e3),
        ns if ns < 999_500.0 => format!("{:.0}us", ns / 1e3),
        ns if ns < 9_950_000.0 => format!("{:.1}ms", ns / 1e6),
        ns if ns < 999_500_000.0 => format!("{:.0}ms", ns / 1e6),
        ns => format!("{:.1}s", ns / 1e9),
    }
}

/// A number, in four digits or so.
pub fn count(n: f64) -> String {
    match n {
        n if n < 9_999.5 => format!("{n:.0}"),
        n => scaled(n),
    }
}

/// With a decimal prefix, as disks and networks have it.
fn scaled(n: f64) -> String {
    let (n, prefix) = match n {
        n if n < 999.5 => return format!("{n:.0}"),
        n if n < 999_500.0 => (n / 1e3, "k"),
        n if n < 999_500_000.0 => (n / 1e6, "M"),
        n => (n / 1e9, "G"),
    };
    if n < 9.95 {
        format!("{n:.1}{prefix}")
    } else {
        format!("{n:.0}{prefix}")
    }
}

#[cfg(test)]
mod tests {
    use super::super::rates::tests::answer;
    use super::*;

    #[test]
    fn one_line_shows_all_columns() {
        let rates = Sample::new(&answer(2)).since(&Sample::new(&answer(1)));
        let lines: Vec<_> = rates.iter().map(cells).collect();
        let expected = [
            "a", "6000", "2000", "25MB/s", "16MB/s", "0", "0", "1.2", "201us", "201us", "201us",
            "15us", "25%", "10%", "60%", "5%",
        ];
        assert_eq!(lines[0], expected);
        assert_eq!(lines[0].len(), HEADINGS.len());
        let idle = Sample::new(&answer(2));
        let mut later = answer(2);
        for disk in [0, 1] {
            later["disks"][disk]["stats"]["at-ns"] = 9_000_000_000u64.into();
        }
        let rates = Sample::new(&later).since(&idle);
        assert_eq!(
            cells(&rates[0])[1..],
            [
                "0", "0", "0B/s", "0B/s", "0", "0", "4.0", "-", "-", "-", "-", "-", "-", "-", "-"
            ]
        );
    }

    #[test]
    fn numbers_are_short() {
        let times = [940.0, 12_345.0, 999_499.0, 1_234_567.0, 45e6, 2.5e9].map(time);
        assert_eq!(times, ["0.9us", "12us", "999us", "1.2ms", "45ms", "2.5s"]);
        let counts = [0.4, 9_999.0, 12_345.0, 1_234_567.0].map(count);
        assert_eq!(counts, ["0", "9999", "12k", "1.2M"]);
    }
}
