//! What becomes of each field that a client may send (decisions.md, unknown request fields).
//!
//! Four kinds: read by the handlers; without effect on tokens, accepted; with an effect that is not built, accepted
//! only with the value that means "no effect"; of no known API, accepted and named in the answer's header.

use serde_json::Value;

use super::body::{Fields, tree};
use super::errors::ApiError;

/// Which API a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// What becomes of a field.
#[derive(Clone, Copy)]
enum Rule {
    /// The handlers read it.
    Read,
    /// It changes no token.
    NoEffect,
    /// Only the neutral value passes; the text says which that is, or what to use instead.
    Neutral(fn(&Value) -> bool, &'static str),
}

use Rule::{Neutral, NoEffect, Read};

/// Fields that both APIs have.
const BOTH: &[(&str, Rule)] = &[
    ("model", Read),
    ("temperature", Read),
    ("top_p", Read),
    ("max_tokens", Read),
    ("min_tokens", Read),
    ("ignore_eos", Read),
    ("stop", Read),
    ("seed", Read),
    ("logprobs", Read),
    ("stream", Read),
    ("stream_options", Read),
    ("user", NoEffect),
    ("metadata", NoEffect),
    ("store", NoEffect),
    ("service_tier", NoEffect),
    ("safety_identifier", NoEffect),
    ("prompt_cache_key", NoEffect),
    ("prompt_cache_retention", NoEffect),
    ("cache_salt", NoEffect),
    ("priority", NoEffect),
    ("request_id", NoEffect),
    ("rid", NoEffect),
    ("n", Neutral(is_one, "only 1 is supported")),
    ("best_of", Neutral(is_one, "only 1 is supported")),
    ("frequency_penalty", Neutral(is_zero, "penalties are not supported; leave it out or send 0")),
    ("presence_penalty", Neutral(is_zero, "penalties are not supported; leave it out or send 0")),
    ("repetition_penalty", Neutral(is_one, "penalties are not supported; leave it out or send 1")),
    ("length_penalty", Neutral(is_one, "beam search is not supported; leave it out or send 1")),
    ("logit_bias", Neutral(is_empty, "is not supported; leave it out or send {}")),
    ("top_k", Neutral(is_no_top_k, "is not supported; leave it out or send 0 or -1")),
    ("top_a", Neutral(is_zero, "is not supported; leave it out or send 0")),
    ("min_p", Neutral(is_zero, "is not supported; leave it out or send 0")),
    ("typical_p", Neutral(is_one, "is not supported; leave it out or send 1")),
    ("use_beam_search", Neutral(is_false, "beam search is not supported")),
    ("early_stopping", Neutral(is_false, "beam search is not supported")),
    ("stop_token_ids", Neutral(is_empty, "is not supported; use `stop`")),
    ("stop_sequences", Neutral(is_empty, "is not a field of this API; use `stop`")),
    ("stop_regex", Neutral(is_empty, "is not supported; use `stop`")),
    ("min_new_tokens", Neutral(is_zero, "is not a field of this API; use `min_tokens`")),
    ("max_new_tokens", Neutral(is_never, "is not a field of this API; use `max_tokens`")),
    ("bad_words", Neutral(is_empty, "is not supported")),
    ("allowed_token_ids", Neutral(is_empty, "is not supported")),
    ("include_stop_str_in_output", Neutral(is_false, "is not supported: stop strings are left out")),
    ("no_stop_trim", Neutral(is_false, "is not supported: stop strings are left out")),
    ("skip_special_tokens", Neutral(is_true, "is not supported: special tokens have no text")),
    ("spaces_between_special_tokens", NoEffect),
    ("detokenize", Neutral(is_true, "is not supported: answers are text")),
    ("prompt_logprobs", Neutral(is_zero_or_false, "is not supported")),
    ("logprob_start_len", Neutral(is_never, "is not supported")),
    ("top_logprobs_num", Neutral(is_zero, "is not supported; use `logprobs`")),
    ("truncate_prompt_tokens", Neutral(is_never, "is not supported; shorten the prompt")),
    ("return_tokens_as_token_ids", Neutral(is_false, "is not supported; use `return_token_ids`")),
    ("return_hidden_states", Neutral(is_false, "is not supported")),
    ("return_text_in_logprobs", NoEffect),
    ("guided_json", Neutral(is_empty, STRUCTURED)),
    ("guided_regex", Neutral(is_empty, STRUCTURED)),
    ("guided_choice", Neutral(is_empty, STRUCTURED)),
    ("guided_grammar", Neutral(is_empty, STRUCTURED)),
    ("structured_outputs", Neutral(is_empty, STRUCTURED)),
    ("structural_tag", Neutral(is_empty, STRUCTURED)),
    ("json_schema", Neutral(is_empty, STRUCTURED)),
    ("regex", Neutral(is_empty, STRUCTURED)),
    ("ebnf", Neutral(is_empty, STRUCTURED)),
    ("response_format", Neutral(is_text_format, STRUCTURED)),
    ("logits_processors", Neutral(is_empty, "is not supported")),
    ("custom_logit_processor", Neutral(is_empty, "is not supported")),
    ("custom_params", Neutral(is_empty, "is not supported")),
    ("lora_path", Neutral(is_empty, "adapters are not supported")),
    ("lora_request", Neutral(is_empty, "adapters are not supported")),
    ("session_params", Neutral(is_empty, "is not supported")),
    ("kv_transfer_params", Neutral(is_empty, "is not supported")),
    ("vllm_xargs", Neutral(is_empty, "is not supported")),
];

/// Fields of chat completions alone.
const CHAT: &[(&str, Rule)] = &[
    ("messages", Read),
    ("max_completion_tokens", Read),
    ("top_logprobs", Read),
    ("tools", Read),
    ("tool_choice", Read),
    ("reasoning_effort", Read),
    ("thinking", Read),
    ("prediction", NoEffect),
    ("modalities", Neutral(is_text_only, "only [\"text\"] is supported")),
    ("audio", Neutral(is_empty, "is not supported")),
    ("verbosity", Neutral(is_medium, "is not supported; leave it out or send \"medium\"")),
    ("web_search_options", Neutral(is_never, "is not supported")),
    ("parallel_tool_calls", Neutral(is_true, "only true is supported")),
    ("functions", Neutral(is_empty, "is not supported; use `tools`")),
    ("function_call", Neutral(is_empty, "is not supported; use `tool_choice`")),
    ("system", Neutral(is_empty, "is not a field of this API; send a message with role \"system\"")),
    ("prompt", Neutral(is_empty, "is not a field of this API; use `messages`")),
    ("input", Neutral(is_empty, "is not a field of this API; use `messages`")),
    ("reasoning", Neutral(is_empty, "is not a field of this API; use `reasoning_effort`")),
    ("echo", Neutral(is_false, "is not supported")),
    ("return_token_ids", Neutral(is_false, "is supported by /v1/completions only")),
    ("add_generation_prompt", Neutral(is_true, "only true is supported")),
    ("continue_final_message", Neutral(is_false, "is not supported")),
    ("add_special_tokens", Neutral(is_false, "is not supported: the prompt format decides")),
    ("documents", Neutral(is_empty, "is not supported")),
    ("chat_template", Neutral(is_empty, "is not supported: the model's own format is used")),
    ("chat_template_kwargs", Neutral(is_empty, "is not supported; use `thinking` or `reasoning_effort`")),
    ("include_reasoning", Neutral(is_true, "only true is supported")),
    ("separate_reasoning", Neutral(is_true, "only true is supported")),
    ("stream_reasoning", Neutral(is_true, "only true is supported")),
    ("mm_processor_kwargs", Neutral(is_empty, "is not supported")),
    ("media_io_kwargs", Neutral(is_empty, "is not supported")),
];

/// Fields of completions alone.
const COMPLETIONS: &[(&str, Rule)] = &[
    ("prompt", Read),
    ("return_token_ids", Read),
    ("echo", Neutral(is_false, "is not supported; the answer holds generated text only")),
    ("suffix", Neutral(is_empty, "is not supported")),
    ("add_special_tokens", Neutral(is_false, "is not supported: nothing is added to the prompt")),
    ("prompt_embeds", Neutral(is_empty, "is not supported; use `prompt`")),
    ("max_completion_tokens", Neutral(is_never, "is not a field of this API; use `max_tokens`")),
    ("messages", Neutral(is_empty, "is not a field of this API; use /v1/chat/completions")),
    ("tools", Neutral(is_empty, "is not a field of this API; use /v1/chat/completions")),
    ("top_logprobs", Neutral(is_zero, "is not a field of this API; use `logprobs`")),
];

const STRUCTURED: &str = "structured output is not supported; leave it out or ask for plain text";

/// Check every field that the handlers do not read. Returns the names of fields that no known API has.
pub(crate) fn check(fields: &Fields<'_>, endpoint: Endpoint) -> Result<Vec<String>, ApiError> {
    let own = match endpoint {
        Endpoint::Chat => CHAT,
        Endpoint::Completions => COMPLETIONS,
    };
    let mut ignored = Vec::new();
    for (name, raw) in fields.iter() {
        let rule = BOTH.iter().chain(own).find(|(known, _)| *known == name);
        match rule {
            Some((_, Read | NoEffect)) => {}
            Some((name, Neutral(neutral, advice))) => {
                let value = tree(name, raw)?;
                if !value.is_null() && !neutral(&value) {
                    return Err(ApiError::unsupported(name, advice));
                }
            }
            None => ignored.push(name.to_owned()),
        }
    }
    Ok(ignored)
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn is_no_top_k(value: &Value) -> bool {
    value.as_f64().is_some_and(|k| k == 0.0 || k == -1.0)
}

fn is_zero_or_false(value: &Value) -> bool {
    is_zero(value) || is_false(value)
}

fn is_false(value: &Value) -> bool {
    value.as_bool() == Some(false)
}

fn is_true(value: &Value) -> bool {
    value.as_bool() == Some(true)
}

fn is_medium(value: &Value) -> bool {
    value.as_str() == Some("medium")
}

fn is_never(_: &Value) -> bool {
    false
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        _ => false,
    }
}

fn is_text_format(value: &Value) -> bool {
    value.get("type").and_then(Value::as_str) == Some("text")
}

fn is_text_only(value: &Value) -> bool {
    value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind == "text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_field_has_two_rules() {
        for own in [CHAT, COMPLETIONS] {
            let mut names: Vec<_> = BOTH.iter().chain(own).map(|(name, _)| name).collect();
            names.sort();
            assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
        }
    }
}
