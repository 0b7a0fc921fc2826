//! What the tests of several operations share.

use super::{Cpu, SimdLevel};
use crate::host::HostBuf;

/// A reproducible stream of numbers.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// A number below `n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// Roughly bell-shaped, deviation 1.
    pub(super) fn float(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.next() as f32 / (1u32 << 31) as f32).sum();
        (sum - 2.0) * 1.7
    }

    pub(super) fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }

    pub(super) fn buffer(&mut self, len: usize) -> HostBuf<f32> {
        HostBuf(self.floats(len))
    }
}

/// Every level of this machine with one, two and three threads.
pub(super) fn backends() -> Vec<Cpu> {
    let levels = SimdLevel::available();
    levels
        .into_iter()
        .flat_map(|level| {
            (1..=3).map(move |threads| Cpu::with_level(threads, level).expect("an available level"))
        })
        .collect()
}

/// Runs `f` on every backend and asserts that all answers have the same bits; answers them.
pub(super) fn same_bits(what: &str, f: impl Fn(&Cpu) -> Vec<f32>) -> Vec<f32> {
    let mut first: Option<Vec<f32>> = None;
    for cpu in backends() {
        let got = f(&cpu);
        let expected = first.get_or_insert_with(|| got.clone());
        assert_bits(&format!("{what}: {cpu:?}"), &got, expected);
    }
    first.expect("a machine has at least one level")
}

/// Asserts equal bits.
pub(super) fn assert_bits(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!(g.to_bits() == e.to_bits(), "{what}: element {i} is {g:e}, expected {e:e}");
    }
}

/// Asserts that each difference is at most `tolerance * (1 + |expected|)`.
pub(super) fn assert_close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((g - e).abs() <= tolerance * (1.0 + e.abs()), "{what}: element {i} is {g:e}, expected {e:e}");
    }
}
