//! The operations of the model: one trait, one line of shape and one formula each.
//!
//! Conventions. Matrices are row-major. `rows` is the number of token rows of the step; buffers may be longer
//! than an operation needs and only their first `rows * width` elements are read or written. Weights are
//! `[out, in]`. Selections return the highest scores, ties go to the lowest index. Sums have an order that
//! depends on the shape of the weight only (attention: on the keys, in ascending position), never on `rows`,
//! on the thread count or on what else is in the step: a row's result is bitwise the same in any company.
//!
//! Every operation asserts its shapes: a wrong shape is a bug of the caller, never an error of the user.

use crate::formats::{RowFormat, WeightFormat};
use crate::mapped::ByteView;

/// A plain number that device memory can hold.
pub trait Element: Copy + Default + Send + Sync + PartialEq + std::fmt::Debug + 'static {}
impl Element for f32 {}
impl Element for u32 {}

/// Device memory of a known length.
#[allow(clippy::len_without_is_empty)]
pub trait Buffer<T: Element>: Send + Sync {
    /// Number of elements.
    fn len(&self) -> usize;
}

/// A weight matrix as the checkpoint stores it.
#[derive(Clone, Debug)]
pub struct MatrixSource {
    /// How `data` and `scales` are to be read.
    pub format: WeightFormat,
    /// Output rows.
    pub rows: usize,
    /// Input columns.
    pub cols: usize,
    /// Values, row-major; for FP4 two columns a byte, the even one in the low nibble. Any alignment.
    pub data: ByteView,
    /// E8M0 scales, one byte each (see [`WeightFormat::scale_shape`]); `None` for F32 and BF16.
    pub scales: Option<ByteView>,
}

/// What is known of a weight without touching its bytes.
pub trait WeightInfo: Send + Sync {
    /// Stored format.
    fn format(&self) -> WeightFormat;
    /// Output rows.
    fn rows(&self) -> usize;
    /// Input columns.
    fn cols(&self) -> usize;
    /// Bytes of values and scales.
    fn bytes(&self) -> usize;
}

/// What is known of a row store without touching its bytes.
pub trait StoreInfo: Send + Sync {
    /// Format of every row.
    fn format(&self) -> RowFormat;
    /// Channels of a row.
    fn width(&self) -> usize;
    /// Number of rows.
    fn rows(&self) -> usize;
}

/// Parameters of the hyper-connection mixes (model.md section 5).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HcParams {
    /// Copies of the residual stream, `m`.
    pub copies: usize,
    /// Sinkhorn iterations, the first column-only one included.
    pub iters: usize,
    /// Added in the mixes and to every Sinkhorn denominator.
    pub eps: f32,
    /// Epsilon of the norm over all `m * H` channels.
    pub norm_eps: f32,
}

/// Parameters of the expert router (model.md section 7).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteParams {
    /// Experts picked per row.
    pub top_k: usize,
    /// Divide the picked scores by their sum (+ 1e-20); done only when `top_k > 1`.
    pub normalize: bool,
    /// Factor on the weights after that.
    pub scale: f32,
}

/// The three matrices of one expert.
#[derive(Debug)]
pub struct ExpertWeights<W> {
    /// Gate projection `[I, H]`.
    pub w1: W,
    /// Up projection `[I, H]`.
    pub w3: W,
    /// Down projection `[H, I]`.
    pub w2: W,
}

/// The experts a rank holds: slots with weights, and which slot serves which expert.
#[derive(Debug)]
pub struct ExpertSet<W> {
    /// Weights by local slot.
    pub slots: Vec<ExpertWeights<W>>,
    /// Logical expert -> local slot. Every expert that the router can pick must have a slot below `slots.len()`.
    pub slot_of: Vec<u32>,
}

/// Parameters of the expert computation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertParams {
    /// Picks per row.
    pub top_k: usize,
    /// Clamp of SwiGLU: gate from above, up both ways; 0 or less means none.
    pub limit: f32,
    /// Round the inputs of `w1`, `w3` and `w2` to FP8 ([`RowFormat::Fp8`]) first.
    pub quantize: bool,
}

