//! The order of commands: a command claims a disk before it changes the disk.
//!
//! A claim names disks, nodes and exports, and [what these need](super::resources). Claims that have nothing in common are
//! held at the same time; others follow each other in the order in which they were asked for, so that none is overtaken. A
//! thread holds one claim at a time, and it is taken as a whole: no two commands wait for each other. Only the holder of a
//! claim can call what changes a disk, and what it has found stays true until it gives the claim up.
//!
//! Claims come after the [inhibitor of handovers](super::handover::HandoverInhibitor) and before all locks. What guests,
//! backups and storage do by themselves, and queries, go on without one.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::{Server, ServerError};

/// How long a command waits for others. Longer than most commands wait for storage.
const PATIENCE: Duration = Duration::from_secs(30);

/// How many commands of clients may wait: fewer than there are sessions, so that others are answered.
const WAITING_MAX: usize = 8;

/// How many reloads may wait for others: each reads the configuration when its turn has come.
const RELOADS_MAX: usize = 4;

/// What a reload has for itself.
const CONFIGURATION: &str = "configuration:";

/// How long any number of them may wait.
const SHORT: Duration = Duration::from_secs(1);

/// How often a command looks whether its client has left.
const LOOK: Duration = Duration::from_millis(500);

/// How somebody waits for others.
pub struct Waiting<'a> {
    deadline: Instant,
    /// How many of those that came before may wait as well.
    others_max: usize,
    /// Whether nobody wants the claim any more.
    has_left: &'a dyn Fn() -> bool,
}

impl<'a> Waiting<'a> {
    /// As the command of a client waits.
    pub fn of_client(has_left: &'a dyn Fn() -> bool) -> Self {
        Self {
            deadline: Instant::now() + PATIENCE,
            others_max: WAITING_MAX,
            has_left,
        }
    }

    /// The same, but not for longer than this.
    pub fn at_most(self, time: Duration) -> Self {
        let deadline = Instant::now().checked_add(time);
        let deadline = deadline.map_or(self.deadline, |it| it.min(self.deadline));
        Self { deadline, ..self }
    }
}

impl Waiting<'static> {
    /// As what no client has asked for waits.
    pub fn of_process() -> Self {
        Self::until(Instant::now() + PATIENCE)
    }

    pub(super) fn until(deadline: Instant) -> Self {
        Self {
            deadline,
            others_max: usize::MAX,
            has_left: &|| false,
        }
    }
}

/// All claims, held or waited for.
#[derive(Default)]
pub(super) struct Claims {
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Default)]
struct Table {
    /// In the order of their tickets.
    entries: Vec<Entry>,
    last_ticket: u64,
    /// Nothing is claimed any more.
    is_closed: bool,
}

struct Entry {
    ticket: u64,
    names: BTreeSet<String>,
    /// The command that needs it.
    command: &'static str,
    since: Instant,
    thread: ThreadId,
    /// It takes one of the sessions.
    is_client: bool,
}

impl Table {
    /// How many clients that came before have waited for others for a while.
    fn waiting_before(&self, ticket: u64) -> usize {
        let entries = self
            .entries
            .iter()
            .take_while(|entry| entry.ticket < ticket);
        let entries = entries.filter(|entry| entry.is_client && entry.since.elapsed() >= SHORT);
        let waiting = entries.filter(|entry| self.ahead_of(entry.ticket).is_some());
        waiting.count()
    }

    /// What an entry waits for, with a name that both have.
    fn ahead_of(&self, ticket: u64) -> Option<(&Entry, &String)> {
        let place = self.entries.iter().position(|e| e.ticket == ticket)?;
        let (earlier, own) = (&self.entries[..place], &self.entries[place]);
        earlier.iter().find_map(|other| {
            let common = other.names.intersection(&own.names).next()?;
            Some((other, common))
        })
    }
}

