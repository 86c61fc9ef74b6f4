//! Types of QEMU's interface language (QAPI). Each type is defined once; the definition parses it from JSON, writes it
//! as JSON and describes it in `query-qmp-schema`.

#[macro_use]
mod macros;
mod basic;
mod schema;

pub use basic::Id;
pub use schema::{Object, Schema};

use std::fmt;

use serde_json::{Map, Value};

use crate::CommandError;
use crate::error::excerpt;

/// A type of argument, reply or event.
pub trait Qapi: Sized {
    /// Adds this type to the schema, and returns the type's name there.
    fn describe(schema: &mut Schema) -> String;

    /// Parses a value at position `at` of the arguments.
    ///
    /// # Errors
    /// The value has another type, lacks a member, has an unknown member, or is out of range.
    fn from_json(value: Value, at: &ArgumentPath<'_>) -> Result<Self, CommandError>;

    /// Converts the value to the JSON that is sent.
    fn to_json(&self) -> Value;
}

/// A JSON object with the members of a Rust struct.
pub trait Record: Sized {
    /// The type's name in the schema.
    const NAME: &'static str;

    /// Describes the members for the schema.
    fn object(schema: &mut Schema) -> Object;

    /// Takes the members of this type from an object that may have others.
    ///
    /// # Errors
    /// As `Qapi::from_json`.
    fn take_members(fields: &mut Fields<'_>) -> Result<Self, CommandError>;

    /// Adds the members to an object.
    fn put_members(&self, map: &mut Map<String, Value>);
}

/// A member of an object; an optional one is an `Option`.
pub trait Member: Sized {
    /// Whether it may be absent.
    const OPTIONAL: bool;

    /// As `Qapi::describe`.
    fn describe(schema: &mut Schema) -> String;

    /// Takes the member from an object.
    ///
    /// # Errors
    /// As `Qapi::from_json`.
    fn take(fields: &mut Fields<'_>, name: &str) -> Result<Self, CommandError>;

    /// Adds the member to an object.
    fn put(&self, name: &str, map: &mut Map<String, Value>);
}

/// The position of a value in the arguments of a command: `file.cache.direct`, `iothread[1]`.
pub struct ArgumentPath<'a> {
    parent: Option<&'a ArgumentPath<'a>>,
    element: PathElement<'a>,
}

enum PathElement<'a> {
    Arguments,
    Member(&'a str),
    Element(usize),
}

impl ArgumentPath<'_> {
    /// The position of the arguments as a whole.
    pub const ARGUMENTS: ArgumentPath<'static> = ArgumentPath {
        parent: None,
        element: PathElement::Arguments,
    };

    /// The error for a value of another type.
    pub fn expected(&self, what: &str) -> CommandError {
        CommandError::generic(format!(
            "Invalid parameter type for '{self}', expected: {what}"
        ))
    }

    /// The error for a value of the right type that is not allowed.
    pub fn refused(&self, problem: impl fmt::Display) -> CommandError {
        CommandError::generic(format!("Parameter '{self}': {problem}"))
    }
}

impl fmt::Display for ArgumentPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parent = self
            .parent
            .filter(|at| !matches!(at.element, PathElement::Arguments));
        if let Some(parent) = parent {
            parent.fmt(f)?;
        }
        match self.element {
            PathElement::Arguments => f.write_str("arguments"),
            PathElement::Member(name) if parent.is_some() => write!(f, ".{name}"),
            PathElement::Member(name) => f.write_str(name),
            PathElement::Element(index) => write!(f, "[{index}]"),
        }
    }
}

/// The members of an object that have not been taken yet.
pub struct Fields<'a> {
    left: Map<String, Value>,
    at: &'a ArgumentPath<'a>,
}

impl<'a> Fields<'a> {
    /// Starts to take the members of `value`.
    ///
    /// # Errors
    /// The value is not an object.
    pub fn open(value: Value, at: &'a ArgumentPath<'a>) -> Result<Self, CommandError> {
        match value {
            Value::Object(left) => Ok(Self { left, at }),
            _ => Err(at.expected("object")),
        }
    }

