//! QAPI's built-in types, and ids.

use std::fmt;

use serde_json::{Value, json};

use super::{ArgumentPath, PathElement, Qapi, Schema};
use crate::CommandError;
use crate::error::excerpt;

impl<T: Qapi> Qapi for Vec<T> {
    fn describe(schema: &mut Schema) -> String {
        let element = T::describe(schema);
        schema.define(
            &format!("[{element}]"),
            |_| json!({ "meta-type": "array", "element-type": element }),
        )
    }

    fn from_json(value: Value, at: &ArgumentPath<'_>) -> Result<Self, CommandError> {
        let Value::Array(elements) = value else {
            return Err(at.expected("array"));
        };
        let read = |(index, value)| {
            let element = PathElement::Element(index);
            let parent = Some(at);
            T::from_json(value, &ArgumentPath { parent, element })
        };
        elements.into_iter().enumerate().map(read).collect()
    }

    fn to_json(&self) -> Value {
        self.iter().map(T::to_json).collect()
    }
}

fn define_builtin(schema: &mut Schema, name: &str, json_type: &str) -> String {
    schema.define(
        name,
        |_| json!({ "meta-type": "builtin", "json-type": json_type }),
    )
}

impl Qapi for String {
    fn describe(schema: &mut Schema) -> String {
        define_builtin(schema, "str", "string")
    }

    fn from_json(value: Value, at: &ArgumentPath<'_>) -> Result<Self, CommandError> {
        match value {
            Value::String(text) => Ok(text),
            _ => Err(at.expected("string")),
        }
    }

    fn to_json(&self) -> Value {
        self.as_str().into()
    }
}

impl Qapi for bool {
    fn describe(schema: &mut Schema) -> String {
        define_builtin(schema, "bool", "boolean")
    }

    fn from_json(value: Value, at: &ArgumentPath<'_>) -> Result<Self, CommandError> {
        value.as_bool().ok_or_else(|| at.expected("boolean"))
    }

    fn to_json(&self) -> Value {
        (*self).into()
    }
}

/// The QAPI schema has a single integer type, whatever the range.
macro_rules! integers {
    ($($type:ty)*) => { $(
        impl Qapi for $type {
            fn describe(schema: &mut Schema) -> String {
                define_builtin(schema, "int", "int")
            }

            fn from_json(value: Value, at: &ArgumentPath<'_>) -> Result<Self, CommandError> {
                if !(value.is_u64() || value.is_i64()) {
                    return Err(at.expected("integer"));
                }
                let number = value.as_u64().and_then(|number| Self::try_from(number).ok());
                number.ok_or_else(|| at.refused(format!("{value} is not a number from 0 to {}", Self::MAX)))
            }

            fn to_json(&self) -> Value {
                (*self).into()
            }
        }
    )* };
}

integers! { u16 u32 u64 }

/// Any JSON value, for data without a fixed type.
impl Qapi for Value {
    fn describe(schema: &mut Schema) -> String {
        define_builtin(schema, "any", "value")
    }

    fn from_json(value: Value, _at: &ArgumentPath<'_>) -> Result<Self, CommandError> {
        Ok(value)
    }

    fn to_json(&self) -> Value {
        self.clone()
    }
}

/// The id of an object that a client creates. QEMU's rule: a letter, followed by letters, digits, `-`, `.` and `_`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(String);

impl Id {
    /// The longest id in bytes, which is also the limit for a disk's name on the command line.
    pub const BYTES_MAX: usize = 64;

    /// Checks an id.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn new(text: impl Into<String>) -> Result<Self, String> {
        let text = text.into();
        let good = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        match text.starts_with(|c: char| c.is_ascii_alphabetic())
            && text.chars().all(good)
            && text.len() <= Self::BYTES_MAX
        {
            true => Ok(Self(text)),
            false => Err(format!(
                "'{}' is no letter followed by letters, digits, '-', '.' or '_', {} at most",
                excerpt(&text),
                Self::BYTES_MAX
            )),
        }
    }

    /// The id as a string.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Qapi for Id {
    fn describe(schema: &mut Schema) -> String {
        String::describe(schema)
    }

    fn from_json(value: Value, at: &ArgumentPath<'_>) -> Result<Self, CommandError> {
        Self::new(String::from_json(value, at)?).map_err(|problem| at.refused(problem))
    }

    fn to_json(&self) -> Value {
        self.as_str().into()
    }
}
