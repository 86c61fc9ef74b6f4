//! `ringdisk lab` as people run it: the real program with real guests, servers and faults.

mod advice;
mod check_measure;
mod faults;
mod host_queue;
mod published_tables;
mod ssh;
mod study;
mod without_guest;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use lab::journal::{Cell, Journal};
use tempfile::TempDir;
use testkit::vm::find_program;

/// A folder with a plan, and its result.
struct PlanFolder {
    folder: TempDir,
}

impl PlanFolder {
    fn new(plan: &str) -> Self {
        // Not in /tmp, which may be a tmpfs: the test needs O_DIRECT of a real file system.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        fs::write(folder.path().join("plan.toml"), plan).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `ringdisk lab run` of the plan.
    fn run(&self) -> Command {
        let mut command = self.lab("run");
        command.arg(self.path("plan.toml"));
        command.arg("--output").arg(self.path("result"));
        command
    }

    /// A subcommand that uses no state outside this folder.
    fn lab(&self, subcommand: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command
            .args(["lab", subcommand])
            .env("XDG_STATE_HOME", self.path("state"))
            .stdin(Stdio::null());
        command
    }

    fn journal(&self) -> Journal {
        Journal::read(&self.path("result")).unwrap()
    }

    /// The number of complete journal lines of this kind.
    fn lines(&self, kind: &str) -> usize {
        let text = fs::read_to_string(self.path("result/journal.jsonl")).unwrap_or_default();
        let what = format!("\"what\":\"{kind}\"");
        let whole = text.split_inclusive('\n').filter(|l| l.ends_with('\n'));
        whole.filter(|line| line.contains(&what)).count()
    }

    /// Asserts that there is a report for people and one for programs, with this many cells.
    fn assert_report(&self, cells: usize) {
        let page = fs::read_to_string(self.path("result/report.html")).unwrap();
        assert!(page.trim_end().ends_with("</html>"), "{page}");
        let json = fs::read_to_string(self.path("result/result.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&json).unwrap();
        let table = fs::read_to_string(self.path("result/cells.csv")).unwrap();
        // An error adds quoted lines of its own.
        assert!(table.lines().count() > cells, "{table}");
    }
}

/// Waits for something that another process does.
fn wait_for(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(300);
    while !is() {
        assert!(Instant::now() < deadline, "{what}: not after 300 s");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn output_text(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!(
        "{}\n{}\n{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    )
}

fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    output_text(&output)
}

/// Starts a run in the background with its output captured.
fn spawn(command: &mut Command) -> Child {
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn errors(cells: &[Cell]) -> Vec<String> {
    cells.iter().filter_map(|cell| cell.error.clone()).collect()
}

/// Whether these programs are installed; prints a message if not.
fn are_installed(test: &str, programs: &[&str]) -> bool {
    let missing: Vec<&&str> = programs
        .iter()
        .filter(|name| find_program(name).is_none())
        .collect();
    if !missing.is_empty() {
        println!("skipped: {test}: missing {missing:?}; `cargo xtask install` installs them");
    }
    missing.is_empty()
}

/// Whether guests can run here; prints a message if not.
fn can_run_guests(test: &str) -> bool {
    let missing = testkit::vm::missing(true);
    if let Some(missing) = &missing {
        println!("skipped: {test}: {missing}");
    }
    missing.is_none()
}

fn write_program(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}
