//! Scalar definitions of every operation: obvious, slow, and the judge of every other backend.
//!
//! Sums are sequential in ascending order and held in float64, functions are those of `std` in float64, and
//! results are rounded to float32 once, where an operation's formula writes a float32. So the distance between
//! another backend and this one is that backend's rounding error and hardly anything of this one's.
//! Where the model itself rounds (cache formats, FP8 inputs of experts) the same codes are used as everywhere.
//!
//! Inputs are assumed free of NaN: with NaN an operation still returns, with NaN or an arbitrary order of picks.
//!
//! - `memory`: rows in cache formats, moving rows.
//! - `dense`: products, norms, rotations, element-wise functions.
//! - `hyper`: hyper-connections. `attention`: attention and pooling. `index`: selection of entries.
//! - `experts`: router and experts. `engram`: the Engram gate.

mod attention;
mod dense;
mod engram;
mod experts;
mod hyper;
mod index;
mod memory;

use crate::formats::RowFormat;
use crate::host::{HostBuf, HostStore, HostWeight};
use crate::ops::{
    AttentionArgs, Backend, CandidateUse, Element, ExpertParams, ExpertSet, HcParams, IndexQuery,
    MatrixSource, RouteParams, Selection,
};

/// The reference backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

type F32 = HostBuf<f32>;
type U32 = HostBuf<u32>;

/// `sum_c a[c] * b[c]`, c ascending from +0. Products of two float32 are exact in float64.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).fold(0.0, |sum, (&a, &b)| sum + f64::from(a) * f64::from(b))
}

/// `(mean(x^2) + eps)^(-1/2)`.
fn inverse_rms(x: &[f32], eps: f32) -> f64 {
    1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt()
}

/// `1 / (1 + e^-x)`.
fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The first `len` elements of a buffer.
///
/// # Panics
/// If the buffer is shorter: a wrong shape is a bug of the caller.
fn part<'a, T: Element>(buffer: &'a HostBuf<T>, len: usize, name: &str) -> &'a [T] {
    assert!(buffer.0.len() >= len, "{name} has {} elements, {len} are needed", buffer.0.len());
    &buffer.0[..len]
}

/// [`part`], to be written.
fn part_mut<'a, T: Element>(buffer: &'a mut HostBuf<T>, len: usize, name: &str) -> &'a mut [T] {
    assert!(buffer.0.len() >= len, "{name} has {} elements, {len} are needed", buffer.0.len());
    &mut buffer.0[..len]
}

impl Backend for Reference {
    type Buf<T: Element> = HostBuf<T>;
    type Weight = HostWeight;
    type Store = HostStore;

    fn name(&self) -> String {
        "reference".into()
    }

    fn alloc<T: Element>(&self, len: usize) -> HostBuf<T> {
        HostBuf(vec![T::default(); len])
    }

    fn write<T: Element>(&self, dst: &mut HostBuf<T>, at: usize, src: &[T]) {
        dst.0[at..at + src.len()].copy_from_slice(src);
    }

    fn read<T: Element>(&self, src: &HostBuf<T>, at: usize, dst: &mut [T]) {
        dst.copy_from_slice(&src.0[at..at + dst.len()]);
    }

    fn weight(&self, source: MatrixSource) -> HostWeight {
        HostWeight::new(source)
    }

    fn store(&self, format: RowFormat, width: usize, rows: usize) -> HostStore {
        HostStore::new(format, width, rows)
    }

    fn store_rows(&self, x: &F32, dst: &mut HostStore, dst_rows: &[u32]) {
        memory::store_rows(x, dst, dst_rows);
    }

    fn load_rows(&self, src: &HostStore, src_rows: &[u32], out: &mut F32) {
        memory::load_rows(src, src_rows, out);
    }

    fn copy_rows(&self, src: &HostStore, src_rows: &[u32], dst: &mut HostStore, dst_rows: &[u32]) {
        memory::copy_rows(src, src_rows, dst, dst_rows);
    }

    fn export_rows(&self, src: &HostStore, rows: &[u32], out: &mut Vec<u8>) {
        memory::export_rows(src, rows, out);
    }

    fn import_rows(&self, dst: &mut HostStore, rows: &[u32], bytes: &[u8]) {
        memory::import_rows(dst, rows, bytes);
    }

