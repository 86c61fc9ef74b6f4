//! Shell scripts: redirections, substitutions and anything not understood are not disks, cause no findings, and do not
//! change.

use advisor::fix::{Fixed, Unfixed};
use advisor::input::{Input, Surroundings};
use advisor::read::read;
use advisor::text::Source;

use crate::support::{findings, fixed, input, text};

fn files(input: &Input) -> Vec<&str> {
    let disks = input.vms.iter().flat_map(|vm| &vm.disks);
    disks.map(|disk| disk.file.as_str()).collect()
}

const GOOD: &str = "-accel kvm -machine q35 -object iothread,id=i0 \
                    -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=none,aio=native,discard=unmap \
                    -device virtio-blk-pci,drive=a,iothread=i0";

#[test]
fn redirections_are_not_disks() {
    for tail in [
        "> /var/log/vm.log 2>&1",
        "2>/dev/null",
        ">>log </dev/null",
        "&> log",
        "2>&1 | tee /var/log/vm.log",
        "<<< 'quit'",
        "<<EOF\nquit\nEOF",
        "& echo $! > /run/vm.pid",
        "&& rm /run/vm.pid || exit 1",
        "; rm -f /run/vm.pid # done",
    ] {
        let good = format!("#!/bin/sh\nqemu-system-x86_64 {GOOD} {tail}\n");
        assert_eq!(files(&input("vm", &good)), ["/dev/vg0/a"], "{tail}");
        assert_eq!(findings(&good), Vec::<String>::new(), "{tail}");
        assert_eq!(text(&fixed(&good)), good, "{tail}");
        // What is changed leaves what follows as it is.
        let slow = format!(
            "#!/bin/sh\nqemu-system-x86_64 -accel kvm -drive file=/dev/vg0/a,format=raw,if=virtio {tail}\n"
        );
        let fixed = fixed(&slow);
        assert!(
            !fixed.done.is_empty() && fixed.left.is_empty(),
            "{tail}: {:?}",
            fixed.left
        );
        assert!(
            text(&fixed).ends_with(&format!(" {tail}\n")),
            "{}",
            text(&fixed)
        );
        assert_eq!(files(&fixed.input), ["/dev/vg0/a"], "{tail}");
    }
}

/// A redirection inside a command stays in its place, even between an option and its value.
#[test]
fn redirections_may_be_anywhere() {
    let slow = "qemu-system-x86_64 >log -accel 2>&1 kvm -drive file=/dev/vg0/a,format=raw,if=virtio 2>err -m 1G\n";
    let fixed = fixed(slow);
    assert_eq!(files(&fixed.input), ["/dev/vg0/a"]);
    for part in ["-64 >log -accel 2>&1 kvm ", " 2>err -m 1G\n"] {
        assert!(
            text(&fixed).contains(part.trim_start_matches("-64")),
            "{}",
            text(&fixed)
        );
    }
    let split = "qemu-system-x86_64 -accel kvm -drive >log file=/dev/vg0/a,format=raw,if=virtio\n";
    assert_eq!(text(&self::fixed(split)), split);
}

/// A variable may contain the machine type, the accelerator, threads and anything else.
#[test]
fn variables_make_properties_unknown() {
    for script in [
        "qemu-system-x86_64 -drive file=/dev/vg0/a,format=raw,cache=none,aio=native \"$@\"",
        "qemu-system-x86_64 $OPTS -drive file=/dev/vg0/a,format=raw,cache=none,aio=native",
        "qemu-system-x86_64 ${OPTS[@]} -device virtio-blk-pci,drive=a,iothread=i7 \
         -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=none,aio=native,discard=unmap",
        "qemu-system-x86_64 \"$@\" -chardev socket,id=c,path=/run/a,reconnect-ms=1000 -device vhost-user-blk-pci,chardev=c",
        "qemu-system-x86_64 $(options) -object iothread,id=i0",
        "qemu-system-x86_64 -$ACCEL kvm -object iothread,id=i0",
        "qemu-system-x86_64 -accel $ACCEL -machine $MACHINE -smp $CPUS \
         -drive file=/dev/vg0/a,format=raw,cache=none,aio=native,discard=unmap",
        "qemu-system-x86_64 -accel kvm -drive file=/vms/a.img,if=virtio,$MORE",
        "qemu-system-x86_64 -accel kvm -drive $DRIVE",
        "qemu-system-x86_64 -accel kvm -drive file=/vms/a.img,format=raw,cache=none,aio=io_uring,if=$IF",
        "qemu-system-x86_64 -accel kvm -object iothread,id=i0 -device virtio-blk-pci,drive=a,$IOTHREAD \
         -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=$CACHE,aio=threads,discard=unmap",
        "qemu-system-x86_64 -readconfig there-is-none.cfg -drive file=/dev/vg0/a,format=raw,cache=none,aio=native",
        "qemu-system-x86_64 @there-is-none -drive file=/dev/vg0/a,format=raw,cache=none,aio=native",
    ] {
        assert_eq!(findings(script), Vec::<String>::new(), "{script}");
        assert_eq!(text(&fixed(script)), script);
    }
}

