//! Rows that run through a layer together, and what belongs to each.

use super::rope::{Frequencies, push_cos_sin};
use crate::engram::Hasher;

/// A set of token rows.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowSet {
    /// Row of the step, `[rows]`, ascending.
    pub ids: Vec<u32>,
    /// Sequence ordinal, `[rows]`.
    pub sequence: Vec<u32>,
    /// 1 for image rows, `[rows]`; empty if there is none.
    pub image: Vec<u8>,
    /// 1 where the Engram gate may open, `[rows]`.
    pub open: Vec<u8>,
    /// Cosines and sines of window-only layers, `[rows, rd]`.
    pub plain_rope: Vec<f32>,
    /// Cosines and sines of layers with compressed KV, `[rows, rd]`.
    pub compressed_rope: Vec<f32>,
    /// Visible compressed entries of each row, `[rows]` for each ratio.
    pub visible: Vec<Vec<u32>>,
    /// Table rows, `[rows, columns]` for each Engram layer.
    pub engram: Vec<Vec<u32>>,
}

/// One row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// Row of the step.
    pub id: usize,
    /// Sequence ordinal.
    pub sequence: usize,
    /// Position in the sequence.
    pub position: usize,
    /// Belongs to an image.
    pub image: bool,
}

impl RowSet {
    /// A set for models with this many ratios and Engram layers.
    pub fn new(ratios: usize, engram_layers: usize) -> Self {
        Self { visible: vec![Vec::new(); ratios], engram: vec![Vec::new(); engram_layers], ..Self::default() }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Empties the set.
    pub fn clear(&mut self) {
        self.ids.clear();
        self.sequence.clear();
        self.image.clear();
        self.open.clear();
        self.plain_rope.clear();
        self.compressed_rope.clear();
        self.visible.iter_mut().for_each(Vec::clear);
        self.engram.iter_mut().for_each(Vec::clear);
    }

    /// Appends a row. `ratios`: tokens per entry, in the order of `visible`.
    pub fn push(&mut self, row: Row, frequencies: &Frequencies, ratios: &[usize]) {
        if row.image && self.image.is_empty() {
            self.image.resize(self.len(), 0);
        }
        if row.image || !self.image.is_empty() {
            self.image.push(u8::from(row.image));
        }
        self.ids.push(row.id as u32);
        self.sequence.push(row.sequence as u32);
        self.open.push(u8::from(!row.image));
        push_cos_sin(&frequencies.plain, row.position, &mut self.plain_rope);
        push_cos_sin(&frequencies.compressed, row.position, &mut self.compressed_rope);
        for (visible, ratio) in self.visible.iter_mut().zip(ratios) {
            visible.push(((row.position + 1) / ratio) as u32);
        }
    }

    /// Appends the table rows of the last row; `history` is newest first.
    pub fn push_engram(&mut self, hasher: &Hasher, history: &[u32]) {
        for (ordinal, rows) in self.engram.iter_mut().enumerate() {
            let at = rows.len();
            rows.resize(at + hasher.columns(), 0);
            hasher.rows(ordinal, history, &mut rows[at..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_flags_exist_only_if_an_image_does() {
        let frequencies = Frequencies { plain: vec![1.0], compressed: vec![0.5] };
        let row = |id, image| Row { id, sequence: 0, position: id, image };
        let mut set = RowSet::new(2, 0);
        for id in 0..3 {
            set.push(row(id, false), &frequencies, &[1, 2]);
        }
        assert!(set.image.is_empty());
        set.push(row(3, true), &frequencies, &[1, 2]);
        set.push(row(4, false), &frequencies, &[1, 2]);
        assert_eq!(set.image, [0, 0, 0, 1, 0]);
        assert_eq!(set.open, [1, 1, 1, 0, 1]);
        assert_eq!(set.visible, [[1, 2, 3, 4, 5], [0, 1, 1, 2, 2]]);
        assert_eq!((set.plain_rope.len(), set.compressed_rope.len()), (10, 10));
    }
}
