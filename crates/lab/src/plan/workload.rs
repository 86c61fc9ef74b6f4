//! The loads of a plan.

use std::fmt::Write as _;

use super::units::{number, on_off, size, size_text, switch, time};
use super::words::{Arrival, Rw, not_one_of};

/// One load.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Its name in reports; empty until the plan is complete.
    pub name: String,
    /// Direction.
    pub rw: Rw,
    /// The size of a request in bytes.
    pub bs: u64,
    /// A mix of sizes in fio's syntax (`4k/60:64k/40`); overrides `bs`.
    pub bssplit: Option<String>,
    /// The requests in flight of each job.
    pub iodepth: u32,
    /// The number of jobs.
    pub numjobs: u32,
    /// The offered requests per second of all jobs of a volume; `None` is a closed loop.
    pub rate: Option<u32>,
    /// Whether rates must be searched for; `rate` is `None` until then.
    pub search: bool,
    /// The distances between requests of the rate.
    pub arrival: Arrival,
    /// The share of reads in mixed loads, in percent.
    pub rwmixread: u32,
    /// The number of writes between two calls of fsync; 0 is never.
    pub fsync: u32,
    /// fio's engine.
    pub engine: String,
    /// fio's `random_distribution`.
    pub distribution: String,
    /// How much buffers can be compressed, in percent.
    pub compress: u32,
    /// The pause in microseconds from the last answer to the next requests; `None` is no pause.
    pub thinktime_us: Option<u64>,
    /// The requests that are sent together after a pause.
    pub burst: u32,
    /// Whether fio makes new data for each write.
    pub refill: bool,
    /// Whether `iodepth` is per queue instead of per volume.
    pub per_queue: bool,
    /// At most one request in each area of this size in bytes; 0 is no limit.
    pub once: u64,
    /// Whether there are requests only before the measured time.
    pub idle: bool,
    /// The text of a job file, which replaces all other keys.
    pub job: Option<String>,
}

/// The keys, in the order of messages.
pub const KEYS: [&str; 18] = [
    "rw",
    "bs",
    "bssplit",
    "iodepth",
    "numjobs",
    "rate",
    "arrival",
    "rwmixread",
    "fsync",
    "engine",
    "distribution",
    "compress",
    "thinktime",
    "burst",
    "refill",
    "per-queue",
    "once",
    "idle",
];

/// The keys of loads that fio cannot make.
pub const WITHOUT_FIO: [&str; 4] = ["thinktime", "per-queue", "once", "idle"];

const ENGINES: [&str; 5] = ["libaio", "io_uring", "psync", "pvsync2", "posixaio"];

impl Default for Workload {
    fn default() -> Self {
        Self {
            name: String::new(),
            rw: Rw::RandRead,
            bs: 4096,
            bssplit: None,
            iodepth: 1,
            numjobs: 1,
            rate: None,
            search: false,
            arrival: Arrival::Linear,
            rwmixread: 50,
            fsync: 0,
            engine: "libaio".into(),
            distribution: "random".into(),
            compress: 0,
            thinktime_us: None,
            burst: 1,
            refill: true,
            per_queue: false,
            once: 0,
            idle: false,
            job: None,
        }
    }
}

