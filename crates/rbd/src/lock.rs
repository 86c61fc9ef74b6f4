//! The exclusive lock of an image, as proof that no other client has written to the image meanwhile.
//!
//! A client writes to an image with the feature `exclusive-lock` only while it owns the lock, which is in an attribute of
//! the image's header object. ringdisk leaves a *mark* there: a text with the lock's owner, which Ceph calls the lock's
//! description and does not use. While the mark is there, the lock has been ringdisk's without interruption:
//!
//! - Any client that acquires the lock, this one included, becomes an owner without a mark.
//! - If librbd has lost its connection and only renews the lock, the mark stays.
//! - The lock of a process that was killed stays, with the mark, until another client breaks it.
//!
//! Without an owner, the version of the header object tells whether another client had the lock: Ceph increases it with
//! each change of the object, and acquiring and releasing the lock are such changes. To open an image and watch it is none.
//!
//! Every change here names the version that the object must have, so that nothing happens if it was changed meanwhile.
//! Releasing the lock returns the version that this has made. Only librbd can acquire the lock for librbd, without such a
//! condition: see [`own_lock`](RbdImage::own_lock).

mod codec;

#[cfg(fuzzing)]
pub use codec::check_answer as check_lock_answer;

use std::ffi::{CString, c_char, c_int};
use std::io;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

use self::codec::Locker;
use crate::cluster::{Connection, c_string, is_ours, text_of};
use crate::error::BLOCKLISTED;
use crate::image::RbdImage;
use crate::library::{Library, Pointer, Watcher};

/// The class of Ceph's OSDs with the functions for locks.
const CLASS: &std::ffi::CStr = c"lock";
/// The name of an image's lock: RBD_LOCK_NAME of `librbd/Types.h`.
const LOCK_NAME: &std::ffi::CStr = c"rbd_lock";

/// The owner of a killed process's lock counts as alive for so long after its last message (`osd_client_watch_timeout`),
/// with a reserve.
const WATCH_TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// A client that opens an image, acquires the lock, writes, and closes the image takes longer than librbd needs for the lock
/// alone, unless this process was stopped meanwhile.
const ACQUISITION_MAX: Duration = Duration::from_secs(1);
/// An outage of the cluster may last so long where bitmaps would be lost otherwise, if its operations have a time limit
/// (`rados_osd_op_timeout`). Without one, they wait.
const OUTAGE_MAX: Duration = Duration::from_secs(30);
/// So often a change of the header object is tried again that others have changed at the same time.
const ATTEMPTS: usize = 20;
/// So long a client that was added to the blocklist stays there: librbd's default (`rbd_blocklist_expire_seconds`: the
/// cluster's, which is an hour).
const BLOCKLIST_EXPIRE_DEFAULT: u32 = 0;
/// The cookie of a lock that librbd has acquired begins so. For any other lock it waits without end.
const LIBRBD_COOKIE: &str = "auto ";
/// A client does not hand over the lock.
const KEPT: &str = "another client keeps it; 'rbd lock ls' and 'rbd status' show which";

/// What an image's header object says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Another one after each change.
    pub version: u64,
    owner: Option<Locker>,
}

impl Header {
    /// The mark with the lock's owner.
    pub fn mark(&self) -> Option<&str> {
        let mark = self.owner.as_ref().map(|owner| owner.mark.as_str());
        mark.filter(|mark| !mark.is_empty())
    }

    /// Whether a client has the lock, which may be dead.
    pub fn is_locked(&self) -> bool {
        self.owner.is_some()
    }
}

