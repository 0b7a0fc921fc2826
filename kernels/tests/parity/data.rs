//! Inputs: a small seeded generator, floats with awkward values among them, and weights in every format.

use deepinfer_kernels::formats::{GROUP, decode_weight_row, encode_weight};
use deepinfer_kernels::host::HostWeight;
use deepinfer_kernels::{Backend, BlockTables, ByteView, MatrixSource, RowFormat, WeightFormat};

use crate::harness::upload;

/// Row counts of the sweeps: one, primes, powers of two, one above them.
pub const ROWS: [usize; 11] = [1, 2, 3, 5, 7, 8, 13, 17, 33, 64, 129];
/// Every weight format.
pub const WEIGHT_FORMATS: [WeightFormat; 5] =
    [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Fp8Rows, WeightFormat::Fp4];
/// Every row format.
pub const ROW_FORMATS: [RowFormat; 4] =
    [RowFormat::F32, RowFormat::Fp8, RowFormat::Fp4Main, RowFormat::Fp4Index];
/// Half a unit in the last place of 1, the relative error of one float32 rounding.
pub const HALF_ULP: f64 = 1.0 / 16_777_216.0;

/// Splitmix64.
pub struct Rng(u64);

impl Rng {
    /// A generator; equal seeds give equal numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// An integer below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// About normal, with standard deviation 1 and no value beyond 3.5.
    pub fn normal(&mut self) -> f32 {
        let sum: f64 = (0..4).map(|_| (self.bits() >> 11) as f64 / (1u64 << 53) as f64).sum();
        ((sum - 2.0) * 3f64.sqrt()) as f32
    }

    /// `n` normal numbers.
    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    /// `n` normal numbers, every eighth or so replaced by a zero of either sign, a subnormal, or something small.
    pub fn awkward(&mut self, n: usize) -> Vec<f32> {
        (0..n)
            .map(|_| match self.below(64) {
                0..3 => 0.0,
                3..5 => -0.0,
                5 => f32::from_bits(1 + self.below(1000) as u32),
                6 => -f32::MIN_POSITIVE / 3.0,
                7 => self.normal() * 1e-6,
                _ => self.normal(),
            })
            .collect()
    }

    /// `n` integers of -1, 0, 1 as floats: their sums and products are exact in any order.
    pub fn signs(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.below(3) as f32 - 1.0).collect()
    }

    /// The numbers below `n` in random order.
    pub fn permutation(&mut self, n: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            all.swap(i, self.below(i + 1));
        }
        all
    }
}

/// A weight as a checkpoint would hold it, and its values.
pub struct TestWeight {
    source: MatrixSource,
    /// Dequantised, row-major.
    pub values: Vec<f32>,
}

impl TestWeight {
    /// A weight of normal numbers, divided by the square root of `cols` so that products are about normal.
    pub fn normal(rng: &mut Rng, format: WeightFormat, rows: usize, cols: usize) -> Self {
        let factor = 1.0 / (cols as f32).sqrt();
        let values: Vec<f32> = rng.awkward(rows * cols).iter().map(|v| v * factor).collect();
        Self::of(format, rows, cols, &values)
    }

    /// A weight with these values, as near as the format allows.
    pub fn of(format: WeightFormat, rows: usize, cols: usize, values: &[f32]) -> Self {
        let (data, scales) = encode_weight(format, rows, cols, values);
        Self::stored(format, rows, cols, data, scales)
    }

    /// Every code of the format and many scales, as they come: nothing that an encoder would prefer.
    pub fn any_codes(rng: &mut Rng, format: WeightFormat, rows: usize, cols: usize) -> Self {
        let count = format.data_bytes(rows, cols);
        let data = match format {
            WeightFormat::F32 => rng.awkward(rows * cols).iter().flat_map(|v| v.to_le_bytes()).collect(),
            WeightFormat::Bf16 => {
                let numbers = rng.awkward(rows * cols);
                numbers.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect()
            }
            WeightFormat::Fp8 | WeightFormat::Fp8Rows => {
                let codes = (0..count).map(|_| rng.bits() as u8);
                codes.map(|code| if code & 0x7F == 0x7F { code ^ 1 } else { code }).collect()
            }
            WeightFormat::Fp4 => (0..count).map(|_| rng.bits() as u8).collect(),
        };
        let (scale_rows, scale_cols) = format.scale_shape(rows, cols);
        let scales = (0..scale_rows * scale_cols).map(|_| 110 + rng.below(30) as u8).collect();
        Self::stored(format, rows, cols, data, scales)
    }

