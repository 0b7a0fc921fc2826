//! Every flag of the command line, with the help that teaches it.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::cluster::args::{ApplyArgs, ExpertsArgs, PlanArgs, ScriptArgs, StatusArgs, UpArgs, ValidateArgs};
use crate::load::args::LoadArgs;

/// Serve DeepSeek-V4.1-Flash-like models: this machine's command line.
#[derive(Debug, Parser)]
#[command(name = "deepinfer", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Start here:\n  \
    deepinfer generate \"What is the capital of France?\"\n  \
    deepinfer generate                     a conversation in the terminal\n  \
    deepinfer up -f examples/clusters/quickstart.yaml      serve the OpenAI API\n  \
    deepinfer inspect DIR                  what a checkpoint holds and needs\n  \
    deepinfer bench --checkpoint DIR       how fast it runs here\n\n\
    The shipped model in examples/models/tiny-v41 is the default checkpoint when run from the repository.")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer a prompt, a chat file, a conversation, or a batch file of prompts
    Generate(GenerateArgs),
    /// Compare this machine's results with golden vectors; exit code 1 if one differs
    Verify(VerifyArgs),
    /// Measure prefill and decode speed of a checkpoint, and the share of memory bandwidth reached
    Bench(BenchArgs),
    /// Show what a checkpoint holds: sizes by part and format, KV bytes per token, memory needed
    Inspect(InspectArgs),
    /// Write a checkpoint of random weights for a config.json, in the real layout and formats
    MakeRandom(MakeRandomArgs),
    /// Serve the cluster of a YAML file on this machine, until Ctrl-C
    Up(UpArgs),
    /// Show a running cluster: what `kubectl get` would show
    Status(StatusArgs),
    /// Show what would be created for a cluster file, and why
    Plan(PlanArgs),
    /// Check cluster files: all errors at once, with line and field
    Validate(ValidateArgs),
    /// Change a running cluster to what a file says, without losing a request
    Apply(ApplyArgs),
    /// Show which experts the tokens of a running cluster chose
    Experts(ExpertsArgs),
    /// Send requests to a server and measure it: fixed concurrency, or a trace
    Load(LoadArgs),
    /// Tell the planner a story, for golden tests and support
    Script(ScriptArgs),
}

/// The model folder of the repository.
pub const DEFAULT_CHECKPOINT: &str = "examples/models/tiny-v41";

/// Where arithmetic runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// The best that this machine has: today always `cpu`
    Auto,
    /// Blocked, threaded SIMD kernels on weights in their stored format
    Cpu,
    /// Scalar definitions of every operation: slow, for comparison
    Reference,
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

/// Flags of every command that runs a model.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    /// Checkpoint folder: config.json, tokenizer.json, safetensors shards
    #[arg(long, value_name = "DIR", default_value = DEFAULT_CHECKPOINT)]
    pub checkpoint: PathBuf,
    /// Where arithmetic runs
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub backend: BackendChoice,
    /// Threads of the cpu backend [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Highest instruction set of the cpu backend; results are bitwise the same with each
    #[arg(long, value_enum, default_value_t = SimdChoice::Auto)]
    pub simd: SimdChoice,
    /// Rounding of activations and caches
    #[arg(long, value_enum, default_value_t = NumericsChoice::Auto)]
    pub numerics: NumericsChoice,
}

/// Flags of `generate`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    deepinfer generate \"What is the capital of France?\"\n  \
    deepinfer generate --chat messages.json --max-tokens 400\n  \
    echo \"Tell me a story.\" | deepinfer generate -\n  \
    deepinfer generate --raw \"Once upon a time\" --temperature 0.8 --seed 7\n  \
    deepinfer generate --batch in.jsonl --out out.jsonl     (run it again after a stop: it goes on)\n\n\
    A chat file is a JSON array of messages, or an object with messages, tools, thinking and reasoning_effort.\n\
    A batch line is {\"id\": \"a\", \"prompt\": \"...\"} or {\"id\": \"a\", \"messages\": [...]} or {\"id\": \"a\", \"prompt_ids\": [...]},\n\
    with optional max_tokens, temperature, top_p, seed, thinking, reasoning_effort and tools.")]
