//! Who asks: API keys map to tenants, tenants to salts.
//!
//! Invariants: a key is kept and looked up only as its HMAC under a key of this process, so neither memory dumps of
//! the table nor the time of a look-up tell anything about it; no key is ever printed; a file that cannot be read
//! or parsed leaves the last good table in force.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use hmac::{Hmac, Mac};
use http::HeaderMap;
use http::header::AUTHORIZATION;
use serde_yaml::Value;
use sha2::Sha256;

/// Most bytes of a keys file: some ten thousand keys.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Longest key that is looked at; longer ones are unknown.
const MAX_KEY_BYTES: usize = 512;
/// Shortest key that a file may hold: shorter ones can be guessed.
const MIN_KEY_BYTES: usize = 8;
/// Longest name of a tenant: it appears in logs.
const MAX_TENANT_BYTES: usize = 63;

type Digest = [u8; 32];

/// Who a request is counted for, and whose KV blocks it may share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Name from the keys file.
    pub name: Arc<str>,
    /// In every block key of the tenant (KV-7).
    pub salt: [u8; 32],
}

impl Tenant {
    /// Name of everybody while no keys are configured.
    pub const EVERYBODY: &'static str = "default";
}

/// Why a keys file is not taken.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The file or folder cannot be read.
    #[error("cannot read the API keys in {}: {source}", path.display())]
    Read {
        /// Where.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// Larger than any honest keys file.
    #[error("the API keys in {} have {bytes} bytes, the limit is {MAX_FILE_BYTES}", path.display())]
    TooLarge {
        /// Where.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// Not YAML; the text is not repeated, it holds secrets.
    #[error("the API keys in {} are not YAML{}: write one `tenant: key` a line", path.display(), at(*line))]
    Yaml {
        /// Where.
        path: PathBuf,
        /// Line from 1, if the parser knows it.
        line: Option<usize>,
    },
    /// YAML that is not a map of tenants to keys.
    #[error("the API keys in {}: tenant `{tenant}`: {problem}", path.display())]
    Tenant {
        /// Where.
        path: PathBuf,
        /// Whose entry; empty if the whole is meant.
        tenant: String,
        /// What is wrong and what is expected.
        problem: &'static str,
    },
}

fn at(line: Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!(" (line {line})"))
}

/// Why a request is not let in. Both are answered 401.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// No key was sent.
    #[error("an API key is needed: send the header `Authorization: Bearer <key>`")]
    Missing,
    /// A key that nobody has, or a header of another form.
    #[error("the API key is not known here")]
    Unknown,
}

/// The table of keys and its file.
pub struct Access {
    path: Option<PathBuf>,
    blind: [u8; 32],
    salt_secret: [u8; 32],
    keys: RwLock<Arc<BTreeMap<Digest, Tenant>>>,
    everybody: Tenant,
    last_bytes: Mutex<Option<Digest>>,
}

impl Access {
    /// Opens the keys of `path` (a YAML map, or a folder with one file per tenant as a mounted Secret is);
    /// `None`: everybody may come in. `salt_secret` is the cluster's: all gateways give a tenant the same salt.
    ///
    /// # Errors
    /// [`KeysError`] naming the file and the tenant.
    ///
    /// # Panics
    /// If the operating system gives no random bytes.
    pub fn open(path: Option<PathBuf>, salt_secret: [u8; 32]) -> Result<Self, KeysError> {
        let mut blind = [0; 32];
        getrandom::fill(&mut blind).expect("the operating system has random bytes");
        let access = Self {
            everybody: tenant(Tenant::EVERYBODY, &salt_secret),
            path,
            blind,
            salt_secret,
            keys: RwLock::default(),
            last_bytes: Mutex::new(None),
        };
        access.reload()?;
        Ok(access)
    }

    /// Whether no keys are configured.
    pub fn is_open(&self) -> bool {
        self.path.is_none()
    }

    /// Tenants and keys in force, for the log at start.
    pub fn counts(&self) -> (usize, usize) {
        let keys = self.table();
        let tenants: std::collections::BTreeSet<&str> = keys.values().map(|t| &*t.name).collect();
        (tenants.len(), keys.len())
    }

    /// Reads the file again; `true` if it had changed. On an error the last good table stays.
    ///
    /// # Errors
    /// [`KeysError`], once for each content.
    pub fn reload(&self) -> Result<bool, KeysError> {
        let Some(path) = &self.path else { return Ok(false) };
        let entries = read(path)?;
        let digest = self.digest_of(&entries);
        {
            let mut last = self.last_bytes.lock().unwrap_or_else(PoisonError::into_inner);
            if *last == Some(digest) {
                return Ok(false);
            }
            *last = Some(digest);
        }
        let parsed = parse(path, &entries)?;
        let mut keys = BTreeMap::new();
        for (name, key) in parsed {
            let owner = tenant(&name, &self.salt_secret);
            if let Some(other) = keys.insert(self.blinded(key.as_bytes()), owner.clone())
                && other != owner
            {
                return Err(KeysError::Tenant {
                    path: path.clone(),
                    tenant: name,
                    problem: "has a key that another tenant has too: give each its own",
                });
            }
        }
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
        Ok(true)
    }

