//! Imports results of fio, DiskSpd and CrystalDiskMark that were run by hand, for the same statistics and charts.

mod crystaldiskmark;
mod diskspd;
mod fio;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use crate::host::{Facts, now_ms};
use crate::journal::{Cell, Header, Record, Sample, Writer};

/// The largest file that is read.
const BYTES_MAX: u64 = 1 << 28;
/// The maximum number of files of a folder.
const FILES_MAX: usize = 10_000;
/// The name of the plan of an imported result. Nobody looked at its figures while they were measured.
pub const PLAN: &str = "imported.toml";

/// What a file says.
#[derive(Debug)]
pub struct Results {
    /// `fio`, `diskspd` or `crystaldiskmark`.
    pub tool: &'static str,
    pub version: String,
    pub loads: Vec<Load>,
    /// What of the file is not used, or is an estimate.
    pub notes: Vec<String>,
}

/// A load with its result.
#[derive(Debug)]
pub struct Load {
    pub name: String,
    pub sample: Sample,
    /// What speaks against the sample.
    pub flag: Option<&'static str>,
}

/// Makes a result from `NAME=FILE` arguments; a folder stands for its files. Files with the same name are of one
/// configuration; if several of them have the same load, these are repeats, in this order. The other configurations are
/// compared with the first. Returns notes on what is not used.
///
/// # Errors
/// A file is from none of these tools, the files are from several tools or versions, or two are the same.
pub fn import(files: &[String], output: &Path) -> Result<Vec<String>> {
    let mut cells = Vec::new();
    let mut names: Vec<String> = Vec::new();
    let mut loads: Vec<String> = Vec::new();
    let mut repeats: BTreeMap<(&str, String), u32> = BTreeMap::new();
    let mut tools = BTreeSet::new();
    let mut known = Known::default();
    let mut notes = Vec::new();
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
        for results in read_all(Path::new(path), &mut known, &mut notes)? {
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
        file: PLAN.into(),
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
        .try_for_each(|cell| writer.write(&Record::Cell(cell)))?;
    notes.dedup();
    Ok(notes)
}

/// The contents of files that were read, by their length and a hash.
#[derive(Default)]
struct Known(BTreeMap<(usize, u64), PathBuf>);

impl Known {
    /// # Errors
    /// Another file has the same contents: it is not a repeat.
    fn add(&mut self, path: &Path, bytes: &[u8]) -> Result<()> {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        if let Some(other) = self.0.insert((bytes.len(), hasher.finish()), path.into()) {
            bail!(
                "it is the same as {}: a repeat is a measurement of its own",
                other.display()
            );
        }
        Ok(())
    }
}

/// Reads a file, or all files of a folder in the order of their names.
fn read_all(path: &Path, known: &mut Known, notes: &mut Vec<String>) -> Result<Vec<Results>> {
    let one = |path: &Path, known: &mut Known, notes: &mut Vec<String>| -> Result<Results> {
        let results = read(path, known)?;
        let its = results.notes.iter();
        notes.extend(its.map(|note| format!("{}: {note}", path.display())));
        Ok(results)
    };
    if !path.is_dir() {
        let results = one(path, known, notes).with_context(|| path.display().to_string())?;
        return Ok(vec![results]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path).with_context(|| path.display().to_string())? {
        let entry = entry?;
        let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if entry.path().is_file() && !is_hidden {
            files.push(entry.path());
        }
        ensure!(
            files.len() <= FILES_MAX,
            "{}: it has more than {FILES_MAX} files",
            path.display()
        );
    }
    files.sort();
    let mut all = Vec::new();
    for file in &files {
        match one(file, known, notes) {
            Ok(results) => all.push(results),
            Err(error) if error.is::<NoResult>() => {
                notes.push(format!("{}: not used: {error:#}", file.display()));
            }
            Err(error) => return Err(error.context(file.display().to_string())),
        }
    }
    ensure!(
        !all.is_empty(),
        "{}: none of its files is a result of fio, DiskSpd or CrystalDiskMark",
        path.display()
    );
    Ok(all)
}

/// The text is from none of the tools.
#[derive(Debug, thiserror::Error)]
#[error(
    "it is neither JSON, text or terse output of fio, nor XML or text of DiskSpd, nor text of CrystalDiskMark"
)]
struct NoResult;

fn read(path: &Path, known: &mut Known) -> Result<Results> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(BYTES_MAX + 1)
        .read_to_end(&mut bytes)?;
    ensure!(
        bytes.len() as u64 <= BYTES_MAX,
        "the file is larger than {BYTES_MAX} bytes; it is not a result"
    );
    known.add(path, &bytes)?;
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
    } else if diskspd::is_text(&text) {
        diskspd::parse_text(&text).context("this is not a result of DiskSpd")?
    } else if fio::is(&text) {
        fio::parse(&text)?
    } else {
        bail!(NoResult);
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
