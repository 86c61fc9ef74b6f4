//! fio's job files, and its results.

use std::collections::BTreeMap;
use std::time::Duration;

use harness::histogram::Histogram;
use harness::histogram::fio_bin_ns;
use serde_json::Value;
use thiserror::Error;

use crate::plan::Workload;
use crate::storage::rbd::Image;

/// The maximum number of jobs in a result, and of intervals in a job: a day of seconds.
const JOBS_MAX: usize = 4096;
const INTERVALS_MAX: usize = 100_000;
/// The maximum number of bins in fio's histograms, in all of its versions.
const BINS_MAX: usize = 4096;

/// The length of an interval of the histogram log, for a run of this length.
pub fn interval(runtime: Duration) -> Duration {
    (runtime / 20).clamp(Duration::from_millis(250), Duration::from_secs(5))
}

/// A run of fio.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// The load.
    pub workload: &'a Workload,
    /// The disks in the guest: paths, or patterns for their paths in `/sys`.
    pub disks: &'a [String],
    /// The measured time.
    pub runtime: Duration,
    /// The time before it.
    pub ramp: Duration,
    /// The bytes of each disk that are used; `None` is the whole disk.
    pub size: Option<u64>,
    /// The disks are images in its cluster, `POOL/IMAGE`, which fio opens itself.
    pub image: Option<&'a Image>,
    /// Whether the guest's own cache is bypassed.
    pub direct: bool,
    /// Whether the page cache keeps what it has of the disk.
    pub keep_cache: bool,
    /// When to start by the guest's clock, in milliseconds since 1970; `None` is immediately.
    pub start_ms: Option<u64>,
}

impl Job<'_> {
    /// The job file; `@DISK0@` stands for the first disk.
    pub fn file(&self) -> String {
        let mut global = format!(
            "[global]\ntime_based=1\nruntime={}ms\nramp_time={}ms\ndirect={}\nthread=1\ndisk_util=0\n\
             write_hist_log=hist\nlog_hist_msec={}\nlog_unix_epoch=1\n",
            self.runtime.as_millis(),
            self.ramp.as_millis(),
            u8::from(self.direct),
            interval(self.runtime).as_millis(),
        );
        if self.keep_cache {
            global += "invalidate=0\n";
        }
        if let Some(size) = self.size {
            global += &format!("size={size}\n");
        }
        if let Some(job) = &self.workload.job {
            let all: Vec<String> = (0..self.disks.len())
                .map(|index| format!("@DISK{index}@"))
                .collect();
            return global + &users_job(job, &all.join(":"));
        }
        global += &self.workload.job_lines();
        let sequential = matches!(self.workload.rw.word(), "read" | "write" | "rw");
        if sequential && self.workload.numjobs > 1 {
            // Each job has its own part of the disk. Otherwise the later jobs would read what the first has cached.
            global += &format!(
                "offset_increment={}%\n",
                100 / self.workload.numjobs.min(100)
            );
        }
        if let Some(image) = self.image {
            global += &format!("clientname={}\n", image.user);
        }
        for (index, disk) in self.disks.iter().enumerate() {
            global += &format!("[volume{index}]\n");
            global += &match (self.image, disk.split_once('/')) {
                (Some(_), Some((pool, image))) => format!("pool={pool}\nrbdname={image}\n"),
                _ => format!("filename=@DISK{index}@\n"),
            };
        }
        global
    }

    /// A shell script that runs it and prints a result for [`Run::parse`].
    pub fn script(&self) -> String {
        let mut script = String::from(FIND_DISK) + PLAIN_NAME;
        script += "folder=$(mktemp -d) && cd \"$folder\" || exit 8\ncat >job.fio <<'END-OF-JOB'\n";
        script += &self.file();
        script += "END-OF-JOB\n";
        if let Some(image) = self.image {
            let conf = image.conf.display().to_string().replace('\'', "'\\''");
            script += &format!("export CEPH_CONF='{conf}'\n");
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let disk = disk.replace('\'', "'\\''");
            script += &format!(
                "d=$(disk '{disk}') && d=$(plain \"$d\" {index}) || exit 9\nsed -i \"s|@DISK{index}@|$d|\" job.fio\n"
            );
        }
        if let Some(start_ms) = self.start_ms {
            script += CLOCK;
            script += &format!(
                "while [ $(clock) -lt {start_ms} ]; do usleep 10000 2>/dev/null || sleep 0.01; done\n"
            );
        }
        script + RUN
    }
}

