use std::ops::ControlFlow;

/// The progress of a repair or a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tables read so far, or changes processed by a replay.
    pub done: u64,
    /// The value of `done` at the end.
    pub total: u64,
}

/// Receives the progress, and may stop the operation.
pub(crate) type ReportProgress<'a> = &'a mut dyn FnMut(Progress) -> ControlFlow<()>;
