//! Disks of Proxmox VMs: what its administrator, its hookscript and its vzdump call. Proxmox' storage is a stand-in that has its
//! functions, and records what is activated.

mod vma;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::driver::{Device, DeviceConfig, HANG, Op};

use crate::control::server::{CommandOutput, Controlled};
use crate::support::content;

const STORAGE: &str = r#"
package PVE::Storage;
use strict; use warnings;
sub config { return {} }
sub note { open(my $log, '>>', "$ENV{STORE}/log"); print $log join(' ', @_), "\n"; close($log) }
sub activate_volumes { my ($cfg, $all) = @_; note('activate', @$all) }
sub deactivate_volumes { my ($cfg, $all) = @_; note('deactivate', @$all) }
sub path {
    my ($cfg, $volume) = @_;
    my ($storage, $name) = split(/:/, $volume, 2);
    die "storage '$storage' does not exist\n" if $storage ne 'local';
    my $path = "$ENV{STORE}/images/$name";
    die "no such volume '$volume'\n" if !-e $path;
    return wantarray ? ($path, 0, 'images') : $path;
}
1;
"#;

/// A host with one stopped VM, whose disk is a file.
struct Host {
    ringdisk: Controlled,
    vm: String,
}

impl Host {
    /// Prints a message and returns `None` where that is impossible. Sockets have fixed names, so each test has another VM.
    fn start(test: &str, vm: u32) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: {test}: only root has /run/ringdisk");
            return None;
        }
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = dir.path().to_owned();
        for new in ["pve/qemu-server", "run", "lib/PVE", "bin", "store/snippets"] {
            fs::create_dir_all(at.join(new)).unwrap();
        }
        std::os::unix::fs::symlink("/bin/false", at.join("bin/systemd-run")).unwrap();
        let images = at.join(format!("store/images/{vm}"));
        fs::create_dir_all(&images).unwrap();
        fs::write(images.join("disk-0.raw"), content(0, 4 << 20)).unwrap();
        fs::write(at.join("lib/PVE/Storage.pm"), STORAGE).unwrap();
        let store = at.join("store").display().to_string();
        let storages = format!("dir: local\n\tpath {store}\n\tcontent images,snippets\n");
        fs::write(at.join("pve/storage.cfg"), storages).unwrap();
        let config = format!(
            "boot: order=scsi0\ncores: 2\nmemory: 1024\nostype: l26\nscsi0: local:{vm}/disk-0.raw,iops=9999,serial=abc,size=4M\n\
             scsihw: virtio-scsi-single\n"
        );
        fs::write(at.join(format!("pve/qemu-server/{vm}.conf")), config).unwrap();
        let arguments = [
            format!("--nbd={}", at.join("nbd.sock").display()),
            format!("--allow-dir={}", at.display()),
            format!("--state={}", at.join("state").display()),
            format!(
                "null:1M,name=null,socket={}",
                at.join("null.sock").display()
            ),
        ];
        let ringdisk = Controlled::start_in(dir, &arguments);
        let vm = vm.to_string();
        Some(Self { ringdisk, vm })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.ringdisk.path(name)
    }

    fn image(&self) -> PathBuf {
        self.path(&format!("store/images/{}/disk-0.raw", self.vm))
    }

    fn config(&self) -> PathBuf {
        self.path(&format!("pve/qemu-server/{}.conf", self.vm))
    }

    fn run(&self, arguments: &[&str], has_control: bool) -> CommandOutput {
        CommandOutput::of(&mut self.command(arguments, has_control))
    }

    fn command(&self, arguments: &[&str], has_control: bool) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(arguments);
        for (name, place) in [("--pve", "pve"), ("--run", "run"), ("--locks", "locks")] {
            command.arg(name).arg(self.path(place));
        }
        if has_control {
            command.arg("--control").arg(&self.ringdisk.control);
        }
        let env = [("PERL5LIB", "lib"), ("STORE", "store")];
        command.envs(env.map(|(name, place)| (name, self.path(place))));
        // systemd would run a part of it without this environment.
        let programs = format!("{}:/usr/bin:/bin", self.path("bin").display());
        command.env("PATH", programs);
        command.env("TMPDIR", self.path("."));
        command
    }

    #[track_caller]
    fn does(&self, arguments: &[&str], has_control: bool) -> CommandOutput {
        let ran = self.run(arguments, has_control);
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
        ran
    }

    #[track_caller]
    fn hook(&self, phase: &str) {
        self.does(&["hook", "proxmox", &self.vm, phase], true);
    }

    fn disk(&self) -> Value {
        self.ringdisk.disk(&format!("vm-{}-scsi0", self.vm))
    }

    fn device(&self) -> Device {
        let socket = format!("/run/ringdisk/vm-{}-scsi0.sock", self.vm);
        Device::connect(Path::new(&socket), &DeviceConfig::default()).unwrap()
    }

    fn storage_log(&self) -> String {
        fs::read_to_string(self.path("store/log")).unwrap_or_default()
    }

    /// A process in the place of QEMU.
    fn qemu(&self) -> Child {
        let qemu = Command::new("sleep")
            .arg("600")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        fs::write(
            self.path(&format!("run/{}.pid", self.vm)),
            qemu.id().to_string(),
        )
        .unwrap();
        qemu
    }

    fn end(mut qemu: Child) {
        qemu.kill().unwrap();
        qemu.wait().unwrap();
    }
}

