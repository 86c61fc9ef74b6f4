//! Our schema beside that of QEMU's programs: what a client of QEMU sends, within what we serve, is taken, and what it
//! expects of the reply is there.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use crate::support::FakeDisks;
use control::Session;
use serde_json::Value;

const ASK: &str = r#"{"execute":"qmp_capabilities"}{"execute":"query-qmp-schema"}"#;

#[test]
fn commands_and_events_match_qemu() {
    let storage_daemon: &[&str] = &[
        "qemu-storage-daemon",
        "--chardev",
        "stdio,id=m",
        "--monitor",
        "m",
    ];
    let emulator: &[&str] = &[
        "qemu-system-x86_64",
        "-machine",
        "none",
        "-nodefaults",
        "-display",
        "none",
        "-qmp",
        "stdio",
    ];
    let ours = Schema::of(our_answers());
    let mut compared = HashSet::new();
    for program in [storage_daemon, emulator] {
        let Some(answers) = ask(program) else {
            let name = program[0];
            return println!("skipped: commands_and_events_match_qemu: no {name}");
        };
        let greeting: Value = serde_json::from_str(answers.lines().next().unwrap()).unwrap();
        let major = &greeting["QMP"]["version"]["qemu"]["major"];
        if *major != 10 {
            return println!("skipped: commands_and_events_match_qemu: QEMU {major}, not 10");
        }
        let theirs = Schema::of(answers);
        for (name, entity) in &ours.0 {
            let kind = entity["meta-type"].as_str().unwrap();
            if matches!(kind, "command" | "event") && theirs.0.contains_key(name) {
                Comparison::of(&ours, &theirs).entity(name);
                compared.insert(name.as_str());
            }
        }
    }
    // Proxmox' QEMU has four more commands. What QEMU has no command for has a name that says so. It has no event for the end of what BLOCK_IO_ERROR tells
    // the beginning of, and clients that know the one look for the like of it.
    for (name, entity) in &ours.0 {
        let kind = entity["meta-type"].as_str().unwrap();
        let is_own = name.starts_with("x-ringdisk-")
            || name.starts_with("backup-access-")
            || ["query-pbs-bitmap-info", "query-proxmox-support"].contains(&name.as_str())
            || name == "BLOCK_IO_RESUMED";
        assert_eq!(
            matches!(kind, "command" | "event") && !is_own,
            compared.contains(name.as_str()),
            "{name}"
        );
    }
    assert!(compared.len() > 15, "{compared:?}");
}

fn our_answers() -> String {
    let (mut session, disks) = (Session::new(), FakeDisks::default());
    let mut input = ASK.as_bytes();
    let mut answers = Vec::new();
    while let Some(reply) = session.receive(&mut input, &disks) {
        answers.extend(reply);
    }
    String::from_utf8(answers).unwrap()
}

