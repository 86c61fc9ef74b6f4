//! A session that another process can continue: the state that the front-end has set up, and the descriptors
//! that it has sent. No request is in flight.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::inflight::InflightLayout;
use crate::log::LogLayout;
use crate::memory::RegionLayout;
use crate::message::{Deferred, Header, MAX_MEM_SLOTS, VringAddr};
use crate::ring::RingBase;
use crate::sigbus::SessionAbort;

/// Maximum number of rings of a device, far more than any device has.
const RINGS_MAX: u64 = 4096;

/// A session between two messages, with all its rings stopped.
#[derive(Clone)]
pub struct SavedSession {
    pub(crate) features: u64,
    pub(crate) protocol: u64,
    pub(crate) status: u8,
    pub(crate) memory: Vec<(RegionLayout, Arc<OwnedFd>)>,
    pub(crate) inflight: Option<(InflightLayout, Arc<OwnedFd>)>,
    pub(crate) log: Option<(LogLayout, Arc<OwnedFd>)>,
    pub(crate) log_event: Option<Arc<OwnedFd>>,
    pub(crate) channel: Option<Arc<OwnedFd>>,
    pub(crate) rings: Vec<SavedRing>,
    /// A message that the front-end waits for until storage answers. It is not passed to another process.
    pub(crate) deferred: Option<(Header, Deferred)>,
    /// The session's notifier, for this process only.
    pub(crate) abort: Option<SessionAbort>,
}

#[derive(Clone, Default)]
pub(crate) struct SavedRing {
    pub size: u16,
    pub addr: Option<VringAddr>,
    pub base: Option<RingBase>,
    pub kick: Option<Arc<OwnedFd>>,
    pub call: Option<Arc<OwnedFd>>,
    pub error: Option<Arc<OwnedFd>>,
    pub enabled: bool,
    /// The ring has requests that storage has not finished.
    pub unfinished: bool,
}

/// The words do not describe a session, or the descriptors do not match them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidSession;

impl SavedSession {
    /// Whether storage has unfinished requests, which only this process may still finish.
    pub fn is_unfinished(&self) -> bool {
        self.deferred.is_some() || self.rings.iter().any(|ring| ring.unfinished)
    }

    /// Encodes the session as numbers for [`parse`](Self::parse).
    pub fn words(&self) -> Vec<u64> {
        let mut words = vec![self.features, self.protocol, u64::from(self.status)];
        words.push(self.memory.len() as u64);
        for (region, _) in &self.memory {
            words.extend([region.guest, region.len, region.user, region.file_offset]);
        }
        words.push(u64::from(self.inflight.is_some()));
        if let Some((layout, _)) = &self.inflight {
            let queues = [layout.queues, layout.queue_size].map(u64::from);
            words.extend([layout.len, layout.file_offset]);
            words.extend(queues);
        }
        words.push(u64::from(self.log.is_some()));
        if let Some((layout, _)) = &self.log {
            words.extend([layout.len, layout.file_offset]);
        }
        words.push(u64::from(self.log_event.is_some()));
        words.push(u64::from(self.channel.is_some()));
        words.push(self.rings.len() as u64);
        for ring in &self.rings {
            words.extend([u64::from(ring.size), u64::from(ring.enabled)]);
            option(&mut words, ring.addr, |addr, words| {
                words.extend([addr.descriptors, addr.used, addr.available]);
                option(words, addr.log, |log, words| words.push(log));
            });
            option(&mut words, ring.base, |base, words| {
                words.push(u64::from(base.0));
            });
            for fd in [&ring.kick, &ring.call, &ring.error] {
                words.push(u64::from(fd.is_some()));
            }
        }
        words
    }

