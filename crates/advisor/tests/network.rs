//! Facts about storage on a network and about running VMs, collected on hosts that are directories, and what the rules say
//! without these facts.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use advisor::check::check_host;
use advisor::facts::Facts;
use advisor::facts::collect::Host;
use advisor::model::Table;
use advisor::rules::Rules;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A host below a temporary directory.
struct Built(TempDir);

impl Built {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, path: &str, text: &str) -> &Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    fn link(&self, path: &str, target: &str) -> &Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let target = self.0.path().join(target);
        fs::create_dir_all(&target).unwrap();
        symlink(target, path).unwrap();
        self
    }

    fn facts(&self) -> Facts {
        let root = self.0.path().to_owned();
        Host { root }.facts()
    }
}

/// A network card with two ports of 100 Gb/s, of which the second is a port of the guests' bridge.
fn card(host: &Built) {
    for (port, name) in ["ens1f0", "ens1f1"].into_iter().enumerate() {
        let device = format!("sys/devices/pci0000:40/0000:41:00.{port}");
        host.file(&format!("{device}/current_link_speed"), "8.0 GT/s PCIe\n")
            .file(&format!("{device}/current_link_width"), "16\n")
            .file(&format!("sys/class/net/{name}/speed"), "100000\n")
            .link(&format!("sys/class/net/{name}/device"), &device);
    }
    host.file("sys/class/net/vmbr0/speed", "100000\n")
        .link("sys/class/net/vmbr0/brif/ens1f1", "sys/devices/brport1")
        .link("sys/class/net/vmbr0/brif/tap100i0", "sys/devices/brport2")
        .link("sys/class/net/vmbr0/lower_ens1f1", "sys/class/net/ens1f1")
        .link("sys/class/net/ens1f1/brport/bridge", "sys/class/net/vmbr0");
    // The default route, and 10.1.0.0/16 and 10.2.0.0/16.
    host.file(
        "proc/net/route",
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
         vmbr0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
         ens1f0\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n\
         vmbr0\t0000020A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n",
    );
}

fn device(facts: &Facts, name: &str) -> Value {
    let mut map = facts.devices[name].clone();
    for other in ["virtio", "nvme", "rbd", "size"] {
        map.remove(other);
    }
    json!(map)
}

#[test]
fn nvme_namespaces_have_the_facts_of_their_connections() {
    let host = Built::new();
    card(&host);
    let subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0";
    host.file(&format!("{subsystem}/iopolicy"), "numa\n")
        .file(&format!("{subsystem}/nvme0n1/queue/stable_writes"), "1\n")
        .file(&format!("{subsystem}/nvme0n1/size"), "4096\n")
        .link("sys/block/nvme0n1", &format!("{subsystem}/nvme0n1"));
    for (controller, queues) in [("nvme0", 33), ("nvme1", 17)] {
        let directory = format!("sys/devices/virtual/nvme-fabrics/ctl/{controller}");
        host.file(&format!("{directory}/transport"), "tcp\n")
            .file(&format!("{directory}/queue_count"), &format!("{queues}\n"))
            .file(&format!("{directory}/sqsize"), "127\n")
            .file(
                &format!("{directory}/address"),
                "traddr=10.1.3.4,trsvcid=4420,src_addr=10.1.0.1\n",
            )
            .link(&format!("{subsystem}/{controller}"), &directory);
    }
    // A path, which the kernel hides, and a local disk.
    host.file("sys/devices/path/hidden", "1\n")
        .link("sys/block/nvme0c0n1", "sys/devices/path");
    let local = "sys/devices/pci0000:00/0000:01:00.0/nvme/nvme2";
    host.file(&format!("{local}/transport"), "pcie\n")
        .file(&format!("{local}/nvme2n1/queue/stable_writes"), "0\n")
        .link("sys/block/nvme2n1", &format!("{local}/nvme2n1"));
    let facts = host.facts();
    assert_eq!(
        facts.devices.keys().collect::<Vec<_>>(),
        ["nvme0n1", "nvme2n1"]
    );
    assert_eq!(
        device(&facts, "nvme0n1"),
        json!({
            "transport": "tcp", "paths": 2, "path-policy": "numa", "io-queues": 16, "queue-size": 128,
            "data-digest": true, "nic": "ens1f0", "nic-mbps": 100_000, "nic-shared": false,
            // 16 lanes of the third generation; the kernel, which rounds each lane, prints 126.016 Gb/s.
            "nic-pcie-mbps": 126_031, "nic-ports-mbps": 200_000,
        })
    );
    assert_eq!(
        device(&facts, "nvme2n1"),
        json!({ "transport": "pcie", "paths": 1 })
    );
}

