//! Runs shell scripts: in a guest, or on the host.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::Stop;

/// The longest answer. Histograms of 64 jobs over an hour take a few hundred MB.
const ANSWER_MAX: usize = 1 << 30;
/// The longest line before an answer.
const LINE_MAX: usize = 4096;
const TICK: Duration = Duration::from_millis(100);

/// The result of a script.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its exit status.
    pub status: i32,
    /// Its output.
    pub bytes: Vec<u8>,
}

impl Answer {
    /// Its output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// Runs shell scripts, one at a time.
pub trait Shell: Send {
    /// Runs a script, and waits for its end.
    ///
    /// # Errors
    /// The script takes too long, the guest ends, or the user stops the run.
    fn run(&mut self, script: &str, limit: Duration, stop: &Stop) -> Result<Answer>;
}

/// The host's own shell. Its temporary files are in this folder.
pub struct Host(pub PathBuf);

impl Shell for Host {
    fn run(&mut self, script: &str, limit: Duration, stop: &Stop) -> Result<Answer> {
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("TMPDIR", &self.0);
        answer_of(command, None, limit, stop)
    }
}

/// Runs a program as a shell. It has its own process group, so that Ctrl-C reaches only the lab.
pub(super) fn answer_of(
    mut command: Command,
    input: Option<&str>,
    limit: Duration,
    stop: &Stop,
) -> Result<Answer> {
    use std::os::unix::process::CommandExt;
    let stdin = if input.is_some() {
        Stdio::piped()
    } else {
        Stdio::null()
    };
    let mut child = command
        .process_group(0)
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {}", command.get_program().display()))?;
    if let (Some(input), Some(mut stdin)) = (input, child.stdin.take()) {
        // A program that ends without reading all input reports the reason with its status.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = collect(child.stdout.take());
    let errors = collect(child.stderr.take());
    let status = wait(&mut child, limit, stop)?;
    let joined = |reader: std::thread::JoinHandle<Vec<u8>>| reader.join().unwrap_or_default();
    let mut bytes = joined(output);
    bytes.extend(joined(errors));
    Ok(Answer {
        status: status.code().unwrap_or(-1),
        bytes,
    })
}

fn collect(stream: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(stream) = stream {
            let _ = stream.take(ANSWER_MAX as u64).read_to_end(&mut bytes);
        }
        bytes
    })
}

/// Waits for a child. If it takes too long, or the user stops the run, kills it and the processes that it started.
fn wait(child: &mut Child, limit: Duration, stop: &Stop) -> Result<std::process::ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().context("waiting for a program")? {
            return Ok(status);
        }
        if stop.is_wanted() || Instant::now() > deadline {
            let group = rustix::process::Pid::from_child(child);
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            let _ = child.wait();
            ensure!(!stop.is_wanted(), "stopped");
            bail!("killed because it took longer than {} s", limit.as_secs());
        }
        sleep(Duration::from_millis(20));
    }
}

/// A guest's virtio-serial port.
pub(super) struct Port {
    stream: UnixStream,
    received: Vec<u8>,
}

impl Port {
    pub(super) fn new(stream: UnixStream) -> Result<Self> {
        stream
            .set_read_timeout(Some(TICK))
            .context("setting a timeout")?;
        Ok(Self {
            stream,
            received: Vec::new(),
        })
    }

    /// Waits for the next line. `alive` returns an error if the guest has ended.
    pub(super) fn line(
        &mut self,
        deadline: Instant,
        stop: &Stop,
        alive: &mut dyn FnMut() -> Result<()>,
    ) -> Result<String> {
        loop {
            if let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            ensure!(
                self.received.len() <= LINE_MAX,
                "the guest sent a line of more than {LINE_MAX} bytes"
            );
            self.receive(deadline, stop, alive)?;
        }
    }

