//! The server, and the plugin as a program.

use std::ffi::OsString;
use std::path::Path;
use std::process::Output;

use deepinfer_controlplane::{ControlPlane, install, shared};
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::discovery::ApiResource;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::OnceCell;

/// The server with our kinds; `None` if this machine has none.
pub async fn server() -> Option<&'static ControlPlane> {
    static INSTALLED: OnceCell<()> = OnceCell::const_new();
    let plane = shared().await?;
    let install = || async move { install::crds(plane).await.expect("the kinds are installed") };
    INSTALLED.get_or_init(install).await;
    Some(plane)
}

/// What a program said.
#[derive(Debug)]
pub struct Said {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }
}

/// Runs the plugin as an administrator.
pub async fn plugin(plane: &ControlPlane, args: &[&str]) -> Said {
    let kubeconfig = plane.kubeconfig().expect("a kubeconfig");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-deepinfer"));
    command.arg("--kubeconfig").arg(kubeconfig).args(args).kill_on_drop(true);
    command.output().await.expect("the plugin starts").into()
}

/// Runs `kubectl deepinfer` with the plugin in the PATH.
pub async fn kubectl_plugin(plane: &ControlPlane, args: &[&str]) -> Said {
    let folder = Path::new(env!("CARGO_BIN_EXE_kubectl-deepinfer")).parent().expect("a folder");
    let mut path = OsString::from(folder);
    path.push(":/usr/bin:/bin");
    let mut command = Command::new(plane.kubernetes_binary());
    command.args(["kubectl", "deepinfer"]).args(args).kill_on_drop(true);
    command.env("PATH", path).env("KUBECONFIG", plane.kubeconfig().expect("a kubeconfig"));
    command.output().await.expect("kubectl starts").into()
}

/// Objects of any kind.
pub fn api(plane: &ControlPlane, value: &Value, namespace: &str) -> Api<DynamicObject> {
    let version = value["apiVersion"].as_str().expect("apiVersion");
    let kind = value["kind"].as_str().expect("kind");
    let (group, version) = version.rsplit_once('/').unwrap_or(("", version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    match kind {
        "Node" => Api::all_with(plane.client(), &resource),
        _ => Api::namespaced_with(plane.client(), namespace, &resource),
    }
}

/// Makes an object, and gives it its status if it has one.
pub async fn make(plane: &ControlPlane, namespace: &str, value: Value) -> DynamicObject {
    let api = api(plane, &value, namespace);
    let object: DynamicObject = serde_json::from_value(value.clone()).expect("an object");
    let made = api.create(&PostParams::default(), &object).await.unwrap_or_else(|e| panic!("{value}: {e}"));
    let Some(status) = value.get("status") else { return made };
    let patch = json!({"status": status});
    let params = PatchParams::default();
    api.patch_status(&made.name_any(), &params, &Patch::Merge(patch)).await.expect("a sound status")
}
