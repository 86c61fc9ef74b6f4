//! Systems where io_uring is forbidden, missing or disabled.

use super::*;

#[expect(unsafe_code, reason = "the standard library knows no seccomp")]
unsafe extern "C" {
    fn prctl(option: i32, ...) -> i32;
}

#[repr(C)]
struct Instruction {
    code: u16,
    jump_true: u8,
    jump_false: u8,
    operand: u32,
}

#[repr(C)]
struct Program {
    len: u16,
    instructions: *const Instruction,
}

/// Makes io_uring_setup fail with `errno` for a command and its children only.
#[expect(unsafe_code, reason = "the standard library knows no seccomp")]
fn without_io_uring(command: &mut Command, errno: u32) {
    const PR_SET_SECCOMP: i32 = 22;
    const SECCOMP_MODE_FILTER: usize = 2;
    const PR_SET_NO_NEW_PRIVS: i32 = 38;
    const IO_URING_SETUP: u32 = 425;
    let instruction = |code, jump_false, operand| Instruction {
        code,
        jump_true: 0,
        jump_false,
        operand,
    };
    let filter = move || {
        let instructions = [
            instruction(0x20, 0, 0),              // load the number of the system call
            instruction(0x15, 1, IO_URING_SETUP), // skip one unless it is this
            instruction(0x06, 0, 0x0005_0000 | errno), // return an error
            instruction(0x06, 0, 0x7fff_0000),    // let it pass
        ];
        let program = Program {
            len: instructions.len() as u16,
            instructions: instructions.as_ptr(),
        };
        // SAFETY: the first takes numbers, the second reads a program that lives until it returns.
        let failed = unsafe {
            prctl(PR_SET_NO_NEW_PRIVS, 1usize, 0usize, 0usize, 0usize) != 0
                || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &raw const program) != 0
        };
        if failed {
            Err(std::io::Error::last_os_error())
        } else {
            Ok(())
        }
    };
    // SAFETY: between fork and exec it makes two system calls and allocates nothing.
    unsafe { command.pre_exec(filter) };
}

#[test]
fn forbidden_or_missing_io_uring_is_reported() {
    const EPERM: u32 = 1;
    const EACCES: u32 = 13;
    const ENOSYS: u32 = 38;
    const ENOMEM: u32 = 12;
    let disk = Disk::new();
    let setting = fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    let forbidden = &["io_uring is forbidden", "container", "io_uring_setup"][..];
    for (errno, words) in [
        (EPERM, forbidden),
        (EACCES, forbidden),
        (ENOSYS, &["this kernel has no io_uring", "Linux 5."]),
        (ENOMEM, &["io_uring cannot be set up", "memory"]),
    ] {
        if errno == EPERM && setting.as_ref().is_ok_and(|s| s.trim() != "0") {
            continue;
        }
        let mut command = ringdisk();
        without_io_uring(&mut command, errno);
        command.args(["serve", &disk.argument("aio=io_uring")]);
        assert_fails(command, 1, &[words, &["aio=auto"]].concat());
        assert!(!disk.socket.exists());
        // Without an explicit `aio`, the disk is served without io_uring.
        let mut command = ringdisk();
        without_io_uring(&mut command, errno);
        command.args(["serve", "--json", &disk.argument("cache=none")]);
        let mut server = Server::ringdisk_command(command).unwrap();
        let chosen = server.wait_for_log(&["aio="]);
        assert!(!chosen.contains("aio=io_uring"), "{chosen}");
        assert!(chosen.contains(words[0]), "{chosen}");
        assert_serves(&disk.socket);
        assert!(server.terminate().unwrap().success());
    }
}

/// Disabled as if by `sysctl`, but only for this one process.
#[test]
fn disabled_io_uring_is_reported() {
    const TEST: &str = "disabled_io_uring_is_reported";
    let disk = Disk::new();
    let setting = disk.file.with_extension("setting");
    let binary = env!("CARGO_BIN_EXE_ringdisk");
    for value in ["1", "2"] {
        fs::write(&setting, format!("{value}\n")).unwrap();
        let script = "mount --bind \"$0\" /proc/sys/kernel/io_uring_disabled || exit 99; \
            exec \"$@\"";
        let unshare = |program: &[&str]| {
            let mut command = Command::new("unshare");
            command.args(["-m", "sh", "-c", script]).arg(&setting);
            command.args(program).stdin(Stdio::null());
            command
        };
        match unshare(&["true"]).output() {
            Ok(output) if output.status.success() => {}
            result => return println!("skipped: {TEST}: no namespace of its own: {result:?}"),
        }
        let mut command = unshare(&[binary, "serve", &disk.argument("aio=io_uring")]);
        without_io_uring(&mut command, 1);
        let words = [
            "switched off",
            &format!("kernel.io_uring_disabled = {value}"),
            "sysctl -w kernel.io_uring_disabled=0",
        ];
        assert_fails(command, 1, &words);
    }
}
