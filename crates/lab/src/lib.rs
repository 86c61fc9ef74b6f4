//! `ringdisk lab` measures how much a storage configuration of a VM gains.
//!
//! It measures from outside: nothing here depends on the data path. The way of a plan:
//!
//! 1. [`commands::run`] reads a [recipe](recipes) or a file, and [`plan::Plan::parse`] checks it.
//! 2. [`run::run`] begins a [journal](journal::Journal) and runs the plan [block by block](schedule::Schedule).
//! 3. Each block boots each configuration: [servers](storage), [guests](guest), and then a load. [fio](fio) runs in the
//!    guests or on the host; without a guest, the lab [drives the server's socket](drive), or starts a
//!    [client process](client) for it. Only the time [in which all jobs ran](window) counts.
//! 4. An [analysis](analysis::Analysis) of the journal judges each comparison with [statistics](stats), and tells the
//!    next block which are still undecided.
//! 5. [Reports](report) are made from an analysis alone, so `ringdisk lab report` can make them again at any time.
//!
//! A [study](study) is a list of such runs, with the published tables and figures that they measure.

/// `print!`, but without a panic if nobody reads the output any more: a run goes on, and its result is in its folder.
macro_rules! out {
    ($($argument:tt)*) => {{
        let text = harness::text::printable_lines(&format!($($argument)*));
        let _ = std::io::Write::write_all(&mut std::io::stdout().lock(), text.as_bytes());
    }};
}

/// [`out`] with a line break.
macro_rules! outln {
    ($($argument:tt)*) => {
        out!("{}\n", format_args!($($argument)*))
    };
}

pub mod analysis;
pub mod client;
pub mod commands;
pub mod compare;
pub mod drive;
pub mod fio;
pub mod guest;
pub mod host;
pub mod import;
pub mod journal;
pub mod measured;
pub mod own_folder;
pub mod plan;
pub mod profile;
pub mod recipes;
pub mod report;
pub mod run;
pub mod schedule;
pub mod stats;
pub mod storage;
pub mod study;
pub mod vhost;
pub mod window;
