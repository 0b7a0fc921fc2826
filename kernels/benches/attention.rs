//! Index selection, attention and the row operations at the shapes of one layer of the real model.
//!
//! `cargo bench -p deepinfer-kernels --bench attention [-- THREADS ...]`; without numbers 1 thread and all cores.
//! Stores are larger than four times a last-level cache of 32 MiB and each run looks elsewhere. Index products are
//! sums of bytes, for which machines with VNNI have four times the multiply-adds of float32: they can pass the roof,
//! which is that of float32. Rows between the products are in cache, as they are in a step, and pass it too.

mod support;

use deepinfer_kernels::host::{HostBuf, HostStore, HostWeight};
use deepinfer_kernels::ops::{
    AttentionArgs, BlockTables, CandidateUse, Candidates, GlobalKeys, HcParams, IndexQuery, MatrixSource,
    RouteParams, Selection,
};
use deepinfer_kernels::{Backend, ByteView, Cpu, RowFormat, WeightFormat};
use support::{Random, Roof};

const HIDDEN: usize = 5120;
const COPIES: usize = 4;
const HEADS: usize = 64;
const WIDTH: usize = 512;
const INDEX_HEADS: usize = 32;
const INDEX_WIDTH: usize = 128;
const ENTRIES: usize = 100_000;
const TOP_K: usize = 512;
const WINDOW: usize = 128;
const PER_BLOCK: usize = 128;

fn main() {
    let asked: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if asked.is_empty() { vec![1, cores] } else { asked };
    for threads in threads {
        let cpu = Cpu::new(threads);
        let roof = Roof::measure(&cpu);
        index(&cpu, &roof);
        attention(&cpu, &roof);
        rows(&cpu, &roof, 1);
        rows(&cpu, &roof, 64);
    }
}

/// A store of random bytes that decode to moderate numbers.
fn store(cpu: &Cpu, random: &mut Random, format: RowFormat, width: usize, rows: usize) -> HostStore {
    let mut store = cpu.store(format, width, rows);
    let values = match format {
        RowFormat::Fp8 => width,
        _ => width / 2,
    };
    let row_bytes = store.row_bytes;
    for row in store.data.chunks_exact_mut(row_bytes) {
        let (codes, scales) = row.split_at_mut(values);
        for code in codes {
            *code = random.next() as u8 & 0xbf;
        }
        scales.fill(match format {
            RowFormat::Fp4Main => 0x38,
            _ => 124,
        });
    }
    store
}

/// Block tables of sequences that lie one after the other, `blocks` blocks each.
struct Tables {
    blocks: Vec<u32>,
    ends: Vec<u32>,
}

impl Tables {
    fn new(sequences: usize, blocks: usize) -> Self {
        Self {
            blocks: (0..(sequences * blocks) as u32).collect(),
            ends: (1..=sequences).map(|s| (s * blocks) as u32).collect(),
        }
    }

    fn of<'a>(&'a self, row_sequence: &'a [u32]) -> BlockTables<'a> {
        BlockTables { row_sequence, blocks: &self.blocks, ends: &self.ends, entries_per_block: PER_BLOCK }
    }
}

fn index(cpu: &Cpu, roof: &Roof) {
    let mut random = Random(1);
    let sequences = 20;
    let blocks = ENTRIES.div_ceil(PER_BLOCK);
    let keys = store(cpu, &mut random, RowFormat::Fp4Index, INDEX_WIDTH, sequences * blocks * PER_BLOCK);
    let tables = Tables::new(sequences, blocks);
    let row_bytes = RowFormat::Fp4Index.row_bytes(INDEX_WIDTH) as f64;
    for (rows, kind) in [(1, ""), (1, ", blocks out"), (1, ", 2048 blocks in"), (16, ""), (64, "")] {
        let query = HostBuf(random.floats(rows * INDEX_HEADS * INDEX_WIDTH));
        let weights = HostBuf(random.floats(rows * INDEX_HEADS));
        let visible = vec![ENTRIES as u32; rows];
        let mut selection =
            Selection { indices: cpu.alloc(rows * TOP_K), counts: cpu.alloc(rows), top_k: TOP_K };
        let mut candidates = Candidates {
            indices: cpu.alloc(rows * 2048),
            counts: cpu.alloc(rows),
            max_blocks: 2048,
            block_size: 8,
        };
        for (i, block) in candidates.indices.0.iter_mut().enumerate() {
            *block = i as u32 % 2048 * 6;
        }
        candidates.counts.0.fill(2048);
        let looked = if kind.contains("in") { 2048 * 8 } else { ENTRIES };
        let flops = (rows * looked * INDEX_HEADS * (2 * INDEX_WIDTH + 2)) as f64;
        let name = format!("index scores, top 512: {rows} rows x {looked} entries{kind}");
        roof.line(&name, looked as f64 * row_bytes, flops, |i| {
            let row_sequence = vec![(i % sequences) as u32; rows];
            let query = IndexQuery {
                rows,
                heads: INDEX_HEADS,
                width: INDEX_WIDTH,
                query: &query,
                weights: &weights,
                keys: &keys,
                visible: &visible,
                tables: tables.of(&row_sequence),
            };
            let usage = match kind {
                ", blocks out" => CandidateUse::Produce(&mut candidates),
                ", 2048 blocks in" => CandidateUse::Restrict(&candidates),
                _ => CandidateUse::Ignore,
            };
            cpu.index_select(&query, usage, &mut selection);
        });
    }
}