/// Which blocks hold the compressed entries of each sequence of the step.
///
/// Entry `j` of sequence `s` lies in store row
/// `blocks[ends[s-1] + j / entries_per_block] * entries_per_block + j % entries_per_block`.
#[derive(Clone, Copy, Debug)]
pub struct BlockTables<'a> {
    /// Sequence ordinal of each row of the step, `[rows]`.
    pub row_sequence: &'a [u32],
    /// Block ids of all sequences, one after the other.
    pub blocks: &'a [u32],
    /// End of each sequence's part of `blocks`, `[sequences]`.
    pub ends: &'a [u32],
    /// Entries in one block: 128 tokens divided by the compression ratio.
    pub entries_per_block: usize,
}

impl BlockTables<'_> {
    /// Store row of entry `entry` as seen by step row `row`.
    pub fn store_row(&self, row: usize, entry: usize) -> usize {
        let sequence = self.row_sequence[row] as usize;
        let first = if sequence == 0 { 0 } else { self.ends[sequence - 1] as usize };
        let block = self.blocks[first + entry / self.entries_per_block] as usize;
        block * self.entries_per_block + entry % self.entries_per_block
    }
}

/// Compressed entries chosen for each row of a step, ascending.
#[derive(Debug)]
pub struct Selection<U> {
    /// Entry ordinals, `[rows, top_k]`; the first `counts[row]` of a row are valid and ascending.
    pub indices: U,
    /// Valid entries per row, `[rows]`.
    pub counts: U,
    /// Row stride of `indices`.
    pub top_k: usize,
}

/// Candidate blocks (groups of consecutive entries) of each row, ascending; the same layout as [`Selection`].
#[derive(Debug)]
pub struct Candidates<U> {
    /// Block ordinals (entry / block_size), `[rows, max_blocks]`.
    pub indices: U,
    /// Valid blocks per row.
    pub counts: U,
    /// Row stride of `indices` and number of blocks kept.
    pub max_blocks: usize,
    /// Entries in a block.
    pub block_size: usize,
}

/// What an index selection does with the candidate blocks (model.md 6.4).
pub enum CandidateUse<'a, U> {
    /// Look at all visible entries.
    Ignore,
    /// Look at all visible entries, and also write the best blocks: block score = highest entry score, the block
    /// with the newest visible entry always in, `max_blocks` kept.
    Produce(&'a mut Candidates<U>),
    /// Look only inside these blocks.
    Restrict(&'a Candidates<U>),
}

/// Input of [`Backend::index_select`] and [`Backend::index_scores`].
pub struct IndexQuery<'a, B: Backend> {
    /// Rows of the step.
    pub rows: usize,
    /// Index heads.
    pub heads: usize,
    /// Channels of an index head.
    pub width: usize,
    /// Rotated queries `[rows, heads * width]`. If the keys are [`RowFormat::Fp4Index`], each head is rounded to
    /// that format first.
    pub query: &'a B::Buf<f32>,
    /// Head weights `[rows, heads]`, scaled, of any sign.
    pub weights: &'a B::Buf<f32>,
    /// Index keys.
    pub keys: &'a B::Store,
    /// Visible entries of each row, `[rows]`.
    pub visible: &'a [u32],
    /// Where the entries lie.
    pub tables: BlockTables<'a>,
}

/// Compressed keys of an attention call.
pub struct GlobalKeys<'a, B: Backend> {
    /// Main KV.
    pub store: &'a B::Store,
    /// Entries each row may see.
    pub selection: &'a Selection<B::Buf<u32>>,
    /// Where the entries lie.
    pub tables: BlockTables<'a>,
}

