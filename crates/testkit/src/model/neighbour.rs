//! A second disk of the same process, with its own journal in the same directory. It is written at the same time as the
//! first disk, and killed with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::config::Serve;
use super::failure::{Failure, Outcome};
use super::files::{wait_until_free, windows};
use super::guest::Guest;
use super::oracle::{Oracle, SECTOR};
use super::process::run;
use super::steps::{Kind, Request};

const BYTES: u64 = 2 << 20;
/// Distinguishes its writes from those of the first disk.
const MARK: u64 = 1 << 52;

pub struct Neighbour {
    directory: PathBuf,
    pub image: PathBuf,
    oracle: Oracle,
    guest: Option<Guest>,
    /// ringdisk was killed, and has not opened the image since.
    pub killed: bool,
}

impl Neighbour {
    pub fn make(directory: &Path, options: &str) -> Outcome<Self> {
        let neighbour = Self {
            directory: directory.into(),
            image: directory.join("neighbour"),
            oracle: Oracle::new(BYTES, &[(0, BYTES as usize / SECTOR)]),
            guest: None,
            killed: false,
        };
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", "qcow2", "-o", options]);
        command.arg(&neighbour.image).arg(BYTES.to_string());
        neighbour.expect(&mut command).map(|()| neighbour)
    }

    fn expect(&self, command: &mut Command) -> Outcome<()> {
        match run(command, &self.directory)? {
            (Some(0), _) => Ok(()),
            (code, said) => {
                let what = format!("the neighbour: {command:?}: {code:?}, {said}");
                Err(Failure::new("tool", what))
            }
        }
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("neighbour.sock")
    }

    /// The disk, as given on the command line.
    pub fn disk(&self, serve: &Serve) -> String {
        let (file, socket) = (self.image.display(), self.socket());
        let Serve { cache, queues, .. } = serve;
        let _ = fs::remove_file(&socket);
        format!(
            "file={file},name=neighbour,format=qcow2,socket={},queues={queues},queue-size=64,cache={cache}",
            socket.display()
        )
    }

    pub fn connect(&mut self, serve: &Serve) -> Outcome<()> {
        self.oracle.write_through = serve.is_write_through();
        self.guest = Some(Guest::connect(&self.socket(), serve)?);
        self.killed = false;
        Ok(())
    }

    pub fn reconnect(&mut self) -> Outcome<()> {
        let socket = self.socket();
        self.guest.as_mut().map_or(Ok(()), |g| g.reconnect(&socket))
    }

    /// Sends some of the first disk's requests, and leaves half of them in flight.
    pub fn run(&mut self, list: &[Request]) -> Outcome<()> {
        let Some(guest) = &mut self.guest else {
            return Ok(());
        };
        let own = list.iter().step_by(3).map(|request| Request {
            mark: request.mark | MARK,
            ..*request
        });
        let own: Vec<_> = own.collect();
        let enough = own.len() as u32 / 2;
        guest.run(&mut self.oracle, &own, Some(enough))
    }

    /// Waits for all answers, and verifies the content of the disk.
    pub fn verify(&mut self) -> Outcome<()> {
        let Some(guest) = &mut self.guest else {
            return Ok(());
        };
        guest.drain(&mut self.oracle)?;
        let all = (0..BYTES / SECTOR as u64).step_by(128);
        let list: Vec<_> = all
            .map(|at| Request {
                kind: Kind::Read,
                queue: (at / 128) as u16,
                mark: 0,
                at,
                align: 1,
                sectors: 128,
            })
            .collect();
        let result = guest.run(&mut self.oracle, &list, None);
        result.map_err(|e| e.told(|what| format!("the neighbour: {what}")))
    }

    pub fn drain(&mut self) -> Outcome<()> {
        self.guest
            .as_mut()
            .map_or(Ok(()), |guest| guest.drain(&mut self.oracle))
    }

    /// Records that the guest is gone with its requests in flight. Returns how many requests were answered.
    pub fn ended(&mut self) -> u64 {
        if let Some(guest) = &self.guest {
            guest.killed(&mut self.oracle);
        }
        self.oracle.killed();
        self.guest.take().map_or(0, |guest| guest.completed)
    }

    /// Records an orderly end of ringdisk: all data is durable.
    pub fn durable(&mut self) {
        self.oracle.durable();
    }

    /// Records a power cut, which removes the journals: of the data that was not flushed, any part may remain.
    pub fn power_cut(&mut self) {
        self.oracle.power_cut();
        self.killed = false;
    }

    /// Compares the image, as QEMU reads it, with the oracle. No server may have it open, and its journal must be
    /// empty.
    pub fn compare(&mut self) -> Outcome<()> {
        wait_until_free(&self.image)?;
        let mut command = Command::new("qemu-img");
        command.args(["check", "-q", "-f", "qcow2"]);
        match run(command.arg(&self.image), &self.directory)? {
            // A kill may leak space.
            (Some(0 | 3), _) => {}
            (code, said) => {
                let what = format!("the neighbour: qemu-img check: {code:?}, {said}");
                return Err(Failure::new("check", what));
            }
        }
        let raw = self.directory.join("neighbour.raw");
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-f", "qcow2", "-O", "raw"]);
        self.expect(command.arg(&self.image).arg(&raw))?;
        let bytes = windows(&raw, &self.oracle)?;
        let saw = self.oracle.saw(0..bytes.len() / SECTOR, &bytes);
        saw.map_err(|e| Failure::new("content", format!("the neighbour: qemu-img convert: {e}")))
    }
}
