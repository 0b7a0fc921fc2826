//! The programs of a control plane, built from pinned Go modules once and kept in a cache folder; and our own.
//!
//! A module's folder in the cache is named by a digest of its sources and of the Go release, so an edit builds anew and
//! never disturbs a run that uses the old one.

mod build;
mod ours;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use sha2::{Digest, Sha256};

pub(crate) use ours::plugin_folder;
pub use ours::workspace_binary;

/// What a test or a person needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// etcd, API server, controller manager, scheduler and kubectl in one binary.
    Kubernetes,
    /// Pretend nodes.
    Kwok,
    /// The chart's client.
    Helm,
}

/// Why a program is not there.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing in the cache and nothing to build it with.
    #[error(
        "no Go toolchain: `go version` does not run, and {0} is not in the cache; install Go 1.26 or later, or set \
         KUBECONFIG_FOR_TESTS to the kubeconfig of a cluster that may be used"
    )]
    NoGo(&'static str),
    /// The build failed.
    #[error("building {name} failed ({status}); the last lines were:\n{tail}")]
    Build {
        /// What was built.
        name: &'static str,
        /// How the build ended.
        status: String,
        /// What it said at last.
        tail: String,
    },
    /// A file or a program.
    #[error("{0}: {1}")]
    Io(String, #[source] io::Error),
}

impl Need {
    /// Everything, in the order in which a test run wants it.
    pub const ALL: [Need; 3] = [Need::Kubernetes, Need::Kwok, Need::Helm];

    /// Its folder in `go/`, and the name of its binary.
    pub fn name(self) -> &'static str {
        match self {
            Need::Kubernetes => "kubernetes",
            Need::Kwok => "kwok",
            Need::Helm => "helm",
        }
    }

    /// The package that is built: our own `main`, or the tool that the module names.
    fn package(self) -> &'static str {
        match self {
            Need::Kubernetes => ".",
            Need::Kwok => "sigs.k8s.io/kwok/cmd/kwok",
            Need::Helm => "helm.sh/helm/v3/cmd/helm",
        }
    }

    /// What a first build costs, to be said before it begins.
    fn cost(self) -> &'static str {
        match self {
            Need::Kubernetes => "about 8 minutes on two idle cores and 1 GB of modules",
            Need::Kwok | Need::Helm => "about 3 minutes on two idle cores",
        }
    }

    /// Values that a release build of the program puts into itself.
    fn linker_flags(self) -> &'static str {
        match self {
            Need::Kubernetes => {
                "-s -w -X k8s.io/component-base/version.gitVersion=v1.36.3 \
                 -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36 \
                 -X k8s.io/client-go/pkg/version.gitVersion=v1.36.3"
            }
            Need::Kwok => "-s -w",
            Need::Helm => "-s -w -X helm.sh/helm/v3/internal/version.version=v3.22.0",
        }
    }

    fn sources(self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("go").join(self.name())
    }
}

/// The program, built if it is missing. Blocks for minutes then, and says on stderr what it does.
///
/// # Errors
/// If it has to be built and there is no Go toolchain, or the build fails.
pub fn ensure(need: Need) -> Result<PathBuf, Error> {
    let cache = crate::args::cache_folder();
    let sources = digest(need)?;
    let Some(go) = go_version() else {
        return cached(&cache, need, &sources).ok_or(Error::NoGo(need.name()));
    };
    let folder = cache.join(format!("{}-{sources}-{}", need.name(), short(&Sha256::digest(go.as_bytes()))));
    let binary = folder.join(need.name());
    if !binary.is_file() {
        build::build(need, &cache, &folder)?;
    }
    Ok(binary)
}

/// A folder whose `kubectl` is the one of the control plane, for PATH.
///
/// # Errors
/// As [`ensure`].
pub fn kubectl_folder() -> Result<PathBuf, Error> {
    let binary = ensure(Need::Kubernetes)?;
    Ok(binary.parent().expect("a binary lies in a folder").to_path_buf())
}

/// What an earlier run built from the same sources with whatever Go.
fn cached(cache: &Path, need: Need, sources: &str) -> Option<PathBuf> {
    let prefix = format!("{}-{sources}-", need.name());
    let entries = fs::read_dir(cache).ok()?.flatten();
    let mut found = entries.filter(|e| e.file_name().to_string_lossy().starts_with(&prefix));
    found.find_map(|e| Some(e.path().join(need.name())).filter(|p| p.is_file()))
}

/// A digest of everything that the binary is built from and of how.
fn digest(need: Need) -> Result<String, Error> {
    let mut sum = Sha256::new();
    for file in ["go.mod", "go.sum", "main.go"] {
        let path = need.sources().join(file);
        match fs::read(&path) {
            Ok(bytes) => sum.update([file.as_bytes(), b"\n", &bytes].concat()),
            // Only one of the modules has a main of its own.
            Err(error) if error.kind() == io::ErrorKind::NotFound && file == "main.go" => {}
            Err(error) => return Err(Error::Io(path.display().to_string(), error)),
        }
    }
    sum.update(need.linker_flags());
    Ok(short(&sum.finalize()))
}

fn short(digest: &[u8]) -> String {
    digest.iter().take(6).map(|b| format!("{b:02x}")).collect()
}

fn go_version() -> Option<String> {
    let output = Command::new("go").arg("version").output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
