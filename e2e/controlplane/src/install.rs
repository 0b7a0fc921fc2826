//! Brings our kinds, and the operator's account, rights and policies, into a control plane.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use deepinfer_crds::crd::{Kind, definition};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{Patch, PatchParams};

use crate::ControlPlane;
use crate::binaries::workspace_binary;

/// How long the API server may take to serve a kind.
const ESTABLISHED: Duration = Duration::from_secs(30);

/// What of the operator's install is wanted besides its account and rights.
#[derive(Clone, Debug)]
pub struct InstallOptions {
    /// Where the operator lives.
    pub namespace: String,
    /// Whether the admission policies are installed: they keep everybody but the operator from its own kinds.
    pub policies: bool,
    /// Namespaces that it may work in; empty for all.
    pub watch_namespaces: Vec<String>,
}

impl Default for InstallOptions {
    fn default() -> InstallOptions {
        InstallOptions {
            namespace: deepinfer_crds::names::rbac::OPERATOR_NAMESPACE.to_owned(),
            policies: true,
            watch_namespaces: Vec::new(),
        }
    }
}

/// The kinds, the operator's account and rights, and the policies: everything but the operator itself.
///
/// # Errors
/// If the API server refuses something.
pub async fn all(plane: &ControlPlane) -> anyhow::Result<()> {
    crds(plane).await?;
    operator(plane, &InstallOptions::default()).await
}

/// The four kinds; returns when the API server serves them.
///
/// # Errors
/// If it refuses one, or takes too long.
pub async fn crds(plane: &ControlPlane) -> anyhow::Result<()> {
    let api: Api<CustomResourceDefinition> = Api::all(plane.client());
    let params = PatchParams::apply("controlplane").force();
    let mut names = Vec::new();
    for kind in Kind::ALL {
        let object = definition(kind).object();
        let name = object["metadata"]["name"].as_str().context("a CRD without a name")?;
        let result = api.patch(name, &params, &Patch::Apply(object)).await;
        result.with_context(|| format!("installing the CRD {name}"))?;
        names.push(name.to_owned());
    }
    for name in names {
        established(&api, &name).await?;
    }
    Ok(())
}

async fn established(api: &Api<CustomResourceDefinition>, name: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + ESTABLISHED;
    loop {
        let status = api.get(name).await?.status.unwrap_or_default();
        let conditions = status.conditions.unwrap_or_default();
        if conditions.iter().any(|c| c.type_ == "Established" && c.status == "True") {
            return Ok(());
        }
        if Instant::now() > deadline {
            let all: Vec<String> = conditions.iter().map(|c| format!("{}={}", c.type_, c.status)).collect();
            bail!("CRD {name} is not served: {}", all.join(", "));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What `deepinfer-operator manifests` prints, without the Deployment: tests run the operator as a process.
///
/// # Errors
/// If the binary fails, or the API server refuses an object.
pub async fn operator(plane: &ControlPlane, options: &InstallOptions) -> anyhow::Result<()> {
    let text = manifests(options).await?;
    let wanted: Vec<String> = documents(&text)
        .into_iter()
        .filter(|document| !is_kind(document, "Deployment"))
        .map(|document| format!("---\n{document}"))
        .collect();
    plane.apply_yaml(&wanted.concat()).await?;
    Ok(())
}

/// The text of the operator's install.
async fn manifests(options: &InstallOptions) -> anyhow::Result<String> {
    let binary = tokio::task::spawn_blocking(|| workspace_binary("deepinfer-operator")).await??;
    let mut command = tokio::process::Command::new(binary);
    command.args(["manifests", "--namespace", &options.namespace]);
    if !options.policies {
        command.arg("--no-policies");
    }
    for namespace in &options.watch_namespaces {
        command.args(["--watch-namespace", namespace]);
    }
    let output = command.output().await.context("starting deepinfer-operator")?;
    if !output.status.success() {
        bail!("deepinfer-operator manifests: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// The documents of a YAML stream.
fn documents(text: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    for line in text.lines() {
        if line.trim_end() == "---" {
            all.push(String::new());
            continue;
        }
        let last = all.last_mut().expect("begins with one");
        last.push_str(line);
        last.push('\n');
    }
    all
}

fn is_kind(document: &str, kind: &str) -> bool {
    document.lines().any(|line| line.strip_prefix("kind:").is_some_and(|k| k.trim() == kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_cut_into_documents_and_their_kinds_are_seen() {
        let text = "kind: Namespace\nmetadata: {name: a}\n---\nkind: Deployment\nspec:\n  kind: Other\n";
        let all = documents(text);
        assert_eq!(all.len(), 2);
        assert!(is_kind(&all[0], "Namespace") && !is_kind(&all[0], "Deployment"));
        assert!(is_kind(&all[1], "Deployment") && !is_kind(&all[1], "Other"));
    }
}
