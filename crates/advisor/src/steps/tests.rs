use super::*;
use crate::input::Surroundings;
use crate::read::read;
use crate::text::Source;

const DISK: &str = "qemu-system-x86_64 -machine q35,accel=kvm -cpu host -smp 2 -m 1G -object iothread,id=i0 \
    -blockdev driver=file,filename=/vms/a.raw,node-name=f,aio=native,cache.direct=on \
    -device virtio-blk-pci,drive=f,id=d,iothread=i0";

/// The second step, from the command above to one with a part replaced.
fn step(part: &str, with: &str) -> Step {
    assert!(DISK.contains(part), "{part}");
    step_to(&DISK.replacen(part, with, 1))
}

fn step_to(command: &str) -> Step {
    let text = format!("{DISK}\n{command}\n");
    let input = read(Source::new("steps.sh", text), Surroundings::default()).unwrap();
    let rules = Rules::built_in().unwrap();
    let mut steps = steps(vec![input], &rules, None, &[]);
    assert_eq!(steps.len(), 2);
    steps.pop().unwrap()
}

fn changed(step: &Step) -> Vec<String> {
    let properties = step.changes.iter().map(|change| {
        let Change {
            property, from, to, ..
        } = change;
        format!("{property}: {from} -> {to}")
    });
    properties.chain(step.others.clone()).collect()
}

#[test]
fn each_option_of_a_disk_is_a_factor() {
    for (part, with, what) in [
        (
            "id=i0",
            "id=i0,poll-max-ns=0",
            "vm.thread-poll: none -> 0 ns",
        ),
        (
            "id=i0",
            "id=i0,poll-max-ns=50000",
            "vm.thread-poll: none -> 50000 ns",
        ),
        (
            "id=i0",
            "id=i0,aio-max-batch=4",
            "-object i0: aio-max-batch: none -> 4",
        ),
        ("-cpu host", "-cpu qemu64", "vm.cpu-model: host -> qemu64"),
        (
            "-cpu host",
            "-cpu host,+invtsc",
            "-cpu: +invtsc: none -> on",
        ),
        (
            "id=d",
            "id=d,logical_block_size=4096",
            "logical_block_size: none -> 4096",
        ),
        (
            "id=d",
            "id=d,iommu_platform=on",
            "-device d virtio-blk-pci: iommu_platform: none -> on",
        ),
        ("id=d", "id=d,ioeventfd=off", "disk.ioeventfd: "),
        (
            "accel=kvm",
            "accel=kvm,kernel_irqchip=split",
            "-machine: kernel_irqchip: none -> split",
        ),
        ("a.raw", "b.raw", "disk: /vms/a.raw -> /vms/b.raw"),
    ] {
        let step = step(part, with);
        let found = changed(&step);
        assert!(
            found.iter().any(|one| one.starts_with(what)),
            "{with}: {found:?}"
        );
        assert!(found.len() == 1 && !step.confounded, "{with}: {found:?}");
    }
}

#[test]
fn an_option_without_a_property_confounds_a_step() {
    let step = step("id=d", "id=d,ioeventfd=off,event_idx=off");
    assert!(step.confounded, "{step:?}");
    let text = text(&[step.clone(), step]);
    assert!(
        text.contains("        -device d virtio-blk-pci: event_idx: none -> off\n"),
        "{text}"
    );
}

#[test]
fn names_and_places_are_no_factor() {
    for (part, with) in [
        ("id=d", "id=d,addr=5,serial=a,bootindex=1"),
        ("-smp 2", "-smp 2 -name other -vga none"),
        ("accel=kvm", "accel=kvm,usb=off"),
    ] {
        let step = step(part, with);
        assert!(changed(&step).is_empty() && !step.confounded, "{step:?}");
    }
}

/// One value that stands in several keys, or that replaces others, is one factor.
#[test]
fn a_factor_of_several_keys_is_one() {
    let cached = step(
        "aio=native,cache.direct=on",
        "aio=native,cache.direct=on,cache.no-flush=on",
    );
    let threads = step(",iothread=i0", " -object iothread,id=i1 -name none");
    for step in [cached, threads] {
        assert!(step.others.is_empty(), "{step:?}");
    }
    let unmap = step("aio=native", "aio=native,discard=unmap");
    assert_eq!(changed(&unmap), ["disk.discard: ignore -> unmap"]);
}