    /// Whose request this is.
    ///
    /// # Errors
    /// [`Denied`] if keys are configured and the request has none of them.
    pub fn tenant_of(&self, headers: &HeaderMap) -> Result<Tenant, Denied> {
        if self.is_open() {
            return Ok(self.everybody.clone());
        }
        let key = presented(headers).ok_or(Denied::Missing)?;
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            return Err(Denied::Unknown);
        }
        self.table().get(&self.blinded(key)).cloned().ok_or(Denied::Unknown)
    }

    fn table(&self) -> Arc<BTreeMap<Digest, Tenant>> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn blinded(&self, key: &[u8]) -> Digest {
        mac(&self.blind, &[key])
    }

    fn digest_of(&self, entries: &Entries) -> Digest {
        let mut parts: Vec<&[u8]> = Vec::new();
        match entries {
            Entries::File(bytes) => parts.push(bytes),
            Entries::Folder(files) => {
                for (name, bytes) in files {
                    parts.extend([name.as_bytes(), &[0], bytes, &[0]]);
                }
            }
        }
        mac(&self.blind, &parts)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("path", &self.path).finish_non_exhaustive()
    }
}

fn mac(key: &[u8; 32], parts: &[&[u8]]) -> Digest {
    let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

fn tenant(name: &str, salt_secret: &[u8; 32]) -> Tenant {
    Tenant { name: name.into(), salt: mac(salt_secret, &[b"tenant-salt\0", name.as_bytes()]) }
}

/// The key of `Authorization: Bearer` (any case), or of `x-api-key`, which some clients send instead.
fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(value) = headers.get(AUTHORIZATION) {
        let value = value.as_bytes();
        return match value.split_at_checked(7) {
            Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"bearer ") => Some(key.trim_ascii()),
            _ => Some(b""),
        };
    }
    headers.get("x-api-key").map(|value| value.as_bytes().trim_ascii())
}

enum Entries {
    File(Vec<u8>),
    Folder(BTreeMap<String, Vec<u8>>),
}

fn read(path: &Path) -> Result<Entries, KeysError> {
    let trouble = |source| KeysError::Read { path: path.to_owned(), source };
    let bounded = |file: &Path| -> Result<Vec<u8>, KeysError> {
        let bytes = std::fs::metadata(file).map_err(trouble)?.len();
        if bytes > MAX_FILE_BYTES {
            return Err(KeysError::TooLarge { path: file.to_owned(), bytes });
        }
        std::fs::read(file).map_err(trouble)
    };
    if !std::fs::metadata(path).map_err(trouble)?.is_dir() {
        return bounded(path).map(Entries::File);
    }
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(path).map_err(trouble)? {
        let entry = entry.map_err(trouble)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // A mounted Secret has links and folders that begin with a dot beside its keys.
        if !name.starts_with('.') && entry.path().is_file() {
            files.insert(name, bounded(&entry.path())?);
        }
    }
    Ok(Entries::Folder(files))
}

