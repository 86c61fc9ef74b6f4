//! Signals of which a process ends or stops that says nothing else, and with it all disks that it serves.

#![expect(unsafe_code, reason = "signal actions")]

use std::ptr;

/// What nobody sends to end ringdisk: the kernel, where a limit is reached (RLIMIT_FSIZE, RLIMIT_CPU: the call fails as
/// well, or the hard limit ends the process), and for a log on a terminal that another job has; and those who take it for a
/// program to which these two mean something. Rust ignores SIGPIPE.
const IGNORED: [i32; 6] = [
    libc::SIGXFSZ,
    libc::SIGXCPU,
    libc::SIGTTIN,
    libc::SIGTTOU,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// Ignores them from now on.
pub fn ignore_signals() {
    for signal in IGNORED {
        // SAFETY: all zeroes is a signal action, and the call is given a valid one, which runs no code.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = libc::SIG_IGN;
            libc::sigaction(signal, &raw const action, ptr::null_mut());
        }
    }
}
