//! The tokenizer against the reference implementation, the streaming detokenizer, and damaged files.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::sync::Arc;

use common::{Dice, SHIPPED, read, repository, shipped};
use deepinfer_gateway::{Detokenizer, Tokenizer, TokenizerError, fuzzing};
use proptest::prelude::*;
use serde_json::{Value, json};

/// The reference encoder without its added vocabulary.
fn reference(path: &str) -> tokenizers::Tokenizer {
    let mut file: Value = serde_json::from_slice(&read(path)).unwrap();
    file["added_tokens"] = json!([]);
    serde_json::from_value(file).unwrap()
}

fn reference_ids(reference: &tokenizers::Tokenizer, text: &str) -> Vec<u32> {
    reference.encode_fast(text, false).unwrap().get_ids().to_vec()
}

/// Words, markup, control characters, whitespace of all kinds and random characters of all planes.
fn random_text(dice: &mut Dice) -> String {
    let words = [
        "hello",
        " the",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "<think>",
        "<｜User｜>",
        "｜DSML｜",
        "4567.89",
        "你好世界",
        "émigré",
        "e\u{301}",
        "👩‍👩‍👧",
        "don't",
        "\u{0}",
        "\u{a0}",
        "\u{3000}",
        "ａｂｃ",
        "मानक",
        "ไทย",
        "عربى",
        "\u{200d}",
        "🇩🇪",
        "{\"a\": 1}",
        "\u{10ffff}",
        "\u{fffd}",
        "㍿",
        "𝟙²½",
        "$",
        "—",
        "...",
        "_x_",
        "    x",
    ];
    let mut text = String::new();
    for _ in 0..dice.below(40) {
        match dice.below(5) {
            0 | 1 => text.push_str(words[dice.below(words.len())]),
            2 => text.extend(char::from_u32(dice.below(0x11_0000) as u32)),
            3 => text.extend(char::from_u32(dice.below(0x3000) as u32)),
            _ => text.push((32 + dice.below(95) as u8) as char),
        }
    }
    text
}

#[test]
fn the_fast_encoder_gives_the_ids_of_the_reference_and_decoding_gives_back_the_text() {
    for path in [SHIPPED, "e2e/golden/tiny-bf16/tokenizer.json"] {
        let tokenizer = Tokenizer::open(repository(path)).unwrap();
        let reference = reference(path);
        let mut dice = Dice(1);
        let check = |text: &str| {
            let ids = tokenizer.encode_text(text).unwrap();
            assert_eq!(ids, reference_ids(&reference, text), "{text:?}");
            assert_eq!(tokenizer.decode(&ids, true), text);
        };
        for _ in 0..3_000 {
            check(&random_text(&mut dice));
        }
        // Long enough for the encoder's parallel path.
        check(&(0..2_000).map(|_| random_text(&mut dice)).collect::<String>());
        for repeated in [" ", "\n", " \n", "a", "!", "好", "7", "\u{301}"] {
            check(&repeated.repeat(20_000));
        }
    }
}

/// A byte-level tokenizer with random merges over a few letters and parts of characters.
fn random_tokenizer(dice: &mut Dice) -> Value {
    let shipped = shipped();
    let byte_tokens = (0..shipped.vocab_size() as u32).filter(|&id| shipped.token_bytes(id).len() == 1);
    let mut names: Vec<String> = byte_tokens.map(|id| shipped.id_to_token(id).unwrap().to_owned()).collect();
    let mut parts: Vec<String> = ["a", "b", "Ġ", "Ã", "©", "ð", "Ł", "¤"].map(str::to_owned).to_vec();
    let mut merges: Vec<[String; 2]> = Vec::new();
    for _ in 0..dice.below(50) {
        let pair = [0; 2].map(|_| parts[dice.below(parts.len())].clone());
        let product = pair.concat();
        if product.len() < 30 && !merges.contains(&pair) {
            merges.push(pair);
            for list in [&mut names, &mut parts] {
                if !list.contains(&product) {
                    list.push(product.clone());
                }
            }
        }
    }
    let vocab: serde_json::Map<String, Value> =
        names.into_iter().zip(0..).map(|(n, id)| (n, json!(id))).collect();
    let mut file: Value = serde_json::from_slice(&read("e2e/golden/tiny-bf16/tokenizer.json")).unwrap();
    file["added_tokens"] = json!([]);
    file["pre_tokenizer"]["use_regex"] = json!(dice.below(2) == 0);
    file["model"]["ignore_merges"] = json!(dice.below(3) == 0);
    file["model"]["vocab"] = Value::Object(vocab);
    file["model"]["merges"] = json!(merges);
    file
}

