//! A QMP client, for QEMU and for ringdisk.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

/// The longest message that is read.
const MESSAGE_MAX: u64 = 16 << 20;

/// A connection to a QMP socket.
pub struct Qmp(BufReader<UnixStream>);

impl Qmp {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// No process listens, or it does not speak QMP.
    pub fn connect(socket: &Path) -> Result<Qmp> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("connecting to {}", socket.display()))?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut qmp = Qmp(BufReader::new(stream));
        let greeting = qmp.read()?;
        ensure!(
            greeting.get("QMP").is_some(),
            "{} greeted with {greeting}",
            socket.display()
        );
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// The process that listens on the socket, if it is in a PID namespace that this process sees. It is not QEMU if
    /// QEMU was given a socket that another program had opened, as by libvirt.
    pub fn listener(&self) -> Option<u32> {
        let peer = rustix::net::sockopt::socket_peercred(self.0.get_ref()).ok()?;
        let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).ok()?;
        (pid > 0).then_some(pid)
    }

    /// Executes a command; events that arrive meanwhile are skipped.
    ///
    /// # Errors
    /// The command fails, or the connection is closed.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.send(command, arguments)?;
        loop {
            let mut answer = self.read()?;
            if let Some(error) = answer.get("error") {
                bail!("the QMP command {command} failed: {error}");
            }
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
        }
    }

    /// A property of an object; `None` if the object does not have it.
    pub fn property(&mut self, path: &str, property: &str) -> Option<Value> {
        self.execute("qom-get", json!({ "path": path, "property": property }))
            .ok()
    }

    /// Plugs in a memory module that is shared with the server of the guest's disks.
    ///
    /// # Errors
    /// QEMU refuses the command.
    pub fn plug_memory(&mut self, name: &str, mib: u32) -> Result<()> {
        let backend = format!("{name}-memory");
        self.execute(
            "object-add",
            json!({
                "qom-type": "memory-backend-memfd",
                "id": backend,
                "size": u64::from(mib) << 20,
                "share": true,
            }),
        )?;
        self.execute(
            "device_add",
            json!({ "driver": "pc-dimm", "id": name, "memdev": backend }),
        )?;
        Ok(())
    }

    /// Asks the guest to release a memory module, waits until it has, and frees the memory.
    ///
    /// # Errors
    /// QEMU or the guest refuses.
    pub fn unplug_memory(&mut self, name: &str) -> Result<()> {
        self.unplug(name)?;
        self.execute("object-del", json!({ "id": format!("{name}-memory") }))?;
        Ok(())
    }

    /// Asks the guest to release a device, and waits until it has.
    ///
    /// # Errors
    /// QEMU or the guest refuses.
    pub fn unplug(&mut self, name: &str) -> Result<()> {
        // Not `execute`, which would skip events that arrive before QEMU's reply.
        self.send("device_del", json!({ "id": name }))?;
        loop {
            let message = self.read()?;
            if message.get("error").is_some() || message["event"] == "MEM_UNPLUG_ERROR" {
                bail!("unplugging {name}: {message}");
            }
            if message["event"] == "DEVICE_DELETED" && message["data"]["device"] == name {
                return Ok(());
            }
        }
    }

    fn send(&mut self, command: &str, arguments: Value) -> Result<()> {
        let message = json!({ "execute": command, "arguments": arguments });
        writeln!(self.0.get_ref(), "{message}").context("sending a QMP command")
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        (&mut self.0)
            .take(MESSAGE_MAX)
            .read_line(&mut line)
            .context("reading a QMP reply")?;
        serde_json::from_str(&line).with_context(|| format!("the QMP reply is not JSON: {line:?}"))
    }
}
