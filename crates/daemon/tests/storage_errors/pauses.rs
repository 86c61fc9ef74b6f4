//! A VM is paused and resumed while its requests wait for storage: each is completed once, as without the pause.

use testkit::driver::RegionEntries;

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
