//! Checks which loads are possible on a vhost-user socket without a guest.

use super::words::Client;
use super::workload::WITHOUT_FIO;
use super::{Settings, Workload};
use crate::vhost::{DESCRIPTORS, QUEUE_SIZE_MAX};

/// The queue size of the ring client, unless the plan sets another.
pub const RING_QUEUE_SIZE: u16 = 512;

/// The maximum number of bytes in flight on all volumes, which need memory.
const MEMORY_MAX: u64 = 1 << 30;

/// The number of requests in flight on a volume.
pub fn depth(settings: &Settings, load: &Workload) -> usize {
    let depth = load.iodepth as usize * load.numjobs as usize;
    match load.per_queue {
        true => depth * queues(settings),
        false => depth,
    }
}

fn queues(settings: &Settings) -> usize {
    settings.queues.unwrap_or(1).into()
}

/// Checks whether the client can make a load.
///
/// # Errors
/// The load needs fio or another client.
pub fn check(settings: &Settings, load: &Workload) -> Result<(), String> {
    let plain = Workload::default();
    let only_fio = [
        ("job", load.job.is_some()),
        ("bssplit", load.bssplit.is_some()),
        ("fsync", load.fsync != plain.fsync),
        ("engine", load.engine != plain.engine),
        ("distribution", load.distribution != plain.distribution),
    ];
    if let Some((key, _)) = only_fio.into_iter().find(|(_, set)| *set) {
        return Err(format!(
            "{key} is fio's, which needs a guest or device=host; a vhost-user socket without a guest has rw, bs, \
             iodepth, numjobs, rate, arrival, rwmixread, thinktime, burst, per-queue, once and idle"
        ));
    }
    let bytes = u64::from(depth(settings, load) as u32) * load.bs * u64::from(settings.volumes);
    if bytes > MEMORY_MAX {
        return Err(format!(
            "{bytes} bytes in flight are more than {MEMORY_MAX}; set a smaller iodepth or bs"
        ));
    }
    match settings.client {
        Client::Blkio => check_blkio(settings, load),
        Client::Ring | Client::RingPoll => check_ring(settings, load),
    }
}

/// Checks for the blkio crate's driver, which spreads requests over the queues.
fn check_blkio(settings: &Settings, load: &Workload) -> Result<(), String> {
    let of_load = WITHOUT_FIO
        .into_iter()
        .find(|key| *key != "per-queue" && load.get(key) != Workload::default().get(key));
    let of_settings = ["active", "neighbour"]
        .into_iter()
        .find(|key| settings.value(key) != Settings::default().value(key));
    if let Some(key) = of_load.or(of_settings) {
        return Err(format!("{key} needs client = \"ring\""));
    }
    let queues = queues(settings);
    let size = usize::from(settings.queue_size.unwrap_or(QUEUE_SIZE_MAX));
    let room = size / DESCRIPTORS;
    let depth = depth(settings, load).div_ceil(queues);
    if depth > room {
        return Err(format!(
            "{depth} requests under way in a queue do not fit into {size} entries: each takes {DESCRIPTORS}. Set a \
             smaller iodepth, or more queues"
        ));
    }
    Ok(())
}

/// Checks for the driver crate's driver, which sends the same number of requests to all queues.
fn check_ring(settings: &Settings, load: &Workload) -> Result<(), String> {
    if !settings.opens_disks() {
        return Err(format!(
            "client={} measures the CPU time of a server that the lab starts; for the server at {}, use client=blkio",
            settings.client, settings.server
        ));
    }
    let depth = depth(settings, load);
    let queues = queues(settings);
    let size = usize::from(settings.queue_size.unwrap_or(RING_QUEUE_SIZE));
    if let Some(cpus) = &settings.pinning.load
        && cpus.to_vec().len() > queues * usize::from(settings.volumes)
    {
        return Err(format!(
            "load-cpus={cpus}: a thread of the load drives queues of its own, and there are {}; set more queues",
            queues * usize::from(settings.volumes)
        ));
    }
    if !depth.is_multiple_of(queues) {
        return Err(format!(
            "client={} drives all queues alike; {depth} requests in flight are not a multiple of {queues} queues",
            settings.client
        ));
    }
    if depth / queues > size {
        return Err(format!(
            "{} requests in flight do not fit into a queue of {size} entries; set a larger queue-size, or a smaller iodepth",
            depth / queues
        ));
    }
    if matches!(load.get("rw").as_str(), "randrw" | "rw") {
        return Err(format!(
            "client={} reads or writes; rw={} needs client=blkio, or a guest",
            settings.client, load.rw
        ));
    }
    check_once(settings, load)?;
    let paced = load.rate.is_some() || load.search || load.thinktime_us.is_some();
    if paced && (queues > 1 || load.sequential()) {
        return Err(format!(
            "client={} sends requests at a rate or after a pause at random, to one queue of each disk",
            settings.client
        ));
    }
    if load.thinktime_us.is_some() && load.rate.is_some() {
        return Err("a load has a rate or a thinktime, not both".into());
    }
    if paced && load.idle {
        return Err("an idle load has neither a rate nor a thinktime".into());
    }
    if load.thinktime_us.is_some() && load.burst as usize > depth {
        return Err(format!(
            "a burst of {} does not fit into {depth} requests in flight; set iodepth={}",
            load.burst, load.burst
        ));
    }
    Ok(())
}

/// Checks a load that accesses each area once.
fn check_once(settings: &Settings, load: &Workload) -> Result<(), String> {
    if load.once == 0 {
        return Ok(());
    }
    if load.once < load.bs || !load.once.is_multiple_of(load.bs) {
        return Err("once is a size of bs or a multiple of it".into());
    }
    let closed = load.rate.is_none() && !load.search && load.thinktime_us.is_none();
    match closed && !load.idle && settings.volumes == 1 {
        true => Ok(()),
        false => Err("once is for a closed loop on one volume".into()),
    }
}
