//! A ringdisk with a control socket, and its clients: ringdisk's own subcommands and QEMU's client library.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::driver::{Op, Queue};
use testkit::server::Server;

use crate::support::content;

/// `ringdisk serve`, with a control socket in a directory of its own.
pub struct Controlled {
    pub server: Server,
    pub dir: TempDir,
    pub control: PathBuf,
    pub arguments: Vec<String>,
}

impl Controlled {
    pub fn start(arguments: &[String]) -> Self {
        // Not in /tmp, which may be a tmpfs: the test needs O_DIRECT and holes of a real file system.
        Self::start_in(
            tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
            arguments,
        )
    }

    /// The same, with existing files.
    pub fn start_in(dir: TempDir, arguments: &[String]) -> Self {
        let control = dir.path().join("control.qmp");
        let socket = ["--control".to_owned(), control.display().to_string()];
        let all = [&socket[..], arguments].concat();
        let server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &all).unwrap();
        Self {
            server,
            dir,
            control,
            arguments: arguments.to_vec(),
        }
    }

    /// Kills the server and starts it with the same arguments.
    pub fn kill_and_restart(self) -> Self {
        self.server.signal(Signal::KILL);
        self.restart()
    }

    /// Starts the server, which has ended or is about to, with the same arguments.
    pub fn restart(self) -> Self {
        drop(self.server);
        Self::start_in(self.dir, &self.arguments)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A file of `bytes` bytes filled with [`content`].
    pub fn file(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content(0, bytes as usize)).unwrap();
        path
    }

    /// Runs `ringdisk ARGUMENTS... --control SOCKET` in the directory.
    pub fn ringdisk(&self, arguments: &[&str]) -> CommandOutput {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(arguments).arg("--control").arg(&self.control);
        CommandOutput::of(command.current_dir(self.dir.path()))
    }

    /// The same with `--json`; it must succeed.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let ran = self.ringdisk(&[arguments, &["--json"]].concat());
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
        assert_eq!(ran.out.lines().count(), 1, "{ran:?}");
        serde_json::from_str(&ran.out).unwrap()
    }

    /// The disk's entry in `list`.
    pub fn disk(&self, name: &str) -> Value {
        let disks = self.json(&["list"]);
        let mut disks = disks.as_array().unwrap().iter();
        let found = disks.find(|disk| disk["name"] == name).cloned();
        found.unwrap_or(Value::Null)
    }

    /// The threads of the process: id and name.
    pub fn threads(&self) -> Vec<(u32, String)> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.server.pid())).unwrap();
        let thread = |task: std::fs::DirEntry| {
            let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
            let id = task.file_name().to_str()?.parse().ok()?;
            Some((id, name.trim_end().to_owned()))
        };
        tasks.filter_map(|task| thread(task.unwrap())).collect()
    }
}

/// A finished command.
#[derive(Debug)]
pub struct CommandOutput {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl From<Output> for CommandOutput {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self {
            code: output.status.code(),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }
}

impl CommandOutput {
    pub fn of(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).output().unwrap().into()
    }

    /// Asserts that it failed with a single line that contains all of `words`.
    pub fn assert_fails(&self, code: i32, words: &[&str]) {
        println!("{}", self.err.trim_end());
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(
            (self.out.as_str(), self.err.lines().count()),
            ("", 1),
            "{self:?}"
        );
        for word in words {
            assert!(self.err.contains(word), "no '{word}' in {self:?}");
        }
    }
}

/// QEMU's own QMP client, controlled by the test.
pub struct QemuClient {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// The server's greeting.
    pub greeting: Value,
}

/// Class and description of the error of a refused command.
pub type Refusal = (String, String);

