//! Loops that do nothing but read, or nothing but multiply and add: what a kernel's time is compared with.

#![allow(unsafe_code)]

use super::decode::Decode;
use super::dispatch_fn;
use super::lanes::{LANES, Lanes};

/// Chains of multiply-adds: as many as latency times issue width, and no more than AVX2 has registers for pairs.
pub(crate) const CHAINS: usize = 6;
/// Floats between reading one and asking the memory for it.
const AHEAD: usize = 4096;
/// Floating point operations of one round of [`multiply_adds`].
pub(crate) const FLOPS_PER_ROUND: usize = CHAINS * LANES * 2;
/// Factor and addend; the chains converge.
pub(crate) const FACTOR: f32 = 0.5;

#[inline(always)]
fn sum_bits_lanes<L: Decode>(data: &[f32]) -> u32 {
    // The exclusive or of all words: the compiler makes vector code of it, and one that waits for memory only.
    let mut acc = [0u32; 64];
    let whole = data.len() / 64 * 64;
    let mut at = 0;
    while at < whole {
        let group = &data[at..at + 64];
        // Fetching ahead by instruction gets a little more out of the memory than the machine's own guesses.
        for line in 0..4 {
            L::prefetch(group.as_ptr().wrapping_add(AHEAD + 16 * line).cast());
        }
        for i in 0..64 {
            acc[i] ^= group[i].to_bits();
        }
        at += 64;
    }
    for (i, v) in data[whole..].iter().enumerate() {
        acc[i] ^= v.to_bits();
    }
    let mut all = 0;
    for v in acc {
        all ^= v;
    }
    all
}

dispatch_fn! {
    /// The exclusive or of the bits of all floats: reads everything once.
    pub(crate) fn sum_bits(data: &[f32]) -> u32 = sum_bits_lanes;
}

#[inline(always)]
fn multiply_adds_lanes<L: Lanes>(rounds: usize) -> f32 {
    let factor = L::splat(std::hint::black_box(FACTOR));
    // Different beginnings: equal chains would be computed once.
    let mut chains = [L::zero(); CHAINS];
    for i in 0..CHAINS {
        chains[i] = L::splat(i as f32);
    }
    for _ in 0..rounds {
        for i in 0..CHAINS {
            chains[i] = chains[i].fma(factor, factor);
        }
    }
    let mut sum = 0.0;
    for i in 0..CHAINS {
        sum += chains[i].reduce_add();
    }
    sum
}

dispatch_fn! {
    /// `rounds` multiply-adds in each of the chains, which begin at 0, 1, ...; the sum of their ends.
    pub(crate) fn multiply_adds(rounds: usize) -> f32 = multiply_adds_lanes;
}
