//! Upgrades during a live migration: dirty logging continues.

use std::os::fd::{AsFd, OwnedFd};

use testkit::driver::Op;
use testkit::frontend::{F_LOG_ALL, eventfd, eventfd_wait};
use testkit::memory::Memory;

use super::*;

/// A migrating guest: the device marks the memory it writes as dirty.
struct MigratingGuest {
    device: Device,
    log: Memory,
    event: OwnedFd,
}

impl MigratingGuest {
    fn start(disk: &Disk, packed: bool) -> Self {
        let config = DeviceConfig { packed, ..config() };
        let mut device = Device::connect(&disk.socket, &config).unwrap();
        let end = device.memory.regions()[Device::HIGH].end();
        // One bit per page.
        let log = Memory::new(&[(0, end.div_ceil(8 * 4096).next_multiple_of(4096))]).unwrap();
        let event = eventfd().unwrap();
        let frontend = &mut device.frontend;
        frontend.set_log(&log.regions()[0], event.as_fd()).unwrap();
        let features = device.features | F_LOG_ALL;
        device.frontend.set_features(features).unwrap();
        Self { device, log, event }
    }

    fn is_marked(&self, guest: u64) -> bool {
        let page = guest / 4096;
        self.log.read(page / 8, 1)[0] >> (page % 8) & 1 != 0
    }

    fn clear(&self) {
        let bytes = self.log.regions()[0].size as usize;
        self.log.write(0, &vec![0; bytes]);
    }

    /// Lets the device write to memory, and checks all its marks.
    fn round(&mut self) {
        self.clear();
        for queue in &mut self.device.queues {
            let slots: Vec<_> = (0..queue.slots()).collect();
            for &slot in &slots {
                queue.prepare(slot, Op::Read, u64::from(slot) * 16, 8192);
            }
            queue.submit(&slots);
        }
        for queue in &mut self.device.queues {
            let done = queue.finish(usize::from(queue.slots()));
            assert!(done.iter().all(|(_, status)| *status == 0), "{done:?}");
        }
        for queue in &self.device.queues {
            for slot in 0..queue.slots() {
                let at = queue.buffer(slot);
                let marked = [at, at + 4096].map(|at| self.is_marked(at));
                assert_eq!(marked, [true; 2], "queue {}, slot {slot}", queue.index);
            }
            // The ring is marked after the guest has seen its content.
            let ring = queue.ring.guest_addresses();
            let written = if queue.ring.is_packed() {
                ring.desc
            } else {
                ring.used
            };
            let start = Instant::now();
            while !self.is_marked(written) {
                assert!(start.elapsed() < HANG, "ring {} is not marked", queue.index);
                thread::sleep(Duration::from_micros(100));
            }
        }
        assert!(eventfd_wait(&self.event, Some(HANG)).unwrap());
    }
}

/// In the middle of a live migration, dirty logging continues, and so does the migration.
#[test]
fn migrating_guest_continues() {
    let disks = [Disk::new(), Disk::new()];
    let options = "queues=2,queue-size=64";
    let mut served = Served::start(&disks.each_ref().map(|disk| disk.argument(options)));
    let mut guests = [
        MigratingGuest::start(&disks[0], false),
        MigratingGuest::start(&disks[1], true),
    ];
    let taking = served.script(
        "taking",
        &format!(
            "{}; {RECEIVE_MESSAGE}; {}; {RECEIVE_MESSAGE}; kill -9 $$",
            send_message(r#"{"protocol":2,"version":"x"}"#),
            send_message(r#""Prepared""#)
        ),
    );
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _stop = Stop(&done);
            for _ in 0..2 {
                served.assert_upgrade_fails(&taking, "while it took over");
                served.upgrade(&[]);
            }
        });
        while !done.load(Ordering::Relaxed) {
            guests.iter_mut().for_each(MigratingGuest::round);
        }
    });
    for guest in &mut guests {
        guest.round();
        // After the migration or its failure, nothing is marked.
        let features = guest.device.features;
        guest.device.frontend.set_features(features).unwrap();
        guest.clear();
        assert!(guest.device.queues[1].read(0, 4096).is_ok());
        let bytes = guest.log.regions()[0].size as usize;
        assert!(guest.log.read(0, bytes).iter().all(|byte| *byte == 0));
    }
    served.end();
}
