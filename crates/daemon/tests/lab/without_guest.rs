//! Servers without guests, and the knee of an open loop.

use std::fs;
use std::process::Command;

use super::{PlanFolder, are_installed, errors, output_text, succeed};
use testkit::server::Server;

#[test]
fn servers_are_measured_without_a_guest() {
    if !are_installed(
        "servers_are_measured_without_a_guest",
        &["fio", "qemu-storage-daemon"],
    ) {
        return;
    }
    let bench = PlanFolder::new(
        "guest = 'none'\nblocks = 1\n[storage]\nsize = '16M'\n\
         [[case]]\nname = 'host'\ndevice = 'host'\n\
         [[case]]\nname = 'ringdisk'\ndevice = 'vhost-user-blk'\nqueues = 2\n\
         [[case]]\nname = 'null'\ndevice = 'vhost-user-blk'\nbacking = 'null'\nvolumes = 2\n\
         [[case]]\nname = 'qsd'\ndevice = 'vhost-user-blk'\nserver = 'qemu-storage-daemon'\n\
         [fio]\nruntime = '2s'\nramp = '200ms'\n\
         [[workload]]\nrw = 'randread'\niodepth = 5\n\
         [[workload]]\nrw = 'rw'\nbs = '64k'\nnumjobs = 2\n\
         [[workload]]\nrw = 'randrw'\nrate = 200\narrival = 'poisson'\niodepth = 16\n",
    );
    succeed(&mut bench.run());
    let journal = bench.journal();
    assert_eq!(errors(&journal.cells), Vec::<String>::new());
    assert_eq!(journal.cells.len(), 5 * 3);
    for cell in &journal.cells {
        let sample = cell.sample.as_ref().unwrap();
        assert!(
            sample.iops > 0.0 && sample.latencies.requests() > 0,
            "{cell:?}"
        );
        // The cost of a server is known; fio's own time is not a cost of the host.
        assert_eq!(
            sample.cpu_us.is_some(),
            cell.case != "host",
            "{}",
            cell.case
        );
        if cell.workload.contains("rate") {
            // Per volume; a busy machine may fall behind, but never runs ahead.
            let offered = if cell.case == "null" { 400.0 } else { 200.0 };
            assert!(
                sample.iops < 1.3 * offered,
                "{}: {}",
                cell.case,
                sample.iops
            );
        }
    }
    let queues = |case: &str| {
        let boot = journal.boots.iter().find(|boot| boot.case == case).unwrap();
        boot.effective.get("queues").cloned()
    };
    assert_eq!(queues("ringdisk").as_deref(), Some("2"));
    bench.assert_report(journal.cells.len());
}

/// The published tables: CPU time of servers and of fio, each load's configurations next to each other, ratios.
#[test]
fn last_configuration_is_compared_with_all_others() {
    let programs = ["fio", "qemu-storage-daemon"];
    if !are_installed("last_configuration_is_compared_with_all_others", &programs) {
        return;
    }
    let bench = PlanFolder::new(
        "guest = 'none'\ncompare = 'last'\ninterleave = 'loads'\nuntil = 'blocks'\nblocks = 5\n\
         [storage]\nsize = '16M'\nsettle = 'on'\n[cpus]\nserver = 0\nload = 0\n\
         [config]\ndevice = 'vhost-user-blk'\nclient = 'ring'\niothread = 'on'\nqueues = 1\niops = ['default', 5000]\n\
         [[case]]\nname = 'fio'\ndevice = 'host'\naio = 'io_uring'\niops = 'default'\n\
         [[case]]\nname = 'qsd'\nserver = 'qemu-storage-daemon'\naio = 'io_uring'\n\
         [[case]]\nname = 'ringdisk'\n\
         [fio]\nruntime = '1s'\nramp = '200ms'\n\
         [[workload]]\nrw = 'randread'\niodepth = [4, 8]\n\
         [[workload]]\nrw = 'randread'\nrate = 500\niodepth = 4\n\
         [[workload]]\nrw = 'randread'\nthinktime = '2ms'\niodepth = 4\nburst = 4\n",
    );
    let said = succeed(
        bench
            .run()
            .args([
                "--only",
                "case=qsd,baseline,ringdisk",
                "--only",
                "iodepth=4",
            ])
            .args(["--set", "blocks=1", "--baseline"])
            .arg(env!("CARGO_BIN_EXE_ringdisk")),
    );
    assert!(
        said.contains("ringdisk's figure over that of the row"),
        "{said}"
    );
    let journal = bench.journal();
    assert_eq!(errors(&journal.cells), Vec::<String>::new());
    // Three cases with and without a limit, and the twin of the first, under three loads.
    assert_eq!(journal.cells.len(), 7 * 3);
    for turns in journal.cells.chunks(7) {
        assert!(turns.iter().all(|cell| cell.workload == turns[0].workload));
    }
    for cell in &journal.cells {
        let sample = cell.sample.as_ref().unwrap();
        assert!(sample.cpu_us.unwrap() > 0.0, "{cell:?}");
        assert_eq!(sample.polling.is_some(), !cell.case.starts_with("qsd"));
        let limit = match &cell.workload {
            load if load.contains("rate") => 500.0,
            load if load.contains("thinktime") => 2000.0,
            _ if cell.case.ends_with("5000") => 5000.0,
            _ => f64::MAX,
        };
        assert!(sample.iops < 1.5 * limit, "{}: {}", cell.case, sample.iops);
    }
    bench.assert_report(journal.cells.len());
}

