//! config.json files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _accepted = deepinfer_engine::fuzzing::config_json(bytes);
});
