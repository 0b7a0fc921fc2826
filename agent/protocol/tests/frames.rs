//! Frames from hostile bytes: the fuzz corpus, and mutations of good frames. Nothing panics, nothing is allocated on
//! the word of a length.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::path::Path;

use deepinfer_protocol::frame;
use deepinfer_protocol::fuzzing::fuzz_frames;
use deepinfer_protocol::generate::{FinishReason, GenerateSpec, Logprob, Token, TokenEvent};
use deepinfer_protocol::limits::MAX_FRAME_BYTES;
use deepinfer_protocol::message::{
    Assignment, DecodeWork, Message, Peer, PieceKind, PrefillEntry, PrefillWork, Refusal,
};
use deepinfer_protocol::{Attempt, Epoch, Generation, Rank, RequestId, Span};
use proptest::prelude::*;

fn spec() -> GenerateSpec {
    GenerateSpec {
        temperature: f32::NAN,
        top_p: 1.0,
        seed: u64::MAX,
        max_tokens: 7,
        min_tokens: 0,
        stop_tokens: vec![1, 2],
        logprobs: Some(20),
    }
}

fn samples() -> Vec<Message> {
    let (request, attempt) = (RequestId(u128::MAX - 5), Attempt(2));
    let assignment = Assignment { epoch: Epoch(3), number: 4 };
    let top = (0..20).map(|i| (i, -0.5)).collect();
    let token = Token { id: 9, logprob: Some(Box::new(Logprob { logprob: f32::NEG_INFINITY, top })) };
    vec![
        Message::Hello {
            version: 2,
            name: "gateway-0".into(),
            peer: Peer::Gateway,
            process: 1 << 63,
            nonce: [1; 32],
            key: Generation(2),
            mac: [3; 32],
        },
        Message::Enqueue(PrefillEntry {
            request,
            attempt,
            tokens: 1 << 20,
            max_tokens: 1,
            waited: Span::MAX,
            deadline: Span::ZERO,
            resumed: true,
            exclude: vec!["a".into(), "".into()],
        }),
        Message::Prefill(PrefillWork {
            request,
            attempt,
            assignment,
            spec: spec(),
            tokens: (0..5000).collect(),
            prompt_tokens: 4000,
            salt: [7; 32],
            reuse: true,
        }),
        Message::Decode(DecodeWork {
            request,
            attempt,
            assignment,
            rank: Rank(3),
            spec: spec(),
            tokens: vec![u32::MAX; 10],
            prompt_tokens: 1,
            holder: "worker".into(),
            preemptions: 1,
        }),
        Message::Tokens(vec![TokenEvent {
            request,
            attempt,
            index: 8,
            tokens: vec![token],
            finish: Some(FinishReason::Stop),
        }]),
        Message::FetchKv { request, attempt, only: Some(PieceKind::Block(4)) },
        Message::Refuse { request, attempt, reason: Refusal::NoRoom, retry_after: Span::secs(1) },
        Message::Heartbeat,
    ]
}

#[test]
fn the_corpus_breaks_nothing() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/frames");
    let mut count = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        fuzz_frames(&std::fs::read(entry.unwrap().path()).unwrap());
        count += 1;
    }
    assert!(count > 30, "{count} files");
}

#[test]
fn messages_of_every_shape_come_back_as_they_were() {
    let mut bytes = Vec::new();
    for message in samples() {
        frame::encode(&message, b"payload", &mut bytes);
    }
    fuzz_frames(&bytes);
    let mut rest = &bytes[..];
    for message in samples() {
        let (frame, used) = frame::decode(rest, MAX_FRAME_BYTES).unwrap().unwrap();
        // Not equality: a temperature is NaN.
        assert_eq!(format!("{:?}", frame.message), format!("{message:?}"));
        assert_eq!(frame.payload, b"payload");
        rest = &rest[used..];
    }
    assert!(rest.is_empty());
}

proptest! {
    #[test]
    fn damaged_frames_are_refused_or_read_but_never_panic(
        which in 0usize..8,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = Vec::new();
        frame::encode(&samples()[which], b"xyz", &mut bytes);
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        fuzz_frames(&bytes);
        fuzz_frames(&bytes[..cut.index(bytes.len())]);
    }

    #[test]
    fn any_bytes_are_refused_or_read_but_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        fuzz_frames(&bytes);
    }
}
