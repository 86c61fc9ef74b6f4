//! What guests depend on and no configuration says: the number of queues that a device has, and the guest's choice of a write
//! cache. A guest connects at a socket, so that is where all of it belongs: an export there may get another name, and another export
//! that name. Only where an export comes to a socket at which nothing is known, its name tells what it had elsewhere.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;

use super::{DISKS_MAX, ServerState};
use crate::config::export::ExportSpec;
use crate::config::spec::FileSpec;
use crate::state::Remembered;

/// The most queues that a disk has by default.
const QUEUES_DEFAULT_MAX: usize = 16;

/// Limit of the sockets of which something is remembered: as many as can be served, and as many again that were before.
const SOCKETS_MAX: usize = 2 * DISKS_MAX;

/// What guests depend on, by socket.
#[derive(Clone, Default)]
pub(super) struct Guests {
    all: BTreeMap<PathBuf, Guest>,
    /// Counts what was noted.
    noted: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Guest {
    /// The export that was there last, if it is known.
    name: Option<String>,
    queues: Option<u16>,
    write_cache: Option<bool>,
    /// The file of the export, as it was when that came.
    file: Option<String>,
    /// When an export came there, compared with others.
    noted: u64,
}

impl Guests {
    /// Of these records, which have a name or a socket as their key, and these exports with their sockets: one that is served comes
    /// before others of its socket or its name. Older versions did not record the sockets.
    pub fn new(records: &BTreeMap<String, Remembered>, exports: &[(String, PathBuf)]) -> Self {
        let mut guests = Self::default();
        let (placed, unplaced): (Vec<_>, Vec<_>) =
            (records.iter()).partition(|(_, it)| it.socket.is_some());
        for (key, it) in placed {
            let Some(socket) = &it.socket else { continue };
            let there = exports.iter().find(|(_, at)| at == socket);
            if there.is_some_and(|(id, _)| id == key) || !guests.all.contains_key(socket) {
                let name = (!it.is_of_socket(key)).then(|| key.clone());
                guests.all.insert(socket.clone(), Guest::of(name, it));
            }
        }
        for (id, it) in unplaced {
            let its = exports.iter().find(|(other, _)| other == id);
            if let Some((_, socket)) = its.filter(|(_, socket)| !guests.all.contains_key(socket)) {
                let guest = Guest::of(Some(id.clone()), it);
                guests.all.insert(socket.clone(), guest);
            }
        }
        guests.noted = 1;
        guests
    }

    /// The same for the state file: the key is the name of the export that was there last, or the socket if another one has had
    /// this name since.
    pub fn records(&self) -> BTreeMap<String, Remembered> {
        let mut newest: Vec<_> = self.all.iter().collect();
        newest.sort_by_key(|(_, guest)| std::cmp::Reverse(guest.noted));
        let mut records = BTreeMap::new();
        for (socket, guest) in newest {
            let name = guest.name.clone().filter(|it| !records.contains_key(it));
            let record = Remembered {
                queues: guest.queues,
                write_cache: guest.write_cache,
                socket: Some(socket.clone()),
                file: guest.file.clone(),
            };
            if !record.is_empty() {
                let key = name.unwrap_or_else(|| socket.display().to_string());
                records.insert(key, record);
            }
        }
        records
    }

    /// Notes the choice of the guest at a socket.
    pub fn choose(&mut self, socket: &Path, write_cache: Option<bool>) {
        if let Some(guest) = self.all.get_mut(socket) {
            guest.write_cache = write_cache;
        }
    }

    /// The number of queues at a socket, if that is a default.
    pub fn queues(&self, socket: &Path) -> Option<u16> {
        self.all.get(socket)?.queues
    }

    /// The guest's choice of a write cache at a socket, if it has made one.
    pub fn write_cache(&self, socket: &Path) -> Option<bool> {
        self.all.get(socket)?.write_cache
    }

    /// An export of a file comes to a socket. If nothing is known there, it takes along what is known elsewhere of its name or its
    /// file. `is_others`: what was at a socket belongs to another export.
    fn come(
        &mut self,
        id: &str,
        socket: &Path,
        file: Option<String>,
        is_others: impl Fn(&Path) -> bool,
    ) -> &mut Guest {
        let elsewhere = |has: &dyn Fn(&Guest) -> bool| {
            let all = self.all.iter();
            let its = all.filter(|(at, guest)| has(guest) && !is_others(at));
            let newest = its.max_by_key(|(_, guest)| guest.noted);
            newest.map(|(at, _)| at.clone())
        };
        let known = match self.all.get(socket) {
            Some(there) => Some(there.clone()),
            None => {
                let same_name = |guest: &Guest| guest.name.as_deref() == Some(id);
                let same_file = |guest: &Guest| file.is_some() && guest.file == file;
                let at = elsewhere(&|guest| same_name(guest) && same_file(guest));
                let at = at.or_else(|| elsewhere(&same_name));
                let at = at.or_else(|| elsewhere(&same_file));
                let known = at.as_ref().and_then(|at| self.all.get(at)).cloned();
                // It may be another's of this name, which comes back to its socket.
                if let Some(at) = at.filter(|_| known.as_ref().is_some_and(same_file)) {
                    self.all.remove(&at);
                }
                known
            }
        };
        self.noted += 1;
        let guest = self.all.entry(socket.to_owned()).or_default();
        *guest = Guest {
            name: Some(id.to_owned()),
            noted: self.noted,
            file,
            ..known.unwrap_or_default()
        };
        guest
    }

