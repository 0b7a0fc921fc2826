//! The two numerics of the engine and the cache formats that follow from them (model.md sections 4 and 14).

use deepinfer_kernels::RowFormat;

/// How activations and caches are rounded. Weights are read in their stored format in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numerics {
    /// Nothing is rounded: float32 activations and caches.
    F32,
    /// Inputs of FP8 and FP4 weights, window KV, main KV and index vectors are rounded as in training.
    Quantized,
}

impl Numerics {
    /// Format of window KV rows.
    pub fn window_format(self) -> RowFormat {
        match self {
            Numerics::F32 => RowFormat::F32,
            Numerics::Quantized => RowFormat::Fp8,
        }
    }

    /// Format of main (compressed) KV rows.
    pub fn main_format(self) -> RowFormat {
        match self {
            Numerics::F32 => RowFormat::F32,
            Numerics::Quantized => RowFormat::Fp4Main,
        }
    }

    /// Format of index key rows.
    pub fn index_format(self) -> RowFormat {
        match self {
            Numerics::F32 => RowFormat::F32,
            Numerics::Quantized => RowFormat::Fp4Index,
        }
    }
}

impl std::fmt::Display for Numerics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Numerics::F32 => "f32",
            Numerics::Quantized => "quantized",
        })
    }
}
