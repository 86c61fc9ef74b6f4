//! Servers under test as child processes: ringdisk, and qemu-storage-daemon with the same disk for comparison.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::driver::HANG;

/// A running vhost-user-blk server. Dropping this kills it.
pub struct Server {
    child: Child,
    /// The sockets, one per disk.
    pub sockets: Vec<PathBuf>,
    /// ringdisk's message that it is ready; null for qemu-storage-daemon.
    pub ready: Value,
    log: Arc<Mutex<String>>,
}

impl Server {
    /// Starts `ringdisk serve --json ARGS...`, and waits until its sockets accept connections.
    pub fn ringdisk<S: AsRef<OsStr>>(binary: impl AsRef<OsStr>, args: &[S]) -> io::Result<Self> {
        let mut command = Command::new(binary);
        command.args(["serve", "--json"]).args(args);
        Self::ringdisk_command(command)
    }

    /// As `ringdisk`, with a complete command, for example under `taskset`, that ends in the arguments of `serve
    /// --json`.
    pub fn ringdisk_command(mut command: Command) -> io::Result<Self> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let log = collect(child.stderr.take().expect("stderr is piped"));
        let mut stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut server = Self {
            child,
            sockets: Vec::new(),
            ready: Value::Null,
            log,
        };
        let mut line = String::new();
        if stdout.read_line(&mut line)? == 0 {
            let status = server.child.wait()?;
            return Err(io::Error::other(format!(
                "not ready, {status}: {}",
                server.log_at_end()
            )));
        }
        server.ready = serde_json::from_str(&line)
            .map_err(|e| io::Error::other(format!("{e} in {line:?}")))?;
        let disks = server.ready["disks"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        server.sockets = disks
            .iter()
            .filter_map(|d| d["socket"].as_str())
            .map(PathBuf::from)
            .collect();
        Ok(server)
    }

    /// Starts qemu-storage-daemon on `socket`, with one block node in an I/O thread of its own. The node is given in
    /// `--blockdev` syntax without its name, for example `driver=file,filename=disk.raw,aio=io_uring,cache.direct=on`.
    pub fn qemu(blockdev: &str, socket: &Path, queues: u16) -> io::Result<Self> {
        let mut command = Command::new("qemu-storage-daemon");
        Self::qemu_command(&mut command, blockdev, socket, queues)
    }

    /// As `qemu`, appended to a command (for example `taskset -c 0 qemu-storage-daemon`).
    pub fn qemu_command(
        command: &mut Command,
        blockdev: &str,
        socket: &Path,
        queues: u16,
    ) -> io::Result<Self> {
        let pidfile = socket.with_extension("pid");
        let _ = std::fs::remove_file(&pidfile);
        let export = format!(
            "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},writable=on,num-queues={queues},\
             iothread=io",
            socket.display()
        );
        command.args([
            "--object",
            "iothread,id=io",
            "--blockdev",
            &format!("{blockdev},node-name=disk"),
        ]);
        command
            .args(["--export", &export])
            .arg("--pidfile")
            .arg(&pidfile);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let log = collect(child.stderr.take().expect("stderr is piped"));
        let mut server = Self {
            child,
            sockets: vec![socket.to_owned()],
            ready: Value::Null,
            log,
        };
        // The daemon writes the pid file when its exports listen.
        while !pidfile.exists() {
            if let Some(status) = server.child.try_wait()? {
                return Err(io::Error::other(format!(
                    "qemu-storage-daemon: {status}: {}",
                    server.log_at_end()
                )));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    /// The socket of the first disk.
    pub fn socket(&self) -> &Path {
        &self.sockets[0]
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.rustix_pid(), signal)
            .expect("the server is our child and not waited for");
    }

    /// Sends SIGTERM, and waits for the end of the process for a limited time.
    pub fn terminate(&mut self) -> io::Result<ExitStatus> {
        self.signal(Signal::TERM);
        self.ended()
    }

    /// Waits for the end of a server that was asked to end, for a limited time.
    pub fn ended(&mut self) -> io::Result<ExitStatus> {
        let deadline = Instant::now() + HANG;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                self.log_at_end();
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the server does not end",
        ))
    }

    /// Whether the process still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// The part of the server's stderr that has been read. A line that was just written may be missing: see
    /// [`Self::logged`]. The log is complete when the server has ended.
    pub fn log(&self) -> String {
        self.log.lock().expect("no panic while logging").clone()
    }

    /// Waits for a line of the log that contains all `parts`, and returns it.
    ///
    /// # Panics
    /// No such line appears.
    #[track_caller]
    pub fn wait_for_log(&self, parts: &[&str]) -> String {
        let deadline = Instant::now() + HANG;
        loop {
            let log = self.log();
            let mut lines = log.lines();
            if let Some(line) = lines.find(|line| parts.iter().all(|part| line.contains(part))) {
                return line.to_owned();
            }
            assert!(Instant::now() < deadline, "no line with {parts:?} in {log}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn rustix_pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The log of a server that has ended; waits for the thread that collects its last lines.
    fn log_at_end(&self) -> String {
        let start = Instant::now();
        while Arc::strong_count(&self.log) > 1 && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.log()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Collects a server's stderr, and also prints it for the reader of a failed test.
fn collect(stderr: impl Read + Send + 'static) -> Arc<Mutex<String>> {
    let log = Arc::new(Mutex::new(String::new()));
    let shared = log.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            eprintln!("server: {line}");
            let mut log = shared.lock().expect("no panic while logging");
            log.push_str(&line);
            log.push('\n');
        }
    });
    log
}

/// Waits until a process and its threads have ended; one of them may still be in the kernel. A zombie counts as ended.
pub fn wait_for_exit(pid: u32) {
    let start = Instant::now();
    let there = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let state = stat.rsplit(')').next()?.trim_start().chars().next();
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        Some(state != Some('Z') || threads.count() > 1)
    };
    while there() == Some(true) {
        assert!(start.elapsed() < HANG, "process {pid} does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}
