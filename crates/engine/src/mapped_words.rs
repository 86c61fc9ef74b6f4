//! Words of memory in a file, which outlive the process.

#![expect(
    unsafe_code,
    reason = "maps a file, and reads and writes it as integers"
)]

use std::fs::File;
use std::io;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use block::SharedWords;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::time::{ClockId, clock_gettime};

const WORD_BYTES: usize = size_of::<AtomicU64>();
/// The words begin after this many: the first of them is the time that was noted last, the second the caller's, and the
/// others are not used.
const HEAD: usize = 512;

/// A file that is mapped and shared: what is stored in these words is in the file, also after a kill of this process.
///
/// The file has space for all of its words, so that storing one needs no more, and is on a tmpfs: nothing waits for a
/// device. Nobody else may make it shorter.
pub struct MappedWords {
    file: File,
    start: NonNull<AtomicU64>,
    /// Bytes of addresses.
    mapped: usize,
    /// Words that the file has.
    words: AtomicUsize,
}

// SAFETY: the mapping belongs to this value, lives as long, and is accessed only as atomic integers.
unsafe impl Send for MappedWords {}
// SAFETY: as above.
unsafe impl Sync for MappedWords {}

impl MappedWords {
    /// Maps a file that is empty, or was mapped before. It can have words of `bytes_max` bytes.
    ///
    /// # Errors
    /// It has more than that, there is no space for what it has, or it cannot be mapped.
    pub fn new(file: File, bytes_max: u64) -> io::Result<Self> {
        let head = (HEAD * WORD_BYTES) as u64;
        let len = file.metadata()?.len().max(head);
        if len > head + bytes_max {
            return Err(io::Error::other(format!(
                "it has {len} bytes, and at most {} are possible",
                head + bytes_max
            )));
        }
        let mapped = usize::try_from(head + bytes_max).map_err(io::Error::other)?;
        // It may have holes.
        fallocate(&file, FallocateFlags::empty(), 0, len)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses, of a file that this process has open.
        let start = unsafe { mmap(ptr::null_mut(), mapped, access, MapFlags::SHARED, &file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            file,
            start,
            mapped,
            words: AtomicUsize::new(len as usize / WORD_BYTES - HEAD),
        })
    }

    /// When something was about to be written to the disk, as noted last, by the monotonic clock of this boot. It advances
    /// together with the times of files.
    pub fn noted_time(&self) -> Duration {
        Duration::from_nanos(self.head()[0].load(Ordering::Relaxed))
    }

    /// A word for the caller, which is 0 in a new file.
    pub fn label(&self) -> &AtomicU64 {
        &self.head()[1]
    }

    fn head(&self) -> &[AtomicU64; 2] {
        // SAFETY: the file has a head, which is mapped while this value lives. Any bits are a valid AtomicU64, and a mapping
        // begins at a page.
        unsafe { self.start.cast().as_ref() }
    }
}

impl SharedWords for MappedWords {
    #[inline]
    fn words(&self) -> &[AtomicU64] {
        let words = self.words.load(Ordering::Acquire);
        // SAFETY: the file has so many words after the head, and they are mapped while this value lives. Any bits are a valid
        // AtomicU64, and a mapping begins at a page.
        unsafe { slice::from_raw_parts(self.start.as_ptr().add(HEAD), words) }
    }

    fn grow(&self, words: u64) -> io::Result<()> {
        let words = usize::try_from(words).map_err(io::Error::other)?;
        if words <= self.words.load(Ordering::Relaxed) {
            return Ok(());
        }
        let bytes = words.saturating_add(HEAD).saturating_mul(WORD_BYTES);
        if bytes > self.mapped {
            return Err(io::Error::other("more words than can be mapped"));
        }
        fallocate(&self.file, FallocateFlags::empty(), 0, bytes as u64)?;
        self.words.store(words, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn note_time(&self) {
        // A few nanoseconds, without a system call.
        let now = clock_gettime(ClockId::MonotonicCoarse);
        let now = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        let [noted, _] = self.head();
        if noted.load(Ordering::Relaxed) != now {
            noted.store(now, Ordering::Relaxed);
        }
    }
}

impl Drop for MappedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping of this value, of which no reference is left.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.mapped) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_outlive_the_mapping() {
        let file = tempfile::tempfile().unwrap();
        let open = || MappedWords::new(file.try_clone().unwrap(), 1 << 20).unwrap();
        let words = open();
        assert!(words.words().is_empty());
        words.grow(3).unwrap();
        words.words()[2].store(7, Ordering::Relaxed);
        words.grow(1000).unwrap();
        words.words()[999].store(9, Ordering::Relaxed);
        words.note_time();
        let noted = words.noted_time();
        let now = clock_gettime(ClockId::Monotonic);
        assert!(Duration::try_from(now).unwrap().abs_diff(noted) < Duration::from_secs(100));
        assert_eq!(words.label().swap(3, Ordering::Relaxed), 0);
        assert!(words.grow((1 << 17) + 1).is_err());
        drop(words);
        let again = open();
        assert_eq!(again.noted_time(), noted);
        assert_eq!(again.label().load(Ordering::Relaxed), 3);
        let found = again
            .words()
            .iter()
            .map(|word| word.load(Ordering::Relaxed));
        assert_eq!(found.clone().sum::<u64>(), 16);
        assert_eq!(
            (found.len(), again.words()[2].load(Ordering::Relaxed)),
            (1000, 7)
        );
        file.set_len((1 << 20) + 4097).unwrap();
        assert!(MappedWords::new(file, 1 << 20).is_err());
    }
}
