//! Number formats of checkpoints and caches (model.md section 4), exact to the bit.
//!
//! - [`codes`]: single numbers: E4M3, E8M0, E2M1, BF16.
//! - [`rows`]: rows of channels as caches and activations store them.
//! - [`weights`]: weight matrices as checkpoints store them.
//!
//! Dequantised values are one float32 multiplication, `value * scale`. With an E8M0 scale it is exact (the scale
//! is a power of two) unless it leaves the range of float32, where it becomes infinite as IEEE 754 says. Scale
//! bytes 0 ..= 254 stand for 2^-127 ..= 2^127; byte 255 is NaN and so is everything it scales (the checkpoint
//! reader refuses it). The encoders write scale bytes 1 ..= 254 for finite input.
//!
//! Nothing here panics because of a value: a group that holds a NaN or an infinity is stored with a NaN scale
//! and comes back as NaN, so that a broken number is seen instead of being clamped into a plausible one.

use std::fmt;

pub mod codes;
pub mod rows;
pub mod weights;

pub use codes::{
    E2M1_VALUES, E4M3_MAX, E4M3_VALUES, bf16_decode, bf16_encode, e2m1_decode, e2m1_encode, e4m3_decode,
    e4m3_encode, e8m0_decode, e8m0_encode, pow2_ceil,
};
pub use rows::{decode_row, encode_row, quantize_row};
pub use weights::{decode_weight_row, encode_weight, encode_weight_into};

/// Side of an FP8 weight block, and group length of E8M0-scaled rows.
pub const GROUP: usize = 32;
/// Group length of the E4M3-scaled FP4 rows of the main KV.
pub const MAIN_GROUP: usize = 16;

/// How a weight matrix `[rows, cols]` is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightFormat {
    /// IEEE float32, little endian.
    F32,
    /// bfloat16, little endian.
    Bf16,
    /// E4M3 bytes with one E8M0 scale per 32 x 32 block.
    Fp8,
    /// E4M3 bytes with one E8M0 scale per row and 32 columns (Engram tables).
    Fp8Rows,
    /// E2M1, two columns a byte (even column in the low nibble), one E8M0 scale per row and 32 columns.
    Fp4,
}

impl WeightFormat {
    /// Bytes of the values of a `[rows, cols]` matrix. FP4 needs an even `cols`.
    pub fn data_bytes(self, rows: usize, cols: usize) -> usize {
        match self {
            WeightFormat::F32 => rows * cols * 4,
            WeightFormat::Bf16 => rows * cols * 2,
            WeightFormat::Fp8 | WeightFormat::Fp8Rows => rows * cols,
            WeightFormat::Fp4 => rows * cols / 2,
        }
    }

    /// Shape of the scale matrix; `(0, 0)` if the format has none.
    pub fn scale_shape(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            WeightFormat::F32 | WeightFormat::Bf16 => (0, 0),
            WeightFormat::Fp8 => (rows.div_ceil(GROUP), cols.div_ceil(GROUP)),
            WeightFormat::Fp8Rows | WeightFormat::Fp4 => (rows, cols.div_ceil(GROUP)),
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WeightFormat::F32 => "F32",
            WeightFormat::Bf16 => "BF16",
            WeightFormat::Fp8 => "FP8",
            WeightFormat::Fp8Rows => "FP8 rows",
            WeightFormat::Fp4 => "FP4",
        })
    }
}

/// How a cached or transmitted row of channels is stored: values first, then scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// float32, little endian: nothing is rounded.
    F32,
    /// E4M3 with an E8M0 scale per 32 channels: window KV, activations.
    Fp8,
    /// E2M1 with an E4M3 scale per 16 channels: main (compressed) KV.
    Fp4Main,
    /// E2M1 with an E8M0 scale per 32 channels: index keys and queries.
    Fp4Index,
}

impl RowFormat {
    /// Channels that share a scale; 1 for F32.
    pub fn group(self) -> usize {
        match self {
            RowFormat::F32 => 1,
            RowFormat::Fp8 | RowFormat::Fp4Index => GROUP,
            RowFormat::Fp4Main => MAIN_GROUP,
        }
    }

    /// Bytes of a row of `width` channels. `width` is a multiple of [`RowFormat::group`].
    pub fn row_bytes(self, width: usize) -> usize {
        debug_assert_eq!(width % self.group(), 0);
        match self {
            RowFormat::F32 => width * 4,
            RowFormat::Fp8 => width + width / GROUP,
            RowFormat::Fp4Main => width / 2 + width / MAIN_GROUP,
            RowFormat::Fp4Index => width / 2 + width / GROUP,
        }
    }
}
