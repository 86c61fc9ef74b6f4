//! The kernel's own threads behind a ring (io-wq), which do what would block: fdatasync, and reads and writes
//! on files that cannot do without waiting.

use std::mem;

use io_uring::IoUring;

use crate::blocking::THREADS_MAX;

/// Where the workers of one thread run. A kernel before 6.2 lets them run on every CPU, whatever their
/// thread may use, so that they take the time of the very guests that it was kept away from; and any kernel
/// keeps those that it has started where they are, when their thread moves.
pub(crate) struct Workers {
    /// As registered; none if the kernel (before 5.14) or the host (more than 1024 CPUs) cannot.
    cpus: Option<libc::cpu_set_t>,
}

impl Workers {
    /// Those of the calling thread, which made the ring and has not enabled it. At most as many of them as
    /// the pool of threads would have, or as many as the kernel would start if these are fewer: by default
    /// that is four for each CPU, for each thread.
    pub fn of(ring: &IoUring) -> Self {
        let mut before = [0; 2];
        let submitter = ring.submitter();
        // A kernel before 5.15 has no such limit to set.
        if submitter.register_iowq_max_workers(&mut before).is_ok() {
            // Those for sockets and the like, of which there is no use here, stay as they are.
            let mut wanted = [before[0].min(THREADS_MAX as u32), 0];
            let _ = submitter.register_iowq_max_workers(&mut wanted);
        }
        let mut workers = Self { cpus: None };
        workers.follow(ring);
        workers
    }

    /// Lets them run where the calling thread may run by now.
    pub fn follow(&mut self, ring: &IoUring) {
        if let Some(now) = own_cpus() {
            self.run_on(ring, now);
        }
    }

    /// Lets them run on these CPUs. Those that run elsewhere end when they have been idle for some seconds.
    pub fn run_on(&mut self, ring: &IoUring, cpus: libc::cpu_set_t) {
        // SAFETY: it compares two structures.
        #[expect(unsafe_code, reason = "as libc declares it")]
        let same = |before| unsafe { libc::CPU_EQUAL(before, &cpus) };
        if !self.cpus.as_ref().is_some_and(same)
            && ring.submitter().register_iowq_aff(&cpus).is_ok()
        {
            self.cpus = Some(cpus);
        }
    }

    /// Where they were told to run.
    #[cfg(test)]
    #[expect(unsafe_code, reason = "libc's sets of CPUs")]
    pub fn cpus(&self) -> Vec<usize> {
        let Some(cpus) = &self.cpus else {
            return Vec::new();
        };
        let all = 0..libc::CPU_SETSIZE as usize;
        // SAFETY: the CPUs that are asked for are within the set.
        all.filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, cpus) })
            .collect()
    }
}

/// CPUs that the calling thread may run on.
#[expect(unsafe_code, reason = "a system call that fills a structure")]
fn own_cpus() -> Option<libc::cpu_set_t> {
    // SAFETY: it is an array of integers, for which all zeroes is a value.
    let mut cpus: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: the kernel writes at most as many bytes as it is told there are.
    let result = unsafe { libc::sched_getaffinity(0, size_of_val(&cpus), &mut cpus) };
    (result == 0).then_some(cpus)
}
