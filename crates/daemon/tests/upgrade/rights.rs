//! Root, before it becomes `--user`, lends that user no access: what the user's process or an image names is opened with
//! the user's rights, and only what the operator names with root's.

use std::os::unix::fs::OpenOptionsExt;

use super::*;
use crate::support::loop_device::LoopDevice;

/// Files that anyone may use, in a directory that anyone may use.
struct Shared {
    dir: tempfile::TempDir,
}

impl Shared {
    fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        set_mode(dir.path(), 0o777);
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn file(&self, name: &str, mode: u32) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, vec![7; 1 << 20]).unwrap();
        set_mode(&path, mode);
        path
    }
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn is_root(test: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: {test}: needs root");
    }
    is_root
}

/// The operator's disk is root's alone, in a directory that only root may search: its descriptor is inherited. A disk that
/// a command has added is named by the old process, and by the state file.
#[test]
fn only_what_the_operator_names_is_opened_as_root() {
    if !is_root("only_what_the_operator_names_is_opened_as_root") {
        return;
    }
    let (disk, shared) = (Disk::new(), Shared::new());
    set_mode(&disk.file, 0o600);
    let state = shared.path("state");
    let arguments = [
        format!("--state={}", state.display()),
        "--user=nobody".into(),
        format!("--allow-dir={}", shared.dir.path().display()),
        disk.argument("queues=2"),
    ];
    let control = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut served = Served::start_in(control, &arguments, None);
    let file = shared.file("added.raw", 0o666);
    let (socket, spec) = (shared.path("added.sock"), |file: &Path, options: &str| {
        let (file, socket) = (file.display(), shared.path("added.sock"));
        format!(
            "file={file},name=added,socket={}{options}",
            socket.display()
        )
    });
    let roots = shared.file("roots.raw", 0o600);
    let refused = served.ringdisk(&["attach", &spec(&roots, "")]);
    assert!(!refused.status.success(), "{refused:?}");
    let attached = served.ringdisk(&["attach", &spec(&file, ",lock=running")]);
    assert!(attached.status.success(), "{attached:?}");
    let mut device = Device::connect(&disk.socket, &config()).unwrap();
    served.upgrade(&[]);
    assert!(device.queues[0].read(0, 4096).is_ok());
    assert!(socket.exists());
    // The name leads to a file of root, as another name from a compromised process would.
    fs::rename(&roots, &file).unwrap();
    served.assert_upgrade_fails(Path::new(BINARY), "permission denied");
    assert!(device.queues[0].read(0, 4096).is_ok());
    drop(device);
    let control = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    served.end();
    let served = Served::start_in(control, &arguments, None);
    let absent = served.first.wait_for_log(&["added", "is not served"]);
    assert!(absent.contains("permission denied"), "{absent}");
    served.end();
}

/// An image names its backing file, and the process that writes the image can change the name.
#[test]
fn backing_files_are_opened_as_the_user_unless_their_directory_is_named() {
    let test = "backing_files_are_opened_as_the_user_unless_their_directory_is_named";
    if !is_root(test) {
        return;
    }
    let shared = Shared::new();
    let base = shared.file("base.raw", 0o600);
    let image = shared.path("image.qcow2");
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
    let made = create.arg(&base).arg(&image).status();
    if !made.is_ok_and(|status| status.success()) {
        return println!("skipped: {test}: there is no qemu-img");
    }
    let start = |options: &[String]| {
        let disk = format!(
            "file={},socket={}",
            image.display(),
            shared.path("i.sock").display()
        );
        let mut command = Command::new(BINARY);
        command.args(["serve", "--json", "--user=nobody", &disk]);
        command.args(options);
        Server::ringdisk_command(command)
    };
    let refused = start(&[]).err().unwrap().to_string();
    assert!(refused.contains("ermission denied"), "{refused}");
    assert!(refused.contains("--allow-backing"), "{refused}");
    let allowed = format!("--allow-backing={}", shared.dir.path().display());
    drop(start(&[allowed]).unwrap());
    set_mode(&base, 0o644);
    drop(start(&[]).unwrap());
}

/// An image on root's block device, which the kernel gives to one process only, lacks its backing file. The process that takes
/// over opens the device while it is root, also after an upgrade that failed: when the file comes back, the disk is served.
#[test]
fn absent_disk_on_a_block_device_of_root_outlasts_upgrades() {
    let test = "absent_disk_on_a_block_device_of_root_outlasts_upgrades";
    if !is_root(test) {
        return;
    }
    let Some(device) = LoopDevice::new() else {
        return;
    };
    let (shared, disk) = (Shared::new(), Disk::new());
    let base = shared.file("base.raw", 0o644);
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
    let made = create.arg(&base).arg(&device.device).status();
    if !made.is_ok_and(|status| status.success()) {
        return println!("skipped: {test}: there is no qemu-img");
    }
    let away = shared.path("away");
    fs::rename(&base, &away).unwrap();
    let config = shared.path("r.toml");
    let text = format!(
        "allow-dir = {0:?}\nallow-backing = [{0:?}]\n[[disk]]\nname = 'i'\nformat = 'qcow2'\nfile = {1:?}\nsocket = {2:?}\n",
        shared.dir.path(),
        device.device,
        shared.path("i.sock")
    );
    fs::write(&config, text).unwrap();
    set_mode(&disk.file, 0o666);
    let control = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let arguments = [
        format!("--config={}", config.display()),
        "--user=nobody".into(),
        disk.argument("queues=2"),
    ];
    let mut served = Served::start_in(control, &arguments, None);
    let lacks_base = |served: &Served| {
        let problem = served.disk("i")["problem"].clone();
        problem.as_str().is_some_and(|it| it.contains("base.raw"))
    };
    support::wait_until("the reason", || lacks_base(&served));
    served.upgrade(&[]);
    support::wait_until("the reason", || lacks_base(&served));
    // It has received everything.
    let hello = send_message(r#"{"protocol":2,"version":"x"}"#);
    let failing = served.script("fails", &format!("{hello}; {RECEIVE_MESSAGE}; exit 1"));
    served.assert_upgrade_fails(&failing, "cannot serve");
    served.upgrade(&[]);
    fs::rename(&away, &base).unwrap();
    support::wait_until("the disk", || served.disk("i")["storage"] == "works");
    let mut guest = Device::connect(shared.path("i.sock"), &DeviceConfig::default()).unwrap();
    assert_eq!(guest.queues[0].read(0, 512).unwrap(), [7; 512]);
    // Nobody else gets the device, and it stays so.
    let is_taken = || {
        let mut exclusive = fs::File::options();
        exclusive.read(true).custom_flags(libc::O_EXCL);
        let opened = exclusive.open(&device.device);
        opened.is_err_and(|e| e.kind() == io::ErrorKind::ResourceBusy)
    };
    assert!(is_taken());
    served.upgrade(&[]);
    assert!(is_taken());
    assert_eq!(guest.queues[0].read(0, 512).unwrap(), [7; 512]);
    served.end();
}