fn attention(cpu: &Cpu, roof: &Roof) {
    let mut random = Random(2);
    let entries = 480_000;
    let global = store(cpu, &mut random, RowFormat::Fp4Main, WIDTH, entries);
    let windows = 2_000;
    let window = store(cpu, &mut random, RowFormat::Fp8, WIDTH, windows * WINDOW);
    let sink = HostBuf(random.floats(HEADS));
    let tables = Tables::new(1, entries / PER_BLOCK);
    for (rows, selected) in [(1, TOP_K), (1, 0), (8, TOP_K), (64, TOP_K), (64, 0)] {
        let query = HostBuf(random.floats(rows * HEADS * WIDTH));
        let mut out = cpu.alloc(rows * HEADS * WIDTH);
        // A new selection for each of some runs, ascending as the engine's are.
        let selections: Vec<Selection<HostBuf<u32>>> = (0..40)
            .map(|_| {
                let mut indices = Vec::new();
                for _ in 0..rows {
                    let mut row: Vec<u32> = (0..selected).map(|_| random.next() % entries as u32).collect();
                    row.sort_unstable();
                    indices.extend(row);
                }
                Selection {
                    indices: HostBuf(indices),
                    counts: HostBuf(vec![selected as u32; rows]),
                    top_k: selected,
                }
            })
            .collect();
        let ends: Vec<u32> = (1..=rows as u32).map(|r| r * WINDOW as u32).collect();
        let row_sequence = vec![0; rows];
        let keys = rows * (WINDOW + selected);
        let bytes = (rows * WINDOW * window.row_bytes + rows * selected * global.row_bytes) as f64
            + (2 * rows * HEADS * WIDTH * 4) as f64;
        let name = format!("attention: {rows} rows, {WINDOW} window and {selected} selected keys");
        roof.line(&name, bytes, (keys * HEADS * WIDTH * 4) as f64, |i| {
            let first = i * 7 % (windows - rows);
            let window_rows: Vec<u32> = (0..rows)
                .flat_map(|r| (first + r) * WINDOW..(first + r + 1) * WINDOW)
                .map(|row| row as u32)
                .collect();
            let args = AttentionArgs {
                rows,
                heads: HEADS,
                width: WIDTH,
                scale: 0.04,
                query: &query,
                sink: &sink,
                window: &window,
                window_rows: &window_rows,
                window_ends: &ends,
                global: Some(GlobalKeys {
                    store: &global,
                    selection: &selections[i % selections.len()],
                    tables: tables.of(&row_sequence),
                }),
            };
            cpu.attention(&args, &mut out);
        });
    }
}

fn weight(random: &mut Random, format: WeightFormat, rows: usize, cols: usize) -> HostWeight {
    let values = random.floats(rows * cols);
    let data = match format {
        WeightFormat::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect(),
    };
    HostWeight::new(MatrixSource { format, rows, cols, data: ByteView::owned(data), scales: None })
}

