//! What a disk is in: a file or block device, or an image in a Ceph cluster.
//!
//! Nobody else writes to a locked file. Of an image, ringdisk has the exclusive lock while persistent bitmaps are in use, and
//! leaves a [mark] with it. As long as the mark is there, no other client has written to the image.
//!
//! A record announces the *next* token. A process that continues the bitmaps
//!
//! 1. acquires the lock with that token, marked as new;
//! 2. writes a record with a token of its own, and the one that it began with, durably;
//! 3. gives the lock its own token. Only now the image may be written to.
//!
//! So an older copy of a record, or of the whole state directory, is not mistaken for the last one: no lock ever has its tokens
//! again once the image was written to.
//!
//! | record | lock of the image | other clients have, and a later process has |
//! |---|---|---|
//! | stored | the header has the version that the release of the lock has made | not written |
//! | any | with the next token, and new: a kill came after step 1 | not written |
//! | in use | with the token that it began with, and new: a kill came after step 2 | not written |
//! | in use | with its own token, of this process, or of one that was killed | not written |
//! | any | anything else | perhaps written |
//!
//! A kill after the release and before the record makes the bitmaps inconsistent, and so does one between the acquisition and
//! the mark. A copy of the record that was made while the same process served the image has its token too, and lacks changes
//! if the host has crashed since: nobody may restore one.
//!
//! [mark]: super::mark

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use block::Backing;
use engine::DiskFile;
use rbd::{Header, OwnError, RbdImage};

use super::mark::Mark;
use super::seen::{LOCK_LOST, Seen, StorageKey};
use crate::token::token;

pub enum Medium {
    File(Arc<DiskFile>),
    Image(ClusterImage),
}

/// An image in a Ceph cluster.
pub struct ClusterImage {
    image: Arc<RbdImage>,
    /// What identifies it.
    id: String,
    /// As it was when it was opened.
    found: Header,
    /// What this process has left with the lock.
    mark: Mutex<Option<Mark>>,
    /// Its own token, which its records have.
    token: Mutex<String>,
}

impl ClusterImage {
    fn mark(&self) -> MutexGuard<'_, Option<Mark>> {
        self.mark.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_mark(&self, mark: Mark, token: String) {
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = token;
        *self.mark() = Some(mark);
    }

    fn seen(&self, version: u64) -> io::Result<Seen> {
        let mark = self.mark().clone();
        let begun = mark.as_ref().filter(|mark| mark.is_new);
        let begun = begun.map(|mark| mark.token.clone());
        let token = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        let token = mark.map(|_| token.clone());
        let tokens = [token, begun].map(Option::unwrap_or_default);
        Seen::of_image(&self.id, tokens, version)
    }
}

impl Medium {
    /// An image that was opened, and that this process has not written to.
    ///
    /// # Errors
    /// The cluster does not say what it is.
    pub fn image(image: &Arc<RbdImage>) -> io::Result<Self> {
        Ok(Self::Image(ClusterImage {
            image: image.clone(),
            id: image.identity()?,
            found: image.header()?,
            mark: Mutex::default(),
            token: Mutex::default(),
        }))
    }

    /// The absolute path of a file, or the full name of an image.
    ///
    /// # Errors
    /// The path is relative, and to what is not known.
    pub fn path(&self, named: &Path) -> io::Result<PathBuf> {
        match self {
            Self::File(_) => std::path::absolute(named),
            Self::Image(_) => Ok(named.to_owned()),
        }
    }

