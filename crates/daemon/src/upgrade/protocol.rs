//! The handover protocol: messages with descriptors on pairs of sockets, by which one ringdisk hands everything that it
//! serves to another.
//!
//! `ringdisk upgrade` starts the new process, since the old one is in its sandbox and cannot start programs. The steps of
//! the three processes, from top to bottom:
//!
//! | `ringdisk upgrade` | old process | new process |
//! |---|---|---|
//! | connects, `UpgradeRequest` | | |
//! | | `UpgradeReply`, with a channel | |
//! | starts the new process, `Launched` | | reads its configuration, `Hello` |
//! | | writes metadata of images; pauses all disks; `Handover` | |
//! | | | opens everything, enters its sandbox, `Prepared` |
//! | | `Commit` | |
//! | | | `Serving`, and serves |
//! | `Outcome` | exits | |
//!
//! Until it has sent `Serving`, the new process changes nothing, neither in a file nor in a guest's memory. *Who serves* is
//! decided in one place: whether `Serving` has reached the old process's socket before that is closed for receiving. If it
//! has, the old process exits. If not, it never will: the new process finds that it cannot send it, and the old one
//! continues with its own sessions, rings and locks, whatever happens to the new one.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::spec::SpecError;
use crate::inherited::{FileIdentity, InheritedDisk};
use crate::state::Remembered;
use crate::state::left::LeftFiles;

/// The version of the messages. Version 1 lacked the files of disks.
pub const PROTOCOL: u32 = 2;

/// Limit of a message in bytes: 4096 disks with sessions of 256 queues.
const BYTES_MAX: usize = 256 << 20;

/// Limit of descriptors in a message; similar to the kernel's limit for a process.
const DESCRIPTORS_MAX: usize = 1 << 20;

/// Bytes and descriptors of a packet; the kernel's limit is 253 descriptors.
const PACKET: usize = 32 << 10;
const PACKET_DESCRIPTORS: usize = 250;

/// The first message of `ringdisk upgrade`.
#[derive(Serialize, Deserialize)]
pub struct UpgradeRequest {
    /// Nothing is done if the running process has this [program](program).
    pub unless_running: Option<String>,
}

/// Whether an upgrade is needed. `Start` comes with three descriptors: the new process's channel, and the old one's
/// standard output and error.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UpgradeReply {
    Start,
    SameProgram,
}

/// The reply that `ringdisk upgrade` receives.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum ReplyOrFailure {
    UpgradeReply(UpgradeReply),
    /// No upgrade is possible.
    Failed(Outcome),
}

#[derive(Serialize, Deserialize)]
pub struct Launched {
    pub pid: u32,
}

/// The result of an upgrade.
#[derive(Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Why the old process continues to serve.
    pub error: Option<String>,
    /// From the pause of the first disk until all disks are served again.
    pub pause_us: u64,
    pub disks: usize,
    pub connected: usize,
    /// The ids of backups that the upgrade has ended, also if the old process continues.
    #[serde(default)]
    pub failed_backups: Vec<String>,
}

#[derive(Serialize, Deserialize)]
pub struct Hello {
    pub protocol: u32,
    pub version: String,
    /// The new program reads the directory of a configuration. Older ones do not.
    #[serde(default)]
    pub reads_directory: bool,
}

/// Everything that is handed over. Its descriptors, in this order: `files` files; the lock of the state directory; the
/// sockets for commands, upgrades and metrics; for each export, its socket, and then its connection with the
/// descriptors of the session; the socket of the NBD server; a file with the bits of the temporary bitmaps.
#[derive(Serialize, Deserialize)]
pub struct Handover {
    pub files: usize,
    pub lock: bool,
    pub control: bool,
    pub upgrade: bool,
    pub metrics: bool,
    pub disks: Vec<HandoverDisk>,
    /// Changes made at run time, in the format of the state file. If they are missing, the state file is used.
    #[serde(default)]
    pub changed: Option<String>,
    /// Names of disks that are to be served and cannot be. Older versions served nothing if one could not be.
    #[serde(default)]
    pub absent: Vec<String>,
    /// Names of released disks, which other hosts may have locked.
    pub away: Vec<String>,
    /// The files of all sockets. Another file at one of the paths does not belong to ringdisk.
    #[serde(default)]
    pub sockets: Vec<(PathBuf, FileIdentity)>,
    pub exports: Vec<HandoverExport>,
    /// The NBD server. Versions without it ignore its socket.
    #[serde(default)]
    pub nbd: Option<HandoverNbd>,
    /// Certificates that commands have added, by id. The new process reads the files.
    #[serde(default)]
    pub tls: Vec<(String, HandoverTls)>,
    /// What the configuration that is in force says about NBD.
    #[serde(default)]
    pub nbd_config: Option<HandoverNbdConfig>,
    /// The configuration that is in force has a directory with more files. Older versions have none.
    #[serde(default)]
    pub has_directory: bool,
    /// The numbers of queues that are defaults, by export. Older versions give every disk a number.
    #[serde(default)]
    pub queues: Option<BTreeMap<String, u16>>,
    /// The sockets of exports of whose guests something is remembered. Older versions do not know them.
    #[serde(default)]
    pub remembered_at: BTreeMap<String, PathBuf>,
    /// All that guests depend on, by export. Older versions know only parts of it, above.
    #[serde(default)]
    pub guests: BTreeMap<String, Remembered>,
    /// The files that disks have left. Older versions do not know them.
    #[serde(default)]
    pub left: LeftFiles,
    /// Temporary bitmaps, in the order of their bits. Older versions do not know them.
    #[serde(default)]
    pub bitmaps: Vec<HandoverBitmap>,
}

