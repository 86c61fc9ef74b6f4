//! What follows from a result: programs accept the patches in its report, and `ringdisk check` uses what was measured
//! on this host.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::{PlanFolder, are_installed, output_text, succeed};
use lab::journal::{BootRecord, Cell, Header, Record, Sample, Writer};
use lab::plan::Plan;
use testkit::server::Server;

/// A result of this plan on this host, as if KVM worked here: each case is half as good again as the previous one.
fn measured(bench: &PlanFolder, plan: &str) {
    let parsed = Plan::parse(Path::new("plan.toml"), plan).unwrap();
    let mut facts = lab::host::facts(bench.folder.path());
    facts.insert("accelerator".into(), "kvm".into());
    let header = Header {
        version: 1,
        file: "plan.toml".into(),
        plan: plan.into(),
        jobs: BTreeMap::new(),
        seed: 1,
        started_ms: 1,
        facts,
        only: Vec::new(),
        left_out: BTreeMap::new(),
    };
    let folder = bench.path("result");
    let mut journal = Writer::create(&folder, header).unwrap();
    for block in 0..8 {
        for (arm, case) in parsed.cases.iter().chain(&parsed.cases[..1]).enumerate() {
            let twin = arm == parsed.cases.len();
            let boot = BootRecord {
                block,
                case: case.name.clone(),
                twin,
                effective: BTreeMap::new(),
                boot_s: 1.0,
            };
            journal.write(&Record::Boot(boot)).unwrap();
            for load in &parsed.workloads {
                let better = if twin { 1.0 } else { 1.5_f64.powi(arm as i32) };
                let noise = 1.0 + 0.002 * f64::from((block * 7 + arm as u32 * 3) % 5);
                let iops = 10_000.0 * better * noise;
                let mut sample = Sample {
                    iops,
                    mean_ns: 1e9 / iops,
                    window_s: 10.0,
                    cpu_us: Some(10.0),
                    ..Sample::default()
                };
                sample.latencies.add((1e9 / iops) as u64, 1000);
                let cell = Cell {
                    block,
                    case: case.name.clone(),
                    twin,
                    workload: load.name.clone(),
                    sample: Some(sample),
                    ..Cell::default()
                };
                journal.write(&Record::Cell(cell)).unwrap();
            }
        }
    }
}

/// `ringdisk lab report`, and the patch in it.
fn patch(bench: &PlanFolder, whom: &str) -> String {
    succeed(bench.lab("report").arg(bench.path("result")));
    let text = fs::read_to_string(bench.path("result/result.json")).unwrap();
    let result: Value = serde_json::from_str(&text).unwrap();
    let advice = &result["recommendation"];
    let sentence = advice["sentence"].as_str().unwrap();
    assert!(sentence.contains("brings +50 %"), "{sentence}");
    advice["patches"][whom].as_str().unwrap().to_owned()
}

const CASES: [&str; 7] = [
    "iothread = 'on'\naio = 'native'\nqueue-size = 256",
    "iothread = 2\nqueues = 2\naio = 'io_uring'",
    "cache = 'writeback'\nvcpus = 2\nhugepages = true",
    "device = 'virtio-scsi'\niothread = 'on'\nqueues = 2",
    "device = 'virtio-scsi'\niothread = 2\nqueues = 2",
    "format = 'qcow2'\ncache = 'unsafe'",
    "device = 'vhost-user-blk'\nqueues = 2",
];

fn bench(case: &str) -> PlanFolder {
    let bench = PlanFolder::new("");
    let plan = format!(
        "[[case]]\nname = 'before'\ncache = 'writethrough'\n[[case]]\nname = 'after'\n{case}\n[fio]\nrw = 'randread'\n"
    );
    measured(&bench, &plan);
    bench
}

#[test]
fn qemu_accepts_the_patch() {
    if !are_installed(
        "qemu_accepts_the_patch",
        &["qemu-system-x86_64", "qemu-img"],
    ) {
        return;
    }
    for case in CASES {
        let bench = bench(case);
        let patch = patch(&bench, "QEMU");
        let image = bench.path("disk.img");
        let format = if case.contains("qcow2") {
            "qcow2"
        } else {
            "raw"
        };
        let mut make = Command::new("qemu-img");
        make.args(["create", "-q", "-f", format])
            .arg(&image)
            .arg("16M");
        assert!(make.status().unwrap().success());
        let socket = bench.path("vm.sock");
        if case.contains("vcpus") {
            assert!(
                patch.starts_with("# and in the VM: hugepages=on, vcpus=2\n"),
                "{patch}"
            );
        }
        let patch: Vec<&str> = patch.lines().filter(|l| !l.starts_with('#')).collect();
        let patch = patch
            .join("\n")
            .replace("/PATH/OF/DISK", &image.display().to_string())
            .replace("/run/ringdisk/vm.sock", &socket.display().to_string())
            .replace("MEMORY", "64M");
        // The command that serves the disk comes first, then QEMU's arguments.
        let (serve, arguments) = match patch.split_once("\n\n") {
            Some((serve, arguments)) => (Some(serve), arguments),
            None => (None, patch.as_str()),
        };
        let _server = serve.map(|serve| {
            let words: Vec<&str> = serve.split_whitespace().collect();
            assert_eq!(words[..2], ["ringdisk", "serve"], "{serve}");
            Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &words[2..]).unwrap()
        });
        let machine = if arguments.contains("-machine") {
            ""
        } else {
            "-machine q35"
        };
        let script = format!(
            "echo '{{\"execute\":\"qmp_capabilities\"}}{{\"execute\":\"quit\"}}' | \
             exec qemu-system-x86_64 -nodefaults -display none -S -m 64 {machine} -qmp stdio \\\n{arguments}\n"
        );
        let output = Command::new("sh").args(["-ec", &script]).output().unwrap();
        assert!(
            output.status.success(),
            "{case}\n{script}\n{}",
            output_text(&output)
        );
    }
}

