//! What the API server offers beside its core, looked at when the operator starts and every ten minutes
//! (operator.md 6.2.1, 12.9, 14): gang APIs, ComputeDomains, and whether our own CRDs are new enough.
//!
//! Invariants: a kind that is missing is a fact, never a failure; a fact that cannot be had now keeps its last value; the
//! first look is whole or is repeated. Nothing is left behind: what is created is a dry run.

use std::time::Duration;

use deepinfer_crds::crd;
use deepinfer_crds::names::annotation;
use deepinfer_planner::{Apis, NativeVersion};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DynamicObject, PostParams};
use kube::core::ApiResource;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Pause between two tries of the first look.
const FIRST_RETRY: Duration = Duration::from_secs(2);
/// With CRDs that are too old somebody is upgrading just now: look again soon.
const SKEW_RETRY: Duration = Duration::from_secs(10);
/// Label of the topology constraint in dry runs: any key will do.
const DRY_RUN_LABEL: &str = "topology.kubernetes.io/zone";

/// How to look.
#[derive(Clone, Debug)]
pub struct ProbeOptions {
    /// Where dry runs are made: a namespace in which pods may be created.
    pub namespace: String,
    /// Account of the pods of dry runs that is there if the operator is; else that of the namespace.
    pub account: Option<String>,
    /// Pause between two looks.
    pub interval: Duration,
    /// Longest call.
    pub request_timeout: Duration,
    /// What our CRDs must have at least.
    pub schema_revision: u32,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probed {
    /// Optional APIs.
    pub apis: Apis,
    /// The CRDs are missing or older than this operator needs, and what to do about it.
    pub skew: Option<String>,
}

/// Looks once, for as long as it takes, then goes on looking until `stop`.
pub async fn start(
    client: Client,
    options: ProbeOptions,
    stop: CancellationToken,
) -> watch::Receiver<Probed> {
    let probe = Probe { client, options };
    let first = loop {
        match probe.look().await {
            Ok(probed) => break probed,
            Err(error) => tracing::warn!(err = %error, "the API server cannot be probed; trying again"),
        }
        tokio::select! {
            () = stop.cancelled() => break Probed::default(),
            () = tokio::time::sleep(FIRST_RETRY) => {}
        }
    };
    tell(&first);
    let (send, receive) = watch::channel(first);
    tokio::spawn(async move { probe.go_on(&send, &stop).await });
    receive
}

fn tell(probed: &Probed) {
    tracing::info!(apis = ?probed.apis, skew = probed.skew.as_deref().unwrap_or(""), "probed");
}

struct Probe {
    client: Client,
    options: ProbeOptions,
}

impl Probe {
    async fn go_on(&self, send: &watch::Sender<Probed>, stop: &CancellationToken) {
        loop {
            let skewed = send.borrow().skew.is_some();
            let pause = if skewed { self.options.interval.min(SKEW_RETRY) } else { self.options.interval };
            tokio::select! {
                () = stop.cancelled() => return,
                () = send.closed() => return,
                () = tokio::time::sleep(pause) => {}
            }
            match self.look().await {
                Ok(probed) => {
                    let changed = send.send_if_modified(|last| {
                        let changed = *last != probed;
                        last.clone_from(&probed);
                        changed
                    });
                    if changed {
                        tell(&probed);
                    }
                }
                Err(error) => tracing::debug!(err = %error, "the API server cannot be probed now"),
            }
        }
    }

    /// One whole look.
    async fn look(&self) -> Result<Probed, kube::Error> {
        let skew = self.skew().await?;
        let native = match self.serves("scheduling.k8s.io/v1beta1", "PodGroup").await? {
            true => Some(NativeVersion::V1Beta1),
            false if self.serves("scheduling.k8s.io/v1alpha2", "PodGroup").await? => {
                Some(NativeVersion::V1Alpha2)
            }
            false => None,
        };
        let mut apis = Apis {
            volcano: self.serves("scheduling.volcano.sh/v1beta1", "PodGroup").await?,
            kai: self.serves("scheduling.run.ai/v2alpha2", "PodGroup").await?,
            kueue: self.serves("kueue.x-k8s.io/v1beta2", "LocalQueue").await?
                || self.serves("kueue.x-k8s.io/v1beta1", "LocalQueue").await?,
            compute_domain: self.serves("resource.nvidia.com/v1beta1", "ComputeDomain").await?,
            ..Apis::default()
        };
        if let Some(version) = native
            && self.pods_keep_their_group().await?
        {
            apis.native_gang = Some(version);
            apis.native_topology = self.groups_take_topology(version).await?;
        }
        Ok(Probed { apis, skew })
    }

