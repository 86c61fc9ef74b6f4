//! seccomp: allows only the system calls that serving disks needs (seccomp(2)).
//!
//! seccomp does not see the operations of io_uring. ringdisk's own rings are restricted to the operations that it uses. A
//! ring that an attacker creates is still restricted by Landlock, from files and from TCP.

use std::collections::BTreeMap;
use std::fmt;

use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, apply_filter_all_threads,
};

/// Allowed with any arguments.
const ALLOWED: &[c_long] = &[
    // Files.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_fallocate,
    libc::SYS_utimensat,
    libc::SYS_ftruncate,
    libc::SYS_fadvise64,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_statfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_flock,
    libc::SYS_umask,
    // Rings, events, time.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_destroy,
    libc::SYS_io_cancel,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_ppoll,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_times,
    // Sockets, of which only some kinds can be created.
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    // Memory, none of which can be made executable.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_msync,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_brk,
    libc::SYS_memfd_create,
    libc::SYS_move_pages,
    libc::SYS_get_mempolicy,
    libc::SYS_set_mempolicy,
    libc::SYS_mbind,
    // Threads.
    libc::SYS_clone3,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_set_tid_address,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_getrusage,
    libc::SYS_prlimit64,
    libc::SYS_getrandom,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    // Older calls, which C libraries still use on this architecture.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_arch_prctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_getrlimit,
];

/// Allowed ioctls, on block devices, descriptors and terminals.
const IOCTLS: &[u64] = &[
    0x1268,      // BLKSSZGET
    0x127b,      // BLKPBSZGET
    0x8008_1272, // BLKGETSIZE64
    0x1277,      // BLKDISCARD
    0x127f,      // BLKZEROOUT
    0x5421,      // FIONBIO
    0x5401,      // TCGETS
    0x5413,      // TIOCGWINSZ
];

/// Refused even if disks may be in Ceph clusters, whose library needs system calls that are not known here: calls that
/// start programs, access other processes, or change the system.
const REFUSED: &[c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsmount,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_quotactl,
    libc::SYS_mknodat,
    libc::SYS_open_by_handle_at,
    libc::SYS_personality,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_capset,
];

/// The system calls that this process may still make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// This number of system calls.
    Calls(usize),
    /// All but this number, because the library for Ceph clusters needs system calls that are not known here.
    AllBut(usize),
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Calls(n) => write!(f, "{n} system calls"),
            Self::AllBut(n) => write!(
                f,
                "all system calls but {n}, because disks may be in Ceph clusters, whose library needs many"
            ),
        }
    }
}

/// Restricts all threads.
///
/// # Errors
/// The kernel does not support it, or refuses it.
pub fn restrict(cluster: bool) -> Result<Left, String> {
    let arch: TargetArch = std::env::consts::ARCH
        .try_into()
        .map_err(|_| format!("not supported on {}", std::env::consts::ARCH))?;
    let (allow, errno) = (SeccompAction::Allow, |e: i32| {
        SeccompAction::Errno(e as u32)
    });
    let (others, left) = if cluster {
        let rules = refused().map_err(|e| e.to_string())?;
        let left = Left::AllBut(rules.len());
        let filter = SeccompFilter::new(rules, allow.clone(), errno(libc::EPERM), arch);
        (filter, left)
    } else {
        let rules = rules().map_err(|e| e.to_string())?;
        let left = Left::Calls(rules.len());
        let filter = SeccompFilter::new(rules, errno(libc::EPERM), allow.clone(), arch);
        (filter, left)
    };
    // The filter cannot see the flags of clone3. With ENOSYS, the C library falls back to clone.
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let clone3 = SeccompFilter::new(clone3, allow, errno(libc::ENOSYS), arch);
    for filter in [clone3, others] {
        let program: Result<BpfProgram, _> = filter.and_then(TryInto::try_into);
        let program = program.map_err(|e| e.to_string())?;
        apply_filter_all_threads(&program).map_err(|e| e.to_string())?;
    }
    Ok(left)
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn when(
    argument: u8,
    len: SeccompCmpArgLen,
    op: SeccompCmpOp,
    value: u64,
) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(argument, len, op, value)?])
}

fn refused() -> Result<Rules, BackendError> {
    let mut rules: Rules = REFUSED.iter().map(|&call| (call, Vec::new())).collect();
    // Processes; not threads.
    let thread = SeccompCmpOp::MaskedEq(libc::CLONE_THREAD as u64);
    let process = when(0, SeccompCmpArgLen::Qword, thread, 0)?;
    rules.insert(libc::SYS_clone, vec![process]);
    #[cfg(target_arch = "x86_64")]
    for call in [libc::SYS_fork, libc::SYS_vfork] {
        rules.insert(call, Vec::new());
    }
    Ok(rules)
}

fn rules() -> Result<Rules, BackendError> {
    use SeccompCmpArgLen::{Dword, Qword};
    use SeccompCmpOp::{Eq, MaskedEq};
    let mut rules: Rules = ALLOWED.iter().map(|&call| (call, Vec::new())).collect();

    // Threads, and no processes.
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(
        libc::SYS_clone,
        vec![when(0, Qword, MaskedEq(thread), thread)?],
    );
    // No new code.
    let executable = libc::PROT_EXEC as u64;
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![when(2, Qword, MaskedEq(executable), 0)?]);
    }
    // To probe whether a socket is in use, and for the service manager and clients.
    let local = libc::AF_UNIX as u64;
    for call in [libc::SYS_socket, libc::SYS_socketpair] {
        rules.insert(call, vec![when(0, Dword, Eq, local)?]);
    }
    let ioctls = IOCTLS.iter().map(|&request| when(1, Dword, Eq, request));
    rules.insert(libc::SYS_ioctl, ioctls.collect::<Result<_, _>>()?);
    // Signals to itself, such as abort().
    let this = u64::from(std::process::id());
    for call in [libc::SYS_kill, libc::SYS_tgkill] {
        rules.insert(call, vec![when(0, Dword, Eq, this)?]);
    }
    // Names of threads; libraries ask whether the process is dumpable.
    let prctls = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_GET_DUMPABLE];
    let prctls = prctls
        .iter()
        .map(|&option| when(0, Dword, Eq, option as u64));
    rules.insert(libc::SYS_prctl, prctls.collect::<Result<_, _>>()?);
    Ok(rules)
}
