//! U-Boot, which has its own virtio disk driver, on a disk of ringdisk.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};

use testkit::compatibility::Record;
use testkit::driver::HANG;
use testkit::qemu::Release;

use crate::support::{content, serve};

/// From Debian's package `u-boot-qemu`.
const ROM: &str = "/usr/lib/u-boot/qemu-x86_64/u-boot.rom";

const PROMPT: &str = "\n=> ";

/// A machine with U-Boot's shell on its serial port.
struct Machine {
    qemu: Child,
    serial: UnixStream,
}

impl Machine {
    fn start(release: &Release, disk: &Path, device: &str) -> Self {
        let (serial, its_end) = UnixStream::pair().unwrap();
        serial.set_read_timeout(Some(4 * HANG)).unwrap();
        let its_end = OwnedFd::from(its_end);
        // setpriv: a guest must not outlive a test run that is killed.
        let mut qemu = Command::new("setpriv");
        qemu.args(["--pdeathsig", "KILL"])
            .arg(release.program("qemu-system-x86_64"))
            .args(["-machine", "pc,memory-backend=mem", "-m", "256M"])
            .args(["-object", "memory-backend-memfd,id=mem,size=256M,share=on"])
            .args(["-bios", ROM, "-nodefaults", "-display", "none"])
            .args(["-serial", "stdio"])
            .args([
                "-chardev",
                &format!("socket,id=disk,path={}", disk.display()),
            ])
            .args([
                "-device",
                &format!("vhost-user-blk-pci,chardev=disk{device}"),
            ]);
        qemu.stdin(its_end.try_clone().unwrap()).stdout(its_end);
        let qemu = qemu.spawn().unwrap();
        Self { qemu, serial }
    }

    /// Reads the output up to and including these words.
    fn read_until(&mut self, words: &str) -> String {
        let mut text = String::new();
        while !text.ends_with(words) {
            let mut byte = [0];
            let read = self.serial.read_exact(&mut byte);
            read.unwrap_or_else(|error| panic!("no {words:?} after {text:?}: {error}"));
            // Drops the carriage returns of the terminal.
            text.extend(Some(char::from(byte[0])).filter(|c| *c != '\r'));
        }
        text
    }

    /// Runs a command and returns its output.
    fn run(&mut self, command: &str) -> String {
        self.serial
            .write_all(format!("{command}\n").as_bytes())
            .unwrap();
        let text = self.read_until(PROMPT);
        println!("{text}");
        text
    }

    /// Memory at an address, as U-Boot prints it.
    fn memory(&mut self, at: u64, len: usize) -> Vec<u8> {
        let text = self.run(&format!("md.b {at:x} {len:x}"));
        let lines = text.lines().filter_map(|line| line.split_once(": "));
        let bytes = lines.flat_map(|(_, dump)| dump.split(' ').take(16));
        bytes
            .map_while(|byte| u8::from_str_radix(byte, 16).ok())
            .collect()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.qemu.kill().ok();
        self.qemu.wait().ok();
    }
}

#[test]
fn reads_and_writes() {
    let test = "reads_and_writes";
    if !Path::new(ROM).exists() {
        return println!("skipped: {test}: Debian's package u-boot-qemu is not installed");
    }
    let release = match Release::find("debian-13") {
        Ok(release) => release,
        Err(error) => return println!("skipped: {test}: {error:#}"),
    };
    let mut record = None;
    for device in [
        "",
        ",queue-size=256",
        ",num-queues=1,disable-modern=on,disable-legacy=off",
    ] {
        let (server, disk) = serve("queues=2");
        let mut machine = Machine::start(&release, server.socket(), device);
        let banner = machine.read_until("\nModel:");
        // The first banner is that of the part that loads it.
        let version = banner.rsplit("U-Boot ").next().unwrap();
        let version = version.split(' ').next().unwrap();
        let record = record.get_or_insert_with(|| {
            let version = format!("{version} (on QEMU {})", release.version);
            Record::new("U-Boot", &version)
        });
        record.step(&format!("blocks read and written{device}"), || {
            machine.read_until("Hit any key");
            machine.serial.write_all(b"\n").unwrap();
            machine.read_until(PROMPT);
            let found = machine.run("virtio scan; virtio info");
            assert!(found.contains("32768 x 512"), "{found}");
            for (sector, sectors) in [(7, 1), (1000, 8), (0, 32768)] {
                let read = machine.run(&format!("virtio read 2000000 {sector:x} {sectors:x}"));
                assert!(
                    read.contains(&format!("{sectors} blocks read: OK")),
                    "{read}"
                );
                let last = sectors - 1;
                let found = machine.memory(0x200_0000 + 512 * last, 512);
                assert_eq!(found, content(sector + last, 512));
            }
            machine.run("mw.b 1000000 5a 400000");
            for (sector, sectors) in [(1, 1), (8192, 8192)] {
                let wrote = machine.run(&format!("virtio write 1000000 {sector:x} {sectors:x}"));
                assert!(
                    wrote.contains(&format!("{sectors} blocks written: OK")),
                    "{wrote}"
                );
                let bytes = 512 * sectors;
                assert_eq!(disk.bytes(sector, bytes), vec![0x5a; bytes]);
            }
            assert_eq!(disk.bytes(2, 512), content(2, 512));
            assert_eq!(disk.bytes(16384, 512), content(16384, 512));
        });
    }
}
