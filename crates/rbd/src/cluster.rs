//! Connections to clusters. Images share them.

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};

use crate::error::{BLOCKLISTED, RbdError, error_of};
use crate::library::{Library, Pointer};
use crate::location::{Access, Location};
use crate::settings::{IMAGE_SETTINGS, OF_CLUSTER, OURS, Origin, Setting};

/// The default limit, if the machine has as many CPUs: each connection has its own threads.
const CONNECTIONS_DEFAULT_MAX: usize = 4;

/// A connection to a cluster (`rados_t`), with its own messenger and its own threads.
pub(crate) struct Connection {
    pub library: &'static Library,
    cluster: Pointer,
    /// The number of this connection among those with the same access, from 0.
    pub number: usize,
    /// Each setting, with what every source has said about it so far.
    settings: Vec<Setting>,
    /// The cluster refuses every request of this client until it removes the client from its blocklist. No further
    /// image is opened on this connection.
    blocklisted: AtomicBool,
    /// Snapshots that this client has made and still uses, by [name](crate::snapshot).
    pub snapshots: Mutex<HashSet<String>>,
}

// SAFETY: any thread may use a `rados_t`, and several threads may use it at a time.
unsafe impl Send for Connection {}
// SAFETY: as above.
unsafe impl Sync for Connection {}

/// Images share a connection if they have the same access and the same cache setting.
type Key = (Access, bool);

/// The connections of this process.
static ALL: LazyLock<Mutex<HashMap<Key, Vec<Weak<Connection>>>>> = LazyLock::new(Mutex::default);

/// Whether a client, by its number in the cluster, is a connection of this process.
pub(crate) fn is_ours(client: u64) -> bool {
    let connections: Vec<_> = {
        let all = ALL.lock().unwrap_or_else(|e| e.into_inner());
        all.values().flatten().filter_map(Weak::upgrade).collect()
    };
    connections.iter().any(|ours| ours.client() == client)
}

impl Connection {
    /// Returns a connection for this image. A new one is made while there are fewer than the disks with this access may
    /// have; after that, the one with the fewest images is shared. Connections that are known to be on the cluster's
    /// blocklist do not count.
    ///
    /// # Errors
    /// The libraries cannot be loaded, or the cluster does not admit this client.
    pub fn to(location: &Location, cache: bool) -> Result<Arc<Self>, RbdError> {
        let max = location.access.connections.unwrap_or_else(|| {
            let cpus = std::thread::available_parallelism().map_or(1, usize::from);
            cpus.min(CONNECTIONS_DEFAULT_MAX)
        });
        let key = (location.access.clone(), cache);
        let number = {
            let mut all = ALL.lock().unwrap_or_else(|e| e.into_inner());
            let connections = all.entry(key.clone()).or_default();
            connections.retain(|c| c.strong_count() > 0);
            let there: Vec<_> = connections.iter().filter_map(Weak::upgrade).collect();
            let usable = there.iter().filter(|c| !c.is_blocklisted());
            if usable.clone().count() >= max
                && let Some(least) = usable.min_by_key(|c| Arc::strong_count(c))
            {
                return Ok(least.clone());
            }
            (0..).find(|n| there.iter().all(|c| c.number != *n))
        };
        // The lock is released here: connecting to a cluster that does not answer may take long.
        let connection = Arc::new(Self::new(location, cache, number.unwrap_or(0))?);
        let mut all = ALL.lock().unwrap_or_else(|e| e.into_inner());
        let connections = all.entry(key).or_default();
        connections.push(Arc::downgrade(&connection));
        Ok(connection)
    }

    fn new(location: &Location, cache: bool, number: usize) -> Result<Self, RbdError> {
        let name = location.to_string();
        let library = Library::get().map_err(|e| RbdError::Library(name.clone(), e))?;
        let access = &location.access;
        let id = access.id.as_deref().unwrap_or("admin");
        let user = c_string(&format!("client.{id}"));
        let cluster_name = c_string(access.cluster.as_deref().unwrap_or("ceph"));
        let mut cluster = ptr::null_mut();
        // SAFETY: both names end with a zero byte and outlive the call.
        let made = unsafe {
            (library.rados_create2)(&mut cluster, cluster_name.as_ptr(), user.as_ptr(), 0)
        };
        check(made).map_err(|e| RbdError::Io(name.clone(), "set up librados", e))?;
        let mut this = Self {
            library,
            cluster,
            number,
            settings: Vec::new(),
            blocklisted: AtomicBool::new(false),
            snapshots: Mutex::default(),
        };
        for &(key, about) in OF_CLUSTER.iter().chain(IMAGE_SETTINGS) {
            if let Some(value) = this.get(key) {
                this.settings.push(Setting {
                    name: key.into(),
                    value,
                    origin: Origin::Default,
                    overridden: Vec::new(),
                    about,
                });
            }
        }
        let before: Vec<_> = OURS.iter().map(|(key, _)| this.get(key)).collect();
        this.read_conf(location)?;
        this.notice(Origin::Conf);
        for (&(key, value), before) in OURS.iter().zip(before) {
            let given = access.options.iter().any(|(k, _)| k == key);
            // A setting that this version of the library does not know is left out.
            if !given && before.is_some() && this.get(key) == before {
                this.set(&name, key, value)?;
            }
        }
        this.notice(Origin::Ringdisk);
        if let Some(keyring) = &access.keyring {
            this.set(&name, "keyring", &keyring.to_string_lossy())?;
        }
        for (key, value) in &access.options {
            this.set(&name, key, value)?;
        }
        this.set(&name, "rbd_cache", if cache { "true" } else { "false" })?;
        this.notice(Origin::CommandLine);
        // SAFETY: `rados_create2` made the cluster above.
        let connected = unsafe { (library.rados_connect)(this.cluster) };
        check(connected).map_err(|error| RbdError::Connect {
            image: name,
            id: id.into(),
            hint: match error.raw_os_error() {
                Some(libc::ENOENT) => {
                    "is mon_host in Ceph's configuration, and is there a key of this user in a keyring that it names \
                     (keyring=PATH)?"
                }
                Some(libc::EACCES | libc::EPERM) => {
                    "the key or the user is not what the cluster knows; `ceph auth get` shows it"
                }
                Some(libc::ETIMEDOUT) => "do its monitors run, and does mon_host name them?",
                _ => "`ceph -s` as the same user says more",
            },
            error,
        })?;
        this.notice(Origin::Monitors);
        Ok(this)
    }