impl Claims {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody else holds these names, or waits for them since earlier. Returns the ticket.
    fn take(
        &self,
        names: BTreeSet<String>,
        command: &'static str,
        waiting: &Waiting<'_>,
    ) -> Result<u64, ServerError> {
        let mut table = self.table();
        let thread = thread::current().id();
        debug_assert!(
            table.entries.iter().all(|entry| entry.thread != thread),
            "{command}: this thread has a claim already"
        );
        table.last_ticket += 1;
        let (ticket, since) = (table.last_ticket, Instant::now());
        table.entries.push(Entry {
            ticket,
            names,
            command,
            since,
            thread,
            is_client: waiting.others_max < usize::MAX,
        });
        loop {
            let error = if table.is_closed {
                ServerError::Stopping
            } else if (waiting.has_left)() {
                ServerError::Left
            } else {
                let Some((other, name)) = table.ahead_of(ticket) else {
                    return Ok(ticket);
                };
                let left = waiting.deadline.saturating_duration_since(Instant::now());
                // Most commands take milliseconds.
                let before = table.waiting_before(ticket);
                let may_wait = since.elapsed() < SHORT || before < waiting.others_max;
                if !left.is_zero() && may_wait {
                    let waited = self.changed.wait_timeout(table, left.min(LOOK));
                    table = waited.unwrap_or_else(PoisonError::into_inner).0;
                    continue;
                }
                ServerError::Busy {
                    what: describe(name),
                    command: other.command,
                    seconds: other.since.elapsed().as_secs(),
                }
            };
            drop(table);
            self.give_up(ticket, || ());
            return Err(error);
        }
    }

    /// Others may hold the names when `work` is done.
    fn give_up(&self, ticket: u64, work: impl FnOnce()) {
        let mut table = self.table();
        table.entries.retain(|entry| entry.ticket != ticket);
        work();
        drop(table);
        self.changed.notify_all();
    }

    fn keep(&self, ticket: u64, names: &BTreeSet<String>) {
        let mut table = self.table();
        let mut entries = table.entries.iter_mut();
        if let Some(entry) = entries.find(|entry| entry.ticket == ticket) {
            entry.names.clone_from(names);
        }
        drop(table);
        self.changed.notify_all();
    }

    /// From now on, nothing is claimed: commands that wait fail.
    pub(super) fn close(&self) {
        self.table().is_closed = true;
        self.changed.notify_all();
    }

    /// Does something unless somebody has claimed this, and before anybody has.
    pub(super) fn unless_claimed(&self, name: &str, work: impl FnOnce()) {
        let table = self.table();
        let is_held = |entry: &Entry| table.ahead_of(entry.ticket).is_none();
        let mut entries = table.entries.iter();
        if !entries.any(|entry| entry.names.contains(name) && is_held(entry)) {
            work();
        }
    }
}

/// The right to change what it names. Given up when it is dropped.
pub struct Claim<'a> {
    server: &'a Server,
    names: BTreeSet<String>,
    ticket: u64,
}

impl Claim<'_> {
    /// Gives up all but these names, and what belongs to them.
    pub(super) fn keep(&mut self, names: &BTreeSet<String>) {
        let kept = self.server.related(names.clone());
        self.names.retain(|name| kept.contains(name));
        self.server.claims.keep(self.ticket, &self.names);
    }

    /// What it names.
    pub(super) fn names(&self) -> &BTreeSet<String> {
        &self.names
    }

    /// Whether it names this.
    pub(super) fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Checks that the claim names this, in tests: to change anything else is a mistake of the program.
    pub(super) fn covers(&self, name: &str) {
        debug_assert!(
            self.names.contains(name),
            "{name} is not claimed, but {:?}",
            self.names
        );
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // A change of bitmaps has brought back those of a backup that has ended meanwhile.
        let forget = || {
            (self.server.backups).forget_ended(|node| self.names.contains(node));
        };
        self.server.claims.give_up(self.ticket, forget);
    }
}

/// The turn of a reload: there is one at a time. Given up when it is dropped.
pub(super) struct Turn<'a> {
    claims: &'a Claims,
    ticket: u64,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.claims.give_up(self.ticket, || ());
    }
}

impl Server {
    /// Waits for the turn of a reload, before it claims disks.
    ///
    /// # Errors
    /// Another one does not end, or the process does.
    pub(super) fn reload_turn(&self, waiting: &Waiting<'_>) -> Result<Turn<'_>, ServerError> {
        let waiting = Waiting {
            others_max: waiting.others_max.min(RELOADS_MAX),
            ..*waiting
        };
        let claims = &self.reloads;
        let names = BTreeSet::from([CONFIGURATION.to_owned()]);
        let ticket = claims.take(names, "reload", &waiting)?;
        Ok(Turn { claims, ticket })
    }

    /// Claims what `names` returns, with all nodes and exports that belong to it.
    ///
    /// # Errors
    /// Another command does not end, or the process does.
    pub fn claim<N: AsRef<str>>(
        &self,
        command: &'static str,
        names: impl Fn() -> Vec<N>,
    ) -> Result<Claim<'_>, ServerError> {
        let waiting = Waiting::of_process();
        self.claim_as(&waiting, command, names)
    }

