use std::borrow::Cow;

use block::ThrottleError;
use serde_json::{Value, json};
use thiserror::Error;

/// Why a command was refused or has failed: the `error` that a client receives (QMP specification, "Error Responses").
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{desc}")]
pub struct CommandError {
    /// The class, for programs.
    pub class: ErrorClass,
    /// The description, for users: which object, what happened, what to do next.
    pub desc: String,
}

/// `QapiErrorClass`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// Most errors.
    GenericError,
    /// The command does not exist, or is not allowed in this state of the session.
    CommandNotFound,
    /// The device exists and has not been started.
    DeviceNotActive,
    /// The device does not exist.
    DeviceNotFound,
    /// The host lacks a capability.
    KvmMissingCap,
}

impl CommandError {
    /// Makes a `GenericError`.
    pub fn generic(desc: impl Into<String>) -> Self {
        Self::new(ErrorClass::GenericError, desc)
    }

    /// Makes a `DeviceNotFound`.
    pub fn device_not_found(desc: impl Into<String>) -> Self {
        Self::new(ErrorClass::DeviceNotFound, desc)
    }

    /// Makes an error of any class.
    pub fn new(class: ErrorClass, desc: impl Into<String>) -> Self {
        let desc = desc.into();
        Self { class, desc }
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({ "class": self.class.word(), "desc": self.desc })
    }
}

impl ErrorClass {
    /// The value of `class`.
    pub fn word(self) -> &'static str {
        match self {
            Self::GenericError => "GenericError",
            Self::CommandNotFound => "CommandNotFound",
            Self::DeviceNotActive => "DeviceNotActive",
            Self::DeviceNotFound => "DeviceNotFound",
            Self::KvmMissingCap => "KVMMissingCap",
        }
    }

    /// Parses `class`. QMP asks clients to treat a class that they do not know as `GenericError`.
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

/// The beginning of a text from the other side, for an error message.
pub(crate) fn excerpt(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(100) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}
