//! Machines with very many disks: the work of a fix grows with their number, and nothing stops it before its end.

use super::{Fixed, Wanted, fix};
use crate::convert::{Direction, convert};
use crate::input::{Input, Surroundings};
use crate::read::read;
use crate::rules::Rules;
use crate::text::Source;
use crate::work::tests::STEPS;

/// Numbers of disks start here: all have as many digits.
const FIRST: usize = 1000;

fn domain(disks: usize, disk: impl Fn(usize) -> String) -> String {
    let disks: String = (FIRST..FIRST + disks).map(disk).collect();
    format!(
        "<domain type='kvm'>
  <name>vm</name>
  <memory unit='GiB'>1</memory>
  <vcpu>4</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>
{disks}    <memballoon model='none'/>
  </devices>
</domain>
"
    )
}

fn element(number: usize, target: &str, bus: &str) -> String {
    format!(
        "    <disk type='block' device='disk'>
      <driver name='qemu' type='raw'/>
      <source dev='/dev/vg/vm-{number}'/>
      <target dev='{target}{number}' bus='{bus}'/>
    </disk>\n"
    )
}

/// A SCSI disk with a controller of its own.
fn on_controller(number: usize, model: &str) -> String {
    let disk = element(number, "sd", "scsi");
    let address = format!("<address type='drive' controller='{number}'/></disk>");
    disk.replace("</disk>", &address)
        + &format!("    <controller type='scsi' index='{number}' model='{model}'/>\n")
}

fn command(disks: usize, disk: impl Fn(usize) -> String) -> String {
    let disks: String = (FIRST..FIRST + disks).map(disk).collect();
    format!("qemu-system-x86_64 -accel kvm -smp 4 -m 1G{disks}\n")
}

/// A drive, and a device for it that comes from its number.
fn drive(n: usize, device: &str) -> String {
    let device = device.replace("{n}", &n.to_string());
    format!(" -drive file=/dev/vg/vm-{n},format=raw,if=none,id=d{n}{device}")
}

