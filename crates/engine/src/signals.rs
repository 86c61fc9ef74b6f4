//! Ignores signals whose default action would end or stop the process, and with it all disks that it serves.

#![expect(unsafe_code, reason = "signal actions")]

use std::ptr;

/// Signals that nobody sends to end ringdisk. Their sources are:
///
/// - the kernel, when a limit is reached (RLIMIT_FSIZE, RLIMIT_CPU); the system call fails as well, or the
///   hard limit ends the process;
/// - the kernel, when ringdisk logs to a terminal that another job owns;
/// - users who expect SIGUSR1 or SIGUSR2 to have a meaning, as in other programs.
///
/// Rust's runtime already ignores SIGPIPE.
const IGNORED: [i32; 6] = [
    libc::SIGXFSZ,
    libc::SIGXCPU,
    libc::SIGTTIN,
    libc::SIGTTOU,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// Ignores these signals for the whole process.
pub fn ignore_signals() {
    for signal in IGNORED {
        // SAFETY: an all-zero `sigaction` is valid, and the call gets a valid action that runs no code.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = libc::SIG_IGN;
            libc::sigaction(signal, &raw const action, ptr::null_mut());
        }
    }
}
