//! Flags.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use deepinfer_crds::names::rbac;

/// What `--help` ends with.
const AFTER: &str = "Examples:\n  \
    kubectl deepinfer status                     what runs in the namespace, and what is missing\n  \
    kubectl deepinfer why my-cluster             why it is not ready, and what would help\n  \
    kubectl deepinfer validate -f cluster.yaml   all errors of a file with their lines, without a cluster\n\n\
    Exit codes: 0 all is well, 1 there is a problem, 2 wrong usage.";

/// Looks at DeepInfer clusters: what they do, what they wait for, and why.
#[derive(Debug, Parser)]
#[command(name = "kubectl-deepinfer", bin_name = "kubectl deepinfer", version, after_help = AFTER)]
pub struct Args {
    /// Which API server, as whom, in which namespace.
    #[command(flatten)]
    pub connection: Connection,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Which API server, as whom, in which namespace.
#[derive(Debug, Default, ClapArgs)]
pub struct Connection {
    /// Namespace [default: that of the context]
    #[arg(short, long, global = true, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Context of the kubeconfig [default: its current one]
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Kubeconfig file [default: as kubectl, from KUBECONFIG or ~/.kube/config]
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// User to act as
    #[arg(long = "as", global = true, value_name = "USER")]
    pub as_user: Option<String>,
    /// Group to act as; may be repeated; needs --as
    #[arg(long = "as-group", global = true, value_name = "GROUP")]
    pub as_group: Vec<String>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Pools, supernodes, conditions, what waits, and the address
    Status(StatusArgs),
    /// Why a cluster or a supernode is not ready, and what would help
    Why(WhyArgs),
    /// Check cluster files without a cluster: schema, rules, and what this release does not do
    Validate(ValidateArgs),
    /// Fabric domains: their nodes, free accelerators and supernodes
    Topology(TopologyArgs),
    /// Where experts are and how evenly they are used
    Experts {
        /// What to show.
        #[command(subcommand)]
        command: ExpertsCommand,
    },
    /// Find a request in the logs of the gateways and engines
    Trace(TraceArgs),
    /// Pack everything that a bug report needs, without secrets
    SupportBundle(BundleArgs),
    /// Let a deleted cluster go that hangs because its operator is gone
    Release(ReleaseArgs),
    /// The definitions of our kinds: print them, or compare with the installed ones
    Crds {
        /// What to do with them.
        #[command(subcommand)]
        command: CrdsCommand,
    },
}

/// Verbs about experts.
#[derive(Debug, Subcommand)]
pub enum ExpertsCommand {
    /// The plan of each supernode, its balance and its hottest experts
    Show(ExpertsArgs),
}

/// Verbs about definitions.
#[derive(Debug, Subcommand)]
pub enum CrdsCommand {
    /// Print the definitions and admission policies of this release as YAML
    #[command(
        after_help = "Install them with:\n  kubectl deepinfer crds print | kubectl apply --server-side -f -"
    )]
    Print(PrintArgs),
    /// Compare the installed definitions with this release
    Check,
}

/// What is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Everything, as JSON
    Json,
}

/// Flags of `status`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Exit code 1 if a shown cluster does not serve, is degraded or needs a human.")]
pub struct StatusArgs {
    /// The cluster [default: the only one of the namespace; of several, a line each]
    #[arg(value_name = "CLUSTER")]
    pub cluster: Option<String>,
    /// Another form of output
    #[arg(short, long, value_enum, value_name = "FORM")]
    pub output: Option<Output>,
    /// Print again whenever something changes, until interrupted
    #[arg(short, long)]
    pub watch: bool,
}

/// Flags of `why`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Exit code 1 if something is in the way.")]
pub struct WhyArgs {
    /// A supernode or a cluster [default: the clusters of the namespace]
    #[arg(value_name = "SUPERNODE|CLUSTER")]
    pub name: Option<String>,
    /// Another form of output
    #[arg(short, long, value_enum, value_name = "FORM")]
    pub output: Option<Output>,
}

/// Flags of `validate`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Exit code 1 if a file has an error, or asks for what this release does not do.")]
pub struct ValidateArgs {
    /// A cluster's YAML file; may be repeated; `-` reads standard input
    #[arg(short, long = "file", value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Another form of output
    #[arg(short, long, value_enum, value_name = "FORM")]
    pub output: Option<Output>,
}

