use std::borrow::Cow;

use block::ThrottleError;
use serde_json::{Value, json};
use thiserror::Error;

/// Why a command was refused or has failed: what a client gets as `error` (QMP specification, "Error Responses").
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{desc}")]
pub struct CommandError {
    /// What a program may look at.
    pub class: ErrorClass,
    /// For people: which object, what happened, what to do next.
    pub desc: String,
}

/// `QapiErrorClass`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// Most errors.
    GenericError,
    /// There is no such command, or not in this state of the session.
    CommandNotFound,
    /// The device is there and has not been started.
    DeviceNotActive,
    /// There is no such device.
    DeviceNotFound,
    /// The host can't do it.
    KvmMissingCap,
}

impl CommandError {
    /// A `GenericError`.
    pub fn generic(desc: impl Into<String>) -> Self {
        Self::new(ErrorClass::GenericError, desc)
    }

    /// A `DeviceNotFound`.
    pub fn device_not_found(desc: impl Into<String>) -> Self {
        Self::new(ErrorClass::DeviceNotFound, desc)
    }

    /// An error of this class.
    pub fn new(class: ErrorClass, desc: impl Into<String>) -> Self {
        let desc = desc.into();
        Self { class, desc }
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({ "class": self.class.word(), "desc": self.desc })
    }
}

impl ErrorClass {
    /// As it stands in `class`.
    pub fn word(self) -> &'static str {
        match self {
            Self::GenericError => "GenericError",
            Self::CommandNotFound => "CommandNotFound",
            Self::DeviceNotActive => "DeviceNotActive",
            Self::DeviceNotFound => "DeviceNotFound",
            Self::KvmMissingCap => "KVMMissingCap",
        }
    }

    /// Reads `class`. Clients are to treat a class that they don't know as the general one.
    pub(crate) fn of_word(word: &str) -> Self {
        let all = [
            Self::CommandNotFound,
            Self::DeviceNotActive,
            Self::DeviceNotFound,
            Self::KvmMissingCap,
        ];
        let found = all.into_iter().find(|class| class.word() == word);
        found.unwrap_or(Self::GenericError)
    }
}

impl From<ThrottleError> for CommandError {
    fn from(error: ThrottleError) -> Self {
        Self::generic(error.to_string())
    }
}

/// The beginning of what the other side sent, for an error message.
pub(crate) fn excerpt(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(100) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}