pub struct GenerateArgs {
    /// The user's message; `-` reads it from standard input. Without it a conversation starts
    #[arg(value_name = "PROMPT", conflicts_with_all = ["chat", "batch"])]
    pub prompt: Option<String>,
    /// Chat messages from a JSON file
    #[arg(long, value_name = "FILE", conflicts_with = "batch")]
    pub chat: Option<PathBuf>,
    /// System message before the prompt or the conversation
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["chat", "batch", "raw"])]
    pub system: Option<String>,
    /// Continue PROMPT as plain text, without the chat format
    #[arg(long, requires = "prompt")]
    pub raw: bool,
    /// Prompts from a JSON-lines file, answered side by side
    #[arg(long, value_name = "FILE", requires = "out")]
    pub batch: Option<PathBuf>,
    /// Results of --batch, one JSON line each, in the order they finish; finished ids are not run again
    #[arg(long, value_name = "FILE", requires = "batch")]
    pub out: Option<PathBuf>,
    /// Sequences of --batch that run at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub batch_size: u16,
    /// Most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub max_tokens: u32,
    /// 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = parse_temperature)]
    pub temperature: f32,
    /// Smallest set of tokens with this much probability
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = parse_top_p)]
    pub top_p: f32,
    /// Seed of the draws; the same seed gives the same answer on any machine and in any batch
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Let the model think before it answers; the thoughts go to standard error
    #[arg(long)]
    pub thinking: bool,
    /// How hard to think: a level that the prompt format knows, such as high or max
    #[arg(long, value_name = "LEVEL", requires = "thinking")]
    pub reasoning_effort: Option<String>,
    /// Longest sequence, prompt and answer together [default: what the model allows, at most 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub context: Option<u32>,
    /// Prompt tokens per step
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub chunk: u32,
    /// Leave out the line about speed
    #[arg(long, short)]
    pub quiet: bool,
    /// Model and machine
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Flags of `verify`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    deepinfer verify --checkpoint e2e/golden/tiny-quant --vectors e2e/golden/vectors\n  \
    deepinfer verify --checkpoint /models/other --name tiny-quant --vectors e2e/golden/vectors --backend reference\n\n\
    Runs the entries of the folder's manifest.json whose checkpoint is the folder's name (or --name), and those without one.")]
pub struct VerifyArgs {
    /// Checkpoint folder
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Folder with manifest.json and the vector files
    #[arg(long, value_name = "DIR")]
    pub vectors: PathBuf,
    /// Name of the checkpoint in the manifest [default: the folder's name]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Where arithmetic runs
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub backend: BackendChoice,
    /// Threads of the cpu backend [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Highest instruction set of the cpu backend
    #[arg(long, value_enum, default_value_t = SimdChoice::Auto)]
    pub simd: SimdChoice,
}

/// Flags of `bench`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    deepinfer bench --checkpoint /tmp/bench-1b --threads 2\n  \
    deepinfer bench --checkpoint /tmp/bench-1b --prompt 512 --generate 64 --batch 16 --json\n\n\
    Decode speed is given as tokens/s over all sequences, and as the share of the measured memory bandwidth that the\n\
    weights of a token need: active bytes = stored bytes, scales included, of all tensors that one decoded token reads.")]
pub struct BenchArgs {
    /// Prompt tokens of each sequence
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub prompt: u32,
    /// Tokens to decode for each sequence in a run
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub generate: u32,
    /// Sequences that run at once
    #[arg(long, value_name = "B", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub batch: u16,
    /// Runs; the median and the spread are reported
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub runs: u16,
    /// Prompt tokens per step
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub chunk: u32,
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
    /// Model and machine
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Flags of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Checkpoint folder, or a config.json alone
    #[arg(value_name = "DIR", default_value = DEFAULT_CHECKPOINT)]
    pub checkpoint: PathBuf,
    /// Sequences of the memory estimate
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub sequences: u32,
    /// Length of each of them in tokens [default: what the model allows]
    #[arg(long, value_name = "L", value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    pub length: Option<u32>,
    /// Rounding of activations and caches
    #[arg(long, value_enum, default_value_t = NumericsChoice::Auto)]
    pub numerics: NumericsChoice,
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Flags of `make-random`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    deepinfer make-random --config examples/configs/bench-1b.json --out /tmp/bench-1b --seed 1\n\n\
    Written by streaming, so any size fits in little memory. The Engram row counts of the written config.json are set to\n\
    match its tokenizer. The same seed gives the same bytes.")]
pub struct MakeRandomArgs {
    /// A config.json in the model's layout
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// New folder for the checkpoint; must not exist or be empty
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Seed of the weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// A tokenizer.json to go with it [default: a byte-level one of exactly vocab_size entries]
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
}

fn parse_temperature(text: &str) -> Result<f32, String> {
    parse_in(text, |t| (0.0..=2.0).contains(&t), "a number from 0 to 2")
}

fn parse_top_p(text: &str) -> Result<f32, String> {
    parse_in(text, |p| p > 0.0 && p <= 1.0, "a number above 0 and up to 1")
}

fn parse_in(text: &str, fits: impl Fn(f32) -> bool, what: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| format!("expected {what}"))?;
    if fits(value) { Ok(value) } else { Err(format!("expected {what}")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sampling_numbers_out_of_range_are_refused() {
        for bad in [["--temperature", "2.5"], ["--temperature", "nan"], ["--top-p", "0"], ["--top-p", "x"]] {
            let line = ["deepinfer", "generate", "hi", bad[0], bad[1]];
            let error = Cli::try_parse_from(line).expect_err("out of range").to_string();
            assert!(error.contains("expected a number"), "{error}");
        }
    }

    #[test]
    fn a_batch_needs_an_output() {
        assert!(Cli::try_parse_from(["deepinfer", "generate", "--batch", "in.jsonl"]).is_err());
        assert!(Cli::try_parse_from(["deepinfer", "generate", "--batch", "a", "--out", "b"]).is_ok());
    }
}
