//! Operations that control the data path: starting and stopping queues, holding disks, replacing a disk's file, and what is
//! done about storage that fails.

mod ages;
pub(crate) mod cut;
mod error_policy;
pub(crate) mod hold;
mod queues;
pub(crate) mod replace;

use block::Engine;

use crate::clock::now_ns;
use crate::command::{Command, QueueId};
use crate::queue::Interrupt;
use crate::worker::{StopRequest, Worker};

/// Most commands that are handled before requests are looked at again. Sessions wait for the answers to theirs, so that
/// there are seldom more from each than it has queues; but many front-ends can send many messages.
const COMMANDS: usize = 16;

impl<E: Engine> Worker<E> {
    pub fn handle_commands(&mut self) {
        for stop in std::mem::take(&mut self.control.postponed) {
            self.stop(stop);
        }
        for _ in 0..COMMANDS {
            let Ok(command) = self.control.commands.try_recv() else {
                return;
            };
            self.handle_command(command);
        }
        // There may be more, and others wait as well.
        self.wake.wake();
    }

    /// Replies are ignored by sessions that have ended.
    fn handle_command(&mut self, command: Command) {
        match command {
            Command::Start(start) => self.start_or_wait(start),
            Command::Stop { queue, reply } => self.stop(StopRequest {
                queue,
                since: now_ns(),
                reply,
            }),
            Command::SetEventFds {
                queue: QueueId(number),
                call,
                error,
                reply,
            } => {
                // A queue that was abandoned may have ended meanwhile.
                if let Some(queue) = self.queues.find(number) {
                    queue.interrupt = Interrupt::new(call, queue.disk.blocks_threads());
                    queue.error = error;
                    self.interrupt(number);
                }
                let _ = reply.send(());
            }
            Command::Pause { disk, reply } => self.pause(disk, reply),
            Command::AttachNext {
                disk,
                content,
                source,
                reply,
            } => drop(reply.send(self.attach_next(&disk, &content, source))),
            Command::Cut { disks, meeting } => self.cut(&disks, &meeting),
            Command::EndCut { disk } => self.end_cut(&disk),
            Command::Unpause {
                disk,
                replaced,
                reply,
            } => {
                for start in self.unpause(&disk, replaced) {
                    let reply = start.reply.clone();
                    let _ = reply.send(self.start(start));
                }
                let _ = reply.send(Ok(()));
            }
            Command::Resume { disk, report } => self.resume(&disk, report),
            Command::CheckAges => self.check_ages(),
            Command::Quit => self.control.has_quit = true,
        }
    }
}
