//! Log-probabilities as the two APIs write them. Always finite: JSON has no infinities (SV-037).

use deepinfer_protocol::generate::{Logprob, Token};

use super::json::{push_escaped, push_f32, push_numbers, push_string, push_u64};
use crate::tokenizer::Tokenizer;

/// Append the text of one id as a JSON string. Bytes that are not whole characters are written as `\xNN`.
fn push_token(buffer: &mut Vec<u8>, tokenizer: &Tokenizer, id: u32) {
    match std::str::from_utf8(tokenizer.token_bytes(id)) {
        Ok(text) => push_string(buffer, text),
        Err(_) => {
            let escaped: String =
                tokenizer.token_bytes(id).iter().map(|byte| format!("\\x{byte:02x}")).collect();
            push_string(buffer, &escaped);
        }
    }
}

fn push_pair(buffer: &mut Vec<u8>, tokenizer: &Tokenizer, id: u32, logprob: f32) {
    buffer.extend_from_slice(br#"{"token":"#);
    push_token(buffer, tokenizer, id);
    buffer.extend_from_slice(br#","logprob":"#);
    push_f32(buffer, logprob.max(Logprob::FLOOR), Logprob::FLOOR);
    buffer.extend_from_slice(br#","bytes":"#);
    push_numbers(buffer, tokenizer.token_bytes(id).iter().map(|byte| u64::from(*byte)));
}

/// Entries of chat completions, in brackets.
pub(crate) fn push_chat(buffer: &mut Vec<u8>, tokenizer: &Tokenizer, tokens: &[Token]) {
    buffer.push(b'[');
    for (index, token) in tokens.iter().enumerate() {
        if index > 0 {
            buffer.push(b',');
        }
        let (own, top) = parts(token);
        push_pair(buffer, tokenizer, token.id, own);
        buffer.extend_from_slice(br#","top_logprobs":["#);
        for (index, (id, logprob)) in top.iter().enumerate() {
            if index > 0 {
                buffer.push(b',');
            }
            push_pair(buffer, tokenizer, *id, *logprob);
            buffer.push(b'}');
        }
        buffer.extend_from_slice(b"]}");
    }
    buffer.push(b']');
}

/// The object of completions. `offset` is where the first token's text begins in the answer, in characters, and
/// becomes where the next one's does.
pub(crate) fn push_completion(
    buffer: &mut Vec<u8>,
    tokenizer: &Tokenizer,
    tokens: &[Token],
    offset: &mut usize,
) {
    let list = |buffer: &mut Vec<u8>, name: &str, each: &mut dyn FnMut(&mut Vec<u8>, &Token)| {
        buffer.push(b'"');
        push_escaped(buffer, name);
        buffer.extend_from_slice(b"\":[");
        for (index, token) in tokens.iter().enumerate() {
            if index > 0 {
                buffer.push(b',');
            }
            each(buffer, token);
        }
        buffer.push(b']');
    };
    buffer.push(b'{');
    list(buffer, "tokens", &mut |buffer, token| push_token(buffer, tokenizer, token.id));
    buffer.push(b',');
    list(buffer, "token_logprobs", &mut |buffer, token| {
        push_f32(buffer, parts(token).0.max(Logprob::FLOOR), Logprob::FLOOR);
    });
    buffer.push(b',');
    list(buffer, "top_logprobs", &mut |buffer, token| push_top(buffer, tokenizer, parts(token).1));
    buffer.push(b',');
    list(buffer, "text_offset", &mut |buffer, token| {
        push_u64(buffer, *offset as u64);
        *offset += String::from_utf8_lossy(tokenizer.token_bytes(token.id)).chars().count();
    });
    buffer.push(b'}');
}

/// Alternatives as an object from text to log-probability; of two ids with one text the more likely counts.
fn push_top(buffer: &mut Vec<u8>, tokenizer: &Tokenizer, top: &[(u32, f32)]) {
    buffer.push(b'{');
    let mut first = true;
    for (index, (id, logprob)) in top.iter().enumerate() {
        let bytes = tokenizer.token_bytes(*id);
        if top[..index].iter().any(|(earlier, _)| tokenizer.token_bytes(*earlier) == bytes) {
            continue;
        }
        if !first {
            buffer.push(b',');
        }
        first = false;
        push_token(buffer, tokenizer, *id);
        buffer.push(b':');
        push_f32(buffer, logprob.max(Logprob::FLOOR), Logprob::FLOOR);
    }
    buffer.push(b'}');
}

/// An engine that sent none is at the floor: better than a gap that shifts all entries after it.
fn parts(token: &Token) -> (f32, &[(u32, f32)]) {
    match &token.logprob {
        Some(logprob) => (logprob.logprob, &logprob.top),
        None => (Logprob::FLOOR, &[]),
    }
}