#[test]
fn a_disk_that_is_added_or_removed_is_not_another_storage() {
    let more = format!(
        "{DISK} -blockdev driver=file,filename=/vms/b.raw,node-name=g -device virtio-blk-pci,drive=g,id=e"
    );
    let added = step_to(&more);
    let disks = |step: &Step| {
        let is_disk = |change: &&Change| change.property == "disk";
        let found = step.changes.iter().filter(is_disk);
        let texts =
            found.map(|change| format!("{}: {} -> {}", change.disk, change.from, change.to));
        texts.collect::<Vec<_>>()
    };
    assert_eq!(disks(&added), ["e: none -> /vms/b.raw"]);
    let shared = step_to(&more.replace("id=e", "id=e,iothread=i0"));
    assert_eq!(changed(&shared), ["disk: none -> /vms/b.raw"]);
    let removed = step(
        "-device virtio-blk-pci,drive=f,id=d,iothread=i0",
        "-name none",
    );
    assert_eq!(disks(&removed), ["d: /vms/a.raw -> none"]);
}

const DOMAIN: &str = "<domain type='kvm'><name>a</name><memory unit='GiB'>4</memory><vcpu>2</vcpu>\
    <iothreads>1</iothreads><cputune><vcpupin vcpu='0' cpuset='1'/></cputune>\
    <os><type arch='x86_64' machine='pc-q35-8.2'>hvm</type></os><cpu mode='host-passthrough'/><devices>\
    <disk type='file' device='disk'><driver name='qemu' type='raw' cache='none' io='native' iothread='1'/>\
    <source file='/vms/a.raw'/><target dev='vda' bus='virtio'/><address type='pci' slot='4'/></disk>\
    <controller type='scsi' index='0' model='virtio-scsi'/></devices></domain>";

const PROXMOX: &str = "cores: 2\nmemory: 4096\ncpu: host\nscsihw: virtio-scsi-single\n\
    scsi0: local:vm-1-disk-0,iothread=1,size=8G\nargs: -device virtio-rng-pci\n";

/// The second step, from one configuration to another one of its kind.
fn step_of(texts: [&str; 2]) -> Step {
    let inputs = texts.map(|text| {
        read(Source::new("a", text), Surroundings::default())
            .unwrap_or_else(|e| panic!("{e}: {text}"))
    });
    let rules = Rules::built_in().unwrap();
    steps(inputs.into(), &rules, None, &[]).pop().unwrap()
}

/// What is replaced in a configuration, and the one factor that changes.
type Replacement<'a> = (&'a str, &'a str, &'a str);

#[track_caller]
fn expect_one_factor(base: &str, cases: &[Replacement]) {
    for (part, with, what) in cases {
        assert!(base.contains(part), "{part}");
        let step = step_of([base, &base.replacen(part, with, 1)]);
        let found = changed(&step);
        let is_meant = found.iter().any(|one| one.starts_with(what));
        assert!(is_meant && found.len() == 1, "{with}: {found:?}");
        assert!(!step.confounded, "{with}: {found:?}");
    }
}

#[test]
fn each_setting_of_a_domain_is_a_factor() {
    let x2apic = "<cpu mode='host-passthrough'><feature policy='disable' name='x2apic'/></cpu>";
    let sectors = "model='virtio-scsi'><driver max_sectors='8'/></controller>";
    let limit = "<iotune><total_iops_sec>100</total_iops_sec></iotune><target";
    let own_pages = "<memoryBacking><nosharepages/></memoryBacking><cpu mode";
    let quota = "<cputune><vcpu_quota>1000</vcpu_quota>";
    let cases = [
        (
            "io=",
            "event_idx='off' io=",
            "disk vda: driver.event_idx: none -> off",
        ),
        (
            "io=",
            "page_per_vq='on' io=",
            "disk vda: driver.page_per_vq: none -> on",
        ),
        (
            "<target",
            "<transient/><target",
            "disk vda: transient: none -> set",
        ),
        (
            "<target",
            "<blockio discard_granularity='4096'/><target",
            "disk vda: blockio.discard_granularity",
        ),
        ("<target", limit, "disk.throttled: "),
        (
            "cpuset='1'",
            "cpuset='3'",
            "domain: cputune.vcpupin 0.cpuset: 1 -> 3",
        ),
        (
            "<cputune>",
            quota,
            "domain: cputune.vcpu_quota: none -> 1000",
        ),
        ("<cpu mode", own_pages, "domain: memoryBacking.nosharepages"),
        (
            "model='virtio-scsi'/>",
            sectors,
            "scsi controller 0: driver.max_sectors",
        ),
        (
            "<cpu mode='host-passthrough'/>",
            "<cpu mode='host-model'/>",
            "vm.cpu-model: ",
        ),
        ("<cpu mode='host-passthrough'/>", x2apic, "vm.cpu-x2apic: "),
        ("io='native'", "io='threads'", "disk.aio: native -> threads"),
        ("a.raw", "b.raw", "disk: /vms/a.raw -> /vms/b.raw"),
    ];
    expect_one_factor(DOMAIN, &cases);
}

