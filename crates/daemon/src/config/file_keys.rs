//! The keys of the configuration file outside `[[disk]]`. This table is the one definition of each of them: the file is
//! parsed with it, and `--help` and the configuration reference are generated from it.

use std::fmt::Display;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use super::keys::{Form, Key, key};
use super::nbd::NbdExportSpec;
use super::values::{Entry, Mistake};
use super::{Config, ThreadSpec, spec};

/// The most threads in the pool, and the most that are added by name.
pub const THREADS_MAX: usize = 256;

/// The longest time that an I/O thread may be told to poll before it sleeps, in microseconds.
pub const POLL_MAX_US_MAX: u64 = 10_000;

/// The limit on what polling costs beyond the sleeps that it saves, in percent of a core.
pub const POLL_CPU: RangeInclusive<u64> = 1..=100;

const POLL_MAX_US_FORM: Form = Form::Number(0, POLL_MAX_US_MAX);
const POLL_CPU_FORM: Form = Form::Number(*POLL_CPU.start(), *POLL_CPU.end());

/// A key at the top level of the file.
pub struct TopKey {
    pub key: Key,
    read: fn(&mut Config, &Entry<'_>) -> Result<(), Mistake>,
    /// Whether two configurations differ in the value.
    pub differs: fn(&Config, &Config) -> bool,
}

pub static TOP_KEYS: &[TopKey] = &[
    TopKey {
        key: key(
            "iothreads",
            Form::Number(1, THREADS_MAX as u64),
            "number of I/O threads in the pool, which serve the queues of all disks in turn; they are called \
             `iothread0`, `iothread1` and so on",
        )
        .by_default("one per CPU, up to 16"),
        read: |config, entry| set_some(&mut config.iothreads, entry),
        differs: |a, b| a.iothreads != b.iothreads,
    },
    TopKey {
        key: key(
            "cpus",
            Form::Text("LIST"),
            "CPUs for these threads, as in `2,4-7`: the first thread runs on the first CPU, the second on the second, \
             and so on in turn",
        )
        .by_default("all"),
        read: |config, entry| set_some(&mut config.cpus, entry),
        differs: |a, b| a.cpus != b.cpus,
    },
    TopKey {
        key: key(
            "poll-max-us",
            POLL_MAX_US_FORM,
            "longest time in microseconds that a thread [polls](threads.md#polling) before it sleeps, for a guest that \
             waits for each request before it sends the next; 0 disables polling",
        )
        .by_default("100"),
        read: |config, entry| {
            let us = entry.parsed()?;
            config.poll_max = Some(Duration::from_micros(us));
            Ok(())
        },
        differs: |a, b| a.poll_max != b.poll_max,
    },
    TopKey {
        key: key(
            "poll-cpu",
            POLL_CPU_FORM,
            "limit on what polling costs beyond the sleeps that it saves, in percent of a core for each thread",
        )
        .by_default("80"),
        read: |config, entry| set_some(&mut config.poll_cpu, entry),
        differs: |a, b| a.poll_cpu != b.poll_cpu,
    },
    TopKey {
        key: key(
            "control",
            Form::Text("PATH"),
            "[control socket](qmp.md), which speaks QMP and to which the other commands connect",
        )
        .by_default("control.qmp in the default directory of the disks' sockets"),
        read: |config, entry| set_some(&mut config.control, entry),
        differs: |a, b| a.control != b.control,
    },
    TopKey {
        key: key(
            "metrics",
            Form::Text("ADDRESS"),
            "address and port for [Prometheus](monitoring.md#prometheus), as in `127.0.0.1:9747`. The metrics are not \
             protected, and they contain the names of the disks",
        )
        .by_default("none"),
        read: |config, entry| {
            let address = address(&entry.text()?).map_err(|e| entry.mistake(e));
            address.map(|address| config.metrics = Some(address))
        },
        differs: |a, b| a.metrics != b.metrics,
    },
    TopKey {
        key: key(
            "nbd",
            Form::Text("ADDRESS"),
            "where [NBD clients](nbd.md) connect: the path of a socket, or an IP address and a port, as in \
             `192.0.2.1:10809`, which only `nbd-tls` protects",
        )
        .by_default("none"),
        read: |config, entry| set_some(&mut config.nbd, entry),
        differs: |a, b| a.nbd != b.nbd,
    },
    TopKey {
        key: key(
            "nbd-tls",
            Form::Text("DIR"),
            "directory with the [certificates](nbd.md#tls) of the NBD server; its clients must use TLS then",
        )
        .by_default("none"),
        read: |config, entry| set_some(&mut config.nbd_tls, entry),
        differs: |a, b| a.nbd_tls != b.nbd_tls,
    },
    TopKey {
        key: key(
            "nbd-tls-verify-peer",
            Form::Words(&["on", "off"]),
            "whether NBD clients must have a certificate of the authority in `ca-cert.pem`",
        )
        .by_default("`on`"),
        read: |config, entry| {
            config.nbd_tls_any_peer = matches!(&*entry.text()?, "off" | "false");
            Ok(())
        },
        differs: |a, b| a.nbd_tls_any_peer != b.nbd_tls_any_peer,
    },
    TopKey {
        key: key(
            "allow-backing",
            Form::Text("DIR"),
            "directory, or several, where backing files named by images may lie, subdirectories included, and devices to \
             which root's links there lead (`/dev/VG`); `none` allows no such file",
        )
        .by_default("each image's own directory"),
        read: |config, entry| entry.directories().map(|all| config.allow_backing = all),
        differs: |a, b| a.allow_backing != b.allow_backing,
    },
    TopKey {
        key: key(
            "sandbox",
            Form::Words(&["auto", "on", "off"]),
            "[sandbox](sandbox.md) that restricts ringdisk once it serves: `auto` is as much of it as works on this \
             host, and the log says how much; `on` is all of it, and ringdisk does not start without it; `off` is none",
        )
        .by_default("`auto`"),
        read: |config, entry| set_some(&mut config.sandbox, entry),
        differs: |a, b| a.sandbox != b.sandbox,
    },
    TopKey {
        key: key(
            "allow-dir",
            Form::Text("DIR"),
            "directory, or several, where disks and sockets that are added later may lie, in addition to the \
             directories of the first disks",
        )
        .by_default("none"),
        read: |config, entry| entry.directories().map(|all| config.allow = all),
        differs: |a, b| a.allow != b.allow,
    },
    TopKey {
        key: key(
            "user",
            Form::Text("NAME"),
            "user that ringdisk switches to once everything is open, if root starts it",
        )
        .by_default("none"),
        read: |config, entry| set_some(&mut config.user, entry),
        differs: |a, b| a.user != b.user,
    },
    TopKey {
        key: key(
            "fleece",
            Form::Text("DIR"),
            "directory for old data that VMs overwrite while a [backup](../backup.md) is open, if it does not fit into memory",
        )
        .by_default("none: such a backup fails"),
        read: |config, entry| set_some(&mut config.fleece, entry),
        differs: |a, b| a.fleece != b.fleece,
    },
    TopKey {
        key: key(
            "state",
            Form::Text("DIR"),
            "directory for [persisted state](state.md): changes made at run time, which a restart restores",
        )
        .by_default("`$STATE_DIRECTORY` (systemd), otherwise none"),
        read: |config, entry| set_some(&mut config.state, entry),
        differs: |a, b| a.state != b.state,
    },
];

impl TopKey {
    /// Takes the value from an entry.
    ///
    /// # Errors
    /// It is not a value of this key.
    pub fn read(&self, config: &mut Config, entry: &Entry<'_>) -> Result<(), Mistake> {
        check(&self.key, entry)?;
        (self.read)(config, entry)
    }
}

/// What `--help` says about the command-line option of this name.
///
/// # Panics
/// There is no such key.
pub fn help(name: &str) -> String {
    let top = TOP_KEYS.iter().find(|top| top.key.name == name);
    let key = &top.expect("a key of the file").key;
    let help = key.help(key.default);
    let mut chars = help.chars();
    chars.next().map_or(String::new(), |first| {
        first.to_uppercase().chain(chars).collect()
    })
}

/// An address for metrics.
///
/// # Errors
/// The text is not an address.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| format!("'{text}' is not an IP address with a port, as in 127.0.0.1:9747"))
}

