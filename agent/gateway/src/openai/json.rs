//! Writing JSON by hand into a reused buffer: what is said once per token must not build trees.
//!
//! Invariant: whatever string is given, the output is one valid JSON string on one line (line breaks are escaped),
//! so no text can end a server-sent event or forge another.

/// For each byte: 0 if it stands for itself, `u` for a `\u00XX` escape, else the letter after the backslash.
const ESCAPES: [u8; 256] = {
    let mut table = [0_u8; 256];
    let mut byte = 0;
    while byte < 0x20 {
        table[byte] = b'u';
        byte += 1;
    }
    table[b'\n' as usize] = b'n';
    table[b'\r' as usize] = b'r';
    table[b'\t' as usize] = b't';
    table[0x08] = b'b';
    table[0x0C] = b'f';
    table[b'"' as usize] = b'"';
    table[b'\\' as usize] = b'\\';
    table[0x7F] = b'u';
    table
};

/// Append the content of a JSON string, without quotes.
pub(crate) fn push_escaped(buffer: &mut Vec<u8>, text: &str) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let bytes = text.as_bytes();
    let mut start = 0;
    for (index, &byte) in bytes.iter().enumerate() {
        let escape = ESCAPES[usize::from(byte)];
        if escape == 0 {
            continue;
        }
        buffer.extend_from_slice(&bytes[start..index]);
        buffer.extend_from_slice(&[b'\\', escape]);
        if escape == b'u' {
            buffer.extend_from_slice(b"00");
            buffer.push(HEX[usize::from(byte >> 4)]);
            buffer.push(HEX[usize::from(byte & 15)]);
        }
        start = index + 1;
    }
    buffer.extend_from_slice(&bytes[start..]);
}

/// Append a JSON string.
pub(crate) fn push_string(buffer: &mut Vec<u8>, text: &str) {
    buffer.push(b'"');
    push_escaped(buffer, text);
    buffer.push(b'"');
}

/// Append a number.
pub(crate) fn push_u64(buffer: &mut Vec<u8>, mut number: u64) {
    let mut digits = [0_u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    buffer.extend_from_slice(&digits[at..]);
}

/// Append a finite number in its shortest form; JSON has no others, so anything else becomes `floor`.
pub(crate) fn push_f32(buffer: &mut Vec<u8>, number: f32, floor: f32) {
    use std::io::Write;
    let number = if number.is_finite() { number } else { floor };
    // Writing to a vector cannot fail.
    let _ = write!(buffer, "{number:?}");
}

/// Append numbers, separated by commas, in brackets.
pub(crate) fn push_numbers(buffer: &mut Vec<u8>, numbers: impl IntoIterator<Item = u64>) {
    buffer.push(b'[');
    for (index, number) in numbers.into_iter().enumerate() {
        if index > 0 {
            buffer.push(b',');
        }
        push_u64(buffer, number);
    }
    buffer.push(b']');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_stay_on_one_line_whatever_the_text() {
        let mut buffer = Vec::new();
        push_string(&mut buffer, "a\r\n\r\ndata: [DONE]\nb\u{0}\u{1f}\u{7f}\"\\\u{8}\u{c}\t");
        assert!(!buffer.iter().any(|byte| *byte < 0x20 || *byte == 0x7F));
    }

    proptest! {
        #[test]
        fn any_text_reads_back_as_it_was(text in any::<String>()) {
            let mut buffer = Vec::new();
            push_string(&mut buffer, &text);
            prop_assert_eq!(serde_json::from_slice::<String>(&buffer).unwrap(), text);
        }

        #[test]
        fn any_number_reads_back_as_it_was(number in any::<u64>(), real in any::<f32>()) {
            let mut buffer = Vec::new();
            push_numbers(&mut buffer, [number, 0]);
            prop_assert_eq!(serde_json::from_slice::<Vec<u64>>(&buffer).unwrap(), vec![number, 0]);
            buffer.clear();
            push_f32(&mut buffer, real, -1.0);
            let read = serde_json::from_slice::<f64>(&buffer).unwrap() as f32;
            prop_assert_eq!(read, if real.is_finite() { real } else { -1.0 });
        }
    }
}
