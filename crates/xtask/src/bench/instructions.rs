//! Instructions per I/O of a server: steadier than time, where they can be counted.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::backing::Prepared;
use super::client::Job;
use super::plan::{Backing, Server};
use super::server::{Programs, Running};

/// Instructions per I/O of one server.
#[derive(Serialize, Deserialize)]
pub struct Instructions {
    pub server: Server,
    pub backing: Backing,
    pub depth: usize,
    pub per_io: f64,
    pub counter: Counter,
}

/// What counts.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Counter {
    /// The processor, user and kernel.
    Perf,
    /// valgrind's simulation, user mode only. It slows the server so much that only the null disk makes sense.
    Callgrind,
}

impl Counter {
    /// The best one that works here.
    pub fn here() -> anyhow::Result<Counter> {
        let perf = perf("instructions").arg("true").output();
        let counted = |text: &str| text.contains(",instructions") && !text.contains("<not");
        if perf.is_ok_and(|output| counted(&String::from_utf8_lossy(&output.stderr))) {
            return Ok(Counter::Perf);
        }
        match Command::new("valgrind").arg("--version").output() {
            Ok(_) => Ok(Counter::Callgrind),
            Err(_) => bail!("perf events are not readable here, and valgrind is not installed"),
        }
    }
}

/// Counts over a short and a long run: the difference is free of what starting and connecting cost.
pub fn per_io(
    counter: Counter,
    server: Server,
    backing: &Prepared,
    programs: &Programs,
    dir: &Path,
    job: impl Fn(&Running) -> Job,
) -> anyhow::Result<f64> {
    let count = |seconds: f64| -> anyhow::Result<(f64, f64)> {
        let wrapper: &[OsString] = match counter {
            Counter::Perf => &[],
            Counter::Callgrind => &[
                "valgrind".into(),
                "--tool=callgrind".into(),
                "--callgrind-out-file=/dev/null".into(),
            ],
        };
        let running = Running::start_under(wrapper, server, backing, programs, dir)?;
        let perf = match counter {
            Counter::Perf => Some(attach(running.pid())?),
            Counter::Callgrind => None,
        };
        let job = Job {
            warmup_s: 0.0,
            runtime_s: seconds,
            ..job(&running)
        };
        let ios = running.measure(&job, programs)?.iops * seconds;
        let instructions = match perf {
            Some(perf) => detach(perf)?,
            None => collected(&running.stop()?)?,
        };
        Ok((instructions, ios))
    };
    let (short, long) = (count(1.0)?, count(4.0)?);
    Ok((long.0 - short.0) / (long.1 - short.1))
}

fn perf(events: &str) -> Command {
    let mut perf = Command::new("perf");
    perf.args(["stat", "--field-separator=,", "--event", events]);
    perf.stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    perf
}

fn attach(pid: u32) -> anyhow::Result<Child> {
    perf("instructions")
        .arg("--pid")
        .arg(pid.to_string())
        .spawn()
        .context("starting perf")
}

fn detach(perf: Child) -> anyhow::Result<f64> {
    kill_process(Pid::from_child(&perf), Signal::INT)?;
    let output = perf.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find(|line| line.contains(",instructions"));
    let count = line.and_then(|line| line.split(',').next()?.parse().ok());
    count.with_context(|| format!("perf said: {text}"))
}

/// `==PID== Collected : N`.
fn collected(log: &str) -> anyhow::Result<f64> {
    let line = log.lines().find_map(|line| line.split_once("Collected :"));
    let count = line.and_then(|(_, count)| count.trim().parse().ok());
    count.with_context(|| format!("callgrind said: {log}"))
}
