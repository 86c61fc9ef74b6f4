//! Disks on images in a real Ceph cluster, of one monitor and three OSDs, with cephx. All tests run on the
//! distribution's Ceph and on a newer one, whose librbd ringdisk then uses.

/// Makes tests of functions that take the version of Ceph to run on.
macro_rules! on_each_release {
    ($($test:ident),+ $(,)?) => {
        mod system {
            $(
                #[test]
                fn $test() {
                    super::$test(crate::rbd::cluster::CephVersion::System);
                }
            )+
        }

        mod newer {
            $(
                #[test]
                fn $test() {
                    super::$test(crate::rbd::cluster::CephVersion::Newer);
                }
            )+
        }
    };
}

mod blocklist;
mod cluster;
mod disk;
mod faults;
mod guest;
mod image_changes;
mod lab;
mod load;
mod resize;
