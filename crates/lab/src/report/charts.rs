//! The charts of a report.

use harness::histogram::Histogram;
use harness::svg::{Anchor, Svg, short, ticks, width};

use crate::analysis::{Analysis, Question};
use crate::plan::workload::KEYS;
use crate::stats::Verdict;

/// Colours of the page's style: what a chart does not have room for is in the table.
pub const COLOURS: usize = 8;

/// A plan's loads as rows and columns: one key makes the columns, and the others the rows.
pub struct Grid {
    /// The key of the columns; empty if there is one only.
    pub key: &'static str,
    /// The values of the columns.
    pub columns: Vec<String>,
    /// Rows by name: the load of each column.
    pub rows: Vec<(String, Vec<Option<usize>>)>,
}

impl Grid {
    /// Of the loads of a plan. The columns are those of the key with most values, depth before all others.
    pub fn of(analysis: &Analysis) -> Grid {
        let loads = &analysis.plan().workloads;
        let values = |key: &str| {
            let mut values: Vec<String> = Vec::new();
            for load in loads
                .iter()
                .map(|load| load.get(key))
                .filter(|value| value != "-" && value != "none")
            {
                if !values.contains(&load) {
                    values.push(load);
                }
            }
            values
        };
        let wanted = ["iodepth", "rate", "numjobs", "bs"];
        let key = wanted
            .into_iter()
            .max_by_key(|key| (values(key).len(), *key == "iodepth"))
            .unwrap_or("iodepth");
        let mut columns = values(key);
        columns.sort_by_key(|column| crate::plan::units::size(column).unwrap_or(0));
        if columns.len() < 2 {
            let rows = loads
                .iter()
                .enumerate()
                .map(|(index, load)| (load.name.clone(), vec![Some(index)]))
                .collect();
            return Grid {
                key: "",
                columns: vec![String::new()],
                rows,
            };
        }
        let mut rows: Vec<(Vec<String>, String, Vec<Option<usize>>)> = Vec::new();
        let varied: Vec<&str> = KEYS
            .into_iter()
            .filter(|other| *other != key && values(other).len() > 1)
            .collect();
        for (index, load) in loads.iter().enumerate() {
            // A load with a name of its own stands alone.
            let own_name = (load.clone().named().name
                != crate::plan::Workload {
                    name: String::new(),
                    ..load.clone()
                }
                .named()
                .name)
                .then(|| load.name.clone());
            let rest: Vec<String> = varied
                .iter()
                .map(|key| load.get(key))
                .chain(own_name.clone())
                .collect();
            let column = columns.iter().position(|value| *value == load.get(key));
            let name = own_name.unwrap_or_else(|| {
                let words: Vec<String> = varied
                    .iter()
                    .map(|key| load.get(key))
                    .filter(|value| value != "-")
                    .collect();
                if words.is_empty() {
                    format!("{} {}", load.get("rw"), load.get("bs"))
                } else {
                    words.join(" ")
                }
            });
            let row = match rows.iter().position(|(key, ..)| *key == rest) {
                Some(row) => row,
                None => {
                    rows.push((rest, name, vec![None; columns.len()]));
                    rows.len() - 1
                }
            };
            if let Some(column) = column {
                rows[row].2[column] = Some(index);
            }
        }
        Grid {
            key,
            columns,
            rows: rows
                .into_iter()
                .map(|(_, name, loads)| (name, loads))
                .collect(),
        }
    }

    /// What the columns are, for an axis.
    pub fn title(&self) -> &'static str {
        match self.key {
            "iodepth" => "depth",
            "rate" => "offered requests per second",
            "numjobs" => "jobs",
            "bs" => "block size",
            _ => "",
        }
    }
}

/// A series of a chart: a point for each column, with its interval.
pub struct Series {
    /// Its colour.
    pub colour: usize,
    /// Its name.
    pub name: String,
    /// Value, low and high.
    pub points: Vec<Option<(f64, f64, f64)>>,
}

