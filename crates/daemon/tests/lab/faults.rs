//! A fault affects only its own cell, which keeps the last output of the failed program; a run that ends early keeps
//! its measurements.

use std::fs;
use std::path::Path;

use super::{
    PlanFolder, are_installed, can_run_guests, errors, output_text, spawn, succeed, wait_for,
    write_program,
};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::loop_device::LoopDevice;
use crate::support::small_fs::SmallFs;

const ON_HOST: &str = "guest = 'none'\nblocks = 2\n[storage]\nsize = '16M'\n[config]\ncache = ['writeback', 'none']\n\
    [fio]\nrw = 'randread'\nruntime = '1s'\nramp = '0s'\n";

fn kill(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid as i32).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Children of a process whose command line contains this word.
fn children(parent: u32, word: &str) -> Vec<u32> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_it = |pid: &u32| {
        let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let stat = String::from_utf8_lossy(&read("stat")).into_owned();
        let behind = stat.rsplit(')').next().unwrap_or_default().to_owned();
        let of = behind
            .split_whitespace()
            .nth(1)
            .and_then(|p| p.parse().ok());
        of == Some(parent) && String::from_utf8_lossy(&read("cmdline")).contains(word)
    };
    pids.filter(is_it).collect()
}

#[test]
fn killed_qemu_fails_one_cell_with_its_last_output() {
    if !can_run_guests("killed_qemu_fails_one_cell_with_its_last_output") {
        return;
    }
    let bench = PlanFolder::new(
        "blocks = 1\n[storage]\nsize = '16M'\n[fio]\nrw = 'randread'\nruntime = '4s'\nramp = '0s'\n",
    );
    let lab = spawn(&mut bench.run());
    // The load starts once the effective settings are in the journal.
    wait_for("a guest", || bench.lines("boot") > 0);
    let qemu = children(lab.id(), "ringdisk-lab");
    assert_eq!(qemu.len(), 1, "{qemu:?}");
    kill(qemu[0], Signal::KILL);
    let output = lab.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    let journal = bench.journal();
    assert_eq!(journal.cells.len(), 2);
    let errors = errors(&journal.cells);
    assert_eq!(errors.len(), 1, "the other one was measured");
    assert!(
        errors[0].contains("QEMU ended") && errors[0].contains("signal: 9"),
        "{}",
        errors[0]
    );
    bench.assert_report(2);
    // Its logs are kept.
    let kept = fs::read_dir(bench.path("result/failed")).unwrap().count();
    assert_eq!(kept, 1);
}

#[test]
fn guest_that_does_not_boot_fails_one_cell_with_its_console() {
    if !can_run_guests("guest_that_does_not_boot_fails_one_cell_with_its_console") {
        return;
    }
    let bench = PlanFolder::new("");
    let broken = bench.path("broken-qemu");
    // A kernel that is told to start a missing program.
    write_program(
        &broken,
        "#!/bin/sh\nexec qemu-system-x86_64 \"$@\" -append 'console=ttyS0 panic=-1 rdinit=/nowhere root=/dev/none'\n",
    );
    let plan = format!(
        "blocks = 1\n[storage]\nsize = '16M'\n[[case]]\nname = 'host'\ndevice = 'host'\n\
         [[case]]\nname = 'broken'\nqemu = '{}'\n[fio]\nrw = 'randread'\nruntime = '1s'\nramp = '0s'\n",
        broken.display()
    );
    fs::write(bench.path("plan.toml"), plan).unwrap();
    let said = succeed(&mut bench.run());
    let journal = bench.journal();
    let errors = errors(&journal.cells);
    assert_eq!((journal.cells.len(), errors.len()), (3, 1), "{said}");
    assert!(
        errors[0].contains("console.log:") && errors[0].contains("Kernel panic"),
        "{}",
        errors[0]
    );
    bench.assert_report(3);
}

