//! From a request's bytes to what the core needs, common to both APIs. Pure: no I/O, no clock.

use deepinfer_protocol::generate::GenerateSpec;

use super::Api;
use super::answer::AnswerBuilder;
use super::body::Fields;
use super::errors::ApiError;
use super::write::Shape;

/// A request that was parsed, tokenized and validated.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) prompt: Vec<u32>,
    pub(crate) spec: GenerateSpec,
    pub(crate) builder: AnswerBuilder,
    pub(crate) shape: Shape,
    pub(crate) stream: bool,
    /// Names of fields of no known API.
    pub(crate) ignored: Vec<String>,
}

/// How one API prepares.
pub(crate) type Prepare = fn(&Api, &[u8]) -> Result<Prepared, ApiError>;

/// The model that a request names is served here.
pub(crate) fn check_model(api: &Api, fields: &Fields<'_>) -> Result<(), ApiError> {
    match fields.string("model")? {
        Some(name) if api.serves(&name) => Ok(()),
        Some(_) => Err(ApiError::unknown_model(&api.model.name)),
        None => Err(ApiError::field("model", format!("is missing; send {:?}", api.model.name))),
    }
}