    /// The position of the object.
    pub fn at(&self) -> &ArgumentPath<'a> {
        self.at
    }

    /// Takes an optional member.
    ///
    /// # Errors
    /// As `Qapi::from_json`.
    pub fn take_optional<T: Qapi>(&mut self, name: &str) -> Result<Option<T>, CommandError> {
        let at = member(self.at, name);
        let value = self.left.remove(name);
        value.map(|value| T::from_json(value, &at)).transpose()
    }

    /// Takes a mandatory member.
    ///
    /// # Errors
    /// The member is missing; otherwise as `Qapi::from_json`.
    pub fn take_required<T: Qapi>(&mut self, name: &str) -> Result<T, CommandError> {
        self.take_optional(name)?.ok_or_else(|| {
            let at = member(self.at, name);
            CommandError::generic(format!("Parameter '{at}' is missing"))
        })
    }

    /// Takes the member that selects the variant, and returns its index in `cases`.
    ///
    /// # Errors
    /// The member is missing, or is not one of the cases.
    pub fn take_case(&mut self, name: &str, cases: &[&'static str]) -> Result<usize, CommandError> {
        let word: String = self.take_required(name)?;
        word_index(&word, cases, &member(self.at, name))
    }

    /// Ends the parsing of the object.
    ///
    /// # Errors
    /// A member is left that was not taken.
    pub fn close(self) -> Result<(), CommandError> {
        match self.left.keys().next() {
            None => Ok(()),
            Some(name) => {
                let name = excerpt(name);
                let at = member(self.at, &name);
                Err(CommandError::generic(format!(
                    "Parameter '{at}' is unexpected"
                )))
            }
        }
    }
}

fn member<'a>(parent: &'a ArgumentPath<'a>, name: &'a str) -> ArgumentPath<'a> {
    ArgumentPath {
        parent: Some(parent),
        element: PathElement::Member(name),
    }
}

/// The index of `word` in `words`, or the error for a value that is not allowed.
pub fn word_index(
    word: &str,
    words: &[&'static str],
    at: &ArgumentPath<'_>,
) -> Result<usize, CommandError> {
    words
        .iter()
        .position(|known| *known == word)
        .ok_or_else(|| {
            CommandError::generic(format!(
                "Parameter '{at}' does not accept value '{}'; it is one of {}",
                excerpt(word),
                words.join(", ")
            ))
        })
}

impl<T: Record> Qapi for T {
    fn describe(schema: &mut Schema) -> String {
        schema.define_record::<T>()
    }

    fn from_json(value: Value, at: &ArgumentPath<'_>) -> Result<Self, CommandError> {
        let mut fields = Fields::open(value, at)?;
        let record = T::take_members(&mut fields)?;
        fields.close()?;
        Ok(record)
    }

    fn to_json(&self) -> Value {
        let mut map = Map::new();
        self.put_members(&mut map);
        Value::Object(map)
    }
}

impl<T: Qapi> Member for T {
    const OPTIONAL: bool = false;

    fn describe(schema: &mut Schema) -> String {
        T::describe(schema)
    }

    fn take(fields: &mut Fields<'_>, name: &str) -> Result<Self, CommandError> {
        fields.take_required(name)
    }

    fn put(&self, name: &str, map: &mut Map<String, Value>) {
        map.insert(name.into(), self.to_json());
    }
}

impl<T: Qapi> Member for Option<T> {
    const OPTIONAL: bool = true;

    fn describe(schema: &mut Schema) -> String {
        T::describe(schema)
    }

    fn take(fields: &mut Fields<'_>, name: &str) -> Result<Self, CommandError> {
        fields.take_optional(name)
    }

    fn put(&self, name: &str, map: &mut Map<String, Value>) {
        if let Some(value) = self {
            map.insert(name.into(), value.to_json());
        }
    }
}