    /// The descriptors, in the order that [`parse`](Self::parse) expects.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let memory = self.memory.iter().map(|(_, fd)| fd);
        let inflight = self.inflight.iter().map(|(_, fd)| fd);
        let rings = self.rings.iter();
        let rings = rings.flat_map(|ring| [&ring.kick, &ring.call, &ring.error]);
        memory
            .chain(inflight)
            .chain(self.log.iter().map(|(_, fd)| fd))
            .chain(&self.log_event)
            .chain(&self.channel)
            .chain(rings.flatten())
            .map(|fd| fd.as_fd())
            .collect()
    }

    /// Decodes a session that another process has encoded.
    ///
    /// # Errors
    /// The words and descriptors do not describe a session.
    pub fn parse(
        words: &[u64],
        descriptors: impl IntoIterator<Item = OwnedFd>,
    ) -> Result<Self, InvalidSession> {
        let mut from = Words {
            words: words.iter(),
            descriptors: descriptors.into_iter(),
        };
        let (features, protocol, status) = (from.word()?, from.word()?, from.below(256)? as u8);
        let mut memory = Vec::new();
        for _ in 0..from.below(MAX_MEM_SLOTS as u64 + 1)? {
            let region = RegionLayout {
                guest: from.word()?,
                len: from.word()?,
                user: from.word()?,
                file_offset: from.word()?,
            };
            memory.push((region, from.descriptor()?));
        }
        let inflight = from.option(|from| {
            let layout = InflightLayout {
                len: from.word()?,
                file_offset: from.word()?,
                queues: from.below(1 << 16)? as u16,
                queue_size: from.below(1 << 16)? as u16,
            };
            Ok((layout, from.descriptor()?))
        })?;
        let log = from.option(|from| {
            let layout = LogLayout {
                len: from.word()?,
                file_offset: from.word()?,
            };
            Ok((layout, from.descriptor()?))
        })?;
        let log_event = from.option(Words::descriptor)?;
        let channel = from.option(Words::descriptor)?;
        let mut rings = Vec::new();
        for number in 0..from.below(RINGS_MAX + 1)? {
            rings.push(SavedRing {
                size: from.below(1 << 16)? as u16,
                enabled: from.below(2)? != 0,
                addr: from.option(|from| {
                    Ok(VringAddr {
                        ring: number as u32,
                        descriptors: from.word()?,
                        used: from.word()?,
                        available: from.word()?,
                        log: from.option(Words::word)?,
                    })
                })?,
                base: from.option(|from| Ok(RingBase(from.below(1 << 32)? as u32)))?,
                kick: from.option(Words::descriptor)?,
                call: from.option(Words::descriptor)?,
                error: from.option(Words::descriptor)?,
                unfinished: false,
            });
        }
        let ended = from.words.next().is_none() && from.descriptors.next().is_none();
        let saved = Self {
            features,
            protocol,
            status,
            memory,
            inflight,
            log,
            log_event,
            channel,
            rings,
            deferred: None,
            abort: None,
        };
        ended.then_some(saved).ok_or(InvalidSession)
    }
}

/// Encodes an option: 1 followed by the words that `put` adds, or 0.
fn option<T>(words: &mut Vec<u64>, value: Option<T>, put: impl FnOnce(T, &mut Vec<u64>)) {
    words.push(u64::from(value.is_some()));
    if let Some(value) = value {
        put(value, words);
    }
}

struct Words<'a, I> {
    words: std::slice::Iter<'a, u64>,
    descriptors: I,
}

impl<I: Iterator<Item = OwnedFd>> Words<'_, I> {
    fn word(&mut self) -> Result<u64, InvalidSession> {
        self.words.next().copied().ok_or(InvalidSession)
    }

    fn below(&mut self, end: u64) -> Result<u64, InvalidSession> {
        self.word().and_then(|word| {
            if word < end {
                Ok(word)
            } else {
                Err(InvalidSession)
            }
        })
    }

    fn descriptor(&mut self) -> Result<Arc<OwnedFd>, InvalidSession> {
        self.descriptors.next().map(Arc::new).ok_or(InvalidSession)
    }

    fn option<T>(
        &mut self,
        get: impl FnOnce(&mut Self) -> Result<T, InvalidSession>,
    ) -> Result<Option<T>, InvalidSession> {
        match self.below(2)? {
            0 => Ok(None),
            _ => get(self).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn fd() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC).unwrap()
    }

    fn saved() -> SavedSession {
        let fd = || Arc::new(fd());
        let region = RegionLayout {
            guest: 1,
            len: 2,
            user: 3,
            file_offset: 4,
        };
        let ring = SavedRing {
            size: 256,
            addr: Some(VringAddr {
                ring: 0,
                descriptors: 5,
                used: 6,
                available: 7,
                log: Some(8),
            }),
            base: Some(RingBase(u32::MAX)),
            kick: Some(fd()),
            call: None,
            error: Some(fd()),
            enabled: true,
            unfinished: false,
        };
        SavedSession {
            features: u64::MAX,
            protocol: 9,
            status: 15,
            memory: vec![(region, fd()), (region, fd())],
            inflight: Some((InflightLayout::new(2, 64, false), fd())),
            log: Some((
                LogLayout {
                    len: 9,
                    file_offset: 10,
                },
                fd(),
            )),
            log_event: Some(fd()),
            channel: Some(fd()),
            rings: vec![ring, SavedRing::default()],
            deferred: None,
            abort: None,
        }
    }

    #[test]
    fn saved_session_round_trips() {
        let (saved, fds) = (saved(), || (0..8).map(|_| fd()));
        assert_eq!(saved.descriptors().len(), 8);
        let words = saved.words();
        let again = SavedSession::parse(&words, fds()).unwrap();
        assert_eq!(again.words(), words);
        assert_eq!(again.descriptors().len(), 8);
        // With a missing or an extra word or descriptor, parsing fails.
        for len in 0..words.len() {
            assert!(SavedSession::parse(&words[..len], fds()).is_err(), "{len}");
        }
        assert!(SavedSession::parse(&words, fds().skip(1)).is_err());
        assert!(SavedSession::parse(&words, fds().chain([fd()])).is_err());
        let more = [&words[..], &[0]].concat();
        assert!(SavedSession::parse(&more, fds()).is_err());
    }

    #[test]
    fn invalid_words_do_not_panic() {
        let words = saved().words();
        for place in 0..words.len() {
            for to in [0, 1, 2, 257, 1 << 16, 1 << 40, u64::MAX] {
                let mut words = words.clone();
                words[place] = to;
                let _ = SavedSession::parse(&words, (0..8).map(|_| fd()));
            }
        }
    }
}