    /// The given bytes.
    pub fn stored(format: WeightFormat, rows: usize, cols: usize, data: Vec<u8>, scales: Vec<u8>) -> Self {
        let scales = (!scales.is_empty()).then(|| unaligned(&scales, 3));
        let source = MatrixSource { format, rows, cols, data: unaligned(&data, 1), scales };
        let weight = HostWeight::new(source.clone());
        let mut values = vec![0.0; rows * cols];
        for (row, out) in values.chunks_exact_mut(cols.max(1)).enumerate() {
            decode_weight_row(&weight, row, out);
        }
        Self { source, values }
    }

    /// To be handed to a backend.
    pub fn source(&self) -> MatrixSource {
        self.source.clone()
    }

    /// Output rows.
    pub fn rows(&self) -> usize {
        self.source.rows
    }

    /// Input columns.
    pub fn cols(&self) -> usize {
        self.source.cols
    }

    /// Format.
    pub fn format(&self) -> WeightFormat {
        self.source.format
    }
}

/// A view that starts at an odd place, with other bytes around it: tensors of a checkpoint lie anywhere.
fn unaligned(bytes: &[u8], offset: usize) -> ByteView {
    let mut padded = vec![0xFF; offset];
    padded.extend_from_slice(bytes);
    padded.extend_from_slice(&[0xFF; 7]);
    ByteView::owned(padded).slice(offset, bytes.len())
}

/// Whether a format can hold rows of `cols` columns.
pub fn fits(format: WeightFormat, cols: usize) -> bool {
    format != WeightFormat::Fp4 || cols.is_multiple_of(2)
}

/// Bound of the error of a float32 dot product of length `n` whose terms have magnitudes that sum to `magnitude`:
/// sixteen chains of n / 16 fused steps and a tree of four additions each lose half a unit in the last place.
pub fn dot_bound(n: usize, magnitude: f64) -> f64 {
    (n.div_ceil(2 * GROUP) as f64 * 4.0 + 6.0) * HALF_ULP * magnitude + 1e-40
}

/// `sum |a b|`.
pub fn magnitude(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| (f64::from(a) * f64::from(b)).abs()).sum()
}

/// Entries of several sequences in blocks that lie anywhere in a store.
pub struct TestTables {
    row_sequence: Vec<u32>,
    blocks: Vec<u32>,
    ends: Vec<u32>,
    entries_per_block: usize,
    store_rows: usize,
}

impl TestTables {
    /// Tables for sequences of the given numbers of entries; row r belongs to sequence `row_sequence[r]`.
    pub fn new(rng: &mut Rng, row_sequence: Vec<u32>, entries: &[usize], entries_per_block: usize) -> Self {
        let counts: Vec<usize> = entries.iter().map(|n| n.div_ceil(entries_per_block)).collect();
        let total = counts.iter().sum::<usize>() + 2;
        let blocks = rng.permutation(total)[..total - 2].to_vec();
        let ends = counts.iter().scan(0, |end, n| {
            *end += *n as u32;
            Some(*end)
        });
        let (ends, store_rows) = (ends.collect(), total * entries_per_block);
        Self { row_sequence, blocks, ends, entries_per_block, store_rows }
    }

    /// The tables as a step with these rows sees them.
    pub fn view(&self, rows: std::ops::Range<usize>) -> BlockTables<'_> {
        BlockTables {
            row_sequence: &self.row_sequence[rows],
            blocks: &self.blocks,
            ends: &self.ends,
            entries_per_block: self.entries_per_block,
        }
    }

    /// Sequence of a row.
    pub fn sequence(&self, row: usize) -> usize {
        self.row_sequence[row] as usize
    }

    /// Rows that the store needs.
    pub fn store_rows(&self) -> usize {
        self.store_rows
    }
}

/// A store with these rows from row 0 on.
pub fn filled_store<B: Backend>(backend: &B, format: RowFormat, width: usize, values: &[f32]) -> B::Store {
    let rows = values.len() / width;
    let mut store = backend.store(format, width, rows);
    let places: Vec<u32> = (0..rows as u32).collect();
    backend.store_rows(&upload(backend, values), &mut store, &places);
    store
}
