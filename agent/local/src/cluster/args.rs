//! Flags of the commands about a cluster: `up`, `status`, `plan`, `validate`, `apply`, `experts`, `script`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Where running clusters of this machine are found.
#[derive(Clone, Debug, Args)]
pub struct StateArgs {
    /// Folder of the state of all clusters of this machine [default: $XDG_STATE_HOME/deepinfer, else
    /// ~/.local/state/deepinfer]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
}

impl StateArgs {
    /// The folder; `None` if neither the flag nor the environment names one.
    pub fn root(&self) -> Option<PathBuf> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let from_home = |home: OsString| PathBuf::from(home).join(".local/state");
        let state =
            || variable("XDG_STATE_HOME").map(PathBuf::from).or_else(|| variable("HOME").map(from_home));
        self.state_dir.clone().or_else(|| state().map(|folder| folder.join("deepinfer")))
    }
}

/// How logs look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object a line
    Json,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// What failed
    Error,
    /// What deserves a look
    Warn,
    /// A line for each finished request, and what the planner did
    Info,
    /// What led to it
    Debug,
}

impl LogLevel {
    /// As filters of logs name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }
}

/// Flags of `up`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    deepinfer up -f examples/clusters/quickstart.yaml\n\n\
    Plans the cluster with the planner of the Kubernetes operator and runs its gateway, prefill workers and decode\n\
    supernodes in this process. Ctrl-C lets running answers finish; a second one stops at once.\n\
    Beside it: `deepinfer status`, `deepinfer apply -f FILE`, `deepinfer experts --watch`.")]
pub struct UpArgs {
    /// The cluster's YAML file
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Address of the API; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,
    /// Ranks of each decode supernode, whatever the file says
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    pub ranks: Option<u32>,
    /// File or folder of API keys, a line `tenant: key` for each [default: everybody who reaches the port may use it]
    #[arg(long, value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
    /// PEM file of the TLS certificate
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file of its key
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// How logs look on standard error
    #[arg(long = "log", value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log: LogFormat,
    /// How much is logged [default: info; warn where progress is drawn in a terminal]
    #[arg(long, value_name = "LEVEL", value_enum)]
    pub log_level: Option<LogLevel>,
    /// State folder
    #[command(flatten)]
    pub state: StateArgs,
}

/// What a table or object is printed as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StatusOutput {
    /// The table with more columns, pods and engines
    Wide,
    /// Everything, as YAML
    Yaml,
    /// Everything, as JSON
    Json,
}

/// Flags of `status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// The cluster [default: the one that runs on this machine]
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Another form of output
    #[arg(short, long, value_name = "FORM", value_enum)]
    pub output: Option<StatusOutput>,
    /// Print again each second until interrupted
    #[arg(short, long)]
    pub watch: bool,
    /// State folder
    #[command(flatten)]
    pub state: StateArgs,
}

/// What a plan is printed as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlanOutput {
    /// The objects that would exist, as YAML documents
    Yaml,
}

/// Flags of `plan`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    deepinfer plan -f examples/clusters/quickstart.yaml --explain\n\n\
    Shows what `deepinfer up` would make of the file: nothing is started. Beside a running cluster of the same name it\n\
    shows what `deepinfer apply` would change.")]
pub struct PlanArgs {
    /// The cluster's YAML file; `-` reads standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Each resolved value, and where it came from
    #[arg(long)]
    pub explain: bool,
    /// Ranks of each decode supernode, whatever the file says
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    pub ranks: Option<u32>,
    /// Another form of output
    #[arg(short, long, value_name = "FORM", value_enum)]
    pub output: Option<PlanOutput>,
    /// State folder
    #[command(flatten)]
    pub state: StateArgs,
}

/// Flags of `validate`.
#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// A cluster's YAML file; may be repeated; `-` reads standard input
    #[arg(short, long = "file", value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
}

/// Flags of `apply`.
#[derive(Debug, Args)]
pub struct ApplyArgs {
    /// The cluster's YAML file; `-` reads standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Wait until the cluster serves as the file says
    #[arg(long)]
    pub wait: bool,
    /// Seconds that --wait waits at most
    #[arg(long, value_name = "S", default_value_t = 1800)]
    pub timeout: u64,
    /// State folder
    #[command(flatten)]
    pub state: StateArgs,
}

/// Whose tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExpertsRole {
    /// Of answers
    Decode,
    /// Of prompts
    Prefill,
}

/// Flags of `experts`.
#[derive(Debug, Args)]
#[command(
    after_help = "Each cell of the map is a share of the layer's tokens: the darkest shade is the hottest expert of the layer.\n\
    balancedness is the mean over steps and layers of mean load / highest load of the ranks: 1 is even."
)]
pub struct ExpertsArgs {
    /// The cluster [default: the one that runs on this machine]
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Print again each second until interrupted
    #[arg(short, long)]
    pub watch: bool,
    /// Only one role [default: both]
    #[arg(long, value_enum)]
    pub role: Option<ExpertsRole>,
    /// Only these layers, for example 0-3,7 [default: all]
    #[arg(long, value_name = "LIST", value_parser = parse_layers)]
    pub layers: Option<Layers>,
    /// The last window of 100 steps instead of everything since the start
    #[arg(long)]
    pub window: bool,
    /// One JSON array of reports instead of the map
    #[arg(long)]
    pub json: bool,
    /// State folder
    #[command(flatten)]
    pub state: StateArgs,
}

/// A choice of layers, sorted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layers(pub Vec<u32>);

/// Flags of `script`.
#[derive(Debug, Args)]
#[command(
    after_help = "A story for the planner, a command a line: cluster NAME|PATH, target local | local ranks N | kubernetes,\n\
    set PATH JSON, unset PATH, delete, model ready, plan, run, start|serve|drained|silent|lose|end [POD], busy POD N,\n\
    fail POD REASON, advance SECONDS, show, status, fleet, explain. See e2e/scripts for examples."
)]
pub struct ScriptArgs {
    /// The script
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// Layers that a list may name at most: more than any model has.
const MAX_LAYERS: u32 = 1024;

fn parse_layers(text: &str) -> Result<Layers, String> {
    let wrong = |part: &str| format!("{part:?} is not a layer or a range such as 0-3, below {MAX_LAYERS}");
    let mut layers = Vec::new();
    for part in text.split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|layer| *layer < MAX_LAYERS);
        match (number(from), number(to)) {
            (Some(from), Some(to)) if from <= to => layers.extend(from..=to),
            _ => return Err(wrong(part)),
        }
    }
    layers.sort_unstable();
    layers.dedup();
    Ok(Layers(layers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_layers_are_read_and_wrong_ones_named() {
        assert_eq!(parse_layers("7,0-2,1"), Ok(Layers(vec![0, 1, 2, 7])));
        for bad in ["", "3-1", "x", "1,,2", "0-99999"] {
            assert!(parse_layers(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_flag_names_the_state_folder_before_the_environment() {
        let args = StateArgs { state_dir: Some("/tmp/here".into()) };
        assert_eq!(args.root(), Some("/tmp/here".into()));
    }
}
