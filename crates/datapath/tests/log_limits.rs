//! Limits of log lines: what a guest does cannot hide what its storage does.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{FACTS, Served};
use block::{Aio, Backing};
use datapath::{Disk, IoThread, Options, Polling};
use image::Image;
use testkit::driver::{Device, DeviceConfig, Op};
use testkit::faulty::{Faults, Faulty, MemoryDisk};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const DISK_BYTES: u64 = 1 << 20;
const LEN: u32 = 512;
const IO_ERROR: u8 = 1;
const EIO: i32 = 5;

/// Collects the lines of the whole program that are about one disk.
struct Lines(&'static str, Arc<Mutex<Vec<String>>>);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        if line.0.contains(self.0) {
            self.1.lock().unwrap().push(line.0);
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

/// A guest sends a refused request right before its storage fails: the log has a line for each.
#[test]
fn refused_requests_do_not_hide_storage_errors() {
    let lines: Arc<Mutex<Vec<String>>> = Arc::default();
    tracing::subscriber::set_global_default(Lines("disk limited:", lines.clone())).unwrap();
    let storage = MemoryDisk::new(DISK_BYTES as usize);
    let its_storage = storage.clone();
    let faults = Faults::NONE;
    let make = move || Faulty::new(its_storage, faults, 1);
    let thread = IoThread::spawn("io-0".into(), Polling::up_to(Duration::ZERO), make).unwrap();
    let file = Arc::new(tempfile::tempfile().unwrap().into());
    let disk = Disk::new(
        "limited".into(),
        Image::raw(),
        Some((file, Backing::File, Aio::Auto)),
        FACTS,
        DISK_BYTES,
        "",
        Options::default(),
    );
    let served = Served::new(Arc::new(disk), Arc::new(vec![thread]), 1, 256);
    let mut device = Device::connect(served.socket(), &DeviceConfig::default()).unwrap();
    let queue = &mut device.queues[0];

    let beyond_the_end = DISK_BYTES / u64::from(LEN);
    assert_eq!(queue.run(Op::Read, beyond_the_end, LEN), IO_ERROR);
    storage.lock().unwrap().outage = Some(EIO);
    assert_eq!(queue.run(Op::Read, 8, LEN), IO_ERROR);

    let lines = lines.lock().unwrap();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].contains("refused request"), "{lines:?}");
    assert!(lines[1].contains("Input/output error"), "{lines:?}");
}