    /// Whether a kind is served at this version.
    async fn serves(&self, api_version: &str, kind: &str) -> Result<bool, kube::Error> {
        match self.bounded(self.client.list_api_group_resources(api_version)).await {
            Ok(list) => Ok(list.resources.iter().any(|resource| resource.kind == kind)),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether the field `schedulingGroup` survives: without the gate the API server drops it silently.
    async fn pods_keep_their_group(&self) -> Result<bool, kube::Error> {
        let resource = ApiResource::erase::<k8s_openapi::api::core::v1::Pod>(&());
        // The namespace's own account is made by a controller, a moment after the namespace.
        for account in self.options.account.as_deref().into_iter().chain(["default"]) {
            if let Some(pod) = self.dry_run(&resource, dry_run_pod(account)).await? {
                let kept = pod.pointer("/spec/schedulingGroup/podGroupName");
                return Ok(kept == Some(&json!("deepinfer-probe")));
            }
        }
        Ok(false)
    }

    /// Whether a PodGroup keeps its topology constraint.
    async fn groups_take_topology(&self, version: NativeVersion) -> Result<bool, kube::Error> {
        let group = dry_run_group(version);
        let kept = self.dry_run(&pod_group(version), group).await?;
        Ok(kept.is_some_and(|group| {
            group.pointer("/spec/schedulingConstraints/topology/0/key") == Some(&json!(DRY_RUN_LABEL))
        }))
    }

    /// What the API server would have stored; `None` if it refuses, which is an answer too.
    async fn dry_run(&self, resource: &ApiResource, object: Value) -> Result<Option<Value>, kube::Error> {
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &self.options.namespace, resource);
        let object: DynamicObject = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
        let params = PostParams { dry_run: true, field_manager: None };
        match self.bounded(api.create(&params, &object)).await {
            Ok(stored) => serde_json::to_value(stored).map(Some).map_err(kube::Error::SerdeError),
            Err(kube::Error::Api(status)) if (400..500).contains(&status.code) && status.code != 429 => {
                let (kind, why) = (resource.kind.as_str(), status.message.as_str());
                tracing::debug!(kind, reason = why, "a dry run was refused");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// What is wrong with our CRDs.
    async fn skew(&self) -> Result<Option<String>, kube::Error> {
        let api: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        for kind in crd::Kind::ALL {
            let name = format!("{}.{}", kind.plural(), deepinfer_crds::names::GROUP);
            let live = match self.bounded(api.get_opt(&name)).await {
                Ok(live) => live,
                Err(kube::Error::Api(status)) if status.code == 403 => {
                    tracing::warn!(crd = name, "the CRD may not be read: its schema revision is not checked");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let revision = live.map(|live| revision_of(&live));
            if let Some(skew) = skew_of(&name, revision, self.options.schema_revision) {
                return Ok(Some(skew));
            }
        }
        Ok(None)
    }

    async fn bounded<T>(&self, call: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
        let limit = self.options.request_timeout;
        tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
            let message = format!("no answer from the API server within {} s", limit.as_secs_f64());
            Err(kube::Error::Service(message.into()))
        })
    }
}

/// Revision that a CRD says it has; none is the oldest.
fn revision_of(definition: &CustomResourceDefinition) -> u32 {
    let annotations = definition.metadata.annotations.as_ref();
    let revision = annotations.and_then(|all| all.get(annotation::SCHEMA_REVISION));
    revision.and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// What is wrong with a CRD of this revision, with the fix. A newer one is fine: fields are only ever added.
fn skew_of(name: &str, revision: Option<u32>, needed: u32) -> Option<String> {
    const FIX: &str = "apply the CRDs of this release first: deepinfer-operator crds print | kubectl apply --server-side -f -";
    match revision {
        None => Some(format!("CRD {name} is not installed; {FIX}")),
        Some(revision) if revision < needed => {
            Some(format!("CRD {name} has schema revision {revision}, this operator needs {needed}; {FIX}"))
        }
        Some(_) => None,
    }
}

/// A pod that even a restricted namespace would take.
fn dry_run_pod(account: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "deepinfer-probe"},
        "spec": {
            "schedulingGroup": {"podGroupName": "deepinfer-probe"},
            "serviceAccountName": account,
            "automountServiceAccountToken": false,
            "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "probe", "image": "deepinfer-probe",
                "resources": {
                    "requests": {"cpu": "1m", "memory": "1Mi"}, "limits": {"cpu": "1m", "memory": "1Mi"},
                },
                "securityContext": {
                    "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
                },
            }],
        },
    })
}

fn dry_run_group(version: NativeVersion) -> Value {
    json!({
        "apiVersion": format!("scheduling.k8s.io/{}", version_word(version)), "kind": "PodGroup",
        "metadata": {"name": "deepinfer-probe"},
        "spec": {
            "schedulingPolicy": {"gang": {"minCount": 2}},
            "schedulingConstraints": {"topology": [{"key": DRY_RUN_LABEL}]},
        },
    })
}

fn pod_group(version: NativeVersion) -> ApiResource {
    let word = version_word(version);
    ApiResource {
        group: "scheduling.k8s.io".to_owned(),
        version: word.to_owned(),
        api_version: format!("scheduling.k8s.io/{word}"),
        kind: "PodGroup".to_owned(),
        plural: "podgroups".to_owned(),
    }
}

fn version_word(version: NativeVersion) -> &'static str {
    match version {
        NativeVersion::V1Alpha2 => "v1alpha2",
        NativeVersion::V1Beta1 => "v1beta1",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_and_missing_crds_are_named_with_the_fix_and_newer_ones_are_fine() {
        let name = "supernodes.deepinfer.io";
        let old = skew_of(name, Some(1), 2).unwrap();
        assert!(old.contains(name) && old.contains("revision 1") && old.contains("needs 2"), "{old}");
        assert!(old.contains("crds print"), "{old}");
        assert!(skew_of(name, None, 2).unwrap().contains("not installed"));
        assert_eq!(skew_of(name, Some(2), 2), None);
        assert_eq!(skew_of(name, Some(3), 2), None);
        assert_eq!(revision_of(&CustomResourceDefinition::default()), 0);
    }

    #[test]
    fn dry_run_objects_are_of_the_probed_version() {
        assert_eq!(dry_run_group(NativeVersion::V1Beta1)["apiVersion"], "scheduling.k8s.io/v1beta1");
        assert_eq!(pod_group(NativeVersion::V1Alpha2).api_version, "scheduling.k8s.io/v1alpha2");
    }
}