/// What a program answers; `None` if there is none.
fn ask(program: &[&str]) -> Option<String> {
    let mut child = Command::new(program[0])
        .args(&program[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .ok()?;
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(ASK.as_bytes()).unwrap();
    // The greeting, and an answer to each. Told to end any earlier, QEMU leaves out what the pipe has no room for.
    let stdout = BufReader::new(child.stdout.take().unwrap());
    let lines = stdout.lines().take(3).map(Result::unwrap);
    let answers = lines.map(|line| line + "\n").collect();
    child.kill().unwrap();
    child.wait().unwrap();
    Some(answers)
}

/// Entities by their names.
struct Schema(HashMap<String, Value>);

impl Schema {
    fn of(answers: String) -> Self {
        let lines = answers
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        let entities = lines
            .filter_map(|reply| reply["return"].as_array().cloned())
            .next()
            .unwrap();
        let name = |entity: &Value| entity["name"].as_str().unwrap().to_owned();
        let count = entities.len();
        let schema = Self(
            entities
                .into_iter()
                .map(|entity| (name(&entity), entity))
                .collect(),
        );
        assert_eq!(schema.0.len(), count, "a name stands for two entities");
        schema
    }

    fn get(&self, name: &Value) -> &Value {
        let name = name.as_str().unwrap();
        self.0
            .get(name)
            .unwrap_or_else(|| panic!("{name} is not in the schema"))
    }

    /// Members by their names.
    fn members<'a>(&self, object: &'a Value) -> HashMap<&'a str, &'a Value> {
        let members = object["members"].as_array().unwrap().iter();
        members
            .map(|member| (member["name"].as_str().unwrap(), member))
            .collect()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    FromClient,
    ToClient,
}

struct Comparison<'a> {
    ours: &'a Schema,
    theirs: &'a Schema,
    /// Types may have themselves inside.
    seen: HashSet<(String, String)>,
}

impl<'a> Comparison<'a> {
    fn of(ours: &'a Schema, theirs: &'a Schema) -> Self {
        let seen = HashSet::new();
        Self { ours, theirs, seen }
    }

    fn entity(&mut self, name: &str) {
        let (ours, theirs) = (&self.ours.0[name], &self.theirs.0[name]);
        assert_eq!(ours["meta-type"], theirs["meta-type"], "{name}");
        let is_event = ours["meta-type"] == "event";
        let arguments = if is_event {
            Direction::ToClient
        } else {
            Direction::FromClient
        };
        self.types(&ours["arg-type"], &theirs["arg-type"], arguments, name);
        // A description of descriptions is not described here.
        if !is_event && name != "query-qmp-schema" {
            let at = format!("reply to {name}");
            self.types(
                &ours["ret-type"],
                &theirs["ret-type"],
                Direction::ToClient,
                &at,
            );
        }
    }

    fn types(&mut self, ours: &Value, theirs: &Value, direction: Direction, at: &str) {
        if !self.seen.insert((ours.to_string(), theirs.to_string())) {
            return;
        }
        let (ours, theirs) = (self.ours.get(ours), self.theirs.get(theirs));
        let kind = |entity: &Value| entity["meta-type"].as_str().unwrap().to_owned();
        match (kind(ours).as_str(), kind(theirs).as_str()) {
            ("builtin", "builtin") => assert_eq!(ours["json-type"], theirs["json-type"], "{at}"),
            ("enum", "enum") => {
                let words = theirs["values"].as_array().unwrap();
                for word in ours["values"].as_array().unwrap() {
                    assert!(words.contains(word), "{at}: {word}");
                }
            }
            // `drv` is a string in QEMU; a word where it has a string is one.
            ("enum", "builtin") => assert_eq!(theirs["json-type"], "string", "{at}"),
            ("array", "array") => {
                self.types(
                    &ours["element-type"],
                    &theirs["element-type"],
                    direction,
                    at,
                );
            }
            ("object", "object") => self.objects(ours, theirs, direction, at),
            ("alternate", "alternate") => {
                for branch in ours["members"].as_array().unwrap() {
                    let same = |other: &&Value| {
                        kind(self.theirs.get(&other["type"]))
                            == kind(self.ours.get(&branch["type"]))
                    };
                    let other = theirs["members"].as_array().unwrap().iter().find(same);
                    let other = other.unwrap_or_else(|| panic!("{at}: {branch}"));
                    self.types(&branch["type"], &other["type"], direction, at);
                }
            }
            // QEMU 10.1 takes a list where 10.0 takes one.
            ("alternate", "builtin") if direction == Direction::FromClient => {
                let branches = ours["members"].as_array().unwrap();
                assert!(
                    branches
                        .iter()
                        .any(|branch| branch["type"] == theirs["name"]),
                    "{at}"
                );
            }
            (ours, theirs) => panic!("{at}: {ours} is {theirs} in QEMU"),
        }
    }

    fn objects(&mut self, ours: &Value, theirs: &Value, direction: Direction, at: &str) {
        let (our_members, their_members) = (self.ours.members(ours), self.theirs.members(theirs));
        for (name, member) in &our_members {
            let at = format!("{at}: {name}");
            // Always empty, so that nobody sees that its elements have nothing in them.
            if *name == "timed_stats" {
                continue;
            }
            // Nobody has to give what is ours alone.
            if name.starts_with("x-ringdisk-") && member.get("default").is_some() {
                continue;
            }
            let other = their_members.get(name);
            let other = other.unwrap_or_else(|| panic!("{at} is not in QEMU"));
            let (optional, theirs_is) = (member.get("default"), other.get("default"));
            match direction {
                Direction::FromClient if theirs_is.is_some() => assert!(optional.is_some(), "{at}"),
                // In QEMU 10.0 mandatory, in others not there.
                Direction::ToClient if *name == "qom-path" => {}
                Direction::ToClient if theirs_is.is_none() => assert!(optional.is_none(), "{at}"),
                _ => {}
            }
            self.types(&member["type"], &other["type"], direction, &at);
        }
        for (name, member) in their_members {
            let mandatory = member.get("default").is_none();
            assert!(
                !mandatory || our_members.contains_key(name),
                "{at}: {name} is missing"
            );
        }
        assert_eq!(
            ours.get("tag"),
            theirs.get("tag").filter(|_| ours.get("tag").is_some()),
            "{at}"
        );
        for variant in ours["variants"].as_array().into_iter().flatten() {
            let case = &variant["case"];
            let same = |other: &&Value| other["case"] == *case;
            let other = theirs["variants"].as_array().unwrap().iter().find(same);
            let other = other.unwrap_or_else(|| panic!("{at}: {case} is not in QEMU"));
            self.types(
                &variant["type"],
                &other["type"],
                direction,
                &format!("{at}: {case}"),
            );
        }
    }
}
