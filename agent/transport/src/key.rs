//! The cluster's keys: who holds one may speak on data and control ports.
//!
//! Invariant: a key is never printed; tags are compared in constant time.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use deepinfer_protocol::Generation;
use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Generations that are accepted side by side while keys roll: n and n-1.
const ACCEPTED_GENERATIONS: usize = 2;

/// A key of one generation.
pub type GenerationKey = (Generation, [u8; 32]);

/// Keys of a cluster: generations n and n-1 are accepted, the highest signs. Clones share the keys: where one is told
/// of others ([`ClusterKey::replace`]), they are in force everywhere at once.
#[derive(Clone)]
pub struct ClusterKey {
    generations: Arc<RwLock<Arc<[GenerationKey]>>>,
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterKey").field("generations", &self.numbers()).finish_non_exhaustive()
    }
}

impl ClusterKey {
    /// A cluster with one key.
    pub fn new(generation: Generation, key: [u8; 32]) -> Self {
        Self::of(vec![(generation, key)])
    }

    /// A cluster with these keys, in any order.
    ///
    /// # Panics
    /// Without any.
    pub fn of(generations: Vec<GenerationKey>) -> Self {
        assert!(!generations.is_empty(), "a cluster has at least one key");
        Self { generations: Arc::new(RwLock::new(generations.into())) }
    }

    /// A fresh random key of generation 1, for clusters that live in one process.
    ///
    /// # Errors
    /// If the operating system gives no random bytes.
    pub fn random() -> std::io::Result<Self> {
        Ok(Self::new(Generation(1), random_bytes()?))
    }

    /// Puts other keys in force, here and in every clone. Connections that are open stay open.
    ///
    /// # Panics
    /// Without any key.
    pub fn replace(&self, generations: Vec<GenerationKey>) {
        assert!(!generations.is_empty(), "a cluster has at least one key");
        *self.generations.write().unwrap_or_else(PoisonError::into_inner) = generations.into();
    }

    /// Generations that are held, in the order in which they were given.
    pub fn numbers(&self) -> Vec<Generation> {
        self.held().iter().map(|(generation, _)| *generation).collect()
    }

    /// Whether these are the keys in force.
    pub fn holds(&self, generations: &[GenerationKey]) -> bool {
        *self.held() == *generations
    }

    /// Signs with the newest key: HMAC-SHA256 over the parts, one after the other. Callers put parts of a fixed
    /// length first, so that two lists of parts never give the same bytes.
    pub fn sign(&self, parts: &[&[u8]]) -> (Generation, [u8; 32]) {
        let held = self.held();
        let newest = held.iter().max_by_key(|(generation, _)| *generation);
        let (generation, key) = newest.expect("a cluster has at least one key");
        (*generation, tag(key, parts).finalize().into_bytes().into())
    }

    /// Signs with the key of this generation; `None` if it is not accepted.
    pub fn sign_as(&self, generation: Generation, parts: &[&[u8]]) -> Option<[u8; 32]> {
        let held = self.held();
        let key = accepted(&held).find(|(g, _)| *g == generation).map(|(_, key)| key)?;
        Some(tag(key, parts).finalize().into_bytes().into())
    }

    /// Whether `mac` is the tag of the parts under this generation's key.
    pub fn verify(&self, generation: Generation, parts: &[&[u8]], mac: &[u8]) -> bool {
        let held = self.held();
        accepted(&held)
            .filter(|(g, _)| *g == generation)
            .any(|(_, key)| tag(key, parts).verify_slice(mac).is_ok())
    }

    /// Whether `mac` is the tag of the parts under any accepted key.
    pub fn verify_any(&self, parts: &[&[u8]], mac: &[u8]) -> bool {
        let held = self.held();
        accepted(&held).any(|(_, key)| tag(key, parts).verify_slice(mac).is_ok())
    }

    /// Whether keys of this generation are accepted.
    pub fn accepts(&self, generation: Generation) -> bool {
        accepted(&self.held()).any(|(g, _)| *g == generation)
    }

    fn held(&self) -> Arc<[GenerationKey]> {
        self.generations.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn accepted(held: &[GenerationKey]) -> impl Iterator<Item = &GenerationKey> {
    let highest = held.iter().map(|(g, _)| g.0).max().unwrap_or_default();
    let lowest = highest.saturating_sub(ACCEPTED_GENERATIONS as u64 - 1);
    held.iter().filter(move |(g, _)| g.0 >= lowest)
}

/// Bytes that nobody can guess.
pub(crate) fn random_bytes() -> std::io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| std::io::Error::other(error.to_string()))?;
    Ok(bytes)
}

fn tag(key: &[u8; 32], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("any key length is fine for HMAC");
    for part in parts {
        mac.update(part);
    }
    mac
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_key_signs_and_the_two_newest_are_accepted() {
        let key = ClusterKey::of(vec![
            (Generation(3), [3; 32]),
            (Generation(2), [2; 32]),
            (Generation(1), [1; 32]),
        ]);
        let (generation, mac) = key.sign(&[b"a", b"b"]);
        assert_eq!(generation, Generation(3));
        assert!(key.verify(Generation(3), &[b"ab"], &mac));
        assert!(!key.verify(Generation(2), &[b"ab"], &mac));
        assert!(!key.verify(Generation(3), &[b"abc"], &mac));
        assert!(!key.verify(Generation(3), &[b"ab"], &mac[..31]));
        let older = ClusterKey::new(Generation(2), [2; 32]).sign(&[b"x"]).1;
        assert!(key.verify_any(&[b"x"], &older));
        let oldest = ClusterKey::new(Generation(1), [1; 32]).sign(&[b"x"]).1;
        assert!(!key.verify_any(&[b"x"], &oldest), "n-2 has expired");
    }

    #[test]
    fn a_key_is_not_printed() {
        let text = format!("{:?}", ClusterKey::new(Generation(7), [0xab; 32]));
        assert!(text.contains('7') && !text.contains("ab") && !text.contains("171"), "{text}");
    }
}
