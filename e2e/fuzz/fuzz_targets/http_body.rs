//! HTTP bodies of both OpenAI endpoints: parse and validate.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    deepinfer_gateway::fuzzing::fuzz_http_body(bytes);
});
