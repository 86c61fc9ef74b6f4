//! Signals that end a command that must undo something first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::CommandLineError;

/// How often [`Interrupt::watch`] looks at signals and at its work.
const LOOK: Duration = Duration::from_millis(1);

/// Signals that end a command. The end of a terminal's session is one of them.
pub struct Interrupt {
    has_arrived: Arc<AtomicBool>,
    is_released: Arc<AtomicBool>,
    /// When the first of them was noticed.
    noticed: OnceLock<Instant>,
}

impl Interrupt {
    /// From now on, these signals do not end the process.
    pub fn register() -> Self {
        let [has_arrived, is_released] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
            // If these fail, the signal ends the process at once.
            let released = is_released.clone();
            let _ = signal_hook::flag::register_conditional_default(signal, released);
            let _ = signal_hook::flag::register(signal, has_arrived.clone());
        }
        Self {
            has_arrived,
            is_released,
            noticed: OnceLock::new(),
        }
    }

    /// The signals end the process again.
    pub fn release(&self) {
        self.is_released.store(true, Ordering::SeqCst);
    }

    /// When a signal was noticed, if one has arrived.
    pub fn arrived(&self) -> Option<Instant> {
        let has_arrived = self.has_arrived.load(Ordering::Relaxed);
        has_arrived.then(|| *self.noticed.get_or_init(Instant::now))
    }

    /// Does `work`, and waits for it. If a signal has arrived or `limit` is over before it is done, calls `stop`, which has
    /// the work end soon.
    ///
    /// # Errors
    /// Why `stop` was called.
    pub fn watch<T: Send>(
        &self,
        limit: Option<Duration>,
        work: impl FnOnce() -> T + Send,
        stop: impl FnOnce(),
    ) -> (T, Result<(), CommandLineError>) {
        thread::scope(|scope| {
            let began = Instant::now();
            let working = scope.spawn(work);
            let watched = loop {
                if self.arrived().is_some() {
                    break Err(CommandLineError::Interrupted);
                }
                if working.is_finished() {
                    break Ok(());
                }
                if let Some(limit) = limit.filter(|limit| began.elapsed() >= *limit) {
                    break Err(CommandLineError::NoAnswer(limit));
                }
                thread::sleep(LOOK);
            };
            if watched.is_err() {
                stop();
            }
            let done = working.join();
            let done = done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (done, watched)
        })
    }
}
