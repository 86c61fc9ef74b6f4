//! `ringdisk upgrade`: starts this program to take over from the running one.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::json;

use crate::client::{CommandLineError, CommandResult, Connection};
use crate::monitor::control_socket;
use crate::upgrade::launch_record::{LaunchRecord, REPLACED_CONTROL, path_of};
use crate::upgrade::process_settings;
use crate::upgrade::protocol::{
    Channel, Launched, Outcome, ReplyOrFailure, UpgradeReply, UpgradeRequest, program,
};

/// How long an upgrade may take. The server's own limits are shorter.
const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(clap::Args)]
#[command(after_help = "Example:
  apt install ./ringdisk_0.2.0-1_amd64.deb && ringdisk upgrade

The new program takes over from the running one, with the same arguments and the present configuration. VMs stay
connected and see a short pause. If anything fails, the running program continues to serve, and the exit code is 1.
Requests in flight finish first, and those that a limit delays are not delayed further; if that takes more than 5 s, the
upgrade is cancelled.")]
pub struct Args {
    /// New program; default: this one
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    #[command(flatten)]
    connection: Connection,
}

/// Runs the command.
pub fn run(args: &Args) -> CommandResult {
    let ask = UpgradeRequest {
        unless_running: None,
    };
    take_over(&args.connection, &ask, args.program.as_deref()).map(drop)
}

/// Upgrades if the running program is not this one. Returns whether it did.
pub fn if_changed(connection: &Connection) -> Result<bool, CommandLineError> {
    let ask = UpgradeRequest {
        unless_running: program(),
    };
    match ask.unless_running {
        Some(_) => take_over(connection, &ask, None),
        None => Ok(false),
    }
}

fn take_over(
    connection: &Connection,
    ask: &UpgradeRequest,
    program: Option<&Path>,
) -> Result<bool, CommandLineError> {
    let here = |what| move |e: io::Error| CommandLineError::Here(what, e);
    let control = connection
        .control
        .clone()
        .unwrap_or_else(control_socket::default_path);
    let deadline = Instant::now() + TIMEOUT;
    let socket = path_of(&control, "upgrade");
    let server = match connect_to(&socket) {
        // An older version has no such socket. If none runs at all, the reload reports that.
        Err(e) if ask.unless_running.is_some() && e.kind() == io::ErrorKind::NotFound => {
            return Ok(false);
        }
        server => server.map_err(|e| {
            let e = format!(
                "{}: {e}; is ringdisk running, and as this user?",
                socket.display()
            );
            CommandLineError::Here("cannot ask for an upgrade", io::Error::other(e))
        })?,
    };
    match server.send(ask, &[], deadline) {
        // A server that cannot serve the connection has closed it, and has said why.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
        sent => sent.map_err(here("cannot ask for an upgrade"))?,
    }
    let Some((mut child, pid)) = launch(&server, &control, program, deadline).map_err(here(
        "the running program continues to serve: the new one cannot be started",
    ))?
    else {
        return Ok(false);
    };
    let outcome = server.receive::<Outcome>(deadline);
    let failed = |why: String, child: &mut Child| {
        // With its children, which have descriptors of the log and a socket to the running process.
        let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
        // Not forever: it may hang in the kernel, waiting for storage.
        while let Ok(None) = child.try_wait()
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(CommandLineError::Here(
            "the running program continues to serve",
            io::Error::other(why),
        ))
    };
    match outcome {
        Ok((Outcome { error: None, .. }, _)) if child.try_wait().is_ok_and(|s| s.is_some()) => {
            Err(CommandLineError::Here(
                "nothing is served",
                io::Error::other(format!(
                    "process {pid} took over and has exited; its log says why; start ringdisk again: VMs that reconnect \
                     continue"
                )),
            ))
        }
        Ok((outcome @ Outcome { error: None, .. }, _)) => {
            let ms = outcome.pause_us as f64 / 1000.0;
            let reply = json!({
                "pid": pid, "disks": outcome.disks, "connected": outcome.connected, "pause-ms": ms,
                "failed-backups": &outcome.failed_backups,
            });
            let disks = match outcome.disks {
                1 => "1 disk".into(),
                n => format!("{n} disks"),
            };
            let mut text =
                format!("process {pid} serves {disks} from now on; VMs waited {ms:.1} ms");
            text += &ended(&outcome.failed_backups);
            connection.say(&reply, &text);
            Ok(true)
        }
        Ok((
            Outcome {
                error: Some(e),
                failed_backups,
                ..
            },
            _,
        )) => failed(e + &ended(&failed_backups), &mut child),
        // The two processes have decided which of them serves; the other one exits by itself.
        Err(e) => Err(CommandLineError::Here(
            "the running program has not reported the result; see 'ringdisk list' and the log",
            e,
        )),
    }
}

