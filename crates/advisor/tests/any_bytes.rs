//! The checks of `checks/`, which fuzzing runs for hours, here for seconds: with the seeds in `fuzz/seeds`, with the
//! corpus, with these changed, and with text that has the look of one of the formats.

use crate::checks;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use advisor::input::Surroundings;
use advisor::read::read;
use advisor::rules::Rules;
use advisor::text::Source;
use proptest::prelude::*;

static RULES: LazyLock<Rules> = LazyLock::new(|| Rules::built_in().unwrap());

fn texts(directory: &Path) -> Vec<String> {
    let mut texts = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            texts.extend(self::texts(&path));
        } else {
            texts.push(String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned());
        }
    }
    texts
}

fn seeds(target: &str) -> Vec<String> {
    let seeds =
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds")).join(target);
    let texts = texts(&seeds);
    assert!(texts.len() >= 2, "{target}");
    texts
}

fn configurations() -> Vec<String> {
    let mut texts = texts(Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/corpus"
    )));
    texts.extend(seeds("check_input"));
    texts
}

/// A text with some characters changed, a part taken out and another put in.
fn changed(texts: Vec<String>) -> impl Strategy<Value = String> {
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<char>()), 0..6);
    let cut = prop::option::of((any::<prop::sample::Index>(), any::<prop::sample::Index>()));
    let insert = prop::option::of((
        any::<prop::sample::Index>(),
        "[-<>/='\"{}:,@#\\[\\]\\\\\n a-z0-9]{0,20}",
    ));
    (prop::sample::select(texts), changes, cut, insert).prop_map(|(text, changes, cut, insert)| {
        let mut chars: Vec<char> = text.chars().collect();
        for (at, c) in changes {
            if !chars.is_empty() {
                let at = at.index(chars.len());
                chars[at] = c;
            }
        }
        if let Some((from, to)) = cut {
            let (from, to) = (from.index(chars.len() + 1), to.index(chars.len() + 1));
            chars.drain(from.min(to)..from.max(to));
        }
        if let Some((at, text)) = insert {
            let at = at.index(chars.len() + 1);
            chars.splice(at..at, text.chars());
        }
        chars.into_iter().collect()
    })
}

#[test]
fn seeds_pass_the_checks() {
    configurations()
        .iter()
        .for_each(|text| checks::input(&RULES, text));
    seeds("check_facts")
        .iter()
        .for_each(|text| checks::facts(&RULES, text));
    seeds("check_measured")
        .iter()
        .for_each(|text| checks::measured(&RULES, text));
}

/// Inputs that exceed a limit are refused with a position.
#[test]
fn large_and_deep_inputs_are_refused() {
    for text in [
        "<a>".repeat(100_000),
        format!("<domain>{}</domain>", "<a/>".repeat(510_000)),
        format!("<domain a='{}'/>", "&lt;".repeat(100_000)),
        format!(
            "qemu-system-x86_64 -blockdev '{}'",
            "{\"a\":".repeat(100_000)
        ),
        format!("qemu-system-x86_64 -device '{}", "a,".repeat(10_000)),
        "qemu-system-x86_64 -drive if=virtio,file=a\n".repeat(300),
        "scsi0: a:b,iothread=1\n".repeat(300),
        "[[disk]]\nfile = 'a'\n".repeat(300),
        "x".repeat(advisor::text::BYTES_MAX + 1),
        "<domain><iothreads>99999999999</iothreads><devices/></domain>".into(),
        "<!DOCTYPE a [<!ENTITY b \"c\">]><domain/>".into(),
    ] {
        checks::input(&RULES, &text);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_configuration(text in changed(configurations())) {
        checks::input(&RULES, &text);
    }

    #[test]
    fn any_command_line(words in prop::collection::vec("-?[a-z0-9=,.:/'\"{}$@\\\\-]{0,20}", 0..12)) {
        checks::input(&RULES, &format!("qemu-system-x86_64 {}", words.join(" ")));
    }

    #[test]
    fn any_script(words in prop::collection::vec(
        "qemu-system-x86_64|-drive file=/a,format=raw,if=(ide|virtio)|-device virtio-blk-pci,drive=a|[-><&|;()\\[\\]{}$`'\"#*?=\\\\ \n]{1,3}|\
         <<E|\nE\n|\\$[A-Z@]{1,2}|\"\\$@\"|2>&1|-[a-z]{1,6}|[a-z]{1,3}",
        0..14,
    )) {
        checks::input(&RULES, &format!("kvm -m 1 {}", words.join(" ")));
    }

    #[test]
    fn any_facts(text in changed(seeds("check_facts"))) {
        checks::facts(&RULES, &text);
    }

    #[test]
    fn any_results(text in changed(seeds("check_measured"))) {
        checks::measured(&RULES, &text);
    }
}

/// An arguments file that includes itself is read once, so a short text does not become a long one.
#[test]
fn recursive_arguments_file_is_read_once() {
    let text = "qemu-system-x86_64 @a @b @a disk.raw";
    let files = ["a", "b"].map(|name| Source::new(name, "@b @a another.raw"));
    let surroundings = Surroundings {
        files: files.into(),
        ..Surroundings::default()
    };
    let input = read(Source::new("input", text), surroundings).unwrap();
    assert_eq!(input.vms[0].disks.len(), 3);
    let again = |note: &advisor::model::Note| note.text.contains("was already read");
    assert!(input.notes.iter().any(again));
}