/// Why the lock was not acquired, or not with the proof that no other client has written.
#[derive(Debug, Error)]
pub enum OwnError {
    /// Another client may have written to the image.
    #[error("{0}")]
    Foreign(&'static str),
    #[error("the image's lock cannot be acquired: {0}")]
    Io(#[from] io::Error),
}

const MEANWHILE: OwnError =
    OwnError::Foreign("another client has changed the image, or had its lock, at the same time");

impl RbdImage {
    /// What identifies the image: the cluster, the pool, the namespace, and an id that no other image there ever had.
    ///
    /// # Errors
    /// The cluster does not tell.
    pub fn identity(&self) -> io::Result<String> {
        let (library, location) = (self.library(), self.location());
        let mut buffer = [0u8; 64];
        // SAFETY: the cluster is connected; the buffer has the length that is given.
        let got = unsafe {
            let cluster = self.connection().cluster();
            (library.rados_cluster_fsid)(cluster, buffer.as_mut_ptr().cast(), buffer.len())
        };
        self.connection().check(got)?;
        let cluster = text_of(&buffer);
        let pool = HeaderObject::of(self)?.pool_id();
        let namespace = location.namespace.as_deref().unwrap_or_default();
        Ok(format!("{cluster}/{pool}/{namespace}/{}", self.id()?))
    }

    /// The name of the image, in a cluster that it identifies.
    ///
    /// # Errors
    /// The cluster does not tell.
    pub fn full_name(&self) -> io::Result<String> {
        let identity = self.identity()?;
        let cluster = identity.split('/').next().unwrap_or_default();
        Ok(format!("rbd:{cluster}/{}", self.location().image_spec()))
    }

    fn id(&self) -> io::Result<String> {
        let mut buffer = [0u8; 128];
        // SAFETY: the image is open; the buffer has the length that is given.
        let got = unsafe {
            let id = buffer.as_mut_ptr().cast();
            (self.library().rbd_get_id)(self.handle(), id, buffer.len())
        };
        self.connection().check(got)?;
        Ok(text_of(&buffer))
    }

    /// What the header object says now.
    ///
    /// # Errors
    /// The cluster does not tell; or ([`io::ErrorKind::InvalidData`]) the lock is not as librbd and ringdisk leave it.
    pub fn header(&self) -> io::Result<Header> {
        HeaderObject::of(self)?.read()
    }

    /// Whether another client that is alive has the lock.
    ///
    /// # Errors
    /// As for [`header`](Self::header).
    pub fn has_other_owner(&self) -> io::Result<bool> {
        let header = self.header()?;
        match header.owner {
            Some(owner) if !self.is_own(&owner) => Ok(self.watchers()?.contains(&owner.client)),
            _ => Ok(false),
        }
    }

    /// Acquires the lock, and marks it. `since` is the state of the header since which no other client may have written: without
    /// an owner, or with the lock of a process that was killed. If `is_dead`, that process is known to have ended; otherwise
    /// this waits until the cluster does not know it any more. Without `since`, others may have written.
    ///
    /// librbd acquires the lock itself. Just before, a change of the header that is made only if it is as in `since` proves that
    /// no other client came until then. That none came between this and librbd is certain if the two changes have adjacent
    /// versions, which are numbers of the header's placement group. Other changes in that group may come between. Then no
    /// other client may have the image open before and after, and all must have taken less than [`ACQUISITION_MAX`].
    ///
    /// # Errors
    /// Another client may have written, or it cannot be acquired.
    pub fn own_lock(&self, since: Option<(&Header, bool)>, mark: &str) -> Result<(), OwnError> {
        let object = HeaderObject::of(self)?;
        let begun = Instant::now();
        let mut begun_at = None;
        if let Some((header, is_dead)) = since {
            let (version, freed) = self.take_from(&object, header, is_dead)?;
            let others = patiently(|| self.other_watchers(header))?;
            begun_at = Some((version, freed, others));
        }
        let kept = || io::Error::new(io::ErrorKind::ResourceBusy, KEPT);
        let is_librbds = |owner: &Locker| owner.cookie.starts_with(LIBRBD_COOKIE);
        if !object.read()?.owner.as_ref().is_none_or(is_librbds) {
            return Err(kept().into());
        }
        for _ in 0..ATTEMPTS {
            let limit = since.is_none().then(|| begun + WATCH_TIMEOUT_MAX);
            match patiently(|| self.acquire_lock(limit)) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                    let from = begun_at.as_ref().map(|(version, ..)| *version);
                    let version = self.free_unnoticed(&object, from)?.ok_or(MEANWHILE)?;
                    if let Some(begun_at) = &mut begun_at {
                        begun_at.0 = version;
                    }
                    continue;
                }
                Err(e) if e.kind() == io::ErrorKind::TimedOut && limit.is_some() => {
                    return Err(kept().into());
                }
                acquired => acquired?,
            }
            let now = object.read()?;
            let owner = now.owner.as_ref().filter(|owner| self.is_own(owner));
            if let Some((version, freed, others)) = &begun_at {
                let is_quick = || freed.elapsed() < ACQUISITION_MAX;
                let is_alone = |header| Ok::<_, io::Error>(!self.other_watchers(header)?);
                let is_proven = now.version == version + 1
                    || !others && is_quick() && since.map_or(Ok(true), |(h, _)| is_alone(h))?;
                if owner.is_none() || !is_proven {
                    return Err(MEANWHILE);
                }
            }
            if let Some(owner) = owner
                && object.mark(now.version, owner, mark)?
            {
                return Ok(());
            }
            if begun_at.is_some() {
                return Err(MEANWHILE);
            }
            if begun.elapsed() > WATCH_TIMEOUT_MAX {
                break;
            }
        }
        let text = "another client takes it again and again";
        Err(io::Error::new(io::ErrorKind::TimedOut, text).into())
    }