/// The operations between the products; what they read was just written, so their bytes count as cached.
fn rows(cpu: &Cpu, roof: &Roof, rows: usize) {
    let mut random = Random(3);
    let floats = |n: usize| (n * 4) as f64;
    let mut stream = HostBuf(random.floats(rows * COPIES * HIDDEN));
    let mut x = HostBuf(random.floats(rows * HIDDEN));
    let mut y: HostBuf<f32> = cpu.alloc(rows * HIDDEN);
    let norm = HostBuf(random.floats(HIDDEN));
    let (mut pre, mut post) = (cpu.alloc(rows * COPIES), cpu.alloc(rows * COPIES));
    let mut comb = cpu.alloc(rows * COPIES * COPIES);
    let mixers: Vec<HostWeight> =
        (0..80).map(|_| weight(&mut random, WeightFormat::F32, 24, COPIES * HIDDEN)).collect();
    let (scale, base) = (HostBuf(random.floats(3)), HostBuf(random.floats(24)));
    let p = HcParams { copies: COPIES, iters: 20, eps: 1e-6, norm_eps: 1e-20 };
    let bytes = floats(rows * COPIES * HIDDEN) + mixers[0].data.len() as f64;
    let flops = (rows * COPIES * HIDDEN * 50) as f64;
    roof.line(&format!("hc_mixes: {rows} rows"), bytes, flops, |i| {
        let f = &mixers[i % mixers.len()];
        cpu.hc_mixes(&stream, rows, f, &scale, &base, p, &mut pre, &mut post, &mut comb);
    });
    let bytes = floats(rows * (COPIES + 1) * HIDDEN);
    roof.line(&format!("hc_collapse: {rows} rows"), bytes, (rows * COPIES * HIDDEN * 2) as f64, |_| {
        cpu.hc_collapse(&stream, rows, COPIES, HIDDEN, &pre, &mut x);
    });
    roof.line(
        &format!("hc_merge: {rows} rows"),
        floats(rows * (2 * COPIES + 1) * HIDDEN),
        (rows * COPIES * HIDDEN * 9) as f64,
        |_| {
            cpu.hc_merge(&mut stream, rows, COPIES, HIDDEN, &x, &post, &comb);
            // Repeated merging would leave the range of float32.
            if stream.0[0].abs() > 1e6 {
                stream.0.fill(1.0);
            }
        },
    );
    roof.line(
        &format!("rmsnorm: {rows} rows"),
        floats(2 * rows * HIDDEN),
        (rows * HIDDEN * 4) as f64,
        |_| {
            cpu.rmsnorm(&x, rows, HIDDEN, &norm, 1e-20, &mut y);
        },
    );
    let mut q = HostBuf(random.floats(rows * HEADS * WIDTH));
    let cos_sin = HostBuf(vec![std::f32::consts::FRAC_1_SQRT_2; rows * 64]);
    let rotated = rows * HEADS * 64;
    roof.line(&format!("rope: {rows} rows x 64 heads"), floats(2 * rotated), (rotated * 3) as f64, |_| {
        cpu.rope(&mut q, rows, HEADS, WIDTH, 64, &cos_sin, false);
    });
    roof.line(&format!("fake_quantize to FP8: {rows} rows"), floats(2 * rows * HIDDEN), 0.0, |_| {
        cpu.fake_quantize(&mut y, rows, HIDDEN, RowFormat::Fp8);
    });
    let up = HostBuf(random.floats(rows * 2304));
    let gate = HostBuf(random.floats(rows * 2304));
    let mut work = gate.clone();
    roof.line(&format!("swiglu: {rows} rows x 2304"), floats(4 * rows * 2304), 0.0, |_| {
        work.0.copy_from_slice(&gate.0);
        cpu.swiglu(&mut work, &up, rows * 2304, 10.0);
    });
    let gates: Vec<HostWeight> =
        (0..40).map(|_| weight(&mut random, WeightFormat::Bf16, 384, HIDDEN)).collect();
    let (bias, no_bias) = (HostBuf(random.floats(384)), HostBuf(Vec::new()));
    let (mut ids, mut weights) = (cpu.alloc(rows * 6), cpu.alloc(rows * 6));
    let bytes = floats(rows * HIDDEN) + gates[0].data.len() as f64;
    roof.line(&format!("route: {rows} rows, 384 experts"), bytes, (rows * HIDDEN * 384 * 2) as f64, |i| {
        let p = RouteParams { top_k: 6, normalize: true, scale: 1.5 };
        let gate = &gates[i % gates.len()];
        cpu.route(&x, rows, gate, &bias, &no_bias, &[], p, &mut ids, &mut weights);
    });
    let mut single: HostStore = cpu.store(RowFormat::Fp8, WIDTH, rows);
    let at: Vec<u32> = (0..rows as u32).collect();
    roof.line(&format!("store_rows FP8: {rows} rows x 512"), floats(rows * WIDTH), 0.0, |_| {
        cpu.store_rows(&q, &mut single, &at);
    });
}
