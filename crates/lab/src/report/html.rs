//! The HTML page: one file that needs no network, for light and dark screens and for paper.

use std::fmt::Write as _;

use harness::histogram::Histogram;
use harness::svg::{escape, short};

use super::advice::advice;
use super::charts::{self, Series, latency, percent};
use super::grid::Grid;
use super::profiles;
use super::ratios;
use crate::analysis::{Analysis, ClaimResult, Question};
use crate::plan::words::Against;

const STYLE: &str = include_str!("style.css");

/// The maximum number of charts of one kind. The tables have the rest.
const CHARTS_MAX: usize = 24;

/// The whole page.
pub fn page(analysis: &Analysis) -> String {
    let plan = analysis.plan();
    let title = if plan.title.is_empty() {
        &plan.name
    } else {
        &plan.title
    };
    let grid = Grid::of(analysis);
    let questions = analysis.questions();
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{0}</title>\n<style>\n{STYLE}</style></head>\n<body>\n<h1>{0}</h1>\n",
        escape(title)
    );
    top(&mut page, analysis, &questions);
    verdicts(&mut page, analysis, &grid, &questions);
    if plan.against == Against::Previous {
        ladders(&mut page, analysis);
    }
    if ratios::are_shown(plan) {
        page += &ratios::html(analysis);
    }
    curves(&mut page, analysis, &grid);
    surfaces(&mut page, analysis, &grid);
    latencies(&mut page, analysis);
    page += &profiles::html(analysis);
    knees(&mut page, analysis);
    claims(&mut page, analysis);
    cells(&mut page, analysis);
    doubts(&mut page, analysis);
    method(&mut page, analysis);
    page.push_str("</body></html>\n");
    page
}

fn top(page: &mut String, analysis: &Analysis, questions: &[Question]) {
    let advice = advice(analysis);
    let facts = &analysis.journal.header.facts;
    let _ = writeln!(
        page,
        "<section class=\"answer\"><p class=\"sentence\">{}</p>",
        escape(&advice.sentence)
    );
    if !advice.costs.is_empty() {
        page.push_str("<ul>");
        for cost in &advice.costs {
            let _ = write!(page, "<li>{}</li>", escape(cost));
        }
        page.push_str("</ul>\n");
    }
    for (whom, patch) in &advice.patches {
        let _ = writeln!(
            page,
            "<details><summary>For {}</summary><pre>{}</pre></details>",
            escape(whom),
            escape(patch)
        );
    }
    page.push_str("</section>\n");
    if facts.get("accelerator").is_some_and(|accel| accel == "tcg") {
        page.push_str("<p class=\"banner\">KVM was not available, so the guests ran under emulation. The guest is the bottleneck: absolute figures mean nothing, but directions may be right.</p>\n");
    }
    let twins: Vec<&Question> = questions
        .iter()
        .filter(|question| question.to >= analysis.plan().cases.len())
        .collect();
    let differing = twins
        .iter()
        .filter(|q| {
            matches!(
                q.verdict,
                crate::stats::Verdict::Gain | crate::stats::Verdict::Loss
            )
        })
        .count();
    let noise = match analysis.noise() {
        Some(noise) => format!(
            "Two runs of the same configuration differ by {:.1} % (one standard deviation)",
            noise * 100.0
        ),
        None => {
            "There are too few pairs to tell how much two runs of the same configuration differ"
                .into()
        }
    };
    let difference = match differing {
        0 => "and no load shows a difference between them.".to_owned(),
        n => format!(
            "and {n} of {} loads show a difference between them: this host drifts, so other verdicts may be wrong too.",
            twins.len()
        ),
    };
    let _ = writeln!(page, "<p>{noise}, {difference}</p>");
    let names = analysis.plan().cases.iter().enumerate().map(|(index, case)| {
        format!("<span class=\"key\"><svg width=\"14\" height=\"14\"><rect class=\"bar c{}\" width=\"14\" height=\"14\"/></svg>{}</span>", index % charts::COLOURS, escape(&case.name))
    });
    let _ = writeln!(
        page,
        "<p class=\"legend\">{}</p>",
        names.collect::<Vec<_>>().join(" ")
    );
}

