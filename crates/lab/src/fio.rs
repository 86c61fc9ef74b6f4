//! What fio is told, and what it says.

use std::collections::BTreeMap;
use std::time::Duration;

use harness::histogram::Histogram;
use harness::histogram::fio_bin_ns;
use serde_json::Value;
use thiserror::Error;

use crate::plan::Workload;
use crate::storage::rbd::Image;

/// Most jobs of an answer, and most intervals of a job: a day of seconds.
const JOBS_MAX: usize = 4096;
const INTERVALS_MAX: usize = 100_000;
/// Bins of fio's histograms, in any of its versions.
const BINS_MAX: usize = 4096;

/// How often latencies are counted anew in a run of this length.
pub fn interval(runtime: Duration) -> Duration {
    (runtime / 20).clamp(Duration::from_millis(250), Duration::from_secs(5))
}

/// A run of fio.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// The load.
    pub workload: &'a Workload,
    /// The disks in the guest: paths, or patterns of where they lie in `/sys`.
    pub disks: &'a [String],
    /// How long it counts.
    pub runtime: Duration,
    /// How long it runs before.
    pub ramp: Duration,
    /// Bytes of each disk that are used; `None` is all of it.
    pub size: Option<u64>,
    /// The disks are images in its cluster, `POOL/IMAGE`, which fio opens itself.
    pub image: Option<&'a Image>,
    /// Whether the guest's own cache is bypassed.
    pub direct: bool,
    /// Whether the page cache keeps what it has of the disk.
    pub keep_cache: bool,
    /// The guest's time at which to start, in milliseconds since 1970; `None` is at once.
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
            // Each job has a stream of its own; one behind the other, they would read what the first has read.
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

    /// A shell script that runs it, and prints an answer for [`Run::parse`].
    pub fn script(&self) -> String {
        let mut script = String::from(FIND_DISK);
        script += "folder=$(mktemp -d) && cd $folder || exit 8\ncat >job.fio <<'END-OF-JOB'\n";
        script += &self.file();
        script += "END-OF-JOB\n";
        if let Some(image) = self.image {
            let conf = image.conf.display().to_string().replace('\'', "'\\''");
            script += &format!("export CEPH_CONF='{conf}'\n");
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let disk = disk.replace('\'', "'\\''");
            script +=
                &format!("d=$(disk '{disk}') || exit 9\nsed -i \"s|@DISK{index}@|$d|\" job.fio\n");
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

/// `disk WHERE` prints the device: a path as it is, or what lies there in `/sys`.
pub const FIND_DISK: &str = r#"
disk() {
    case $1 in /devices/*) ;; *) echo "$1"; return;; esac
    for block in /sys/block/*; do
        case $(readlink -f $block)/ in */virtual/*) ;; *$1*) echo /dev/${block##*/}; return;; esac
    done
    echo "no disk at $1; there are: $(ls /sys/block)" >&2
    return 9
}
"#;

/// `clock` prints milliseconds since 1970. busybox' date has no fractions of a second, but it has `ts`.
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
cd / && rm -rf $folder
"#;

/// A user's job file without what is the lab's matter, on the lab's disks.
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

/// What is wrong with an answer.
#[derive(Debug, Error)]
pub enum FioError {
    /// fio, or what leads to it, failed.
    #[error("fio failed with status {status}; it said:\n{log}")]
    Failed {
        /// The shell's.
        status: i32,
        /// fio's last lines.
        log: String,
    },
    /// The answer is not one.
    #[error("{0}")]
    Answer(String),
}

/// Requests of one job in one interval.
#[derive(Clone, Debug, PartialEq)]
pub struct Interval {
    /// When it ended, in milliseconds since 1970, by the clock of the machine that fio ran on.
    pub end_ms: u64,
    /// How long it was.
    pub length_ms: u64,
    /// Its requests.
    pub latencies: Histogram,
}

/// What fio measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// fio's version.
    pub version: String,
    /// Intervals of each job; of a run without a log, one interval.
    pub jobs: Vec<Vec<Interval>>,
    /// All requests.
    pub latencies: Histogram,
    /// Bytes of all requests, and how many there were.
    pub bytes: u64,
    /// See `bytes`.
    pub requests: u64,
    /// Requests per second, all jobs added, as fio says.
    pub iops: f64,
}

impl Run {
    /// Reads the answer of [`Job::script`].
    ///
    /// # Errors
    /// fio failed, or this is no answer of its.
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
            // A job too slow for a single interval has an empty log.
            if jobs.iter().all(|job| !job.is_empty()) {
                run.jobs = jobs;
            }
        }
        Ok(run)
    }

    /// Reads fio's `json` or `json+` output, whoever ran it.
    ///
    /// # Errors
    /// It is none, or fio says that a job failed.
    pub fn parse_json(text: &str) -> Result<Run, FioError> {
        let wrong = |what: &str| FioError::Answer(format!("this is no JSON of fio: {what}"));
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

/// Plain `json` has no bins: the counts between fio's percentiles are put at their upper ends.
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
    let mut counted = 0;
    for (share, latency) in points {
        let upto = (share / 100.0 * count as f64) as u64;
        latencies.add(latency, upto.saturating_sub(counted));
        counted = counted.max(upto);
    }
}

/// Lines of `time, direction, block size, bin, bin, …`: all requests of a job since the line before. The directions of
/// one time belong together.
fn hist_log(log: &str, interval: Duration) -> Result<Vec<Interval>, FioError> {
    let usual = interval.as_millis() as u64;
    let mut intervals: Vec<Interval> = Vec::new();
    for line in log
        .lines()
        .filter(|line| !line.trim().is_empty())
        .take(INTERVALS_MAX)
    {
        let wrong = || FioError::Answer(format!("no line of fio's histogram log: {:.60}", line));
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
        assert!(wrong("@@status 0\n@@json\n{").contains("no JSON"));
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
