//! A server without disks: it answers as a real one would, from what it is told.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use block::{DetectZeroes, ThrottleLimits};
use control::*;
use serde_json::{Value, json};
use tempfile::TempDir;

/// `FakeDisks` behind a socket, a thread for each client.
pub struct Server {
    directory: TempDir,
    hub: Arc<EventHub>,
    accepting: JoinHandle<Vec<JoinHandle<()>>>,
}

impl Server {
    pub fn start() -> Self {
        let directory = TempDir::new().unwrap();
        let listener = UnixListener::bind(directory.path().join("control.sock")).unwrap();
        let hub = EventHub::new();
        let disks = Arc::new(FakeDisks {
            hub: Arc::clone(&hub),
            ..FakeDisks::default()
        });
        let accepting_hub = Arc::clone(&hub);
        let accepting = thread::spawn(move || {
            let mut sessions = Vec::new();
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                let Ok(events) = accepting_hub.subscribe() else {
                    break; // the hub is closed, or too many: the client sees it hang up
                };
                let disks = Arc::clone(&disks);
                sessions.push(thread::spawn(move || {
                    serve_socket(&stream, &events, &*disks).unwrap();
                }));
            }
            sessions
        });
        Self {
            directory,
            hub,
            accepting,
        }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("control.sock")
    }

    pub fn hub(&self) -> &EventHub {
        &self.hub
    }

    /// Waits until every session has ended, as they do when the hub is closed.
    pub fn join(self) {
        // One that comes too late lets the thread that accepts end.
        let _ = std::os::unix::net::UnixStream::connect(self.path());
        for session in self.accepting.join().unwrap() {
            session.join().unwrap();
        }
    }
}

pub fn io_error(reason: &str) -> Event {
    Event::BlockIoError(BlockIoError {
        qom_path: None,
        device: "e1".into(),
        node_name: Some("vm1".into()),
        operation: IoOperationType::Write,
        action: BlockErrorAction::Report,
        nospace: Some(true),
        reason: reason.into(),
    })
}

/// Knows nodes and exports by their names only.
#[derive(Default)]
pub struct FakeDisks {
    nodes: Mutex<Vec<(String, String)>>,
    exports: Mutex<Vec<(String, String)>>,
    limits: Mutex<ThrottleLimits>,
    hub: Arc<EventHub>,
}