    /// Sends a script and waits for its answer.
    pub(super) fn run(
        &mut self,
        script: &str,
        limit: Duration,
        stop: &Stop,
        alive: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Answer> {
        let line = base64(script.as_bytes()) + "\n";
        self.stream
            .write_all(line.as_bytes())
            .context("sending a script to the guest")?;
        let deadline = Instant::now() + limit;
        let head = self.line(deadline, stop, alive)?;
        let mut words = head.split_whitespace();
        let (Some("answer"), Some(status), Some(size)) = (
            words.next(),
            words.next().and_then(|word| word.parse().ok()),
            words.next().and_then(|word| word.parse::<usize>().ok()),
        ) else {
            bail!("the guest sent {head:?} instead of an answer");
        };
        ensure!(size <= ANSWER_MAX, "the guest's answer has {size} bytes");
        while self.received.len() < size {
            self.receive(deadline, stop, alive)?;
        }
        Ok(Answer {
            status,
            bytes: self.received.drain(..size).collect(),
        })
    }

    fn receive(
        &mut self,
        deadline: Instant,
        stop: &Stop,
        alive: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut chunk = [0; 65536];
        match self.stream.read(&mut chunk) {
            Ok(0) => {
                alive()?;
                bail!("QEMU closed the guest's port");
            }
            Ok(read) => self.received.extend_from_slice(&chunk[..read]),
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                alive()?;
                ensure!(!stop.is_wanted(), "stopped");
                ensure!(Instant::now() < deadline, "the guest does not answer");
            }
            Err(e) => {
                alive()?;
                return Err(e).context("reading from the guest");
            }
        }
        Ok(())
    }
}

/// RFC 4648 §4.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().enumerate().fold(0_u32, |word, (i, byte)| {
            word | u32::from(*byte) << (16 - 8 * i)
        });
        for digit in 0..4 {
            if digit <= chunk.len() {
                let index = (word >> (18 - 6 * digit)) as usize & 63;
                text.push(char::from(ALPHABET[index]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        let pairs = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("foobar", "Zm9vYmFy"),
        ];
        for (text, encoded) in pairs {
            assert_eq!(base64(text.as_bytes()), encoded);
        }
    }

    #[test]
    fn the_hosts_shell_answers_times_out_and_stops() {
        let stop = Stop::default();
        let answer = Host(std::env::temp_dir())
            .run(
                "echo one; echo two >&2; exit 3",
                Duration::from_secs(60),
                &stop,
            )
            .unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (3, "one\ntwo\n"));
        let late = Host(std::env::temp_dir())
            .run("sleep 1000 | sleep 1000", Duration::from_millis(50), &stop)
            .unwrap_err();
        assert!(late.to_string().contains("took longer"), "{late}");
        stop.flag()
            .store(true, std::sync::atomic::Ordering::Relaxed);
        let stopped = Host(std::env::temp_dir())
            .run("sleep 1000", Duration::from_secs(600), &stop)
            .unwrap_err();
        assert!(stopped.to_string().contains("stopped"), "{stopped}");
    }

    #[test]
    fn a_port_accepts_any_output_and_no_invalid_answer() {
        let (ours, mut guests) = UnixStream::pair().unwrap();
        let mut port = Port::new(ours).unwrap();
        let (stop, limit) = (Stop::default(), Duration::from_secs(60));
        guests.write_all(b"answer 0 5\nab\ncd").unwrap();
        let answer = port.run("x", limit, &stop, &mut || Ok(())).unwrap();
        assert_eq!(
            (answer.status, answer.bytes.as_slice()),
            (0, b"ab\ncd".as_slice())
        );
        for invalid in [
            "nonsense\n",
            "answer 0\n",
            "answer 0 -1\n",
            "answer 0 99999999999999\n",
        ] {
            guests.write_all(invalid.as_bytes()).unwrap();
            assert!(
                port.run("x", limit, &stop, &mut || Ok(())).is_err(),
                "{invalid}"
            );
        }
        guests.write_all(&[b'x'; 3 * LINE_MAX]).unwrap();
        assert!(port.run("x", limit, &stop, &mut || Ok(())).is_err());
    }
}
