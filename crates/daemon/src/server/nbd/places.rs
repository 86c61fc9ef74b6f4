//! Places of connections: some for the handshake, and others for clients that use an export.
//!
//! A client that asks to use an export while all of those places are taken waits for its answer until another client has left,
//! and has no place in the handshake meanwhile. A peer in the handshake may be anybody, so it keeps others out for a short time
//! only: if all of its places are taken, the next peers wait in the socket's queue until the peer that has been there longest
//! is disconnected. Peers that have shown a certificate, and clients that wait for a place, are not disconnected for others.
//!
//! A client with several connections needs several places before it begins, so such clients can wait for each other. Two rules
//! prevent that they do so for ever: only the first quarter of the clients is told that it may open more
//! ([`HandshakePlace::allows_more`]); and if all stand still, the client that has waited longest is [refused](ClientPlace::gives_up).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

/// Limit of clients that use an export.
pub const CLIENTS_MAX: usize = 100;

/// So many clients may hold several connections: with four each, there are places for all of them.
const WITH_MORE_MAX: usize = CLIENTS_MAX / 4;

/// Limit of clients that wait for a place.
pub const WAITING_MAX: usize = 256;

/// After this time in which no client has got anywhere, one that waits is refused.
pub const STALLED: Duration = Duration::from_secs(30);

/// Limit of connections in the handshake.
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
    /// Readable when there is one handshake less.
    ended: OwnedFd,
    /// Grows when requests of clients are done, or a client leaves.
    progress: AtomicU64,
}

#[derive(Default)]
struct PlacesState {
    /// Those in the handshake and those that wait, in the order in which they came.
    peers: BTreeMap<u64, Peer>,
    /// The number of the next.
    next: u64,
    /// Places of clients that are taken.
    clients: usize,
    /// Clients that wait for a place, by the numbers that they had in the handshake.
    waiting: VecDeque<(u64, Arc<OwnedFd>)>,
}

struct Peer {
    /// When it has come, or has last waited for a place.
    since: Instant,
    name: Arc<str>,
    /// Ends the connection.
    stop: Arc<OwnedFd>,
    /// It may be disconnected for another one, and was not yet.
    is_replaceable: bool,
    /// It waits for the place of a client.
    waits: bool,
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
    /// The progress of all clients when it was last looked at, and when that was.
    seen: (u64, Instant),
}

impl Places {
    /// # Errors
    /// There is no descriptor left.
    pub fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            state: Mutex::default(),
            ended: event()?,
            progress: AtomicU64::new(0),
        }))
    }

    /// Requests of a client are done.
    pub fn progressed(&self) {
        self.progress.fetch_add(1, Relaxed);
    }

    /// Readable when a handshake has ended, or waits, since the last [`room`](Self::room).
    pub fn ended(&self) -> &OwnedFd {
        &self.ended
    }

    /// Makes room for the next peer, if that is allowed now.
    pub fn room(&self, now: Instant) -> Room {
        let _ = rustix::io::read(&self.ended, &mut [0; 8]);
        let mut state = self.lock();
        let negotiating = state.peers.values_mut().filter(|peer| !peer.waits);
        let mut negotiating: Vec<_> = negotiating.collect();
        if negotiating.len() < HANDSHAKES_MAX {
            return Room::Free;
        }
        // One at a time: its thread has not ended yet.
        negotiating.retain(|peer| peer.is_replaceable);
        let Some(oldest) = negotiating.into_iter().min_by_key(|peer| peer.since) else {
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
            waits: false,
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

    /// A place for the client, which may have to wait for it. Returns `None` if too many wait.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn ask(&self) -> io::Result<Option<ClientPlace>> {
        let mut state = self.places.lock();
        let mut turn = None;
        if state.clients < CLIENTS_MAX {
            state.clients += 1;
        } else if state.waiting.len() < WAITING_MAX {
            let event = Arc::new(event()?);
            state.waiting.push_back((self.number, event.clone()));
            turn = Some(event);
            state.set_waits(self.number, true);
            signal(&self.places.ended);
        } else {
            return Ok(None);
        }
        drop(state);
        Ok(Some(ClientPlace {
            places: self.places.clone(),
            number: self.number,
            turn,
            seen: (self.places.progress.load(Relaxed), Instant::now()),
        }))
    }

    /// Whether the client may be told that it may open several connections; `place` is what it has. At most [`WITH_MORE_MAX`]
    /// clients with a place were told so, since each of them has one.
    pub fn allows_more(&self, place: Option<&ClientPlace>) -> bool {
        let others = self.places.lock().clients - usize::from(place.is_some());
        others < WITH_MORE_MAX
    }
}

