//! The charts of a report.

use harness::histogram::Histogram;
use harness::svg::{Anchor, Svg, short, ticks, width};

use super::grid::Grid;
use crate::analysis::Question;
use crate::stats::Verdict;

/// The number of colours in the page's style; more series reuse them.
pub const COLOURS: usize = 8;

/// A series of a chart: a point for each column, with its interval.
pub struct Series {
    /// Its colour.
    pub colour: usize,
    /// Its name.
    pub name: String,
    /// `None` where nothing was measured.
    pub points: Vec<Option<Point>>,
}

/// A value with the low and the high end of its interval.
pub type Point = (f64, f64, f64);

/// The size of the area for points.
const PLOT: (f64, f64) = (300.0, 170.0);
/// What is above that area: two titles.
const ABOVE: f64 = 46.0;
/// What is below it: the names of the columns, and what they are.
const BELOW: f64 = 40.0;

/// A chart with columns: titles, a grid, and labels on both axes.
struct Frame {
    svg: Svg,
    /// The left edge of the area for points.
    left: f64,
    columns: usize,
}

impl Frame {
    /// Heights of grid lines are shares of the area, from the bottom.
    fn new(
        title: &str,
        unit: &str,
        x_title: &str,
        columns: &[&str],
        grid: &[(f64, String)],
    ) -> Frame {
        let labels = grid.iter().map(|(_, label)| width(label));
        let left = 14.0 + labels.fold(0.0, f64::max);
        let total = (left + PLOT.0 + 20.0).max(width(title) * 1.15 + 10.0);
        let mut frame = Frame {
            svg: Svg::new(total, ABOVE + PLOT.1 + BELOW),
            left,
            columns: columns.len(),
        };
        frame.svg.text((0.0, 13.0), Anchor::Start, "t b", title);
        frame.svg.text((0.0, 28.0), Anchor::Start, "t s", unit);
        for (height, label) in grid {
            let y = Frame::y(*height);
            frame.svg.line(&[(left, y), (left + PLOT.0, y)], "grid");
            let at = (left - 6.0, y + 4.0);
            frame.svg.text(at, Anchor::End, "t s", label);
        }
        frame.label_columns(columns);
        let middle = (left + PLOT.0 / 2.0, ABOVE + PLOT.1 + 33.0);
        frame.svg.text(middle, Anchor::Middle, "t s", x_title);
        frame
    }

    /// Labels every column, or every second, third and so on if they would overlap.
    fn label_columns(&mut self, columns: &[&str]) {
        let widths = columns.iter().map(|column| width(column) + 8.0);
        let widest = widths.fold(1.0, f64::max);
        let every = (widest / self.step()).ceil().max(1.0) as usize;
        for (index, column) in columns.iter().enumerate().step_by(every) {
            let at = (self.x(index), ABOVE + PLOT.1 + 16.0);
            self.svg.text(at, Anchor::Middle, "t s", column);
        }
    }

    /// The distance of two columns.
    fn step(&self) -> f64 {
        PLOT.0 / self.columns as f64
    }

    /// The middle of a column.
    fn x(&self, column: usize) -> f64 {
        self.left + self.step() * (column as f64 + 0.5)
    }

    /// A height as a share of the area.
    fn y(height: f64) -> f64 {
        ABOVE + PLOT.1 * (1.0 - height)
    }
}

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
    let grid: Vec<_> = ticks
        .iter()
        .map(|tick| (tick / top, short(*tick)))
        .collect();
    let names: Vec<&str> = columns.iter().map(String::as_str).collect();
    let mut frame = Frame::new(title, unit, x_title, &names, &grid);
    for (index, line) in series.iter().enumerate() {
        let points: Vec<(usize, Point)> = line
            .points
            .iter()
            .enumerate()
            .filter_map(|(column, point)| Some((column, (*point)?)))
            .collect();
        match points[..] {
            [] => {}
            [(column, point)] => {
                let x = beside_others(&frame, column, index, series.len());
                whisker(&mut frame, line, x, point, top);
            }
            _ => {
                let tooltip = |column: usize, (value, low, high): Point| {
                    format!(
                        "{}, {x_title} {}: {} [{}, {}]",
                        line.name,
                        columns[column],
                        short(value),
                        short(low),
                        short(high)
                    )
                };
                band(&mut frame, line.colour, &points, top, tooltip);
            }
        }
    }
    frame.svg.finish(&format!("{title}, {unit}"))
}

