//! The steps of a case, drawn from a seed. A step contains everything that it needs. A step that does not fit (nothing
//! is served, the snapshot does not exist) is skipped, so that any part of a list is a valid list.

use std::fmt;

use super::config::{Image, Journal, Place, Serve, pick};
use crate::random::Random;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    /// A write of zeroes only.
    WriteNothing,
    WriteZeroes {
        unmap: bool,
    },
    Discard,
    Flush,
}

/// A request of the guest.
#[derive(Clone, Copy)]
pub struct Request {
    pub kind: Kind,
    pub queue: u16,
    /// The number of the request in the whole list.
    pub mark: u64,
    /// The position in sectors, modulo the number of sectors.
    pub at: u64,
    /// The alignment in sectors, a power of two.
    pub align: u64,
    pub sectors: u32,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self {
            kind, queue, mark, ..
        } = self;
        if *kind == Kind::Flush {
            return write!(f, "Flush in {queue}");
        }
        let at = self.at - self.at % self.align;
        write!(f, "{kind:?} {mark:#x} {at}+{} in {queue}", self.sectors)
    }
}

/// An operation of QEMU's tools on an image that is not served.
#[derive(Clone, Debug)]
pub enum Tool {
    Check,
    Repair {
        all: bool,
    },
    SnapshotCreate,
    SnapshotApply(u64),
    SnapshotDelete(u64),
    Write(Vec<Request>),
    /// qemu-io writes, and is killed after this many microseconds.
    Crash {
        requests: Vec<Request>,
        after_us: u64,
    },
    /// qemu-storage-daemon serves the image. It is killed after this many answers, or ends in order.
    Daemon {
        requests: Vec<Request>,
        kill: Option<u32>,
    },
    /// qemu-io writes to an overlay, which is then committed: QEMU first opens the image read-only.
    CommitInto(Vec<Request>),
    Resize(u64),
    Amend(&'static str),
    BitmapAdd,
    BitmapRemove,
    /// A copy made by `qemu-img convert` replaces the image.
    Convert,
    Compare,
    Rebase,
    Commit,
}

/// The moment at which a process is killed.
#[derive(Clone, Copy, Debug)]
pub enum Moment {
    /// After this many microseconds.
    Us(u64),
    /// After this many further lines in ringdisk's log.
    Line(u64),
}

#[derive(Clone, Debug)]
pub enum Step {
    Start(Serve),
    /// Start ringdisk, and kill it soon afterwards.
    StartKilled {
        serve: Serve,
        when: Moment,
    },
    /// The guest sends these requests, and continues when all or `until` of them have been answered.
    Requests {
        list: Vec<Request>,
        until: Option<u32>,
    },
    /// Read the whole disk through the server.
    Verify,
    Flush,
    WriteCache {
        on: bool,
    },
    Resize(u64),
    /// Put a new overlay above the image.
    Snapshot {
        options: &'static str,
        drain: bool,
    },
    /// Tell ringdisk another name of the disk's file.
    OtherName,
    /// A client copies what has changed since its last backup, and names that, or not.
    CopyChanges {
        names_checkpoint: bool,
    },
    /// Kill ringdisk while a client does that.
    CopyChangesKilled {
        after_us: u64,
    },
    /// Move the disk to a copy.
    Replace {
        qcow2: bool,
    },
    Reconnect,
    Upgrade,
    /// Copy the image while it is served.
    CopyServed {
        flush: bool,
    },
    Kill {
        after_us: u64,
    },
    /// Kill ringdisk; the next process executes the requests in flight.
    KillAndReconnect {
        l2_cache: Option<&'static str>,
    },
    Terminate,
    TerminateKilled {
        when: Moment,
    },
    UpgradeKilled {
        when: Moment,
    },
    PowerCut {
        seed: u64,
    },
    FillJournal {
        leave_kib: u64,
    },
    FreeJournal,
    FillImage {
        leave_kib: u64,
    },
    FreeImage,
    /// Copy the image with cp.
    Backup,
    /// Restore a copy, in the same file or in a new one with its name. The largest number means the latest copy.
    Restore {
        number: u64,
        in_place: bool,
    },
    Rename,
    HardLink,
    /// Replace the image by a copy of it.
    CopyOver,
    Tool(Tool),
}

/// A test case: everything that follows from a seed.
#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    pub image: Image,
    pub steps: Vec<Step>,
}

