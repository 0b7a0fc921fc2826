//! The command line of the operator: every number that a test or an administrator may want to change is a flag.
//!
//! Invariant: the environment is read here and nowhere else in this crate.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use deepinfer_crds::names::{SCHEMA_REVISION, rbac};
use deepinfer_planner::KubernetesTarget;
use deepinfer_planner::topology::Profile;
use tokio::net::TcpListener;

use crate::agents::AgentOptions;
use crate::manifests::InstallOptions;
use crate::probe::ProbeOptions;

/// Release of this program, as in `build_info`.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");
/// Where the Deployment of our manifests mounts the master key.
pub const MASTER_KEY_FILE: &str = "/etc/deepinfer/master-key/key";
/// Time for a TCP connection and its TLS handshake to the API server.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Turns DeepInferCluster objects into running pods.
#[derive(Debug, Parser)]
#[command(name = "deepinfer-operator", version, max_term_width = 100, args_override_self = true)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the operator
    Run(Box<RunArgs>),
    /// Print the objects that install the operator, as YAML for `kubectl apply --server-side -f -`
    Manifests(ManifestArgs),
    /// The custom resource definitions of this release
    Crds {
        /// What to do with them
        #[command(subcommand)]
        action: CrdsAction,
    },
}

/// What to do with the CRDs.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum CrdsAction {
    /// Print them as YAML for `kubectl apply --server-side -f -`; before the operator, at every upgrade
    Print,
}

/// Flags of `manifests`.
#[derive(Clone, Debug, Args)]
pub struct ManifestArgs {
    /// Namespace of the operator
    #[arg(long, value_name = "NAME", default_value = rbac::OPERATOR_NAMESPACE)]
    pub namespace: String,
    /// Image of the operator
    #[arg(long, value_name = "IMAGE", default_value_t = image("deepinfer-operator"))]
    pub image: String,
    /// Image of the gateway that clusters get which name none
    #[arg(long, value_name = "IMAGE", default_value_t = image("deepinfer-gateway"))]
    pub gateway_image: String,
    /// Only the account, roles and bindings
    #[arg(long)]
    pub rbac_only: bool,
    /// Watch only this namespace, with a Role in it; may be repeated [default: all namespaces]
    #[arg(long = "watch-namespace", value_name = "NAME")]
    pub watch_namespaces: Vec<String>,
    /// Without the admission policies
    #[arg(long)]
    pub no_policies: bool,
    /// Without the right to read nodes: no placement of our own, no reasons why a supernode waits
    #[arg(long)]
    pub no_nodes: bool,
}

impl ManifestArgs {
    /// As the pure functions take it.
    pub fn options(&self) -> InstallOptions {
        InstallOptions {
            namespace: self.namespace.clone(),
            image: self.image.clone(),
            gateway_image: self.gateway_image.clone(),
            watch_namespaces: self.watch_namespaces.clone(),
            policies: !self.no_policies,
            read_nodes: !self.no_nodes,
        }
    }
}

/// Image of a program of this release.
fn image(program: &str) -> String {
    format!("{program}:{RELEASE}")
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line
    Json,
    /// For people
    Text,
}

