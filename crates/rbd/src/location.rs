//! The location of an image, in QEMU's syntax: `POOL[/NAMESPACE]/IMAGE[@SNAP][:KEY=VALUE...]`.

use std::fmt;
use std::path::PathBuf;

/// The largest number of connections that disks with the same access may share.
pub const CONNECTIONS_MAX: usize = 64;

/// The longest name of a pool, image or option, in bytes: librbd's `RBD_MAX_IMAGE_NAME_SIZE`.
const NAME_MAX: usize = 96;

/// The longest value of an option, in bytes.
const VALUE_MAX: usize = 1024;

/// The largest number of options of one disk.
const OPTIONS_MAX: usize = 64;

/// An image, or a snapshot of one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location {
    /// The pool that contains the image.
    pub pool: String,
    pub namespace: Option<String>,
    pub image: String,
    /// The snapshot to open, read-only; the image itself if absent.
    pub snapshot: Option<String>,
    /// How to reach the cluster.
    pub access: Access,
}

/// How to reach a cluster, and as which user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Access {
    /// Ceph's configuration file; if absent, the library searches for it (`/etc/ceph/CLUSTER.conf`).
    pub conf: Option<PathBuf>,
    /// The user, without `client.`; `admin` if absent.
    pub id: Option<String>,
    /// The file with the user's key.
    pub keyring: Option<PathBuf>,
    /// The cluster's name; `ceph` if absent.
    pub cluster: Option<String>,
    /// Other options of librados and librbd: name and value.
    pub options: Vec<(String, String)>,
    /// The number of connections to the cluster that disks with the same access share; if absent, as many as there are
    /// CPUs, up to four.
    pub connections: Option<usize>,
}

impl Location {
    /// Parses the text after `rbd:`. A backslash escapes the next character, as in QEMU.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.contains('\0') {
            return Err("has a zero byte inside".into());
        }
        let (path, rest) = until(text, ":");
        let names = path.as_str();
        let mut parts = names.splitn(3, SLASH);
        let parts: [Option<&str>; 3] = [parts.next(), parts.next(), parts.next()];
        let (pool, namespace, image) = match parts {
            [Some(pool), Some(image), None] => (pool, None, image),
            [Some(pool), Some(namespace), Some(image)] => (pool, Some(namespace), image),
            _ => {
                return Err(
                    "is not POOL/IMAGE, POOL/NAMESPACE/IMAGE or one of these with @SNAP".into(),
                );
            }
        };
        let (image, snapshot) = match image.split_once(AT) {
            Some((image, snapshot)) => (image, Some(snapshot)),
            None => (image, None),
        };
        let mut location = Self::new(pool, namespace, image, snapshot)?;
        let mut rest = rest;
        while let Some(pairs) = rest {
            let (pair, next) = until(pairs, ":");
            let pair = plain(&pair);
            let Some((key, value)) = pair.split_once('=') else {
                return Err(format!("has '{pair}', which is not KEY=VALUE"));
            };
            location.access.set(key, value)?;
            rest = next;
        }
        Ok(location)
    }

    /// Makes a location from names, without options.
    ///
    /// # Errors
    /// A sentence that says which name is invalid.
    pub fn new(
        pool: &str,
        namespace: Option<&str>,
        image: &str,
        snapshot: Option<&str>,
    ) -> Result<Self, String> {
        Ok(Self {
            pool: name("pool", pool)?,
            namespace: match namespace {
                None | Some("") => None,
                Some(namespace) => Some(name("namespace", namespace)?),
            },
            image: name("image", image)?,
            snapshot: snapshot.map(|snap| name("snapshot", snap)).transpose()?,
            access: Access::default(),
        })
    }

    /// The text that `parse` reads, without how to reach the cluster and without escapes.
    pub fn image_spec(&self) -> String {
        let namespace = self.namespace.as_deref();
        let namespace = namespace.map(|n| format!("{n}/")).unwrap_or_default();
        let snapshot = self.snapshot.as_deref();
        let snapshot = snapshot.map(|s| format!("@{s}")).unwrap_or_default();
        format!("{}/{namespace}{}{snapshot}", self.pool, self.image)
    }

    /// The complete text, which [`parse`](Self::parse) reads back.
    pub fn option_text(&self) -> String {
        let mut text = escaped(&self.pool);
        if let Some(namespace) = &self.namespace {
            text += &format!("/{}", escaped(namespace));
        }
        text += &format!("/{}", escaped(&self.image));
        if let Some(snapshot) = &self.snapshot {
            text += &format!("@{}", escaped(snapshot));
        }
        let access = &self.access;
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let options = access.options.iter();
        let options = options.map(|(key, value)| (key.as_str(), Some(value.clone())));
        let pairs = [
            ("conf", path(&access.conf)),
            ("id", access.id.clone()),
            ("keyring", path(&access.keyring)),
            ("cluster", access.cluster.clone()),
            ("connections", access.connections.map(|n| n.to_string())),
        ];
        for (key, value) in pairs.into_iter().chain(options) {
            if let Some(value) = value {
                text += &format!(":{key}={}", escaped(&value));
            }
        }
        text
    }

    /// Whether both name the same image of the same cluster, as far as their text shows.
    pub fn is_same_image(&self, other: &Self) -> bool {
        let key = |l: &Self| {
            let snapshot = l.snapshot.clone();
            (
                l.pool.clone(),
                l.namespace.clone(),
                l.image.clone(),
                snapshot,
            )
        };
        let cluster = |a: &Access| (a.conf.clone(), a.cluster.clone());
        key(self) == key(other) && cluster(&self.access) == cluster(&other.access)
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rbd:{}", self.image_spec())
    }
}

