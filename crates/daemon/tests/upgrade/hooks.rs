//! Hooks of the managers of VMs, which nobody repeats.

use std::fs;
use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rustix::process::{Pid, Signal, kill_process};

use super::{BINARY, Served};
use crate::support::content;

/// Disks begin and end with their domain while one ringdisk takes over from another.
#[test]
fn domains_start_and_end_during_upgrades() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = dir.path().to_owned();
    fs::write(at.join("vm1.raw"), content(1, 1 << 20)).unwrap();
    let arguments = [
        format!("--allow-dir={}", at.display()),
        format!(
            "null:1M,name=null,socket={}",
            at.join("null.sock").display()
        ),
    ];
    let mut served = Served::start_in(dir, &arguments, None);
    let domain = format!(
        "<domain><name>vm1</name><metadata><r:disks xmlns:r='urn:ringdisk:libvirt:1'>\
         <r:disk target='vda' file='{0}/vm1.raw'/></r:disks></metadata><devices><disk type='vhostuser' device='disk'>\
         <source type='unix' path='{0}/vm1.sock'/><target dev='vda' bus='virtio'/></disk></devices></domain>",
        at.display()
    );
    let hook = |domain: &str, operation: &str, step: &str| -> Output {
        let mut hook = Command::new(BINARY);
        hook.args(["hook", "libvirt", "vm1", operation, step, "-", "--control"]);
        hook.arg(&served.control);
        hook.stdin(Stdio::piped());
        hook.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut hook = hook.spawn().unwrap();
        hook.stdin
            .take()
            .unwrap()
            .write_all(domain.as_bytes())
            .unwrap();
        hook.wait_with_output().unwrap()
    };
    // Where libvirtd runs is no directory of a disk.
    let relative = domain.replace(&format!("{}/vm1.raw", at.display()), "vm1.raw");
    let refused = hook(&relative, "prepare", "begin");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && said.contains("no absolute path"),
        "{said}"
    );
    let is_over = AtomicBool::new(false);
    let last = thread::scope(|scope| {
        let upgrades = scope.spawn(|| {
            let mut pid = served.pid;
            while !is_over.load(Ordering::SeqCst) {
                let upgrade = served.ringdisk(&["upgrade", "--json"]);
                // A command that changes disks may have come first.
                if let Ok(reply) = serde_json::from_slice::<serde_json::Value>(&upgrade.stdout) {
                    pid = reply["pid"].as_u64().unwrap() as u32;
                }
            }
            pid
        });
        let hooks = scope.spawn(|| {
            for _ in 0..8 {
                for (operation, step) in [("prepare", "begin"), ("release", "end")] {
                    let ran = hook(&domain, operation, step);
                    assert!(ran.status.success(), "{ran:?}");
                }
            }
        });
        let hooks = hooks.join();
        is_over.store(true, Ordering::SeqCst);
        let last = upgrades.join().unwrap();
        hooks.unwrap();
        last
    });
    assert_ne!(last, served.pid);
    served.pid = last;
    let list = served.ringdisk(&["list", "--json"]);
    let text = String::from_utf8(list.stdout).unwrap();
    assert!(!text.contains("vm1"), "{text}");
    let _ = kill_process(Pid::from_raw(last as i32).unwrap(), Signal::TERM);
}
