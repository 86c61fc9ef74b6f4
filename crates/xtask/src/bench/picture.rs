//! The picture for the README: 4k random reads, a row per backing, IOPS on the left and CPU per I/O on the right.

use std::fmt::Write;
use std::path::Path;

use anyhow::Context;

use super::plan::{Backing, Client, Server};
use super::report::{CellResult, Report, short};
use super::stats::Spread;
use lab::client::Sample;

const WIDTH: usize = 960;
const MARGIN: usize = 24;
const HEADER: usize = 104;
const ROW: usize = 190;
const PLOT: usize = 112;
const PANEL: usize = (WIDTH - 3 * MARGIN) / 2;
const BAR: usize = 30;

const SERVERS: [(Server, &str, &str); 4] = [
    (Server::Ringdisk, "#0b7285", "ringdisk"),
    (Server::RingdiskFixed, "#66b2c1", "fixed-buffers=on"),
    (Server::Qsd, "#f08c00", "qemu-storage-daemon, io_uring"),
    (Server::Host, "#adb5bd", "fio on the host, no virtual disk"),
];

/// One of the two columns.
struct Figure {
    title: &'static str,
    metric: fn(&Sample) -> f64,
    text: fn(f64) -> String,
}

const FIGURES: [Figure; 2] = [
    Figure {
        title: "IOPS (more is better)",
        metric: |s| s.iops,
        text: thousands,
    },
    Figure {
        title: "server CPU per I/O, µs (less is better)",
        metric: |s| s.cpu_us_per_io,
        text: short,
    },
];

/// Draws `report` as SVG.
pub fn write(report: &Report, path: &Path) -> anyhow::Result<()> {
    let mut svg = String::new();
    draw(&mut svg, report).expect("writing to a String does not fail");
    std::fs::write(path, svg).with_context(|| format!("writing {}", path.display()))
}

fn draw(out: &mut String, report: &Report) -> std::fmt::Result {
    let cells = || {
        report
            .cells
            .iter()
            .filter(|it| !it.cell.workload.write && !it.cell.workload.sequential)
    };
    // Of several settings, the first.
    let setting_of = |backing| Some(cells().find(|it| it.cell.backing == backing)?.cell.setting);
    let rows: Vec<Vec<&CellResult>> = [Backing::Null, Backing::Cache, Backing::Zram, Backing::Disk]
        .into_iter()
        .map(|backing| {
            let setting = setting_of(backing);
            cells()
                .filter(|it| it.cell.backing == backing && Some(it.cell.setting) == setting)
                .collect()
        })
        .filter(|row: &Vec<_>| !row.is_empty())
        .collect();
    let height = HEADER + rows.len() * ROW + MARGIN / 2;
    writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">"#
    )?;
    writeln!(
        out,
        r##"<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>"##
    )?;
    header(out, report)?;
    for (i, row) in rows.iter().enumerate() {
        let top = HEADER + i * ROW;
        for (column, figure) in FIGURES.iter().enumerate() {
            panel(out, row, figure, MARGIN + column * (PANEL + MARGIN), top)?;
        }
    }
    writeln!(out, "</svg>")
}

fn header(out: &mut String, report: &Report) -> std::fmt::Result {
    let machine = &report.machine;
    text(
        out,
        MARGIN,
        34,
        20,
        "bold",
        "start",
        "4k random reads, one core for the server",
    )?;
    let how = format!(
        "medians of {} interleaved rounds, whiskers: least and most; {}, Linux {}, {}, {}",
        report.rounds, machine.cpu, machine.kernel, machine.qemu_storage_daemon, machine.fio
    );
    text(out, MARGIN, 56, 12, "normal", "start", &how)?;
    let mut x = MARGIN;
    for (_, colour, name) in SERVERS {
        writeln!(
            out,
            r#"<rect x="{x}" y="72" width="14" height="14" fill="{colour}"/>"#
        )?;
        text(out, x + 20, 84, 13, "normal", "start", name)?;
        x += 60 + name.len() * 7;
    }
    Ok(())
}

