//! The image of a case, and how it is served, as drawn from a seed.

use super::oracle::SECTOR;
use crate::random::Random;

/// The location of the image's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The file system of the working directory.
    Plain,
    /// A tmpfs for this image, which can be filled.
    Tmpfs,
    /// A FUSE file system of the testkit, whose power can be cut.
    Fuse,
    /// A loop device of the size of the fully allocated disk.
    ExactDevice,
    /// A tmpfs of that size, and little more.
    ExactTmpfs,
}

impl Place {
    /// Whether it has just the space of the fully allocated disk.
    pub fn is_exact(self) -> bool {
        matches!(self, Self::ExactDevice | Self::ExactTmpfs)
    }
}

/// The location of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Journal {
    /// An ordinary directory.
    Plain,
    /// A tmpfs of this many KiB, which can be filled.
    Tmpfs(u64),
    /// A place where no journal can be created.
    Unusable,
}

/// A backing file.
#[derive(Clone, Debug)]
pub struct Backing {
    /// Options for `qemu-img create`; none for a raw file.
    pub options: Option<String>,
    pub size: u64,
}

/// The image of a case.
#[derive(Clone, Debug)]
pub struct Image {
    pub qcow2: bool,
    /// Options for `qemu-img create`, without a data file.
    pub options: String,
    pub cluster: u64,
    /// The image has a data file, which may be a raw image of the disk.
    pub data_file: bool,
    pub data_file_raw: bool,
    pub size: u64,
    /// The ranges of sectors that are used, as `(first, count)`.
    pub windows: Vec<(u64, usize)>,
    /// The backing files, the uppermost first.
    pub backing: Vec<Backing>,
    pub compressed: bool,
    pub snapshots: u32,
    pub bitmaps: bool,
    /// A client makes incremental backups.
    pub backups: bool,
    /// ringdisk has a state directory.
    pub state: bool,
    /// Options for a second image, which the same process serves as another disk.
    pub neighbour: Option<String>,
    pub place: Place,
    pub journal: Journal,
    /// The seed of the initial content.
    pub seed: u64,
}

/// How the image is served and used.
#[derive(Clone, Debug)]
pub struct Serve {
    pub cache: &'static str,
    pub aio: &'static str,
    pub discard: &'static str,
    pub detect_zeroes: &'static str,
    pub l2_cache: Option<&'static str>,
    pub werror: &'static str,
    pub lock: &'static str,
    pub iothreads: u64,
    pub queues: u16,
    pub slots: u16,
    pub packed: bool,
    pub indirect: bool,
    pub event_idx: bool,
    pub buffer_offset: u32,
    /// The driver accepts neither FLUSH nor a switchable write cache.
    pub without_flush: bool,
}

impl Serve {
    pub fn draw(random: &mut Random) -> Self {
        let cache = pick(
            random,
            &[
                "none",
                "none",
                "writeback",
                "writeback",
                "directsync",
                "writethrough",
                "unsafe",
            ],
        );
        let aio = match cache {
            "none" | "directsync" => pick(random, &["auto", "io_uring", "native", "threads"]),
            _ => pick(random, &["auto", "io_uring", "threads"]),
        };
        Self {
            cache,
            aio,
            discard: pick(random, &["unmap", "unmap", "ignore"]),
            detect_zeroes: pick(random, &["off", "off", "on", "unmap"]),
            l2_cache: pick(
                random,
                &[None, None, Some("1k"), Some("1k"), Some("4k"), Some("64k")],
            ),
            werror: pick(random, &["enospc", "report"]),
            lock: pick(random, &["on", "on", "running"]),
            iothreads: 1 + random.below(3),
            queues: 1 + random.below(4) as u16,
            slots: pick(random, &[2, 8, 16]),
            packed: random.one_in(2),
            indirect: random.one_in(2),
            event_idx: random.one_in(2),
            buffer_offset: pick(random, &[0, 0, 512, 8]),
            without_flush: random.one_in(12),
        }
    }

