//! Flags that the agent and the gateway share. In one process with others (local mode) they are read and have no effect.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

/// See the module.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Pod")]
pub struct PodArgs {
    /// Folder with the cluster's keys: a file for each generation, named by its number, 64 hex digits inside. Read
    /// again when it changes
    #[arg(long, value_name = "DIR")]
    pub key_dir: Option<PathBuf>,
    /// Base URLs of the operator's replicas, comma-separated, such as http://10.0.0.3:8082
    #[arg(long, value_name = "URLS", value_delimiter = ',')]
    pub fleet_url: Vec<String>,
    /// Where they serve this cluster's fleet view: /v1/fleet/NAMESPACE/CLUSTER
    #[arg(long, value_name = "PATH")]
    pub fleet_path: Option<String>,
    /// File that keeps the last fleet view, for a restart while the operator is away
    #[arg(long, value_name = "FILE")]
    pub ledger: Option<PathBuf>,
    /// Address that the ports listen on by default
    #[arg(long, value_name = "IP", env = "DEEPINFER_BIND_ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    pub bind_address: IpAddr,
    /// After SIGTERM, what runs may take this long to finish; a second signal ends at once
    #[arg(long, value_name = "S", default_value_t = 30)]
    pub termination_grace_seconds: u32,
    /// How the log on stderr is written
    #[arg(long, value_enum, default_value_t = LogFormat::Json)]
    pub log_format: LogFormat,
    /// What is logged: a level, or more exactly such as info,deepinfer_transport=debug
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
}

/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object on each line
    Json,
    /// For people
    Text,
}

impl PodArgs {
    /// The address of a port: as its flag says, else the common address with the port's default number. A flag that
    /// says "any address" means the common one.
    pub fn listen(&self, given: Option<SocketAddr>, port: u16) -> SocketAddr {
        match given {
            Some(given) if !given.ip().is_unspecified() => given,
            Some(any) if self.bind_address.is_unspecified() => any,
            Some(any) => SocketAddr::new(self.bind_address, any.port()),
            None => SocketAddr::new(self.bind_address, port),
        }
    }

    /// Time from SIGTERM to the end.
    pub fn termination_grace(&self) -> Duration {
        Duration::from_secs(u64::from(self.termination_grace_seconds))
    }
}
