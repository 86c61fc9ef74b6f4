//! Drives a vhost-user socket without a guest, with the virtio-blk driver of the blkio crate: an independent implementation.

use std::fs::File;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};

/// blkio takes three descriptors for a request, and no indirect ones.
pub const DESCRIPTORS: usize = 3;
/// The largest queue (virtio 1.3 §2.7 allows more, but no server here has more).
pub const QUEUE_SIZE_MAX: u16 = 1024;

/// The parameters of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The number of queues.
    pub queues: u16,
    /// The size of each queue; at least [`DESCRIPTORS`] times `depth`.
    pub queue_size: u16,
    /// The maximum number of requests in flight in each queue.
    pub depth: usize,
    /// The size of each request in bytes.
    pub block: usize,
}

/// A connection and the memory of its requests. Drop it after its queues.
pub struct Device {
    _device: Blkio,
    /// The size of the disk in bytes.
    pub capacity: u64,
}

/// A queue with slots for requests, each with its own buffer.
pub struct Queue {
    queue: Blkioq,
    buffers: usize,
    block: usize,
    completions: Vec<MaybeUninit<Completion>>,
}

impl Device {
    /// Connects, and fills the buffers with repetitions of `fill`.
    ///
    /// # Errors
    /// No server listens, or it is not a virtio-blk device with these parameters.
    pub fn connect(socket: &Path, shape: Shape, fill: &[u8]) -> Result<(Device, Vec<Queue>)> {
        let mut device = Blkio::new("virtio-blk-vhost-user")?;
        let path = socket.to_str().context("the socket's path is not UTF-8")?;
        device.set_str("path", path)?;
        device
            .connect()
            .with_context(|| format!("connecting to {path}"))?;
        device.set_i32("num-queues", i32::from(shape.queues))?;
        device.set_i32("queue-size", i32::from(shape.queue_size))?;
        let queues = device
            .start()
            .with_context(|| format!("starting {path} with {} queues", shape.queues))?
            .queues;
        let capacity = device.get_u64("capacity")?;
        let align = usize::try_from(device.get_u64("mem-region-alignment")?)?.max(1);
        let each = shape.depth * shape.block;
        let region = device.alloc_mem_region((queues.len() * each).next_multiple_of(align))?;
        let memory = File::options()
            .write(true)
            .open(format!("/proc/self/fd/{}", region.fd))
            .context("opening the memory of requests")?;
        for at in (0..region.len).step_by(fill.len().max(1)) {
            let part = &fill[..fill.len().min(region.len - at)];
            memory.write_all_at(part, at as u64)?;
        }
        device.map_mem_region(&region).context("mapping memory")?;
        let queue = |(index, queue)| Queue {
            queue,
            buffers: region.addr + index * each,
            block: shape.block,
            completions: (0..shape.depth).map(|_| MaybeUninit::uninit()).collect(),
        };
        let queues = queues.into_iter().enumerate().map(queue).collect();
        Ok((
            Device {
                _device: device,
                capacity,
            },
            queues,
        ))
    }
}

impl Queue {
    /// The maximum number of requests in flight.
    pub fn slots(&self) -> usize {
        self.completions.len()
    }

    /// Prepares a request. The next [`Queue::reap`] submits it.
    pub fn prepare(&mut self, slot: usize, write: bool, offset: u64) {
        let buffer = std::ptr::with_exposed_provenance_mut(self.buffers + slot * self.block);
        let flags = ReqFlags::empty();
        if write {
            self.queue.write(offset, buffer, self.block, slot, flags)
        } else {
            self.queue.read(offset, buffer, self.block, slot, flags)
        }
    }

    /// Adds the slots of completed requests to `done`, after waiting for `at_least` of them, or until the timeout.
    ///
    /// # Errors
    /// A request failed, or fewer than `at_least` are in flight.
    pub fn reap(
        &mut self,
        at_least: usize,
        timeout: Option<Duration>,
        done: &mut Vec<usize>,
    ) -> Result<()> {
        let mut left = timeout;
        let reaped = self
            .queue
            .do_io(&mut self.completions, at_least, left.as_mut(), None);
        let count = match reaped {
            Ok(count) => count,
            Err(error)
                if timeout.is_some()
                    && matches!(error.errno(), blkio::Errno::TIME | blkio::Errno::INTR) =>
            {
                0
            }
            Err(error) => return Err(error.into()),
        };
        for completion in &self.completions[..count] {
            #[expect(
                unsafe_code,
                reason = "blkio hands completions back in uninitialised memory"
            )]
            // SAFETY: `do_io` has written the first `count` elements.
            let completion = unsafe { completion.assume_init_ref() };
            ensure!(
                completion.ret == 0,
                "a request failed: {}",
                std::io::Error::from_raw_os_error(completion.ret.saturating_neg())
            );
            done.push(completion.user_data);
        }
        Ok(())
    }
}
