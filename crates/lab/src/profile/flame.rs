//! A flame graph of what threads do on a CPU, recorded with `perf`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use harness::paths::find_program;
use harness::svg::{Anchor, Svg, width};

/// Samples per second and thread: not a divisor of the kernel's own timers.
const FREQUENCY: &str = "99";
/// The most functions in a stack.
const DEPTH_MAX: usize = 96;
/// The most boxes that are drawn.
const BOXES_MAX: usize = 20_000;
/// The size of the drawing.
const WIDTH: f64 = 1200.0;
const ROW: f64 = 17.0;
const TOP: f64 = 30.0;
/// A narrower box is not drawn.
const BOX_MIN: f64 = 0.4;

/// A recording that runs.
pub struct Recording {
    perf: Child,
    data: PathBuf,
    errors: PathBuf,
}

impl Recording {
    /// Records all threads of these processes for so many seconds.
    ///
    /// # Errors
    /// perf is not installed, or the kernel does not allow it; the message says what to do.
    pub fn start(pids: &[u32], seconds: f64, folder: &Path) -> Result<Recording> {
        ensure!(!pids.is_empty(), "there are no processes to record");
        let perf = find_program("perf").context(
            "a flame graph needs perf, which is not installed; on Debian, install linux-perf, on Ubuntu linux-tools-generic",
        )?;
        allowed(rustix::process::geteuid().is_root(), paranoia())?;
        let (data, errors) = (folder.join("perf.data"), folder.join("perf.log"));
        let list: Vec<String> = pids.iter().map(u32::to_string).collect();
        let log = fs::File::create(&errors).context("creating perf's log")?;
        // With -p, perf ignores threads that end before it has opened them.
        let perf = Command::new(perf)
            .args(["record", "-F", FREQUENCY, "-g", "-p", &list.join(","), "-o"])
            .arg(&data)
            .args(["--", "sleep", &format!("{seconds:.3}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("starting perf")?;
        Ok(Recording { perf, data, errors })
    }

    /// Waits for the end of the recording, and draws it.
    ///
    /// # Errors
    /// perf fails; the message has its last line.
    pub fn finish(mut self, title: &str) -> Result<String> {
        let status = self.perf.wait().context("waiting for perf")?;
        if !status.success() {
            let log = fs::read_to_string(&self.errors).unwrap_or_default();
            let lines = log.lines().map(str::trim).filter(|line| !line.is_empty());
            let lines: Vec<&str> = lines.collect();
            let last = lines[lines.len().saturating_sub(3)..].join("; ");
            bail!("perf record failed ({status}): {last}");
        }
        let script = Command::new("perf")
            .args(["script", "-F", "comm,tid,ip,sym", "-i"])
            .arg(&self.data)
            .stdin(Stdio::null())
            .output()
            .context("starting perf script")?;
        ensure!(
            script.status.success(),
            "perf script failed: {}",
            String::from_utf8_lossy(&script.stderr)
                .lines()
                .last()
                .unwrap_or_default()
        );
        let stacks = fold(&String::from_utf8_lossy(&script.stdout));
        ensure!(
            !stacks.is_empty(),
            "perf recorded nothing: the threads were not on a CPU in this time"
        );
        Ok(draw(title, &stacks))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let _ = self.perf.kill();
        let _ = self.perf.wait();
    }
}

/// The kernel's restriction of perf; `None` if it does not support perf.
fn paranoia() -> Option<i32> {
    let text = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").ok()?;
    text.trim().parse().ok()
}

fn allowed(is_root: bool, paranoia: Option<i32>) -> Result<()> {
    let Some(level) = paranoia else {
        bail!("this kernel was built without perf events, so there is no flame graph here");
    };
    ensure!(
        is_root || level <= 1,
        "the kernel does not let this user record stacks (perf_event_paranoid is {level}): run this as root, or set \
         'sysctl kernel.perf_event_paranoid=1'"
    );
    Ok(())
}

/// How often each stack was found: the thread's name first, then functions from the outermost to the innermost.
pub type Stacks = BTreeMap<Vec<String>, u64>;

/// Counts the stacks in the output of `perf script -F comm,tid,ip,sym`.
pub fn fold(script: &str) -> Stacks {
    let mut stacks = Stacks::new();
    let mut lines = script.lines().peekable();
    while let Some(line) = lines.next() {
        // A name may contain spaces; the thread's id is the last word.
        let header = line.trim();
        let Some((name, tid)) = header.rsplit_once(char::is_whitespace) else {
            continue;
        };
        if tid.parse::<u32>().is_err() || line.starts_with('\t') {
            continue;
        }
        let mut stack = Vec::new();
        while let Some(frame) = lines.next_if(|line| !line.trim().is_empty()) {
            let (_, symbol) = frame
                .trim()
                .split_once(char::is_whitespace)
                .unwrap_or_default();
            if stack.len() < DEPTH_MAX {
                stack.push(match symbol.trim() {
                    "" => "[unknown]".to_owned(),
                    symbol => symbol.chars().take(200).collect(),
                });
            }
        }
        stack.push(name.trim().to_owned());
        stack.reverse();
        *stacks.entry(stack).or_default() += 1;
    }
    stacks
}

/// Draws stacks: the width of a box is the share of samples in which its function was on the stack.
pub fn draw(title: &str, stacks: &Stacks) -> String {
    let depth = stacks.keys().map(Vec::len).max().unwrap_or(0);
    let height = TOP + ROW * (depth + 1) as f64 + 8.0;
    let total: u64 = stacks.values().sum();
    let mut svg = Svg::new(WIDTH, height);
    svg.text((WIDTH / 2.0, 18.0), Anchor::Middle, "t b", title);
    let all: Vec<(&[String], u64)> = stacks.iter().map(|(stack, n)| (&stack[..], *n)).collect();
    let mut boxes = Boxes {
        svg,
        bottom: height - 8.0,
        total: total.max(1),
        drawn: 0,
    };
    boxes.draw_box("all", 0, 0, total);
    boxes.level(&all, 0, 1);
    let style = "text { font-size: 11px; fill: #1d2126; } .b { font-weight: 600; font-size: 14px; } rect.f { stroke: #fff; stroke-width: .5; }";
    boxes.svg.standalone(title, style)
}

struct Boxes {
    svg: Svg,
    bottom: f64,
    total: u64,
    drawn: usize,
}

impl Boxes {
    /// Draws the boxes of a level: stacks that share a function here share a box. The stacks are sorted.
    fn level(&mut self, stacks: &[(&[String], u64)], first: u64, depth: usize) {
        let mut at = first;
        let mut rest = stacks;
        while let Some((stack, n)) = rest.first() {
            let Some(name) = stack.first() else {
                // It ends here.
                (at, rest) = (at + n, &rest[1..]);
                continue;
            };
            let same = rest
                .iter()
                .take_while(|(its, _)| its.first() == Some(name))
                .count();
            let (group, others) = rest.split_at(same);
            let sum = group.iter().map(|(_, n)| n).sum();
            if self.draw_box(name, depth, at, sum) {
                let below: Vec<(&[String], u64)> =
                    group.iter().map(|(stack, n)| (&stack[1..], *n)).collect();
                self.level(&below, at, depth + 1);
            }
            (at, rest) = (at + sum, others);
        }
    }

    /// Returns whether it is wide enough to be drawn.
    fn draw_box(&mut self, name: &str, depth: usize, at: u64, n: u64) -> bool {
        let scale = |n: u64| n as f64 / self.total as f64 * WIDTH;
        let (x, wide) = (scale(at), scale(n));
        if wide < BOX_MIN || self.drawn >= BOXES_MAX {
            return false;
        }
        self.drawn += 1;
        let y = self.bottom - ROW * (depth + 1) as f64;
        let share = n as f64 / self.total as f64 * 100.0;
        let style = format!("fill: {}", colour(name, depth));
        let tooltip = format!("{name}: {share:.1} % ({n} samples)");
        self.svg.rect((x, y), (wide, ROW), "f", &style, &tooltip);
        let fits = ((wide - 6.0) / width("x")).max(0.0) as usize;
        if fits >= 3 {
            let mut label: String = name.chars().take(fits).collect();
            if label.len() < name.len() {
                label = label.chars().take(fits - 1).collect::<String>() + "…";
            }
            self.svg
                .text((x + 3.0, y + ROW - 5.0), Anchor::Start, "", &label);
        }
        true
    }
}

/// Threads are blue, functions yellow to red: the same function always has the same colour.
fn colour(name: &str, depth: usize) -> String {
    let hash = name.bytes().fold(7_u32, |hash, byte| {
        hash.wrapping_mul(31).wrapping_add(byte.into())
    });
    match depth {
        0 => "#dfe4e8".into(),
        1 => format!("hsl(210 65% {}%)", 70 + hash % 12),
        _ => format!("hsl({} 85% {}%)", 15 + hash % 40, 62 + hash / 64 % 12),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SCRIPT: &str = "CPU 0/KVM    1234 \n\
        \t    ffffffff81 vmx_vcpu_run\n\t    ffffffff82 kvm_vcpu_ioctl\n\t        7f0001 ioctl\n\n\
        CPU 0/KVM    1234 \n\
        \t    ffffffff81 vmx_vcpu_run\n\t    ffffffff82 kvm_vcpu_ioctl\n\t        7f0001 ioctl\n\n\
        iothread0    99 \n\t        55 operator new(unsigned long)\n\t        7f0002\n\n";

    #[test]
    fn stacks_are_counted_from_the_outermost_function() {
        let stacks = fold(SCRIPT);
        let words = |stack: &[&str]| {
            stack
                .iter()
                .map(|&word| word.to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            stacks,
            Stacks::from([
                (
                    words(&["CPU 0/KVM", "ioctl", "kvm_vcpu_ioctl", "vmx_vcpu_run"]),
                    2
                ),
                (
                    words(&["iothread0", "[unknown]", "operator new(unsigned long)"]),
                    1
                ),
            ])
        );
        let drawing = draw("vm1 <1>", &stacks);
        assert!(
            drawing.contains("vm1 &lt;1&gt;")
                && drawing.contains("kvm_vcpu_ioctl: 66.7 % (2 samples)")
        );
        // The box of `all`, two threads, and five functions.
        assert_eq!(drawing.matches("class=\"f\"").count(), 8);
    }

    #[test]
    fn restrictions_are_explained() {
        assert!(allowed(true, Some(4)).is_ok() && allowed(false, Some(1)).is_ok());
        let error = allowed(false, Some(2)).unwrap_err().to_string();
        assert!(
            error.contains("perf_event_paranoid is 2") && error.contains("sysctl"),
            "{error}"
        );
        assert!(allowed(true, None).is_err());
    }

    proptest! {
        #[test]
        fn any_script_is_drawn(text in "([a-z/ ]{0,9} ?[0-9]{0,6} ?\n|\t +[0-9a-f]{1,8} [a-z<>&:() ]{0,20}\n|\n|\\PC{0,9}){0,40}") {
            let stacks = fold(&text);
            let drawing = draw("any", &stacks);
            prop_assert!(drawing.ends_with("</svg>\n"));
        }
    }
}
