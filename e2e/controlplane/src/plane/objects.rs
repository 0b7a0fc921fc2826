//! Objects and kubectl: what a test does to a cluster as its administrator.

use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::discovery::{ApiResource, Scope, pinned_kind};
use kube::{Api, Client};
use serde::Deserialize as _;
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;

use super::{ControlPlane, programs};
use crate::{args, binaries};

/// The field manager of what tests apply.
const MANAGER: &str = "controlplane";
/// How long the kind of a CRD may take to be served once the CRD exists.
const KIND_SERVED: Duration = Duration::from_secs(20);

impl ControlPlane {
    /// A namespace that no other test uses, ready for pods. Returns its name.
    ///
    /// # Errors
    /// If the API server refuses.
    pub async fn namespace(&self, prefix: &str) -> anyhow::Result<String> {
        let client = self.client();
        let metadata = ObjectMeta { generate_name: Some(format!("{prefix}-")), ..ObjectMeta::default() };
        let namespace = Namespace { metadata, ..Namespace::default() };
        let made = Api::all(client.clone()).create(&PostParams::default(), &namespace).await?;
        let name = made.metadata.name.context("a namespace without a name")?;
        // Without it the API server refuses pods.
        let accounts: Api<ServiceAccount> = Api::namespaced(client, &name);
        let account = async || accounts.get("default").await.is_ok();
        let deadline = Instant::now() + Duration::from_secs(60);
        self.poll("a new namespace has no default service account", deadline, account).await?;
        Ok(name)
    }

    /// Applies the documents of a YAML text by server-side apply, in their order; returns what the server made of them.
    /// An object without a namespace goes to `default`, if its kind has namespaces.
    ///
    /// # Errors
    /// The first refusal, with kind and name.
    pub async fn apply_yaml(&self, text: &str) -> anyhow::Result<Vec<DynamicObject>> {
        apply(&self.client(), text).await
    }

    /// Runs kubectl with an administrator's rights, whatever it answers. `kubectl deepinfer` is ours.
    ///
    /// # Errors
    /// If it cannot be started.
    pub async fn kubectl(&self, args: &[&str]) -> anyhow::Result<Output> {
        self.kubectl_with(args, "").await
    }

    /// As [`Self::kubectl`], with a text on standard input (`-f -`).
    ///
    /// # Errors
    /// If it cannot be started.
    pub async fn kubectl_with(&self, words: &[&str], input: &str) -> anyhow::Result<Output> {
        let mut command = tokio::process::Command::from(programs::kubectl(&self.binary));
        // By the environment, so that plugins get it too; ours lies beside the program that runs.
        command
            .env("KUBECONFIG", self.kubeconfig()?)
            .env("KUBECACHEDIR", self.folder().join("kubectl-cache"));
        if let Some(plugins) = binaries::plugin_folder() {
            command.env("PATH", args::path_with(&plugins));
        }
        command.args(words).current_dir(self.folder()).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("starting kubectl")?;
        let mut stdin = child.stdin.take().context("kubectl without an input")?;
        // It may end without reading: then its answer says why.
        let _ = stdin.write_all(input.as_bytes()).await;
        drop(stdin);
        Ok(child.wait_with_output().await?)
    }

    /// Runs kubectl and returns what it prints.
    ///
    /// # Errors
    /// If it fails, with its error text.
    pub async fn kubectl_ok(&self, args: &[&str]) -> anyhow::Result<String> {
        let output = self.kubectl(args).await?;
        if !output.status.success() {
            bail!("kubectl {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The binary that is kubectl when called with that first argument.
    pub fn kubernetes_binary(&self) -> PathBuf {
        self.binary.clone()
    }
}

/// Server-side apply of each document of a text.
pub(super) async fn apply(client: &Client, text: &str) -> anyhow::Result<Vec<DynamicObject>> {
    let mut applied = Vec::new();
    for document in serde_yaml::Deserializer::from_str(text) {
        let value = Value::deserialize(document).context("a document is not YAML")?;
        if value.is_null() {
            continue;
        }
        applied.push(apply_one(client, &value).await?);
    }
    Ok(applied)
}

async fn apply_one(client: &Client, value: &Value) -> anyhow::Result<DynamicObject> {
    let word = |pointer: &str| value.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let (version, kind, name) = (word("/apiVersion"), word("/kind"), word("/metadata/name"));
    if version.is_empty() || kind.is_empty() || name.is_empty() {
        bail!("a document needs apiVersion, kind and metadata.name: {value}");
    }
    let (group, version) = version.rsplit_once('/').unwrap_or(("", version));
    let (resource, scope) = kind_of(client, &GroupVersionKind::gvk(group, version, kind)).await?;
    let api: Api<DynamicObject> = match (scope, word("/metadata/namespace")) {
        (Scope::Cluster, _) => Api::all_with(client.clone(), &resource),
        (Scope::Namespaced, "") => Api::namespaced_with(client.clone(), "default", &resource),
        (Scope::Namespaced, namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
    };
    let params = PatchParams::apply(MANAGER).force();
    let result = api.patch(name, &params, &Patch::Apply(value)).await;
    result.with_context(|| format!("applying {kind} {name}"))
}

/// How the server calls a kind. A CRD that was just made is served a moment later.
async fn kind_of(client: &Client, gvk: &GroupVersionKind) -> anyhow::Result<(ApiResource, Scope)> {
    let deadline = Instant::now() + KIND_SERVED;
    loop {
        match pinned_kind(client, gvk).await {
            Ok((resource, capabilities)) => return Ok((resource, capabilities.scope)),
            Err(_) if Instant::now() < deadline => tokio::time::sleep(Duration::from_millis(100)).await,
            Err(error) => {
                let kind = format!("{}/{} {}", gvk.group, gvk.version, gvk.kind);
                return Err(error).with_context(|| format!("the API server does not serve {kind}"));
            }
        }
    }
}
