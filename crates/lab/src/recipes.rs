//! The plans that ship with ringdisk: published measurements, comparisons for the rules of `ringdisk check`, and the tables
//! of docs/performance.md.

use std::path::Path;

use crate::plan::words::not_one_of;
use crate::plan::workload::Profile;

/// The name and the text of each recipe.
pub const RECIPES: [(&str, &str); 46] = [
    ("ladder", include_str!("../recipes/ladder.toml")),
    ("aio-iothread", include_str!("../recipes/aio-iothread.toml")),
    ("backends", include_str!("../recipes/backends.toml")),
    ("desktop", include_str!("../recipes/desktop.toml")),
    (
        "desktop-changes",
        include_str!("../recipes/desktop-changes.toml"),
    ),
    ("rbd-scaling", include_str!("../recipes/rbd-scaling.toml")),
    (
        "wire-encryption",
        include_str!("../recipes/wire-encryption.toml"),
    ),
    ("librbd", include_str!("../recipes/librbd.toml")),
    ("file-system", include_str!("../recipes/file-system.toml")),
    ("pv-eoi", include_str!("../recipes/pv-eoi.toml")),
    ("rbd-cache", include_str!("../recipes/rbd-cache.toml")),
    ("rbd-clients", include_str!("../recipes/rbd-clients.toml")),
    ("million-iops", include_str!("../recipes/million-iops.toml")),
    ("thin-chunk", include_str!("../recipes/thin-chunk.toml")),
    ("myths", include_str!("../recipes/myths.toml")),
    ("noise", include_str!("../recipes/noise.toml")),
    ("versus", include_str!("../recipes/versus.toml")),
    ("disk-cache", include_str!("../recipes/disk-cache.toml")),
    ("aio", include_str!("../recipes/aio.toml")),
    ("queues", include_str!("../recipes/queues.toml")),
    ("cpu-flags", include_str!("../recipes/cpu-flags.toml")),
    ("host-queue", include_str!("../recipes/host-queue.toml")),
    ("rbd-threads", include_str!("../recipes/rbd-threads.toml")),
    (
        "fixed-buffers",
        include_str!("../recipes/fixed-buffers.toml"),
    ),
    ("prefill", include_str!("../recipes/prefill.toml")),
    ("storage", include_str!("../recipes/storage.toml")),
    (
        "qcow2-overlay",
        include_str!("../recipes/qcow2-overlay.toml"),
    ),
    ("bench-null", include_str!("../recipes/bench-null.toml")),
    (
        "bench-page-cache",
        include_str!("../recipes/bench-page-cache.toml"),
    ),
    ("bench-zram", include_str!("../recipes/bench-zram.toml")),
    ("bench-disk", include_str!("../recipes/bench-disk.toml")),
    (
        "bench-rates-disk",
        include_str!("../recipes/bench-rates-disk.toml"),
    ),
    (
        "bench-rates-zram",
        include_str!("../recipes/bench-rates-zram.toml"),
    ),
    (
        "bench-rates-page-cache",
        include_str!("../recipes/bench-rates-page-cache.toml"),
    ),
    ("bench-think", include_str!("../recipes/bench-think.toml")),
    (
        "bench-throttle",
        include_str!("../recipes/bench-throttle.toml"),
    ),
    ("bench-disks", include_str!("../recipes/bench-disks.toml")),
    ("bench-ceph", include_str!("../recipes/bench-ceph.toml")),
    ("bench-bursts", include_str!("../recipes/bench-bursts.toml")),
    ("bench-qcow2", include_str!("../recipes/bench-qcow2.toml")),
    (
        "bench-qcow2-new",
        include_str!("../recipes/bench-qcow2-new.toml"),
    ),
    (
        "bench-qcow2-backing",
        include_str!("../recipes/bench-qcow2-backing.toml"),
    ),
    ("bench-idle", include_str!("../recipes/bench-idle.toml")),
    (
        "bench-fairness",
        include_str!("../recipes/bench-fairness.toml"),
    ),
    (
        "bench-scaling",
        include_str!("../recipes/bench-scaling.toml"),
    ),
    (
        "bench-scaling-disks",
        include_str!("../recipes/bench-scaling-disks.toml"),
    ),
];

/// The text of a recipe.
pub fn text(name: &str) -> Option<&'static str> {
    RECIPES
        .iter()
        .find(|recipe| recipe.0 == name)
        .map(|recipe| recipe.1)
}

/// The configurations of `ringdisk lab compare`, with their settings.
const CONFIGURATIONS: [(&str, &str); 9] = [
    ("ringdisk", "device = \"vhost-user-blk\""),
    ("qemu", "iothread = \"on\"\naio = \"io_uring\""),
    ("qemu-plain", "aio = \"io_uring\""),
    (
        "qemu-mapping",
        "iothread = 4\nqueues = 4\nvcpus = 4\naio = \"io_uring\"",
    ),
    (
        "qemu-storage-daemon",
        "device = \"vhost-user-blk\"\nserver = \"qemu-storage-daemon\"\niothread = \"on\"\naio = \"io_uring\"",
    ),
    (
        "virtio-scsi",
        "device = \"virtio-scsi\"\niothread = \"on\"\naio = \"io_uring\"",
    ),
    (
        "ide",
        "device = \"ide\"\nmachine = \"pc\"\naio = \"io_uring\"",
    ),
    ("host", "device = \"host\""),
    ("stock", "cache = \"writeback\"\naio = \"threads\""),
];

