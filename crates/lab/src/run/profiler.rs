//! Profiles a load while it runs: see [`crate::profile`].

use std::path::PathBuf;

use crate::plan::words::{Client, Device};
use crate::plan::{Server, Settings};
use crate::profile::Profile;
use crate::profile::measurement::{GuestView, Limit};
use crate::profile::procfs::device_of;
use crate::profile::roles::Program;
use crate::profile::sampler::{Process, Sampler, Targets};
use crate::storage::Served;
use crate::window::Window;

/// Samples the threads of a configuration from before a load begins until [`finish`](Profiler::finish).
pub struct Profiler {
    sampler: Sampler,
    devices: Vec<String>,
    /// The number of disks that the load uses.
    disks: u32,
    /// The limit of each disk.
    iops: Option<u32>,
}

impl Profiler {
    /// Starts to sample. `pids` are QEMU's and the server's; `client` is the process that makes the load, if there is one
    /// already; `paths` are the disks' files.
    pub fn start(
        settings: &Settings,
        served: Option<&Served>,
        pids: &[u32],
        client: Option<u32>,
        paths: &[PathBuf],
    ) -> Profiler {
        let mut processes: Vec<Process> = pids.iter().map(|pid| Process::new(*pid)).collect();
        let is_ringdisk = matches!(settings.server, Server::Ringdisk | Server::Build(_));
        let mut control = None;
        if let Some(served) = served
            && is_ringdisk
        {
            let server = processes
                .iter_mut()
                .filter(|its| Some(its.pid) == served.pid());
            // The name of another build may be anything.
            server.for_each(|its| its.program = Program::Ringdisk);
            control = served.control();
        }
        // A client that polls is always busy, which means nothing.
        let program = match settings.client {
            Client::RingPoll => Program::Other,
            _ => Program::Client,
        };
        processes.extend(client.map(|pid| Process {
            program,
            ..Process::new(pid)
        }));
        let mut devices: Vec<_> = paths.iter().filter_map(|path| device_of(path)).collect();
        devices.sort();
        devices.dedup();
        let disks =
            u32::from(settings.active.unwrap_or(settings.volumes)) * u32::from(settings.guests);
        let measured = match settings.neighbour {
            Some(_) => (0..settings.volumes)
                .map(|index| format!("lab{index}"))
                .collect(),
            None => Vec::new(),
        };
        Profiler {
            devices: devices.iter().map(|(_, name)| name.clone()).collect(),
            sampler: Sampler::start(Targets {
                processes,
                children: (settings.device == Device::Host).then(|| "fio".to_owned()),
                control,
                disks: measured,
                devices,
            }),
            disks,
            iops: settings.iops,
        }
    }

    /// The profile of the window in which the load was measured; `None` if it is too short.
    pub fn finish(self, window: Window, iops: f64, mean_ns: f64) -> Option<Box<Profile>> {
        let readings = self.sampler.finish();
        let interval = readings.between(window.start_ms, window.end_ms, &self.devices)?;
        let mut measurement = interval.measurement;
        measurement.guest = Some(GuestView {
            per_s: iops,
            mean_ns,
            disks: self.disks,
        });
        if let (None, Some(limit)) = (&measurement.limit, self.iops) {
            measurement.limit = Some(Limit {
                text: format!("iops={limit}"),
                used: Some(iops / f64::from(limit) / f64::from(self.disks.max(1))),
            });
        }
        Some(Box::new(Profile::of(measurement)))
    }
}