    fn fake_quantize(&self, x: &mut F32, rows: usize, width: usize, format: RowFormat) {
        memory::fake_quantize(x, rows, width, format);
    }

    fn gather(&self, table: &HostWeight, ids: &[u32], out: &mut F32) {
        memory::gather(table, ids, out);
    }

    fn take_rows(&self, src: &F32, width: usize, ids: &[u32], dst: &mut F32) {
        memory::take_rows(src, width, ids, dst);
    }

    fn broadcast_copies(&self, x: &F32, rows: usize, copies: usize, width: usize, out: &mut F32) {
        memory::broadcast_copies(x, rows, copies, width, out);
    }

    fn mean_copies(
        &self,
        stream: &F32,
        rows: usize,
        copies: usize,
        width: usize,
        out: &mut F32,
        stride: usize,
        at: usize,
    ) {
        memory::mean_copies(stream, rows, copies, width, out, stride, at);
    }

    fn matmul(&self, w: &HostWeight, x: &F32, rows: usize, y: &mut F32) {
        dense::matmul_grouped(w, 1, x, rows, y);
    }

    fn matmul_grouped(&self, w: &HostWeight, groups: usize, x: &F32, rows: usize, y: &mut F32) {
        dense::matmul_grouped(w, groups, x, rows, y);
    }

    fn rmsnorm(&self, x: &F32, rows: usize, width: usize, weight: &F32, eps: f32, y: &mut F32) {
        dense::rmsnorm(x, rows, width, weight, eps, y);
    }

    fn add(&self, y: &mut F32, x: &F32, len: usize) {
        dense::add(y, x, len);
    }

    fn scale(&self, x: &mut F32, factor: f32, len: usize) {
        dense::scale(x, factor, len);
    }

    fn rope(
        &self,
        x: &mut F32,
        rows: usize,
        heads: usize,
        width: usize,
        rd: usize,
        cos_sin: &F32,
        inverse: bool,
    ) {
        dense::rope(x, rows, heads, width, rd, cos_sin, inverse);
    }

    fn swiglu(&self, gate: &mut F32, up: &F32, len: usize, limit: f32) {
        dense::swiglu(gate, up, len, limit);
    }

    fn hc_mixes(
        &self,
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
        hyper::mixes(stream, rows, f, scale, base, p, pre, post, comb);
    }

    fn hc_collapse(&self, stream: &F32, rows: usize, copies: usize, width: usize, pre: &F32, x: &mut F32) {
        hyper::collapse(stream, rows, copies, width, pre, x);
    }

    fn hc_merge(
        &self,
        stream: &mut F32,
        rows: usize,
        copies: usize,
        width: usize,
        y: &F32,
        post: &F32,
        comb: &F32,
    ) {
        hyper::merge(stream, rows, copies, width, y, post, comb);
    }

    fn attention(&self, args: &AttentionArgs<'_, Self>, out: &mut F32) {
        attention::attention(args, out);
    }

    fn compress_pool(
        &self,
        values: &F32,
        gates: &F32,
        groups: usize,
        ratio: usize,
        width: usize,
        out: &mut F32,
    ) {
        attention::compress_pool(values, gates, groups, ratio, width, out);
    }

    fn index_scores(&self, query: &IndexQuery<'_, Self>, entries: usize, out: &mut F32) {
        index::scores(query, entries, out);
    }

    fn index_select(
        &self,
        query: &IndexQuery<'_, Self>,
        candidates: CandidateUse<'_, U32>,
        selection: &mut Selection<U32>,
    ) {
        index::select(query, candidates, selection);
    }

    fn route(
        &self,
        x: &F32,
        rows: usize,
        gate: &HostWeight,
        bias: &F32,
        bias_image: &F32,
        image: &[u8],
        p: RouteParams,
        ids: &mut U32,
        weights: &mut F32,
    ) {
        experts::route(x, rows, gate, bias, bias_image, image, p, ids, weights);
    }

    fn experts(
        &self,
        x: &F32,
        rows: usize,
        ids: &U32,
        weights: &F32,
        set: &ExpertSet<HostWeight>,
        p: ExpertParams,
        y: &mut F32,
        arrivals: &mut [u32],
    ) {
        experts::experts(x, rows, ids, weights, set, p, y, arrivals);
    }

    fn engram_gate(
        &self,
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
        engram::gate(stream, rows, copies, width, kv, q_weight, k_weight, open, eps, gates);
    }
}
