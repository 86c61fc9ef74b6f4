//! How much of a copy is done.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use block::format_size;

/// How often it is shown: at a terminal, and otherwise.
const SHOW: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// Shows how much is done until it is over.
pub fn show(is_over: &AtomicBool, done: &AtomicU64, copied: &AtomicU64, total: u64) {
    let is_terminal = io::stderr().is_terminal();
    let pause = SHOW[usize::from(!is_terminal)];
    let (began, mut shown) = (Instant::now(), Instant::now());
    while !is_over.load(Relaxed) {
        thread::sleep(Duration::from_millis(20));
        if shown.elapsed() < pause {
            continue;
        }
        shown = Instant::now();
        let line = progress(
            done.load(Relaxed),
            copied.load(Relaxed),
            total,
            began.elapsed(),
        );
        if is_terminal {
            tell(&format!("\r{line}\x1b[K"));
        } else {
            tell(&format!("{line}\n"));
        }
    }
    if is_terminal {
        tell("\r\x1b[K");
    }
}

/// Nobody may read it, which is no reason to end.
fn tell(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

fn progress(done: u64, copied: u64, total: u64, elapsed: Duration) -> String {
    let part = done as f64 / total.max(1) as f64;
    let rate = copied as f64 / elapsed.as_secs_f64().max(1e-3);
    let left = match part {
        part if part > 0.0 => {
            let left = (elapsed.as_secs_f64() * (1.0 - part) / part).round() as u64;
            format!(
                "{}:{:02}:{:02} left",
                left / 3600,
                left / 60 % 60,
                left % 60
            )
        }
        _ => "?".into(),
    };
    let (percent, copied, rate) = (100.0 * part, format_size(copied), format_size(rate as u64));
    format!("{percent:.1} % done, {copied} copied, {rate}/s, {left}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_has_the_time_that_is_left() {
        let line = progress(1 << 30, 512 << 20, 4 << 30, Duration::from_secs(2000));
        assert!(line.starts_with("25.0 % done, 512"), "{line}");
        assert!(line.ends_with(", 1:40:00 left"), "{line}");
        assert!(progress(0, 0, 0, Duration::ZERO).ends_with('?'));
    }
}