    /// What the records of a file or device are found by; `None` for an image.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn storage_key(&self) -> io::Result<Option<StorageKey>> {
        match self {
            Self::File(file) => Seen::key_of(file).map(Some),
            Self::Image(_) => Ok(None),
        }
    }

    /// When a file was made, if its file system knows.
    pub fn born(&self) -> Option<SystemTime> {
        match self {
            Self::File(file) if file.backing() == Backing::File => file.found().created().ok(),
            _ => None,
        }
    }

    /// Bytes, in whole blocks.
    ///
    /// # Errors
    /// The storage does not say.
    pub fn size(&self) -> io::Result<u64> {
        let (size, facts) = match self {
            Self::File(file) => (file.size()?, file.facts()),
            Self::Image(of) => (of.image.size()?, of.image.facts()),
        };
        Ok(size - size % u64::from(facts.logical_block))
    }

    /// The least size in bytes of an image since that was last looked at, after all changes that the cluster has reported.
    pub fn lowest_size(&self) -> u64 {
        match self {
            Self::File(_) => u64::MAX,
            Self::Image(of) => {
                of.image.settle();
                of.image.lowest_size()
            }
        }
    }

    /// Makes completed writes durable.
    ///
    /// # Errors
    /// They are not.
    pub fn sync(&self) -> io::Result<()> {
        match self {
            Self::File(file) => file.sync(),
            Self::Image(of) => block::Remote::sync(&*of.image),
        }
    }

    /// As it was found when it was opened and locked, but with the mark that this process has left.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn found(&self) -> io::Result<Seen> {
        match self {
            Self::File(file) => Seen::found(file),
            Self::Image(of) => of.seen(of.found.version),
        }
    }

    /// As it is when it is not in use any more: the next write of others changes that.
    ///
    /// # Errors
    /// The storage does not say, or others may have written.
    pub fn at_rest(&self) -> io::Result<Seen> {
        let of = match self {
            Self::File(file) => return Seen::at_rest(file),
            Self::Image(of) => of,
        };
        let mark = of.mark().clone();
        let Some(mark) = mark else {
            return of.seen(of.found.version);
        };
        let released = of.image.release_lock(&mark.text())?;
        let version = released.ok_or_else(|| io::Error::other(LOCK_LOST))?;
        *of.mark() = None;
        of.seen(version)
    }

    /// Checks that no other client has written to an image since it was seen: while it was in use, or since it was stored.
    ///
    /// # Errors
    /// What may have happened.
    pub fn check(&self, then: &Seen, is_stored: bool) -> Result<(), &'static str> {
        match self {
            Self::File(_) => Ok(()),
            Self::Image(of) => {
                let mark = of.found.mark().and_then(Mark::parse);
                then.check_image(&of.id, mark.as_ref(), of.found.version, is_stored)
            }
        }
    }

    /// Continues where the process has ended that saw `then`. Nothing was written to an image since, as far as its header says.
    /// Its mark is [new](Mark::is_new) until it is [confirmed](Self::confirm).
    ///
    /// Returns why another client may have written to the image, if one may.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn take_over(&self, then: &Seen) -> io::Result<Result<(), String>> {
        let Self::Image(of) = self else {
            return Ok(Ok(()));
        };
        let (next, is_same_boot) = then.next_of_image()?;
        let found = of.found.mark().and_then(Mark::parse);
        let living = found.filter(|_| is_same_boot);
        if let Some(process) = living.and_then(|mark| mark.living()) {
            let text = format!("process {process} of this host serves its image");
            return Ok(Err(text));
        }
        let mark = Mark::new(next.to_owned(), true);
        let owned = (of.image).own_lock(Some((&of.found, is_same_boot)), &mark.text());
        match owned {
            Ok(()) => of.set_mark(mark, token()),
            Err(OwnError::Foreign(why)) => return Ok(Err(why.into())),
            Err(OwnError::Io(e)) => return Err(e),
        }
        Ok(Ok(()))
    }

    /// A record has the mark, durably. From now on, the image may be written to.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn confirm(&self) -> io::Result<()> {
        let Self::Image(of) = self else { return Ok(()) };
        let mut mark = of.mark();
        let Some(begun) = mark.as_ref().filter(|mark| mark.is_new) else {
            return Ok(());
        };
        let token = of.token.lock().unwrap_or_else(PoisonError::into_inner);
        let own = Mark::new(token.clone(), false);
        // If another client has the lock, the next look finds that the mark is lost.
        if of.image.change_mark(&begun.text(), &own.text())? {
            *mark = Some(own);
        }
        Ok(())
    }

    /// Acquires the lock of an image, if this process has not marked it. What was written to the image before does not matter.
    /// Returns the mark.
    ///
    /// # Errors
    /// It cannot be acquired.
    pub fn own(&self) -> io::Result<Option<String>> {
        let Self::Image(of) = self else {
            return Ok(None);
        };
        if of.mark().is_none() {
            let token = token();
            let new = Mark::new(token.clone(), false);
            of.image.own_lock(None, &new.text()).map_err(|e| match e {
                OwnError::Io(e) => e,
                e => io::Error::other(e.to_string()),
            })?;
            of.set_mark(new, token);
        }
        Ok(of.mark().as_ref().map(Mark::text))
    }

    /// Whether this process has marked the lock, if it is an image.
    pub fn is_owned(&self) -> bool {
        match self {
            Self::File(_) => true,
            Self::Image(of) => of.mark().is_some(),
        }
    }

    /// Whether no record has the mark that this process has left.
    pub fn is_unconfirmed(&self) -> bool {
        match self {
            Self::File(_) => false,
            Self::Image(of) => of.mark().as_ref().is_some_and(|mark| mark.is_new),
        }
    }

    /// The mark that this process has left, if it is not there any more: another client has had the lock since.
    ///
    /// # Errors
    /// The cluster does not say.
    pub fn lost_mark(&self) -> io::Result<Option<String>> {
        let Self::Image(of) = self else {
            return Ok(None);
        };
        let mark = of.mark().as_ref().map(Mark::text);
        match mark {
            Some(mark) if !of.image.has_mark(&mark)? => Ok(Some(mark)),
            _ => Ok(None),
        }
    }

    /// Forgets a mark that is lost. Returns false if it was forgotten before.
    pub fn forget(&self, lost: &str) -> bool {
        match self {
            Self::File(_) => false,
            Self::Image(of) => of.mark().take_if(|mark| mark.text() == lost).is_some(),
        }
    }
}
