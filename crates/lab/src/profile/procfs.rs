//! What the kernel says about threads, devices and the host, in the text of `/proc` and `/sys`.

use std::fs;
use std::path::Path;

use harness::text::printable;

/// The first fields of `/proc/PID/task/TID/stat`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The thread's name. Characters that are not printable, which its process may have put there, are replaced.
    pub name: String,
    /// `R`, `S`, `D` and so on.
    pub state: char,
}

impl Stat {
    /// Parses the text of the file. The name is in parentheses and may contain anything.
    pub fn parse(text: &str) -> Option<Stat> {
        let (before, after) = text.rsplit_once(')')?;
        let (_, name) = before.split_once('(')?;
        Some(Stat {
            name: printable(name),
            state: after.trim_start().chars().next()?,
        })
    }

    /// Reads it; `None` if the thread has ended.
    pub fn of(pid: u32, thread: i32) -> Option<Stat> {
        Stat::parse(&fs::read_to_string(format!("/proc/{pid}/task/{thread}/stat")).ok()?)
    }
}

/// The kernel function in which a thread sleeps, if the kernel tells.
pub fn wchan(pid: u32, thread: i32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/wchan")).ok()?;
    let name = text.trim();
    (!name.is_empty() && name != "0" && name.len() < 80).then(|| name.to_owned())
}

/// The id of a thread in its own PID namespace, from the text of `/proc/PID/task/TID/status`.
pub fn innermost_id(status: &str) -> Option<i32> {
    let ids = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    ids.split_ascii_whitespace().last()?.parse().ok()
}

/// What a block device has done, from `/sys/dev/block/MAJOR:MINOR/stat`. Times in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Completed requests of all kinds.
    pub requests: u64,
    /// The sum of their times.
    pub requests_ms: u64,
    /// The time in which at least one request was in flight.
    pub busy_ms: u64,
    /// The time of all requests that were in flight.
    pub in_flight_ms: u64,
}

impl DeviceCounters {
    /// Parses the text of the file. Old kernels have 11 fields; discards and flushes came later.
    pub fn parse(text: &str) -> Option<DeviceCounters> {
        let fields: Vec<u64> = text
            .split_ascii_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()
            .ok()?;
        if fields.len() < 11 {
            return None;
        }
        let sum = |indices: &[usize]| {
            let each = indices.iter().filter_map(|at| fields.get(*at));
            each.fold(0_u64, |sum, n| sum.saturating_add(*n))
        };
        Some(DeviceCounters {
            requests: sum(&[0, 4, 11, 15]),
            requests_ms: sum(&[3, 7, 14, 16]),
            busy_ms: fields[9],
            in_flight_ms: fields[10],
        })
    }
}

/// The `total=` of a line of `/proc/pressure/…`, in microseconds; `line` is `some` or `full`.
pub fn pressure_us(text: &str, line: &str) -> Option<u64> {
    let mut lines = text.lines();
    let found = lines.find(|its| its.split_ascii_whitespace().next() == Some(line))?;
    let total = found
        .split_ascii_whitespace()
        .find_map(|word| word.strip_prefix("total="))?;
    total.parse().ok()
}

/// The block device that holds a file, or that the path is: `MAJOR:MINOR` and the kernel's name. `None` for files on network
/// and memory file systems.
pub fn device_of(path: &Path) -> Option<(String, String)> {
    let number = crate::host::device_of(path)?;
    let target = fs::read_link(format!("/sys/dev/block/{number}")).ok()?;
    let name = target.file_name()?.to_string_lossy().into_owned();
    Some((number, name))
}

/// A file below which the kernel counts no requests, with the name of its file system, such as `fuse.sshfs` or `nfs4`. `None`
/// for block devices and files on them, and for files in memory.
pub fn uncounted(path: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    if device_of(path).is_some() {
        return None;
    }
    let device = fs::metadata(path).ok()?.dev();
    let number = format!(
        "{}:{}",
        rustix::fs::major(device),
        rustix::fs::minor(device)
    );
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let file_system = file_system_of(&mounts, &number)?;
    (!["tmpfs", "ramfs"].contains(&file_system))
        .then(|| format!("{} ({file_system})", path.display()))
}

/// The type of the file system with this device number (proc_pid_mountinfo(5)).
fn file_system_of<'a>(mounts: &'a str, number: &str) -> Option<&'a str> {
    let mount = mounts
        .lines()
        .find(|line| line.split(' ').nth(2) == Some(number))?;
    mount.split_once(" - ")?.1.split(' ').next()
}

