//! What QEMU has no command for. The prefix keeps these names out of the way of QEMU's (QAPI: "x-", and a vendor's name).

use super::FilePath;

record! {
    /// Arguments of `x-ringdisk-attach`.
    RingdiskAttach {
        /// The disk, as `ringdisk serve` takes it: `file=vm2.raw,name=vm2`.
        disk: String = "disk",
        /// What relative paths in it are relative to; the server's working directory if absent.
        directory: Option<FilePath> = "directory",
    }
}

record! {
    /// Arguments of `x-ringdisk-resize`.
    RingdiskResize {
        /// The name of the disk.
        id: String = "id",
        /// Bytes, never less than now; what its file has if absent.
        size: Option<u64> = "size",
    }
}

record! {
    /// Reply to `x-ringdisk-resize`.
    RingdiskResized {
        /// Bytes that the guest can address from now on.
        size: u64 = "size",
    }
}

record! {
    /// Arguments of `x-ringdisk-detach`.
    RingdiskDetach {
        /// The name of the disk.
        id: String = "id",
        /// Whether a front-end that is connected is cut off; if not, the disk stays. False if absent.
        force: Option<bool> = "force",
    }
}

record! {
    /// Arguments of `x-ringdisk-replace`.
    RingdiskReplace {
        /// The name of the disk.
        id: String = "id",
        /// The file that is to hold it from now on.
        file: FilePath = "file",
        /// The format of that file; what its name says if absent, or else the format of the file before.
        format: Option<ImageFormat> = "format",
    }
}

words! {
    /// The format of a file.
    ImageFormat {
        /// Every byte of it is the disk's.
        Raw = "raw",
        /// It goes by tables.
        Qcow2 = "qcow2",
    }
}

record! {
    /// Arguments of `x-ringdisk-resume`.
    RingdiskResume {
        /// The name of the disk.
        id: String = "id",
        /// Whether the guest is told of the errors; if not, the requests are tried again. False if absent.
        report: Option<bool> = "report",
    }
}
