//! Tables of all configurations with one that is compared with all others: their figures, and ratios of samples of the same
//! block.

use std::fmt::Write as _;

use harness::svg::{escape, short};
use serde_json::{Value, json};

use crate::analysis::{Analysis, Ratio};
use crate::journal::Sample;
use crate::plan::words::{Against, GuestKind};
use crate::plan::{Plan, Workload};
use crate::stats::median::median;

/// A figure of a sample.
type Figure = fn(&Sample) -> Option<f64>;

/// A figure with its name in tables of ratios and in JSON.
type Named = (&'static str, &'static str, Figure);

/// The figures of a load with requests.
const REQUESTS: [Named; 4] = [
    ("IOPS", "iops", |sample| Some(sample.iops)),
    ("mean latency", "mean-us", |sample| Some(sample.mean_ns)),
    ("p99 latency", "p99-us", |sample| {
        Some(sample.percentile_us(0.99))
    }),
    ("CPU per I/O", "cpu-us", |sample| sample.cpu_us),
];

/// The figures of disks without I/O.
const IDLE: [Named; 4] = [
    ("core", "core-percent", |sample| {
        Some(sample.idle.as_ref()?.core * 100.0)
    }),
    ("memory", "private-kib", |sample| {
        Some(sample.idle.as_ref()?.footprint.private_kib)
    }),
    ("descriptors", "descriptors", |sample| {
        Some(sample.idle.as_ref()?.footprint.open() as f64)
    }),
    ("ready", "ready-s", |sample| {
        Some(sample.idle.as_ref()?.ready_s)
    }),
];

fn compared(load: &Workload) -> [Named; 4] {
    if load.idle { IDLE } else { REQUESTS }
}

/// The column heads of the figures.
fn heads(load: &Workload) -> [&'static str; 4] {
    match load.idle {
        true => ["core %", "KiB", "open", "ready s"],
        false => ["IOPS", "mean us", "p99 us", "CPU us"],
    }
}

/// The ratios of a comparison: the second configuration's figure over the first's.
pub fn json(analysis: &Analysis, from: usize, to: usize, load: usize) -> Value {
    let figures = compared(&analysis.plan().workloads[load]);
    let each = figures.iter().map(|(_, key, figure)| {
        let ratio = analysis.ratio(from, to, load, *figure);
        let value = ratio.map(|it| json!([it.median, it.least, it.most]));
        ((*key).to_owned(), value.into())
    });
    Value::Object(each.collect())
}

/// A row of a table: a configuration under a load.
struct Row {
    name: String,
    figures: [String; 4],
    /// Described by [`caption`]
    ratios: [String; 4],
}

/// The rows of a load.
fn rows(analysis: &Analysis, load: usize) -> Vec<Row> {
    let cases = analysis.plan().cases.len();
    let contrasts = &analysis.schedule.contrasts()[1..];
    let compared = compared(&analysis.plan().workloads[load]);
    (0..cases)
        .filter_map(|arm| {
            let summary = analysis.summary(arm, load)?;
            let of_row = |(from, to): &&(usize, usize)| match analysis.plan().against {
                Against::First => *to == arm,
                _ => *from == arm,
            };
            let pair = contrasts.iter().find(of_row);
            let ratio = |figure: Figure| {
                let ratio = pair.and_then(|(from, to)| analysis.ratio(*from, *to, load, figure));
                ratio.map_or_else(String::new, |it| it.to_string())
            };
            let middle = |(_, _, figure): Named| {
                let samples = analysis.samples(arm, load);
                let values: Vec<f64> = samples.filter_map(|(_, it)| figure(it)).collect();
                median(&values).map_or_else(String::new, short)
            };
            Some(Row {
                name: analysis.name(arm),
                figures: match analysis.plan().workloads[load].idle {
                    true => IDLE.map(middle),
                    false => [
                        short(summary.iops),
                        short(summary.mean_us),
                        short(summary.p99_us),
                        summary.cpu_us.map_or_else(String::new, short),
                    ],
                },
                ratios: compared.map(|(_, _, figure)| ratio(figure)),
            })
        })
        .collect()
}

/// Whether a plan has one configuration that is compared with all others.
pub fn are_shown(plan: &Plan) -> bool {
    match plan.against {
        Against::Last => true,
        Against::First => plan.guest == GuestKind::None,
        Against::Previous | Against::OneFactor | Against::FirstAndOneFactor => false,
    }
}

/// A description of the ratios.
fn caption(analysis: &Analysis) -> String {
    let ratios = match (
        analysis.plan().against,
        analysis.schedule.contrasts().get(1),
    ) {
        (Against::First, _) => "the row's figure over that of the first".to_owned(),
        (_, Some((_, to))) => {
            let base = &analysis.plan().cases[*to].base;
            format!("{base}'s figure over that of the row")
        }
        (_, None) => "none".to_owned(),
    };
    format!(
        "ratios: {ratios}, median [least..most] of the blocks; CPU time is the server's, fio's is the whole process"
    )
}

/// The tables for a terminal.
pub fn text(analysis: &Analysis) -> String {
    let mut text = String::new();
    for (index, load) in analysis.plan().workloads.iter().enumerate() {
        let rows = rows(analysis, index);
        let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
        let _ = write!(text, "\n{}\n{:width$}", load.name, "");
        for head in heads(load) {
            let _ = write!(text, " {head:>9}");
        }
        for (name, _, _) in compared(load) {
            let _ = write!(text, "   {name:20}");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
        for row in rows {
            let _ = write!(text, "{:width$}", row.name);
            for figure in &row.figures {
                let _ = write!(text, " {figure:>9}");
            }
            for ratio in &row.ratios {
                let _ = write!(text, "   {ratio:20}");
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
    }
    let _ = writeln!(text, "\n{}", caption(analysis));
    text
}

/// The tables for the page.
pub fn html(analysis: &Analysis) -> String {
    let mut page = String::from("<section><h2>Comparison</h2>\n");
    for (index, load) in analysis.plan().workloads.iter().enumerate() {
        let _ = write!(page, "<h3>{}</h3><table><tr><th></th>", escape(&load.name));
        let compared = compared(load).map(|(name, _, _)| name);
        for head in heads(load).into_iter().chain(compared) {
            let _ = write!(page, "<th>{head}</th>");
        }
        page.push_str("</tr>\n");
        for row in rows(analysis, index) {
            let _ = write!(page, "<tr><td>{}</td>", escape(&row.name));
            for text in row.figures.iter().chain(&row.ratios) {
                let _ = write!(page, "<td>{text}</td>");
            }
            page.push_str("</tr>\n");
        }
        page.push_str("</table>\n");
    }
    let _ = writeln!(page, "<p>{}</p></section>", escape(&caption(analysis)));
    page
}

impl std::fmt::Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Ratio {
            median,
            least,
            most,
        } = self;
        write!(f, "{median:.2} [{least:.2}..{most:.2}]")
    }
}
