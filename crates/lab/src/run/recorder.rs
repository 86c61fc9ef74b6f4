//! A result while it grows.

use anyhow::Result;

use super::progress::Progress;
use crate::guest::Stop;
use crate::journal::{BootRecord, Ceiling, Cell, Journal, Rates, Record, Writer};
use crate::plan::Plan;
use crate::storage::Files;

/// Writes each record to the journal's file and adds it to the journal in memory.
pub struct Recorder<'a> {
    /// What has been recorded so far.
    pub journal: Journal,
    /// The user's display.
    pub progress: &'a mut dyn Progress,
    writer: Writer,
}

impl<'a> Recorder<'a> {
    /// `writer` continues the file from which `journal` was read.
    pub fn new(journal: Journal, writer: Writer, progress: &'a mut dyn Progress) -> Self {
        Self {
            journal,
            progress,
            writer,
        }
    }

    /// Creates and fills disks that the plan names, and records which were filled.
    ///
    /// # Errors
    /// A disk cannot be created or filled, the user stops the run, or the journal cannot be written.
    pub fn fill(&mut self, files: &mut Files, plan: &Plan, stop: &Stop) -> Result<()> {
        let progress = &mut *self.progress;
        let fills = files.prepare(plan, stop, &mut |disk, done, of| {
            progress.filled(disk, done, of);
        })?;
        for fill in fills {
            self.writer.write(&Record::Fill(fill.clone()))?;
            self.journal.fills.push(fill);
        }
        Ok(())
    }

    /// Records a configuration that came up.
    ///
    /// # Errors
    /// The journal cannot be written; as for all records.
    pub fn boot(&mut self, boot: BootRecord) -> Result<()> {
        self.writer.write(&Record::Boot(boot.clone()))?;
        self.journal.boots.push(boot);
        Ok(())
    }

    /// Records a load that ran or failed.
    ///
    /// # Errors
    /// See [`Recorder::boot`].
    pub fn cell(&mut self, cell: Cell) -> Result<()> {
        self.writer.write(&Record::Cell(cell.clone()))?;
        self.progress.finished(&cell);
        self.journal.cells.push(cell);
        Ok(())
    }

    /// Records what the host's own disk reaches.
    ///
    /// # Errors
    /// See [`Recorder::boot`].
    pub fn ceiling(&mut self, ceiling: Ceiling) -> Result<()> {
        self.writer.write(&Record::Ceiling(ceiling.clone()))?;
        self.journal.ceilings.push(ceiling);
        Ok(())
    }

    /// Records the rates that a search found; they replace the load in the plan.
    ///
    /// # Errors
    /// See [`Recorder::boot`].
    pub fn rates(&mut self, found: Rates) -> Result<()> {
        let plan = &self.journal.plan;
        self.journal.plan = plan.with_rates(&found.workload, &found.rates);
        self.journal.searched_s += found.took_s;
        self.writer.write(&Record::Rates(found))
    }
}
