//! QEMU's arguments for a configuration, and a running guest.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use harness::process::{Process, Stop, guarded, tail};
use harness::qemu::{self, Accel, Machine, escaped};
use harness::qmp::Qmp;
use serde_json::{Value, json};

use super::shell::Port;
use super::{Answer, Kernel, Shell, Ssh};
use crate::plan::words::{Cache, Device, Syntax};
use crate::plan::{IoThread, Settings};
use crate::storage::{Disk, image_node};

/// A disk of a guest.
#[derive(Clone, Debug)]
pub enum Volume {
    /// QEMU opens it itself.
    Own(Disk),
    /// A server exports it at this socket.
    Socket(PathBuf),
}

/// The setup of a guest.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The folder for its logs and sockets.
    pub folder: PathBuf,
    /// The configuration to measure.
    pub settings: Settings,
    /// Bytes of a null disk.
    pub size: u64,
    /// The disks.
    pub volumes: Vec<Volume>,
    /// How its instructions run.
    pub accel: Accel,
    /// A kernel with an initramfs, or a disk image with a login.
    pub boot: Boot,
}

/// What a guest boots.
#[derive(Clone, Debug)]
pub enum Boot {
    /// A kernel with the lab's initramfs.
    Lab(Kernel, PathBuf),
    /// A disk image, used read-only and reached over ssh.
    Image(PathBuf, Ssh),
}

/// The PCI slot of the first disk, by which the guest identifies the disks. q35 has devices of its own from slot 31.
const FIRST_SLOT: usize = 5;
/// Up to so many disks have a slot each; more are functions of devices, eight in a slot.
const SLOTS: usize = 24;
const FUNCTIONS: usize = 8;

/// The PCI slot and function of a disk, of `count` in all.
fn pci_address(index: usize, count: usize) -> (usize, usize) {
    if count <= SLOTS {
        (FIRST_SLOT + index, 0)
    } else {
        (FIRST_SLOT + index / FUNCTIONS, index % FUNCTIONS)
    }
}