impl QemuClient {
    /// Returns `None` and prints the reason where the package is not installed.
    pub fn connect(test: &str, socket: &Path) -> Option<Self> {
        let python = match testkit::python::QMP.python() {
            Ok(python) => python,
            Err(missing) => {
                println!("skipped: {test}: {missing}");
                return None;
            }
        };
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/control/qemu_client.py");
        let mut child = Command::new(python)
            .arg(script)
            .arg(socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to = child.stdin.take().unwrap();
        let from = BufReader::new(child.stdout.take().unwrap());
        let mut client = Self {
            child,
            to,
            from,
            greeting: Value::Null,
        };
        client.greeting = client.read();
        Some(client)
    }

    /// Runs a command.
    pub fn try_call(&mut self, command: &str, arguments: Value) -> Result<Value, Refusal> {
        let mut answer = self.ask(json!({ "execute": command, "arguments": arguments }));
        match answer.get_mut("return") {
            Some(value) => Ok(value.take()),
            None => {
                let text = |key: &str| answer[key].as_str().unwrap().to_owned();
                Err((text("class"), text("desc")))
            }
        }
    }

    pub fn call(&mut self, command: &str, arguments: Value) -> Value {
        self.try_call(command, arguments)
            .unwrap_or_else(|refusal| panic!("{command}: {refusal:?}"))
    }

    /// Asserts that a command is refused and the description contains all of `words`.
    pub fn assert_refused(&mut self, command: &str, arguments: Value, class: &str, words: &[&str]) {
        let refusal = self.try_call(command, arguments.clone());
        let (got, desc) = refusal.expect_err(&format!("{command} {arguments} is refused"));
        println!("{command}: {got}: {desc}");
        assert_eq!(got, class, "{command} {arguments}: {desc}");
        for word in words {
            assert!(
                desc.contains(word),
                "{command} {arguments}: no '{word}' in: {desc}"
            );
        }
    }

    /// The next event: its name and data.
    pub fn event(&mut self) -> (String, Value) {
        let mut event = self.ask(json!({ "wait": true }));
        let name = event["event"].as_str().map(str::to_owned);
        (
            name.unwrap_or_else(|| panic!("{event}")),
            event["data"].take(),
        )
    }

    fn ask(&mut self, request: Value) -> Value {
        writeln!(self.to, "{request}").unwrap();
        self.read()
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e} in {line:?}"))
    }
}

impl Drop for QemuClient {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Stops the threads of a test, even after a failed assertion.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Bytes of each request of [`verify`].
pub const VERIFY_BYTES: usize = 8 << 10;

/// The first sector of a slot: slots do not overlap, and each uses at most 64 KiB.
pub fn slot_sector(queue: u16, slot: u16) -> u64 {
    u64::from(queue) * 2048 + u64::from(slot) * 128
}

/// Reads what [`content`] wrote to the disk, all slots at once; panics on a difference.
pub fn verify(queue: &mut Queue) {
    let slots: Vec<u16> = (0..queue.slots()).collect();
    for &slot in &slots {
        queue.write_buffer(slot, &[0xa5; VERIFY_BYTES]);
        let at = slot_sector(queue.index, slot);
        queue.prepare(slot, Op::Read, at, VERIFY_BYTES as u32);
    }
    queue.submit(&slots);
    for (slot, status) in queue.finish(slots.len()) {
        let at = slot_sector(queue.index, slot);
        assert_eq!(status, 0, "read at sector {at}");
        let right = content(at, VERIFY_BYTES);
        assert!(
            queue.read_buffer(slot, VERIFY_BYTES) == right,
            "sector {at} has something else"
        );
    }
}

/// Rewrites the existing data, all slots at once, flushes it and reads it back.
pub fn rewrite(queue: &mut Queue) {
    let slots: Vec<u16> = (0..queue.slots()).collect();
    for &slot in &slots {
        let at = slot_sector(queue.index, slot);
        queue.write_buffer(slot, &content(at, VERIFY_BYTES));
        queue.prepare(slot, Op::Write, at, VERIFY_BYTES as u32);
    }
    queue.submit(&slots);
    for (slot, status) in queue.finish(slots.len()) {
        assert_eq!(status, 0, "write in slot {slot}");
    }
    assert_eq!(queue.run(Op::Flush, 0, 0), 0);
    verify(queue);
}