impl PlacesState {
    /// A peer begins to wait for a place, or goes on with its handshake, for which it has time again.
    fn set_waits(&mut self, number: u64, waits: bool) {
        if let Some(peer) = self.peers.get_mut(&number) {
            peer.waits = waits;
            peer.since = Instant::now();
        }
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

    /// When to ask whether it [gives up](Self::gives_up).
    pub fn ask_again_at(&self) -> Instant {
        self.seen.1 + STALLED
    }

    /// Whether it waits in vain: nobody has got anywhere for [`STALLED`], and it has waited longest. The next one waits as long
    /// again, since this one may have other connections, which end now.
    pub fn gives_up(&mut self, now: Instant) -> bool {
        if now < self.ask_again_at() {
            return false;
        }
        let state = self.places.lock();
        let progress = self.places.progress.load(Relaxed);
        let is_first = (state.waiting.front()).is_some_and(|(number, _)| *number == self.number);
        let gives_up = is_first && progress == self.seen.0;
        if gives_up {
            self.places.progressed();
        }
        drop(state);
        self.seen = (progress, now);
        gives_up
    }
}

impl Drop for ClientPlace {
    fn drop(&mut self) {
        self.places.progressed();
        let mut state = self.places.lock();
        let before = state.waiting.len();
        let number = self.number;
        state.waiting.retain(|(other, _)| *other != number);
        if state.waiting.len() < before {
            state.set_waits(number, false);
            return;
        }
        match state.waiting.pop_front() {
            Some((next, turn)) => {
                state.set_waits(next, false);
                signal(&turn);
            }
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
        peers[1].0.keep();
        // Whether or not there is an export for it: it has its place.
        let _asks = peers[2].0.ask().unwrap();
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
        let ask = || enter(&places).0.ask().unwrap().unwrap();
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

    /// They have no place in the handshake until it is their turn, or they have left. There is a limit for them.
    #[test]
    fn clients_that_wait_keep_nobody_out() {
        let places = Places::new().unwrap();
        let ask = |peer: &HandshakePlace| peer.ask().unwrap();
        let mut clients: Vec<_> = (0..CLIENTS_MAX).map(|_| ask(&enter(&places).0)).collect();
        let mut waiting = Vec::new();
        for _ in 0..WAITING_MAX {
            assert!(matches!(places.room(Instant::now()), Room::Free));
            let (peer, stop) = enter(&places);
            let place = ask(&peer).unwrap();
            assert!(is_told(places.ended()));
            waiting.push((place, peer, stop));
        }
        let (next, _stop) = enter(&places);
        assert!(ask(&next).is_none());
        drop(next);
        let peers: Vec<_> = (0..HANDSHAKES_MAX - 1).map(|_| enter(&places)).collect();
        let later = Instant::now() + 2 * UNDISTURBED;
        assert!(matches!(places.room(later), Room::Free));
        // Its handshake goes on, and it is one of the peers. It came before they did, and has its time again.
        clients.pop();
        assert!(waiting[0].0.turn().is_none());
        assert!(matches!(places.room(later), Room::Replacing(_)));
        assert!(is_told(&peers[0].1) && !is_told(&waiting[0].2));
        drop(waiting);
        drop(clients);
        assert_eq!(places.lock().clients, 0);
    }

    /// Those that hold several connections have places for four each, whenever they open them.
    #[test]
    fn few_clients_may_open_several_connections() {
        let places = Places::new().unwrap();
        let peers: Vec<_> = (0..60).map(|_| enter(&places)).collect();
        let mut clients = Vec::new();
        for (number, (peer, _)) in peers.iter().enumerate() {
            let place = peer.ask().unwrap().unwrap();
            assert_eq!(peer.allows_more(Some(&place)), number < WITH_MORE_MAX);
            clients.push(place);
        }
        assert!(!peers[0].0.allows_more(None));
        clients.truncate(WITH_MORE_MAX);
        assert!(!peers[0].0.allows_more(None));
        clients.pop();
        assert!(peers[0].0.allows_more(None));
    }

    /// One at a time, and only if nobody gets anywhere.
    #[test]
    fn clients_that_wait_in_vain_give_up() {
        let places = Places::new().unwrap();
        let ask = || enter(&places).0.ask().unwrap().unwrap();
        let clients: Vec<_> = (0..CLIENTS_MAX).map(|_| ask()).collect();
        let [mut first, mut second] = [ask(), ask()];
        let begin = Instant::now();
        let at = |times: u32| begin + STALLED * times;
        assert!(!first.gives_up(begin));
        places.progressed();
        assert!(!first.gives_up(at(1)) && !second.gives_up(at(1)));
        assert!(!second.gives_up(at(2)), "another one has waited longer");
        assert!(first.gives_up(at(2)));
        drop(first);
        assert!(!second.gives_up(at(3)), "another one has just given up");
        assert!(second.gives_up(at(4)));
        drop((second, clients));
        assert_eq!(places.lock().clients, 0);
    }
}
