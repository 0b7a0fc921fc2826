//! The master key and what is derived from it: the keys of clusters, which open control ports and the FleetView.
//!
//! The operator may create Secrets but never read one, so the master key comes by a mount. On the first start nobody has
//! made it: the operator creates the Secret with random bytes, and the kubelet projects it into the running pod within
//! about a minute (the mount is optional, so that the pod could start). Two replicas may both try; one wins, both read
//! what the kubelet brings.
//! Invariants: a key is never printed; the same master gives the same keys for ever, so that a restart asks nobody.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use deepinfer_protocol::Generation;
use deepinfer_transport::ClusterKey;
use hmac::{Hmac, Mac};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use sha2::Sha256;

use crate::health::Health;

/// Secret with the master key, in the operator's namespace.
pub const MASTER_SECRET: &str = "deepinfer-operator-master";
/// Its data item, which becomes the file's name.
pub const MASTER_ITEM: &str = "key";
/// Generation of cluster keys; rolling them comes later.
const GENERATION: u64 = 1;
/// Pause between two looks for the file.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Pause between two tries to create the Secret.
const CREATE_EVERY: Duration = Duration::from_secs(30);
/// Name of what is missing, in `/readyz`.
const MISSING: &str = "master-key";

/// A cluster object: one incarnation of a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID: another object of the same name is another cluster with another key.
    pub uid: String,
}

impl fmt::Display for ClusterRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Why there is no master key.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The file cannot be read.
    #[error("--master-key-file {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file does not hold a key.
    #[error("--master-key-file {path}: has {bytes} bytes, a key is 64 hex digits or 32 bytes", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: usize,
    },
    /// No random bytes.
    #[error("the operating system gives no random bytes: {0}")]
    Random(String),
}

/// Derives the keys of clusters.
#[derive(Clone)]
pub struct Keys {
    master: [u8; 32],
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

impl Keys {
    /// With this master key.
    pub fn new(master: [u8; 32]) -> Self {
        Self { master }
    }

    /// Reads the master key; `None` if there is no such file yet.
    ///
    /// # Errors
    /// [`KeysError`].
    pub fn read(path: &Path) -> Result<Option<Self>, KeysError> {
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(KeysError::Read { path: path.to_path_buf(), source }),
        };
        let format = || KeysError::Format { path: path.to_path_buf(), bytes: bytes.len() };
        master_of(&bytes).map(|master| Some(Self { master })).ok_or_else(format)
    }

    /// The key of a cluster at a generation.
    ///
    /// # Panics
    /// Never: HMAC takes keys of any length.
    pub fn derive(&self, cluster_uid: &str, generation: u64) -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.master).expect("HMAC takes any key length");
        mac.update(format!("{cluster_uid}/{generation}").as_bytes());
        mac.finalize().into_bytes().into()
    }

    /// The same as 64 hex digits: the value of the Secret's data item.
    pub fn hex(&self, cluster_uid: &str, generation: u64) -> String {
        hex(&self.derive(cluster_uid, generation))
    }

    /// What signs and opens calls of a cluster.
    pub fn cluster(&self, cluster_uid: &str) -> ClusterKey {
        ClusterKey::new(Generation(GENERATION), self.derive(cluster_uid, GENERATION))
    }
}

/// 64 hex digits with white space around them, or 32 bytes as they are.
fn master_of(bytes: &[u8]) -> Option<[u8; 32]> {
    if let Ok(raw) = <[u8; 32]>::try_from(bytes) {
        return Some(raw);
    }
    let text = std::str::from_utf8(bytes).ok()?.trim().as_bytes();
    let mut master = [0; 32];
    if text.len() != 64 {
        return None;
    }
    for (byte, pair) in master.iter_mut().zip(text.chunks_exact(2)) {
        let digit = |b: u8| char::from(b).to_digit(16);
        *byte = u8::try_from((digit(pair[0])? << 4) | digit(pair[1])?).ok()?;
    }
    Some(master)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The master key from its file. While there is none, the Secret is created (once; another replica or an
/// administrator may have been faster) and the file is waited for.
///
/// # Errors
/// If the file is there and is not good.
pub async fn obtain(
    path: &Path,
    client: &Client,
    namespace: &str,
    health: &Health,
) -> Result<Arc<Keys>, KeysError> {
    let mut next_try = tokio::time::Instant::now();
    let mut made = false;
    loop {
        if let Some(keys) = Keys::read(path)? {
            health.satisfied(MISSING);
            return Ok(Arc::new(keys));
        }
        if !made && tokio::time::Instant::now() >= next_try {
            next_try = tokio::time::Instant::now() + CREATE_EVERY;
            let why = match create(client, namespace).await? {
                Ok(()) => {
                    made = true;
                    format!("Secret {MASTER_SECRET} is there; waiting for its mount at {}", path.display())
                }
                Err(message) => format!("Secret {MASTER_SECRET} cannot be created: {message}"),
            };
            tracing::info!(reason = %why, "no master key yet");
            health.missing(MISSING, why);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Creates the Secret with fresh random bytes; one that is there counts as success.
async fn create(client: &Client, namespace: &str) -> Result<Result<(), String>, KeysError> {
    let mut master = [0; 32];
    getrandom::fill(&mut master).map_err(|error| KeysError::Random(error.to_string()))?;
    let secret = Secret {
        metadata: ObjectMeta { name: Some(MASTER_SECRET.to_owned()), ..ObjectMeta::default() },
        data: Some(BTreeMap::from([(MASTER_ITEM.to_owned(), ByteString(hex(&master).into_bytes()))])),
        ..Secret::default()
    };
    let api: Api<Secret> = Api::namespaced(client.clone(), namespace);
    Ok(match api.create(&PostParams::default(), &secret).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(error) => Err(error.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_depend_on_master_cluster_and_generation_only() {
        let keys = Keys::new([7; 32]);
        assert_eq!(keys.derive("a", 1), Keys::new([7; 32]).derive("a", 1));
        let others = [keys.derive("a", 2), keys.derive("b", 1), Keys::new([8; 32]).derive("a", 1)];
        assert!(others.iter().all(|other| *other != keys.derive("a", 1)));
        assert_eq!(keys.hex("a", 1).len(), 64);
        let signed = keys.cluster("a").sign(&[b"x"]).1;
        assert!(ClusterKey::new(Generation(1), keys.derive("a", 1)).verify(Generation(1), &[b"x"], &signed));
    }

    #[test]
    fn a_master_key_is_hex_or_raw_and_anything_else_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        assert!(Keys::read(&path).unwrap().is_none());
        std::fs::write(&path, format!("{}\n", "0a".repeat(32))).unwrap();
        let from_hex = Keys::read(&path).unwrap().unwrap();
        std::fs::write(&path, [10; 32]).unwrap();
        assert_eq!(Keys::read(&path).unwrap().unwrap().derive("u", 1), from_hex.derive("u", 1));
        for bad in [&b"short"[..], &[b'g'; 64], b""] {
            std::fs::write(&path, bad).unwrap();
            let error = Keys::read(&path).unwrap_err().to_string();
            assert!(error.contains("--master-key-file") && error.contains("64 hex digits"), "{error}");
        }
    }

    #[test]
    fn a_master_key_is_not_printed() {
        assert!(!format!("{:?}", Keys::new([0xab; 32])).contains("171"));
    }
}
