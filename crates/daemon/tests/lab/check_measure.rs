//! `ringdisk check --measure` with real servers, or with real guests where KVM works.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::{are_installed, can_run_guests, output_text};

/// A VM whose disk has the page cache and no I/O thread, in a folder of its own.
struct VmFolder(tempfile::TempDir);

impl VmFolder {
    fn new() -> Self {
        // Not in /tmp, which may be a tmpfs: the test needs O_DIRECT of a real file system.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let disk = folder.path().join("a.raw");
        File::create(&disk).unwrap().set_len(64 << 20).unwrap();
        let command = format!(
            "qemu-system-x86_64 -accel kvm -machine q35 -m 512 -drive file={},format=raw,if=virtio\n",
            disk.display()
        );
        fs::write(folder.path().join("vm1.sh"), command).unwrap();
        Self(folder)
    }

    fn check(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command
            .arg("check")
            .args(arguments)
            .arg("vm1.sh")
            .current_dir(self.0.path())
            .env("XDG_STATE_HOME", self.0.path().join("state"))
            .stdin(Stdio::null());
        command
    }

    /// The bytes of the disk, the time of its last change, and its allocated blocks.
    fn disk(&self) -> (Vec<u8>, i64, u64) {
        let path = self.0.path().join("a.raw");
        let metadata = fs::metadata(&path).unwrap();
        (fs::read(path).unwrap(), metadata.mtime(), metadata.blocks())
    }

    fn assert_no_scratch_disk(&self) {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        let is_scratch = |name: &std::ffi::OsString| name.to_string_lossy().contains("measure");
        assert!(!names.iter().any(is_scratch), "{names:?}");
    }
}

#[test]
fn findings_are_measured_beside_the_disk_which_stays_as_it_is() {
    let name = "findings_are_measured_beside_the_disk_which_stays_as_it_is";
    if !are_installed(name, &["qemu-storage-daemon"]) || !can_run_guests(name) {
        return;
    }
    let vm = VmFolder::new();
    let before = vm.disk();
    let mut command = vm.check(&["--measure", "--yes", "--json", "--budget", "90s"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", output_text(&output));
    assert!(vm.disk() == before, "the VM's disk has changed");
    vm.assert_no_scratch_disk();
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let measurement = &json["measurement"];
    let comparisons = measurement["disks"][0]["comparisons"].as_array().unwrap();
    let ringdisk = comparisons.iter().find(|one| one["name"] == "ringdisk");
    let gains = ringdisk.and_then(|one| one["gains"].as_array()).unwrap();
    assert!(!gains.is_empty(), "{}", output_text(&output));
    // Each finding has a figure of this run, or a reason.
    let reasons = measurement["not-measured"].as_array().unwrap();
    for finding in json["findings"].as_array().unwrap() {
        let is_note = finding["severity"] == "info";
        let has_reason = reasons.iter().any(|one| one["rule"] == finding["rule"]);
        let has_figure = finding["measured"]
            .as_array()
            .is_some_and(|all| !all.is_empty());
        assert!(is_note || has_reason || has_figure, "{finding}");
    }
}

#[test]
fn nothing_is_created_without_consent_and_a_plan_creates_nothing() {
    let vm = VmFolder::new();
    let output = vm.check(&["--plan"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", output_text(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let plan = lab::plan::Plan::parse(std::path::Path::new("plan.toml"), &text).unwrap();
    assert_eq!(plan.cases[0].name, "now");
    vm.assert_no_scratch_disk();
    let name = "nothing_is_created_without_consent_and_a_plan_creates_nothing";
    if !are_installed(name, &["qemu-storage-daemon"]) || !can_run_guests(name) {
        return;
    }
    let output = vm.check(&["--measure"]).output().unwrap();
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("nothing was created") && said.contains("--yes"),
        "{said}"
    );
    vm.assert_no_scratch_disk();
}
