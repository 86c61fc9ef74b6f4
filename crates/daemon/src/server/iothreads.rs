//! The I/O threads of this process, by id. Each starts when a queue first needs it.

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

/// Default limit of threads: one per CPU, up to this number.
const DEFAULT_MAX: usize = 16;

/// The pool (`iothread0` and so on), to which queues are assigned in turn, and named threads, which serve only the
/// disks that name them.
pub struct IoThreads {
    /// Those that exist or can be started.
    pool: Vec<ThreadSpec>,
    /// How many of the pool get queues in turn. Disks may name the others.
    in_turn: usize,
    /// NUMA nodes to choose from, for threads without configured CPUs.
    nodes: Option<Arc<Nodes>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The thread of the pool that gets the next queue.
    next: usize,
    running: BTreeMap<String, Running>,
}

struct Running {
    spec: ThreadSpec,
    /// Named threads stay when nothing uses them.
    thread: NamedThread,
}

/// A running thread, as queues see it.
#[derive(Clone)]
pub struct NamedThread {
    pub id: String,
    pub thread: Arc<IoThread>,
    /// Keeps it near its queues, on hosts with several NUMA nodes.
    home: Option<Arc<Home>>,
}

impl NamedThread {
    /// Moves the thread near a queue that it will serve, if its placement is automatic. Returns what `leave` needs.
    pub fn arrive(&self, queue: &Virtqueue) -> Option<u32> {
        let home = self.home.as_ref()?;
        home.arrive(&self.id, &self.thread, queue.address())
    }

    /// The thread no longer serves the queue.
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
        or the QMP command object-add make more)"
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
    /// A pool of `n` threads, by default one per CPU. All have the same polling; thread i runs on CPU i of `cpus`, in
    /// turn. If the number is the default, disks may name every thread that a host with more CPUs would have: whether a
    /// disk can be served must not depend on the number of CPUs.
    pub fn new(n: Option<usize>, cpus: &Cpus, polling: Polling) -> Self {
        let default = || thread::available_parallelism().map_or(1, |n| n.get().min(DEFAULT_MAX));
        let in_turn = n.unwrap_or_else(default);
        let pool = (0..n.unwrap_or(DEFAULT_MAX))
            .map(|i| ThreadSpec {
                cpus: cpus.turn(i),
                polling,
            })
            .collect();
        Self {
            pool,
            in_turn,
            nodes: Nodes::here(),
            state: Mutex::default(),
        }
    }

    /// The polling of threads without settings of their own.
    pub fn polling(&self) -> Polling {
        self.pool[0].polling
    }

    /// Starts all threads of the pool that get queues in turn.
    ///
    /// # Errors
    /// One of them cannot be started.
    pub fn all(&self) -> Result<Vec<NamedThread>, IoThreadError> {
        let mut state = self.state();
        (0..self.in_turn)
            .map(|i| self.of_pool(&mut state, i))
            .collect()
    }

    /// Threads for `queues` queues of a disk: those that `wanted` names, in turn, otherwise the next ones of the pool.
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
                    state.next = (i + 1) % self.in_turn;
                    self.of_pool(&mut state, i)
                }
                _ => self.named(&mut state, &wanted[queue % wanted.len()]),
            })
            .collect()
    }

    /// Checks that all threads of these names exist, without starting one.
    ///
    /// # Errors
    /// One of them does not exist.
    pub fn check(&self, wanted: &[String]) -> Result<(), IoThreadError> {
        let state = self.state();
        let missing = |id: &String| !state.running.contains_key(id) && self.place(id).is_none();
        match wanted.iter().map(|id| full_id(id)).find(missing) {
            Some(id) => Err(self.unknown(&state, &id)),
            None => Ok(()),
        }
    }

    /// Adds a named thread.
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

    /// Stops a named thread that serves nothing.
    ///
    /// # Errors
    /// There is no such thread, or it serves disks.
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

    /// The named threads.
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

    /// The running threads, in the order of their ids.
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
            // Before the ring is created: its kernel workers inherit the CPUs.
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

    /// The index in the pool of the thread with this id.
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

/// A number stands for a thread of the pool.
pub fn full_id(id: &str) -> String {
    match id.parse::<usize>() {
        Ok(i) => pool_id(i),
        Err(_) => id.to_owned(),
    }
}
