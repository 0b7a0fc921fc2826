//! The files that several tests read, and small shared helpers.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use deepinfer_gateway::Tokenizer;

/// A path in the repository.
pub fn repository(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

/// The content of a file in the repository.
pub fn read(path: &str) -> Vec<u8> {
    let path = repository(path);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub const SHIPPED: &str = "examples/models/tiny-v41/tokenizer.json";

/// The tokenizer of the shipped model.
pub fn shipped() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    Arc::clone(TOKENIZER.get_or_init(|| Arc::new(Tokenizer::open(repository(SHIPPED)).unwrap())))
}

/// A small generator of numbers for tests that need many random cases.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}
