//! Places of connections: some for the handshake, and others for clients that use an export.
//!
//! Nobody is refused. A client that asks to use an export while all of those places are taken waits for its answer until another
//! client has left. A peer in the handshake may be anybody, so it keeps others out for a short time only: if all of its places
//! are taken, the next peers wait in the socket's queue until the peer that has been there longest is disconnected. Peers
//! that have shown a certificate, and clients that wait for a place, are not disconnected for others.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

/// Limit of clients that use an export.
pub const CLIENTS_MAX: usize = 100;

/// Limit of connections in the handshake, with clients that wait.
pub const HANDSHAKES_MAX: usize = 64;

/// A peer is not disconnected for others before this time: enough for a handshake with TLS over long distances.
pub const UNDISTURBED: Duration = Duration::from_secs(2);

pub fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Makes the descriptor readable.
pub fn signal(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

pub struct Places {
    state: Mutex<PlacesState>,
    /// Readable when a handshake has ended.
    ended: OwnedFd,
}

#[derive(Default)]
struct PlacesState {
    /// Those in the handshake, in the order in which they came.
    peers: BTreeMap<u64, Peer>,
    /// The number of the next.
    next: u64,
    /// Places of clients that are taken.
    clients: usize,
    /// Clients that wait for a place, by the numbers that they had in the handshake.
    waiting: VecDeque<(u64, Arc<OwnedFd>)>,
}

struct Peer {
    since: Instant,
    name: Arc<str>,
    /// Ends the connection.
    stop: Arc<OwnedFd>,
    /// It may be disconnected for another one, and was not yet.
    is_replaceable: bool,
}

/// Whether the next peer may be accepted.
pub enum Room {
    Free,
    /// Not before a handshake ends; ask again then, and at this time.
    Full(Option<Instant>),
    /// The same; this peer has just been told to end.
    Replacing(Arc<str>),
}

/// A connection in the handshake, which ends when this is dropped.
pub struct HandshakePlace {
    places: Arc<Places>,
    number: u64,
}

/// The place of a client that uses an export, or waits for one.
pub struct ClientPlace {
    places: Arc<Places>,
    number: u64,
    /// Readable once there is a place; `None` if there was one at once.
    turn: Option<Arc<OwnedFd>>,
}

impl Places {
    /// # Errors
    /// There is no descriptor left.
    pub fn new() -> io::Result<Arc<Self>> {
        let (state, ended) = (Mutex::default(), event()?);
        Ok(Arc::new(Self { state, ended }))
    }

    /// Readable when a handshake has ended since the last [`room`](Self::room).
    pub fn ended(&self) -> &OwnedFd {
        &self.ended
    }

    /// Makes room for the next peer, if that is allowed now.
    pub fn room(&self, now: Instant) -> Room {
        let _ = rustix::io::read(&self.ended, &mut [0; 8]);
        let mut state = self.lock();
        if state.peers.len() < HANDSHAKES_MAX {
            return Room::Free;
        }
        // One at a time: its thread has not ended yet.
        let is_ending = |peer: &&mut Peer| peer.is_replaceable;
        let Some(oldest) = state.peers.values_mut().find(is_ending) else {
            return Room::Full(None);
        };
        let until = oldest.since + UNDISTURBED;
        if now < until {
            return Room::Full(Some(until));
        }
        oldest.is_replaceable = false;
        signal(&oldest.stop);
        Room::Replacing(oldest.name.clone())
    }

    /// A peer was accepted. `stop` ends its connection.
    pub fn enter(self: &Arc<Self>, name: &str, stop: &Arc<OwnedFd>) -> HandshakePlace {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        let peer = Peer {
            since: Instant::now(),
            name: name.into(),
            stop: stop.clone(),
            is_replaceable: true,
        };
        state.peers.insert(number, peer);
        HandshakePlace {
            places: self.clone(),
            number,
        }
    }

    fn lock(&self) -> MutexGuard<'_, PlacesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HandshakePlace {
    /// The peer is known: it is not disconnected for another one.
    pub fn keep(&self) {
        if let Some(peer) = self.places.lock().peers.get_mut(&self.number) {
            peer.is_replaceable = false;
        }
    }

    /// A place for the client, which may have to wait for it. It keeps its place in the handshake meanwhile.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn ask(&self) -> io::Result<ClientPlace> {
        let mut state = self.places.lock();
        let mut turn = None;
        if state.clients < CLIENTS_MAX {
            state.clients += 1;
        } else {
            let event = Arc::new(event()?);
            state.waiting.push_back((self.number, event.clone()));
            turn = Some(event);
        }
        drop(state);
        self.keep();
        Ok(ClientPlace {
            places: self.places.clone(),
            number: self.number,
            turn,
        })
    }
}

