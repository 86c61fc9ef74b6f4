use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{Member, Record};

/// The members of an object, for the schema.
pub struct Object {
    /// Its `SchemaInfoObjectMember`s.
    pub members: Vec<Value>,
    /// The name of the tag, and the `SchemaInfoObjectVariant`s.
    pub variants: Option<(&'static str, Vec<Value>)>,
}

/// Builds the reply to `query-qmp-schema`: a list of `SchemaInfo`s.
#[derive(Default)]
pub struct Schema {
    entries: Vec<Value>,
    known: BTreeSet<String>,
}

impl Schema {
    /// Adds an entity unless it is defined already, and returns its name. `make` returns everything but the name.
    pub fn define(&mut self, name: &str, make: impl FnOnce(&mut Self) -> Value) -> String {
        // Insert the name first: a type may contain itself.
        if self.known.insert(name.to_owned()) {
            let mut entry = make(self);
            entry["name"] = name.into();
            self.entries.push(entry);
        }
        name.to_owned()
    }

    /// Adds an enumeration, and returns its name.
    pub fn define_words(&mut self, name: &str, words: &[&'static str]) -> String {
        self.define(name, |_| {
            let members: Vec<_> = words.iter().map(|word| json!({ "name": word })).collect();
            // Clients for QEMU before 6.2 read `values`.
            json!({ "meta-type": "enum", "members": members, "values": words })
        })
    }

    /// Adds the object type of a record, and returns its name.
    pub fn define_record<T: Record>(&mut self) -> String {
        self.define(T::NAME, |schema| {
            let object = T::object(schema);
            let mut entry = json!({ "meta-type": "object", "members": object.members });
            if let Some((tag, variants)) = object.variants {
                entry["tag"] = tag.into();
                entry["variants"] = variants.into();
            }
            entry
        })
    }

    /// Makes a `SchemaInfoObjectMember`.
    pub fn member<T: Member>(&mut self, name: &str) -> Value {
        let mut member = json!({ "name": name, "type": T::describe(self) });
        if T::OPTIONAL {
            member["default"] = Value::Null;
        }
        member
    }

    /// All entries that were added.
    pub fn into_entries(self) -> Vec<Value> {
        self.entries
    }
}