#[test]
fn each_setting_of_a_proxmox_vm_is_a_factor() {
    let interrupts = "virtio-rng-pci -machine kernel_irqchip=split";
    let cases = [
        (
            "cpu: host",
            "cpu: host,flags=+aes",
            "VM: cpu.flags: none -> +aes",
        ),
        ("cpu: host", "cpu: kvm64", "vm.cpu-model: host -> kvm64"),
        (
            "cores: 2",
            "cores: 2\ncpulimit: 0.5",
            "VM: cpulimit: none -> 0.5",
        ),
        (
            "cores: 2",
            "cores: 2\naffinity: 0-3",
            "VM: affinity: none -> 0-3",
        ),
        ("cores: 2", "cores: 2\nnuma: 1", "VM: numa: none -> 1"),
        ("cores: 2", "cores: 4", "vm.vcpus: 2 -> 4"),
        ("size=8G", "size=8G,aio=native", "disk.aio: "),
        ("size=8G", "size=8G,newer=7", "disk scsi0: newer: none -> 7"),
        ("virtio-rng-pci", interrupts, "-machine: kernel_irqchip"),
    ];
    expect_one_factor(PROXMOX, &cases);
}

/// A value of which a property tells only that it is there.
#[test]
fn a_value_that_is_partly_read_is_a_factor() {
    let limited = PROXMOX.replace("size=8G", "size=8G,iops=100");
    let step = step_of([&limited, &limited.replace("100", "200")]);
    // Of limits, a property tells all.
    assert_eq!(
        changed(&step),
        ["disk.limits: iops-total=100 -> iops-total=200"]
    );
    let pages = PROXMOX.replace("cores", "hugepages: 2\ncores");
    let step = step_of([&pages, &pages.replace(": 2\nc", ": 1024\nc")]);
    assert_eq!(changed(&step), ["VM: hugepages: 2 -> 1024"]);
    let both = DOMAIN.replace(
        "cache='none'",
        "cache='none' ioeventfd='off' event_idx='off'",
    );
    assert!(step_of([DOMAIN, &both]).confounded);
    // The disk gets another name.
    let moved = DOMAIN
        .replace("dev='vda'", "dev='vdb'")
        .replace("cache=", "event_idx='off' cache=");
    let step = step_of([DOMAIN, &moved]);
    assert_eq!(changed(&step), ["disk vdb: driver.event_idx: none -> off"]);
}

#[test]
fn names_and_places_of_other_front_ends_are_no_factor() {
    for (base, part, with) in [
        (DOMAIN, "slot='4'", "slot='5'"),
        (
            DOMAIN,
            "<target",
            "<serial>s</serial><boot order='1'/><alias name='x'/><target",
        ),
        (
            DOMAIN,
            "<name>a</name>",
            "<name>b</name><uuid>1</uuid><description>d</description>",
        ),
        (
            PROXMOX,
            "cores: 2",
            "cores: 2\nname: b\nonboot: 1\nnet0: virtio=1",
        ),
        (PROXMOX, "size=8G", "size=8G,backup=0,serial=s"),
    ] {
        assert!(base.contains(part), "{part}");
        let step = step_of([base, &base.replacen(part, with, 1)]);
        assert!(changed(&step).is_empty(), "{with}: {step:?}");
    }
}
