//! The I/O threads of this process, by id, each started when a queue first needs it.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use datapath::{IoThread, Polling};
use engine::{MultiEngine, Support, UringError};
use guest::Virtqueue;
use rbd::RbdEngine;
use rustix::thread::{CpuSet, sched_setaffinity};
use thiserror::Error;

use crate::config::cpus::Cpus;
use crate::config::{THREADS_MAX, ThreadSpec};
use crate::server::numa::{Home, Nodes};

/// Threads by default: one per CPU, up to this.
const DEFAULT_MAX: usize = 16;

/// The pool, `iothread0` and on, which queues go to in turn; and threads with names of their own, which
/// serve only the disks that ask for them.
pub struct IoThreads {
    pool: Vec<ThreadSpec>,
    /// To choose from, for threads whose CPUs the operator has not named.
    nodes: Option<Arc<Nodes>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The thread of the pool that the next queue goes to.
    next: usize,
    running: BTreeMap<String, Running>,
}

struct Running {
    spec: ThreadSpec,
    /// Threads added by name stay when nothing uses them.
    thread: NamedThread,
}

/// A running thread, as queues see it.
#[derive(Clone)]
pub struct NamedThread {
    pub id: String,
    pub thread: Arc<IoThread>,
    /// Keeps it near its queues, where there is a choice.
    home: Option<Arc<Home>>,
}

impl NamedThread {
    /// Moves the thread near a queue that it is going to serve, if it is to be moved at all. Returns what
    /// `leave` wants back.
    pub fn arrive(&self, queue: &Virtqueue) -> Option<u32> {
        let home = self.home.as_ref()?;
        home.arrive(&self.id, &self.thread, queue.address())
    }

    /// It serves the queue no longer.
    pub fn leave(&self, arrived: Option<u32>) {
        if let (Some(home), Some(node)) = (&self.home, arrived) {
            home.leave(node);
        }
    }
}

