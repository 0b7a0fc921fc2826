//! TLS of the client port, from PEM files that may change while the gateway runs.
//!
//! Invariant: connections always meet a certificate that fits its key; a pair that does not load leaves the last
//! good one in force.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Why certificate and key are not taken.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read the TLS file {}: {source}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// No certificate in the file.
    #[error("{} holds no certificate: expected PEM with `BEGIN CERTIFICATE`", path.display())]
    NoCertificate {
        /// Which.
        path: PathBuf,
    },
    /// No private key in the file; its content is not repeated.
    #[error("{} holds no private key: expected PEM with `BEGIN PRIVATE KEY` (PKCS#8, PKCS#1 or SEC1)", path.display())]
    NoKey {
        /// Which.
        path: PathBuf,
    },
    /// They do not belong together, or are of a kind that is not supported.
    #[error("the certificate {} and the key {} cannot be used: {problem}", certificate.display(), key.display())]
    Rejected {
        /// Certificate file.
        certificate: PathBuf,
        /// Key file.
        key: PathBuf,
        /// What the library said.
        problem: String,
    },
}

type Contents = (Vec<u8>, Vec<u8>);

/// The pair of files and what they hold now.
pub struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    config: RwLock<Arc<ServerConfig>>,
    last: Mutex<Contents>,
}

impl Tls {
    /// Reads a chain of certificates and its key.
    ///
    /// # Errors
    /// [`TlsError`] naming the file.
    pub fn open(certificate: PathBuf, key: PathBuf) -> Result<Self, TlsError> {
        let contents = (read(&certificate)?, read(&key)?);
        let config = RwLock::new(Arc::new(config(&certificate, &key, &contents)?));
        Ok(Self { certificate, key, config, last: Mutex::new(contents) })
    }

    /// For the next connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        Arc::clone(&self.config.read().unwrap_or_else(PoisonError::into_inner)).into()
    }

    /// Reads the files again; `true` if they had changed and are in force.
    ///
    /// # Errors
    /// [`TlsError`], once for each content; the last good pair stays.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let contents = (read(&self.certificate)?, read(&self.key)?);
        {
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            if *last == contents {
                return Ok(false);
            }
            last.clone_from(&contents);
        }
        let config = config(&self.certificate, &self.key, &contents)?;
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
        Ok(true)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

fn config(certificate: &Path, key: &Path, (chain_pem, key_pem): &Contents) -> Result<ServerConfig, TlsError> {
    let no_certificate = || TlsError::NoCertificate { path: certificate.to_owned() };
    let chain: Vec<CertificateDer<'static>> =
        CertificateDer::pem_slice_iter(chain_pem).collect::<Result<_, _>>().map_err(|_| no_certificate())?;
    if chain.is_empty() {
        return Err(no_certificate());
    }
    let private =
        PrivateKeyDer::from_pem_slice(key_pem).map_err(|_| TlsError::NoKey { path: key.to_owned() })?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private))
        .map_err(|error| TlsError::Rejected {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            problem: error.to_string(),
        })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}
