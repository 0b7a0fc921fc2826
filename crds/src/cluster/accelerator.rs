//! Accelerators and networks of the engine pods.
//! Invariant: the vendor of a cluster never changes (CEL rule 8).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cel::{self, rules};

/// Kind of device. `cpu` needs no device: pods may share a node and all nodes are one domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = crate::crd::without_description)]
pub enum Vendor {
    /// NVIDIA GPUs.
    Nvidia,
    /// Ascend NPUs.
    Ascend,
    /// No device: the CPU engine.
    Cpu,
}

/// Whether a supernode gets a ComputeDomain of the NVIDIA DRA driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum ComputeDomainMode {
    /// If the API is served and the topology profile is a multi-node one.
    Auto,
    /// Always; without the API the cluster is Stalled.
    Required,
    /// Never.
    Off,
}

/// The accelerators that all pools run on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::COMPUTE_DOMAIN_NEEDS_NVIDIA])))]
pub struct Accelerator {
    /// Kind of device: nvidia, ascend or cpu. Can not be changed afterwards.
    #[schemars(extend("x-kubernetes-validations" = rules(&[cel::VENDOR_IMMUTABLE])))]
    pub vendor: Vendor,
    /// Accelerators (= ranks) in each pod, 1 to 16. Default 8; for vendor cpu 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16))]
    pub accelerators_per_node: Option<u32>,
    /// Resource that pods ask for. Default nvidia.com/gpu or huawei.com/npu; none for cpu.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub resource_name: Option<String>,
    /// Name of the operator's topology profile, which says what labels make a domain. Default: hgx (8 per
    /// node) or nvl72 (4 per node) for nvidia, superpod for ascend, none for cpu.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub topology_profile: Option<String>,
    /// ComputeDomain of a supernode: Auto, Required or "Off". Default Auto; only for vendor nvidia.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_domain: Option<ComputeDomainMode>,
}

/// Extra network interfaces of engine pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Network {
    /// RDMA devices for KV and expert exchange. Default: none, TCP is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma: Option<Rdma>,
    /// Whether engine pods share the node's network. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_network: Option<bool>,
    /// Names of Multus network attachments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), inner(length(min = 1, max = 253)), extend("x-kubernetes-list-type" = "set"))]
    pub attachments: Vec<String>,
}

/// RDMA devices: by resource name and count, or by a claim template.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::RDMA_ONE_SOURCE])))]
pub struct Rdma {
    /// Extended resource of the device plugin, as rdma/hca. This or resourceClaimTemplateName.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub resource_name: Option<String>,
    /// Devices in each pod, 1 to 16. Default 1; only with resourceName.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16))]
    pub count: Option<u32>,
    /// ResourceClaimTemplate in the namespace of the cluster. This or resourceName.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub resource_claim_template_name: Option<String>,
}
