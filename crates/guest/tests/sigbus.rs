//! A SIGBUS in guest memory is survived; one anywhere else ends the process as if nobody had a handler.
#![expect(unsafe_code, reason = "fork, and memory whose file is cut short")]

use std::os::fd::OwnedFd;
use std::ptr;

use guest::{GuestMemory, RegionLayout, SessionAbort};
use nix::sys::signal::{Signal, raise};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};

const BYTES: usize = 0x4000;

fn file() -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BYTES as u64).unwrap();
    file
}

fn guest(file: &OwnedFd) -> (GuestMemory, *mut u8) {
    let layout = RegionLayout {
        guest: 0,
        len: BYTES as u64,
        user: 0x7000_0000,
        file_offset: 0,
    };
    let memory = GuestMemory::watched(SessionAbort::new().unwrap());
    let memory = memory
        .with_region(layout, file.try_clone().unwrap())
        .unwrap();
    let at = memory.mappings().next().unwrap().addr;
    (memory, at as *mut u8)
}

/// How a process ends that does this.
fn end_of(work: impl FnOnce()) -> WaitStatus {
    // SAFETY: the child does its work and ends; what it allocates with, the C library keeps usable after a fork.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            work();
            // SAFETY: ends the process, and runs nothing of what the parent has to run at its end.
            unsafe { nix::libc::_exit(0) }
        }
        ForkResult::Parent { child } => waitpid(child, None).unwrap(),
    }
}

#[test]
fn truncated_memory_reads_as_zeroes_and_is_writable() {
    let file = file();
    let (memory, at) = guest(&file);
    // SAFETY: mapped, whatever the file's length; nothing is borrowed.
    unsafe {
        at.write_volatile(7);
        ftruncate(&file, 0).unwrap();
        assert_eq!(at.add(BYTES - 1).read_volatile(), 0);
        at.add(0x1000).write_volatile(8);
        assert_eq!((at.read_volatile(), at.add(0x1000).read_volatile()), (0, 8));
    }
    drop(memory);
    // The place is free for others: these are known by themselves.
    let (again, at) = guest(&self::file());
    // SAFETY: mapped.
    unsafe { at.write_volatile(9) };
    drop(again);
}

#[test]
fn elsewhere_it_ends_the_process() {
    let _handler = guest(&file());
    let file = file();
    let flags = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping.
    let other = unsafe { mmap(ptr::null_mut(), BYTES, flags, MapFlags::SHARED, &file, 0) }.unwrap();
    ftruncate(&file, 0).unwrap();
    // SAFETY: mapped; that it faults is what is tested.
    let end = end_of(|| assert_eq!(unsafe { other.cast::<u8>().read_volatile() }, 0));
    assert!(
        matches!(end, WaitStatus::Signaled(_, Signal::SIGBUS, _)),
        "{end:?}"
    );
    let end = end_of(|| raise(Signal::SIGBUS).unwrap());
    assert!(
        matches!(end, WaitStatus::Signaled(_, Signal::SIGBUS, _)),
        "{end:?}"
    );
}