const PLOT: (f64, f64) = (300.0, 170.0);

/// Lines over columns, with intervals.
pub fn lines(
    title: &str,
    x_title: &str,
    columns: &[String],
    series: &[Series],
    unit: &str,
) -> String {
    let most = series
        .iter()
        .flat_map(|line| line.points.iter().flatten())
        .map(|point| point.2)
        .fold(0.0, f64::max);
    let ticks = ticks(most);
    let top = ticks.last().copied().unwrap_or(1.0);
    let labels: Vec<String> = ticks.iter().map(|tick| short(*tick)).collect();
    let left = 14.0 + labels.iter().map(|label| width(label)).fold(0.0, f64::max);
    let (plot_width, plot_height) = PLOT;
    let (upper, lower) = (46.0, 40.0);
    let total = (left + plot_width + 20.0).max(width(title) * 1.15 + 10.0);
    let mut svg = Svg::new(total, upper + plot_height + lower);
    svg.text((0.0, 13.0), Anchor::Start, "t b", title);
    svg.text((0.0, 28.0), Anchor::Start, "t s", unit);
    let y = |value: f64| upper + plot_height * (1.0 - value / top);
    let step = plot_width / columns.len() as f64;
    let x = |column: usize| left + step * (column as f64 + 0.5);
    for (tick, label) in ticks.iter().zip(&labels) {
        svg.line(&[(left, y(*tick)), (left + plot_width, y(*tick))], "grid");
        svg.text((left - 6.0, y(*tick) + 4.0), Anchor::End, "t s", label);
    }
    // As many labels as there is room for.
    let widest = columns
        .iter()
        .map(|column| width(column) + 8.0)
        .fold(1.0, f64::max);
    let every = (widest / step).ceil().max(1.0) as usize;
    for (index, column) in columns.iter().enumerate().step_by(every) {
        svg.text(
            (x(index), upper + plot_height + 16.0),
            Anchor::Middle,
            "t s",
            column,
        );
    }
    svg.text(
        (left + plot_width / 2.0, upper + plot_height + 33.0),
        Anchor::Middle,
        "t s",
        x_title,
    );
    let many = series.len() as f64;
    for (index, line) in series.iter().enumerate() {
        let colour = line.colour % COLOURS;
        let present: Vec<(usize, (f64, f64, f64))> = line
            .points
            .iter()
            .enumerate()
            .filter_map(|(column, point)| Some((column, (*point)?)))
            .collect();
        let upper_edge = present
            .iter()
            .map(|(column, point)| (x(*column), y(point.2)));
        let lower_edge = present
            .iter()
            .rev()
            .map(|(column, point)| (x(*column), y(point.1.max(0.0))));
        match present.len() {
            0 => continue,
            1 => {
                // Single points stand side by side, with whiskers.
                let (column, point) = present[0];
                let at =
                    x(column) + (index as f64 - (many - 1.0) / 2.0) * (step * 0.7 / many).min(24.0);
                svg.line(
                    &[(at, y(point.1.max(0.0))), (at, y(point.2))],
                    &format!("l c{colour}"),
                );
                svg.dot(
                    (at, y(point.0)),
                    &format!("d c{colour}"),
                    &format!("{}: {}", line.name, short(point.0)),
                );
            }
            _ => {
                svg.area(
                    &upper_edge.chain(lower_edge).collect::<Vec<_>>(),
                    &format!("band c{colour}"),
                );
                svg.line(
                    &present
                        .iter()
                        .map(|(column, point)| (x(*column), y(point.0)))
                        .collect::<Vec<_>>(),
                    &format!("l c{colour}"),
                );
                for (column, point) in present {
                    let told = format!(
                        "{}, {} {}: {} [{}, {}]",
                        line.name,
                        x_title,
                        columns[column],
                        short(point.0),
                        short(point.1),
                        short(point.2)
                    );
                    svg.dot((x(column), y(point.0)), &format!("d c{colour}"), &told);
                }
            }
        }
    }
    svg.finish(&format!("{title}, {unit}"))
}

