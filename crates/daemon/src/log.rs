//! The log, on standard error. Threads queue their lines and do not wait: a full disk or a pipe without a reader costs
//! lines, never the time of an I/O thread.

use std::cell::RefCell;
use std::fmt::{self, Debug, Write as _};
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use harness::text::{Escaping, printable_lines};
use tracing::field::{Field, Visit};
use tracing::{Level, Metadata};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FormatFields, MakeWriter};

/// Limit of lines that wait to be written: 200 KiB at 200 bytes each.
const LINES_MAX: usize = 1024;

/// How long the process waits for unwritten lines when it exits.
const AT_END: Duration = Duration::from_secs(1);

/// The queue of lines.
#[derive(Clone)]
pub struct Log {
    lines: SyncSender<Vec<u8>>,
    counts: Arc<Counts>,
    to_journal: bool,
}

#[derive(Default)]
struct Counts {
    handed_over: AtomicU64,
    written: AtomicU64,
    /// Lines that were dropped because the queue was full.
    lost: AtomicU64,
}

static LOG: OnceLock<Log> = OnceLock::new();

/// The receiver of the queue, until the thread takes it.
static WAITING: Mutex<Option<Receiver<Vec<u8>>>> = Mutex::new(None);

impl Log {
    /// A log whose lines wait until [`start`] or [`finish`].
    pub fn new() -> Self {
        let (lines, waiting) = mpsc::sync_channel(LINES_MAX);
        let log = Self {
            lines,
            counts: Arc::default(),
            to_journal: is_journal(),
        };
        *waiting_lines() = Some(waiting);
        LOG.get_or_init(|| log).clone()
    }

    fn queue(&self, line: Vec<u8>) {
        match self.lines.try_send(line) {
            Ok(()) => self.counts.handed_over.fetch_add(1, Ordering::Release),
            Err(_) => self.counts.lost.fetch_add(1, Ordering::Relaxed),
        };
    }

    /// Whether systemd's journal reads the log: it adds times, and takes a level before each line (sd-daemon(3)).
    pub fn to_journal(&self) -> bool {
        self.to_journal
    }
}

/// Whether standard error is the stream that systemd names by device and inode (systemd.exec(5), `JOURNAL_STREAM`).
pub fn is_journal() -> bool {
    let Some(stream) = std::env::var_os("JOURNAL_STREAM") else {
        return false;
    };
    let there = rustix::fs::fstat(io::stderr());
    there.is_ok_and(|there| *stream == *format!("{}:{}", there.st_dev, there.st_ino))
}

/// The level's number in syslog.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// Writes the text of an event so that it is one line, whatever the names in it are: clients and images choose some of them. What
/// is before the text, such as the time, is ours.
pub struct OneLine;

impl<'w> FormatFields<'w> for OneLine {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut text = EventText {
            writer: Escaping(writer),
            is_first: true,
            result: Ok(()),
        };
        fields.record(&mut text);
        text.result
    }
}

struct EventText<'w> {
    writer: Escaping<Writer<'w>>,
    is_first: bool,
    result: fmt::Result,
}

impl Visit for EventText<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let space = if std::mem::take(&mut self.is_first) {
            ""
        } else {
            " "
        };
        let written = match field.name() {
            "message" => write!(self.writer, "{space}{value:?}"),
            name => write!(self.writer, "{space}{name}={value:?}"),
        };
        self.result = self.result.and(written);
    }
}

/// Why the process or a command fails: the last lines of standard error. No line but the first can be taken for another one of
/// ringdisk or of the journal, because the text may quote names of others.
pub fn complain(problem: &str) {
    // It may be full, which is no reason to end in another way.
    let _ = io::stderr().write_all(complaint(problem, is_journal()).as_bytes());
}

fn complaint(problem: &str, to_journal: bool) -> String {
    let level = if to_journal { "<3>" } else { "" };
    let next = format!("\n{level}  ");
    let problem = printable_lines(problem).replace('\n', &next);
    format!("{level}ringdisk: {problem}\n")
}

fn waiting_lines() -> MutexGuard<'static, Option<Receiver<Vec<u8>>>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread that writes. Called after entering the sandbox, which applies to threads that are started in it.
///
/// # Errors
/// No thread can be started.
pub fn start() -> io::Result<()> {
    let (Some(log), Some(waiting)) = (LOG.get(), waiting_lines().take()) else {
        return Ok(());
    };
    let counts = log.counts.clone();
    let thread = thread::Builder::new().name("log".into());
    thread.spawn(move || write(&waiting, &counts, io::stderr()))?;
    Ok(())
}

/// Waits until all lines are written, up to a limit: there may be no reader.
pub fn finish() {
    // There is no thread yet, or none could be started.
    if let Some(waiting) = waiting_lines().take() {
        waiting.try_iter().for_each(|line| {
            let _ = io::stderr().write_all(&line);
        });
        return;
    }
    let Some(Log { counts, .. }) = LOG.get() else {
        return;
    };
    let deadline = Instant::now() + AT_END;
    let due = counts.handed_over.load(Ordering::Acquire);
    while counts.written.load(Ordering::Acquire) < due && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
}