/// On the host and in a guest, which uses a copy of the host's fio.
#[test]
fn failed_fio_fails_one_cell_with_its_last_output() {
    if !can_run_guests("failed_fio_fails_one_cell_with_its_last_output") {
        return;
    }
    let bench = PlanFolder::new(
        "blocks = 1\n[storage]\nsize = '16M'\n[[case]]\nname = 'host'\ndevice = 'host'\n[[case]]\nname = 'guest'\n\
         [fio]\nrw = 'randread'\nruntime = '1s'\nramp = '0s'\n",
    );
    let programs = bench.path("bin");
    fs::create_dir(&programs).unwrap();
    write_program(
        &programs.join("fio"),
        "#!/bin/busybox sh\n[ \"$1\" != --version ] || { echo fio-3.0; exit; }\n\
         echo 'fio: its last line'\nkill -9 $$\n",
    );
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{path}", programs.display());
    let output = bench.run().env("PATH", path).output().unwrap();
    let said = output_text(&output);
    assert_eq!(
        output.status.code(),
        Some(1),
        "nothing was measured: {said}"
    );
    assert!(said.contains("no cell was measured"), "{said}");
    let errors = errors(&bench.journal().cells);
    assert_eq!(errors.len(), 3, "{errors:?}");
    for error in errors {
        assert!(
            error.contains("fio failed with status 137") && error.contains("its last line"),
            "{error}"
        );
    }
    bench.assert_report(3);
}

#[test]
fn full_disk_fails_one_cell_and_full_journal_is_resumed() {
    if !are_installed(
        "full_disk_fails_one_cell_and_full_journal_is_resumed",
        &["fio"],
    ) {
        return;
    }
    let bench = PlanFolder::new("");
    let Some(small) = SmallFs::mount(&bench.path("small"), "300M") else {
        return;
    };
    // One disk fits beside the lab's reserve of 256 MiB; a second one does not.
    let plan = format!(
        "guest = 'none'\nblocks = 1\n[storage]\nsize = '24M'\ndirectory = '{}'\n[config]\nvolumes = [1, 2]\n\
         cache = 'writeback'\n[fio]\nrw = 'randread'\nruntime = '1s'\nramp = '0s'\n",
        small.0.display()
    );
    fs::write(bench.path("plan.toml"), plan).unwrap();
    let said_first = succeed(&mut bench.run());
    let journal = bench.journal();
    let found = errors(&journal.cells);
    assert_eq!((journal.cells.len(), found.len()), (3, 1), "{said_first}");
    assert!(found[0].contains("MiB free"), "{}", found[0]);
    bench.assert_report(3);

    // The journal's own disk fills up during the run.
    fs::write(
        bench.path("plan.toml"),
        ON_HOST.replace(
            "[storage]",
            &format!("[storage]\ndirectory = '{}'", bench.path("disks").display()),
        ),
    )
    .unwrap();
    let output = small.0.join("result");
    let run = |resume: bool| {
        let mut command = bench.lab("run");
        command
            .arg(bench.path("plan.toml"))
            .arg("--output")
            .arg(&output);
        command.args(resume.then_some("--resume"));
        command
    };
    let lab = spawn(&mut run(false));
    let journal = output.join("journal.jsonl");
    wait_for("a cell", || {
        let text = fs::read_to_string(&journal).unwrap_or_default();
        text.contains("\"what\":\"cell\"") && text.ends_with('\n')
    });
    let filler = small.0.join("filler");
    fill(&filler);
    let ended = lab.wait_with_output().unwrap();
    let said_full = output_text(&ended);
    assert_eq!(ended.status.code(), Some(1), "{said_full}");
    assert!(said_full.contains("--resume continues"), "{said_full}");
    fs::remove_file(&filler).unwrap();
    succeed(&mut run(true));
    let whole = lab::journal::Journal::read(&output).unwrap();
    assert_eq!(errors(&whole.cells), Vec::<String>::new());
    assert_eq!(whole.cells.len(), 6);
}

/// Writes a file until its disk is full.
fn fill(path: &Path) {
    use std::io::Write;
    let mut file = fs::File::create(path).unwrap();
    while file.write(&[1; 512]).is_ok_and(|written| written > 0) {}
}

#[test]
fn killed_run_resumes() {
    if !are_installed("killed_run_resumes", &["fio"]) {
        return;
    }
    let bench = PlanFolder::new(ON_HOST);
    let lab = spawn(&mut bench.run());
    wait_for("two cells", || bench.lines("cell") >= 2);
    kill(lab.id(), Signal::KILL);
    let output = lab.wait_with_output().unwrap();
    assert!(!output.status.success());
    let before = bench.journal().cells.len();
    assert!((2..6).contains(&before), "{before}");
    let refused = bench.run().output().unwrap();
    assert!(!refused.status.success() && output_text(&refused).contains("--resume"));

    succeed(bench.run().arg("--resume"));
    let cells = bench.journal().cells;
    assert_eq!(errors(&cells), Vec::<String>::new());
    let mut names: Vec<_> = cells
        .iter()
        .map(|cell| (cell.block, cell.case.clone(), cell.twin))
        .collect();
    names.sort();
    names.dedup();
    assert_eq!((names.len(), cells.len()), (6, 6), "each once");
    bench.assert_report(6);
}

