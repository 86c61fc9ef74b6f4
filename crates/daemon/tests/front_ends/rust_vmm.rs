//! rust-vmm's `vhost` crate, which Cloud Hypervisor and Firecracker use, as the front-end of our driver.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use testkit::compatibility::Record;
use testkit::driver::{DISK_FEATURES, DeviceConfig, DiskConfig, Op, Queue, lay_out};
use testkit::frontend::rust_vmm_eventfd;
use testkit::memory::Memory;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::support::{Disk, content, serve};

const QUEUES: u16 = 2;
const OK: u8 = 0;

fn regions(memory: &Memory) -> Vec<VhostUserMemoryRegionInfo> {
    let regions = memory.regions().iter();
    let info = |region: &testkit::memory::Region| VhostUserMemoryRegionInfo {
        guest_phys_addr: region.gpa,
        memory_size: region.size,
        userspace_addr: region.user,
        mmap_offset: region.mmap_offset,
        mmap_handle: region.file.as_raw_fd(),
    };
    regions.map(info).collect()
}

fn start(frontend: &Frontend, memory: &Memory, queue: &Queue, base: u16) {
    let (index, ring) = (usize::from(queue.index), &queue.ring);
    let at = ring.guest_addresses();
    let addresses = VringConfigData {
        queue_max_size: ring.size,
        queue_size: ring.size,
        flags: 0,
        desc_table_addr: memory.user(at.desc),
        used_ring_addr: memory.user(at.used),
        avail_ring_addr: memory.user(at.avail),
        log_addr: None,
    };
    frontend.set_vring_num(index, ring.size).unwrap();
    frontend.set_vring_addr(index, &addresses).unwrap();
    frontend.set_vring_base(index, base).unwrap();
    let event = |fd| rust_vmm_eventfd(fd).unwrap();
    frontend.set_vring_call(index, &event(&ring.call)).unwrap();
    frontend.set_vring_kick(index, &event(&ring.kick)).unwrap();
    frontend.set_vring_err(index, &event(&ring.err)).unwrap();
}

/// On each queue: reads the old data, writes new data and flushes it.
fn read_write_flush(queues: &mut [Queue], disk: &Disk, round: u64) {
    for queue in queues {
        let sector = 1024 * (2 * round + u64::from(queue.index));
        assert_eq!(queue.read(sector, 65536), Ok(content(sector, 65536)));
        let bytes = content(sector + 7, 65536);
        assert_eq!(queue.write(sector, &bytes), OK);
        assert_eq!(queue.run(Op::Flush, 0, 0), OK);
        assert_eq!(queue.read(sector, 65536), Ok(bytes.clone()));
        assert_eq!(disk.bytes(sector, 65536), bytes);
    }
}

#[test]
fn vhost_crate_as_front_end() {
    let mut record = Record::new("rust-vmm's vhost crate", "0.18");
    let (server, disk) = serve("queues=2");
    let mut frontend = Frontend::connect(server.socket(), u64::from(QUEUES)).unwrap();
    let protocol = VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
    let features = record.step("negotiate", || {
        frontend.set_owner().unwrap();
        let offered = frontend.get_features().unwrap();
        let wanted = DISK_FEATURES
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
            | 1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | 1 << VIRTIO_RING_F_INDIRECT_DESC;
        let offered_protocol = frontend.get_protocol_features().unwrap();
        assert!(offered_protocol.contains(protocol), "{offered_protocol:?}");
        frontend.set_protocol_features(protocol).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_features(offered & wanted).unwrap();
        assert_eq!(frontend.get_queue_num().unwrap(), u64::from(QUEUES));
        offered & wanted
    });
    record.step("configuration", || {
        let flags = VhostUserConfigFlags::WRITABLE;
        let len = DiskConfig::LEN as u32;
        let (_, config) = frontend
            .get_config(0, len, flags, &[0; DiskConfig::LEN])
            .unwrap();
        let sectors = u64::from_le_bytes(config[..8].try_into().unwrap());
        assert_eq!(sectors * 512, crate::support::DISK_BYTES);
        // Writethrough, then back.
        for cache in [0, 1] {
            frontend
                .set_config(DiskConfig::WCE_AT, flags, &[cache])
                .unwrap();
            let (_, found) = frontend
                .get_config(DiskConfig::WCE_AT, 1, flags, &[0])
                .unwrap();
            assert_eq!(found, [cache]);
        }
    });

    let config = DeviceConfig {
        queues: QUEUES,
        ..DeviceConfig::default()
    };
    let (memory, mut queues) = lay_out(&config, features).unwrap();
    let memory: Arc<Memory> = memory;
    let regions = regions(&memory);
    // The last region is removed and added while the guest runs.
    let (spare, regions) = regions.split_last().unwrap();
    record.step("start, with memory for what is in flight", || {
        frontend.set_mem_table(regions).unwrap();
        let asked = VhostUserInflight::new(0, 0, QUEUES, config.queue_size);
        let (inflight, file) = frontend.get_inflight_fd(&asked).unwrap();
        frontend
            .set_inflight_fd(&inflight, file.as_raw_fd())
            .unwrap();
        for queue in &queues {
            start(&frontend, &memory, queue, 0);
        }
        for index in 0..QUEUES {
            frontend.set_vring_enable(index.into(), true).unwrap();
        }
    });
    record.step("read, write, flush", || {
        read_write_flush(&mut queues, &disk, 0);
    });
    record.step("memory added and removed", || {
        assert!(frontend.get_max_mem_slots().unwrap() > regions.len() as u64);
        frontend.add_mem_region(spare).unwrap();
        read_write_flush(&mut queues, &disk, 1);
        frontend.remove_mem_region(spare).unwrap();
        read_write_flush(&mut queues, &disk, 2);
    });
    record.step("stop and start", || {
        for queue in &queues {
            let index = usize::from(queue.index);
            frontend.set_vring_enable(index, false).unwrap();
            let base = frontend.get_vring_base(index).unwrap();
            assert_eq!(base, u32::from(queue.ring.avail_idx()));
            start(&frontend, &memory, queue, base as u16);
            frontend.set_vring_enable(index, true).unwrap();
        }
        read_write_flush(&mut queues, &disk, 3);
    });
}
