//! Writing one safetensors file strip by strip, by several threads.
//!
//! Where every byte goes is known before the first is drawn: the header is written at once, then strips of
//! rows in any order, each to its place. Memory is a few strips, whatever the size of the file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use deepinfer_kernels::WeightFormat;
use deepinfer_kernels::formats::{GROUP, encode_weight_into};
use serde_json::{Map, json};

use super::draw::{Draw, Stream};
use crate::tensors::TensorSpec;

/// Values of a strip, about.
const STRIP: usize = 1 << 19;

/// A tensor to be drawn and stored.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    /// What it is.
    pub(super) spec: TensorSpec,
    /// How it is stored.
    pub(super) format: WeightFormat,
    /// How it is drawn.
    pub(super) draw: Draw,
}

impl Planned {
    pub(super) fn bytes(&self) -> u64 {
        self.spec.bytes(self.format)
    }

    fn data_bytes(&self) -> u64 {
        self.format.data_bytes(self.spec.rows(), self.spec.cols()) as u64
    }

    fn scale_shape(&self) -> [usize; 2] {
        let (rows, cols) = self.format.scale_shape(self.spec.rows(), self.spec.cols());
        [rows, cols]
    }

    /// Stored names, the scale's too.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        let scale = (self.scale_shape() != [0, 0]).then(|| self.spec.scale_name());
        std::iter::once(self.spec.name.clone()).chain(scale)
    }
}

/// Name of the element type in a header.
fn dtype(format: WeightFormat) -> &'static str {
    match format {
        WeightFormat::F32 => "F32",
        WeightFormat::Bf16 => "BF16",
        WeightFormat::Fp8 | WeightFormat::Fp8Rows => "F8_E4M3",
        WeightFormat::Fp4 => "I8",
    }
}

/// A planned tensor with its place in the file.
struct Placed<'a> {
    planned: &'a Planned,
    data_at: u64,
    scale_at: u64,
}

/// The header of a file, and the places of its tensors. Wide elements come first, so that all are aligned.
fn place(tensors: &[Planned]) -> (Vec<u8>, Vec<Placed<'_>>, u64) {
    let mut order: Vec<&Planned> = tensors.iter().collect();
    order.sort_by_key(|t| match t.format {
        WeightFormat::F32 => 0,
        WeightFormat::Bf16 => 1,
        _ => 2,
    });
    let (mut header, mut placed, mut at) = (Map::new(), Vec::new(), 0u64);
    header.insert("__metadata__".to_string(), json!({"format": "pt"}));
    for planned in order {
        let (data_at, scale_at) = (at, at + planned.data_bytes());
        at += planned.bytes();
        let spec = &planned.spec;
        let shape = spec.data_shape(planned.format);
        let entry =
            json!({"dtype": dtype(planned.format), "shape": shape, "data_offsets": [data_at, scale_at]});
        header.insert(spec.name.clone(), entry);
        if planned.scale_shape() != [0, 0] {
            let (shape, offsets) = (planned.scale_shape(), [scale_at, at]);
            let entry = json!({"dtype": "F8_E8M0", "shape": shape, "data_offsets": offsets});
            header.insert(spec.scale_name(), entry);
        }
        placed.push(Placed { planned, data_at, scale_at });
    }
    let mut text = serde_json::Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    let start = bytes.len() as u64;
    for tensor in &mut placed {
        tensor.data_at += start;
        tensor.scale_at += start;
    }
    (bytes, placed, start + at)
}

/// Rows of a tensor that are drawn and written together.
struct Strip {
    tensor: usize,
    first: usize,
    rows: usize,
}

fn strips(placed: &[Placed<'_>]) -> Vec<Strip> {
    let mut strips = Vec::new();
    for (tensor, place) in placed.iter().enumerate() {
        let (rows, cols) = (place.planned.spec.rows(), place.planned.spec.cols());
        // FP8 blocks must not be cut.
        let height = (STRIP / cols / GROUP).max(1) * GROUP;
        let starts = (0..rows).step_by(height);
        strips.extend(starts.map(|first| Strip { tensor, first, rows: height.min(rows - first) }));
    }
    strips
}

/// Buffers of one thread.
#[derive(Default)]
struct Scratch {
    values: Vec<f32>,
    data: Vec<u8>,
    scales: Vec<u8>,
}

fn write_strip(
    file: &File,
    place: &Placed<'_>,
    strip: &Strip,
    seed: u64,
    buf: &mut Scratch,
) -> io::Result<u64> {
    let Planned { spec, format, draw } = place.planned;
    let (cols, rows, format) = (spec.cols(), strip.rows, *format);
    let (scale_rows, scale_cols) = format.scale_shape(rows, cols);
    buf.values.resize(rows * cols, 0.0);
    buf.data.resize(format.data_bytes(rows, cols), 0);
    buf.scales.resize(scale_rows * scale_cols, 0);
    let first_value = strip.first as u64 * cols as u64;
    Stream::new(seed, &spec.name).fill(draw, first_value, &mut buf.values);
    encode_weight_into(format, rows, cols, &buf.values, &mut buf.data, &mut buf.scales);
    let data_before = format.data_bytes(strip.first, cols) as u64;
    file.write_all_at(&buf.data, place.data_at + data_before)?;
    let (scale_rows, scale_cols) = format.scale_shape(strip.first, cols);
    file.write_all_at(&buf.scales, place.scale_at + (scale_rows * scale_cols) as u64)?;
    Ok((buf.data.len() + buf.scales.len()) as u64)
}

/// Writes a file of random tensors. `wrote` is called on this thread with the bytes of each finished strip.
pub(super) fn write_file(
    path: &Path,
    tensors: &[Planned],
    seed: u64,
    threads: usize,
    wrote: &mut dyn FnMut(u64),
) -> io::Result<()> {
    let (header, placed, len) = place(tensors);
    let file = File::create_new(path)?;
    file.set_len(len)?;
    file.write_all_at(&header, 0)?;
    let (strips, next) = (strips(&placed), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let (report, reports) = mpsc::sync_channel::<io::Result<u64>>(64);
        for _ in 0..threads.max(1) {
            let (report, file, strips, next, placed) = (report.clone(), &file, &strips, &next, &placed);
            scope.spawn(move || {
                let mut buf = Scratch::default();
                while let Some(strip) = strips.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = write_strip(file, &placed[strip.tensor], strip, seed, &mut buf);
                    // Nobody listens any more: another thread failed.
                    if report.send(result).is_err() {
                        return;
                    }
                }
            });
        }
        drop(report);
        for result in reports {
            wrote(result?);
        }
        Ok(())
    })
}
