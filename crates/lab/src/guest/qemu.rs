//! QEMU: its arguments for a configuration, and a guest's life.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use harness::qmp::Qmp;
use serde_json::{Value, json};

use super::shell::Port;
use super::{Answer, Kernel, Shell, Ssh, Stop, find_program, tail};
use crate::plan::words::{Cache, Device, Syntax};
use crate::plan::{Backing, IoThread, Settings};

/// How QEMU runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// On the processor.
    Kvm,
    /// Translated: everything works, 10 to 50 times slower, so that absolute speeds mean nothing.
    Tcg,
}

impl Accel {
    /// QEMU's word.
    pub fn word(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
        }
    }

    fn arguments(self) -> [&'static str; 4] {
        match self {
            Accel::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Accel::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
        }
    }

    /// How long a guest may take to come up.
    pub fn boot_limit(self) -> Duration {
        Duration::from_secs(match self {
            Accel::Kvm => 120,
            Accel::Tcg => 600,
        })
    }
}

const QEMU: &str = "qemu-system-x86_64";

/// Finds out whether KVM works: some hosts have the device, and QEMU aborts on it.
pub fn accel() -> Accel {
    if File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_err()
    {
        return Accel::Tcg;
    }
    let mut qemu = Command::new(QEMU);
    qemu.args(Accel::Kvm.arguments())
        .args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-S",
            "-qmp",
            "stdio",
        ])
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let Ok(mut child) = qemu.spawn() else {
        return Accel::Tcg;
    };
    if let Some(mut stdin) = child.stdin.take() {
        let _ = stdin.write_all(b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"quit\"}\n");
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Accel::Kvm,
            Ok(None) => sleep(Duration::from_millis(20)),
            _ => return Accel::Tcg,
        }
    }
    let _ = child.kill();
    let _ = child.wait();
    Accel::Tcg
}

/// What a program says of its version, first line; empty if it is not there.
pub fn version(program: &Path) -> String {
    let output = Command::new(program).arg("--version").output();
    let text = output
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    text.lines().next().unwrap_or_default().trim().to_owned()
}

/// A disk of a guest.
#[derive(Clone, Debug)]
pub enum Volume {
    /// QEMU opens it itself.
    Own(Backing, PathBuf),
    /// Somebody serves it at this socket.
    Socket(PathBuf),
    /// Nothing is stored; so many bytes.
    Null(u64),
}

/// A guest to be.
#[derive(Clone, Debug)]
pub struct Setup {
    /// For its logs and sockets.
    pub folder: PathBuf,
    /// Its configuration.
    pub settings: Settings,
    /// Its disks.
    pub volumes: Vec<Volume>,
    /// How its instructions run.
    pub accel: Accel,
    /// What it boots: a kernel with an initramfs, or a disk image with a login.
    pub boot: Boot,
}

/// What a guest boots.
#[derive(Clone, Debug)]
pub enum Boot {
    /// A kernel with the lab's initramfs.
    Lab(Kernel, PathBuf),
    /// An image that nothing is written to, reached over ssh.
    Image(PathBuf, Ssh),
}

/// PCI slot of the first disk, so that the guest knows which is which.
const FIRST_SLOT: usize = 5;

