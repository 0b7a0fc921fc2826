//! How to draw and when to end: the fields that both APIs share.

use deepinfer_protocol::generate::GenerateSpec;
use deepinfer_protocol::limits::MAX_TOP_LOGPROBS;

use super::ModelInfo;
use super::body::Fields;
use super::errors::ApiError;

/// Most output tokens that a request may name (serving.md J.1).
const MAX_TOKENS: u64 = 393_216;
/// Most stop strings: DeepSeek's own limit; OpenAI's is 4.
const MAX_STOPS: usize = 16;
/// Longest stop string in bytes: as much text may have to be held back.
const MAX_STOP_BYTES: usize = 1024;

/// What a request says about drawing and ending.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Sampling {
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) min_tokens: u32,
    pub(crate) ignore_eos: bool,
    pub(crate) stop: Vec<String>,
    pub(crate) seed: Option<u64>,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
}

impl Sampling {
    /// Read the shared fields. `max_completion_tokens` counts where the API has it.
    pub(crate) fn read(fields: &Fields<'_>, has_max_completion: bool) -> Result<Self, ApiError> {
        let stream = fields.flag("stream")?.unwrap_or(false);
        let in_range = |field: &str, low| fields.whole(field, low, MAX_TOKENS);
        let mut max_tokens = in_range("max_tokens", 1)?;
        if has_max_completion {
            let newer = in_range("max_completion_tokens", 1)?;
            if let (Some(old), Some(new)) = (max_tokens, newer)
                && old != new
            {
                let problem = format!(
                    "differs from `max_tokens` ({new} and {old}), which means the same; send one of the two"
                );
                return Err(ApiError::field("max_completion_tokens", problem));
            }
            max_tokens = newer.or(max_tokens);
        }
        let min_tokens = in_range("min_tokens", 0)?.unwrap_or(0);
        if max_tokens.is_some_and(|max| min_tokens > max) {
            return Err(ApiError::field("min_tokens", "is larger than `max_tokens`"));
        }
        Ok(Self {
            temperature: fields.real("temperature", "from 0 to 2", |t| (0.0..=2.0).contains(&t))?,
            top_p: fields.real("top_p", "above 0, at most 1", |p| p > 0.0 && p <= 1.0)?,
            max_tokens: max_tokens.map(|max| max as u32),
            min_tokens: min_tokens as u32,
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            stop: stops(fields)?,
            seed: fields.whole("seed", 0, i64::MAX as u64)?,
            stream,
            include_usage: include_usage(fields, stream)?,
        })
    }

    /// The engines' order. `default_max` applies where the request names no limit; both are clipped to what the
    /// context has left after the prompt.
    pub(crate) fn spec(
        &self,
        model: &ModelInfo,
        prompt: usize,
        default_max: u32,
        logprobs: Option<u8>,
    ) -> Result<GenerateSpec, ApiError> {
        let left = u32::try_from(prompt).ok().and_then(|prompt| model.context_limit.checked_sub(prompt));
        let Some(left) = left.filter(|left| *left > 0) else {
            return Err(ApiError::too_long("prompt", prompt, model.context_limit));
        };
        let max_tokens = self.max_tokens.unwrap_or(default_max).min(left);
        let seed = match self.seed {
            Some(seed) => seed,
            None => random_seed()?,
        };
        Ok(GenerateSpec {
            temperature: self.temperature.unwrap_or(1.0),
            // A positive number may round to zero, which would keep nothing.
            top_p: self.top_p.unwrap_or(1.0).max(f32::MIN_POSITIVE),
            seed,
            max_tokens,
            min_tokens: self.min_tokens.min(max_tokens),
            stop_tokens: if self.ignore_eos { Vec::new() } else { model.stop_tokens.clone() },
            logprobs,
        })
    }
}

/// How many alternatives `field` asks for.
pub(crate) fn alternatives(fields: &Fields<'_>, field: &str) -> Result<Option<u8>, ApiError> {
    Ok(fields.whole(field, 0, u64::from(MAX_TOP_LOGPROBS))?.map(|count| count as u8))
}

fn random_seed() -> Result<u64, ApiError> {
    let mut seed = [0; 8];
    getrandom::fill(&mut seed)
        .map_err(|error| ApiError::internal(format!("no random seed from the operating system: {error}")))?;
    Ok(u64::from_le_bytes(seed))
}

fn stops(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let expected = || ApiError::field("stop", format!("expected a string or up to {MAX_STOPS} strings"));
    let Some(raw) = fields.raw("stop") else { return Ok(Vec::new()) };
    let stops = match serde_json::from_str::<String>(raw.get()) {
        Ok(stop) => vec![stop],
        Err(_) => serde_json::from_str::<Vec<String>>(raw.get()).map_err(|_| expected())?,
    };
    if stops.len() > MAX_STOPS {
        return Err(expected());
    }
    for stop in &stops {
        if stop.is_empty() || stop.len() > MAX_STOP_BYTES {
            let problem = format!("each string must have 1 to {MAX_STOP_BYTES} bytes");
            return Err(ApiError::field("stop", problem));
        }
    }
    Ok(stops)
}

fn include_usage(fields: &Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.value("stream_options")? else { return Ok(false) };
    let Some(options) = options.as_object() else {
        return Err(ApiError::field("stream_options", "expected an object"));
    };
    if !stream {
        return Err(ApiError::field("stream_options", "is allowed only with `stream: true`"));
    }
    if options.get("continuous_usage_stats").is_some_and(|value| value.as_bool() == Some(true)) {
        return Err(ApiError::field("stream_options.continuous_usage_stats", "is not supported"));
    }
    match options.get("include_usage") {
        None | Some(serde_json::Value::Null) => Ok(false),
        Some(serde_json::Value::Bool(include)) => Ok(*include),
        Some(_) => Err(ApiError::field("stream_options.include_usage", "expected true or false")),
    }
}
