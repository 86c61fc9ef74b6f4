//! The command line of `ringdisk lab`.

use std::path::PathBuf;

use ::lab::commands::{self, CompareOptions, Failed, RunOptions};
use ::lab::study::Storage;
use ::lab::study::run::{StudyOptions, study};
use clap::{Subcommand, ValueEnum};

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk lab run aio-iothread                  a recipe; 'ringdisk lab recipes' lists them
  ringdisk lab run my-plan.toml --budget 30m     your own plan
  ringdisk lab compare ringdisk qemu --disk /dev/vg0/test
  ringdisk lab report RESULT                     HTML, CSV and JSON again, without running

docs/lab.md describes plans, statistics and reports. Exit codes: 0 done, 1 failed, 2 wrong usage or an error in a
plan; 'gate' and 'diff': 3 worse, 4 not comparable.")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a recipe or a plan
    Run(Run),
    /// List the recipes, or print one as a plan
    #[command(after_help = "Examples:
  ringdisk lab recipes
  ringdisk lab recipes versus > my-plan.toml     a copy to edit and run")]
    Recipes {
        /// Print this recipe
        name: Option<String>,
    },
    /// Reproduce a published study on your storage
    Study(Study),
    /// Compare configurations of one of your disks
    Compare(Compare),
    /// Write a result's report, tables and recommendation again
    #[command(after_help = "Example:
  ringdisk lab report lab-versus --output /var/www/versus

Runs nothing. Writes report.html, result.json, cells.csv and measured.json, also for a run that was killed.")]
    Report {
        /// A result's folder, or a journal
        result: PathBuf,
        /// The folder for the files; default: the result's folder. A bundle has none, and needs this
        #[arg(long, value_name = "DIR")]
        output: Option<PathBuf>,
    },
    /// Show what changed from one result to another
    #[command(after_help = "Example:
  ringdisk lab diff lab-versus-before lab-versus-after

Configurations and loads of the same name are compared. Exit code 4: the results are from different processors, kernels,
storage, or versions of fio or QEMU, or one is from KVM and the other from TCG.")]
    Diff {
        /// The result before
        before: PathBuf,
        /// The result after
        after: PathBuf,
        /// Compare results of different machines or programs too
        #[arg(long)]
        force: bool,
    },
    /// Fail if a result is worse than another
    #[command(after_help = "Example:
  ringdisk lab run versus --output new && ringdisk lab gate new --against baseline

Exit codes: 0 not worse, 3 worse, 4 not comparable.")]
    Gate {
        /// The result to judge
        result: PathBuf,
        /// The result that it must not be worse than
        #[arg(long, value_name = "RESULT")]
        against: PathBuf,
        /// Compare results of different machines or programs too
        #[arg(long)]
        force: bool,
    },
    /// The client of one sample; the lab starts it as a process of its own
    #[command(hide = true)]
    Client {
        /// What to measure, as JSON
        job: String,
    },
    /// Make a result from files of fio, DiskSpd or CrystalDiskMark; the other configurations are compared with that of the
    /// first file
    #[command(after_help = "Example:
  fio --output-format=json+ --output=a1.json job.fio      once for each boot, in turn: a1, b1, a2, b2, ...
  diskspd -Rxml -L ... > a1.xml                           in a Windows guest
  ringdisk lab import before=FOLDER-A after=FOLDER-B --output RESULT
  ringdisk lab import before=a1.json before=a2.json after=b1.json after=b2.json --output RESULT

fio's JSON, text and terse output, DiskSpd's XML and text, and CrystalDiskMark's text are read. Nothing is decided with
fewer than five files for each name.")]
    Import {
        /// A configuration and a result, or a folder of results; files with the same name are repeats
        #[arg(required = true, value_name = "NAME=FILE")]
        files: Vec<String>,
        /// The result's folder
        #[arg(long, value_name = "DIR")]
        output: PathBuf,
    },
}

#[derive(clap::Args)]
#[command(after_help = "Example:
  ringdisk lab run versus --budget 10m --output /var/tmp/versus
  ringdisk lab run bench-disk --only iodepth=1,32 --set blocks=3
  ringdisk lab run versus --profile              also: where the time goes, and what limits

