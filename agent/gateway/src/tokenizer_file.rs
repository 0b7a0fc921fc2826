//! Reading and checking `tokenizer.json`.
//!
//! Every check names the field it is about. What comes out is a [`TokenizerFile`]: the text of every id, and a
//! copy of the file from which the encoder is built. In that copy the added tokens are unreachable: their
//! vocabulary entries carry names outside the byte alphabet and the merges that would build them are gone. That
//! is the invariant behind "text never becomes a special id", whatever the file says about merges.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::{Map, Value, json};

use crate::byte_alphabet::{bytes_of_token, char_of_byte};

/// Ids may have holes, but the id space stays within this many ids of twice the entries.
const SPARE_IDS: usize = 4096;

/// A field of `tokenizer.json` that cannot be used, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FieldProblem {
    /// Path of the field, such as `model.vocab`.
    pub(crate) field: String,
    /// What is wrong with it and what is expected.
    pub(crate) problem: String,
}

fn problem(field: impl Into<String>, problem: impl Into<String>) -> FieldProblem {
    FieldProblem { field: field.into(), problem: problem.into() }
}

/// One id: its vocabulary string and the bytes that it stands for.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) name: Box<str>,
    pub(crate) bytes: Box<[u8]>,
    pub(crate) special: bool,
}

/// A checked tokenizer file.
#[derive(Debug)]
pub(crate) struct TokenizerFile {
    /// Indexed by id; `None` where the file leaves a hole.
    pub(crate) entries: Vec<Option<Entry>>,
    /// The added tokens: content to id.
    pub(crate) special_ids: BTreeMap<String, u32>,
    /// What the encoder is built from; the added tokens are unreachable in it.
    pub(crate) encoder_json: Value,
}

impl TokenizerFile {
    /// Check the parsed file `root`.
    pub(crate) fn check(mut root: Value) -> Result<Self, FieldProblem> {
        let Some(file) = root.as_object_mut() else {
            return Err(problem("top level", "expected an object with `model` and `added_tokens`"));
        };
        check_pipeline(file)?;
        let special_ids = read_added_tokens(file.get("added_tokens"))?;
        let model = match file.get_mut("model") {
            Some(Value::Object(model)) => model,
            Some(_) => return Err(problem("model", "expected an object")),
            None => return Err(problem("model", "missing; this is not a tokenizer.json")),
        };
        check_model_settings(model)?;
        let vocab = read_vocab(model.get("vocab"))?;
        check_byte_alphabet(&vocab, &special_ids)?;
        let entries = place_entries(&vocab, &special_ids)?;
        let merges = reachable_merges(model.get("merges"), &vocab, &special_ids)?;
        model.insert("merges".to_owned(), Value::Array(merges));
        model.insert("vocab".to_owned(), Value::Object(unreachable_specials(vocab, &special_ids)));
        // Added tokens, limits and templates are not the encoder's business: rendering writes the special
        // tokens, the engine checks lengths, and nothing may be cut or appended silently.
        file.insert("added_tokens".to_owned(), json!([]));
        for field in ["truncation", "padding", "post_processor"] {
            file.insert(field.to_owned(), Value::Null);
        }
        Ok(Self { entries, special_ids, encoder_json: root })
    }
}

/// The steps around the model must be byte-level: otherwise ids do not stand for bytes.
fn check_pipeline(file: &Map<String, Value>) -> Result<(), FieldProblem> {
    for (field, list) in [("pre_tokenizer", "pretokenizers"), ("decoder", "decoders")] {
        let step = file.get(field).unwrap_or(&Value::Null);
        if !mentions_byte_level(step, list) {
            let found = step.get("type").unwrap_or(step);
            let expected =
                "only byte-level tokenizers are supported (type `ByteLevel`, alone or in a `Sequence`)";
            return Err(problem(field, format!("{expected}, found {}", shorten(&found.to_string()))));
        }
    }
    Ok(())
}

