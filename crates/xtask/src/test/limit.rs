//! Reads the output of a test program, and kills a program that runs too long.

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// A program that has ended may have left processes that hold its output open. They get this long to print something.
const LEFT_OPEN: Duration = Duration::from_secs(5);

/// How a test program ended.
pub enum End {
    Exited(ExitStatus),
    /// It was killed because it ran longer than allowed; with the tests that had not ended, most suspect first.
    Killed(Vec<String>),
}

/// Passes each line of the program's output to `print` until the program ends. Kills the program and its descendants after
/// `limit`.
pub fn follow(
    mut child: Child,
    tests: &[&String],
    limit: Duration,
    mut print: impl FnMut(&str),
) -> Result<End> {
    let started = Instant::now();
    let stdout = child
        .stdout
        .take()
        .context("a test program has no stdout")?;
    let (send, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
    });
    let mut unfinished = Unfinished::new(tests);
    let mut last_output = Instant::now();
    loop {
        match lines.recv_timeout(Duration::from_secs(1)) {
            Ok(line) => {
                let line = String::from_utf8_lossy(&line);
                unfinished.read(&line);
                print(&line);
                last_output = Instant::now();
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                if last_output.elapsed() > LEFT_OPEN && child.try_wait()?.is_some() {
                    break;
                }
            }
        }
        if started.elapsed() >= limit && child.try_wait()?.is_none() {
            kill_with_descendants(&mut child)?;
            return Ok(End::Killed(unfinished.into_suspects()));
        }
    }
    Ok(End::Exited(child.wait()?))
}

/// The tests of a program that have not ended.
struct Unfinished {
    tests: Vec<String>,
    /// Those of which the program said that they take long.
    slow: Vec<String>,
}

impl Unfinished {
    fn new(tests: &[&String]) -> Self {
        Self {
            tests: tests.iter().map(|test| (*test).clone()).collect(),
            slow: Vec::new(),
        }
    }

    fn read(&mut self, line: &str) {
        let Some(about) = line.strip_prefix("test ") else {
            return;
        };
        if let Some((test, _)) = about.split_once(" ... ") {
            self.tests.retain(|unfinished| unfinished != test);
            self.slow.retain(|unfinished| unfinished != test);
        } else if let Some((test, _)) = about.split_once(" has been running for over ") {
            self.slow.push(test.to_owned());
        }
    }

    /// The slow tests, or all tests if none of them is slow.
    fn into_suspects(self) -> Vec<String> {
        match self.slow.is_empty() {
            true => self.tests,
            false => self.slow,
        }
    }
}

fn kill_with_descendants(child: &mut Child) -> Result<()> {
    let descendants = descendants_of(Pid::from_child(child))?;
    child.kill().context("killing a test program")?;
    child.wait().context("waiting for a killed test program")?;
    for pid in descendants {
        // It may have ended together with the program.
        let _ = kill_process(pid, Signal::KILL);
    }
    Ok(())
}

fn descendants_of(ancestor: Pid) -> Result<Vec<Pid>> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc").context("listing the processes")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // The process may have ended.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // pid (name) state parent ...; the name can contain anything.
        let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let parent = after_name.split_whitespace().nth(1);
        let parent = parent.and_then(|parent| parent.parse().ok());
        if let (Some(pid), Some(parent)) = (Pid::from_raw(pid), parent.and_then(Pid::from_raw)) {
            parents.push((pid, parent));
        }
    }
    let mut found = vec![ancestor];
    let mut at = 0;
    while let Some(&parent) = found.get(at) {
        let children = parents.iter().filter(|(_, of)| *of == parent);
        found.extend(children.map(|(pid, _)| *pid));
        at += 1;
    }
    found.remove(0);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn shell(script: &str) -> Child {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).stdout(Stdio::piped());
        shell.spawn().unwrap()
    }

    #[test]
    fn program_that_hangs_is_killed_with_its_descendants() {
        let folder = tempfile::tempdir().unwrap();
        let ready = folder.path().join("ready");
        // Cargo's own shell is the parent of the one that sleeps.
        let script = format!(
            "sh -c 'sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; wait'; :",
            ready.display()
        );
        let child = shell(&script);
        while !ready.exists() {
            thread::sleep(Duration::from_millis(5));
        }
        let grandchild = fs::read_to_string(&ready).unwrap();
        let tests = ["a::one".to_owned(), "b::two".to_owned()];
        let end = follow(child, &[&tests[0], &tests[1]], Duration::ZERO, |_| ());
        let Ok(End::Killed(suspects)) = end else {
            panic!("it was not killed");
        };
        assert_eq!(suspects, tests);
        // A zombie until its new parent looks.
        let state = || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", grandchild.trim())).ok()?;
            stat.rsplit_once(") ")?.1.chars().next()
        };
        while !matches!(state(), None | Some('Z')) {
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn program_that_ends_is_not_killed_although_its_output_stays_open() {
        let child = shell("sleep 1000 & echo $!; exit 3");
        let mut printed = Vec::new();
        let tests = ["a::one".to_owned()];
        let end = follow(child, &[&tests[0]], Duration::from_secs(1000), |line| {
            printed.push(line.to_owned());
        });
        let Ok(End::Exited(status)) = end else {
            panic!("it was killed");
        };
        assert_eq!(status.code(), Some(3));
        let left_behind = Pid::from_raw(printed[0].parse().unwrap()).unwrap();
        kill_process(left_behind, Signal::KILL).unwrap();
    }

    #[test]
    fn tests_that_have_not_ended_are_suspects() {
        let names = ["a::one", "b::two", "c::three", "d::four"].map(str::to_owned);
        let names: Vec<&String> = names.iter().collect();
        let mut unfinished = Unfinished::new(&names);
        for line in [
            "test a::one ... ok",
            "test b::two has been running for over 60 seconds",
            "test c::three has been running for over 60 seconds",
            "server: test d::four ... ok",
        ] {
            unfinished.read(line);
        }
        assert_eq!(unfinished.tests, ["b::two", "c::three", "d::four"]);
        unfinished.read("test c::three ... FAILED");
        assert_eq!(unfinished.into_suspects(), ["b::two"]);
        let mut unfinished = Unfinished::new(&names);
        unfinished.read("test b::two ... ok");
        let expected = ["a::one", "c::three", "d::four"];
        assert_eq!(unfinished.into_suspects(), expected);
    }
}