/// Names backups that an upgrade has ended, also one that has failed.
fn ended(backups: &[String]) -> String {
    match backups {
        [] => String::new(),
        ids => format!(
            "; open backups have failed, begin them again: {}",
            ids.join(", ")
        ),
    }
}

fn connect_to(path: &Path) -> io::Result<Channel> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(Channel::from(socket))
}

/// Starts the new process like the old one, and with the same output. `None` if it is the same program.
fn launch(
    server: &Channel,
    control: &Path,
    program: Option<&Path>,
    deadline: Instant,
) -> io::Result<Option<(Child, u32)>> {
    let (reply, mut descriptors) = server.receive(deadline)?;
    let reply = match reply {
        ReplyOrFailure::UpgradeReply(reply) => reply,
        ReplyOrFailure::Failed(outcome) => {
            let why = outcome.error.unwrap_or_default();
            return Err(io::Error::other(format!(
                "the running program reports: {why}"
            )));
        }
    };
    if reply == UpgradeReply::SameProgram {
        return Ok(None);
    }
    let mut next = || {
        let next = descriptors.pop_front();
        next.ok_or_else(|| io::Error::other("a descriptor is missing"))
    };
    let channel = next()?;
    let program: PathBuf = match program {
        Some(program) => std::path::absolute(program)?,
        None => std::env::current_exe()?,
    };
    let record = LaunchRecord::read(control)?;
    if record.is_managed() && !shares_cgroup(&channel) {
        return Err(io::Error::other(
            "it is a service, and the service manager would not recognise a process started outside of it; 'systemctl \
             reload ringdisk' upgrades to the installed program",
        ));
    }
    if let Ok(running) = socket_peercred(&channel) {
        for problem in process_settings::adopt(running.pid, record.umask)? {
            eprintln!("ringdisk: the new process does not get {problem}");
        }
    }
    let child = Command::new(&program)
        .args(record.taking_over())
        .env_clear()
        .envs(record.environment)
        .env(REPLACED_CONTROL, std::path::absolute(control)?)
        .current_dir(record.directory)
        .stdin(channel)
        .stdout(next()?)
        .stderr(next()?)
        // It must survive the end of the terminal.
        .process_group(0)
        .spawn()
        .map_err(|e| {
            let program = program.display();
            io::Error::other(format!("{program}: {e}; --program PATH names another"))
        })?;
    let pid = child.id();
    server.send(&Launched { pid }, &[], deadline)?;
    Ok(Some((child, pid)))
}

/// Whether this process is in the control group of the server, which made the channel. systemd accepts no other process
/// as the service.
fn shares_cgroup(channel: &OwnedFd) -> bool {
    let group = |process: String| std::fs::read(format!("/proc/{process}/cgroup")).ok();
    let server = socket_peercred(channel).map(|server| server.pid.as_raw_nonzero());
    match server.map(|pid| group(pid.to_string())) {
        // If it cannot be read, the start reports the error.
        Ok(Some(theirs)) => group("self".into()).is_none_or(|ours| ours == theirs),
        _ => true,
    }
}
