//! `ringdisk lab study`.

use super::{PlanFolder, are_installed, output_text, succeed};

/// One run of a study with a small part of its plan, on ringdisk in place of qemu-storage-daemon.
const SMALL: [&str; 6] = [
    "--run=servers",
    "--only=bs=4k",
    "--only=iodepth=1",
    "--set=fio.runtime=100ms",
    "--set=fio.ramp=0s",
    "--set=storage.size=16M",
];

#[test]
fn a_study_ends_with_verdicts_and_a_bundle_and_is_resumed() {
    if !are_installed("study", &["qemu-storage-daemon"]) {
        return;
    }
    let here = PlanFolder::new("");
    let study = |more: &[&str]| {
        let mut command = here.lab("study");
        command
            .arg("001")
            .args(SMALL)
            .args(["--set=blocks=3", "--json"]);
        command.arg("--output").arg(here.path("result")).args(more);
        command
    };
    let bundles = here.path("bundles").display().to_string();
    let output = study(&["--bundle", &bundles, "--note", "a test"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    let claims: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let of_servers = |it: &&serde_json::Value| it["run"] == "servers" && it["published"] == "+15 %";
    let sized: Vec<_> = claims
        .as_array()
        .unwrap()
        .iter()
        .filter(of_servers)
        .collect();
    assert_eq!(sized.len(), 2, "{claims}");
    assert!(
        sized.iter().all(|it| it["measured"].is_string()),
        "{claims}"
    );
    let others = claims
        .as_array()
        .unwrap()
        .iter()
        .filter(|it| it["run"] == "grid");
    others.for_each(|it| assert_eq!(it["verdict"], "cannot run here", "{it}"));

    // The bundle is a result, and has what the document needs.
    let said = succeed(here.lab("study").args(["--document", &bundles]));
    assert!(said.contains("a test") && said.contains("% ["), "{said}");

    // The run is complete, so that it is not run again.
    let journal = here.path("result/servers/journal.jsonl");
    let before = std::fs::read(&journal).unwrap();
    succeed(&mut study(&["--resume"]));
    assert!(before == std::fs::read(&journal).unwrap());

    // What was measured with other options, or for another study, has no verdict in this one.
    let refused = study(&["--resume", "--set=config.queues=2"])
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(2), "{}", output_text(&refused));
    assert!(
        output_text(&refused).contains("with other options"),
        "{}",
        output_text(&refused)
    );
    let mut other = here.lab("study");
    other.args(["004", "--run=servers", "--resume", "--output"]);
    let refused = other.arg(here.path("result")).output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{}", output_text(&refused));
    assert!(
        output_text(&refused).contains("is of study 001"),
        "{}",
        output_text(&refused)
    );
}

#[test]
fn what_a_study_lacks_is_said_before_anything_runs() {
    let here = PlanFolder::new("");
    let said =
        succeed(
            here.lab("study")
                .args(["000", "--run=librbd", "--backing=/mnt/", "--dry-run"]),
        );
    assert!(
        said.contains("not run: needs a Ceph cluster: --pool POOL"),
        "{said}"
    );
    let output = here
        .lab("study")
        .args(["000", "--run=ladr"])
        .output()
        .unwrap();
    assert!(
        output_text(&output).contains("did you mean 'ladder'"),
        "{}",
        output_text(&output)
    );
    assert_eq!(output.status.code(), Some(2));
}