/// Where a single point of one series of several stands.
fn beside_others(frame: &Frame, column: usize, index: usize, series: usize) -> f64 {
    let from_middle = index as f64 - (series as f64 - 1.0) / 2.0;
    let distance = (frame.step() * 0.7 / series as f64).min(24.0);
    frame.x(column) + from_middle * distance
}

/// A single point with its interval.
fn whisker(frame: &mut Frame, line: &Series, x: f64, (value, low, high): Point, top: f64) {
    let y = |value: f64| Frame::y(value / top);
    let colour = line.colour % COLOURS;
    let ends = [(x, y(low.max(0.0))), (x, y(high))];
    frame.svg.line(&ends, &format!("l c{colour}"));
    let tooltip = format!("{}: {}", line.name, short(value));
    frame
        .svg
        .dot((x, y(value)), &format!("d c{colour}"), &tooltip);
}

/// Points with a line through them, and a band of their intervals.
fn band(
    frame: &mut Frame,
    colour: usize,
    points: &[(usize, Point)],
    top: f64,
    tooltip: impl Fn(usize, Point) -> String,
) {
    let colour = colour % COLOURS;
    let at = |frame: &Frame, column: usize, value: f64| (frame.x(column), Frame::y(value / top));
    let upper = points
        .iter()
        .map(|(column, (_, _, high))| at(frame, *column, *high));
    let lower = points
        .iter()
        .rev()
        .map(|(column, (_, low, _))| at(frame, *column, low.max(0.0)));
    let edge: Vec<_> = upper.chain(lower).collect();
    let middle: Vec<_> = points
        .iter()
        .map(|(column, (value, _, _))| at(frame, *column, *value))
        .collect();
    frame.svg.area(&edge, &format!("band c{colour}"));
    frame.svg.line(&middle, &format!("l c{colour}"));
    for ((column, point), at) in points.iter().zip(middle) {
        let tooltip = tooltip(*column, *point);
        frame.svg.dot(at, &format!("d c{colour}"), &tooltip);
    }
}

/// The gains and losses of one comparison under all loads.
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
            let tooltip = format!(
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
                &tooltip,
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

/// `+12 %`, or from a doubling on `×3.4`.
pub fn percent(gain: f64) -> String {
    match gain {
        1.0.. => format!("×{}", short(1.0 + gain)),
        _ if gain.abs() < 0.0995 => format!("{:+.1} %", gain * 100.0),
        _ => format!("{:+.0} %", gain * 100.0),
    }
}

/// A step of a ladder: its name, its value and its interval.
pub type Step = (String, f64, Option<(f64, f64)>);

/// Steps as bars below each other, with the ratio of each to the first.
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

/// Values by rows and columns, as shades: a surface from above.
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

/// Percentiles of latencies, on a logarithmic axis.
pub fn distribution(title: &str, series: &[(usize, String, &Histogram)]) -> String {
    let value = |histogram: &Histogram, share: f64| {
        histogram
            .percentile(share)
            .map(|ns| (ns as f64 / 1000.0).max(0.1))
    };
    // A percentile above which there are fewer than ten requests says nothing.
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
    let height = |us: f64| (us.log10() - low) / (high - low);
    let grid: Vec<_> = decades
        .iter()
        .map(|decade| 10_f64.powf(*decade))
        .map(|us| (height(us), latency(us)))
        .collect();
    let mut frame = Frame::new(
        title,
        "latency, logarithmic",
        "percent of all requests",
        &NINES.map(|(_, name)| name),
        &grid,
    );
    for (colour, name, histogram) in series {
        let points: Vec<(usize, f64)> = NINES
            .iter()
            .enumerate()
            .filter(|(_, (share, _))| known(histogram, *share))
            .filter_map(|(index, (share, _))| Some((index, value(histogram, *share)?)))
            .collect();
        let colour = colour % COLOURS;
        let at = |(index, us): &(usize, f64)| (frame.x(*index), Frame::y(height(*us)));
        let line: Vec<_> = points.iter().map(at).collect();
        frame.svg.line(&line, &format!("l c{colour}"));
        for ((index, us), at) in points.iter().zip(line) {
            let tooltip = format!("{name}, {} %: {}", NINES[*index].1, latency(*us));
            frame.svg.dot(at, &format!("d c{colour}"), &tooltip);
        }
    }
    frame.svg.finish(title)
}

/// A latency in microseconds as `20 µs`, `1.5 ms` or `2 s`.
pub fn latency(us: f64) -> String {
    match us {
        ..1000.0 => format!("{} µs", short(us)),
        ..1_000_000.0 => format!("{} ms", short(us / 1e3)),
        _ => format!("{} s", short(us / 1e6)),
    }
}
