//! Guests that go on after a kill, and those that must not: their image lacks what they have written.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};

use testkit::driver::{Device, DeviceConfig, Op};
use testkit::server::Server;

use super::{Image, kill};
use crate::support::content;

/// A guest goes on after a kill where its image's journal is not, as after a move to another host: it would lack
/// acknowledged writes. It goes on once they are there. A guest that starts needs no journal, and goes on after the next
/// kill, also if it has only read.
#[test]
fn no_guest_goes_on_without_the_journal_of_its_image() -> io::Result<()> {
    for (queues, has_state) in [(1, false), (2, true), (1, true)] {
        for packed in [false, true] {
            let Some(mut image) =
                Image::new("no_guest_goes_on_without_the_journal_of_its_image", "")
            else {
                return Ok(());
            };
            image.has_state = has_state;
            let config = DeviceConfig {
                queues,
                packed,
                inflight: packed,
                ..DeviceConfig::default()
            };
            let (here, elsewhere) = ["runtime", "elsewhere"]
                .map(|name| image.directory().join(name))
                .into();
            let options = format!(",queues={queues}");
            let server = image.serve(&options);
            let mut device = Device::connect(server.socket(), &config)?;
            let last = usize::from(queues) - 1;
            assert_eq!(device.queues[0].run(Op::Flush, 0, 0), 0);
            assert_eq!(device.queues[last].write(0, &content(1, 1 << 16)), 0);
            kill(server);
            fs::rename(&here, &elsewhere)?;
            let mut server = image.serve(&options);
            // Its last message may be refused.
            let _ = device.reconnect(server.socket(), &config);
            server.wait_for_log(&["may lack writes that its running guest relies on"]);
            // No command makes the journal worthless that is elsewhere.
            let mut resize = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
            resize.args(["resize", "image", "128M", "--control"]);
            let resized = resize.arg(image.control()).output()?;
            let said = String::from_utf8_lossy(&resized.stderr);
            assert!(said.contains("needs the journal of this image"), "{said}");
            assert!(server.terminate()?.success());
            fs::remove_dir_all(&here)?;
            fs::rename(&elsewhere, &here)?;
            let server = image.serve(&options);
            device.reconnect(server.socket(), &config)?;
            assert!(device.queues[last].read(0, 1 << 16).unwrap() == content(1, 1 << 16));

            assert_eq!(device.queues[last].write(1 << 11, &content(2, 1 << 16)), 0);
            kill(server);
            fs::rename(&here, &elsewhere)?;
            let server = image.serve(&options);
            let mut device = Device::connect(server.socket(), &config)?;
            assert!(device.queues[last].read(1 << 11, 1 << 16).unwrap() == vec![0; 1 << 16]);
            kill(server);
            let server = image.serve(&options);
            device.reconnect(server.socket(), &config)?;
            assert!(device.queues[last].read(1 << 11, 1 << 16).unwrap() == vec![0; 1 << 16]);
        }
    }
    Ok(())
}

/// What another program does with an image after a kill.
const CHANGES: [&str; 4] = [
    "check -q -r all",
    "snapshot -c s",
    "amend -o compat=v3",
    "copy",
];

/// A guest that has used a disk, is paused, and goes on elsewhere.
struct Paused {
    device: Device,
    bases: Vec<u32>,
}

impl Paused {
    fn of(image: &Image) -> io::Result<Self> {
        let mut server = image.serve("");
        let mut device = Device::connect(server.socket(), &with_region(false))?;
        assert_eq!(device.queues[0].run(Op::Flush, 0, 0), 0);
        let bases = device.pause(false)?;
        assert!(server.terminate()?.success());
        Ok(Self { device, bases })
    }

    fn go_on(mut self, server: &Server, config: &DeviceConfig) -> io::Result<Device> {
        self.device.rejoin(server.socket(), config)?;
        self.device.go_on(&self.bases)?;
        Ok(self.device)
    }
}