/// The NBD server, without its clients, which connect again.
#[derive(Serialize, Deserialize)]
pub struct HandoverNbd {
    pub address: String,
    /// Clients must use TLS.
    #[serde(default)]
    pub tls: Option<HandoverTls>,
    pub exports: Vec<HandoverNbdExport>,
}

#[derive(Serialize, Deserialize)]
pub struct HandoverNbdConfig {
    pub address: Option<String>,
    pub tls: Option<PathBuf>,
    pub tls_any_peer: bool,
    pub exports: Vec<HandoverNbdExport>,
}

/// Where certificates are.
#[derive(Serialize, Deserialize)]
pub struct HandoverTls {
    pub dir: PathBuf,
    pub verify_peer: bool,
}

#[derive(Serialize, Deserialize)]
pub struct HandoverNbdExport {
    pub id: String,
    pub node: String,
    pub name: String,
    pub description: String,
    pub writable: bool,
    /// Dirty bitmaps. Older versions ignore them, and export the disk without them.
    #[serde(default)]
    pub bitmaps: Vec<String>,
    /// Pairs of a key and a number.
    pub limits: Vec<(String, u64)>,
}

/// A bitmap that is not stored in the disk's image.
#[derive(Serialize, Deserialize)]
pub struct HandoverBitmap {
    pub disk: String,
    pub name: String,
    pub granularity_bits: u32,
    /// Bytes of the disk.
    pub size: u64,
    pub recording: bool,
}

/// The file of the bits of bitmaps has each in a multiple of this.
pub const BITMAP_UNIT: u64 = 8;

/// A disk, served or not, in the syntax of the command line.
#[derive(Serialize, Deserialize)]
pub struct HandoverDisk {
    /// As it is now.
    pub disk: String,
    /// As it is configured.
    pub written: Option<String>,
    /// Its file, if it has one that is locked: the path may no longer lead to it.
    #[serde(default)]
    pub file: Option<FileIdentity>,
}

impl TryFrom<&HandoverDisk> for InheritedDisk {
    type Error = SpecError;

    fn try_from(handover: &HandoverDisk) -> Result<Self, SpecError> {
        Ok(Self {
            spec: handover.disk.parse()?,
            configured: handover.written.as_deref().map(str::parse).transpose()?,
            file: handover.file,
        })
    }
}

impl From<&InheritedDisk> for HandoverDisk {
    fn from(disk: &InheritedDisk) -> Self {
        Self {
            disk: disk.spec.to_string(),
            written: disk.configured.as_ref().map(ToString::to_string),
            file: disk.file,
        }
    }
}

#[derive(Serialize, Deserialize)]
pub struct HandoverExport {
    pub socket: PathBuf,
    /// The file of its disk, if it has one that is locked.
    pub file: Option<FileIdentity>,
    /// The guest's choice of a write cache, if it is not the default.
    pub write_cache: Option<bool>,
    /// The size that the front-end has read, in sectors.
    #[serde(default)]
    pub capacity_read: Option<u64>,
    /// The disk's size in bytes, which stays if its file has become shorter.
    #[serde(default)]
    pub size: Option<u64>,
    pub session: Option<HandoverSession>,
}

#[derive(Serialize, Deserialize)]
pub struct HandoverSession {
    pub words: Vec<u64>,
    pub descriptors: usize,
}

/// Messages without further content.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    Prepared,
    Commit,
    Serving,
    /// The new process exits, and why. May replace any other message of that process.
    Failed(String),
}

/// The first message of the new process.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum FirstMessage {
    Hello(Hello),
    Failed(Step),
}

/// The header of a message. A short message is one packet, which arrives completely or not at all.
struct MessageHeader {
    bytes: usize,
    descriptors: usize,
}

/// Length of the header in bytes: two little-endian numbers.
const HEAD: usize = 16;

