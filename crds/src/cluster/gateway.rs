//! The HTTP edge.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cel::{self, rules};

/// Whether the model thinks before it answers when a request does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum Thinking {
    /// It thinks.
    On,
    /// It answers at once.
    Off,
}

/// The HTTP edge. At most one of replicas and scaling.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::GATEWAY_REPLICAS_OR_SCALING])))]
pub struct Gateway {
    /// Image of the gateway. Default: the operator's release, kept while the revision stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub image: Option<String>,
    /// Pods, 0 to 256. Default 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 256))]
    pub replicas: Option<u32>,
    /// Leaves the number of pods to an HPA on the Deployment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<GatewayScaling>,
    /// Shape of the Service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceShape>,
    /// An InferencePool of the Gateway API. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inference_pool: Option<InferencePool>,
    /// An HTTPRoute of the Gateway API. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<Route>,
    /// Holds requests while a pool has no replica.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activator: Option<Activator>,
    /// Secret with tls.crt and tls.key; read again when it changes. Default: plain HTTP.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub tls_secret_name: Option<String>,
    /// Secret with the API keys and their tenants. Default: none, everybody may call.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub api_keys_secret_name: Option<String>,
    /// Whether the model thinks when a request does not say: "On" or "Off". Default "On". Quote the word:
    /// kubectl reads a bare On or Off as a boolean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_thinking: Option<Thinking>,
}

/// Leaves the number of gateway pods to somebody else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayScaling {
    /// Who scales: External.
    pub mode: GatewayScalingMode,
}

/// Who scales the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum GatewayScalingMode {
    /// An HPA on the Deployment.
    External,
}

/// Shape of the gateway's Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceShape {
    /// ClusterIP, NodePort or LoadBalancer. Default ClusterIP.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "type")]
    pub service_type: Option<ServiceType>,
    /// Annotations of the Service.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64, "additionalProperties" = {"type": "string", "maxLength": 4096}))]
    pub annotations: BTreeMap<String, String>,
}

/// Kind of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum ServiceType {
    /// Inside the Kubernetes cluster.
    #[serde(rename = "ClusterIP")]
    ClusterIp,
    /// On a port of every node.
    NodePort,
    /// Behind a load balancer.
    LoadBalancer,
}

/// An InferencePool of the Gateway API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InferencePool {
    /// Whether it is made. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// The endpoint picker. Default: the gateway's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint_picker_ref: Option<PickerRef>,
    /// What happens without the picker: FailOpen or FailClose. Default FailOpen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_mode: Option<PickerFailureMode>,
}

/// A Service that picks endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PickerRef {
    /// Name of the Service.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Its port, 1 to 65535. Default 9002.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<u32>,
}

/// What happens without the endpoint picker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum PickerFailureMode {
    /// Requests go to any endpoint.
    FailOpen,
    /// Requests are refused.
    FailClose,
}

/// An HTTPRoute of the Gateway API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Route {
    /// Gateways that the route belongs to.
    #[schemars(length(min = 1, max = 32), extend("x-kubernetes-list-type" = "atomic"))]
    pub parent_refs: Vec<RouteParentRef>,
    /// Host names that the route answers. Default: all of the parent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 253)), extend("x-kubernetes-list-type" = "set"))]
    pub hostnames: Vec<String>,
}

/// A Gateway that a route belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteParentRef {
    /// Name of the Gateway.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Its namespace. Default: that of the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub namespace: Option<String>,
    /// Its listener. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub section_name: Option<String>,
}

/// Holds requests while a pool has no replica.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Activator {
    /// Whether requests are held. Default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Longest hold of a request, in seconds, 1 to 3600. Default 600.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3600))]
    pub max_hold_seconds: Option<u32>,
    /// Most requests held by one gateway pod, 1 to 100000. Default 1000.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100000))]
    pub max_held: Option<u32>,
}
