//! What a test does with a disk where there is no cargo: a program of its own around the driver, which can be carried into
//! a guest, or be run as another user.
//!
//!     disk_io write|verify|load SOCKET SEED
//!
//! `write` writes blocks that follow from the seed, all over a disk of 16 MiB or more, flushes nothing, says `written`, and
//! stays connected until its standard input ends. `verify` reads them back. `load` writes and reads back, each time
//! something else, until its standard input ends.

use std::io::{self, Read};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use testkit::driver::{Device, DeviceConfig, Queue};

const BLOCKS: u64 = 16;
const BLOCK: usize = 16 << 10;
const CLUSTER: u64 = 64 << 10;
const SECTOR: u64 = 512;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("disk_io: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [what, socket, seed] = &words[..] else {
        bail!("disk_io write|verify|load SOCKET SEED");
    };
    let mut seed: u64 = seed.parse().context("the seed is a number")?;
    let mut device = Device::connect(socket, &DeviceConfig::default()).context(socket.clone())?;
    let disk = Disk {
        sectors: device.config()?.capacity,
    };
    let queue = &mut device.queues[0];
    match what.as_str() {
        "write" => {
            disk.write(queue, seed)?;
            println!("written");
            io::stdin().read_to_end(&mut Vec::new())?;
        }
        "verify" => disk.verify(queue, seed)?,
        "load" => {
            let enough = Arc::new(AtomicBool::new(false));
            let told = enough.clone();
            thread::spawn(move || {
                let _ = io::stdin().read_to_end(&mut Vec::new());
                told.store(true, Ordering::Release);
            });
            while !enough.load(Ordering::Acquire) {
                let began = Instant::now();
                disk.write(queue, seed)?;
                disk.verify(queue, seed)?;
                seed += 1;
                // Others are to have their half of the processors.
                thread::sleep(began.elapsed());
            }
        }
        other => bail!("{other} is none of write, verify and load"),
    }
    Ok(())
}

struct Disk {
    sectors: u64,
}

impl Disk {
    fn write(&self, queue: &mut Queue, seed: u64) -> Result<()> {
        for (sector, bytes) in self.blocks(seed) {
            let status = queue.write(sector, &bytes);
            ensure!(status == 0, "writing sector {sector}: status {status}");
        }
        Ok(())
    }

    fn verify(&self, queue: &mut Queue, seed: u64) -> Result<()> {
        for (sector, bytes) in self.blocks(seed) {
            let read = queue.read(sector, BLOCK);
            let read = read.map_err(|status| anyhow!("sector {sector}: status {status}"))?;
            ensure!(read == bytes, "sector {sector} holds something else");
        }
        Ok(())
    }

    /// Where they go and what is in them.
    fn blocks(&self, seed: u64) -> impl Iterator<Item = (u64, Vec<u8>)> {
        let stride = self.sectors / BLOCKS;
        // Not in the same clusters of an image.
        let first = seed % 16 * CLUSTER / SECTOR;
        (0..BLOCKS).map(move |block| {
            let sector = first + block * stride;
            // Each word is there once.
            let words =
                (0..BLOCK as u64 / 8).map(|word| (seed << 40) | (sector * SECTOR + word * 8));
            (sector, words.flat_map(u64::to_le_bytes).collect())
        })
    }
}
