//! Commands from tests to QEMU while a guest runs (QEMU's QMP specification).

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A connection to QEMU's monitor.
pub struct Qmp(BufReader<UnixStream>);

impl Qmp {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// No process listens, or it is not QEMU.
    pub fn connect(socket: &Path) -> Result<Qmp> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("connecting to {}", socket.display()))?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut qmp = Qmp(BufReader::new(stream));
        let greeting = qmp.read()?;
        if greeting.get("QMP").is_none() {
            bail!("QEMU greeted with {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command; events that arrive meanwhile are skipped.
    ///
    /// # Errors
    /// QEMU refuses the command.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let message = json!({ "execute": command, "arguments": arguments });
        writeln!(self.0.get_ref(), "{message}")?;
        loop {
            let mut answer = self.read()?;
            if let Some(error) = answer.get("error") {
                bail!("{command}: {error}");
            }
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
        }
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
        let message = json!({ "execute": "device_del", "arguments": { "id": name } });
        writeln!(self.0.get_ref(), "{message}")?;
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

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.0.read_line(&mut line).context("reading from QEMU")?;
        serde_json::from_str(&line).with_context(|| format!("QEMU said {line:?}"))
    }
}