fn mentions_byte_level(step: &Value, list: &str) -> bool {
    match step.get("type").and_then(Value::as_str) {
        Some("ByteLevel") => true,
        Some("Sequence") => step
            .get(list)
            .and_then(Value::as_array)
            .is_some_and(|steps| steps.iter().any(|step| mentions_byte_level(step, list))),
        _ => false,
    }
}

/// Settings of the BPE model that would change ids in ways the encoder or the decoder does not follow.
fn check_model_settings(model: &Map<String, Value>) -> Result<(), FieldProblem> {
    match model.get("type") {
        None => {}
        Some(kind) if kind == "BPE" => {}
        Some(kind) => {
            return Err(problem(
                "model.type",
                format!("expected `BPE`, found {}", shorten(&kind.to_string())),
            ));
        }
    }
    let neutral = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Number(number) => number.as_f64() == Some(0.0),
        _ => false,
    };
    for field in ["dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"] {
        if let Some(value) = model.get(field)
            && !neutral(value)
        {
            let found = shorten(&value.to_string());
            return Err(problem(
                format!("model.{field}"),
                format!("{found} is not supported; expected null"),
            ));
        }
    }
    Ok(())
}

fn read_added_tokens(added: Option<&Value>) -> Result<BTreeMap<String, u32>, FieldProblem> {
    let list = match added {
        None | Some(Value::Null) => return Ok(BTreeMap::new()),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(problem("added_tokens", "expected an array")),
    };
    let mut contents = BTreeMap::new();
    let mut ids = HashSet::new();
    for (index, token) in list.iter().enumerate() {
        let field = |name: &str| format!("added_tokens[{index}].{name}");
        let content = token
            .get("content")
            .and_then(Value::as_str)
            .filter(|content| !content.is_empty())
            .ok_or_else(|| problem(field("content"), "expected a string that is not empty"))?;
        let id = read_id(token.get("id")).ok_or_else(|| problem(field("id"), "expected a token id"))?;
        if !ids.insert(id) {
            return Err(problem(field("id"), format!("id {id} is used by two added tokens")));
        }
        if contents.insert(content.to_owned(), id).is_some() {
            return Err(problem(field("content"), format!("{content:?} is listed twice")));
        }
    }
    Ok(contents)
}

fn read_id(value: Option<&Value>) -> Option<u32> {
    value.and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok())
}

fn read_vocab(vocab: Option<&Value>) -> Result<HashMap<String, u32>, FieldProblem> {
    let vocab = match vocab {
        Some(Value::Object(vocab)) => vocab,
        Some(_) => return Err(problem("model.vocab", "expected an object from token to id")),
        None => return Err(problem("model.vocab", "missing")),
    };
    if vocab.is_empty() {
        return Err(problem("model.vocab", "is empty; a tokenizer needs at least the 256 byte tokens"));
    }
    vocab
        .iter()
        .map(|(name, id)| match read_id(Some(id)) {
            Some(_) if name.is_empty() => Err(problem("model.vocab", "contains the empty token")),
            Some(id) => Ok((name.clone(), id)),
            None => Err(problem(format!("model.vocab[{name:?}]"), "expected a token id")),
        })
        .collect()
}

/// Every byte needs its own token (else some text could not be encoded), and none of them may be an added token
/// (else that byte could not be written as text).
fn check_byte_alphabet(
    vocab: &HashMap<String, u32>,
    special_ids: &BTreeMap<String, u32>,
) -> Result<(), FieldProblem> {
    let mut missing = 0;
    let mut first = None;
    for byte in 0..=u8::MAX {
        let name = char_of_byte(byte).to_string();
        if special_ids.contains_key(&name) {
            return Err(problem("added_tokens", format!("{name:?} is also the token of byte {byte:#04x}")));
        }
        if !vocab.contains_key(&name) {
            missing += 1;
            first = first.or(Some(byte));
        }
    }
    match first {
        None => Ok(()),
        Some(byte) => Err(problem(
            "model.vocab",
            format!("lacks {missing} of the 256 byte tokens, the first for byte {byte:#04x}"),
        )),
    }
}

