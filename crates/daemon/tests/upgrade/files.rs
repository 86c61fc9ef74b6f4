//! Which file a guest is on after a handover.

use std::os::unix::fs::MetadataExt;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;
use crate::support::loop_device::LoopDevice;

/// A disk that was moved to an image, and one that was moved to an overlay of that, are handed over on those images.
#[test]
fn replaced_disk_is_handed_over() {
    let (mut image, raw) = (Disk::new(), Disk::new());
    image.file = raw.file.with_file_name("other");
    if !qcow2(&mut image) {
        println!("skipped: replaced_disk_is_handed_over: there is no qemu-img");
        return;
    }
    fs::write(&raw.file, vec![0; 64 << 20]).unwrap();
    let options = "queues=2,queue-size=64,name=disk";
    let mut served = Served::start(&[raw.argument(options)]);
    let mut random = Random(seed());
    let device = Device::connect(&raw.socket, &config()).unwrap();
    served.replace("disk", &image.file);
    let loads = Load::all(&device, 4096, BlockContent::Zeroes, true);
    let mut devices = vec![(device, loads)];
    let at = image.file.parent().unwrap();
    let below = image.file.file_name().unwrap().to_str().unwrap();
    let name = "above.qcow2";
    for round in 0..3 {
        under_load(&mut devices, &mut random, || {
            thread::sleep(Duration::from_millis(100));
            if round == 1 {
                let create = format!("create -q -f qcow2 -b {below} -F qcow2 {name}");
                testkit::qemu_img::img(at, &create);
                served.replace("disk", &at.join(name));
            }
            served.upgrade(&[]);
        });
    }
    // The backing file is handed from process to process, too.
    testkit::qemu_img::is_locked(at, below, "qcow2");
    for (device, loads) in &mut devices {
        Load::finish(loads, device);
    }
    served.end();
    testkit::qemu_img::check(at, below, false);
    testkit::qemu_img::check(at, name, false);
    let converted = format!("convert -f qcow2 -O raw {name} converted");
    testkit::qemu_img::img(at, &converted);
    for load in &devices[0].1 {
        load.verify(&at.join("converted")).unwrap();
    }
    assert!(fs::read(&raw.file).unwrap() == vec![0; 64 << 20]);
}

/// The node of a block device is removed: its guest continues, and is not told that the device is gone.
#[test]
fn device_without_a_node_is_handed_over() {
    let Some(device) = LoopDevice::new() else {
        return;
    };
    let (node, socket) = (device.dir.path().join("node"), device.dir.path().join("s"));
    let rdev = fs::metadata(&device.device).unwrap().rdev();
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, &node, FileType::BlockDevice, mode, rdev).unwrap();
    let disk = format!("file={},name=d,socket={}", node.display(), socket.display());
    let mut served = Served::start(&[disk]);
    let mut device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].write(8, &[7; 4096]), 0);
    fs::remove_file(&node).unwrap();
    served.upgrade(&[]);
    served
        .first
        .wait_for_log(&["disk d", "on the device that it has open", "no device node"]);
    assert!(!served.first.log().contains("lost when"));
    assert_eq!(device.queues[0].read(8, 4096).unwrap(), [7; 4096]);
    served.end();
}

