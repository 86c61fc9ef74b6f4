//! What is opened, repaired, refused, and with which words; and what an image says of itself afterwards.

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, Ordering::SeqCst};

use crate::support::memory::Memory;
use crate::support::{Disk, How, READ, WRITE};
use block::{FileOffset, GuestOffset};
use image::{AllowedDirectories, LayerFormat, PlainFile, Storage, ZeroMode};
use testkit::qemu_img as qemu;

fn patch(path: &Path, at: u64, bytes: &[u8]) {
    let mut file = fs::File::options().write(true).open(path).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(bytes).unwrap();
}

fn bytes<const N: usize>(path: &Path, at: u64) -> [u8; N] {
    let mut file = fs::File::open(path).unwrap();
    let mut bytes = [0; N];
    file.seek(SeekFrom::Start(at)).unwrap();
    file.read_exact(&mut bytes).unwrap();
    bytes
}

fn number(path: &Path, at: u64) -> u64 {
    u64::from_be_bytes(bytes(path, at))
}

fn refusal(path: &Path, how: How) -> String {
    match Disk::open(path, how) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(error) => error.to_string(),
    }
}

macro_rules! needs_qemu {
    ($test:literal) => {
        if !qemu::is_there($test) {
            return;
        }
    };
}

#[test]
fn dirty_image_is_repaired_before_first_write() {
    needs_qemu!("dirty_image_is_repaired_before_first_write");
    for options in [
        "lazy_refcounts=on,cluster_size=512",
        "lazy_refcounts=on,cluster_size=4k,refcount_bits=1",
        "lazy_refcounts=on,cluster_size=64k,extended_l2=on",
        "lazy_refcounts=on,cluster_size=512,refcount_bits=64",
    ] {
        let directory = tempfile::tempdir().unwrap();
        let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
        qemu::img(
            directory,
            &format!("create -q -f qcow2 -o {options} disk.qcow2 4M"),
        );
        // As a QEMU that was killed: its refcounts were never written.
        let writes = [
            "write -P 1 0 1M".into(),
            "write -P 2 3M 300k".into(),
            "abort".into(),
        ];
        std::process::Command::new("qemu-io")
            .args(["-f", "qcow2", "disk.qcow2"])
            .args(writes.iter().flat_map(|w: &String| ["-c", w.as_str()]))
            .current_dir(directory)
            .output()
            .unwrap();
        assert_eq!(number(&file, 72) & 1, 1, "{options}: not dirty");
        assert_ne!(qemu::check_code(directory, "disk.qcow2"), Some(0));
        let want = {
            let disk = Disk::open(&file, READ).unwrap();
            disk.content().unwrap()
        };
        assert!(want[..1 << 20].iter().all(|&byte| byte == 1), "{options}");
        let disk = Disk::open(&file, WRITE).unwrap();
        assert_eq!(number(&file, 72) & 1, 0);
        assert!(disk.content().unwrap() == want);
        disk.write(2 << 20, &[7; 4096]).unwrap();
        disk.chain.close().unwrap();
        qemu::check(directory, "disk.qcow2", false);
    }
}

