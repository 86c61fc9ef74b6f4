//! Whether guests boot under KVM. Under some nested hypervisors, QEMU starts with KVM and no guest ever boots.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use harness::paths::cache_dir;

use crate::guest::{Accel, Boot, Guest, Kernel, Setup, Stop, accel, write_initramfs};
use crate::own_folder::OwnFolder;
use crate::plan::Settings;

/// A guest boots in 3 s; the host may be busy.
const LIMIT: Duration = Duration::from_secs(30);

/// The best accelerator under which a guest of the lab boots here, and why it is not KVM. The answer of a trial is stored
/// until the host reboots.
pub fn accel_of_guests(stop: &Stop) -> (Accel, Option<String>) {
    if accel() == Accel::Tcg {
        return (Accel::Tcg, Some("QEMU cannot use /dev/kvm".into()));
    }
    let stored = stored_answer();
    let answer = stored
        .as_ref()
        .and_then(|path| fs::read_to_string(path).ok());
    let answer = answer.unwrap_or_else(|| {
        eprintln!("ringdisk: trying whether a guest boots under KVM, for up to {LIMIT:?}");
        let answer = match boot(stop) {
            Ok(()) => WORKS.into(),
            Err(error) => format!("{error:#}\n"),
        };
        if let Some(path) = stored.filter(|_| !stop.is_wanted()) {
            // Without a stored answer, the next run tries again.
            let made = path.parent().map_or(Ok(()), fs::create_dir_all);
            let _ = made.and_then(|()| fs::write(path, &answer));
        }
        answer
    });
    if answer.starts_with(WORKS) {
        (Accel::Kvm, None)
    } else {
        let why = answer.lines().next().unwrap_or_default();
        (
            Accel::Tcg,
            Some(format!("a guest did not boot under it: {why}")),
        )
    }
}

/// The answer if it works. Other answers say why not.
const WORKS: &str = "works\n";

/// The file for the answer of a trial since the host has booted.
fn stored_answer() -> Option<PathBuf> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(cache_dir().join(format!("kvm-{}", boot.trim())))
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
