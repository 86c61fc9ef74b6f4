//! The picture of an open loop: CPU per I/O against offered load, a row per backing, reads left and writes right.

use std::fmt::Write;
use std::path::Path;

use anyhow::Context;

use super::report::{Row, rows};
use super::{Load, Measured};
use crate::bench::picture::text;
use crate::bench::plan::{Backing, Server};
use crate::bench::report::{Report, short};
use crate::bench::stats::Spread;

const WIDTH: usize = 960;
const MARGIN: usize = 24;
const HEADER: usize = 104;
const ROW: usize = 260;
const PLOT: usize = 180;
/// Room for the numbers of the upright axis.
const AXIS: usize = 40;
const PANEL: usize = (WIDTH - 3 * MARGIN) / 2;

const SERVERS: [(Server, &str, &str); 5] = [
    (Server::Ringdisk, "#0b7285", "ringdisk"),
    (Server::RingdiskNoPolling, "#66b2c1", "--poll-max-us 0"),
    (Server::Baseline, "#868e96", "baseline"),
    (Server::QsdNative, "#c92a2a", "qemu-storage-daemon, native"),
    (Server::Qsd, "#f08c00", "qemu-storage-daemon, io_uring"),
];

/// Draws the rates of `report` as SVG; nothing if there are none.
pub fn write(report: &Report, path: &Path) -> anyhow::Result<()> {
    let is_rate = |it: &&Measured| matches!(it.cell.load, Load::Rates { .. });
    let samples: Vec<Measured> = report.open_loop.iter().filter(is_rate).cloned().collect();
    if samples.is_empty() {
        return Ok(());
    }
    let mut svg = String::new();
    draw(&mut svg, report, &rows(&samples)).expect("writing to a String does not fail");
    std::fs::write(path, svg).with_context(|| format!("writing {}", path.display()))
}

fn draw(out: &mut String, report: &Report, rows: &[Row]) -> std::fmt::Result {
    let mut backings: Vec<Backing> = rows.iter().map(|row| row.cell.backing).collect();
    backings.sort();
    backings.dedup();
    backings.reverse();
    let height = HEADER + backings.len() * ROW;
    writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">"#
    )?;
    writeln!(
        out,
        r##"<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>"##
    )?;
    let title = "Server CPU per 4k request, µs, against offered requests per second";
    text(out, MARGIN, 34, 20, "bold", "start", title)?;
    let machine = &report.machine;
    let how = format!(
        "medians of {} interleaved rounds, whiskers: least and most; {}, Linux {}, {}",
        report.rounds, machine.cpu, machine.kernel, machine.qemu_storage_daemon
    );
    text(out, MARGIN, 56, 12, "normal", "start", &how)?;
    let mut x = MARGIN;
    let took_part = |server| rows.iter().any(|row| row.spread(server, cpu_us).is_some());
    for (_, colour, name) in SERVERS.into_iter().filter(|(it, ..)| took_part(*it)) {
        writeln!(
            out,
            r#"<rect x="{x}" y="72" width="14" height="14" fill="{colour}"/>"#
        )?;
        text(out, x + 20, 84, 13, "normal", "start", name)?;
        x += 44 + name.len() * 7;
    }
    for (i, backing) in backings.iter().enumerate() {
        for (column, write) in [false, true].into_iter().enumerate() {
            let its: Vec<&Row> = rows
                .iter()
                .filter(|row| row.cell.backing == *backing && row.cell.write == write)
                .collect();
            let left = MARGIN + column * (PANEL + MARGIN);
            if !its.is_empty() {
                panel(out, &its, left, HEADER + i * ROW)?;
            }
        }
    }
    writeln!(out, "</svg>")
}

fn cpu_us(sample: &lab::client::Sample) -> f64 {
    sample.cpu_us_per_io
}

fn offered(row: &Row) -> f64 {
    match row.cell.load {
        Load::Rates { per_second, .. } => per_second.into(),
        _ => f64::NAN,
    }
}