/// Pairs of tenant and key.
fn parse(path: &Path, entries: &Entries) -> Result<Vec<(String, String)>, KeysError> {
    let wrong = |tenant: &str, problem| KeysError::Tenant {
        path: path.to_owned(),
        tenant: tenant.to_owned(),
        problem,
    };
    let mut pairs = Vec::new();
    match entries {
        Entries::File(bytes) => {
            let root: Value = serde_yaml::from_slice(bytes).map_err(|error| KeysError::Yaml {
                path: path.to_owned(),
                line: error.location().map(|l| l.line()),
            })?;
            let map = root.as_mapping().ok_or_else(|| {
                wrong("", "expected a map of tenants to keys: `tenant: key` or `tenant: [key, key]`")
            })?;
            for (name, keys) in map {
                let name =
                    name.as_str().ok_or_else(|| wrong("", "names of tenants are text: quote numbers"))?;
                let list = match keys {
                    Value::Sequence(list) => list.iter().collect(),
                    one => vec![one],
                };
                for key in list {
                    let key = key.as_str().ok_or_else(|| {
                        wrong(name, "keys are text: `tenant: key` or `tenant: [key, key]`, numbers in quotes")
                    })?;
                    pairs.push((name.to_owned(), key.to_owned()));
                }
            }
        }
        Entries::Folder(files) => {
            for (name, bytes) in files {
                let text = std::str::from_utf8(bytes).map_err(|_| wrong(name, "the key is not text"))?;
                let keys = text.lines().map(str::trim).filter(|line| !line.is_empty());
                pairs.extend(keys.map(|key| (name.clone(), key.to_owned())));
            }
        }
    }
    for (name, key) in &pairs {
        if name.is_empty() || name.len() > MAX_TENANT_BYTES || name.chars().any(char::is_control) {
            return Err(wrong(name, "a tenant's name has 1 to 63 bytes and no control characters"));
        }
        if !(MIN_KEY_BYTES..=MAX_KEY_BYTES).contains(&key.len()) || !key.bytes().all(|b| b.is_ascii_graphic())
        {
            return Err(wrong(name, "a key has 8 to 512 visible ASCII characters and no spaces"));
        }
    }
    if pairs.is_empty() {
        return Err(wrong(
            "",
            "there is no key: nobody could come in; leave the option away to let everybody in",
        ));
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(text: &str) -> Result<Access, KeysError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.yaml");
        std::fs::write(&path, text).unwrap();
        Access::open(Some(path), [7; 32])
    }

    fn with(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    #[test]
    fn a_tenant_has_one_or_several_keys_and_one_salt() {
        let access = access("alpha: key-of-alpha\nbeta:\n  - first-of-beta\n  - second-of-beta\n").unwrap();
        assert_eq!(access.counts(), (2, 3));
        let of = |key: &str| access.tenant_of(&with("authorization", &format!("Bearer {key}"))).unwrap();
        let (alpha, one, two) = (of("key-of-alpha"), of("first-of-beta"), of("second-of-beta"));
        assert_eq!(&*alpha.name, "alpha");
        assert_eq!(one, two);
        assert_ne!(alpha.salt, one.salt);
        assert_eq!(access.tenant_of(&with("x-api-key", "key-of-alpha")), Ok(alpha));
    }

    #[test]
    fn salts_come_from_the_secret_so_that_all_gateways_agree() {
        let one = tenant("alpha", &[1; 32]);
        assert_eq!(one, tenant("alpha", &[1; 32]));
        assert_ne!(one.salt, tenant("alpha", &[2; 32]).salt);
    }

    #[test]
    fn without_a_known_key_nobody_comes_in() {
        let access = access("alpha: key-of-alpha\n").unwrap();
        assert_eq!(access.tenant_of(&HeaderMap::new()), Err(Denied::Missing));
        for value in
            ["Bearer key-of-alph", "Bearer ", "Basic key-of-alpha", "key-of-alpha", "Bearer KEY-OF-ALPHA"]
        {
            assert_eq!(access.tenant_of(&with("authorization", value)), Err(Denied::Unknown), "{value}");
        }
        let long = format!("Bearer {}", "x".repeat(MAX_KEY_BYTES + 1));
        assert_eq!(access.tenant_of(&with("authorization", &long)), Err(Denied::Unknown));
    }

    #[test]
    fn a_bad_file_is_refused_by_name_and_never_repeated() {
        let cases = [
            ("just-a-secret-word", "expected a map"),
            ("alpha: [secret-key-1, {a: secret-key-2}]", "tenant `alpha`"),
            ("alpha: 123456789", "numbers in quotes"),
            ("alpha: short", "8 to 512"),
            ("alpha: secret-key-1\nbeta: secret-key-1", "another tenant"),
            ("alpha: \"secret-key-1\nbeta", "not YAML"),
            ("{}", "there is no key"),
        ];
        for (text, expected) in cases {
            let message = access(text).unwrap_err().to_string();
            assert!(message.contains(expected) && message.contains("keys.yaml"), "{message}");
            assert!(!message.contains("secret-key") && !message.contains("secret-word"), "{message}");
        }
    }

    #[test]
    fn a_mounted_secret_has_a_file_per_tenant() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("alpha"), "key-of-alpha\n").unwrap();
        std::fs::create_dir(dir.path().join("..data")).unwrap();
        let access = Access::open(Some(dir.path().to_owned()), [7; 32]).unwrap();
        assert_eq!(&*access.tenant_of(&with("x-api-key", "key-of-alpha")).unwrap().name, "alpha");
    }

    #[test]
    fn a_changed_file_takes_over_and_a_broken_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.yaml");
        std::fs::write(&path, "alpha: key-of-alpha").unwrap();
        let access = Access::open(Some(path.clone()), [7; 32]).unwrap();
        assert!(!access.reload().unwrap());
        std::fs::write(&path, "beta: key-of-beta0").unwrap();
        assert!(access.reload().unwrap());
        assert_eq!(access.tenant_of(&with("x-api-key", "key-of-alpha")), Err(Denied::Unknown));
        std::fs::write(&path, "beta: [").unwrap();
        assert!(access.reload().is_err());
        assert!(access.tenant_of(&with("x-api-key", "key-of-beta0")).is_ok());
        assert!(!access.reload().unwrap_or(true), "one error for each content");
        std::fs::remove_file(&path).unwrap();
        assert!(access.reload().is_err());
        assert!(access.tenant_of(&with("x-api-key", "key-of-beta0")).is_ok());
    }
}