/// Input of [`Backend::attention`].
pub struct AttentionArgs<'a, B: Backend> {
    /// Rows of the step.
    pub rows: usize,
    /// Query heads; all share one key/value vector per position.
    pub heads: usize,
    /// Channels of a head and of a key.
    pub width: usize,
    /// Factor on `q . k`.
    pub scale: f32,
    /// Rotated queries `[rows, heads * width]`.
    pub query: &'a B::Buf<f32>,
    /// Sink logit per head `[heads]`; adds `exp(sink)` to the denominator.
    pub sink: &'a B::Buf<f32>,
    /// Window keys.
    pub window: &'a B::Store,
    /// Store rows of all rows' window keys, one list after the other, each in ascending position.
    pub window_rows: &'a [u32],
    /// End of each row's list in `window_rows`, `[rows]`.
    pub window_ends: &'a [u32],
    /// Compressed keys, after the window keys in the order of additions.
    pub global: Option<GlobalKeys<'a, B>>,
}

/// Where arithmetic runs. A type parameter of the engine, never a trait object.
pub trait Backend: Send + Sync + Sized + 'static {
    /// Device memory.
    type Buf<T: Element>: Buffer<T>;
    /// A weight in its stored format.
    type Weight: WeightInfo;
    /// Rows in a cache format, addressed by row number.
    type Store: StoreInfo;

    /// Name for people, for example `cpu (avx512, 2 threads)`.
    fn name(&self) -> String;

    // ---- memory

    /// Zeroed memory for `len` elements.
    fn alloc<T: Element>(&self, len: usize) -> Self::Buf<T>;
    /// Copies `src` to `dst[at..]`.
    fn write<T: Element>(&self, dst: &mut Self::Buf<T>, at: usize, src: &[T]);
    /// Copies `src[at..]` to `dst`.
    fn read<T: Element>(&self, src: &Self::Buf<T>, at: usize, dst: &mut [T]);
    /// Takes a weight as stored; host backends keep the view and copy nothing.
    fn weight(&self, source: MatrixSource) -> Self::Weight;
    /// A zeroed store of `rows` rows of `width` channels.
    fn store(&self, format: RowFormat, width: usize, rows: usize) -> Self::Store;

    // ---- rows in cache formats

    /// `dst[dst_rows[i]] = encode(x[i])`, x `[dst_rows.len(), width]`.
    fn store_rows(&self, x: &Self::Buf<f32>, dst: &mut Self::Store, dst_rows: &[u32]);
    /// `out[i] = decode(src[src_rows[i]])`.
    fn load_rows(&self, src: &Self::Store, src_rows: &[u32], out: &mut Self::Buf<f32>);
    /// `dst[dst_rows[i]] = src[src_rows[i]]`, stored bytes; both stores have one format and width.
    fn copy_rows(&self, src: &Self::Store, src_rows: &[u32], dst: &mut Self::Store, dst_rows: &[u32]);
    /// Stored bytes of `rows`, one after the other, appended to `out`.
    fn export_rows(&self, src: &Self::Store, rows: &[u32], out: &mut Vec<u8>);
    /// The inverse of [`Backend::export_rows`]; `bytes.len()` is `rows.len() * row_bytes`.
    fn import_rows(&self, dst: &mut Self::Store, rows: &[u32], bytes: &[u8]);
    /// Rounds `rows` rows of `width` channels to `format` and back, in place.
    fn fake_quantize(&self, x: &mut Self::Buf<f32>, rows: usize, width: usize, format: RowFormat);

    // ---- moving rows

    /// `out[i] = table[ids[i]]`, dequantised, `[ids.len(), table.cols]`. Embeddings, Engram rows.
    fn gather(&self, table: &Self::Weight, ids: &[u32], out: &mut Self::Buf<f32>);
    /// `dst[i] = src[ids[i]]`, rows of `width` floats.
    fn take_rows(&self, src: &Self::Buf<f32>, width: usize, ids: &[u32], dst: &mut Self::Buf<f32>);
    /// `out[r, c, :] = x[r, :]` for `copies` copies; x `[rows, width]`.
    fn broadcast_copies(
        &self,
        x: &Self::Buf<f32>,
        rows: usize,
        copies: usize,
        width: usize,
        out: &mut Self::Buf<f32>,
    );
    /// `out[r, at .. at + width] = mean over copies of stream[r, c, :]`; out has `stride` columns.
    #[allow(clippy::too_many_arguments)]
    fn mean_copies(
        &self,
        stream: &Self::Buf<f32>,
        rows: usize,
        copies: usize,
        width: usize,
        out: &mut Self::Buf<f32>,
        stride: usize,
        at: usize,
    );

    // ---- dense arithmetic

    /// `y = x W^T`: x `[rows, K]`, W `[N, K]`, y `[rows, N]`.
    fn matmul(&self, w: &Self::Weight, x: &Self::Buf<f32>, rows: usize, y: &mut Self::Buf<f32>);
    /// Block-diagonal: W `[G * N, K]`, x `[rows, G * K]`, `y[:, g N ..] = x[:, g K ..] W_g^T`, y `[rows, G * N]`.
    fn matmul_grouped(
        &self,
        w: &Self::Weight,
        groups: usize,
        x: &Self::Buf<f32>,
        rows: usize,
        y: &mut Self::Buf<f32>,
    );
    /// `y = x * rsqrt(mean(x^2) + eps) * weight`, per row of `width`; weight `[width]`.
    fn rmsnorm(
        &self,
        x: &Self::Buf<f32>,
        rows: usize,
        width: usize,
        weight: &Self::Buf<f32>,
        eps: f32,
        y: &mut Self::Buf<f32>,
    );
    /// `y += x`, first `len` elements.
    fn add(&self, y: &mut Self::Buf<f32>, x: &Self::Buf<f32>, len: usize);
    /// `x *= factor`, first `len` elements.
    fn scale(&self, x: &mut Self::Buf<f32>, factor: f32, len: usize);
    /// Rotates the last `rd` of `width` channels of each of `heads` heads, adjacent pairs:
    /// `(a, b) -> (a cos - b sin, a sin + b cos)`; `inverse` negates sin. `cos_sin` is `[rows, rd]`: rd/2 cosines,
    /// then rd/2 sines of the row.
    #[allow(clippy::too_many_arguments)]
    fn rope(
        &self,
        x: &mut Self::Buf<f32>,
        rows: usize,
        heads: usize,
        width: usize,
        rd: usize,
        cos_sin: &Self::Buf<f32>,
        inverse: bool,
    );
    /// `h = silu(min(gate, limit)) * clamp(up, -limit, limit)`, in place in `gate`; no clamp if `limit <= 0`.
    fn swiglu(&self, gate: &mut Self::Buf<f32>, up: &Self::Buf<f32>, len: usize, limit: f32);

    // ---- hyper-connections (model.md section 5)

    /// stream `[rows, m * H]`, f `[m (2 + m), m * H]`, scale `[3]`, base `[m (2 + m)]` ->
    /// pre `[rows, m]`, post `[rows, m]`, comb `[rows, m, m]`, indexed by old copy, then new.
    #[allow(clippy::too_many_arguments)]
    fn hc_mixes(
        &self,
        stream: &Self::Buf<f32>,
        rows: usize,
        f: &Self::Weight,
        scale: &Self::Buf<f32>,
        base: &Self::Buf<f32>,
        p: HcParams,
        pre: &mut Self::Buf<f32>,
        post: &mut Self::Buf<f32>,
        comb: &mut Self::Buf<f32>,
    );
    /// `x[r, :] = sum_i pre[r, i] * stream[r, i, :]`, i ascending.
    fn hc_collapse(
        &self,
        stream: &Self::Buf<f32>,
        rows: usize,
        copies: usize,
        width: usize,
        pre: &Self::Buf<f32>,
        x: &mut Self::Buf<f32>,
    );
    /// `stream[r, j, :] = post[r, j] * y[r, :] + sum_i comb[r, i, j] * stream[r, i, :]`, in place.
    #[allow(clippy::too_many_arguments)]
    fn hc_merge(
        &self,
        stream: &mut Self::Buf<f32>,
        rows: usize,
        copies: usize,
        width: usize,
        y: &Self::Buf<f32>,
        post: &Self::Buf<f32>,
        comb: &Self::Buf<f32>,
    );

    // ---- attention (model.md section 6)

    /// `softmax([q . k * scale, sink]) . k`, per row and head, over the row's window keys then its selected
    /// compressed keys -> out `[rows, heads * width]`. A row without any key gives zeros.
    fn attention(&self, args: &AttentionArgs<'_, Self>, out: &mut Self::Buf<f32>);
    /// Groups of `ratio` consecutive rows: `out[g, c] = sum_i v[i, c] * softmax_i(gate[i, c])`; both
    /// `[groups * ratio, width]`, out `[groups, width]`.
    fn compress_pool(
        &self,
        values: &Self::Buf<f32>,
        gates: &Self::Buf<f32>,
        groups: usize,
        ratio: usize,
        width: usize,
        out: &mut Self::Buf<f32>,
    );
    /// `S[r, j] = sum_h w[r, h] * relu(q[r, h] . k[j])` for `j < visible[r]`, else -inf; out `[rows, entries]`.
    /// For records and tests; [`Backend::index_select`] computes the same scores.
    fn index_scores(&self, query: &IndexQuery<'_, Self>, entries: usize, out: &mut Self::Buf<f32>);
    /// The `selection.top_k` entries with the highest score of each row.
    fn index_select(
        &self,
        query: &IndexQuery<'_, Self>,
        candidates: CandidateUse<'_, Self::Buf<u32>>,
        selection: &mut Selection<Self::Buf<u32>>,
    );

    // ---- experts (model.md section 7)

    /// `a = sqrt(softplus(gate . x))`; the `top_k` experts with the highest `a + bias` in descending order (ties:
    /// lowest id) -> ids `[rows, top_k]`, weights `[rows, top_k]` from unbiased `a`. Rows with `image[r] != 0` use
    /// `bias_image`; an empty `image` means no such row.
    #[allow(clippy::too_many_arguments)]
    fn route(
        &self,
        x: &Self::Buf<f32>,
        rows: usize,
        gate: &Self::Weight,
        bias: &Self::Buf<f32>,
        bias_image: &Self::Buf<f32>,
        image: &[u8],
        p: RouteParams,
        ids: &mut Self::Buf<u32>,
        weights: &mut Self::Buf<f32>,
    );
    /// `y[r] = sum over picks, ascending expert id, of w2 (weight * swiglu(w1 x, w3 x))`; y is overwritten.
    /// `arrivals[slot]` is increased by the picks that reached each local slot.
    #[allow(clippy::too_many_arguments)]
    fn experts(
        &self,
        x: &Self::Buf<f32>,
        rows: usize,
        ids: &Self::Buf<u32>,
        weights: &Self::Buf<f32>,
        set: &ExpertSet<Self::Weight>,
        p: ExpertParams,
        y: &mut Self::Buf<f32>,
        arrivals: &mut [u32],
    );

    // ---- Engram (model.md section 8)

    /// kv `[rows, (m + 1) * H]`: m keys, one value. `stream[r, i] += g * value`, with
    /// `d = sum_c s q_weight k_weight key * rs(s) rs(key) / sqrt(H)`, `g = sigmoid(copysign(sqrt(max(|d|, 1e-6)), d))`,
    /// `rs(v) = (mean v^2 + eps)^-1/2`; g = 0 where `open[r] == 0`. The gates go to `gates` `[rows, m]`.
    #[allow(clippy::too_many_arguments)]
    fn engram_gate(
        &self,
        stream: &mut Self::Buf<f32>,
        rows: usize,
        copies: usize,
        width: usize,
        kv: &Self::Buf<f32>,
        q_weight: &Self::Buf<f32>,
        k_weight: &Self::Buf<f32>,
        open: &[u8],
        eps: f32,
        gates: &mut Self::Buf<f32>,
    );
}
