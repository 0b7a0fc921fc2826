//! Flags of the benchmark.

use std::time::Duration;

use clap::Parser;

/// Measures of the operator with pretend nodes.
#[derive(Clone, Debug, Parser)]
pub struct Args {
    /// Only these: supernode, curve, failover
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    only: Vec<String>,
    /// Points of the curve: clusters
    #[arg(long, value_delimiter = ',', value_name = "N", default_value = "1,10,50,200")]
    pub clusters: Vec<usize>,
    /// Supernodes of each cluster on the curve
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub supernodes: usize,
    /// Nodes of each of them, with four accelerators each, of racks of 18
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub nodes: usize,
    /// Pods that have room on a node of the curve: with one, there are more nodes than the 5,000 that Kubernetes is made
    /// for before there are 30,000 pods
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub pods_per_node: u32,
    /// Repetitions where a median is taken
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub repeat: usize,
    /// A point of the curve may take this long, then it says how far it came
    #[arg(long, value_name = "S", default_value_t = 300)]
    pub limit_seconds: u64,
    /// How long the operator is watched doing nothing
    #[arg(long, value_name = "S", default_value_t = 20)]
    pub idle_seconds: u64,
    /// Edits at each point of the curve, one after the other
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub edits: usize,
    /// More flags for the operator, as in --operator-flag=--concurrency=8
    #[arg(long = "operator-flag", value_name = "FLAG", allow_hyphen_values = true)]
    pub operator_flags: Vec<String>,
    /// `cargo bench` gives this flag to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

impl Args {
    /// Whether a part is wanted.
    pub fn only(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| name == part)
    }

    /// The longest that a point may take.
    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.limit_seconds)
    }
}
