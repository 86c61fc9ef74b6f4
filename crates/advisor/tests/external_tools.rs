//! Checks the output of `--fix` with libvirt's schema of domains, and with QEMU.
//!
//! Without these programs nothing is tested; `cargo xtask test` installs them.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use advisor::convert::{Direction, convert};
use advisor::fix::{Wanted, fix};
use advisor::input::Input;
use advisor::rules::Rules;

use crate::support::input;

fn corpus(directory: &str) -> Vec<(String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/corpus")
        .join(directory);
    let mut files: Vec<_> = fs::read_dir(path)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            (
                path.file_name().unwrap().to_string_lossy().into_owned(),
                fs::read_to_string(&path).unwrap(),
            )
        })
        .collect();
    files.sort();
    files
}

/// Whether libvirt's schema accepts a domain; `None` without the program.
fn is_valid(directory: &Path, text: &str) -> Option<Result<(), String>> {
    let file = directory.join("domain.xml");
    fs::write(&file, text).unwrap();
    let xmllint = Command::new("xmllint").arg("--version").output();
    let output = Command::new("virt-xml-validate")
        .arg(&file)
        .arg("domain")
        .output();
    match (output, xmllint) {
        (Err(e), _) | (_, Err(e)) if e.kind() == ErrorKind::NotFound => None,
        (Ok(output), Ok(_)) if output.status.success() => Some(Ok(())),
        (Ok(output), _) => Some(Err(String::from_utf8_lossy(&output.stderr).into_owned())),
        (Err(e), _) => panic!("{e}"),
    }
}

#[test]
fn fixed_domains_are_valid() {
    let rules = Rules::built_in().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let (mut fixed_ones, mut converted_ones) = (0, 0);
    for (name, text) in corpus("libvirt") {
        let before = match is_valid(directory.path(), &text) {
            Some(before) => before,
            None => return eprintln!("skipped: virt-xml-validate or xmllint is not installed"),
        };
        // Schemas that are older than a feature refuse the original already.
        if before.is_err() {
            continue;
        }
        let fixed = fix(input(&name, &text), &rules, None, Wanted::default()).unwrap();
        if !fixed.done.is_empty() {
            fixed_ones += 1;
            let text = &fixed.input.sources[0].text;
            let valid = is_valid(directory.path(), text).unwrap();
            assert_eq!(valid, Ok(()), "{name}:\n{text}");
        }
        let in_metadata = convert(vec![fixed.input.clone()], Direction::ToMetadata);
        if let Ok(named) = in_metadata {
            let valid = is_valid(directory.path(), &named.inputs[0].sources[0].text);
            assert_eq!(valid.unwrap(), Ok(()), "{name}");
        }
        if let Ok(converted) = convert(vec![fixed.input], Direction::ToRingdisk) {
            converted_ones += 1;
            let text = &converted.inputs[0].sources[0].text;
            assert_eq!(
                is_valid(directory.path(), text).unwrap(),
                Ok(()),
                "{name}:\n{text}"
            );
            // And back again.
            let config = input("ringdisk.toml", converted.config.as_deref().unwrap());
            let back =
                convert(vec![converted.inputs[0].clone(), config], Direction::ToQemu).unwrap();
            let text = &back.inputs[0].sources[0].text;
            assert_eq!(
                is_valid(directory.path(), text).unwrap(),
                Ok(()),
                "{name}:\n{text}"
            );
            let files = |input: &Input| {
                input.vms[0]
                    .disks
                    .iter()
                    .map(|disk| disk.file.clone())
                    .collect::<Vec<_>>()
            };
            let first = input(
                &name,
                &corpus("libvirt")
                    .into_iter()
                    .find(|(other, _)| *other == name)
                    .unwrap()
                    .1,
            );
            assert_eq!(files(&back.inputs[0]), files(&first), "{name}");
        }
    }
    assert!(
        fixed_ones >= 12 && converted_ones >= 6,
        "{fixed_ones} fixed, {converted_ones} converted"
    );
}

fn has_qemu() -> bool {
    let version = Command::new("qemu-system-x86_64").arg("--version").output();
    if version.is_err() {
        eprintln!("skipped: qemu-system-x86_64 is not installed");
    }
    version.is_ok()
}

/// Starts QEMU without letting its guest run, and ends it.
fn starts(command: &str) -> Option<Result<(), String>> {
    let mut child = match Command::new("sh")
        .arg("-c")
        .arg(command)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
    {
        Ok(child) => child,
        Err(_) => return None,
    };
    let mut stdin = child.stdin.take().unwrap();
    // If it has ended already, its exit status says why.
    let _ = stdin.write_all(b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"quit\"}\n");
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    Some(if output.status.success() {
        Ok(())
    } else {
        Err(errors)
    })
}

