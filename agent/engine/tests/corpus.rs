//! Replays the fuzzing corpora: `ok-*` must be accepted, `bad-*` refused, and nothing may panic.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::fs;
use std::path::Path;

use deepinfer_engine::fuzzing;

fn replay(kind: &str, target: fn(&[u8]) -> bool) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(kind);
    let (mut accepted, mut refused) = (0, 0);
    for entry in fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        let expected = match name.split('-').next() {
            Some("ok") => true,
            Some("bad") => false,
            _ => panic!("{}: corpus files are named ok-... or bad-...", path.display()),
        };
        let bytes = fs::read(&path).unwrap();
        assert_eq!(target(&bytes), expected, "{}", path.display());
        // Cut anywhere, nothing may panic either.
        for len in (0..bytes.len()).step_by(bytes.len() / 40 + 1) {
            target(&bytes[..len]);
        }
        for (at, byte) in mutations(bytes.len()) {
            let mut changed = bytes.clone();
            changed[at] = byte;
            target(&changed);
        }
        if expected { accepted += 1 } else { refused += 1 }
    }
    assert!(accepted >= 3 && refused >= 10, "{kind}: {accepted} accepted, {refused} refused");
}

/// Places and values of single changed bytes, spread over a file.
fn mutations(len: usize) -> impl Iterator<Item = (usize, u8)> {
    const BYTES: [u8; 8] = [0, b'"', b'9', b'-', b',', b'}', b'\\', 0xFF];
    let step = (len / 60).max(1);
    (0..len).step_by(step).enumerate().map(|(i, at)| (at, BYTES[i % BYTES.len()]))
}

#[test]
fn safetensors_headers() {
    replay("safetensors", fuzzing::safetensors_header);
}

#[test]
fn indexes() {
    replay("index", fuzzing::safetensors_index);
}

#[test]
fn configurations() {
    replay("config", fuzzing::config_json);
}

#[test]
fn the_header_reader_agrees_with_the_safetensors_crate() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/safetensors");
    let mut paths: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.push(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../e2e/golden/tiny-quant/model-00001-of-00001.safetensors"),
    );
    for path in paths {
        // The crate keeps one of two tensors of the same name; we refuse.
        if path.ends_with("bad-name-twice") {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        let theirs = safetensors::SafeTensors::read_metadata(&bytes);
        let Ok(ours) = deepinfer_engine::weights::header::parse(&bytes) else {
            assert!(theirs.is_err(), "{}: only we refuse it", path.display());
            continue;
        };
        let (start, theirs) =
            theirs.unwrap_or_else(|e| panic!("{}: only they refuse it: {e}", path.display()));
        let infos = theirs.tensors();
        assert_eq!(infos.len(), ours.entries.len());
        for entry in ours.entries {
            let info = infos[&entry.name];
            assert_eq!((info.dtype, &info.shape), (entry.dtype, &entry.shape));
            let begin = 8 + start + info.data_offsets.0;
            assert_eq!((begin, info.data_offsets.1 - info.data_offsets.0), (entry.offset, entry.len));
        }
    }
}
