//! Runs with real guests: what a plan sets is read back from QEMU, from the guest and from the host.

use std::path::Path;

use harness::cpu;
use harness::initramfs::Kernel;
use harness::paths::find_program;
use lab::guest::{Accel, Stop};
use lab::journal::Journal;
use lab::run::{Options, run};

use crate::host::Silent;

/// Why no guest can run here.
fn missing() -> Option<String> {
    let programs = ["qemu-system-x86_64", "busybox", "fio", "ldd"];
    let program = programs.iter().find(|name| find_program(name).is_none());
    match program {
        Some(name) => Some(format!("{name} is missing")),
        None => Kernel::find().err().map(|error| error.to_string()),
    }
}

/// Runs a plan with guests under TCG, which works everywhere; `None` where a program is missing.
fn measured(plan: &str) -> Option<Journal> {
    if let Some(missing) = missing() {
        println!("skipped: guests of the lab: {missing}; `cargo xtask install` installs it");
        return None;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    Some(measured_in(folder.path(), plan))
}

fn measured_in(folder: &Path, plan: &str) -> Journal {
    let options = Options {
        folder: folder.join("result"),
        ringdisk: "/nonexistent/ringdisk".into(),
        accel: Accel::Tcg,
        resume: false,
        file: folder.join("plan.toml"),
        budget: None,
        only: Vec::new(),
        profile: false,
    };
    run(plan, &options, &Stop::default(), &mut Silent).unwrap()
}

fn errors(journal: &Journal) -> Vec<String> {
    let errors = journal.cells.iter().filter_map(|cell| cell.error.clone());
    errors.collect()
}

/// The effective value of a setting in a case.
fn effective(journal: &Journal, case: &str, key: &str) -> String {
    let boot = journal.boots.iter().find(|boot| boot.case == case);
    let boot = boot.unwrap_or_else(|| panic!("{case} has not booted"));
    let found = boot.effective.get(key);
    found
        .unwrap_or_else(|| panic!("{key}: {:#?}", boot.effective))
        .clone()
}

const LOAD: &str = "[fio]\nrw = 'randread'\niodepth = 4\nruntime = '1s'\nramp = '0s'\n";

#[test]
fn processor_pinning_and_polling_are_read_back() {
    let allowed = cpu::affinity(None).unwrap();
    let (first, last) = (allowed[0], *allowed.last().unwrap());
    let plan = format!(
        "blocks = 1\n[storage]\nsize = '16M'\n[[case]]\nname = 'plain'\n\
         cpu = 'max'\n[[case]]\nname = 'tuned'\ncpu = 'max,-x2apic'\nvcpus = 2\niothread = 'on'\npoll-max-us = 100\n\
         vcpu-cpus = '{first},{last}'\nserver-cpus = {last}\nvolumes = 2\n\
         [[case]]\nname = 'kvm'\ncpu = 'host,kvm-pv-eoi=off'\n{LOAD}"
    );
    let Some(journal) = measured(&plan) else {
        return;
    };
    assert_eq!(errors(&journal), [""; 0]);
    let tuned = |key: &str| effective(&journal, "tuned", key);
    assert_eq!(tuned("cpu"), "max,x2apic=off");
    assert_eq!(tuned("guest x2apic"), "off");
    assert_eq!(tuned("poll-max-us"), "100");
    assert_eq!(tuned("iothreads"), "2");
    assert_eq!(tuned("server-cpus"), last.to_string());
    let both = lab::plan::cpus::CpuList::of(vec![first, last]);
    assert_eq!(tuned("vcpu-cpus"), both.to_string());
    assert_eq!(effective(&journal, "plain", "cpu"), "max");
    let why = &journal.header.left_out["kvm"];
    assert!(why.contains("only KVM has host"), "{why}");
}

#[test]
fn feature_that_the_processor_does_not_have_fails_the_boot() {
    // TCG has no transactional memory.
    let plan = format!("blocks = 1\n[storage]\nsize = '16M'\n[config]\ncpu = 'max,rtm=on'\n{LOAD}");
    let Some(journal) = measured(&plan) else {
        return;
    };
    let errors = errors(&journal);
    assert!(
        !errors.is_empty() && errors.iter().all(|error| error.contains("rtm=off")),
        "{errors:?}"
    );
}

/// The storage benchmark of 2013 had 42 LUNs in one guest.
#[test]
fn many_disks_of_a_guest_are_found_and_measured() {
    let plan = format!(
        "blocks = 1\n[storage]\nsize = '16M'\n[config]\nvolumes = 42\nbacking = 'null'\nvcpus = 2\n\
         [[case]]\nname = 'blk'\n[[case]]\nname = 'scsi'\ndevice = 'virtio-scsi'\nmachine = 'pc'\n{}",
        // Under emulation, seconds pass until the last of 42 jobs has begun.
        LOAD.replace("'1s'", "'20s'")
    );
    // QEMU 7.2 fails this assertion of its own under emulation, rarely, when a guest maps so many devices.
    let is_of_qemu = |error: &String| error.contains("iotlb_to_section");
    let mut tries = (0..3).filter_map(|_| measured(&plan));
    let Some(journal) = tries.find(|journal| !errors(journal).iter().any(is_of_qemu)) else {
        println!(
            "skipped: many disks of a guest: QEMU is missing, or ended three times in iotlb_to_section"
        );
        return;
    };
    assert_eq!(errors(&journal), [""; 0]);
    assert_eq!(journal.boots.len(), 3, "both, and the first again");
    assert!(journal.cells.iter().all(|cell| {
        let sample = cell.sample.as_ref().unwrap();
        sample.iops > 0.0
    }));
}

#[test]
fn loads_run_on_a_file_system_in_the_guest_over_backing_files() {
    let programs = ["mkfs.ext4", "qemu-img"];
    if let Some(name) = programs.iter().find(|name| find_program(name).is_none()) {
        println!("skipped: file systems in guests: {name} is missing");
        return;
    }
    let plan = format!(
        "blocks = 1\n[storage]\nsize = '64M'\n[[case]]\nname = 'ext4'\nfile-system = 'ext4'\n\
         [[case]]\nname = 'chain'\nformat = 'qcow2'\nbacking-files = 2\naio = 'threads'\nvolumes = 2\n{LOAD}"
    );
    let Some(journal) = measured(&plan) else {
        return;
    };
    assert_eq!(errors(&journal), [""; 0]);
    assert_eq!(effective(&journal, "ext4", "file-system"), "ext4");
    let bytes: u64 = effective(&journal, "ext4", "file bytes").parse().unwrap();
    assert!((30 << 20..64 << 20).contains(&bytes), "{bytes}");
    assert_eq!(effective(&journal, "chain", "backing files"), "2");
}

#[test]
fn queues_of_virtio_scsi_are_spread_over_threads() {
    // QEMU is asked for its version before it is started.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let older = folder.path().join("older-qemu");
    std::fs::write(&older, "#!/bin/sh\necho QEMU emulator version 7.2.22\n").unwrap();
    std::fs::set_permissions(&older, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let plan = format!(
        "blocks = 1\n[storage]\nsize = '16M'\n[config]\ndevice = 'virtio-scsi'\niothread = 2\nqueues = 4\nvcpus = 2\n\
         [[case]]\nname = 'newer'\n[[case]]\nname = 'older'\nqemu = '{}'\n{LOAD}",
        older.display()
    );
    let version = lab::guest::version(Path::new(harness::qemu::SYSTEM));
    if !version.contains("version 1") {
        println!(
            "skipped: queues of virtio-scsi on threads: it needs QEMU 10.0; this is {version}"
        );
        return;
    }
    let Some(journal) = measured(&plan) else {
        return;
    };
    assert_eq!(errors(&journal), [""; 0]);
    assert_eq!(effective(&journal, "newer", "iothread"), "2");
    let why = &journal.header.left_out["older"];
    assert!(why.contains("needs QEMU 10.0; this is 7.2"), "{why}");
}
