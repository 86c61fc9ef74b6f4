//! A VM is paused and resumed while its requests wait for storage: each is completed once, as without the pause.

use rustix::process::{Pid, Signal, kill_process};
use testkit::driver::RegionEntries;

use super::hung::upgrade;
use super::*;

/// With the messages of QEMU 7.2 and of later versions, with both kinds of rings, and with a region that is too small.
#[test]
fn writes_wait_for_space_across_a_pause() {
    for reset_first in [false, true] {
        for (packed, region) in [
            (false, None),
            (true, None),
            (false, Some(RegionEntries::Made(64))),
        ] {
            let Some(setup) = Setup::new("raw", 31) else {
                return;
            };
            let _server = setup.serve("cache=none", &[]);
            let config = DeviceConfig {
                packed,
                region,
                ..config()
            };
            let mut device = Device::connect(setup.socket(), &config).unwrap();
            for round in 0..3 {
                setup.storage.change(|s| s.full = true);
                submit(&mut device, Op::Write);
                wait_until("writes wait", || {
                    stats(&setup.control())["storage"] == "fails"
                });
                // A second pause before there is space, with other messages in between.
                let bases = device.pause(reset_first).unwrap();
                device.go_on(&bases).unwrap();
                let bases = device.pause(reset_first).unwrap();
                assert_eq!(device.frontend.vring_base(0).unwrap(), bases[0]);
                setup.storage.change(|s| s.full = false);
                device.go_on(&bases).unwrap();
                let done = finish(&mut device);
                let context = format!("{packed} {region:?}, reset first: {reset_first}, {round}");
                assert_eq!(done, vec![OK; usize::from(DEPTH)], "{context}");
                for sector in (0..u64::from(DEPTH)).map(|slot| slot * 1024) {
                    let read = device.queues[0].read(sector, LEN as usize).unwrap();
                    assert_eq!(read, content(sector, LEN as usize), "{context}");
                }
            }
        }
    }
}

/// Waiting requests are dropped when the guest resets its device: QEMU reports the reset, and the region may stay the
/// same.
#[test]
fn device_reset_drops_waiting_requests() {
    for packed in [false, true] {
        let Some(setup) = Setup::new("raw", 32) else {
            return;
        };
        let server = setup.serve("cache=none", &[]);
        let config = DeviceConfig { packed, ..config() };
        let mut device = Device::connect(setup.socket(), &config).unwrap();
        setup.storage.change(|s| s.full = true);
        submit(&mut device, Op::Write);
        wait_until("writes wait", || {
            stats(&setup.control())["storage"] == "fails"
        });
        device.pause(false).unwrap();
        device.frontend.reset_device().unwrap();
        setup.storage.change(|s| s.full = false);
        device.frontend.set_features(device.features).unwrap();
        let region = device.inflight.as_ref().unwrap();
        device.frontend.set_inflight(region).unwrap();
        let base = device.queues[0].ring.first_base();
        device.start_queue(0, base).unwrap();
        let read = device.queues[0].read(1024, LEN as usize).unwrap();
        assert_eq!(read, vec![0; LEN as usize]);
        let log = server.log();
        assert!(!log.contains("requests in flight had"), "{log}");
    }
}

/// A write finds no space while an upgrade waits for it, and its front-end keeps no record of requests in flight: the
/// upgrade is refused, the guest is told of no error, and the write is done when there is space.
#[test]
fn write_that_finds_no_space_during_an_upgrade_is_not_reported() {
    for format in ["raw", "qcow2"] {
        let Some(setup) = Setup::new(format, 33) else {
            return;
        };
        let mut server = setup.serve("cache=none,werror=enospc", &[]);
        let config = DeviceConfig {
            inflight: false,
            ..config()
        };
        let mut device = Device::connect(setup.socket(), &config).unwrap();
        submit(&mut device, Op::Write);
        assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
        setup.storage.change(|s| s.hangs = true);
        submit(&mut device, Op::Write);
        wait_until("writes wait", || setup.storage.control().held > 0);
        let (pid, text) = std::thread::scope(|scope| {
            let asked = scope.spawn(|| upgrade(&setup));
            server.wait_for_log(&["upgrade: handing over to process"]);
            // It waits for the writes. If it does not yet, it will see that they wait for space.
            std::thread::sleep(Duration::from_secs(1));
            setup.storage.change(|s| (s.hangs, s.full) = (false, true));
            asked.join().unwrap()
        });
        // Tables of an image are written first, which need space as well.
        let says_so = text.contains("it may be full") || text.contains("No space left");
        assert!(pid.is_none() && says_so, "{text}");
        assert_eq!(stats(&setup.control())["storage"], "fails", "{format}");
        setup.storage.change(|s| s.full = false);
        assert_eq!(
            finish(&mut device),
            vec![OK; usize::from(DEPTH)],
            "{format}"
        );
        assert!(server.terminate().unwrap().success());
    }
}

/// The socket was removed and is made again while writes wait for space, and the front-end keeps no record of requests in
/// flight: the guest is told of no error.
#[test]
fn writes_wait_for_space_while_the_socket_is_made_again() {
    let Some(setup) = Setup::new("raw", 34) else {
        return;
    };
    let mut server = setup.serve("cache=none,werror=enospc", &[]);
    let config = DeviceConfig {
        inflight: false,
        ..config()
    };
    let mut device = Device::connect(setup.socket(), &config).unwrap();
    setup.storage.change(|s| s.full = true);
    submit(&mut device, Op::Write);
    wait_until("writes wait", || {
        stats(&setup.control())["storage"] == "fails"
    });
    std::fs::remove_file(setup.socket()).unwrap();
    let pid = Pid::from_raw(server.pid() as i32).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    server.wait_for_log(&["ringdisk has created it again"]);
    assert!(setup.socket().exists());
    assert_eq!(device.config().unwrap().num_queues, config.queues);
    setup.storage.change(|s| s.full = false);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    drop(device);
    let mut device = Device::connect(setup.socket(), &config).unwrap();
    let read = device.queues[0].read(0, LEN as usize).unwrap();
    assert_eq!(read, content(0, LEN as usize));
    assert!(server.terminate().unwrap().success());
}
