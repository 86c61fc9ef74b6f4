//! What is exported to NBD clients, and where.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use block::ThrottleLimits;

/// Where the server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

impl FromStr for NbdAddress {
    type Err = String;

    /// A path that begins with `/` or `./`, or `ADDRESS:PORT`.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains('/') {
            return Ok(Self::Unix(text.into()));
        }
        text.parse().map(Self::Tcp).map_err(|_| {
            format!("'{text}' is neither the path of a socket, as in /run/ringdisk/nbd.sock, nor an address and port, as in 192.0.2.1:10809")
        })
    }
}

/// The certificates of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSpec {
    /// With QEMU's names: `server-cert.pem`, `server-key.pem`, `ca-cert.pem` and, if there is one, `ca-crl.pem`.
    pub dir: PathBuf,
    /// Whether clients need a certificate of this authority.
    pub verify_peer: bool,
}

/// What a configuration says about NBD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NbdConfig {
    pub address: Option<NbdAddress>,
    /// The directory with the certificates.
    pub tls: Option<PathBuf>,
    /// Clients need no certificate.
    pub tls_any_peer: bool,
    pub exports: Vec<NbdExportSpec>,
}

/// How a disk is exported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NbdExportSpec {
    pub id: String,
    /// The node, or the disk.
    pub node: String,
    /// The name that clients use.
    pub name: String,
    pub description: String,
    pub writable: bool,
    /// Dirty bitmaps of the disk that clients may query.
    pub bitmaps: Vec<String>,
    /// For all clients of the export together. Those of the disk apply to its guest only.
    pub limits: ThrottleLimits,
}

impl NbdExportSpec {
    /// With the name of its disk if it has none, and an id, which no disk has.
    pub fn named(self) -> Self {
        let name = if self.name.is_empty() {
            self.node.clone()
        } else {
            self.name
        };
        Self {
            id: id_of(&name),
            name,
            ..self
        }
    }
}

/// The id of an export with this name, unless it was given another. Names may have more characters than ids, and others.
pub fn id_of(name: &str) -> String {
    let id = format!("nbd-{name}");
    if super::spec::name(&id).is_ok() {
        return id;
    }
    let allowed = |c: char| {
        if c.is_ascii_alphanumeric() || "-._".contains(c) {
            c
        } else {
            '_'
        }
    };
    let start: String = id.chars().map(allowed).take(47).collect();
    // FNV-1a tells apart those that begin alike.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    format!("{start}-{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_an_id_of_its_own() {
        assert_eq!(id_of("vm1-backup"), "nbd-vm1-backup");
        let long = "vm-6f1c2b1e-0f0e-4a53-9a39-1f0f5c2d7e11-disk-0-nightly-2026-11-25";
        let ids = [
            long,
            &format!("{long}b"),
            "a b",
            "a_b",
            "\u{e4}",
            &"x".repeat(4096),
        ]
        .map(id_of);
        for (i, id) in ids.iter().enumerate() {
            assert_eq!(super::super::spec::name(id).as_ref(), Ok(id));
            assert!(!ids[..i].contains(id), "{id}");
        }
    }

    #[test]
    fn addresses_are_paths_or_sockets() {
        let parsed = |text: &str| text.parse::<NbdAddress>();
        assert_eq!(
            parsed("/run/nbd.sock"),
            Ok(NbdAddress::Unix("/run/nbd.sock".into()))
        );
        assert_eq!(parsed("./nbd"), Ok(NbdAddress::Unix("./nbd".into())));
        for address in ["127.0.0.1:10809", "[::1]:0"] {
            assert_eq!(parsed(address).unwrap().to_string(), address);
        }
        for wrong in ["", "nbd.sock", "localhost:10809", "127.0.0.1"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
