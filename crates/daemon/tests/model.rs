//! Two minutes of the random tester. For hours: `cargo xtask model`.

use std::time::Duration;

use testkit::model::{self, Options};
use testkit::qemu_img;

use crate::support::seed;

#[test]
fn random_cases() {
    if !qemu_img::is_there("random_cases") {
        return;
    }
    let report = model::run(&Options {
        binary: env!("CARGO_BIN_EXE_ringdisk").into(),
        directory: env!("CARGO_TARGET_TMPDIR").into(),
        length: Duration::from_secs(120),
        seed: seed() * 1_000_000,
        only: false,
        jobs: 1,
        shrink: Duration::from_secs(60),
        go_on: false,
    })
    .unwrap();
    for skipped in &report.skipped {
        println!("skipped: random_cases: {skipped}");
    }
    println!("{}", report.summary());
    assert!(report.findings.is_empty(), "{}", report.findings.join("\n"));
}
