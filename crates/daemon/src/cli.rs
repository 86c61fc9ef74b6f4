//! The command line: subcommands, the log, and exit codes.

use std::env;
use std::io::{self, IsTerminal};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::upgrade::client as upgrade;
use crate::{check, client, hook, lab, log, manual, profile, proxmox, resource_limits, serve};

#[derive(Parser)]
#[command(name = "ringdisk", version, about, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed (the last line says why and what to do), \
    2 wrong usage.\nRINGDISK_LOG=debug logs the messages of front-ends."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve disks to virtual machines over vhost-user
    Serve(serve::Args),
    /// List the served disks
    List(client::ListArgs),
    /// Serve another disk
    Attach(client::AttachArgs),
    /// Print how a VM connects to a disk: options of QEMU, libvirt's XML, and arguments for Proxmox VE
    ConnectInfo(client::ConnectInfoArgs),
    /// Stop serving a disk
    Detach(client::DetachArgs),
    /// Let NBD clients, such as backup programs, read or write a disk
    Export(client::ExportArgs),
    /// Grow a disk
    Resize(client::ResizeArgs),
    /// Show the load of the disks, measured over a second
    Stats(client::StatsArgs),
    /// Show the load of the disks continuously
    Top(client::TopArgs),
    /// Find what limits a disk that is in use
    Profile(profile::Args),
    /// Limit the bytes and operations per second of a disk
    Throttle(client::ThrottleArgs),
    /// Move a disk to another file while its VM runs
    Replace(client::ReplaceArgs),
    /// Export what disks are at one moment, for a backup
    Backup(client::BackupArgs),
    /// List and change the dirty bitmaps of disks
    Bitmap(client::BitmapArgs),
    /// Retry or fail the requests that wait because storage failed
    Resume(client::ResumeArgs),
    /// Reload the configuration
    Reload(client::ReloadArgs),
    /// Find and fix what slows the disks of virtual machines
    Check(check::Args),
    /// Measure the performance of storage configurations
    Lab(lab::Args),

    /// Replace the running ringdisk with this program, without disconnecting VMs
    Upgrade(upgrade::Args),
    /// Serve the disks of a VM when its manager starts it, and end that when it has gone
    Hook(hook::Args),
    /// Give disks of a VM of Proxmox VE to ringdisk, and back
    Proxmox(proxmox::Args),
    /// Write manual pages and shell completions to a directory
    Manual(manual::Args),
}

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    // No command of a user.
    if env::args_os()
        .nth(1)
        .is_some_and(|first| first == serve::probe::SUBCOMMAND)
    {
        return serve::probe::run().map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    let cli = Cli::parse();
    if let Command::Check(args) = &cli.command {
        return checked(args);
    }
    let filter = EnvFilter::try_from_env("RINGDISK_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .fmt_fields(log::OneLine)
        .log_internal_errors(false);
    let lines = log::Log::new();
    if lines.to_journal() {
        log.without_time()
            .with_level(false)
            .with_writer(lines)
            .init()
    } else {
        log.with_writer(lines).init()
    }
    if !matches!(cli.command, Command::Serve(_)) {
        // Without a thread, lines are written at the end.
        let _ = log::start();
    }
    resource_limits::raise_file_limit();
    let result = run(&cli.command);
    log::finish();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { code, problem }) => {
            log::complain(&problem);
            ExitCode::from(code)
        }
    }
}

fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Serve(args) => return Ok(serve::run(args)?),
        Command::Manual(args) => return Ok(manual::run(args, Cli::command())?),
        Command::Check(_) => Ok(()),
        Command::Lab(args) => return Ok(lab::run(args)?),
        Command::Profile(args) => return Ok(profile::run(args)?),
        Command::List(args) => client::list(args),
        Command::Attach(args) => client::attach(args),
        Command::ConnectInfo(args) => client::connect_info(args),
        Command::Detach(args) => client::detach(args),
        Command::Export(args) => client::export(args),
        Command::Resize(args) => client::resize(args),
        Command::Stats(args) => client::stats(args),
        Command::Top(args) => client::top(args),
        Command::Throttle(args) => client::throttle(args),
        Command::Replace(args) => client::replace(args),
        Command::Backup(args) => client::backup(args),
        Command::Bitmap(args) => client::bitmap(args),
        Command::Resume(args) => client::resume(args),
        Command::Reload(args) => {
            if args.upgrade && upgrade::if_changed(&args.connection)? {
                return Ok(());
            }
            client::reload(args)
        }
        Command::Upgrade(args) => upgrade::run(args),
        Command::Hook(args) => hook::run(args),
        Command::Proxmox(args) => proxmox::run(args),
    }?;
    Ok(())
}

/// Checks need no log, and have exit codes of their own: 0 clean, 1 findings, 2 something cannot be read.
fn checked(args: &check::Args) -> ExitCode {
    match check::run(args) {
        Ok(check::CheckResult::Clean) => ExitCode::SUCCESS,
        Ok(check::CheckResult::Findings) => ExitCode::from(1),
        Err(problem) => {
            log::complain(&problem.to_string());
            ExitCode::from(2)
        }
    }
}

/// What the user sees, and the exit code.
struct Failure {
    code: u8,
    problem: String,
}

impl From<serve::ServeError> for Failure {
    fn from(e: serve::ServeError) -> Self {
        let (code, problem) = (e.exit_code(), e.to_string());
        Self { code, problem }
    }
}

impl From<client::CommandLineError> for Failure {
    fn from(e: client::CommandLineError) -> Self {
        let (code, problem) = (e.exit_code(), e.to_string());
        Self { code, problem }
    }
}

impl From<profile::ProfileError> for Failure {
    fn from(e: profile::ProfileError) -> Self {
        let (code, problem) = (e.exit_code(), e.to_string());
        Self { code, problem }
    }
}

impl From<::lab::commands::Failed> for Failure {
    fn from(e: ::lab::commands::Failed) -> Self {
        let (code, problem) = (e.code, e.to_string());
        Self { code, problem }
    }
}

impl From<manual::ManualError> for Failure {
    fn from(e: manual::ManualError) -> Self {
        let (code, problem) = (1, e.to_string());
        Self { code, problem }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// clap checks a command at its first use, and panics if it is invalid.
    #[test]
    fn the_options_of_all_commands_agree() {
        Cli::command().debug_assert();
    }
}