/// A variable in a file name does not affect other options.
#[test]
fn options_next_to_variables_count() {
    let script = "IMG=$HOME/a.img\nqemu-system-x86_64 -accel kvm -machine q35 -m $MEM -drive file=\"$HOME\"/vms/a.img,format=raw,if=ide \
                  -drive file=$B,format=raw,if=ide,cache=unsafe \"$@\"\n";
    let found = findings(script);
    assert_eq!(found, ["cache-unsafe", "emulated-bus", "emulated-bus"]);
    let fixed = fixed(script);
    assert!(
        text(&fixed).contains("file=$B,format=raw,if=ide,cache=writeback \"$@\""),
        "{}",
        text(&fixed)
    );
    assert!(
        text(&fixed).contains("file=\"$HOME\"/vms/a.img,format=raw,if=ide "),
        "{}",
        text(&fixed)
    );
}

/// A word that may be the value of an unknown option is not a disk.
#[test]
fn value_of_an_unknown_option_is_not_a_disk() {
    let script = "qemu-system-x86_64 -new-flag -drive file=/vms/a.img,format=raw -new-option value -m 1G $X what";
    assert_eq!(files(&input("vm", script)), ["/vms/a.img"]);
}

/// A removal keeps quotes balanced.
#[test]
fn quotes_stay_balanced() {
    let script = "qemu-system-x86_64 -accel kvm -machine q35 -object iothread,id=i0 \
                  -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=none,aio=native,discard=unmap \
                  -device virtio-blk-pci,drive=a,ioeventfd=\"off\",iothread=i0\n";
    let fixed = fixed(script);
    assert_eq!(text(&fixed), script, "{:?}", fixed.left);
    assert_eq!(fixed.left.len(), 1);
}

/// The value of -hda and similar options is a file name, including commas.
#[test]
fn file_names_may_have_commas() {
    let script = "qemu-system-x86_64 -accel kvm -hda /dev/a,format=raw\n";
    assert_eq!(files(&input("vm", script)), ["/dev/a,format=raw"]);
    let fixed = fixed(script);
    assert_eq!(
        files(&fixed.input),
        ["/dev/a,format=raw"],
        "{}",
        text(&fixed)
    );
}

/// Only shell scripts are read: systemd units and batch files have other rules for quotes and variables.
#[test]
fn non_shell_scripts_are_refused() {
    for (script, why) in [
        (
            "[Unit]\nDescription=a\n[Service]\nExecStart=/usr/bin/env qemu-system-x86_64 -drive file=a\n",
            "systemd",
        ),
        (
            "qemu-system-x86_64 ^\r\n  -drive file=C:\\vms\\a.img\r\n",
            "batch file",
        ),
        ("qemu-system-x86_64 -drive file='a\n", "quote"),
    ] {
        let error = read(Source::new("vm", script), Surroundings::default()).unwrap_err();
        assert!(error.problem.contains(why), "{error}");
    }
}

/// Proxmox passes `args:` to QEMU without a shell: `>` and `$` have no special meaning.
#[test]
fn proxmox_args_are_not_shell_syntax() {
    let text = "scsihw: virtio-scsi-single\nmemory: 2048\nargs: -device vmgenid,guid=$X;y -drive file=/a>b,if=none,id=x \
                -device virtio-blk-pci,drive=x\n";
    assert_eq!(files(&input("vm", text)), ["/a>b"]);
}

