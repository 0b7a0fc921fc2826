//! Frames: a length, a message, and the raw bytes that belong to it.
//!
//! ```text
//! u32 LE  bytes after this field
//! u32 LE  bytes of the message
//! ...     the message (postcard)
//! ...     payload: the rest of the frame
//! ```

use thiserror::Error;

use crate::limits::MAX_FRAME_BYTES;
use crate::message::Message;

/// Bytes before the message.
pub const HEADER_BYTES: usize = 8;

/// A message and the bytes that follow it.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame<'a> {
    /// The message.
    pub message: Message,
    /// Raw bytes; empty for most messages.
    pub payload: &'a [u8],
}

/// Why bytes are not a frame. The connection they came from cannot be used any more.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum FrameError {
    /// Longer than the limit.
    #[error("a frame of {bytes} bytes, the limit is {limit}")]
    TooLong {
        /// Announced.
        bytes: usize,
        /// Allowed.
        limit: usize,
    },
    /// The message's length does not fit into the frame's.
    #[error("a message of {message} bytes in a frame of {frame}")]
    Lengths {
        /// Announced for the message.
        message: usize,
        /// Of the frame.
        frame: usize,
    },
    /// The message's bytes mean nothing.
    #[error("not a message: {0}")]
    Message(String),
}

/// Appends a frame.
///
/// # Panics
/// If the frame would be longer than [`MAX_FRAME_BYTES`]: senders bound what they send.
pub fn encode(message: &Message, payload: &[u8], out: &mut Vec<u8>) {
    encode_head(message, payload.len(), out).expect("senders bound what they send");
    out.extend_from_slice(payload);
}

/// Appends a frame without its payload, for writers that send the payload's bytes from where they lie.
///
/// # Errors
/// [`FrameError::TooLong`] if frame and payload together exceed [`MAX_FRAME_BYTES`]; `out` is as it was then.
pub fn encode_head(message: &Message, payload_bytes: usize, out: &mut Vec<u8>) -> Result<(), FrameError> {
    let start = out.len();
    out.extend_from_slice(&[0; HEADER_BYTES]);
    *out =
        postcard::to_extend(message, std::mem::take(out)).expect("a message of our own types can be encoded");
    let message_bytes = out.len() - start - HEADER_BYTES;
    let rest = message_bytes + 4 + payload_bytes;
    if rest > MAX_FRAME_BYTES {
        out.truncate(start);
        return Err(FrameError::TooLong { bytes: rest, limit: MAX_FRAME_BYTES });
    }
    out[start..start + 4].copy_from_slice(&(rest as u32).to_le_bytes());
    out[start + 4..start + HEADER_BYTES].copy_from_slice(&(message_bytes as u32).to_le_bytes());
    Ok(())
}

/// Reads the first frame of `bytes`; gives it and how many bytes it took, or `None` if bytes are missing.
///
/// # Errors
/// [`FrameError`]; a length above `limit` is refused before its bytes have come.
pub fn decode(bytes: &[u8], limit: usize) -> Result<Option<(Frame<'_>, usize)>, FrameError> {
    let Some((head, rest)) = bytes.split_first_chunk::<4>() else {
        return Ok(None);
    };
    let len = u32::from_le_bytes(*head) as usize;
    if len > limit {
        return Err(FrameError::TooLong { bytes: len, limit });
    }
    if len < 4 {
        return Err(FrameError::Lengths { message: 0, frame: len });
    }
    if rest.len() < len {
        return Ok(None);
    }
    let (head, body) = rest[..len].split_first_chunk::<4>().expect("at least four bytes");
    let message_len = u32::from_le_bytes(*head) as usize;
    let Some((message, payload)) = body.split_at_checked(message_len) else {
        return Err(FrameError::Lengths { message: message_len, frame: len });
    };
    let (message, left) =
        postcard::take_from_bytes(message).map_err(|error| FrameError::Message(error.to_string()))?;
    if !left.is_empty() {
        return Err(FrameError::Message(format!("{} bytes after it", left.len())));
    }
    Ok(Some((Frame { message, payload }, 4 + len)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Attempt, RequestId};
    use crate::message::PieceKind;

    #[test]
    fn a_frame_is_read_once_all_of_it_has_come() {
        let message = Message::KvPiece {
            request: RequestId(7),
            attempt: Attempt(1),
            kind: PieceKind::Block(3),
            pieces: 5,
            tokens: 400,
            crc: 0xdead_beef,
        };
        let mut bytes = Vec::new();
        encode(&message, b"payload", &mut bytes);
        let whole = bytes.len();
        encode(&Message::Heartbeat, b"", &mut bytes);
        for cut in 0..whole {
            assert_eq!(decode(&bytes[..cut], MAX_FRAME_BYTES), Ok(None));
        }
        let (frame, used) = decode(&bytes, MAX_FRAME_BYTES).expect("a frame").expect("whole");
        assert_eq!((frame, used), (Frame { message, payload: b"payload" }, whole));
        let (frame, _) = decode(&bytes[whole..], MAX_FRAME_BYTES).expect("a frame").expect("whole");
        assert_eq!(frame.message, Message::Heartbeat);
    }

    #[test]
    fn lengths_that_lie_are_refused_before_their_bytes_come() {
        let mut bytes = (u32::MAX).to_le_bytes().to_vec();
        assert!(matches!(decode(&bytes, 100), Err(FrameError::TooLong { .. })));
        bytes = [8u32.to_le_bytes(), 9u32.to_le_bytes(), [0; 4]].concat();
        assert!(matches!(decode(&bytes, 100), Err(FrameError::Lengths { message: 9, frame: 8 })));
        bytes = [5u32.to_le_bytes().to_vec(), 1u32.to_le_bytes().to_vec(), vec![200]].concat();
        assert!(matches!(decode(&bytes, 100), Err(FrameError::Message(_))));
        bytes = 3u32.to_le_bytes().to_vec();
        assert!(decode(&bytes, 100).is_err());
    }
}
