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
