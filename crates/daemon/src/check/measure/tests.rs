use std::collections::BTreeSet;
use std::fs;

use advisor::check::check;
use advisor::input::Surroundings;
use advisor::read::read;
use advisor::rules::Measurement;
use advisor::text::Source;

use super::*;

mod differences;
mod scratch;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../advisor/tests/corpus")
}

/// The configurations of the advisor's tests, each with the facts of a host, if it has some.
fn fixtures() -> Vec<(String, Input, Option<Facts>)> {
    let manifest = fs::read_to_string(corpus().join("expected.toml")).unwrap();
    let manifest: toml::Table = manifest.parse().unwrap();
    let cases = manifest["case"].as_array().unwrap().iter();
    let text = |name: &str| fs::read_to_string(corpus().join(name)).unwrap();
    let of_case = |case: &toml::Value| {
        let file = case.get("file")?.as_str()?;
        let own = text(file);
        let named = advisor::read::files_named(&own).into_iter();
        let surroundings = Surroundings {
            storages: Some(Source::new("storage.cfg", text("proxmox/storage.cfg"))),
            files: named
                .map(|name| Source::new(name.clone(), text(&format!("qemu/{name}"))))
                .collect(),
            ..Surroundings::default()
        };
        let input = read(Source::new(file, own), surroundings).unwrap();
        let facts = case.get("facts").and_then(toml::Value::as_str).map(|name| {
            let (facts, _) = Facts::parse(name, &text(&format!("facts/{name}"))).unwrap();
            facts
        });
        Some((file.to_owned(), input, facts))
    };
    cases.filter_map(of_case).collect()
}

fn with(load: Load) -> Means {
    Means {
        load,
        accel: Accel::Kvm,
        without_kvm: String::new(),
    }
}

/// A checked input, its report, and its plans.
fn planned(
    mut input: Input,
    facts: Option<&Facts>,
    args: &Args,
    load: Load,
) -> (Vec<Input>, Report, Plans) {
    let rules = Rules::built_in().unwrap();
    let mut report = Report::default();
    let checked = check(&mut input, &rules, facts, &[]);
    report.add(&input, checked);
    let inputs = vec![input];
    let context = Context {
        inputs: &inputs,
        rules: &rules,
        facts,
        notes: true,
        ask: false,
    };
    let plans = plans(args, &context, &report.findings, &with(load)).unwrap();
    (inputs, report, plans)
}

/// For every configuration: each finding is measured by one case, or says why not; the lab reads each plan; and no plan
/// touches a disk of the VM.
#[test]
fn plans_of_all_configurations_measure_each_finding_and_touch_no_disk() {
    let rules = Rules::built_in().unwrap();
    let (mut measured, mut measured_rules) = (0, BTreeSet::new());
    let args = Args {
        scratch: None,
        ..Args::default()
    };
    for (name, input, facts) in fixtures() {
        for load in [Load::Guests, Load::Servers] {
            let (inputs, report, plans) = planned(input.clone(), facts.as_ref(), &args, load);
            for (index, finding) in report.findings.iter().enumerate() {
                let cases: usize = plans
                    .targets
                    .iter()
                    .flat_map(Target::comparisons)
                    .filter(|comparison| comparison.findings.contains(&index))
                    .count();
                let reasons: Vec<&NotMeasured> = plans
                    .not_measured
                    .iter()
                    .filter(|one| one.finding == index)
                    .collect();
                assert_eq!(cases + reasons.len(), 1, "{name}: {finding:?}: {reasons:?}");
                assert!(reasons.iter().all(|one| !one.why.is_empty()), "{name}");
                let rule = rules.get(&finding.rule).unwrap();
                if let Measurement::None(why) = &rule.measurement {
                    assert_eq!(reasons[0].why, *why, "{name}: {}", finding.rule);
                }
                if cases > 0 {
                    measured += 1;
                    measured_rules.insert(finding.rule.clone());
                }
            }
            for target in &plans.targets {
                assert_harmless(&name, target, &inputs);
            }
        }
    }
    assert!(measured > 100, "{measured}");
    assert!(measured_rules.len() > 20, "{measured_rules:?}");
}