/// The disks of a process: files and block devices of at least 1 MiB that it has open for writing, and block devices that it
/// reads. Needs the rights of the process's user.
///
/// # Errors
/// The process has ended, or belongs to another user.
pub fn open_disks(pid: u32) -> std::io::Result<Vec<std::path::PathBuf>> {
    use std::os::unix::fs::FileTypeExt;
    let mut disks = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let Ok(metadata) = fs::metadata(entry.path()) else {
            continue;
        };
        let flags = fs::read_to_string(format!(
            "/proc/{pid}/fdinfo/{}",
            entry.file_name().to_string_lossy()
        ));
        let is_disk = metadata.file_type().is_block_device()
            || metadata.is_file()
                && metadata.len() >= 1 << 20
                && is_open_for_writing(&flags.unwrap_or_default());
        if let (true, Ok(path)) = (is_disk, fs::read_link(entry.path()))
            && path.exists()
            && !disks.contains(&path)
        {
            disks.push(path);
        }
    }
    disks.sort();
    Ok(disks)
}

/// Whether `/proc/PID/fdinfo/FD` has an access mode other than `O_RDONLY`.
fn is_open_for_writing(fdinfo: &str) -> bool {
    let flags = fdinfo.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & 0o3 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_name_may_contain_anything() {
        let stat = Stat::parse("12 (a) R 1) S 1 12 12 0 -1").unwrap();
        assert_eq!(
            stat,
            Stat {
                name: "a) R 1".into(),
                state: 'S'
            }
        );
        let hostile = Stat::parse("12 (\x1b[31m\nr\u{202e}ed) R 1").unwrap();
        assert_eq!(hostile.name, "?[31m?r?ed");
        assert_eq!(Stat::parse("12 (cut"), None);
        assert_eq!(Stat::parse("12 (cut)"), None);
        let own = Stat::of(
            std::process::id(),
            rustix::thread::gettid().as_raw_nonzero().get(),
        );
        assert_eq!(own.unwrap().state, 'R');
    }

    #[test]
    fn file_systems_are_found_by_their_device() {
        let mounts = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
                      40 22 0:35 / /mnt/vms rw - fuse.sshfs host:/vms rw,user_id=0\nbroken\n";
        assert_eq!(file_system_of(mounts, "0:35"), Some("fuse.sshfs"));
        assert_eq!(file_system_of(mounts, "254:0"), Some("ext4"));
        assert_eq!(file_system_of(mounts, "0:36"), None);
        assert_eq!(uncounted(Path::new("/proc/self/there/is/none")), None);
    }

    #[test]
    fn devices_count_all_kinds_of_requests() {
        let old = "10 1 80 5 20 2 160 7 3 9 12";
        let new = "10 1 80 5 20 2 160 7 3 9 12 4 0 32 1 6 2";
        let counters = DeviceCounters::parse(old).unwrap();
        assert_eq!((counters.requests, counters.requests_ms), (30, 12));
        let counters = DeviceCounters::parse(new).unwrap();
        assert_eq!(
            counters,
            DeviceCounters {
                requests: 40,
                requests_ms: 15,
                busy_ms: 9,
                in_flight_ms: 12
            }
        );
        assert_eq!(DeviceCounters::parse("10 1 80"), None);
        assert_eq!(DeviceCounters::parse("a b c d e f g h i j k"), None);
    }

    #[test]
    fn pressure_has_totals() {
        let text = "some avg10=0.00 avg60=0.00 avg300=0.00 total=123\nfull avg10=0.00 total=45\n";
        assert_eq!(pressure_us(text, "some"), Some(123));
        assert_eq!(pressure_us(text, "full"), Some(45));
        assert_eq!(pressure_us(text, "none"), None);
    }

    #[test]
    fn only_files_that_are_written_are_disks() {
        assert!(is_open_for_writing(
            "pos:\t0\nflags:\t02100002\nmnt_id:\t29\n"
        ));
        assert!(!is_open_for_writing(
            "pos:\t0\nflags:\t02100000\nmnt_id:\t29\n"
        ));
        assert!(!is_open_for_writing("pos:\t0\n"));
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk.raw");
        let file = fs::File::create(&disk).unwrap();
        file.set_len(2 << 20).unwrap();
        assert!(open_disks(std::process::id()).unwrap().contains(&disk));
        drop(file);
        assert!(!open_disks(std::process::id()).unwrap().contains(&disk));
    }

    #[test]
    fn threads_have_an_id_in_each_namespace() {
        assert_eq!(innermost_id("Pid:\t12\nNSpid:\t12\t3\n"), Some(3));
        assert_eq!(innermost_id("Pid:\t12\nNSpid:\t12\n"), Some(12));
        assert_eq!(innermost_id("Pid:\t12\n"), None);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "[ -~\n]{0,120}|([0-9]{1,22} ){0,20}") {
            let _ = Stat::parse(&text);
            let _ = DeviceCounters::parse(&text);
            let _ = pressure_us(&text, "some");
            let _ = is_open_for_writing(&text);
            let _ = innermost_id(&text);
            let _ = harness::cpu::ThreadUsage::parse(&text, &text);
        }
    }
}