impl Step {
    /// Whether the image stays in its file, and needs no more space than before.
    fn leaves_file_in_place(&self) -> bool {
        match self {
            Self::Start(_)
            | Self::StartKilled { .. }
            | Self::Requests { .. }
            | Self::Verify
            | Self::Flush
            | Self::WriteCache { .. }
            | Self::Reconnect
            | Self::Upgrade
            | Self::Kill { .. }
            | Self::KillAndReconnect { .. }
            | Self::Terminate
            | Self::TerminateKilled { .. }
            | Self::UpgradeKilled { .. }
            | Self::FillJournal { .. }
            | Self::FreeJournal
            | Self::Tool(Tool::Check | Tool::Compare) => true,
            Self::Resize(_)
            | Self::Snapshot { .. }
            | Self::Replace { .. }
            | Self::CopyServed { .. }
            | Self::PowerCut { .. }
            | Self::FillImage { .. }
            | Self::FreeImage
            | Self::Backup
            | Self::Restore { .. }
            | Self::Rename
            | Self::HardLink
            | Self::CopyOver
            | Self::OtherName
            | Self::CopyChanges { .. }
            | Self::CopyChangesKilled { .. }
            | Self::Tool(_) => false,
        }
    }
}

struct Draw {
    random: Random,
    marks: u64,
    cluster: u64,
    backups: bool,
    /// The number of sectors to draw from. It is larger than the disk, so that some requests are in the part that a
    /// resize has added, and otherwise wrap around.
    sectors: u64,
}

impl Case {
    pub fn draw(seed: u64) -> Self {
        let mut random = Random(seed);
        let image = Image::draw(&mut random);
        let mut draw = Draw {
            random,
            marks: 0,
            cluster: image.cluster,
            backups: image.backups,
            sectors: image.windows.iter().map(|w| w.1 as u64).sum::<u64>() * 9 / 8,
        };
        let mut steps = Vec::new();
        for _ in 0..2 + draw.random.below(4) {
            draw.round(&image, &mut steps);
        }
        if image.place.is_exact() {
            steps.retain(Step::leaves_file_in_place);
        }
        Self { seed, image, steps }
    }
}

impl Draw {
    /// Draws the steps from one start to the next.
    fn round(&mut self, image: &Image, steps: &mut Vec<Step>) {
        let first = steps.len();
        let mut serve = Serve::draw(&mut self.random);
        if self.random.one_in(5) {
            // Only complete what a killed process left.
            serve.l2_cache = pick(
                &mut self.random,
                &[Some("1k"), Some("1k"), Some("4k"), None],
            );
            steps.push(Step::Start(serve));
            match self.random.below(3) {
                0 => steps.push(Step::Verify),
                1 => steps.push(Step::Flush),
                _ => {}
            }
            return self.end(image, steps);
        }
        if self.random.one_in(4) {
            for _ in 0..=self.random.below(3) {
                let when = self.moment(60_000, 4);
                let mut serve = serve.clone();
                if self.random.one_in(2) {
                    serve.l2_cache = Some("1k");
                }
                steps.push(Step::StartKilled { serve, when });
            }
        }
        let journal_full = matches!(image.journal, Journal::Tmpfs(_)) && self.random.one_in(4);
        let image_full = image.place == Place::Tmpfs && self.random.one_in(4);
        if journal_full && self.random.one_in(4) {
            steps.push(Step::FillJournal { leave_kib: 0 });
        }
        steps.push(Step::Start(serve));
        if self.random.one_in(3) {
            steps.push(Step::Verify);
        }
        if self.backups && self.random.one_in(2) {
            steps.push(self.copy_changes());
        }
        for number in 0..1 + self.random.below(4) {
            if number == 1 && journal_full {
                let leave_kib = 4 * self.random.below(5);
                steps.push(Step::FillJournal { leave_kib });
            }
            if number == 1 && image_full {
                let leave_kib = 4 * self.random.below(64);
                steps.push(Step::FillImage { leave_kib });
            }
            if image.place.is_exact() && self.random.one_in(2) {
                self.refill(image, steps);
            }
            self.phase(steps);
        }
        if journal_full && self.random.one_in(2) {
            steps.push(Step::FreeJournal);
        }
        if image_full {
            steps.push(Step::FreeImage);
        }
        if self.backups && self.random.one_in(4) {
            return self.put_back(steps);
        }
        let copied = steps[first..]
            .iter()
            .any(|step| matches!(step, Step::CopyServed { .. }));
        self.end(image, steps);
        if copied && self.random.one_in(2) {
            // Restore the latest copy while the later changes are still in the journal.
            steps.push(Step::Restore {
                number: u64::MAX,
                in_place: true,
            });
        }
        for _ in 0..pick(&mut self.random, &[0, 0, 1, 2, 3]) {
            self.between(image, steps);
        }
        if journal_full {
            steps.push(Step::FreeJournal);
        }
    }

