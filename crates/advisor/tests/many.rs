//! Machines with very many disks: the work of a fix grows with their number, and nothing stops it before its end.

use advisor::fix::{Fixed, Wanted, fix};
use advisor::input::{Surroundings, read};
use advisor::rules::Rules;
use advisor::text::Source;

fn domain(disks: usize, disk: impl Fn(usize) -> String) -> String {
    let disks: String = (0..disks).map(disk).collect();
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
      <target dev='{target}' bus='{bus}'/>
    </disk>\n"
    )
}

fn command(disks: usize, disk: impl Fn(usize) -> String) -> String {
    let disks: String = (0..disks).map(disk).collect();
    format!("qemu-system-x86_64 -accel kvm -smp 4 -m 1G{disks}\n")
}

fn fixed(name: &str, text: &str) -> Fixed {
    let input = read(Source::new(name, text), Surroundings::default()).unwrap();
    fix(input, &Rules::built_in().unwrap(), None, Wanted::default()).unwrap()
}

/// Of how few disks there are, the number of rounds does not depend; each reads the text once. With one change after the
/// other there would be two thousand and more, and it once stopped at two thousand without a word.
#[test]
fn the_work_grows_with_the_disks() {
    type Text = fn(usize) -> String;
    let kinds: [(&str, Text); 5] = [
        ("vm.xml", |count| {
            domain(count, |n| element(n, &format!("vd{n}"), "virtio"))
        }),
        ("ide.xml", |count| {
            domain(count, |n| element(n, &format!("hd{n}"), "ide"))
        }),
        ("one-line.xml", |count| {
            domain(count, |n| element(n, &format!("vd{n}"), "virtio")).replace('\n', "")
        }),
        ("if.sh", |count| {
            command(count, |n| {
                format!(" -drive file=/dev/vg/vm-{n},format=raw,if=virtio")
            })
        }),
        ("devices.sh", |count| {
            command(count, |n| {
                format!(
                    " -drive file=/dev/vg/vm-{n},format=raw,if=none,id=d{n} -device virtio-blk-pci,drive=d{n}"
                )
            })
        }),
    ];
    for (name, text) in kinds {
        let few = fixed(name, &text(4));
        let many = fixed(name, &text(700));
        assert_eq!(many.rounds, few.rounds, "{name}");
        assert_eq!(many.left, [], "{name}");
        assert!(many.done.len() >= 2100, "{name}: {}", many.done.len());
        assert_eq!(many.done.len(), few.done.len() * 175, "{name}");
        let again = fixed(name, &many.input.sources[0].text);
        assert_eq!((again.rounds, again.done.len()), (0, 0), "{name}");
    }
}
