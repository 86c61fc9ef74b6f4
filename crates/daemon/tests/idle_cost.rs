//! What connected but idle disks cost the serving process.

use std::collections::BTreeMap;
use std::fs;

use tempfile::TempDir;
use testkit::driver::{Device, DeviceConfig};
use testkit::server::Server;

use crate::support::{serve_all, wait_until};

const FEW: usize = 16;
const MANY: usize = 64;

/// For a build without optimizations, whose threads need more stack.
const KIB_MAX: usize = 112;

/// A server with some disks, each connected and after one request.
struct Disks {
    server: Server,
    _devices: Vec<Device>,
    _folder: TempDir,
}

impl Disks {
    fn connected(count: usize) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let disk = |number| {
            let file = folder.path().join(format!("{number}.raw"));
            fs::write(&file, [7; 8192]).unwrap();
            let socket = file.with_extension("sock");
            format!("file={},socket={}", file.display(), socket.display())
        };
        // Whether another test's server has the usual socket makes no difference.
        let control = folder.path().join("control.qmp");
        let mut arguments = vec![
            "--iothreads=1".to_owned(),
            format!("--control={}", control.display()),
        ];
        arguments.extend((0..count).map(disk));
        let server = serve_all(&arguments);
        let config = DeviceConfig {
            slots: 1,
            buffer_len: 4096,
            ..DeviceConfig::default()
        };
        let connect = |socket| {
            let mut device = Device::connect(socket, &config).unwrap();
            assert_eq!(device.queues[0].read(8, 4096).unwrap(), [7; 4096]);
            device
        };
        let devices = server.sockets.iter().map(connect).collect();
        Self {
            server,
            _devices: devices,
            _folder: folder,
        }
    }

    /// Open descriptors by kind.
    fn descriptors(&self) -> BTreeMap<String, usize> {
        let mut descriptors = BTreeMap::new();
        let all = fs::read_dir(format!("/proc/{}/fd", self.server.pid())).unwrap();
        for entry in all {
            let target = fs::read_link(entry.unwrap().path()).unwrap_or_default();
            let target = target.to_string_lossy();
            let kind = match target.split(':').next() {
                Some("socket") => "socket",
                Some("anon_inode") => &target,
                Some("/memfd") => "memory",
                _ => "file",
            };
            *descriptors.entry(kind.to_owned()).or_default() += 1;
        }
        descriptors
    }

    /// Memory that no other process shares.
    fn private_kib(&self) -> usize {
        let file = format!("/proc/{}/smaps_rollup", self.server.pid());
        let memory = fs::read_to_string(file).unwrap();
        // Clean pages belong to the program, and count as private only while no other test runs it.
        let private = memory
            .lines()
            .filter(|line| line.starts_with("Private_Dirty"));
        let kib = private.filter_map(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok());
        kib.sum()
    }
}

/// A disk needs its file, its socket and three eventfds of ringdisk: one stops its session, one reports lost guest memory, and
/// one tells the thread that waits for a front-end that the socket was made again. The front-end adds a connection, three eventfds of its queue and three memory regions, which a successor
/// process must map again.
#[test]
fn memory_and_descriptors_per_idle_disk() {
    let (few, many) = (Disks::connected(FEW), Disks::connected(MANY));
    let more = MANY - FEW;
    let expected = BTreeMap::from([
        ("anon_inode:[eventfd]", (3 + 3) * more),
        ("file", more),
        ("memory", 3 * more),
        ("socket", (1 + 1) * more),
    ])
    .into_iter()
    .map(|(kind, n)| (kind.to_owned(), n))
    .collect::<BTreeMap<_, _>>();
    // Sessions that have just begun still hold a few more.
    wait_until(&format!("what {more} disks need, {expected:?}"), || {
        let before = few.descriptors();
        let mut each = many.descriptors();
        for (kind, n) in &mut each {
            *n = n.saturating_sub(before.get(kind).copied().unwrap_or_default());
        }
        each.retain(|_, n| *n > 0);
        each == expected
    });
    let kib = many.private_kib().saturating_sub(few.private_kib()) / more;
    println!("{kib} KiB for each disk");
    assert!(kib <= KIB_MAX, "a disk takes {kib} KiB");
}