/// The text of a plan that compares configurations of one disk.
///
/// # Errors
/// A name is unknown; the message has the nearest one.
pub fn comparison(
    names: &[String],
    disk: Option<&Path>,
    profile: Option<&str>,
) -> Result<String, String> {
    let mut text = String::from(
        "name = \"compare\"\ntitle = \"Configurations from the command line\"\nbudget = \"20m\"\n",
    );
    if let Some(disk) = disk {
        let disk = std::path::absolute(disk).map_err(|e| format!("{}: {e}", disk.display()))?;
        let quoted =
            serde_json::to_string(&disk.display().to_string()).map_err(|e| e.to_string())?;
        text += &format!("\n[config]\nbacking = {quoted}\n");
    }
    for name in names {
        let known: Vec<_> = CONFIGURATIONS.iter().map(|found| found.0).collect();
        let found = CONFIGURATIONS
            .iter()
            .find(|found| found.0 == name)
            .ok_or_else(|| not_one_of(name, &known))?;
        text += &format!("\n[[case]]\nname = \"{name}\"\n{}\n", found.1);
    }
    text += "\n[fio]\nruntime = \"8s\"\n";
    match profile {
        Some(profile) => text += &format!("profile = \"{}\"\n", Profile::of(profile)?.name),
        None => text += "rw = \"randread\"\nbs = \"4k\"\niodepth = [1, 32]\n",
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;

    #[test]
    fn recipes_are_valid_plans_and_their_claims_match_comparisons() {
        for (name, text) in RECIPES {
            let plan =
                Plan::parse(Path::new("recipe"), text).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(plan.name, name);
            assert!(
                !plan.title.is_empty() && !plan.contrasts.is_empty() && plan.left_out.is_empty(),
                "{name}"
            );
            let for_rules = [
                "aio",
                "disk-cache",
                "queues",
                "cpu-flags",
                "host-queue",
                "rbd-threads",
                "fixed-buffers",
                "prefill",
                "storage",
                "qcow2-overlay",
            ];
            let claims_nothing =
                for_rules.contains(&name) || name == "noise" || name.starts_with("bench-");
            assert!(claims_nothing || !plan.claims.is_empty(), "{name}");
            for claim in &plan.claims {
                assert!(
                    !claim.source.is_empty() && !claim.figure.is_empty(),
                    "{name}"
                );
            }
        }
    }

    /// Each published figure has a verdict with a reason, whether or not its configurations could run.
    #[test]
    fn recipes_end_with_a_verdict_on_each_claim() {
        for (name, text) in RECIPES {
            let plan = Plan::parse(Path::new("recipe"), text).unwrap();
            let missing = |case: &crate::plan::Case| (case.name.clone(), "is not here".to_owned());
            for left_out in [
                Default::default(),
                plan.cases[1..].iter().map(missing).collect(),
            ] {
                let header = crate::journal::Header {
                    version: 1,
                    file: "recipe.toml".into(),
                    plan: text.into(),
                    jobs: Default::default(),
                    seed: 1,
                    started_ms: 0,
                    facts: Default::default(),
                    only: Vec::new(),
                    left_out,
                };
                let all_left_out = !header.left_out.is_empty();
                let line = serde_json::to_string(&crate::journal::Record::Plan(header)).unwrap();
                let journal = crate::journal::Journal::parse(&line).unwrap();
                let text = crate::report::text(&crate::analysis::Analysis::of(&journal));
                for claim in &plan.claims {
                    let start = format!("published ({}): {}: ", claim.source, claim.figure);
                    let line = text.lines().find_map(|line| line.strip_prefix(&start));
                    let line = line.unwrap_or_else(|| panic!("{name}: {start} in {text}"));
                    let is_side = |case: &&crate::plan::Case| case.matches(&claim.to);
                    let mut sides = plan.cases.iter().filter(is_side);
                    let is_on = sides.all(|case| claim.is_on(&case.settings));
                    let is_testable = claim.untestable.is_none() && is_on;
                    let wanted = match is_testable && !all_left_out {
                        true => "undecided",
                        false => "cannot run here",
                    };
                    assert!(
                        line.starts_with(wanted) && line.ends_with(')'),
                        "{name}: {line}"
                    );
                }
            }
        }
    }

    #[test]
    fn configurations_of_the_command_line_are_plans() {
        let names: Vec<String> = CONFIGURATIONS
            .iter()
            .map(|found| found.0.to_owned())
            .collect();
        let text = comparison(&names, Some(Path::new("/dev/a \"disk\"")), Some("mail")).unwrap();
        let plan = Plan::parse(Path::new("compare.toml"), &text).unwrap();
        assert_eq!(plan.cases.len(), CONFIGURATIONS.len());
        assert_eq!(plan.cases[0].settings.get("backing"), "/dev/a \"disk\"");
        assert!(
            comparison(&["qmu".into()], None, None)
                .unwrap_err()
                .contains("did you mean 'qemu'")
        );
    }
}
