//! The kernel's worker threads of a ring (io-wq). They perform operations that would block: fdatasync, and
//! reads and writes on files that do not support nonblocking I/O.

use std::mem;

use io_uring::IoUring;

use crate::blocking::FILE_MAX;

/// CPU affinity of the workers of one thread. Kernels before 6.2 let workers run on every CPU, whatever the
/// affinity of their thread, so they would take time from the guests that the thread was kept away from. No
/// kernel moves existing workers when their thread is moved.
pub(crate) struct Workers {
    /// The registered CPUs; `None` if the kernel (before 5.14) or the host (more than 1024 CPUs) does not
    /// support this.
    cpus: Option<libc::cpu_set_t>,
}

impl Workers {
    /// Configures the workers of the calling thread, which created the ring and has not enabled it. Limits
    /// their number to that of a file's threads in the pool, or to the kernel's default if that is lower; the default
    /// is four workers per CPU, for each thread.
    pub fn of(ring: &IoUring) -> Self {
        let mut before = [0; 2];
        let submitter = ring.submitter();
        // A kernel before 5.15 has no such limit.
        if submitter.register_iowq_max_workers(&mut before).is_ok() {
            // The limit of unbounded workers (for sockets and similar) is unchanged; ringdisk does not use
            // them.
            let mut wanted = [before[0].min(FILE_MAX as u32), 0];
            let _ = submitter.register_iowq_max_workers(&mut wanted);
        }
        let mut workers = Self { cpus: None };
        workers.follow(ring);
        workers
    }

    /// Lets the workers run on the CPUs that the calling thread may use now.
    pub fn follow(&mut self, ring: &IoUring) {
        if let Some(now) = own_cpus() {
            self.run_on(ring, now);
        }
    }

    /// Lets the workers run on these CPUs. Workers on other CPUs end after they have been idle for some
    /// seconds.
    pub fn run_on(&mut self, ring: &IoUring, cpus: libc::cpu_set_t) {
        // SAFETY: the call only compares two structures.
        #[expect(unsafe_code, reason = "as libc declares it")]
        let same = |before| unsafe { libc::CPU_EQUAL(before, &cpus) };
        if !self.cpus.as_ref().is_some_and(same)
            && ring.submitter().register_iowq_aff(&cpus).is_ok()
        {
            self.cpus = Some(cpus);
        }
    }

    /// The CPUs that the workers may use.
    #[cfg(test)]
    #[expect(unsafe_code, reason = "libc's sets of CPUs")]
    pub fn cpus(&self) -> Vec<usize> {
        let Some(cpus) = &self.cpus else {
            return Vec::new();
        };
        let all = 0..libc::CPU_SETSIZE as usize;
        // SAFETY: the tested CPUs are within the set.
        all.filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, cpus) })
            .collect()
    }
}

/// The CPUs that the calling thread may use.
#[expect(unsafe_code, reason = "a system call that fills a structure")]
fn own_cpus() -> Option<libc::cpu_set_t> {
    // SAFETY: the type is an array of integers, for which all zeroes is valid.
    let mut cpus: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: the kernel writes at most the number of bytes that it is given.
    let result = unsafe { libc::sched_getaffinity(0, size_of_val(&cpus), &mut cpus) };
    (result == 0).then_some(cpus)
}
