//! Converts disks to ringdisk and back: limits and everything that the guest sees survive.

use std::fs;
use std::path::Path;

use advisor::convert::{Converted, Direction, convert};
use advisor::input::Input;
use advisor::model::carried::Carried;

use crate::support::input;

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
fn domain_limits_survive_conversion() {
    let (before, there, config) = there("libvirt/limits.xml");
    assert_eq!(there.messages, Vec::<String>::new());
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
fn command_line_limits_survive_conversion() {
    let (before, there, config) = there("qemu/limits.sh");
    let back = back(there, &config);
    assert_eq!(carried(&back.inputs[0]), carried(&before), "{config}");
    assert_eq!(carried(&before)[0].limits.len(), 4);
}

/// A read-only disk stays read-only with either server.
#[test]
fn read_only_drive_stays_read_only() {
    let line = "qemu-system-x86_64 -m 1G -drive \
                id=a,if=none,file=/srv/a.raw,format=raw,readonly=on -device \
                virtio-blk-pci,drive=a,werror=report\n";
    let before = input("vm.sh", line);
    let there = convert(vec![before.clone()], Direction::ToRingdisk).unwrap();
    let config = there.config.clone().unwrap();
    assert!(config.contains("readonly = true"), "{config}");
    let back = back(there, &config);
    let text = &back.inputs[0].sources[0].text;
    assert!(text.contains(",readonly=on"), "{text}");
    assert!(text.contains(",werror=report"), "{text}");
}

#[test]
fn node_limits_survive_conversion() {
    let (before, there, config) = there("qemu/throttle-node.sh");
    assert!(config.contains("iops-max = 600"), "{config}");
    let back = back(there, &config);
    let limits = |input: &Input| carried(input)[0].limits.clone();
    assert_eq!(limits(&back.inputs[0]), limits(&before), "{config}");
}

/// A domain with this disk.
fn domain(disk: &str) -> Input {
    let text = format!(
        "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>vm</name>
  <memory unit='GiB'>1</memory>
  <vcpu>2</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>
    {disk}
  </devices>
</domain>
"
    );
    input("vm.xml", &text)
}

fn disk(attributes: &str, driver: &str, source: &str, more: &str) -> String {
    format!(
        "<disk type='file' device='disk' {attributes}>
      <driver name='qemu' type='raw' {driver}/>
      <source file='/srv/a.raw'>{source}</source>
      <target dev='vda' bus='virtio'/>
      {more}
    </disk>"
    )
}

/// A disk with a setting that ringdisk does not support is not converted. Without the setting, the guest could read other
/// data, or several guests could write to a shared disk.
#[test]
fn unsupported_disk_is_not_converted() {
    let secret = "<secret type='passphrase' uuid='00000000-0000-0000-0000-000000000000'/>";
    let luks = format!("<encryption format='luks'>{secret}</encryption>");
    let slice = "<slices><slice type='storage' offset='1048576' size='1048576'/></slices>";
    let backing = "<backingStore type='file'><source file='/srv/b'/></backingStore>";
    for (attributes, driver, source, more, says) in [
        ("", "", "", luks.as_str(), "<encryption>"),
        ("", "", luks.as_str(), "", "<encryption> in <source>"),
        ("", "", slice, "", "<slices> in <source>"),
        ("", "", "<reservations/>", "", "<reservations>"),
        ("", "", "", "<transient/>", "<transient>"),
        ("", "", "", "<mirror type='file' job='copy'/>", "<mirror>"),
        ("", "", "", "<shareable/>", "<shareable>"),
        ("", "", "", "<auth username='a'/>", "<auth>"),
        ("", "", "", "<wwn>5000c50015ea71ad</wwn>", "<wwn>"),
        ("", "", "", "<geometry cyls='1'/>", "<geometry>"),
        ("", "", "", "<serial>\u{e9}</serial>", "not printable ASCII"),
        ("", "", "", "<blockio logical_block_size='1024'/>", "1024"),
        (
            "",
            "",
            "",
            "<blockio discard_granularity='1'/>",
            "discard_granularity",
        ),
        ("", "", "", "<iotune><new>1</new></iotune>", "<new>"),
        ("", "", "", "<new-in-libvirt/>", "<new-in-libvirt>"),
        ("", "", "", backing, "type='file' of <backingStore>"),
        ("snapshot='internal'", "", "", "", "snapshot='internal'"),
        ("rawio='yes'", "", "", "", "rawio='yes'"),
        ("", "copy_on_read='on'", "", "", "copy_on_read='on'"),
        ("", "iommu='on'", "", "", "iommu='on'"),
        ("", "ats='on'", "", "", "ats='on'"),
        ("", "error_policy='ignore'", "", "", "error_policy='ignore'"),
        ("", "new='1'", "", "", "new='1'"),
    ] {
        let before = domain(&disk(attributes, driver, source, more));
        let why = convert(vec![before], Direction::ToRingdisk).unwrap_err();
        assert!(
            why.contains("vm vda is not converted") && why.contains(says),
            "{attributes} {driver} {source} {more}: {why}"
        );
    }
}

/// Supported settings are in ringdisk's configuration or in the new element, and come back.
#[test]
fn supported_settings_are_converted() {
    let driver = "error_policy='stop' packed='on' iommu='off' event_idx='off' cache='directsync' \
                  detect_zeroes='unmap'";
    let more = "<readonly/>\n      <boot order='1'/>";
    let before = domain(&disk("", driver, "", more));
    let there = convert(vec![before.clone()], Direction::ToRingdisk).unwrap();
    let config = there.config.clone().unwrap();
    for line in [
        "readonly = true",
        "werror = \"stop\"",
        "rerror = \"stop\"",
        "cache = \"directsync\"",
        "discard = \"ignore\"",
        // QEMU writes zeroes where it may not discard.
        "detect-zeroes = \"on\"",
    ] {
        assert!(config.lines().any(|l| l == line), "{line}:\n{config}");
    }
    let text = &there.inputs[0].sources[0].text;
    for kept in ["packed='on'", "iommu='off'", "event_idx='off'", "order='1'"] {
        assert!(text.contains(kept), "{kept}: {text}");
    }
    assert!(!text.contains("readonly"), "{text}");
    assert!(!text.contains("error_policy"), "{text}");
    assert!(
        there.messages[0].contains("continues to run"),
        "{:?}",
        there.messages
    );
    let back = back(there, &config);
    let text = &back.inputs[0].sources[0].text;
    for kept in [
        "<readonly/>",
        " error_policy='stop'",
        "packed='on'",
        "cache='directsync'",
    ] {
        assert!(text.contains(kept), "{kept}: {text}");
    }
    let mut expected = carried(&before);
    // Written down, because the disk must have them on whatever it lies.
    expected[0].logical_block = None;
    assert_eq!(carried(&back.inputs[0]), expected);
}

/// Disks are not converted if their VM cannot have vhost-user disks: it would not start.
#[test]
fn vm_without_vhost_user_is_not_converted() {
    let text = domain(&disk("", "", "", "")).sources[0].text.clone();
    let sealed = "<launchSecurity type='sev'/>\n</domain>";
    let set = "<qemu:commandline><qemu:arg value='-set'/><qemu:arg \
               value='device.virtio-disk0.config-wce=off'/></qemu:commandline>\n</domain>";
    for (text, says) in [
        (text.replace("</domain>", sealed), "encrypted"),
        (text.replace("</domain>", set), "names a disk"),
        (
            text.replace(
                "</devices>",
                "<memory model='nvdimm'><target/></memory></devices>",
            ),
            "NVDIMM",
        ),
        (
            text.replace(
                "<devices>",
                "<cpu><numa><cell id='0' memAccess='private'/></numa></cpu><devices>",
            ),
            "NUMA cell",
        ),
        (text.replace("type='kvm'", "type='xen'"), "no disk"),
        (text.replace("x86_64", "s390x"), "s390x"),
    ] {
        let why = convert(vec![input("vm.xml", &text)], Direction::ToRingdisk).unwrap_err();
        assert!(why.contains(says), "{says}: {why}");
    }
    let line = "qemu-system-x86_64 -m 1G -mem-path /dev/hugepages -drive \
                id=a,if=none,file=/srv/a.raw,format=raw -device virtio-blk-pci,drive=a\n";
    let why = convert(vec![input("vm.sh", line)], Direction::ToRingdisk).unwrap_err();
    assert!(why.contains("memory cannot be shared"), "{why}");
}

/// Likewise on a command line.
#[test]
fn unsupported_disk_on_a_command_line_is_not_converted() {
    let drive = |more: &str| format!("-drive id=a,if=none,file=/srv/a.raw,format=raw{more}");
    let device = |more: &str| format!("-device virtio-blk-pci,drive=a{more}");
    let node = |json: &str| format!("-blockdev '{{\"node-name\":\"a\",{json}}}'");
    let file = r#""file":{"driver":"file","filename":"/srv/a"}"#;
    for (storage, device, says) in [
        (drive(",offset=1048576"), device(""), "offset=1048576"),
        (
            drive(",encrypt.format=luks"),
            device(""),
            "encrypt.format=luks",
        ),
        (drive(",snapshot=on"), device(""), "snapshot=on"),
        (drive("") + " -snapshot", device(""), "-snapshot"),
        (drive(",copy-on-read=on"), device(""), "copy-on-read=on"),
        (drive(",werror=ignore"), device(""), "werror=ignore"),
        (drive(",backing.driver=raw"), device(""), "backing.driver"),
        (drive(""), device(",iommu_platform=on"), "iommu_platform=on"),
        (drive(""), device(",share-rw=on"), "share-rw=on"),
        (drive(""), device(",discard=off"), "discard=off"),
        (drive(""), device(",secs=63"), "secs=63"),
        (
            drive("") + " -device ide-hd,drive=a",
            device(""),
            "-device also uses 'a'",
        ),
        (
            drive("").replace("/srv/", "$DIR/"),
            device(""),
            "shell variable",
        ),
        (
            node(&format!(r#""driver":"raw","offset":512,{file}"#)),
            device(""),
            "offset=512",
        ),
        (
            node(&format!(r#""driver":"luks","key-secret":"s",{file}"#)),
            device(""),
            "neither raw nor qcow2",
        ),
        (
            node(&format!(
                r#""driver":"qcow2","file":{{"driver":"raw",{file}}}"#
            )),
            device(""),
            "nested formats",
        ),
    ] {
        let line = format!("qemu-system-x86_64 -m 1G {storage} {device}\n");
        let there = convert(vec![input("vm.sh", &line)], Direction::ToRingdisk);
        let why = there.map(|there| there.config).unwrap_err();
        assert!(why.contains(says), "{line} {says}: {why}");
    }
}

/// A file keeps its line endings: one line stays one line, and a CRLF file gets CRLF lines.
#[test]
fn line_endings_are_preserved() {
    let text = domain(&disk("", "", "", "")).sources[0].text.clone();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let there = |text: &str| {
        let there = convert(vec![input("vm.xml", text)], Direction::ToRingdisk).unwrap();
        let text = there.inputs[0].sources[0].text.clone();
        assert!(
            text.contains("vhostuser") && text.contains("memfd"),
            "{text}"
        );
        text
    };
    let one = there(&lines.concat());
    assert!(!one.contains('\n'), "{one}");
    let crlf = there(&text.replace('\n', "\r\n"));
    assert_eq!(crlf, there(&text).replace('\n', "\r\n"));
}

/// Disks that share limits are converted together or not at all: otherwise each side would grant all of them.
#[test]
fn throttle_group_is_converted_together() {
    let tune = "<iotune><total_iops_sec>100</total_iops_sec><group_name>g</group_name></iotune>";
    let first = disk("", "", "", tune);
    let second = disk("", "", "", &format!("<shareable/>{tune}")).replace("vda", "vdb");
    let third = disk("", "", "", "").replace("vda", "vdc");
    let before = domain(&format!("{first}\n    {second}\n    {third}"));
    let there = convert(vec![before], Direction::ToRingdisk).unwrap();
    assert_eq!(there.config.unwrap().matches("[[disk]]").count(), 1);
    let messages = there.messages.join("\n");
    assert!(
        messages.contains("vda is not converted: it shares its limits with vdb"),
        "{messages}"
    );
}

/// In ringdisk, a disk can have limits in addition to those of its group. QEMU supports only one of the two.
#[test]
fn own_limits_of_a_group_member_are_reported() {
    let (_, there, config) = there("qemu/limits.sh");
    let config =
        format!("[[throttle-group]]\nname = \"g\"\niops = 9\n\n{config}throttle-group = \"g\"\n")
            .replace("\n\nthrottle-group", "\nthrottle-group");
    let back = back(there, &config);
    assert!(
        back.messages
            .iter()
            .any(|message| message.contains("limits of its group")),
        "{:?}",
        back.messages
    );
    assert!(
        back.inputs[0].sources[0]
            .text
            .contains("throttling.iops-total=9,throttling.group=g")
    );
}

/// A command line with one convertible disk, and with these options.
fn with(more: &str) -> Input {
    let line = format!(
        "qemu-system-x86_64 -m 1G -drive file=/srv/a.raw,format=raw,if=none,id=a -device \
         virtio-blk-pci,drive=a,id=d{more}\n"
    );
    input("vm.sh", &line)
}

/// ringdisk has no counterpart for `-global` settings of virtio-blk, such as the block size or the serial number.
#[test]
fn disk_with_globals_is_not_converted() {
    for global in [
        "virtio-blk-pci.logical_block_size=4096",
        "virtio-blk-pci.write-cache=off",
        "driver=virtio-blk-pci,property=serial,value=GG",
        "vhost-user-blk-pci.num-queues=3",
        "\"$GLOBAL\"",
    ] {
        let why = convert(
            vec![with(&format!(" -global {global}"))],
            Direction::ToRingdisk,
        )
        .unwrap_err();
        assert!(why.contains("-global"), "{global}: {why}");
    }
    let other = with(" -global ICH9-LPC.disable_s3=1");
    assert!(convert(vec![other], Direction::ToRingdisk).is_ok());
}

/// A `-set` of a converted drive is removed, because QEMU would not start with it. Its value is converted.
#[test]
fn set_options_are_removed_with_their_drive() {
    let before =
        with(" -set drive.a.cache=directsync -set drive.a.iops=100 -set device.d.serial=GG -S");
    let there = convert(vec![before], Direction::ToRingdisk).unwrap();
    let text = there.inputs[0].sources[0].text.clone();
    assert!(!text.contains("-set"), "{text}");
    assert!(text.ends_with(" -S\n"), "{text}");
    let config = there.config.clone().unwrap();
    for setting in ["cache = \"directsync\"", "iops = 100", "serial = \"GG\""] {
        assert!(config.contains(setting), "{setting}: {config}");
    }
    // One for the socket goes on the way back.
    let mut there = there;
    let line = text.replace(" -S", " -set chardev.vm-d.reconnect=1");
    there.inputs = vec![input("vm.sh", &line)];
    let back = back(there, &config);
    let text = &back.inputs[0].sources[0].text;
    assert!(!text.contains("-set") && text.contains("-drive"), "{text}");
    // What only the shell knows may set anything of it.
    for set in ["\"$V\"", "drive.a.cache=$CACHE", "device.d.drive=a"] {
        let result = convert(vec![with(&format!(" -set {set}"))], Direction::ToRingdisk);
        assert!(result.is_err(), "{set}");
    }
}

/// Names the disks of a domain in its metadata, where ringdisk's hook finds them, and takes them away again.
#[test]
fn metadata_of_a_domain_names_its_disks() {
    let driver = "cache='directsync' error_policy='stop'";
    let more =
        "<serial>A&amp;B&apos;s</serial><iotune><total_iops_sec>100</total_iops_sec></iotune>";
    let first = disk("", driver, "", more).replace("/srv/a.raw", "/srv/a&amp;&apos;.raw");
    let second = disk("", "", "", "<readonly/>").replace("vda", "vdb");
    let plain = domain(&format!("{first}\n    {second}"));
    let text = &plain.sources[0].text;
    let os = "<os:os xmlns:os='urn:os' id='x'/>";
    for metadata in [
        String::new(),
        "<metadata/>".into(),
        "<metadata></metadata>".into(),
        format!("<metadata>{os}</metadata>"),
        format!("<metadata>\n    {os}\n  </metadata>"),
        "<metadata><r:disks xmlns:r='urn:ringdisk:libvirt:1'/></metadata>".into(),
        "<metadata><disks xmlns='urn:ringdisk:libvirt:1'><disk target='vdz' file='/z'/></disks></metadata>".into(),
        "<metadata>\n    <r:disks xmlns:r='urn:ringdisk:libvirt:1'>\n      <r:disk target='vdz' file='/z'/>\n    </r:disks>\n  </metadata>".into(),
    ] {
        let before = text.replace("</name>", &format!("</name>\n  {metadata}"));
        let before = input("vm.xml", before.replace("\n  \n", "\n").as_str());
        let there = convert(vec![before.clone()], Direction::ToMetadata).unwrap();
        assert_eq!(there.config, None);
        let text = &there.inputs[0].sources[0].text;
        let parsed = roxmltree::Document::parse(text).unwrap();
        let named: Vec<_> = parsed
            .descendants()
            .filter(|node| node.has_tag_name(("urn:ringdisk:libvirt:1", "disk")))
            .filter(|node| node.attribute("target") != Some("vdz"))
            .collect();
        let is_right = |node: &roxmltree::Node<'_, '_>| {
            let disks = node.parent_element().unwrap();
            disks.has_tag_name(("urn:ringdisk:libvirt:1", "disks"))
                && disks.parent_element().unwrap().has_tag_name("metadata")
        };
        assert!(named.len() == 2 && named.iter().all(is_right), "{text}");
        let value = |disk: usize, key: &str| named[disk].attribute(key);
        for (disk, key, expected) in [
            (0, "target", Some("vda")),
            (0, "file", Some("/srv/a&'.raw")),
            (0, "serial", Some("A&B's")),
            (0, "cache", Some("directsync")),
            (0, "werror", Some("stop")),
            (0, "iops", Some("100")),
            (0, "logical-block-size", Some("512")),
            // These are in the disk's element.
            (0, "name", None),
            (0, "socket", None),
            (0, "queues", None),
            (1, "target", Some("vdb")),
            (1, "readonly", Some("on")),
        ] {
            assert_eq!(value(disk, key), expected, "{disk} {key}: {text}");
        }
        // Nothing else is needed for the way back.
        let back = convert(there.inputs.clone(), Direction::ToQemu).unwrap();
        let moved: Vec<_> = back.moved.iter().map(|disk| disk.file.as_str()).collect();
        assert_eq!(moved, ["/srv/a&'.raw", "/srv/a.raw"]);
        let text = &back.inputs[0].sources[0].text;
        assert_eq!(text.contains("libvirt:1"), metadata.contains("vdz"), "{text}");
        assert_eq!(text.contains("urn:os"), metadata.contains("urn:os"), "{text}");
        let mut expected = carried(&before);
        expected.iter_mut().for_each(|disk| disk.logical_block = None);
        assert_eq!(carried(&back.inputs[0]), expected, "{text}");
    }
}

/// What the metadata cannot have is refused by name.
#[test]
fn disks_that_metadata_cannot_have_are_refused() {
    let tune = "<iotune><total_iops_sec>100</total_iops_sec><group_name>g</group_name></iotune>";
    let grouped = domain(&disk("", "", "", tune));
    let why = convert(vec![grouped], Direction::ToMetadata).unwrap_err();
    assert!(why.contains("(g)") && why.contains("--config"), "{why}");
    let there = "<metadata><r:disks xmlns:r='urn:ringdisk:libvirt:1'><r:disk target='vda' file='/z'/></r:disks></metadata>";
    let text = domain(&disk("", "", "", "")).sources[0].text.clone();
    let twice = text.replace("</name>", &format!("</name>{there}"));
    let why = convert(vec![input("vm.xml", &twice)], Direction::ToMetadata).unwrap_err();
    assert!(why.contains("names vda for ringdisk already"), "{why}");
}

/// A disk is found by its socket: another one may have the name that the socket's file has.
#[test]
fn disks_are_found_by_their_sockets() {
    let there = convert(vec![domain(&disk("", "", "", ""))], Direction::ToRingdisk).unwrap();
    let back_with = |config: &str| {
        let inputs = vec![there.inputs[0].clone(), input("ringdisk.toml", config)];
        convert(inputs, Direction::ToQemu)
    };
    let socket = "/run/ringdisk/vm-vda.sock";
    let two = format!(
        "[[disk]]\nname = \"vm-vda\"\nfile = \"/wrong.raw\"\nsocket = \"/run/ringdisk/x.sock\"\n\n\
         [[disk]]\nname = \"x\"\nfile = \"/right.raw\"\nsocket = \"{socket}\"\ncache = \"none\"\n"
    );
    let found = back_with(&two).unwrap();
    assert_eq!(found.moved[0].file, "/right.raw");
    // It leaves the configuration as well.
    let config = &found.inputs[1].sources[0].text;
    assert!(
        config.contains("/wrong.raw") && !config.contains("/right.raw"),
        "{config}"
    );
    let by_default = "[[disk]]\nname = \"vm-vda\"\nfile = \"/right.raw\"\n";
    assert_eq!(back_with(by_default).unwrap().moved[0].file, "/right.raw");
    for (config, says) in [
        (
            two.replace(socket, "/run/ringdisk/y.sock"),
            "has a disk at its socket",
        ),
        (format!("{two}{by_default}"), "two disks"),
        (
            two.replace("/right.raw", "rbd:pool/image"),
            "rbd: storage manually",
        ),
    ] {
        let why = back_with(&config).unwrap_err();
        assert!(why.contains(says), "{says}: {why}");
    }
    let named = "<metadata><r:disks xmlns:r='urn:ringdisk:libvirt:1'><r:disk target='vda' file='/z'/></r:disks></metadata>";
    let text = &there.inputs[0].sources[0].text;
    let both = text.replace("</name>", &format!("</name>{named}"));
    let inputs = vec![input("vm.xml", &both), input("ringdisk.toml", &two)];
    let why = convert(inputs, Direction::ToQemu).unwrap_err();
    assert!(why.contains("/z") && why.contains("/right.raw"), "{why}");
}

/// VMs whose names differ have disks whose names and sockets differ, whatever characters these may have.
#[test]
fn names_of_vms_stay_apart() {
    let long = "a".repeat(60);
    let names = [
        "vm \u{e4}",
        "vm \u{f6}",
        "vm-\u{f6}",
        &long,
        &format!("{long}b"),
        "1",
    ];
    let mut sockets = std::collections::BTreeSet::new();
    for name in names {
        let text = domain(&disk("", "", "", "")).sources[0].text.clone();
        let text = text.replace("<name>vm<", &format!("<name>{name}<"));
        for direction in [Direction::ToRingdisk, Direction::ToMetadata] {
            let there = convert(vec![input("vm.xml", &text)], direction).unwrap();
            let text = &there.inputs[0].sources[0].text;
            let socket = text.split("/run/ringdisk/").nth(1).unwrap();
            let socket = socket.split(".sock").next().unwrap().to_owned();
            assert!(socket.len() <= 60 && socket.is_ascii(), "{socket}");
            let config = there.config.unwrap_or_else(|| text.clone());
            assert!(config.contains(&socket), "{config}");
            sockets.insert(socket);
        }
    }
    assert_eq!(sockets.len(), names.len(), "{sockets:?}");
}

/// What QEMU's disk would not have, or what cannot be read, is refused, and what libvirt adds by itself does not stay.
#[test]
fn way_back_drops_nothing_in_silence() {
    let there = domain(&disk("", "queues='7'", "", ""));
    let there = convert(vec![there], Direction::ToMetadata).unwrap();
    let text = there.inputs[0].sources[0].text.clone();
    let back = |text: &str| convert(vec![input("vm.xml", text)], Direction::ToQemu);
    let with = |before: &str, now: &str| {
        assert!(text.contains(before), "{text}");
        back(&text.replace(before, now))
    };
    for (attribute, says) in [
        ("format='vmdk'", "vmdk"),
        ("format='raw' throttle-group='g'", "throttle group"),
        ("format='raw' data-file='/srv/d'", "data-file"),
    ] {
        let why = with("format='raw'", attribute).unwrap_err();
        assert!(why.contains(says), "{attribute}: {why}");
    }
    for (file, says) in [("", "names its file"), ("a.raw", "no absolute path")] {
        let why = with("file='/srv/a.raw'", &format!("file='{file}'")).unwrap_err();
        assert!(why.contains(says), "{file}: {why}");
    }
    let large = with("logical-block-size='512'", "logical-block-size='4k'").unwrap();
    let large = &large.inputs[0].sources[0].text;
    assert!(large.contains("logical_block_size='4096'"), "{large}");
    let kept = with("type='vhostuser'", "type='vhostuser' snapshot='no'").unwrap();
    let kept = &kept.inputs[0].sources[0].text;
    assert!(!kept.contains("snapshot="), "{kept}");
    assert!(kept.contains("queues='7'"), "{kept}");
}
