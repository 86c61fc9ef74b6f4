//! The guest of one disk, in a thread of its own: a load that verifies all that it reads.

use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use testkit::driver::{Device, DeviceConfig, Op};
use testkit::faulty::Random;
use testkit::load::{BLOCK, Held, Load};

pub const QUEUES: u16 = 2;

/// What a driver is told to do. It answers when it has.
pub enum Order {
    /// Finish what is under way, and disconnect.
    Rest,
    /// Compare this file with what the disk must hold.
    Verify(PathBuf),
    /// Connect.
    Work,
    /// Connect again with all that is under way: the connection is gone, or is given up.
    Reconnect,
    /// Finish what is under way, flush it, and stay connected.
    Pause,
    /// Go on after a pause.
    GoOn,
    /// The disk is at another socket, from the next connection on.
    Move(PathBuf),
    /// Requests may fail from now on; or, once what is under way is finished, may not any more.
    MayFail(bool),
    /// Finish at least one more request.
    Progress,
}

/// What a guest has, and what it does.
pub struct Guest {
    pub socket: PathBuf,
    /// What a fresh disk holds.
    pub held: Held,
    pub packed: bool,
    pub seed: u64,
    /// Blocks that the load of a queue works on.
    pub blocks: usize,
    /// How long it does nothing between short bursts, at most: there are more drivers than CPUs, and the server is to get
    /// one.
    pub pause_us: u64,
}

pub struct Driver {
    orders: Sender<Order>,
    done: Receiver<()>,
    thread: Option<JoinHandle<u64>>,
}

impl Driver {
    pub fn start(guest: Guest) -> Self {
        let (orders, ordered) = mpsc::channel();
        let (tell, done) = mpsc::channel();
        let thread = thread::spawn(move || guest.drive(&ordered, &tell));
        Self {
            orders,
            done,
            thread: Some(thread),
        }
    }

    pub fn send(&self, order: Order) {
        // If it has ended, `wait` tells.
        let _ = self.orders.send(order);
    }

    pub fn wait(&mut self) {
        if self.done.recv().is_err() {
            let thread = self.thread.take().expect("it is waited for once");
            std::panic::resume_unwind(thread.join().expect_err("it ends when it is told to"));
        }
    }

    pub fn order(&mut self, order: Order) {
        self.send(order);
        self.wait();
    }

    /// Ends it; returns how many requests have completed.
    pub fn end(mut self) -> u64 {
        drop(self.orders);
        let thread = self.thread.take().expect("it is waited for once");
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Guest {
    fn drive(mut self, orders: &Receiver<Order>, done: &Sender<()>) -> u64 {
        let config = DeviceConfig {
            queues: QUEUES,
            queue_size: if self.packed { 50 } else { 64 },
            packed: self.packed,
            inflight: true,
            buffer_len: BLOCK as u32,
            ..DeviceConfig::default()
        };
        let mut random = Random(self.seed);
        let mut loads: Vec<Load> = Vec::new();
        let mut device: Option<Device> = None;
        let mut paused = false;
        loop {
            let order = match &device {
                Some(_) if !paused => orders.try_recv(),
                _ => orders.recv().map_err(|_| TryRecvError::Disconnected),
            };
            match order {
                Ok(Order::Rest) => {
                    if let Some(mut device) = device.take() {
                        Load::finish(&mut loads, &mut device);
                    }
                }
                Ok(Order::Verify(file)) => {
                    loads.iter().for_each(|load| load.verify(&file).unwrap());
                }
                Ok(Order::Work) => {
                    let new = Device::connect(&self.socket, &config).unwrap();
                    if loads.is_empty() {
                        loads = Load::all(&new, self.blocks, self.held, true);
                    }
                    device = Some(new);
                }
                Ok(Order::Reconnect) => {
                    if let Some(device) = &mut device {
                        device.reconnect(&self.socket, &config).unwrap();
                    }
                }
                Ok(Order::Pause) => {
                    if let Some(device) = &mut device {
                        Load::finish(&mut loads, device);
                        assert_eq!(device.queues[0].run(Op::Flush, 0, 0), 0, "a flush");
                    }
                    paused = true;
                }
                Ok(Order::GoOn) => paused = false,
                Ok(Order::Move(socket)) => self.socket = socket,
                Ok(Order::MayFail(may)) => {
                    if let (Some(device), false) = (&mut device, may) {
                        Load::finish(&mut loads, device);
                    }
                    loads.iter_mut().for_each(|load| load.may_fail = may);
                }
                Ok(Order::Progress) => {
                    if let Some(device) = &mut device {
                        Load::run(&mut loads, device, &mut random, Duration::from_micros(100));
                        Load::finish(&mut loads, device);
                    }
                }
                Err(TryRecvError::Empty) => {
                    if let Some(device) = &mut device {
                        Load::run(&mut loads, device, &mut random, Duration::from_micros(100));
                        thread::sleep(Duration::from_micros(random.below(self.pause_us)));
                    }
                    continue;
                }
                Err(TryRecvError::Disconnected) => {
                    return loads.iter().map(|load| load.completed).sum();
                }
            }
            let _ = done.send(());
        }
    }
}
