//! JSON with the position of every value. serde_json parses the values.

use serde_json::Value;

/// The maximum depth. A graph of block nodes in one option has about ten levels.
const DEPTH_MAX: usize = 64;

/// A value without inner values: a scalar, an empty object or an empty list.
#[derive(Debug, PartialEq)]
pub struct Leaf {
    /// The keys and indexes of the path to it, separated by dots
    pub path: String,
    /// What it is.
    pub value: Value,
    /// Its first byte.
    pub start: usize,
    /// The byte after its last.
    pub end: usize,
}

/// All values of a text, or the position and the reason of an error.
pub fn leaves(text: &str) -> Result<Vec<Leaf>, (usize, String)> {
    let mut reader = Reader {
        text,
        at: 0,
        leaves: Vec::new(),
    };
    reader.value(String::new(), 0)?;
    reader.space();
    if reader.at == text.len() {
        Ok(reader.leaves)
    } else {
        Err((reader.at, "text after the end of the value".into()))
    }
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    leaves: Vec<Leaf>,
}

type Read<T> = Result<T, (usize, String)>;

impl Reader<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn space(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start_matches([' ', '\t', '\n', '\r']).len();
    }

    fn eat(&mut self, c: char) -> bool {
        self.space();
        let found = self.rest().starts_with(c);
        self.at += usize::from(found);
        found
    }

    fn fail<T>(&self, expected: &str) -> Read<T> {
        Err((self.at, format!("expected {expected}")))
    }

    fn value(&mut self, path: String, depth: usize) -> Read<()> {
        if depth > DEPTH_MAX {
            return self.fail(&format!("no more than {DEPTH_MAX} levels"));
        }
        self.space();
        match self.rest().chars().next() {
            Some('{') => self.object(path, depth),
            Some('[') => self.list(path, depth),
            Some(_) => {
                let start = self.at;
                let value = self.scalar()?;
                let end = self.at;
                self.leaves.push(Leaf {
                    path,
                    value,
                    start,
                    end,
                });
                Ok(())
            }
            None => self.fail("a value"),
        }
    }

    fn object(&mut self, path: String, depth: usize) -> Read<()> {
        let start = self.at;
        self.eat('{');
        if self.eat('}') {
            self.empty(path, Value::Object(serde_json::Map::new()), start);
            return Ok(());
        }
        loop {
            self.space();
            let Ok(Value::String(key)) = self.scalar() else {
                return self.fail("a key in quotes");
            };
            if !self.eat(':') {
                return self.fail("':'");
            }
            self.value(join(&path, &key), depth + 1)?;
            match (self.eat(','), self.eat('}')) {
                (true, false) => {}
                (false, true) => return Ok(()),
                _ => return self.fail("',' or '}'"),
            }
        }
    }

    fn list(&mut self, path: String, depth: usize) -> Read<()> {
        let start = self.at;
        self.eat('[');
        if self.eat(']') {
            self.empty(path, Value::Array(Vec::new()), start);
            return Ok(());
        }
        for place in 0.. {
            self.value(join(&path, &place.to_string()), depth + 1)?;
            match (self.eat(','), self.eat(']')) {
                (true, false) => {}
                (false, true) => return Ok(()),
                _ => return self.fail("',' or ']'"),
            }
        }
        Ok(())
    }

    fn empty(&mut self, path: String, value: Value, start: usize) {
        // The whole option is not the value of a key.
        if !path.is_empty() {
            let end = self.at;
            self.leaves.push(Leaf {
                path,
                value,
                start,
                end,
            });
        }
    }

    fn scalar(&mut self) -> Read<Value> {
        let rest = self.rest();
        let length = match rest.strip_prefix('"') {
            Some(inner) => {
                let mut escaped = false;
                let end = inner.find(|c| {
                    let end = c == '"' && !escaped;
                    escaped = c == '\\' && !escaped;
                    end
                });
                match end {
                    Some(end) => end + 2,
                    None => return self.fail("'\"' at the end of a string"),
                }
            }
            None => rest
                .find([',', '}', ']', ':', ' ', '\t', '\n', '\r'])
                .unwrap_or(rest.len()),
        };
        let Ok(value) = serde_json::from_str(&rest[..length]) else {
            return self.fail("a value");
        };
        self.at += length;
        Ok(value)
    }
}

fn join(path: &str, key: &str) -> String {
    match path {
        "" => key.to_owned(),
        path => format!("{path}.{key}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_places() {
        let text = r#" {"driver": "file", "cache": {"direct":true}, "vqs": [1, 2], "s": "a\"b\\", "e":{} } "#;
        let leaves = leaves(text).unwrap();
        let shown: Vec<_> = leaves
            .iter()
            .map(|leaf| format!("{}={}", leaf.path, &text[leaf.start..leaf.end]))
            .collect();
        assert_eq!(
            shown,
            [
                "driver=\"file\"",
                "cache.direct=true",
                "vqs.0=1",
                "vqs.1=2",
                r#"s="a\"b\\""#,
                "e={}"
            ]
        );
    }

    #[test]
    fn mistakes_have_places() {
        for (text, at) in [
            ("{", 1),
            ("{\"a\" 1}", 5),
            ("{\"a\":}", 5),
            ("[1,,]", 3),
            ("{} x", 3),
            ("\"abc", 0),
        ] {
            assert_eq!(leaves(text).unwrap_err().0, at, "{text}");
        }
        assert!(leaves(&"[".repeat(100_000)).is_err());
    }
}
