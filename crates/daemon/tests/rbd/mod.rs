//! Disks that are images in a Ceph cluster: a real one, of a monitor and three OSDs, with cephx.

mod cluster;
mod disk;
mod driver;
mod faults;
mod guest;
