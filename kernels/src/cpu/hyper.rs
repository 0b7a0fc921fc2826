//! Hyper-connections (model.md section 5): rows are shared out, the mixing matrix goes through the matmul.

use super::Cpu;
use super::pool::{DisjointSlice, SharedScratch};
use super::simd::hyper::{self, MAX_COPIES};
use super::vector::{F32, part, part_mut, rows_per_task};
use crate::host::HostWeight;
use crate::ops::HcParams;

/// Mixes of every row; see [`crate::Backend::hc_mixes`].
#[allow(clippy::too_many_arguments)]
pub(super) fn mixes(
    cpu: &Cpu,
    stream: &F32,
    rows: usize,
    f: &HostWeight,
    scale: &F32,
    base: &F32,
    p: HcParams,
    pre: &mut F32,
    post: &mut F32,
    comb: &mut F32,
) {
    let m = p.copies;
    assert!((1..=MAX_COPIES).contains(&m), "{m} copies of the stream, 1 to {MAX_COPIES} are supported");
    let (outputs, inputs) = (f.rows, f.cols);
    assert_eq!(outputs, m * (2 + m), "rows of the mixing matrix for {m} copies");
    assert!(inputs.is_multiple_of(m), "{inputs} channels in {m} copies");
    let stream = part(stream, rows * inputs, "stream");
    let scale = part(scale, 3, "scale");
    let base = part(base, outputs, "base");
    let pre = DisjointSlice::new(part_mut(pre, rows * m, "pre"));
    let post = DisjointSlice::new(part_mut(post, rows * m, "post"));
    let comb = DisjointSlice::new(part_mut(comb, rows * m * m, "comb"));
    let mut linear = SharedScratch::hold(&cpu.shared.linear);
    let z = linear.get(rows * outputs);
    cpu.matmul_rows(f, stream, rows, z);
    // The Sinkhorn iterations are a chain of divisions; they weigh as much as a few thousand channels.
    let per_task = rows_per_task(cpu, rows, inputs + 256 * p.iters);
    cpu.pool.run_pieces(z, per_task * outputs, &|task, _, z| {
        for (i, z) in z.chunks_exact_mut(outputs).enumerate() {
            let r = task * per_task + i;
            hyper::mixes_row(
                cpu.level,
                &stream[r * inputs..(r + 1) * inputs],
                z,
                scale,
                base,
                p,
                pre.claim(r * m, m),
                post.claim(r * m, m),
                comb.claim(r * m * m, m * m),
            );
        }
    });
}

/// `x[r] = sum_i pre[r, i] * stream[r, i]`.
pub(super) fn collapse(
    cpu: &Cpu,
    stream: &F32,
    rows: usize,
    copies: usize,
    width: usize,
    pre: &F32,
    x: &mut F32,
) {
    assert!(copies > 0, "a stream has at least one copy");
    let size = copies * width;
    let stream = part(stream, rows * size, "stream");
    let pre = part(pre, rows * copies, "pre");
    let x = part_mut(x, rows * width, "x");
    let per_task = rows_per_task(cpu, rows, size);
    cpu.pool.run_pieces(x, (per_task * width).max(1), &|task, _, x| {
        for (i, x) in x.chunks_exact_mut(width).enumerate() {
            let r = task * per_task + i;
            let stream = &stream[r * size..(r + 1) * size];
            hyper::collapse_row(cpu.level, stream, &pre[r * copies..(r + 1) * copies], x);
        }
    });
}

/// `stream[r, j] = post[r, j] * y[r] + sum_i comb[r, i, j] * stream[r, i]`, in place.
#[allow(clippy::too_many_arguments)]
pub(super) fn merge(
    cpu: &Cpu,
    stream: &mut F32,
    rows: usize,
    copies: usize,
    width: usize,
    y: &F32,
    post: &F32,
    comb: &F32,
) {
    assert!(
        (1..=MAX_COPIES).contains(&copies),
        "{copies} copies of the stream, 1 to {MAX_COPIES} are supported"
    );
    let size = copies * width;
    let stream = part_mut(stream, rows * size, "stream");
    let y = part(y, rows * width, "y");
    let post = part(post, rows * copies, "post");
    let comb = part(comb, rows * copies * copies, "comb");
    let per_task = rows_per_task(cpu, rows, size);
    cpu.pool.run_pieces(stream, (per_task * size).max(1), &|task, _, stream| {
        for (i, stream) in stream.chunks_exact_mut(size).enumerate() {
            let r = task * per_task + i;
            let comb = &comb[r * copies * copies..(r + 1) * copies * copies];
            let post = &post[r * copies..(r + 1) * copies];
            hyper::merge_row(cpu.level, stream, &y[r * width..(r + 1) * width], post, comb);
        }
    });
}
