#![no_main]

use std::sync::LazyLock;

use advisor::rules::Rules;

#[path = "../../crates/advisor/tests/checks/mod.rs"]
#[expect(dead_code, reason = "each target has its own check")]
mod checks;

static RULES: LazyLock<Rules> = LazyLock::new(|| Rules::built_in().expect("a test reads them"));

libfuzzer_sys::fuzz_target!(|text: &str| checks::input(&RULES, text));
