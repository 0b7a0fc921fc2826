//! The header of calls to control ports: `Authorization: DeepInfer <seconds>.<hex tag>`, where the tag signs the
//! time, the method and the path. A captured header opens one path for a few minutes and nothing else.

use crate::key::ClusterKey;

/// Seconds by which the caller's clock may differ from ours.
pub const CLOCK_TOLERANCE_SECONDS: u64 = 300;

const SCHEME: &str = "DeepInfer ";

/// The header's value for a call at `unix_seconds`. `path` without query.
pub fn authorization(key: &ClusterKey, unix_seconds: u64, method: &str, path: &str) -> String {
    let (_, mac) = key.sign(&[signed(unix_seconds, method, path).as_bytes()]);
    let mut value = format!("{SCHEME}{unix_seconds}.");
    for byte in mac {
        value.push(char::from_digit(u32::from(byte >> 4), 16).expect("a nibble"));
        value.push(char::from_digit(u32::from(byte & 15), 16).expect("a nibble"));
    }
    value
}

/// Whether a call may come in.
///
/// # Errors
/// What is wrong, for the answer's body; it does not say more than the caller sent.
pub fn check(
    key: &ClusterKey,
    unix_seconds: u64,
    method: &str,
    path: &str,
    header: Option<&str>,
) -> Result<(), &'static str> {
    let Some(value) = header else {
        return Err("send an Authorization: DeepInfer header signed with the cluster's key");
    };
    let parsed = value.strip_prefix(SCHEME).and_then(|rest| rest.split_once('.'));
    let Some((time, hex)) = parsed else {
        return Err("the Authorization header is not of the form DeepInfer <seconds>.<hex>");
    };
    let Ok(time) = time.parse::<u64>() else {
        return Err("the Authorization header's time is not a number of seconds");
    };
    let Some(mac) = bytes_of(hex) else {
        return Err("the Authorization header's signature is not 64 hex digits");
    };
    if !key.verify_any(&[signed(time, method, path).as_bytes()], &mac) {
        return Err("the Authorization header's signature does not match the cluster's key");
    }
    if time.abs_diff(unix_seconds) > CLOCK_TOLERANCE_SECONDS {
        return Err("the Authorization header is older or newer than 300 s: check the clocks");
    }
    Ok(())
}

fn signed(unix_seconds: u64, method: &str, path: &str) -> String {
    format!("{unix_seconds}\n{method}\n{path}")
}

/// 32 bytes of 64 hex digits.
pub(crate) fn bytes_of(hex: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if hex.len() != 64 {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
        let digit = |b: u8| char::from(b).to_digit(16);
        *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use deepinfer_protocol::Generation;

    use super::*;

    #[test]
    fn a_signed_call_opens_its_own_path_in_its_own_time() {
        let key = ClusterKey::new(Generation(1), [5; 32]);
        let header = authorization(&key, 1000, "GET", "/v1/status");
        let check = |time, method, path, header: &str| check(&key, time, method, path, Some(header));
        assert_eq!(check(1000, "GET", "/v1/status", &header), Ok(()));
        assert_eq!(check(1300, "GET", "/v1/status", &header), Ok(()));
        assert_eq!(check(700, "GET", "/v1/status", &header), Ok(()));
        assert!(check(1301, "GET", "/v1/status", &header).is_err());
        assert!(check(699, "GET", "/v1/status", &header).is_err());
        assert!(check(1000, "POST", "/v1/status", &header).is_err());
        assert!(check(1000, "GET", "/v1/drain", &header).is_err());
    }

    #[test]
    fn other_keys_and_damaged_headers_are_refused() {
        let key = ClusterKey::new(Generation(1), [5; 32]);
        let other = authorization(&ClusterKey::new(Generation(1), [6; 32]), 1000, "GET", "/");
        let good = authorization(&key, 1000, "GET", "/");
        let long = format!("DeepInfer 1000.{}", "f".repeat(4000));
        let cut = &good[..good.len() - 1];
        for header in ["", "Bearer x", "DeepInfer ", "DeepInfer x.y", "DeepInfer 1000.é", cut, &other, &long]
        {
            assert!(check(&key, 1000, "GET", "/", Some(header)).is_err(), "{header}");
        }
        assert!(check(&key, 1000, "GET", "/", None).is_err());
    }
}