#[test]
fn the_fast_encoder_follows_any_table_of_merges_as_the_reference_does() {
    let mut dice = Dice(6);
    for _ in 0..60 {
        let file = random_tokenizer(&mut dice);
        let tokenizer = Tokenizer::from_bytes("random", file.to_string().as_bytes()).unwrap();
        let reference: tokenizers::Tokenizer = serde_json::from_value(file).unwrap();
        for _ in 0..40 {
            let letters = ["a", "b", "aa", "ab", " ", "é", "🤭", "\n", "x"];
            let text: String = (0..dice.below(30)).map(|_| letters[dice.below(letters.len())]).collect();
            assert_eq!(tokenizer.encode_text(&text).unwrap(), reference_ids(&reference, &text), "{text:?}");
        }
    }
}

/// The pre-tokenizer of the family's large models, on the shipped vocabulary: the encoder has a scanner of its own
/// for exactly these patterns.
#[test]
fn the_scanner_for_the_familys_patterns_gives_the_ids_of_the_reference() {
    let mut file: Value = serde_json::from_slice(&read(SHIPPED)).unwrap();
    let patterns = [
        r"\p{N}{1,3}",
        "[一-龥\u{3040}-ゟ゠-ヿ]+",
        concat!(
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"##,
            "\r\n",
            r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[",
            "\r\n",
            r"]*|\s*[",
            "\r\n",
            r"]+|\s+(?!\S)|\s+"
        ),
    ];
    for (index, pattern) in patterns.into_iter().enumerate() {
        file["pre_tokenizer"]["pretokenizers"][index]["pattern"]["Regex"] = pattern.into();
    }
    let tokenizer = Tokenizer::from_bytes("large", file.to_string().as_bytes()).unwrap();
    file["added_tokens"] = json!([]);
    let reference: tokenizers::Tokenizer = serde_json::from_value(file).unwrap();
    let mut dice = Dice(2);
    for _ in 0..3_000 {
        let text = random_text(&mut dice);
        assert_eq!(tokenizer.encode_text(&text).unwrap(), reference_ids(&reference, &text), "{text:?}");
    }
    for c in (0..0x3_0000).filter_map(char::from_u32) {
        let text = format!("a{c}a {c}1{c}. {c}{c}\n{c} ");
        assert_eq!(tokenizer.encode_text(&text).unwrap(), reference_ids(&reference, &text), "{c:?}");
    }
}

#[test]
fn decoding_equals_the_reference_for_random_ids() {
    let reference = tokenizers::Tokenizer::from_file(repository(SHIPPED)).unwrap();
    let tokenizer = shipped();
    let mut dice = Dice(3);
    for _ in 0..2_000 {
        let ids: Vec<u32> =
            (0..dice.below(30)).map(|_| dice.below(tokenizer.vocab_size() + 3) as u32).collect();
        for skip in [false, true] {
            assert_eq!(tokenizer.decode(&ids, skip), reference.decode(&ids, skip).unwrap(), "{ids:?}");
        }
    }
}

#[test]
fn ids_tokens_and_sizes_are_those_of_the_file() {
    let tokenizer = shipped();
    assert_eq!(tokenizer.vocab_size(), 3072);
    assert_eq!(tokenizer.special_id("</think>"), Some(4));
    assert_eq!(tokenizer.special_id("the"), None);
    assert_eq!(tokenizer.id_to_token(4), Some("</think>"));
    assert_eq!(tokenizer.id_to_token(3072), None);
    assert!(tokenizer.is_special(4) && !tokenizer.is_special(20) && !tokenizer.is_special(u32::MAX));
    let ids = tokenizer.encode_text(" the").unwrap();
    assert_eq!(tokenizer.id_to_token(ids[0]), Some("Ġthe"));
    assert_eq!(tokenizer.token_bytes(ids[0]), b" the");
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
    assert!(tokenizer.encode_text("").unwrap().is_empty());
}

#[test]
fn a_tokenizer_larger_than_the_embedding_is_refused() {
    let tokenizer = shipped();
    tokenizer.check_embedding(3072).unwrap();
    tokenizer.check_embedding(4000).unwrap();
    let message = tokenizer.check_embedding(3071).unwrap_err().to_string();
    assert!(message.starts_with("tokenizer larger than the embedding"), "{message}");
    assert!(message.contains("3071") && message.contains("rows"), "{message}");
}

/// The pieces of a stream, each already checked to be text by its type.
fn stream(mut detokenizer: Detokenizer, ids: &[u32]) -> String {
    let mut text = String::new();
    for &id in ids {
        text.push_str(detokenizer.push(id));
    }
    text.push_str(detokenizer.finish());
    text
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// Ids below 280 are the special tokens and the single bytes, so broken characters are frequent.
    #[test]
    fn streaming_any_ids_gives_the_text_of_decoding_them_at_once(
        ids in prop::collection::vec(prop_oneof![0u32..3_080, 0u32..280, 128u32..280], 0..200),
    ) {
        let tokenizer = shipped();
        let spelled = stream(Detokenizer::with_special(Arc::clone(&tokenizer)), &ids);
        prop_assert_eq!(spelled, tokenizer.decode(&ids, false));
        let skipped = stream(Detokenizer::new(Arc::clone(&tokenizer)), &ids);
        prop_assert_eq!(skipped, tokenizer.decode(&ids, true));
    }

    #[test]
    fn streaming_the_ids_of_a_text_gives_the_text_in_whole_characters(text in ".{0,60}") {
        let tokenizer = shipped();
        let ids = tokenizer.encode_text(&text).unwrap();
        let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer));
        let mut position = 0;
        for &id in &ids {
            let piece = detokenizer.push(id);
            prop_assert!(text[position..].starts_with(piece), "{:?} at {}", piece, position);
            position += piece.len();
        }
        prop_assert_eq!(detokenizer.finish(), "");
        prop_assert_eq!(position, text.len());
    }
}

