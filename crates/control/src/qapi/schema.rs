use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{Member, Record};

/// What an object has, for the schema.
pub struct Object {
    /// `SchemaInfoObjectMember`s
    pub members: Vec<Value>,
    /// The member that says which variant it is, and `SchemaInfoObjectVariant`s.
    pub variants: Option<(&'static str, Vec<Value>)>,
}

/// The answer to `query-qmp-schema` in the making: `SchemaInfo`s.
#[derive(Default)]
pub struct Schema {
    entries: Vec<Value>,
    known: BTreeSet<String>,
}

impl Schema {
    /// Adds an entity, unless it is known, and returns its name. `make` gives all but the name.
    pub fn define(&mut self, name: &str, make: impl FnOnce(&mut Self) -> Value) -> String {
        // Known before it is made: a type may have itself inside.
        if self.known.insert(name.to_owned()) {
            let mut entry = make(self);
            entry["name"] = name.into();
            self.entries.push(entry);
        }
        name.to_owned()
    }

    /// Adds an enumeration.
    pub fn define_words(&mut self, name: &str, words: &[&'static str]) -> String {
        self.define(name, |_| {
            let members: Vec<_> = words.iter().map(|word| json!({ "name": word })).collect();
            // `values` is what clients of QEMU before 6.2 look at.
            json!({ "meta-type": "enum", "members": members, "values": words })
        })
    }

    /// Adds the type of a record's objects.
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

    /// A `SchemaInfoObjectMember`.
    pub fn member<T: Member>(&mut self, name: &str) -> Value {
        let mut member = json!({ "name": name, "type": T::describe(self) });
        if T::OPTIONAL {
            member["default"] = Value::Null;
        }
        member
    }

    /// All that has been added.
    pub fn into_entries(self) -> Vec<Value> {
        self.entries
    }
}