impl Setup {
    /// QEMU's arguments.
    pub fn arguments(&self) -> Vec<String> {
        let s = &self.settings;
        let memory = format!("{}M", s.memory_mib);
        let huge = if s.hugepages { ",hugetlb=on" } else { "" };
        let qmp = self.folder.join("qmp.sock");
        let mut arguments: Vec<String> = [
            "-name",
            "ringdisk-lab,debug-threads=on",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-monitor",
            "none",
            "-no-reboot",
            "-machine",
            &format!("{},memory-backend=mem", s.machine),
            "-m",
            &memory,
            "-object",
            &format!("memory-backend-memfd,id=mem,size={memory},share=on{huge}"),
            "-smp",
            &s.vcpus.to_string(),
            "-qmp",
            &format!("unix:{},server=on,wait=off", option(&qmp)),
            "-serial",
            &format!("file:{}", option(&self.folder.join("console.log"))),
        ]
        .map(str::to_owned)
        .to_vec();
        arguments.extend(self.accel.arguments().map(str::to_owned));
        match &self.boot {
            Boot::Lab(kernel, initramfs) => {
                let port = option(&self.folder.join("port.sock"));
                arguments.extend([
                    "-kernel".into(),
                    kernel.image.display().to_string(),
                    "-initrd".into(),
                    initramfs.display().to_string(),
                    "-append".into(),
                    "console=ttyS0 panic=-1 mitigations=off no_timer_check quiet loglevel=5".into(),
                    "-device".into(),
                    "virtio-serial-pci,id=serial,addr=0x3".into(),
                    "-chardev".into(),
                    format!("socket,id=port,path={port},server=on,wait=off"),
                    "-device".into(),
                    "virtserialport,bus=serial.0,chardev=port,name=ringdisk.lab".into(),
                ]);
            }
            Boot::Image(image, ssh) => {
                arguments.extend([
                    "-snapshot".into(),
                    "-drive".into(),
                    format!("if=none,id=system,file={}", option(image)),
                    "-device".into(),
                    "virtio-blk-pci,drive=system,bootindex=0,addr=0x3".into(),
                    "-nic".into(),
                    format!(
                        "user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:{}-:22",
                        ssh.port
                    ),
                ]);
            }
        }
        for (index, volume) in self.volumes.iter().enumerate() {
            self.disk(index, volume, &mut arguments);
        }
        arguments
    }

    fn disk(&self, index: usize, volume: &Volume, arguments: &mut Vec<String>) {
        let s = &self.settings;
        let mut push = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
        let node = format!("disk{index}");
        let mut device = json!({});
        match volume {
            Volume::Socket(socket) => {
                push(
                    "-chardev",
                    format!("socket,id={node},path={}", option(socket)),
                );
                device["driver"] = "vhost-user-blk-pci".into();
                device["chardev"] = node.into();
            }
            Volume::Null(size) => {
                let blockdev = json!({ "driver": "null-co", "size": size, "read-zeroes": false, "node-name": node });
                push("-blockdev", blockdev.to_string());
                device["drive"] = node.into();
            }
            Volume::Own(backing, path) => {
                match s.syntax {
                    Syntax::Blockdev => {
                        push("-blockdev", self.blockdev(backing, path, &node).to_string())
                    }
                    Syntax::Drive => push("-drive", self.drive(backing, path, &node)),
                }
                device["drive"] = node.into();
            }
        }
        let threads = match s.iothread {
            IoThread::Off => 0,
            IoThread::One => 1,
            IoThread::Mapping(threads) => threads,
        };
        let in_qemu = matches!(s.device, Device::VirtioBlk | Device::VirtioScsi);
        let names: Vec<String> = (0..if in_qemu { threads } else { 0 })
            .map(|n| format!("io{index}-{n}"))
            .collect();
        names
            .iter()
            .for_each(|name| push("-object", format!("iothread,id={name}")));
        let iothread = match &names[..] {
            [] => None,
            [one] => Some(("iothread", Value::from(one.as_str()))),
            _ => Some((
                "iothread-vq-mapping",
                names
                    .iter()
                    .map(|name| json!({ "iothread": name }))
                    .collect(),
            )),
        };
        let address = format!("{:#x}", FIRST_SLOT + index);
        if s.device != Device::VhostUserBlk && !matches!(volume, Volume::Null(_)) {
            // Else QEMU's default would make writethrough out of every -blockdev, or nothing of it.
            let writeback = !matches!(s.cache, Cache::Writethrough | Cache::Directsync);
            device["write-cache"] = if writeback { "on" } else { "off" }.into();
        }
        match s.device {
            Device::Ide => {
                device["driver"] = "ide-hd".into();
                device["bus"] = format!("ide.{}", index / 2).into();
                device["unit"] = (index % 2).into();
            }
            Device::VirtioScsi => {
                let mut controller = json!({ "driver": "virtio-scsi-pci", "id": format!("scsi{index}"), "addr": address });
                if let Some((key, value)) = iothread {
                    controller[key] = value;
                }
                if let Some(queues) = s.queues {
                    controller["num_queues"] = queues.into();
                }
                if let Some(size) = s.queue_size {
                    controller["virtqueue_size"] = size.into();
                }
                push("-device", controller.to_string());
                device["driver"] = "scsi-hd".into();
                device["bus"] = format!("scsi{index}.0").into();
            }
            Device::VirtioBlk | Device::VhostUserBlk | Device::Host => {
                if s.device != Device::VhostUserBlk {
                    device["driver"] = "virtio-blk-pci".into();
                }
                device["addr"] = address.into();
                if let Some((key, value)) = iothread {
                    device[key] = value;
                }
                if let Some(queues) = s.queues {
                    device["num-queues"] = queues.into();
                }
                if let Some(size) = s.queue_size {
                    device["queue-size"] = size.into();
                }
            }
        }
        device["id"] = format!("dev{index}").into();
        push("-device", device.to_string());
    }

