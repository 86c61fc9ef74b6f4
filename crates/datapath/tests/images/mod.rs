//! Disks with mapped images, through the whole data path: rings, I/O threads, the blocking pool, and storage that fails,
//! delays and reorders.

mod backup;
mod bounced;
mod files;
mod flushes;
mod hung;
mod misdirected;
mod model;
mod zeroes;
