//! What a property is.

use super::Data;

/// The possible values of a property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One of these words; any word if the list is empty
    Word(&'static [&'static str]),
    /// Sizes are in bytes
    Number,
    Version,
}

#[derive(Clone, Copy, Debug)]
pub struct Property {
    /// The prefix says what it belongs to: `disk.`, `vm.`, `host.`
    pub name: &'static str,
    pub kind: Kind,
    pub about: &'static str,
}

impl Property {
    pub fn allows(&self, data: &Data) -> bool {
        match (self.kind, data) {
            (_, Data::Unknown) => true,
            (Kind::Word([]), Data::Word(_)) => true,
            (Kind::Word(words), Data::Word(word)) => words.contains(&word.as_ref()),
            (Kind::Number, Data::Number(_)) | (Kind::Version, Data::Version(_)) => true,
            _ => false,
        }
    }
}
