//! What a plain scalar means.
//! Invariant: never something else than kubectl reads; where YAML 1.1 and 1.2 differ, the difference is
//! reported.

use serde_json::{Number, Value};

/// A scalar of a file.
#[derive(Clone, Debug, PartialEq)]
pub enum Scalar {
    /// One meaning in every YAML.
    Sure(Value),
    /// A text in YAML 1.2, a boolean in the YAML 1.1 of kubectl.
    Word(bool),
    /// A number whose value depends on the reader.
    Doubtful(&'static str),
}

/// Whether a bare scalar is a text for every reader.
pub fn is_plain_text(text: &str) -> bool {
    matches!(resolve(text), Scalar::Sure(Value::String(_)))
}

fn yaml11_boolean(word: &str) -> Option<bool> {
    match word {
        "y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Some(true),
        "n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => Some(false),
        _ => None,
    }
}

/// Whether a plain scalar is a null.
pub fn is_null(text: &str) -> bool {
    matches!(text, "" | "~" | "null" | "Null" | "NULL")
}

/// The meaning of a plain scalar.
pub fn resolve(text: &str) -> Scalar {
    if is_null(text) {
        return Scalar::Sure(Value::Null);
    }
    match text {
        "true" | "True" | "TRUE" => return Scalar::Sure(Value::Bool(true)),
        "false" | "False" | "FALSE" => return Scalar::Sure(Value::Bool(false)),
        _ => {}
    }
    if let Some(meant) = yaml11_boolean(text) {
        return Scalar::Word(meant);
    }
    number(text).unwrap_or_else(|| Scalar::Sure(Value::String(text.to_owned())))
}

fn number(text: &str) -> Option<Scalar> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let first = digits.bytes().next()?;
    if !(first.is_ascii_digit() || first == b'.') {
        return None;
    }
    if digits.len() > 1 && digits.bytes().all(|b| b.is_ascii_digit() || b == b'_') {
        if digits.contains('_') {
            return Some(Scalar::Doubtful("write the number without _, or put a text in quotes"));
        }
        if first == b'0' {
            return Some(Scalar::Doubtful("write the number without leading 0, or put a text in quotes"));
        }
    }
    if is_based(digits) {
        return Some(Scalar::Doubtful("write a decimal number, or put a text in quotes"));
    }
    if matches!(digits, ".inf" | ".Inf" | ".INF" | ".nan" | ".NaN" | ".NAN") {
        return Some(Scalar::Doubtful("must be a finite number"));
    }
    let unsigned = text.strip_prefix('+').unwrap_or(text);
    if digits.bytes().all(|b| b.is_ascii_digit()) {
        if let Ok(whole) = unsigned.parse::<i64>() {
            return Some(Scalar::Sure(Value::from(whole)));
        }
        if let Ok(whole) = unsigned.parse::<u64>() {
            return Some(Scalar::Sure(Value::from(whole)));
        }
    }
    if !is_float(digits) {
        return None;
    }
    let float: f64 = unsigned.parse().ok()?;
    Some(match Number::from_f64(float) {
        Some(n) => Scalar::Sure(Value::Number(n)),
        None => Scalar::Doubtful("the number is too large"),
    })
}

/// Hexadecimal, octal and binary numbers.
fn is_based(digits: &str) -> bool {
    let Some(rest) = digits.strip_prefix('0') else { return false };
    let (base, rest) = match rest.bytes().next() {
        Some(b'x') => (16, &rest[1..]),
        Some(b'o') => (8, &rest[1..]),
        Some(b'b') => (2, &rest[1..]),
        _ => return false,
    };
    !rest.is_empty() && rest.chars().all(|c| c == '_' || c.is_digit(base))
}

/// Digits with at most one point and an exponent. `1e3` is one; `1.2.3` and `12ab` are texts.
fn is_float(digits: &str) -> bool {
    let (mantissa, exponent) = match digits.find(['e', 'E']) {
        Some(i) => (&digits[..i], Some(&digits[i + 1..])),
        None => (digits, None),
    };
    let exponent_fits = exponent.is_none_or(|e| {
        let e = e.strip_prefix(['+', '-']).unwrap_or(e);
        !e.is_empty() && e.bytes().all(|b| b.is_ascii_digit())
    });
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let all_digits = whole.bytes().chain(fraction.bytes()).all(|b| b.is_ascii_digit());
    exponent_fits && all_digits && !(whole.is_empty() && fraction.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn plain_scalars_mean_what_kubectl_reads() {
        for (text, value) in [
            ("", json!(null)),
            ("~", json!(null)),
            ("true", json!(true)),
            ("12", json!(12)),
            ("-3", json!(-3)),
            ("+3", json!(3)),
            ("0", json!(0)),
            ("0.85", json!(0.85)),
            (".5", json!(0.5)),
            ("1e3", json!(1000.0)),
            ("18446744073709551615", json!(18_446_744_073_709_551_615_u64)),
            ("1.2.3", json!("1.2.3")),
            ("12ab", json!("12ab")),
            ("--numerics=f32", json!("--numerics=f32")),
            (".", json!(".")),
            ("-", json!("-")),
            ("1e", json!("1e")),
        ] {
            assert_eq!(resolve(text), Scalar::Sure(value), "{text:?}");
        }
    }

    #[test]
    fn numbers_that_readers_disagree_about_are_refused() {
        for text in ["0777", "1_000", "0x1F", "0o17", "0b101", ".inf", "-.inf", ".nan", "1e999"] {
            assert!(matches!(resolve(text), Scalar::Doubtful(_)), "{text:?}");
        }
    }

    #[test]
    fn words_that_kubectl_takes_for_booleans_are_known() {
        assert_eq!(resolve("Off"), Scalar::Word(false));
        assert_eq!(resolve("on"), Scalar::Word(true));
        assert_eq!(resolve("oFF"), Scalar::Sure(json!("oFF")));
    }
}