impl Drop for HandshakePlace {
    fn drop(&mut self) {
        self.places.lock().peers.remove(&self.number);
        signal(&self.places.ended);
    }
}

impl ClientPlace {
    /// What to wait for; `None` if there is a place.
    pub fn turn(&self) -> Option<&OwnedFd> {
        let turn = self.turn.as_deref()?;
        let state = self.places.lock();
        let mut waiting = state.waiting.iter();
        let waits = waiting.any(|(number, _)| *number == self.number);
        waits.then_some(turn)
    }
}

impl Drop for ClientPlace {
    fn drop(&mut self) {
        let mut state = self.places.lock();
        let before = state.waiting.len();
        let number = self.number;
        state.waiting.retain(|(other, _)| *other != number);
        if state.waiting.len() < before {
            return;
        }
        match state.waiting.pop_front() {
            Some((_, turn)) => signal(&turn),
            None => state.clients -= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(places: &Arc<Places>) -> (HandshakePlace, Arc<OwnedFd>) {
        let stop = Arc::new(event().unwrap());
        (places.enter("a peer", &stop), stop)
    }

    fn is_told(stop: &OwnedFd) -> bool {
        rustix::io::read(stop, &mut [0; 8]).is_ok()
    }

    /// The oldest goes, one for each that comes, and only after its time. Those that are known stay.
    #[test]
    fn peers_in_the_handshake_make_room_for_others() {
        let places = Places::new().unwrap();
        let mut peers: Vec<_> = (0..HANDSHAKES_MAX).map(|_| enter(&places)).collect();
        peers[0].0.keep();
        let _waits = peers[1].0.ask().unwrap();
        let now = Instant::now();
        let Room::Full(Some(until)) = places.room(now) else {
            panic!("there is room");
        };
        assert!(until > now);
        for i in 2..4 {
            assert!(matches!(
                places.room(until + UNDISTURBED),
                Room::Replacing(_)
            ));
            let told = peers.iter().position(|(_, stop)| is_told(stop));
            assert_eq!(told, Some(i));
        }
        drop(peers.remove(2));
        assert!(matches!(places.room(now), Room::Free));
        peers.push(enter(&places));
        for (place, _) in &peers {
            place.keep();
        }
        assert!(matches!(places.room(until + UNDISTURBED), Room::Full(None)));
        drop(peers);
        assert!(is_told(places.ended()));
        assert!(matches!(places.room(now), Room::Free));
    }

    /// Clients get places in the order in which they have asked, and those that leave meanwhile do not count.
    #[test]
    fn clients_wait_for_places() {
        let places = Places::new().unwrap();
        let ask = || enter(&places).0.ask().unwrap();
        let mut clients: VecDeque<_> = (0..CLIENTS_MAX).map(|_| ask()).collect();
        assert!(clients.iter().all(|client| client.turn().is_none()));
        let [first, second, third] = [ask(), ask(), ask()];
        assert!(first.turn().is_some() && second.turn().is_some());
        drop(second);
        clients.pop_front();
        assert!(first.turn().is_none() && third.turn().is_some());
        drop(first);
        assert!(third.turn().is_none());
        drop((third, clients));
        assert_eq!(places.lock().clients, 0);
    }
}