#[track_caller]
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < HANG, "{what}");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_vm_is_served_and_comes_back() {
    let Some(host) = Host::start("a_vm_is_served_and_comes_back", 990_001) else {
        return;
    };
    let vm = host.vm.clone();
    let before = fs::read_to_string(host.config()).unwrap();
    let shown = host.does(&["proxmox", "enable", &vm, "--dry-run"], false);
    assert!(
        shown.out.contains("-scsi0: local:") && shown.out.contains("+unused0: local:"),
        "{shown:?}"
    );
    assert_eq!(fs::read_to_string(host.config()).unwrap(), before);
    assert!(!host.path("store/snippets/ringdisk").exists());

    let enabled = host.does(&["proxmox", "enable", &vm, "--disk", "scsi0"], false);
    assert_eq!(enabled.out, shown.out);
    let script = fs::read_to_string(host.path("store/snippets/ringdisk")).unwrap();
    assert!(script.contains("ringdisk hook proxmox \"$@\""), "{script}");
    let vzdump = |phase: &str| host.run(&["hook", "vzdump", phase, "snapshot", &vm], false);
    vzdump("backup-start").assert_fails(1, &[&vm, "scsi0", "ringdisk proxmox backup"]);
    assert_eq!(vzdump("backup-end").code, Some(0));

    for _ in 0..2 {
        host.hook("pre-start");
        let disk = host.disk();
        assert_eq!(disk["file"], host.image().display().to_string(), "{disk}");
        assert_eq!(
            (&disk["domain"], &disk["target"]),
            (&vm.as_str().into(), &"scsi0".into())
        );
    }
    let mut guest = host.device();
    assert_eq!(guest.queues[0].read(0, 4096).unwrap(), content(0, 4096));
    assert_eq!(guest.queues[0].write(0, &[7; 4096]), 0);
    let queue = &mut guest.queues[0];
    assert_eq!(queue.run(Op::GetId, 0, 0), 0);
    assert!(queue.read_buffer(0, 20).starts_with(b"abc\0"));
    drop(guest);
    host.hook("post-stop");
    assert!(host.disk().is_null());
    let volume = format!("local:{vm}/disk-0.raw");
    let log = format!("activate {volume}\nactivate {volume}\ndeactivate {volume}\n");
    assert_eq!(host.storage_log(), log);

    host.does(&["proxmox", "disable", &vm], true);
    assert_eq!(fs::read_to_string(host.config()).unwrap(), before);
    assert_eq!(vzdump("backup-start").code, Some(0));
    let written = fs::read(host.image()).unwrap();
    assert!(written[..4096] == [7; 4096]);
}

