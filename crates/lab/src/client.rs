//! The client of a measurement without a guest: it sends requests to the vhost-user sockets of one server. It is a separate
//! process, so that its CPU time and memory are separate too.

mod closed;
mod drivers;
pub mod footprint;
mod job;
pub mod pace;
mod paced;
mod window;

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::plan::words::Client;
use drivers::{BlkioDriver, RingDriver};

pub use crate::plan::sockets::RING_QUEUE_SIZE;
pub use job::{Access, Job, Sample, noise};

/// Runs a [`Job`] in JSON and prints its [`Sample`] as one line of JSON.
///
/// # Errors
/// The job is invalid, a connection fails, or a request fails.
pub fn run(job: &str) -> Result<()> {
    let job: Job = serde_json::from_str(job).context("parsing the client's job")?;
    watchdog(&job);
    wait_for(&job.sockets)?;
    let sample = match (job.client, job.pace) {
        (Client::Blkio, None) => {
            let (drivers, _devices) = BlkioDriver::connect(&job)?;
            window::measure(&job, drivers, closed::drive)?
        }
        (Client::Ring | Client::RingPoll, None) => {
            let (drivers, _devices) = RingDriver::connect(&job)?;
            window::measure(&job, drivers, closed::drive)?
        }
        (_, Some(pace)) => paced::run(&job, pace)?,
    };
    println!("{}", serde_json::to_string(&sample)?);
    Ok(())
}

/// The longest that it may take to connect to a disk: on a busy host, 32 disks of 4 queues take some seconds.
const CONNECT_MAX: Duration = Duration::from_millis(500);

/// How long a job may take beyond its times.
pub fn grace(job: &Job) -> Duration {
    Duration::from_secs(20) + CONNECT_MAX * job.sockets.len() as u32
}

/// Ends the process after a time limit: if a server lost a request, a sleeping client would never wake.
fn watchdog(job: &Job) {
    let times_s = job.warmup_s + job.runtime_s + job.cooldown_s + job.idle_s.unwrap_or(0.0);
    let limit = Duration::from_secs_f64(times_s) + grace(job);
    thread::spawn(move || {
        thread::sleep(limit);
        eprintln!(
            "client: not finished after {limit:?}; the server has stopped completing requests"
        );
        std::process::exit(3);
    });
}

/// Connects to a socket. A server creates its sockets before it listens on them, so this tries again.
fn wait_for(sockets: &[PathBuf]) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(5);
    for path in sockets {
        while !path.exists() {
            if Instant::now() > deadline {
                bail!("no socket at {} after 5 s", path.display());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
    thread::sleep(Duration::from_millis(20));
    Ok(())
}