/// The name of a file, and its text with that many disks.
type Text = (&'static str, Box<dyn Fn(usize) -> String>);

/// The name of a file with a command, and what it has of one disk.
type PerDisk = (&'static str, fn(usize) -> String);

fn texts() -> Vec<Text> {
    let mut texts: Vec<Text> = vec![
        (
            "vm.xml",
            Box::new(|count| domain(count, |n| element(n, "vd", "virtio"))),
        ),
        (
            "ide.xml",
            Box::new(|count| domain(count, |n| element(n, "hd", "ide"))),
        ),
        (
            "one-line.xml",
            Box::new(|count| domain(count, |n| element(n, "vd", "virtio")).replace('\n', "")),
        ),
        (
            "virtio-scsi.xml",
            Box::new(|count| domain(count, |n| on_controller(n, "virtio-scsi"))),
        ),
        (
            "lsi.xml",
            Box::new(|count| domain(count, |n| on_controller(n, "lsilogic"))),
        ),
    ];
    let commands: [PerDisk; 13] = [
        ("if.sh", |n| {
            format!(" -drive file=/dev/vg/vm-{n},format=raw,if=virtio")
        }),
        ("if-id.sh", |n| {
            // Their names are in another order than they.
            let id = 9999 - n;
            format!(" -drive file=/dev/vg/vm-{n},format=raw,if=virtio,id=d{id}")
        }),
        ("if-ide.sh", |n| {
            format!(" -drive file=/dev/vg/vm-{n},format=raw")
        }),
        ("devices.sh", |n| {
            drive(n, " -device virtio-blk-pci,drive=d{n}")
        }),
        ("ide-hd.sh", |n| drive(n, " -device ide-hd,drive=d{n}")),
        ("ahci.sh", |n| {
            drive(
                n,
                " -device ahci,id=a{n} -device ide-hd,drive=d{n},bus=a{n}.0,bootindex={n}",
            )
        }),
        ("scsi.sh", |n| {
            drive(
                n,
                " -device virtio-scsi-pci,id=s{n} -device scsi-hd,drive=d{n},bus=s{n}.0",
            )
        }),
        ("lsi.sh", |n| {
            drive(
                n,
                " -device lsi,id=s{n} -device scsi-hd,drive=d{n},bus=s{n}.0,bootindex={n}",
            )
        }),
        ("threads.sh", |n| {
            drive(
                n,
                " -object iothread,id=t{n} -device virtio-blk-pci,drive=d{n}",
            )
        }),
        ("set.sh", |n| {
            drive(
                n,
                " -device virtio-blk-pci,drive=d{n},id=e{n} -set device.e{n}.queue-size=128",
            )
        }),
        ("vhost-user.sh", |n| {
            format!(
                " -chardev socket,id=c{n},path=/run/{n}.sock -device vhost-user-blk-pci,chardev=c{n}"
            )
        }),
        ("json.sh", |n| {
            format!(
                r#" -blockdev '{{"driver":"raw","node-name":"f{n}","file":{{"driver":"host_device","filename":"/dev/vg/vm-{n}"}}}}' -device virtio-blk-pci,drive=f{n}"#
            )
        }),
        ("throttle.sh", |n| {
            format!(
                " -object throttle-group,id=g{n},x-iops-total=100 -blockdev driver=host_device,node-name=p{n},filename=/dev/vg/vm-{n} -blockdev driver=throttle,throttle-group=g{n},node-name=f{n},file=p{n} -device virtio-blk-pci,drive=f{n}"
            )
        }),
    ];
    for (name, disk) in commands {
        texts.push((name, Box::new(move |count| command(count, disk))));
    }
    texts
}

fn input(name: &str, text: &str) -> Input {
    read(Source::new(name, text), Surroundings::default()).unwrap()
}

fn fixed(name: &str, text: &str, rules: &Rules) -> Fixed {
    fix(input(name, text), rules, None, Wanted::default()).unwrap()
}

/// The number of rounds does not depend on the number of disks, nor do the steps that each disk takes. One change after the
/// other would take as many rounds as there are disks; and a search through all options for each disk would show as steps of
/// which the number grows by more from 40 disks to 60 than from 20 to 40.
#[test]
fn work_is_linear_in_the_number_of_disks() {
    let rules = Rules::built_in().unwrap();
    let mut superlinear = Vec::new();
    for (name, text) in texts() {
        let mut steps = [0; 3];
        let mut moves = [0; 3];
        let mut done = [0; 3];
        let mut rounds = [0; 3];
        for (at, disks) in [20, 40, 60].into_iter().enumerate() {
            let text = text(disks);
            STEPS.set(0);
            let fixed = fixed(name, &text, &rules);
            steps[at] = STEPS.replace(0);
            // Not all can be moved, and trying takes steps too.
            let _ = convert(vec![input(name, &text)], Direction::ToRingdisk);
            moves[at] = STEPS.get();
            rounds[at] = fixed.rounds;
            done[at] = fixed.done.len();
            assert_eq!(fixed.left, [], "{name}");
            let again = self::fixed(name, &fixed.input.sources[0].text, &rules);
            assert_eq!((again.rounds, again.done.len()), (0, 0), "{name}");
        }
        assert_eq!(rounds, [rounds[0]; 3], "{name}");
        assert!(done[0] >= 20, "{name}: {done:?}");
        for [few, more, most] in [steps, moves, done.map(|count| count as u64)] {
            let (first, second) = (more - few, most - more);
            if second > first + first / 100 {
                superlinear.push(format!("{name}: {first} more, then {second} more"));
            }
        }
    }
    assert!(superlinear.is_empty(), "{superlinear:#?}");
}

/// It once stopped at two thousand changes without a word.
#[test]
fn large_fix_is_completed() {
    let rules = Rules::built_in().unwrap();
    let text = domain(700, |n| element(n, "vd", "virtio"));
    let fixed = fixed("vm.xml", &text, &rules);
    assert_eq!((fixed.left.len(), fixed.done.len()), (0, 2100));
}
