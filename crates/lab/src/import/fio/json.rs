//! fio's JSON, `json` and `json+`, of fio 2 and 3: also with messages around it, of `--status-interval` and of
//! `fio --client`.

use std::borrow::Cow;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Job, Latencies, POINTS_MAX, Side};

/// The maximum number of interim results.
const DOCUMENTS_MAX: usize = 100_000;

/// Where the JSON begins: fio prints it from the start of a line, after its messages.
pub(super) fn start(text: &str) -> Option<usize> {
    let at_line = |(at, _): &(usize, &str)| {
        let before = text[..*at].chars().next_back();
        before.is_none_or(|before| matches!(before, '\n' | '\r'))
    };
    let is_object = |at: usize| {
        let rest = text[at + 1..].trim_start();
        rest.starts_with('"') || rest.starts_with('}') || rest.is_empty()
    };
    text.match_indices('{')
        .filter(at_line)
        .map(|(at, _)| at)
        .find(|at| is_object(*at))
}

/// fio's version, and its jobs.
pub(super) fn parse(text: &str) -> Result<(String, Vec<Job>)> {
    let text = without_nan(text);
    let mut rest = &text[..];
    let (mut version, mut documents) = (String::new(), Vec::new());
    while let Some(at) = start(rest) {
        let mut values = serde_json::Deserializer::from_str(&rest[at..]).into_iter::<Value>();
        let value = values.next().context("it is empty")?;
        let value = value.context("it is not JSON, or was cut off")?;
        rest = &rest[at + values.byte_offset()..];
        ensure!(documents.len() < DOCUMENTS_MAX, "it has too many results");
        let its = value["fio version"].as_str().unwrap_or("unknown");
        ensure!(
            documents.is_empty() || version == its,
            "it has results of several versions of fio: {version} and {its}"
        );
        its.clone_into(&mut version);
        documents.push(jobs(&value, its)?);
    }
    Ok((version, super::last_of(documents)?))
}

/// Old versions print `nan` and `inf` for sides without requests.
fn without_nan(text: &str) -> Cow<'_, str> {
    if !text.contains("nan") && !text.contains("inf") {
        return Cow::Borrowed(text);
    }
    let mut clean = String::with_capacity(text.len());
    let (mut in_string, mut escaped) = (false, false);
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if !in_string {
            let number = rest.strip_prefix('-').unwrap_or(rest);
            let after = number.strip_prefix("nan").or(number.strip_prefix("inf"));
            let is_value = clean.trim_end_matches([' ', '\t']).ends_with(':');
            if let Some(after) = after
                && is_value
            {
                clean.push_str("null");
                rest = after;
                continue;
            }
        }
        match c {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            // A message before the JSON may have an odd number of quotes.
            '\n' => in_string = false,
            _ => {}
        }
        clean.push(c);
        rest = &rest[c.len_utf8()..];
    }
    Cow::Owned(clean)
}

fn jobs(document: &Value, version: &str) -> Result<Vec<Job>> {
    let list = |key: &str| document[key].as_array();
    let all = match (list("jobs"), list("client_stats")) {
        (Some(jobs), None) => jobs,
        (None, Some(clients)) => clients,
        (Some(_), Some(_)) => anyhow::bail!("it has both jobs and client_stats"),
        (None, None) => anyhow::bail!("it has no jobs of fio"),
    };
    all.iter()
        // The sum of the others.
        .filter(|job| job["jobname"] != "All clients")
        .take(super::JOBS_MAX + 1)
        .map(|one| job(one, version))
        .collect()
}

fn job(job: &Value, version: &str) -> Result<Job> {
    let name = job["jobname"].as_str().unwrap_or("job");
    let mut sides = Vec::new();
    let has_own = job["read"].is_object() || job["write"].is_object();
    for direction in ["read", "write", "trim", "mixed"] {
        // With unified_rw_reporting=both, the mixed side is the sum of the others.
        if direction == "mixed" && has_own {
            continue;
        }
        if let Some(side) = side(&job[direction], direction, version)
            .with_context(|| format!("job {name}, {direction}"))?
        {
            sides.push(side);
        }
    }
    Ok(Job {
        name: name.replace(char::is_control, " "),
        group: job["groupid"].as_u64().unwrap_or(0),
        error: job["error"].as_i64().unwrap_or(0),
        start_ms: job["job_start"].as_u64(),
        sides,
    })
}

fn side(side: &Value, direction: &'static str, version: &str) -> Result<Option<Side>> {
    let requests = side["total_ios"].as_u64().unwrap_or(0);
    let iops = side["iops"].as_f64().unwrap_or(0.0);
    if requests == 0 && iops == 0.0 {
        return Ok(None);
    }
    // fio 3 names its unit, and fio 2 has microseconds and KiB.
    let has = |key: &str| side[key].is_object();
    let is_new = has("clat_ns") || has("lat_ns") || !side["io_kbytes"].is_null();
    let is_old = !is_new && (has("clat") || has("lat"));
    let (suffix, unit) = if is_old { ("", 1000.0) } else { ("_ns", 1.0) };
    let number = |key: &str| side[key].as_f64();
    let runtime_ms = side["runtime"].as_u64().unwrap_or(0);
    let io_bytes = if is_old {
        number("io_bytes").map(|kib| kib * 1024.0)
    } else {
        ensure!(
            is_new || !version.starts_with("fio-2"),
            "fio 2 without latencies does not say whether io_bytes are bytes"
        );
        number("io_bytes")
    };
    let per_request = io_bytes.map(|bytes| bytes / requests.max(1) as f64);
    let bytes_per_s = match (number("bw_bytes"), per_request, number("bw")) {
        (Some(bytes), ..) => bytes,
        (None, Some(bytes), _) => bytes * iops,
        (None, None, kib) => kib.unwrap_or(0.0) * 1024.0,
    };
    let of = |kind: &str| &side[format!("{kind}{suffix}").as_str()];
    let read = |kind: &str| latencies(of(kind), unit);
    // Percentiles and mean are of the same kind.
    let mut kind = "clat";
    if matches!(read("clat"), Latencies::None)
        && (!matches!(read("lat"), Latencies::None) || mean(of("clat"), unit).is_none())
    {
        kind = "lat";
    }
    Ok(Some(Side {
        direction,
        requests,
        iops,
        bytes_per_s,
        runtime_ms,
        mean_ns: mean(of(kind), unit),
        latencies: read(kind),
        is_total: kind == "lat" && of("lat").is_object(),
    }))
}

fn mean(of: &Value, unit: f64) -> Option<f64> {
    let mean = of["mean"].as_f64()? * unit;
    (mean > 0.0).then_some(mean)
}

fn latencies(of: &Value, unit: f64) -> Latencies {
    let list = |key: &str| of[key].as_object().into_iter().flatten().take(POINTS_MAX);
    let scale = |value: f64| (value * unit) as u64;
    let bins: Vec<(u64, u64)> = list("bins")
        .filter_map(|(latency, requests)| Some((scale(latency.parse().ok()?), requests.as_u64()?)))
        .filter(|(_, requests)| *requests > 0)
        .collect();
    if !bins.is_empty() {
        return Latencies::Bins(bins);
    }
    let mut points: Vec<(f64, u64)> = list("percentile")
        .filter_map(|(share, latency)| Some((share.parse().ok()?, scale(latency.as_f64()?))))
        .filter(|(share, _)| (0.0..=100.0).contains(share))
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    match points
        .iter()
        .any(|(share, latency)| *share > 0.0 && *latency > 0)
    {
        true => Latencies::Percentiles(points),
        false => Latencies::None,
    }
}
