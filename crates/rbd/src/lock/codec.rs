//! What the lock class of Ceph's OSDs takes and returns: `cls/lock/cls_lock_ops.h`, in Ceph's encoding.
//!
//! A structure is a frame: its version, the oldest version that can read it, and its length in bytes. Later versions add
//! fields at the end.

use super::LOCK_NAME;

/// The type of an exclusive lock.
const EXCLUSIVE: u8 = 1;
/// The owner may have the lock already.
const MAY_RENEW: u8 = 1;
/// The type of clients among the entities of a cluster.
const CLIENT: u8 = 8;
/// The marker of an address that is a frame. The older encoding begins with 0.
const FRAMED_ADDRESS: u8 = 1;
/// Bytes of an address in the older encoding.
const OLD_ADDRESS: usize = 4 + 4 + 128;

/// The owner of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Locker {
    /// The client's number in the cluster.
    pub client: u64,
    /// Which of the client's locks it is.
    pub cookie: String,
    /// The description.
    pub mark: String,
    /// librbd's, which it must have.
    tag: String,
}

/// The input of `get_info`.
pub fn ask() -> Vec<u8> {
    frame(&text(&name()))
}

/// The input of `lock` for the owner of a lock, which gets another description.
pub fn mark_owner(owner: &Locker, mark: &str) -> Vec<u8> {
    let mut fields = text(&name());
    fields.push(EXCLUSIVE);
    fields.extend(text(&owner.cookie));
    fields.extend(text(&owner.tag));
    fields.extend(text(mark));
    // It does not expire.
    fields.extend([0; 8]);
    fields.push(MAY_RENEW);
    frame(&fields)
}

/// The input of `unlock`.
pub fn unlock(owner: &Locker) -> Vec<u8> {
    frame(&[text(&name()), text(&owner.cookie)].concat())
}

/// The input of `break_lock`.
pub fn break_owner(owner: &Locker) -> Vec<u8> {
    let mut fields = text(&name());
    fields.push(CLIENT);
    fields.extend(owner.client.to_le_bytes());
    fields.extend(text(&owner.cookie));
    frame(&fields)
}

fn name() -> String {
    LOCK_NAME.to_string_lossy().into_owned()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

fn frame(fields: &[u8]) -> Vec<u8> {
    [&[1, 1], &(fields.len() as u32).to_le_bytes()[..], fields].concat()
}

/// The owner of a lock, from the output of `get_info`; `None` if it is free.
///
/// # Errors
/// It is not in this encoding, or the lock is shared.
pub fn owner(answer: &[u8]) -> Result<Option<Locker>, &'static str> {
    let parsed = parse(&mut Reader(answer));
    parsed.unwrap_or(Err("the cluster's answer about the lock is not understood"))
}

fn parse(answer: &mut Reader<'_>) -> Option<Result<Option<Locker>, &'static str>> {
    let mut answer = answer.frame()?;
    let mut owner = match answer.u32()? {
        0 => return Some(Ok(None)),
        1 => {
            let mut id = answer.frame()?;
            let (kind, client, cookie) = (id.take(1)?[0], id.u64()?, id.text()?);
            let mut info = answer.frame()?;
            // When it expires.
            info.take(8)?;
            if info.0.first() == Some(&FRAMED_ADDRESS) {
                info.take(1)?;
                info.frame()?;
            } else {
                info.take(OLD_ADDRESS)?;
            }
            let mark = info.text()?;
            if kind != CLIENT {
                return None;
            }
            Locker {
                client,
                cookie,
                mark,
                tag: String::new(),
            }
        }
        _ => return Some(Err("several clients share the image's lock")),
    };
    let kind = answer.take(1)?[0];
    owner.tag = answer.text()?;
    if kind != EXCLUSIVE {
        return Some(Err("a client shares the image's lock"));
    }
    Some(Ok(Some(owner)))
}

/// Parses any answer, for the fuzz target. What is sent about an owner that it names is bounded by it, and well-formed.
#[cfg(any(test, fuzzing))]
pub fn check_answer(answer: &[u8]) {
    let Ok(Some(owner)) = owner(answer) else {
        return;
    };
    // A byte that is no text becomes a character of three.
    let bytes = owner.cookie.len() + owner.mark.len() + owner.tag.len();
    assert!(bytes <= 3 * answer.len());
    for sent in [unlock(&owner), break_owner(&owner), mark_owner(&owner, "m")] {
        let mut sent = Reader(&sent);
        let mut fields = sent.frame().expect("a frame");
        assert_eq!((fields.text(), sent.0.len()), (Some(name()), 0));
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<String> {
        let len = self.u32()? as usize;
        Some(String::from_utf8_lossy(self.take(len)?).into_owned())
    }

    fn frame(&mut self) -> Option<Self> {
        self.take(2)?;
        let len = self.u32()? as usize;
        Some(Self(self.take(len)?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As an OSD of Ceph 16 has sent it.
    const LOCKED: &[u8] = b"\x01\x01z\x00\x00\x00\x01\x00\x00\x00\x01\x01!\x00\x00\x00\x08\x11\x10\x00\x00\x00\x00\x00\x00\
        \x14\x00\x00\x00auto 140040697115424\x01\x01<\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x01\x01\x1c\x00\x00\x00\
        \x01\x00\x00\x00\x94[\x81E\x10\x00\x00\x00\x02\x00\x00\x00\x7f\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\r\x00\x00\
        \x00ringdisk 0123\x01\x08\x00\x00\x00internal";
    const FREE: &[u8] = b"\x01\x01\x11\x00\x00\x00\x00\x00\x00\x00\x01\x08\x00\x00\x00internal";

    #[test]
    fn owners_are_parsed() {
        let owner = Locker {
            client: 4113,
            cookie: "auto 140040697115424".into(),
            mark: "ringdisk 0123".into(),
            tag: "internal".into(),
        };
        assert_eq!(super::owner(LOCKED), Ok(Some(owner)));
        assert_eq!(super::owner(FREE), Ok(None));
        for len in 0..LOCKED.len() {
            assert!(super::owner(&LOCKED[..len]).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_answer_is_parsed_or_refused(
            at in 0..LOCKED.len(),
            bytes in prop::collection::vec(any::<u8>(), 1..9),
        ) {
            let mut answer = LOCKED.to_vec();
            let end = (at + bytes.len()).min(answer.len());
            answer[at..end].copy_from_slice(&bytes[..end - at]);
            check_answer(&answer);
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            check_answer(&bytes);
        }
    }

    #[test]
    fn fuzzing_seeds_are_valid() {
        let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/rbd_lock");
        for (name, bytes) in [("locked", LOCKED), ("free", FREE)] {
            assert_eq!(std::fs::read(format!("{seeds}/{name}")).unwrap(), bytes);
        }
        for seed in std::fs::read_dir(seeds).unwrap() {
            check_answer(&std::fs::read(seed.unwrap().path()).unwrap());
        }
    }
}
