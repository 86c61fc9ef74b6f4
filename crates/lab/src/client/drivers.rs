//! The drivers of a client.

use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use driver::{Device, DeviceConfig, Op, Queue};

use super::job::{Access, Job, noise};
use crate::vhost;

/// A virtio-blk driver with a fixed set of request slots, each with its own buffer.
pub trait Driver: Send {
    fn capacity(&self) -> u64;
    /// The numbers of its slots.
    fn slots(&self) -> Vec<usize>;
    fn prepare(&mut self, slot: usize, write: bool, offset: u64, len: usize) -> Result<()>;
    /// Publishes all prepared requests, and kicks the device if it needs that.
    fn submit(&mut self) -> Result<()>;
    /// Appends the completed slots. A sleeping client blocks until there is one; a polling client may append none.
    fn reap(&mut self, done: &mut Vec<usize>) -> Result<()>;
    /// Appends the completed slots, after waiting for one or until a time. At least one request must be in flight.
    fn reap_until(&mut self, until: Instant, done: &mut Vec<usize>) -> Result<()>;
}

/// The driver crate's rings, with minimal cost: chains are built once, and then only sectors change.
pub struct RingDriver {
    lanes: Vec<Lane>,
    /// The number of a slot has its lane in the upper bits, from this one on
    lane_shift: u32,
    capacity: u64,
    sleeps: bool,
}

/// A queue of a driver.
struct Lane {
    queue: Queue,
    built: Vec<bool>,
    prepared: Vec<u16>,
}

impl RingDriver {
    /// Returns the devices together with the drivers, because dropping a device would end its connection.
    pub fn connect(job: &Job) -> Result<(Vec<RingDriver>, Vec<Device>)> {
        let Access { depth, block, .. } = job.access;
        let config = DeviceConfig {
            queues: job.queues,
            queue_size: job.queue_size,
            slots: depth as u16,
            buffer_len: block as u32,
            packed: job.packed,
            ..DeviceConfig::default()
        };
        let driver = || RingDriver {
            lanes: Vec::new(),
            lane_shift: depth.next_power_of_two().trailing_zeros(),
            capacity: 0,
            sleeps: job.client.sleeps(),
        };
        let mut drivers: Vec<_> = (0..job.cpus.len().max(1)).map(|_| driver()).collect();
        let mut devices = Vec::new();
        let data = noise(depth * block, job.seed);
        for (disk, socket) in job.sockets.iter().enumerate() {
            let mut device = Device::connect(socket, &config).context("connecting")?;
            if job.packed && !device.queues.iter().all(|queue| queue.ring.is_packed()) {
                bail!("the server does not offer packed rings");
            }
            let capacity = device.config()?.capacity * 512;
            for (number, mut queue) in device.queues.drain(..).enumerate() {
                if disk >= job.driven {
                    // One read, so that the disk is in use.
                    let read = queue.read(0, 512);
                    read.map_err(|status| anyhow!("a read failed with status {status}"))?;
                    continue;
                }
                for (slot, buffer) in data.chunks(block).enumerate() {
                    queue.write_buffer(slot as u16, buffer);
                }
                let threads = drivers.len();
                let number = disk * usize::from(job.queues) + number;
                let driver = &mut drivers[number % threads];
                driver.capacity = capacity;
                driver.lanes.push(Lane {
                    queue,
                    built: vec![false; depth],
                    prepared: Vec::with_capacity(depth),
                });
            }
            devices.push(device);
        }
        if drivers.iter().any(|driver| driver.lanes.is_empty()) {
            bail!("a client thread has no queue to drive");
        }
        Ok((drivers, devices))
    }
}

impl Driver for RingDriver {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn slots(&self) -> Vec<usize> {
        let lanes = self.lanes.iter().enumerate();
        lanes
            .flat_map(|(i, lane)| {
                (0..lane.built.len()).map(move |slot| i << self.lane_shift | slot)
            })
            .collect()
    }

    #[inline]
    fn prepare(&mut self, slot: usize, write: bool, offset: u64, len: usize) -> Result<()> {
        let sector = offset / 512;
        let lane = &mut self.lanes[slot >> self.lane_shift];
        let slot = slot & ((1 << self.lane_shift) - 1);
        if lane.built[slot] {
            lane.queue.set_sector(slot as u16, sector);
        } else {
            let op = if write { Op::Write } else { Op::Read };
            lane.queue.prepare(slot as u16, op, sector, len as u32);
            lane.built[slot] = true;
        }
        lane.prepared.push(slot as u16);
        Ok(())
    }

    #[inline]
    fn submit(&mut self) -> Result<()> {
        for lane in &mut self.lanes {
            if !lane.prepared.is_empty() {
                lane.queue.submit(&lane.prepared);
                lane.prepared.clear();
            }
        }
        Ok(())
    }

    #[inline]
    fn reap(&mut self, done: &mut Vec<usize>) -> Result<()> {
        loop {
            let mut failed = 0;
            for (i, lane) in self.lanes.iter_mut().enumerate() {
                let first = i << self.lane_shift;
                lane.queue.poll(|slot, status| {
                    failed |= status;
                    done.push(first | slot as usize);
                });
            }
            if failed != 0 {
                bail!("a request failed with status {failed}");
            }
            if !self.sleeps || !done.is_empty() {
                return Ok(());
            }
            match &mut self.lanes[..] {
                [only] => only.queue.wait(),
                lanes => Queue::wait_any(lanes.iter_mut().map(|lane| &mut lane.queue)),
            }
        }
    }

    fn reap_until(&mut self, until: Instant, done: &mut Vec<usize>) -> Result<()> {
        let [lane] = &mut self.lanes[..] else {
            bail!("a client with a schedule drives one queue per thread");
        };
        if !lane.queue.wait_until(until) {
            return Ok(());
        }
        self.reap(done)
    }
}

/// The virtio-blk driver of the blkio crate: an independent implementation.
pub struct BlkioDriver {
    queue: vhost::Queue,
    capacity: u64,
}

impl BlkioDriver {
    /// Returns a driver for each queue, because a driver sleeps on one queue.
    pub fn connect(job: &Job) -> Result<(Vec<BlkioDriver>, vhost::Device)> {
        let [socket] = &job.sockets[..] else {
            bail!("this client drives one disk");
        };
        let Access { depth, block, .. } = job.access;
        let shape = vhost::Shape {
            queues: job.queues,
            queue_size: job.queue_size,
            depth,
            block,
        };
        let fill = noise(usize::from(job.queues) * depth * block, job.seed);
        let (device, queues) = vhost::Device::connect(socket, shape, &fill)?;
        let capacity = device.capacity;
        let driver = |queue| BlkioDriver { queue, capacity };
        Ok((queues.into_iter().map(driver).collect(), device))
    }
}

impl Driver for BlkioDriver {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn slots(&self) -> Vec<usize> {
        (0..self.queue.slots()).collect()
    }

    fn prepare(&mut self, slot: usize, write: bool, offset: u64, _: usize) -> Result<()> {
        self.queue.prepare(slot, write, offset);
        Ok(())
    }

    /// [`vhost::Queue::reap`] kicks before it waits.
    fn submit(&mut self) -> Result<()> {
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<usize>) -> Result<()> {
        self.queue.reap(1, None, done)
    }

    fn reap_until(&mut self, until: Instant, done: &mut Vec<usize>) -> Result<()> {
        let left = until.saturating_duration_since(Instant::now());
        self.queue.reap(1, Some(left), done)
    }
}