/// What must not be: two programs with the same disk, a VM on an older file, or one that starts without its disk.
#[test]
fn mistakes_are_refused() {
    let Some(host) = Host::start("mistakes_are_refused", 990_002) else {
        return;
    };
    let vm = host.vm.clone();
    let qemu = host.qemu();
    let refused = host.run(&["proxmox", "enable", &vm], false);
    refused.assert_fails(1, &["it runs", "nothing has been changed"]);
    Host::end(qemu);
    host.run(&["proxmox", "enable", "1/../2"], false)
        .assert_fails(1, &["no number of a VM"]);
    host.run(&["proxmox", "enable", "990999"], false)
        .assert_fails(1, &["not on this host"]);
    host.run(&["proxmox", "disable", &vm], false)
        .assert_fails(1, &["serves no drive"]);
    host.does(&["proxmox", "enable", &vm], false);
    host.run(&["proxmox", "enable", &vm, "--disk", "scsi0"], false)
        .assert_fails(1, &["already"]);

    let enabled = fs::read_to_string(host.config()).unwrap();
    let start = || host.run(&["hook", "proxmox", &vm, "pre-start"], true);
    // Somebody has cleared the VM's notes, or removed the volume.
    let without: String = enabled
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(host.config(), without).unwrap();
    start().assert_fails(1, &["scsi0", "put it back"]);
    fs::write(host.config(), &enabled).unwrap();
    fs::rename(host.image(), host.path("away")).unwrap();
    start().assert_fails(1, &["no such volume"]);
    fs::rename(host.path("away"), host.image()).unwrap();
    // Moved by ringdisk while the VM ran.
    host.hook("pre-start");
    fs::copy(host.image(), host.path("store/other.raw")).unwrap();
    let other = host.path("store/other.raw").display().to_string();
    let guest = host.device();
    host.ringdisk
        .json(&["replace", &format!("vm-{vm}-scsi0"), &other]);
    drop(guest);
    let ended = host.run(&["hook", "proxmox", &vm, "post-stop"], true);
    ended.assert_fails(1, &["stays served", "other.raw"]);
    let refused = host.run(&["proxmox", "disable", &vm], true);
    refused.assert_fails(1, &["moved", "other.raw"]);
    assert_eq!(fs::read_to_string(host.config()).unwrap(), enabled);
    host.ringdisk.json(&["detach", &format!("vm-{vm}-scsi0")]);
    start().assert_fails(1, &["a disk was moved from it", "other.raw"]);
    // QEMU would not start, and not say why.
    fs::write(
        host.config(),
        enabled.replace("memory: 1024", "memory: 2048"),
    )
    .unwrap();
    start().assert_fails(1, &["memory", "2048", "disable"]);
    fs::remove_file(host.config()).unwrap();
    start().assert_fails(1, &["on no host"]);
    // An administrator has written 'args:'.
    let by_hand =
        "args: -chardev socket,id=c,path=/run/c.sock -device vhost-user-blk-pci,chardev=c\n";
    fs::write(
        host.config(),
        by_hand.to_owned() + &enabled.replace("args:", "#args:"),
    )
    .unwrap();
    let vzdump = host.run(&["hook", "vzdump", "backup-start", "snapshot", &vm], false);
    vzdump.assert_fails(1, &["lack the disk at /run/c.sock"]);
}

/// No hook is called on the source of a migration, nor where Proxmox' own cleanup fails.
#[test]
fn the_end_of_qemu_is_seen() {
    let Some(host) = Host::start("the_end_of_qemu_is_seen", 990_003) else {
        return;
    };
    let vm = host.vm.clone();
    host.does(&["proxmox", "enable", &vm], false);
    // The VM is started again before the process that waits for its first QEMU looks.
    host.hook("pre-start");
    let first = host.qemu();
    host.hook("post-start");
    Host::end(first);
    host.hook("post-stop");
    // On the target of a migration, the source still has the configuration.
    let of_source = host.path("pve/nodes/source/qemu-server");
    fs::create_dir_all(&of_source).unwrap();
    let of_source = of_source.join(host.config().file_name().unwrap());
    fs::rename(host.config(), &of_source).unwrap();
    host.hook("pre-start");
    assert!(!host.disk().is_null());
    fs::rename(&of_source, host.config()).unwrap();
    let second = host.qemu();
    host.hook("post-start");
    thread::sleep(Duration::from_secs(12));
    assert!(
        !host.disk().is_null(),
        "the disk of a VM that runs has ended"
    );
    // It goes to another host, with its configuration.
    fs::rename(host.config(), host.path("migrated.conf")).unwrap();
    Host::end(second);
    wait_until("the disk is not served any more", || host.disk().is_null());
    let volume = format!("local:{vm}/disk-0.raw");
    wait_until("the volume is inactive", || {
        host.storage_log()
            .ends_with(&format!("deactivate {volume}\n"))
    });
}

