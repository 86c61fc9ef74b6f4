//! Disks that are images in a Ceph cluster: a real one, of a monitor and three OSDs, with cephx. All of it is tested on
//! the Ceph of the system, and on a newer one, which ringdisk then has librbd of.

/// Makes tests of functions that take [`Which`](cluster::Which) Ceph they are to run on.
macro_rules! on_each_release {
    ($($test:ident),+ $(,)?) => {
        mod system {
            $(
                #[test]
                fn $test() {
                    super::$test(crate::rbd::cluster::Which::System);
                }
            )+
        }

        mod newer {
            $(
                #[test]
                fn $test() {
                    super::$test(crate::rbd::cluster::Which::Newer);
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
mod load;
mod resize;