/// Gains and losses of one comparison, all loads.
pub fn heat_map(title: &str, grid: &Grid, questions: &[Question]) -> String {
    let cell = (74.0, 34.0);
    let left = grid
        .rows
        .iter()
        .map(|(name, _)| width(name))
        .fold(0.0, f64::max)
        + 12.0;
    let upper = 46.0;
    let total = (left + cell.0 * grid.columns.len() as f64 + 4.0).max(width(title) * 1.15 + 10.0);
    let mut svg = Svg::new(total, upper + cell.1 * grid.rows.len() as f64 + 6.0);
    svg.text((0.0, 13.0), Anchor::Start, "t b", title);
    for (index, column) in grid.columns.iter().enumerate() {
        let name = if index == 0 && !column.is_empty() {
            format!(
                "{} {column}",
                if grid.key == "bs" { "" } else { grid.title() }
            )
        } else {
            column.clone()
        };
        let name = if width(&name) > cell.0 {
            column.clone()
        } else {
            name
        };
        svg.text(
            (left + cell.0 * (index as f64 + 0.5), 38.0),
            Anchor::Middle,
            "t s",
            name.trim(),
        );
    }
    for (row, (name, loads)) in grid.rows.iter().enumerate() {
        let y = upper + cell.1 * row as f64;
        svg.text((left - 8.0, y + 21.0), Anchor::End, "t s", name);
        for (column, load) in loads.iter().enumerate() {
            let Some(question) =
                load.and_then(|load| questions.iter().find(|question| question.workload == load))
            else {
                continue;
            };
            let x = left + cell.0 * column as f64;
            let gain = question.gain.unwrap_or(0.0);
            let (class, strength) = match question.verdict {
                Verdict::Gain => ("gain", (gain / 0.5).clamp(0.25, 1.0)),
                Verdict::Loss => ("loss", (-gain / 0.4).clamp(0.25, 1.0)),
                Verdict::Equivalent => ("equal", 1.0),
                Verdict::Undecided => ("open", 1.0),
            };
            let interval = question.interval.map_or_else(String::new, |(low, high)| {
                format!(" [{:+.1}, {:+.1}]", low * 100.0, high * 100.0)
            });
            let told = format!(
                "{} {:+.1} %{interval}, {} pairs",
                question.verdict,
                gain * 100.0,
                question.pairs
            );
            svg.rect(
                (x + 1.0, y + 1.0),
                (cell.0 - 2.0, cell.1 - 2.0),
                class,
                &format!("fill-opacity:{strength:.2}"),
                &told,
            );
            let text = match (question.verdict, question.gain) {
                (_, None) => "–".into(),
                (Verdict::Undecided, Some(gain)) => format!("{}?", percent(gain)),
                (Verdict::Equivalent, Some(gain)) => format!("≈ {}", percent(gain)),
                (_, Some(gain)) => percent(gain),
            };
            svg.text((x + cell.0 / 2.0, y + 21.0), Anchor::Middle, "t", &text);
        }
    }
    svg.finish(title)
}

/// `+12 %`, or `×3.4` for what is beyond a doubling.
pub fn percent(gain: f64) -> String {
    match gain {
        1.0.. => format!("×{}", short(1.0 + gain)),
        _ if gain.abs() < 0.0995 => format!("{:+.1} %", gain * 100.0),
        _ => format!("{:+.0} %", gain * 100.0),
    }
}

/// A step of a ladder: its name, its value and its interval.
pub type Step = (String, f64, Option<(f64, f64)>);

