//! Guests that libvirt runs: with the XML that ringdisk prints, and with a VM patched by `ringdisk check`. libvirt's
//! driver runs inside virsh, so other VMs on this machine are not touched.

mod hook;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;
use testkit::server::Server;
use testkit::vm::{self, Vm, find_program};

use crate::support;

const BINARY: &str = env!("CARGO_BIN_EXE_ringdisk");

/// An unprivileged user: libvirt's own user belongs to its services, which need not be installed.
const USER: u32 = 65534;

/// The machine may be busy and the guest emulated.
const TIMEOUT: Duration = Duration::from_secs(300);

/// What a guest and libvirt need, owned by an unprivileged user.
struct Host {
    dir: TempDir,
}

impl Host {
    /// Prints a message and returns `None` where that is impossible.
    fn new(test: &str) -> Option<Self> {
        if let Some(missing) = vm::missing(false) {
            println!("skipped: {test}: {missing}");
            return None;
        }
        for (program, package) in [
            ("virsh", "libvirt-clients"),
            ("libvirtd", "libvirt-daemon"),
            ("virt-qemu-run", "libvirt-daemon-driver-qemu"),
            ("patch", "patch"),
        ] {
            if find_program(program).is_none() {
                println!(
                    "skipped: {test}: {program} is missing; 'apt-get install {package}' installs it"
                );
                return None;
            }
        }
        // In a directory that any user can enter, and not in memory: the test needs O_DIRECT.
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let host = Self { dir };
        fs::create_dir(host.path("home")).unwrap();
        host.give_to_user("home");
        Some(host)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Gives a file to the user that libvirt and QEMU run as.
    fn give_to_user(&self, name: &str) {
        if is_root() {
            chown(self.path(name), Some(USER), Some(USER)).unwrap();
        }
    }

    fn disk(&self, name: &str) -> File {
        let file = File::create_new(self.path(name)).unwrap();
        file.set_len(64 << 20).unwrap();
        self.give_to_user(name);
        file
    }

    /// A domain that boots and runs `script`, with console output in `lines`.
    fn domain(&self, script: &str, memory_backing: &str, disk: &str) -> String {
        let boot = Vm::new(self.path("vm")).boot_files(script).unwrap();
        let kernel = self.path("kernel");
        fs::copy(boot.kernel, &kernel).unwrap();
        fs::set_permissions(&kernel, PermissionsExt::from_mode(0o644)).unwrap();
        let [console, lines] = ["home/console", "home/lines"].map(|name| self.path(name));
        format!(
            "<domain type='qemu'>
  <name>guest</name>
  <memory unit='MiB'>512</memory>
  {memory_backing}
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{}</kernel>
    <initrd>{}</initrd>
    <cmdline>{}</cmdline>
  </os>
  <features><acpi/><apic/></features>
  <cpu mode='custom'><model>qemu64</model></cpu>
  <on_reboot>destroy</on_reboot>
  <devices>
    <emulator>{}</emulator>
    {disk}
    <serial type='file'><source path='{}'/><target port='0'/></serial>
    <serial type='file'><source path='{}'/><target port='1'/></serial>
  </devices>
</domain>
",
            kernel.display(),
            boot.initrd.display(),
            boot.command_line,
            find_program("qemu-system-x86_64").unwrap().display(),
            console.display(),
            lines.display(),
        )
    }

    /// Waits until the guest has printed this line.
    fn wait_for_line(&self, line: &str) {
        let start = Instant::now();
        let read = |name: &str| fs::read(self.path(name)).unwrap_or_default();
        loop {
            let lines = String::from_utf8_lossy(&read("home/lines")).into_owned();
            if lines.lines().any(|its| its == line) {
                return;
            }
            let ended = lines.contains("vm-exit:");
            assert!(
                start.elapsed() < TIMEOUT && !ended,
                "the guest does not say '{line}' but {lines}; its console: {}; QEMU: {}",
                String::from_utf8_lossy(&read("home/console")),
                String::from_utf8_lossy(&read("home/libvirt/log/qemu/guest.log")),
            );
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// virsh with libvirt's QEMU driver inside it.
struct Virsh {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    asked: u32,
}

impl Virsh {
    fn new(host: &Host) -> Self {
        let home = host.path("home");
        let connect = format!(
            "exec virsh -c 'qemu:///embed?root={}/libvirt' 2>&1",
            home.display()
        );
        let mut command = if is_root() {
            let mut command = Command::new("setpriv");
            let ids = [format!("--reuid={USER}"), format!("--regid={USER}")];
            command.args(ids).args(["--clear-groups", "sh", "-c"]);
            command
        } else {
            let mut command = Command::new("sh");
            command.arg("-c");
            command
        };
        command.arg(connect).current_dir(&home);
        for variable in [
            "HOME",
            "XDG_RUNTIME_DIR",
            "XDG_CACHE_HOME",
            "XDG_CONFIG_HOME",
        ] {
            command.env(variable, &home);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (say, lines) = channel();
        thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            lines.for_each(|line| drop(say.send(line)));
        });
        Self {
            child,
            stdin,
            lines,
            asked: 0,
        }
    }

    /// Runs a command and returns its output.
    fn run(&mut self, command: &str) -> String {
        self.asked += 1;
        let end = format!("end-of-{}", self.asked);
        writeln!(self.stdin, "{command}\necho {end}").unwrap();
        let mut text = String::new();
        loop {
            let line = self.lines.recv_timeout(TIMEOUT);
            let line = line.unwrap_or_else(|e| panic!("virsh {command}: {e} after {text}"));
            if line.trim() == end {
                return text;
            }
            text += &line;
            text.push('\n');
        }
    }

    /// The same, and expects these words in the output.
    fn run_expecting(&mut self, command: &str, says: &str) {
        let text = self.run(command);
        assert!(text.contains(says), "virsh {command}: {text}");
    }

    /// Waits until the guest has powered off.
    fn until_off(&mut self) {
        let start = Instant::now();
        while !self.run("domstate guest").contains("shut off") {
            assert!(start.elapsed() < TIMEOUT, "the guest does not end");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Virsh {
    fn drop(&mut self) {
        // The driver stops with virsh: no guest stays behind.
        let _ = writeln!(self.stdin, "destroy guest\nquit");
        let start = Instant::now();
        while self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            if start.elapsed() > TIMEOUT {
                let _ = self.child.kill();
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The printed XML of a served disk: for the domain and for its devices.
fn printed_xml(server: &Server, disk: usize) -> (String, String) {
    let libvirt = &server.ready["disks"][disk]["libvirt"];
    let text = |key: &str| libvirt[key].as_str().unwrap().to_owned();
    (text("memoryBacking"), text("disk"))
}

/// One disk is there from the start and survives a kill of ringdisk; another is plugged in and out.
#[test]
fn printed_xml_works_in_a_domain() {
    let Some(host) = Host::new("printed_xml_works_in_a_domain") else {
        return;
    };
    let disks = ["first", "second"].map(|name| {
        host.disk(&format!("{name}.raw"));
        format!(
            "file={dir}/{name}.raw,socket={dir}/{name}.sock,serial={name},queues=2,socket-mode=0666",
            dir = host.dir.path().display()
        )
    });
    let serve = || Server::ringdisk(BINARY, &disks).unwrap();
    let mut server = serve();
    let (memory_backing, first) = printed_xml(&server, 0);
    let (_, second) = printed_xml(&server, 1);
    let script = "
        write() { dd if=/tmp/data of=$1 bs=64k seek=$2 oflag=direct conv=notrunc,fsync 2>/tmp/dd; }
        read() { dd if=$1 bs=64k skip=$2 count=16 iflag=direct 2>/tmp/dd | cmp - /tmp/data; }
        head -c 1048576 /dev/urandom >/tmp/data
        first=$(disk first)
        write $first 0
        echo plug
        until second=$(disk second 2>/tmp/no); do sleep 0.1; done
        write $second 16
        read $second 16
        echo pull
        while disk second >/tmp/no 2>&1; do sleep 0.1; done
        echo kill
        for i in $(seq 50); do
            write $first $((i * 16))
            read $first $((i * 16))
            sleep 0.1
        done
        read $first 0
        echo done";
    let domain = host.domain(script, &memory_backing, &first);
    fs::write(host.path("guest.xml"), domain).unwrap();
    fs::write(host.path("second.xml"), second.replace("'vda'", "'vdb'")).unwrap();
    let dir = host.dir.path().display();

    let mut virsh = Virsh::new(&host);
    virsh.run_expecting(&format!("define {dir}/guest.xml"), "defined");
    virsh.run_expecting("start guest", "started");
    host.wait_for_line("plug");
    virsh.run_expecting(
        &format!("attach-device guest {dir}/second.xml --live"),
        "attached successfully",
    );
    host.wait_for_line("pull");
    let blocks = virsh.run("domblklist guest");
    for name in ["first", "second"] {
        let row = format!("{dir}/{name}.sock");
        assert!(blocks.contains(&row), "{blocks}");
    }
    virsh.run_expecting(
        &format!("detach-device guest {dir}/second.xml --live"),
        "detached successfully",
    );
    host.wait_for_line("kill");
    server.signal(Signal::KILL);
    drop(server);
    server = serve();
    host.wait_for_line("done");
    virsh.until_off();
    assert!(server.terminate().unwrap().success());
    let log = server.log();
    support::assert_queues_served(&log);
}

/// The patches of `ringdisk check` move the disk of a VM, in libvirt's own XML, to ringdisk and back; the guest finds
/// what it wrote.
#[test]
fn check_patches_move_a_vm_to_ringdisk_and_back() {
    let Some(host) = Host::new("check_patches_move_a_vm_to_ringdisk_and_back") else {
        return;
    };
    let dir = host.dir.path().display().to_string();
    host.disk("disk.raw").write_all_at(b"0", 0).unwrap();
    let disk = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{dir}/disk.raw'/>\
         <target dev='vda' bus='virtio'/></disk>"
    );
    // One more line on each boot.
    let script = "
        boots=$(head -c 1 /dev/vda)
        printf $((boots + 1)) | dd of=/dev/vda conv=notrunc,fsync 2>/tmp/dd
        echo boots $boots on $(cat /sys/block/vda/queue/logical_block_size)";
    let domain = host.domain(script, "", &disk);
    fs::write(host.path("guest.xml"), domain).unwrap();

    let mut virsh = Virsh::new(&host);
    let mut boots = 0;
    let mut boot = |virsh: &mut Virsh| {
        virsh.run_expecting(&format!("define {dir}/guest.xml"), "defined");
        virsh.run_expecting("start guest", "started");
        host.wait_for_line(&format!("boots {boots} on 512"));
        virsh.until_off();
        boots += 1;
    };
    boot(&mut virsh);

    let text = virsh.run("dumpxml guest --inactive");
    let (from, to) = (
        text.find("<domain").unwrap(),
        text.find("</domain>").unwrap(),
    );
    fs::write(
        host.path("guest.xml"),
        format!("{}</domain>\n", &text[from..to]),
    )
    .unwrap();
    apply_patch(&host, "ringdisk", &["guest.xml"]);
    // In a directory where this test may create sockets and this user may connect.
    for name in ["guest.xml", "ringdisk.toml"] {
        let text = fs::read_to_string(host.path(name)).unwrap();
        assert!(text.contains("/run/ringdisk/"), "{text}");
        fs::write(
            host.path(name),
            text.replace("/run/ringdisk/", &format!("{dir}/")),
        )
        .unwrap();
    }
    let mut config = fs::read_to_string(host.path("ringdisk.toml")).unwrap();
    config = config.replace("[[disk]]", "[[disk]]\nsocket-mode = \"0666\"");
    fs::write(host.path("ringdisk.toml"), config).unwrap();
    let arguments = [format!("--config={dir}/ringdisk.toml")];
    let mut server = Server::ringdisk(BINARY, &arguments).unwrap();
    boot(&mut virsh);
    assert!(server.terminate().unwrap().success());
    server.wait_for_log(&["front-end connected"]);

    apply_patch(&host, "qemu", &["guest.xml", "ringdisk.toml"]);
    boot(&mut virsh);
    let mut first = [0];
    let disk = File::open(host.path("disk.raw")).unwrap();
    disk.read_exact_at(&mut first, 0).unwrap();
    assert_eq!(&first, b"3");
}

/// `ringdisk check --fix --to WHERE FILES | patch`, in the host's directory.
fn apply_patch(host: &Host, to: &str, files: &[&str]) {
    let check = Command::new(BINARY)
        .args(["check", "--fix", "--to", to])
        .args((to == "ringdisk").then_some("--config=ringdisk.toml"))
        .args(files)
        .current_dir(host.dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&check.stderr);
    assert_eq!(check.status.code(), Some(1), "{said}");
    fs::write(host.path("patch"), &check.stdout).unwrap();
    let patched = Command::new("patch")
        .args(["-p0", "--batch", "--input=patch"])
        .current_dir(host.dir.path())
        .output()
        .unwrap();
    assert!(patched.status.success(), "{patched:?}");
    let text = fs::read_to_string(host.path("guest.xml")).unwrap();
    assert_eq!(
        text.contains("type='vhostuser'"),
        to == "ringdisk",
        "{text}"
    );
}
