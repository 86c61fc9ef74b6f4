//! Commands about dirty bitmaps.

record! {
    /// Arguments of `block-dirty-bitmap-add`.
    BlockDirtyBitmapAdd {
        /// The disk, by the name of its node.
        node: String = "node",
        name: String = "name",
        /// Bytes of the disk for each bit, a power of two; if absent, the cluster size of the image, from 4 KiB to 64
        /// KiB.
        granularity: Option<u32> = "granularity",
        /// Whether the bitmap is stored when the disk is no longer in use; false if absent.
        persistent: Option<bool> = "persistent",
        /// Whether the bitmap records nothing at first; false if absent.
        disabled: Option<bool> = "disabled",
    }
}

record! {
    /// `BlockDirtyBitmap`: a bitmap of a disk.
    BlockDirtyBitmap {
        /// The disk, by the name of its node.
        node: String = "node",
        name: String = "name",
    }
}

record! {
    /// Arguments of `block-dirty-bitmap-merge`.
    BlockDirtyBitmapMerge {
        /// The disk of the target, by the name of its node.
        node: String = "node",
        /// The bitmap that gets the bits of the others.
        target: String = "target",
        bitmaps: Vec<BlockDirtyBitmapOrStr> = "bitmaps",
    }
}

alternate! {
    /// `BlockDirtyBitmapOrStr`
    BlockDirtyBitmapOrStr = "BlockDirtyBitmapOrStr" {
        /// A bitmap of the disk that the command is about, by its name.
        Local(String) if is_string,
        /// A bitmap of any disk of the same size.
        External(BlockDirtyBitmap) if is_object,
    }
}

record! {
    /// Arguments of `transaction`.
    Transaction {
        /// What is done, all of it or nothing, at one moment for all disks.
        actions: Vec<TransactionAction> = "actions",
        properties: Option<TransactionProperties> = "properties",
    }
}

record! {
    /// `TransactionProperties`
    TransactionProperties {
        /// Whether jobs that the actions start succeed together; without effect, since none of the actions starts a job.
        completion_mode: Option<ActionCompletionMode> = "completion-mode",
    }
}

words! {
    /// `ActionCompletionMode`
    ActionCompletionMode {
        Individual = "individual",
        Grouped = "grouped",
    }
}

union! {
    /// `TransactionAction`
    TransactionAction {}
    /// The kind of action.
    action: TransactionActionKind = "type" {
        /// Always fails: for tests.
        Abort(AbortWrapper) = "abort",
        /// As `block-dirty-bitmap-add`.
        BitmapAdd(BlockDirtyBitmapAddWrapper) = "block-dirty-bitmap-add",
        /// As `block-dirty-bitmap-remove`.
        BitmapRemove(BlockDirtyBitmapWrapper) = "block-dirty-bitmap-remove",
        /// As `block-dirty-bitmap-clear`.
        BitmapClear(BlockDirtyBitmapWrapper) = "block-dirty-bitmap-clear",
        /// As `block-dirty-bitmap-enable`.
        BitmapEnable(BlockDirtyBitmapWrapper) = "block-dirty-bitmap-enable",
        /// As `block-dirty-bitmap-disable`.
        BitmapDisable(BlockDirtyBitmapWrapper) = "block-dirty-bitmap-disable",
        /// As `block-dirty-bitmap-merge`.
        BitmapMerge(BlockDirtyBitmapMergeWrapper) = "block-dirty-bitmap-merge",
    }
}

record! {
    /// `Abort`
    Abort {}
}

record! {
    /// `AbortWrapper`
    AbortWrapper {
        data: Abort = "data",
    }
}

record! {
    /// `BlockDirtyBitmapAddWrapper`
    BlockDirtyBitmapAddWrapper {
        data: BlockDirtyBitmapAdd = "data",
    }
}

record! {
    /// `BlockDirtyBitmapWrapper`
    BlockDirtyBitmapWrapper {
        data: BlockDirtyBitmap = "data",
    }
}

record! {
    /// `BlockDirtyBitmapMergeWrapper`
    BlockDirtyBitmapMergeWrapper {
        data: BlockDirtyBitmapMerge = "data",
    }
}
