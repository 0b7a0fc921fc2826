//! The head of a safetensors file: eight bytes of length, then JSON that says where each tensor lies.
//!
//! Invariant: in a [`Header`] every tensor lies inside the file, is as long as its shape and dtype say, and
//! shares no byte with another. Whatever the bytes were, nothing here panics or allocates more than a small
//! multiple of them.

use std::fmt;

use safetensors::Dtype;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;

/// Longest JSON part that the format allows.
const MAX_JSON: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name as stored, an optional `model.` prefix included.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape as stored.
    pub shape: Vec<usize>,
    /// First byte, counted from the beginning of the file.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// What a file says it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// The tensors in the order of their bytes.
    pub entries: Vec<Entry>,
}

/// Reads the header of a whole file.
///
/// # Errors
/// All problems of the file that could be found, without its name.
pub fn parse(file: &[u8]) -> Result<Header, Vec<String>> {
    let (json, data_start) = json_part(file).map_err(|problem| vec![problem])?;
    let raw: RawHeader = serde_json::from_slice(json)
        .map_err(|e| vec![format!("has a header that is not JSON of tensors: {e}")])?;
    let (mut header, mut problems) = (Header::default(), Vec::new());
    for (name, value) in raw.0 {
        if name == "__metadata__" {
            continue;
        }
        match entry(name, &value, data_start) {
            Ok(entry) => header.entries.push(entry),
            Err(problem) => problems.push(problem),
        }
    }
    header.entries.sort_by_key(|e| (e.offset, e.len));
    check_layout(&header.entries, data_start, file.len(), &mut problems);
    check_names(&header.entries, &mut problems);
    if problems.is_empty() { Ok(header) } else { Err(problems) }
}

/// The JSON and the position of the first data byte.
fn json_part(file: &[u8]) -> Result<(&[u8], usize), String> {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(format!("is truncated: {} bytes, not even the length of the header", file.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_JSON {
        return Err(format!("is no safetensors file: its header would be {length} bytes long"));
    }
    let length = length as usize;
    match rest.get(..length) {
        Some(json) => Ok((json, 8 + length)),
        None => {
            Err(format!("is truncated: the header ends at byte {}, the file at {}", 8 + length, file.len()))
        }
    }
}

fn entry(name: String, value: &Value, data_start: usize) -> Result<Entry, String> {
    let read = || {
        let dtype: Dtype = serde_json::from_value(value.get("dtype")?.clone()).ok()?;
        let shape: Vec<usize> = serde_json::from_value(value.get("shape")?.clone()).ok()?;
        let (begin, end): (usize, usize) = serde_json::from_value(value.get("data_offsets")?.clone()).ok()?;
        Some((dtype, shape, begin, end))
    };
    let Some((dtype, shape, begin, end)) = read() else {
        let dtype = value.get("dtype").and_then(Value::as_str).unwrap_or("missing");
        return Err(format!("tensor {name}: unreadable dtype ({dtype}), shape or data_offsets"));
    };
    let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &dim| bits.checked_mul(dim));
    match (bits, end.checked_sub(begin), data_start.checked_add(begin), data_start.checked_add(end)) {
        (Some(bits), Some(len), Some(offset), Some(_)) if len.checked_mul(8) == Some(bits) => {
            Ok(Entry { name, dtype, shape, offset, len })
        }
        _ => Err(format!("tensor {name}: data_offsets [{begin}, {end}] do not fit {dtype} {shape:?}")),
    }
}

/// Every data byte belongs to exactly one tensor.
fn check_layout(entries: &[Entry], data_start: usize, file_len: usize, problems: &mut Vec<String>) {
    let described = entries.iter().map(|e| e.offset + e.len).max().unwrap_or(data_start);
    if described > file_len {
        problems.push(format!("is truncated: its tensors end at byte {described}, the file at {file_len}"));
        return;
    }
    let mut next = data_start;
    for entry in entries {
        if entry.offset < next {
            problems.push(format!("tensor {}: its bytes overlap those of the tensor before it", entry.name));
        } else if entry.offset > next && problems.is_empty() {
            problems.push(format!(
                "tensor {}: the {} bytes before it belong to no tensor",
                entry.name,
                entry.offset - next
            ));
        }
        next = next.max(entry.offset + entry.len);
    }
    if next < file_len && problems.is_empty() {
        problems.push(format!("has {} bytes after its last tensor", file_len - next));
    }
}

fn check_names(entries: &[Entry], problems: &mut Vec<String>) {
    let mut names: Vec<&str> = entries.iter().map(|e| e.name.as_str()).collect();
    names.sort_unstable();
    let mut twice: Vec<&str> =
        names.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
    twice.dedup();
    problems.extend(twice.into_iter().map(|name| format!("tensor {name}: named twice in the header")));
}

/// A JSON object that keeps double keys.
pub(super) struct RawHeader(pub(super) Vec<(String, Value)>);

impl<'de> serde::Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(RawHeader(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}