/// A block device has no space behind its end: the refcounts are written where they are, and to clusters that nothing refers to.
/// Whichever step fails, the next attempt repairs the image.
#[test]
fn dirty_image_on_a_device_is_repaired() {
    if !qemu::is_there("dirty_image_on_a_device_is_repaired") {
        return;
    }
    let allowed = AllowedDirectories::new::<&str>([]).unwrap();
    let (path, format) = (Path::new("/disk.qcow2"), LayerFormat::Qcow2);
    for (options, cluster) in [
        ("cluster_size=64k", 64 << 10),
        ("cluster_size=4k,refcount_bits=64", 4 << 10),
        ("cluster_size=512,refcount_bits=1", 512),
        ("cluster_size=16k,extended_l2=on", 16 << 10),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let create = format!("create -q -f qcow2 -o lazy_refcounts=on,{options} disk.qcow2 4M");
        qemu::img(directory.path(), &create);
        // As a QEMU that was killed: its refcounts were never written.
        let mut killed = std::process::Command::new("qemu-io");
        killed.args(["-f", "qcow2", "disk.qcow2", "-c", "write -P 1 0 1M"]);
        killed.args(["-c", "write -P 2 3M 300k", "-c", "abort"]);
        killed.current_dir(directory.path()).output().unwrap();
        let dirty = fs::read(directory.path().join("disk.qcow2")).unwrap();
        assert_eq!(dirty[79] & 1, 1, "{options}: not dirty");
        for (spare, fails_in) in (0..4).map(|spare| (spare, 0)).chain((1..).map(|n| (0, n))) {
            let memory = Memory::new(dirty.clone());
            let size = dirty.len().next_multiple_of(cluster) + spare * cluster + 512 % cluster;
            memory.be_device(size as u64);
            let open = || Disk::with(Arc::new(memory.clone()), path, format, &allowed, WRITE);
            memory.fail_in(fails_in);
            let first = open();
            let has_failed = first.is_err();
            memory.fail_in(0);
            let disk = first.unwrap_or_else(|_| open().unwrap());
            let content = disk.content().unwrap();
            assert!(
                content[..1 << 20].iter().all(|&byte| byte == 1),
                "{options}"
            );
            let second = &content[3 << 20..(3 << 20) + (300 << 10)];
            assert!(second.iter().all(|&byte| byte == 2), "{options}");
            disk.chain.close().unwrap();
            fs::write(directory.path().join("disk.qcow2"), memory.bytes()).unwrap();
            qemu::check(directory.path(), "disk.qcow2", false);
            assert!(fails_in != 1 || has_failed, "{options}");
            if fails_in > 0 && !has_failed {
                break;
            }
        }
    }
}

#[test]
fn corrupt_image_opens_read_only_at_most() {
    needs_qemu!("corrupt_image_opens_read_only_at_most");
    let directory = tempfile::tempdir().unwrap();
    let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
    qemu::img(directory, "create -q -f qcow2 disk.qcow2 4M");
    patch(&file, 72, &2_u64.to_be_bytes());
    for how in [
        READ,
        WRITE,
        How {
            allow_corrupt: true,
            ..WRITE
        },
    ] {
        let error = refusal(&file, how);
        assert!(error.contains("marked as corrupt") && error.contains("qemu-img check -r all"));
    }
    let disk = Disk::open(
        &file,
        How {
            allow_corrupt: true,
            ..READ
        },
    )
    .unwrap();
    assert!(disk.content().unwrap().iter().all(|&byte| byte == 0));
}

