use std::fmt;
use std::str::FromStr;

/// An enum whose values are words of QEMU, with the same spelling on the command line, in the
/// configuration and in messages.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$value_doc])* $value,)+
        }

        impl $name {
            /// Every value, in the order in which they are shown.
            pub const ALL: &[Self] = &[$(Self::$value),+];

            /// The word for it.
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
    /// How caches are used, with QEMU's meaning and names.
    CacheMode {
        /// O_DIRECT; the guest's flush reaches the device.
        None = "none",
        /// Through the host's page cache; the guest's flush reaches the device.
        Writeback = "writeback",
        /// Through the host's page cache, and every completed write is on stable storage.
        Writethrough = "writethrough",
        /// O_DIRECT, and every completed write is on stable storage.
        Directsync = "directsync",
        /// Through the host's page cache, and the guest's flush is ignored: a crash of the host
        /// loses data that the guest made durable.
        Unsafe = "unsafe",
    }
}

impl CacheMode {
    /// Whether I/O goes past the page cache.
    pub fn direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    /// Whether the guest is told of a write cache at first, so that a completed write may be lost until
    /// the next flush. The guest may change it.
    pub fn write_cache(self) -> bool {
        !matches!(self, Self::Writethrough | Self::Directsync)
    }

    /// Whether the guest's flush is obeyed.
    pub fn flushes(self) -> bool {
        self != Self::Unsafe
    }
}

words! {
    /// How bytes are moved, with QEMU's names.
    Aio {
        /// Whichever suits the file and works here.
        Auto = "auto",
        /// io_uring.
        IoUring = "io_uring",
        /// Linux AIO: `io_submit`.
        Native = "native",
        /// Plain calls on a pool of threads.
        Threads = "threads",
    }
}

words! {
    /// What becomes of the guest's discards.
    Discard {
        /// The space is given back.
        Unmap = "unmap",
        /// Nothing, and the guest is not offered any.
        Ignore = "ignore",
    }
}

words! {
    /// What becomes of writes of nothing but zeroes.
    DetectZeroes {
        /// They are written like any other.
        Off = "off",
        /// The range is zeroed by the cheapest means that keeps its space allocated.
        On = "on",
        /// The range is zeroed by giving its space back, if `discard=unmap`.
        Unmap = "unmap",
    }
}

words! {
    /// What is done about a request that storage failed to serve, with QEMU's names where it has them.
    OnError {
        /// The guest is told.
        Report = "report",
        /// A write for which there is no space waits, and is tried again now and then; of all else the
        /// guest is told.
        Enospc = "enospc",
        /// It waits, and so does all that the guest sends after it, until the operator has them go on.
        Stop = "stop",
        /// It waits, and is tried again with growing pauses.
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
