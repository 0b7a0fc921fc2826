//! Memory of the host backends: buffers, weights as views of stored bytes, and row stores.

use crate::formats::{RowFormat, WeightFormat};
use crate::mapped::ByteView;
use crate::ops::{Buffer, Element, MatrixSource, StoreInfo, WeightInfo};

/// Host memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostBuf<T>(pub Vec<T>);

impl<T: Element> Buffer<T> for HostBuf<T> {
    fn len(&self) -> usize {
        self.0.len()
    }
}

/// A weight whose bytes stay where the checkpoint has them.
#[derive(Clone, Debug)]
pub struct HostWeight {
    /// Stored format.
    pub format: WeightFormat,
    /// Output rows.
    pub rows: usize,
    /// Input columns.
    pub cols: usize,
    /// Values, any alignment.
    pub data: ByteView,
    /// E8M0 scales; empty for F32 and BF16.
    pub scales: ByteView,
}

impl HostWeight {
    /// Checks that the byte counts fit the shape.
    ///
    /// # Panics
    /// If they do not: the checkpoint reader has checked them before.
    pub fn new(source: MatrixSource) -> Self {
        let MatrixSource { format, rows, cols, data, scales } = source;
        assert_eq!(
            data.len(),
            format.data_bytes(rows, cols),
            "bytes of a {format:?} weight [{rows}, {cols}]"
        );
        let scales = scales.unwrap_or_default();
        let (scale_rows, scale_cols) = format.scale_shape(rows, cols);
        assert_eq!(scales.len(), scale_rows * scale_cols, "scales of a {format:?} weight [{rows}, {cols}]");
        Self { format, rows, cols, data, scales }
    }
}

impl WeightInfo for HostWeight {
    fn format(&self) -> WeightFormat {
        self.format
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn cols(&self) -> usize {
        self.cols
    }
    fn bytes(&self) -> usize {
        self.data.len() + self.scales.len()
    }
}

/// Rows in a cache format in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct HostStore {
    /// Format of every row.
    pub format: RowFormat,
    /// Channels of a row.
    pub width: usize,
    /// Bytes of a row: values, then scales.
    pub row_bytes: usize,
    /// All rows.
    pub data: Vec<u8>,
}

impl HostStore {
    /// A store of `rows` zero rows.
    pub fn new(format: RowFormat, width: usize, rows: usize) -> Self {
        let row_bytes = format.row_bytes(width);
        Self { format, width, row_bytes, data: vec![0; rows * row_bytes] }
    }

    /// Bytes of one row.
    pub fn row(&self, row: usize) -> &[u8] {
        &self.data[row * self.row_bytes..(row + 1) * self.row_bytes]
    }

    /// Bytes of one row, to be overwritten.
    pub fn row_mut(&mut self, row: usize) -> &mut [u8] {
        &mut self.data[row * self.row_bytes..(row + 1) * self.row_bytes]
    }
}

impl StoreInfo for HostStore {
    fn format(&self) -> RowFormat {
        self.format
    }
    fn width(&self) -> usize {
        self.width
    }
    fn rows(&self) -> usize {
        self.data.len().checked_div(self.row_bytes).unwrap_or(0)
    }
}