/// A new key is inserted once, into the object that it belongs to, whatever its first key is.
#[test]
fn json_keys_are_inserted_into_their_object() {
    let lines = [
        (
            "-blockdev '{\"driver\":\"qcow2\",\"node-name\":\"f0\",\"file\":{\"driver\":\"file\",\"filename\":\"/vms/a.qcow2\"}}'",
            "",
        ),
        (
            "-blockdev '{\"file\":{\"driver\":\"file\",\"filename\":\"/vms/a.qcow2\"},\"driver\":\"qcow2\",\"node-name\":\"f0\"}'",
            "",
        ),
        (
            "-blockdev '{\"cache\":{\"direct\":true},\"driver\":\"file\",\"node-name\":\"f0\",\"filename\":\"/vms/a.img\"}'",
            "",
        ),
        (
            "-blockdev '{\"driver\":\"raw\",\"node-name\":\"f0\",\"cache\":{\"no-flush\":false},\"file\":{\"driver\":\"file\",\"filename\":\"/vms/a.img\"}}'",
            "\"cache\":{\"direct\":true,\"no-flush\":false}",
        ),
        (
            "-blockdev \"{\\\"cache\\\": {}, \\\"driver\\\":\\\"file\\\",\\\"node-name\\\":\\\"f0\\\",\\\"filename\\\":\\\"/vms/a.img\\\"}\"",
            "\\\"cache\\\": {\\\"direct\\\":true}",
        ),
    ];
    for (blockdev, part) in lines {
        let line = format!(
            "qemu-system-x86_64 -accel kvm -machine q35 {blockdev} -device virtio-blk-pci,drive=f0\n"
        );
        let fixed = fixed(&line);
        let now = text(&fixed);
        assert!(now.contains(part), "{now}");
        assert_ne!(now, line);
        for key in ["cache", "direct", "discard", "aio"] {
            let most = match key {
                "discard" => blockdev.matches("driver").count(),
                _ => 1,
            };
            let found = now.matches(&format!("{key}\\\":")).count()
                + now.matches(&format!("{key}\":")).count();
            assert!(found <= most, "{key}: {now}");
        }
        assert!(fixed.rounds < 10, "{now}");
        assert_eq!(text(&self::fixed(now)), now);
    }
}

/// Removing a key also removes one comma, with or without white space around it.
#[test]
fn removing_a_key_keeps_json_valid() {
    for device in [
        "{\"driver\":\"virtio-blk-pci\", \"drive\":\"a\", \"iothread\":\"i0\", \"ioeventfd\":false}",
        "{\"driver\":\"virtio-blk-pci\", \"ioeventfd\":false , \"drive\":\"a\", \"iothread\":\"i0\"}",
    ] {
        let line = format!(
            "qemu-system-x86_64 -accel kvm -machine q35 -object iothread,id=i0 \
             -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=none,aio=native,discard=unmap -device '{device}'\n"
        );
        let fixed = fixed(&line);
        let now = text(&fixed);
        assert!(!now.contains("ioeventfd"), "{now}");
        let json = now.split('\'').nth(1).unwrap();
        assert!(
            serde_json::from_str::<serde_json::Value>(json).is_ok(),
            "{json}"
        );
    }
}

/// A drive that has only the wrong bus.
fn disk(id: &str, interface: &str) -> String {
    format!(
        "-drive file=/dev/vg0/{id},format=raw,cache=none,aio=native,discard=unmap,if={interface},id={id}"
    )
}

/// Disks with their buses.
fn buses(fixed: &Fixed) -> Vec<(&str, &str)> {
    let disks = fixed.input.vms.iter().flat_map(|vm| &vm.disks);
    disks
        .map(|disk| {
            (
                disk.name.as_str(),
                disk.table.word("disk.bus").unwrap_or_default(),
            )
        })
        .collect()
}

/// Changes that are each correct must not change the boot disk together.
#[test]
fn changes_of_a_round_keep_the_boot_disk() {
    let line = |text: &str| format!("qemu-system-x86_64 -accel kvm {text}\n");
    // The IDE disk is booted, so it must not come behind c.
    let both = line(&format!(
        "{} {} -device ide-hd,drive=h",
        disk("c", "virtio"),
        disk("h", "none")
    ));
    let fixed = self::fixed(&both);
    let first = text(&fixed).find("drive=h").unwrap();
    let other = text(&fixed).find("drive=c").unwrap_or(usize::MAX);
    let is_ide = buses(&fixed).contains(&("h", "ide"));
    assert!(is_ide || first < other, "{}", text(&fixed));
    // QEMU attaches a drive before it makes a device.
    let mixed = line(&format!(
        "{} -device ide-hd,drive=d {}",
        disk("d", "none"),
        disk("g", "ide")
    ));
    let fixed = self::fixed(&mixed);
    assert!(buses(&fixed).contains(&("g", "ide")), "{}", text(&fixed));
}

