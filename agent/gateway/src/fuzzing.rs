//! Entry points for fuzzing; the corpora under `tests/corpus` are replayed by an ordinary test.
//!
//! Each function takes arbitrary bytes and must not panic. They check what holds for every input, so a broken
//! invariant is a panic too.

use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value, json};

use crate::core::CoreHandle;
use crate::openai::{Api, ApiOptions, ModelInfo};
use crate::{ChatRequest, Detokenizer, RECIPE_TOKENS, Tokenizer};

/// Texts beyond this length add time, not paths.
const TEXT_LIMIT: usize = 4096;

/// Read `bytes` as a tokenizer file and, independently, as a text and as ids for a small built-in tokenizer.
pub fn fuzz_tokenizer(bytes: &[u8]) {
    if let Ok(tokenizer) = Tokenizer::from_bytes("fuzz", bytes) {
        let tokenizer = Arc::new(tokenizer);
        for text in ["", "a b  c\n", "<think>\u{1F600}é", "\0\u{7f}"] {
            check_text(&tokenizer, text);
        }
        check_ids(&tokenizer, bytes);
    }
    let tokenizer = sample();
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(TEXT_LIMIT)]);
    if let Some(ids) = check_text(tokenizer, &text) {
        assert_eq!(tokenizer.decode(&ids, true), text, "decoding gives back the text");
    }
    check_ids(tokenizer, bytes);
}

/// Read `bytes` as a chat file.
pub fn fuzz_chat(bytes: &[u8]) {
    if let Ok(request) = ChatRequest::parse(&String::from_utf8_lossy(bytes)) {
        assert!(!request.messages.is_empty(), "a chat without messages is refused");
    }
}

/// Read `bytes` as the body of a request to each endpoint. Returns how many accept it.
///
/// What is accepted fits into the model; what is not gets a small error.
pub fn fuzz_http_body(bytes: &[u8]) -> usize {
    static API: OnceLock<Api> = OnceLock::new();
    let api = API.get_or_init(|| {
        let tokenizer = sample_chat_tokenizer();
        let model = ModelInfo {
            name: "tiny".to_owned(),
            aliases: Vec::new(),
            context_limit: 2048,
            vocab_size: tokenizer.vocab_size() as u32,
            stop_tokens: vec![1],
            tokenizer,
            default_thinking: false,
            created: 0,
        };
        Api::new(model, CoreHandle::pair(1).0, ApiOptions::default())
    });
    api.check_body(bytes).into_iter().filter(|accepted| *accepted).count()
}

/// A tokenizer of bytes with the special tokens of the recipe.
pub(crate) fn sample_chat_tokenizer() -> Arc<Tokenizer> {
    static SAMPLE: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let tokenizer = SAMPLE.get_or_init(|| {
        let json = sample_json(&RECIPE_TOKENS).to_string();
        Arc::new(Tokenizer::from_bytes("sample", json.as_bytes()).expect("the built-in tokenizer is valid"))
    });
    Arc::clone(tokenizer)
}

fn check_text(tokenizer: &Tokenizer, text: &str) -> Option<Vec<u32>> {
    let ids = tokenizer.encode_text(text).ok()?;
    assert!(!ids.iter().any(|&id| tokenizer.is_special(id)), "text never becomes a special id");
    assert!(ids.iter().all(|&id| tokenizer.id_to_token(id).is_some()), "only known ids");
    Some(ids)
}

/// Streaming equals one-shot decoding for the ids that `bytes` spells, two bytes an id.
fn check_ids(tokenizer: &Arc<Tokenizer>, bytes: &[u8]) {
    let size = tokenizer.vocab_size() as u32 + 2;
    let ids: Vec<u32> = bytes
        .chunks_exact(2)
        .take(TEXT_LIMIT)
        .map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])) % size)
        .collect();
    let mut stream = Detokenizer::with_special(Arc::clone(tokenizer));
    let mut text = String::new();
    for &id in &ids {
        text.push_str(stream.push(id));
    }
    text.push_str(stream.finish());
    assert_eq!(text, tokenizer.decode(&ids, false), "streaming equals one-shot decoding");
}

/// A tokenizer of the 256 bytes, a few merges and a few special tokens, one of which merges could build.
fn sample() -> &'static Arc<Tokenizer> {
    static SAMPLE: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let json = sample_json(&["<think>", "</think>", "<｜User｜>", "hex"]).to_string();
        Arc::new(Tokenizer::from_bytes("sample", json.as_bytes()).expect("the built-in tokenizer is valid"))
    })
}

fn sample_json(specials: &[&str]) -> Value {
    let merges = [["h", "e"], ["Ġ", "t"], ["he", "x"], ["hex", "a"], ["Ã", "©"]];
    let mut names: Vec<String> = specials.iter().map(|&name| name.to_owned()).collect();
    names.extend((0..=u8::MAX).map(|byte| crate::byte_alphabet::char_of_byte(byte).to_string()));
    for [left, right] in merges {
        let product = format!("{left}{right}");
        if !names.contains(&product) {
            names.push(product);
        }
    }
    let vocab: Map<String, Value> = names.into_iter().zip(0..).map(|(name, id)| (name, json!(id))).collect();
    let added = specials.iter().zip(0..).map(|(content, id)| json!({ "id": id, "content": content }));
    json!({
        "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "use_regex": true },
        "decoder": { "type": "ByteLevel" },
        "model": { "type": "BPE", "vocab": vocab, "merges": merges }
    })
}
