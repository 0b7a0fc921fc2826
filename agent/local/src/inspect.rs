//! `deepinfer inspect`: what a checkpoint holds, and what running it takes.

use std::process::ExitCode;

use anyhow::{Context, Result};
use deepinfer_engine::sizes::Sizes;
use deepinfer_engine::{Checkpoint, ModelShape, Numerics, config};
use serde::Serialize;

use crate::args::InspectArgs;
use crate::machine;
use crate::report;

/// Prints text or JSON.
pub fn run(args: InspectArgs) -> Result<ExitCode> {
    let source = Source::open(&args)?;
    let shape = source.shape();
    let default = if shape.quantized { Numerics::Quantized } else { Numerics::F32 };
    let numerics = machine::numerics(args.numerics).unwrap_or(default);
    let sizes = match &source {
        Source::Checkpoint(checkpoint) => Sizes::of_checkpoint(checkpoint, numerics),
        Source::Config(shape) => Sizes::of(shape, numerics),
    };
    let length = args.length.map_or(shape.max_position_embeddings, |l| l as usize);
    let view = View::of(shape, &sizes, numerics, args.sequences as usize, length);
    if args.json {
        report::print(&(serde_json::to_string_pretty(&view)? + "\n"))?;
    } else {
        report::print(&text(&args, shape, &view))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A folder with weights, or the numbers alone.
enum Source {
    Checkpoint(Box<Checkpoint>),
    Config(Box<ModelShape>),
}

impl Source {
    fn open(args: &InspectArgs) -> Result<Self> {
        let path = &args.checkpoint;
        if !path.is_file() {
            return Ok(Self::Checkpoint(Box::new(machine::open_checkpoint(path)?)));
        }
        let name = || path.display().to_string();
        let bytes = std::fs::read(path).with_context(name)?;
        let (shape, ignored) = config::parse(&bytes).with_context(name)?;
        machine::warn_ignored(&ignored);
        Ok(Self::Config(Box::new(shape)))
    }

    fn shape(&self) -> &ModelShape {
        match self {
            Self::Checkpoint(checkpoint) => &checkpoint.shape,
            Self::Config(shape) => shape,
        }
    }
}

/// What `--json` prints. Bytes throughout.
#[derive(Debug, Serialize)]
struct View {
    numerics: String,
    parameters: u64,
    weight_bytes: u64,
    weights: Vec<WeightLine>,
    active_parameters_per_token: u64,
    active_bytes_per_token: u64,
    /// Compressed KV and index keys of one token.
    kv_bytes_per_token: f64,
    /// Window rings, open groups and n-gram history of one sequence.
    state_bytes_per_sequence: u64,
    memory: Memory,
}

#[derive(Debug, Serialize)]
struct WeightLine {
    part: String,
    format: String,
    tensors: usize,
    parameters: u64,
    bytes: u64,
}

/// Memory for some sequences; buffers of a step are not in it.
#[derive(Debug, Serialize)]
struct Memory {
    sequences: usize,
    length: usize,
    weights: u64,
    kv: u64,
    state: u64,
    total: u64,
}

impl View {
    fn of(shape: &ModelShape, sizes: &Sizes, numerics: Numerics, sequences: usize, length: usize) -> Self {
        let needed = sizes.needed(sequences, length.min(shape.max_position_embeddings));
        let weights = sizes.weights.iter().map(|w| WeightLine {
            part: w.part.name().to_owned(),
            format: w.format.to_string(),
            tensors: w.tensors,
            parameters: w.parameters,
            bytes: w.bytes,
        });
        Self {
            numerics: numerics.to_string(),
            parameters: sizes.parameters,
            weight_bytes: sizes.weight_bytes,
            weights: weights.collect(),
            active_parameters_per_token: sizes.active_parameters,
            active_bytes_per_token: sizes.active_bytes_per_token,
            kv_bytes_per_token: sizes.kv_bytes_per_token(),
            state_bytes_per_sequence: sizes.state_bytes_per_slot,
            memory: Memory {
                sequences,
                length: length.min(shape.max_position_embeddings),
                weights: needed.weights,
                kv: needed.kv,
                state: needed.state,
                total: needed.total(),
            },
        }
    }
}

fn text(args: &InspectArgs, shape: &ModelShape, view: &View) -> String {
    let experts = format!("{} experts, {} a token", shape.n_routed_experts, shape.num_experts_per_tok);
    let mut text = format!(
        "{}\n{} layers + {} draft, hidden {}, {experts}, vocabulary {}, context {}\n\n",
        args.checkpoint.display(),
        shape.num_hidden_layers,
        shape.draft_layers(),
        shape.hidden_size,
        report::count(shape.vocab_size as u64),
        report::count(shape.max_position_embeddings as u64),
    );
    text +=
        &format!("{:<24} {:<9} {:>8} {:>17} {:>12}\n", "part", "format", "tensors", "parameters", "bytes");
    for line in &view.weights {
        text += &format!(
            "{:<24} {:<9} {:>8} {:>17} {:>12}\n",
            line.part,
            line.format,
            line.tensors,
            report::count(line.parameters),
            report::bytes(line.bytes)
        );
    }
    text += &format!(
        "{:<24} {:<9} {:>8} {:>17} {:>12}\n",
        "all",
        "",
        view.weights.iter().map(|w| w.tensors).sum::<usize>(),
        report::count(view.parameters),
        report::bytes(view.weight_bytes)
    );
    text += &format!(
        "{:<24} {:<9} {:>8} {:>17} {:>12}\n\n",
        "read for one token",
        "",
        "",
        report::count(view.active_parameters_per_token),
        report::bytes(view.active_bytes_per_token)
    );
    let memory = &view.memory;
    text += &format!(
        "compressed KV            {} bytes per token ({} numerics)\n",
        view.kv_bytes_per_token, view.numerics
    );
    text +=
        &format!("state                    {} per sequence\n", report::bytes(view.state_bytes_per_sequence));
    text += &format!(
        "memory                   {} for {} of {} tokens: weights {}, KV {}, state {}\n",
        report::bytes(memory.total),
        if memory.sequences == 1 {
            "1 sequence".to_owned()
        } else {
            format!("{} sequences", memory.sequences)
        },
        report::count(memory.length as u64),
        report::bytes(memory.weights),
        report::bytes(memory.kv),
        report::bytes(memory.state)
    );
    text
}