/// Put every token at its id and refuse contradictions between the vocabulary and the added tokens.
fn place_entries(
    vocab: &HashMap<String, u32>,
    special_ids: &BTreeMap<String, u32>,
) -> Result<Vec<Option<Entry>>, FieldProblem> {
    let count = vocab.len() + special_ids.len();
    let largest = vocab.values().chain(special_ids.values()).copied().max().unwrap_or(0) as usize;
    if largest >= 2 * count + SPARE_IDS {
        return Err(problem(
            "model.vocab",
            format!("id {largest} is far beyond the {count} tokens of the file"),
        ));
    }
    let mut entries: Vec<Option<Entry>> = vec![None; largest + 1];
    for (content, &id) in special_ids {
        if let Some(&other) = vocab.get(content)
            && other != id
        {
            return Err(problem(
                "added_tokens",
                format!("{content:?} has id {id}, but {other} in model.vocab"),
            ));
        }
        let bytes = content.as_bytes().into();
        entries[id as usize] = Some(Entry { name: content.as_str().into(), bytes, special: true });
    }
    for (name, &id) in vocab {
        if special_ids.contains_key(name) {
            continue;
        }
        if let Some(other) = &entries[id as usize] {
            return Err(problem(
                "model.vocab",
                format!("id {id} belongs to both {name:?} and {:?}", other.name),
            ));
        }
        let bytes = bytes_of_token(name);
        entries[id as usize] = Some(Entry { name: name.as_str().into(), bytes, special: false });
    }
    Ok(entries)
}

/// The merges of the file without those that build, or build upon, an added token.
fn reachable_merges(
    merges: Option<&Value>,
    vocab: &HashMap<String, u32>,
    special_ids: &BTreeMap<String, u32>,
) -> Result<Vec<Value>, FieldProblem> {
    let merges = match merges {
        Some(Value::Array(merges)) => merges,
        Some(_) => return Err(problem("model.merges", "expected an array")),
        None => return Err(problem("model.merges", "missing")),
    };
    let mut kept = Vec::with_capacity(merges.len());
    for (index, merge) in merges.iter().enumerate() {
        let field = || format!("model.merges[{index}]");
        let pair = match merge {
            Value::String(text) => text.split_once(' '),
            Value::Array(pair) => match pair.as_slice() {
                [Value::String(left), Value::String(right)] => Some((left.as_str(), right.as_str())),
                _ => None,
            },
            _ => None,
        };
        let Some((left, right)) = pair else {
            return Err(problem(field(), "expected two tokens, as `[\"a\", \"b\"]` or `\"a b\"`"));
        };
        let product = format!("{left}{right}");
        for token in [left, right, &product] {
            if !vocab.contains_key(token) {
                return Err(problem(
                    field(),
                    format!("{} is not in model.vocab", shorten(&format!("{token:?}"))),
                ));
            }
        }
        if ![left, right, &product].iter().any(|&token| special_ids.contains_key(token)) {
            kept.push(merge.clone());
        }
    }
    Ok(kept)
}

/// The vocabulary with added tokens and holes renamed to strings that no text can become: U+0000 is not a
/// character of the byte alphabet. Ids stay contiguous, which the encoder asks for.
fn unreachable_specials(
    vocab: HashMap<String, u32>,
    special_ids: &BTreeMap<String, u32>,
) -> Map<String, Value> {
    let placeholder = |id: u32| format!("\0{id}");
    let largest = vocab.values().copied().max().unwrap_or(0);
    let mut free: HashSet<u32> = (0..=largest).collect();
    let mut names = Map::new();
    for (name, id) in vocab {
        free.remove(&id);
        let name = if special_ids.contains_key(&name) { placeholder(id) } else { name };
        names.insert(name, id.into());
    }
    for id in free {
        names.insert(placeholder(id), id.into());
    }
    names
}

/// At most 60 characters of a value, for messages.
fn shorten(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
