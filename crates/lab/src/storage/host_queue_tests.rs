use super::*;
use std::process::Command;

/// A loop device over a file; detached when dropped.
struct Loop {
    device: PathBuf,
    _file: tempfile::NamedTempFile,
}

impl Loop {
    /// `None` where loop devices cannot be made; says so.
    fn new() -> Option<Loop> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(16 << 20).unwrap();
        let made = Command::new("losetup")
            .args(["--show", "-f"])
            .arg(file.path())
            .output();
        match made {
            Ok(made) if made.status.success() => Some(Loop {
                device: String::from_utf8(made.stdout).unwrap().trim().into(),
                _file: file,
            }),
            _ => {
                println!(
                    "skipped: queues of the host: losetup makes no loop device here; it needs root"
                );
                None
            }
        }
    }

    fn name(&self) -> &str {
        self.device.file_name().unwrap().to_str().unwrap()
    }

    fn values(&self) -> [Option<String>; 2] {
        [SCHEDULER, READ_AHEAD].map(|attribute| read(self.name(), attribute))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.device).status();
    }
}

fn queue(scheduler: &str, read_ahead: &str) -> HostQueue {
    let mut queue = HostQueue::default();
    queue.set("host-scheduler", scheduler).unwrap();
    queue.set("host-read-ahead", read_ahead).unwrap();
    queue
}

/// One test, because there is one record for the host.
#[test]
fn queues_are_set_and_restored_also_after_an_error_or_a_kill() {
    let Some(disk) = Loop::new() else { return };
    let paths = [disk.device.clone()];
    let before = disk.values();
    let original = before.clone().map(Option::unwrap);
    assert_eq!(set(&HostQueue::default(), &paths).unwrap().map(drop), None);

    let wanted = queue("mq-deadline", "64k");
    assert_eq!(missing(&wanted, &disk.device), None);
    let changed = set(&wanted, &paths).unwrap().unwrap();
    assert_eq!(
        disk.values(),
        [Some("mq-deadline".into()), Some("64".into())]
    );
    assert_eq!(
        in_force(&paths).unwrap().map(|(_, value)| value),
        ["mq-deadline", "64k"]
    );
    let said = changed.before();
    assert!(
        said.contains(&format!("{} scheduler={}", disk.name(), original[0])),
        "{said}"
    );
    // While this run has changed queues, no other run changes or restores any.
    let other = set(&queue("bfq", "default"), &paths).unwrap_err();
    assert!(format!("{other:#}").contains("another run"), "{other:#}");
    assert!(restore_after_kill().is_empty());
    assert_eq!(disk.values()[1], Some("64".into()));
    drop(changed);
    assert_eq!(disk.values(), before);
    assert!(!Path::new(RECORD).exists());

    // The read-ahead is set before the scheduler, which this device does not have.
    let error = set(
        &queue("kyber", "64k"),
        &[disk.device.clone(), "/proc".into()],
    )
    .unwrap_err();
    assert!(
        format!("{error:#}").contains("no block device"),
        "{error:#}"
    );
    assert_eq!(disk.values(), before);

    // A killed run does not drop anything, but the kernel ends its lock.
    let mut changed = set(&wanted, &paths).unwrap().unwrap();
    changed.originals.clear();
    let text = fs::read(RECORD).unwrap();
    drop(changed);
    fs::write(RECORD, text).unwrap();
    assert_eq!(disk.values()[0], Some("mq-deadline".into()));
    let said = restore_after_kill();
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].contains("is restored"), "{said:?}");
    assert_eq!(disk.values(), before);
    assert!(restore_after_kill().is_empty());

    // What the user has changed since the kill stays.
    let mut changed = set(&wanted, &paths).unwrap().unwrap();
    changed.originals.clear();
    let text = fs::read(RECORD).unwrap();
    drop(changed);
    fs::write(RECORD, text).unwrap();
    write(disk.name(), READ_AHEAD, "32").unwrap();
    let said = restore_after_kill().concat();
    assert!(said.contains("read_ahead_kb stays 32"), "{said}");
    let after = [before[0].clone(), Some("32".into())];
    assert_eq!(disk.values(), after);

    // So does a device that got the name of another one.
    let mut other = Original {
        device: disk.name().into(),
        attribute: READ_AHEAD.into(),
        value: "16".into(),
        set: "32".into(),
        diskseq: Some(0),
    };
    assert!(other.restore_left().contains("stays 32"));
    assert_eq!(disk.values(), after);
    other.diskseq = diskseq(disk.name());
    assert!(other.restore_left().contains("is restored"));
    assert_eq!(disk.values()[1], Some("16".into()));

    // A record by somebody else writes no other file.
    let elsewhere = Original {
        device: "../../etc".into(),
        attribute: SCHEDULER.into(),
        value: "x".into(),
        set: "y".into(),
        diskseq: None,
    };
    assert!(elsewhere.restore_left().contains("damaged"));
    assert!(elsewhere.restore().is_err());
}

#[test]
fn a_disk_without_a_block_device_is_refused_by_name() {
    let why = missing(&queue("none", "default"), Path::new("/dev/shm")).unwrap();
    assert!(why.contains("no block device on this host"), "{why}");
    let gone = tempfile::tempdir().unwrap().path().join("gone");
    assert!(missing(&HostQueue::default(), &gone).is_some());
}

#[test]
fn a_file_has_the_queue_of_its_file_system() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    let Ok(device) = device_of(&file) else {
        println!(
            "skipped: a file's queue: {} is on no block device",
            file.display()
        );
        return;
    };
    assert!(
        Path::new(&format!("/sys/block/{device}/queue")).is_dir(),
        "{device}"
    );
    assert!(!at_bottom(&device, DEPTH_MAX).unwrap().is_empty());
    let error = at_bottom(&device, 0).unwrap_err().to_string();
    assert!(error.contains("too many"), "{error}");
}