fn assert_harmless(name: &str, target: &Target, inputs: &[Input]) {
    let text = target.text(Duration::from_secs(1200), Duration::from_secs(3));
    let plan = ::lab::plan::Plan::parse(Path::new("check.toml"), &text)
        .unwrap_or_else(|e| panic!("{name}: {e}\n{text}"));
    let disks = inputs.iter().flat_map(|input| &input.vms);
    let files: Vec<String> = disks
        .flat_map(|vm| &vm.disks)
        .map(|disk| disk.file.clone())
        .filter(|file| !file.is_empty())
        .collect();
    target.refuse_disks(&files).unwrap();
    let directory = plan.directory.as_deref().and_then(Path::to_str);
    let backings = plan.cases.iter().map(|case| case.settings.get("backing"));
    let used: Vec<String> = directory
        .map(str::to_owned)
        .into_iter()
        .chain(backings)
        .collect();
    for used in used {
        assert!(
            used == "file" || used.contains("ringdisk-measure-"),
            "{name}: {used}"
        );
        for file in &files {
            let words = used.split([',', ':']);
            assert!(!words.clone().any(|word| word == file), "{name}: {used}");
            assert!(!Path::new(&used).starts_with(file), "{name}: {used}");
        }
    }
    for file in files.iter().filter(|file| file.len() > 4) {
        assert!(
            !text.contains(&format!("\"{file}\"")),
            "{name}: {file}\n{text}"
        );
    }
}

/// A VM with disks of the given files, in a directory of the test.
fn domain(files: &[(&str, &str)]) -> String {
    let disks = files.iter().enumerate().map(|(number, (format, file))| {
        let letter = char::from(b'a' + number as u8);
        format!(
            "<disk type='file' device='disk'><driver name='qemu' type='{format}' cache='writeback'/>\
             <source file='{file}'/><target dev='vd{letter}' bus='virtio'/></disk>"
        )
    });
    let disks: String = disks.collect();
    format!(
        "<domain type='kvm'><name>vm1</name><memory unit='GiB'>1</memory><vcpu>1</vcpu>\
         <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os><devices>{disks}</devices></domain>"
    )
}

fn plans_of(text: &str, args: &Args) -> Result<(Report, Plans), String> {
    let rules = Rules::built_in().unwrap();
    let mut input = read(Source::new("vm1.xml", text), Surroundings::default()).unwrap();
    let mut report = Report::default();
    let checked = check(&mut input, &rules, None, &[]);
    report.add(&input, checked);
    let context = Context {
        inputs: &[input],
        rules: &rules,
        facts: None,
        notes: false,
        ask: false,
    };
    let plans = plans(args, &context, &report.findings, &with(Load::Guests))?;
    Ok((report, plans))
}

fn with_scratch(place: &str) -> Args {
    Args {
        scratch: Some(place.into()),
        ..Args::default()
    }
}

/// virt-install's defaults: the page cache, and no I/O thread. The latter is measured without the former, and both are also
/// measured together.
#[test]
fn each_finding_is_one_change_and_starts_from_what_its_rule_needs() {
    let (report, plans) = plans_of(&domain(&[("raw", "/vms/a.raw")]), &Args::default()).unwrap();
    let [target] = &plans.targets[..] else {
        panic!("{:?}", plans.targets);
    };
    let compared: Vec<String> = target
        .comparisons()
        .map(|one| {
            let change = one.change.map_or_else(String::new, ToString::to_string);
            let rules = one
                .findings
                .iter()
                .map(|finding| report.findings[*finding].rule.as_str());
            let rules: Vec<&str> = rules.collect();
            format!(
                "{} [{}]: {} > {}: {change}",
                one.name,
                rules.join(","),
                one.from,
                one.to
            )
        })
        .collect();
    assert_eq!(
        compared,
        [
            "cache-host-page [cache-host-page]: now > cache-host-page: cache writeback → none",
            "no-iothread [no-iothread]: cache-host-page > no-iothread: iothread off → on",
            "all together []: now > no-iothread: ",
            "ringdisk []: now > ringdisk: ",
        ]
    );
    let text = target.text(Duration::from_secs(600), Duration::from_secs(3));
    assert!(
        text.contains("directory = \"/vms/ringdisk-measure-vm1-vda\""),
        "{text}"
    );
}

