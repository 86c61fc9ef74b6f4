//! Errors that come from a limit of the process or the host.

use std::io;

/// Error numbers; they are the same on all architectures on which ringdisk runs under Linux.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
const EFBIG: i32 = 27;
const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;

/// The text of an error and the next step. The step names the limit to raise if a limit caused the error;
/// otherwise it is `otherwise`, which may be empty.
pub fn explain(error: &io::Error, otherwise: &str) -> String {
    let step = match error.raw_os_error() {
        Some(EMFILE) => {
            "this process has reached its limit of open files; raise RLIMIT_NOFILE ('ulimit -n 65536' before the start, \
             'prlimit --nofile=65536 --pid PID' for a process that runs, systemd: LimitNOFILE=65536)"
        }
        Some(ENFILE) => "this host has reached its limit of open files; raise fs.file-max",
        Some(EFBIG) => {
            "the file would exceed the maximum size; raise RLIMIT_FSIZE ('ulimit -f', systemd: LimitFSIZE=) if it is limited, or \
             choose a file system that takes larger files"
        }
        _ => otherwise,
    };
    match step {
        "" => error.to_string(),
        step => format!("{error}; {step}"),
    }
}

/// Like [`explain`], for a thread that cannot be started.
pub fn explain_thread(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock => format!(
            "{error}; the limit of threads is reached (RLIMIT_NPROC, TasksMax= of systemd, pids.max), or there \
             is no memory for another thread"
        ),
        _ => explain(error, ""),
    }
}

/// Whether the process or the host has reached its limit of open files.
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE))
}

/// Whether a write failed for lack of space. An exhausted quota counts as well: both conditions end when an
/// operator frees space, and until then a guest that waits is better than a guest that sees broken storage.
/// The file system decides which error it reports (XFS reports ENOSPC for a project quota, ext4 reports
/// EDQUOT for a user quota). QEMU counts only ENOSPC.
pub fn is_no_space(errno: i32) -> bool {
    matches!(errno, ENOSPC | EDQUOT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exhausted_limit_is_named() {
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