/// A command line with existing files instead of its own, and without KVM.
fn for_this_host(text: &str, file: &Path, qcow2: &Path) -> String {
    let text = text
        .replace("host_device", "file")
        .replace(" disk.img", " /vms/disk.img");
    let mut text = text.replace("=disk.img", "=/vms/disk.img");
    let prefixes = ["/dev/vg0/", "/vms/", "ubuntu/", "/dev/sd"];
    for prefix in prefixes {
        while let Some(start) = text.find(prefix) {
            let rest = &text[start..];
            let end = rest.find([' ', '\n', '"', '\'']).unwrap_or(rest.len());
            // Names with doubled commas and spaces are of one test only.
            let end = if rest.starts_with("/vms/a,,b c.img") {
                15
            } else {
                rest[..end].find(',').unwrap_or(end)
            };
            let path = if rest[..end].ends_with("qcow2") {
                qcow2
            } else {
                file
            };
            text.replace_range(start..start + end, path.to_str().unwrap());
        }
    }
    let text = text.replace("kvm", "tcg");
    let text = text
        .replace("/usr/bin/qemu-system", "qemu-system")
        .replace("sudo nice -n 5", "");
    let line = text.trim_end().trim_end_matches("; echo done").trim_end();
    format!("{line} -accel tcg -S -display none -qmp stdio -nic none")
}

