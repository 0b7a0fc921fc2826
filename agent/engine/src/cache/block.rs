//! Bytes of a block outside its engine: a header that says whose they are, then the rows.

use thiserror::Error;

const MAGIC: [u8; 4] = *b"DIKB";
const VERSION: u32 = 1;

/// Why bytes are not a block, or not one of this engine.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BlockError {
    /// Not a block at all, or of another version of this program.
    #[error("kv block: not version {VERSION} of the format")]
    Format,
    /// Made by an engine with another configuration.
    #[error("kv block: it belongs to a model with another shape, numerics or boundary_swa")]
    Digest,
    /// Bytes are missing or left over.
    #[error("kv block: {found} bytes, expected {expected}")]
    Length {
        /// Bytes there are.
        found: usize,
        /// Bytes there should be.
        expected: usize,
    },
    /// Some byte is not what was exported.
    #[error("kv block: damaged, its checksum differs")]
    Damaged,
}

/// Magic, version, digest of the format, CRC32C of the rows.
pub(crate) struct BlockHeader;

impl BlockHeader {
    /// Bytes before the rows.
    pub const BYTES: usize = 4 + 4 + 8 + 4;

    /// Room for a block: an empty header, to be followed by the rows and sealed.
    pub fn begin(payload: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES + payload);
        bytes.resize(Self::BYTES, 0);
        bytes
    }

    /// Writes the header before the rows.
    pub fn seal(bytes: &mut [u8], digest: u64) {
        let (header, rows) = bytes.split_at_mut(Self::BYTES);
        header[..4].copy_from_slice(&MAGIC);
        header[4..8].copy_from_slice(&VERSION.to_le_bytes());
        header[8..16].copy_from_slice(&digest.to_le_bytes());
        header[16..].copy_from_slice(&crc32c::crc32c(rows).to_le_bytes());
    }

    /// The rows, if all of it is right.
    pub fn open(bytes: &[u8], digest: u64, payload: usize) -> Result<&[u8], BlockError> {
        let Some((header, rows)) = bytes.split_at_checked(Self::BYTES) else {
            return Err(BlockError::Format);
        };
        if header[..4] != MAGIC || header[4..8] != VERSION.to_le_bytes() {
            return Err(BlockError::Format);
        }
        if header[8..16] != digest.to_le_bytes() {
            return Err(BlockError::Digest);
        }
        if rows.len() != payload {
            let (found, expected) = (bytes.len(), Self::BYTES + payload);
            return Err(BlockError::Length { found, expected });
        }
        if header[16..] != crc32c::crc32c(rows).to_le_bytes() {
            return Err(BlockError::Damaged);
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_damaged_byte_of_a_block_is_noticed() {
        let mut bytes = BlockHeader::begin(5);
        bytes.extend_from_slice(&[1, 2, 3, 4, 5]);
        BlockHeader::seal(&mut bytes, 77);
        assert_eq!(BlockHeader::open(&bytes, 77, 5), Ok(&[1u8, 2, 3, 4, 5][..]));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert!(BlockHeader::open(&damaged, 77, 5).is_err(), "byte {at}");
        }
        for len in 0..bytes.len() {
            assert!(BlockHeader::open(&bytes[..len], 77, 5).is_err(), "{len} bytes");
        }
        assert_eq!(BlockHeader::open(&bytes, 78, 5), Err(BlockError::Digest));
    }
}