/// `disk PATH` prints a device: the path itself, or the device at that path in `/sys`. All links are read once, because a
/// guest may have 200 disks.
pub const FIND_DISK: &str = r#"
blocks=$(for block in /sys/block/*; do echo "$(readlink -f $block)/ ${block##*/}"; done)
disk() {
    case $1 in /devices/*) ;; *) echo "$1"; return;; esac
    while read -r path name; do
        case $path in */virtual/*) ;; *$1*) echo /dev/$name; return;; esac
    done <<END-OF-BLOCKS
$blocks
END-OF-BLOCKS
    echo "no disk at $1; there are: $(ls /sys/block)" >&2
    return 9
}
"#;

/// `plain PATH NUMBER` prints a name for the job file, in which fio takes `:`, `;`, `#` and `\` for something else. That of a
/// device is the kernel's, by which fio finds out whether it is mounted.
const PLAIN_NAME: &str = r#"
plain() {
    case $1 in
        *[!A-Za-z0-9/._-]*) if [ -b "$1" ]; then readlink -f "$1"; else ln -s "$1" disk$2 && echo disk$2; fi;;
        *) echo "$1";;
    esac
}
"#;

/// `clock` prints milliseconds since 1970. busybox' `date` has no fractions of a second, but its `ts` has.
pub const CLOCK: &str = r#"
clock() {
    now=$(date +%s%3N)
    case $now in
        *N) now=$(echo | busybox ts %.s); now=${now%% *}; part=${now#*.}; echo ${now%.*}$(echo $part | cut -c1-3);;
        *) echo $now;;
    esac
}
"#;

const RUN: &str = r#"
fio --output-format=json+ --output=out.json job.fio >log 2>&1
echo "@@status $?"
echo "@@json"
cat out.json
echo
for log in hist_clat_hist*.log; do
    [ -f $log ] || continue
    echo "@@hist"
    cat $log
done
echo "@@log"
tail -n 20 log
cd / && rm -rf "$folder"
"#;

/// A user's job file on the lab's disks, without the options that the lab sets.
fn users_job(job: &str, disks: &str) -> String {
    const OURS: [&str; 13] = [
        "filename",
        "directory",
        "runtime",
        "timeout",
        "ramp_time",
        "time_based",
        "size",
        "output",
        "output-format",
        "write_hist_log",
        "group_reporting",
        "log_unix_epoch",
        "direct",
    ];
    let mut text = String::new();
    for line in job.lines().map(str::trim) {
        let key = line.split('=').next().unwrap_or_default().trim();
        if line == "END-OF-JOB" || OURS.contains(&key) {
            continue;
        }
        text += line;
        text.push('\n');
        if line.starts_with('[') && line != "[global]" {
            text += &format!("filename={disks}\n");
        }
    }
    text
}

/// The error of a run.
#[derive(Debug, Error)]
pub enum FioError {
    /// fio or the script failed.
    #[error("fio failed with status {status}:\n{log}")]
    Failed {
        /// The exit status.
        status: i32,
        /// fio's last lines.
        log: String,
    },
    /// The output is not a result of fio.
    #[error("{0}")]
    Answer(String),
}

/// Requests of one job in one interval.
#[derive(Clone, Debug, PartialEq)]
pub struct Interval {
    /// When it ended by the clock of the machine on which fio ran, in milliseconds since 1970.
    pub end_ms: u64,
    /// Its length.
    pub length_ms: u64,
    /// Its requests.
    pub latencies: Histogram,
}

/// The result of fio.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// fio's version.
    pub version: String,
    /// The intervals of each job; without a histogram log, one interval.
    pub jobs: Vec<Vec<Interval>>,
    /// The latencies of all requests.
    pub latencies: Histogram,
    /// The bytes of all requests.
    pub bytes: u64,
    /// The number of requests.
    pub requests: u64,
    /// Requests per second of all jobs together, as reported by fio.
    pub iops: f64,
}

impl Run {
    /// Reads the output of [`Job::script`].
    ///
    /// # Errors
    /// fio failed, or this is not its output.
    pub fn parse(answer: &str, interval: Duration) -> Result<Run, FioError> {
        let mut sections: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let mut parts = answer.split("@@");
        let before = parts.next().unwrap_or_default();
        for part in parts {
            let (name, body) = part.split_once('\n').unwrap_or((part, ""));
            let (name, value) = name.split_once(' ').unwrap_or((name, body));
            sections.entry(name).or_default().push(value);
        }
        let first = |name: &str| sections.get(name).and_then(|found| found.first().copied());
        let status = first("status").and_then(|status| status.trim().parse().ok());
        let log = || first("log").unwrap_or(before).trim().to_owned();
        match status {
            None => {
                return Err(FioError::Answer(format!(
                    "fio did not run: {}",
                    before.trim()
                )));
            }
            Some(0) => {}
            Some(status) => return Err(FioError::Failed { status, log: log() }),
        }
        let mut run = Self::parse_json(first("json").unwrap_or_default())?;
        let logs = sections.remove("hist").unwrap_or_default();
        if !logs.is_empty() {
            let jobs = logs
                .into_iter()
                .map(|log| hist_log(log, interval))
                .collect::<Result<Vec<_>, _>>()?;
            // The log of a job without a complete interval is empty.
            if jobs.iter().all(|job| !job.is_empty()) {
                run.jobs = jobs;
            }
        }
        Ok(run)
    }

    /// Reads fio's `json` or `json+` output.
    ///
    /// # Errors
    /// It is something else, or a job failed.
    pub fn parse_json(text: &str) -> Result<Run, FioError> {
        let wrong = |what: &str| FioError::Answer(format!("this is not JSON of fio: {what}"));
        // fio puts warnings before its JSON.
        let start = text.find('{').ok_or_else(|| wrong("there is no '{'"))?;
        let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
        let json = values
            .next()
            .ok_or_else(|| wrong("it is empty"))?
            .map_err(|e| wrong(&e.to_string()))?;
        let mut run = Run {
            version: json["fio version"].as_str().unwrap_or("unknown").to_owned(),
            ..Run::default()
        };
        let jobs = json["jobs"]
            .as_array()
            .or(json["client_stats"].as_array())
            .ok_or_else(|| wrong("it has no jobs"))?;
        let stamp = json["timestamp_ms"].as_u64().unwrap_or(0);
        for job in jobs
            .iter()
            .take(JOBS_MAX)
            .filter(|job| job["jobname"] != "All clients")
        {
            if let Some(error) = job["error"].as_i64().filter(|error| *error != 0) {
                let name = job["jobname"].as_str().unwrap_or("?");
                return Err(FioError::Answer(format!(
                    "fio's job {name} ended with error {error}"
                )));
            }
            let mut latencies = Histogram::default();
            let mut longest = 0;
            for direction in ["read", "write"] {
                let side = &job[direction];
                let count = side["total_ios"].as_u64().unwrap_or(0);
                run.requests = run.requests.saturating_add(count);
                run.bytes = run
                    .bytes
                    .saturating_add(side["io_bytes"].as_u64().unwrap_or(0));
                run.iops += side["iops"]
                    .as_f64()
                    .filter(|iops| iops.is_finite() && *iops >= 0.0)
                    .unwrap_or(0.0);
                longest = longest.max(side["runtime"].as_u64().unwrap_or(0));
                let bins = side["clat_ns"]["bins"]
                    .as_object()
                    .or(side["lat_ns"]["bins"].as_object());
                for (latency, requests) in bins.into_iter().flatten().take(BINS_MAX) {
                    if let (Ok(latency), Some(requests)) = (latency.parse(), requests.as_u64()) {
                        latencies.add(latency, requests);
                    }
                }
                if bins.is_none() && count > 0 {
                    percentiles(&side["clat_ns"]["percentile"], count, &mut latencies);
                }
            }
            run.latencies.merge(&latencies);
            run.jobs.push(vec![Interval {
                end_ms: stamp,
                length_ms: longest,
                latencies,
            }]);
        }
        match run.requests {
            0 => Err(wrong("no request was made")),
            _ => Ok(run),
        }
    }
}

/// Fills a histogram from percentiles, because plain `json` has no bins.
fn percentiles(list: &Value, count: u64, latencies: &mut Histogram) {
    let parsed =
        |(share, latency): (&String, &Value)| Some((share.parse::<f64>().ok()?, latency.as_u64()?));
    let mut points: Vec<(f64, u64)> = list
        .as_object()
        .into_iter()
        .flatten()
        .take(BINS_MAX)
        .filter_map(parsed)
        .collect();
    points.retain(|(share, _)| (0.0..=100.0).contains(share));
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    add_between(points, count, latencies);
}

/// Adds `count` requests of which only percentiles are known, in ascending order. Requests between two percentiles are
/// counted at the upper one.
pub(crate) fn add_between(points: Vec<(f64, u64)>, count: u64, latencies: &mut Histogram) {
    let mut counted = 0;
    for (share, latency) in points {
        let upto = (share / 100.0 * count as f64) as u64;
        latencies.add(latency, upto.saturating_sub(counted));
        counted = counted.max(upto);
    }
}

/// Reads lines of `time, direction, block size, bin, bin, …`, each with the requests of a job since the previous line.
/// Merges the directions of one time.
fn hist_log(log: &str, interval: Duration) -> Result<Vec<Interval>, FioError> {
    let usual = interval.as_millis() as u64;
    let mut intervals: Vec<Interval> = Vec::new();
    for line in log
        .lines()
        .filter(|line| !line.trim().is_empty())
        .take(INTERVALS_MAX)
    {
        let wrong =
            || FioError::Answer(format!("invalid line in fio's histogram log: {:.60}", line));
        let mut fields = line.split(',').map(str::trim);
        let end_ms: u64 = fields
            .next()
            .and_then(|field| field.parse().ok())
            .ok_or_else(wrong)?;
        let mut latencies = Histogram::default();
        for (bin, field) in fields.skip(2).enumerate().take(BINS_MAX) {
            if field != "0" {
                latencies.add(fio_bin_ns(bin), field.parse().map_err(|_| wrong())?);
            }
        }
        match intervals.last_mut() {
            Some(last) if end_ms < last.end_ms + usual / 2 => last.latencies.merge(&latencies),
            last => {
                let length_ms = last.map_or(usual, |last| end_ms - last.end_ms);
                intervals.push(Interval {
                    end_ms,
                    length_ms,
                    latencies,
                });
            }
        }
    }
    Ok(intervals)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(workload: &Workload) -> Job<'_> {
        Job {
            workload,
            disks: &[],
            runtime: Duration::from_secs(10),
            ramp: Duration::from_secs(1),
            size: None,
            image: None,
            direct: true,
            keep_cache: false,
            start_ms: None,
        }
    }

    #[test]
    fn a_job_file_of_the_users_runs_on_the_labs_disks_only() {
        let text = "[global]\nfilename=/dev/sda\nbs=4k\nEND-OF-JOB\n[a]\nrw=read\nruntime=9\n[b]\nrw=write\n";
        let load = Workload {
            job: Some(text.into()),
            ..Workload::default()
        };
        let disks = ["/dev/x".to_owned(), "/dev/y".to_owned()];
        let file = Job {
            disks: &disks,
            ..job(&load)
        }
        .file();
        assert!(
            !file.contains("/dev/sda")
                && !file.contains("runtime=9")
                && !file.contains("END-OF-JOB"),
            "{file}"
        );
        assert_eq!(file.matches("filename=@DISK0@:@DISK1@").count(), 2);
    }

    #[test]
    fn names_that_fio_would_take_apart_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let run = |name: &str| {
            let script = format!(
                "cd '{}'{PLAIN_NAME}plain '{name}' 3",
                folder.path().display()
            );
            let output = std::process::Command::new("sh")
                .args(["-c", &script])
                .output();
            String::from_utf8(output.unwrap().stdout)
                .unwrap()
                .trim_end()
                .to_owned()
        };
        assert_eq!(run("/a/B-c_1.raw"), "/a/B-c_1.raw");
        for character in [':', ';', '#', '\\', '&', '|', ' ', ',', 'é'] {
            let disk = folder.path().join(format!("a{character}b"));
            std::fs::write(&disk, "x").unwrap();
            assert_eq!(run(disk.to_str().unwrap()), "disk3", "{character}");
            let link = folder.path().join("disk3");
            assert_eq!(std::fs::read_link(&link).unwrap(), disk);
            std::fs::remove_file(link).unwrap();
        }
    }

    #[test]
    fn an_answer_is_read() {
        let answer = "@@status 0\n@@json\nfio: note\n{\"fio version\":\"fio-3.33\",\"jobs\":[{\"jobname\":\"a\",\"error\":0,\
            \"read\":{\"total_ios\":6,\"io_bytes\":24576,\"iops\":3.0,\"runtime\":2000,\"clat_ns\":{\"bins\":{\"100\":5,\"900\":1}}}}]}\n\
            @@hist\n1000, 0, 4096, 0, 2, 0\n1003, 1, 4096, 0, 0, 1\n1500, 0, 4096, 3, 0, 0\n@@log\n";
        let run = Run::parse(answer, Duration::from_millis(500)).unwrap();
        assert_eq!(
            (run.requests, run.bytes, run.latencies.requests()),
            (6, 24_576, 6)
        );
        let intervals = &run.jobs[0];
        assert_eq!(
            intervals.len(),
            2,
            "both directions of a time are one interval"
        );
        assert_eq!(
            (intervals[0].latencies.requests(), intervals[1].length_ms),
            (3, 500)
        );
    }

    #[test]
    fn what_went_wrong_is_told_with_its_words() {
        let wrong = |answer: &str| {
            Run::parse(answer, Duration::from_millis(500))
                .unwrap_err()
                .to_string()
        };
        assert!(wrong("sh: fio: not found\n").contains("not found"));
        assert!(
            wrong("@@status 1\n@@json\n\n@@log\nfio: no space left\n").contains("no space left")
        );
        assert!(wrong("@@status 0\n@@json\n{\"jobs\":[]}").contains("no request"));
        assert!(wrong("@@status 0\n@@json\n{\"jobs\":[{\"error\":5}]}").contains("error 5"));
        assert!(wrong("@@status 0\n@@json\n{").contains("not JSON"));
    }

    #[test]
    fn plain_json_has_percentiles_too() {
        let text = "{\"jobs\":[{\"read\":{\"total_ios\":1000,\"iops\":10,\"clat_ns\":{\"percentile\":{\"50.0\":100,\"99.0\":900}}}}]}";
        let run = Run::parse_json(text).unwrap();
        assert_eq!(run.latencies.percentile(0.5), Some(100));
        assert_eq!(run.latencies.percentile(0.97), Some(900));
    }

    proptest::proptest! {
        #[test]
        fn any_answer_is_a_run_or_a_mistake(text in "(@@(status|json|hist|log)[ \n]?|[0-9]{1,20}|, |\n|\\{\"jobs\":\\[\\{\"read\":\\{\"total_ios\":[0-9]{1,3}\\}\\}\\]\\}|\\PC{0,4}){0,30}") {
            if let Ok(run) = Run::parse(&text, Duration::from_millis(500)) {
                assert!(run.requests > 0 && run.iops.is_finite());
            }
        }
    }
}