#[test]
fn equal_disks_are_measured_once_and_a_disk_can_be_selected() {
    let equal = domain(&[
        ("raw", "/vms/a.raw"),
        ("raw", "/vms/b.raw"),
        ("qcow2", "/vms/c"),
    ]);
    let (report, plans) = plans_of(&equal, &Args::default()).unwrap();
    let disks: Vec<&[String]> = plans
        .targets
        .iter()
        .map(|target| &target.disks[..])
        .collect();
    assert_eq!(
        disks,
        [
            &["vm1 vda".to_owned(), "vm1 vdb".to_owned()][..],
            &["vm1 vdc".to_owned()]
        ]
    );
    let both = plans.targets[0].comparisons().next().unwrap();
    let measured: Vec<&str> = both
        .findings
        .iter()
        .map(|finding| report.findings[*finding].disk.as_str())
        .collect();
    assert_eq!(measured, ["vda", "vdb"]);

    let select = |disk: &str| Args {
        disk: vec![disk.into()],
        ..Args::default()
    };
    let (_, one) = plans_of(&equal, &select("vdc")).unwrap();
    assert_eq!(one.targets.len(), 1);
    let error = plans_of(&equal, &select("vdx")).err().unwrap();
    assert!(error.contains("vm1 vda, vm1 vdb, vm1 vdc"), "{error}");
}

/// A figure of a local file says nothing about a finding on an image in a cluster.
#[test]
fn storage_of_another_kind_is_refused_for_each_finding() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path().display().to_string();
    for (disk, scratch, words) in [
        (
            "rbd:vms/a",
            directory.as_str(),
            "the VM's disk is an RBD image",
        ),
        ("nbd://host/a", &directory, "storage of the kind 'nbd'"),
        ("/dev/vg0/a", &directory, "the VM's disk is a block device"),
        ("/vms/a.raw", "rbd:vms/b", "the VM's disk is a file"),
        ("/vms/a.raw", "/dev/vg0/b", "is a block device"),
    ] {
        let command = format!(
            "qemu-system-x86_64 -accel kvm -drive file={disk},format=raw,if=virtio,cache=writeback"
        );
        let (report, plans) = plans_of(&command, &with_scratch(scratch)).unwrap();
        assert!(plans.targets.is_empty(), "{disk}: {:?}", plans.targets);
        let refused: Vec<_> = plans
            .not_measured
            .iter()
            .filter(|one| one.why.contains(words))
            .collect();
        assert!(!refused.is_empty(), "{disk}: {:?}", plans.not_measured);
        let has_reason = |index| plans.not_measured.iter().any(|one| one.finding == index);
        for (index, finding) in report.findings.iter().enumerate() {
            let is_asked = finding.severity != Severity::Info;
            assert_eq!(has_reason(index), is_asked, "{disk}: {finding:?}");
        }
    }
}

