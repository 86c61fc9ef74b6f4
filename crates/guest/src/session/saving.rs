//! Saves a session between two messages, and continues a saved one.

use std::sync::Arc;

use super::rings::Ring;
use super::{F_LOG_ALL, PROTOCOL_FEATURES, Session, SessionError};
use crate::inflight::Inflight;
use crate::log::DirtyLog;
use crate::memory::GuestMemory;
use crate::saved::{SavedRing, SavedSession};

impl Session<'_> {
    /// The state that another process needs to continue the session. All rings have stopped.
    pub(super) fn save(&self) -> SavedSession {
        let ring = |ring: &Ring| SavedRing {
            size: ring.size,
            addr: ring.addr,
            base: ring.base.or(ring.base_at_reset),
            kick: ring.kick.clone(),
            call: ring.call.clone(),
            error: ring.error.clone(),
            enabled: ring.enabled,
            unfinished: ring.unfinished,
        };
        SavedSession {
            features: self.features,
            protocol: self.protocol(),
            status: self.status,
            memory: self.memory.regions().collect(),
            inflight: (self.inflight.as_ref()).map(|i| i.region(self.packed())),
            log: self.log.as_ref().map(|log| log.region()),
            log_event: self.log_event.clone(),
            channel: self.channel.clone(),
            rings: self.rings.iter().map(ring).collect(),
            deferred: self.deferred,
            abort: Some(self.abort.clone()),
        }
    }

    /// Continues a saved session.
    pub(super) fn restore(&mut self, saved: SavedSession) -> Result<(), SessionError> {
        let fits = saved.rings.len() == self.rings.len()
            && self.acceptable(saved.features)
            && saved.protocol & !PROTOCOL_FEATURES == 0;
        if !fits {
            return Err(SessionError::Refused(
                "the disk differs from the one with which the session began; the front-end may reconnect",
            ));
        }
        self.owned = true;
        (self.features, self.protocol, self.status) =
            (saved.features, Some(saved.protocol), saved.status);
        if saved.features != 0 {
            self.device.set_features(saved.features & !F_LOG_ALL);
        }
        let mut memory = GuestMemory::watched(self.abort.clone());
        for (layout, file) in saved.memory {
            memory = memory.with_region(layout, file)?;
        }
        self.memory = Arc::new(memory);
        if let Some((layout, file)) = saved.inflight {
            let (queues, abort) = (self.device.queues(), Some(self.abort.clone()));
            self.inflight = Some(Inflight::map_watched(layout, file, queues, abort)?);
        }
        if let Some((layout, file)) = saved.log {
            let log = DirtyLog::map(layout, file, Some(self.abort.clone()))?;
            self.log = Some(Arc::new(log));
        }
        self.log_event = saved.log_event;
        self.deferred = saved.deferred;
        if let Some(channel) = saved.channel {
            self.open_channel(channel);
        }
        for (ring, saved) in self.rings.iter_mut().zip(saved.rings) {
            *ring = Ring {
                size: saved.size,
                addr: saved.addr,
                base: saved.base,
                kick: saved.kick,
                call: saved.call,
                error: saved.error,
                enabled: saved.enabled,
                unfinished: saved.unfinished,
                // If there is a region, the requests were put back when the ring stopped.
                requeued: saved.unfinished && self.inflight.is_some(),
                ..Ring::default()
            };
        }
        match self.deferred {
            None => self.start_again((0..self.device.queues()).collect()),
            // The front-end is stopping all rings.
            Some(_) => Ok(()),
        }
    }
}