fn with_region(packed: bool) -> DeviceConfig {
    DeviceConfig {
        packed,
        inflight: true,
        ..DeviceConfig::default()
    }
}

/// A command of ringdisk writes to the image.
fn assert_resized(image: &Image) -> io::Result<()> {
    let mut resize = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    resize.args(["resize", "image", "65M", "--control"]);
    let resized = resize.arg(image.control()).output()?;
    let said = String::from_utf8_lossy(&resized.stderr);
    assert!(resized.status.success(), "{said}");
    Ok(())
}

fn assert_first(device: &mut Device, expected: &[u8]) {
    assert!(device.queues[0].read(0, expected.len()).unwrap() == expected);
}

/// Tries to go on, and is refused.
fn assert_refused(image: &Image, device: &mut Device, config: &DeviceConfig) -> io::Result<()> {
    let mut server = image.serve("");
    // Its last message may be refused.
    let _ = device.reconnect(server.socket(), config);
    server.wait_for_log(&["may lack writes that its running guest relies on"]);
    assert!(server.terminate()?.success());
    Ok(())
}

/// After a kill, another program opens the image for writing, or a copy is put back that was made while it was closed: then nothing
/// in the image says that it had a journal. No guest goes on that relies on that, however often ringdisk is started, and whatever
/// commands write meanwhile. One that starts, and one that comes from another host, do not rely on it, and others go on after the
/// next kill.
#[test]
fn no_guest_goes_on_after_others_have_changed_its_image() -> io::Result<()> {
    let test = "no_guest_goes_on_after_others_have_changed_its_image";
    let (written, nothing) = (content(1, 1 << 16), vec![0; 1 << 16]);
    for how in CHANGES {
        for next in ["starts", "comes", "has no region", "command", "twice"] {
            let Some(mut image) = Image::new(test, "") else {
                return Ok(());
            };
            let comes = next == "comes";
            image.has_state = comes;
            let config = match next {
                "has no region" => DeviceConfig::default(),
                _ => with_region(comes),
            };
            let paused = Paused::of(&image)?;
            let file = image.directory().join(&image.name);
            let copy = fs::read(&file)?;

            let server = image.serve("");
            let mut device = Device::connect(server.socket(), &config)?;
            assert_eq!(device.queues[0].run(Op::Flush, 0, 0), 0);
            assert_eq!(device.queues[0].write(0, &written), 0);
            kill(server);
            match how {
                "copy" => fs::write(&file, copy)?,
                _ => image.qemu_img_after_kill(how),
            }
            let has_command = ["command", "twice"].contains(&next);
            if has_command {
                let mut server = image.serve("");
                assert_resized(&image)?;
                assert!(server.terminate()?.success());
            }
            if next == "twice" {
                image.qemu_img("amend -o compat=v3 image.qcow2");
            }
            // The one that comes has started elsewhere since.
            for _ in 0..if comes { 0 } else { 2 } {
                assert_refused(&image, &mut device, &config)?;
            }
            if comes {
                let server = image.serve("");
                let mut other = paused.go_on(&server, &with_region(false))?;
                assert_first(&mut other, &nothing);
                kill(server);
            }
            let server = image.serve("");
            let mut device = Device::connect(server.socket(), &config)?;
            assert_first(&mut device, &nothing);
            kill(server);
            let server = image.serve("");
            device.reconnect(server.socket(), &config)?;
            assert_first(&mut device, &nothing);
        }
    }
    Ok(())
}

