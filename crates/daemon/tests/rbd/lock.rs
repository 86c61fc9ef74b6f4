//! The proof that no other client has had the lock of an image: clients that come in between are noticed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ::rbd::{Location, OpenOptions, OwnError, RbdImage};
use testkit::ceph::POOL;
use testkit::random::Random;

use super::cluster::{CephVersion, Cluster};

/// Opens an image as a client that shares its connection only with those of the same number.
fn open(cluster: &mut Cluster, name: &str, client: usize) -> Arc<RbdImage> {
    let access = cluster.ceph().options().replace(',', ":");
    let location = format!("{POOL}/{name}:connections={client}{access}");
    RbdImage::open(OpenOptions {
        location: Location::parse(&location).unwrap(),
        cache: block::CacheMode::None,
        read_only: false,
    })
    .unwrap()
}

fn is_foreign<T>(owned: Result<T, OwnError>) -> bool {
    match owned {
        Ok(_) => false,
        Err(OwnError::Foreign(_)) => true,
        Err(e) => panic!("{e}"),
    }
}

// The library that this process loads is the distribution's.
#[test]
fn acquisitions_notice_clients_in_between() {
    let test = "acquisitions_notice_clients_in_between";
    let Some(mut cluster) = Cluster::get(CephVersion::System, test) else {
        return;
    };
    cluster.ceph().create("raced", 32).unwrap();
    let (ours, other) = (
        open(&mut cluster, "raced", 1),
        open(&mut cluster, "raced", 2),
    );
    assert_eq!(ours.identity().unwrap(), other.identity().unwrap());
    let header = ours.header().unwrap();
    assert!(!header.is_locked() && header.mark().is_none());
    ours.own_lock(Some((&header, true)), "ours").unwrap();
    assert!(ours.has_mark("ours").unwrap() && !other.has_mark("ours").unwrap());
    assert_eq!(other.header().unwrap().mark(), Some("ours"));
    // It is alive, whatever the caller says.
    let locked = other.header().unwrap();
    assert!(is_foreign(other.own_lock(Some((&locked, true)), "other")));
    let version = ours.release_lock("ours").unwrap().unwrap();
    let stopped = ours.header().unwrap();
    assert!(!stopped.is_locked() && stopped.version == version);
    // To be opened is no change.
    let reader = open(&mut cluster, "raced", 3);
    assert_eq!(reader.header().unwrap(), stopped);
    drop(reader);
    other.own_lock(None, "other").unwrap();
    assert!(other.release_lock("other").unwrap().is_some());
    assert!(is_foreign(ours.own_lock(Some((&stopped, true)), "ours")));
    // The lock was handed over, and came back.
    ours.own_lock(None, "ours").unwrap();
    other.own_lock(None, "other").unwrap();
    ours.own_lock(None, "again").unwrap();
    assert!(!ours.has_mark("ours").unwrap() && ours.has_mark("again").unwrap());
    assert_eq!(ours.release_lock("ours").unwrap(), None);
    assert!(ours.release_lock("again").unwrap().is_some());
}

/// librbd would wait for it.
#[test]
fn locks_of_administrators_are_not_waited_for() {
    let test = "locks_of_administrators_are_not_waited_for";
    let Some(mut cluster) = Cluster::get(CephVersion::System, test) else {
        return;
    };
    cluster.ceph().create("kept", 32).unwrap();
    let ours = open(&mut cluster, "kept", 1);
    let image = format!("{POOL}/kept");
    let add = ["lock", "add", &image, "maintenance"];
    cluster.ceph().rbd(&add).unwrap();
    let refused = ours.own_lock(None, "ours").unwrap_err().to_string();
    assert!(refused.contains("another client keeps it"), "{refused}");
    let locks = ["lock", "ls", &image, "--format=json"];
    let locks = cluster.ceph().rbd(&locks).unwrap();
    let locks: serde_json::Value = serde_json::from_str(&locks).unwrap();
    let locker = locks[0]["locker"].as_str().unwrap();
    let remove = ["lock", "rm", &image, "maintenance", locker];
    cluster.ceph().rbd(&remove).unwrap();
    ours.own_lock(None, "ours").unwrap();
}

#[test]
fn acquisitions_that_succeed_hide_no_client() {
    let test = "acquisitions_that_succeed_hide_no_client";
    let Some(mut cluster) = Cluster::get(CephVersion::System, test) else {
        return;
    };
    cluster.ceph().create("raced-often", 32).unwrap();
    let (ours, other) = (
        open(&mut cluster, "raced-often", 1),
        open(&mut cluster, "raced-often", 2),
    );
    let is_over = AtomicBool::new(false);
    let (held, proven, refused) = thread::scope(|scope| {
        // When the other client had the lock.
        let others = scope.spawn(|| {
            let (mut random, mut held) = (Random(7), Vec::new());
            while !is_over.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_micros(random.below(60_000)));
                let begin = Instant::now();
                // It may lose the lock at any time.
                let owned = other.own_lock(None, "other");
                if owned.is_ok() && matches!(other.release_lock("other"), Ok(Some(_))) {
                    held.push((begin, Instant::now()));
                }
            }
            held
        });
        let (mut proven, mut refused) = (Vec::new(), 0);
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(15) {
            let header = ours.header().unwrap();
            let since = Instant::now();
            // As a process that has been waiting for the state directory.
            thread::sleep(Duration::from_millis(proven.len() as u64 % 3 * 10));
            if is_foreign(ours.own_lock(Some((&header, true)), "ours")) {
                refused += 1;
                thread::sleep(Duration::from_millis(20));
            } else {
                proven.push((since, Instant::now()));
                ours.release_lock("ours").unwrap();
            }
        }
        is_over.store(true, Ordering::SeqCst);
        (others.join().unwrap(), proven, refused)
    });
    println!(
        "{} proven, {refused} refused, {} others",
        proven.len(),
        held.len()
    );
    for (since, until) in &proven {
        let is_hidden = |&&(begin, end): &&(Instant, Instant)| begin > *since && end < *until;
        assert_eq!(held.iter().filter(is_hidden).count(), 0);
    }
    assert!(proven.len() > 10 && refused > 10 && held.len() > 10);
}

/// Other writes to the placement group of the header come between the changes of the header.
#[test]
fn busy_pools_are_no_other_clients() {
    let test = "busy_pools_are_no_other_clients";
    let Some(mut cluster) = Cluster::get(CephVersion::System, test) else {
        return;
    };
    cluster.ceph().create("raced-busy", 32).unwrap();
    let ours = open(&mut cluster, "raced-busy", 1);
    let ceph = &*cluster.ceph();
    let bench = ["bench", "8", "write", "-b", "4096", "-t", "16"];
    let bench = [&["-p", POOL], &bench[..]].concat();
    let (proven, refused) = thread::scope(|scope| {
        let load = scope.spawn(|| ceph.rados(&bench).unwrap());
        let (mut proven, mut refused) = (0, 0);
        while !load.is_finished() {
            let header = ours.header().unwrap();
            if is_foreign(ours.own_lock(Some((&header, true)), "ours")) {
                refused += 1;
                ours.own_lock(None, "ours").unwrap();
            } else {
                proven += 1;
            }
            ours.release_lock("ours").unwrap();
        }
        (proven, refused)
    });
    println!("{proven} proven, {refused} refused");
    assert!(proven > refused && proven > 10);
}
