//! Chat files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    deepinfer_gateway::fuzzing::fuzz_chat(bytes);
});
