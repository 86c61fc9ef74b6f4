//! Tables for programs.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::analysis::Analysis;

/// A line for each sample.
pub fn cells_csv(analysis: &Analysis) -> String {
    let mut text = String::from(
        "block,case,twin,workload,loop,iops,bytes_per_s,mean_us,p50_us,p99_us,p999_us,window_s,cpu_us,switches,exits,flags,error\n",
    );
    for cell in &analysis.journal.cells {
        let number =
            |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.3}"));
        // CrystalDiskMark has only means.
        let percentile = |share: f64, sample: &crate::journal::Sample| {
            (!sample.latencies.is_empty()).then(|| sample.percentile_us(share))
        };
        let of = |get: &dyn Fn(&crate::journal::Sample) -> Option<f64>| {
            number(cell.sample.as_ref().and_then(get))
        };
        let _ = writeln!(
            text,
            "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}",
            cell.block,
            quoted(&cell.case),
            u8::from(cell.twin),
            quoted(&cell.workload),
            match analysis
                .plan()
                .workloads
                .iter()
                .find(|load| load.name == cell.workload)
            {
                Some(load) if load.rate.is_some() => "open",
                _ => "closed",
            },
            of(&|sample| Some(sample.iops)),
            of(&|sample| Some(sample.bytes_per_s)),
            of(&|sample| Some(sample.mean_ns / 1000.0)),
            of(&|sample| percentile(0.5, sample)),
            of(&|sample| percentile(0.99, sample)),
            of(&|sample| percentile(0.999, sample)),
            of(&|sample| Some(sample.window_s)),
            of(&|sample| sample.cpu_us),
            of(&|sample| sample.switches),
            of(&|sample| sample.exits),
            quoted(&cell.flags.join("; ")),
            quoted(cell.error.as_deref().unwrap_or_default()),
        );
    }
    text
}

/// RFC 4180 §2.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

fn recommendation(analysis: &Analysis) -> Value {
    let advice = super::advice::advice(analysis);
    let patches: serde_json::Map<String, Value> = advice
        .patches
        .into_iter()
        .map(|(whom, patch)| (whom.to_owned(), patch.into()))
        .collect();
    json!({ "sentence": advice.sentence, "costs": advice.costs, "patches": patches })
}

/// All that was found.
pub fn result_json(analysis: &Analysis) -> Value {
    let plan = analysis.plan();
    let arms = 0..=plan.cases.len();
    let cells: Vec<Value> = arms
        .flat_map(|arm| (0..plan.workloads.len()).map(move |load| (arm, load)))
        .filter_map(|(arm, load)| {
            let summary = analysis.summary(arm, load)?;
            Some(json!({
                "case": analysis.name(arm), "workload": plan.workloads[load].name, "samples": summary.samples,
                "loop": if plan.workloads[load].rate.is_some() { "open" } else { "closed" },
                "iops": summary.iops,
                "iops-interval": summary.iops_interval.map(|found| [found.low, found.high, found.level]),
                "bytes-per-s": summary.bytes_per_s, "mean-us": summary.mean_us,
                "p50-us": summary.p50_us, "p99-us": summary.p99_us, "p999-us": summary.p999_us,
                "p99-interval": summary.p99_interval.map(|found| [found.low, found.high]),
                "cpu-us": summary.cpu_us, "polling": summary.polling, "switches": summary.switches, "exits": summary.exits,
                "limits": super::profiles::json(analysis, arm, load),
            }))
        })
        .collect();
    let contrasts: Vec<Value> = analysis
        .questions()
        .iter()
        .map(|question| {
            json!({
                "from": analysis.name(question.from), "to": analysis.name(question.to),
                "workload": plan.workloads[question.workload].name, "verdict": question.verdict,
                "pairs": question.pairs, "gain-percent": question.gain.map(|gain| gain * 100.0),
                "interval-percent": question.interval.map(|(low, high)| [low * 100.0, high * 100.0]),
                "detectable-percent": question.detectable.map(|effect| effect * 100.0),
                "ratios": super::ratios::json(analysis, question.from, question.to, question.workload),
                "confounded": analysis.confounded(question.from, question.to),
            })
        })
        .collect();
    let claims: Vec<Value> = plan
        .claims
        .iter()
        .zip(analysis.replications())
        .map(|(claim, found)| {
            let percent = |log: f64| log.exp_m1() * 100.0;
            json!({
                "source": claim.source, "figure": claim.figure, "expect": claim.expect,
                "size-percent": claim.size.map(|size| [percent(size.low), percent(size.high)]),
                "won": claim.won.as_ref().map(ToString::to_string),
                "measured-percent": found.measured.map(|gain| gain * 100.0),
                "interval-percent": found.interval.map(|(low, high)| [low * 100.0, high * 100.0]),
                "outcome": found.outcome.to_string(), "why": found.why,
                "selected": found.selected, "comparisons": found.comparisons,
            })
        })
        .collect();
    json!({
        "format": "ringdisk-lab-1", "name": plan.name, "title": plan.title, "seed": analysis.journal.header.seed,
        "facts": analysis.journal.header.facts, "left-out": analysis.journal.header.left_out,
        "not-compared": plan.uncompared(), "filled": analysis.journal.fills,
        "margin-percent": plan.margin * 100.0, "noise-percent": analysis.noise().map(|noise| noise * 100.0),
        "cells": cells, "contrasts": contrasts, "claims": claims, "recommendation": recommendation(analysis),
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn fields_with_commas_and_quotes_are_quoted() {
        assert_eq!(super::quoted("a, \"b\""), "\"a, \"\"b\"\"\"");
        assert_eq!(super::quoted("plain"), "plain");
    }
}