/// What the lab's disk does not have is refused if the figures would be about another disk, and noted otherwise.
#[test]
fn the_plan_starts_from_what_the_disk_has_or_says_what_it_lacks() {
    let thread = "-object iothread,id=io0,poll-max-ns=0 -smp 4 -cpu qemu64";
    let command = |options: &str, device: &str| {
        format!(
            "qemu-system-x86_64 -accel kvm -M q35 {thread} -drive id=a,if=none,file=/vms/a.raw,format=raw,\
             cache=writeback{options} -device {device},drive=a"
        )
    };
    let virtio = "virtio-blk-pci,iothread=io0,packed=on";
    let limited = command(",copy-on-read=on,throttling.iops-total=500", virtio);
    let args = Args {
        plan: Some("-".into()),
        ..Args::default()
    };
    let (_, plans) = plans_of(&limited, &args).unwrap();
    let text = plans.targets[0].text(Duration::from_secs(600), Duration::from_secs(3));
    for words in [
        "poll-max-us = \"0\"",
        "vcpus = \"4\"",
        "this VM has qemu64",
        "without the limits of the VM's disk (iops=500)",
        "this one has packed ones",
        "does not copy what is read",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let unusual = command(
        ",offset=512,detect-zeroes=unmap",
        "virtio-blk-pci,ioeventfd=off,event_idx=off,iommu_platform=on,logical_block_size=4096",
    );
    let (_, plans) = plans_of(&unusual, &args).unwrap();
    let text = plans.targets[0].text(Duration::from_secs(600), Duration::from_secs(3));
    for words in [
        "ioeventfd=off",
        "event_idx=off",
        "iommu_platform=on",
        "logical_block_size=4096",
        "detect-zeroes=unmap",
        "offset=512",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let mapped = "qemu-system-x86_64 -accel kvm -M q35 -smp 4 -object iothread,id=io0,aio-max-batch=8 -object iothread,id=io1 \
        -blockdev driver=file,node-name=f,filename=/vms/a.raw -blockdev driver=raw,node-name=r,file=f \
        -device '{\"driver\":\"virtio-blk-pci\",\"drive\":\"r\",\"iothread-vq-mapping\":[{\"iothread\":\"io0\",\"vqs\":[VQS0]},\
        {\"iothread\":\"io1\",\"vqs\":[VQS1]}]}'";
    for (first, second, is_noted) in [("0,1", "2,3", true), ("0,2", "1,3", false)] {
        let mapped = mapped.replace("VQS0", first).replace("VQS1", second);
        let (_, plans) = plans_of(&mapped, &args).unwrap();
        let text = plans.targets[0].text(Duration::from_secs(600), Duration::from_secs(3));
        assert!(text.contains("aio-max-batch=8 of io0"), "{text}");
        assert_eq!(
            text.contains("its own assignment of queues"),
            is_noted,
            "{text}"
        );
    }
    for (options, device, words) in [
        (",encrypt.key-secret=k", virtio, "QEMU encrypts it"),
        ("", "ide-hd", "no disks of the kind 'sata'"),
    ] {
        let (_, plans) = plans_of(&command(options, device), &args).unwrap();
        let is_said = |one: &NotMeasured| one.why.contains(words);
        assert!(
            plans.targets.is_empty() && plans.not_measured.iter().any(is_said),
            "{words}"
        );
    }
    let luks =
        domain(&[("raw", "/vms/a.raw")]).replace("<target", "<encryption format='luks'/><target");
    let (_, plans) = plans_of(&luks, &args).unwrap();
    assert!(plans.targets.is_empty(), "{:?}", plans.targets);
}

/// Without the monitors that the VM names, the lab might measure another cluster.
#[test]
fn the_plan_has_the_monitors_and_options_of_librbd() {
    let args = Args {
        plan: Some("-".into()),
        ..Args::default()
    };
    let command = |drive: &str| {
        format!(
            "qemu-system-x86_64 -accel kvm -M q35 -smp 4 {drive} -device virtio-blk-pci,drive=a"
        )
    };
    let by_name = command(
        "-drive 'id=a,if=none,format=raw,cache=writeback,\
         file=rbd:bench/vm1:id=vm:key=c2VjcmV0:mon_host=10.9.9.9\\:6789:ms_client_mode=secure'",
    );
    let by_node = command(
        "-blockdev '{\"driver\":\"rbd\",\"node-name\":\"a\",\"pool\":\"bench\",\"image\":\"vm1\",\"user\":\"vm\",\"key-secret\":\"s\",\
         \"server\":[{\"host\":\"10.0.0.1\",\"port\":\"6789\"},{\"host\":\"fd00::2\",\"port\":\"6789\"}]}'",
    );
    let by_libvirt = domain(&[("raw", "")])
        .replace("type='file'", "type='network'")
        .replace(
            "<source file=''/>",
            "<source protocol='rbd' name='bench/vm1'><host name='10.0.0.1' port='3300'/><host name='m2'/>\
             <auth username='vm'><secret type='ceph' uuid='x'/></auth></source>",
        );
    for (text, options) in [
        (by_name, "mon_host=10.9.9.9:6789 ms_client_mode=secure"),
        (by_node, "mon_host=10.0.0.1:6789,[fd00::2]:6789"),
        (by_libvirt, "mon_host=10.0.0.1:3300,m2"),
    ] {
        let (_, plans) = plans_of(&text, &args).unwrap();
        let plan = plans.targets[0].text(Duration::from_secs(600), Duration::from_secs(3));
        assert!(
            plan.contains(&format!("ceph-options = \"{options}\"")),
            "{plan}"
        );
        assert!(
            plan.contains("the key of client.vm") && !plan.contains("c2VjcmV0"),
            "{plan}"
        );
    }
}

/// A rule names libraries, and a plan their files.
#[test]
fn libraries_are_those_of_the_recipe() {
    let command =
        "qemu-system-x86_64 -accel kvm -drive file=rbd:vms/a,format=raw,if=virtio,cache=none";
    let facts = r#"{ "format": "ringdisk-facts-1", "name": "h", "host": { "librbd": "15.2.1" } }"#;
    let (facts, _) = Facts::parse("facts.json", facts).unwrap();
    let input = read(Source::new("vm1.sh", command), Surroundings::default()).unwrap();
    let (_, report, plans) = planned(input, Some(&facts), &Args::default(), Load::Guests);
    let text = plans.targets[0].text(Duration::from_secs(600), Duration::from_secs(3));
    let of_rule = |rule: &str| {
        let found = plans.targets[0].comparisons().find(|one| {
            let mut rules = one
                .findings
                .iter()
                .map(|at| report.findings[*at].rule.as_str());
            rules.any(|name| name == rule)
        });
        let found = found.unwrap_or_else(|| panic!("{rule}: {:?}", plans.not_measured));
        (found.from.to_owned(), found.change.unwrap().to_string())
    };
    let tcmalloc = "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4";
    assert_eq!(
        of_rule("rbd-malloc"),
        ("now".into(), format!("preload default → {tcmalloc}"))
    );
    let (from, change) = of_rule("rbd-old-librbd");
    assert_eq!(
        change,
        format!("preload {tcmalloc} → {tcmalloc}:/usr/local/lib/librbd.so.1")
    );
    assert_eq!(from, "rbd-malloc");
    assert!(
        text.contains(&format!("preload = \"{tcmalloc}\"")),
        "{text}"
    );
}

/// libvirt's and Proxmox' names may be long, and those of two disks differ only at the end.
#[test]
fn disks_of_vms_with_long_names_have_names_of_their_own() {
    let long = "n".repeat(80);
    let mut named = Vec::new();
    for (file, wanted) in [("/vms/a", "vda"), ("/vms/b", "vdb")] {
        let text = domain(&[("raw", "/vms/a"), ("qcow2", file)]).replace("vm1", &long);
        let args = Args {
            disk: vec![wanted.into()],
            ..Args::default()
        };
        let (_, plans) = plans_of(&text, &args).unwrap();
        let target = plans
            .targets
            .first()
            .unwrap_or_else(|| panic!("{:?}", plans.not_measured));
        target.parse().unwrap();
        assert!(target.name().ends_with(wanted), "{}", target.name());
        named.push(target.name());
    }
    // It begins and ends like the first.
    let middle = format!("{0}2{0}", &long[..40]);
    let other = domain(&[("raw", "/vms/a")]).replace("vm1", &middle);
    let (_, plans) = plans_of(&other, &Args::default()).unwrap();
    named.push(plans.targets[0].name());
    named.sort();
    named.dedup();
    assert_eq!(named.len(), 3, "{named:?}");
}

/// A disk may have two plans: one starts with a full disk, and one with an empty disk.
#[test]
fn the_plans_of_a_selected_disk_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut twice = 0;
    for (name, input, facts) in fixtures() {
        let of = |args: &Args| planned(input.clone(), facts.as_ref(), args, Load::Guests);
        let (.., all) = of(&Args::default());
        for label in all.targets.iter().flat_map(|target| &target.disks) {
            let args = Args {
                disk: vec![label.clone()],
                ..Args::default()
            };
            let (_, report, plans) = of(&args);
            let file = folder.path().join("plan.toml");
            write_plan(&file, &plans, &report, Duration::from_secs(1200))
                .unwrap_or_else(|e| panic!("{name}, {label}: {e}"));
            let mut files = vec![file];
            if plans.targets.len() > 1 {
                twice += 1;
                files.push(folder.path().join("plan-thin.toml"));
            }
            assert_eq!(files.len(), plans.targets.len(), "{name}, {label}");
            for file in files {
                let text = fs::read_to_string(&file).unwrap();
                ::lab::plan::Plan::parse(&file, &text).unwrap_or_else(|e| panic!("{name}: {e}"));
                fs::remove_file(file).unwrap();
            }
        }
    }
    assert!(twice > 0, "no disk has two plans");
}

#[test]
fn the_reason_against_ringdisk_is_that_of_the_disk() {
    let text = domain(&[("raw", "/vms/a"), ("qcow2", "/vms/b"), ("raw", "/vms/c")])
        .replacen(
            "cache='writeback'/>",
            "cache='writeback' copy_on_read='on'/>",
            1,
        )
        .replacen(
            "<source file='/vms/b'/>",
            "<source file='/vms/b'/><transient/>",
            1,
        );
    let (_, plans) = plans_of(&text, &Args::default()).unwrap();
    for (disk, says) in [
        ("vm1 vda", Some("copy_on_read")),
        ("vm1 vdb", Some("transient")),
        ("vm1 vdc", None),
    ] {
        let mut targets = plans.targets.iter();
        let target = targets
            .find(|target| target.disks.iter().any(|name| name == disk))
            .unwrap_or_else(|| panic!("{disk}: {:?}", plans.not_measured));
        let reasons = &target.left_out;
        assert_eq!(reasons.len(), usize::from(says.is_some()), "{reasons:?}");
        for (why, says) in reasons.iter().zip(says) {
            assert!(
                why.starts_with("with ringdisk: ") && why.contains(says),
                "{why}"
            );
            assert!(!why.contains("vda") && !why.contains("vdb"), "{why}");
        }
    }
}

#[test]
fn an_interrupted_measurement_says_so() {
    let (report, plans) = plans_of(&domain(&[("raw", "/vms/a")]), &Args::default()).unwrap();
    let target = &plans.targets[0];
    let header = ::lab::journal::Header {
        version: 1,
        file: "check.toml".into(),
        plan: target.text(Duration::from_secs(1200), Duration::from_secs(3)),
        jobs: BTreeMap::new(),
        seed: 1,
        started_ms: 0,
        facts: BTreeMap::new(),
        only: Vec::new(),
        left_out: BTreeMap::new(),
    };
    let line = serde_json::to_string(&::lab::journal::Record::Plan(header)).unwrap();
    let journal = ::lab::journal::Journal::parse(&(line + "\n")).unwrap();
    for is_complete in [false, true] {
        let mut outcome = Outcome::new(Vec::new(), Accel::Kvm, Load::Guests);
        let analysis = Analysis::of(&journal);
        let folder = Path::new("lab-check");
        outcome.add(
            target.clone(),
            folder,
            &analysis,
            Duration::ZERO,
            is_complete,
        );
        let says = |text: &str| text.contains("interrupted; the report is of what was measured");
        let text = outcome.text(&report.findings);
        assert_eq!(says(&text), !is_complete, "{text}");
        assert_eq!(text.contains(": interrupted\n"), !is_complete, "{text}");
        assert_eq!(text.contains("longer --budget"), is_complete, "{text}");
        let failure = outcome.failure();
        assert_eq!(failure.is_some_and(|why| says(&why)), !is_complete);
        let json = outcome.json(&report.findings);
        assert_eq!(json["disks"][0]["complete"], is_complete);
    }
}