    /// Frees the lock that the cluster has given to librbd after librbd had given up, which it cannot acquire then. `from` is the
    /// version of the header before. Returns that after, or `None` if others may have had the lock in between.
    fn free_unnoticed(
        &self,
        object: &HeaderObject<'_>,
        from: Option<u64>,
    ) -> io::Result<Option<u64>> {
        let now = object.read()?;
        let Some(owner) = now.owner.as_ref().filter(|owner| self.is_own(owner)) else {
            return Ok(None);
        };
        if from.is_some_and(|from| now.version != from + 1) {
            return Ok(None);
        }
        let freed = object.change(now.version, c"unlock", &codec::unlock(owner));
        object.or_look(now.version, freed)
    }

    /// Frees the lock, if the header is as it was. Returns the version that this makes, and a time just before.
    fn take_from(
        &self,
        object: &HeaderObject<'_>,
        header: &Header,
        is_dead: bool,
    ) -> Result<(u64, Instant), OwnError> {
        let Some(owner) = &header.owner else {
            let before = Instant::now();
            let touched = object.or_look(header.version, object.touch(header.version))?;
            return touched.map(|version| (version, before)).ok_or(MEANWHILE);
        };
        if is_ours(owner.client) {
            // It is alive: this process has not closed the image.
            return Err(OwnError::Foreign("this process still has the image open"));
        }
        let begun = Instant::now();
        while !is_dead && self.watchers()?.contains(&owner.client) {
            if begun.elapsed() > WATCH_TIMEOUT_MAX {
                return Err(OwnError::Foreign("the client that has its lock is alive"));
            }
            thread::sleep(Duration::from_millis(500));
        }
        // Its requests in flight must not arrive later.
        object.blocklist(owner)?;
        for _ in 0..ATTEMPTS {
            let now = object.read()?;
            if now.owner.as_ref() != Some(owner) {
                return Err(MEANWHILE);
            }
            let (broken, before) = (codec::break_owner(owner), Instant::now());
            let broken = object.change(now.version, c"break_lock", &broken);
            if let Some(version) = object.or_look(now.version, broken)? {
                return Ok((version, before));
            }
        }
        Err(MEANWHILE)
    }