/// The journal is where it is not looked for, and then another program removes what the image says of it.
#[test]
fn no_guest_goes_on_after_its_journal_was_missed_and_others_have_changed_the_image()
-> io::Result<()> {
    let test = "no_guest_goes_on_after_its_journal_was_missed_and_others_have_changed_the_image";
    let config = with_region(false);
    for has_command in [false, true] {
        let Some(image) = Image::new(test, "") else {
            return Ok(());
        };
        let server = image.serve("");
        let mut device = Device::connect(server.socket(), &config)?;
        assert_eq!(device.queues[0].run(Op::Flush, 0, 0), 0);
        assert_eq!(device.queues[0].write(0, &content(1, 1 << 16)), 0);
        kill(server);
        let runtime = image.directory().join("runtime");
        fs::rename(runtime, image.directory().join("elsewhere"))?;
        let server = image.serve("");
        server.wait_for_log(&["WARN", "says that it has a journal"]);
        if has_command {
            assert_resized(&image)?;
        }
        kill(server);
        image.qemu_img_after_kill("amend -o compat=v3");
        assert_refused(&image, &mut device, &config)?;
        // One that starts misses nothing, nor when it goes on.
        let server = image.serve("");
        let mut device = Device::connect(server.socket(), &config)?;
        assert_first(&mut device, &[0; 1 << 16]);
        kill(server);
        image.qemu_img_after_kill("amend -o compat=v3");
        let server = image.serve("");
        device.reconnect(server.socket(), &config)?;
        assert_first(&mut device, &[0; 1 << 16]);
    }
    Ok(())
}

/// Another host, for the same image.
fn elsewhere<T>(image: &Image, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let at = image.directory();
    let exchange = |name: &str| -> io::Result<()> {
        let [here, other] =
            [name.to_owned(), format!("{name}-elsewhere")].map(|name| at.join(name));
        for directory in [&here, &other] {
            fs::create_dir_all(directory)?;
        }
        let between = at.join("between");
        fs::rename(&here, &between)?;
        fs::rename(&other, &here)?;
        fs::rename(&between, &other)
    };
    for name in ["runtime", "state"] {
        exchange(name)?;
    }
    let result = run();
    for name in ["runtime", "state"] {
        exchange(name)?;
    }
    result
}

/// As [`assert_refused`], after QEMU has moved to the host of this server.
fn assert_moved_is_refused(image: &Image, device: &mut Device) -> io::Result<()> {
    let mut server = image.serve("");
    let _ = device.move_after_death(server.socket(), &with_region(false));
    server.wait_for_log(&["may lack writes that its running guest relies on"]);
    assert!(server.terminate()?.success());
    Ok(())
}

/// A guest, and the image that lacks what it has written: its ringdisk was killed.
fn lost(image: &Image) -> io::Result<Device> {
    let server = image.serve("");
    let mut device = Device::connect(server.socket(), &with_region(false))?;
    assert_eq!(device.queues[0].run(Op::Flush, 0, 0), 0);
    assert_eq!(device.queues[0].write(0, &content(1, 1 << 16)), 0);
    kill(server);
    Ok(device)
}