/// The boot index of a network card or a CD-ROM does not order the disks.
#[test]
fn bootindex_of_other_devices_does_not_order_disks() {
    for other in [
        "-device virtio-net-pci,romfile=,bootindex=9",
        "-drive file=/a.iso,if=none,id=cd,media=cdrom -device ide-cd,drive=cd,bootindex=1",
    ] {
        let line = format!(
            "qemu-system-x86_64 -accel kvm {} -device virtio-blk-pci,drive=b {} {other}\n",
            disk("b", "none"),
            disk("c", "ide")
        );
        let fixed = fixed(&line);
        assert!(buses(&fixed).contains(&("c", "ide")), "{}", text(&fixed));
    }
    // That of a disk does.
    let line = format!(
        "qemu-system-x86_64 -accel kvm {} -device virtio-blk-pci,drive=b,bootindex=1 {}\n",
        disk("b", "none"),
        disk("c", "ide")
    );
    assert!(!text(&fixed(&line)).contains("if=ide"));
}

/// The new device of a drive follows all others, since QEMU creates devices for drives last: a network card keeps its slot.
#[test]
fn new_device_does_not_move_others() {
    let line = format!(
        "qemu-system-x86_64 -accel kvm -machine q35 {} -netdev user,id=n -device virtio-net-pci,netdev=n {} -m 1G\n",
        disk("a", "virtio"),
        disk("b", "virtio")
    );
    let fixed = fixed(&line);
    let now = text(&fixed);
    let at = |part: &str| now.find(part).unwrap_or_else(|| panic!("{part}: {now}"));
    assert!(at("virtio-net-pci") < at("virtio-blk-pci,drive=a"), "{now}");
    assert!(at("blk-pci,drive=a") < at("blk-pci,drive=b"), "{now}");
    assert!(fixed.left.is_empty(), "{:?}", fixed.left);
    // Behind a drive that keeps its device, nothing changes.
    let left = format!(
        "qemu-system-x86_64 -accel kvm -machine q35 {},$MORE {}\n",
        disk("a", "virtio"),
        disk("b", "virtio")
    );
    assert_eq!(text(&self::fixed(&left)), left);
}

/// A device whose driver is a shell variable may become the boot disk once another disk has left its bus.
#[test]
fn device_in_a_variable_may_be_the_boot_disk() {
    for device in [
        "\"$DEV\"",
        "$T,drive=b",
        "driver=$T,drive=b",
        "$(echo ide-hd,drive=b)",
        "ide-hd,drive=b,$MORE",
        "'{\"driver\":\"'$T'\",\"drive\":\"b\"}'",
    ] {
        let line = |more: &str| {
            format!(
                "qemu-system-x86_64 -accel kvm {} -device ide-hd,drive=a{more} {} -device {device}\n",
                disk("a", "none"),
                disk("b", "none")
            )
        };
        let fixed = fixed(&line(""));
        assert!(text(&fixed).contains("ide-hd,drive=a "), "{}", text(&fixed));
        let is_expected = |left: &Unfixed| left.reason.contains("another disk");
        assert!(
            fixed.left.iter().any(is_expected),
            "{device}: {:?}",
            fixed.left
        );
        // With a bootindex, the buses say nothing.
        let ordered = self::fixed(&line(",bootindex=1"));
        assert!(
            text(&ordered).contains("virtio-blk-pci,drive=a,bootindex=1"),
            "{}",
            text(&ordered)
        );
    }
}

