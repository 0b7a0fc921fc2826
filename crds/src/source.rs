//! Model sources: what a `uri` of a cluster means.
//! Invariant: pure text; whether something is there is for the caller to find out.

use std::path::{Path, PathBuf};

/// Where weights come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceUri {
    /// A path of the host. It may be relative only in local mode.
    File(PathBuf),
    /// A path in a PersistentVolumeClaim.
    Claim {
        /// Name of the claim.
        claim: String,
        /// Path in it, without a leading slash. Empty: its root.
        path: String,
    },
    /// An OCI artifact.
    Oci(String),
    /// A repository of Hugging Face.
    HuggingFace(String),
    /// A bucket and a prefix.
    S3(String),
}

/// A `uri` that names no source.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// The scheme is missing or unknown.
    #[error("model.source.uri {0:?} must begin with oci://, pvc://, file://, hf:// or s3://")]
    Scheme(String),
    /// Nothing stands behind the scheme.
    #[error("model.source.uri {0:?} names nothing behind its scheme")]
    Empty(String),
}

impl SourceUri {
    /// What a uri means. Errors: an unknown scheme, or nothing behind it.
    pub fn parse(uri: &str) -> Result<Self, SourceError> {
        let (scheme, rest) = uri.split_once("://").ok_or_else(|| SourceError::Scheme(uri.to_owned()))?;
        if rest.is_empty() {
            return Err(SourceError::Empty(uri.to_owned()));
        }
        match scheme {
            "file" => Ok(SourceUri::File(PathBuf::from(rest))),
            "pvc" => {
                let (claim, path) = rest.split_once('/').unwrap_or((rest, ""));
                if claim.is_empty() {
                    return Err(SourceError::Empty(uri.to_owned()));
                }
                Ok(SourceUri::Claim { claim: claim.to_owned(), path: path.trim_matches('/').to_owned() })
            }
            "oci" => Ok(SourceUri::Oci(rest.to_owned())),
            "hf" => Ok(SourceUri::HuggingFace(rest.to_owned())),
            "s3" => Ok(SourceUri::S3(rest.to_owned())),
            _ => Err(SourceError::Scheme(uri.to_owned())),
        }
    }

    /// The scheme, as written before `://`.
    pub fn scheme(&self) -> &'static str {
        match self {
            SourceUri::File(_) => "file",
            SourceUri::Claim { .. } => "pvc",
            SourceUri::Oci(_) => "oci",
            SourceUri::HuggingFace(_) => "hf",
            SourceUri::S3(_) => "s3",
        }
    }

    /// The folder of a `file://` source; a relative one is looked up from `base`, the folder of the cluster
    /// file. Absent for other sources.
    pub fn local_path(&self, base: &Path) -> Option<PathBuf> {
        match self {
            SourceUri::File(path) => Some(base.join(path)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_file_is_looked_up_from_the_folder_of_the_cluster_file() {
        let relative = SourceUri::parse("file://../models/tiny").unwrap();
        assert_eq!(relative.local_path(Path::new("/a/clusters")), Some("/a/clusters/../models/tiny".into()));
        let absolute = SourceUri::parse("file:///data/v41").unwrap();
        assert_eq!(absolute.local_path(Path::new("/a/clusters")), Some("/data/v41".into()));
        assert_eq!(SourceUri::parse("oci://r/m:1").unwrap().local_path(Path::new("/a")), None);
    }

    #[test]
    fn a_claim_is_split_into_name_and_path() {
        let uri = SourceUri::parse("pvc://weights/v41/1017").unwrap();
        assert_eq!(uri, SourceUri::Claim { claim: "weights".into(), path: "v41/1017".into() });
        assert_eq!(uri.scheme(), "pvc");
        assert!(matches!(SourceUri::parse("pvc:///v41"), Err(SourceError::Empty(_))));
    }

    #[test]
    fn unknown_schemes_and_empty_names_are_refused() {
        assert!(matches!(SourceUri::parse("/data/v41"), Err(SourceError::Scheme(_))));
        assert!(matches!(SourceUri::parse("http://x/y"), Err(SourceError::Scheme(_))));
        assert!(matches!(SourceUri::parse("hf://"), Err(SourceError::Empty(_))));
    }
}
