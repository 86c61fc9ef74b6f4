//! Conversations word by word. In `golden/`, `-> ` is what a client sends (with the newline) and `<- ` what it gets.
//! `RINGDISK_WRITE_GOLDEN=1` writes the answers down as they are now.

use std::fs;
use std::path::Path;

use crate::support::FakeDisks;
use control::Session;
use serde_json::Value;

#[test]
fn negotiation() {
    compare("negotiation");
}

#[test]
fn invalid_input_is_refused() {
    compare("invalid_input_is_refused");
}

#[test]
fn arguments() {
    compare("arguments");
}

#[test]
fn life_of_a_disk() {
    compare("life_of_a_disk");
}

#[test]
fn schema() {
    compare("schema");
}

#[test]
fn every_command_and_event_is_in_the_documents() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let document = fs::read_to_string(root.join("docs/operating/qmp.md")).unwrap();
    let (mut session, disks) = (Session::new(), FakeDisks::default());
    let asked = r#"{"execute": "qmp_capabilities"}{"execute": "query-qmp-schema"}"#;
    let mut input = asked.as_bytes();
    session.receive(&mut input, &disks).unwrap();
    let reply: Value =
        serde_json::from_slice(&session.receive(&mut input, &disks).unwrap()).unwrap();
    let mut named = 0;
    for entity in reply["return"].as_array().unwrap() {
        if entity["meta-type"] == "command" || entity["meta-type"] == "event" {
            let name = entity["name"].as_str().unwrap();
            assert!(document.contains(&format!("`{name}`")), "{name}");
            named += 1;
        }
    }
    assert!(named > 20);
}

fn compare(name: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}.qmp"));
    let golden = fs::read_to_string(&file).unwrap();
    let mut session = Session::new();
    let disks = FakeDisks::default();
    let mut found = String::new();
    let get = |found: &mut String, bytes: Vec<u8>| {
        let text = String::from_utf8(bytes).unwrap();
        // The version changes with every release.
        let text = text.replace(env!("CARGO_PKG_VERSION"), "VERSION");
        found.push_str(&format!("<- {}\n", text.strip_suffix("\r\n").unwrap()));
    };
    get(&mut found, session.greeting());
    for line in golden.lines() {
        if let Some(sent) = line.strip_prefix("-> ") {
            found.push_str(&format!("{line}\n"));
            let bytes = [sent.as_bytes(), b"\n"].concat();
            let mut input = &bytes[..];
            while let Some(reply) = session.receive(&mut input, &disks) {
                get(&mut found, reply);
            }
        } else if !line.starts_with("<- ") {
            found.push_str(&format!("{line}\n"));
        }
    }
    if std::env::var_os("RINGDISK_WRITE_GOLDEN").is_some() {
        fs::write(&file, &found).unwrap();
        return;
    }
    for (found, expected) in found.lines().zip(golden.lines()) {
        assert_eq!(found, expected, "{name}");
    }
    assert_eq!(found, golden, "{name}");
}