/// A change of the driver would lose the `-global` settings of the old one, or get those of the new one.
#[test]
fn disk_with_a_global_keeps_its_bus() {
    let line = |global: &str, device: &str| {
        format!(
            "qemu-system-x86_64 -accel kvm {} -device {device},drive=a {global}\n",
            disk("a", "none")
        )
    };
    for global in [
        "-global ide-hd.write-cache=off",
        "-global driver=ide-hd,property=serial,value=a",
        "-global virtio-blk-pci.serial=GG",
        "-global ide-device.serial=a",
        "-global \"$GLOBAL\"",
        "-global $DRIVER.serial=a",
        "-global driver=$DRIVER,property=serial,value=a",
        "-global driver=isa-fdc,$MORE",
    ] {
        let line = line(global, "ide-hd");
        let fixed = fixed(&line);
        assert_eq!(text(&fixed), line, "{global}");
        let is_expected = |left: &Unfixed| left.reason.contains("-global");
        assert!(
            fixed.left.iter().any(is_expected),
            "{global}: {:?}",
            fixed.left
        );
    }
    // Other drivers are no matter of disks.
    for global in [
        "-global ICH9-LPC.disable_s3=1",
        "-global driver=cfi.pflash01,property=secure,value=on",
        "-global kvm-pit.lost_tick_policy=$POLICY",
    ] {
        let fixed = fixed(&line(global, "usb-storage"));
        assert_eq!(buses(&fixed), [("a", "virtio-blk")], "{global}");
    }
}

/// Strings in JSON with escaped quotes are not changed, and nothing else is changed for them.
#[test]
fn escaped_json_is_not_changed() {
    for (driver, more) in [
        ("ide-hd", ""),
        ("virtio-blk-pci", ""),
        ("virtio-blk-pci", " -object iothread,id=x"),
        ("virtio-blk-pci\\\",\\\"iothread\\\":\\\"gone", ""),
    ] {
        let line = format!(
            "qemu-system-x86_64 -accel kvm -machine q35 {} -device \"{{\\\"driver\\\":\\\"{driver}\\\",\\\"drive\\\":\\\"a\\\"}}\"{more}\n",
            disk("a", "none")
        );
        let fixed = fixed(&line);
        assert!(fixed.rounds < 4, "{line}");
        assert!(!text(&fixed).contains("iothread0"), "{}", text(&fixed));
        let is_expected = |left: &Unfixed| left.reason.contains("JSON is unclear");
        assert!(
            driver.contains("iothread") || fixed.left.iter().any(is_expected),
            "{line}: {:?}",
            fixed.left
        );
        let device = |text: &str| {
            text[text.find("-device").unwrap()..]
                .split(' ')
                .nth(1)
                .map(str::to_owned)
        };
        assert_eq!(device(text(&fixed).trim_end()), device(line.trim_end()));
    }
}

/// A `-set` in a shell variable may set the same value, and QEMU refuses a value that is set twice.
#[test]
fn set_with_a_variable_may_set_anything() {
    for set in [
        "\"$V\"",
        "$V",
        "drive.a.$KEY=writeback",
        "drive.$ID.cache=none",
        "$(cat set)",
    ] {
        let line = format!(
            "qemu-system-x86_64 -accel kvm -drive file=/dev/vg0/a,format=raw,if=none,id=a,aio=native \
             -device ide-hd,drive=a -object iothread,id=x -set {set}\n"
        );
        let fixed = fixed(&line);
        assert_eq!(text(&fixed), line, "{set}");
    }
    // A drive without an id is none of its matters.
    let line = "qemu-system-x86_64 -accel kvm -machine q35 -drive file=/dev/vg0/a,format=raw,if=ide,cache=unsafe -set \"$V\"\n";
    let beside = fixed(line);
    assert!(
        text(&beside).contains(",cache=none"),
        "{}: {:?}",
        text(&beside),
        beside.left
    );
    // With a key that is known, it says what it says.
    let line = "qemu-system-x86_64 -accel kvm -drive file=/dev/vg0/a,format=raw,if=none,id=a -device virtio-blk-pci,drive=a \
                -set drive.a.cache=writeback\n";
    let fixed = fixed(line);
    assert!(
        text(&fixed).contains("-set drive.a.cache=none") && !text(&fixed).contains(",cache="),
        "{}",
        text(&fixed)
    );
}

/// A VM with two disks, each after the given devices.
fn two_disks(first: &str, second: &str) -> String {
    format!(
        "qemu-system-x86_64 -accel kvm -object iothread,id=t {} {first} {} {second}\n",
        disk("a", "none"),
        disk("b", "none")
    )
}

