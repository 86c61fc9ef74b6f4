//! Finds disks whose storage does not answer, before this process looks at their paths. A thread that waits for such storage
//! could not be stopped, and must not be there when the sandbox is entered, so a child process does it.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::config::spec::{DiskSpec, FileSpec};
use crate::state::store;

/// The subcommand of the child.
pub const SUBCOMMAND: &str = "probe-paths";

/// How long storage may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// Which of these paths do not answer. None, if that cannot be found out.
pub fn hanging(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    if paths.is_empty() {
        return paths;
    }
    match answering(&paths) {
        Ok(answers) => {
            let paths = paths.into_iter().zip(answers);
            paths.filter(|(_, a)| !a).map(|(path, _)| path).collect()
        }
        Err(_) => Vec::new(),
    }
}

/// The disks of the state in this directory whose storage answers.
pub fn attached(state: &Path) -> Vec<DiskSpec> {
    let path = |disk: &DiskSpec| match &disk.file {
        FileSpec::Path(path) => Some(path.clone()),
        FileSpec::Rbd(_) | FileSpec::Null(_) => None,
    };
    let mut disks = store::disks_at(state);
    let hanging = hanging(disks.iter().filter_map(path).collect());
    disks.retain(|disk| path(disk).is_none_or(|path| !hanging.contains(&path)));
    disks
}

fn answering(paths: &[PathBuf]) -> io::Result<Vec<bool>> {
    let mut child = Command::new("/proc/self/exe")
        .arg(SUBCOMMAND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let (Some(mut to), Some(mut from)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(io::ErrorKind::BrokenPipe.into());
    };
    let bytes: Vec<_> = paths
        .iter()
        .map(|path| path.as_os_str().as_bytes())
        .collect();
    to.write_all(&bytes.join(&0))?;
    drop(to);
    let mut answers = vec![false; paths.len()];
    let mut left = paths.len();
    let mut line = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while left > 0 {
        let wait = deadline.saturating_duration_since(Instant::now());
        let wait: Option<Timespec> = wait.try_into().ok();
        let fd = from.as_fd();
        match poll(
            &mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)],
            wait.as_ref(),
        ) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        let mut part = [0; 4096];
        let n = from.read(&mut part)?;
        if n == 0 {
            // It has failed: nothing is known.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.extend_from_slice(&part[..n]);
        while let Some(end) = line.iter().position(|&byte| byte == b'\n') {
            let number = String::from_utf8_lossy(&line[..end]).parse::<usize>();
            line.drain(..=end);
            if let Some(answer) = number.ok().and_then(|n| answers.get_mut(n)) {
                left -= usize::from(!std::mem::replace(answer, true));
            }
        }
    }
    let _ = child.kill();
    if left == 0 {
        let _ = child.wait();
    }
    // Otherwise one of its threads waits for storage, and it is not waited for.
    Ok(answers)
}

/// The child: looks at the paths on standard input, all at once, and prints the number of each that has answered.
pub fn run() -> io::Result<()> {
    const STACK: usize = 128 << 10;
    let mut text = Vec::new();
    io::stdin().read_to_end(&mut text)?;
    let mut threads = Vec::new();
    for (number, path) in text.split(|&byte| byte == 0).enumerate() {
        let path = PathBuf::from(std::ffi::OsString::from_vec(path.to_vec()));
        let look = move || {
            // All, as far as they succeed: a missing file has answered.
            if let Ok(real) = fs::canonicalize(&path)
                && fs::metadata(&real).is_ok_and(|found| found.is_dir())
            {
                // The kernel may still know its attributes.
                let _ = fs::read_dir(real);
            }
            let _ = writeln!(io::stdout(), "{number}");
        };
        threads.push(thread::Builder::new().stack_size(STACK).spawn(look)?);
    }
    for thread in threads {
        let _ = thread.join();
    }
    Ok(())
}
