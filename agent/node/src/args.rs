//! Flags of the agent: the container arguments of its pod, and `engine.extraArgs` of a cluster's YAML.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use deepinfer_transport::pod::PodArgs;

/// Runs one prefill worker, or the ranks of one node of a decode supernode.
#[derive(Clone, Debug, Parser)]
// A flag of `engine.extraArgs` comes after the operator's own and wins.
#[command(name = "deepinfer-agent", version, max_term_width = 100, args_override_self = true)]
#[command(
    after_help = "Sizes follow from each other: --max-requests sequences of up to --context-limit tokens share \
    --kv-tokens of cache. What is not said is chosen to fit into --memory, and the agent prints what it chose.\n\n\
    SIGTERM takes no new work, lets what runs finish for --termination-grace-seconds and exits with 0; a second \
    signal ends at once. Exit codes: 0 after a clean end, 1 failed (the log's last error says why), 2 wrong flags. \
    A model that is not there, has another digest or cannot be run does not end the process: it stays unready, says \
    why in GET /v1/status and /readyz, and tries again every 10 s.\n\n\
    Example: deepinfer-agent --name=p-0 --role=prefill --checkpoint=/model --key-dir=/keys \
    --fleet-url=http://10.0.0.3:8082 --fleet-path=/v1/fleet/default/chat --ledger=/state/fleet.json"
)]
pub struct AgentArgs {
    /// Name of this agent in the fleet: the name of its pod
    #[arg(long, value_name = "NAME")]
    pub name: String,
    /// What its engines do
    #[arg(long, value_enum)]
    pub role: RoleChoice,
    /// Supernode that this agent belongs to; decode only
    #[arg(long, value_name = "NAME")]
    pub supernode: Option<String>,
    /// Index of this pod in its supernode; its ranks are numbered from --index times --ranks
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1022))]
    pub index: u16,
    /// Pods of its supernode: all must be in the fleet view and answer before this one is ready
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1023))]
    pub supernode_nodes: u16,
    /// Pods that one prefill worker has; more than one is not built yet
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1023))]
    pub nodes_per_worker: u16,
    /// Ranks that this agent runs; the experts are spread over them. Prefill runs one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub ranks: u16,
    /// Checkpoint folder: config.json, tokenizer.json, safetensors shards
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Digest that the checkpoint must have, as an agent that serves it tells in GET /v1/status (modelDigest): 64 hex
    /// digits, sha256: may stand before
    #[arg(long, value_name = "HEX", value_parser = parse_digest)]
    pub model_digest: Option<[u8; 32]>,
    /// Where arithmetic runs
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub backend: BackendChoice,
    /// Threads of the cpu backend, shared by the ranks [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Highest instruction set of the cpu backend; results are bitwise the same with each
    #[arg(long, value_enum, default_value_t = SimdChoice::Auto)]
    pub simd: SimdChoice,
    /// Rounding of activations and caches
    #[arg(long, value_enum, default_value_t = NumericsChoice::Auto)]
    pub numerics: NumericsChoice,
    /// Token rows of one step at most [default: 512 for prefill, --max-requests for decode]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub max_rows: Option<u32>,
    /// Sequences at once, for each rank [default: 8 for prefill, 64 for decode]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_requests: Option<u32>,
    /// Tokens of KV cache for each rank [default: --max-requests times --context-limit, as far as --memory allows]
    #[arg(long, value_name = "N", conflicts_with = "kv_blocks")]
    pub kv_tokens: Option<u64>,
    /// The same in blocks of 128 tokens
    #[arg(long, value_name = "N")]
    pub kv_blocks: Option<u32>,
    /// Longest sequence in tokens, prompt and answer [default: the model's, as far as --kv-tokens allows]
    #[arg(long, value_name = "N")]
    pub context_limit: Option<u32>,
    /// Time budget of a prefill step: long prompts run in chunks of about this, so that short ones pass between
    #[arg(long, value_name = "MS", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub chunk_budget_ms: u32,
    /// Smallest chunk in tokens, a multiple of 128
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = parse_chunk)]
    pub chunk_min_tokens: u32,
    /// Expert replicas that each rank holds beyond its share; a supernode of one rank has none
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=64))]
    pub extra_slots_per_rank: u16,
    /// Memory that this agent may take beside the weights, for example 6GiB [default: half of what is available]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub memory: Option<u64>,
    /// Host memory for window checkpoints, which make prefix hits cheap; 0 turns them off [default: 1/16 of --memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub checkpoint_memory: Option<u64>,
    /// Host memory for sequences that wait between prefill and decode [default: 1/4 of --memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub parked_memory: Option<u64>,
    /// A step that takes longer than this, and than 20 times what was predicted, counts as hung
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub hung_step_seconds: u32,
    /// What a gateway owns here is freed when it was not heard of for this long
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub lease_seconds: u32,
    /// Interval of heartbeats on data ports
    #[arg(long, value_name = "MS", default_value_t = 250, value_parser = clap::value_parser!(u32).range(10..=60_000))]
    pub heartbeat_ms: u32,
    /// Missed heartbeats after which a peer is suspect: no new work, its requests resume elsewhere
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=1000))]
    pub missed_heartbeats: u32,
    /// Address of the data port [default: --bind-address and 29500]
    #[arg(long, value_name = "ADDR")]
    pub data_listen: Option<SocketAddr>,
    /// Address of the control port [default: --bind-address and 9810]
    #[arg(long, value_name = "ADDR")]
    pub control_listen: Option<SocketAddr>,
    /// Address of a port for metrics only [default: --bind-address and 9811]
    #[arg(long, value_name = "ADDR")]
    pub metrics_listen: Option<SocketAddr>,
    /// File that asks for a drain while it holds {"deadline": UNIX_SECONDS, "reason": TEXT}: the pod's annotation
    /// deepinfer.io/drain, mounted. Empty or missing: no drain
    #[arg(long, value_name = "FILE")]
    pub drain_file: Option<PathBuf>,
    /// Faults on request at the control port: for tests only
    #[arg(long, hide = true)]
    pub fault_injection: bool,
    /// What every process of a pod has
    #[command(flatten)]
    pub pod: PodArgs,
}