/// Steps, one under the other, with what each gains on the first.
pub fn ladder(title: &str, steps: &[Step]) -> String {
    let bar = 28.0;
    let left = steps
        .iter()
        .map(|(name, ..)| width(name))
        .fold(0.0, f64::max)
        + 12.0;
    let plot = 360.0;
    let most = steps
        .iter()
        .map(|(_, value, interval)| interval.map_or(*value, |interval| interval.1))
        .fold(1e-9, f64::max);
    let first = steps.first().map_or(1.0, |(_, value, _)| *value).max(1e-9);
    let labels: Vec<String> = steps
        .iter()
        .map(|(_, value, _)| format!("{}  ×{}", short(*value), short(value / first)))
        .collect();
    let right = labels.iter().map(|label| width(label)).fold(0.0, f64::max) + 16.0;
    let total = (left + plot + right).max(width(title) * 1.15 + 10.0);
    let mut svg = Svg::new(total, 28.0 + bar * steps.len() as f64);
    svg.text((0.0, 13.0), Anchor::Start, "t b", title);
    for (index, ((name, value, interval), label)) in steps.iter().zip(&labels).enumerate() {
        let y = 24.0 + bar * index as f64;
        let scale = |value: f64| plot * value / most;
        svg.text((left - 8.0, y + 17.0), Anchor::End, "t s", name);
        svg.rect(
            (left, y + 4.0),
            (scale(*value), bar - 10.0),
            &format!("bar c{}", index % COLOURS),
            "",
            &format!("{name}: {label}"),
        );
        let mut end = scale(*value);
        if let Some((low, high)) = interval {
            svg.line(
                &[
                    (left + scale(low.max(0.0)), y + bar / 2.0 - 1.0),
                    (left + scale(*high), y + bar / 2.0 - 1.0),
                ],
                "whisker",
            );
            end = end.max(scale(*high));
        }
        svg.text((left + end + 8.0, y + 17.0), Anchor::Start, "t s", label);
    }
    svg.finish(title)
}

/// A field of values by rows and columns: a surface seen from above, where nothing hides anything.
pub fn surface(
    title: &str,
    x_title: &str,
    columns: &[String],
    rows: &[(String, Vec<Option<f64>>)],
) -> String {
    let cell = (62.0, 30.0);
    let left = rows.iter().map(|(name, _)| width(name)).fold(0.0, f64::max) + 12.0;
    let upper = 46.0;
    let total = (left + cell.0 * columns.len() as f64 + 4.0).max(width(title) * 1.15 + 10.0);
    let most = rows
        .iter()
        .flat_map(|(_, values)| values.iter().flatten().copied())
        .fold(1e-9, f64::max);
    let mut svg = Svg::new(total, upper + cell.1 * rows.len() as f64 + 24.0);
    svg.text((0.0, 13.0), Anchor::Start, "t b", title);
    for (index, column) in columns.iter().enumerate() {
        svg.text(
            (left + cell.0 * (index as f64 + 0.5), 38.0),
            Anchor::Middle,
            "t s",
            column,
        );
    }
    for (row, (name, values)) in rows.iter().enumerate() {
        let y = upper + cell.1 * row as f64;
        svg.text((left - 8.0, y + 19.0), Anchor::End, "t s", name);
        for (column, value) in values.iter().enumerate() {
            let Some(value) = value else { continue };
            let x = left + cell.0 * column as f64;
            let opacity = format!("fill-opacity:{:.2}", 0.08 + 0.62 * value / most);
            svg.rect(
                (x + 1.0, y + 1.0),
                (cell.0 - 2.0, cell.1 - 2.0),
                "surface",
                &opacity,
                &format!("{name}, {}: {}", columns[column], short(*value)),
            );
            svg.text(
                (x + cell.0 / 2.0, y + 19.0),
                Anchor::Middle,
                "t",
                &short(*value),
            );
        }
    }
    svg.text(
        (
            left + cell.0 * columns.len() as f64 / 2.0,
            upper + cell.1 * rows.len() as f64 + 16.0,
        ),
        Anchor::Middle,
        "t s",
        x_title,
    );
    svg.finish(title)
}

