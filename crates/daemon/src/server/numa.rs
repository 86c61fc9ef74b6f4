//! Places I/O threads on hosts with several NUMA nodes, if the operator has not: near the rings that they serve, which
//! both thread and guest access for every request.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use datapath::IoThread;
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tracing::{debug, info};

use crate::config::cpus::Cpus;

/// The nodes of this host that have CPUs for this process; at least two.
pub struct Nodes(BTreeMap<u32, Cpus>);

impl Nodes {
    /// None where there is nothing to choose from: one node, or all CPUs of this process are on one.
    pub fn here() -> Option<Arc<Self>> {
        let allowed = sched_getaffinity(None).ok()?;
        let nodes = Self::read(Path::new("/sys/devices/system/node"), |cpu| {
            allowed.is_set(cpu)
        });
        nodes.map(Arc::new)
    }

    /// Reads the nodes from sysfs (Documentation/ABI/stable/sysfs-devices-node). `None` if that fails: then threads run on
    /// any allowed CPU.
    fn read(sysfs: &Path, allowed: impl Fn(usize) -> bool) -> Option<Self> {
        let list = |path: &Path| -> Option<Cpus> {
            let text = fs::read_to_string(path).ok()?;
            // Numbers of nodes are written like those of CPUs.
            text.trim().parse().ok()
        };
        let online = list(&sysfs.join("online"))?;
        if online.iter().count() < 2 {
            return None;
        }
        let mut nodes = BTreeMap::new();
        for node in online.iter() {
            // A node that is memory alone has an empty list.
            let Some(cpus) = list(&sysfs.join(format!("node{node}/cpulist"))) else {
                continue;
            };
            let cpus: Cpus = cpus.iter().filter(|&cpu| allowed(cpu)).collect();
            if !cpus.is_empty() {
                nodes.insert(node as u32, cpus);
            }
        }
        (nodes.len() > 1).then_some(Self(nodes))
    }
}

/// Moves one I/O thread to the node where most of its queues lie. It stays where it is while no node has
/// more, and when queues go.
pub struct Home {
    nodes: Arc<Nodes>,
    queues: Mutex<Queues>,
}

impl Home {
    pub fn new(nodes: Arc<Nodes>) -> Self {
        Self {
            nodes,
            queues: Mutex::default(),
        }
    }

    /// A queue whose ring is at `address` will be served by `thread`. Returns its node, which `leave` wants
    /// back.
    pub fn arrive(&self, id: &str, thread: &IoThread, address: usize) -> Option<u32> {
        let node = engine::node_of(address)
            .inspect_err(|e| debug!("I/O thread {id}: cannot tell the node of a ring: {e}"))
            .ok()?;
        self.settle(id, thread.thread_id(), node);
        Some(node)
    }

    /// A queue is served no longer.
    pub fn leave(&self, node: u32) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.remove(node);
    }

    fn settle(&self, id: &str, thread_id: u32, node: u32) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if !queues.add(node) {
            return;
        }
        // A node that is memory alone is as near to one CPU as to another.
        let Some(cpus) = self.nodes.0.get(&node) else {
            return;
        };
        match run_on(thread_id, cpus) {
            Ok(()) => info!("I/O thread {id}: runs on CPUs {cpus}, near its guest on node {node}"),
            // The CPUs may have been taken offline; it runs where it did.
            Err(e) => debug!("I/O thread {id}: cannot run on CPUs {cpus}: {e}"),
        }
    }
}

/// The queues of a thread, by the node of their rings.
#[derive(Default)]
struct Queues {
    each: BTreeMap<u32, usize>,
    now: Option<u32>,
}

impl Queues {
    /// One more on `node`; whether the thread is to move there.
    fn add(&mut self, node: u32) -> bool {
        *self.each.entry(node).or_default() += 1;
        let there = self.count(node);
        let here = self.now.map_or(0, |now| self.count(now));
        let moves = self.now != Some(node) && there > here;
        if moves {
            self.now = Some(node);
        }
        moves
    }

    fn remove(&mut self, node: u32) {
        if let Some(count) = self.each.get_mut(&node) {
            *count = count.saturating_sub(1);
        }
    }