    /// Draws a backup that an older state of the image, which is put back after it, does not have.
    fn put_back(&mut self, steps: &mut Vec<Step>) {
        let count = 1 + self.random.below(20);
        let mut list = self.requests(count, false);
        for request in &mut list {
            request.kind = Kind::Write;
            request.sectors = request.sectors.min(256);
        }
        let until = None;
        steps.push(Step::Requests {
            list: list.clone(),
            until,
        });
        steps.push(self.copy_changes());
        steps.push(Step::CopyServed {
            flush: self.random.one_in(2),
        });
        // Again, in place.
        for request in &mut list {
            self.marks += 1;
            request.mark = self.marks;
        }
        steps.push(Step::Requests { list, until });
        steps.push(self.copy_changes());
        steps.push(match self.random.below(3) {
            0 => Step::Terminate,
            _ => Step::Kill { after_us: 0 },
        });
        steps.push(Step::Restore {
            number: u64::MAX,
            in_place: !self.random.one_in(4),
        });
        steps.push(Step::Start(Serve::draw(&mut self.random)));
        steps.push(self.copy_changes());
        steps.push(Step::Terminate);
    }

    /// Draws steps while the image is served.
    fn phase(&mut self, steps: &mut Vec<Step>) {
        let most = pick(&mut self.random, &[4, 20, 100, 300]);
        let count = 1 + self.random.below(most);
        let list = self.requests(count, true);
        let until = match self.random.below(3) {
            0 => None,
            _ => Some(self.random.below(count) as u32),
        };
        steps.push(Step::Requests { list, until });
        if self.backups && self.random.one_in(3) {
            steps.push(self.copy_changes());
            return;
        }
        let options = pick(
            &mut self.random,
            &[
                "cluster_size=64k",
                "cluster_size=4k",
                "cluster_size=512",
                "extended_l2=on,cluster_size=32k",
            ],
        );
        steps.push(match self.random.below(29) {
            0 | 1 => Step::Resize(1 + self.random.below(1000)),
            2 => Step::Snapshot {
                options,
                drain: self.random.one_in(2),
            },
            3 => Step::Replace {
                qcow2: !self.random.one_in(4),
            },
            4 | 5 => Step::Reconnect,
            6 => Step::Upgrade,
            7 | 8 => Step::CopyServed {
                flush: self.random.one_in(2),
            },
            9..12 => Step::KillAndReconnect {
                l2_cache: pick(&mut self.random, &[None, Some("1k"), Some("4k")]),
            },
            12..15 => Step::Verify,
            15..20 => Step::Flush,
            26 | 27 => Step::WriteCache {
                on: self.random.one_in(2),
            },
            28 => Step::OtherName,
            _ => return,
        });
    }

    fn copy_changes(&mut self) -> Step {
        Step::CopyChanges {
            names_checkpoint: !self.random.one_in(4),
        }
    }

    /// Draws requests that write the whole disk, discard most of it, and write it again.
    fn refill(&mut self, image: &Image, steps: &mut Vec<Step>) {
        let sectors = image.size.div_ceil(512);
        let mut list = Vec::new();
        let mut add = |draw: &mut Self, kind, each: u64| {
            for at in (0..sectors).step_by(each as usize) {
                draw.marks += 1;
                list.push(Request {
                    kind,
                    queue: draw.random.below(4) as u16,
                    mark: draw.marks,
                    at,
                    align: 1,
                    sectors: each.min(sectors - at) as u32,
                });
            }
        };
        add(self, Kind::Write, 256);
        if self.random.one_in(2) {
            add(self, Kind::Flush, sectors);
        }
        let unmap = Kind::WriteZeroes { unmap: true };
        let kind = pick(&mut self.random, &[Kind::Discard, Kind::Discard, unmap]);
        add(self, kind, 4096);
        if self.random.one_in(2) {
            add(self, Kind::Flush, sectors);
        }
        if self.random.one_in(3) {
            // Only what comes next fills it again.
            let until = Some(self.random.below(list.len() as u64) as u32);
            steps.push(Step::Requests { list, until });
            return;
        }
        add(self, Kind::Write, 256);
        steps.push(Step::Requests { list, until: None });
    }

    fn moment(&mut self, us: u64, lines: u64) -> Moment {
        match self.random.below(3) {
            0 => Moment::Line(1 + self.random.below(lines)),
            _ => Moment::Us(self.random.below(us)),
        }
    }

