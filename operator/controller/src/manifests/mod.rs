//! The objects that install the operator, as YAML: pure functions of a few choices.
//!
//! ```text
//! rbac.rs   what the operator may do, rule by rule, and the bindings      workload.rs   what runs: Deployment, Service, ...
//! ```
//!
//! The CRDs are not among them: they come first and outlive the operator (`deepinfer-operator crds print`).
//! `operator/controller/manifests/install.yaml` is the output without flags; a test compares.

pub mod rbac;
mod workload;

use std::collections::BTreeMap;

use deepinfer_crds::names::{label, rbac as names};
use deepinfer_crds::{crd, policy, yaml};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::api::ObjectMeta;
use serde::Serialize;

/// The choices of an installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstallOptions {
    /// Namespace of the operator.
    pub namespace: String,
    /// Its image.
    pub image: String,
    /// Image of the gateway for clusters that name none.
    pub gateway_image: String,
    /// Watched namespaces; none means all.
    pub watch_namespaces: Vec<String>,
    /// With the admission policies.
    pub policies: bool,
    /// With the right to read nodes.
    pub read_nodes: bool,
}

impl InstallOptions {
    /// The operator's account as a user of the API server.
    pub fn user(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, names::OPERATOR_SERVICE_ACCOUNT)
    }

    /// Metadata of an object in the operator's namespace.
    fn meta(&self, name: &str) -> ObjectMeta {
        ObjectMeta { namespace: Some(self.namespace.clone()), ..cluster_meta(name) }
    }
}

/// Name of everything that there is one of.
pub(crate) const NAME: &str = names::OPERATOR_SERVICE_ACCOUNT;
/// Head of the printed text.
const NOTE: &str =
    "# Generated: deepinfer-operator manifests. The CRDs come first: deepinfer-operator crds print\n";

/// Everything that an installation needs beside the CRDs.
///
/// # Panics
/// Never: Kubernetes objects are JSON.
pub fn install(options: &InstallOptions) -> String {
    let mut documents = account(options);
    documents.extend(workload::objects(options));
    let mut text = NOTE.to_owned() + &joined(&documents);
    if options.policies {
        text += &policy::yaml(&options.user());
    }
    text
}

/// Only the account and what it may do.
///
/// # Panics
/// Never: Kubernetes objects are JSON.
pub fn rbac_only(options: &InstallOptions) -> String {
    NOTE.to_owned() + &joined(&account(options))
}

/// The CRDs of this release.
pub fn crds() -> String {
    crd::Kind::ALL
        .into_iter()
        .map(|kind| format!("---\n{}\n", crd::definition(kind).yaml().trim_end()))
        .collect()
}

fn account(options: &InstallOptions) -> Vec<String> {
    let namespace = Namespace { metadata: cluster_meta(&options.namespace), ..Namespace::default() };
    let account = ServiceAccount { metadata: options.meta(NAME), ..ServiceAccount::default() };
    let mut documents = vec![document(&namespace), document(&account)];
    documents.extend(rbac::objects(options));
    documents
}

/// Metadata of an object of the whole cluster.
fn cluster_meta(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), labels: Some(labels()), ..ObjectMeta::default() }
}

/// Labels of everything that is installed; also what selects the operator's pods.
fn labels() -> BTreeMap<String, String> {
    let pairs =
        [(label::APP_NAME, NAME), (label::APP_COMPONENT, "operator"), (label::APP_INSTANCE, "deepinfer")];
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn document<T: Serialize>(object: &T) -> String {
    yaml::to_yaml(object).expect("Kubernetes objects are JSON")
}

fn joined(documents: &[String]) -> String {
    documents.iter().map(|document| format!("---\n{}\n", document.trim_end())).collect()
}

#[cfg(test)]
mod tests;
