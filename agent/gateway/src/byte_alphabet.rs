//! The byte alphabet of byte-level tokenizers: one printable character for each of the 256 bytes, so that a
//! vocabulary of bytes can be written as a vocabulary of strings.

/// The bytes of a vocabulary string: each character of the byte alphabet is one byte. A string with any other
/// character stands for its own UTF-8, as in the reference decoder.
pub(crate) fn bytes_of_token(name: &str) -> Box<[u8]> {
    name.chars().map(byte_of_char).collect::<Option<Box<[u8]>>>().unwrap_or_else(|| name.as_bytes().into())
}

/// The bytes that the byte alphabet writes as themselves: those that are printable in Latin-1.
const fn is_literal(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

/// Byte to character of the byte alphabet: bytes that are not literal take U+0100, U+0101, ... in order.
const BYTE_CHARS: [char; 256] = {
    let mut chars = ['\0'; 256];
    let mut next = 0x100;
    let mut byte = 0;
    while byte < 256 {
        if is_literal(byte as u8) {
            chars[byte] = byte as u8 as char;
        } else {
            // The 68 others end at U+0143, far below the surrogates.
            chars[byte] = match char::from_u32(next) {
                Some(found) => found,
                None => '\0',
            };
            next += 1;
        }
        byte += 1;
    }
    chars
};

/// Character of the byte alphabet to byte; `None` elsewhere.
const CHAR_BYTES: [Option<u8>; 0x144] = {
    let mut bytes = [None; 0x144];
    let mut byte = 0;
    while byte < 256 {
        bytes[BYTE_CHARS[byte] as usize] = Some(byte as u8);
        byte += 1;
    }
    bytes
};

/// The character that stands for `byte`.
pub(crate) fn char_of_byte(byte: u8) -> char {
    BYTE_CHARS[byte as usize]
}

fn byte_of_char(c: char) -> Option<u8> {
    CHAR_BYTES.get(c as usize).copied().flatten()
}
