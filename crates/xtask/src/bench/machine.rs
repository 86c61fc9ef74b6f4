//! The machine and the programs of a run.

use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The core of each side.
pub const SERVER_CPU: usize = 0;
pub const CLIENT_CPU: usize = 1;

#[derive(Serialize, Deserialize)]
pub struct Machine {
    pub kernel: String,
    pub cpu: String,
    pub cores: usize,
    pub commit: String,
    pub qemu_storage_daemon: String,
    pub fio: String,
    pub command: String,
    pub server_cpu: usize,
    pub client_cpu: usize,
    pub unix_time: u64,
}

impl Machine {
    pub fn here() -> Machine {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpuinfo
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Machine {
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .into(),
            cpu: cpu.map_or("unknown CPU".into(), |(_, name)| name.into()),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            commit: first_line("git", &["describe", "--always", "--dirty", "--abbrev=10"]),
            qemu_storage_daemon: first_line("qemu-storage-daemon", &["--version"])
                .split(" (")
                .next()
                .unwrap_or_default()
                .replace("version ", ""),
            fio: first_line("fio", &["--version"]),
            command: std::env::args().skip(1).collect::<Vec<_>>().join(" "),
            server_cpu: SERVER_CPU,
            client_cpu: CLIENT_CPU,
            unix_time: std::time::SystemTime::UNIX_EPOCH
                .elapsed()
                .map_or(0, |time| time.as_secs()),
        }
    }
}

/// What a program prints first, or that it is not there.
fn first_line(program: &str, args: &[&str]) -> String {
    match Command::new(program)
        .args(args)
        .current_dir(crate::root())
        .output()
    {
        Ok(output) => String::from_utf8_lossy(&output.stdout)
            .lines()
            .next()
            .unwrap_or_default()
            .to_string(),
        Err(_) => format!("no {program}"),
    }
}
