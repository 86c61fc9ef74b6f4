//! The picture of an open loop: CPU per I/O against offered load, a row per backing, reads left and writes right.

use std::path::Path;

use anyhow::Context;
use harness::svg::{Anchor, Svg};

use super::report::{Row, rows};
use super::{Load, Measured};
use crate::bench::frame::{Contestant, HEADER, MARGIN, PANEL, WIDTH, header, style};
use crate::bench::words::{Backing, Server, short};
use harness::spread::Spread;

const ROW: f64 = 260.0;
const PLOT: f64 = 180.0;
/// The width of the numbers on the vertical axis.
const AXIS: f64 = 40.0;

const SERVERS: [Contestant; 5] = [
    (Server::Ringdisk, "#0b7285", "ringdisk"),
    (Server::RingdiskNoPolling, "#66b2c1", "--poll-max-us 0"),
    (Server::Baseline, "#868e96", "baseline"),
    (Server::QsdNative, "#c92a2a", "qemu-storage-daemon, native"),
    (Server::Qsd, "#f08c00", "qemu-storage-daemon, io_uring"),
];

/// Draws the rates as SVG; does nothing if there are none.
pub fn write(samples: &[Measured], conditions: &str, path: &Path) -> anyhow::Result<()> {
    let is_rate = |it: &&Measured| matches!(it.cell.load, Load::Rates { .. });
    let samples: Vec<Measured> = samples.iter().filter(is_rate).cloned().collect();
    if samples.is_empty() {
        return Ok(());
    }
    let svg = draw(conditions, &rows(&samples));
    std::fs::write(path, svg).with_context(|| format!("writing {}", path.display()))
}

fn draw(conditions: &str, rows: &[Row]) -> String {
    let mut backings: Vec<Backing> = rows.iter().map(|row| row.cell.backing).collect();
    backings.sort();
    backings.dedup();
    backings.reverse();
    let mut svg = Svg::new(WIDTH, HEADER + backings.len() as f64 * ROW);
    let title = "Server CPU per 4k request, µs, against offered requests per second";
    let took_part = |server| rows.iter().any(|row| row.spread(server, cpu_us).is_some());
    let legend: Vec<Contestant> = SERVERS
        .into_iter()
        .filter(|(server, ..)| took_part(*server))
        .collect();
    header(&mut svg, conditions, title, &legend);
    for (i, backing) in backings.iter().enumerate() {
        for (column, write) in [false, true].into_iter().enumerate() {
            let its: Vec<&Row> = rows
                .iter()
                .filter(|row| row.cell.backing == *backing && row.cell.write == write)
                .collect();
            let left = MARGIN + column as f64 * (PANEL + MARGIN);
            if !its.is_empty() {
                panel(&mut svg, &its, left, HEADER + i as f64 * ROW);
            }
        }
    }
    svg.standalone(title, &style(&SERVERS))
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
fn panel(svg: &mut Svg, rows: &[&Row], left: f64, top: f64) {
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
    let direction = if cell.write { "writes" } else { "reads" };
    let title = format!("{backing}: random {direction}");
    svg.text((left, top + 12.0), Anchor::Start, "panel", &title);
    let bottom = top + 28.0 + PLOT;
    let values = all.iter().flat_map(|it| [it.min, it.max]);
    let y = Scale::new(values, bottom, top + 28.0).rounded();
    let x = Scale::new(
        rows.iter().map(|row| offered(row)),
        left + AXIS + 20.0,
        left + PANEL - 20.0,
    );
    for value in y.ticks() {
        let at = y.place(value);
        svg.line(&[(left + AXIS, at), (left + PANEL, at)], "grid");
        let label = short(value);
        let label = label.trim_end_matches('0').trim_end_matches('.');
        let label = if value >= 10.0 {
            format!("{value}")
        } else {
            label.into()
        };
        let place = (left + AXIS - 6.0, at + 4.0);
        svg.text(place, Anchor::End, "tick", &label);
    }
    for row in rows {
        let place = (x.place(offered(row)), bottom + 18.0);
        svg.text(place, Anchor::Middle, "text", &offered(row).to_string());
    }
    for (server, ..) in SERVERS {
        let points: Vec<(f64, Spread)> = rows
            .iter()
            .filter_map(|row| Some((x.place(offered(row)), row.spread(server, cpu_us)?)))
            .filter(|(_, it)| it.min > 0.0)
            .collect();
        if points.is_empty() {
            continue;
        }
        let class = server.to_string();
        let medians: Vec<(f64, f64)> = points
            .iter()
            .map(|(x, it)| (*x, y.place(it.median)))
            .collect();
        svg.line(&medians, &format!("curve {class}"));
        for ((x, it), median) in points.iter().zip(&medians) {
            svg.line(&[(*x, y.place(it.min)), (*x, y.place(it.max))], &class);
            svg.dot(*median, &class, "");
        }
    }
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