#[test]
fn fio_on_the_host_costs_cpu_time_where_cpus_are_named() {
    if !are_installed(
        "fio_on_the_host_costs_cpu_time_where_cpus_are_named",
        &["fio"],
    ) {
        return;
    }
    let bench = PlanFolder::new(
        "guest = 'none'\nblocks = 1\n[storage]\nsize = '16M'\n[cpus]\nserver = 0\n\
         [[case]]\nname = 'fio'\ndevice = 'host'\naio = 'io_uring'\n\
         [fio]\nruntime = '2s'\nramp = '200ms'\nrw = 'randread'\n",
    );
    succeed(&mut bench.run());
    let journal = bench.journal();
    assert_eq!(errors(&journal.cells), Vec::<String>::new());
    let sample = journal.cells[0].sample.as_ref().unwrap();
    assert!(sample.cpu_us.unwrap() > 0.0);
}

/// Without `[cpus]`, nothing is pinned: neither closed loops nor pauses nor rates.
#[test]
fn cpus_need_not_be_named() {
    let bench = PlanFolder::new(
        "guest = 'none'\nblocks = 1\n[storage]\nsize = '16M'\n\
         [[case]]\ndevice = 'vhost-user-blk'\nclient = 'ring'\nbacking = 'null'\n\
         [fio]\nruntime = '100ms'\nramp = '0s'\nrw = 'randread'\n\
         [[workload]]\nrw = 'randread'\n\
         [[workload]]\nrw = 'randread'\nthinktime = '2ms'\n\
         [[workload]]\nrw = 'randread'\nrate = 1000\n",
    );
    succeed(&mut bench.run());
    let journal = bench.journal();
    assert!(!journal.cells.is_empty());
    assert!(journal.cells.iter().all(|cell| cell.sample.is_some()));
}

#[test]
fn guest_settings_are_refused_without_a_guest() {
    for (config, said_of_it) in [
        ("[[case]]\ndevice = 'virtio-blk'\n", "vhost-user-blk"),
        ("[[case]]\ndevice = 'vhost-user-blk'\nvcpus = 2\n", "vcpus"),
        (
            "[[case]]\ndevice = 'vhost-user-blk'\n[fio]\nfsync = 1\nrw = 'write'\n",
            "fsync",
        ),
        (
            "[[case]]\ndevice = 'vhost-user-blk'\n[fio]\niodepth = 1000\n",
            "more queues",
        ),
        (
            "[[case]]\ndevice = 'vhost-user-blk'\nclient = 'ring'\n[fio]\nrw = 'randrw'\n",
            "client=blkio",
        ),
        (
            "[[case]]\ndevice = 'vhost-user-blk'\n[fio]\nthinktime = '1ms'\n",
            "client = \"ring\"",
        ),
        (
            "[[case]]\ndevice = 'vhost-user-blk'\nclient = 'ring'\nqueues = 2\n[fio]\niodepth = 3\n",
            "multiple",
        ),
        (
            "[[case]]\ndevice = 'host'\n[fio]\nrate = 'auto'\n",
            "iodepth of 8",
        ),
    ] {
        let bench = PlanFolder::new(&format!("guest = 'none'\n{config}"));
        let output = bench.run().output().unwrap();
        let said = output_text(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(
            said.contains(said_of_it) && said.contains("line "),
            "{said}"
        );
    }
}

/// A throttled server has its knee at the limit, or below it on a machine that is too busy.
#[test]
fn knee_of_a_throttled_disk_is_found() {
    let bench = PlanFolder::new("");
    let socket = bench.path("disk.sock");
    let disk = format!("file=null:1G,socket={},iops=1000", socket.display());
    let _server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &[disk]).unwrap();
    let plan = format!(
        "guest = 'none'\nblocks = 1\nbudget = '1s'\n[[case]]\nname = 'limited'\ndevice = 'vhost-user-blk'\nserver = '{}'\n\
         [fio]\nrw = 'randread'\niodepth = 32\nrate = 'auto'\narrival = 'poisson'\nruntime = '2s'\nramp = '0s'\n",
        socket.display()
    );
    fs::write(bench.path("plan.toml"), plan).unwrap();
    let dry = succeed(bench.run().arg("--dry-run"));
    assert!(dry.contains("a search for at most"), "{dry}");
    let said = succeed(&mut bench.run());
    assert!(said.contains("keeps up with about"), "{said}");
    let journal = bench.journal();
    let rates: Vec<u32> = journal
        .plan
        .workloads
        .iter()
        .filter_map(|load| load.rate)
        .collect();
    assert!((3..=9).contains(&rates.len()), "{rates:?}");
    assert!(rates[0] < 300 && *rates.last().unwrap() < 1600, "{rates:?}");
    assert!(journal.searched_s > 0.0);
    let measured: Vec<_> = journal
        .cells
        .iter()
        .filter(|c| c.sample.is_some())
        .collect();
    assert_eq!(measured.len(), 2 * rates.len(), "the case and its twin");
    assert!(
        measured
            .iter()
            .all(|c| c.sample.as_ref().unwrap().iops < 1300.0)
    );
    let page = fs::read_to_string(bench.path("result/report.html")).unwrap();
    assert!(page.contains("Knees"), "{page}");
    let table = fs::read_to_string(bench.path("result/cells.csv")).unwrap();
    assert!(table.contains(",open,"), "{table}");

    // A repeated run reuses the result.
    let mut again: Command = bench.run();
    again.arg("--resume");
    let said = succeed(&mut again);
    assert!(!said.contains("keeps up with about"), "{said}");
    assert_eq!(bench.journal().cells.len(), journal.cells.len());
}
