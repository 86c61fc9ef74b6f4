//! Servers under test as child processes: ringdisk, and qemu-storage-daemon with the same disk to compare with.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::driver::HANG;

/// A running vhost-user-blk server. Killed on drop.
pub struct Server {
    child: Child,
    /// One socket per disk.
    pub sockets: Vec<PathBuf>,
    /// What ringdisk printed when it became ready; null for qemu-storage-daemon.
    pub ready: Value,
    log: Arc<Mutex<String>>,
}

/// CPU time that a process has used.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuTime {
    /// All of it, with threads that have ended and io_uring's workers, to the nanosecond.
    pub total: Duration,
    /// The part in user mode; the kernel's estimate.
    pub user: Duration,
    /// The part in the kernel; the kernel's estimate.
    pub system: Duration,
}

impl Server {
    /// Starts `ringdisk serve --json ARGS...` and waits until its sockets accept.
    pub fn ringdisk<S: AsRef<OsStr>>(binary: impl AsRef<OsStr>, args: &[S]) -> io::Result<Self> {
        let mut command = Command::new(binary);
        command.args(["serve", "--json"]).args(args);
        Self::ringdisk_command(command)
    }

    /// Like `ringdisk`, with a command line (say, under `taskset`) that ends in what `serve --json` needs.
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

    /// Starts qemu-storage-daemon with one block node, given in `--blockdev` syntax without its name, say
    /// `driver=file,filename=disk.raw,aio=io_uring,cache.direct=on`, in an I/O thread of its own, behind `socket`.
    pub fn qemu(blockdev: &str, socket: &Path, queues: u16) -> io::Result<Self> {
        let mut command = Command::new("qemu-storage-daemon");
        Self::qemu_command(&mut command, blockdev, socket, queues)
    }

    /// Like `qemu`, appended to a command line (say, `taskset -c 0 qemu-storage-daemon`).
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
        // The pid file is written when the exports listen.
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

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.rustix_pid(), signal)
            .expect("the server is our child and not waited for");
    }

    /// Asks the server to end (SIGTERM), and waits until it has, but not for ever.
    pub fn terminate(&mut self) -> io::Result<ExitStatus> {
        self.signal(Signal::TERM);
        self.ended()
    }

    /// Waits until a server that was asked to end has done so, but not for ever.
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

    /// What has been read of the server's stderr. A line that was written just now may be missing: see [`Self::logged`].
    /// All of it is there when the server has ended.
    pub fn log(&self) -> String {
        self.log.lock().expect("no panic while logging").clone()
    }

    /// Waits for a line of the log with all these `parts`, and gives it.
    ///
    /// # Panics
    /// If none comes.
    #[track_caller]
    pub fn logged(&self, parts: &[&str]) -> String {
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

    /// CPU time used so far.
    pub fn cpu_time(&self) -> io::Result<CpuTime> {
        let total = process_clock(self.pid())?;
        // Fields 14 and 15, counted behind the parenthesised command name, which may contain anything.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid()))?;
        let mut fields = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .skip(11);
        let mut ticks = || fields.next().and_then(|f| f.parse().ok()).unwrap_or(0);
        let tick = |n: u64| {
            Duration::from_nanos(n * 1_000_000_000 / rustix::param::clock_ticks_per_second())
        };
        Ok(CpuTime {
            total,
            user: tick(ticks()),
            system: tick(ticks()),
        })
    }

    fn rustix_pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The log of a server that has ended; its collecting thread may still be at the last line.
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

/// Gathers a server's stderr, and passes it on for whoever reads a failed test.
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

/// The CPU clock of another process (`clock_getcpuclockid(3)`): unlike a sum over /proc/PID/task it does not forget
/// threads that have ended.
fn process_clock(pid: u32) -> io::Result<Duration> {
    let mut clock = 0;
    // SAFETY: writes one clock id into the local variable.
    let failed = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &raw mut clock) };
    if failed != 0 {
        return Err(io::Error::from_raw_os_error(failed));
    }
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one timespec into the local variable.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Waits until a process has ended, and its threads, one of which may still be in the kernel. One that nobody has waited
/// for counts as gone.
pub fn gone(pid: u32) {
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
