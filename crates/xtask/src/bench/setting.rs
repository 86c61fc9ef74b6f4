//! How a disk is served: the product of `--aio`, `--cache`, `--queues`, `--poll` and `--ring`, the same for every server.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::words::{Backing, Server};

/// What every server of a row is told. What is not named is as each server has it by default, and as the backing needs it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Setting {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aio: Option<Aio>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,
    /// Queues in use, each at the row's depth.
    pub queues: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub poll: Option<Poll>,
    pub ring: Ring,
}

impl Default for Setting {
    fn default() -> Setting {
        Setting {
            aio: None,
            cache: None,
            queues: 1,
            poll: None,
            ring: Ring::Split,
        }
    }
}

/// How bytes are moved, in the words of both servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Aio {
    #[value(name = "io_uring")]
    IoUring,
    Native,
    Threads,
}

/// A cache mode as in QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    None,
    Writeback,
    Writethrough,
    Directsync,
    Unsafe,
}

/// Whether a server may look out for its guest before it sleeps, and how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Poll {
    /// Up to [`POLL_MAX_US`], adaptively.
    On,
    Off,
}

/// The kind of virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Ring {
    Split,
    /// qemu-storage-daemon does not offer it, nor does blkio ask for it: they take no part.
    Packed,
}

/// Longest look-out of both servers where polling is asked for: ringdisk's default.
pub const POLL_MAX_US: u32 = 100;

/// The lists of the command line. An empty one leaves its setting as it is by default.
pub struct Lists {
    pub aio: Vec<Aio>,
    pub cache: Vec<Cache>,
    pub queues: Vec<u16>,
    pub poll: Vec<Poll>,
    pub ring: Vec<Ring>,
}

impl Lists {
    /// Their cross product.
    pub fn settings(&self) -> Vec<Setting> {
        let mut settings = vec![Setting::default()];
        multiply(&mut settings, &self.aio, |s, aio| s.aio = Some(aio));
        multiply(&mut settings, &self.cache, |s, cache| s.cache = Some(cache));
        multiply(&mut settings, &self.queues, |s, queues| s.queues = queues);
        multiply(&mut settings, &self.poll, |s, poll| s.poll = Some(poll));
        multiply(&mut settings, &self.ring, |s, ring| s.ring = ring);
        settings
    }
}

fn multiply<T: Copy>(settings: &mut Vec<Setting>, choices: &[T], set: impl Fn(&mut Setting, T)) {
    if choices.is_empty() {
        return;
    }
    let each = settings.iter().flat_map(|setting| {
        choices.iter().map(|choice| {
            let mut setting = *setting;
            set(&mut setting, *choice);
            setting
        })
    });
    *settings = each.collect();
}

impl Setting {
    /// The setting as it matters on `backing`, or why there is no such thing.
    pub fn on(self, backing: Backing) -> Result<Setting, String> {
        if backing == Backing::Null {
            // Nothing is opened, nothing is moved.
            return Ok(Setting {
                aio: None,
                cache: None,
                ..self
            });
        }
        let cache = self.cache_on(backing);
        if backing == Backing::Cache && cache.direct() {
            return Err(format!(
                "cache={cache} goes past the page cache: that is 'disk'"
            ));
        }
        if self.aio == Some(Aio::Native) && !cache.direct() {
            return Err(format!("no server has aio=native with cache={cache}"));
        }
        Ok(self)
    }

    /// The cache mode that is used.
    pub fn cache_on(self, backing: Backing) -> Cache {
        self.cache.unwrap_or(match backing {
            Backing::Cache => Cache::Writeback,
            Backing::Null | Backing::Zram | Backing::Disk => Cache::None,
        })
    }

    /// Whether `server` can be set so, and differs by it from a contestant that takes part anyway.
    pub fn concerns(self, server: Server, backing: Backing) -> bool {
        match server {
            Server::Qsd => self.ring == Ring::Split,
            // Native AIO is a choice only where there is a file and `O_DIRECT`, and where none is named for all.
            Server::QsdNative => {
                self.ring == Ring::Split
                    && self.aio.is_none()
                    && matches!(backing, Backing::Zram | Backing::Disk)
                    && self.cache_on(backing).direct()
            }
            Server::RingdiskFixed => {
                backing == Backing::Disk && matches!(self.aio, None | Some(Aio::IoUring))
            }
            Server::RingdiskNoPolling => self.poll.is_none(),
            Server::Ringdisk | Server::Baseline | Server::Host => true,
        }
    }

    pub fn is_default(&self) -> bool {
        *self == Setting::default()
    }
}

impl Cache {
    /// Whether the page cache is bypassed.
    pub fn direct(self) -> bool {
        matches!(self, Cache::None | Cache::Directsync)
    }
}

impl Poll {
    /// The longest look-out.
    pub fn max_us(self) -> u32 {
        match self {
            Poll::On => POLL_MAX_US,
            Poll::Off => 0,
        }
    }
}

/// What differs from the default, such as "aio=native queues=2".
impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut words = Vec::new();
        words.extend(self.aio.map(|aio| format!("aio={aio}")));
        words.extend(self.cache.map(|cache| format!("cache={cache}")));
        words.extend((self.queues != 1).then(|| format!("queues={}", self.queues)));
        words.extend(self.poll.map(|poll| format!("poll={poll}")));
        words.extend((self.ring == Ring::Packed).then(|| "ring=packed".into()));
        f.pad(&words.join(" "))
    }
}

impl fmt::Display for Aio {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Aio::IoUring => "io_uring",
            Aio::Native => "native",
            Aio::Threads => "threads",
        })
    }
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Cache::None => "none",
            Cache::Writeback => "writeback",
            Cache::Writethrough => "writethrough",
            Cache::Directsync => "directsync",
            Cache::Unsafe => "unsafe",
        })
    }
}

impl fmt::Display for Poll {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Poll::On => "on",
            Poll::Off => "off",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Lists = Lists {
        aio: Vec::new(),
        cache: Vec::new(),
        queues: Vec::new(),
        poll: Vec::new(),
        ring: Vec::new(),
    };

    #[test]
    fn lists_multiply_and_nothing_named_is_the_default() {
        assert_eq!(NONE.settings(), [Setting::default()]);
        let lists = Lists {
            aio: vec![Aio::IoUring, Aio::Native],
            queues: vec![1, 2],
            poll: vec![Poll::Off],
            ..NONE
        };
        let names: Vec<String> = lists.settings().iter().map(Setting::to_string).collect();
        assert_eq!(
            names,
            [
                "aio=io_uring poll=off",
                "aio=io_uring queues=2 poll=off",
                "aio=native poll=off",
                "aio=native queues=2 poll=off"
            ]
        );
    }

    #[test]
    fn a_setting_is_kept_only_where_it_means_something() {
        let native = Setting {
            aio: Some(Aio::Native),
            ..Setting::default()
        };
        assert_eq!(native.on(Backing::Disk), Ok(native));
        assert_eq!(native.on(Backing::Null), Ok(Setting::default()));
        assert!(native.on(Backing::Cache).is_err());
        let none = Setting {
            cache: Some(Cache::None),
            ..Setting::default()
        };
        assert!(none.on(Backing::Cache).is_err());
        assert_eq!(none.on(Backing::Zram), Ok(none));
    }

    #[test]
    fn what_does_not_know_packed_rings_takes_no_part_in_them() {
        let packed = Setting {
            ring: Ring::Packed,
            ..Setting::default()
        };
        assert!(packed.concerns(Server::Ringdisk, Backing::Null));
        assert!(!packed.concerns(Server::Qsd, Backing::Null));
    }
}
