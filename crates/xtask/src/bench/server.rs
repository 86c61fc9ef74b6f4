//! The contestants: how each is started, pinned and stopped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::backing::{NULL_BYTES, Prepared};
use super::plan::Server;
use super::setting::{Cache, Poll, Setting};
use harness::cpu;
use lab::client::{Job, Sample};

/// Which core each side has to itself.
pub const SERVER_CPU: usize = 0;
pub const CLIENT_CPU: usize = 1;

/// The programs that take part.
pub struct Programs {
    pub ringdisk: PathBuf,
    pub baseline: Option<PathBuf>,
    /// The ringdisk that runs plans of the lab.
    pub lab: PathBuf,
    /// The release build of this program, as the client.
    pub xtask: PathBuf,
    /// More arguments for `ringdisk serve` and the baseline.
    pub ringdisk_args: Vec<String>,
}

/// A server that is up, or about to be; killed when dropped.
pub struct Running {
    child: Child,
    pub socket: PathBuf,
    log: PathBuf,
}

impl Running {
    /// Starts `server` on `backing`, pinned to its core from birth: with one core, ringdisk has one I/O thread.
    pub fn start(
        server: Server,
        backing: &Prepared,
        setting: Setting,
        programs: &Programs,
        dir: &Path,
    ) -> anyhow::Result<Running> {
        let socket = dir.join(format!("{server}.sock"));
        let log = dir.join(format!("{server}.log"));
        let _ = fs::remove_file(&socket);
        let setting = match server {
            Server::RingdiskNoPolling => Setting {
                poll: Some(Poll::Off),
                ..setting
            },
            _ => setting,
        };
        let ours =
            |binary: &Path, more| ringdisk(binary, programs, backing, setting, &socket, more);
        let mut command = match server {
            Server::Ringdisk | Server::RingdiskNoPolling => ours(&programs.ringdisk, ""),
            Server::RingdiskFixed => ours(&programs.ringdisk, ",fixed-buffers=on"),
            Server::Baseline => {
                let binary = programs.baseline.as_ref();
                ours(binary.context("no --baseline was given")?, "")
            }
            Server::Qsd => qsd("io_uring", backing, setting, &socket),
            Server::QsdNative => qsd("native", backing, setting, &socket),
            Server::Host => bail!("the host is no server"),
        };
        let log_file = fs::File::create(&log)?;
        command
            .stdin(Stdio::null())
            .stdout(log_file.try_clone()?)
            .stderr(log_file);
        let child = cpu::start_on(&[SERVER_CPU], || command.spawn())?
            .with_context(|| format!("starting {}", command.get_program().display()))?;
        Ok(Running { child, socket, log })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs the client against this server and waits for its sample.
    pub fn measure(&self, job: &Job, programs: &Programs) -> anyhow::Result<Sample> {
        self.finish(self.start_client(job, programs)?)
    }

    /// Starts the client, pinned to its core.
    pub fn start_client(&self, job: &Job, programs: &Programs) -> anyhow::Result<Child> {
        let mut command = Command::new(&programs.xtask);
        command
            .args(["bench", "client"])
            .arg(serde_json::to_string(job)?);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        cpu::start_on(&[CLIENT_CPU], || command.spawn())?.context("starting the client")
    }

    /// Waits for the client's sample.
    pub fn finish(&self, client: Child) -> anyhow::Result<Sample> {
        let output = client.wait_with_output()?;
        if !output.status.success() {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            let last = log.trim_end().rsplit('\n').next().unwrap_or_default();
            let client = String::from_utf8_lossy(&output.stderr);
            bail!("{}; the server's last line: {last:?}", client.trim());
        }
        serde_json::from_slice(&output.stdout).context("reading the client's sample")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        stop(&mut self.child);
        let _ = fs::remove_file(&self.socket);
    }
}

/// Ends a server, and waits until it has ended.
pub fn stop(server: &mut Child) {
    // Fails only if it has ended already.
    let _ = kill_process(Pid::from_child(server), Signal::TERM);
    let deadline = Instant::now() + Duration::from_secs(5);
    while let Ok(None) = server.try_wait() {
        if Instant::now() > deadline {
            eprintln!("server {} ignores SIGTERM; killed", server.id());
            let _ = server.kill();
            let _ = server.wait();
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn ringdisk(
    binary: &Path,
    programs: &Programs,
    backing: &Prepared,
    setting: Setting,
    socket: &Path,
    more: &str,
) -> Command {
    let mut command = Command::new(binary);
    command.arg("serve").args(&programs.ringdisk_args);
    if let Some(poll) = setting.poll {
        command.arg(format!("--poll-max-us={}", poll.max_us()));
    }
    command.arg(format!(
        "{},queues={},queue-size=1024,socket={}{more}",
        file(backing, setting),
        setting.queues,
        doubled_commas(socket)
    ));
    command
}

/// A backing as `ringdisk serve` takes it.
pub fn file(backing: &Prepared, setting: Setting) -> String {
    let file = match backing.path() {
        Some(path) => doubled_commas(path),
        None => format!("null:{}G", NULL_BYTES >> 30),
    };
    let cache = setting.cache_on(backing.kind());
    let aio = setting.aio.map(|aio| format!(",aio={aio}"));
    format!(
        "file={file},format=raw,cache={cache}{}",
        aio.unwrap_or_default()
    )
}

/// All queues of an export have one I/O thread: qemu-storage-daemon 10 takes no list of them for vhost-user-blk.
fn qsd(aio: &str, backing: &Prepared, setting: Setting, socket: &Path) -> Command {
    let cache = setting.cache_on(backing.kind());
    let on_off = |on| if on { "on" } else { "off" };
    let direct = on_off(cache.direct());
    let no_flush = on_off(cache == Cache::Unsafe);
    let aio = match setting.aio {
        Some(aio) => aio.to_string(),
        // QEMU refuses native AIO through the page cache.
        None if cache.direct() => aio.into(),
        None => "io_uring".into(),
    };
    let options = format!("cache.direct={direct},cache.no-flush={no_flush},aio={aio}");
    let node = match backing {
        Prepared::Null => format!("driver=null-co,size={NULL_BYTES}"),
        Prepared::Cache(path) | Prepared::Disk(path) => {
            format!("driver=file,filename={},{options}", doubled_commas(path))
        }
        Prepared::Zram(zram) => {
            let path = doubled_commas(zram.device());
            format!("driver=host_device,filename={path},{options}")
        }
    };
    let poll = setting.poll.map(|poll| {
        let max_ns = poll.max_us() * 1000;
        format!(",poll-max-ns={max_ns}")
    });
    let mut command = Command::new("qemu-storage-daemon");
    command
        .arg("--object")
        .arg(format!("iothread,id=t0{}", poll.unwrap_or_default()))
        .arg("--blockdev")
        .arg(format!("{node},node-name=n"));
    command.arg("--export").arg(format!(
        "vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path={},iothread=t0,num-queues={},writable=on,writethrough={}",
        doubled_commas(socket),
        setting.queues,
        on_off(cache.through())
    ));
    command
}

/// QEMU's option syntax, and ringdisk's: a comma in a value is doubled.
pub fn doubled_commas(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}
