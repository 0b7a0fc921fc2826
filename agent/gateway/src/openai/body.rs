//! From the bytes of a request body to the fields of one JSON object, each read when it is asked for.
//!
//! Fields are kept as raw JSON text first: a number that no type holds (`1e400`) or a value nested too deeply is
//! then the fault of a field with a name, not of the whole body. Invariant: no error repeats what was sent.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use super::errors::ApiError;

/// Most fields of a request; the APIs know about a hundred.
const MAX_FIELDS: usize = 256;
/// Longest name of a field in bytes.
const MAX_NAME: usize = 256;

/// Read a body within its limits.
pub(crate) async fn read(
    headers: &HeaderMap,
    body: Body,
    limit: usize,
    timeout: Duration,
) -> Result<Bytes, ApiError> {
    if let Some(kind) = headers.get(header::CONTENT_TYPE) {
        let kind = kind.as_bytes();
        let kind = kind.split(|byte| *byte == b';').next().unwrap_or(kind).trim_ascii();
        if !kind.eq_ignore_ascii_case(b"application/json") {
            return Err(ApiError::content_type());
        }
    }
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    if announced.and_then(|length| length.parse::<u64>().ok()).is_some_and(|length| length > limit as u64) {
        return Err(ApiError::body_too_large(limit));
    }
    match tokio::time::timeout(timeout, Limited::new(body, limit).collect()).await {
        Err(_) => Err(ApiError::body_timeout(timeout)),
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::body_too_large(limit)),
        Ok(Err(_)) => Err(ApiError::bad_request("the request body broke off")),
    }
}

/// The fields of a request, in the order they came.
#[derive(Debug)]
pub(crate) struct Fields<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'a> Fields<'a> {
    /// Read one JSON object.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, ApiError> {
        if bytes.trim_ascii().is_empty() {
            return Err(ApiError::bad_request("the request body is empty; send a JSON object"));
        }
        let fields: Self = serde_json::from_slice(bytes).map_err(|error| explain(&error))?;
        for (index, (name, _)) in fields.0.iter().enumerate() {
            if fields.0[..index].iter().any(|(earlier, _)| earlier == name) {
                return Err(ApiError::field(name.as_ref(), "is given twice"));
            }
        }
        Ok(fields)
    }

    /// Names and raw values.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        self.0.iter().map(|(name, value)| (name.as_ref(), *value))
    }

    /// The raw value of a field; null counts as not given, as OpenAI's schema has it.
    pub(crate) fn raw(&self, name: &str) -> Option<&'a RawValue> {
        let (_, value) = self.0.iter().find(|(field, _)| field == name)?;
        (value.get() != "null").then_some(*value)
    }

    /// A string.
    pub(crate) fn string(&self, name: &str) -> Result<Option<String>, ApiError> {
        self.typed(name, "expected a string")
    }

    /// True or false.
    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "expected true or false")
    }

    /// A tree, for what is not read once a token.
    pub(crate) fn value(&self, name: &str) -> Result<Option<Value>, ApiError> {
        self.raw(name).map(|raw| tree(name, raw)).transpose()
    }

    fn typed<T: DeserializeOwned>(&self, name: &str, expected: &str) -> Result<Option<T>, ApiError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        serde_json::from_str(raw.get()).map(Some).map_err(|_| ApiError::field(name, expected))
    }

    /// A whole number from `low` to `high`. `2.0` is one, as in JavaScript.
    pub(crate) fn whole(&self, name: &str, low: u64, high: u64) -> Result<Option<u64>, ApiError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        whole(raw)
            .filter(|number| (low..=high).contains(number))
            .map(Some)
            .ok_or_else(|| ApiError::field(name, format!("expected a whole number from {low} to {high}")))
    }

    /// A number for which `allowed` holds; `expected` says which those are.
    pub(crate) fn real(
        &self,
        name: &str,
        expected: &str,
        allowed: impl Fn(f64) -> bool,
    ) -> Result<Option<f32>, ApiError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        match serde_json::from_str::<f64>(raw.get()) {
            Ok(number) if number.is_finite() && allowed(number) => Ok(Some(number as f32)),
            _ => Err(ApiError::field(name, format!("expected a number {expected}"))),
        }
    }
}

/// A raw value as a tree.
pub(crate) fn tree(name: &str, raw: &RawValue) -> Result<Value, ApiError> {
    serde_json::from_str(raw.get()).map_err(|error| {
        // serde_json has no other way to tell.
        if error.to_string().starts_with("recursion limit") {
            return ApiError::field(name, "is nested too deeply; at most 127 levels are read");
        }
        ApiError::field(name, "holds a number that is out of range")
    })
}

/// A raw value as a whole number that is not negative.
pub(crate) fn whole(raw: &RawValue) -> Option<u64> {
    // Beyond 2^53 not every whole number is one of these.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    serde_json::from_str::<u64>(raw.get()).ok().or_else(|| {
        let real = serde_json::from_str::<f64>(raw.get()).ok()?;
        (real.fract() == 0.0 && (0.0..EXACT).contains(&real)).then_some(real as u64)
    })
}

fn explain(error: &serde_json::Error) -> ApiError {
    use serde_json::error::Category;
    match error.classify() {
        Category::Data => ApiError::bad_request(format!(
            "the request body must be one JSON object with at most {MAX_FIELDS} fields"
        )),
        Category::Eof => ApiError::bad_request("the request body is not valid JSON: it ends too early"),
        Category::Syntax | Category::Io => ApiError::bad_request(format!(
            "the request body is not valid JSON: error at line {} column {}",
            error.line(),
            error.column()
        )),
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some(Name(name)) = map.next_key()? {
                    if fields.len() == MAX_FIELDS || name.len() > MAX_NAME {
                        return Err(serde::de::Error::custom("too many fields"));
                    }
                    fields.push((name, map.next_value()?));
                }
                Ok(fields)
            }
        }

        deserializer.deserialize_map(Object).map(Self)
    }
}

/// A name, borrowed from the body unless it has escapes.
struct Name<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Name<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl<'de> Visitor<'de> for Text {
            type Value = Cow<'de, str>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a name")
            }

            fn visit_borrowed_str<E>(self, name: &'de str) -> Result<Self::Value, E> {
                Ok(Cow::Borrowed(name))
            }

            fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
                Ok(Cow::Owned(name.to_owned()))
            }
        }

        deserializer.deserialize_str(Text).map(Self)
    }
}
