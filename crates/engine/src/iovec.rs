//! Lists of segments as system calls take them.

use block::Segment;

/// Maximum number of segments in one operation (UIO_MAXIOV).
pub(crate) const SEGMENTS_MAX: usize = 1024;

/// Converts a list of segments for the kernel, which accepts at most [`SEGMENTS_MAX`] of them: an operation
/// on a longer list completes short. A [`Segment`] is laid out like an iovec.
pub(crate) fn iovec(segments: &[Segment]) -> (*const libc::iovec, u32) {
    const {
        assert!(size_of::<Segment>() == size_of::<libc::iovec>());
        assert!(align_of::<Segment>() == align_of::<libc::iovec>());
    }
    (
        segments.as_ptr().cast(),
        segments.len().min(SEGMENTS_MAX) as u32,
    )
}
