//! Commands about backups.

use control::{
    BackupAccessInfo, BackupAccessSetup, BackupAccessSetupBitmapMode, BackupAccessTeardown,
    BackupBitmapAction, Qapi, RingdiskBackup,
};

use super::{Reply, done};
use crate::server::Server;
use crate::server::backup::{Backup, BackupDisk, BackupTarget, BitmapMode};

pub(super) fn begin(server: &Server, wanted: BackupAccessSetup) -> Reply {
    let id = wanted.target_id;
    let target = |device: control::BackupAccessSourceDevice| {
        let mode = match device.bitmap_mode {
            None | Some(BackupAccessSetupBitmapMode::None) => None,
            Some(BackupAccessSetupBitmapMode::New) => Some(BitmapMode::New),
            Some(BackupAccessSetupBitmapMode::Use) => Some(BitmapMode::Use),
            Some(BackupAccessSetupBitmapMode::Auto) => Some(BitmapMode::Auto),
        };
        let name = device.bitmap_name.unwrap_or_else(|| id.clone());
        BackupTarget {
            disk: device.device,
            bitmap: mode.map(|mode| (name, mode)),
        }
    };
    let targets: Vec<_> = wanted.devices.into_iter().map(target).collect();
    let backup = server.begin_backup(&id, &targets, wanted.memory)?;
    let infos: Vec<_> = backup.disks.iter().map(info).collect();
    Ok(infos.to_json())
}

pub(super) fn end(server: &Server, which: &BackupAccessTeardown) -> Reply {
    done(server.end_backup(&which.target_id, which.success))
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
    RingdiskBackup {
        id: backup.id.clone(),
        devices: backup.disks.iter().map(info).collect(),
        held_us: backup.held.time.as_micros() as u64,
        memory,
        file,
        error: backup.failure(),
    }
}

fn info(disk: &BackupDisk) -> BackupAccessInfo {
    let bitmap = disk.bitmap.as_ref();
    BackupAccessInfo {
        node_name: disk.access.clone(),
        device: disk.device.disk.name.clone(),
        size: disk.moment.fleece.size(),
        bitmap_name: bitmap.filter(|b| b.is_used).map(|b| b.name.clone()),
        bitmap_action: Some(match bitmap {
            None => BackupBitmapAction::NotUsed,
            Some(bitmap) if bitmap.is_used => BackupBitmapAction::Used,
            Some(_) => BackupBitmapAction::New,
        }),
    }
}
