//! How the next token of a sequence is drawn, and whether it ends the sequence. The same in a prefill worker and a
//! decode rank, so that a sequence ends at the same token wherever it runs.

use deepinfer_protocol::generate::{FinishReason, GenerateSpec};

use super::Sample;

/// The draw after a sequence of `length` tokens, `emitted` of which were output.
pub(super) fn sample(spec: &GenerateSpec, length: u32, emitted: u32) -> Sample {
    let forbidden = if emitted < spec.min_tokens { spec.stop_tokens.clone() } else { Vec::new() };
    Sample {
        temperature: spec.temperature,
        top_p: spec.top_p,
        seed: spec.seed,
        position: u64::from(length),
        logprobs: spec.logprobs,
        forbidden,
    }
}

/// Whether `token` ends a sequence that has `length` tokens with it, `emitted` of them output. A stop token counts
/// first: inside the budget it is a stop even if it is the last token allowed (SV-016).
pub(super) fn finish(
    spec: &GenerateSpec,
    token: u32,
    length: u32,
    emitted: u32,
    limit: u32,
) -> Option<FinishReason> {
    if spec.stop_tokens.contains(&token) {
        return Some(FinishReason::Stop);
    }
    (emitted >= spec.max_tokens || length >= limit).then_some(FinishReason::Length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> GenerateSpec {
        GenerateSpec {
            temperature: 0.0,
            top_p: 1.0,
            seed: 3,
            max_tokens: 4,
            min_tokens: 2,
            stop_tokens: vec![1],
            logprobs: None,
        }
    }

    #[test]
    fn stop_tokens_are_forbidden_until_min_tokens_were_output() {
        assert_eq!(sample(&spec(), 10, 0).forbidden, [1]);
        assert_eq!(sample(&spec(), 11, 1).forbidden, [1]);
        assert_eq!(sample(&spec(), 12, 2).forbidden, [0u32; 0]);
        assert_eq!(sample(&spec(), 12, 2).position, 12);
    }

    #[test]
    fn a_stop_token_as_the_last_allowed_token_is_a_stop() {
        assert_eq!(finish(&spec(), 1, 14, 4, 14), Some(FinishReason::Stop));
        assert_eq!(finish(&spec(), 9, 14, 4, 100), Some(FinishReason::Length));
        assert_eq!(finish(&spec(), 9, 13, 3, 100), None);
        assert_eq!(finish(&spec(), 9, 13, 3, 13), Some(FinishReason::Length), "the context is full");
    }
}
