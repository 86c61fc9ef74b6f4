//! One round of changes to an input: new names are unique, and each thread is given to one disk.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};

use crate::input::Input;
use crate::text::{Span, is_plain};

/// An input, and what the changes of a round have used so far.
pub struct Round<'a> {
    pub input: &'a Input,
    reserved: Vec<RefCell<Reserved>>,
}

/// What the changes to a VM have reserved.
#[derive(Default)]
struct Reserved {
    names: HashMap<&'static str, Names>,
    /// Defined I/O threads that nothing names.
    unused: Option<VecDeque<String>>,
    /// The number of I/O threads that the VM needs, if the input only counts them.
    threads: Option<u64>,
    /// Disks that move to virtio, with their new names.
    moves: HashMap<Span, String>,
    order: OrderChange,
    /// Undoes the last change.
    undo: Vec<Undo>,
}

/// The effect of a round's changes on the order in which the firmware tries disks. Each change is checked against the order
/// at the start of the round, so not all of them can be combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OrderChange {
    #[default]
    Nothing,
    /// A disk has moved to another bus.
    Moved,
    /// Disks have moved to another bus, and the boot disk is still before all of them.
    MovedBehind,
    /// The first drives, this many, have got separate devices.
    Devices(usize),
}

#[derive(Default)]
struct Names {
    taken: HashSet<String>,
    next: u64,
}

enum Undo {
    Name(&'static str, String, u64),
    Unused(String),
    Threads(Option<u64>),
    Move(Span),
    Order(OrderChange),
}

impl<'a> Round<'a> {
    pub fn new(input: &'a Input) -> Self {
        Self {
            input,
            reserved: input.vms.iter().map(|_| RefCell::default()).collect(),
        }
    }

    /// Begins a change to a VM.
    pub fn begin(&self, vm: usize) {
        if let Some(reserved) = self.reserved.get(vm) {
            reserved.borrow_mut().undo.clear();
        }
    }

    /// Releases what the current change has reserved: it is not made.
    pub fn undo(&self, vm: usize) {
        let Some(reserved) = self.reserved.get(vm) else {
            return;
        };
        let reserved = &mut *reserved.borrow_mut();
        for undo in reserved.undo.drain(..).rev() {
            match undo {
                Undo::Name(kind, name, next) => {
                    let names = reserved.names.entry(kind).or_default();
                    names.taken.remove(&name);
                    names.next = next;
                }
                Undo::Unused(id) => {
                    if let Some(unused) = &mut reserved.unused {
                        unused.push_front(id);
                    }
                }
                Undo::Threads(before) => reserved.threads = before,
                Undo::Order(before) => reserved.order = before,
                Undo::Move(disk) => {
                    reserved.moves.remove(&disk);
                }
            }
        }
    }

    /// Reserves the first free name of a kind: `name` makes one from each number starting at 0, and `existing` lists those
    /// in the input.
    pub fn name(
        &self,
        vm: usize,
        kind: &'static str,
        existing: impl FnOnce() -> HashSet<String>,
        name: impl Fn(u64) -> String,
    ) -> String {
        let Some(reserved) = self.reserved.get(vm) else {
            return name(0);
        };
        let reserved = &mut *reserved.borrow_mut();
        let names = reserved.names.entry(kind).or_insert_with(|| Names {
            taken: existing(),
            next: 0,
        });
        let before = names.next;
        let free = loop {
            let candidate = name(names.next);
            names.next += 1;
            if names.taken.insert(candidate.clone()) {
                break candidate;
            }
        };
        reserved.undo.push(Undo::Name(kind, free.clone(), before));
        free
    }

    /// Reserves a defined I/O thread that nothing names, and whose id needs no quotes.
    pub fn unused_thread(&self, vm: usize) -> Option<String> {
        let machine = self.input.vms.get(vm)?;
        let reserved = &mut *self.reserved.get(vm)?.borrow_mut();
        let unused = reserved.unused.get_or_insert_with(|| {
            let used = machine.threads_used();
            let ids = machine.threads.iter().map(|thread| thread.id.as_str());
            let free = ids.filter(|id| is_plain(id) && !used.contains(id));
            free.map(str::to_owned).collect()
        });
        let id = unused.pop_front()?;
        reserved.undo.push(Undo::Unused(id.clone()));
        Some(id)
    }

    /// Reserves `more` I/O threads in addition to those that exist or are reserved, and at least `least` in total.
    pub fn want_threads(&self, vm: usize, now: u64, more: u64, least: u64) -> u64 {
        let Some(reserved) = self.reserved.get(vm) else {
            return least;
        };
        let reserved = &mut *reserved.borrow_mut();
        let before = reserved.threads;
        let wanted = (before.unwrap_or(now) + more).max(least);
        reserved.threads = Some(wanted);
        reserved.undo.push(Undo::Threads(before));
        wanted
    }

    /// The effect of the VM's changes on the order of its disks.
    pub fn order(&self, vm: usize) -> OrderChange {
        let reserved = self.reserved.get(vm);
        reserved.map_or(OrderChange::Nothing, |reserved| reserved.borrow().order)
    }

    /// Records the effect of the current change.
    pub fn reorder(&self, vm: usize, order: OrderChange) {
        if let Some(reserved) = self.reserved.get(vm) {
            let reserved = &mut *reserved.borrow_mut();
            reserved.undo.push(Undo::Order(reserved.order));
            reserved.order = order;
        }
    }

    /// Records that a disk moves to virtio under that name.
    pub fn moves(&self, vm: usize, disk: Span, name: &str) {
        if let Some(reserved) = self.reserved.get(vm) {
            let reserved = &mut *reserved.borrow_mut();
            reserved.moves.insert(disk, name.to_owned());
            reserved.undo.push(Undo::Move(disk));
        }
    }

    /// The disks that move to virtio, with their new names.
    pub fn moved(&self, vm: usize) -> HashMap<Span, String> {
        let reserved = self.reserved.get(vm);
        reserved.map_or_else(HashMap::new, |reserved| reserved.borrow().moves.clone())
    }

    /// The number of I/O threads that the VM needs, if changes reserved some.
    pub fn threads(&self, vm: usize) -> Option<u64> {
        self.reserved.get(vm)?.borrow().threads
    }
}
