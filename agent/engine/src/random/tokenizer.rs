//! A tokenizer for a random checkpoint: byte-level BPE, exactly `vocab_size` entries, with the special tokens
//! that prompt rendering writes.
//!
//! Words are made of all letter strings in order, a quarter of them again with a space in front, so that the
//! Engram vocabulary is about three quarters of the whole, as in the real model.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value, json};

use crate::shape::ModelShape;

/// Smallest vocabulary: bytes, special tokens and some words.
pub(super) const MIN_VOCAB: usize = 512;

const BOS: &str = "<｜begin▁of▁sentence｜>";
const EOS: &str = "<｜end▁of▁sentence｜>";
const PAD: &str = "<｜▁pad▁｜>";
const IMAGE: &str = "<｜image｜>";
const NOISE: &str = "<｜place▁holder▁no▁0｜>";
/// Special tokens without a place of their own: they take the lowest free ids.
const OTHERS: [&str; 15] = [
    "<think>",
    "</think>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "｜DSML｜",
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
];
/// Id of the image token in the released vocabulary, where prompt rendering expects it.
const RELEASED_IMAGE_ID: u32 = 129_264;

/// Special tokens by id.
///
/// # Errors
/// If the configuration gives one id to two of them.
fn special_tokens(shape: &ModelShape) -> Result<BTreeMap<u32, &'static str>, String> {
    let mut fixed = vec![
        ("bos_token_id", shape.bos_token_id, BOS),
        ("eos_token_id", shape.eos_token_id, EOS),
        ("pad_token_id", shape.pad_token_id, PAD),
    ];
    let released = || Some(RELEASED_IMAGE_ID).filter(|&id| (id as usize) < shape.vocab_size);
    if let Some(id) = shape.image_token_id.or_else(released) {
        fixed.push(("image_token_id", id, IMAGE));
    }
    if let Some(draft) = &shape.draft {
        fixed.push(("text_config.dspark_noise_token_id", draft.noise_token_id, NOISE));
    }
    let mut tokens = BTreeMap::new();
    for (field, id, token) in fixed {
        if let Some(other) = tokens.insert(id, token) {
            return Err(format!(
                "{field} is {id}, which is already {other}: special tokens need ids of their own"
            ));
        }
    }
    let placed = [IMAGE, NOISE].into_iter().filter(|token| !tokens.values().any(|t| t == token));
    let rest: Vec<&'static str> = OTHERS.into_iter().chain(placed).collect();
    let free: Vec<u32> = (0..).filter(|id| !tokens.contains_key(id)).take(rest.len()).collect();
    tokens.extend(free.into_iter().zip(rest));
    Ok(tokens)
}

/// The character that stands for a byte in byte-level vocabularies: itself if it is visible, else one above
/// 255.
fn byte_chars() -> [char; 256] {
    let visible =
        |b: u32| (0x21..=0x7E).contains(&b) || (0xA1..=0xAC).contains(&b) || (0xAE..=0xFF).contains(&b);
    let mut hidden = 0;
    std::array::from_fn(|byte| {
        let byte = byte as u32;
        let code = if visible(byte) {
            byte
        } else {
            hidden += 1;
            255 + hidden
        };
        char::from_u32(code).expect("below the surrogates")
    })
}

/// One more token, and the two that it is merged from.
struct Word {
    text: String,
    parts: (String, String),
}

/// Letter strings in order of length, every third one also with a space in front.
fn words(space: char) -> impl Iterator<Item = Word> {
    let letters = || ('a'..='z').map(String::from);
    let mut shorter: Vec<String> = letters().collect();
    let by_length = std::iter::from_fn(move || {
        let longer: Vec<Word> = shorter
            .iter()
            .flat_map(|stem| {
                letters().map(move |last| Word { text: format!("{stem}{last}"), parts: (stem.clone(), last) })
            })
            .collect();
        shorter = longer.iter().map(|word| word.text.clone()).collect();
        Some(longer)
    });
    by_length.flatten().enumerate().flat_map(move |(i, word)| {
        let spaced = (i % 3 == 2).then(|| {
            let parts = (space.to_string(), word.text.clone());
            Word { text: format!("{space}{}", word.text), parts }
        });
        [Some(word), spaced].into_iter().flatten()
    })
}

