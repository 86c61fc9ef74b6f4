//! Front-ends that cannot run here: the messages that their sources send, in the same order, and requests through the
//! rings that they set up.
//!
//! The messages of each are data in [`scripts`](super::scripts). A reply must have exactly the size and flags that the
//! front-end accepts.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::process::Signal;
use testkit::compatibility::Record;
use testkit::driver::{DeviceConfig, DiskConfig, Op, Queue, lay_out};
use testkit::frontend::{
    F_LOG_ALL, Frontend, Inflight, NEED_REPLY, RingAddresses, VERSION, message, protocol,
};
use testkit::memory::{Memory, Region};
use testkit::server::Server;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::scripts::{FRONT_ENDS, FrontEnd, RingStep, Step};
use crate::support::{DISK_BYTES, Disk, content, serve_all};

const OK: u8 = 0;

/// A front-end in the middle of its script.
struct Replay<'a> {
    front_end: &'a FrontEnd,
    server: Server,
    disk: &'a Disk,
    connection: Frontend,
    memory: Arc<Memory>,
    queues: Vec<Queue>,
    /// Flags of every message.
    flags: u32,
    /// Features that the device offers, too.
    features: u64,
    protocol: u64,
    inflight: Option<Inflight>,
    log: Option<OwnedFd>,
    /// How many times requests were sent.
    rounds: u64,
}

fn replay(name: &str) {
    for front_end in FRONT_ENDS.iter().filter(|known| known.name == name) {
        let mut record = Record::new(
            front_end.name,
            &format!("{} (replay of its messages)", front_end.version),
        );
        let disk = Disk::new();
        let mut replay = Replay::new(front_end, &disk);
        for (what, steps) in front_end.script {
            println!("{name} {}: {what}", front_end.version);
            record.step(what, || steps.iter().for_each(|step| replay.step(step)));
        }
    }
}

#[test]
fn cloud_hypervisor() {
    replay("Cloud Hypervisor");
}

#[test]
fn crosvm() {
    replay("crosvm");
}

#[test]
fn firecracker() {
    replay("Firecracker");
}

#[test]
fn spdk() {
    replay("SPDK's initiator");
}

impl<'a> Replay<'a> {
    fn new(front_end: &'a FrontEnd, disk: &'a Disk) -> Self {
        let server = Self::serve(front_end, disk);
        let has = |bit: u32| front_end.features & 1 << bit != 0;
        let config = DeviceConfig {
            queues: front_end.queues,
            queue_size: front_end.queue_size,
            indirect: has(VIRTIO_RING_F_INDIRECT_DESC),
            event_idx: has(VIRTIO_RING_F_EVENT_IDX),
            file_offset: front_end.file_offset,
            ..DeviceConfig::default()
        };
        let (memory, queues) = lay_out(&config, front_end.features).unwrap();
        Self {
            front_end,
            connection: Frontend::connect(server.socket()).unwrap(),
            server,
            disk,
            memory,
            queues,
            flags: VERSION,
            features: 0,
            protocol: 0,
            inflight: None,
            log: None,
            rounds: 0,
        }
    }

    fn serve(front_end: &FrontEnd, disk: &Disk) -> Server {
        serve_all(&[disk.argument(&format!("queues={}", front_end.queues))])
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::All(steps) => steps.iter().for_each(|step| self.step(step)),
            Step::Owner => self.tell(message::SET_OWNER, &[], &[]),
            Step::GetFeatures => {
                let offered = self.ask_u64(message::GET_FEATURES);
                self.features = offered & self.front_end.features;
                let rings = 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;
                assert_eq!(self.features & rings, self.front_end.features & rings);
            }
            Step::SetFeatures => self.set_features(self.features & !F_LOG_ALL),
            Step::GetProtocol => {
                let offered = self.ask_u64(message::GET_PROTOCOL_FEATURES);
                self.protocol = offered & self.front_end.protocol;
            }
            Step::SetProtocol => {
                // This message itself decides whether it is acknowledged, so the flags are those of before.
                self.flags = VERSION;
                let features = self.protocol.to_ne_bytes();
                self.tell(message::SET_PROTOCOL_FEATURES, &features, &[]);
                if self.front_end.needs_reply && self.protocol & protocol::REPLY_ACK != 0 {
                    self.flags = VERSION | NEED_REPLY;
                }
            }
            Step::QueueNum => {
                let queues = self.ask_u64(message::GET_QUEUE_NUM);
                assert_eq!(queues, u64::from(self.front_end.queues));
            }
            Step::GetConfig {
                offset,
                len,
                flags,
                space,
            } => self.get_config(offset, len, flags, space),
            Step::SetConfig {
                offset,
                value,
                flags,
                space,
            } => {
                let mut payload = [offset, 1, flags].map(u32::to_ne_bytes).concat();
                payload.push(value);
                payload.resize(12 + space, 0);
                self.tell(message::SET_CONFIG, &payload, &[]);
            }
            Step::CacheIs(cache) => {
                // Through a message that every front-end may send and that has a reply.
                let asked = [DiskConfig::WCE_AT, 1, 0].map(u32::to_ne_bytes).concat();
                let found = self.ask(message::GET_CONFIG, &[asked, vec![0]].concat());
                assert_eq!(found[12..], [cache]);
            }
            Step::BackendChannel => {
                let (_ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
                self.tell(message::SET_BACKEND_REQ_FD, &[], &[&theirs.into()]);
            }
            Step::Memory => self.set_memory(),
            Step::AddMemory => {
                let spare = &self.memory.regions()[self.announced()];
                let payload = [vec![0; 8], self.described(spare)].concat();
                self.tell(message::ADD_MEM_REG, &payload, &[&spare.file]);
            }
            Step::Inflight => self.set_inflight(),
            Step::Rings(steps) => {
                for index in 0..self.queues.len() {
                    steps.iter().for_each(|step| self.ring_step(index, *step));
                }
            }
            Step::StartLog => self.start_log(),
            Step::StopLog => {
                self.log = None;
                self.set_features(self.features & !F_LOG_ALL);
            }
            Step::Requests => self.requests(),
            Step::NewGuest => {
                for queue in &mut self.queues {
                    queue.restart(0);
                }
                self.inflight = None;
            }
            Step::Reconnect => {
                self.server.signal(Signal::KILL);
                self.server.ended().unwrap();
                self.server = Self::serve(self.front_end, self.disk);
                self.connection = Frontend::connect(self.server.socket()).unwrap();
                self.flags = VERSION;
            }
        }
    }

