//! A result while it grows.

use anyhow::Result;

use super::progress::Progress;
use crate::journal::{BootRecord, Ceiling, Cell, Journal, Rates, Record, Writer};

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
