//! Entries for fuzzing: each takes any bytes and panics only if a promise is broken.

use crate::frame::{self, HEADER_BYTES};
use crate::limits::MAX_FRAME_BYTES;

/// Frames are read until the bytes end or mean nothing. What was read is written and read again: the bytes of
/// the second writing equal those of the first (floats may be NaN, so messages are compared as bytes).
pub fn fuzz_frames(mut bytes: &[u8]) {
    while let Ok(Some((frame, used))) = frame::decode(bytes, MAX_FRAME_BYTES) {
        assert!(used >= HEADER_BYTES && used <= bytes.len(), "a frame of {used} bytes of {}", bytes.len());
        let mut first = Vec::new();
        frame::encode(&frame.message, frame.payload, &mut first);
        let (again, length) = frame::decode(&first, MAX_FRAME_BYTES)
            .expect("what was written can be read")
            .expect("what was written is whole");
        assert_eq!(length, first.len());
        assert_eq!(again.payload, frame.payload);
        let mut second = Vec::new();
        frame::encode(&again.message, again.payload, &mut second);
        assert_eq!(first, second);
        bytes = &bytes[used..];
    }
}