fn verdicts(page: &mut String, analysis: &Analysis, grid: &Grid, questions: &[Question]) {
    page.push_str("<h2>Gains and losses</h2>\n<p>Each field is one comparison under one load. “≈” means a difference within the margin, and “?” means undecided. Point at a field to see its interval.</p>\n<div class=\"charts\">\n");
    for (from, to) in analysis
        .schedule
        .contrasts()
        .iter()
        .skip(1)
        .chain(analysis.schedule.contrasts().first())
        .take(CHARTS_MAX)
    {
        let own: Vec<Question> = questions
            .iter()
            .filter(|q| (q.from, q.to) == (*from, *to))
            .cloned()
            .collect();
        let title = format!("{} → {}", analysis.name(*from), analysis.name(*to));
        let mut chart = charts::heat_map(&title, grid, &own);
        let mut notes = Vec::new();
        if let Some(settings) = analysis.confounded(*from, *to) {
            notes.push(format!(
                "Confounded: {} differ, so the gain cannot be attributed to one setting.",
                settings.join(", ")
            ));
        }
        let effective = analysis.effective_differences(*from, *to);
        if !effective.is_empty() {
            notes.push(format!("Effective settings: {}", effective.join("; ")));
        }
        if !notes.is_empty() {
            let _ = write!(
                chart,
                "<figcaption>{}</figcaption>",
                escape(&notes.join(" "))
            );
        }
        figure(page, &chart);
    }
    page.push_str("</div>\n");
}

fn figure(page: &mut String, chart: &str) {
    let _ = writeln!(page, "<figure>{chart}</figure>");
}

fn ladders(page: &mut String, analysis: &Analysis) {
    page.push_str("<h2>Step by step</h2>\n<div class=\"charts\">\n");
    for (load, workload) in analysis
        .plan()
        .workloads
        .iter()
        .enumerate()
        .take(CHARTS_MAX)
    {
        let step = |arm: usize| {
            let summary = analysis.summary(arm, load)?;
            Some((
                analysis.name(arm),
                summary.iops,
                summary.iops_interval.map(|found| (found.low, found.high)),
            ))
        };
        let steps: Vec<_> = (0..analysis.plan().cases.len()).filter_map(step).collect();
        if !steps.is_empty() {
            figure(
                page,
                &charts::ladder(&format!("{}: requests per second", workload.name), &steps),
            );
        }
    }
    page.push_str("</div>\n");
}

fn curves(page: &mut String, analysis: &Analysis, grid: &Grid) {
    page.push_str("<h2>Requests per second, latency and CPU time</h2>\n<p>Medians with 95 % intervals. Depth sweeps are closed loops, in which a slow disk receives fewer requests.</p>\n<div class=\"charts\">\n");
    type Value = fn(&crate::analysis::Summary) -> Option<(f64, f64, f64)>;
    let kinds: [(&str, Value); 3] = [
        ("requests per second", |summary| {
            let (low, high) = summary
                .iops_interval
                .map_or((summary.iops, summary.iops), |found| {
                    (found.low, found.high)
                });
            Some((summary.iops, low, high))
        }),
        ("99th percentile, µs", |summary| {
            if summary.latencies.is_empty() {
                return None;
            }
            let (low, high) = summary
                .p99_interval
                .map_or((summary.p99_us, summary.p99_us), |found| {
                    (found.low, found.high)
                });
            Some((
                summary.p99_us,
                low.min(summary.p99_us),
                high.max(summary.p99_us),
            ))
        }),
        ("host CPU per request, µs", |summary| {
            summary.cpu_us.map(|cpu| (cpu, cpu, cpu))
        }),
    ];
    for (name, loads) in grid.rows.iter().take(CHARTS_MAX) {
        for (unit, value) in kinds {
            let series: Vec<Series> = (0..analysis.plan().cases.len())
                .map(|arm| Series {
                    colour: arm,
                    name: analysis.name(arm),
                    points: loads
                        .iter()
                        .map(|load| value(&analysis.summary(arm, (*load)?)?))
                        .collect(),
                })
                .collect();
            if series
                .iter()
                .any(|line| line.points.iter().any(Option::is_some))
            {
                figure(
                    page,
                    &charts::lines(name, grid.title(), &grid.columns, &series, unit),
                );
            }
        }
    }
    page.push_str("</div>\n");
}