    /// Like [`claim`](Self::claim), but waits in another way.
    pub fn claim_as<N: AsRef<str>>(
        &self,
        waiting: &Waiting<'_>,
        command: &'static str,
        names: impl Fn() -> Vec<N>,
    ) -> Result<Claim<'_>, ServerError> {
        let wanted = || {
            let names = names().into_iter();
            self.related(names.map(|name| name.as_ref().to_owned()).collect())
        };
        loop {
            let names = wanted();
            let ticket = self.claims.take(names.clone(), command, waiting)?;
            let claim = Claim {
                server: self,
                names,
                ticket,
            };
            // The commands that were waited for may have given the names to others.
            if wanted().is_subset(&claim.names) {
                return Ok(claim);
            }
        }
    }

    /// These names, and those of all nodes and exports that belong to the same disks.
    fn related(&self, mut names: BTreeSet<String>) -> BTreeSet<String> {
        let mut both: Vec<(String, String)> = {
            let state = self.state();
            let exports = state.exports.iter();
            let exports = exports.map(|(id, export)| (id.clone(), export.node.name().to_owned()));
            let nodes = state.nodes.iter();
            let nodes =
                nodes.filter_map(|(name, entry)| Some((name.clone(), entry.child.clone()?)));
            exports.chain(nodes).collect()
        };
        let waiting = self.waiting_exports().into_iter();
        both.extend(waiting.map(|export| (export.id, export.node)));
        let exports = self.nbd.exports().into_iter();
        both.extend(exports.map(|export| (export.id.clone(), export.device.disk.name.clone())));
        for backup in self.backups.all() {
            let disks = backup.disks.iter();
            both.extend(disks.map(|disk| (disk.access.clone(), disk.device.disk.name.clone())));
        }
        loop {
            let before = names.len();
            for (one, other) in &both {
                if names.contains(one) || names.contains(other) {
                    names.extend([one.clone(), other.clone()]);
                }
            }
            if names.len() == before {
                return names;
            }
        }
    }
}

