//! The picture for the README: 4k random reads, a row per backing, IOPS on the left and CPU per I/O on the right.

use std::path::Path;

use anyhow::Context;
use harness::svg::{Anchor, Svg};

use super::frame::{Contestant, HEADER, MARGIN, PANEL, WIDTH, header, style};
use super::report::{CellResult, Report};
use super::words::{Backing, Client, Server, short};
use harness::spread::Spread;
use lab::client::Sample;

const ROW: f64 = 190.0;
const PLOT: f64 = 112.0;
const BAR: f64 = 30.0;

const SERVERS: [Contestant; 4] = [
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
    std::fs::write(path, draw(report)).with_context(|| format!("writing {}", path.display()))
}

fn draw(report: &Report) -> String {
    let cells = || {
        report
            .cells
            .iter()
            .filter(|it| !it.cell.workload.write && !it.cell.workload.sequential)
    };
    // If a backing has several settings, the first one.
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
    let mut svg = Svg::new(WIDTH, HEADER + rows.len() as f64 * ROW + MARGIN / 2.0);
    let title = "4k random reads, one core for the server";
    header(&mut svg, &report.conditions(), title, &SERVERS);
    for (i, row) in rows.iter().enumerate() {
        let top = HEADER + i as f64 * ROW;
        for (column, figure) in FIGURES.iter().enumerate() {
            let left = MARGIN + column as f64 * (PANEL + MARGIN);
            panel(&mut svg, row, figure, left, top);
        }
    }
    svg.standalone(title, &style(&SERVERS))
}

/// The bars of one backing and one figure, in groups by depth.
fn panel(svg: &mut Svg, row: &[&CellResult], figure: &Figure, left: f64, top: f64) {
    let client = client(row);
    let groups: Vec<Vec<(Server, Spread)>> = row
        .iter()
        .map(|cell| {
            let bar = |(server, ..): Contestant| {
                Some((server, cell.side(server, client).spread(figure.metric)?))
            };
            SERVERS.into_iter().filter_map(bar).collect()
        })
        .collect();
    let highest = groups
        .iter()
        .flatten()
        .map(|(_, spread)| spread.max)
        .fold(0.0, f64::max);
    // The label above a bar needs some of the height.
    let scale = |value: f64| value / highest * (PLOT - 14.0);
    let base = top + 28.0 + PLOT;
    let mut what = label(row[0].cell.backing, client);
    if !row[0].cell.setting.is_default() {
        what = format!("{what}, {}", row[0].cell.setting);
    }
    let title = format!("{what}: {}", figure.title);
    svg.text((left, top + 10.0), Anchor::Start, "panel", &title);

    let group_width = PANEL / groups.len().max(1) as f64;
    for (i, group) in groups.iter().enumerate() {
        let middle = left + (i as f64 + 0.5) * group_width;
        let first = middle - group.len() as f64 * BAR / 2.0;
        for (j, (server, spread)) in group.iter().enumerate() {
            let x = first + j as f64 * BAR;
            let (height, centre) = (scale(spread.median), x + BAR / 2.0);
            let (least, most) = (base - scale(spread.min), base - scale(spread.max));
            let class = server.to_string();
            svg.rect(
                (x + 2.0, base - height),
                (BAR - 4.0, height),
                &class,
                "",
                "",
            );
            svg.line(&[(centre, most), (centre, least)], "whisker");
            let text = (figure.text)(spread.median);
            svg.text((centre, most - 3.0), Anchor::Middle, "value", &text);
        }
        let depth = format!("depth {}", row[i].cell.workload.depth);
        svg.text((middle, base + 16.0), Anchor::Middle, "text", &depth);
    }
    svg.line(&[(left, base), (left + PANEL, base)], "axis");
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

/// 9.70k, 131k, 1.41M.
fn thousands(iops: f64) -> String {
    if iops >= 999_500.0 {
        format!("{}M", short(iops / 1e6))
    } else {
        format!("{}k", short(iops / 1e3))
    }
}
