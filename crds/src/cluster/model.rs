//! The model: its name for clients and where its weights come from.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cel::{self, rules};

/// The model that is served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Model {
    /// Name that clients send. It is never part of an object's name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Further names that clients may send.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 253)), extend("x-kubernetes-list-type" = "set"))]
    pub aliases: Vec<String>,
    /// Where the weights come from.
    pub source: ModelSource,
    /// How nodes keep the weights. Default: by the kind of source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<ModelCache>,
}

/// Where the weights come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelSource {
    /// One of oci://, pvc://claim/path, file:// (a path of the host), hf://, s3://. In local mode a file://
    /// path that does not begin with / is looked up from the folder of the cluster file.
    #[schemars(
        length(min = 1, max = 2048),
        extend("x-kubernetes-validations" = rules(&[cel::MODEL_URI_SCHEME]))
    )]
    pub uri: String,
    /// Revision of the source: branch, tag or digest. Default: what the uri names.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub revision: Option<String>,
    /// Secret with the credentials of the source. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub credentials_secret_name: Option<String>,
}

/// How nodes keep the weights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelCache {
    /// ImageVolume, NodeLocal, SharedClaim or None. Default: ImageVolume for oci:// where the cluster has
    /// image volumes, NodeLocal for hf:// and s3://, None otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<CacheMode>,
    /// Folder of the node-local cache on the host. Default /var/lib/deepinfer/models.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub path: Option<String>,
    /// Whether all candidate nodes load the weights before pods start. Default true; only for NodeLocal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<bool>,
}

/// How nodes keep the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum CacheMode {
    /// As an image volume of the pod.
    ImageVolume,
    /// In a folder of each node.
    NodeLocal,
    /// In a claim that all pods mount.
    SharedClaim,
    /// Not at all: read from the source.
    None,
}