    /// Draws how the process ends.
    fn end(&mut self, image: &Image, steps: &mut Vec<Step>) {
        let after_us = pick(&mut self.random, &[0, 0, 300, 3000, 30_000]);
        let after_us = if after_us == 0 {
            0
        } else {
            self.random.below(after_us)
        };
        if self.random.one_in(4) {
            // The process ends while a flush is in flight.
            let list = self.requests(4, true);
            steps.push(Step::Requests {
                list: list.into_iter().map(to_flush).collect(),
                until: Some(0),
            });
        }
        if self.backups && self.random.one_in(8) {
            steps.push(Step::CopyChangesKilled {
                after_us: self.random.below(60_000),
            });
            return;
        }
        let seed = self.random.any();
        let end = self.random.below(20);
        if image.place == Place::Fuse && end < 9 {
            steps.push(Step::PowerCut { seed });
            return;
        }
        steps.push(match end {
            0..10 => Step::Kill { after_us },
            10..12 => Step::TerminateKilled {
                when: self.moment(after_us.max(1), 3),
            },
            12 => Step::UpgradeKilled {
                when: self.moment(80_000, 8),
            },
            _ => Step::Terminate,
        });
    }

    /// Draws a step while the image is not served.
    fn between(&mut self, image: &Image, steps: &mut Vec<Step>) {
        let number = self.random.below(8);
        steps.push(match self.random.below(36) {
            0..3 => Step::Backup,
            3..7 => Step::Restore {
                number,
                in_place: !self.random.one_in(3),
            },
            7 | 8 => Step::Rename,
            9 | 10 => Step::HardLink,
            11 => Step::CopyOver,
            12..15 => Step::Tool(Tool::Check),
            15 | 16 => Step::Tool(Tool::Repair { all: false }),
            17 => Step::Tool(Tool::Repair { all: true }),
            18 | 19 => Step::Tool(Tool::SnapshotCreate),
            20 => Step::Tool(Tool::SnapshotApply(number)),
            21 => Step::Tool(Tool::SnapshotDelete(number)),
            22 | 23 => {
                let count = 1 + self.random.below(8);
                Step::Tool(Tool::Write(self.requests(count, false)))
            }
            24 => {
                let count = 1 + self.random.below(40);
                Step::Tool(Tool::Crash {
                    requests: self.requests(count, false),
                    after_us: self.random.below(60_000),
                })
            }
            25 | 26 => {
                let count = 1 + self.random.below(60);
                let kill = match self.random.below(3) {
                    0 => None,
                    _ => Some(self.random.below(count) as u32),
                };
                Step::Tool(Tool::Daemon {
                    requests: self.requests(count, true),
                    kill,
                })
            }
            34 | 35 => {
                let count = 1 + self.random.below(8);
                Step::Tool(Tool::CommitInto(self.requests(count, false)))
            }
            27 => Step::Tool(Tool::Resize(1 + self.random.below(1000))),
            28 => Step::Tool(Tool::Amend(pick(
                &mut self.random,
                &["compat=v3", "lazy_refcounts=on", "lazy_refcounts=off"],
            ))),
            29 => Step::Tool(Tool::BitmapAdd),
            30 => Step::Tool(Tool::BitmapRemove),
            31 if image.windows.len() == 1 => Step::Tool(Tool::Convert),
            32 if !image.backing.is_empty() => {
                Step::Tool(pick(&mut self.random, &[Tool::Rebase, Tool::Commit]))
            }
            _ => Step::Tool(Tool::Compare),
        });
    }

    fn requests(&mut self, count: u64, flushes: bool) -> Vec<Request> {
        let random = &mut self.random;
        // Some lists cover the whole disk, others a small part of it.
        let base = random.below(self.sectors);
        let spread = pick(random, &[16, 256, self.sectors]);
        let often_flushed = flushes && random.one_in(3);
        let mut list = Vec::new();
        for _ in 0..count {
            self.marks += 1;
            let kind = match random.below(20) {
                0..5 => Kind::Read,
                5..14 => Kind::Write,
                14 => Kind::WriteNothing,
                15 | 16 => Kind::WriteZeroes {
                    unmap: random.one_in(2),
                },
                17 | 18 => Kind::Discard,
                _ if often_flushed => Kind::Flush,
                _ => Kind::Write,
            };
            let cluster = (self.cluster / 512).max(1);
            let align = pick(random, &[1, 1, 8, cluster]);
            let unit = pick(random, &[1, 1, align, cluster]);
            let most = pick(random, &[1, 2, 8]);
            let bytes = matches!(kind, Kind::Read | Kind::Write | Kind::WriteNothing);
            let longest = if bytes { 256 } else { 4096 };
            list.push(Request {
                kind,
                queue: random.below(4) as u16,
                mark: self.marks,
                at: (base + random.below(spread)) % self.sectors,
                align,
                sectors: (unit * (1 + random.below(most))).min(longest) as u32,
            });
        }
        list
    }
}

/// Turns every other request into a flush.
fn to_flush(request: Request) -> Request {
    match request.mark % 2 {
        0 => request,
        _ => Request {
            kind: Kind::Flush,
            ..request
        },
    }
}