/// The guest's write cache setting in the handover is newer than the persisted one: with the older one, a guest that
/// switched the cache off would lose unflushed data.
#[test]
fn handed_over_write_cache_wins_over_persisted_state() {
    let disk = Disk::new();
    let mut served = Served::start(&[disk.argument("queues=2,name=disk,cache=directsync")]);
    let mut device = Device::connect(&disk.socket, &config()).unwrap();
    let state = served.dir.path().join("state/state.json");
    let mut choose = |on: u8, kept: Value| {
        device.frontend.set_config(32, &[on]).unwrap();
        let start = Instant::now();
        loop {
            let text = fs::read_to_string(&state).unwrap();
            let now: Value = serde_json::from_str(&text).unwrap();
            if now["write-caches"]["disk"] == kept {
                return text;
            }
            assert!(start.elapsed() < HANG, "{text}");
            thread::sleep(Duration::from_millis(10));
        }
    };
    let older = choose(1, true.into());
    choose(0, Value::Null);
    // The state as it is before the last setting was written.
    let kept = served.dir.path().join("older");
    fs::write(&kept, older).unwrap();
    let program = served.script(
        "behind",
        &format!(
            r#"cp {} {} && exec {BINARY} "$@""#,
            kept.display(),
            state.display()
        ),
    );
    served.upgrade(&["--program", program.to_str().unwrap()]);
    assert_eq!(device.frontend.config(32, 1).unwrap(), [0]);
    drop(device);
    // The old setting does not come back with the next front-end or the next process.
    let mut device = Device::connect(&disk.socket, &config()).unwrap();
    served.upgrade(&[]);
    assert_eq!(device.frontend.config(32, 1).unwrap(), [0]);
    served.end();
}

/// Disks with the same content in one directory, some of them configured.
struct Files(tempfile::TempDir);

impl Files {
    fn new(names: &[&str]) -> Self {
        let files = Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        for name in names {
            fs::write(files.path(name), content(0, 4 << 20)).unwrap();
        }
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A configuration file beside them, which outlives this value.
    fn config(&self) -> Config {
        Config(self.0.path().to_owned())
    }

    fn serve(self, arguments: &[String]) -> Served {
        let config = format!("--config={}", self.path("config.toml").display());
        Served::start_in(self.0, &[&[config][..], arguments].concat(), None)
    }
}

/// A configuration, beside its disks.
struct Config(PathBuf);

impl Config {
    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Disks by name, file and socket, each with two queues and more lines.
    fn write(&self, disks: &[(&str, &str, &str)], more: &str) {
        let dir = self.0.display();
        let text = disks.iter().map(|(name, file, socket)| {
            format!("[[disk]]\nname = \"{name}\"\nfile = \"{dir}/{file}\"\nsocket = \"{dir}/{socket}\"\nqueues = 2\n{more}\n")
        });
        fs::write(self.path("config.toml"), text.collect::<String>()).unwrap();
    }

    fn argument(&self, name: &str) -> String {
        let dir = self.0.display();
        format!("{dir}/{name}.raw,socket={dir}/{name}.sock,queues=2")
    }

