use super::*;

/// Of a version that gave every disk a number of queues.
#[test]
fn detached_disk_of_an_older_version_keeps_its_queues() {
    let disk = |text: &str| text.parse::<DiskSpec>().unwrap();
    let configured = Configured {
        disks: ["/vms/a.raw", "/vms/b.raw"].map(disk).into(),
        ..Configured::default()
    };
    let overrides = Overrides {
        detached: vec![disk("/vms/b.raw,queues=5")],
        ..Overrides::default()
    };
    let (configured, overrides) = taken_over(&configured, overrides);
    assert_eq!(configured.disks, [disk("/vms/a.raw")]);
    assert_eq!(overrides.queues()["b"], 5);
}