/// Flags of `topology`.
#[derive(Debug, ClapArgs)]
pub struct TopologyArgs {
    /// Take the profile of this cluster
    #[arg(value_name = "CLUSTER", conflicts_with = "profile")]
    pub cluster: Option<String>,
    /// Topology profile: nvl72, hgx, superpod, none [default: the first whose labels the nodes have]
    #[arg(long, value_name = "NAME")]
    pub profile: Option<String>,
    /// Another form of output
    #[arg(short, long, value_enum, value_name = "FORM")]
    pub output: Option<Output>,
}

/// Flags of `experts show`.
#[derive(Debug, ClapArgs)]
pub struct ExpertsArgs {
    /// The supernode [default: all of the namespace]
    #[arg(value_name = "SUPERNODE")]
    pub supernode: Option<String>,
    /// Another form of output
    #[arg(short, long, value_enum, value_name = "FORM")]
    pub output: Option<Output>,
}

/// Flags of `trace`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "The id is the response header x-request-id, or the id of the answer (chatcmpl-...).\n\
    Exit code 1 if no log line names it."
)]
pub struct TraceArgs {
    /// Id of the request
    #[arg(value_name = "REQUEST-ID")]
    pub id: String,
    /// Only the pods of this cluster [default: all of the namespace]
    #[arg(long, value_name = "CLUSTER")]
    pub cluster: Option<String>,
    /// How far back logs are read, in hours
    #[arg(long, value_name = "HOURS", default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=720))]
    pub hours: u32,
}

/// Flags of `support-bundle`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Secrets are never read; values of environment variables and credentials in flags are replaced by\n\
    REDACTED. Look into the archive before you send it: logs are included as they are, but for credentials."
)]
pub struct BundleArgs {
    /// The cluster [default: the only one of the namespace]
    #[arg(value_name = "CLUSTER")]
    pub cluster: Option<String>,
    /// Archive to write; `-` is standard output, as for `| gzip` [default: deepinfer-CLUSTER-TIME.tar]
    #[arg(short, long, value_name = "FILE.tar")]
    pub output: Option<PathBuf>,
    /// Lines from the end of each log
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub lines: u32,
    /// Namespace of the operator
    #[arg(long, value_name = "NAME", default_value = rbac::OPERATOR_NAMESPACE)]
    pub operator_namespace: String,
}

/// Flags of `release`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Takes the operator's finalizers off a cluster that is being deleted, and off its supernodes, so that\n\
    Kubernetes removes them without draining: running answers are cut. Only for clusters whose operator is gone.\n\
    While admission policies are installed it needs the group deepinfer:admins: --as ME --as-group deepinfer:admins"
)]
pub struct ReleaseArgs {
    /// The cluster
    #[arg(value_name = "CLUSTER")]
    pub name: String,
    /// Do it; without this flag it only says what it would do
    #[arg(long)]
    pub yes: bool,
    /// Namespace of the operator
    #[arg(long, value_name = "NAME", default_value = rbac::OPERATOR_NAMESPACE)]
    pub operator_namespace: String,
}

/// Flags of `crds print`.
#[derive(Debug, ClapArgs)]
pub struct PrintArgs {
    /// User that the operator runs as, for the admission policies
    #[arg(long, value_name = "USER", default_value = rbac::OPERATOR_USER)]
    pub operator_user: String,
    /// Leave the admission policies out
    #[arg(long)]
    pub without_policies: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_flags_are_sound_and_work_behind_the_verb() {
        Args::command().debug_assert();
        let args = Args::parse_from(["kubectl-deepinfer", "why", "sn", "-n", "serving", "--as", "me"]);
        assert_eq!(args.connection.namespace.as_deref(), Some("serving"));
        assert_eq!(args.connection.as_user.as_deref(), Some("me"));
    }

    #[test]
    fn a_missing_verb_is_wrong_usage() {
        let error = Args::try_parse_from(["kubectl-deepinfer", "fly"]).expect_err("no such verb");
        assert_eq!(error.exit_code(), 2);
    }
}