    /// Has librbd acquire the lock, if it has not. It does that for a flush, as for a write. If librbd still waits at `limit`,
    /// it may acquire the lock later.
    ///
    /// # Errors
    /// It cannot be acquired, or ([`io::ErrorKind::TimedOut`]) another client keeps it.
    fn acquire_lock(&self, limit: Option<Instant>) -> io::Result<()> {
        let (library, mut completion) = (self.library(), ptr::null_mut());
        // SAFETY: librbd makes the completion; it calls nothing when that has ended.
        let made =
            unsafe { (library.rbd_aio_create_completion)(ptr::null_mut(), None, &mut completion) };
        self.connection().check(made)?;
        // SAFETY: the image is open. librbd keeps what it needs of a completion until that has ended.
        unsafe {
            let mut flushed = (library.rbd_aio_flush)(self.handle(), completion);
            while flushed >= 0 && (library.rbd_aio_is_complete)(completion) == 0 {
                if limit.is_some_and(|limit| Instant::now() > limit) {
                    flushed = -libc::ETIMEDOUT;
                } else {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            if flushed >= 0 {
                flushed = (library.rbd_aio_get_return_value)(completion) as c_int;
            }
            (library.rbd_aio_release)(completion);
            self.connection().check(flushed)
        }
    }

    /// Whether the lock still has this mark.
    ///
    /// # Errors
    /// The cluster does not tell.
    pub fn has_mark(&self, mark: &str) -> io::Result<bool> {
        let header = self.header()?;
        let owner = header.owner.as_ref();
        Ok(owner.is_some_and(|owner| self.is_own(owner) && owner.mark == mark))
    }

    /// Gives the lock another mark if it still has this one. Returns whether it had.
    ///
    /// # Errors
    /// The cluster does not tell.
    pub fn change_mark(&self, old: &str, mark: &str) -> io::Result<bool> {
        let object = HeaderObject::of(self)?;
        for _ in 0..ATTEMPTS {
            let now = object.read()?;
            let owner = now.owner.as_ref().filter(|owner| self.is_own(owner));
            match owner {
                Some(owner) if owner.mark == old => {
                    if object.mark(now.version, owner, mark)? {
                        return Ok(true);
                    }
                }
                // A change that was not answered was done after all.
                Some(owner) => return Ok(owner.mark == mark),
                None => return Ok(false),
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Releases the lock if it still has this mark. Nothing may write to the image meanwhile, nor afterwards. Returns the
    /// version of the header then, or `None` if the mark was not there.
    ///
    /// # Errors
    /// It may still be locked.
    pub fn release_lock(&self, mark: &str) -> io::Result<Option<u64>> {
        if !self.has_mark(mark)? {
            return Ok(None);
        }
        // Of librbd's cache, nothing may be written later.
        self.acquire_lock(None)?;
        let object = HeaderObject::of(self)?;
        for _ in 0..ATTEMPTS {
            let now = object.read()?;
            let owner = now.owner.as_ref();
            let Some(owner) = owner.filter(|owner| self.is_own(owner) && owner.mark == mark) else {
                return Ok(None);
            };
            let unlocked = codec::unlock(owner);
            if let Some(version) = object.change(now.version, c"unlock", &unlocked)? {
                // librbd finds that it is not locked any more. Whatever it says, the lock is free.
                // SAFETY: the image is open.
                unsafe { (self.library().rbd_lock_release)(self.handle()) };
                return Ok(Some(version));
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    fn is_own(&self, owner: &Locker) -> bool {
        owner.client == self.connection().client()
    }

    /// Whether another client has the image open for writing. The one that had the lock does not count.
    fn other_watchers(&self, since: &Header) -> io::Result<bool> {
        let before = since.owner.as_ref().map(|owner| owner.client);
        let us = self.connection().client();
        let is_other = |client: &u64| *client != us && Some(*client) != before;
        Ok(self.watchers()?.iter().any(is_other))
    }

    /// The clients that have the image open for writing.
    pub(crate) fn watchers(&self) -> io::Result<Vec<u64>> {
        const NONE: Watcher = Watcher {
            address: ptr::null_mut(),
            client: 0,
            cookie: 0,
        };
        let mut all = vec![NONE; 64];
        loop {
            let mut count = all.len();
            let library = self.library();
            // SAFETY: the image is open; there is room for as many as `count` says.
            let got =
                unsafe { (library.rbd_watchers_list)(self.handle(), all.as_mut_ptr(), &mut count) };
            if got == -libc::ERANGE && count > all.len() {
                all.resize(count, NONE);
                continue;
            }
            self.connection().check(got)?;
            let clients = all[..count].iter().map(|watcher| watcher.client as u64);
            let clients = clients.collect();
            // SAFETY: librbd has filled so many, and frees their addresses.
            unsafe { (library.rbd_watchers_list_cleanup)(all.as_mut_ptr(), count) };
            return Ok(clients);
        }
    }
}

/// Asks the cluster again while that does not answer within the time limit that its operations have.
fn patiently<T>(mut ask: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let begun = Instant::now();
    loop {
        match ask() {
            Err(e) if e.kind() == io::ErrorKind::TimedOut && begun.elapsed() < OUTAGE_MAX => {
                thread::sleep(Duration::from_millis(10));
            }
            answer => return answer,
        }
    }
}

/// The header object of an image, with access of its own to the pool: the version of the last operation is a property of the
/// access.
struct HeaderObject<'a> {
    connection: &'a Connection,
    library: &'static Library,
    pool: Pointer,
    name: CString,
}

impl<'a> HeaderObject<'a> {
    fn of(image: &'a RbdImage) -> io::Result<Self> {
        let (connection, library) = (image.connection(), image.library());
        let name = c_string(&format!("rbd_header.{}", image.id()?));
        let location = image.location();
        let (pool_name, mut pool) = (c_string(&location.pool), ptr::null_mut());
        // SAFETY: the name ends with a zero byte and outlives the call; the cluster is connected.
        let opened = unsafe {
            (library.rados_ioctx_create)(connection.cluster(), pool_name.as_ptr(), &mut pool)
        };
        connection.check(opened)?;
        let namespace = c_string(location.namespace.as_deref().unwrap_or_default());
        // SAFETY: the pool was opened above; the name ends with a zero byte and outlives the call.
        unsafe {
            (library.rados_ioctx_set_namespace)(pool, namespace.as_ptr());
            if let Some(try_it) = library.rados_set_pool_full_try {
                // Nothing here needs space.
                try_it(pool);
            }
        }
        Ok(Self {
            connection,
            library,
            pool,
            name,
        })
    }

    fn pool_id(&self) -> i64 {
        // SAFETY: the pool is open.
        unsafe { (self.library.rados_ioctx_get_id)(self.pool) }
    }

    fn read(&self) -> io::Result<Header> {
        patiently(|| self.try_read())
    }

    fn try_read(&self) -> io::Result<Header> {
        let asked = codec::ask();
        let mut answer = vec![0u8; 16 << 10];
        // SAFETY: the names end with zero bytes; the buffers have the lengths that are given.
        let (got, version) = unsafe {
            let got = (self.library.rados_exec)(
                self.pool,
                self.name.as_ptr(),
                CLASS.as_ptr(),
                c"get_info".as_ptr(),
                asked.as_ptr().cast(),
                asked.len(),
                answer.as_mut_ptr().cast(),
                answer.len(),
            );
            (got, (self.library.rados_get_last_version)(self.pool))
        };
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        if got == -libc::ERANGE {
            return Err(invalid("its owner has left more than 16 KiB with it"));
        }
        self.connection.check(got)?;
        let answer = answer.get(..got as usize).unwrap_or_default();
        let owner = codec::owner(answer).map_err(invalid)?;
        Ok(Header { version, owner })
    }

    /// Changes the object, and nothing in it, if it has this version. Returns the new version.
    fn touch(&self, version: u64) -> io::Result<Option<u64>> {
        let (name, value) = (c"ringdisk", [0u8; 1]);
        self.operate(version, |op| {
            // SAFETY: the operation is valid; the name ends with a zero byte, and the value is copied.
            unsafe {
                let value = (value.as_ptr().cast(), value.len());
                (self.library.rados_write_op_setxattr)(op, name.as_ptr(), value.0, value.1);
                (self.library.rados_write_op_rmxattr)(op, name.as_ptr());
            }
        })
    }

    /// The result of a change that leaves the object without a lock. If the cluster did not answer in time, the change was made
    /// if there is no lock and the version is the next one: another client that writes makes at least two changes.
    fn or_look(&self, before: u64, changed: io::Result<Option<u64>>) -> io::Result<Option<u64>> {
        let e = match changed {
            Err(e) if e.kind() == io::ErrorKind::TimedOut => e,
            changed => return changed,
        };
        let now = self.read()?;
        let is_done = now.owner.is_none() && now.version == before + 1;
        is_done.then_some(Some(now.version)).ok_or(e)
    }

    /// Gives the lock of this owner a mark, if the object has this version. Returns whether it has it.
    fn mark(&self, version: u64, owner: &Locker, mark: &str) -> io::Result<bool> {
        match self.change(version, c"lock", &codec::mark_owner(owner, mark)) {
            Err(e) if e.kind() == io::ErrorKind::TimedOut => {
                let now = self.read()?.owner;
                Ok(now.is_some_and(|now| now.client == owner.client && now.mark == mark))
            }
            changed => Ok(changed?.is_some()),
        }
    }

    /// Calls a function of the lock's class, if the object has this version. Returns the new version.
    fn change(
        &self,
        version: u64,
        function: &std::ffi::CStr,
        input: &[u8],
    ) -> io::Result<Option<u64>> {
        self.operate(version, |op| {
            // SAFETY: the operation is valid; the names end with zero bytes, and the input is copied.
            unsafe {
                (self.library.rados_write_op_exec)(
                    op,
                    CLASS.as_ptr(),
                    function.as_ptr(),
                    input.as_ptr().cast(),
                    input.len(),
                    ptr::null_mut(),
                );
            }
        })
    }

    fn operate(&self, version: u64, add: impl FnOnce(Pointer)) -> io::Result<Option<u64>> {
        // SAFETY: the operation is used by this thread only, and released once; the name ends with a zero byte.
        let (done, version) = unsafe {
            let op = (self.library.rados_create_write_op)();
            (self.library.rados_write_op_assert_version)(op, version);
            add(op);
            let name = self.name.as_ptr();
            let done =
                (self.library.rados_write_op_operate)(op, self.pool, name, ptr::null_mut(), 0);
            (self.library.rados_release_write_op)(op);
            (done, (self.library.rados_get_last_version)(self.pool))
        };
        match done {
            // It has a later version, or an earlier one.
            _ if done == -libc::ERANGE || done == -libc::EOVERFLOW => Ok(None),
            // The lock has another owner.
            _ if done == -libc::EBUSY || done == -libc::ENOENT => Ok(None),
            _ => self.connection.check(done).map(|()| Some(version)),
        }
    }

    /// Has the cluster refuse everything from a client.
    fn blocklist(&self, owner: &Locker) -> io::Result<()> {
        let Some(address) = self.address_of(owner)? else {
            return Ok(());
        };
        let Some(add) = self.library.rados_blocklist_add else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let (cluster, mut address) = (self.connection.cluster(), address.into_bytes_with_nul());
        // SAFETY: the cluster is connected; the address ends with a zero byte and outlives the call.
        let (added, known) = unsafe {
            (
                add(
                    cluster,
                    address.as_mut_ptr().cast(),
                    BLOCKLIST_EXPIRE_DEFAULT,
                ),
                (self.library.rados_wait_for_latest_osdmap)(cluster),
            )
        };
        self.connection.check(added)?;
        self.connection.check(known)
    }

    /// The address of the lock's owner, if it is still this one.
    fn address_of(&self, owner: &Locker) -> io::Result<Option<CString>> {
        let mut exclusive: c_int = 0;
        let [mut tag, mut clients, mut cookies, mut addresses] = [[0u8; 1024]; 4];
        let [
            mut tag_len,
            mut clients_len,
            mut cookies_len,
            mut addresses_len,
        ] = [1024_usize; 4];
        let start = |buffer: &mut [u8; 1024]| buffer.as_mut_ptr().cast::<c_char>();
        // SAFETY: the names end with zero bytes; the buffers have the lengths that are given.
        let got = unsafe {
            (self.library.rados_list_lockers)(
                self.pool,
                self.name.as_ptr(),
                LOCK_NAME.as_ptr(),
                &mut exclusive,
                start(&mut tag),
                &mut tag_len,
                start(&mut clients),
                &mut clients_len,
                start(&mut cookies),
                &mut cookies_len,
                start(&mut addresses),
                &mut addresses_len,
            )
        };
        let got = i32::try_from(got).unwrap_or(i32::MAX);
        if got != -BLOCKLISTED && got == -libc::ENOENT {
            return Ok(None);
        }
        self.connection.check(got)?;
        let is_it = text_of(&clients) == format!("client.{}", owner.client)
            && text_of(&cookies) == owner.cookie;
        Ok(is_it.then(|| c_string(&text_of(&addresses))))
    }
}

impl Drop for HeaderObject<'_> {
    fn drop(&mut self) {
        // SAFETY: the pool was opened by `of`, and is closed once.
        unsafe { (self.library.rados_ioctx_destroy)(self.pool) };
    }
}