impl Handler for FakeDisks {
    fn execute(&self, command: Command) -> Result<Value, CommandError> {
        let mut nodes = self.nodes.lock().unwrap();
        let mut exports = self.exports.lock().unwrap();
        match command {
            Command::BlockdevAdd(options) => {
                let name = options.root_node_name()?.to_string();
                nodes.push((name, options.driver.word().to_owned()));
            }
            Command::BlockdevDel(BlockdevDel { node_name }) => {
                let missing = || CommandError::generic(format!("there is no node '{node_name}'"));
                let index = nodes.iter().position(|node| node.0 == node_name);
                nodes.remove(index.ok_or_else(missing)?);
            }
            Command::BlockExportAdd(options) => {
                exports.push((options.id.to_string(), options.node_name));
            }
            Command::BlockExportDel(BlockExportDel { id, .. }) => {
                exports.retain(|export| export.0 != id);
                let deleted = BlockExportDeleted { id };
                self.hub.emit(&Event::BlockExportDeleted(deleted));
            }
            Command::BlockSetIoThrottle(throttle) => {
                *self.limits.lock().unwrap() = throttle.limits;
            }
            Command::QueryBlockExports(_) => {
                let info = |(id, node_name): &(String, String)| BlockExportInfo {
                    id: id.clone(),
                    kind: ExportKind::VhostUserBlk,
                    node_name: node_name.clone(),
                    shutting_down: false,
                };
                return Ok(exports.iter().map(info).collect::<Vec<_>>().to_json());
            }
            Command::QueryNamedBlockNodes(_) => {
                let limits = *self.limits.lock().unwrap();
                let info = |(name, drv): &(String, String)| node_info(name, drv, limits);
                return Ok(nodes.iter().map(info).collect::<Vec<_>>().to_json());
            }
            Command::QueryBlockstats(_) => {
                let info = |(name, _): &(String, String)| BlockStats {
                    device: None,
                    node_name: Some(name.clone()),
                    stats: BlockDeviceStats::default(),
                };
                return Ok(nodes.iter().map(info).collect::<Vec<_>>().to_json());
            }
            Command::QueryIothreads(_) => {
                let info = IoThreadInfo {
                    id: "iothread0".into(),
                    thread_id: 4711,
                    poll_max_ns: 100_000,
                    poll_grow: 0,
                    poll_shrink: 0,
                    aio_max_batch: 0,
                };
                return Ok(vec![info].to_json());
            }
            Command::RingdiskAttach(RingdiskAttach { disk, .. }) => {
                return Ok(json!({ "name": disk, "socket": format!("/run/{disk}.sock") }));
            }
            Command::RingdiskConnectInfo(wanted) => return Ok(json!({ "name": wanted.id })),
            Command::RingdiskResize(RingdiskResize { size, .. }) => {
                let size = size.unwrap_or(1 << 30);
                return Ok(RingdiskResized { size }.to_json());
            }
            Command::RingdiskExplain(_) => return Ok(json!([])),
            Command::RingdiskStats(_) => return Ok(json!({ "anything": [1, 2] })),
            Command::RingdiskDetach(RingdiskDetach { id, .. }) => {
                let desc = format!("there is no disk '{id}'");
                return Err(CommandError::device_not_found(desc));
            }
            Command::BackupAccessSetup(_)
            | Command::QueryPbsBitmapInfo(_)
            | Command::RingdiskBackups(_) => return Ok(json!([])),
            Command::QueryProxmoxSupport(_) => return Ok(proxmox_support().to_json()),
            Command::BackupAccessTeardown(_)
            | Command::BlockDirtyBitmapAdd(_)
            | Command::BlockDirtyBitmapClear(_)
            | Command::BlockDirtyBitmapDisable(_)
            | Command::BlockDirtyBitmapEnable(_)
            | Command::BlockDirtyBitmapMerge(_)
            | Command::BlockDirtyBitmapRemove(_)
            | Command::Transaction(_)
            | Command::BlockResize(_)
            | Command::NbdServerStart(_)
            | Command::NbdServerStop(_)
            | Command::ObjectAdd(_)
            | Command::ObjectDel(_)
            | Command::Quit(_)
            | Command::RingdiskNbd(_)
            | Command::RingdiskReload(_)
            | Command::RingdiskReplace(_)
            | Command::RingdiskCheckFile(_)
            | Command::RingdiskResume(_) => {}
        }
        Ok(json!({}))
    }
}

fn proxmox_support() -> ProxmoxSupportStatus {
    ProxmoxSupportStatus {
        pbs_dirty_bitmap: false,
        pbs_dirty_bitmap_savevm: false,
        pbs_dirty_bitmap_migration: false,
        pbs_masterkey: false,
        query_bitmap_info: true,
        backup_max_workers: false,
        backup_fleecing: false,
        backup_access_api: true,
    }
}

fn node_info(name: &str, drv: &str, limits: ThrottleLimits) -> BlockDeviceInfo {
    BlockDeviceInfo {
        node: BlockNodeInfo {
            file: "/disk".into(),
            node_name: Some(name.into()),
            ro: false,
            drv: drv.into(),
            backing_file_depth: 0,
            active: true,
            encrypted: false,
            detect_zeroes: DetectZeroes::Off,
            image: ImageInfo {
                filename: "/disk".into(),
                format: drv.into(),
                virtual_size: 1 << 30,
                actual_size: Some(4096),
            },
            dirty_bitmaps: None,
            cache: BlockdevCacheInfo {
                writeback: true,
                direct: true,
                no_flush: false,
            },
            write_threshold: 0,
        },
        limits,
        group: None,
    }
}
