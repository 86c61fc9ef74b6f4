use std::fmt;
use std::str::FromStr;

/// Defines an enum whose values have QEMU's names, spelled the same on the command line, in the configuration
/// and in messages.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$value_doc])* $value,)+
        }

        impl $name {
            /// Every value, in the order in which messages list them.
            pub const ALL: &[Self] = &[$(Self::$value),+];

            /// The names of all values, in the same order.
            pub const WORDS: &[&str] = &[$($word),+];

            /// The name of this value.
            pub fn word(self) -> &'static str {
                match self {
                    $(Self::$value => $word,)+
                }
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let found = Self::ALL.iter().find(|value| value.word() == text);
                found.copied().ok_or_else(|| {
                    let words: Vec<_> = Self::ALL.iter().map(|value| value.word()).collect();
                    format!("'{text}' is not one of {}", words.join(", "))
                })
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.word())
            }
        }
    };
}

words! {
    /// The cache mode of a disk, with QEMU's names and meanings.
    CacheMode {
        /// O_DIRECT; a guest flush reaches the device.
        None = "none",
        /// The host's page cache is used; a guest flush reaches the device.
        Writeback = "writeback",
        /// The host's page cache is used, and every completed write is on stable storage.
        Writethrough = "writethrough",
        /// O_DIRECT, and every completed write is on stable storage.
        Directsync = "directsync",
        /// The host's page cache is used, and guest flushes are ignored: a host crash loses data that the
        /// guest believes durable.
        Unsafe = "unsafe",
    }
}

impl CacheMode {
    /// Whether I/O bypasses the page cache.
    pub fn direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    /// Whether the guest initially sees a write cache, so that a completed write may be lost until the next
    /// flush. The guest may change this setting.
    pub fn write_cache(self) -> bool {
        !matches!(self, Self::Writethrough | Self::Directsync)
    }

    /// Whether guest flushes are carried out.
    pub fn flushes(self) -> bool {
        self != Self::Unsafe
    }
}

words! {
    /// The I/O method of a disk, with QEMU's names.
    Aio {
        /// The method that suits the file, among those that work on this host.
        Auto = "auto",
        /// io_uring.
        IoUring = "io_uring",
        /// Linux AIO: `io_submit`.
        Native = "native",
        /// Blocking system calls on a pool of threads.
        Threads = "threads",
    }
}

words! {
    /// How the guest's discards are handled.
    Discard {
        /// The space is deallocated.
        Unmap = "unmap",
        /// Discards do nothing, and the guest is not offered them.
        Ignore = "ignore",
    }
}

words! {
    /// How writes that contain only zeroes are handled.
    DetectZeroes {
        /// They are written like other data.
        Off = "off",
        /// The range is zeroed in the cheapest way that keeps its space allocated.
        On = "on",
        /// The range is zeroed by deallocating its space if `discard=unmap` is set.
        Unmap = "unmap",
    }
}

words! {
    /// How a request is handled after storage failed to serve it, with QEMU's names where QEMU has one.
    OnError {
        /// The error is reported to the guest.
        Report = "report",
        /// A write that failed for lack of space waits and is retried periodically; all other errors are
        /// reported to the guest.
        Enospc = "enospc",
        /// The request waits, and so do all later requests of the guest, until the operator resumes the disk.
        Stop = "stop",
        /// The request waits and is retried with increasing pauses.
        Retry = "retry",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_read_back_as_written() {
        for &mode in CacheMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        let error = "fast".parse::<Aio>().unwrap_err();
        assert_eq!(
            error,
            "'fast' is not one of auto, io_uring, native, threads"
        );
    }
}