    /// Lets a guest write to one file, and checks that the write reaches no other.
    fn write_goes_to(&self, device: &mut Device, sector: u64, file: &str, others: &[&str]) {
        let new = content(4711 + sector, 4096);
        assert_eq!(device.queues[1].write(sector, &new), 0);
        assert_eq!(device.queues[0].read(sector, 4096).unwrap(), new);
        let there = |name: &str| {
            let bytes = fs::read(self.path(name)).unwrap();
            bytes[sector as usize * 512..][..4096] == new
        };
        assert!(there(file), "{file}");
        others
            .iter()
            .for_each(|other| assert!(!there(other), "{other}"));
    }
}

/// A disk stays on the file set by command: with and without persisted state, on the command line and in a
/// configuration that changes something else. Otherwise its guest would continue on a file that it left long ago.
#[test]
fn disk_stays_on_the_file_set_by_command() {
    for state in [false, true] {
        println!("with state: {state}");
        let files = Files::new(&["a.raw", "a2.raw", "b.raw", "b2.raw"]);
        let here = files.config();
        here.write(&[("b", "b.raw", "b.sock")], "");
        let mut arguments = vec![here.argument("a")];
        if state {
            arguments.push(format!("--state={}", here.path("state").display()));
        }
        let mut served = files.serve(&arguments);
        let connect = |name| Device::connect(here.path(name), &config()).unwrap();
        let (mut a, mut b) = (connect("a.sock"), connect("b.sock"));
        let on = |served: &Served| {
            for (name, file) in [("a", "a2.raw"), ("b", "b2.raw")] {
                let disk = served.disk(name);
                assert_eq!(disk["file"], here.path(file).to_str().unwrap(), "{disk}");
            }
        };
        served.replace("a", &here.path("a2.raw"));
        served.replace("b", &here.path("b2.raw"));
        on(&served);
        for round in 0..3 {
            // From the second round on, the previous process has itself inherited the file.
            if round == 1 {
                here.write(&[("b", "b.raw", "b.sock")], "iops = 77");
            }
            served.upgrade(&[]);
            on(&served);
            here.write_goes_to(&mut a, 8 + 8 * round, "a2.raw", &["a.raw"]);
            here.write_goes_to(&mut b, 8 + 8 * round, "b2.raw", &["b.raw"]);
        }
        assert_eq!(served.disk("b")["limits"]["iops"], 77);
        // A later reload does not change it either.
        here.write(&[("b", "b.raw", "b.sock")], "iops = 78");
        let reloaded = served.ringdisk(&["reload"]);
        assert!(reloaded.status.success(), "{reloaded:?}");
        on(&served);
        assert_eq!(served.disk("b")["limits"]["iops"], 78);
        served.end();
    }
}

/// A detached disk is not served by the next process, whether its file exists or not: it does not come back on its own,
/// and does not prevent an upgrade.
#[test]
fn detached_disk_stays_detached() {
    for state in [false, true] {
        println!("with state: {state}");
        let files = Files::new(&["a.raw", "b.raw", "c.raw", "d.raw", "e.raw"]);
        let here = files.config();
        let disks = [("c", "c.raw", "c.sock"), ("d", "d.raw", "d.sock")];
        here.write(&disks, "");
        let mut arguments = vec![here.argument("a"), here.argument("b")];
        if state {
            arguments.push(format!("--state={}", here.path("state").display()));
        }
        let mut served = files.serve(&arguments);
        let mut device = Device::connect(here.path("b.sock"), &config()).unwrap();
        let works = |served: &Served, arguments: &[&str]| {
            let output = served.ringdisk(arguments);
            assert!(output.status.success(), "{arguments:?}: {output:?}");
        };
        works(&served, &["detach", "a"]);
        works(&served, &["detach", "c"]);
        fs::remove_file(here.path("a.raw")).unwrap();
        let names = |served: &Served| {
            let list = served.ringdisk(&["list", "--json"]).stdout;
            let list: Value = serde_json::from_slice(&list).unwrap();
            let disks = list.as_array().unwrap().clone();
            let names = disks.into_iter().map(|disk| disk["name"].clone());
            names.collect::<Vec<_>>()
        };
        // In the second round, the new process hands over.
        for round in 0..2 {
            served.upgrade(&[]);
            assert_eq!(names(&served), ["b", "d"], "round {round}");
            here.write_goes_to(&mut device, 8 + 8 * round, "b.raw", &["d.raw"]);
            works(&served, &["reload"]);
            assert_eq!(names(&served), ["b", "d"], "round {round}");
        }
        // A disk that was configured since is served.
        here.write(&[disks[0], disks[1], ("e", "e.raw", "e.sock")], "");
        served.upgrade(&[]);
        // By the reload after the upgrade, so that no guest waits for it.
        support::wait_until("the new disk", || names(&served) == ["b", "d", "e"]);
        works(&served, &["attach", &here.argument("c")]);
        served.upgrade(&[]);
        assert_eq!(names(&served), ["b", "c", "d", "e"]);
        served.end();
    }
}

/// Changes made by command are handed over even if they are not persisted, or cannot be: otherwise the guest of an
/// attached disk would lose it.
#[test]
fn unsaved_changes_are_handed_over() {
    for state in [false, true] {
        println!("with state: {state}");
        let files = Files::new(&["a.raw", "b.raw", "c.raw"]);
        let here = files.config();
        here.write(&[("b", "b.raw", "b.sock")], "");
        let mut arguments = vec![here.argument("a")];
        if state {
            arguments.push(format!("--state={}", here.path("state").display()));
        }
        let mut served = files.serve(&arguments);
        if state {
            // A directory of this name prevents writing the file.
            fs::create_dir(here.path("state/state.new")).unwrap();
        }
        let works = |served: &Served, arguments: &[&str]| {
            let output = served.ringdisk(arguments);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            // What was not saved is reported.
            let is_done = output.status.success() || state && said.contains("it is done, but");
            assert!(is_done, "{arguments:?}: {output:?}");
        };
        works(&served, &["attach", &here.argument("c")]);
        works(&served, &["detach", "b"]);
        works(&served, &["throttle", "a", "iops=77"]);
        let mut device = Device::connect(here.path("c.sock"), &config()).unwrap();
        for round in 0..2 {
            served.upgrade(&[]);
            let list = served.ringdisk(&["list", "--json"]).stdout;
            let list: Value = serde_json::from_slice(&list).unwrap();
            let list = list.as_array().unwrap().iter();
            let names: Vec<_> = list.map(|disk| disk["name"].clone()).collect();
            assert_eq!(names, ["a", "c"], "round {round}");
            assert_eq!(served.disk("a")["limits"]["iops"], 77);
            here.write_goes_to(&mut device, 8 + 8 * round, "c.raw", &["a.raw"]);
        }
        // A configuration change to a detached disk does not attach it.
        here.write(&[("b", "b.raw", "b.sock")], "serial = \"new\"");
        served.upgrade(&[]);
        assert!(!here.path("b.sock").exists());
        here.write_goes_to(&mut device, 24, "c.raw", &["a.raw"]);
        served.end();
    }
}

/// If the configuration names another file since, the disk moves to it after the handover, as in a reload.
#[test]
fn newly_configured_file_is_used_after_the_handover() {
    let files = Files::new(&["a.raw", "b.raw", "c.raw"]);
    let here = files.config();
    here.write(&[("disk", "a.raw", "disk.sock")], "");
    let state = format!("--state={}", here.path("state").display());
    let mut served = files.serve(&[state]);
    let mut device = Device::connect(here.path("disk.sock"), &config()).unwrap();
    served.replace("disk", &here.path("b.raw"));
    here.write(&[("disk", "c.raw", "disk.sock")], "iops = 77");
    served.upgrade(&[]);
    let start = Instant::now();
    let is_there =
        |served: &Served| served.disk("disk")["file"] == here.path("c.raw").to_str().unwrap();
    while !is_there(&served) {
        assert!(start.elapsed() < HANG, "{}", served.disk("disk"));
        thread::sleep(Duration::from_millis(10));
    }
    here.write_goes_to(&mut device, 8, "c.raw", &["a.raw", "b.raw"]);
    // It stays there, and is not reported again.
    served.upgrade(&[]);
    assert!(is_there(&served));
    assert_eq!(served.disk("disk")["limits"]["iops"], 77);
    here.write_goes_to(&mut device, 16, "c.raw", &["a.raw", "b.raw"]);
    served.end();
}

/// A renamed file is handed over as it is open, whether ringdisk knows the new name or not.
#[test]
fn renamed_file_is_handed_over() {
    let files = Files::new(&["a.raw", "b.raw"]);
    let here = files.config();
    let disks = [("a", "a.raw", "a.sock"), ("b", "b.raw", "b.sock")];
    here.write(&disks, "");
    let mut served = files.serve(&[]);
    let connect = |name| Device::connect(here.path(name), &config()).unwrap();
    let (mut a, mut b) = (connect("a.sock"), connect("b.sock"));
    for disk in ["a", "b"] {
        let file = |name: &str| here.path(&format!("{disk}{name}.raw"));
        fs::rename(file(""), file("2")).unwrap();
    }
    served.upgrade(&[]);
    served
        .first
        .wait_for_log(&["disk a", "a.raw", "a2.raw", "ringdisk replace a"]);
    here.write_goes_to(&mut a, 8, "a2.raw", &["b2.raw"]);
    // Renamed by command and by the configuration.
    served.replace("a", &here.path("a2.raw"));
    here.write(&[("a", "a.raw", "a.sock"), ("b", "b2.raw", "b.sock")], "");
    served.upgrade(&[]);
    served
        .first
        .wait_for_log(&["disk b", "is now named", "b2.raw"]);
    for (disk, file) in [("a", "a2.raw"), ("b", "b2.raw")] {
        let file = here.path(file);
        assert_eq!(served.disk(disk)["file"], file.to_str().unwrap());
    }
    here.write_goes_to(&mut a, 16, "a2.raw", &["b2.raw"]);
    here.write_goes_to(&mut b, 24, "b2.raw", &["a2.raw"]);
    // The name of another disk's file is not mistaken for it.
    fs::rename(here.path("b2.raw"), here.path("b3.raw")).unwrap();
    fs::copy(here.path("b3.raw"), here.path("b2.raw")).unwrap();
    served.assert_upgrade_fails(
        Path::new(BINARY),
        "b2.raw, name the VM's own file with 'ringdisk replace b",
    );
    here.write_goes_to(&mut b, 32, "b3.raw", &["b2.raw"]);
    served.end();
}

/// A guest is never handed to a process that would serve it another file: under the same path, or at the socket of a
/// renamed disk.
#[test]
fn guest_never_moves_to_another_file() {
    let files = Files::new(&["a.raw", "b.raw"]);
    let here = files.config();
    let disks = [("a", "a.raw", "a.sock"), ("b", "b.raw", "b.sock")];
    here.write(&disks, "");
    let mut served = files.serve(&[]);
    let connect = |name| Device::connect(here.path(name), &config()).unwrap();
    let (mut a, mut b) = (connect("a.sock"), connect("b.sock"));
    let log = |served: &Served, words: &str| {
        served.first.wait_for_log(&[words]);
    };

    here.write(&[("a", "a.raw", "b.sock"), ("b", "b.raw", "a.sock")], "");
    let words = "uses another file than disk 'a' has now";
    served.assert_upgrade_fails(Path::new(BINARY), words);
    log(&served, words);
    fs::write(here.path("config.toml"), "disks = 2").unwrap();
    served.assert_upgrade_fails(Path::new(BINARY), "config.toml, line 1");
    here.write(&[("b", "a.raw", "c.sock"), ("c", "b.raw", "a.sock")], "");
    served.assert_upgrade_fails(Path::new(BINARY), "cannot serve");
    here.write(&disks, "");

    fs::rename(here.path("a.raw"), here.path("old.raw")).unwrap();
    fs::copy(here.path("old.raw"), here.path("a.raw")).unwrap();
    served.assert_upgrade_fails(Path::new(BINARY), "cannot serve");
    here.write_goes_to(&mut a, 8, "old.raw", &["a.raw"]);
    fs::rename(here.path("old.raw"), here.path("a.raw")).unwrap();

    // Another disk name alone is not another file.
    here.write(&[("x", "a.raw", "a.sock"), ("b", "b.raw", "b.sock")], "");
    served.upgrade(&[]);
    here.write_goes_to(&mut a, 16, "a.raw", &["b.raw"]);
    here.write_goes_to(&mut b, 24, "b.raw", &["a.raw"]);
    served.end();
}

/// A new process that fails after opening an image leaves the image and its journal unchanged.
#[test]
fn failed_successor_leaves_the_image_and_journal_unchanged() {
    let test = "failed_successor_leaves_the_image_and_journal_unchanged";
    if !testkit::qemu_img::is_there(test) {
        return;
    }
    let files = Files::new(&["b.raw"]);
    let here = files.config();
    testkit::qemu_img::img(&here.0, "create -q -f qcow2 a.qcow2 64M");
    let disks = [("a", "a.qcow2", "a.sock"), ("b", "b.raw", "b.sock")];
    here.write(&disks, "");
    let served = files.serve(&[]);
    let mut device = Device::connect(here.path("a.sock"), &config()).unwrap();
    // Unflushed writes to clusters that are not yet allocated.
    let write = |device: &mut Device, sector| {
        assert_eq!(device.queues[0].write(sector, &content(sector, 4096)), 0);
    };
    write(&mut device, 0);
    here.write(&[("a", "a.qcow2", "b.sock"), ("b", "b.raw", "a.sock")], "");
    served.assert_upgrade_fails(Path::new(BINARY), "cannot serve");
    write(&mut device, 4096);
    here.write(&disks, "");
    let pid = Pid::from_raw(served.pid as i32).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    let log = served.first.log();
    assert!(!log.contains("panicked"), "{log}");
    let arguments = [format!("--config={}", here.path("config.toml").display())];
    let _again = crate::support::serve_all(&arguments);
    let mut device = Device::connect(here.path("a.sock"), &config()).unwrap();
    for sector in [0, 4096] {
        let there = device.queues[1].read(sector, 4096).unwrap();
        assert!(there == content(sector, 4096), "sector {sector}");
    }
}

/// Serves an image with an external data file `d1.raw`, beside an equal one `d2.raw`, and connects a guest.
fn serve_with_data_file() -> Option<(Config, Served, Device)> {
    let files = Files::new(&[]);
    let here = files.config();
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-o"]);
    let data_file = here.path("d1.raw");
    create.arg(format!(
        "data_file={},data_file_raw=on",
        data_file.display()
    ));
    create.arg(here.path("i.qcow2")).arg("4M");
    if !create.status().is_ok_and(|status| status.success()) {
        println!("skipped: an image with a data file: there is no qemu-img");
        return None;
    }
    configure_data_file(&here, "d1.raw");
    let served = files.serve(&[]);
    let device = Device::connect(here.path("disk.sock"), &config()).unwrap();
    fs::copy(here.path("d1.raw"), here.path("d2.raw")).unwrap();
    Some((here, served, device))
}

fn configure_data_file(here: &Config, data_file: &str) {
    let key = format!("data-file = \"{}\"", here.path(data_file).display());
    here.write(&[("disk", "i.qcow2", "disk.sock")], &key);
}

/// If the configuration names another data file since, the guest keeps its own one, and a reload finds the difference.
#[test]
fn newly_configured_data_file_is_noticed_after_the_handover() {
    let Some((here, mut served, mut device)) = serve_with_data_file() else {
        return;
    };
    configure_data_file(&here, "d2.raw");
    served.upgrade(&[]);
    here.write_goes_to(&mut device, 8, "d1.raw", &["d2.raw"]);
    // The data file of an image cannot change while that is served.
    let reloaded = served.ringdisk(&["reload"]);
    let text = String::from_utf8_lossy(&reloaded.stderr).into_owned();
    assert!(!reloaded.status.success(), "{reloaded:?}");
    assert!(text.contains("disk 'disk'"), "{text}");
    here.write_goes_to(&mut device, 16, "d1.raw", &["d2.raw"]);
    configure_data_file(&here, "d1.raw");
    let reloaded = served.ringdisk(&["reload"]);
    assert!(reloaded.status.success(), "{reloaded:?}");
    served.upgrade(&[]);
    here.write_goes_to(&mut device, 24, "d1.raw", &["d2.raw"]);
    served.end();
}

/// A file that has taken the place of an image's data file is not that data file.
#[test]
fn guest_never_moves_to_another_data_file() {
    let Some((here, mut served, mut device)) = serve_with_data_file() else {
        return;
    };
    fs::rename(here.path("d1.raw"), here.path("old.raw")).unwrap();
    fs::rename(here.path("d2.raw"), here.path("d1.raw")).unwrap();
    served.assert_upgrade_fails(Path::new(BINARY), "d1.raw is another file than the data");
    here.write_goes_to(&mut device, 8, "old.raw", &["d1.raw"]);
    fs::rename(here.path("d1.raw"), here.path("d2.raw")).unwrap();
    fs::rename(here.path("old.raw"), here.path("d1.raw")).unwrap();
    served.upgrade(&[]);
    here.write_goes_to(&mut device, 16, "d1.raw", &["d2.raw"]);
    served.end();
}
