//! Imports results of fio, DiskSpd and CrystalDiskMark that were run by hand, for the same statistics and charts.

mod crystaldiskmark;
mod diskspd;

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

/// What a file says.
#[derive(Debug)]
pub struct Results {
    /// `fio`, `diskspd` or `crystaldiskmark`.
    pub tool: &'static str,
    pub version: String,
    pub loads: Vec<Load>,
}

/// A load with its result.
#[derive(Debug)]
pub struct Load {
    pub name: String,
    pub sample: Sample,
    /// What speaks against the sample.
    pub flag: Option<&'static str>,
}

/// Makes a result from `NAME=FILE` arguments. Files with the same name are of one configuration; if several of them have
/// the same load, these are repeats, in this order. The other configurations are compared with the first.
///
/// # Errors
/// A file is from none of these tools, or the files are from several tools or versions.
pub fn import(files: &[String], output: &Path) -> Result<()> {
    let mut cells = Vec::new();
    let mut names: Vec<String> = Vec::new();
    let mut loads: Vec<String> = Vec::new();
    let mut repeats: BTreeMap<(&str, String), u32> = BTreeMap::new();
    let mut tools = BTreeSet::new();
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
        let results = read(Path::new(path)).with_context(|| path.to_owned())?;
        tools.insert((results.tool, results.version));
        for load in results.loads {
            if !loads.contains(&load.name) {
                loads.push(load.name.clone());
            }
            let repeat = repeats.entry((name, load.name.clone())).or_default();
            let unknown = "imported: the conditions of the measurement are unknown";
            cells.push(Cell {
                block: *repeat,
                case: name.into(),
                workload: load.name,
                flags: vec![load.flag.unwrap_or(unknown).into()],
                sample: Some(load.sample),
                ..Cell::default()
            });
            *repeat += 1;
        }
    }
    ensure!(
        tools.len() == 1,
        "the results are from several tools or versions, and so are not comparable: {tools:?}"
    );
    let quoted = |text: &String| json!(text).to_string();
    let mut plan = String::from(
        "name = \"imported\"\ntitle = \"Results that were imported\"\nguest = \"none\"\n",
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
        facts: tools
            .into_iter()
            .map(|(tool, version)| (tool.into(), version))
            .collect::<Facts>(),
        only: Vec::new(),
        left_out: BTreeMap::new(),
    };
    let mut writer = Writer::create(output, header)?;
    cells
        .into_iter()
        .try_for_each(|cell| writer.write(&Record::Cell(cell)))
}

fn read(path: &Path) -> Result<Results> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(BYTES_MAX + 1)
        .read_to_end(&mut bytes)?;
    ensure!(
        bytes.len() as u64 <= BYTES_MAX,
        "the file is larger than {BYTES_MAX} bytes; it is not a result"
    );
    parse(&bytes)
}

/// Reads a result of any of the tools.
///
/// # Errors
/// It is none, or the tool failed.
pub fn parse(bytes: &[u8]) -> Result<Results> {
    let text = decode(bytes);
    let results = if text.trim_start().starts_with('<') {
        diskspd::parse(&text).context("this is not a result of DiskSpd")?
    } else if crystaldiskmark::is(&text) {
        crystaldiskmark::parse(&text).context("this is not a result of CrystalDiskMark")?
    } else {
        fio(&text)?
    };
    for Load { name, sample, .. } in &results.loads {
        let figures = [
            sample.iops,
            sample.bytes_per_s,
            sample.mean_ns,
            sample.window_s,
        ];
        let is_possible = figures.iter().all(|figure| (0.0..1e15).contains(figure));
        ensure!(is_possible, "{name}: a figure is too large to be measured");
    }
    Ok(results)
}

/// Text as Windows writes it: `>` of Windows PowerShell writes UTF-16. Other characters occur only in names that are not
/// used.
fn decode(bytes: &[u8]) -> String {
    let units = |unit: fn([u8; 2]) -> u16| {
        let units = bytes[2..]
            .chunks_exact(2)
            .map(|pair| unit([pair[0], pair[1]]));
        char::decode_utf16(units)
            .map(|unit| unit.unwrap_or(char::REPLACEMENT_CHARACTER))
            .collect()
    };
    match bytes {
        [0xff, 0xfe, ..] => units(u16::from_le_bytes),
        [0xfe, 0xff, ..] => units(u16::from_be_bytes),
        _ => String::from_utf8_lossy(bytes)
            .trim_start_matches('\u{feff}')
            .to_owned(),
    }
}

/// fio's JSON: one run for each name of a job.
fn fio(text: &str) -> Result<Results> {
    let start = text.find('{').context(
        "it is neither JSON of fio, nor XML of DiskSpd (-Rxml), nor text of CrystalDiskMark",
    )?;
    let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
    let all = values
        .next()
        .context("it is empty")?
        .context("it is not JSON")?;
    let mut by_name: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for job in all["jobs"].as_array().context("it has no jobs of fio")? {
        let name = job["jobname"]
            .as_str()
            .unwrap_or("job")
            .replace(char::is_control, " ");
        by_name.entry(name).or_default().push(job.clone());
    }
    let mut version = String::from("unknown");
    let mut loads = Vec::new();
    for (name, jobs) in by_name {
        let one = json!({ "fio version": all["fio version"], "timestamp_ms": all["timestamp_ms"], "jobs": jobs });
        let run = Run::parse_json(&one.to_string()).with_context(|| name.clone())?;
        let lengths = run.jobs.iter().flatten().map(|part| part.length_ms);
        let sample = Sample {
            iops: run.iops,
            bytes_per_s: run.iops * run.bytes as f64 / run.requests.max(1) as f64,
            mean_ns: run.latencies.mean().unwrap_or(0.0),
            window_s: lengths.max().unwrap_or(0) as f64 / 1000.0,
            latencies: run.latencies.coarse(),
            ..Sample::default()
        };
        version = run.version;
        loads.push(Load {
            name,
            sample,
            flag: None,
        });
    }
    ensure!(!loads.is_empty(), "it has no jobs of fio");
    Ok(Results {
        tool: "fio",
        version,
        loads,
    })
}

/// The name of a load in the words of the lab's own.
fn name(is_random: bool, write_percent: u64, block_size: u64, depth: u64, threads: u64) -> String {
    let random = if is_random { "rand" } else { "" };
    let kind = match write_percent {
        0 => format!("{random}read"),
        100 => format!("{random}write"),
        percent => format!("{random}rw {percent} % writes"),
    };
    let size = match block_size {
        bytes if bytes > 0 && bytes % (1 << 20) == 0 => format!("{}m", bytes >> 20),
        bytes if bytes > 0 && bytes % (1 << 10) == 0 => format!("{}k", bytes >> 10),
        bytes => bytes.to_string(),
    };
    let mut name = format!("{kind} {size} depth {depth}");
    if threads > 1 {
        name += &format!(", {threads} threads");
    }
    name
}

/// The name, with a number if another load of the file has it.
fn unused(name: String, loads: &[Load]) -> String {
    let is_used = |name: &str| loads.iter().any(|load| load.name == name);
    if !is_used(&name) {
        return name;
    }
    let numbered = (2..).map(|number| format!("{name} ({number})"));
    numbered
        .into_iter()
        .find(|name| !is_used(name))
        .unwrap_or(name)
}

#[cfg(test)]
mod tests;
