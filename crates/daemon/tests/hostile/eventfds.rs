//! Eventfds that cannot be signalled, or that block the thread that signals them.

use super::*;

/// An eventfd that blocks any thread that adds to it.
fn full_eventfd() -> OwnedFd {
    let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    fd
}

#[test]
fn full_call_eventfd_delays_no_other_disk() {
    signal_full_eventfd(&full_eventfd(), || {});
}

/// O_NONBLOCK belongs to the open file description, which the front-end shares.
#[test]
fn eventfd_made_blocking_again_delays_no_other_disk() {
    let signal = full_eventfd();
    signal_full_eventfd(&signal, || make_blocking(&signal));
}

/// Gives a disk a call eventfd that is full. `then` runs once the disk has it.
fn signal_full_eventfd(signal: &OwnedFd, then: impl FnOnce()) {
    let (victim, other) = (Disk::new(), Disk::new());
    let mut server = serve_all(&[
        "--iothreads=1".to_owned(),
        victim.argument("queues=2"),
        other.argument("queues=2"),
    ]);
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut bystander = Device::connect(&other.socket, &config).unwrap();
    let mut device = Device::connect(&victim.socket, &config).unwrap();
    device.frontend.set_vring_call(0, signal.as_fd()).unwrap();
    device.frontend.set_vring_err(0, signal.as_fd()).unwrap();
    then();
    for _ in 0..20 {
        assert_reads_uncalled(&mut device, 0);
    }
    assert_reads(&mut device, 1);
    assert_reads(&mut bystander, 0);
    assert_reads(&mut bystander, 1);
    // A broken ring is reported to the eventfd, which must not block.
    device.queues[0].ring.publish([u16::MAX]);
    assert_reads(&mut device, 1);
    assert_reads(&mut bystander, 0);
    let base = device.stop_queue(0).unwrap();
    device.start_queue(0, base).unwrap();
    assert_reads(&mut device, 0);
    assert!(server.terminate().unwrap().success());
}

/// A read that is never signalled.
fn assert_reads_uncalled(device: &mut Device, queue: usize) {
    let queue = &mut device.queues[queue];
    queue.prepare(0, Op::Read, 8, 4096);
    queue.submit(&[0]);
    let start = Instant::now();
    while queue.poll(|_, status| assert_eq!(status, OK)) == 0 {
        assert!(start.elapsed() < HANG, "the queue hangs");
        thread::sleep(Duration::from_micros(100));
    }
    assert!(queue.read_buffer(0, 4096) == content(8, 4096));
}

/// Makes a descriptor blocking again, undoing the server's setting.
fn make_blocking(signal: &OwnedFd) {
    let flags = rustix::fs::fcntl_getfl(signal).unwrap();
    rustix::fs::fcntl_setfl(signal, flags & !OFlags::NONBLOCK).unwrap();
}

/// Each queue, each descriptor and each connection could block the thread once more. It blocks only once.
#[test]
fn blocking_eventfds_delay_others_only_once() {
    let (victim, other) = (Disk::new(), Disk::new());
    let mut server = serve_all(&[
        "--iothreads=1".to_owned(),
        victim.argument("queues=2"),
        other.argument(""),
    ]);
    let mut bystander = Device::connect(&other.socket, &DeviceConfig::default()).unwrap();
    for _ in 0..2 {
        let config = DeviceConfig {
            queues: 2,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(&victim.socket, &config).unwrap();
        for _ in 0..2 {
            let calls = [full_eventfd(), full_eventfd()];
            for (queue, call) in (0..).zip(&calls) {
                device.frontend.set_vring_call(queue, call.as_fd()).unwrap();
                make_blocking(call);
            }
            for queue in 0..2 {
                assert_reads_uncalled(&mut device, queue);
                assert_reads(&mut bystander, 0);
            }
        }
    }
    assert!(server.terminate().unwrap().success());
    let log = server.log();
    assert_eq!(log.matches("has blocked an I/O thread").count(), 1, "{log}");
}

/// Descriptors that may block forever when polled or written to.
#[test]
fn only_eventfds_are_accepted() {
    let (server, _disk) = serve("queues=2");
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let memory = Memory::new(&[(0, 1 << 20)]).unwrap();
    let file = &memory.regions()[0].file;
    let descriptors = [
        reader.as_fd(),
        writer.as_fd(),
        socket.as_fd(),
        epoll.as_fd(),
        file.as_fd(),
    ];
    for (request, payload) in [
        (SET_VRING_KICK, &[0; 8][..]),
        (SET_VRING_CALL, &[0; 8]),
        (SET_VRING_ERR, &[0; 8]),
        (SET_LOG_FD, &[]),
    ] {
        for descriptor in descriptors {
            let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
            let sent = device.frontend.command(request, payload, &[descriptor]);
            assert!(sent.is_err(), "message {request} with {descriptor:?}");
        }
        let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
        let counter = eventfd().unwrap();
        let sent = device
            .frontend
            .command(request, payload, &[counter.as_fd()]);
        sent.unwrap();
    }
}

#[test]
fn blocking_dirty_log_eventfd_delays_no_other_disk() {
    let (victim, other) = (Disk::new(), Disk::new());
    let mut server = serve_all(&[
        "--iothreads=1".to_owned(),
        victim.argument(""),
        other.argument(""),
    ]);
    let mut bystander = Device::connect(&other.socket, &DeviceConfig::default()).unwrap();
    let mut device = Device::connect(&victim.socket, &DeviceConfig::default()).unwrap();
    let log = Memory::new(&[(0, 1 << 20)]).unwrap();
    let event = full_eventfd();
    let log = &log.regions()[0];
    device.frontend.set_log(log, event.as_fd()).unwrap();
    make_blocking(&event);
    let features = device.features | F_LOG_ALL;
    device.frontend.set_features(features).unwrap();
    for _ in 0..3 {
        assert_reads(&mut device, 0);
        assert_reads(&mut bystander, 0);
    }
    assert!(server.terminate().unwrap().success());
    assert!(!server.log().contains("has blocked an"), "{}", server.log());
}

/// The session thread signals rings that it cannot serve.
#[test]
fn blocking_error_eventfd_delays_no_other_disk() {
    let disk = Disk::new();
    let mut server = serve_all(&[disk.argument("queues=2")]);
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(&disk.socket, &config).unwrap();
    let error = full_eventfd();
    for queue in 0..2 {
        device.frontend.set_vring_err(queue, error.as_fd()).unwrap();
    }
    make_blocking(&error);
    // Misaligned, as a guest may set it up.
    for queue in 0..2 {
        let addresses = ring_addresses(&device, queue, 1, 0);
        let frontend = &mut device.frontend;
        frontend.command(SET_VRING_ADDR, &addresses, &[]).unwrap();
    }
    // Both rings are tried again.
    let spare = &device.memory.regions()[Device::SPARE];
    device.frontend.add_mem_reg(spare).unwrap();
    server.wait_for_log(&[support::QUEUE_UNUSABLE]);
    assert!(server.terminate().unwrap().success());
}
