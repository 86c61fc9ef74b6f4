//! Notices storage that does not answer, and says so in the log.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use super::Server;

/// How often the operations in flight are looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// Storage that hangs again and again is logged at most this often.
const LINES: Duration = Duration::from_secs(60);

/// A disk or an I/O thread that has hung lately.
struct Hang {
    /// The line that says so has been written, and the one that says that it has ended has not.
    is_told: bool,
    /// When the last line was written.
    line: Instant,
    /// How long it has hung, as far as was seen.
    time: Duration,
}

/// What has hung lately, by name.
#[derive(Default)]
struct Hangs(BTreeMap<String, Hang>);

/// A line that is to be written.
enum Line {
    Begins(String, Duration),
    Ended(String, Duration),
}

impl Server {
    /// Looks at the operations in flight from now on, for as long as the server exists.
    pub fn watch_hangs(self: &Arc<Self>) {
        let server = Arc::downgrade(self);
        let thread = thread::Builder::new().name("hangs".into());
        if let Err(e) = thread.spawn(move || watch(&server)) {
            warn!("storage that hangs will not be noticed: no thread available: {e}");
        }
    }

    /// The disks whose storage hangs now.
    pub fn hung_disks(&self) -> Vec<String> {
        let mut hung = Vec::new();
        self.each_disk(|look| {
            let export = look
                .export
                .filter(|export| export.device.hangs_for().is_some());
            hung.extend(export.map(|export| export.id.clone()));
        });
        hung
    }
}

fn watch(server: &Weak<Server>) {
    let (mut disks, mut threads) = (Hangs::default(), Hangs::default());
    loop {
        thread::sleep(INTERVAL);
        let Some(server) = server.upgrade() else {
            return;
        };
        let (mut hung, mut blocked) = (Vec::new(), Vec::new());
        let mut served = BTreeSet::new();
        for (thread, _) in server.threads.running() {
            if let Some(time) = thread.thread.blocked_for() {
                blocked.push((thread.id, time));
            }
            thread.thread.check_ages();
        }
        server.each_disk(|look| {
            let Some(export) = look.export else { return };
            served.insert(export.id.clone());
            if let Some(time) = export.disk.hangs_for() {
                hung.push((export.id.clone(), time));
            }
        });
        disks.0.retain(|name, _| served.contains(name));
        for line in disks.update(hung, Instant::now()) {
            match line {
                Line::Begins(name, time) => warn!(
                    "disk {name}: its storage hangs: it has not answered for {} s; requests wait until it does. \
                     Check what the disk is on; 'ringdisk list' shows whether it still hangs",
                    time.as_secs()
                ),
                Line::Ended(name, time) => info!(
                    "disk {name}: its storage answers again, after {} s",
                    time.as_secs()
                ),
            }
        }
        for line in threads.update(blocked, Instant::now()) {
            match line {
                Line::Begins(id, time) => error!(
                    "I/O thread {id}: blocked for {} s, probably by storage that hangs: all disks that it serves wait",
                    time.as_secs()
                ),
                Line::Ended(id, time) => {
                    info!("I/O thread {id}: continues, after {} s", time.as_secs());
                }
            }
        }
    }
}

impl Hangs {
    /// The lines to write, now that these hang, for so long.
    fn update(&mut self, hung: Vec<(String, Duration)>, now: Instant) -> Vec<Line> {
        let mut lines = Vec::new();
        self.0.retain(|name, hang| {
            let lasts = hung.iter().any(|(its_name, _)| its_name == name);
            if !lasts && std::mem::take(&mut hang.is_told) {
                lines.push(Line::Ended(name.clone(), hang.time));
            }
            lasts || now.duration_since(hang.line) < LINES
        });
        for (name, time) in hung {
            match self.0.get_mut(&name) {
                Some(hang) if hang.is_told || now.duration_since(hang.line) < LINES => {
                    hang.time = time;
                }
                _ => {
                    lines.push(Line::Begins(name.clone(), time));
                    let (is_told, line) = (true, now);
                    self.0.insert(
                        name,
                        Hang {
                            is_told,
                            line,
                            time,
                        },
                    );
                }
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One line when it begins, one when it ends; if it comes back at once, none until a minute has passed.
    #[test]
    fn hang_is_logged_once_and_its_end_once() {
        let mut hangs = Hangs::default();
        let began = Instant::now();
        let mut at = |s: u64, hung: &[(&str, u64)]| -> Vec<String> {
            let hung = hung.iter();
            let hung = hung.map(|&(name, s)| (name.to_owned(), Duration::from_secs(s)));
            let lines = hangs.update(hung.collect(), began + Duration::from_secs(s));
            let text = |line| match line {
                Line::Begins(name, time) => format!("{name} begins {}", time.as_secs()),
                Line::Ended(name, time) => format!("{name} ended {}", time.as_secs()),
            };
            lines.into_iter().map(text).collect()
        };
        assert_eq!(at(5, &[("a", 4)]), ["a begins 4"]);
        assert_eq!(at(6, &[("a", 5), ("b", 4)]), ["b begins 4"]);
        assert_eq!(at(7, &[("b", 5)]), ["a ended 5"]);
        assert!(at(12, &[("a", 4), ("b", 10)]).is_empty());
        assert!(at(13, &[("b", 11)]).is_empty());
        assert_eq!(at(90, &[("a", 4), ("b", 88)]), ["a begins 4"]);
        assert_eq!(at(91, &[]), ["a ended 4", "b ended 88"]);
        assert!(at(200, &[]).is_empty());
        assert_eq!(hangs.0.len(), 0);
    }
}