    fn blockdev(&self, backing: &Backing, path: &Path, node: &str) -> Value {
        let s = &self.settings;
        let cache = json!({ "direct": s.cache.direct(), "no-flush": s.cache == Cache::Unsafe });
        if let Backing::Rbd(image) = backing {
            let (pool, image) = image.split_once('/').unwrap_or((image, ""));
            return json!({ "driver": "rbd", "pool": pool, "image": image, "node-name": node, "cache": cache });
        }
        let driver = if is_block_device(path) {
            "host_device"
        } else {
            "file"
        };
        let mut file =
            json!({ "driver": driver, "filename": path, "cache": cache, "discard": "unmap" });
        if let Some(aio) = s.aio {
            file["aio"] = aio.word().into();
        }
        json!({ "driver": s.format.word(), "node-name": node, "file": file, "cache": cache, "discard": "unmap" })
    }

    fn drive(&self, backing: &Backing, path: &Path, node: &str) -> String {
        let s = &self.settings;
        let file = match backing {
            Backing::Rbd(image) => format!("rbd:{image}"),
            _ => option(path),
        };
        let aio = match (s.aio, backing) {
            (Some(aio), Backing::File | Backing::Ram | Backing::Path(_)) => format!(",aio={aio}"),
            _ => String::new(),
        };
        format!(
            "if=none,id={node},file={file},format={},cache={},discard=unmap{aio}",
            s.format, s.cache
        )
    }
}