/// A key of an `[[iothread]]`.
pub struct ThreadKey {
    pub key: Key,
    read: fn(&mut NewThread, &Entry<'_>) -> Result<(), Mistake>,
}

/// An `[[iothread]]` of which not all keys have been read.
pub struct NewThread {
    pub id: Option<String>,
    pub spec: ThreadSpec,
}

pub static THREAD_KEYS: &[ThreadKey] = &[
    ThreadKey {
        key: key(
            "id",
            Form::Text("NAME"),
            "name of the thread; `iothread` followed by a number is reserved for the pool",
        )
        .by_default("required"),
        read: |thread, entry| named(entry).map(|id| thread.id = Some(id)),
    },
    ThreadKey {
        key: key(
            "cpus",
            Form::Text("LIST"),
            "CPUs that the thread may run on",
        )
        .by_default("all"),
        read: |thread, entry| set(&mut thread.spec.cpus, entry),
    },
    ThreadKey {
        key: key("poll-max-us", POLL_MAX_US_FORM, "as at the top level")
            .by_default("that of the top level"),
        read: |thread, entry| {
            thread.spec.polling.max = Duration::from_micros(entry.parsed()?);
            Ok(())
        },
    },
    ThreadKey {
        key: key("poll-cpu", POLL_CPU_FORM, "as at the top level")
            .by_default("that of the top level"),
        read: |thread, entry| set(&mut thread.spec.polling.cpu, entry),
    },
];

impl ThreadKey {
    /// Takes the value from an entry.
    ///
    /// # Errors
    /// It is not a value of this key.
    pub fn read(&self, thread: &mut NewThread, entry: &Entry<'_>) -> Result<(), Mistake> {
        check(&self.key, entry)?;
        (self.read)(thread, entry)
    }
}

/// A key of an `[[export]]`, apart from its limits.
pub struct ExportKey {
    pub key: Key,
    read: fn(&mut NbdExportSpec, &Entry<'_>) -> Result<(), Mistake>,
}

pub static EXPORT_KEYS: &[ExportKey] = &[
    ExportKey {
        key: key("disk", Form::Text("NAME"), "name of the disk").by_default("required"),
        read: |export, entry| named(entry).map(|name| export.node = name),
    },
    ExportKey {
        key: key("name", Form::Text("NAME"), "name that NBD clients use")
            .by_default("that of the disk"),
        read: |export, entry| named(entry).map(|name| export.name = name),
    },
    ExportKey {
        key: key(
            "description",
            Form::Text("TEXT"),
            "what clients list for it",
        )
        .by_default("none"),
        read: |export, entry| set(&mut export.description, entry),
    },
    ExportKey {
        key: key(
            "writable",
            Form::Words(&["on", "off"]),
            "whether clients may write to the disk; its guest must not use it then",
        )
        .by_default("`off`"),
        read: |export, entry| {
            export.writable = matches!(&*entry.text()?, "on" | "true");
            Ok(())
        },
    },
    ExportKey {
        key: key(
            "bitmaps",
            Form::Text("NAMES"),
            "a [dirty bitmap](bitmaps.md) that clients may query, or a list of them, as in `[\"nightly\"]`",
        )
        .by_default("none"),
        read: |export, entry| {
            let names = match entry.elements() {
                Some(names) => names.iter().map(Entry::text).collect::<Result<_, _>>()?,
                None => vec![entry.text()?],
            };
            export.bitmaps = names;
            Ok(())
        },
    },
];

impl ExportKey {
    /// Takes the value from an entry.
    ///
    /// # Errors
    /// It is not a value of this key.
    pub fn read(&self, export: &mut NbdExportSpec, entry: &Entry<'_>) -> Result<(), Mistake> {
        check(&self.key, entry)?;
        (self.read)(export, entry)
    }
}

/// Checks the form of a value, if the key demands one.
fn check(key: &Key, entry: &Entry<'_>) -> Result<(), Mistake> {
    match &key.form {
        Form::Text(_) => Ok(()),
        form => form.check(&entry.text()?).map_err(|e| entry.mistake(e)),
    }
}

/// The key of a `[[throttle-group]]`, apart from its limits.
pub static GROUP_NAME: Key =
    key("name", Form::Text("NAME"), "name that disks refer to").by_default("required");

/// A key of a `[[disk]]` that only the file has.
pub static MAPPING: Key = key(
    "iothread-vq-mapping",
    Form::Text("LIST"),
    "the same as `iothreads` in QEMU's syntax, instead of it: a list of `{ iothread = \"ID\", vqs = [0, 2] }`. Either no \
     entry has `vqs`, and the threads take turns, or every entry has it, and each queue is named exactly once; without \
     `queues`, the disk then has the queues that are named",
)
.by_default("none");

fn set<T: FromStr<Err: Display>>(field: &mut T, entry: &Entry<'_>) -> Result<(), Mistake> {
    entry.parsed().map(|value| *field = value)
}

fn set_some<T: FromStr<Err: Display>>(
    field: &mut Option<T>,
    entry: &Entry<'_>,
) -> Result<(), Mistake> {
    entry.parsed().map(|value| *field = Some(value))
}

/// A name.
///
/// # Errors
/// It does not follow the rules for names.
pub fn named(entry: &Entry<'_>) -> Result<String, Mistake> {
    spec::name(&entry.text()?).map_err(|problem| entry.mistake(problem))
}
