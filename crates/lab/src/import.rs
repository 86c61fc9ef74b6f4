//! Imports results of fio that was run by hand, for the same statistics and charts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::fio::Run;
use crate::host::{Facts, now_ms};
use crate::journal::{Cell, Header, Record, Sample, Writer};

/// The largest file that is read.
const BYTES_MAX: u64 = 1 << 30;

/// Makes a result from `NAME=FILE` arguments. Files with the same name are repeats of one configuration, in this order. The
/// other configurations are compared with the first.
///
/// # Errors
/// A file is not JSON of fio, or the files are from several versions of fio.
pub fn import(files: &[String], output: &Path) -> Result<()> {
    let mut cells = Vec::new();
    let mut names: Vec<String> = Vec::new();
    let mut loads: Vec<String> = Vec::new();
    let mut repeats: BTreeMap<String, u32> = BTreeMap::new();
    let mut versions = BTreeSet::new();
    for pair in files {
        let (name, path) = pair
            .split_once('=')
            .with_context(|| format!("'{pair}' is not NAME=FILE"))?;
        ensure!(
            !name.trim().is_empty() && !name.contains(char::is_control),
            "'{pair}' has no name before '='"
        );
        if !names.iter().any(|known| known == name) {
            names.push(name.into());
        }
        let block = repeats.entry(name.into()).or_default();
        for (load, run) in read(Path::new(path))? {
            versions.insert(run.version.clone());
            if !loads.contains(&load) {
                loads.push(load.clone());
            }
            let sample = Sample {
                iops: run.iops,
                bytes_per_s: run.iops * run.bytes as f64 / run.requests.max(1) as f64,
                mean_ns: run.latencies.mean().unwrap_or(0.0),
                window_s: run
                    .jobs
                    .iter()
                    .flatten()
                    .map(|part| part.length_ms)
                    .max()
                    .unwrap_or(0) as f64
                    / 1000.0,
                latencies: run.latencies.coarse(),
                ..Sample::default()
            };
            let flags = vec!["imported: the conditions of the measurement are unknown".into()];
            cells.push(Cell {
                block: *block,
                case: name.into(),
                workload: load,
                flags,
                sample: Some(sample),
                ..Cell::default()
            });
        }
        *block += 1;
    }
    ensure!(
        versions.len() == 1,
        "the results are from several versions of fio, and so are not comparable: {versions:?}"
    );
    let quoted = |text: &String| json!(text).to_string();
    let mut plan = String::from(
        "name = \"imported\"\ntitle = \"Results of fio that were imported\"\nguest = \"none\"\n",
    );
    names
        .iter()
        .for_each(|name| plan += &format!("[[case]]\nname = {}\n", quoted(name)));
    loads
        .iter()
        .for_each(|load| plan += &format!("[[workload]]\nname = {}\n", quoted(load)));
    let header = Header {
        version: 1,
        file: "imported.toml".into(),
        plan,
        jobs: Default::default(),
        seed: 0,
        started_ms: now_ms(),
        facts: versions
            .into_iter()
            .map(|version| ("fio".into(), version))
            .collect::<Facts>(),
        only: Vec::new(),
        left_out: BTreeMap::new(),
    };
    let mut writer = Writer::create(output, header)?;
    cells
        .into_iter()
        .try_for_each(|cell| writer.write(&Record::Cell(cell)))
}

/// The runs of a file, one for each job name.
fn read(path: &Path) -> Result<Vec<(String, Run)>> {
    let mut text = String::new();
    let file = File::open(path).with_context(|| path.display().to_string())?;
    file.take(BYTES_MAX)
        .read_to_string(&mut text)
        .with_context(|| format!("reading {}", path.display()))?;
    let start = text
        .find('{')
        .with_context(|| format!("{}: has no JSON of fio", path.display()))?;
    let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
    let all = values
        .next()
        .context("it is empty")?
        .with_context(|| format!("{}: is not JSON", path.display()))?;
    let mut by_name: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for job in all["jobs"]
        .as_array()
        .with_context(|| format!("{}: has no jobs of fio", path.display()))?
    {
        let name = job["jobname"]
            .as_str()
            .unwrap_or("job")
            .replace(char::is_control, " ");
        by_name.entry(name).or_default().push(job.clone());
    }
    let run = |(name, jobs): (String, Vec<Value>)| {
        let one = json!({ "fio version": all["fio version"], "timestamp_ms": all["timestamp_ms"], "jobs": jobs });
        let run = Run::parse_json(&one.to_string())
            .with_context(|| format!("{}: {name}", path.display()))?;
        Ok((name, run))
    };
    by_name.into_iter().map(run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Analysis;
    use crate::journal::Journal;
    use crate::stats::Verdict;

    #[test]
    fn repeats_of_two_configurations_are_compared() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = Vec::new();
        for (name, iops) in [("slow", 1000), ("fast", 1500)] {
            for repeat in 0..6 {
                let path = folder.path().join(format!("{name}{repeat}.json"));
                let side = json!({ "total_ios": 9000, "io_bytes": 36_864_000, "iops": iops + repeat, "runtime": 9000,
                    "clat_ns": { "percentile": { "50.0": 1000, "99.0": 2000 } } });
                let json = json!({ "fio version": "fio-3.36", "jobs": [{ "jobname": "a\"b", "error": 0, "read": side }] });
                std::fs::write(&path, json.to_string()).unwrap();
                files.push(format!("{name}={}", path.display()));
            }
        }
        let output = folder.path().join("result");
        import(&files, &output).unwrap();
        let journal = Journal::read(&output).unwrap();
        let analysis = Analysis::of(&journal);
        let question = &analysis.questions()[1];
        assert_eq!((question.verdict, question.pairs), (Verdict::Gain, 6));
        assert!((question.gain.unwrap() - 0.5).abs() < 0.01);
        assert!(import(&["x".into()], &output).is_err());
    }
}
