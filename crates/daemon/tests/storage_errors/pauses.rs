//! A VM is paused and goes on while its requests wait for storage: they are done once, as if it had not been.

use testkit::driver::RegionEntries;

use super::*;

/// The messages of QEMU 7.2 and of later ones, for rings of both kinds, and with a region that is too small.
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
                until("writes wait", || {
                    stats(&setup.control())["storage"] == "fails"
                });
                // Once more before there is space, and with other messages between.
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

/// What waits is not done again for a guest that has reset its device: QEMU tells of that as well, and the region may be
/// the same.
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
        until("writes wait", || {
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