#[derive(Debug, Error)]
pub enum IoThreadError {
    #[error(
        "there is no I/O thread '{0}'; there are {1} (--iothreads, [[iothread]] in the configuration, \
        or object-add make more)"
    )]
    Unknown(String, String),
    #[error("there is an I/O thread '{0}' already; choose another id")]
    Exists(String),
    #[error("I/O thread '{0}' serves disks; detach these first")]
    InUse(String),
    #[error("I/O thread '{0}' is one of the pool, which stays as it was started (--iothreads)")]
    OfPool(String),
    #[error("there are {THREADS_MAX} I/O threads already; remove one first")]
    TooMany,
    #[error("I/O thread '{0}' may run on CPUs {1}, none of which this process can use: {2}")]
    Affinity(String, Cpus, io::Error),
    #[error(transparent)]
    Uring(#[from] UringError),
    #[error("cannot start an I/O thread: {cause}", cause = block::explain_thread(.0))]
    Thread(#[from] io::Error),
}

impl IoThreads {
    /// A pool of `n` threads, by default one per CPU, all polling alike, the i-th on the i-th of
    /// `cpus` in turn.
    pub fn new(n: Option<usize>, cpus: &Cpus, polling: Polling) -> Self {
        let n = n.unwrap_or_else(|| {
            thread::available_parallelism().map_or(1, |n| n.get().min(DEFAULT_MAX))
        });
        let pool = (0..n)
            .map(|i| ThreadSpec {
                cpus: cpus.turn(i),
                polling,
            })
            .collect();
        Self {
            pool,
            nodes: Nodes::here(),
            state: Mutex::default(),
        }
    }

    /// How a thread polls that is not told otherwise.
    pub fn polling(&self) -> Polling {
        self.pool[0].polling
    }

    /// All threads of the pool, started.
    ///
    /// # Errors
    /// One of them cannot be.
    pub fn all(&self) -> Result<Vec<NamedThread>, IoThreadError> {
        let mut state = self.state();
        (0..self.pool.len())
            .map(|i| self.of_pool(&mut state, i))
            .collect()
    }

    /// Threads for `queues` queues of a disk: those that `wanted` names, in turn, or else the next ones
    /// of the pool.
    ///
    /// # Errors
    /// There is no such thread, or it cannot be started.
    pub fn assign(
        &self,
        queues: u16,
        wanted: &[String],
    ) -> Result<Vec<NamedThread>, IoThreadError> {
        let mut state = self.state();
        (0..usize::from(queues))
            .map(|queue| match wanted {
                [] => {
                    let i = state.next;
                    state.next = (i + 1) % self.pool.len();
                    self.of_pool(&mut state, i)
                }
                _ => self.named(&mut state, &wanted[queue % wanted.len()]),
            })
            .collect()
    }

    /// Whether all threads of these names can be had, without starting one.
    ///
    /// # Errors
    /// One of them is not there.
    pub fn check(&self, wanted: &[String]) -> Result<(), IoThreadError> {
        let state = self.state();
        let missing = |id: &String| !state.running.contains_key(id) && self.place(id).is_none();
        match wanted.iter().map(|id| full_id(id)).find(missing) {
            Some(id) => Err(self.unknown(&state, &id)),
            None => Ok(()),
        }
    }

    /// Adds a thread by name.
    ///
    /// # Errors
    /// The name is taken, or the thread cannot be started.
    pub fn add(&self, id: &str, spec: ThreadSpec) -> Result<(), IoThreadError> {
        let mut state = self.state();
        if state.running.contains_key(id) || self.place(id).is_some() {
            return Err(IoThreadError::Exists(id.into()));
        }
        if state.running.len() >= THREADS_MAX {
            return Err(IoThreadError::TooMany);
        }
        self.start(&mut state, id, spec).map(drop)
    }

    /// Ends a thread that was added by name and serves nothing.
    ///
    /// # Errors
    /// There is none of this name, or it serves disks.
    pub fn remove(&self, id: &str) -> Result<(), IoThreadError> {
        if self.place(id).is_some() {
            return Err(IoThreadError::OfPool(id.into()));
        }
        let mut state = self.state();
        let Some(running) = state.running.get(id) else {
            return Err(self.unknown(&state, id));
        };
        if Arc::strong_count(&running.thread.thread) > 1 {
            return Err(IoThreadError::InUse(id.into()));
        }
        state.running.remove(id);
        Ok(())
    }

    /// The threads that were added by name.
    pub fn added(&self) -> Vec<(String, ThreadSpec)> {
        let state = self.state();
        let added = state
            .running
            .iter()
            .filter(|(id, _)| self.place(id).is_none());
        added
            .map(|(id, running)| (id.clone(), running.spec.clone()))
            .collect()
    }

    /// The threads that run, in the order of their ids.
    pub fn running(&self) -> Vec<(NamedThread, ThreadSpec)> {
        let state = self.state();
        let each = state.running.iter();
        each.map(|(_, running)| (running.thread.clone(), running.spec.clone()))
            .collect()
    }

    fn named(&self, state: &mut State, id: &str) -> Result<NamedThread, IoThreadError> {
        let id = full_id(id);
        if let Some(running) = state.running.get(&id) {
            return Ok(running.thread.clone());
        }
        match self.place(&id) {
            Some(i) => self.of_pool(state, i),
            None => Err(self.unknown(state, &id)),
        }
    }

    fn of_pool(&self, state: &mut State, i: usize) -> Result<NamedThread, IoThreadError> {
        let id = pool_id(i);
        if let Some(running) = state.running.get(&id) {
            return Ok(running.thread.clone());
        }
        self.start(state, &id, self.pool[i].clone())
    }

    fn start(
        &self,
        state: &mut State,
        id: &str,
        spec: ThreadSpec,
    ) -> Result<NamedThread, IoThreadError> {
        let (polling, cpus, its_id) = (spec.polling, spec.cpus.clone(), id.to_owned());
        let thread = IoThread::spawn(id.to_owned(), polling, move || {
            // Before the ring is made, whose kernel workers inherit it.
            if !cpus.is_empty() {
                let mut set = CpuSet::new();
                cpus.iter().for_each(|cpu| set.set(cpu));
                sched_setaffinity(None, &set)
                    .map_err(|e| IoThreadError::Affinity(its_id, cpus, e.into()))?;
            }
            let engine = MultiEngine::new(Support::here())?;
            Ok::<_, IoThreadError>(RbdEngine::new(engine)?)
        })?;
        let nodes = self.nodes.clone().filter(|_| spec.cpus.is_empty());
        let thread = NamedThread {
            id: id.to_owned(),
            thread: Arc::new(thread),
            home: nodes.map(Home::new).map(Arc::new),
        };
        let running = Running {
            spec,
            thread: thread.clone(),
        };
        state.running.insert(id.to_owned(), running);
        Ok(thread)
    }

    /// Where in the pool the thread of this id is.
    fn place(&self, id: &str) -> Option<usize> {
        (0..self.pool.len()).find(|&i| pool_id(i) == id)
    }

    fn unknown(&self, state: &State, id: &str) -> IoThreadError {
        let pool = match self.pool.len() {
            1 => pool_id(0),
            n => format!("{} to {}", pool_id(0), pool_id(n - 1)),
        };
        let named = state.running.keys().filter(|id| self.place(id).is_none());
        let all: Vec<_> = [pool].into_iter().chain(named.cloned()).collect();
        IoThreadError::Unknown(id.into(), all.join(", "))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn pool_id(i: usize) -> String {
    format!("iothread{i}")
}

/// A number is short for a thread of the pool.
fn full_id(id: &str) -> String {
    match id.parse::<usize>() {
        Ok(i) => pool_id(i),
        Err(_) => id.to_owned(),
    }
}
