//! Where an image has data, from its object map.
//!
//! The map says which of the image's objects (4 MiB by default) exist. It is asked only if the image has the feature
//! `fast-diff` and its map is valid. Otherwise librbd would ask for each object, and a backup of a large image would wait
//! for it longer than it takes to read holes.

use std::ffi::{c_int, c_void};
use std::ptr;

use block::DataExtents;

use crate::library::{Library, Pointer};

/// RBD_FEATURE_STRIPINGV2 of `rbd/features.h`.
const FEATURE_STRIPING: u64 = 1 << 1;
/// RBD_FEATURE_FAST_DIFF
const FEATURE_FAST_DIFF: u64 = 1 << 4;
/// RBD_FLAG_OBJECT_MAP_INVALID and RBD_FLAG_FAST_DIFF_INVALID of `rbd/librbd.h`
const FLAGS_INVALID: u64 = 1 << 0 | 1 << 1;

/// librbd 1.16 and older report wrong offsets of data that a clone shares with its parent (Ceph's issue 53784).
const VERSION_OF_CLONES: (c_int, c_int) = (1, 17);

/// The largest part that is asked for at once. The map is read as a whole whatever the part is.
const PART_BYTES_MAX: u64 = 1 << 40;

/// The most extents of a part, which ends after them. A reply to an NBD client has fewer.
const EXTENTS_MAX: usize = 64 << 10;

/// Ends the iteration; no errno of the system or of Ceph.
const STOP: c_int = -9000;

/// The parts of a range that may have data, with whole objects. `None` if there is no valid map.
///
/// # Errors
/// What librbd returned.
///
/// # Safety
/// `image` must be an open image.
pub(crate) unsafe fn data_in(
    library: &Library,
    image: Pointer,
    (at, len): (u64, u64),
) -> Result<Option<DataExtents>, c_int> {
    let check = |result: c_int| if result < 0 { Err(result) } else { Ok(()) };
    let (mut features, mut flags, mut overlap, mut object, mut size) = (0, 0, 0, 0, 0);
    // SAFETY: the image is open; each call writes one number.
    unsafe {
        check((library.rbd_get_features)(image, &mut features))?;
        check((library.rbd_get_flags)(image, &mut flags))?;
        check((library.rbd_get_overlap)(image, &mut overlap))?;
        // The size of an object, unless the image is striped.
        check((library.rbd_get_stripe_unit)(image, &mut object))?;
        check((library.rbd_get_size)(image, &mut size))?;
    }
    let is_known = features & (FEATURE_FAST_DIFF | FEATURE_STRIPING) == FEATURE_FAST_DIFF
        && flags & FLAGS_INVALID == 0
        && (overlap == 0 || library.version() >= VERSION_OF_CLONES);
    if !is_known || object == 0 || at >= size {
        return Ok(None);
    }
    // librbd before 16.2.8 reports wrong offsets if the range does not begin with an object (issue 53784, too).
    let from = at / object * object;
    let to = at.saturating_add(len.min(PART_BYTES_MAX)).min(size);
    let mut found = Found(DataExtents {
        from,
        to,
        data: Vec::new(),
    });
    let arg = ptr::from_mut(&mut found).cast();
    // SAFETY: the image is open; librbd calls `found_extent` with `arg` before it returns, from one thread at a time.
    let ended = unsafe {
        (library.rbd_diff_iterate2)(image, ptr::null(), from, to - from, 1, 1, found_extent, arg)
    };
    if ended != STOP {
        check(ended)?;
    }
    Ok(Some(found.0))
}

extern "C" fn found_extent(at: u64, len: usize, exists: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: `data_in` passes this, and does not use it meanwhile.
    let found = unsafe { &mut *arg.cast::<Found>() };
    if exists == 0 || found.add(at, len as u64) {
        0
    } else {
        STOP
    }
}

/// What was found so far.
struct Found(DataExtents);

impl Found {
    /// Adds an extent with data. Returns false if nothing can be added any more: what lies behind is not part of the result.
    fn add(&mut self, at: u64, len: u64) -> bool {
        let DataExtents { from, to, data } = &mut self.0;
        let end = at.saturating_add(len).min(*to);
        let at = at.max(*from);
        if at >= end {
            return true;
        }
        let is_full = data.len() == EXTENTS_MAX;
        match data.last_mut() {
            Some(&mut (begin, _)) if at < begin => {
                // Out of order, which librbd never was: all of it counts as data.
                *data = vec![(*from, *to)];
                return false;
            }
            Some(last) if at <= last.1 => last.1 = last.1.max(end),
            _ if is_full => {
                *to = at;
                return false;
            }
            _ => data.push((at, end)),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found() -> Found {
        Found(DataExtents {
            from: 1000,
            to: 9000,
            data: Vec::new(),
        })
    }

    #[test]
    fn extents_are_joined_and_inside_the_part() {
        let mut all = found();
        for (at, len) in [(0, 1000), (900, 200), (1100, 50), (3000, 0), (4000, 1000)] {
            assert!(all.add(at, len));
        }
        assert!(all.add(8000, 5000) && all.add(9000, 1));
        assert_eq!(all.0.data, [(1000, 1150), (4000, 5000), (8000, 9000)]);
        assert_eq!(all.0.beginning(1050, 9999), Some((100, true)));
        assert_eq!(all.0.beginning(1150, 100), Some((100, false)));
        assert_eq!(all.0.beginning(5000, 9999), Some((3000, false)));
        assert_eq!(all.0.beginning(8999, 9999), Some((1, true)));
        assert_eq!(
            (all.0.beginning(999, 1), all.0.beginning(9000, 1)),
            (None, None)
        );
    }

    #[test]
    fn what_was_not_found_in_order_counts_as_data() {
        let mut all = found();
        assert!(all.add(3000, 100) && !all.add(2000, 100));
        assert_eq!(all.0.beginning(1000, 9999), Some((8000, true)));
    }

    #[test]
    fn extents_are_limited() {
        let mut all = Found(DataExtents {
            from: 0,
            to: u64::MAX,
            data: Vec::new(),
        });
        let limit = (0..).find(|&at| !all.add(at * 10, 5)).unwrap();
        assert_eq!(limit, EXTENTS_MAX as u64);
        assert_eq!((all.0.to, all.0.data.len()), (limit * 10, EXTENTS_MAX));
    }
}