--resume with the same --output continues a run that was interrupted or killed.")]
struct Run {
    /// A recipe's name, or a plan's file
    plan: String,
    /// Find out what limits each configuration: record the threads from the guest to the storage while loads run
    #[arg(long)]
    profile: bool,
    #[command(flatten)]
    how: How,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk lab study                              the studies
  ringdisk lab study 004 --pool bench --dry-run   what would run, and for how long
  ringdisk lab study 004 --pool bench --budget 2h
  ringdisk lab study 003 --backing '/dev/vg0/lab-{guest}-{volume}' --create

Each run is one of 'ringdisk lab run' with a folder and a journal of its own; --resume continues after the last. At the
end, each published claim has its size, what was measured, and a verdict. docs/studies.md has the studies' tables and
figures.")]
struct Study {
    /// The study: 000 to 004; without it, a list
    study: Option<String>,
    /// Measure images that are created in this pool of a Ceph cluster
    #[arg(long, value_name = "POOL", conflicts_with_all = ["backing", "create"])]
    pool: Option<String>,
    /// Measure these disks, such as /dev/vg0/lab-{guest}-{volume} or /mnt/nfs/
    #[arg(long, value_name = "DISKS")]
    backing: Option<String>,
    /// Create the disks of --backing, and remove them at the end
    #[arg(long, requires = "backing")]
    create: bool,
    /// Only this run, such as ladder; repeatable
    #[arg(long, value_name = "NAME")]
    run: Vec<String>,
    /// Print the verdicts as JSON, and nothing else
    #[arg(long)]
    json: bool,
    /// Write the results without curves below this folder too
    #[arg(long, value_name = "DIR")]
    bundle: Option<PathBuf>,
    /// A remark on this host, for the bundle
    #[arg(long, value_name = "TEXT", requires = "bundle")]
    note: Option<String>,
    /// Print docs/studies.md with the bundles below this folder, and run nothing
    #[arg(long, value_name = "DIR", conflicts_with = "study")]
    document: Option<PathBuf>,
    #[command(flatten)]
    how: How,
}

impl From<&Study> for StudyOptions {
    fn from(args: &Study) -> Self {
        let storage = Storage {
            backing: args.backing.clone(),
            create: args.create,
        };
        Self {
            study: args.study.clone(),
            storage: args.pool.as_deref().map_or(storage, Storage::pool),
            runs: args.run.clone(),
            json: args.json,
            bundle: args.bundle.clone(),
            note: args.note.clone(),
            document: args.document.clone(),
            common: (&args.how).into(),
        }
    }
}

#[derive(clap::Args)]
struct How {
    /// The time that it may take, as in 30m; default: the plan's
    #[arg(long, value_name = "TIME")]
    budget: Option<String>,
    /// The result's folder; default: lab-NAME in the current directory, or study-NUMBER
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Continue the result in the folder
    #[arg(long)]
    resume: bool,
    /// Print what would run and how long it would take, and run nothing
    #[arg(long)]
    dry_run: bool,
    /// Overwrite the disks that the plan names, without asking
    #[arg(long)]
    overwrite: bool,
    /// How guests run; default: kvm if it works
    #[arg(long, value_enum)]
    accel: Option<Accel>,
    /// The ringdisk to measure; default: this program
    #[arg(long, value_name = "PATH")]
    ringdisk: Option<PathBuf>,
    /// Another build of ringdisk, measured in the same blocks with the settings of the last case
    #[arg(long, value_name = "PATH")]
    baseline: Option<PathBuf>,
    /// Replace a value of the plan, such as blocks=3 or fio.runtime=1s; commas separate the values of a list;
    /// a value with commas is one of a list in TOML, as in 'config.cpu=["host,x2apic=off"]'; repeatable
    #[arg(long, value_name = "[TABLE.]KEY=VALUE")]
    set: Vec<String>,
    /// Select cases or loads with this value, such as case=ringdisk,fio or iodepth=1; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    only: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Accel {
    Kvm,
    Tcg,
}

#[derive(clap::Args)]
#[command(after_help = "Example:
  ringdisk lab compare ringdisk qemu host --disk /dev/vg0/test --profile database

Configurations: ringdisk, qemu (one IOThread), qemu-plain (none), qemu-mapping (4 IOThreads), qemu-storage-daemon,
virtio-scsi, ide, stock (QEMU's defaults), host (no guest). The others are compared with the first.")]
struct Compare {
    /// Two or more configurations
    #[arg(required = true, num_args = 2..)]
    configurations: Vec<String>,
    /// A file or block device; default: a file that the lab creates
    #[arg(long, value_name = "PATH")]
    disk: Option<PathBuf>,
    /// crystaldiskmark, database, mail or streaming; default: 4k random reads at depth 1 and 32
    #[arg(long)]
    profile: Option<String>,
    #[command(flatten)]
    how: How,
}

impl From<&Run> for RunOptions {
    fn from(run: &Run) -> Self {
        Self {
            profile: run.profile,
            ..(&run.how).into()
        }
    }
}

impl From<&How> for RunOptions {
    fn from(how: &How) -> Self {
        Self {
            budget: how.budget.clone(),
            output: how.output.clone(),
            resume: how.resume,
            dry_run: how.dry_run,
            overwrite: how.overwrite,
            accel: how.accel.map(|accel| match accel {
                Accel::Kvm => ::lab::guest::Accel::Kvm,
                Accel::Tcg => ::lab::guest::Accel::Tcg,
            }),
            ringdisk: how.ringdisk.clone(),
            baseline: how.baseline.clone(),
            set: how.set.clone(),
            only: how.only.clone(),
            profile: false,
            quiet: false,
        }
    }
}

pub fn run(args: &Args) -> Result<(), Failed> {
    match &args.command {
        Command::Run(run) => commands::run(&run.plan, &run.into()),
        Command::Recipes { name } => commands::recipes(name.as_deref()),
        Command::Study(args) => study(&args.into()),
        Command::Compare(compare) => {
            let what = CompareOptions {
                configurations: compare.configurations.clone(),
                disk: compare.disk.clone(),
                profile: compare.profile.clone(),
            };
            commands::compare(&what, &(&compare.how).into())
        }
        Command::Report { result, output } => commands::report(result, output.as_deref()),
        Command::Diff {
            before,
            after,
            force,
        } => commands::diff(before, after, *force),
        Command::Gate {
            result,
            against,
            force,
        } => commands::gate(result, against, *force),
        Command::Client { job } => Ok(::lab::client::run(job)?),
        Command::Import { files, output } => commands::import(files, output),
    }
}