impl Setup {
    /// QEMU's arguments.
    pub fn arguments(&self) -> Vec<String> {
        let s = &self.settings;
        let cpu_model = s.cpu.as_ref().map(ToString::to_string);
        let machine = Machine {
            name: "ringdisk-lab",
            kind: s.machine.word(),
            memory_mib: s.memory_mib,
            more_memory: false,
            hugepages: s.hugepages,
            cpus: s.vcpus.into(),
            cpu_model: cpu_model.as_deref(),
            accel: self.accel,
        };
        let mut arguments = machine.arguments();
        arguments.extend([
            "-no-reboot".into(),
            "-qmp".into(),
            format!(
                "unix:{},server=on,wait=off",
                escaped(&self.folder.join("qmp.sock"))
            ),
            "-serial".into(),
            format!("file:{}", escaped(&self.folder.join("console.log"))),
        ]);
        match &self.boot {
            Boot::Lab(kernel, initramfs) => {
                let port = escaped(&self.folder.join("port.sock"));
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
                    format!("if=none,id=system,file={}", escaped(image)),
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
                    format!("socket,id={node},path={}", escaped(socket)),
                );
                device["driver"] = "vhost-user-blk-pci".into();
                device["chardev"] = node.into();
            }
            Volume::Own(disk) => {
                match s.syntax {
                    Syntax::Drive if *disk != Disk::Null => {
                        push("-drive", self.drive(disk, &node));
                    }
                    Syntax::Drive | Syntax::Blockdev => {
                        push("-blockdev", self.blockdev(disk, &node).to_string());
                    }
                }
                device["drive"] = node.into();
            }
        }
        let (threads, iothread) = self.iothreads(index);
        threads
            .into_iter()
            .for_each(|thread| push("-object", thread));
        let (slot, function) = pci_address(index, self.volumes.len());
        let mut address = json!({ "addr": format!("{slot:#x}.{function}") });
        if self.volumes.len() > SLOTS {
            address["multifunction"] = true.into();
        }
        if s.device != Device::VhostUserBlk && !matches!(volume, Volume::Own(Disk::Null)) {
            // Otherwise QEMU's default would turn every -blockdev into writethrough, or ignore the setting.
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
                let mut controller = address;
                controller["driver"] = "virtio-scsi-pci".into();
                controller["id"] = format!("scsi{index}").into();
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
                device["addr"] = address["addr"].take();
                if let Some(multifunction) = address.get("multifunction") {
                    device["multifunction"] = multifunction.clone();
                }
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

    /// The values of `-object` for a disk's I/O threads, and the property of the device that uses them.
    fn iothreads(&self, index: usize) -> (Vec<String>, Option<(&'static str, Value)>) {
        let s = &self.settings;
        let threads = match s.iothread {
            IoThread::Off => 0,
            _ if !s.has_iothreads() => 0,
            IoThread::One => 1,
            IoThread::Mapping(threads) => threads,
        };
        let names: Vec<String> = (0..threads).map(|n| format!("io{index}-{n}")).collect();
        let polling = s.poll_max_us.map_or_else(String::new, |us| {
            format!(",poll-max-ns={}", u64::from(us) * 1000)
        });
        let objects = names
            .iter()
            .map(|name| format!("iothread,id={name}{polling}"));
        let property = match &names[..] {
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
        (objects.collect(), property)
    }

    fn blockdev(&self, disk: &Disk, node: &str) -> Value {
        let s = &self.settings;
        let cache = json!({ "direct": s.cache.direct(), "no-flush": s.cache == Cache::Unsafe });
        let mut blockdev = match disk {
            Disk::Null => {
                json!({ "driver": "null-co", "size": self.size, "read-zeroes": false })
            }
            Disk::Rbd(image) => image.blockdev(cache),
            Disk::Path(_) | Disk::Chain(_) => image_node(s, disk.files(), &cache),
        };
        blockdev["node-name"] = node.into();
        blockdev
    }

    fn drive(&self, disk: &Disk, node: &str) -> String {
        let s = &self.settings;
        let file = match disk {
            Disk::Null => String::new(),
            Disk::Path(_) | Disk::Chain(_) => disk.path().map(escaped).unwrap_or_default(),
            Disk::Rbd(image) => escaped(Path::new(&image.drive())),
        };
        let aio = match (s.aio, disk.path()) {
            (Some(aio), Some(_)) => format!(",aio={aio}"),
            _ => String::new(),
        };
        format!(
            "if=none,id={node},file={file},format={},cache={},discard=unmap{aio}",
            s.format, s.cache
        )
    }
}

/// A running guest. Dropping this kills it.
pub struct Guest {
    qemu: Process,
    folder: PathBuf,
    disks: Vec<String>,
    session: Session,
}

enum Session {
    Port(Port),
    Ssh(Ssh),
}

impl Guest {
    /// Starts QEMU. The guest boots afterwards: see [`Guest::wait`].
    ///
    /// # Errors
    /// QEMU is missing, or ends immediately; the message contains its output.
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
        let program = setup.settings.qemu.clone();
        let program = program.unwrap_or_else(|| qemu::SYSTEM.into());
        let arguments = setup.arguments();
        fs::write(setup.folder.join("qemu.args"), arguments.join("\n"))
            .context("writing qemu.args")?;
        let mut command = guarded(&program);
        command.args(&arguments);
        if let Some(library) = &setup.settings.preload {
            command.env("LD_PRELOAD", library);
        }
        let mut qemu = Process::start("QEMU", &mut command, &setup.folder.join("qemu.log"))?;
        let session = match &setup.boot {
            Boot::Image(_, ssh) => Session::Ssh(ssh.clone()),
            Boot::Lab(..) => {
                let mut stream = None;
                qemu.wait_until(Duration::from_secs(60), stop, || {
                    stream = UnixStream::connect(&port).ok();
                    stream.is_some()
                })?;
                Session::Port(Port::new(
                    stream.context("connecting to the guest's port")?,
                )?)
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
                .map(|n| pci_address(n, setup.volumes.len()))
                .map(|(slot, function)| {
                    format!("/devices/pci0000:00/0000:00:{slot:02x}.{function}/")
                })
                .collect(),
        };
        Ok(Guest {
            qemu,
            folder: setup.folder.clone(),
            disks,
            session,
        })
    }

    /// Waits until the guest has booted.
    ///
    /// # Errors
    /// The guest does not boot in time, or QEMU ends; the message contains the last lines of both.
    pub fn wait(&mut self, limit: Duration, stop: &Stop) -> Result<()> {
        let deadline = Instant::now() + limit;
        let Self {
            qemu,
            folder,
            session,
            ..
        } = self;
        match session {
            Session::Port(port) => {
                let ready = port.line(deadline, stop, &mut || alive(qemu, folder));
                let ready = ready
                    .with_context(|| format!("the guest did not boot{}", log_tails(folder)))?;
                ensure!(
                    ready == "ready",
                    "the guest sent {ready:?} instead of 'ready'"
                );
            }
            Session::Ssh(ssh) => loop {
                alive(qemu, folder)?;
                match ssh.run("true", Duration::from_secs(30), stop) {
                    Ok(_) => break,
                    Err(e) if Instant::now() > deadline || stop.is_wanted() => {
                        return Err(
                            e.context(format!("the guest did not boot{}", log_tails(folder)))
                        );
                    }
                    Err(_) => sleep(Duration::from_secs(1)),
                }
            },
        }
        Ok(())
    }

    /// The process id of QEMU.
    pub fn pid(&self) -> u32 {
        self.qemu.pid()
    }

    /// Connects to QEMU's monitor.
    ///
    /// # Errors
    /// QEMU does not reply.
    pub fn qmp(&self) -> Result<Qmp> {
        Qmp::connect(&self.folder.join("qmp.sock"))
    }

    /// The disks' paths in the guest's `/sys`, as shell patterns.
    pub fn disks(&self) -> &[String] {
        &self.disks
    }
}

impl Shell for Guest {
    fn run(&mut self, script: &str, limit: Duration, stop: &Stop) -> Result<Answer> {
        let Self {
            qemu,
            folder,
            session,
            ..
        } = self;
        let answer = match session {
            Session::Port(port) => port.run(script, limit, stop, &mut || alive(qemu, folder)),
            Session::Ssh(ssh) => ssh.run(script, limit, stop),
        };
        match answer {
            Err(e) if !stop.is_wanted() => Err(explained(e, qemu, folder)),
            other => other,
        }
    }
}

/// How long QEMU may take to end after it has closed its sockets.
const ENDING: Duration = Duration::from_secs(10);

/// Waits whether QEMU ends, and returns that as the reason of an error. Otherwise returns the error itself.
fn explained(error: anyhow::Error, qemu: &mut Process, folder: &Path) -> anyhow::Error {
    let deadline = Instant::now() + ENDING;
    while Instant::now() < deadline {
        if let Err(ended) = alive(qemu, folder) {
            return ended;
        }
        sleep(Duration::from_millis(50));
    }
    let lost = format!("the connection to the guest is lost{}", log_tails(folder));
    error.context(lost)
}

fn alive(qemu: &mut Process, folder: &Path) -> Result<()> {
    match qemu.ended()? {
        None => Ok(()),
        Some(status) => bail!("QEMU ended ({status}){}", log_tails(folder)),
    }
}

/// The last lines of QEMU's log and of the guest's console.
fn log_tails(folder: &Path) -> String {
    let log = |name: &str, lines| {
        let text = tail(&folder.join(name), lines);
        if text.is_empty() {
            String::new()
        } else {
            format!("\n{name}:\n{text}")
        }
    };
    let console = log("console.log", 12);
    // The reason for a panic is above the trace at the end.
    let panic = tail(&folder.join("console.log"), 200)
        .lines()
        .rfind(|line| line.contains("Kernel panic"))
        .filter(|line| !console.contains(line))
        .map_or_else(String::new, |line| format!("\n{line}"));
    format!("{}{panic}{console}", log("qemu.log", 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// QEMU closes its sockets before it ends.
    #[test]
    fn an_error_is_explained_by_the_end_of_qemu_after_it() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("qemu.log");
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "sleep 0.5; exit 3"]);
        let mut qemu = Process::start("QEMU", &mut command, &log).unwrap();
        let closed = anyhow::anyhow!("QEMU closed the guest's port");
        let error = explained(closed, &mut qemu, folder.path());
        assert!(error.to_string().contains("exit status: 3"), "{error:#}");
    }
}
