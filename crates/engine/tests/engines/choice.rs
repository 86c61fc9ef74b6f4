//! Which engine is chosen when, and what is said of it.

use std::sync::Arc;

use block::{Aio, CacheMode, Engine};
use engine::{Choice, MultiEngine, Support, choose};

use super::places::{Place, support};

fn chosen(place: &Place, aio: Aio, ring: bool) -> Result<Choice, String> {
    let file = place.open(false).unwrap();
    choose(&file, aio, &support(ring)).map_err(|e| e.to_string())
}

#[test]
fn auto_takes_what_works_and_suits() {
    for place in Place::all() {
        let direct = if place.cache.direct() {
            "O_DIRECT"
        } else {
            "buffered"
        };
        let with = chosen(&place, Aio::Auto, true).unwrap();
        assert_eq!(with.aio, Aio::IoUring, "{}", place.name);
        assert!(with.reason.starts_with(direct), "{with:?}");
        let without = chosen(&place, Aio::Auto, false).unwrap();
        let native = place.cache.direct() && !place.name.starts_with("tmpfs");
        let expected = if native { Aio::Native } else { Aio::Threads };
        assert_eq!(without.aio, expected, "{}", place.name);
        let why = "io_uring is switched off (kernel.io_uring_disabled = 2)";
        assert!(without.reason.ends_with(why), "{without:?}");
        if place.name.starts_with("tmpfs") {
            assert!(with.reason.contains("plain calls"), "{with:?}");
            assert!(with.reason.contains(" on tmpfs"), "{with:?}");
        }
    }
}

#[test]
fn requested_method_is_used_or_refused_with_next_step() {
    for place in Place::all() {
        for aio in [Aio::IoUring, Aio::Threads] {
            assert_eq!(chosen(&place, aio, true).unwrap().aio, aio);
        }
        match (chosen(&place, Aio::Native, false), place.cache) {
            (Ok(choice), CacheMode::None | CacheMode::Directsync) => {
                assert_eq!(choice.aio, Aio::Native);
            }
            (Err(e), CacheMode::Writeback) => assert!(e.contains("cache=none"), "{e}"),
            (other, cache) => panic!("{}, cache={cache}: {other:?}", place.name),
        }
        let error = chosen(&place, Aio::IoUring, false).unwrap_err();
        assert!(
            error.contains("aio=auto") && error.contains("sysctl -w"),
            "{error}"
        );
        // The engine itself refuses as well.
        let file = place.open(false).unwrap();
        let mut engines = MultiEngine::new(support(false)).unwrap();
        let error = engines
            .attach(file.descriptor(), file.backing(), Aio::IoUring)
            .unwrap_err();
        assert!(error.to_string().contains("aio=auto"), "{error}");
    }
}

/// In a container that filters system calls, all goes on without io_uring.
#[test]
fn seccomp_filter_forbids_io_uring() {
    // The filter is for this thread alone, which ends with the test.
    forbid(libc::SYS_io_uring_setup);
    let support = Arc::new(Support::probe());
    assert!(support.linux_aio.is_ok());
    for place in Place::all() {
        let file = place.open(false).unwrap();
        let choice = choose(&file, Aio::Auto, &support).unwrap();
        assert_ne!(choice.aio, Aio::IoUring);
        let why = "io_uring is forbidden here by a seccomp filter";
        assert!(choice.reason.ends_with(why), "{choice:?}");
        drop(file);
        let mut engines = MultiEngine::new(support.clone()).unwrap();
        let (_file, subject) = place.attach(&mut engines, Aio::Auto);
        testkit::conformance::runs_at_full_capacity(&mut engines, &subject);
    }
    // And without Linux AIO as well.
    forbid(libc::SYS_io_setup);
    let support = Support::probe();
    for place in Place::all() {
        let file = place.open(false).unwrap();
        let choice = choose(&file, Aio::Auto, &support).unwrap();
        assert_eq!(choice.aio, Aio::Threads);
        let error = choose(&file, Aio::Native, &support).unwrap_err();
        let expected = if place.cache.direct() {
            "io_setup"
        } else {
            "cache=none"
        };
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// From now on, the system call fails with EPERM in this thread.
#[expect(unsafe_code, reason = "libc has no safe way to set a filter")]
fn forbid(call: libc::c_long) {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let errno = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        // The number of the system call is the first field of what is looked at.
        op(LOAD, 0, 0, 0),
        op(JUMP_EQUAL, 0, 1, call as u32),
        op(RETURN, 0, 0, errno),
        op(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: both calls change only this thread; the second reads the program, which is alive.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program),
            0
        );
    }
}
