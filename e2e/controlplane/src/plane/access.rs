//! How clients reach a control plane: address, authority, tokens, kubeconfig files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kube::{Client, Config};
use serde_json::json;

/// An administrator's way in.
#[derive(Clone, Debug)]
pub(super) struct Access {
    pub url: String,
    pub ca_pem: String,
    pub token: String,
}

impl Access {
    /// Settings of a client with this access.
    fn config(&self) -> Config {
        let mut config = Config::new(self.url.parse().expect("the address of an API server is a URL"));
        config.root_cert = Some(certificates(&self.ca_pem));
        config.auth_info =
            serde_json::from_value(json!({"token": self.token})).expect("a token is all that a user needs");
        // The library's own retries would hide from a test what the server answered.
        config.default_retry = false;
        config
    }

    /// A client for the runtime of the caller.
    pub fn client(&self) -> Client {
        Client::try_from(self.config()).expect("the access of a control plane makes a client")
    }
}

/// The certificates of a PEM text.
fn certificates(pem: &str) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let mut body = String::new();
    for line in pem.lines() {
        match line {
            "-----BEGIN CERTIFICATE-----" => body.clear(),
            "-----END CERTIFICATE-----" => found.extend(STANDARD.decode(&body)),
            _ => body.push_str(line.trim()),
        }
    }
    found
}

/// The certificates as a PEM text.
pub(super) fn pem(certificates: &[Vec<u8>]) -> String {
    let mut text = String::new();
    for der in certificates {
        text.push_str("-----BEGIN CERTIFICATE-----\n");
        let body = STANDARD.encode(der);
        let lines = body.as_bytes().chunks(64).map(String::from_utf8_lossy);
        lines.for_each(|line| text.extend([&*line, "\n"]));
        text.push_str("-----END CERTIFICATE-----\n");
    }
    text
}

/// The text of a kubeconfig with one cluster and one token.
pub(super) fn text(url: &str, ca_pem: Option<&str>, token: &str) -> String {
    let mut cluster = json!({"server": url});
    if let Some(pem) = ca_pem {
        cluster["certificate-authority-data"] = STANDARD.encode(pem).into();
    }
    let value = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": cluster}],
        "users": [{"name": "tests", "user": {"token": token}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
        "current-context": "tests",
    });
    serde_yaml::to_string(&value).expect("a JSON value is YAML")
}

/// Writes a kubeconfig that only its owner can read.
pub(super) fn write(path: &Path, text: &str) -> anyhow::Result<PathBuf> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut file = fs::File::options()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("writing {}", path.display()))?;
    file.write_all(text.as_bytes())?;
    Ok(path.to_path_buf())
}

/// A random token of 128 bits.
pub(super) fn random_token() -> anyhow::Result<String> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).map_err(|e| anyhow::anyhow!("no random numbers from the system: {e}"))?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_survive_their_text_form() {
        let ders = vec![vec![7; 100], vec![8; 3]];
        assert_eq!(certificates(&pem(&ders)), ders);
    }
}