impl Workload {
    /// Sets the value of `key`, one of [`KEYS`].
    ///
    /// # Errors
    /// The value is invalid; the message says what is allowed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "rw" => self.rw = value.parse()?,
            "bs" => {
                self.bs = size(value)?;
                if self.bs > 64 << 20 || !self.bs.is_multiple_of(512) {
                    return Err(format!("'{value}' is not a multiple of 512 up to 64M"));
                }
            }
            "bssplit" => self.bssplit = Some(plain(value, "0123456789km/:")?),
            "iodepth" => self.iodepth = number(value, 1, 4096)?,
            "numjobs" => self.numjobs = number(value, 1, 256)?,
            "rate" => {
                self.search = value == "auto";
                self.rate = match value {
                    "none" | "auto" => None,
                    _ => Some(
                        number(value, 1, 100_000_000)
                            .map_err(|e| e + " requests per second, nor auto or none")?,
                    ),
                }
            }
            "arrival" => self.arrival = value.parse()?,
            "rwmixread" => self.rwmixread = number(value, 0, 100)?,
            "fsync" => self.fsync = number(value, 0, 1_000_000)?,
            "engine" if ENGINES.contains(&value) => self.engine = value.into(),
            "engine" => return Err(not_one_of(value, &ENGINES)),
            "distribution" => {
                self.distribution = plain(value, "abcdefghijklmnopqrstuvwxyz0123456789:./,")?
            }
            "compress" => self.compress = number(value, 0, 100)?,
            "thinktime" => {
                self.thinktime_us = match value {
                    "none" => None,
                    _ => Some(time(value)?.as_micros() as u64),
                }
            }
            "burst" => self.burst = number(value, 1, 512)?,
            "refill" => self.refill = switch(value)?,
            "per-queue" => self.per_queue = switch(value)?,
            "once" => {
                self.once = match value {
                    "off" => 0,
                    _ => size(value)?,
                }
            }
            "idle" => self.idle = switch(value)?,
            _ => return Err(not_one_of(key, &KEYS)),
        }
        Ok(())
    }

    /// The value of `key`, one of [`KEYS`]; `-` if it does not apply.
    pub fn get(&self, key: &str) -> String {
        if self.job.is_some() {
            return "-".into();
        }
        match key {
            "rw" => self.rw.to_string(),
            "bs" if self.bssplit.is_some() => "-".into(),
            "bs" => size_text(self.bs),
            "bssplit" => self.bssplit.clone().unwrap_or_else(|| "-".into()),
            "iodepth" => self.iodepth.to_string(),
            "numjobs" => self.numjobs.to_string(),
            "rate" if self.search => "auto".into(),
            "rate" => self
                .rate
                .map_or_else(|| "none".into(), |rate| rate.to_string()),
            "arrival" if self.rate.is_some() || self.search => self.arrival.to_string(),
            "rwmixread" if matches!(self.rw, Rw::RandRw | Rw::ReadWrite) => {
                self.rwmixread.to_string()
            }
            "fsync" if self.rw.writes() => self.fsync.to_string(),
            "engine" => self.engine.clone(),
            "distribution" => self.distribution.clone(),
            "compress" => self.compress.to_string(),
            "thinktime" => self
                .thinktime_us
                .map_or_else(|| "none".into(), |us| format!("{us}us")),
            "burst" if self.thinktime_us.is_some() => self.burst.to_string(),
            "refill" if self.rw.writes() => on_off(self.refill),
            "per-queue" => on_off(self.per_queue),
            "once" if self.once > 0 => size_text(self.once),
            "once" => "off".into(),
            "idle" => on_off(self.idle),
            _ => "-".into(),
        }
    }

    /// Gives the load a name if it has none: `randread 4k, depth 8`.
    pub fn named(mut self) -> Self {
        if !self.name.is_empty() {
            return self;
        }
        let size = match &self.bssplit {
            Some(split) => split.clone(),
            None => size_text(self.bs),
        };
        self.name = format!("{} {size}, depth {}", self.rw, self.iodepth);
        let plain = Workload {
            rw: self.rw,
            ..Self::default()
        };
        for key in KEYS.into_iter().skip(4).filter(|key| *key != "refill") {
            if self.get(key) != plain.get(key) && self.get(key) != "-" {
                let _ = write!(self.name, ", {key} {}", self.get(key));
            }
        }
        self
    }

    /// The load at this rate, which was searched for.
    #[must_use]
    pub fn at_rate(&self, rate: u32) -> Self {
        let (unknown, known) = (", rate auto", format!(", rate {rate}"));
        Self {
            name: match self.name.contains(unknown) {
                true => self.name.replace(unknown, &known),
                false => self.name.clone() + &known,
            },
            rate: Some(rate),
            search: false,
            ..self.clone()
        }
    }

    /// Whether requests are sequential.
    pub fn sequential(&self) -> bool {
        matches!(self.rw, Rw::Read | Rw::Write | Rw::ReadWrite)
    }

    /// Whether the load may write. A job file without `rw` may.
    pub fn writes(&self) -> bool {
        match &self.job {
            None => self.rw.writes(),
            Some(job) => job
                .lines()
                .filter_map(|line| line.split_once('='))
                .filter(|(key, _)| ["rw", "readwrite"].contains(&key.trim()))
                .any(|(_, value)| !["read", "randread"].contains(&value.trim())),
        }
    }

    /// The lines of a fio job without the file, times and output, which the run sets.
    pub fn job_lines(&self) -> String {
        let mut lines = format!(
            "rw={}\niodepth={}\nnumjobs={}\nioengine={}\nrandom_distribution={}\nnorandommap=1\nrandrepeat=0\n",
            self.rw, self.iodepth, self.numjobs, self.engine, self.distribution
        );
        match &self.bssplit {
            Some(split) => lines += &format!("bssplit={split}\n"),
            None => lines += &format!("bs={}\n", self.bs),
        }
        if self.get("rwmixread") != "-" {
            lines += &format!("rwmixread={}\n", self.rwmixread);
        }
        if self.rw.writes() {
            // A buffer of zeroes would be stored without I/O.
            lines += &format!(
                "refill_buffers={}\nbuffer_compress_percentage={}\n",
                u8::from(self.refill),
                self.compress
            );
            if self.fsync > 0 {
                lines += &format!("fsync={}\n", self.fsync);
            }
        }
        if let Some(rate) = self.rate {
            // fio's rate is per job and direction.
            let each = |share: u32| {
                let part = u64::from(rate) * u64::from(share) / 100;
                (part / u64::from(self.numjobs)).max(1)
            };
            lines += &match self.get("rwmixread").parse() {
                Ok(reads) => format!("rate_iops={},{}\n", each(reads), each(100 - reads)),
                Err(_) => format!("rate_iops={}\n", each(100)),
            };
            lines += &format!("rate_process={}\n", self.arrival);
        }
        lines
    }
}

