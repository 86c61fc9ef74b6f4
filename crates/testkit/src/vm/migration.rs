//! Live migration: a guest migrations from one QEMU to another while it runs.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use harness::process::Process;
use serde_json::{Value, json};

use super::{Lines, Output, Qmp, Vm, accel, emulation_failed};

/// The times of a migration.
#[derive(Clone, Copy, Debug)]
pub struct MigrationTimes {
    /// The time from the command to the end.
    pub total: Duration,
    /// The time during which the guest did not run, as QEMU reports it.
    pub downtime: Duration,
}

/// How often a guest is booted whose QEMU [fails by itself](emulation_failed) while it boots.
const BOOTS_MAX: u32 = 3;

/// Boots the guest on the first host and runs `script` in it as [`Vm::run`] does. Once the script has printed `migrate
/// me`, the running guest migrates `migrations` times, to the QEMU of each of `hosts` in turn. `on_migrated` is called
/// after each migration; after the last one, the script must run to its end. All hosts use the same folder.
///
/// # Errors
/// As [`Vm::run`]; also if a migration fails, or the script ends before the last one.
pub fn run_migrating(
    hosts: &[Vm],
    migrations: usize,
    script: &str,
    limit: Duration,
    on_migrated: &mut dyn FnMut(usize, MigrationTimes) -> Result<()>,
) -> Result<Output> {
    let accel = accel()?;
    let first = hosts.first().context("there is no host")?;
    let boot = first.boot_files(script)?;
    // In a short path: the path of a socket is limited to 108 bytes.
    let sockets = tempfile::tempdir().context("making a folder for sockets")?;
    let on_host = |number: usize| {
        let vm = hosts[number % hosts.len()].clone();
        vm.qmp(sockets.path().join(format!("qmp{number}")))
    };

    let started = Instant::now();
    let mut lines = Lines::of(first.folder.join("results.log"))?;
    let (mut number, mut asked, mut boots_left) = (0, false, BOOTS_MAX - 1);
    let mut guest = on_host(0).start(accel, &boot, None)?;
    let ended = loop {
        let ended = guest.ended()?;
        lines.read(&mut |line| asked |= line == "migrate me")?;
        if ended.is_some() && !asked && boots_left > 0 && emulation_failed(&first.folder) {
            boots_left -= 1;
            lines = Lines::of(first.folder.join("results.log"))?;
            guest = on_host(0).start(accel, &boot, None)?;
            continue;
        }
        if ended.is_some() || started.elapsed() > limit {
            break ended;
        }
        if asked && number < migrations {
            let incoming = sockets.path().join(format!("migration{number}"));
            let there = on_host(number + 1).start(accel, &boot, Some(&incoming))?;
            let qmp = |n: usize| sockets.path().join(format!("qmp{n}"));
            let deadline = started + limit;
            let result = migrate(&qmp(number), &qmp(number + 1), &incoming, deadline)
                .with_context(|| format!("migration {number}{}", first.last_output()))?;
            end_source(guest, &qmp(number))?;
            guest = there;
            on_migrated(number, result)?;
            number += 1;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    drop(guest);
    fs::remove_file(&boot.initrd).ok();
    let output = first.output(ended, lines, started, accel, limit)?;
    ensure!(
        number == migrations,
        "the script ended after {number} migrations: {:?}",
        output.lines
    );
    Ok(output)
}

fn migrate(from: &Path, to: &Path, socket: &Path, deadline: Instant) -> Result<MigrationTimes> {
    let until = |what: &str, done: &mut dyn FnMut() -> Result<bool>| {
        while !done()? {
            ensure!(Instant::now() < deadline, "{what}: not before the limit");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    };
    until("the other QEMU starts", &mut || {
        Ok(socket.exists() && to.exists())
    })?;
    let (mut from, mut to) = (Qmp::connect(from)?, Qmp::connect(to)?);
    from.execute(
        "migrate-set-parameters",
        json!({ "max-bandwidth": 4u64 << 30, "downtime-limit": 1000 }),
    )?;
    let began = Instant::now();
    from.execute(
        "migrate",
        json!({ "uri": format!("unix:{}", socket.display()) }),
    )?;
    let mut state = Value::Null;
    until("the migration", &mut || {
        state = from.execute("query-migrate", json!({}))?;
        match state["status"].as_str() {
            Some("completed") => Ok(true),
            Some("failed" | "cancelled") => bail!("QEMU says: {state}"),
            _ => Ok(false),
        }
    })?;
    until("the guest runs there", &mut || {
        Ok(to.execute("query-status", json!({}))?["running"] == true)
    })?;
    Ok(MigrationTimes {
        total: began.elapsed(),
        downtime: Duration::from_millis(state["downtime"].as_u64().unwrap_or(0)),
    })
}

/// Ends the QEMU from which the guest has migrated.
fn end_source(mut guest: Process, qmp: &Path) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = loop {
        // QEMU may close the connection before it has replied.
        let asked = Qmp::connect(qmp).and_then(|mut qmp| qmp.execute("quit", json!({})));
        if let Some(status) = guest.ended()? {
            break status;
        }
        ensure!(Instant::now() < deadline, "QEMU does not end: {asked:?}");
        std::thread::sleep(Duration::from_millis(50));
    };
    ensure!(status.success(), "QEMU ended with {status}");
    Ok(())
}