/// A line for each server; both axes are logarithmic.
fn panel(out: &mut String, rows: &[&Row], left: usize, top: usize) -> std::fmt::Result {
    let all: Vec<Spread> = rows
        .iter()
        .flat_map(|row| SERVERS.map(|(server, ..)| row.spread(server, cpu_us)))
        .flatten()
        .filter(|it| it.min > 0.0)
        .collect();
    let cell = &rows[0].cell;
    let backing = match cell.backing {
        Backing::Null => "Null disk",
        Backing::Cache => "Page cache",
        Backing::Zram => "zram",
        Backing::Disk => "Real disk, O_DIRECT",
    };
    let title = format!(
        "{backing}: random {}",
        if cell.write { "writes" } else { "reads" }
    );
    text(out, left, top + 12, 13, "bold", "start", &title)?;
    let y = Scale::new(
        all.iter().flat_map(|it| [it.min, it.max]),
        (top + 28 + PLOT) as f64,
        (top + 28) as f64,
    )
    .rounded();
    let x = Scale::new(
        rows.iter().map(|row| offered(row)),
        (left + AXIS + 20) as f64,
        (left + PANEL - 20) as f64,
    );
    for value in y.ticks() {
        let at = y.place(value);
        writeln!(
            out,
            r##"<path d="M{} {at:.1}H{}" stroke="#dee2e6" stroke-width="1"/>"##,
            left + AXIS,
            left + PANEL
        )?;
        let label = short(value);
        let label = label.trim_end_matches('0').trim_end_matches('.');
        let label = if value >= 10.0 {
            format!("{value}")
        } else {
            label.into()
        };
        text(
            out,
            left + AXIS - 6,
            at as usize + 4,
            11,
            "normal",
            "end",
            &label,
        )?;
    }
    for row in rows {
        let at = x.place(offered(row)) as usize;
        let label = format!("{}", offered(row));
        text(
            out,
            at,
            top + 28 + PLOT + 18,
            12,
            "normal",
            "middle",
            &label,
        )?;
    }
    for (server, colour, _) in SERVERS {
        let points: Vec<(f64, Spread)> = rows
            .iter()
            .filter_map(|row| Some((x.place(offered(row)), row.spread(server, cpu_us)?)))
            .filter(|(_, it)| it.min > 0.0)
            .collect();
        if points.is_empty() {
            continue;
        }
        let path: Vec<String> = points
            .iter()
            .map(|(x, it)| format!("{x:.1},{:.1}", y.place(it.median)))
            .collect();
        writeln!(
            out,
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#,
            path.join(" ")
        )?;
        for (x, it) in &points {
            writeln!(
                out,
                r#"<path d="M{x:.1} {:.1}V{:.1}" stroke="{colour}" stroke-width="1"/>"#,
                y.place(it.min),
                y.place(it.max)
            )?;
            writeln!(
                out,
                r#"<circle cx="{x:.1}" cy="{:.1}" r="3.5" fill="{colour}"/>"#,
                y.place(it.median)
            )?;
        }
    }
    Ok(())
}

/// A logarithmic axis.
struct Scale {
    least: f64,
    most: f64,
    from: f64,
    to: f64,
}

impl Scale {
    /// Values that are all positive go to places between `from` and `to`.
    fn new(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Scale {
        let least = values.clone().fold(f64::INFINITY, f64::min);
        // One value has a place too.
        let most = values.fold(0.0, f64::max).max(least * 1.01);
        Scale {
            least,
            most,
            from,
            to,
        }
    }

    fn place(&self, value: f64) -> f64 {
        let part = (value / self.least).ln() / (self.most / self.least).ln();
        self.from + part * (self.to - self.from)
    }

    /// The same from a round number to a round number.
    fn rounded(self) -> Scale {
        let below = round_numbers().filter(|it| *it <= self.least);
        let mut above = round_numbers().filter(|it| *it >= self.most);
        Scale {
            least: below.last().unwrap_or(self.least),
            most: above.next().unwrap_or(self.most),
            ..self
        }
    }

    /// The round numbers that lie between.
    fn ticks(&self) -> Vec<f64> {
        round_numbers()
            .filter(|it| (self.least..=self.most).contains(it))
            .collect()
    }
}

/// 1, 2 and 5 of each power of ten.
fn round_numbers() -> impl Iterator<Item = f64> + Clone {
    (-3..7).flat_map(|power| [1.0, 2.0, 5.0].map(|it| it * 10_f64.powi(power)))
}

#[cfg(test)]
mod tests {
    use super::Scale;

    #[test]
    fn a_logarithmic_axis_has_equal_ratios_at_equal_distances() {
        let scale = Scale::new([10.0, 1000.0].into_iter(), 0.0, 100.0);
        let places = [10.0, 100.0, 1000.0].map(|value| scale.place(value).round());
        assert_eq!(places, [0.0, 50.0, 100.0]);
        assert_eq!(
            scale.ticks(),
            [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]
        );
        let rounded = Scale::new([7.3, 41.0].into_iter(), 0.0, 100.0).rounded();
        assert_eq!(rounded.ticks(), [5.0, 10.0, 20.0, 50.0]);
    }
}