/// A claimed name as users know it: that of a disk, or one of [`resources`](super::resources).
fn describe(claimed: &str) -> String {
    let known = [
        ("file:", "file"),
        ("socket:", "socket"),
        ("group:", "throttle group"),
        ("iothread:", "I/O thread"),
        ("nbd:", "NBD export"),
    ];
    let found = known
        .iter()
        .find_map(|(prefix, what)| Some((what, claimed.strip_prefix(prefix)?)));
    match found {
        _ if claimed == CONFIGURATION => "the configuration".into(),
        Some((what, name)) => format!("{what} '{name}'"),
        None => format!("disk '{claimed}'"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    fn names(all: &[&str]) -> BTreeSet<String> {
        all.iter().map(|&name| name.to_owned()).collect()
    }

    fn later() -> Waiting<'static> {
        Waiting::until(Instant::now() + Duration::from_secs(600))
    }

    /// Waits until so many claims are held or waited for.
    fn wait_for(claims: &Claims, number: usize) {
        while claims.table().entries.len() < number {
            thread::yield_now();
        }
    }

    #[test]
    fn claims_of_other_disks_do_not_wait() {
        let claims = Claims::default();
        let first = claims.take(names(&["a"]), "first", &later()).unwrap();
        thread::scope(|scope| {
            let second = scope.spawn(|| claims.take(names(&["b"]), "second", &later()));
            claims.give_up(second.join().unwrap().unwrap(), || ());
        });
        claims.give_up(first, || ());
    }

    /// A command for all disks is not overtaken by those that come later for one that is free.
    #[test]
    fn claims_are_held_in_the_order_in_which_they_are_asked_for() {
        let claims = Arc::new(Claims::default());
        let first = claims.take(names(&["a"]), "first", &later()).unwrap();
        let (done, order) = mpsc::channel();
        let asked = [("all", names(&["a", "b"])), ("b", names(&["b"]))];
        let threads = asked.into_iter().enumerate().map(|(i, (command, names))| {
            let (claims, done) = (claims.clone(), done.clone());
            let thread_claims = claims.clone();
            let thread = thread::spawn(move || {
                let ticket = thread_claims.take(names, command, &later()).unwrap();
                done.send(command).unwrap();
                thread_claims.give_up(ticket, || ());
            });
            wait_for(&claims, i + 2);
            thread
        });
        let threads: Vec<_> = threads.collect();
        assert!(order.try_recv().is_err());
        claims.give_up(first, || ());
        assert_eq!([order.recv(), order.recv()], [Ok("all"), Ok("b")]);
        threads.into_iter().for_each(|t| t.join().unwrap());
    }

    /// The error says which command holds what, and one that gives up holds up nobody.
    #[test]
    fn command_that_waits_too_long_says_for_what() {
        let claims = Claims::default();
        let first = claims
            .take(names(&["a", "b"]), "replace", &later())
            .unwrap();
        thread::scope(|scope| {
            let second = scope.spawn(|| {
                claims.take(
                    names(&["b", "c"]),
                    "detach",
                    &Waiting::until(Instant::now()),
                )
            });
            match second.join().unwrap() {
                Err(ServerError::Busy { what, command, .. }) => {
                    assert_eq!((what.as_str(), command), ("disk 'b'", "replace"));
                }
                other => panic!("{other:?}"),
            }
            let third = scope.spawn(|| claims.take(names(&["c"]), "attach", &later()));
            claims.give_up(third.join().unwrap().unwrap(), || ());
        });
        claims.give_up(first, || ());
    }

    /// Clients leave sessions to others, and one that has hung up does not wait.
    #[test]
    fn few_clients_wait() {
        let claims = Claims::default();
        let first = claims.take(names(&["a"]), "replace", &later()).unwrap();
        let leave = AtomicBool::new(false);
        thread::scope(|scope| {
            let client = || {
                let has_left = || leave.load(Ordering::SeqCst);
                claims.take(names(&["a"]), "detach", &Waiting::of_client(&has_left))
            };
            let waiting: Vec<_> = (0..WAITING_MAX).map(|_| scope.spawn(client)).collect();
            wait_for(&claims, 1 + WAITING_MAX);
            while claims.table().waiting_before(u64::MAX) < WAITING_MAX {
                thread::yield_now();
            }
            let refused = scope.spawn(client).join().unwrap();
            assert!(
                matches!(refused, Err(ServerError::Busy { .. })),
                "{refused:?}"
            );
            leave.store(true, Ordering::SeqCst);
            for client in waiting {
                assert!(matches!(client.join().unwrap(), Err(ServerError::Left)));
            }
        });
        claims.give_up(first, || ());
        assert!(claims.table().entries.is_empty());
    }

    #[test]
    fn names_that_are_given_up_are_free() {
        let claims = Claims::default();
        let first = claims.take(names(&["a", "b"]), "reload", &later()).unwrap();
        thread::scope(|scope| {
            let second = scope.spawn(|| claims.take(names(&["b"]), "throttle", &later()));
            wait_for(&claims, 2);
            claims.keep(first, &names(&["a"]));
            claims.give_up(second.join().unwrap().unwrap(), || ());
        });
        claims.give_up(first, || ());
    }

    #[test]
    fn nothing_is_claimed_once_the_process_ends() {
        let claims = Claims::default();
        let first = claims.take(names(&["a"]), "replace", &later()).unwrap();
        thread::scope(|scope| {
            let second = scope.spawn(|| claims.take(names(&["a"]), "detach", &later()));
            wait_for(&claims, 2);
            claims.close();
            assert!(matches!(second.join().unwrap(), Err(ServerError::Stopping)));
        });
        claims.give_up(first, || ());
        let late = claims.take(names(&["a"]), "detach", &later());
        assert!(matches!(late, Err(ServerError::Stopping)));
    }

    /// Random claims from many threads: no name is held twice, and all end.
    #[test]
    fn no_two_claims_hold_the_same_name() {
        let claims = Claims::default();
        let held: Vec<AtomicUsize> = (0..5).map(|_| AtomicUsize::new(0)).collect();
        thread::scope(|scope| {
            for seed in 1..=8u64 {
                let (claims, held) = (&claims, &held);
                scope.spawn(move || {
                    let mut random = seed;
                    for _ in 0..500 {
                        random = random
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1);
                        let wanted: Vec<usize> =
                            (0..5).filter(|i| random >> (40 + i) & 1 == 1).collect();
                        let names = wanted.iter().map(ToString::to_string).collect();
                        let ticket = claims.take(names, "random", &later()).unwrap();
                        for &i in &wanted {
                            assert_eq!(held[i].fetch_add(1, Ordering::SeqCst), 0);
                        }
                        thread::yield_now();
                        for &i in &wanted {
                            held[i].fetch_sub(1, Ordering::SeqCst);
                        }
                        claims.give_up(ticket, || ());
                    }
                });
            }
        });
        assert!(claims.table().entries.is_empty());
    }

    #[cfg(debug_assertions)]
    #[test]
    #[should_panic(expected = "has a claim already")]
    fn thread_that_claims_twice_is_a_mistake() {
        let claims = Claims::default();
        claims.take(names(&["a"]), "first", &later()).unwrap();
        let _ = claims.take(names(&["b"]), "second", &later());
    }
}
