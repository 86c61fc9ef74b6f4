//! Disks whose images map, through the whole data path: rings, I/O threads, the slow lane, and storage that fails,
//! delays and reorders.

mod astray;
mod bounced;
mod files;
mod flushes;
mod hung;
mod model;
mod zeroes;
