//! What connected but idle disks cost the serving process.

use std::collections::BTreeMap;
use std::fs;

use testkit::driver::{Device, DeviceConfig};

use crate::support::serve_all;

const FEW: usize = 16;
const MANY: usize = 64;

/// For a build without optimizations, whose threads need more stack.
const KIB_MAX: usize = 112;

/// Resources of a process.
struct Footprint {
    descriptors: BTreeMap<String, usize>,
    /// Memory that no other process shares.
    private_kib: usize,
}

impl Footprint {
    /// Of a server with this many disks, each connected and after one request.
    fn of(disks: usize) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let disk = |number| {
            let file = folder.path().join(format!("{number}.raw"));
            fs::write(&file, [7; 8192]).unwrap();
            let socket = file.with_extension("sock");
            format!("file={},socket={}", file.display(), socket.display())
        };
        let mut arguments = vec!["--iothreads=1".to_owned()];
        arguments.extend((0..disks).map(disk));
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
        let _devices: Vec<Device> = server.sockets.iter().map(connect).collect();
        Self::current(server.pid())
    }

    fn current(pid: u32) -> Self {
        let process = format!("/proc/{pid}");
        let mut descriptors = BTreeMap::new();
        for entry in fs::read_dir(format!("{process}/fd")).unwrap() {
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
        let memory = fs::read_to_string(format!("{process}/smaps_rollup")).unwrap();
        // Clean pages belong to the program, and count as private only while no other test runs it.
        let private = memory
            .lines()
            .filter(|line| line.starts_with("Private_Dirty"));
        let kib = private.filter_map(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok());
        Self {
            descriptors,
            private_kib: kib.sum(),
        }
    }
}

/// A disk needs its file, its socket and two eventfds of ringdisk: one stops its session, the other reports lost guest
/// memory. The front-end adds a connection, three eventfds of its queue and three memory regions, which a successor
/// process must map again.
#[test]
fn memory_and_descriptors_per_idle_disk() {
    let (few, many) = (Footprint::of(FEW), Footprint::of(MANY));
    let more = MANY - FEW;
    let each: BTreeMap<&str, usize> = many
        .descriptors
        .iter()
        .map(|(kind, n)| (kind.as_str(), n - few.descriptors.get(kind).unwrap_or(&0)))
        .filter(|(_, n)| *n > 0)
        .collect();
    let expected = [
        ("anon_inode:[eventfd]", (2 + 3) * more),
        ("file", more),
        ("memory", 3 * more),
        ("socket", (1 + 1) * more),
    ];
    assert_eq!(each, BTreeMap::from(expected));
    let kib = (many.private_kib - few.private_kib) / more;
    println!("{kib} KiB for each disk");
    assert!(kib <= KIB_MAX, "a disk takes {kib} KiB");
}
