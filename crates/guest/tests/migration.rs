//! The end of a move to another machine, when the guest's storage does not answer.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use guest::blk::{CONFIG_BYTES, F_FLUSH};
use guest::{
    Device, FrontendChannel, NewQueue, RingBase, RingError, SavedSession, SessionEnd, StoppedRing,
};
use testkit::frontend::message::{GET_VRING_BASE, SET_STATUS};
use testkit::frontend::{F_LOG_ALL, Frontend, NEED_REPLY, VERSION, eventfd, protocol};

/// A disk whose storage does not answer at first.
#[derive(Default)]
struct Hung {
    answered: AtomicBool,
    asked: AtomicBool,
    left: AtomicBool,
}

impl Device for &Hung {
    fn features(&self) -> u64 {
        F_FLUSH
    }
    fn queues(&self) -> u16 {
        1
    }
    fn seg_max(&self) -> u16 {
        1
    }
    fn capacity_read(&self, _: u64) {}
    fn untracked(&self, _: u16, _: u16) {}
    fn config(&self) -> [u8; CONFIG_BYTES] {
        [0; CONFIG_BYTES]
    }
    fn set_write_cache(&mut self, _: bool) {}
    fn set_features(&mut self, _: u64) {}
    fn set_frontend(&mut self, _: Option<FrontendChannel>) {}
    fn ring_failed(&self, _: u16, _: &RingError) {}
    fn start(&mut self, _: u16, _: NewQueue, _: guest::Driver) -> io::Result<()> {
        panic!("nothing is to be served")
    }
    fn begin_stop(&mut self, _: u16) {
        panic!("nothing is served")
    }
    fn finish_stop(&mut self, _: u16) -> StoppedRing {
        panic!("nothing is served")
    }
    fn quiesce(&mut self, why: guest::Pause) -> io::Result<()> {
        let migrating = why == guest::Pause::Moving;
        assert!(!migrating || self.storage_answered(), "left too early");
        self.left.fetch_or(migrating, Ordering::SeqCst);
        Ok(())
    }
    fn storage_answered(&self) -> bool {
        self.asked.store(true, Ordering::SeqCst);
        self.answered.load(Ordering::SeqCst)
    }
    fn set_event_fds(&mut self, _: u16, _: Option<Arc<OwnedFd>>, _: Option<Arc<OwnedFd>>) {}
}

/// Serves until it is stopped, and then goes on as after an upgrade that came to nothing.
fn serve_twice(socket: &UnixStream, hung: &Hung, stop: &OwnedFd, go_on: impl FnOnce()) {
    let (mut first, mut second) = (hung, hung);
    let (end, saved) = guest::serve_from(socket, &mut first, stop.as_fd(), None);
    assert!(matches!(end, SessionEnd::Stopped), "{end:?}");
    assert!(saved.as_ref().is_some_and(SavedSession::is_unfinished));
    assert!(!hung.left.load(Ordering::SeqCst));
    rustix::io::read(stop, &mut [0; 8]).unwrap();
    go_on();
    let (end, _) = guest::serve_from(socket, &mut second, stop.as_fd(), saved);
    assert!(matches!(end, SessionEnd::Disconnected), "{end:?}");
    assert!(hung.left.load(Ordering::SeqCst));
}

/// The front-end gets its answer once storage has answered, and the disk is not left before; also if the process was to
/// be replaced meanwhile. QEMU 7.2 resets the status first, later ones ask where the ring is.
#[test]
fn migration_waits_for_storage() {
    for status_first in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut frontend = Frontend::connect(&path).unwrap();
        let (socket, _) = listener.accept().unwrap();
        let (hung, stop) = (Arc::new(Hung::default()), eventfd().unwrap());
        let (its_hung, its_stop) = (hung.clone(), stop.try_clone().unwrap());
        let served = thread::spawn(move || {
            let answers = || its_hung.answered.store(true, Ordering::SeqCst);
            serve_twice(&socket, &its_hung, &its_stop, answers);
        });
        let offered = frontend.features().unwrap();
        let accepted = protocol::ALL & frontend.protocol_features().unwrap();
        frontend.set_protocol_features(accepted).unwrap();
        frontend.set_features(offered | F_LOG_ALL).unwrap();
        let (request, flags, payload) = if status_first {
            (SET_STATUS, VERSION | NEED_REPLY, [0; 8])
        } else {
            (GET_VRING_BASE, VERSION, [0; 8])
        };
        frontend.send_raw(request, flags, 8, &payload, &[]).unwrap();
        while !hung.asked.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
        assert_eq!(frontend.any_reply().unwrap(), [0; 8]);
        assert_eq!(frontend.vring_base(0).unwrap(), RingBase::first(false).0);
        drop(frontend);
        served.join().unwrap();
    }
}
