//! Commands that QEMU does not have. The prefix keeps their names apart from QEMU's (QAPI: "x-", and a vendor's name).

use super::FilePath;

record! {
    /// Arguments of `x-ringdisk-attach`.
    RingdiskAttach {
        /// The disk, in the syntax of `ringdisk serve`: `file=vm2.raw,name=vm2`.
        disk: String = "disk",
        /// The directory for relative paths in `disk`; the server's working directory if absent.
        directory: Option<FilePath> = "directory",
        /// Whether the command fails if the disk was moved from this file before, and the file has not changed since. False if
        /// absent.
        unless_left: Option<bool> = "unless-left",
    }
}

record! {
    /// Arguments of `x-ringdisk-check-file`.
    RingdiskCheckFile {
        /// The disk with that file, in the syntax of `ringdisk serve`.
        disk: String = "disk",
    }
}

record! {
    /// Arguments of `x-ringdisk-connect-info`.
    RingdiskConnectInfo {
        id: String = "id",
        /// The file from which the disk must be served. If it is served from another file, or another file has that name since,
        /// the command fails.
        file: Option<String> = "file",
    }
}

record! {
    /// Arguments of `x-ringdisk-resize`.
    RingdiskResize {
        id: String = "id",
        /// The new size in bytes, never less than the current size; the size of its file if absent.
        size: Option<u64> = "size",
    }
}

record! {
    /// Reply to `x-ringdisk-resize`.
    RingdiskResized {
        /// The size in bytes that the guest can address from now on.
        size: u64 = "size",
    }
}

record! {
    /// Arguments of `x-ringdisk-detach`.
    RingdiskDetach {
        id: String = "id",
        /// Whether a connected front-end is disconnected; otherwise the disk stays. False if absent.
        force: Option<bool> = "force",
        /// The file from which the disk must be served. If it is served from another file, the command fails.
        file: Option<String> = "file",
    }
}

record! {
    /// Arguments of `x-ringdisk-replace`.
    RingdiskReplace {
        id: String = "id",
        /// The file that contains the disk from now on.
        file: FilePath = "file",
        /// The format of that file. If absent, the file's name decides; if the name does not tell, it is the format of
        /// the previous file.
        format: Option<ImageFormat> = "format",
        /// The external data file of that image.
        data_file: Option<FilePath> = "data-file",
    }
}

words! {
    /// The format of a file.
    ImageFormat {
        /// The file contains the bytes of the disk.
        Raw = "raw",
        /// The file is a mapped image.
        Qcow2 = "qcow2",
    }
}

record! {
    /// Arguments of `x-ringdisk-resume`.
    RingdiskResume {
        id: String = "id",
        /// Whether the errors are reported to the guest; otherwise the requests are retried. False if absent.
        report: Option<bool> = "report",
    }
}