impl MessageHeader {
    fn bytes(&self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[..8].copy_from_slice(&(self.bytes as u64).to_le_bytes());
        bytes[8..].copy_from_slice(&(self.descriptors as u64).to_le_bytes());
        bytes
    }

    fn parse(packet: &[u8]) -> Option<Self> {
        let (bytes, rest) = packet.split_first_chunk()?;
        let (descriptors, _) = rest.split_first_chunk()?;
        let number = |bytes: &[u8; 8], max: usize| {
            let number = usize::try_from(u64::from_le_bytes(*bytes)).ok()?;
            (number <= max).then_some(number)
        };
        Some(Self {
            bytes: number(bytes, BYTES_MAX)?,
            descriptors: number(descriptors, DESCRIPTORS_MAX)?,
        })
    }
}

/// One end of a connection.
pub struct Channel(OwnedFd);

impl Channel {
    /// Both ends of a new connection.
    ///
    /// # Errors
    /// The system call failed.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Self(ours), Self(theirs)))
    }

    pub fn into_descriptor(self) -> OwnedFd {
        self.0
    }

    /// Refuses further messages. Those that have arrived can still be received.
    pub fn close_for_receiving(&self) {
        // Cannot fail for an open pair of sockets.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Read);
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The other side has closed, or does not receive it in time.
    pub fn send(
        &self,
        message: &impl Serialize,
        descriptors: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        let head = MessageHeader {
            bytes: bytes.len(),
            descriptors: descriptors.len(),
        };
        let bytes = [&head.bytes()[..], &bytes].concat();
        let mut parts = bytes.chunks(PACKET);
        let mut batches = descriptors.chunks(PACKET_DESCRIPTORS);
        loop {
            match (parts.next(), batches.next()) {
                (None, None) => return Ok(()),
                // A packet without bytes would mean the end of the connection.
                (part, batch) => {
                    self.packet(part.unwrap_or(b" "), batch.unwrap_or(&[]), deadline)?;
                }
            }
        }
    }

    fn packet(
        &self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PACKET_DESCRIPTORS))];
        loop {
            wait(self.0.as_fd(), PollFlags::OUT, deadline)?;
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                // The buffer is large enough.
                control.push(SendAncillaryMessage::ScmRights(descriptors));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, flags) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                result => return Ok(result.map(drop)?),
            }
        }
    }

    /// Receives a message.
    ///
    /// # Errors
    /// The other side has closed, nothing arrives in time, or another message arrives.
    pub fn receive<T: DeserializeOwned>(
        &self,
        deadline: Instant,
    ) -> io::Result<(T, VecDeque<OwnedFd>)> {
        let mut descriptors = VecDeque::new();
        let mut bytes = self.take(&mut descriptors, deadline)?;
        let head = MessageHeader::parse(&bytes);
        let head = head.ok_or_else(|| io::Error::other("received bytes that are not a message"))?;
        bytes.drain(..HEAD);
        while bytes.len() < head.bytes || descriptors.len() < head.descriptors {
            bytes.extend(self.take(&mut descriptors, deadline)?);
        }
        bytes.truncate(head.bytes);
        if descriptors.len() != head.descriptors {
            return Err(io::Error::other("received more descriptors than announced"));
        }
        Ok((serde_json::from_slice(&bytes)?, descriptors))
    }

    fn take(&self, descriptors: &mut VecDeque<OwnedFd>, deadline: Instant) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; PACKET];
        loop {
            wait(self.0.as_fd(), PollFlags::IN, deadline)?;
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PACKET_DESCRIPTORS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let received = recvmsg(
                &self.0,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                flags,
            );
            let received = match received {
                Err(Errno::AGAIN | Errno::INTR) => continue,
                received => received?,
            };
            for part in control.drain() {
                if let RecvAncillaryMessage::ScmRights(list) = part {
                    descriptors.extend(list);
                }
            }
            if received.flags.contains(ReturnFlags::CTRUNC) {
                // The buffer is large enough: this process has reached its limit of descriptors.
                return Err(Errno::MFILE.into());
            }
            if received.bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            bytes.truncate(received.bytes);
            return Ok(bytes);
        }
    }
}

impl From<OwnedFd> for Channel {
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
}

/// Waits until a descriptor is ready.
///
/// # Errors
/// It does not become ready in time.
pub fn wait(fd: BorrowedFd<'_>, what: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut ready = [PollFd::from_borrowed_fd(fd, what)];
        // Rounded up, since a timeout of 0 would spin.
        let left = (left + Duration::from_millis(1)).try_into();
        match poll(&mut ready, left.as_ref().ok().map(|left: &Timespec| left)) {
            Ok(0) | Err(Errno::INTR) => {}
            result => return Ok(result.map(drop)?),
        }
    }
}

