//! What must hold for any bytes that a client sends: for the fuzz target `qmp`, and for `../any_bytes.rs`.

use std::cell::RefCell;

use control::{Command, CommandError, Framer, FramingError, Handler, Limits, Session};
use serde_json::{Value, json};

/// Input: what a client sends after the greeting.
pub fn check(data: &[u8]) {
    let (whole, split) = (messages(data, data.len().max(1)), messages(data, 1));
    assert_eq!(whole, split, "the same bytes in pieces are other messages");
    check_session(data);
    check_small_limit(data);
}

/// Cuts `data` into messages, of which `step` bytes come at a time.
fn messages(data: &[u8], step: usize) -> Vec<Result<Vec<u8>, FramingError>> {
    let mut framer = Framer::new(Limits::COMMAND);
    let mut messages = Vec::new();
    for mut input in data.chunks(step) {
        while let Some(message) = framer.next(&mut input) {
            messages.push(message);
        }
        assert!(input.is_empty(), "bytes are left over");
    }
    messages
}

/// Every message gets one answer, what is executed is what was asked, and 0xFF brings any client into step.
fn check_session(data: &[u8]) {
    let mut session = Session::new();
    let commands = Commands::default();
    let mut replies = 0;
    let mut input = data;
    while let Some(reply) = session.receive(&mut input, &commands) {
        let text = std::str::from_utf8(&reply).expect("replies are text");
        let text = text.strip_suffix("\r\n").expect("replies end their line");
        assert!(!text.contains(['\r', '\n']), "{text}");
        let reply: Value = serde_json::from_str(text).expect("replies are JSON");
        assert!(
            reply.get("return").is_some() != reply.get("error").is_some(),
            "{reply}"
        );
        if let Some(error) = reply.get("error") {
            assert!(
                error["class"].is_string() && error["desc"].is_string(),
                "{reply}"
            );
        }
        replies += 1;
    }
    assert_eq!(replies, messages(data, data.len().max(1)).len());
    for command in commands.0.take() {
        let Value::Object(arguments) = command.arguments() else {
            panic!("{command:?} has arguments that are no object");
        };
        assert_eq!(Command::parse(command.name(), arguments), Ok(command));
    }

    let mut input = &b"\xff{\"execute\": \"qmp_capabilities\", \"id\": \"in step\"}"[..];
    let mut reply = Vec::new();
    while let Some(next) = session.receive(&mut input, &commands) {
        reply = next;
    }
    let reply: Value = serde_json::from_slice(&reply).expect("replies are JSON");
    assert_eq!(reply["id"], "in step");
}

/// Nothing longer than the limit comes out, and less than that is kept.
fn check_small_limit(data: &[u8]) {
    let limits = Limits {
        bytes: 16,
        tokens: 5,
    };
    let mut framer = Framer::new(limits);
    let mut input = data;
    while let Some(message) = framer.next(&mut input) {
        assert!(message.is_ok_and(|message| message.len() <= limits.bytes) || !framer.is_midway());
    }
}

/// Keeps what it is to execute.
#[derive(Default)]
struct Commands(RefCell<Vec<Command>>);

impl Handler for Commands {
    fn execute(&self, command: Command) -> Result<Value, CommandError> {
        let returns_list = command.name().starts_with("query-");
        let refused = matches!(command, Command::RingdiskAttach(_));
        self.0.borrow_mut().push(command);
        match (refused, returns_list) {
            (true, _) => Err(CommandError::generic("not here")),
            (_, true) => Ok(json!([])),
            _ => Ok(json!({})),
        }
    }
}