#[test]
fn overlaps_stop_writes_and_set_corrupt_bit() {
    needs_qemu!("overlaps_stop_writes_and_set_corrupt_bit");
    type Break = fn(&Path);
    let cases: [(&str, Break); 4] = [
        // Data at the place of the L1 table.
        ("to metadata", |file| {
            let (l1, copied) = (number(file, 40), 1 << 63);
            let l2 = number(file, l1) & !copied;
            patch(file, l2, &(l1 | copied).to_be_bytes());
        }),
        // A cluster in use, with a refcount of 0, would be given away again.
        ("refcount 0", |file| {
            let block = number(file, number(file, 48));
            patch(file, block, &[0; 64]);
        }),
        ("leads nowhere", |file| {
            let l2 = number(file, number(file, 40)) & !(1 << 63);
            patch(file, l2, &(1_u64 << 63 | 0x5_0200).to_be_bytes());
        }),
        ("L1 entry", |file| {
            patch(file, number(file, 40), &0x200_u64.to_be_bytes())
        }),
    ];
    for (says, damage) in cases {
        let directory = tempfile::tempdir().unwrap();
        let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
        qemu::img(directory, "create -q -f qcow2 disk.qcow2 4M");
        qemu::io(
            directory,
            "disk.qcow2",
            &["-f", "qcow2"],
            &["write -P 1 0 64k".into()],
        );
        damage(&file);
        let disk = Disk::open(&file, WRITE).unwrap();
        let told = Arc::new(AtomicUsize::new(0));
        let count = told.clone();
        disk.chain.image().unwrap().on_damage(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        if says == "to metadata" {
            // What is beside it can be written, and leaves it as it is.
            let l2 = number(&file, number(&file, 40)) & !(1 << 63);
            let before = number(&file, l2);
            disk.write(3 << 20, &[9; 512]).unwrap();
            disk.flush().unwrap();
            assert_eq!(number(&file, l2), before);
        }
        let first = disk.write(0, &[9; 512]);
        let error = match first {
            // What is sound goes on, until it needs a cluster.
            Ok(()) => disk.write(1 << 20, &[9; 512]).unwrap_err(),
            Err(error) => error,
        };
        assert!(error.to_string().contains(says), "{says}: {error}");
        let later = disk.write(2 << 20, &[9; 512]).unwrap_err();
        assert!(later.to_string().contains(says), "{says}: {later}");
        assert!(disk.chain.flush().is_err());
        assert_eq!(told.load(Ordering::Relaxed), 1, "{says}");
        assert!(disk.chain.damage().is_some());
        assert_eq!(number(&file, 72) & 2, 2, "{says}: the corrupt bit");
        assert!(refusal(&file, WRITE).contains("marked as corrupt"));
    }
}

#[test]
fn bitmaps_are_in_use_while_the_image_is() {
    needs_qemu!("bitmaps_are_in_use_while_the_image_is");
    let directory = tempfile::tempdir().unwrap();
    let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
    qemu::img(directory, "create -q -f qcow2 disk.qcow2 4M");
    qemu::img(directory, "bitmap --add disk.qcow2 follows");
    qemu::img(directory, "bitmap --add --disable disk.qcow2 rests");
    let info = || {
        let output = std::process::Command::new("qemu-img")
            .args(["info", "disk.qcow2"])
            .current_dir(directory)
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let in_use = || info().matches("in-use").count();
    let before = fs::read(&file).unwrap();
    let disk = Disk::open(&file, WRITE).unwrap();
    disk.read(0, &mut [0; 512]).unwrap();
    disk.chain.close().unwrap();
    assert!(fs::read(&file).unwrap() == before, "only read");
    let disk = Disk::open(&file, WRITE).unwrap();
    disk.write(0, &[1; 512]).unwrap();
    assert_eq!(in_use(), 1, "{}", info());
    disk.grow(5 << 20).unwrap();
    assert_eq!(in_use(), 2, "{}", info());
    disk.chain.close().unwrap();
    assert_eq!(in_use(), 0, "{}", info());
    qemu::check(directory, "disk.qcow2", false);
    // Features that are not known are cleared, and with them nothing else.
    patch(&file, 88, &0xf1_u64.to_be_bytes());
    let disk = Disk::open(&file, WRITE).unwrap();
    assert_eq!(number(&file, 88), 0xf1);
    disk.zero(0, 512, ZeroMode::Zeroes { unmap: false })
        .unwrap();
    disk.write(0, &[2; 512]).unwrap();
    assert_eq!(number(&file, 88), 1);
    disk.chain.close().unwrap();
    qemu::check(directory, "disk.qcow2", false);
}

#[test]
fn open_errors_give_cause_and_next_step() {
    needs_qemu!("open_errors_give_cause_and_next_step");
    let directory = tempfile::tempdir().unwrap();
    let (directory, disk) = (directory.path(), directory.path().join("disk.qcow2"));
    fs::create_dir(directory.join("other")).unwrap();
    let make = |args: &str| {
        qemu::img(
            directory,
            &format!("create -q -f qcow2 {args} disk.qcow2 1M"),
        )
    };
    let refused = |words: &[&str]| {
        let error = refusal(&disk, READ);
        for word in words {
            assert!(error.contains(word), "no '{word}' in: {error}");
        }
    };
    fs::write(directory.join("base.raw"), vec![3; 1 << 20]).unwrap();
    fs::write(directory.join("other/base.raw"), vec![3; 1 << 20]).unwrap();
    make("-u -b base.raw -F raw");
    // Without the extension that says the format: it is called something else.
    let extensions = u64::from(u32::from_be_bytes(bytes(&disk, 100)));
    assert_eq!(bytes(&disk, extensions), 0xe279_2aca_u32.to_be_bytes());
    patch(&disk, extensions, &0x1234_5678_u32.to_be_bytes());
    refused(&["rebase -u -F", "base.raw"]);
    make("-u -b other/../../base.raw -F raw");
    refused(&["none of the directories"]);
    make("-u -b /etc/hostname -F raw");
    refused(&["none of the directories", "/etc/hostname"]);
    symlink("/etc/hostname", directory.join("link.raw")).unwrap();
    make("-u -b link.raw -F raw");
    refused(&["none of the directories", "link.raw"]);
    make("-u -b nbd://localhost/disk -F raw");
    refused(&["not a file"]);
    make("-u -b base.vmdk -F vmdk");
    refused(&["vmdk", "use raw or qcow2"]);
    symlink("disk.qcow2", directory.join("itself")).unwrap();
    make("-u -b itself -F qcow2");
    refused(&["its own backing file"]);
    make("-u -b gone.raw -F raw");
    refused(&["gone.raw", "restore the file"]);
    let secret = "--object secret,id=s,data=abc -o encrypt.format=luks,encrypt.key-secret=s";
    let secret = format!("{secret},encrypt.iter-time=10");
    make(&secret);
    refused(&["encrypted (LUKS)"]);
    make("-o data_file=data");
    patch(&disk, 72, &(4_u64 | 1 << 50).to_be_bytes());
    refused(&["feature bit 50"]);
    fs::write(&disk, b"not an image").unwrap();
    refused(&["not a qcow2 image"]);
    // And what is allowed works.
    make("-u -b other/base.raw -F raw");
    let disk = Disk::open(&disk, READ).unwrap();
    assert!(disk.content().unwrap().iter().all(|&byte| byte == 3));
}

#[test]
fn long_chains_open_and_loops_are_refused() {
    needs_qemu!("long_chains_open_and_loops_are_refused");
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    qemu::img(directory, "create -q -f qcow2 0.qcow2 1M");
    qemu::io(
        directory,
        "0.qcow2",
        &["-f", "qcow2"],
        &["write -P 5 64k 64k".into()],
    );
    // Copies of one overlay that differ in the name of what is below.
    qemu::img(
        directory,
        "create -q -f qcow2 -u -b 0000.qcow2 -F qcow2 layer 1M",
    );
    let layer = fs::read(directory.join("layer")).unwrap();
    let at = layer.windows(10).position(|w| w == b"0000.qcow2").unwrap();
    fs::copy(directory.join("0.qcow2"), directory.join("0000.qcow2")).unwrap();
    for number in 1..=200 {
        let mut layer = layer.clone();
        layer[at..at + 4].copy_from_slice(format!("{:04}", number - 1).as_bytes());
        fs::write(directory.join(format!("{number:04}.qcow2")), layer).unwrap();
    }
    let disk = Disk::open(&directory.join("0199.qcow2"), READ).unwrap();
    assert_eq!(disk.chain.depth(), 200);
    let content = disk.content().unwrap();
    assert!(content[64 << 10..128 << 10].iter().all(|&byte| byte == 5));
    let error = refusal(&directory.join("0200.qcow2"), READ);
    assert!(error.contains("200th backing file"), "{error}");
    // One leads back to one above.
    let mut layer = layer.clone();
    layer[at..at + 4].copy_from_slice(b"0150");
    fs::write(directory.join("0100.qcow2"), layer).unwrap();
    let error = refusal(&directory.join("0199.qcow2"), READ);
    assert!(error.contains("its own backing file"), "{error}");
}

#[test]
fn refcount_and_l1_tables_grow() {
    needs_qemu!("refcount_and_l1_tables_grow");
    for options in [
        "cluster_size=512,refcount_bits=64",
        "cluster_size=512,refcount_bits=1",
    ] {
        let directory = tempfile::tempdir().unwrap();
        let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
        qemu::img(
            directory,
            &format!("create -q -f qcow2 -o {options} disk.qcow2 1M"),
        );
        let (table, l1) = (number(&file, 48), number(&file, 40));
        let disk = Disk::open(&file, WRITE).unwrap();
        let mut want = vec![0; 24 << 20];
        let half = want.len() / 2;
        for size in [half, want.len()] {
            disk.grow(size as u64).unwrap();
            for at in (0..size).step_by(96 << 10) {
                let data = vec![(at >> 14) as u8 | 1; 48 << 10];
                let len = data.len().min(size - at);
                disk.write(at as u64, &data[..len]).unwrap();
                want[at..at + len].copy_from_slice(&data[..len]);
            }
            disk.flush().unwrap();
        }
        disk.chain.close().unwrap();
        if options.contains("64") {
            assert_ne!(number(&file, 48), table, "the refcount table has not moved");
        }
        assert_ne!(number(&file, 40), l1, "the L1 table has not moved");
        qemu::check(directory, "disk.qcow2", false);
        assert!(qemu::content(directory, "disk.qcow2", "qcow2") == want);
        let disk = Disk::open(&file, WRITE).unwrap();
        let error = disk.grow(1 << 20).unwrap_err().to_string();
        assert!(error.contains("--shrink"), "{error}");
    }
}

#[test]
fn full_clusters_copy_nothing_and_the_file_grows_in_large_steps() {
    needs_qemu!("full_clusters_copy_nothing_and_the_file_grows_in_large_steps");
    let directory = tempfile::tempdir().unwrap();
    let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
    fs::write(directory.join("base.raw"), vec![3; 4 << 20]).unwrap();
    qemu::img(
        directory,
        "create -q -f qcow2 -b base.raw -F raw disk.qcow2 16M",
    );
    let disk = Disk::open(&file, WRITE).unwrap();
    let chain = &disk.chain;
    let prepare = |at: u64, len: u64| {
        let pin = chain.pins().pin(0);
        while let image::WriteLocation::Load(missing) = chain.map_write(&pin, GuestOffset(at), len)
        {
            chain.load(missing).unwrap();
        }
        chain.pins().unpin(pin);
        match chain.prepare_write(GuestOffset(at), len).unwrap() {
            image::Prepared::Allocated(allocation) => allocation,
            other => panic!("{other:?}"),
        }
    };
    let whole = prepare(64 << 10, 128 << 10);
    assert_eq!((whole.len, whole.fills.len()), (128 << 10, 0));
    let size = fs::metadata(&file).unwrap().len();
    assert!(size >= 16 << 20, "{size}");
    // Only what the guest does not write, from the backing file.
    let part = prepare((1 << 20) + 4096, 4096);
    let copied: Vec<_> = part
        .fills
        .iter()
        .map(|fill| (fill.from, fill.len))
        .collect();
    assert_eq!(
        copied,
        [
            (Some(GuestOffset(1 << 20)), 4096),
            (Some(GuestOffset((1 << 20) + 8192)), 57344)
        ]
    );
    // Behind the backing file there are zeroes, and in new space they are there already.
    let fresh = prepare((8 << 20) + 4096, 4096);
    assert_eq!(fresh.fills, []);
    for allocation in [whole, part, fresh] {
        chain.abort(allocation);
    }
    chain.close().unwrap();
    qemu::check(directory, "disk.qcow2", false);
}

/// A file whose operations are counted.
struct Counted(PlainFile, Arc<AtomicU64>);

impl Storage for Counted {
    fn read_at(&self, at: FileOffset, to: &mut [u8]) -> std::io::Result<usize> {
        self.1.fetch_add(1, SeqCst);
        self.0.read_at(at, to)
    }

    fn write_at(&self, at: FileOffset, from: &[u8]) -> std::io::Result<()> {
        self.1.fetch_add(1, SeqCst);
        self.0.write_at(at, from)
    }

    fn flush(&self) -> std::io::Result<()> {
        self.1.fetch_add(1, SeqCst);
        self.0.flush()
    }

    fn loses_data_on_failed_flush(&self) -> bool {
        false
    }

    fn size(&self) -> std::io::Result<u64> {
        self.1.fetch_add(1, SeqCst);
        self.0.size()
    }

    fn set_size(&self, size: u64) -> std::io::Result<()> {
        self.1.fetch_add(1, SeqCst);
        self.0.set_size(size)
    }

    fn punch(&self, at: FileOffset, len: u64) -> std::io::Result<()> {
        self.1.fetch_add(1, SeqCst);
        self.0.punch(at, len)
    }

    fn block_size(&self) -> u32 {
        512
    }
}

/// What an I/O thread asks for never reads the file, writes it, or makes it longer; after another thread has
/// done that once, clusters are taken without.
#[test]
fn nonblocking_calls_do_not_touch_the_file() {
    needs_qemu!("nonblocking_calls_do_not_touch_the_file");
    for options in [
        "cluster_size=4k",
        "cluster_size=16k,extended_l2=on",
        "cluster_size=4k,data_file=data",
    ] {
        let directory = tempfile::tempdir().unwrap();
        let (directory, path) = (directory.path(), directory.path().join("disk.qcow2"));
        qemu::img(
            directory,
            &format!("create -q -f qcow2 -o {options} disk.qcow2 128M"),
        );
        let file = fs::File::options().read(true).write(true).open(&path);
        let count = Arc::new(AtomicU64::new(0));
        let storage = Arc::new(Counted(PlainFile(file.unwrap()), count.clone()));
        let allowed = AllowedDirectories::of_image(&path).unwrap();
        let disk = Disk::with(storage, &path, LayerFormat::Qcow2, &allowed, WRITE).unwrap();
        let chain = &disk.chain;
        let (mut at_once, mut otherwise) = (0, 0);
        for at in (0..64 << 20).step_by(4096) {
            let pin = chain.pins().pin(0);
            while let image::WriteLocation::Load(missing) =
                chain.map_write(&pin, GuestOffset(at), 4096)
            {
                chain.load(missing).unwrap();
            }
            let before = count.load(SeqCst);
            let tried = chain.try_prepare_write(&pin, GuestOffset(at), 4096);
            assert_eq!(count.load(SeqCst), before, "{options}, {at}");
            at_once += u64::from(tried.is_some());
            let allocation = match tried {
                Some(allocation) => Some(allocation),
                None => match chain.prepare_write(GuestOffset(at), 4096).unwrap() {
                    image::Prepared::Allocated(allocation) => {
                        otherwise += 1;
                        Some(allocation)
                    }
                    _ => None,
                },
            };
            if let Some(allocation) = allocation {
                let before = count.load(SeqCst);
                chain.try_commit(allocation).unwrap();
                assert_eq!(count.load(SeqCst), before, "{options}, {at}");
            }
            chain.pins().unpin(pin);
        }
        println!("{options}: {at_once} at once, {otherwise} otherwise");
        assert!(otherwise > 0 && at_once > 100 * otherwise);
    }
}

#[test]
fn raw_disk_is_a_single_layer() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    fs::write(&path, vec![1; 8192]).unwrap();
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let allowed = AllowedDirectories::new::<&str>([]).unwrap();
    let storage = Arc::new(PlainFile(file));
    let disk = Disk::with(storage, &path, LayerFormat::Raw, &allowed, WRITE).unwrap();
    disk.write(512, &[2; 512]).unwrap();
    disk.zero(1024, 512, ZeroMode::Zeroes { unmap: true })
        .unwrap();
    disk.grow(16384).unwrap();
    let content = disk.content().unwrap();
    assert_eq!(
        (content.len(), content[0], content[512], content[1024]),
        (16384, 1, 2, 0)
    );
    assert_eq!(content[8192..], [0; 8192]);
}

#[test]
fn data_files_give_their_space_back() {
    needs_qemu!("data_files_give_their_space_back");
    for options in [
        "data_file=data",
        "data_file=data,extended_l2=on",
        "data_file=data,data_file_raw=on",
    ] {
        let directory = tempfile::tempdir().unwrap();
        let (directory, file) = (directory.path(), directory.path().join("disk.qcow2"));
        qemu::img(
            directory,
            &format!("create -q -f qcow2 -o {options} disk.qcow2 4M"),
        );
        let data = directory.join("data");
        let allocated = || fs::metadata(&data).unwrap().blocks() * 512;
        for why in [
            ZeroMode::Discard,
            ZeroMode::Zeroes { unmap: true },
            ZeroMode::Zeroes { unmap: false },
        ] {
            let place = format!("{options} {why:?}");
            let disk = Disk::open(&file, WRITE).unwrap();
            disk.write(0, &vec![7; 4 << 20]).unwrap();
            disk.chain.flush().unwrap();
            let before = allocated();
            // Beginning and ending in the middle of clusters.
            let (at, len) = ((512 << 10) + 512, (2 << 20) + 4096);
            assert!(
                matches!(disk.chain.zero(GuestOffset(at), len, why), Ok((n, None)) if n == len)
            );
            let given_back = before.saturating_sub(allocated());
            let mut want = vec![7; 4 << 20];
            want[at as usize..(at + len) as usize].fill(0);
            let got = disk.content().unwrap();
            // What is left of the first and the last cluster may be as before, if it was discarded.
            let parts = |at: usize| !(589_824..2_621_440).contains(&at);
            let is_right = |at: usize| {
                got[at] == want[at] || why == ZeroMode::Discard && got[at] == 7 && parts(at)
            };
            assert!((0..got.len()).all(is_right), "{place}");
            match why {
                ZeroMode::Zeroes { unmap: false } => assert_eq!(given_back, 0, "{place}"),
                _ => assert!(given_back >= 1 << 20, "{place}: {given_back}"),
            }
            disk.chain.close().unwrap();
            qemu::check(directory, "disk.qcow2", false);
            assert!(
                qemu::content(directory, "disk.qcow2", "qcow2") == got,
                "{place}"
            );
        }
    }
}