/// Checks a word for a job file: it must not start another line or option.
fn plain(value: &str, allowed: &str) -> Result<String, String> {
    match !value.is_empty() && value.len() <= 256 && value.chars().all(|c| allowed.contains(c)) {
        true => Ok(value.into()),
        false => Err(format!("'{value}' has characters other than {allowed}")),
    }
}

/// A named list of loads.
#[derive(Clone, Copy)]
pub struct Profile {
    /// The name.
    pub name: &'static str,
    /// A description.
    pub about: &'static str,
    /// The name and the settings of each load.
    loads: &'static [(&'static str, &'static [(&'static str, &'static str)])],
}

/// All profiles.
pub const PROFILES: [Profile; 4] = [
    Profile {
        name: "crystaldiskmark",
        about: "the four of CrystalDiskMark 6, read and written",
        loads: &[
            (
                "SEQ Q32T1 read",
                &[("rw", "read"), ("bs", "128k"), ("iodepth", "32")],
            ),
            (
                "SEQ Q32T1 write",
                &[("rw", "write"), ("bs", "128k"), ("iodepth", "32")],
            ),
            (
                "4K Q8T8 read",
                &[("rw", "randread"), ("iodepth", "8"), ("numjobs", "8")],
            ),
            (
                "4K Q8T8 write",
                &[("rw", "randwrite"), ("iodepth", "8"), ("numjobs", "8")],
            ),
            ("4K Q32T1 read", &[("rw", "randread"), ("iodepth", "32")]),
            ("4K Q32T1 write", &[("rw", "randwrite"), ("iodepth", "32")]),
            ("4K Q1T1 read", &[("rw", "randread")]),
            ("4K Q1T1 write", &[("rw", "randwrite")]),
        ],
    },
    Profile {
        name: "database",
        about: "8k pages, 70 % read, with hot spots, and a log of small synchronous writes",
        loads: &[
            (
                "database pages",
                &[
                    ("rw", "randrw"),
                    ("bs", "8k"),
                    ("iodepth", "32"),
                    ("rwmixread", "70"),
                    ("distribution", "zipf:1.1"),
                ],
            ),
            (
                "database log",
                &[("rw", "write"), ("bs", "4k"), ("fsync", "1")],
            ),
        ],
    },
    Profile {
        name: "mail",
        about: "small files of many users: half read, half written, and each made durable",
        loads: &[(
            "mail",
            &[
                ("rw", "randrw"),
                ("bssplit", "4k/50:16k/30:64k/20"),
                ("iodepth", "1"),
                ("numjobs", "8"),
                ("fsync", "4"),
            ],
        )],
    },
    Profile {
        name: "streaming",
        about: "large sequential reads of a few viewers, and one recording",
        loads: &[
            (
                "streaming view",
                &[
                    ("rw", "read"),
                    ("bs", "1M"),
                    ("iodepth", "4"),
                    ("numjobs", "4"),
                ],
            ),
            (
                "streaming record",
                &[("rw", "write"), ("bs", "1M"), ("iodepth", "4")],
            ),
        ],
    },
];

