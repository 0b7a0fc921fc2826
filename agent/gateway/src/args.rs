//! Flags of the gateway: the container arguments of its pod.
//!
//! Invariant: flags and the model's own files are all that [`GatewayArgs::model`] reads; what is wrong is named with its file.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Parser, ValueEnum};
use deepinfer_protocol::Span;
use deepinfer_transport::ClusterKey;
use deepinfer_transport::pod::PodArgs;
use serde::Deserialize;

use crate::openai::ModelInfo;
use crate::server::GatewayOptions;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Largest config.json that is read, in bytes: real ones have a few thousand.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Serves the OpenAI API in front of a fleet of agents.
#[derive(Clone, Debug, Parser)]
// The last of two equal flags wins.
#[command(name = "deepinfer-gateway", version, max_term_width = 100, args_override_self = true)]
#[command(after_help = "SIGTERM turns new requests away (/readyz says 503), lets what runs finish for \
    --termination-grace-seconds and exits with 0; a second signal ends at once. Exit codes: 0 after a clean end, 1 \
    failed (the log's last error says why), 2 wrong flags. Probes and metrics need no key: /healthz, /readyz, \
    /metrics.\n\n\
    Example: deepinfer-gateway --name=g-0 --model-name=tiny --checkpoint=/model --key-dir=/keys \
    --fleet-url=http://10.0.0.3:8082 --fleet-path=/v1/fleet/default/chat --ledger=/state/fleet.json")]
pub struct GatewayArgs {
    /// Name of this gateway among the agents: the name of its pod
    #[arg(long, value_name = "NAME")]
    pub name: String,
    /// Address of the API [default: --bind-address and 8000]
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// Name of the model in requests and answers
    #[arg(long, value_name = "NAME")]
    pub model_name: String,
    /// Another name that requests may use; may be repeated
    #[arg(long = "alias", value_name = "NAME")]
    pub aliases: Vec<String>,
    /// Checkpoint folder: only config.json and tokenizer.json are read
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Longest sequence in tokens, prompt and answer [default: what the model supports]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub context_limit: Option<u32>,
    /// Whether requests think that say nothing about it
    #[arg(long, value_enum, default_value_t = ThinkingChoice::On)]
    pub default_thinking: ThinkingChoice,
    /// File or folder of API keys [default: everybody who reaches the port may use it]
    #[arg(long, value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
    /// PEM file of the TLS certificate
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file of its key
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// A request without its first token after this is turned away
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub ttft_deadline_seconds: u32,
    /// A request that has begun waits this long for a worker or a rank while none serves, for example until a lost
    /// supernode is rebuilt; then it fails
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub resume_wait_seconds: u32,
    /// Interval of heartbeats with agents
    #[arg(long, value_name = "MS", default_value_t = 250, value_parser = clap::value_parser!(u32).range(10..=60_000))]
    pub heartbeat_ms: u32,
    /// Missed heartbeats after which an agent is suspect: no new work, its requests resume elsewhere
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=1000))]
    pub missed_heartbeats: u32,
    /// What every process of a pod has
    #[command(flatten)]
    pub pod: PodArgs,
}

/// Whether requests think by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ThinkingChoice {
    /// As the model's recipe has it
    On,
    /// Answers come at once
    Off,
}

/// Why the model's files do not serve a gateway.
#[derive(Debug, thiserror::Error)]
pub enum ModelFilesError {
    /// config.json cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// config.json is not what it should be.
    #[error("{path}: {message}", path = path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The tokenizer is not good.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// The fields of config.json that a gateway needs.
#[derive(Debug, Deserialize)]
struct Config {
    eos_token_id: u32,
    text_config: TextConfig,
}

/// See [`Config`].
#[derive(Debug, Deserialize)]
struct TextConfig {
    vocab_size: u32,
    max_position_embeddings: u32,
}

impl GatewayArgs {
    /// Reads container arguments, without a program name before them.
    ///
    /// # Errors
    /// What clap says, which names the flag and the fix.
    pub fn from_flags<S: AsRef<str>>(flags: &[S]) -> Result<Self, clap::Error> {
        let name = std::iter::once("deepinfer-gateway");
        Self::try_parse_from(name.chain(flags.iter().map(AsRef::as_ref)))
    }

