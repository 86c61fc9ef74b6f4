//! Commands about backups: what disks were at one moment. All but the list of backups are those of Proxmox' QEMU.

record! {
    /// Arguments of `backup-access-setup`.
    BackupAccessSetup {
        /// The id of the backup.
        target_id: String = "target-id",
        devices: Vec<BackupAccessSourceDevice> = "devices",
        /// Bytes of old data of each disk in memory; 256 MiB if absent.
        memory: Option<u64> = "x-ringdisk-memory",
        /// Names this backup for `backup-access-teardown`; others with this id have another one.
        token: Option<String> = "x-ringdisk-token",
    }
}

record! {
    /// `BackupAccessSourceDevice`: a disk to be backed up.
    BackupAccessSourceDevice {
        /// The disk, by its name.
        device: String = "device",
        /// What is done with a bitmap; none is used if absent.
        bitmap_mode: Option<BackupAccessSetupBitmapMode> = "bitmap-mode",
        /// The bitmap; the id of the backup if absent.
        bitmap_name: Option<String> = "bitmap-name",
        /// The checkpoint of the last backup that the client has. With it, the backup is incremental only if the bitmap has this
        /// checkpoint.
        since: Option<String> = "x-ringdisk-since",
    }
}

words! {
    /// `BackupAccessSetupBitmapMode`
    BackupAccessSetupBitmapMode {
        /// No bitmap is used.
        None = "none",
        /// The backup is full. If it succeeds, the bitmap is created, or begins again.
        New = "new",
        /// The backup is incremental, with this bitmap; if there is none that can be used, as `new`.
        Use = "use",
        /// As `use`, but a bitmap that is missing or cannot be used is not reported as such.
        Auto = "x-ringdisk-auto",
    }
}

record! {
    /// `BackupAccessInfo`: a disk at the moment of a backup.
    BackupAccessInfo {
        /// For `block-export-add`.
        node_name: String = "node-name",
        /// The disk.
        device: String = "device",
        /// Bytes of the disk at the moment.
        size: u64 = "size",
        /// The disk's node, if the backup has a bitmap.
        bitmap_node_name: Option<String> = "bitmap-node-name",
        /// The bitmap, which says what to copy; all bits are set if the backup is full.
        bitmap_name: Option<String> = "bitmap-name",
        bitmap_action: Option<BackupBitmapAction> = "bitmap-action",
        /// The checkpoint of the bitmap: the backup since which an incremental one has the changes.
        checkpoint: Option<String> = "x-ringdisk-checkpoint",
        /// Why the backup is full. Absent if it is incremental.
        full: Option<RingdiskFullBackup> = "x-ringdisk-full",
    }
}

words! {
    /// `RingdiskFullBackup`: why a backup is full.
    RingdiskFullBackup {
        /// The client wants that.
        Wanted = "wanted",
        /// There is no such bitmap.
        Missing = "missing",
        /// The bitmap lacks changes.
        Inconsistent = "inconsistent",
        /// The bitmap does not record changes.
        Disabled = "disabled",
        /// The client names a checkpoint, and the bitmap has none.
        NoCheckpoint = "no-checkpoint",
        /// The bitmap has another checkpoint than the one that the client names.
        OtherCheckpoint = "other-checkpoint",
        /// The bitmap has that checkpoint, and is that of another disk of the same backup.
        OtherDisk = "other-disk",
    }
}

words! {
    /// `PBSBitmapAction`: what is done with the bitmap. All but `used` are full backups, and the bitmap begins if they succeed.
    BackupBitmapAction {
        /// There is none.
        NotUsed = "not-used",
        /// As wanted.
        New = "new",
        /// The backup is incremental.
        Used = "used",
        /// The bitmap is inconsistent or disabled.
        Invalid = "invalid",
        /// There was no such bitmap.
        MissingRecreated = "missing-recreated",
    }
}

record! {
    /// `PBSBitmapInfo`: what a backup of a disk copies.
    PbsBitmapInfo {
        /// The disk.
        drive: String = "drive",
        action: BackupBitmapAction = "action",
        /// Bytes of the disk.
        size: u64 = "size",
        /// Bytes to be copied.
        dirty: u64 = "dirty",
    }
}

record! {
    /// `ProxmoxSupportStatus`: which commands of Proxmox' QEMU there are. Others are false.
    ProxmoxSupportStatus {
        /// `backup` with bitmaps.
        pbs_dirty_bitmap: bool = "pbs-dirty-bitmap",
        pbs_dirty_bitmap_savevm: bool = "pbs-dirty-bitmap-savevm",
        pbs_dirty_bitmap_migration: bool = "pbs-dirty-bitmap-migration",
        pbs_masterkey: bool = "pbs-masterkey",
        /// `query-pbs-bitmap-info`
        query_bitmap_info: bool = "query-bitmap-info",
        backup_max_workers: bool = "backup-max-workers",
        /// `backup` with fleecing.
        backup_fleecing: bool = "backup-fleecing",
        /// `backup-access-setup` and `backup-access-teardown`
        backup_access_api: bool = "backup-access-api",
    }
}

record! {
    /// Arguments of `backup-access-teardown`.
    BackupAccessTeardown {
        /// The id of the backup.
        target_id: String = "target-id",
        /// Whether everything was copied: the bitmaps then have only what has changed since the moment.
        success: bool = "success",
        /// Only a backup that was begun with it is ended.
        token: Option<String> = "x-ringdisk-token",
    }
}

record! {
    /// `RingdiskBackupEnd`: a backup that has ended.
    RingdiskBackupEnd {
        /// Names this backup for `x-ringdisk-since` of the next ones. Absent if it was no success, or had no bitmap.
        checkpoint: Option<String> = "x-ringdisk-checkpoint",
    }
}

record! {
    /// `RingdiskBackup`: an open backup.
    RingdiskBackup {
        id: String = "id",
        devices: Vec<BackupAccessInfo> = "devices",
        /// For how long no request of the guests was fetched, in microseconds.
        held_us: u64 = "held-us",
        /// Bytes of old data in memory.
        memory: u64 = "memory",
        /// Bytes of old data in the file.
        file: u64 = "file",
        /// Snapshots of images in Ceph clusters that exist for it, as in `pool/image@snapshot`.
        snapshots: Vec<String> = "snapshots",
        /// Why it has failed, if it has.
        error: Option<String> = "error",
    }
}
