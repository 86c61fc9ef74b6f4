use serde_json::{Map, Value, json};

use crate::commands::{self, Command, CommandInfo, QmpCapabilities, QmpCapability, rows};
use crate::error::excerpt;
use crate::events;
use crate::framing::{Framer, Limits};
use crate::json;
use crate::qapi::{ArgumentPath, Qapi, Schema};
use crate::replies::{VersionInfo, VersionTriple};
use crate::{CommandError, ErrorClass};

/// Executes the commands of a session.
pub trait Handler {
    /// Executes a command, and returns a value that conforms to the schema. Debug builds panic if it does not.
    ///
    /// # Errors
    /// The error that the client receives.
    fn execute(&self, command: Command) -> Result<Value, CommandError>;
}

/// One client's session: bytes in, bytes out (QMP specification, "Protocol Specification").
pub struct Session {
    framer: Framer,
    negotiated: bool,
}

impl Default for Session {
    fn default() -> Self {
        Self::new()
    }
}

impl Session {
    /// Starts a session. The client must receive `greeting` first.
    pub fn new() -> Self {
        Self {
            framer: Framer::new(Limits::COMMAND),
            negotiated: false,
        }
    }

    /// The first message to the client.
    pub fn greeting(&self) -> Vec<u8> {
        let version = version().to_json();
        line(&json!({ "QMP": { "version": version, "capabilities": [] } }))
    }

    /// Consumes `input` up to the end of a message, executes the message, and returns the reply to be sent; `None` when
    /// the input is used up. An invalid message gets an error as its reply.
    pub fn receive(&mut self, input: &mut &[u8], handler: &dyn Handler) -> Option<Vec<u8>> {
        let message = self.framer.next(input)?;
        let parsed = match &message {
            Ok(text) => json::parse(text),
            Err(error) => Err(error.to_string()),
        };
        let reply = match parsed {
            Ok(message) => self.reply(message, handler),
            Err(problem) => {
                let error = CommandError::generic(format!("JSON parse error: {problem}"));
                json!({ "error": error.to_json() })
            }
        };
        Some(line(&reply))
    }

    /// Formats an event from [`Pending`](crate::Pending) for this client; `None` before the client has negotiated, as
    /// it then gets no events.
    pub fn event(&self, message: &Value) -> Option<Vec<u8>> {
        self.negotiated.then(|| line(message))
    }

    fn reply(&mut self, message: Value, handler: &dyn Handler) -> Value {
        let Value::Object(mut message) = message else {
            let error = CommandError::generic("QMP input must be a JSON object");
            return json!({ "error": error.to_json() });
        };
        let id = message.remove("id");
        let mut reply = match self.execute(message, handler) {
            Ok(value) => json!({ "return": value }),
            Err(error) => json!({ "error": error.to_json() }),
        };
        if let Some(id) = id {
            reply["id"] = id;
        }
        reply
    }

    fn execute(
        &mut self,
        mut message: Map<String, Value>,
        handler: &dyn Handler,
    ) -> Result<Value, CommandError> {
        let name = message.remove("execute");
        let arguments = message.remove("arguments");
        if let Some(member) = message.keys().next() {
            return Err(CommandError::generic(format!(
                "QMP input member '{}' is unexpected",
                excerpt(member)
            )));
        }
        let name = match name {
            Some(Value::String(name)) => name,
            Some(_) => return Err(wrong("execute", "a string")),
            None => return Err(CommandError::generic("QMP input lacks member 'execute'")),
        };
        let arguments = match arguments {
            Some(Value::Object(arguments)) => arguments,
            None => Map::new(),
            Some(_) => return Err(wrong("arguments", "an object")),
        };
        self.check_mode(&name)?;
        match name.as_str() {
            "qmp_capabilities" => self.negotiate(arguments),
            "query-commands" => without_arguments(arguments).map(|()| names()),
            "query-qmp-schema" => without_arguments(arguments).map(|()| schema()),
            "query-version" => without_arguments(arguments).map(|()| version().to_json()),
            _ => {
                let command = Command::parse(&name, arguments)?;
                let reply = handler.execute(command)?;
                debug_assert_eq!(commands::check_reply(&name, &reply), Ok(()), "{name}");
                Ok(reply)
            }
        }
    }

    /// Checks that the command is allowed now: `qmp_capabilities` must come first, and only once.
    fn check_mode(&self, name: &str) -> Result<(), CommandError> {
        let problem = match (self.negotiated, name == "qmp_capabilities") {
            (false, false) => {
                "Capabilities have to be negotiated with 'qmp_capabilities' before any other command"
            }
            (true, true) => "Capabilities have been negotiated already, the command is ignored",
            _ => return Ok(()),
        };
        Err(CommandError::new(ErrorClass::CommandNotFound, problem))
    }

    fn negotiate(&mut self, arguments: Map<String, Value>) -> Result<Value, CommandError> {
        let wanted = QmpCapabilities::from_json(arguments.into(), &ArgumentPath::ARGUMENTS)?.enable;
        if let Some(QmpCapability::Oob) = wanted.unwrap_or_default().first() {
            let problem = "Capability 'oob' is not offered; the greeting lists those that are";
            return Err(CommandError::generic(problem));
        }
        self.negotiated = true;
        Ok(json!({}))
    }
}

fn wrong(member: &str, expected: &str) -> CommandError {
    CommandError::generic(format!("QMP input member '{member}' must be {expected}"))
}

fn without_arguments(arguments: Map<String, Value>) -> Result<(), CommandError> {
    commands::Empty::from_json(arguments.into(), &ArgumentPath::ARGUMENTS).map(drop)
}

/// The reply to `query-commands`.
fn names() -> Value {
    let name = |row: &&commands::Row| CommandInfo {
        name: row.name.into(),
    };
    rows().iter().map(name).collect::<Vec<_>>().to_json()
}

/// The reply to `query-qmp-schema`.
fn schema() -> Value {
    let mut schema = Schema::default();
    commands::describe(&mut schema);
    events::describe(&mut schema);
    schema.into_entries().into()
}

/// The version of QEMU whose commands and members are implemented; clients derive from it what they may use.
fn version() -> VersionInfo {
    VersionInfo {
        qemu: VersionTriple {
            major: 10,
            minor: 0,
            micro: 0,
        },
        package: concat!("ringdisk ", env!("CARGO_PKG_VERSION")).into(),
    }
}

/// Formats a message for sending: on a line of its own, for people and for clients that read lines.
pub(crate) fn line(message: &Value) -> Vec<u8> {
    let mut bytes = message.to_string().into_bytes();
    bytes.extend(b"\r\n");
    bytes
}