/// Flags of `run`.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Kubeconfig file [default: KUBECONFIG, else the account of the pod]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the operator itself: its Lease and its master key
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE", default_value = rbac::OPERATOR_NAMESPACE)]
    pub namespace: String,
    /// Name of this replica in the Lease and in events [default: a random one]
    #[arg(long, value_name = "NAME", env = "POD_NAME", default_value_t = random_identity(), hide_default_value = true)]
    pub identity: String,
    /// Watch only this namespace; may be repeated [default: all]
    #[arg(
        long = "watch-namespace",
        value_name = "NAME",
        env = "DEEPINFER_WATCH_NAMESPACES",
        value_delimiter = ','
    )]
    pub watch_namespaces: Vec<String>,
    /// Address of /metrics; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:8080")]
    pub metrics_listen: SocketAddr,
    /// Address of /livez and /readyz
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:8081")]
    pub health_listen: SocketAddr,
    /// Address of the FleetView for gateways and agents
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:8082")]
    pub fleet_listen: SocketAddr,
    /// Base URL of the FleetView as pods reach it; several with commas; port 0 becomes the port of --fleet-listen
    /// [default: the Service deepinfer-operator of the operator's namespace]
    #[arg(long, value_name = "URL", value_delimiter = ',', value_parser = base_url)]
    pub fleet_url: Vec<String>,
    /// Gateways and agents that may wait for a new FleetView at once; more are told to come back
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = positive)]
    pub fleet_waiters: usize,
    /// Image of the gateway for clusters that name none
    #[arg(long, value_name = "IMAGE", default_value_t = image("deepinfer-gateway"))]
    pub gateway_image: String,
    /// File with the master key, 64 hex digits or 32 bytes; while it is missing the operator makes the Secret and waits
    #[arg(long, value_name = "FILE", default_value = MASTER_KEY_FILE)]
    pub master_key_file: PathBuf,

    /// Name of the Lease
    #[arg(long, value_name = "NAME", default_value = "deepinfer-operator")]
    pub lease_name: String,
    /// A leader that is silent for this long has lost
    #[arg(long = "lease-duration-seconds", value_name = "S", default_value = "15", value_parser = seconds)]
    pub lease_duration: Duration,
    /// A leader that could not renew for this long ends itself
    #[arg(long = "lease-renew-seconds", value_name = "S", default_value = "10", value_parser = seconds)]
    pub lease_renew_deadline: Duration,
    /// Pause between two tries to get or renew
    #[arg(long = "lease-retry-seconds", value_name = "S", default_value = "2", value_parser = seconds)]
    pub lease_retry: Duration,
    /// Every cluster is planned again after this long, whatever happens
    #[arg(long = "resync-seconds", value_name = "S", default_value = "600", value_parser = seconds)]
    pub resync: Duration,
    /// Clusters that are reconciled at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = positive)]
    pub concurrency: usize,
    /// Longest call to the API server
    #[arg(long = "request-timeout-seconds", value_name = "S", default_value = "15", value_parser = seconds)]
    pub request_timeout: Duration,
    /// A connection to the API server that brings nothing for this long is closed
    #[arg(long = "read-idle-seconds", value_name = "S", default_value = "120", value_parser = seconds)]
    pub read_idle: Duration,
    /// A watch without a word for this long is looked into; after three times as long /livez fails
    #[arg(long = "watch-stale-seconds", value_name = "S", default_value = "300", value_parser = seconds)]
    pub watch_stale: Duration,
    /// Pause between two looks at what the API server offers
    #[arg(long = "probe-seconds", value_name = "S", default_value = "600", value_parser = seconds)]
    pub probe_interval: Duration,
    /// Whether nodes may be read; without, no placement of our own and no reasons why a supernode waits
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    pub read_nodes: bool,
    /// Supernodes with a ComputeDomain that may share one NVLink domain; 0 = no limit
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub compute_domains_per_clique: u32,
    /// YAML file of topology profiles by name, merged over the built-in ones
    #[arg(long, value_name = "FILE")]
    pub profiles: Option<PathBuf>,

    /// How agents are asked
    #[command(flatten)]
    pub agents: AgentOptions,

    /// Log level, or a filter as `info,deepinfer_operator=debug`
    #[arg(long, value_name = "LEVEL", env = "DEEPINFER_LOG", default_value = "info")]
    pub log_level: String,
    /// Format of log lines
    #[arg(long, value_enum, default_value_t = LogFormat::Json)]
    pub log_format: LogFormat,

    /// Schema revision of the CRDs that this operator needs: tests play other releases
    #[arg(long, hide = true, default_value_t = SCHEMA_REVISION)]
    pub schema_revision: u32,
    /// A default of the spec as NAME=VALUE: tests play other releases
    #[arg(long = "default", hide = true, value_name = "NAME=VALUE")]
    pub defaults: Vec<String>,
    /// Release that this operator says it is
    #[arg(long, hide = true, default_value = RELEASE)]
    pub release: String,
}

