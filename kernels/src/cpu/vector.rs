//! Norms, element-wise functions, rotations: one row is one thread's, many rows are shared out.

use super::Cpu;
use super::pool::DisjointSlice;
use super::simd::vector;
use crate::host::HostBuf;
use crate::ops::Element;

pub(super) type F32 = HostBuf<f32>;
pub(super) type U32 = HostBuf<u32>;

/// Elements below which an operation stays on the calling thread: waking another takes about as long as reading
/// and writing so many.
const PARALLEL_ELEMENTS: usize = 1 << 15;

/// The first `len` elements of a buffer.
///
/// # Panics
/// If the buffer is shorter: a wrong shape is a bug of the caller.
pub(super) fn part<'a, T: Element>(buffer: &'a HostBuf<T>, len: usize, name: &str) -> &'a [T] {
    assert!(buffer.0.len() >= len, "{name} has {} elements, {len} are needed", buffer.0.len());
    &buffer.0[..len]
}

/// [`part`], to be written.
pub(super) fn part_mut<'a, T: Element>(buffer: &'a mut HostBuf<T>, len: usize, name: &str) -> &'a mut [T] {
    assert!(buffer.0.len() >= len, "{name} has {} elements, {len} are needed", buffer.0.len());
    &mut buffer.0[..len]
}

/// How many of `rows` rows one task takes if a row costs as much as touching `elements` elements: all of them if
/// they are few, else four tasks per thread. At least 1.
pub(super) fn rows_per_task(cpu: &Cpu, rows: usize, elements: usize) -> usize {
    if cpu.threads() == 1 || rows * elements < PARALLEL_ELEMENTS {
        rows.max(1)
    } else {
        let smallest = (PARALLEL_ELEMENTS / 4).div_ceil(elements.max(1));
        rows.div_ceil(4 * cpu.threads()).max(smallest)
    }
}

/// `y[r] = x[r] * rsqrt(mean(x[r]^2) + eps) * weight`.
pub(super) fn rmsnorm(cpu: &Cpu, x: &F32, rows: usize, width: usize, weight: &F32, eps: f32, y: &mut F32) {
    let x = part(x, rows * width, "x");
    let weight = part(weight, width, "weight");
    let y = part_mut(y, rows * width, "y");
    let per_task = rows_per_task(cpu, rows, width);
    cpu.pool.run_pieces(y, (per_task * width).max(1), &|task, _, y| {
        let x = &x[task * per_task * width..];
        for (y, x) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            vector::rmsnorm_row(cpu.level, x, weight, eps, y);
        }
    });
}

/// `y += x`.
pub(super) fn add(cpu: &Cpu, y: &mut F32, x: &F32, len: usize) {
    let x = part(x, len, "x");
    let piece = rows_per_task(cpu, len.div_ceil(16), 16) * 16;
    cpu.pool.run_pieces(part_mut(y, len, "y"), piece, &|task, _, y| {
        vector::add(cpu.level, y, &x[task * piece..][..y.len()]);
    });
}

/// `x *= factor`.
pub(super) fn scale(cpu: &Cpu, x: &mut F32, factor: f32, len: usize) {
    let piece = rows_per_task(cpu, len.div_ceil(16), 16) * 16;
    cpu.pool.run_pieces(part_mut(x, len, "x"), piece, &|_, _, x| {
        vector::scale(cpu.level, x, factor);
    });
}

/// `gate = silu(min(gate, limit)) * clamp(up, -limit, limit)`.
pub(super) fn swiglu(cpu: &Cpu, gate: &mut F32, up: &F32, len: usize, limit: f32) {
    let up = part(up, len, "up");
    // An exponential costs as much as moving four numbers.
    let piece = rows_per_task(cpu, len.div_ceil(16), 64) * 16;
    cpu.pool.run_pieces(part_mut(gate, len, "gate"), piece, &|task, _, gate| {
        vector::swiglu(cpu.level, gate, &up[task * piece..][..gate.len()], limit);
    });
}

/// Rotates the last `rd` channels of every head.
#[allow(clippy::too_many_arguments)]
pub(super) fn rope(
    cpu: &Cpu,
    x: &mut F32,
    rows: usize,
    heads: usize,
    width: usize,
    rd: usize,
    cos_sin: &F32,
    inverse: bool,
) {
    assert!(rd <= width && rd.is_multiple_of(2), "rotation of {rd} of {width} channels");
    let row = heads * width;
    let x = part_mut(x, rows * row, "x");
    let cos_sin = part(cos_sin, rows * rd, "cos_sin");
    let per_task = rows_per_task(cpu, rows, heads * rd);
    cpu.pool.run_pieces(x, (per_task * row).max(1), &|task, _, x| {
        for (i, x) in x.chunks_exact_mut(row).enumerate() {
            let r = task * per_task + i;
            vector::rope_row(cpu.level, x, heads, width, rd, &cos_sin[r * rd..(r + 1) * rd], inverse);
        }
    });
}

/// `out[g, c] = sum_i v[g ratio + i, c] * softmax_i(gate[g ratio + i, c])`.
pub(super) fn compress_pool(
    cpu: &Cpu,
    values: &F32,
    gates: &F32,
    groups: usize,
    ratio: usize,
    width: usize,
    out: &mut F32,
) {
    assert!(ratio > 0, "a group has at least one row");
    let size = ratio * width;
    let values = part(values, groups * size, "values");
    let gates = part(gates, groups * size, "gates");
    let out = part_mut(out, groups * width, "out");
    let per_task = rows_per_task(cpu, groups, 4 * size);
    cpu.pool.run_pieces(out, (per_task * width).max(1), &|task, _, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let at = (task * per_task + i) * size;
            vector::pool_group(cpu.level, &values[at..at + size], &gates[at..at + size], ratio, out);
        }
    });
}

/// The Engram gate (model.md section 8); see [`crate::Backend::engram_gate`].
#[allow(clippy::too_many_arguments)]
pub(super) fn engram_gate(
    cpu: &Cpu,
    stream: &mut F32,
    rows: usize,
    copies: usize,
    width: usize,
    kv: &F32,
    q_weight: &F32,
    k_weight: &F32,
    open: &[u8],
    eps: f32,
    gates: &mut F32,
) {
    let stream = DisjointSlice::new(part_mut(stream, rows * copies * width, "stream"));
    let kv = part(kv, rows * (copies + 1) * width, "kv");
    let q_weight = part(q_weight, copies * width, "q_weight");
    let k_weight = part(k_weight, copies * width, "k_weight");
    let gates = DisjointSlice::new(part_mut(gates, rows * copies, "gates"));
    assert!(open.len() >= rows, "open flags of {rows} rows");
    // One task takes some of all rows' copies; each copy is normed on its own.
    let per_task = rows_per_task(cpu, rows * copies, 4 * width);
    cpu.pool.run((rows * copies).div_ceil(per_task), &|task, _| {
        for at in task * per_task..(rows * copies).min((task + 1) * per_task) {
            let (r, i) = (at / copies, at % copies);
            let gate = &mut gates.claim(at, 1)[0];
            if open[r] == 0 {
                *gate = 0.0;
                continue;
            }
            let kv = &kv[r * (copies + 1) * width..(r + 1) * (copies + 1) * width];
            let part = i * width..(i + 1) * width;
            *gate = vector::engram_copy(
                cpu.level,
                stream.claim(at * width, width),
                &kv[part.clone()],
                &kv[copies * width..],
                &q_weight[part.clone()],
                &k_weight[part],
                eps,
            );
        }
    });
}

#[cfg(test)]
#[path = "vector_tests.rs"]
mod tests;
