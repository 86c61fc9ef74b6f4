//! The real libvirt, with its driver for QEMU inside virsh itself, so that no libvirt of this machine is touched.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

/// Nobody: libvirt's own user belongs to its services, which need not be installed.
const USER: u32 = 65534;

/// How long one answer may take. Some domains need services that are not there, and libvirt waits for them.
const PATIENCE: Duration = Duration::from_secs(30);

/// One connection for all questions; a new one if libvirt dies of one.
pub struct Virsh {
    dir: TempDir,
    running: Option<Running>,
    asked: u32,
}

struct Running {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Virsh {
    /// What is missing, if it cannot be had.
    pub fn new() -> Result<Self, String> {
        for (program, package) in [
            ("virsh", "libvirt-clients"),
            ("virt-qemu-run", "libvirt-daemon-driver-qemu"),
            ("qemu-system-x86_64", "qemu-system-x86"),
            ("setpriv", "util-linux"),
        ] {
            let path = std::env::var_os("PATH").unwrap_or_default();
            if !std::env::split_paths(&path).any(|folder| folder.join(program).is_file()) {
                return Err(format!(
                    "{program} is missing; 'apt-get install {package}' installs it"
                ));
            }
        }
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let home = dir.path().join("home");
        fs::create_dir(&home).unwrap();
        if is_root(&home) {
            chown(&home, Some(USER), Some(USER)).unwrap();
        }
        Ok(Self {
            dir,
            running: None,
            asked: 0,
        })
    }

    /// The arguments that libvirt would start QEMU with, or why it refuses.
    pub fn arguments(&mut self, domain: &str) -> Result<String, String> {
        let file = self.dir.path().join("domain.xml");
        fs::write(&file, domain).unwrap();
        fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        let home = self.dir.path().join("home");
        let running = self.running.get_or_insert_with(|| Running::new(&home));
        self.asked += 1;
        let end = format!("end-of-{}", self.asked);
        let command = format!("domxml-to-native qemu-argv {}", file.display());
        // A virsh that has died is noticed by its silence.
        let _ = writeln!(running.stdin, "{command}\necho {end}");
        let mut text = String::new();
        loop {
            match running.lines.recv_timeout(PATIENCE) {
                Ok(line) if line.trim() == end => break,
                Ok(line) => {
                    text += &line;
                    text.push('\n');
                }
                Err(_) => {
                    self.running = None;
                    return Err(format!("no answer: {text}"));
                }
            }
        }
        let arguments = text.lines().find(|line| line.contains(" -name "));
        match arguments {
            Some(line) if !text.contains("error:") => Ok(line.to_owned()),
            _ => Err(text),
        }
    }
}

fn is_root(made: &Path) -> bool {
    std::os::unix::fs::MetadataExt::uid(&fs::metadata(made).unwrap()) == 0
}

impl Running {
    fn new(home: &Path) -> Self {
        let connect = format!(
            "exec virsh -c 'qemu:///embed?root={}/libvirt' 2>&1",
            home.display()
        );
        let is_root = is_root(home.parent().unwrap());
        let mut command = Command::new(if is_root { "setpriv" } else { "sh" });
        if is_root {
            let ids = [format!("--reuid={USER}"), format!("--regid={USER}")];
            command.args(ids).args(["--clear-groups", "sh"]);
        }
        command.args(["-c", &connect]).current_dir(home);
        for variable in [
            "HOME",
            "XDG_RUNTIME_DIR",
            "XDG_CACHE_HOME",
            "XDG_CONFIG_HOME",
        ] {
            command.env(variable, home);
        }
        let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = pipes.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (say, lines) = channel();
        thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            lines.for_each(|line| drop(say.send(line)));
        });
        Self {
            child,
            stdin,
            lines,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
