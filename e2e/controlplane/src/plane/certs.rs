//! The keys of a control plane: an authority, the API server's certificate, the key that signs service account tokens.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};

/// Names under which the API server is called: by us, and by pods as in every cluster.
const NAMES: [&str; 6] = [
    "127.0.0.1",
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
];

/// Files that the programs read.
#[derive(Clone, Debug)]
pub(super) struct Certs {
    pub ca_pem: String,
    pub ca: PathBuf,
    pub server: PathBuf,
    pub server_key: PathBuf,
    pub accounts_key: PathBuf,
    pub accounts_public: PathBuf,
}

impl Certs {
    /// Makes them all, for this run only.
    pub fn new(folder: &Path) -> anyhow::Result<Certs> {
        let mut authority = CertificateParams::default();
        authority.distinguished_name.push(DnType::CommonName, "control plane for tests");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;

        let mut server = CertificateParams::new(NAMES.map(String::from))?;
        server.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        let server_key = KeyPair::generate()?;
        let certificate = server.signed_by(&server_key, &authority)?;
        let accounts = KeyPair::generate()?;

        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            fs::write(&path, text).with_context(|| format!("writing {}", path.display())).map(|()| path)
        };
        Ok(Certs {
            ca: write("ca.crt", &authority.pem())?,
            ca_pem: authority.pem(),
            server: write("server.crt", &certificate.pem())?,
            server_key: write("server.key", &server_key.serialize_pem())?,
            accounts_key: write("accounts.key", &accounts.serialize_pem())?,
            accounts_public: write("accounts.pub", &accounts.public_key_pem())?,
        })
    }
}