impl Profile {
    /// The profile with this name.
    ///
    /// # Errors
    /// There is none; the message lists all.
    pub fn of(name: &str) -> Result<Profile, String> {
        let names: Vec<_> = PROFILES.iter().map(|profile| profile.name).collect();
        let found = PROFILES.into_iter().find(|profile| profile.name == name);
        found.ok_or_else(|| not_one_of(name, &names))
    }

    /// Its loads.
    pub fn workloads(&self) -> Vec<Workload> {
        let load = |(name, settings): &(&str, &[(&str, &str)])| {
            let mut workload = Workload {
                name: (*name).into(),
                ..Workload::default()
            };
            for (key, value) in *settings {
                let set = workload.set(key, value);
                assert!(set.is_ok(), "{name}: {set:?}");
            }
            workload
        };
        self.loads.iter().map(load).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_is_unusual() {
        let mut workload = Workload {
            iodepth: 8,
            ..Workload::default()
        };
        assert_eq!(workload.clone().named().name, "randread 4k, depth 8");
        workload.set("numjobs", "4").unwrap();
        workload.set("rate", "500").unwrap();
        workload.set("arrival", "poisson").unwrap();
        let name = workload.named().name;
        assert_eq!(
            name,
            "randread 4k, depth 8, numjobs 4, rate 500, arrival poisson"
        );
    }

    #[test]
    fn a_rate_is_that_of_both_directions_and_all_jobs_together() {
        let lines = |settings: &[(&str, &str)]| {
            let mut load = Workload::default();
            for (key, value) in settings {
                load.set(key, value).unwrap();
            }
            load.job_lines()
        };
        let mixed = [("rw", "randrw"), ("rwmixread", "70"), ("rate", "1000")];
        assert!(lines(&mixed).contains("rate_iops=700,300\n"));
        let jobs = [("rate", "1000"), ("numjobs", "4")];
        assert!(lines(&jobs).contains("rate_iops=250\n"));
    }

    #[test]
    fn a_rate_that_was_found_takes_the_place_of_auto() {
        let mut load = Workload::default();
        load.set("rate", "auto").unwrap();
        let named = load.clone().named();
        assert_eq!(
            named.name,
            "randread 4k, depth 1, rate auto, arrival linear"
        );
        let found = named.at_rate(500);
        assert_eq!(found.name, "randread 4k, depth 1, rate 500, arrival linear");
        assert_eq!((found.get("rate").as_str(), found.search), ("500", false));
        load.name = "mine".into();
        assert_eq!(load.at_rate(7).name, "mine, rate 7");
    }

    #[test]
    fn nothing_in_a_value_starts_another_option() {
        let mut workload = Workload::default();
        for (key, value) in [
            ("distribution", "zipf\nexec=x"),
            ("bssplit", "4k/1\nx"),
            ("engine", "exec"),
        ] {
            assert!(workload.set(key, value).is_err(), "{key}");
        }
    }

    #[test]
    fn profiles_are_sound_and_named_apart() {
        for profile in PROFILES {
            let loads = profile.workloads();
            let mut names: Vec<_> = loads.iter().map(|load| load.name.clone()).collect();
            names.dedup();
            assert_eq!(names.len(), loads.len(), "{}", profile.name);
        }
        assert!(matches!(Profile::of("databse"), Err(said) if said.contains("'database'")));
    }

    #[test]
    fn a_job_file_that_writes_is_known_to() {
        let job = |text: &str| {
            Workload {
                job: Some(text.into()),
                ..Workload::default()
            }
            .writes()
        };
        assert!(job("[a]\nrw = randwrite\n") && job("[a]\nrw=read\n[b]\nreadwrite=rw\n"));
        assert!(!job("[a]\nrw=randread\nbs=4k\n") && !job("[a]\nbs=4k\n"));
    }
}