/// Proxmox' client, which stores what it is given, once the test lets it.
const CLIENT: &str = r#"#!/bin/bash
set -e
echo "$@" >"$STORE/arguments"
while [ ! -e "$STORE/go" ]; do sleep 0.05; done
for word; do
    case $word in
    *.img:* | *.conf:*) cp -- "${word#*:}" "$STORE/sent/${word%%:*}" ;;
    esac
done
[ ! -e "$STORE/fail" ]
"#;

/// An EFI volume beside the disk, which QEMU has; and rules of a firewall.
fn add_efi(host: &Host) {
    let efi = format!("local:{}/efi.raw", host.vm);
    fs::write(host.image().with_file_name("efi.raw"), content(9, 540_672)).unwrap();
    let config = fs::read_to_string(host.config()).unwrap();
    fs::write(
        host.config(),
        config.replace("memory:", &format!("efidisk0: {efi},size=528K\nmemory:")),
    )
    .unwrap();
    fs::create_dir_all(host.path("pve/firewall")).unwrap();
    let rules = host.path(&format!("pve/firewall/{}.fw", host.vm));
    fs::write(rules, "[OPTIONS]\nenable: 1\n").unwrap();
}

/// The configuration that a backup has: Proxmox has the drive, and each device its place.
fn stored_config(host: &Host, before: &str) -> String {
    let _ = host;
    let line = |drive: &str, name: &str| format!("#qmdump#map:{drive}:{name}:local:raw:\n");
    before.to_owned() + &line("efidisk0", "drive-efidisk0") + &line("scsi0", "drive-scsi0")
}

