//! `cargo xtask ceph`: a Ceph cluster on the loopback interface for experiments.

use anyhow::Result;
use clap::Subcommand;
use std::path::PathBuf;
use std::time::Instant;
use testkit::ceph::{self, Ceph, Options};

use crate::{packages, root};

/// Start or stop the cluster
#[derive(Subcommand)]
pub enum Args {
    /// Start a monitor, three OSDs with three copies of all data, cephx, a pool `rbd` and a user `vm`
    Up {
        /// The directory for its files
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,

        /// The number of OSDs, each with a copy of all data
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=5))]
        osds: u8,

        /// Keep objects in the OSDs' memory
        #[arg(long)]
        in_memory: bool,
    },
    /// Stop the cluster and remove its files
    Down {
        /// The directory with its files
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

/// Starts or stops the cluster.
pub fn run(args: &Args) -> Result<()> {
    let folder = |dir: &Option<PathBuf>| dir.clone().unwrap_or_else(|| root().join("target/ceph"));
    match args {
        Args::Up {
            dir,
            osds,
            in_memory,
        } => {
            packages::ceph::ensure()?;
            let start = Instant::now();
            let (osds, in_memory) = (usize::from(*osds), *in_memory);
            let ceph = Ceph::start_to_keep(
                &folder(dir),
                Options {
                    osds,
                    replicas: osds,
                    in_memory,
                    ..Options::default()
                },
            )?;
            let (conf, options) = (ceph.conf(), ceph.options());
            ceph.keep()?;
            println!(
                "Ceph runs after {:.1} s. To create an image and serve it:\n    rbd --conf {conf} create --size 10G \
                 rbd/vm1\n    ringdisk serve file=rbd:rbd/vm1{options}\n`cargo xtask ceph down` stops the cluster.",
                start.elapsed().as_secs_f64(),
                conf = conf.display()
            );
            Ok(())
        }
        Args::Down { dir } => ceph::shut_down(&folder(dir)),
    }
}