/// What is wrong with the flags, beyond what clap sees.
#[derive(Debug, thiserror::Error)]
pub enum ArgsError {
    /// A file cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The profiles are not what they should be.
    #[error("--profiles {path}: {message}", path = path.display())]
    Profiles {
        /// The file.
        path: PathBuf,
        /// What is wrong where.
        message: String,
    },
    /// A hidden flag of tests.
    #[error("--default {text}: {message}")]
    Default {
        /// As given.
        text: String,
        /// What is wrong.
        message: String,
    },
    /// A port cannot be had.
    #[error("--{flag} {address}: {source}: free the port or give another one")]
    Listen {
        /// The flag.
        flag: &'static str,
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// No API server is configured.
    #[error("no API server: give --kubeconfig, set KUBECONFIG, or run in a pod: {0}")]
    Kubeconfig(String),
    /// The client cannot be made.
    #[error("the client of the API server: {0}")]
    Client(#[from] Box<kube::Error>),
}

/// The three ports, bound.
#[derive(Debug)]
pub struct Listeners {
    /// `/metrics`.
    pub metrics: TcpListener,
    /// `/livez`, `/readyz`.
    pub health: TcpListener,
    /// The FleetView.
    pub fleet: TcpListener,
}

impl RunArgs {
    /// What plans look at.
    ///
    /// # Errors
    /// [`ArgsError`].
    pub fn target(&self) -> Result<KubernetesTarget, ArgsError> {
        let mut target = KubernetesTarget::new(self.gateway_image.clone(), self.fleet_urls());
        target.release.clone_from(&self.release);
        target.compute_domains_per_clique = self.compute_domains_per_clique;
        if let Some(path) = &self.profiles {
            target.profiles.extend(read_profiles(path)?);
        }
        for text in &self.defaults {
            let fail = |message| ArgsError::Default { text: text.clone(), message };
            let (name, value) = text.split_once('=').ok_or_else(|| fail("write NAME=VALUE".to_owned()))?;
            target.defaults.set(name, value).map_err(fail)?;
        }
        Ok(target)
    }

    /// Base URLs of the FleetView, with commas.
    pub fn fleet_urls(&self) -> String {
        if self.fleet_url.is_empty() {
            let port = deepinfer_crds::names::port::FLEET_VIEW;
            return format!("http://{}.{}:{port}", rbac::OPERATOR_SERVICE_ACCOUNT, self.namespace);
        }
        self.fleet_url.join(",")
    }

    /// Binds the ports, says where, and puts the real port into fleet URLs with port 0.
    ///
    /// # Errors
    /// [`ArgsError::Listen`].
    pub async fn listen(&mut self) -> Result<Listeners, ArgsError> {
        let listeners = Listeners {
            metrics: bind("metrics-listen", self.metrics_listen).await?,
            health: bind("health-listen", self.health_listen).await?,
            fleet: bind("fleet-listen", self.fleet_listen).await?,
        };
        let local =
            |listener: &TcpListener| listener.local_addr().map_or_else(|e| e.to_string(), |a| a.to_string());
        if let Ok(address) = listeners.fleet.local_addr() {
            for url in &mut self.fleet_url {
                if let Some(base) = url.strip_suffix(":0") {
                    *url = format!("{base}:{}", address.port());
                }
            }
        }
        tracing::info!(
            metrics = local(&listeners.metrics),
            health = local(&listeners.health),
            fleet = local(&listeners.fleet),
            "listening"
        );
        Ok(listeners)
    }

    /// A client of the API server. Its connections end when they bring nothing for `--read-idle-seconds`, so that a
    /// network that swallows packets is noticed; single calls are bounded by their callers.
    ///
    /// # Errors
    /// [`ArgsError::Kubeconfig`], [`ArgsError::Client`].
    pub async fn client(&self) -> Result<kube::Client, ArgsError> {
        let fail = |message: String| ArgsError::Kubeconfig(message);
        let mut config = match &self.kubeconfig {
            Some(path) => {
                let file = kube::config::Kubeconfig::read_from(path).map_err(|e| fail(e.to_string()))?;
                let options = kube::config::KubeConfigOptions::default();
                kube::Config::from_custom_kubeconfig(file, &options).await.map_err(|e| fail(e.to_string()))?
            }
            None => kube::Config::infer().await.map_err(|e| fail(e.to_string()))?,
        };
        config.connect_timeout = Some(CONNECT_TIME);
        config.read_timeout = Some(self.read_idle);
        config.write_timeout = Some(self.request_timeout);
        // Callers retry by what went wrong, and writes are counted.
        config.default_retry = false;
        kube::Client::try_from(config).map_err(|error| ArgsError::Client(Box::new(error)))
    }

    /// What the probe is started with.
    pub fn probe_options(&self) -> ProbeOptions {
        ProbeOptions {
            namespace: self.watch_namespaces.first().unwrap_or(&self.namespace).clone(),
            account: self.watch_namespaces.is_empty().then(|| rbac::OPERATOR_SERVICE_ACCOUNT.to_owned()),
            interval: self.probe_interval,
            request_timeout: self.request_timeout,
            schema_revision: self.schema_revision,
        }
    }
}

async fn bind(flag: &'static str, address: SocketAddr) -> Result<TcpListener, ArgsError> {
    TcpListener::bind(address).await.map_err(|source| ArgsError::Listen { flag, address, source })
}

/// Profiles of a file. A profile replaces the built-in one of its name whole: half of two profiles would be neither.
fn read_profiles(path: &Path) -> Result<BTreeMap<String, Profile>, ArgsError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ArgsError::Read { path: path.to_path_buf(), source })?;
    let fail = |message: String| ArgsError::Profiles { path: path.to_path_buf(), message };
    serde_yaml::from_str(&text).map_err(|error| fail(error.to_string()))
}

/// A number of seconds, with decimals if need be.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    let duration = Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())?;
    if duration.is_zero() {
        return Err("must be more than 0 seconds".to_owned());
    }
    Ok(duration)
}

/// A number that is not 0.
pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err(format!("{text:?} is not a number")),
    }
}

/// `http://host:port` without a path: paths are appended.
fn base_url(text: &str) -> Result<String, String> {
    let rest =
        text.strip_prefix("http://").ok_or("must begin with http://: the FleetView is plain HTTP, signed")?;
    let rest = rest.trim_end_matches('/');
    if rest.is_empty() || rest.contains('/') {
        return Err("write http://HOST:PORT without a path".to_owned());
    }
    Ok(format!("http://{rest}"))
}

/// A name for a replica that was given none.
fn random_identity() -> String {
    let mut bytes = [0; 5];
    // Without randomness the process id still tells two replicas on one machine apart.
    if getrandom::fill(&mut bytes).is_err() {
        return format!("operator-{}", std::process::id());
    }
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("operator-{hex}")
}

/// Whether a test writes the manifests of the tree anew.
#[cfg(test)]
pub(crate) fn update_manifests() -> bool {
    std::env::var_os("UPDATE_MANIFESTS").is_some()
}

#[cfg(test)]
mod tests;
