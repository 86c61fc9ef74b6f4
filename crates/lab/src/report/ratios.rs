//! Configurations beside the one that a plan compares with all others: what each gives and costs, and ratios of samples
//! of the same block.

use std::fmt::Write as _;

use harness::svg::{escape, short};
use serde_json::{Value, json};

use crate::analysis::{Analysis, Ratio};
use crate::journal::Sample;

/// A figure of a sample.
type Figure = fn(&Sample) -> Option<f64>;

/// What is compared, with its name in tables and in JSON.
const FIGURES: [(&str, &str, Figure); 3] = [
    ("IOPS", "iops", |sample| Some(sample.iops)),
    ("mean latency", "mean-us", |sample| Some(sample.mean_ns)),
    ("CPU per I/O", "cpu-us", |sample| sample.cpu_us),
];

/// Ratios of a comparison, the second configuration's figure over the first's.
pub fn json(analysis: &Analysis, from: usize, to: usize, load: usize) -> Value {
    let each = FIGURES.iter().map(|(_, key, figure)| {
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
    /// Those of the configuration that is compared, over this one's.
    ratios: [String; 3],
}

/// The rows of a load.
fn rows(analysis: &Analysis, load: usize) -> Vec<Row> {
    let cases = analysis.plan().cases.len();
    let contrasts = &analysis.schedule.contrasts()[1..];
    (0..cases)
        .filter_map(|arm| {
            let summary = analysis.summary(arm, load)?;
            let to = contrasts.iter().find(|(from, _)| *from == arm);
            let ratio = |figure: Figure| {
                let ratio = to.and_then(|(from, to)| analysis.ratio(*from, *to, load, figure));
                ratio.map_or_else(String::new, |it| it.to_string())
            };
            Some(Row {
                name: analysis.name(arm),
                figures: [
                    short(summary.iops),
                    short(summary.mean_us),
                    short(summary.p99_us),
                    summary.cpu_us.map_or_else(String::new, short),
                ],
                ratios: FIGURES.map(|(_, _, figure)| ratio(figure)),
            })
        })
        .collect()
}

const HEAD: [&str; 4] = ["IOPS", "mean us", "p99 us", "CPU us"];

/// For a terminal.
pub fn text(analysis: &Analysis) -> String {
    let mut text = String::new();
    for (index, load) in analysis.plan().workloads.iter().enumerate() {
        let rows = rows(analysis, index);
        let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
        let _ = write!(text, "\n{}\n{:width$}", load.name, "");
        for head in HEAD {
            let _ = write!(text, " {head:>9}");
        }
        for (name, _, _) in FIGURES {
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
    if let Some((_, to)) = analysis.schedule.contrasts().get(1) {
        let _ = writeln!(
            text,
            "\nratios: {}'s figure over that of the row, median [least..most] of the blocks; CPU time is the server's, \
             fio's is the whole process",
            analysis.plan().cases[*to].base
        );
    }
    text
}

/// For the page.
pub fn html(analysis: &Analysis) -> String {
    let mut page = String::from("<section><h2>Beside each other</h2>\n");
    for (index, load) in analysis.plan().workloads.iter().enumerate() {
        let _ = write!(page, "<h3>{}</h3><table><tr><th></th>", escape(&load.name));
        for head in HEAD.into_iter().chain(FIGURES.map(|(name, _, _)| name)) {
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
    page.push_str(
        "<p>Ratios: the figure of the configuration that is compared over that of the row, median [least..most] of the \
         blocks. CPU time is the server's; fio's is that of the whole process.</p></section>\n",
    );
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
