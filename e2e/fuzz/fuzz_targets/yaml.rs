//! Cluster files in YAML.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    deepinfer_crds::fuzzing::fuzz_yaml(bytes);
});
