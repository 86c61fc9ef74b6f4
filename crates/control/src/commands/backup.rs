//! Commands about backups: what disks were at one moment. The first two are those of Proxmox' QEMU.

record! {
    /// Arguments of `backup-access-setup`.
    BackupAccessSetup {
        /// The id of the backup.
        target_id: String = "target-id",
        devices: Vec<BackupAccessSourceDevice> = "devices",
        /// Bytes of old data of each disk in memory; 256 MiB if absent.
        memory: Option<u64> = "x-ringdisk-memory",
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
    }
}

words! {
    /// `BackupAccessSetupBitmapMode`
    BackupAccessSetupBitmapMode {
        /// No bitmap is used.
        None = "none",
        /// The backup is full. If it succeeds, the bitmap is created, or begins again.
        New = "new",
        /// The backup is incremental, with this bitmap.
        Use = "use",
        /// As `use` if the bitmap can be used, otherwise as `new`.
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
        /// The bitmap of an incremental backup; it belongs to the node of `node-name`.
        bitmap_name: Option<String> = "bitmap-name",
        bitmap_action: Option<BackupBitmapAction> = "bitmap-action",
    }
}

words! {
    /// `PBSBitmapAction`: what is done with the bitmap.
    BackupBitmapAction {
        NotUsed = "not-used",
        /// The backup is full; the bitmap is created if it succeeds.
        New = "new",
        /// The backup is incremental.
        Used = "used",
    }
}

record! {
    /// Arguments of `backup-access-teardown`.
    BackupAccessTeardown {
        /// The id of the backup.
        target_id: String = "target-id",
        /// Whether everything was copied: the bitmaps then have only what has changed since the moment.
        success: bool = "success",
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
        /// Why it has failed, if it has.
        error: Option<String> = "error",
    }
}
