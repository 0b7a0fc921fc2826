//! tokenizer.json files, texts and ids.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    deepinfer_gateway::fuzzing::fuzz_tokenizer(bytes);
});
