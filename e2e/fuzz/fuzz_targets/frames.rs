//! Frames of data ports.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    deepinfer_protocol::fuzzing::fuzz_frames(bytes);
});