/// The text of tokenizer.json.
///
/// # Errors
/// If the vocabulary is too small, or two special tokens want one id.
pub(super) fn make(shape: &ModelShape) -> Result<String, String> {
    if shape.vocab_size < MIN_VOCAB {
        return Err(format!(
            "text_config.vocab_size is {}: a tokenizer is made for {MIN_VOCAB} entries and more; \
             name one with --tokenizer",
            shape.vocab_size
        ));
    }
    let special = special_tokens(shape)?;
    let bytes = byte_chars();
    let mut taken: HashSet<String> = special.values().map(|token| (*token).to_string()).collect();
    let mut vocab = Map::new();
    let mut free = (0..shape.vocab_size as u32).filter(|id| !special.contains_key(id));
    for (&id, &token) in &special {
        vocab.insert(token.to_string(), json!(id));
    }
    let mut merges = Vec::new();
    let alphabet = bytes.iter().map(|c| Word { text: c.to_string(), parts: Default::default() });
    for word in alphabet.chain(words(bytes[usize::from(b' ')])) {
        let Some(id) = free.next() else { break };
        assert!(taken.insert(word.text.clone()), "every word is made once");
        if !word.parts.0.is_empty() {
            merges.push(json!([word.parts.0, word.parts.1]));
        }
        vocab.insert(word.text, json!(id));
    }
    Ok(file(&special, vocab, merges).to_string())
}

fn file(special: &BTreeMap<u32, &str>, vocab: Map<String, Value>, merges: Vec<Value>) -> Value {
    let added = special.iter().map(|(id, content)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Vec<Value>>(),
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engram::TokenMap;
    use std::path::Path;
    use tokenizers::Tokenizer;

    fn shape(config: &str) -> ModelShape {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(config);
        crate::config::parse(&std::fs::read(path).unwrap()).unwrap().0
    }

    fn tokenizer(shape: &ModelShape) -> Tokenizer {
        Tokenizer::from_bytes(make(shape).unwrap()).unwrap()
    }

    #[test]
    fn it_has_exactly_as_many_entries_as_the_embedding_and_special_tokens_in_their_places() {
        for config in ["e2e/golden/tiny-quant/config.json", "examples/models/tiny-v41/config.json"] {
            let shape = shape(config);
            let tokenizer = tokenizer(&shape);
            assert_eq!(tokenizer.get_vocab_size(true), shape.vocab_size);
            assert_eq!(tokenizer.get_vocab(true).values().max(), Some(&(shape.vocab_size as u32 - 1)));
            let id = |token: &str| tokenizer.token_to_id(token).unwrap();
            assert_eq!((id(BOS), id(EOS), id(PAD)), (0, 1, 2));
            assert_eq!(Some(id(IMAGE)), shape.image_token_id);
            assert_eq!(id(NOISE), shape.draft.as_ref().unwrap().noise_token_id);
            for token in OTHERS {
                assert_eq!(tokenizer.decode(&[id(token)], false).unwrap(), token);
            }
        }
    }

    #[test]
    fn any_text_comes_back_and_common_letters_are_merged() {
        let tokenizer = tokenizer(&shape("examples/models/tiny-v41/config.json"));
        for text in ["Hello, world!\n\n\tTabs", "naïve 日本語 🙂", "\u{0}\u{7f}", "a able cable"] {
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(tokenizer.decode(ids.get_ids(), false).unwrap(), text);
        }
        assert!(tokenizer.encode("abcabc abc", false).unwrap().len() < 8);
    }

    #[test]
    fn some_tokens_share_an_engram_id() {
        let shape = shape("examples/models/tiny-v41/config.json");
        let map = TokenMap::from_tokenizer(make(&shape).unwrap().as_bytes(), shape.vocab_size).unwrap();
        let share = map.compressed_len() as f64 / map.len() as f64;
        assert!((0.7..0.85).contains(&share), "{share}");
    }

    #[test]
    fn a_small_vocabulary_or_ids_that_collide_are_refused() {
        let mut small = shape("e2e/golden/tiny-quant/config.json");
        small.vocab_size = 511;
        assert!(make(&small).unwrap_err().contains("vocab_size is 511"));
        let mut twice = shape("e2e/golden/tiny-quant/config.json");
        twice.image_token_id = Some(1);
        assert!(make(&twice).unwrap_err().contains("image_token_id is 1"));
    }
}