#[test]
fn a_character_appears_only_when_its_last_byte_has_come() {
    let tokenizer = shipped();
    let byte = |byte: u8| {
        (0..tokenizer.vocab_size() as u32).find(|&id| tokenizer.token_bytes(id) == [byte]).unwrap()
    };
    let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer));
    let bytes = "🤭".as_bytes();
    for &part in &bytes[..3] {
        assert_eq!(detokenizer.push(byte(part)), "");
    }
    assert_eq!(detokenizer.push(byte(bytes[3])), "🤭");
    assert_eq!(detokenizer.push(byte(bytes[0])), "");
    assert_eq!(detokenizer.push(byte(b'x')), "\u{fffd}x");
    assert_eq!(detokenizer.push(byte(bytes[0])), "");
    assert_eq!(detokenizer.finish(), "\u{fffd}");
    assert_eq!(detokenizer.finish(), "");
}

fn error_of(bytes: &[u8]) -> String {
    let error = Tokenizer::from_bytes("tokenizer.json", bytes).unwrap_err();
    assert!(!matches!(error, TokenizerError::Encode { .. }), "{error}");
    error.to_string()
}

#[test]
fn files_that_are_no_tokenizer_are_refused_with_their_name_and_the_reason() {
    let whole = read(SHIPPED);
    assert!(error_of(&whole[..whole.len() / 2]).contains("the file is truncated"));
    assert!(error_of(b"").contains("the file is truncated"));
    assert!(error_of(b"version https://git-lfs.github.com/spec/v1\n").contains("not valid JSON"));
    assert!(error_of(b"[]").contains("top level"));
    assert!(error_of(b"{}").contains("`pre_tokenizer`"));
    let mut dice = Dice(4);
    for length in 0..300 {
        let bytes: Vec<u8> = (0..length).map(|_| dice.below(256) as u8).collect();
        assert!(error_of(&bytes).starts_with("tokenizer.json: "));
    }
    let missing = Tokenizer::open(repository("examples/no-such/tokenizer.json")).unwrap_err().to_string();
    assert!(missing.contains("cannot read") && missing.contains("no-such"), "{missing}");
    let directory = tempfile::tempdir().unwrap();
    assert!(matches!(Tokenizer::open(directory.path()), Err(TokenizerError::Read { .. })));
}