    /// What is served, from the flags and the model's files. Reads files: not for async threads.
    ///
    /// # Errors
    /// [`ModelFilesError`].
    pub fn model(&self) -> Result<ModelInfo, ModelFilesError> {
        let config = read_config(&self.checkpoint.join("config.json"))?;
        let tokenizer = Tokenizer::open(self.checkpoint.join("tokenizer.json"))?;
        let supported = config.text_config.max_position_embeddings;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Ok(ModelInfo {
            name: self.model_name.clone(),
            aliases: self.aliases.clone(),
            context_limit: self.context_limit.map_or(supported, |limit| limit.min(supported)),
            vocab_size: config.text_config.vocab_size,
            stop_tokens: vec![config.eos_token_id],
            tokenizer: Arc::new(tokenizer),
            default_thinking: self.default_thinking == ThinkingChoice::On,
            created,
        })
    }

    /// Where the API listens.
    pub fn listen_address(&self) -> SocketAddr {
        self.pod.listen(self.listen, 8000)
    }

    /// Everything a gateway is started with. Reads files: not for async threads.
    ///
    /// # Errors
    /// [`ModelFilesError`].
    pub fn options(&self, key: ClusterKey) -> Result<GatewayOptions, ModelFilesError> {
        let mut options = GatewayOptions::new(self.name.clone(), self.listen_address(), self.model()?, key);
        options.api_keys.clone_from(&self.api_keys);
        options.tls = self.tls();
        options.api.first_token_deadline = Span::secs(u64::from(self.ttft_deadline_seconds));
        options.requests.times.resume = Span::secs(u64::from(self.resume_wait_seconds));
        options.heartbeat = Span::millis(u64::from(self.heartbeat_ms));
        options.missed_heartbeats = self.missed_heartbeats;
        Ok(options)
    }

    /// Certificate and key, if both were given.
    pub fn tls(&self) -> Option<(PathBuf, PathBuf)> {
        self.tls_cert.clone().zip(self.tls_key.clone())
    }
}

fn read_config(path: &Path) -> Result<Config, ModelFilesError> {
    let fail = |source| ModelFilesError::Read { path: path.to_path_buf(), source };
    let config = |message: String| ModelFilesError::Config { path: path.to_path_buf(), message };
    let bytes = std::fs::metadata(path).map_err(fail)?.len();
    if bytes > MAX_CONFIG_BYTES {
        return Err(config(format!("has {bytes} bytes, at most {MAX_CONFIG_BYTES} are read")));
    }
    let text = std::fs::read_to_string(path).map_err(fail)?;
    serde_json::from_str(&text).map_err(|error| config(error.to_string()))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn args(extra: &[&str]) -> Result<GatewayArgs, clap::Error> {
        let base = ["--name=g", "--model-name=tiny", "--checkpoint=/nowhere"];
        GatewayArgs::from_flags(&[&base[..], extra].concat())
    }

    #[test]
    fn the_flags_are_consistent() {
        GatewayArgs::command().debug_assert();
    }

    #[test]
    fn flags_of_a_pod_are_read() {
        let args = args(&["--alias=a", "--alias=b", "--default-thinking=off", "--listen=[::1]:0"]).unwrap();
        assert_eq!(args.aliases, ["a", "b"]);
        assert_eq!(args.default_thinking, ThinkingChoice::Off);
        assert_eq!(args.listen_address().port(), 0);
        let args = super::tests::args(&["--listen=0.0.0.0:80", "--bind-address=10.0.0.9"]).unwrap();
        assert_eq!(args.listen_address().to_string(), "10.0.0.9:80", "any address is the common one");
    }

    #[test]
    fn half_of_a_tls_pair_and_a_missing_file_are_named() {
        let error = args(&["--tls-cert=x"]).unwrap_err().to_string();
        assert!(error.contains("--tls-key"), "{error}");
        let error = args(&[]).unwrap().model().unwrap_err().to_string();
        assert!(error.contains("/nowhere/config.json"), "{error}");
    }
}
