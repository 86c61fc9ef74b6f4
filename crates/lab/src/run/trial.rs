//! Whether guests boot under KVM. Under some nested hypervisors, QEMU starts with KVM and no guest ever boots.

use std::time::Duration;

use anyhow::Result;

use crate::guest::{Accel, Boot, Guest, Kernel, Setup, Stop, accel, write_initramfs};
use crate::own_folder::OwnFolder;
use crate::plan::Settings;

/// A guest boots in 3 s; the host may be busy.
const LIMIT: Duration = Duration::from_secs(30);

/// The best accelerator under which a guest of the lab boots here, and why it is not KVM.
pub fn accel_of_guests(stop: &Stop) -> (Accel, Option<String>) {
    if accel() == Accel::Tcg {
        return (Accel::Tcg, Some("QEMU cannot use /dev/kvm".into()));
    }
    match boot(stop) {
        Ok(()) => (Accel::Kvm, None),
        Err(error) => (
            Accel::Tcg,
            Some(format!("a guest did not boot under it: {error:#}")),
        ),
    }
}

fn boot(stop: &Stop) -> Result<()> {
    let folder = OwnFolder::new(&std::env::temp_dir())?;
    let kernel = Kernel::find()?;
    let initramfs = folder.path().join("initramfs.cpio");
    write_initramfs(&initramfs, &kernel, &[])?;
    let setup = Setup {
        folder: folder.path().join("trial"),
        settings: Settings::default(),
        size: 0,
        volumes: Vec::new(),
        accel: Accel::Kvm,
        boot: Boot::Lab(kernel, initramfs),
    };
    Guest::start(&setup, stop)?.wait(LIMIT, stop)
}
