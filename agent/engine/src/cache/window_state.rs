//! The constant-size state of a sequence as bytes: the n-gram history, window rows of every layer, and the
//! tokens of open groups. At a block boundary no group is open. Compressed entries are in blocks.
//!
//! Only rows that can still be read are in it, the last `window` positions, so it can be cut out after a few
//! more tokens have run, and equal histories give equal bytes however the rows came about.

use thiserror::Error;

const MAGIC: [u8; 4] = *b"DIWS";
const VERSION: u32 = 2;
/// Magic, version, digest, position, three bounds, checksum.
const HEADER: usize = CHECKSUM + 4;
const CHECKSUM: usize = 4 + 4 + 8 + 4 * 8;

/// State of one sequence at some position. Window checkpoints are such states at multiples of 128.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowState {
    bytes: Vec<u8>,
}

/// Why bytes are not a window state, or not one of this engine.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum WindowStateError {
    /// Not a window state at all, or of another version of this program.
    #[error("window state: not version {VERSION} of the format")]
    Format,
    /// Made by an engine with another configuration.
    #[error("window state: it belongs to a model with another shape, numerics or boundary_swa")]
    Digest,
    /// Bytes are missing or left over.
    #[error("window state: {found} bytes, its header needs {expected}")]
    Length {
        /// Bytes there are.
        found: usize,
        /// Bytes there should be.
        expected: usize,
    },
    /// Some byte is not what was exported.
    #[error("window state: damaged, its checksum differs")]
    Damaged,
    /// Positions that cannot be.
    #[error("window state: position {position} with rows from {from} is not possible")]
    Position {
        /// Tokens covered.
        position: u64,
        /// First position with rows.
        from: u64,
    },
}

/// What the header of a state says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Digest of shape and numerics.
    pub digest: u64,
    /// Tokens covered.
    pub position: usize,
    /// First position with rows: layers before the boundary, boundary layer, layers after it and draft
    /// layers.
    pub from: [usize; 3],
}

impl WindowState {
    /// Takes bytes from a store or the network.
    ///
    /// # Errors
    /// [`WindowStateError::Format`] if they do not begin like a state. Whether they fit an engine is checked
    /// when it imports them.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, WindowStateError> {
        let begins = bytes.len() >= HEADER && bytes[..4] == MAGIC && bytes[4..8] == VERSION.to_le_bytes();
        if begins { Ok(Self { bytes }) } else { Err(WindowStateError::Format) }
    }

    /// The bytes to be stored.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes to be stored, without copying them.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Tokens covered.
    pub fn position(&self) -> usize {
        self.word(1) as usize
    }

    /// A state with a header, to be filled.
    pub(crate) fn begin(header: &Header, payload: usize) -> Self {
        let mut bytes = Vec::with_capacity(HEADER + payload);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        let [a, b, c] = header.from.map(|p| p as u64);
        for word in [header.digest, header.position as u64, a, b, c] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&[0; 4]);
        Self { bytes }
    }

    /// Ends a state whose payload is complete.
    pub(crate) fn seal(mut self) -> Self {
        let checksum = self.checksum().to_le_bytes();
        self.bytes[CHECKSUM..HEADER].copy_from_slice(&checksum);
        self
    }

    /// CRC32C of everything but itself.
    fn checksum(&self) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&self.bytes[..CHECKSUM]), self.payload())
    }

    /// Where the payload is appended.
    pub(crate) fn payload_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// What follows the header.
    pub(crate) fn payload(&self) -> &[u8] {
        &self.bytes[HEADER..]
    }

    /// The header, if it belongs to an engine with this digest and window.
    pub(crate) fn header(&self, digest: u64, window: usize) -> Result<Header, WindowStateError> {
        if self.word(0) != digest {
            return Err(WindowStateError::Digest);
        }
        let position = self.word(1);
        let from = [self.word(2), self.word(3), self.word(4)];
        for from in from {
            if from > position || position - from > window as u64 || usize::try_from(position).is_err() {
                return Err(WindowStateError::Position { position, from });
            }
        }
        Ok(Header { digest, position: position as usize, from: from.map(|p| p as usize) })
    }

    /// Checks the length of the payload, then all of it.
    pub(crate) fn check_payload(&self, expected: usize) -> Result<(), WindowStateError> {
        if self.payload().len() != expected {
            return Err(WindowStateError::Length { found: self.bytes.len(), expected: HEADER + expected });
        }
        if self.bytes[CHECKSUM..HEADER] != self.checksum().to_le_bytes() {
            return Err(WindowStateError::Damaged);
        }
        Ok(())
    }

    fn word(&self, ordinal: usize) -> u64 {
        let at = 8 + 8 * ordinal;
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().expect("eight bytes of a checked header"))
    }
}

/// FNV-1a of a text.
pub(crate) fn digest(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> WindowState {
        let header = Header { digest: 7, position: 256, from: [224, 230, 256] };
        let mut state = WindowState::begin(&header, 3);
        state.payload_mut().extend_from_slice(&[1, 2, 3]);
        state.seal()
    }

    #[test]
    fn a_state_survives_the_way_through_bytes() {
        let copy = WindowState::from_bytes(state().as_bytes().to_vec()).unwrap();
        assert_eq!((copy.position(), copy.payload()), (256, &[1u8, 2, 3][..]));
        assert_eq!(copy.header(7, 32).unwrap().from, [224, 230, 256]);
        assert_eq!(copy.check_payload(3), Ok(()));
    }

    #[test]
    fn foreign_and_damaged_states_are_refused() {
        assert_eq!(state().header(8, 32), Err(WindowStateError::Digest));
        assert!(matches!(state().header(7, 31), Err(WindowStateError::Position { from: 224, .. })));
        assert!(matches!(
            state().check_payload(4),
            Err(WindowStateError::Length { found: 55, expected: 56 })
        ));
        let bytes = state().as_bytes().to_vec();
        assert_eq!(WindowState::from_bytes(bytes[..20].to_vec()), Err(WindowStateError::Format));
        for at in 8..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            let damaged = WindowState::from_bytes(damaged).unwrap();
            let found = damaged.header(7, 32).and_then(|_| damaged.check_payload(3));
            assert!(found.is_err(), "byte {at}");
        }
        let mut other = bytes;
        other[4] = 9;
        assert_eq!(WindowState::from_bytes(other), Err(WindowStateError::Format));
    }
}