    fn count(&self, node: u32) -> usize {
        self.each.get(&node).copied().unwrap_or(0)
    }
}

fn run_on(thread_id: u32, cpus: &Cpus) -> Result<(), Errno> {
    let thread = Pid::from_raw(thread_id as i32).ok_or(Errno::SRCH)?;
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(cpu));
    sched_setaffinity(Some(thread), &set)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    /// A sysfs with these nodes.
    fn nodes(online: &str, lists: &[(u32, &str)], allowed: &[usize]) -> Option<Vec<(u32, String)>> {
        let sysfs = tempfile::tempdir().unwrap();
        fs::write(sysfs.path().join("online"), format!("{online}\n")).unwrap();
        for (node, cpus) in lists {
            let node = sysfs.path().join(format!("node{node}"));
            fs::create_dir(&node).unwrap();
            fs::write(node.join("cpulist"), format!("{cpus}\n")).unwrap();
        }
        let nodes = Nodes::read(sysfs.path(), |cpu| allowed.contains(&cpu))?;
        let each = nodes.0.iter();
        Some(each.map(|(node, cpus)| (*node, cpus.to_string())).collect())
    }

    #[test]
    fn only_nodes_with_usable_cpus_count() {
        let all: Vec<usize> = (0..16).collect();
        let two = [(0, "0-3,8-11"), (1, "4-7,12-15")];
        let found = nodes("0-1", &two, &all).unwrap();
        assert_eq!(found, [(0, "0-3,8-11".into()), (1, "4-7,12-15".into())]);
        // One that is switched off, and one that is memory alone.
        let more = [(0, "0-3"), (2, "4-7"), (3, "")];
        let found = nodes("0,2-3", &more, &all).unwrap();
        assert_eq!(found, [(0, "0-3".into()), (2, "4-7".into())]);
        // The CPUs that taskset allows this process.
        let found = nodes("0-1", &two, &[3, 8, 15]).unwrap();
        assert_eq!(found, [(0, "3,8".into()), (1, "15".into())]);
        assert_eq!(nodes("0-1", &two, &[0, 1]), None);
    }

    #[test]
    fn single_node_is_ignored() {
        assert_eq!(nodes("0", &[(0, "0-3")], &[0, 1, 2, 3]), None);
        assert_eq!(nodes("nonsense", &[(0, "0"), (1, "1")], &[0, 1]), None);
        let nowhere = tempfile::tempdir().unwrap();
        assert!(Nodes::read(nowhere.path(), |_| true).is_none());
    }

    #[test]
    fn thread_moves_to_the_node_of_most_queues() {
        let mut queues = Queues::default();
        assert!(queues.add(1), "the first decides");
        assert!(!queues.add(1), "it is there");
        assert!(!queues.add(0) && !queues.add(0), "as many are not more");
        assert!(queues.add(0));
        // One guest disconnects, another connects.
        (0..3).for_each(|_| queues.remove(0));
        assert_eq!(queues.now, Some(0), "it stays until somebody comes");
        assert!(!queues.add(0), "that is where it is");
        assert!(queues.add(1), "three there, one here");
        queues.remove(7);
        assert_eq!(queues.count(7), 0);
    }

    #[test]
    fn thread_is_bound_to_cpus() {
        let allowed = sched_getaffinity(None).unwrap();
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
        let last = cpus.next_back().unwrap();
        let one_each = [(0, Cpus::default()), (1, [last].into_iter().collect())];
        let home = Home::new(Arc::new(Nodes(one_each.into_iter().collect())));
        let (tell, told) = mpsc::channel();
        let (done, wait) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            let _ = wait.recv();
            let now = sched_getaffinity(None).unwrap();
            (now.count(), now.is_set(last))
        });
        let thread_id = told.recv().unwrap().as_raw_nonzero().get() as u32;
        home.settle("test", thread_id, 1);
        drop(done);
        assert_eq!(thread.join().unwrap(), (1, true));
        // A thread that has ended.
        home.leave(1);
        home.settle("test", thread_id, 5);
    }
}
