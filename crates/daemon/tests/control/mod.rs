//! Changes to a running ringdisk: over its control socket, by the subcommands that use it, and by reloading a
//! configuration.

mod absent;
mod bitmaps;
mod bitmaps_of_images;
mod bitmaps_of_qemu;
mod bitmaps_of_raw;
mod bitmaps_on_full_volumes;
mod churn;
mod cli;
mod gone;
mod host_cpus;
mod limits;
mod named_files;
mod names_of_bitmaps;
mod older_images;
mod pairs;
mod persisted_state;
mod qemu_client;
mod qemu_errors;
mod reload;
mod reload_conflicts;
mod reload_restart;
mod rename;
mod replace;
pub mod server;
mod snapshot;
pub mod stored_disk;
mod unexpected_replies;
mod user_sockets;
