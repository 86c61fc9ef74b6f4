//! Changes to one state of an input. Its text is parsed once for all of them, and no two take the same name.

use std::cell::{OnceCell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};

use crate::fix::is_plain;
use crate::input::{Input, Kind};
use crate::libvirt::Xml;
use crate::qemu::Parsed;
use crate::text::Span;

/// An input in one state.
pub struct Round<'a> {
    /// It.
    pub input: &'a Input,
    xml: Option<Xml<'a>>,
    commands: Vec<OnceCell<Result<Parsed, String>>>,
    taken: Vec<RefCell<Taken>>,
}

/// What changes to a machine have taken so far.
#[derive(Default)]
struct Taken {
    names: HashMap<&'static str, Names>,
    /// Threads that are defined and that nothing names.
    unused: Option<VecDeque<String>>,
    /// How many threads there must be in the end, where they are counted and not named.
    threads: Option<u64>,
    /// Disks that go to virtio, with their new names.
    moves: HashMap<Span, String>,
    /// What changes do to the order of disks.
    order: OrderChange,
    /// How to take back what the last change took.
    undo: Vec<Undo>,
}

/// What the changes of a round have done to the order in which the firmware tries disks. Each is judged against the order
/// at the start of the round, so not all go together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OrderChange {
    /// Nothing.
    #[default]
    Nothing,
    /// A disk has gone to another bus.
    Moved,
    /// Disks have gone to another bus, and the one that is booted stays before all of them.
    MovedBehind,
    /// So many drives have got devices of their own, from the first one on.
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
    /// Parses a domain. Commands are parsed when they are asked for.
    pub fn new(input: &'a Input) -> Self {
        let text = input.sources.first().map_or("", |source| &source.text);
        Self {
            input,
            xml: match input.kind {
                Kind::Libvirt => Xml::parse(text),
                _ => None,
            },
            commands: input.vms.iter().map(|_| OnceCell::new()).collect(),
            taken: input.vms.iter().map(|_| RefCell::default()).collect(),
        }
    }

    /// The tree of a domain's text.
    pub fn xml(&self) -> Result<&Xml<'a>, String> {
        self.xml.as_ref().ok_or_else(|| "is no XML".into())
    }

    /// The options of a machine's command.
    pub fn command(&self, vm: usize) -> Result<&Parsed, String> {
        let cell = self.commands.get(vm).ok_or("there is no such machine")?;
        let parsed = cell.get_or_init(|| Parsed::of(self.input, vm));
        parsed.as_ref().map_err(Clone::clone)
    }

    /// Begins a change to a machine.
    pub fn begin(&self, vm: usize) {
        if let Some(taken) = self.taken.get(vm) {
            taken.borrow_mut().undo.clear();
        }
    }

    /// Gives back what the change took that was begun last: it is not made.
    pub fn undo(&self, vm: usize) {
        let Some(taken) = self.taken.get(vm) else {
            return;
        };
        let taken = &mut *taken.borrow_mut();
        for undo in taken.undo.drain(..).rev() {
            match undo {
                Undo::Name(kind, name, next) => {
                    let names = taken.names.entry(kind).or_default();
                    names.taken.remove(&name);
                    names.next = next;
                }
                Undo::Unused(id) => {
                    if let Some(unused) = &mut taken.unused {
                        unused.push_front(id);
                    }
                }
                Undo::Threads(before) => taken.threads = before,
                Undo::Order(before) => taken.order = before,
                Undo::Move(disk) => {
                    taken.moves.remove(&disk);
                }
            }
        }
    }

    /// Takes the first name of its kind that is free: `name` makes one of each number from 0, and `there` lists those that
    /// the input has.
    pub fn name(
        &self,
        vm: usize,
        kind: &'static str,
        there: impl FnOnce() -> HashSet<String>,
        name: impl Fn(u64) -> String,
    ) -> String {
        let Some(taken) = self.taken.get(vm) else {
            return name(0);
        };
        let taken = &mut *taken.borrow_mut();
        let names = taken.names.entry(kind).or_insert_with(|| Names {
            taken: there(),
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
        taken.undo.push(Undo::Name(kind, free.clone(), before));
        free
    }

    /// Takes an I/O thread that is defined, that no disk names, and that can be named without quotes.
    pub fn unused_thread(&self, vm: usize) -> Option<String> {
        let machine = self.input.vms.get(vm)?;
        let taken = &mut *self.taken.get(vm)?.borrow_mut();
        let unused = taken.unused.get_or_insert_with(|| {
            let used = machine.threads_used();
            let ids = machine.threads.iter().map(|thread| thread.id.as_str());
            let free = ids.filter(|id| is_plain(id) && !used.contains(id));
            free.map(str::to_owned).collect()
        });
        let id = unused.pop_front()?;
        taken.undo.push(Undo::Unused(id.clone()));
        Some(id)
    }

    /// Says that there must be at least so many threads in the end; `more` counts from those that were wanted before.
    pub fn want_threads(&self, vm: usize, now: u64, more: u64, least: u64) -> u64 {
        let Some(taken) = self.taken.get(vm) else {
            return least;
        };
        let taken = &mut *taken.borrow_mut();
        let before = taken.threads;
        let wanted = (before.unwrap_or(now) + more).max(least);
        taken.threads = Some(wanted);
        taken.undo.push(Undo::Threads(before));
        wanted
    }

    /// What the changes to a machine have done to the order of its disks.
    pub fn order(&self, vm: usize) -> OrderChange {
        let taken = self.taken.get(vm);
        taken.map_or(OrderChange::Nothing, |taken| taken.borrow().order)
    }

    /// Says what they have done now.
    pub fn reorder(&self, vm: usize, order: OrderChange) {
        if let Some(taken) = self.taken.get(vm) {
            let taken = &mut *taken.borrow_mut();
            taken.undo.push(Undo::Order(taken.order));
            taken.order = order;
        }
    }

    /// Says that a disk goes to virtio under that name.
    pub fn moves(&self, vm: usize, disk: Span, name: &str) {
        if let Some(taken) = self.taken.get(vm) {
            let taken = &mut *taken.borrow_mut();
            taken.moves.insert(disk, name.to_owned());
            taken.undo.push(Undo::Move(disk));
        }
    }

    /// The disks of which that was said.
    pub fn moved(&self, vm: usize) -> HashMap<Span, String> {
        let taken = self.taken.get(vm);
        taken.map_or_else(HashMap::new, |taken| taken.borrow().moves.clone())
    }

    /// How many threads a machine must have, if that was said.
    pub fn threads(&self, vm: usize) -> Option<u64> {
        self.taken.get(vm)?.borrow().threads
    }
}
