//! `cargo xtask bench --ceph`: the plan `bench-ceph` of the lab on a cluster of one OSD with its objects in memory.
//!
//! All on one machine: the OSD that answers takes cores from who asks, so that the figure that counts is the client's CPU
//! time per I/O.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use testkit::ceph::{Ceph, Options};

use super::Bench;
use super::plans::Changes;
use crate::packages;

/// What to measure on a Ceph cluster
#[derive(clap::Args)]
#[group(skip)]
pub struct Args {
    /// Measure RBD images on a Ceph cluster that is started for it, with --rounds, --runtime and --depth
    #[arg(long)]
    pub ceph: bool,

    /// With --ceph: a library for LD_PRELOAD (an allocator) of all contestants
    #[arg(long, value_name = "PATH", requires = "ceph")]
    preload: Option<PathBuf>,

    /// With --ceph: options of librbd and librados instead of those of the plan, as in rbd_cache=false; repeatable
    #[arg(long, value_name = "KEY=VALUE", requires = "ceph")]
    rbd_option: Vec<String>,
}

/// Starts a cluster, and measures on it.
pub fn run(bench: &Bench) -> Result<()> {
    packages::ceph::ensure()?;
    let folder = bench.dir.join("ceph");
    let result = bench.dir.join("bench-ceph");
    for old in [&folder, &result] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("removing {}", old.display()))?;
        }
    }
    let options = Options {
        osds: 1,
        replicas: 1,
        in_memory: true,
        ..Options::default()
    };
    let ceph = Ceph::start(&folder, options)?;
    let args = &bench.args;
    let mut changes = Changes::of(bench)?;
    changes.set("config.ceph-conf", ceph.conf().display());
    changes.set("config.ceph-keyring", ceph.vm_keyring().display());
    changes.set("config.ceph-user", "vm");
    if let Some(library) = &args.ceph.preload {
        let library = std::path::absolute(library)?;
        changes.set("config.preload", library.display());
    }
    if !args.ceph.rbd_option.is_empty() {
        changes.set("config.ceph-options", args.ceph.rbd_option.join(" "));
    }
    if !args.depth.is_empty() {
        let depths: Vec<String> = args.depth.iter().map(usize::to_string).collect();
        changes.only("iodepth", depths.join(","));
    }
    let mut command = bench.lab("bench-ceph", &result, &changes);
    command.arg("--overwrite");
    let status = command.status().context("starting the lab")?;
    ensure!(status.success(), "the lab failed: {status}");
    Ok(())
}
