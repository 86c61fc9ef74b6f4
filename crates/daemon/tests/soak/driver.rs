//! The guest of one disk, in its own thread: a load that verifies everything it reads.

use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use testkit::driver::{Device, DeviceConfig, Op};
use testkit::load::{BLOCK, BlockContent, Load};
use testkit::random::Random;

pub const QUEUES: u16 = 2;

/// A command to the driver, which answers when it is done.
pub enum Order {
    /// Finish everything in flight, and disconnect.
    Disconnect,
    /// Compare this file with the expected content of the disk.
    Verify(PathBuf),
    /// Connect.
    Connect,
    /// Reconnect with everything in flight: the connection is lost or abandoned.
    Reconnect,
    /// Finish everything in flight, flush, and stay connected.
    Pause,
    /// Continue after a pause.
    Resume,
    /// Remember the expected content of the disk; nothing is in flight.
    Remember,
    /// Compare this file with the content that was remembered.
    VerifyRemembered(PathBuf),
    /// Use another socket from the next connection on.
    UseSocket(PathBuf),
    /// Whether requests may fail from now on; `false` takes effect once everything in flight has finished.
    MayFail(bool),
    /// Finish at least one more request.
    Progress,
}

/// Parameters of a guest.
pub struct Guest {
    pub socket: PathBuf,
    /// The content of a new disk.
    pub held: BlockContent,
    pub packed: bool,
    pub seed: u64,
    /// Blocks in the load of a queue.
    pub blocks: usize,
    /// The longest pause between short bursts: there are more drivers than CPUs, and the server needs one.
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
        // If the driver has ended, `wait` reports it.
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

    /// Ends the driver; returns the number of completed requests.
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
        let mut remembered: Vec<Load> = Vec::new();
        loop {
            let order = match &device {
                Some(_) if !paused => orders.try_recv(),
                _ => orders.recv().map_err(|_| TryRecvError::Disconnected),
            };
            match order {
                Ok(Order::Disconnect) => {
                    if let Some(mut device) = device.take() {
                        Load::finish(&mut loads, &mut device);
                    }
                }
                Ok(Order::Verify(file)) => {
                    loads.iter().for_each(|load| load.verify(&file).unwrap());
                }
                Ok(Order::Connect) => {
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
                Ok(Order::Resume) => paused = false,
                Ok(Order::Remember) => remembered = loads.clone(),
                Ok(Order::VerifyRemembered(file)) => {
                    remembered
                        .iter()
                        .for_each(|load| load.verify(&file).unwrap());
                }
                Ok(Order::UseSocket(socket)) => self.socket = socket,
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