/// The bars of one backing and one figure, in groups by depth.
fn panel(
    out: &mut String,
    row: &[&CellResult],
    figure: &Figure,
    left: usize,
    top: usize,
) -> std::fmt::Result {
    let client = client(row);
    let bars: Vec<Vec<(&str, Option<Spread>)>> = row
        .iter()
        .map(|cell| {
            let bar =
                |(server, colour, _)| (colour, cell.side(server, client).spread(figure.metric));
            SERVERS.into_iter().map(bar).collect()
        })
        .collect();
    let highest = bars
        .iter()
        .flatten()
        .filter_map(|(_, spread)| spread.map(|s| s.max))
        .fold(0.0, f64::max);
    let base = top + 28 + PLOT;
    let mut what = label(row[0].cell.backing, client);
    if !row[0].cell.setting.is_default() {
        what = format!("{what}, {}", row[0].cell.setting);
    }
    let title = format!("{what}: {}", figure.title);
    text(out, left, top + 10, 13, "bold", "start", &title)?;

    let group_width = PANEL / bars.len().max(1);
    for (i, group) in bars.iter().enumerate() {
        let present: Vec<_> = group
            .iter()
            .filter_map(|(colour, spread)| Some((colour, (*spread)?)))
            .collect();
        let middle = left + i * group_width + group_width / 2;
        let first = middle - present.len() * BAR / 2;
        for (j, (colour, spread)) in present.into_iter().enumerate() {
            // The label above a bar needs some of the height.
            let scale = |value: f64| value / highest * (PLOT - 14) as f64;
            let (x, y) = (first + j * BAR, base as f64 - scale(spread.median));
            let (centre, end) = (x + BAR / 2, base as f64 - scale(spread.max));
            writeln!(
                out,
                r#"<rect x="{}" y="{y:.1}" width="{}" height="{:.1}" fill="{colour}"/>"#,
                x + 2,
                BAR - 4,
                scale(spread.median)
            )?;
            writeln!(
                out,
                r##"<path d="M{centre} {end:.1}V{:.1}" stroke="#343a40" stroke-width="1"/>"##,
                base as f64 - scale(spread.min)
            )?;
            text(
                out,
                centre,
                end as usize - 3,
                10,
                "normal",
                "middle",
                &(figure.text)(spread.median),
            )?;
        }
        let depth = format!("depth {}", row[i].cell.workload.depth);
        text(out, middle, base + 16, 12, "normal", "middle", &depth)?;
    }
    writeln!(
        out,
        r##"<path d="M{left} {base}H{}" stroke="#868e96" stroke-width="1"/>"##,
        left + PANEL
    )
}

/// The client of a row: polling on the null disk, where a sleeping one would be what is measured.
fn client(row: &[&CellResult]) -> Client {
    let preferred = match row[0].cell.backing {
        Backing::Null => Client::RingPoll,
        Backing::Cache | Backing::Zram | Backing::Disk => Client::Blkio,
    };
    let clients = &row[0].cell.clients;
    if clients.contains(&preferred) {
        preferred
    } else {
        clients[0]
    }
}

fn label(backing: Backing, client: Client) -> String {
    let backing = match backing {
        Backing::Null => "Null disk",
        Backing::Cache => "Page cache",
        Backing::Zram => "zram",
        Backing::Disk => "Real disk, O_DIRECT",
    };
    if client.sleeps() {
        backing.into()
    } else {
        format!("{backing}, polling client")
    }
}

pub fn text(
    out: &mut String,
    x: usize,
    y: usize,
    size: usize,
    weight: &str,
    anchor: &str,
    text: &str,
) -> std::fmt::Result {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    writeln!(
        out,
        r##"<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="#212529">{text}</text>"##
    )
}

/// 9.70k, 131k, 1.41M.
fn thousands(iops: f64) -> String {
    if iops >= 999_500.0 {
        format!("{}M", short(iops / 1e6))
    } else {
        format!("{}k", short(iops / 1e3))
    }
}
