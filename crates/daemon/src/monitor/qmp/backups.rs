//! Commands about backups.

use std::sync::Arc;
use std::time::Duration;

use block::DirtyBitmap;
use control::{
    BackupAccessInfo, BackupAccessSetup, BackupAccessSetupBitmapMode, BackupAccessTeardown,
    BackupBitmapAction, CommandError, PbsBitmapInfo, ProxmoxSupportStatus, Qapi, RingdiskBackup,
    RingdiskBackupEnd, RingdiskFullBackup,
};
use tracing::warn;

use super::{Reply, Run};
use crate::node::checkpoint::Checkpoint;
use crate::server::backup::{
    Backup, BackupDisk, BackupOptions, BackupTarget, BitmapMode, WantedBitmap, WhyFull,
};
use crate::server::error::BackupError;
use crate::server::{Server, ServerError};

/// How long a backup waits for other commands: its guests may be frozen.
const FROZEN: Duration = Duration::from_secs(1);

/// Nobody would know of a backup whose client has left before the reply, so it does not stay open. A client that has waited in
/// vain can hang up, and then end the backup of its token if there is one: it does not begin later.
pub(super) fn begin(run: &Run<'_>, wanted: BackupAccessSetup) -> Reply {
    let Run { server, client, .. } = run;
    let id = wanted.target_id;
    if client.has_left() {
        return Err(left(&id));
    }
    let target = |device: control::BackupAccessSourceDevice| {
        let mode = match device.bitmap_mode {
            None | Some(BackupAccessSetupBitmapMode::None) => None,
            Some(BackupAccessSetupBitmapMode::New) => Some(BitmapMode::New),
            Some(BackupAccessSetupBitmapMode::Use) => Some(BitmapMode::Use),
            Some(BackupAccessSetupBitmapMode::Auto) => Some(BitmapMode::Auto),
        };
        let since = device.since.map(|text| {
            let parsed = Checkpoint::parse(&text);
            parsed.ok_or(BackupError::NoCheckpoint(text))
        });
        let since = since.transpose().map_err(ServerError::from)?;
        let name = device.bitmap_name.unwrap_or_else(|| id.clone());
        Ok(BackupTarget {
            disk: device.device,
            bitmap: mode.map(|mode| WantedBitmap { name, mode, since }),
        })
    };
    let targets = wanted.devices.into_iter().map(target);
    let targets: Vec<_> = targets.collect::<Result<_, CommandError>>()?;
    let options = BackupOptions {
        memory: wanted.memory,
        token: wanted.token,
    };
    let disks: Vec<_> = targets.iter().map(|target| &target.disk).collect();
    let claim = run.claim_within(FROZEN, || server.names_in_backup(&id, &disks))?;
    let backup = server.begin_backup(&claim, &id, &targets, options)?;
    if client.has_left() {
        // It may have been ended already.
        let _ = server.cancel_backup(&id, Some(&backup.token));
        return Err(left(&id));
    }
    let infos: Vec<_> = backup.disks.iter().map(info).collect();
    Ok(infos.to_json())
}

fn left(id: &str) -> CommandError {
    warn!("backup '{id}': is not open, because its client has left before the reply");
    CommandError::generic("the client has left")
}

pub(super) fn end(run: &Run<'_>, which: &BackupAccessTeardown) -> Reply {
    let (server, id) = (run.server, &which.target_id);
    let token = which.token.as_deref();
    let checkpoint = if which.success {
        let claim = run.claim(|| server.backups.disks_of(id))?;
        server.end_backup(&claim, id, token)?
    } else {
        let cancelled = server.cancel_backup(id, token);
        // As in Proxmox' QEMU, where a client cleans up after a setup that has failed.
        if cancelled.is_err() && !server.backups.all().is_empty() {
            cancelled?;
        }
        None
    };
    let checkpoint = checkpoint.map(|checkpoint| checkpoint.to_string());
    Ok(RingdiskBackupEnd { checkpoint }.to_json())
}

