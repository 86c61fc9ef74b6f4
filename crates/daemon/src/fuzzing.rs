//! Parsers of hostile input, for the fuzz targets. They panic if what they accept does not read back as it is written.

use crate::client::nbd_client;
use crate::config::Config;
use crate::config::spec::DiskSpec;
use crate::hook::libvirt;
use crate::node;
use crate::state::{Overrides, left};
use crate::upgrade::launch_record::LaunchRecord;
use crate::upgrade::protocol;

/// A disk of the command line.
pub fn disk_spec(text: &str) {
    match text.parse::<DiskSpec>() {
        Ok(disk) => {
            disk.assert_sound();
            assert_eq!(disk.to_string().parse(), Ok(disk));
        }
        // The message is made from the text as well.
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A configuration file.
pub fn config(text: &str) {
    Config::check(text);
}

/// A domain that libvirt gives to its hook.
pub fn domain(text: &str) {
    libvirt::check(text);
}

/// A state file, the list of the files that disks have left, or what guests depend on.
pub fn state(bytes: &[u8]) {
    Overrides::check(bytes);
    left::check(bytes);
    let mut read = Overrides::default();
    let guests = serde_json::from_slice(bytes);
    if guests.is_ok_and(|guests| read.set_guests(guests).is_ok()) {
        let text = serde_json::to_vec(&read.guests()).expect("a record");
        let again = serde_json::from_slice(&text).expect("what was written");
        let mut all = Overrides::default();
        all.set_guests(again).expect("numbers of queues");
        assert_eq!(all.remembered, read.remembered);
    }
}

/// The record of a disk's bitmaps in a state directory.
pub fn bitmap_record(bytes: &[u8]) {
    node::check_record(bytes);
}

/// A message of the handover protocol, and the description of how a process was launched.
pub fn handover(bytes: &[u8]) {
    protocol::check(bytes);
    LaunchRecord::check(bytes);
}

/// What an NBD server sends to a copy of a backup.
pub fn nbd_client(bytes: &[u8]) {
    nbd_client::check::check(bytes);
}
