//! Connected disks without I/O: what they use, and how long a server takes until it is ready.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use rustix::process::{Resource, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use testkit::driver::{Device, DeviceConfig};

use super::server::{Footprint, Running, Serving};
use crate::bench::Bench;
use crate::bench::plan::Server;
use harness::cpu::{Cores, Usage};
use lab::client::Sample;

/// How long the CPU time is watched.
const WATCHED: Duration = Duration::from_secs(5);

/// What a disk with one queue needs for its front-end, besides its memory: a connection, kick, call and err.
const FRONT_END_DESCRIPTORS: f64 = 4.0;

/// What connected disks use.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Idle {
    pub disks: usize,
    /// From the start of the process until all disks can be connected to.
    pub ready_s: f64,
    /// Of a server of one disk.
    pub one: Footprint,
    /// Of a server of all disks, before any is connected.
    pub listening: Footprint,
    /// With all of them connected.
    pub connected: Footprint,
}

impl Idle {
    /// What one more connected disk adds to a figure.
    pub fn each(&self, figure: impl Fn(&Footprint) -> f64) -> f64 {
        (figure(&self.connected) - figure(&self.one)) / (self.disks - 1) as f64
    }

    /// Memory of a disk that no other process shares.
    pub fn private_kib(&self) -> f64 {
        self.each(|it| it.private_kib)
    }

    pub fn descriptors(&self) -> f64 {
        self.each(|it| it.descriptors.values().sum::<usize>() as f64)
    }

    /// Without those that the front-end hands over. How many are of its memory is its choice.
    pub fn own_descriptors(&self) -> f64 {
        let memory = self.each(|it| it.descriptors.get("memfd").copied().unwrap_or(0) as f64);
        self.descriptors() - memory - FRONT_END_DESCRIPTORS
    }
}

/// Starts a server of one of the disks and one of all, connects, and watches.
pub fn measure(serving: &Serving, server: Server, bench: &Bench) -> anyhow::Result<(Sample, Idle)> {
    // For the clients here, and for a server that does not raise its own limit.
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit)?;
    let one = {
        let alone = Serving {
            disks: &serving.disks[..1],
        };
        let running = alone.start(server, &bench.programs, &bench.dir)?;
        let _device = connect(&running.sockets[0])?;
        running.footprint()?
    };
    let running = serving.start(server, &bench.programs, &bench.dir)?;
    let listening = running.footprint()?;
    let devices: Result<Vec<Device>, _> = running.sockets.iter().map(|it| connect(it)).collect();
    let _devices = devices?;
    let sample = watch(&running)?;
    let idle = Idle {
        disks: serving.disks.len(),
        ready_s: running.ready_s,
        one,
        listening,
        connected: running.footprint()?,
    };
    Ok((sample, idle))
}

/// A disk that has had something to do.
fn connect(socket: &Path) -> anyhow::Result<Device> {
    let config = DeviceConfig {
        slots: 1,
        buffer_len: 4096,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(socket, &config)?;
    let read = device.queues[0].read(0, 4096);
    read.map_err(|status| anyhow!("a read failed with status {status}"))?;
    Ok(device)
}

fn watch(running: &Running) -> anyhow::Result<Sample> {
    std::thread::sleep(Duration::from_secs(1));
    let (begun, before, cores) = (Instant::now(), Usage::of(running.pid())?, Cores::read()?);
    std::thread::sleep(WATCHED);
    let used = Usage::of(running.pid())?.since(&before);
    let seconds = begun.elapsed().as_secs_f64();
    let cores = Cores::read()?.since(&cores);
    Ok(Sample {
        server_core: used.ran_s() / seconds,
        others_cores: (cores.tasks_s() - used.ran_s()).max(0.0) / seconds,
        stolen_cores: cores.stolen_s() / seconds,
        ..Sample::default()
    })
}