pub(super) fn list(server: &Server) -> Reply {
    let all = server.backups.all();
    let all: Vec<_> = all.iter().map(|backup| state(backup)).collect();
    Ok(all.to_json())
}

fn state(backup: &Backup) -> RingdiskBackup {
    let usage = backup.disks.iter().map(|disk| disk.moment.fleece.usage());
    let (memory, file) = usage.fold((0, 0), |(memory, file), usage| {
        (memory + usage.memory, file + usage.file)
    });
    let snapshots = backup
        .disks
        .iter()
        .filter_map(|d| d.moment.snapshot.as_ref());
    RingdiskBackup {
        id: backup.id.clone(),
        devices: backup.disks.iter().map(info).collect(),
        held_us: backup.held.time.as_micros() as u64,
        memory,
        file,
        snapshots: snapshots.filter_map(|snapshot| snapshot.name()).collect(),
        error: backup.failure().or_else(|| backup.why_still_open()),
    }
}

fn info(disk: &BackupDisk) -> BackupAccessInfo {
    let bitmap = disk.bitmap.as_ref();
    // Proxmox' client wants a name with each action.
    BackupAccessInfo {
        node_name: disk.access.clone(),
        device: disk.device.disk.name.clone(),
        size: disk.moment.fleece.size(),
        bitmap_node_name: bitmap.map(|_| disk.node.name().to_owned()),
        bitmap_name: bitmap.map(|bitmap| bitmap.name.clone()),
        bitmap_action: bitmap.map(|_| action(disk)),
        checkpoint: bitmap.and_then(|bitmap| Some(bitmap.checkpoint.as_ref()?.to_string())),
        full: match bitmap.map(|bitmap| bitmap.why_full) {
            None => Some(RingdiskFullBackup::Wanted),
            Some(why) => why.map(why_full),
        },
    }
}

fn why_full(why: WhyFull) -> RingdiskFullBackup {
    match why {
        WhyFull::Wanted => RingdiskFullBackup::Wanted,
        WhyFull::Missing => RingdiskFullBackup::Missing,
        WhyFull::Inconsistent => RingdiskFullBackup::Inconsistent,
        WhyFull::Disabled => RingdiskFullBackup::Disabled,
        WhyFull::NoCheckpoint => RingdiskFullBackup::NoCheckpoint,
        WhyFull::OtherCheckpoint => RingdiskFullBackup::OtherCheckpoint,
        WhyFull::OtherDisk => RingdiskFullBackup::OtherDisk,
    }
}

fn action(disk: &BackupDisk) -> BackupBitmapAction {
    let Some(bitmap) = &disk.bitmap else {
        return BackupBitmapAction::NotUsed;
    };
    match (bitmap.why_full, bitmap.mode) {
        (None, _) => BackupBitmapAction::Used,
        (Some(_), BitmapMode::New | BitmapMode::Auto) => BackupBitmapAction::New,
        (Some(WhyFull::Missing), BitmapMode::Use) => BackupBitmapAction::MissingRecreated,
        (Some(_), BitmapMode::Use) => BackupBitmapAction::Invalid,
    }
}

pub(super) fn bitmaps(server: &Server) -> Reply {
    let all = server.backups.all();
    let disks = all.iter().flat_map(|backup| &backup.disks);
    let infos: Vec<_> = disks.map(bitmap_info).collect();
    Ok(infos.to_json())
}

fn bitmap_info(disk: &BackupDisk) -> PbsBitmapInfo {
    let size = disk.moment.fleece.size();
    let dirty = |bitmap: &Arc<DirtyBitmap>| bitmap.dirty_bits() * bitmap.granularity();
    PbsBitmapInfo {
        drive: disk.device.disk.name.clone(),
        action: action(disk),
        size,
        dirty: disk.moment.bitmaps.first().map_or(size, dirty).min(size),
    }
}

pub(super) fn proxmox_support() -> ProxmoxSupportStatus {
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