/// The devices of a line.
fn devices(text: &str) -> Vec<&str> {
    let parts = text.trim_end().split(" -");
    parts.filter(|part| part.starts_with("device ")).collect()
}

/// With several SCSI controllers, only an id identifies the one of a disk: QEMU numbers the buses of controllers without an
/// id, and puts a disk without a bus on the last controller before it.
#[test]
fn scsi_disk_with_an_unclear_controller_is_not_changed() {
    for (first, second) in [
        (
            "-device lsi -device virtio-scsi-pci -device scsi-hd,drive=a,bus=scsi.0",
            "-device scsi-hd,drive=b,bus=scsi.1",
        ),
        (
            "-device lsi -device pvscsi -device scsi-hd,drive=a,bus=scsi.0",
            "-device scsi-hd,drive=b,bus=scsi.1",
        ),
        (
            "-device virtio-scsi-pci -device virtio-scsi-pci -device virtio-blk-pci,drive=a,iothread=t",
            "-device scsi-hd,drive=b,bus=scsi.1",
        ),
        (
            "-device lsi,id=z -device virtio-scsi-pci,id=y -device scsi-hd,drive=a,bus=z.0",
            "-device scsi-hd,drive=b",
        ),
        (
            "-device lsi -device scsi-hd,drive=a",
            "-device virtio-scsi-pci -device scsi-hd,drive=b",
        ),
        (
            "-device lsi -device scsi-hd,drive=a",
            "-device usb-uas,id=u -device scsi-hd,drive=b",
        ),
        (
            "-device lsi -device scsi-hd,drive=a",
            "-device \"$HBA\" -device scsi-hd,drive=b",
        ),
        (
            "-device lsi,id=scsi -device virtio-scsi-pci -device scsi-hd,drive=a,bus=scsi.0",
            "-device scsi-hd,drive=b,bus=scsi.0",
        ),
    ] {
        // Neither its bus, nor its controller, nor that one's thread; a bootindex says nothing of the controller.
        for more in ["", ",bootindex=1"] {
            let line = two_disks(first, &format!("{second}{more}"));
            let fixed = fixed(&line);
            assert_eq!(devices(text(&fixed)), devices(&line));
            let is_expected = |note: &advisor::model::Note| note.text.contains("SCSI controller");
            assert!(fixed.input.notes.iter().any(is_expected), "{line}");
        }
    }
    // With one controller, or with ids, it is clear.
    for (first, second) in [
        (
            "-device lsi -device scsi-hd,drive=a,bus=scsi.0",
            "-device scsi-hd,drive=b",
        ),
        (
            "-device virtio-scsi-pci,id=y -device lsi,id=z -device scsi-hd,drive=a,bus=z.0",
            "-device scsi-hd,drive=b,bus=z.0",
        ),
    ] {
        let fixed = fixed(&two_disks(first, second));
        assert_eq!(
            buses(&fixed),
            [("a", "virtio-scsi"), ("b", "virtio-scsi")],
            "{}",
            text(&fixed)
        );
    }
}

/// Likewise for IDE disks, for which the machine type has a built-in controller.
#[test]
fn ide_disk_with_an_unclear_controller_is_not_changed() {
    for (first, second) in [
        (
            "-device ahci,id=h -device ide-hd,drive=a",
            "-device ide-hd,drive=b,bus=ide.0",
        ),
        (
            "-device ahci -device ide-hd,drive=a,bus=ide.2",
            "-device ide-hd,drive=b,bus=ide.0",
        ),
        (
            "-device piix3-ide,id=h -device ide-hd,drive=a",
            "-device virtio-blk-pci,drive=b,iothread=t",
        ),
    ] {
        let line = two_disks(first, second);
        let fixed = fixed(&line);
        assert_eq!(devices(text(&fixed)), devices(&line));
        let is_expected = |left: &Unfixed| left.reason.contains("several controllers");
        assert!(fixed.left.iter().any(is_expected), "{:?}", fixed.left);
    }
    let named = two_disks(
        "-device ahci,id=h -device ide-hd,drive=a,bus=h.0",
        "-device ide-hd,drive=b,bus=h.1",
    );
    let fixed = fixed(&named);
    assert!(
        buses(&fixed).contains(&("b", "virtio-blk")),
        "{}",
        text(&fixed)
    );
}