fn write(lines: &Receiver<Vec<u8>>, counts: &Counts, mut to: impl Write) {
    while let Ok(line) = lines.recv() {
        let lost = counts.lost.swap(0, Ordering::Relaxed);
        // Lines that cannot be written are lost; there is no other place to report that.
        if lost > 0 {
            let _ = writeln!(
                to,
                "{lost} lines of the log were left out: it was written too slowly"
            );
        }
        let _ = to.write_all(&line);
        counts.written.fetch_add(1, Ordering::Release);
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line {
            log: self,
            bytes: Vec::new(),
        }
    }

    fn make_writer_for(&'a self, of: &Metadata<'_>) -> Line<'a> {
        let mut line = self.make_writer();
        if self.to_journal {
            line.bytes = format!("<{}>", priority(*of.level())).into_bytes();
        }
        line
    }
}

thread_local! {
    /// The lines that this thread holds back.
    static HELD: RefCell<Option<Vec<Vec<u8>>>> = const { RefCell::new(None) };
}

/// Lines that were held back.
#[must_use]
pub struct Held(Vec<Vec<u8>>);

/// Runs something whose lines are held back, until it is known whether they say anything new.
pub fn hold<T>(run: impl FnOnce() -> T) -> (T, Held) {
    let outer = HELD.replace(Some(Vec::new()));
    let result = run();
    let lines = HELD.replace(outer);
    (result, Held(lines.unwrap_or_default()))
}

impl Held {
    /// Queues them.
    pub fn release(self) {
        if let Some(log) = LOG.get() {
            self.0.into_iter().for_each(|line| log.queue(line));
        }
    }

    /// They were written before.
    pub fn forget(self) {}
}

/// One line. Dropping it queues it.
pub struct Line<'a> {
    log: &'a Log,
    bytes: Vec<u8>,
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        let line = std::mem::take(&mut self.bytes);
        let queued = HELD.with(|held| match &mut *held.borrow_mut() {
            Some(lines) if lines.len() < LINES_MAX => {
                lines.push(line);
                None
            }
            _ => Some(line),
        });
        if let Some(line) = queued {
            self.log.queue(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;

    /// A reader that reads nothing until it is told to.
    #[derive(Clone, Default)]
    struct Stuck(Arc<Shared>);

    #[derive(Default)]
    struct Shared {
        reads: Mutex<bool>,
        changed: Condvar,
        read: Mutex<Vec<u8>>,
    }

    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let Shared {
                reads,
                changed,
                read,
            } = &*self.0;
            let reads = reads.lock().unwrap();
            drop(changed.wait_while(reads, |reads| !*reads).unwrap());
            read.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Names of clients and images are in it, in every way in which an event can have them.
    #[test]
    fn an_event_is_one_line() {
        let written = Stuck::default();
        *written.0.reads.lock().unwrap() = true;
        let to = written.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_target(false)
            .without_time()
            .with_level(false)
            .fmt_fields(OneLine)
            .with_writer(Mutex::new(to))
            .finish();
        let name = "x\n<0>forged\u{1b}[31m\r\u{9b}\u{202e}";
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!("disk {name}: {}", "done");
            tracing::warn!(name, debug = ?name, "a disk");
        });
        let written = written.0.read.lock().unwrap();
        let written = String::from_utf8(written.clone()).unwrap();
        let lines: Vec<_> = written.lines().collect();
        let shown = r"x\n<0>forged\u{1b}[31m\r\u{9b}\u{202e}";
        assert_eq!(lines[0], format!("disk {shown}: done"));
        assert!(lines[1].starts_with("a disk name="), "{written}");
        assert_eq!(lines.len(), 2);
        assert!(written.chars().all(|c| c == '\n' || !c.is_control()));
    }

    #[test]
    fn lines_of_others_are_not_taken_for_ours() {
        let problem = "no disk 'x\n<0>forged\u{1b}'";
        assert_eq!(
            complaint(problem, false),
            "ringdisk: no disk 'x\n  <0>forged?'\n"
        );
        assert_eq!(
            complaint(problem, true),
            "<3>ringdisk: no disk 'x\n<3>  <0>forged?'\n"
        );
    }

    #[test]
    fn logging_never_waits_and_dropped_lines_are_counted() {
        let (lines, waiting) = mpsc::sync_channel(4);
        let log = Log {
            lines,
            counts: Arc::default(),
            to_journal: false,
        };
        let (stuck, counts) = (Stuck::default(), log.counts.clone());
        let its_stuck = stuck.clone();
        let writer = thread::spawn(move || write(&waiting, &counts, its_stuck));
        // With nobody to read, this would never end if it waited.
        for n in 0..100 {
            writeln!(log.make_writer(), "line {n}").unwrap();
        }
        *stuck.0.reads.lock().unwrap() = true;
        stuck.0.changed.notify_all();
        let handed_over = log.counts.handed_over.load(Ordering::Relaxed);
        while log.counts.written.load(Ordering::Acquire) < handed_over {
            thread::yield_now();
        }
        writeln!(log.make_writer(), "the last").unwrap();
        drop(log);
        writer.join().unwrap();
        let text = String::from_utf8(stuck.0.read.lock().unwrap().clone()).unwrap();
        assert!(
            text.contains("line 0\n") && text.ends_with("the last\n"),
            "{text}"
        );
        assert!(text.contains(" lines of the log were left out"), "{text}");
    }

    #[test]
    fn write_errors_are_ignored() {
        let (lines, waiting) = mpsc::sync_channel(4);
        let counts = Counts::default();
        lines.send(b"nobody reads this\n".to_vec()).unwrap();
        drop(lines);
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
        write(&waiting, &counts, full.unwrap());
        assert_eq!(counts.written.load(Ordering::Relaxed), 1);
    }
}
