//! The float32 product of the `gemm` crate, which the kernels for many rows are compared with.
//!
//! One of the fenced files: the crate takes pointers.

#![allow(unsafe_code)]

/// `y = x W^T` with x `[rows, cols]`, W `[outs, cols]`, y `[rows, outs]`, all row-major.
pub fn product(threads: usize, x: &[f32], w: &[f32], rows: usize, outs: usize, cols: usize, y: &mut [f32]) {
    assert!(x.len() >= rows * cols && w.len() >= outs * cols && y.len() >= rows * outs);
    let parallelism = match threads {
        1 => gemm::Parallelism::None,
        n => gemm::Parallelism::Rayon(n),
    };
    // SAFETY: with these sizes and strides (columns first, then rows) every access is inside the slices, as
    // asserted; y overlaps neither x nor W.
    unsafe {
        gemm::gemm(
            rows,
            outs,
            cols,
            y.as_mut_ptr(),
            1,
            outs as isize,
            false,
            x.as_ptr(),
            1,
            cols as isize,
            w.as_ptr(),
            cols as isize,
            1,
            0.0f32,
            1.0f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}