#[test]
fn proxmox_client_gets_what_it_restores() {
    let Some(host) = Host::start("proxmox_client_gets_what_it_restores", 990_004) else {
        return;
    };
    add_efi(&host);
    let before = fs::read_to_string(host.config()).unwrap();
    let client = host.path("bin/proxmox-backup-client");
    fs::write(&client, CLIENT).unwrap();
    fs::set_permissions(&client, fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(host.path("store/sent")).unwrap();
    let vm = host.vm.clone();
    let backup = [
        "proxmox",
        "backup",
        &vm,
        "--repository",
        "pbs:store",
        "--",
        "--ns",
        "vms",
    ];
    // The options of a test are before those of the client.
    let start = || {
        let mut all = host.command(&backup[..5], true);
        all.args(&backup[5..]);
        all.stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let refused = CommandOutput::of(&mut host.command(&backup[..5], true));
    refused.assert_fails(1, &[&vm, "vzdump"]);
    host.does(&["proxmox", "enable", &vm], false);
    host.hook("pre-start");
    let qemu = host.qemu();
    let mut guest = host.device();
    assert_eq!(guest.queues[0].write(128, &[5; 4096]), 0);

    // All of it is as it was at one moment, whatever the guest writes meanwhile.
    let mut expected = content(0, 4 << 20);
    expected[65536..65536 + 4096].fill(5);
    let running = start();
    wait_until("the client runs", || host.path("store/arguments").exists());
    assert_eq!(guest.queues[0].write(128, &[6; 8192]), 0);
    assert_eq!(guest.queues[0].write(0, &[6; 4096]), 0);
    let locked = fs::read_to_string(host.config()).unwrap();
    assert!(locked.contains("\nlock: backup\n"), "{locked}");
    CommandOutput::of(&mut host.command(&backup[..5], true))
        .assert_fails(1, &["is locked (backup)"]);
    fs::write(host.path("store/go"), "").unwrap();
    let ran = CommandOutput::from(running.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let sent = |name: &str| fs::read(host.path("store/sent").join(name)).unwrap();
    assert!(sent("drive-scsi0.img") == expected);
    assert!(sent("drive-efidisk0.img") == content(9, 540_672));
    assert_eq!(
        String::from_utf8(sent("qemu-server.conf")).unwrap(),
        stored_config(&host, &before)
    );
    assert!(sent("fw.conf").starts_with(b"[OPTIONS]"));
    let arguments = fs::read_to_string(host.path("store/arguments")).unwrap();
    let begin = format!(
        "backup --repository pbs:store --backup-type vm --backup-id {vm} --ns vms qemu-server.conf:"
    );
    assert!(arguments.starts_with(&begin), "{arguments}");
    let open = host.ringdisk.json(&["backup", "list"]);
    assert_eq!(open, serde_json::json!([]));
    assert!(!host.disk().is_null());
    let unlocked = fs::read_to_string(host.config()).unwrap();
    assert_eq!(unlocked, locked.replace("lock: backup\n", ""));

    // One that is not complete is none, and leaves nothing.
    fs::write(host.path("store/fail"), "").unwrap();
    let ran = CommandOutput::from(start().wait_with_output().unwrap());
    ran.assert_fails(1, &["proxmox-backup-client failed", "no backup is open"]);
    fs::remove_file(host.path("store/go")).unwrap();
    fs::remove_file(host.path("store/arguments")).unwrap();
    let interrupted = start();
    wait_until("the client runs", || host.path("store/arguments").exists());
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&interrupted),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    let ran = CommandOutput::from(interrupted.wait_with_output().unwrap());
    ran.assert_fails(1, &["no backup is open"]);
    let left = fs::read_dir(host.path(".")).unwrap().flatten();
    let left: Vec<_> = left
        .filter(|entry| {
            entry
                .file_name()
                .to_string_lossy()
                .starts_with("ringdisk-backup")
        })
        .collect();
    assert!(left.is_empty(), "{left:?}");
    drop(guest);
    Host::end(qemu);
}

/// A VM that does not run: its disks are served for the backup alone.
#[test]
fn an_archive_has_what_proxmox_restores() {
    let Some(host) = Host::start("an_archive_has_what_proxmox_restores", 990_005) else {
        return;
    };
    add_efi(&host);
    let before = fs::read_to_string(host.config()).unwrap();
    let vm = host.vm.clone();
    // Data, a hole, and an end that is none of a block.
    let mut expected = content(3, 5 << 20);
    expected.resize(9 << 20, 0);
    expected.extend(content(4, 4096 + 512));
    fs::write(host.image(), &expected).unwrap();
    host.does(&["proxmox", "enable", &vm], false);
    let dump = host.path("dump");
    fs::create_dir(&dump).unwrap();
    let dir = dump.display().to_string();
    for more in [&[][..], &["--uncompressed"]] {
        let arguments = [&["proxmox", "backup", &vm, "--dir", &dir], more].concat();
        host.does(&arguments, true);
        assert!(host.disk().is_null(), "it is not served afterwards");
        let made: Vec<_> = fs::read_dir(&dump)
            .unwrap()
            .flatten()
            .map(|it| it.path())
            .collect();
        let [path] = made.as_slice() else {
            panic!("{made:?}");
        };
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(name.starts_with(&format!("vzdump-qemu-{vm}-2")), "{name}");
        let archive = if more.is_empty() {
            assert!(name.ends_with(".vma.zst"), "{name}");
            let zstd = Command::new("zstd").arg("-dc").arg(path).output().unwrap();
            assert!(zstd.status.success());
            zstd.stdout
        } else {
            assert!(name.ends_with(".vma"), "{name}");
            fs::read(path).unwrap()
        };
        fs::remove_file(path).unwrap();
        let archive = vma::read(&archive);
        assert_eq!(
            archive.configs["qemu-server.conf"],
            stored_config(&host, &before).as_bytes()
        );
        assert!(archive.configs["qemu-server.fw"].starts_with(b"[OPTIONS]"));
        assert!(archive.devices["drive-scsi0"] == expected);
        assert!(archive.devices["drive-efidisk0"] == content(9, 540_672));
        assert_eq!(archive.devices.len(), 2);
    }
    let log = host.storage_log();
    assert!(
        log.ends_with(&format!("deactivate local:{vm}/disk-0.raw\n")),
        "{log}"
    );

    let missing = host.run(&["proxmox", "backup", &vm, "--dir", "/nowhere"], true);
    missing.assert_fails(1, &["/nowhere", "no backup is open"]);
    assert!(host.disk().is_null());
}