/// libvirt's schema and `ringdisk check` accept the patched domain.
#[test]
fn libvirt_accepts_the_patch() {
    let validate = are_installed("libvirt_accepts_the_patch", &["virt-xml-validate"]);
    for case in CASES {
        let bench = bench(case);
        let patch = patch(&bench, "libvirt");
        let (outside, disk) = patch.split_at(patch.find("<disk").unwrap());
        let (outside, controller) = match outside.find("<controller") {
            Some(at) => outside.split_at(at),
            None => (outside, ""),
        };
        let domain = format!(
            "<domain type='kvm'>\n<name>vm</name>\n<memory unit='MiB'>512</memory>\n<vcpu>4</vcpu>\n{outside}\n\
             <os><type arch='x86_64' machine='q35'>hvm</type></os>\n<devices>\n{controller}\n{disk}\n</devices>\n</domain>\n"
        );
        let file = bench.path("vm.xml");
        fs::write(&file, &domain).unwrap();
        // libvirt has mappings since 10.0; Debian 12 has an older version.
        if validate && !patch.contains("<iothread id=") {
            let output = Command::new("virt-xml-validate")
                .arg(&file)
                .arg("domain")
                .stdin(Stdio::null())
                .output()
                .unwrap();
            assert!(
                output.status.success(),
                "{domain}\n{}",
                output_text(&output)
            );
        }
        let output = check(&bench, &[file.to_str().unwrap()]);
        assert!(
            matches!(output.status.code(), Some(0 | 1)),
            "{domain}\n{}",
            output_text(&output)
        );
    }
}

fn check(bench: &PlanFolder, arguments: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_ringdisk"))
        .arg("check")
        .args(arguments)
        .env("XDG_STATE_HOME", bench.path("state"))
        .output()
        .unwrap()
}

const STOCK: &str = "<domain type='kvm'><name>vm</name><memory unit='MiB'>512</memory>\n\
    <os><type arch='x86_64' machine='q35'>hvm</type></os>\n<devices>\n<disk type='file' device='disk'>\n\
    <driver name='qemu' type='raw' cache='none' io='native'/>\n<source file='/vm.raw'/>\n\
    <target dev='vda' bus='virtio'/>\n</disk>\n</devices></domain>\n";

#[test]
fn check_uses_results_measured_on_this_host() {
    let bench = PlanFolder::new("");
    let file = bench.path("vm.xml");
    fs::write(&file, STOCK).unwrap();
    let file = file.to_str().unwrap();
    let expected = output_text(&check(&bench, &[file]));
    assert!(
        expected.contains("no-iothread") && expected.contains("expected"),
        "{expected}"
    );
    assert!(!expected.contains("measured here"), "{expected}");

    measured(
        &bench,
        "[config]\niothread = ['off', 'on']\n[fio]\nrw = 'randread'\n",
    );
    // From the result's folder, beside other files.
    let report = bench
        .lab("report")
        .arg(bench.path("result"))
        .output()
        .unwrap();
    let told = output_text(&report);
    assert!(
        report.status.success() && told.contains("'ringdisk check' uses"),
        "{told}"
    );
    let result = bench.path("result");
    let named = check(&bench, &["--measured", result.to_str().unwrap(), file]);
    assert_eq!(named.status.code(), Some(1), "{}", output_text(&named));
    assert!(
        output_text(&named).contains("measured here +50 %"),
        "{}",
        output_text(&named)
    );

    // The results are found without an option.
    let found = output_text(&check(&bench, &[file]));
    assert!(found.contains("measured here +50 %"), "{found}");

    // Results of another host and invalid files are ignored.
    let folder = bench.path("state/ringdisk/measured");
    let kept = fs::read_dir(&folder)
        .unwrap()
        .flatten()
        .next()
        .unwrap()
        .path();
    let text = fs::read_to_string(&kept).unwrap();
    let other = lab::host::facts(Path::new("/"))["fingerprint"].clone();
    fs::write(&kept, text.replace(&other, "elsewhere / Another CPU")).unwrap();
    fs::write(folder.join("nonsense.json"), "nonsense").unwrap();
    let output = check(&bench, &[file]);
    assert_eq!(output.status.code(), Some(1), "{}", output_text(&output));
    assert!(
        !output_text(&output).contains("measured here"),
        "{}",
        output_text(&output)
    );
}

/// Results of emulated guests say nothing about this host.
#[test]
fn results_without_kvm_are_ignored() {
    let bench = PlanFolder::new("");
    measured(
        &bench,
        "[config]\niothread = ['off', 'on']\n[fio]\nrw = 'randread'\n",
    );
    let journal = bench.path("result/journal.jsonl");
    let text = fs::read_to_string(&journal).unwrap();
    fs::write(&journal, text.replace("\"kvm\"", "\"tcg\"")).unwrap();
    let told = succeed(bench.lab("report").arg(bench.path("result")));
    assert!(!told.contains("'ringdisk check' uses"), "{told}");
    assert!(!bench.path("state").exists());
}
