//! A run as a person sees it: its tables, and its picture.

use std::fmt::{self, Write};
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};

use super::machine::Machine;
use super::report::Report;
use super::{instructions, open_loop, picture};

/// Reads an earlier run and prints it again.
pub fn show(json: &Path, svg: Option<&Path>) -> anyhow::Result<()> {
    let text = fs::read_to_string(json).with_context(|| format!("reading {}", json.display()))?;
    let report: Report =
        serde_json::from_str(&text).with_context(|| format!("parsing {}", json.display()))?;
    ensure!(
        !(report.cells.is_empty() && report.open_loop.is_empty() && report.instructions.is_empty()),
        "{} has no closed loops, no requests at rates and no instructions, which are what this command prints",
        json.display()
    );
    print!("{}", table(&report));
    svg.map_or(Ok(()), |svg| draw(&report, svg))
}

/// Draws the picture, if there is one of what was measured.
pub fn draw(report: &Report, path: &Path) -> anyhow::Result<()> {
    if !report.open_loop.is_empty() {
        open_loop::draw(&report.open_loop, &report.conditions(), path)
    } else if !report.cells.is_empty() {
        picture::write(report, path)
    } else {
        Ok(())
    }
}

/// The run as text: figures first, then the targets.
pub fn table(report: &Report) -> String {
    let mut out = String::new();
    write(&mut out, report).expect("writing to a String does not fail");
    out
}

fn write(out: &mut String, report: &Report) -> fmt::Result {
    let Machine {
        kernel,
        cpu,
        cores,
        commit,
        qemu_storage_daemon,
        fio,
        ..
    } = &report.machine;
    writeln!(
        out,
        "{cpu}, {cores} cores, Linux {kernel}; ringdisk {commit}; {qemu_storage_daemon}; {fio}"
    )?;
    writeln!(
        out,
        "medians of {} interleaved rounds of {} s; server and host fio on core {}, client on core {}; [min..max]",
        report.rounds, report.runtime_s, report.machine.server_cpu, report.machine.client_cpu
    )?;
    report.write_cells(out)?;
    open_loop::write(out, &report.open_loop)?;
    instructions::write(out, &report.instructions)?;
    report.write_targets(out)?;
    for reason in &report.skipped {
        writeln!(out, "skipped  {reason}")?;
    }
    for failure in &report.failures {
        writeln!(out, "failed   {failure}")?;
    }
    Ok(())
}