/// If the plan varies guests or volumes.
fn surfaces(page: &mut String, analysis: &Analysis, grid: &Grid) {
    let cases = &analysis.plan().cases;
    let shape = |arm: usize| (cases[arm].settings.guests, cases[arm].settings.volumes);
    if (0..cases.len()).all(|arm| shape(arm) == shape(0)) {
        return;
    }
    page.push_str("<h2>Guests and volumes</h2>\n<p>MB per second of all guests and volumes together. Darker is more.</p>\n<div class=\"charts\">\n");
    for (name, loads) in grid.rows.iter().take(CHARTS_MAX) {
        let rows: Vec<(String, Vec<Option<f64>>)> = (0..cases.len())
            .map(|arm| {
                let value =
                    |load: &Option<usize>| Some(analysis.summary(arm, (*load)?)?.bytes_per_s / 1e6);
                (cases[arm].name.clone(), loads.iter().map(value).collect())
            })
            .collect();
        figure(
            page,
            &charts::surface(name, grid.title(), &grid.columns, &rows),
        );
        let series: Vec<Series> = rows
            .iter()
            .enumerate()
            .map(|(colour, (name, values))| Series {
                colour,
                name: name.clone(),
                points: values
                    .iter()
                    .map(|value| value.map(|value| (value, value, value)))
                    .collect(),
            })
            .collect();
        figure(
            page,
            &charts::lines(name, grid.title(), &grid.columns, &series, "MB per second"),
        );
    }
    page.push_str("</div>\n");
}

fn latencies(page: &mut String, analysis: &Analysis) {
    page.push_str("<h2>Latencies</h2>\n<p>Percentiles of all requests of all guests together. The charts over time show the last run of each configuration.</p>\n<div class=\"charts\">\n");
    let cases = analysis.plan().cases.len();
    for (load, workload) in analysis
        .plan()
        .workloads
        .iter()
        .enumerate()
        .take(CHARTS_MAX / 2)
    {
        let merged: Vec<(usize, String, Histogram)> = (0..cases)
            .filter_map(|arm| {
                Some((
                    arm,
                    analysis.name(arm),
                    analysis.summary(arm, load)?.latencies,
                ))
            })
            .collect();
        if merged.is_empty() {
            continue;
        }
        let borrowed: Vec<(usize, String, &Histogram)> = merged
            .iter()
            .map(|(arm, name, latencies)| (*arm, name.clone(), latencies))
            .collect();
        figure(page, &charts::distribution(&workload.name, &borrowed));
        let mut columns = Vec::new();
        let series: Vec<Series> = (0..cases)
            .filter_map(|arm| {
                let (_, sample) = analysis.samples(arm, load).last()?;
                if sample.series.len() > columns.len() {
                    columns = sample
                        .series
                        .iter()
                        .map(|point| short((point.at_s * 10.0).round() / 10.0))
                        .collect();
                }
                let points = sample.series.iter().map(|point| {
                    let us = point.p99_ns as f64 / 1000.0;
                    (point.p99_ns > 0).then_some((us, us, us))
                });
                Some(Series {
                    colour: arm,
                    name: analysis.name(arm),
                    points: points.collect(),
                })
            })
            .filter(|line: &Series| line.points.len() > 1)
            .collect();
        if !series.is_empty() {
            figure(
                page,
                &charts::lines(
                    &workload.name,
                    "seconds",
                    &columns,
                    &series,
                    "99th percentile over time, µs",
                ),
            );
        }
    }
    page.push_str("</div>\n");
}

