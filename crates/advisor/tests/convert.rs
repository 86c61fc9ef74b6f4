//! Disks go to ringdisk and come back as they were: nothing that the guest sees, and no limit, is lost on the way.

use std::fs;
use std::path::Path;

use advisor::convert::{Converted, Direction, convert};
use advisor::input::{Input, Surroundings, read};
use advisor::model::carried::Carried;
use advisor::text::Source;

fn input(name: &str, text: &str) -> Input {
    read(Source::new(name, text), Surroundings::default()).unwrap_or_else(|e| panic!("{e}"))
}

fn corpus(file: &str) -> Input {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    input(file, &fs::read_to_string(path.join(file)).unwrap())
}

fn carried(input: &Input) -> Vec<Carried> {
    let disks = input.vms.iter().flat_map(|vm| &vm.disks);
    disks.map(|disk| disk.carried.clone()).collect()
}

fn there(file: &str) -> (Input, Converted, String) {
    let before = corpus(file);
    let there = convert(vec![before.clone()], Direction::ToRingdisk).unwrap();
    let config = there.config.clone().unwrap();
    (before, there, config)
}

fn back(there: Converted, config: &str) -> Converted {
    let mut inputs = there.inputs;
    inputs.push(input("ringdisk.toml", config));
    convert(inputs, Direction::ToQemu).unwrap()
}

#[test]
fn limits_of_a_domain() {
    let (before, there, config) = there("libvirt/limits.xml");
    assert_eq!(there.said, Vec::<String>::new());
    for line in [
        "serial = \"GOLD-0007\"",
        "logical-block-size = 4096",
        "physical-block-size = 4096",
        "bps = 209715200",
        "iops = 5000",
        "iops-max = 10000",
        "iops-max-length = 30",
        "iops-size = 16384",
        "name = \"gold-7-logs\"",
        "throttle-group = \"gold-7-logs\"",
        "iops-rd = 500",
    ] {
        assert!(config.lines().any(|l| l == line), "{line}:\n{config}");
    }
    assert_eq!(config.matches("[[throttle-group]]").count(), 1, "{config}");
    assert_eq!(config.matches("throttle-group = ").count(), 2, "{config}");
    let text = &there.inputs[0].sources[0].text;
    assert!(
        !text.contains("iotune") && !text.contains("serial"),
        "{text}"
    );
    let back = back(there, &config);
    let mut expected = carried(&before);
    for disk in &mut expected[1..] {
        // Names of groups are the host's with ringdisk.
        disk.group = Some("gold-7-logs".into());
    }
    assert_eq!(
        carried(&back.inputs[0]),
        expected,
        "{}",
        back.inputs[0].sources[0].text
    );
}

#[test]
fn limits_of_a_command_line() {
    let (before, there, config) = there("qemu/limits.sh");
    let back = back(there, &config);
    assert_eq!(carried(&back.inputs[0]), carried(&before), "{config}");
    assert_eq!(carried(&before)[0].limits.len(), 4);
}

#[test]
fn limits_of_a_node() {
    let (before, there, config) = there("qemu/throttle-node.sh");
    assert!(config.contains("iops-max = 600"), "{config}");
    let back = back(there, &config);
    let limits = |input: &Input| carried(input)[0].limits.clone();
    assert_eq!(limits(&back.inputs[0]), limits(&before), "{config}");
}

/// A disk's own limits count besides those of its group with ringdisk; QEMU has either.
#[test]
fn what_has_no_counterpart_is_told() {
    let (_, there, config) = there("qemu/limits.sh");
    let config =
        format!("[[throttle-group]]\nname = \"g\"\niops = 9\n\n{config}throttle-group = \"g\"\n")
            .replace("\n\nthrottle-group", "\nthrottle-group");
    let back = back(there, &config);
    assert!(
        back.said
            .iter()
            .any(|said| said.contains("limits of its group")),
        "{:?}",
        back.said
    );
    assert!(
        back.inputs[0].sources[0]
            .text
            .contains("throttling.iops-total=9,throttling.group=g")
    );
}