#[test]
fn iscsi_disks_have_the_facts_of_their_session() {
    let host = Built::new();
    card(&host);
    for (name, session, address) in [("sda", 1, "10.1.0.9"), ("sdb", 2, "10.2.0.9")] {
        let disk = format!(
            "sys/devices/platform/host{session}/session{session}/target/0:0:0:1/block/{name}"
        );
        let connection = format!("sys/class/iscsi_connection/connection{session}:0");
        host.file(&format!("{disk}/size"), "4096\n")
            .file(&format!("{disk}/device/queue_depth"), "32\n")
            .file(&format!("{connection}/header_digest"), "0\n")
            .file(
                &format!("{connection}/data_digest"),
                &format!("{}\n", session - 1),
            )
            .file(&format!("{connection}/address"), &format!("{address}\n"))
            .link(&format!("sys/block/{name}"), &disk);
    }
    let map = "sys/devices/virtual/block/dm-0";
    host.file(&format!("{map}/dm/uuid"), "mpath-3600\n")
        .file(&format!("{map}/dm/name"), "mpatha\n")
        .link(&format!("{map}/slaves/sda"), "sys/devices/a")
        .link("sys/block/dm-0", map)
        .link("sys/block/sda/holders/dm-0", map);
    host.file("sys/block/sdc/device/queue_depth", "64\n");
    let facts = host.facts();
    assert_eq!(
        device(&facts, "dm-0"),
        json!({ "transport": "stacked", "paths": 1 })
    );
    assert_eq!(
        device(&facts, "sdc"),
        json!({ "transport": "local", "paths": 1, "scsi-queue-depth": 64 })
    );
    assert_eq!(
        device(&facts, "sda"),
        json!({
            "transport": "iscsi", "paths": 1, "multipath": true, "scsi-queue-depth": 32, "header-digest": false, "data-digest": false,
            "nic": "ens1f0", "nic-mbps": 100_000, "nic-shared": false, "nic-pcie-mbps": 126_031, "nic-ports-mbps": 200_000,
        })
    );
    // A disk that is no multipath map is not asked for its path groups.
    let rules = Rules::built_in().unwrap();
    let mut local = facts.clone();
    local.devices.retain(|name, _| name == "sdc");
    let unknown = check_host(&local, Table::default(), &rules, &[]).unknown;
    assert!(
        !unknown.contains_key("device.paths-together"),
        "{unknown:?}"
    );
    let second = device(&facts, "sdb");
    assert_eq!(
        (&second["multipath"], &second["data-digest"]),
        (&json!(false), &json!(true))
    );
    assert_eq!(
        (&second["nic"], &second["nic-shared"]),
        (&json!("ens1f1"), &json!(true))
    );
}

#[test]
fn vcpus_of_running_vms_are_counted() {
    let host = Built::new();
    host.file("proc/cpuinfo", "processor : 0\nprocessor : 1\n")
        .file(
            "proc/pressure/cpu",
            "some avg10=9.00 avg60=9.00 avg300=12.60 total=5\n",
        )
        .file(
            "proc/12/cmdline",
            "/usr/bin/qemu-system-x86_64\0-smp\0cores=2,sockets=2\0-m\x001024\0",
        )
        .file(
            "proc/13/cmdline",
            "/usr/bin/kvm\0-id\x00100\0-smp\x003,maxcpus=8\0",
        )
        .file("proc/14/cmdline", "/bin/sh\0-c\0sleep 9\0")
        .file("proc/15/cmdline", "")
        .file(
            "proc/self/cmdline",
            "/usr/bin/qemu-system-x86_64\0-smp\x0064\0",
        );
    let host = host.facts().host;
    assert_eq!(host["running-vcpus"], 7);
    assert_eq!(host["vcpus-percent"], 350);
    assert_eq!(host["cpu-pressure-percent"], 13);
}

/// Files that are not what they should be leave facts out, and nothing panics.
#[test]
fn broken_files_leave_facts_out() {
    for text in [
        "",
        "-1",
        "\u{0}",
        "99999999999999999999999999",
        "a,b=,traddr=,host_iface=../..",
        "mpath-",
    ] {
        let host = Built::new();
        for path in [
            "proc/net/route",
            "proc/net/ipv6_route",
            "proc/pressure/cpu",
            "proc/7/cmdline",
            "etc/ceph/ceph.conf",
            "sys/block/dm-0/dm/uuid",
            "sys/block/dm-0/dm/name",
            "sys/block/sda/device/queue_depth",
            "sys/block/nvme0n1/transport",
            "sys/block/nvme0n1/iopolicy",
            "sys/block/iopolicy",
            "sys/block/transport",
            "sys/class/net/eth0/speed",
            "sys/devices/session1/block/sdb/device/queue_depth",
            "sys/class/iscsi_connection/connection1:0/header_digest",
            "sys/class/iscsi_connection/connection1:0/address",
        ] {
            host.file(path, text);
        }
        host.link("sys/block/sdb", "sys/devices/session1/block/sdb");
        let facts = host.facts();
        let written = serde_json::to_string(&facts).unwrap();
        let (_, notes) = Facts::parse("facts", &written).unwrap();
        assert_eq!(notes, Vec::<String>::new(), "{text:?}");
        assert!(!facts.devices["sdb"].contains_key("nic"), "{text:?}");
    }
}

/// Rules whose facts are missing are reported as unknown; they do not apply.
#[test]
fn missing_facts_are_unknown() {
    let rules = Rules::built_in().unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/facts/san-host.json");
    let full: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    for (device, fact, rule) in [
        ("nvme0n1", "path-policy", "nvme-path-policy"),
        ("nvme0n1", "queue-size", "nvme-queue-size"),
        ("nvme0n1", "nic-pcie-mbps", "device-nic-pcie"),
        ("dm-0", "paths-together", "multipath-one-path"),
        ("sdb", "nic-mbps", "device-nic-slow"),
        ("", "cpu-pressure-percent", "cpu-short"),
        ("", "vcpus-percent", "cpu-overcommitted-much"),
    ] {
        let mut less = full.clone();
        let map = match device {
            "" => &mut less["host"],
            device => &mut less["devices"][device],
        };
        map.as_object_mut().unwrap().remove(fact).unwrap();
        let (facts, _) = Facts::parse("facts", &less.to_string()).unwrap();
        let checked = check_host(&facts, Table::default(), &rules, &[]);
        let applies = checked
            .findings
            .iter()
            .any(|finding| finding.rule == rule && finding.disk == device);
        assert!(!applies, "{rule}");
        let prefix = if device.is_empty() { "host" } else { "device" };
        let unknown = checked.unknown.get(format!("{prefix}.{fact}").as_str());
        assert!(
            unknown.is_some_and(|rules| rules.contains(rule)),
            "{rule}: {:?}",
            checked.unknown
        );
    }
}
