use super::*;

const NOBODY: IsHere<'_> = &|_| false;

fn mark(file: &str, inode: u64, modified: i64) -> FileMark {
    FileMark {
        file: file.into(),
        identity: Some((1, inode)),
        changed: Some((512, modified, 0)),
    }
}

fn disk(name: &str, socket: &str) -> DiskId {
    DiskId {
        name: name.into(),
        socket: socket.into(),
    }
}

/// Serves a disk from images over each other.
fn serve(all: &mut LeftFiles, disk: &DiskId, images: &[&FileMark]) {
    let below: Vec<_> = images[1..].iter().copied().cloned().collect();
    let before = all.served_before(disk);
    all.served(disk, images[0].clone(), &below, before, NOBODY);
    check(&serde_json::to_vec(&all).unwrap());
}

/// The depth at which a file is refused, and where the disk has gone.
fn refused(all: &LeftFiles, disk: &DiskId, images: &[&FileMark]) -> Option<(usize, String)> {
    let marks: Vec<_> = images.iter().map(|mark| ((*mark).clone(), true)).collect();
    let refused = all.check(disk, false, &marks).err();
    refused.map(|refused| (refused.depth, refused.to))
}

fn to(file: &str) -> Option<(usize, String)> {
    Some((0, file.into()))
}

#[test]
fn only_unchanged_files_are_left() {
    let (mut all, a) = (LeftFiles::default(), disk("a", "/1"));
    let [m0, m1, m2] = [mark("/o0", 1, 10), mark("/o1", 2, 20), mark("/o2", 3, 30)];
    all.moved(&a, Some(m0.clone()), m1.clone(), NOBODY);
    all.moved(&a, Some(m1.clone()), m2.clone(), NOBODY);
    assert_eq!(refused(&all, &a, &[&m0]), to("/o2"));
    assert_eq!(refused(&all, &a, &[&m1]), to("/o2"));
    assert_eq!(refused(&all, &a, &[&mark("/renamed", 1, 10)]), to("/o2"));
    // Under its own name on a device that has another number after a reboot.
    let mut other_device = m0.clone();
    other_device.identity = Some((7, 1));
    assert_eq!(refused(&all, &a, &[&other_device]), to("/o2"));
    for there in [mark("/o0", 1, 11), mark("/o0", 9, 10), m2.clone()] {
        assert_eq!(refused(&all, &a, &[&there]), None);
    }
    // An image over it that has nothing of its own.
    let over = mark("/over", 20, 1);
    assert_eq!(refused(&all, &a, &[&over, &m0]), Some((1, "/o2".into())));
    assert_eq!(refused(&all, &a, &[&over, &m2, &m0]), None);
    let written = [(over, true), (m0.clone(), false)];
    assert_eq!(all.check(&a, false, &written), Ok(()));
    // Back by a move.
    all.moved(&a, Some(m2.clone()), m0.clone(), NOBODY);
    assert_eq!(refused(&all, &a, &[&m0]), None);
    assert_eq!(refused(&all, &a, &[&m2]), to("/o0"));
}

/// Whatever the disk is called now, the file lacks what its VM has written. Clones of others are their own.
#[test]
fn left_files_are_refused_to_all_writers() {
    let (mut all, a, b) = (LeftFiles::default(), disk("a", "/1"), disk("b", "/2"));
    let [m0, m1] = [mark("/o0", 1, 10), mark("/o1", 2, 20)];
    all.moved(&a, Some(m0.clone()), m1, NOBODY);
    assert_eq!(refused(&all, &b, &[&m0]), to("/o1"));
    assert_eq!(all.check(&b, true, &[(m0.clone(), true)]), Ok(()));
    let clone = mark("/clone", 3, 10);
    assert_eq!(refused(&all, &b, &[&clone, &m0]), None);
    assert_eq!(refused(&all, &a, &[&clone, &m0]), Some((1, "/o1".into())));
    // Another VM at that socket.
    let c = disk("c", "/1");
    serve(&mut all, &c, &[&clone, &m0]);
    assert_eq!(refused(&all, &a, &[&m0]), to("/o1"));
    let device = FileMark::named(&FileSpec::Path("/dev/vg/lv".into()));
    all.moved(&a, Some(device.clone()), mark("/o3", 4, 1), NOBODY);
    assert_eq!(refused(&all, &b, &[&device]), None);
    assert_eq!(refused(&all, &a, &[&device]), to("/o3"));
}

#[test]
fn a_start_over_the_file_before_leaves_it() {
    let (mut all, a) = (LeftFiles::default(), disk("a", "/1"));
    let [m0, m1] = [mark("/o0", 1, 10), mark("/o1", 2, 20)];
    serve(&mut all, &a, &[&m0]);
    // At another socket in the same start, which another disk had.
    serve(&mut all, &disk("b", "/2"), &[&mark("/b", 9, 9)]);
    let moved = disk("a", "/2");
    serve(&mut all, &moved, &[&m1, &m0]);
    assert_eq!(refused(&all, &moved, &[&m0]), to("/o1"));
    // Recreated under its name.
    let fresh = mark("/o1", 30, 1);
    assert_eq!(refused(&all, &moved, &[&fresh, &m0]), None);
    // Renamed: an overlay by the new name alone.
    let renamed = disk("z", "/2");
    serve(&mut all, &renamed, &[&m1, &m0]);
    let at_last = disk("z", "/5");
    serve(&mut all, &at_last, &[&m1, &m0]);
    let over = mark("/over", 31, 1);
    assert_eq!(
        refused(&all, &at_last, &[&over, &m0]),
        Some((1, "/o1".into()))
    );
}

