//! The certificates of the NBD server, in the files that QEMU's tls-creds-x509 has.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use thiserror::Error;

use crate::config::nbd::TlsSpec;

const SERVER_CERTIFICATE: &str = "server-cert.pem";
const SERVER_KEY: &str = "server-key.pem";
const AUTHORITY: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

/// Why certificates cannot be used.
#[derive(Debug, Error)]
pub enum TlsError {
    #[error("TLS: {}: {cause}", .0.display(), cause = block::explain(.1, "name a directory with the certificates"))]
    File(PathBuf, io::Error),
    #[error("TLS: {}: {cause}", .0.display(), cause = .1)]
    Pem(PathBuf, pem::Error),
    #[error("TLS: {}: {cause}", .0.display(), cause = .1)]
    Certificate(PathBuf, rustls::Error),
    #[error("TLS: {}: {cause}", .0.display(), cause = .1)]
    Authority(PathBuf, VerifierBuilderError),
}

/// What a server with TLS has read.
pub struct TlsCredentials {
    pub spec: TlsSpec,
    pub config: Arc<ServerConfig>,
}

impl TlsCredentials {
    /// Reads the files.
    ///
    /// # Errors
    /// One is missing, is not what its name says, or does not belong to the others.
    pub fn read(mut spec: TlsSpec) -> Result<Self, TlsError> {
        // For a process that takes over.
        spec.dir = std::path::absolute(&spec.dir).unwrap_or(spec.dir);
        let provider = Arc::new(ring::default_provider());
        let path = |name| spec.dir.join(name);
        let unusable = |e| TlsError::Certificate(path(SERVER_CERTIFICATE), e);
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(unusable)?;
        let builder = if spec.verify_peer {
            let mut authorities = RootCertStore::empty();
            for certificate in read_all::<CertificateDer<'_>>(&path(AUTHORITY))? {
                let unusable = |e| TlsError::Certificate(path(AUTHORITY), e);
                authorities.add(certificate).map_err(unusable)?;
            }
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(authorities), provider);
            let verifier = if path(REVOKED).exists() {
                verifier.with_crls(read_all::<CertificateRevocationListDer<'_>>(&path(
                    REVOKED,
                ))?)
            } else {
                verifier
            };
            let verifier = verifier.build();
            builder.with_client_cert_verifier(
                verifier.map_err(|e| TlsError::Authority(path(AUTHORITY), e))?,
            )
        } else {
            builder.with_no_client_auth()
        };
        let certificates = read_all(&path(SERVER_CERTIFICATE))?;
        let key = PrivateKeyDer::from_pem_slice(&read(&path(SERVER_KEY))?)
            .map_err(|e| TlsError::Pem(path(SERVER_KEY), e))?;
        let config = builder.with_single_cert(certificates, key);
        let config = Arc::new(config.map_err(unusable)?);
        Ok(Self { spec, config })
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|e| TlsError::File(path.into(), e))
}

/// All objects of a kind in a file, of which there must be one.
fn read_all<T: PemObject>(path: &Path) -> Result<Vec<T>, TlsError> {
    let bytes = read(path)?;
    let all = T::pem_slice_iter(&bytes).collect::<Result<Vec<T>, _>>();
    let all = all.map_err(|e| TlsError::Pem(path.into(), e))?;
    if all.is_empty() {
        return Err(TlsError::Pem(path.into(), pem::Error::NoItemsFound));
    }
    Ok(all)
}