/// Identifies this program: `DEVICE:INODE` of its file.
pub fn program() -> Option<String> {
    let file = std::fs::metadata(Path::new("/proc/self/exe")).ok()?;
    Some(format!("{}:{}", file.dev(), file.ino()))
}

/// Panics if a message is not bounded or does not read back as it is written: for tests and fuzzing.
#[cfg(any(test, fuzzing))]
pub fn check(bytes: &[u8]) {
    use rustix::event::{EventfdFlags, eventfd};
    if let Some(head) = MessageHeader::parse(bytes) {
        assert!(head.bytes <= BYTES_MAX && head.descriptors <= DESCRIPTORS_MAX);
        assert!(bytes.starts_with(&head.bytes()));
    }
    let _ = serde_json::from_slice::<Hello>(bytes);
    let _ = serde_json::from_slice::<Outcome>(bytes);
    let Ok(handover) = serde_json::from_slice::<Handover>(bytes) else {
        return;
    };
    for session in handover.exports.into_iter().filter_map(|e| e.session) {
        // Not more than this process may open.
        let count = session.descriptors.min(64);
        let fds = (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC));
        let fds: Vec<_> = fds.collect::<Result<_, _>>().expect("descriptors");
        if let Ok(saved) = guest::SavedSession::parse(&session.words, fds) {
            assert_eq!(saved.words(), session.words);
            assert_eq!(saved.descriptors().len(), count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustix::event::{EventfdFlags, eventfd};

    /// If no upgrade is possible, `ringdisk upgrade` receives the reason instead of a reply.
    #[test]
    fn client_receives_reply_or_failure() {
        let (ours, theirs) = Channel::pair().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let refusal = Outcome {
            error: Some("no".into()),
            pause_us: 0,
            disks: 0,
            connected: 0,
            failed_backups: Vec::new(),
        };
        ours.send(&UpgradeReply::Start, &[], deadline).unwrap();
        ours.send(&refusal, &[], deadline).unwrap();
        let (first, _) = theirs.receive(deadline).unwrap();
        assert!(matches!(
            first,
            ReplyOrFailure::UpgradeReply(UpgradeReply::Start)
        ));
        let (second, _) = theirs.receive(deadline).unwrap();
        match second {
            ReplyOrFailure::Failed(outcome) => assert_eq!(outcome.error, refusal.error),
            ReplyOrFailure::UpgradeReply(answer) => panic!("{answer:?}"),
        }
    }

    /// The seeds of fuzzing, which include its findings.
    fn seeds() -> Vec<Vec<u8>> {
        let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/hand");
        let files = std::fs::read_dir(seeds).unwrap();
        files
            .map(|file| std::fs::read(file.unwrap().path()).unwrap())
            .collect()
    }

    #[test]
    fn fuzzing_seeds_are_valid() {
        seeds().iter().for_each(|seed| check(seed));
        let is_handover = |seed: &&Vec<u8>| serde_json::from_slice::<Handover>(seed).is_ok();
        assert!(seeds().iter().filter(is_handover).count() >= 2);
    }

    proptest! {
        #[test]
        fn changed_messages_are_parsed_or_refused(seed: prop::sample::Index, changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4)) {
            let mut bytes = seed.get(&seeds()).clone();
            for (at, to) in changes {
                let at = at.index(bytes.len());
                bytes[at] = to;
            }
            check(&bytes);
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn messages_of_any_size_arrive_with_their_descriptors() {
        let (ours, theirs) = Channel::pair().unwrap();
        for (bytes, count) in [(0, 0), (1, 1), (PACKET, 0), (3 * PACKET, 600), (10, 251)] {
            let fds: Vec<_> = (0..count)
                .map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap())
                .collect();
            let text = "x".repeat(bytes);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                    ours.send(&text, &fds, soon()).unwrap();
                });
                let (got, came) = theirs.receive::<String>(soon()).unwrap();
                assert!(got == text && came.len() == count, "{bytes} {count}");
            });
        }
        drop(ours);
        let end = theirs.receive::<String>(soon()).err().unwrap();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn invalid_packets_are_refused() {
        for packet in [&b"x"[..], &[0xff; 16], &[0; 16], &[7; 8]] {
            let (ours, theirs) = Channel::pair().unwrap();
            ours.packet(packet, &[], soon()).unwrap();
            drop(ours);
            assert!(theirs.receive::<Step>(soon()).is_err(), "{packet:?}");
        }
        let (ours, theirs) = Channel::pair().unwrap();
        ours.send(&"Unknown", &[], soon()).unwrap();
        assert!(theirs.receive::<Step>(soon()).is_err());
        let late = theirs.receive::<Step>(Instant::now() + Duration::from_millis(5));
        assert_eq!(late.err().unwrap().kind(), io::ErrorKind::TimedOut);
    }
}
