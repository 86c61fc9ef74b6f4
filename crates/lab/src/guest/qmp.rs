//! What the lab asks QEMU while a guest runs.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

/// Longest message of QEMU that is read.
const MESSAGE_MAX: u64 = 16 << 20;

/// A connection to QEMU's monitor.
pub struct Qmp(BufReader<UnixStream>);

impl Qmp {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// Nobody listens, or it is not QEMU.
    pub fn connect(socket: &Path) -> Result<Qmp> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("connecting to {}", socket.display()))?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut qmp = Qmp(BufReader::new(stream));
        let greeting = qmp.read()?;
        ensure!(
            greeting.get("QMP").is_some(),
            "QEMU greeted with {greeting}"
        );
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Executes a command; events that come meanwhile are skipped.
    ///
    /// # Errors
    /// QEMU refuses, or is gone.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let message = json!({ "execute": command, "arguments": arguments });
        writeln!(self.0.get_ref(), "{message}").context("talking to QEMU")?;
        loop {
            let mut answer = self.read()?;
            if let Some(error) = answer.get("error") {
                bail!("QEMU refuses {command}: {error}");
            }
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
        }
    }

    /// A property of an object; `None` if it has no such.
    pub fn property(&mut self, path: &str, property: &str) -> Option<Value> {
        self.execute("qom-get", &json!({ "path": path, "property": property }))
            .ok()
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        (&mut self.0)
            .take(MESSAGE_MAX)
            .read_line(&mut line)
            .context("reading from QEMU")?;
        serde_json::from_str(&line).with_context(|| format!("QEMU said {line:?}"))
    }
}
