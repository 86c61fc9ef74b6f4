//! Limits of the process and of the host, where an error comes from one.

use std::io;

/// Numbers of errors, the same on all architectures that Linux runs ringdisk on.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
const EFBIG: i32 = 27;
const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;

/// An error with the next step: which limit to raise, if that is what it comes from; `otherwise`, which may be empty, if
/// not.
pub fn explain(error: &io::Error, otherwise: &str) -> String {
    let step = match error.raw_os_error() {
        Some(EMFILE) => {
            "this process may have no more files open; raise RLIMIT_NOFILE ('ulimit -n 65536' before the start, \
             'prlimit --nofile=65536 --pid PID' for a process that runs, systemd: LimitNOFILE=65536)"
        }
        Some(ENFILE) => "this host may have no more files open; raise fs.file-max",
        Some(EFBIG) => {
            "its file may not be so large; raise RLIMIT_FSIZE ('ulimit -f', systemd: LimitFSIZE=) if it is limited, or \
             choose a file system that takes larger files"
        }
        _ => otherwise,
    };
    match step {
        "" => error.to_string(),
        step => format!("{error}; {step}"),
    }
}

/// The same for a thread that cannot be started.
pub fn explain_thread(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock => format!(
            "{error}; there are as many threads as there may be (RLIMIT_NPROC, TasksMax= of systemd, pids.max), or \
             there is no memory for one more"
        ),
        _ => explain(error, ""),
    }
}

/// Whether neither this process nor the host may have more files open.
pub fn is_open_files(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE))
}

/// Whether there is no space for a write. A quota that is used up counts as well: both end when somebody makes room, and
/// until then it is better that the guest waits than that it sees broken storage. Which of the two errors it is depends
/// on the file system (for a project's quota, XFS says ENOSPC; for a user's, ext4 says EDQUOT). QEMU counts ENOSPC alone.
pub fn is_no_space(errno: i32) -> bool {
    matches!(errno, ENOSPC | EDQUOT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_named_instead_of_another_step() {
        let text = |number| explain(&io::Error::from_raw_os_error(number), "look elsewhere");
        assert!(text(EMFILE).starts_with("Too many open files"));
        assert!(text(EMFILE).contains("RLIMIT_NOFILE") && !text(EMFILE).contains("elsewhere"));
        assert!(text(EFBIG).starts_with("File too large") && text(EFBIG).contains("RLIMIT_FSIZE"));
        assert!(text(ENFILE).contains("fs.file-max"));
        assert_eq!(text(13), "Permission denied (os error 13); look elsewhere");
        let denied = io::Error::from_raw_os_error(13);
        assert_eq!(explain(&denied, ""), "Permission denied (os error 13)");
        let none = io::Error::from_raw_os_error(11);
        assert!(explain_thread(&none).contains("RLIMIT_NPROC"));
    }
}