fn knees(page: &mut String, analysis: &Analysis) {
    let all: Vec<(String, String, u32, Option<u32>)> = (0..analysis.plan().cases.len())
        .flat_map(|arm| {
            analysis
                .knees(arm)
                .into_iter()
                .map(move |(kind, highest, knee)| (analysis.name(arm), kind, highest, knee))
        })
        .collect();
    if all.is_empty() {
        return;
    }
    page.push_str("<h2>Knees</h2>\n<p>Open loop: requests arrive whether or not the disk keeps up. The knee is the highest offered rate of which 97 % are reached, with a 99th percentile of at most five times that of the lowest rate.</p>\n<div class=\"wide\"><table><tr><th>configuration</th><th>load</th><th>knee</th></tr>\n");
    for (case, kind, highest, knee) in all {
        let knee = match knee {
            Some(knee) if knee == highest => format!("beyond {}", short(f64::from(knee))),
            Some(knee) => short(f64::from(knee)),
            None => "below the lowest rate".into(),
        };
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td>{}</td><td>{knee}</td></tr>",
            escape(&case),
            escape(&kind)
        );
    }
    page.push_str("</table></div>\n");
}

fn claims(page: &mut String, analysis: &Analysis) {
    if analysis.plan().claims.is_empty() {
        return;
    }
    page.push_str("<h2>Published claims</h2>\n<div class=\"wide\"><table><tr><th>source</th><th>figure</th><th>published</th><th>measured</th><th>here</th><th>reason</th></tr>\n");
    for (claim, found) in analysis.plan().claims.iter().zip(analysis.replications()) {
        let class = match found.outcome {
            ClaimResult::Reproduced => "good",
            ClaimResult::NotReproduced => "bad",
            ClaimResult::DirectionOnly | ClaimResult::Undecided | ClaimResult::Untestable => "",
        };
        let published = claim.published();
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td>{}</td><td>{published}</td><td>{}</td><td class=\"{class}\">{}</td><td>{}</td></tr>",
            escape(&claim.source),
            escape(&claim.figure),
            super::measured_size(&found).unwrap_or_else(|| "–".into()),
            found.outcome,
            escape(&found.why)
        );
    }
    page.push_str("</table></div>\n");
}

fn cells(page: &mut String, analysis: &Analysis) {
    page.push_str("<h2>All medians</h2>\n<div class=\"wide\"><table><tr><th>configuration</th><th>load</th><th>runs</th><th>IOPS</th><th>95 %</th><th>MB/s</th><th>mean</th><th>p50</th><th>p99</th><th>p99.9</th><th>CPU µs/IO</th><th>switches/IO</th><th>exits/IO</th></tr>\n");
    let optional = |value: Option<f64>| value.map_or_else(|| "–".into(), short);
    for load in 0..analysis.plan().workloads.len() {
        for arm in 0..=analysis.plan().cases.len() {
            let Some(s) = analysis.summary(arm, load) else {
                continue;
            };
            let interval = s.iops_interval.map_or_else(
                || "–".into(),
                |found| {
                    let level = if found.level < 0.95 {
                        format!(" ({:.0} %)", found.level * 100.0)
                    } else {
                        String::new()
                    };
                    format!("{} … {}{level}", short(found.low), short(found.high))
                },
            );
            let _ = writeln!(
                page,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{interval}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                escape(&analysis.name(arm)),
                escape(&analysis.plan().workloads[load].name),
                s.samples,
                short(s.iops),
                short(s.bytes_per_s / 1e6),
                latency(s.mean_us),
                latency(s.p50_us),
                latency(s.p99_us),
                latency(s.p999_us),
                optional(s.cpu_us),
                optional(s.switches),
                optional(s.exits),
            );
        }
    }
    page.push_str("</table></div>\n");
}