#[test]
fn a_commit_is_followed() {
    let (mut all, a) = (LeftFiles::default(), disk("a", "/1"));
    let [m0, m1] = [mark("/o0", 1, 10), mark("/o1", 2, 20)];
    serve(&mut all, &a, &[&m0]);
    serve(&mut all, &a, &[&m1, &m0]);
    let committed = mark("/o0", 1, 50);
    assert_eq!(refused(&all, &a, &[&committed]), None);
    // The VM goes on above it.
    serve(&mut all, &a, &[&m1, &committed]);
    assert_eq!(refused(&all, &a, &[&committed]), to("/o1"));
    // Or in it: then the image above is old.
    let again = mark("/o0", 1, 60);
    serve(&mut all, &a, &[&again]);
    let new = mark("/new", 2, 99);
    assert_eq!(refused(&all, &a, &[&new]), None);
    assert_eq!(
        refused(&all, &a, &[&m1.clone().without_change()]),
        to("/o0")
    );
}

#[test]
fn a_mistake_and_its_correction_are_moves() {
    let (mut all, a) = (LeftFiles::default(), disk("a", "/1"));
    let [m0, m1, m2] = [mark("/r0", 1, 10), mark("/r1", 2, 20), mark("/r2", 3, 30)];
    all.moved(&a, Some(m0.clone()), m1.clone(), NOBODY);
    all.moved(&a, Some(m1.clone()), m2.clone(), NOBODY);
    for [there, other] in [[&m0, &m2], [&m2, &m0]] {
        let (disk, file) = (a.clone(), other.clone());
        let before = vec![Served { disk, file }];
        all.served(&a, there.clone(), &[], before, NOBODY);
        assert_eq!(refused(&all, &a, &[there]), None);
        assert_eq!(refused(&all, &a, &[other]), to(&there.file));
        assert_eq!(refused(&all, &a, &[&m1]), to(&there.file));
    }
}

/// Files that exchange their names are still known.
#[test]
fn renamed_files_are_known() {
    let (mut all, a) = (LeftFiles::default(), disk("a", "/1"));
    let [m0, m1] = [mark("/r0", 1, 10), mark("/r1", 2, 20)];
    all.moved(&a, Some(m0.clone()), m1, NOBODY);
    let now = mark("/r0", 2, 20);
    assert_eq!(refused(&all, &a, &[&now]), None);
    serve(&mut all, &a, &[&now]);
    for name in ["/old", "/r0", "/r1"] {
        assert_eq!(
            refused(&all, &a, &[&mark(name, 1, 10)]),
            to("/r0"),
            "{name}"
        );
    }
}

/// What had the name or the socket before is another disk.
#[test]
fn files_of_other_disks_are_not_left() {
    let mut all = LeftFiles::default();
    let [a, b] = [disk("a", "/1"), disk("b", "/2")];
    let [a0, a1, b0] = [mark("/a0", 1, 10), mark("/a1", 2, 20), mark("/b0", 3, 30)];
    serve(&mut all, &b, &[&b0]);
    all.moved(&a, Some(a0.clone()), a1.clone(), NOBODY);
    let exchanged = [disk("a", "/2"), disk("b", "/1")];
    for (disk, file) in exchanged.iter().zip([&a1, &b0]) {
        let before = all.served_before(disk);
        all.served(disk, file.clone(), &[], before, NOBODY);
    }
    assert_eq!(refused(&all, &exchanged[1], &[&b0]), None);
    assert_eq!(refused(&all, &exchanged[0], &[&a0]), to("/a1"));
    // The number of a file that was removed.
    let new = mark("/new", 1, 70);
    serve(&mut all, &exchanged[0], &[&new]);
    assert_eq!(refused(&all, &exchanged[0], &[&a1]), None);
}

/// Another disk uses a left file: what that writes is seen by the file's time.
#[test]
fn a_file_is_left_until_it_changes() {
    let (mut all, a, b) = (LeftFiles::default(), disk("a", "/1"), disk("b", "/2"));
    let [m0, m1] = [mark("/r0", 1, 10), mark("/r1", 2, 20)];
    all.moved(&a, Some(m0.clone()), m1, NOBODY);
    serve(&mut all, &b, &[&m0]);
    assert_eq!(refused(&all, &b, &[&m0]), None);
    assert_eq!(refused(&all, &a, &[&m0]), to("/r1"));
    assert_eq!(refused(&all, &a, &[&mark("/r0", 1, 11)]), None);
}