    /// Sends a message that is acknowledged only if the front-end asks for it.
    fn tell(&self, request: u32, payload: &[u8], fds: &[&OwnedFd]) {
        self.send(request, payload, fds);
        if self.flags & NEED_REPLY != 0 {
            let reply = self.connection.reply(request).unwrap();
            assert_eq!(reply, [0; 8], "message {request} was refused");
        }
    }

    /// Sends a message that has a reply.
    fn ask(&self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.send(request, payload, &[]);
        self.connection.reply(request).unwrap()
    }

    fn ask_u64(&self, request: u32) -> u64 {
        let reply = self.ask(request, &[]);
        u64::from_ne_bytes(reply.try_into().unwrap())
    }

    fn send(&self, request: u32, payload: &[u8], fds: &[&OwnedFd]) {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        let (flags, len) = (self.flags, payload.len() as u32);
        let sent = self.connection.send_raw(request, flags, len, payload, &fds);
        sent.unwrap_or_else(|error| panic!("message {request}: {error}"));
    }

    fn set_features(&self, features: u64) {
        self.tell(message::SET_FEATURES, &features.to_ne_bytes(), &[]);
    }

    fn get_config(&self, offset: u32, len: u32, flags: u32, space: usize) {
        let mut payload = [offset, len, flags].map(u32::to_ne_bytes).concat();
        payload.resize(12 + space, 0);
        let reply = self.ask(message::GET_CONFIG, &payload);
        assert_eq!(reply.len(), payload.len(), "of GET_CONFIG");
        assert_eq!(reply[..8], payload[..8], "offset and size of GET_CONFIG");
        // Front-ends use different offsets; the device returns the start of the space in each case.
        if offset.is_multiple_of(0x100) && len >= 8 {
            let sectors = u64::from_ne_bytes(reply[12..20].try_into().unwrap());
            assert_eq!(sectors * 512, DISK_BYTES);
        }
    }

    /// The number of regions sent when the guest starts.
    fn announced(&self) -> usize {
        self.memory.regions().len() - 1
    }

    /// A region as it is sent.
    fn described(&self, region: &Region) -> Vec<u8> {
        let user = self.user(region.gpa);
        let fields = [region.gpa, region.size, user, region.mmap_offset];
        fields
            .iter()
            .flat_map(|field| field.to_ne_bytes())
            .collect()
    }

    /// The front-end's address of a guest address.
    fn user(&self, at: u64) -> u64 {
        if self.front_end.own_addresses {
            at
        } else {
            self.memory.user(at)
        }
    }

    fn set_memory(&self) {
        let regions = &self.memory.regions()[..self.announced()];
        let mut payload = (regions.len() as u64).to_ne_bytes().to_vec();
        payload.extend(regions.iter().flat_map(|region| self.described(region)));
        let files: Vec<_> = regions.iter().map(|region| &region.file).collect();
        self.tell(message::SET_MEM_TABLE, &payload, &files);
    }

    /// Requests an inflight region unless there is one.
    fn set_inflight(&mut self) {
        let FrontEnd {
            queues, queue_size, ..
        } = *self.front_end;
        if self.inflight.is_none() {
            let asked = Inflight::payload((0, 0, queues, queue_size));
            self.send(message::GET_INFLIGHT_FD, &asked, &[]);
            let reply = self.connection.reply_with_fds(message::GET_INFLIGHT_FD);
            let (reply, fds) = reply.unwrap();
            assert_eq!((reply.len(), fds.len()), (24, 1), "of GET_INFLIGHT_FD");
            self.inflight = Some(Inflight::from_reply(&reply, fds).unwrap());
        }
        let inflight = self.inflight.as_ref().unwrap();
        let payload = Inflight::payload(inflight.description);
        self.tell(message::SET_INFLIGHT_FD, &payload, &[&inflight.file]);
    }

