//! What `--fix` must leave as it is: a machine that starts goes on to start, boots from the same disk, and its guest finds
//! what it found before.

use advisor::check::check;
use advisor::fix::{Fixed, Wanted, fix};
use advisor::input::{Input, Surroundings, read};
use advisor::rules::{Rules, Severity};
use advisor::text::Source;

fn input(text: &str) -> Input {
    read(Source::new("vm", text), Surroundings::default()).unwrap_or_else(|e| panic!("{e}"))
}

fn fixed(text: &str) -> Fixed {
    let rules = Rules::built_in().unwrap();
    fix(input(text), &rules, None, Wanted::default()).unwrap()
}

fn text(fixed: &Fixed) -> &str {
    &fixed.input.sources[0].text
}

fn findings(text: &str) -> Vec<String> {
    let rules = Rules::built_in().unwrap();
    let mut input = input(text);
    let found = check(&mut input, &rules, None, &[]).findings.into_iter();
    let bad = found.filter(|finding| finding.severity != Severity::Info);
    bad.map(|finding| finding.rule).collect()
}

/// A domain with these devices; `more` stands before them.
fn domain(more: &str, devices: &str) -> String {
    format!(
        "<domain type='kvm'>\n  <name>vm</name>\n  <memory unit='GiB'>2</memory>\n  <vcpu>2</vcpu>\n  {more}\n  <devices>\n    \
         {devices}\n  </devices>\n</domain>\n"
    )
}

/// A thread that a controller, a balloon or anything else names is in use.
#[test]
fn threads_of_other_devices_stay() {
    let controller = domain(
        "<iothreads>2</iothreads>",
        "<controller type='scsi' index='0' model='virtio-scsi'>\n      <driver iothread='2'/>\n    </controller>",
    );
    let used = "<iothreads>2</iothreads>";
    assert_eq!(findings(&controller), ["iothreads-unused"]);
    let fixed = self::fixed(&controller);
    assert!(text(&fixed).contains(used), "{}", text(&fixed));
    let both = controller.replace("iothread='2'/>\n    </controller>", "iothread='2'/>\n    </controller>\n    \
        <controller type='scsi' index='1' model='virtio-scsi'>\n      <driver><iothreads><iothread id='1'/></iothreads></driver>\n    </controller>");
    assert_eq!(findings(&both), Vec::<String>::new());

    let balloon = "qemu-system-x86_64 -accel kvm -object iothread,id=i0 -object iothread,id=i1 \
                   -device virtio-balloon-pci,iothread=i0 \
                   -device '{\"driver\":\"virtio-scsi-pci\",\"iothread-vq-mapping\":[{\"iothread\":\"i1\"}]}'\n";
    assert_eq!(findings(balloon), Vec::<String>::new());
    let one = format!("{} -object iothread,id=i2\n", balloon.trim_end());
    assert_eq!(findings(&one), ["iothreads-unused"]);
    assert_eq!(text(&self::fixed(&one)), balloon);
}