const NINES: [(f64, &str); 6] = [
    (0.5, "50"),
    (0.9, "90"),
    (0.99, "99"),
    (0.999, "99.9"),
    (0.9999, "99.99"),
    (1.0, "max"),
];

/// Latencies that a share of the requests does not exceed, on a logarithmic axis.
pub fn distribution(title: &str, series: &[(usize, String, &Histogram)]) -> String {
    let value = |histogram: &Histogram, share: f64| {
        histogram
            .percentile(share)
            .map(|ns| (ns as f64 / 1000.0).max(0.1))
    };
    // A percentile that fewer than ten requests decide says nothing.
    let known = |histogram: &Histogram, share: f64| {
        share >= 1.0 || histogram.requests() as f64 * (1.0 - share) >= 10.0
    };
    let all: Vec<f64> = series
        .iter()
        .flat_map(|(_, _, histogram)| {
            NINES
                .iter()
                .filter_map(|(share, _)| value(histogram, *share))
        })
        .collect();
    let low = all
        .iter()
        .copied()
        .fold(f64::INFINITY, f64::min)
        .clamp(0.1, 1e9)
        .log10()
        .floor();
    let high = all
        .iter()
        .copied()
        .fold(1.0, f64::max)
        .log10()
        .ceil()
        .max(low + 1.0);
    let decades: Vec<f64> = (low as i32..=high as i32).map(f64::from).collect();
    let labels: Vec<String> = decades
        .iter()
        .map(|decade| latency(10_f64.powf(*decade)))
        .collect();
    let left = 14.0 + labels.iter().map(|label| width(label)).fold(0.0, f64::max);
    let (plot_width, plot_height) = PLOT;
    let (upper, lower) = (46.0, 40.0);
    let mut svg = Svg::new(
        (left + plot_width + 20.0).max(width(title) * 1.15 + 10.0),
        upper + plot_height + lower,
    );
    svg.text((0.0, 13.0), Anchor::Start, "t b", title);
    svg.text((0.0, 28.0), Anchor::Start, "t s", "latency, logarithmic");
    let y = |us: f64| upper + plot_height * (1.0 - (us.log10() - low) / (high - low));
    let x = |index: usize| left + plot_width / NINES.len() as f64 * (index as f64 + 0.5);
    for (decade, label) in decades.iter().zip(&labels) {
        let at = y(10_f64.powf(*decade));
        svg.line(&[(left, at), (left + plot_width, at)], "grid");
        svg.text((left - 6.0, at + 4.0), Anchor::End, "t s", label);
    }
    for (index, (_, name)) in NINES.iter().enumerate() {
        svg.text(
            (x(index), upper + plot_height + 16.0),
            Anchor::Middle,
            "t s",
            name,
        );
    }
    svg.text(
        (left + plot_width / 2.0, upper + plot_height + 33.0),
        Anchor::Middle,
        "t s",
        "percent of all requests",
    );
    for (colour, name, histogram) in series {
        let points: Vec<(usize, f64)> = NINES
            .iter()
            .enumerate()
            .filter(|(_, (share, _))| known(histogram, *share))
            .filter_map(|(index, (share, _))| Some((index, value(histogram, *share)?)))
            .collect();
        let class = colour % COLOURS;
        svg.line(
            &points
                .iter()
                .map(|(index, us)| (x(*index), y(*us)))
                .collect::<Vec<_>>(),
            &format!("l c{class}"),
        );
        for (index, us) in points {
            svg.dot(
                (x(index), y(us)),
                &format!("d c{class}"),
                &format!("{name}, {} %: {}", NINES[index].1, latency(us)),
            );
        }
    }
    svg.finish(title)
}

/// Microseconds for people.
pub fn latency(us: f64) -> String {
    match us {
        ..1000.0 => format!("{} µs", short(us)),
        ..1_000_000.0 => format!("{} ms", short(us / 1e3)),
        _ => format!("{} s", short(us / 1e6)),
    }
}
