//! Disks on images in a real Ceph cluster, of one monitor and three OSDs, with cephx. All tests run on the
//! distribution's Ceph and on a newer one, whose librbd ringdisk then uses.

/// Makes tests of functions that take the version of Ceph to run on. The names of a function's tests are adjacent, so that
/// tests on both clusters run at the same time.
macro_rules! on_each_release {
    ($($test:ident),+ $(,)?) => {
        $(
            mod $test {
                #[test]
                fn newer() {
                    super::$test(crate::rbd::cluster::CephVersion::Newer);
                }

                #[test]
                fn system() {
                    super::$test(crate::rbd::cluster::CephVersion::System);
                }
            }
        )+
    };
}

mod backup;
mod bitmaps;
mod blocklist;
mod cluster;
mod disk;
mod faults;
mod guest;
mod image_changes;
mod lab;
mod load;
mod lock;
mod resize;
mod snapshots;