#[test]
fn qemu_starts_with_fixed_command_lines() {
    if !has_qemu() {
        return;
    }
    let rules = Rules::built_in().unwrap();
    // On a file system that takes O_DIRECT, which /tmp need not be.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = directory.path().join("disk.img");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let qcow2 = directory.path().join("disk.qcow2");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&qcow2)
        .arg("64M")
        .status();
    assert!(made.unwrap().success());
    let mut started = 0;
    let mut were_refused = 0;
    let mut refused = Vec::new();
    for (name, text) in corpus("qemu") {
        // What needs a cluster, a server, a device of this host or files of its own.
        let aside = [
            "rbd",
            "vhost",
            "vfio",
            "readconfig",
            "@",
            "cdrom",
            "[drive",
            "mem-path",
            "-cpu ",
            "-nographic",
        ];
        if aside.iter().any(|word| text.contains(word)) || !name.ends_with(".sh") {
            continue;
        }
        let fixed = fix(input(&name, &text), &rules, None, Wanted::default()).unwrap();
        let now = for_this_host(&fixed.input.sources[0].text, &file, &qcow2);
        let now = now.replace("-enable-tcg", "");
        if text.contains("kvm ") && text.starts_with("kvm") {
            continue;
        }
        let fixable = fixed.left.is_empty();
        let result = starts(&now).unwrap();
        if fixable {
            if let Err(errors) = result {
                refused.push(format!("{name}: {now}\n  {errors}"));
            }
            started += 1;
        }
        if name == "native-buffered.sh"
            || name == "mapping-hole.sh"
            || name == "thread-twice.sh"
            || name == "thread-undefined.sh"
        {
            let before = starts(&for_this_host(&text, &file, &qcow2)).unwrap();
            assert!(
                before.is_err(),
                "{name}: predicted an error, and QEMU starts"
            );
            were_refused += 1;
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
    assert!(
        started >= 15 && were_refused == 4,
        "{started} started, {were_refused} were refused before"
    );
}

/// Discards must pass through all nodes to the file. By default, a nested node passes them on, and a named node does not.
#[test]
fn discards_pass_nodes_as_modelled() {
    if !has_qemu() {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = directory.path().join("disk.img");
    let name = file.display();
    let group = "-object throttle-group,id=g,x-iops-total=1000";
    let named = format!("-blockdev driver=file,node-name=p,filename={name}");
    let passes = |nodes: &str| {
        fs::write(&file, vec![1; 1 << 20]).unwrap();
        fs::File::open(&file).unwrap().sync_all().unwrap();
        let discard = "{\"execute\":\"human-monitor-command\",\"arguments\":{\"command-line\":\"qemu-io a \\\"discard 0 1M\\\"\"}}";
        let command = format!(
            "printf '%s\\n' '{{\"execute\":\"qmp_capabilities\"}}' '{discard}' '{{\"execute\":\"quit\"}}' | \
             qemu-system-x86_64 -M none -S -nodefaults -display none -qmp stdio {nodes}"
        );
        let output = Command::new("sh").args(["-c", &command]).output().unwrap();
        assert!(output.status.success(), "{nodes}: {output:?}");
        fs::metadata(&file).unwrap().blocks() == 0
    };
    for (nodes, expected) in [
        (
            format!("{named} -blockdev driver=raw,node-name=a,file=p,discard=unmap"),
            false,
        ),
        (
            format!("{named},discard=unmap -blockdev driver=raw,node-name=a,file=p,discard=unmap"),
            true,
        ),
        (
            format!("{named},discard=unmap -blockdev driver=raw,node-name=a,file=p"),
            false,
        ),
        (
            format!(
                "-blockdev driver=raw,node-name=a,discard=unmap,file.driver=file,file.filename={name}"
            ),
            true,
        ),
        (
            format!(
                "-blockdev driver=raw,node-name=a,discard=unmap,file.driver=file,file.filename={name},file.discard=ignore"
            ),
            false,
        ),
        (
            format!(
                "{group} {named},discard=unmap -blockdev driver=throttle,throttle-group=g,node-name=t,file=p \
                 -blockdev driver=raw,node-name=a,file=t,discard=unmap"
            ),
            false,
        ),
    ] {
        assert_eq!(passes(&nodes), expected, "{nodes}");
        let line =
            format!("qemu-system-x86_64 -accel kvm {nodes} -device virtio-blk-pci,drive=a\n");
        let read = input("vm.sh", &line);
        let discard = read.vms[0].disks[0].table.word("disk.discard");
        assert_eq!(discard == Some("unmap"), expected, "{nodes}");
    }
    let line = "qemu-system-x86_64 -accel kvm -blockdev driver=file,node-name=p,filename=/vms/a.qcow2 \
                -blockdev driver=qcow2,node-name=a,file=p,discard=unmap -device virtio-blk-pci,drive=a\n";
    let rules = Rules::built_in().unwrap();
    let fixed = fix(input("vm.sh", line), &rules, None, Wanted::default()).unwrap();
    assert_eq!(
        fixed.input.sources[0].text.matches("discard=unmap").count(),
        2
    );
}

/// The disk that a VM boots: its boot sector ends QEMU with the disk's number.
fn booted(command: &str) -> Option<i32> {
    let status = Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .status()
        .unwrap();
    // QEMU's debug-exit doubles it and adds 1.
    status.code().map(|code| code >> 1)
}

/// Options that define disks, and the number of the disk that the firmware boots.
fn boot_orders(directory: &Path) -> Vec<(String, i32)> {
    let drive = |number: u8, rest: &str| {
        format!(
            "-drive file={}/disk{number},format=raw,{rest}",
            directory.display()
        )
    };
    vec![
        (format!("{} {}", drive(2, "if=ide"), drive(3, "if=ide")), 2),
        (
            format!("{} {}", drive(2, "if=virtio"), drive(3, "if=ide")),
            3,
        ),
        (
            format!("{} {}", drive(2, "if=virtio"), drive(3, "if=virtio")),
            2,
        ),
        (
            format!(
                "{} {} -device virtio-blk-pci,drive=b",
                drive(2, "if=virtio"),
                drive(3, "if=none,id=b")
            ),
            3,
        ),
        (
            format!(
                "{} -device ide-hd,drive=a,bus=ide.1 {} -device ide-hd,drive=b,bus=ide.0",
                drive(2, "if=none,id=a"),
                drive(3, "if=none,id=b")
            ),
            3,
        ),
        (
            format!(
                "-device lsi53c895a {} -device scsi-hd,drive=a {}",
                drive(2, "if=none,id=a"),
                drive(3, "if=virtio")
            ),
            3,
        ),
        (
            format!(
                "-usb {} -device usb-storage,drive=a {}",
                drive(2, "if=none,id=a"),
                drive(3, "if=virtio")
            ),
            3,
        ),
        (
            format!(
                "{} -device ide-hd,drive=a,bootindex=1 {}",
                drive(2, "if=none,id=a"),
                drive(3, "if=virtio")
            ),
            2,
        ),
        (
            format!(
                "{} {} -device ide-hd,drive=b",
                drive(2, "if=virtio"),
                drive(3, "if=none,id=b")
            ),
            3,
        ),
        (
            format!(
                "{} -device ide-hd,drive=a {}",
                drive(2, "if=none,id=a"),
                drive(3, "if=ide")
            ),
            3,
        ),
        (
            format!(
                "{} -device virtio-blk-pci,drive=a {} -device virtio-net-pci,romfile=,bootindex=9",
                drive(2, "if=none,id=a"),
                drive(3, "if=ide")
            ),
            3,
        ),
        (
            format!(
                "{} -device '{{\"driver\":\"virtio-blk-pci\",\"drive\":\"a\"}}' {}",
                drive(2, "if=none,id=a"),
                drive(3, "if=virtio")
            ),
            3,
        ),
    ]
}

/// QEMU's firmware boots the same disk before and after a fix, and tries disks in the assumed order.
#[test]
fn firmware_boots_the_same_disk() {
    if !has_qemu() {
        return;
    }
    let rules = Rules::built_in().unwrap();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for number in [2, 3] {
        // mov dx, 0x501; mov al, NUMBER; out dx, al
        let mut sector = vec![0xba, 0x01, 0x05, 0xb0, number, 0xee];
        sector.resize(510, 0);
        sector.extend([0x55, 0xaa]);
        sector.resize(1 << 20, 0);
        fs::write(directory.path().join(format!("disk{number}")), sector).unwrap();
    }
    for (disks, boots) in boot_orders(directory.path()) {
        let command = format!(
            "qemu-system-x86_64 -accel tcg -m 64 -display none -nic none -device isa-debug-exit,iobase=0x501,iosize=2 {disks}"
        );
        assert_eq!(booted(&command), Some(boots), "{command}");
        let fixed = fix(input("vm.sh", &command), &rules, None, Wanted::default()).unwrap();
        let now = &fixed.input.sources[0].text;
        assert!(*now != command, "{command}: {:?}", fixed.left);
        assert_eq!(booted(now), Some(boots), "{command}\n{now}");
    }
}
