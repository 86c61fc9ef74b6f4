//! What a host needs to run guests, and its accelerator.

use super::{Accel, Kernel, Vm, cache_dir, find_program};
use anyhow::{Context, Result, anyhow};
use harness::qemu;
use std::fs;
use std::sync::OnceLock;
use std::time::Duration;

/// What is missing to run guests here, and how to get it; `None` if nothing is.
pub fn missing(fio: bool) -> Option<String> {
    if !cfg!(target_arch = "x86_64") {
        return Some("guests are x86-64 only".into());
    }
    let mut programs = vec![
        "setpriv",
        "ldd",
        "qemu-system-x86_64",
        "busybox",
        "mkfs.ext4",
        "e2fsck",
        "sfdisk",
    ];
    programs.extend(fio.then_some("fio"));
    let mut missing: Vec<String> = Vec::new();
    missing.extend(
        programs
            .into_iter()
            .filter(|name| find_program(name).is_none())
            .map(String::from),
    );
    missing.extend(Kernel::cached().err().map(|_| "a guest kernel".into()));
    (!missing.is_empty()).then(|| {
        format!(
            "{} missing; `cargo xtask install` installs it",
            missing.join(", ")
        )
    })
}

/// The best accelerator that can boot a guest here.
///
/// That QEMU starts with KVM proves little: under some nested hypervisors a stock kernel then never boots. So it is
/// tried once, with a short limit, and the result is cached until the host reboots.
///
/// # Errors
/// The result cannot be cached.
pub fn accel() -> Result<Accel> {
    static ACCEL: OnceLock<Result<Accel, String>> = OnceLock::new();
    ACCEL
        .get_or_init(|| find_accel().map_err(|error| format!("{error:#}")))
        .clone()
        .map_err(|error| anyhow!(error))
}

fn find_accel() -> Result<Accel> {
    if qemu::accel() == Accel::Tcg {
        return Ok(Accel::Tcg);
    }
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .context("reading the host's boot id")?;
    let answer = cache_dir().join(format!("kvm-{}", boot.trim()));
    if let Ok(answer) = fs::read_to_string(&answer) {
        return Ok(if answer.starts_with("works") {
            Accel::Kvm
        } else {
            Accel::Tcg
        });
    }
    Kernel::cached()?; // without a kernel the trial would fail for the wrong reason
    fs::create_dir_all(cache_dir()).with_context(|| format!("making {}", cache_dir().display()))?;
    let folder = tempfile::tempdir().context("making a folder for the KVM trial")?;
    let trial = Vm::new(folder.path()).run_with(Accel::Kvm, "true", KVM_TRIAL, &mut |_, _| {});
    let (accel, text) = match trial {
        Ok(_) => (Accel::Kvm, "works\n".into()),
        Err(error) => (Accel::Tcg, format!("does not work: {error:#}\n")),
    };
    fs::write(&answer, text).with_context(|| format!("writing {}", answer.display()))?;
    Ok(accel)
}

/// A guest boots in 2 s under a working KVM. The host may be busy, and the one-time cost must stay acceptable.
const KVM_TRIAL: Duration = Duration::from_secs(20);