/// What an agent's engines do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoleChoice {
    /// Runs prompts
    Prefill,
    /// Generates tokens
    Decode,
}

/// Where arithmetic runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// The best that this machine has: today always `cpu`
    Auto,
    /// Blocked, threaded SIMD kernels on weights in their stored format
    Cpu,
    /// Not built yet
    Cuda,
}

/// Instruction sets, to rule one out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SimdChoice {
    /// The best that this machine has
    Auto,
    /// Plain Rust
    Portable,
    /// AVX2 with FMA and F16C
    Avx2,
    /// AVX-512
    Avx512,
}

/// What is rounded on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NumericsChoice {
    /// `quantized` if the checkpoint has a quantization_config, else `f32`
    Auto,
    /// float32 activations and caches
    F32,
    /// FP8 activations before FP8 and FP4 weights, FP8 and FP4 caches: what the model was trained with
    Quantized,
}

impl AgentArgs {
    /// Reads container arguments, without a program name before them.
    ///
    /// # Errors
    /// What clap says, which names the flag and the fix.
    pub fn from_flags<S: AsRef<str>>(flags: &[S]) -> Result<Self, clap::Error> {
        let name = std::iter::once("deepinfer-agent");
        Self::try_parse_from(name.chain(flags.iter().map(AsRef::as_ref)))
    }

    /// Where the data port listens.
    pub fn data_address(&self) -> SocketAddr {
        self.pod.listen(self.data_listen, 29500)
    }

    /// Where the control port listens.
    pub fn control_address(&self) -> SocketAddr {
        self.pod.listen(self.control_listen, 9810)
    }

    /// Where the port for metrics listens.
    pub fn metrics_address(&self) -> SocketAddr {
        self.pod.listen(self.metrics_listen, 9811)
    }

    /// Number of its first rank in the supernode.
    pub fn first_rank(&self) -> u16 {
        // Fits: both are bounded above.
        self.index * self.ranks
    }
}