    /// Whether data is read and written through the page cache.
    pub fn is_cached(&self) -> bool {
        ["writeback", "writethrough", "unsafe"].contains(&self.cache)
    }

    /// Whether every completed write is durable.
    pub fn is_write_through(&self) -> bool {
        self.cache == "directsync"
            || self.cache == "writethrough"
            || self.without_flush && self.cache != "unsafe"
    }
}

impl Image {
    pub fn draw(random: &mut Random) -> Self {
        let place = pick(
            random,
            &[
                Place::Plain,
                Place::Plain,
                Place::Tmpfs,
                Place::Fuse,
                Place::ExactDevice,
                Place::ExactTmpfs,
            ],
        );
        let mut image = Self {
            qcow2: true,
            options: String::new(),
            // Small clusters are more frequent, because they need many tables.
            cluster: 1 << (9 + random.below(13).min(random.below(13))),
            data_file: false,
            data_file_raw: false,
            size: 0,
            windows: Vec::new(),
            backing: Vec::new(),
            compressed: false,
            snapshots: 0,
            bitmaps: false,
            backups: false,
            state: false,
            neighbour: None,
            place,
            journal: match random.below(8) {
                0 => Journal::Unusable,
                1 | 2 => Journal::Tmpfs(64),
                3 | 4 => Journal::Tmpfs(256),
                _ => Journal::Plain,
            },
            seed: random.any(),
        };
        if place == Place::ExactTmpfs {
            // What is left of a page by smaller clusters cannot be given back.
            image.cluster = image.cluster.max(4096);
        }
        if place.is_exact() {
            image.make_exact(random);
            return image;
        }
        image.backups = random.one_in(2);
        image.state = image.backups && !random.one_in(4);
        match random.below(if image.backups { 8 } else { 16 }) {
            0 => image.make_raw(random),
            1 | 2 => image.make_version_2(random),
            _ => image.make_version_3(random),
        }
        if random.one_in(3) {
            let cluster = 1 << (9 + random.below(8));
            let lazy = pick(random, &["on", "off"]);
            image.neighbour = Some(format!("cluster_size={cluster},lazy_refcounts={lazy}"));
        }
        image
    }

    /// Makes an image that needs no more space than `qemu-img measure` tells.
    fn make_exact(&mut self, random: &mut Random) {
        let form = match random.below(4) {
            0 => "compat=0.10",
            1 => {
                self.cluster = self.cluster.max(16 << 10);
                "compat=1.1,extended_l2=on"
            }
            2 => pick(
                random,
                &["compat=1.1,refcount_bits=1", "compat=1.1,refcount_bits=64"],
            ),
            _ => "compat=1.1",
        };
        self.options = format!("{form},cluster_size={}", self.cluster);
        self.draw_size(random, false);
    }

    fn make_raw(&mut self, random: &mut Random) {
        self.qcow2 = false;
        self.draw_size(random, false);
    }

    fn make_version_2(&mut self, random: &mut Random) {
        self.options = format!("compat=0.10,cluster_size={}", self.cluster);
        self.draw_size(random, true);
        self.draw_backing(random);
        self.compressed = random.one_in(3);
        self.draw_snapshots(random);
    }

