//! Flags of `deepinfer load`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Columns of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TraceFormat {
    /// CSV with TIMESTAMP, ContextTokens, GeneratedTokens
    Azure,
    /// JSON lines with timestamp (ms), input_length, output_length
    Mooncake,
}

/// Flags of `load`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:\n  \
    deepinfer load --url http://127.0.0.1:8000 --concurrency 16 --requests 200 --prompt-tokens 128 --output-tokens 64\n  \
    deepinfer load --url http://127.0.0.1:8000 --trace conv.csv --format azure --scale 10 --duration 60\n\n\
    With --concurrency the next request starts when one ends; with --trace each starts at its own time, whatever the\n\
    server does. Goodput counts requests that meet both --goodput-ttft-ms and --goodput-inter-token-ms (their mean).")]
pub struct LoadArgs {
    /// Where the server is, without a path
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Name of the model [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// API key
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Requests that run at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub concurrency: u32,
    /// Requests in all
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub requests: u32,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prompt_tokens: u32,
    /// Tokens of each answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub output_tokens: u32,
    /// Requests of this file, each at its own time
    #[arg(long, value_name = "FILE", requires = "format", conflicts_with_all = ["concurrency", "requests", "prompt_tokens", "output_tokens"])]
    pub trace: Option<PathBuf>,
    /// Columns of the trace
    #[arg(long, value_enum, requires = "trace")]
    pub format: Option<TraceFormat>,
    /// Times between requests of the trace are multiplied with this: 10 is a tenth of the load
    #[arg(long, value_name = "F", default_value_t = 1.0, value_parser = parse_factor, requires = "trace")]
    pub scale: f64,
    /// Lengths of the trace are divided by this [default: so that its longest request fits the server's context]
    #[arg(long, value_name = "F", value_parser = parse_factor, requires = "trace")]
    pub length_scale: Option<f64>,
    /// Seconds of replay after which no further request starts
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub duration: Option<u64>,
    /// Longest sequence of the server in tokens [default: what it says]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(16..))]
    pub context: Option<u32>,
    /// Prompts are random token ids from 3 up to this
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(8..))]
    pub vocab: u32,
    /// Chat completions with generated text instead of token ids
    #[arg(long)]
    pub chat: bool,
    /// Seed of prompts
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// First token later than this is not good, in ms
    #[arg(long, value_name = "MS", default_value_t = 2000.0, value_parser = parse_factor)]
    pub goodput_ttft_ms: f64,
    /// Tokens further apart than this are not good, in ms
    #[arg(long, value_name = "MS", default_value_t = 200.0, value_parser = parse_factor)]
    pub goodput_inter_token_ms: f64,
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

fn parse_factor(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number above 0".to_owned())?;
    if value.is_finite() && value > 0.0 { Ok(value) } else { Err("expected a number above 0".to_owned()) }
}
