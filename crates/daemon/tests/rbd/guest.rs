//! A real guest on an image writes and verifies throughout, while parts of the cluster and ringdisk fail.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use testkit::ceph::POOL;
use testkit::vm::{self, Vm};

use super::cluster::{CephVersion, Cluster};

on_each_release!(
    guest_survives_restarts_and_notices_only_the_resize,
    guest_on_an_image_migrates,
);

/// The guest takes half a minute on an idle machine, including all faults.
const LIMIT: Duration = Duration::from_secs(400);

/// Each step writes at random and reads everything back; the host causes a fault as it starts.
const STEPS: [&str; 7] = [
    "calm",
    "osd-killed",
    "monitor-restarted",
    "osd-back",
    "snapshot",
    "ringdisk-killed",
    "longer",
];

fn guest_survives_restarts_and_notices_only_the_resize(version: CephVersion) {
    let test = "guest_survives_restarts_and_notices_only_the_resize";
    if let Some(missing) = vm::missing(true) {
        return println!("skipped: {test} on the {version:?} Ceph: {missing}");
    }
    let Some(mut cluster) = Cluster::get(version, test) else {
        return;
    };
    let disk = cluster.image("guest", 64, "queues=1,serial=in-ceph");
    let socket = cluster.socket("guest").display().to_string();
    let mut server = Some(cluster.serve(&[&disk]));
    let fio = "fio --eta=never --filename=$dev --size=8M --direct=1 --ioengine=libaio --bs=4k --iodepth=16 \
               --rw=randwrite --norandommap --verify=crc32c --verify_fatal=1 --output=/tmp/fio";
    let mut script = "dev=$(disk in-ceph)\n".to_owned();
    for step in STEPS {
        script += &format!("echo 'step {step}'\n");
        if step == "longer" {
            script += "i=0; while [ $(cat /sys/block/${dev##*/}/size) != 196608 ]; do
                 i=$((i + 1)); [ $i -lt 600 ] || { echo 'no longer disk'; exit 1; }; sleep 0.1; done\n";
        }
        let offset = if step == "longer" { "64M" } else { "8M" };
        script += &format!(
            "{fio} --name={step} --offset={offset} || {{ cat /tmp/fio; exit 1; }}\necho 'ok {step}'\n"
        );
    }
    let pasted = [
        "-chardev",
        &format!("socket,id=disk,path={socket},reconnect-ms=100"),
        "-device",
        "vhost-user-blk-pci,chardev=disk,num-queues=1",
    ];
    let pasted = pasted.map(str::to_owned).to_vec();
    let logs = logs_of(version, test);
    let mut guest = Vm::new(logs).cpus(2).fio().disk(vm::Disk::Printed(pasted));
    guest = guest.memory_mib(512);
    let mut done = Vec::new();
    let output = guest.run_watched(&script, LIMIT, &mut |line, _| match line {
        "step osd-killed" => {
            cluster.ceph().kill_osd(2).unwrap();
            cluster.ceph().wait_for_down(2).unwrap();
        }
        "step monitor-restarted" => cluster.ceph().restart_mon().unwrap(),
        "step osd-back" => {
            cluster.ceph().start_osd(2).unwrap();
            cluster.ceph().wait_for_osds().unwrap();
        }
        "step snapshot" => {
            let snapshot = format!("{POOL}/guest@meanwhile");
            let make = ["snap", "create", "--no-progress", &snapshot];
            cluster.ceph().rbd(&make).unwrap();
        }
        "step ringdisk-killed" => {
            let killed = server.take().unwrap();
            killed.signal(Signal::KILL);
            drop(killed);
            server = Some(cluster.serve(&[&disk]));
        }
        "step longer" => {
            let image = format!("{POOL}/guest");
            let longer = ["resize", "--no-progress", "--size", "96M", &image];
            cluster.ceph().rbd(&longer).unwrap();
        }
        line => done.extend(line.strip_prefix("ok ").map(str::to_owned)),
    });
    output.unwrap().checked().unwrap();
    assert_eq!(done, STEPS);
    assert!(server.unwrap().terminate().unwrap().success());
}

/// Number of migrations.
const MIGRATIONS: usize = 4;

/// A guest that writes and verifies migrates between two QEMUs, each with its own ringdisk on the same image; the
/// image's lock moves with it.
fn guest_on_an_image_migrates(version: CephVersion) {
    let test = "guest_on_an_image_migrates";
    if let Some(missing) = vm::missing(true) {
        return println!("skipped: {test} on the {version:?} Ceph: {missing}");
    }
    let Some(mut cluster) = Cluster::get(version, test) else {
        return;
    };
    let here = cluster.image("moves", 64, "queues=1");
    let sockets =
        [cluster.socket("moves"), cluster.socket("elsewhere")].map(|s| s.display().to_string());
    let there = here.replace(&sockets[0], &sockets[1]);
    let control = cluster
        .folder
        .path()
        .join("there.qmp")
        .display()
        .to_string();
    let mut servers = [
        cluster.serve(&[&here]),
        cluster.start(&["--control", &control, &there]),
    ];
    let signal = cluster.folder.path().join("signal.raw");
    std::fs::write(&signal, [0; 4096]).unwrap();
    let disks = |host: usize| {
        let pasted = [
            "-chardev",
            &format!("socket,id=disk,path={},reconnect-ms=100", sockets[host]),
            "-device",
            "vhost-user-blk-pci,chardev=disk,num-queues=1",
        ];
        vec![
            vm::Disk::Printed(pasted.map(String::from).to_vec()),
            vm::Disk::Qemu {
                file: signal.clone(),
                cache: "writeback",
                aio: "threads",
                queues: 1,
                serial: "signal".into(),
            },
        ]
    };
    let logs = logs_of(version, test);
    let guest = Vm::new(logs).cpus(2).memory_mib(384).fio();
    let mut moves = 0;
    let guests = [0, 1].map(|host| disks(host).into_iter().fold(guest.clone(), Vm::disk));
    let output = vm::run_migrating(
        &guests,
        MIGRATIONS,
        "load() {
             fio --name=load --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=16 --rw=randrw --bs=4k \
                 --size=16M --verify=crc32c --verify_backlog=16 --verify_fatal=1 --eta=never --output=/tmp/fio \
                 --randrepeat=0 || { cat /tmp/fio; echo 'fio failed'; exit 1; }
         }
         echo migrate me
         until dd if=/dev/vdb bs=512 count=1 iflag=direct 2>/dev/null | grep -q enough; do load; done
         load
         dmesg | grep -iE 'i/o error|blk_update|reset' && exit 1 || true",
        LIMIT,
        &mut |number, moved| {
            println!("move {number}: {moved:?}");
            moves += 1;
            if moves == MIGRATIONS {
                let mut enough = [0; 4096];
                enough[..6].copy_from_slice(b"enough");
                std::fs::write(&signal, enough)?;
            }
            Ok(())
        },
    );
    output.unwrap().checked().unwrap();
    assert_eq!(moves, MIGRATIONS);
    for server in &mut servers {
        assert!(server.terminate().unwrap().success());
        assert!(
            !server.log().contains("RBD_BLOCKLISTED"),
            "{}",
            server.log()
        );
    }
}

fn logs_of(version: CephVersion, test: &str) -> PathBuf {
    let name = format!("{test}-{version:?}");
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(name)
}
