//! Interfaces of a running server: QMP, metrics and statistics.

pub mod control_socket;
pub mod explain;
pub mod metrics;
pub mod qmp;
pub mod stats;
