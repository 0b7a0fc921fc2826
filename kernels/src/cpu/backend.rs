//! [`Backend`] for [`Cpu`]: every operation is handed to the file it lives in.

use super::Cpu;
use super::vector::{F32, U32, part, part_mut};
use super::{attention, experts, hyper, index, route, rows, vector};
use crate::formats::RowFormat;
use crate::host::{HostBuf, HostStore, HostWeight};
use crate::ops::{
    AttentionArgs, Backend, CandidateUse, Element, ExpertParams, ExpertSet, HcParams, IndexQuery,
    MatrixSource, RouteParams, Selection,
};

impl Backend for Cpu {
    type Buf<T: Element> = HostBuf<T>;
    type Weight = HostWeight;
    type Store = HostStore;

    fn name(&self) -> String {
        let threads = self.threads();
        let plural = if threads == 1 { "" } else { "s" };
        format!("cpu ({}, {threads} thread{plural})", self.level)
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
        rows::store_rows(self, x, dst, dst_rows);
    }

    fn load_rows(&self, src: &HostStore, src_rows: &[u32], out: &mut F32) {
        rows::load_rows(self, src, src_rows, out);
    }

    fn copy_rows(&self, src: &HostStore, src_rows: &[u32], dst: &mut HostStore, dst_rows: &[u32]) {
        rows::copy_rows(src, src_rows, dst, dst_rows);
    }

    fn export_rows(&self, src: &HostStore, rows: &[u32], out: &mut Vec<u8>) {
        rows::export_rows(src, rows, out);
    }

    fn import_rows(&self, dst: &mut HostStore, rows: &[u32], bytes: &[u8]) {
        rows::import_rows(dst, rows, bytes);
    }

    fn fake_quantize(&self, x: &mut F32, rows: usize, width: usize, format: RowFormat) {
        rows::fake_quantize(self, x, rows, width, format);
    }

    fn gather(&self, table: &HostWeight, ids: &[u32], out: &mut F32) {
        rows::gather(self, table, ids, out);
    }

    fn take_rows(&self, src: &F32, width: usize, ids: &[u32], dst: &mut F32) {
        rows::take_rows(src, width, ids, dst);
    }

    fn broadcast_copies(&self, x: &F32, rows: usize, copies: usize, width: usize, out: &mut F32) {
        rows::broadcast_copies(x, rows, copies, width, out);
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
        rows::mean_copies(self, stream, rows, copies, width, out, stride, at);
    }

    fn matmul(&self, w: &HostWeight, x: &F32, rows: usize, y: &mut F32) {
        self.matmul_grouped(w, 1, x, rows, y);
    }

    fn matmul_grouped(&self, w: &HostWeight, groups: usize, x: &F32, rows: usize, y: &mut F32) {
        let x = part(x, rows * groups * w.cols, "x");
        self.matmul_blocks(w, groups, x, rows, part_mut(y, rows * w.rows, "y"));
    }

    fn rmsnorm(&self, x: &F32, rows: usize, width: usize, weight: &F32, eps: f32, y: &mut F32) {
        vector::rmsnorm(self, x, rows, width, weight, eps, y);
    }

    fn add(&self, y: &mut F32, x: &F32, len: usize) {
        vector::add(self, y, x, len);
    }

    fn scale(&self, x: &mut F32, factor: f32, len: usize) {
        vector::scale(self, x, factor, len);
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
        vector::rope(self, x, rows, heads, width, rd, cos_sin, inverse);
    }

    fn swiglu(&self, gate: &mut F32, up: &F32, len: usize, limit: f32) {
        vector::swiglu(self, gate, up, len, limit);
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
        hyper::mixes(self, stream, rows, f, scale, base, p, pre, post, comb);
    }

    fn hc_collapse(&self, stream: &F32, rows: usize, copies: usize, width: usize, pre: &F32, x: &mut F32) {
        hyper::collapse(self, stream, rows, copies, width, pre, x);
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
        hyper::merge(self, stream, rows, copies, width, y, post, comb);
    }

    fn attention(&self, args: &AttentionArgs<'_, Self>, out: &mut F32) {
        attention::attention(self, args, out);
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
        vector::compress_pool(self, values, gates, groups, ratio, width, out);
    }

    fn index_scores(&self, query: &IndexQuery<'_, Self>, entries: usize, out: &mut F32) {
        index::scores(self, query, entries, out);
    }

    fn index_select(
        &self,
        query: &IndexQuery<'_, Self>,
        candidates: CandidateUse<'_, U32>,
        selection: &mut Selection<U32>,
    ) {
        index::select(self, query, candidates, selection);
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
        route::route(self, x, rows, gate, bias, bias_image, image, p, ids, weights);
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
        experts::experts(self, &x.0, rows, &ids.0, &weights.0, set, p, &mut y.0, arrivals);
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
        vector::engram_gate(self, stream, rows, copies, width, kv, q_weight, k_weight, open, eps, gates);
    }
}