    fn read_conf(&self, location: &Location) -> Result<(), RbdError> {
        let path = location.access.conf.as_ref();
        let text = path.map(|path| c_string(&path.to_string_lossy()));
        let text_ptr = text.as_ref().map_or(ptr::null(), |text| text.as_ptr());
        // SAFETY: the path is null, or ends with a zero byte and outlives the call.
        let read = unsafe { (self.library.rados_conf_read_file)(self.cluster, text_ptr) };
        match check(read) {
            // The default file is optional: options may give everything.
            Err(e) if path.is_none() && e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            result => result.map_err(|error| RbdError::Conf {
                image: location.to_string(),
                file: path.map_or("/etc/ceph/ceph.conf".into(), |p| p.display().to_string()),
                error,
            }),
        }
    }

    /// Reads all settings again and records `origin` as the source of every value that has changed.
    fn notice(&mut self, origin: Origin) {
        for i in 0..self.settings.len() {
            if let Some(value) = self.get(&self.settings[i].name) {
                self.settings[i].set(origin, &value);
            }
        }
    }

    fn set(&self, image: &str, key: &str, value: &str) -> Result<(), RbdError> {
        let (k, v) = (c_string(key), c_string(value));
        // SAFETY: both end with a zero byte and outlive the call.
        let set = unsafe { (self.library.rados_conf_set)(self.cluster, k.as_ptr(), v.as_ptr()) };
        check(set).map_err(|error| RbdError::Option {
            image: image.into(),
            key: key.into(),
            value: value.into(),
            error,
        })
    }

    /// The current value of an option; `None` if the library does not know it.
    pub fn get(&self, key: &str) -> Option<String> {
        let (key, mut buffer) = (c_string(key), [0u8; 1024]);
        let (start, len) = (buffer.as_mut_ptr().cast(), buffer.len());
        // SAFETY: the key ends with a zero byte; the buffer is `len` bytes long.
        let got = unsafe { (self.library.rados_conf_get)(self.cluster, key.as_ptr(), start, len) };
        (got == 0).then(|| text_of(&buffer))
    }

    /// The settings that apply to all images of this connection.
    pub fn settings(&self) -> &[Setting] {
        &self.settings
    }

    /// The client's number in the cluster, as `ceph osd blocklist ls` and `rbd lock ls` show it.
    pub fn client(&self) -> u64 {
        // SAFETY: the cluster is connected.
        unsafe { (self.library.rados_get_instance_id)(self.cluster) }
    }

    pub fn cluster(&self) -> Pointer {
        self.cluster
    }

    /// Converts a return value of the libraries for an operation on this connection. It also records here whether the
    /// client is on the cluster's blocklist.
    pub fn check(&self, result: i32) -> std::io::Result<()> {
        if result == -BLOCKLISTED {
            self.set_blocklisted();
        }
        check(result)
    }

    #[cold]
    pub fn set_blocklisted(&self) {
        self.blocklisted.store(true, Ordering::Relaxed);
    }

    /// Whether the cluster has refused a request because this client is on its blocklist.
    pub fn is_blocklisted(&self) -> bool {
        self.blocklisted.load(Ordering::Relaxed)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: `rados_create2` made the cluster, and every user of it holds an `Arc` of this connection, so none is
        // left.
        unsafe { (self.library.rados_shutdown)(self.cluster) };
    }
}

pub(crate) fn check(result: i32) -> std::io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(error_of(result)),
    }
}

/// A string for the libraries. Parsed text has no zero byte inside.
pub(crate) fn c_string(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}

/// The text before the first zero byte.
pub(crate) fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