    /// Forgets the oldest of those that are not used, if there are too many.
    fn forget_oldest(&mut self, is_used: impl Fn(&Path) -> bool) {
        if self.all.len() <= SOCKETS_MAX {
            return;
        }
        let unused = self.all.iter().filter(|(at, _)| !is_used(at));
        let oldest = unused.min_by_key(|(_, guest)| guest.noted);
        if let Some(socket) = oldest.map(|(socket, _)| socket.clone()) {
            self.all.remove(&socket);
        }
    }
}

impl Guest {
    fn of(name: Option<String>, record: &Remembered) -> Self {
        Self {
            noted: u64::from(name.is_some()),
            name,
            queues: record.queues,
            write_cache: record.write_cache,
            file: record.file.clone(),
        }
    }
}

impl ServerState {
    /// What guests depend on, with the present choices of those that are connected.
    pub(super) fn records_of_guests(&self) -> BTreeMap<String, Remembered> {
        let mut guests = self.guests.clone();
        for export in self.exports.values() {
            guests.choose(&export.socket, export.device.chosen_write_cache());
        }
        guests.records()
    }

    /// The number of queues of an export that comes to its socket: the configured one, otherwise the one that was there before,
    /// otherwise one for each CPU, which is remembered from now on.
    pub(super) fn queues(
        &mut self,
        spec: &ExportSpec,
        file: &FileSpec,
        inherited: Option<u16>,
    ) -> u16 {
        let Self {
            exports,
            wanted,
            guests,
            ..
        } = self;
        let is_others = |at: &Path| {
            let served = exports.values().map(|other| (&other.id, &other.socket));
            let mut all = served.chain(wanted.iter().map(|(id, socket)| (id, socket)));
            all.any(|(id, socket)| socket == at && *id != spec.id)
        };
        let file = match file {
            FileSpec::Null(_) => None,
            file => Some(file.to_string()),
        };
        let guest = guests.come(&spec.id, &spec.socket, file, is_others);
        let queues = match spec.queues {
            Some(queues) => {
                guest.queues = None;
                queues
            }
            None => {
                let default = || thread::available_parallelism().map_or(1, usize::from);
                let default = || default().min(QUEUES_DEFAULT_MAX) as u16;
                let queues = inherited.or(guest.queues).unwrap_or_else(default);
                guest.queues = Some(queues);
                queues
            }
        };
        guests.forget_oldest(|at| {
            at == spec.socket || exports.values().any(|export| export.socket == at)
        });
        queues
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(socket: Option<&str>, queues: u16) -> Remembered {
        Remembered {
            queues: Some(queues),
            write_cache: None,
            socket: socket.map(PathBuf::from),
            file: socket.map(|socket| format!("/files{socket}")),
        }
    }

    #[test]
    fn guests_stay_at_their_sockets() {
        let records = [
            ("a".to_owned(), record(Some("/1"), 1)),
            ("b".to_owned(), record(Some("/2"), 2)),
            ("c".to_owned(), record(None, 3)),
        ];
        let exports = [("a", "/1"), ("b", "/2"), ("c", "/3")];
        let exports = exports.map(|(id, at)| (id.to_owned(), PathBuf::from(at)));
        let mut guests = Guests::new(&records.into(), &exports);
        let nobody = |_: &Path| false;
        let file = |name: &str| Some(name.to_owned());
        let mut come = |id, at, name| guests.come(id, Path::new(at), file(name), nobody).queues;
        // Names are exchanged, and one goes to a socket that nobody knows.
        assert_eq!(come("b", "/1", "/files/1"), Some(1));
        assert_eq!(come("a", "/4", "/files/4"), None);
        assert_eq!(come("a", "/2", "/files/2"), Some(2));
        assert_eq!(come("c", "/5", "/files/5"), Some(3));
        // Another name at another socket, with the same file.
        assert_eq!(come("d", "/6", "/files/5"), Some(3));
        // Nothing is left where it was, and nothing is taken from others.
        assert_eq!(come("z", "/5", "/files/7"), None);
        let third = |at: &Path| at == Path::new("/6");
        let guest = guests.come("e", Path::new("/8"), file("/files/5"), third);
        assert_eq!(guest.queues, None);
        // All of it is read as it was written.
        let records = guests.records();
        assert_eq!(records["b"], record(Some("/1"), 1));
        assert_eq!(records["a"], record(Some("/2"), 2));
        let read = Guests::new(&records, &[]);
        assert_eq!(read.records(), records);
    }
}
