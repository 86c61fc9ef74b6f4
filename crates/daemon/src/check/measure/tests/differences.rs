//! How the lab's guest and disk differ from the VM's, and from those after a fix.

use super::*;

/// The plans of a configuration.
fn plans_for(file: &str, text: &str, means: &Means) -> Plans {
    let rules = Rules::built_in().unwrap();
    let storages = fs::read_to_string(corpus().join("proxmox/storage.cfg")).unwrap();
    let surroundings = Surroundings {
        storages: Some(Source::new("storage.cfg", storages)),
        ..Surroundings::default()
    };
    let mut input = read(Source::new(file, text), surroundings).unwrap();
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
    plans(&Args::default(), &context, &report.findings, means).unwrap()
}

fn notes(plans: &Plans) -> String {
    let notes = plans.targets.iter().flat_map(Target::notes);
    notes.cloned().collect::<Vec<_>>().join("\n")
}

/// Proxmox has a bus of its own choice for a disk that leaves IDE.
#[test]
fn plan_measures_the_value_that_the_fix_chooses() {
    let proxmox = "cores: 1\nmemory: 1024\nostype: l26\nbootdisk: ide0\nide0: nas:1/vm-1-disk-0.raw,size=8G\n";
    let domain = domain(&[("raw", "/vms/a.raw")]);
    let domain = domain
        .replace("vda", "hda")
        .replace("bus='virtio'", "bus='ide'")
        .replace("pc-q35-7.2", "pc-i440fx-7.2");
    for (file, text, device) in [
        ("1.conf", proxmox, "virtio-scsi"),
        ("a.xml", domain.as_str(), "virtio-blk"),
    ] {
        let plans = plans_for(file, text, &with(Load::Guests));
        let mut all = plans.targets.iter().flat_map(Target::comparisons);
        let moved = all.find(|one| one.name == "emulated-bus");
        let change = moved.and_then(|one| one.change).map(ToString::to_string);
        assert_eq!(change, Some(format!("device ide → {device}")), "{file}");
    }
}

#[test]
fn accelerator_of_the_guest_is_compared_with_that_of_the_vm() {
    let kvm = domain(&[("raw", "/vms/a.raw")]);
    let tcg = kvm.replace("type='kvm'", "type='qemu'");
    let under = |accel, text: &str| {
        let means = Means {
            accel,
            ..with(Load::Guests)
        };
        notes(&plans_for("a.xml", text, &means))
    };
    for (accel, text, note) in [
        (Accel::Kvm, &kvm, ""),
        (Accel::Tcg, &tcg, ""),
        (
            Accel::Kvm,
            &tcg,
            "the lab's guest runs under KVM; this VM under emulation (TCG)",
        ),
        (
            Accel::Tcg,
            &kvm,
            "the lab's guest runs under emulation (TCG); this VM under KVM",
        ),
    ] {
        let found = under(accel, text);
        assert_eq!(
            found.contains("the lab's guest runs under"),
            !note.is_empty(),
            "{found}"
        );
        assert!(found.contains(note), "{found}");
    }
}

#[test]
fn time_of_the_first_block_is_told() {
    let text = domain(&[("raw", "/vms/a.raw")]);
    let plans = plans_for("a.xml", &text, &with(Load::Guests));
    let boot = Duration::from_secs(3);
    let summary = |seconds| plans.targets[0].summary(Duration::from_secs(seconds), boot);
    assert!(
        summary(1200).ends_with("for at most 20 min"),
        "{}",
        summary(1200)
    );
    let short = summary(4);
    assert!(
        short.contains("its first block runs in any case"),
        "{short}"
    );
    // Each of its configurations starts, and runs each load for at least 1.2 s.
    let starts = plans.targets[0].cases.len() as u64 + 2;
    let block = plans.targets[0].block(Duration::from_secs(4), boot);
    assert!(block >= Duration::from_secs(starts * 4), "{block:?}");
}

#[test]
fn pinning_is_in_the_plan_and_limits_on_cpu_time_are_noted() {
    let tuned = |tune: &str| {
        let text = domain(&[("raw", "/vms/a.raw")])
            .replace(
                "<vcpu>1</vcpu>",
                &format!("<vcpu>2</vcpu><iothreads>1</iothreads>{tune}"),
            )
            .replace("cache='writeback'", "cache='writeback' iothread='1'");
        let plans = plans_for("a.xml", &text, &with(Load::Guests));
        let value = |key| plans.targets[0].now.value(key);
        (value("vcpu-cpus"), value("server-cpus"), notes(&plans))
    };
    let (vcpus, threads, found) = tuned(
        "<cputune><vcpupin vcpu='0' cpuset='0'/><vcpupin vcpu='1' cpuset='1'/><iothreadpin iothread='1' cpuset='0'/>\
         <emulatorpin cpuset='1'/></cputune>",
    );
    assert_eq!((vcpus.as_str(), threads.as_str()), ("0,1", "0"));
    assert!(
        !found.contains("pinned") && !found.contains("CPUs"),
        "{found}"
    );
    let (vcpus, threads, found) =
        tuned("<cputune><vcpupin vcpu='0' cpuset='0'/><vcpu_quota>10000</vcpu_quota></cputune>");
    assert_eq!((vcpus.as_str(), threads.as_str()), ("default", "default"));
    assert!(found.contains("1 of this VM's 2 are"), "{found}");
    assert!(found.contains("vcpu_quota=10000, 10 % of a CPU"), "{found}");
    // A CPU that this host does not have.
    let (vcpus, _, found) =
        tuned("<cputune><vcpupin vcpu='0' cpuset='4000'/><vcpupin vcpu='1' cpuset='1'/></cputune>");
    assert!(
        vcpus == "default" && found.contains("this host has"),
        "{vcpus}: {found}"
    );
    let proxmox = "cores: 2\nmemory: 1024\nostype: l26\ncpulimit: 0.5\naffinity: 0-1\n\
        scsihw: virtio-scsi-single\nscsi0: nas:1/vm-1-disk-0.raw,size=8G\n";
    let found = notes(&plans_for("1.conf", proxmox, &with(Load::Guests)));
    assert!(found.contains("cpulimit=0.5, 25 % of a CPU"), "{found}");
    assert!(found.contains("this VM may use 0,1"), "{found}");
}
