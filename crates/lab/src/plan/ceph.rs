//! How a configuration reaches a Ceph cluster.

use std::path::PathBuf;

/// How images are opened. Options of librbd and librados hold for all programs alike: the lab writes them, and the
/// keyring, into a copy of the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ceph {
    /// The configuration file; `None` is /etc/ceph/ceph.conf.
    pub conf: Option<PathBuf>,
    /// The user, without `client.`; `None` is `admin`.
    pub user: Option<String>,
    /// The file with the user's key; `None` is what the configuration says.
    pub keyring: Option<PathBuf>,
    /// Options of librbd and librados with their values.
    pub options: Vec<(String, String)>,
}

/// Most options: a mistake is more likely than such a wish.
const OPTIONS_MAX: usize = 100;

impl Ceph {
    /// The file of the cluster.
    pub fn conf(&self) -> PathBuf {
        self.conf
            .clone()
            .unwrap_or_else(|| "/etc/ceph/ceph.conf".into())
    }

    /// The user, without `client.`.
    pub fn user(&self) -> String {
        self.user.clone().unwrap_or_else(|| "admin".into())
    }

    /// Options as a plan writes them; `None` without any.
    pub fn options_text(&self) -> Option<String> {
        let words = self
            .options
            .iter()
            .map(|(key, value)| format!("{key}={value}"));
        let text = words.collect::<Vec<_>>().join(" ");
        (!text.is_empty()).then_some(text)
    }

    /// Whether this can be configured.
    ///
    /// # Errors
    /// The kernel's client does not support a setting.
    pub fn check(&self, krbd: bool) -> Result<(), String> {
        if krbd && !self.options.is_empty() {
            Err(
                "ceph-options are librbd's; the kernel's client (krbd=on) does not read them"
                    .into(),
            )
        } else {
            Ok(())
        }
    }
}

/// The name of a user of Ceph.
///
/// # Errors
/// It is invalid.
pub fn user(text: &str) -> Result<String, String> {
    let plain = text.strip_prefix("client.").unwrap_or(text);
    let is_name = !plain.is_empty()
        && plain
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    if is_name {
        Ok(plain.into())
    } else {
        Err(format!("'{text}' is not a Ceph user, such as admin or vm"))
    }
}

/// Options with spaces between them: `rbd_cache=false ms_client_mode=secure`.
///
/// # Errors
/// One is not KEY=VALUE.
pub fn options(text: &str) -> Result<Vec<(String, String)>, String> {
    let option = |word: &str| match word.split_once('=') {
        Some((key, value))
            if !key.is_empty()
                && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
                && !value.is_empty()
                && value
                    .chars()
                    .all(|c| c.is_ascii_graphic() && !"#;\"'".contains(c)) =>
        {
            Ok((key.to_owned(), value.to_owned()))
        }
        _ => Err(format!(
            "'{word}' is not KEY=VALUE, as in rbd_cache=false; several have spaces between them"
        )),
    };
    let options: Vec<_> = text
        .split_whitespace()
        .map(option)
        .collect::<Result<_, _>>()?;
    match options.len() {
        0 => Err("no option is there; as in rbd_cache=false".into()),
        1..=OPTIONS_MAX => Ok(options),
        more => Err(format!("{more} options are more than {OPTIONS_MAX}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_and_others_refused() {
        let text = "rbd_cache=false mon_host=10.0.0.1:6789,[fd00::2]:6789";
        let ceph = Ceph {
            options: options(text).unwrap(),
            ..Ceph::default()
        };
        assert_eq!(ceph.options_text().as_deref(), Some(text));
        assert!(ceph.check(true).unwrap_err().contains("krbd"));
        for wrong in [
            "rbd_cache",
            "=x",
            "a=",
            "[global]",
            "[a=b",
            "a b=c",
            "x=y;z",
            " ",
        ] {
            assert!(options(wrong).is_err(), "{wrong}");
        }
        assert_eq!(user("client.vm"), Ok("vm".into()));
        assert!(user("a b").is_err());
    }
}