fn doubts(page: &mut String, analysis: &Analysis) {
    let mut lines: Vec<(String, usize)> = Vec::new();
    for cell in &analysis.journal.cells {
        let all = cell
            .flags
            .iter()
            .map(|flag| flag.split(':').next().unwrap_or(flag).to_owned());
        let error = cell
            .error
            .as_ref()
            .map(|error| format!("failed: {}, {}: {error}", cell.case, cell.workload));
        for line in all.chain(error) {
            match lines.iter_mut().find(|(known, _)| *known == line) {
                Some((_, count)) => *count += 1,
                None => lines.push((line, 1)),
            }
        }
    }
    let left_out = analysis
        .journal
        .header
        .left_out
        .iter()
        .map(|(case, why)| format!("left out: {case}: {why}"));
    lines.extend(
        left_out
            .chain(
                analysis
                    .plan()
                    .left_out
                    .iter()
                    .map(|line| format!("left out: {line}")),
            )
            .chain(analysis.plan().uncompared())
            .map(|line| (line, 0)),
    );
    if lines.is_empty() {
        return;
    }
    let _ = writeln!(
        page,
        "<h2>Reasons to doubt these figures</h2>\n<p>Of {} samples. The samples are not removed; cells.csv lists the reasons for each.</p>\n<ul class=\"doubts\">",
        analysis.journal.cells.len()
    );
    for (line, count) in lines {
        let times = if count > 0 {
            format!(" ({count} times)")
        } else {
            String::new()
        };
        let (head, rest) = line.split_once('\n').unwrap_or((&line, ""));
        let rest = if rest.is_empty() {
            String::new()
        } else {
            format!("<pre>{}</pre>", escape(rest))
        };
        let _ = writeln!(page, "<li>{}{times}{rest}</li>", escape(head));
    }
    page.push_str("</ul>\n");
}

fn method(page: &mut String, analysis: &Analysis) {
    let plan = analysis.plan();
    let blocks = analysis
        .journal
        .cells
        .iter()
        .map(|cell| cell.block)
        .max()
        .map_or(0, |last| last + 1);
    let detectable = analysis
        .questions()
        .iter()
        .filter_map(|question| question.detectable)
        .fold(None, |most: Option<f64>, effect| {
            Some(most.map_or(effect, |most| most.max(effect)))
        });
    if analysis.journal.header.file == crate::import::PLAN {
        let _ = writeln!(
            page,
            "<h2>Method</h2>\n<p>These results were imported. One file is one sample, and the files of two configurations are paired in their order. A gain is the ratio of a pair. There is one test, after all files, with at least five pairs; at most 5 % of the given verdicts are wrong in expectation. Gains within {:.1} % count as equivalent.</p>",
            plan.margin * 100.0
        );
        return;
    }
    let _ = writeln!(
        page,
        "<h2>Method</h2>\n<p>One boot with one run in it is one sample: {:.0} s after {:.0} s of ramp. Each of the {blocks} blocks booted every undecided configuration once, in random order (seed {}). A gain is the ratio of a pair of samples of one block. Intervals are valid whenever the run was stopped, and at most 5 % of the given verdicts are wrong in expectation. Gains within {:.1} % count as equivalent.{}</p>",
        plan.runtime.as_secs_f64(),
        plan.ramp.as_secs_f64(),
        analysis.journal.header.seed,
        plan.margin * 100.0,
        detectable.map_or_else(String::new, |effect| format!(
            " The least certain comparison finds effects of {} or more.",
            percent(effect)
        ))
    );
    if !analysis.journal.fills.is_empty() {
        let fills = analysis.journal.fills.iter().map(|fill| {
            let mib = fill.bytes >> 20;
            format!("{} ({mib} MiB in {:.0} s)", escape(&fill.disk), fill.took_s)
        });
        let _ = writeln!(
            page,
            "<p>Thin disks were filled before the first sample: {}.</p>",
            fills.collect::<Vec<_>>().join(", ")
        );
    }
    page.push_str("<div class=\"wide\"><table>\n");
    for (key, value) in &analysis.journal.header.facts {
        let _ = writeln!(
            page,
            "<tr><th>{}</th><td>{}</td></tr>",
            escape(key),
            escape(value)
        );
    }
    page.push_str("</table></div>\n<details><summary>The plan</summary><pre>");
    page.push_str(&escape(&analysis.journal.header.plan));
    page.push_str("</pre></details>\n");
}