fn parse_chunk(text: &str) -> Result<u32, String> {
    let tokens: u32 = text.parse().map_err(|_| "not a number of tokens".to_owned())?;
    if tokens == 0 || !tokens.is_multiple_of(128) {
        return Err("expected a multiple of 128, at least 128".to_owned());
    }
    Ok(tokens)
}

/// Reads a digest of 32 bytes.
fn parse_digest(text: &str) -> Result<[u8; 32], String> {
    let hex = text.strip_prefix("sha256:").unwrap_or(text);
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let mut digest = [0; 32];
    let expected = || "expected 64 hex digits, sha256: may stand before".to_owned();
    if hex.len() != 64 {
        return Err(expected());
    }
    for (byte, pair) in digest.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
        let (high, low) = digit(pair[0]).zip(digit(pair[1])).ok_or_else(expected)?;
        *byte = (high << 4 | low) as u8;
    }
    Ok(digest)
}

/// Reads a size: bytes, or a number with KiB, MiB, GiB, TiB or K, M, G, T (powers of 1000).
fn parse_bytes(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "K" | "KB" => 1000,
        "M" | "MB" => 1000_u64.pow(2),
        "G" | "GB" => 1000_u64.pow(3),
        "T" | "TB" => 1000_u64.pow(4),
        "Ki" | "KiB" => 1 << 10,
        "Mi" | "MiB" => 1 << 20,
        "Gi" | "GiB" => 1 << 30,
        "Ti" | "TiB" => 1 << 40,
        other => return Err(format!("unknown unit {other:?}, expected for example 512MiB or 6GiB")),
    };
    let number: u64 = digits.parse().map_err(|_| "expected a size such as 512MiB or 6GiB".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "too large".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_flags_are_consistent() {
        AgentArgs::command().debug_assert();
    }

    #[test]
    fn sizes_are_read_with_binary_and_decimal_units() {
        let good = [("0", 0), ("17", 17), ("2KiB", 2048), ("3Mi", 3 << 20), ("1G", 1_000_000_000)];
        for (text, bytes) in good {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "1.5GiB", "-1", "1Zi", "99999999999TiB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_digest_is_read_with_and_without_its_prefix() {
        let digest = Ok([0xab; 32]);
        assert_eq!(parse_digest(&"ab".repeat(32)), digest);
        assert_eq!(parse_digest(&format!("sha256:{}", "AB".repeat(32))), digest);
        for wrong in ["", "sha256:", "ab", &"xy".repeat(32), &"é".repeat(32)] {
            assert!(parse_digest(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ports_have_their_default_numbers_at_the_common_address() {
        let flags = ["--name=a", "--role=decode", "--checkpoint=x", "--bind-address=10.1.2.3", "--index=3"];
        let args = AgentArgs::from_flags(&[&flags[..], &["--ranks=8", "--control-listen=[::1]:5"]].concat());
        let args = args.expect("good flags");
        assert_eq!(args.data_address().to_string(), "10.1.2.3:29500");
        assert_eq!(args.control_address().to_string(), "[::1]:5");
        assert_eq!(args.metrics_address().to_string(), "10.1.2.3:9811");
        assert_eq!(args.first_rank(), 24);
    }

    #[test]
    fn a_wrong_flag_is_named() {
        let base = ["--name=a", "--role=decode", "--checkpoint=x"];
        let error = |extra: &str| {
            let flags: Vec<&str> = base.iter().copied().chain([extra]).collect();
            AgentArgs::from_flags(&flags).expect_err(extra).to_string()
        };
        assert!(error("--numerics=f16").contains("--numerics"));
        assert!(error("--chunk-min-tokens=100").contains("multiple of 128"));
        assert!(error("--ranks=0").contains("--ranks"));
        assert!(error("--nonsense").contains("--nonsense"));
        assert!(AgentArgs::from_flags(&base).is_ok());
        let twice = [&base[..], &["--max-rows=5", "--max-rows=6"]].concat();
        assert_eq!(AgentArgs::from_flags(&twice).expect("the last one wins").max_rows, Some(6));
    }
}
