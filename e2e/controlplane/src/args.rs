//! The environment and the flags: the only file that reads either.

use std::env;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// A real Kubernetes control plane on this machine, with nodes that run pods as processes.
#[derive(Debug, Parser)]
#[command(name = "controlplane", version, max_term_width = 100)]
#[command(after_help = "Start here:\n  \
    controlplane up                        a cluster with the operator, until Ctrl-C\n  \
    controlplane up --nodes 16 --domains 2 --accelerators 4\n  \
    controlplane kubectl -- get pods -A    kubectl of the same version, on the cluster that is up")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Build what is missing (etcd, Kubernetes, kwok, helm) into the cache folder; needs Go, takes minutes once
    Build(BuildArgs),
    /// Start a control plane with nodes and the operator, and stay until Ctrl-C
    Up(UpArgs),
    /// Run kubectl against the cluster that `up` started last
    Kubectl(KubectlArgs),
}

/// Flags of `build`.
#[derive(Debug, Args)]
pub struct BuildArgs {
    /// Only these, separated by commas: kubernetes, kwok, helm
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub only: Vec<String>,
}

/// Flags of `up`.
#[derive(Clone, Debug, Args)]
pub struct UpArgs {
    /// Nodes that run pods as processes of this machine
    #[arg(long, default_value_t = 2)]
    pub nodes: usize,
    /// Fabric domains that the nodes are spread over, by label
    #[arg(long, default_value_t = 1)]
    pub domains: usize,
    /// Accelerators that each node claims to have (0 for none); nothing uses them, the scheduler counts them
    #[arg(long, default_value_t = 8)]
    pub accelerators: u32,
    /// Pretend nodes (kwok): pods bound to them count as running, no process is started
    #[arg(long, default_value_t = 0)]
    pub pretend: usize,
    /// Start without the operator; its CRDs are installed all the same
    #[arg(long)]
    pub without_operator: bool,
    /// Folder of this machine that nodes have as /models
    #[arg(long, value_name = "DIR", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models"), hide_default_value = true)]
    pub models: PathBuf,
    /// Leave the data and the logs behind, and say where they are
    #[arg(long)]
    pub keep: bool,
    /// Not the cluster that `controlplane kubectl` talks to
    #[arg(long, hide = true)]
    pub unlisted: bool,
    /// More flags for the operator, as in --operator-flag=--log-level=debug
    #[arg(long = "operator-flag", value_name = "FLAG", allow_hyphen_values = true)]
    pub operator_flags: Vec<String>,
}

/// Flags of `kubectl`.
#[derive(Debug, Args)]
pub struct KubectlArgs {
    /// Arguments of kubectl
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    pub args: Vec<String>,
}

/// Where built programs are kept: `$XDG_CACHE_HOME/deepinfer/controlplane`, or below `~/.cache`.
pub fn cache_folder() -> PathBuf {
    let base = env::var_os("XDG_CACHE_HOME").filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = || env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    base.or_else(home).unwrap_or_else(env::temp_dir).join("deepinfer/controlplane")
}

/// Whether a missing tool is a failure (`CI=true`) or a reason to skip.
pub fn in_ci() -> bool {
    env::var("CI").is_ok_and(|v| !v.is_empty() && v != "false" && v != "0")
}

/// An existing cluster that tests shall use (`KUBECONFIG_FOR_TESTS`).
pub fn given_kubeconfig() -> Option<PathBuf> {
    env::var_os("KUBECONFIG_FOR_TESTS").filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// The search path for programs with `first` in front.
pub fn path_with(first: &std::path::Path) -> std::ffi::OsString {
    let rest = env::var_os("PATH").unwrap_or_default();
    let all = std::iter::once(first.to_path_buf()).chain(env::split_paths(&rest));
    env::join_paths(all).unwrap_or(rest)
}