/// A value in QEMU's key=value syntax: commas are doubled.
fn option(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// Whether a path is a block device's.
pub fn is_block_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// A guest that runs. Killed on drop.
pub struct Guest {
    child: Child,
    folder: PathBuf,
    disks: Vec<String>,
    session: Session,
}

enum Session {
    Port(Port),
    Ssh(Ssh),
}

impl Guest {
    /// Starts QEMU. The guest is not up yet: see [`Guest::wait`].
    ///
    /// # Errors
    /// QEMU is missing, or ends at once; with its words.
    pub fn start(setup: &Setup, stop: &Stop) -> Result<Guest> {
        fs::create_dir_all(&setup.folder)
            .with_context(|| format!("making {}", setup.folder.display()))?;
        let port = setup.folder.join("port.sock");
        for old in [
            &port,
            &setup.folder.join("qmp.sock"),
            &setup.folder.join("console.log"),
        ] {
            let _ = fs::remove_file(old);
        }
        let qemu = setup.settings.qemu.clone().unwrap_or_else(|| QEMU.into());
        let mut command = match find_program("setpriv") {
            // A guest must not outlive a lab that is killed.
            Some(setpriv) => {
                let mut command = Command::new(setpriv);
                command.args(["--pdeathsig", "KILL"]).arg(&qemu);
                command
            }
            None => Command::new(&qemu),
        };
        let arguments = setup.arguments();
        fs::write(setup.folder.join("qemu.args"), arguments.join("\n"))
            .context("writing qemu.args")?;
        command
            .args(&arguments)
            .process_group(0)
            .stdin(Stdio::null());
        if let Some(library) = &setup.settings.preload {
            command.env("LD_PRELOAD", library);
        }
        let log = File::create(setup.folder.join("qemu.log")).context("making qemu.log")?;
        command.stdout(log.try_clone()?).stderr(log);
        let child = command
            .spawn()
            .with_context(|| format!("starting {}; is QEMU installed?", qemu.display()))?;
        let mut child = Kill(Some(child));
        let session = match &setup.boot {
            Boot::Image(_, ssh) => Session::Ssh(ssh.clone()),
            Boot::Lab(..) => {
                let deadline = Instant::now() + Duration::from_secs(60);
                loop {
                    if let Ok(stream) = UnixStream::connect(&port) {
                        break Session::Port(Port::new(stream)?);
                    }
                    let ended = child
                        .0
                        .as_mut()
                        .and_then(|child| child.try_wait().ok().flatten());
                    ensure!(
                        ended.is_none(),
                        "QEMU ended at once; it said:\n{}",
                        tail(&setup.folder.join("qemu.log"), 10)
                    );
                    ensure!(!stop.is_wanted(), "stopped");
                    ensure!(
                        Instant::now() < deadline,
                        "QEMU does not listen at {}",
                        port.display()
                    );
                    sleep(Duration::from_millis(10));
                }
            }
        };
        let disks = match setup.settings.device {
            Device::Ide => (0..setup.volumes.len())
                .map(|n| {
                    format!(
                        "/devices/pci0000:00/*/ata{}/*/target*:0:{}/",
                        n / 2 + 1,
                        n % 2
                    )
                })
                .collect(),
            _ => (0..setup.volumes.len())
                .map(|n| format!("/devices/pci0000:00/0000:00:{:02x}.0/", FIRST_SLOT + n))
                .collect(),
        };
        let Some(child) = child.0.take() else {
            bail!("QEMU is gone")
        };
        Ok(Guest {
            child,
            folder: setup.folder.clone(),
            disks,
            session,
        })
    }

    /// Waits until the guest is up.
    ///
    /// # Errors
    /// It does not come up in time, or QEMU ends; with the last lines of both.
    pub fn wait(&mut self, limit: Duration, stop: &Stop) -> Result<()> {
        let deadline = Instant::now() + limit;
        let Self {
            child,
            folder,
            session,
            ..
        } = self;
        match session {
            Session::Port(port) => {
                let ready = port.line(deadline, stop, &mut || alive(child, folder));
                let ready = ready
                    .with_context(|| format!("the guest did not come up{}", last_words(folder)))?;
                ensure!(ready == "ready", "the guest greeted with {ready:?}");
            }
            Session::Ssh(ssh) => loop {
                alive(child, folder)?;
                match ssh.run("true", Duration::from_secs(30), stop) {
                    Ok(_) => break,
                    Err(e) if Instant::now() > deadline || stop.is_wanted() => {
                        return Err(
                            e.context(format!("the guest did not come up{}", last_words(folder)))
                        );
                    }
                    Err(_) => sleep(Duration::from_secs(1)),
                }
            },
        }
        Ok(())
    }

    /// QEMU's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// QEMU's monitor.
    ///
    /// # Errors
    /// It does not answer.
    pub fn qmp(&self) -> Result<Qmp> {
        Qmp::connect(&self.folder.join("qmp.sock"))
    }

    /// Where its disks lie in the guest's `/sys`, as patterns of a shell.
    pub fn disks(&self) -> &[String] {
        &self.disks
    }
}

impl Shell for Guest {
    fn run(&mut self, script: &str, limit: Duration, stop: &Stop) -> Result<Answer> {
        let Self {
            child,
            folder,
            session,
            ..
        } = self;
        let answer = match session {
            Session::Port(port) => port.run(script, limit, stop, &mut || alive(child, folder)),
            Session::Ssh(ssh) => ssh.run(script, limit, stop),
        };
        match answer {
            // The port may close before QEMU's end is seen.
            Err(e) if !stop.is_wanted() => {
                sleep(Duration::from_millis(200));
                alive(child, folder)?;
                Err(e.context(format!("the guest is lost{}", last_words(folder))))
            }
            other => other,
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kills a child that nobody took.
struct Kill(Option<Child>);

impl Drop for Kill {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn alive(child: &mut Child, folder: &Path) -> Result<()> {
    match child.try_wait().context("waiting for QEMU")? {
        None => Ok(()),
        Some(status) => bail!("QEMU ended ({status}){}", last_words(folder)),
    }
}

fn last_words(folder: &Path) -> String {
    let log = |name: &str, lines| {
        let text = tail(&folder.join(name), lines);
        if text.is_empty() {
            String::new()
        } else {
            format!("\n{name}:\n{text}")
        }
    };
    let console = log("console.log", 12);
    // What a panic is about stands above the trace that it ends with.
    let panic = tail(&folder.join("console.log"), 200)
        .lines()
        .rfind(|line| line.contains("Kernel panic"))
        .filter(|line| !console.contains(line))
        .map_or_else(String::new, |line| format!("\n{line}"));
    format!("{}{panic}{console}", log("qemu.log", 8))
}