impl Access {
    /// Adds an option.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        if value.is_empty() || value.len() > VALUE_MAX || value.contains('\0') {
            return Err(format!(
                "{key} must have a value, of {VALUE_MAX} bytes at most"
            ));
        }
        let twice = || Err(format!("{key} is given twice"));
        let text = value.to_owned();
        match key {
            "conf" if self.conf.replace(value.into()).is_some() => twice(),
            "id" if self.id.replace(text.clone()).is_some() => twice(),
            "keyring" if self.keyring.replace(value.into()).is_some() => twice(),
            "cluster" if self.cluster.replace(text.clone()).is_some() => twice(),
            "conf" | "id" | "keyring" | "cluster" => Ok(()),
            "connections" => match value.parse() {
                Ok(n @ 1..=CONNECTIONS_MAX) => match self.connections.replace(n) {
                    Some(_) => twice(),
                    None => Ok(()),
                },
                _ => Err(format!(
                    "connections: '{value}' is not a number from 1 to {}",
                    CONNECTIONS_MAX
                )),
            },
            "rbd_cache" => Err(
                "rbd_cache is what the disk's cache says: cache=writeback is \
                with it, cache=none without"
                    .into(),
            ),
            _ if key.is_empty()
                || key.len() > NAME_MAX
                || !key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') =>
            {
                Err(format!("'{key}' is no option of librados or librbd"))
            }
            _ if self.options.iter().any(|(k, _)| k == key) => twice(),
            _ if self.options.len() == OPTIONS_MAX => {
                Err(format!("there are more than {OPTIONS_MAX} options"))
            }
            _ => {
                self.options.push((key.to_owned(), text));
                Ok(())
            }
        }
    }
}

/// Placeholders for an unescaped, separating `/` or `@`; an escaped one is part of a name and stays as it is.
const SLASH: char = '\u{1}';
const AT: char = '\u{2}';

/// Splits `text` at the first unescaped `end`: the part before it, with escapes resolved, and the part after it.
fn until<'a>(text: &'a str, end: &str) -> (String, Option<&'a str>) {
    let mut part = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => part.extend(chars.next().map(|(_, c)| c)),
            '/' => part.push(SLASH),
            '@' => part.push(AT),
            c if end.contains(c) => return (part, Some(&text[at + c.len_utf8()..])),
            c => part.push(c),
        }
    }
    (part, None)
}

/// Escapes `text` so that none of its characters is read as a separator.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        if "\\/@:".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// Replaces the placeholders with the characters that they stand for.
fn plain(text: &str) -> String {
    text.replace(SLASH, "/").replace(AT, "@")
}

fn name(what: &str, text: &str) -> Result<String, String> {
    match text.len() {
        0 => Err(format!("names no {what}")),
        n if n >= NAME_MAX => Err(format!(
            "the {what} has {n} bytes, and a name has at most {}",
            NAME_MAX - 1
        )),
        _ if text.chars().any(|c| c.is_control()) => Err(format!(
            "the {what} has a control character or a second @ or / in its name"
        )),
        _ => Ok(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn images_are_named_as_in_qemu() {
        let it = Location::parse("pool/image").unwrap();
        assert_eq!((&*it.pool, &*it.image), ("pool", "image"));
        assert_eq!((it.namespace.clone(), it.snapshot.clone()), (None, None));
        assert_eq!(it.to_string(), "rbd:pool/image");
        let it = Location::parse(
            "p/ns/i@s:id=vm:conf=/etc/ceph/a.conf:ms_client_mode=secure:mon_host=10.0.0.1\\:3300",
        )
        .unwrap();
        assert_eq!(it.to_string(), "rbd:p/ns/i@s");
        assert_eq!(it.access.id.as_deref(), Some("vm"));
        assert_eq!(it.access.conf, Some("/etc/ceph/a.conf".into()));
        let options = [("ms_client_mode", "secure"), ("mon_host", "10.0.0.1:3300")];
        let options: Vec<_> = options.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        assert_eq!(it.access.options, options);
        assert_eq!(Location::parse(&it.option_text()), Ok(it));
        let it = Location::parse("p/we\\:ird\\@na\\/me").unwrap();
        assert_eq!(it.image, "we:ird@na/me");
    }

    #[test]
    fn invalid_names_are_refused() {
        for (text, says) in [
            ("", "is not POOL/IMAGE"),
            ("image", "is not POOL/IMAGE"),
            ("/image", "names no pool"),
            ("pool/", "names no image"),
            ("pool/i@", "names no snapshot"),
            ("pool/i@a@b", "second @"),
            ("pool/n/i/x", "second @ or /"),
            ("pool/i:id", "not KEY=VALUE"),
            ("pool/i:id=", "must have a value"),
            ("pool/i:id=a:id=b", "id is given twice"),
            ("pool/i:rbd_cache=true", "cache=writeback"),
            ("pool/i:connections=0", "number from 1"),
            ("pool/i:a b=c", "no option"),
        ] {
            let error = Location::parse(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_an_image_or_refused(text in ".{0,200}") {
            if let Ok(it) = Location::parse(&text) {
                prop_assert!(!it.pool.is_empty() && !it.image.is_empty());
                prop_assert!(it.image.len() < NAME_MAX && !it.image.contains('\0'));
                prop_assert_eq!(Location::parse(&it.option_text()), Ok(it));
            }
        }

        #[test]
        fn text_of_what_matters_is_an_image_or_refused(text in "[a-c/@:=\\\\]{0,24}") {
            if let Ok(it) = Location::parse(&text) {
                prop_assert_eq!(Location::parse(&it.option_text()), Ok(it));
            }
        }
    }
}