/// What the message says, and the edit of a good file that leads to it.
type Edit = (&'static str, fn(&mut Value));

#[test]
fn wrong_fields_are_refused_by_name() {
    let edits: [Edit; 22] = [
        ("`model`: missing", |file| drop(file.as_object_mut().unwrap().remove("model"))),
        ("`model.vocab`: is empty", |file| file["model"]["vocab"] = json!({})),
        ("`model.vocab`: expected an object", |file| file["model"]["vocab"] = json!([])),
        ("`model.vocab`: missing", |file| drop(file["model"].as_object_mut().unwrap().remove("vocab"))),
        ("`model.vocab[\"a\"]`", |file| file["model"]["vocab"]["a"] = json!(-1)),
        ("`model.vocab[\"a\"]`", |file| file["model"]["vocab"]["a"] = json!("1")),
        ("belongs to both", |file| file["model"]["vocab"]["a"] = json!(700)),
        ("id 4000000000 is far beyond", |file| file["model"]["vocab"]["new"] = json!(4_000_000_000_u32)),
        ("lacks 1 of the 256 byte tokens, the first for byte 0x61", |file| {
            drop(file["model"]["vocab"].as_object_mut().unwrap().remove("a"));
        }),
        ("`model`: token 3072 length 70000", |file| {
            file["model"]["vocab"]["x".repeat(70_000)] = json!(3072);
        }),
        ("`model.type`", |file| file["model"]["type"] = json!("WordPiece")),
        ("`model.dropout`", |file| file["model"]["dropout"] = json!(0.1)),
        ("`model.byte_fallback`", |file| file["model"]["byte_fallback"] = json!(true)),
        ("`model.merges`: missing", |file| drop(file["model"].as_object_mut().unwrap().remove("merges"))),
        ("`model.merges[0]`", |file| file["model"]["merges"][0] = json!(["a"])),
        ("`model.merges[1]`: \"zqzq\" is not in model.vocab", |file| {
            file["model"]["merges"][1] = json!(["zqzq", "a"]);
        }),
        ("`pre_tokenizer`", |file| file["pre_tokenizer"] = json!({ "type": "Whitespace" })),
        ("`decoder`", |file| file["decoder"] = Value::Null),
        ("`added_tokens[0].content`", |file| file["added_tokens"][0]["content"] = json!("")),
        ("`added_tokens[1].id`: id 0 is used", |file| file["added_tokens"][1]["id"] = json!(0)),
        ("has id 9000, but 0 in model.vocab", |file| file["added_tokens"][0]["id"] = json!(9000)),
        ("also the token of byte 0x61", |file| file["added_tokens"][2]["content"] = json!("a")),
    ];
    let whole: Value = serde_json::from_slice(&read(SHIPPED)).unwrap();
    for (expected, edit) in edits {
        let mut file = whole.clone();
        edit(&mut file);
        let message = error_of(file.to_string().as_bytes());
        assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
    }
    let mut file = whole;
    file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("(");
    assert!(error_of(file.to_string().as_bytes()).contains("no encoder can be built from it"));
}

#[test]
fn added_tokens_that_merges_could_build_stay_unreachable_for_text() {
    let mut file: Value = serde_json::from_slice(&read(SHIPPED)).unwrap();
    let the = file["model"]["vocab"]["Ġthe"].clone();
    file["added_tokens"].as_array_mut().unwrap().push(json!({ "id": the, "content": "Ġthe" }));
    let ids_may_have_holes = 3080;
    file["model"]["vocab"]["behind-a-hole"] = json!(ids_may_have_holes);
    let tokenizer = Tokenizer::from_bytes("edited", file.to_string().as_bytes()).unwrap();
    assert!(tokenizer.is_special(the.as_u64().unwrap() as u32));
    assert_eq!(tokenizer.vocab_size(), ids_may_have_holes + 1);
    let ids = tokenizer.encode_text("in the then Ġthe").unwrap();
    assert!(!ids.iter().any(|&id| tokenizer.is_special(id)), "{ids:?}");
    assert_eq!(tokenizer.decode(&ids, true), "in the then Ġthe");
}

#[test]
fn damaged_tokenizer_files_give_errors_and_no_panics() {
    let whole = read("e2e/golden/tiny-bf16/tokenizer.json");
    let mut dice = Dice(5);
    let mut opened = 0;
    for _ in 0..300 {
        let mut bytes = whole.clone();
        for _ in 0..dice.below(4) + 1 {
            let at = dice.below(bytes.len());
            match dice.below(3) {
                0 => bytes[at] = dice.below(256) as u8,
                1 => bytes.truncate(at.max(1)),
                _ => drop(bytes.splice(at..(at + dice.below(9)).min(bytes.len()), *b"0")),
            }
        }
        opened += usize::from(Tokenizer::from_bytes("damaged", &bytes).is_ok());
    }
    assert!(opened < 300);
}

#[test]
fn the_corpus_of_the_fuzz_target_is_replayed() {
    let mut files = 0;
    for entry in std::fs::read_dir(repository("agent/gateway/tests/corpus/tokenizer")).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        fuzzing::fuzz_tokenizer(&bytes);
        fuzzing::fuzz_chat(&bytes);
        files += 1;
    }
    assert!(files >= 10, "{files} files");
}