    fn make_version_3(&mut self, random: &mut Random) {
        let extended = random.one_in(4);
        if extended {
            self.cluster = self.cluster.max(16 << 10);
        }
        let mut options = format!("compat=v3,cluster_size={}", self.cluster);
        let bits = pick(random, &[1, 2, 4, 8, 16, 16, 32, 64]);
        options += &format!(",refcount_bits={bits}");
        if extended {
            options += ",extended_l2=on";
        }
        if random.one_in(5) {
            options += ",lazy_refcounts=on";
        }
        if random.one_in(4) {
            options += ",compression_type=zstd";
        }
        let preallocation = match random.below(8) {
            0 => "metadata",
            1 => "falloc",
            2 => "full",
            _ => "off",
        };
        self.draw_size(random, preallocation == "off");
        if preallocation == "off" {
            self.draw_backing(random);
        } else {
            options += &format!(",preallocation={preallocation}");
        }
        self.data_file = self.place != Place::Fuse && self.windows.len() == 1 && random.one_in(8);
        self.data_file_raw = self.data_file && self.backing.is_empty() && random.one_in(2);
        // An image with a data file allows neither; narrow refcounts can count only few users of a cluster.
        self.compressed = !self.data_file && bits >= 16 && random.one_in(3);
        if !self.data_file && bits > 1 {
            self.draw_snapshots(random);
        }
        self.bitmaps = random.one_in(5);
        self.options = options;
    }

    /// Draws the size of the disk and the ranges that are used. A `sparse` disk may be so large that it has several
    /// tables.
    fn draw_size(&mut self, random: &mut Random, sparse: bool) {
        // The bytes that one L2 table covers; with extended entries it covers half.
        let table = self.cluster * self.cluster / 8;
        let large = sparse && self.qcow2 && (1 << 20..=4 << 30).contains(&table);
        if large && random.one_in(3) {
            let tables = 1 + random.below(3);
            let most = 256 << 10;
            self.size = tables * table + most;
            for number in 0..=tables {
                let start = number * table;
                let before = if number == 0 { 0 } else { 64 << 10 };
                let sectors = (before + (128 << 10)) / 512;
                self.windows
                    .push(((start - before) / 512, sectors as usize));
            }
            return;
        }
        let unit = pick(random, &[512, 4096, 65536]);
        let most = if self.cluster < 2048 {
            1 << 20
        } else {
            4 << 20
        };
        let size = (64 << 10) + random.below(most);
        self.size = (size / unit * unit).max(unit);
        self.windows = vec![(0, self.size as usize / SECTOR)];
    }

    /// Draws snapshots for a few images only, because an image with snapshots has no journal.
    fn draw_snapshots(&mut self, random: &mut Random) {
        if random.one_in(4) {
            self.snapshots = 1 + random.below(2) as u32;
        }
    }

    fn draw_backing(&mut self, random: &mut Random) {
        // The backing files of a large disk are short.
        let largest = self.size.min(6 << 20);
        for _ in 0..pick(random, &[0, 0, 1, 1, 2]) {
            let size = match random.below(3) {
                0 => self.size.min(largest),
                1 => (largest / 2).next_multiple_of(512),
                _ => largest + (300 << 10),
            };
            let options = match random.below(4) {
                0 | 1 => None,
                2 => Some(format!("cluster_size={}", 1 << (9 + random.below(8)))),
                _ => Some("extended_l2=on,cluster_size=16k".into()),
            };
            let raw = options.is_none();
            self.backing.push(Backing { options, size });
            if raw {
                break;
            }
        }
    }

    /// The name of the image's kind in the list of tested kinds.
    pub fn kind(&self) -> String {
        let backing = match self.backing.first() {
            None => "none",
            Some(Backing { options: None, .. }) => "raw",
            Some(_) => "qcow2",
        };
        format!(
            "{} {} data={}{} backing={backing} place={:?} sparse={} snapshots={} bitmaps={} backups={} state={} \
             compressed={} neighbour={}",
            if self.qcow2 { "qcow2" } else { "raw" },
            self.options,
            u8::from(self.data_file),
            u8::from(self.data_file_raw),
            self.place,
            self.windows.len() > 1,
            self.snapshots > 0,
            self.bitmaps,
            self.backups,
            self.state,
            self.compressed,
            self.neighbour.is_some(),
        )
    }
}

pub fn pick<T: Clone>(random: &mut Random, from: &[T]) -> T {
    from[random.below(from.len() as u64) as usize].clone()
}