    fn ring_step(&self, index: usize, step: RingStep) {
        let ring = &self.queues[index].ring;
        let state = |value: u32| [index as u32, value].map(u32::to_ne_bytes).concat();
        let of_fd = (index as u64).to_ne_bytes();
        match step {
            RingStep::Num => self.tell(message::SET_VRING_NUM, &state(ring.size.into()), &[]),
            RingStep::Base => {
                let base = u32::from(ring.avail_idx());
                self.tell(message::SET_VRING_BASE, &state(base), &[]);
            }
            RingStep::Addr | RingStep::LoggedAddr => {
                let RingAddresses { desc, used, avail } = ring.guest_addresses();
                let logged = step == RingStep::LoggedAddr;
                let mut payload = state(logged.into());
                for at in [desc, used, avail] {
                    payload.extend(self.user(at).to_ne_bytes());
                }
                let log = if logged { used } else { 0 };
                payload.extend(log.to_ne_bytes());
                self.tell(message::SET_VRING_ADDR, &payload, &[]);
            }
            RingStep::Call => self.tell(message::SET_VRING_CALL, &of_fd, &[&ring.call]),
            RingStep::Kick => self.tell(message::SET_VRING_KICK, &of_fd, &[&ring.kick]),
            RingStep::Enable(on) => {
                self.tell(message::SET_VRING_ENABLE, &state(on.into()), &[]);
            }
            RingStep::GetBase => {
                let reply = self.ask(message::GET_VRING_BASE, &state(0));
                assert_eq!(reply, state(ring.avail_idx().into()), "of GET_VRING_BASE");
            }
        }
    }

    /// One bit for each page up to the end of memory, in a file that is exactly as long.
    fn start_log(&mut self) {
        let regions = self.memory.regions().iter();
        let last = regions.map(Region::end).max().unwrap() - 1;
        let len = last / 4096 / 8 + 1;
        let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len).unwrap();
        let payload = [len, 0].map(u64::to_ne_bytes).concat();
        self.send(message::SET_LOG_BASE, &payload, &[&file]);
        let reply = self.connection.reply(message::SET_LOG_BASE).unwrap();
        assert_eq!(reply, payload, "of SET_LOG_BASE");
        self.log = Some(file);
        self.set_features(self.features | F_LOG_ALL);
    }

    /// Whether a page is marked dirty.
    fn is_logged(log: &OwnedFd, at: u64) -> bool {
        let mut byte = [0];
        rustix::io::pread(log, &mut byte, at / 4096 / 8).unwrap();
        byte[0] >> (at / 4096 % 8) & 1 != 0
    }

    /// On each queue: reads the old data, writes new data and flushes it.
    fn requests(&mut self) {
        let features = self.features;
        let has = |bit: u32| features & 1 << bit != 0;
        for queue in &mut self.queues {
            let sector = 512 * (2 * self.rounds + u64::from(queue.index));
            assert_eq!(queue.read(sector, 65536), Ok(content(sector, 65536)));
            if let Some(log) = &self.log {
                assert!(Self::is_logged(log, queue.buffer(0)), "the buffer");
                let used = queue.ring.guest_addresses().used;
                assert!(Self::is_logged(log, used), "the used ring");
            }
            let bytes = content(sector + 7, 65536);
            assert_eq!(queue.write(sector, &bytes), OK);
            if has(VIRTIO_BLK_F_FLUSH) {
                assert_eq!(queue.run(Op::Flush, 0, 0), OK);
            }
            assert_eq!(queue.read(sector, 65536), Ok(bytes.clone()));
            assert_eq!(self.disk.bytes(sector, 65536), bytes);
            let next = sector + 128;
            if has(VIRTIO_BLK_F_DISCARD) {
                assert_eq!(queue.run(Op::Discard, next, 65536), OK);
            }
            if has(VIRTIO_BLK_F_WRITE_ZEROES) {
                let unmap = Op::WriteZeroes { unmap: true };
                assert_eq!(queue.run(unmap, next, 65536), OK);
                assert_eq!(queue.read(next, 65536), Ok(vec![0; 65536]));
            }
            // As many requests as the ring can hold at once, and more than one lap of a small ring.
            let slots: Vec<u16> = (0..queue.slots()).collect();
            for _ in 0..32 {
                for &slot in &slots {
                    queue.prepare(slot, Op::Read, sector, 4096);
                }
                queue.submit(&slots);
                let done = queue.finish(slots.len());
                assert!(done.iter().all(|(_, status)| *status == OK), "{done:?}");
            }
        }
        self.rounds += 1;
    }
}