/// A reader forgets nothing.
/// The name that a disk had before leads to no file that the disk has left since.
#[test]
fn a_former_name_is_kept_from_a_left_file() {
    let (mut all, web, www) = (LeftFiles::default(), disk("web", "/1"), disk("www", "/2"));
    let [m0, m1] = [mark("/r0", 1, 10), mark("/r1", 2, 20)];
    serve(&mut all, &web, &[&m0]);
    serve(&mut all, &www, &[&m0]);
    all.moved(&www, Some(m0.clone()), m1.clone(), NOBODY);
    assert_eq!(refused(&all, &web, &[&m0]), to("/r1"));
    assert_eq!(refused(&all, &www, &[&m0]), to("/r1"));
}

/// Two disks have exchanged their files, and have written nothing yet.
#[test]
fn files_that_were_exchanged_are_served() {
    let (mut all, a, b) = (LeftFiles::default(), disk("a", "/1"), disk("b", "/2"));
    let [m0, m1] = [mark("/r0", 1, 10), mark("/r1", 2, 20)];
    serve(&mut all, &a, &[&m0]);
    serve(&mut all, &b, &[&m1]);
    all.moved(&a, Some(m0.clone()), m1.clone(), NOBODY);
    all.moved(&b, Some(m1.clone()), m0.clone(), NOBODY);
    for _ in 0..2 {
        assert_eq!(refused(&all, &a, &[&m1]), None);
        assert_eq!(refused(&all, &b, &[&m0]), None);
        serve(&mut all, &b, &[&m0]);
        serve(&mut all, &a, &[&m1]);
    }
}

/// Another disk has taken the name or the socket, and has another file: that is not where the VM's data is.
#[test]
fn the_reason_names_the_file_of_no_other_disk() {
    let (mut all, a, b) = (LeftFiles::default(), disk("a", "/1"), disk("b", "/1"));
    let [m0, m1, m2] = [mark("/r0", 1, 10), mark("/r1", 2, 20), mark("/b", 3, 30)];
    all.moved(&a, Some(m0.clone()), m1.clone(), NOBODY);
    serve(&mut all, &b, &[&m2]);
    serve(&mut all, &disk("b", "/2"), &[&m2]);
    assert_eq!(refused(&all, &a, &[&m0]), to("/r1"));
    // Its own was renamed meanwhile.
    let renamed = mark("/renamed", 2, 20);
    all.moved(&disk("a", "/3"), None, m1, NOBODY);
    all.moved(&disk("a", "/3"), None, renamed, NOBODY);
    assert_eq!(refused(&all, &a, &[&m0]), to("/renamed"));
}

/// The usual way to snapshot a stopped VM without touching its configuration.
#[test]
fn an_image_that_takes_the_name_of_its_base_leaves_that() {
    let (mut all, a) = (LeftFiles::default(), disk("a", "/1"));
    serve(&mut all, &a, &[&mark("/vm", 1, 10)]);
    let base = mark("/base", 1, 10);
    serve(&mut all, &a, &[&mark("/vm", 2, 20), &base]);
    assert_eq!(refused(&all, &a, &[&base]), to("/vm"));
    assert_eq!(refused(&all, &a, &[&mark("/vm", 1, 10)]), to("/vm"));
}

#[test]
fn numbers_are_bounded() {
    let (mut all, a) = (LeftFiles::default(), disk("a", "/a"));
    let m0 = mark("/a0", 1, 10);
    all.moved(&a, Some(m0.clone()), mark("/a1", 2, 20), NOBODY);
    for n in 0..FILES_MAX as u64 + 100 {
        let other = disk(&format!("d{n}"), "/gone");
        let [old, new] = [10, 11].map(|at| mark(&format!("/{n}-{at}"), 100 + 2 * n + at, 0));
        all.moved(&other, Some(old), new, NOBODY);
        all.disks.retain(|served| served.disk == a);
    }
    assert_eq!(all.left.len(), FILES_OF_DISK_MAX + 1);
    assert_eq!(refused(&all, &a, &[&m0]), to("/a1"));
    for n in 0..100 {
        all.moved(
            &a,
            Some(mark(&format!("/{n}"), n, 5)),
            mark("/now", 10_000, 0),
            NOBODY,
        );
    }
    assert!(all.left.len() <= 2 * FILES_OF_DISK_MAX);
}

/// The number of a device, and what its links resolve to, may be another device's after a reboot.
#[test]
fn devices_are_known_by_the_configured_path() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("disk");
    std::os::unix::fs::symlink("/dev/null", &link).unwrap();
    let device = FileMark::at(&link).unwrap();
    assert_eq!(device, FileMark::at(Path::new("/dev/null")).unwrap());
    // Under another of its names.
    let name = |name: &str| FileMark::named(&FileSpec::Path(name.into()));
    assert!(name("/dev/null").is(&name("/dev/../dev/null")));
    assert!(!name("/dev/null").is(&name("/dev/zero")));
    std::fs::remove_file(&link).unwrap();
    assert_eq!(FileMark::at(&link), None);
    std::fs::write(&link, "x").unwrap();
    let file = FileMark::at(&link).unwrap();
    assert!(file.identity.is_some() && file.changed.is_some());
}
