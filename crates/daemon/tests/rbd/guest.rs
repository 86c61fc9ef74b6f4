//! A real guest on an image: it writes and verifies all the time, while the cluster and ringdisk lose their parts.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use testkit::ceph::POOL;
use testkit::server::Server;
use testkit::vm::{self, Vm};

use crate::cluster::Cluster;

/// With all that happens, a guest is done in half a minute where nothing else runs.
const LIMIT: Duration = Duration::from_secs(400);

/// Each step writes at random and reads it all back; the host does something as it starts.
const STEPS: [&str; 7] = [
    "calm",
    "osd-killed",
    "monitor-restarted",
    "osd-back",
    "snapshot",
    "ringdisk-killed",
    "longer",
];

#[test]
fn a_guest_notices_nothing_but_a_longer_disk() {
    let test = "a_guest_notices_nothing_but_a_longer_disk";
    if let Some(missing) = vm::missing(true) {
        return println!("skipped: {test}: {missing}");
    }
    let Some(mut cluster) = Cluster::get(test) else {
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
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
    let mut guest = Vm::new(logs).cpus(2).fio().disk(vm::Disk::Pasted(pasted));
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
            let killed: Server = server.take().unwrap();
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
