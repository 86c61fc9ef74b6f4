//! A second disk of the same process, with a journal of its own in the same directory: written beside the first one, and
//! killed with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::config::Serve;
use super::failure::{Failure, Outcome};
use super::files::windows;
use super::guest::Guest;
use super::oracle::{Oracle, SECTOR};
use super::process::run;
use super::steps::{Kind, Request};

const BYTES: u64 = 2 << 20;
/// What makes its writes others than those of the first disk.
const MARK: u64 = 1 << 52;

pub struct Neighbour {
    directory: PathBuf,
    pub image: PathBuf,
    oracle: Oracle,
    guest: Option<Guest>,
    /// ringdisk was killed, and has not opened it again.
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

    /// Its disk on the command line.
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

    /// Sends some of what the first disk gets, and leaves half of it under way.
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

    /// Has all answered, and reads it.
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

    /// Its guest is gone with what it had under way; how many requests it had answers to.
    pub fn ended(&mut self) -> u64 {
        self.oracle.killed();
        self.guest.take().map_or(0, |guest| guest.completed)
    }

    /// ringdisk has ended in order.
    pub fn durable(&mut self) {
        self.oracle.durable();
    }

    /// The journals are gone with the power: of what was not flushed, any part is there.
    pub fn power_cut(&mut self) {
        self.oracle.power_cut();
        self.killed = false;
    }

    /// What QEMU finds in the image, which nobody serves and nobody is to replay.
    pub fn compare(&mut self) -> Outcome<()> {
        let mut command = Command::new("qemu-img");
        command.args(["check", "-q", "-f", "qcow2"]);
        match run(command.arg(&self.image), &self.directory)? {
            // Space may be lost by a kill.
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