/// A guest moves to another host after a kill, and another program removes what the image says: once one of the hosts has found out
/// that the guest lacks something, neither lets it go on.
#[test]
fn no_moved_guest_goes_on_once_its_loss_is_known() -> io::Result<()> {
    let test = "no_moved_guest_goes_on_once_its_loss_is_known";
    for found_here in [false, true] {
        for has_command in [false, true] {
            let Some(mut image) = Image::new(test, "") else {
                return Ok(());
            };
            image.has_state = true;
            let mut device = lost(&image)?;
            let command = || -> io::Result<()> {
                let mut server = image.serve("");
                assert_resized(&image)?;
                assert!(server.terminate()?.success());
                Ok(())
            };
            if found_here {
                image.qemu_img_after_kill("amend -o compat=v3");
                if has_command {
                    command()?;
                }
                assert_refused(&image, &mut device, &with_region(false))?;
            } else {
                elsewhere(&image, || {
                    if has_command {
                        command()?;
                    }
                    assert!(image.serve("").terminate()?.success());
                    Ok(())
                })?;
                image.qemu_img_after_kill("amend -o compat=v3");
            }
            elsewhere(&image, || {
                assert_moved_is_refused(&image, &mut device)?;
                // Until one starts, there or here.
                let server = image.serve("");
                let mut device = Device::connect(server.socket(), &with_region(false))?;
                assert_first(&mut device, &[0; 1 << 16]);
                kill(server);
                let server = image.serve("");
                device.reconnect(server.socket(), &with_region(false))?;
                assert_first(&mut device, &[0; 1 << 16]);
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// A journal was looked for elsewhere, in vain, and then found here: nobody misses it any more, elsewhere.
#[test]
fn what_was_found_is_not_missed_elsewhere() -> io::Result<()> {
    let test = "what_was_found_is_not_missed_elsewhere";
    for sessions in [0, 1, 3] {
        let Some(mut image) = Image::new(test, "") else {
            return Ok(());
        };
        image.has_state = true;
        let mut device = lost(&image)?;
        elsewhere(&image, || {
            let mut server = image.serve("");
            server.wait_for_log(&["WARN", "says that it has a journal"]);
            assert!(server.terminate()?.success());
            Ok(())
        })?;
        let mut server = image.serve("");
        server.wait_for_log(&["replayed"]);
        assert!(server.terminate()?.success());
        for session in 0..sessions {
            let mut server = image.serve("");
            device.reconnect(server.socket(), &with_region(false))?;
            assert_first(&mut device, &content(1, 1 << 16));
            let written = device.queues[0].write(1 << 11, &content(session, 1 << 16));
            assert_eq!(written, 0);
            assert!(server.terminate()?.success());
        }
        elsewhere(&image, || {
            let server = image.serve("");
            device.reconnect(server.socket(), &with_region(false))?;
            assert_first(&mut device, &content(1, 1 << 16));
            Ok(())
        })?;
    }
    Ok(())
}

/// A VM that was lost here in a kill was started again elsewhere, and comes back: it misses nothing, whatever was written to its
/// image here before it comes.
#[test]
fn guest_comes_back_to_the_host_where_it_was_lost() -> io::Result<()> {
    let test = "guest_comes_back_to_the_host_where_it_was_lost";
    for has_command in [false, true] {
        let Some(mut image) = Image::new(test, "") else {
            return Ok(());
        };
        image.has_state = true;
        image.qemu_img("bitmap --add image.qcow2 copied");
        let paused = Paused::of(&image)?;
        let server = image.serve("");
        let mut lost = Device::connect(server.socket(), &with_region(true))?;
        assert_eq!(lost.queues[0].write(0, &content(1, 1 << 16)), 0);
        kill(server);
        image.qemu_img_after_kill("amend -o compat=v3");
        let server = image.serve("");
        if has_command {
            assert_resized(&image)?;
        }
        let mut back = paused.go_on(&server, &with_region(false))?;
        assert_first(&mut back, &[0; 1 << 16]);
    }
    Ok(())
}

/// A guest that lacks nothing goes on: what it has written was durable when it paused, or there was nothing.
#[test]
fn guests_that_lack_nothing_go_on_after_others_have_changed_the_image() -> io::Result<()> {
    let test = "guests_that_lack_nothing_go_on_after_others_have_changed_the_image";
    let (config, written) = (with_region(false), content(1, 1 << 16));
    for how in &CHANGES[..3] {
        let Some(mut image) = Image::new(test, "") else {
            return Ok(());
        };
        let server = image.serve("");
        let mut device = Device::connect(server.socket(), &config)?;
        assert_eq!(device.queues[0].write(0, &written), 0);
        let bases = device.pause(false)?;
        kill(server);
        image.qemu_img_after_kill(how);
        let mut server = image.serve("");
        let mut device = Paused { device, bases }.go_on(&server, &config)?;
        assert_first(&mut device, &written);
        assert!(server.terminate()?.success());
        // With a bitmap, ringdisk writes to the image when it opens it.
        image.qemu_img("bitmap --add image.qcow2 copied");
        image.has_state = true;
        let server = image.serve("");
        device.reconnect(server.socket(), &config)?;
        assert_first(&mut device, &written);
        kill(server);
        image.qemu_img_after_kill("amend -o compat=v3");
        let server = image.serve("");
        device.reconnect(server.socket(), &config)?;
        assert_first(&mut device, &written);
    }
    Ok(())
}

/// A copy is put back that was made while the image said that it had everything: the journal after it is newer.
#[test]
fn no_guest_goes_on_with_a_copy_of_a_complete_image() -> io::Result<()> {
    let Some(image) = Image::new("no_guest_goes_on_with_a_copy_of_a_complete_image", "") else {
        return Ok(());
    };
    let config = with_region(false);
    let server = image.serve("");
    let mut device = Device::connect(server.socket(), &config)?;
    assert_eq!(device.queues[0].write(0, &content(1, 1 << 16)), 0);
    kill(server);
    let server = image.serve("");
    server.wait_for_log(&["replayed"]);
    device.reconnect(server.socket(), &config)?;
    let file = image.directory().join(&image.name);
    let copy = fs::read(&file)?;
    assert_eq!(device.queues[0].write(1 << 12, &content(2, 1 << 16)), 0);
    kill(server);
    fs::write(&file, copy)?;
    assert_refused(&image, &mut device, &config)
}

/// A new image has got the number of a deleted one, whose journal is still there.
#[test]
fn journal_of_a_deleted_image_keeps_no_guest_from_another() -> io::Result<()> {
    let test = "journal_of_a_deleted_image_keeps_no_guest_from_another";
    let Some(image) = Image::new(test, "") else {
        return Ok(());
    };
    let config = with_region(false);
    let (file, server) = (image.directory().join(&image.name), image.serve(""));
    let mut device = Device::connect(server.socket(), &config)?;
    assert_eq!(device.queues[0].write(0, &content(1, 1 << 16)), 0);
    kill(server);
    image.qemu_img_after_kill("info");
    let number = fs::metadata(&file)?.ino();
    fs::remove_file(&file)?;
    image.qemu_img("create -q -f qcow2 image.qcow2 64M");
    if fs::metadata(&file)?.ino() != number {
        println!("skipped: {test}: the file system does not use the number again");
        return Ok(());
    }
    let server = image.serve("");
    device.reconnect(server.socket(), &config)?;
    assert_first(&mut device, &[0; 1 << 16]);
    Ok(())
}

/// A guest starts where another program has the image for longer than ringdisk waits; when that has ended, it still starts.
#[test]
fn guest_that_was_refused_for_a_lock_still_starts() -> io::Result<()> {
    let Some(image) = Image::new("guest_that_was_refused_for_a_lock_still_starts", "") else {
        return Ok(());
    };
    let config = with_region(false);
    let mut device = Paused::of(&image)?.device;
    let server = image.serve("");
    let mut other = Device::connect(server.socket(), &config)?;
    assert_eq!(other.queues[0].write(0, &content(1, 1 << 16)), 0);
    kill(server);
    image.qemu_img_after_kill("amend -o compat=v3");
    let server = image.serve(",lock=running");
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.arg(&image.name).current_dir(image.directory());
    let mut qemu_io = qemu_io
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    // It has the lock when it has answered.
    let (input, output) = (qemu_io.stdin.as_mut(), qemu_io.stdout.as_mut());
    input.unwrap().write_all(b"length\n")?;
    let mut answer = [0; 64];
    let answered = output.unwrap().read(&mut answer)?;
    assert!(answered > 0);
    device.rejoin(server.socket(), &config)?;
    let _ = device.start_queue(0, 0);
    server.wait_for_log(&["in use"]);
    drop(qemu_io.stdin.take());
    qemu_io.wait()?;
    device.rejoin(server.socket(), &config)?;
    device.start_queue(0, 0)?;
    assert_first(&mut device, &[0; 1 << 16]);
    Ok(())
}