#[test]
fn killed_run_removes_the_disks_that_it_created_when_it_is_resumed() {
    let name = "killed_run_removes_the_disks_that_it_created_when_it_is_resumed";
    if !are_installed(name, &["fio"]) {
        return;
    }
    let bench = PlanFolder::new("");
    let disk = bench.path("created");
    let own = format!("create = true\n[config]\nbacking = '{}'\n", disk.display());
    let plan = ON_HOST.replace("[config]\n", &own);
    fs::write(bench.path("plan.toml"), plan).unwrap();
    let lab = spawn(bench.run().arg("--overwrite"));
    wait_for("a cell", || bench.lines("cell") >= 1);
    kill(lab.id(), Signal::KILL);
    assert!(!lab.wait_with_output().unwrap().status.success());
    assert!(disk.exists(), "it was killed");
    assert_eq!(bench.journal().left[0].disk, disk.display().to_string());

    let said = succeed(bench.run().args(["--resume", "--overwrite"]));
    assert!(said.contains("this run left when it was killed"), "{said}");
    let journal = bench.journal();
    assert_eq!(errors(&journal.cells), Vec::<String>::new());
    assert_eq!((journal.cells.len(), journal.left.len()), (6, 0));
    assert!(!disk.exists());
}

#[test]
fn interrupted_run_writes_a_report() {
    if !are_installed("interrupted_run_writes_a_report", &["fio"]) {
        return;
    }
    let bench = PlanFolder::new(&ON_HOST.replace("'1s'", "'2s'"));
    let lab = spawn(&mut bench.run());
    wait_for("a cell", || bench.lines("cell") >= 1);
    kill(lab.id(), Signal::INT);
    let output = lab.wait_with_output().unwrap();
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("--resume --output"), "{said}");
    let cells = bench.journal().cells.len();
    assert!((1..6).contains(&cells), "{cells}");
    bench.assert_report(cells);
    assert!(
        !bench.path("result/disks").exists(),
        "the run's disks must be removed"
    );
    succeed(bench.run().arg("--resume"));
    assert_eq!(bench.journal().cells.len(), 6);
}

#[test]
fn mounted_device_is_not_overwritten() {
    if !are_installed(
        "mounted_device_is_not_overwritten",
        &["losetup", "mkfs.ext4"],
    ) {
        return;
    }
    let Some(disk) = LoopDevice::new() else {
        return;
    };
    let plan = |rw: &str| {
        format!(
            "guest = 'none'\nblocks = 1\n[config]\ndevice = 'vhost-user-blk'\nbacking = '{}'\nqueues = [1, 2]\n\
             [fio]\nrw = '{rw}'\nruntime = '200ms'\nramp = '0s'\n",
            disk.device.display()
        )
    };
    // The device is free when the run begins, and mounted when it is resumed.
    let bench = PlanFolder::new(&plan("randwrite"));
    let lab = spawn(bench.run().arg("--overwrite"));
    wait_for("a cell", || bench.lines("cell") > 0);
    kill(lab.id(), Signal::KILL);
    lab.wait_with_output().unwrap();
    let Some(folder) = disk.mount() else {
        return;
    };
    fs::write(folder.join("file"), "mine").unwrap();
    let refused = bench
        .run()
        .args(["--overwrite", "--resume"])
        .output()
        .unwrap();
    let said = output_text(&refused);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("is in use on this host"), "{said}");
    fs::remove_dir_all(bench.path("result")).unwrap();
    let refused = bench.run().arg("--overwrite").output().unwrap();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(
        output_text(&refused).contains("is in use on this host"),
        "{}",
        output_text(&refused)
    );
    // Loads that only read are no danger for it.
    fs::write(bench.path("plan.toml"), plan("randread")).unwrap();
    let said = succeed(bench.run().arg("--dry-run"));
    assert!(!said.contains("in use"), "{said}");
    assert_eq!(disk.unmounted_file("file"), "mine");
}
