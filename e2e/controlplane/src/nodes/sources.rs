//! Secrets, ConfigMaps and claims as a kubelet sees them, and the news that one of them changed.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use futures_util::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::{
    ConfigMap, PersistentVolume, PersistentVolumeClaim, Secret, ServiceAccount,
};
use kube::api::PostParams;
use kube::core::PartialObjectMeta;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::broadcast;

use super::calls::{Soon, within};

/// A Secret or ConfigMap: what environment and files are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Secret,
    ConfigMap,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Kind::Secret => "secret",
            Kind::ConfigMap => "configmap",
        }
    }
}

/// The bytes of a Secret or ConfigMap, by key.
pub(crate) type Data = BTreeMap<String, Vec<u8>>;

/// Reads from the API server, and says which object changed.
pub(crate) struct Sources {
    client: Client,
    changes: broadcast::Sender<String>,
    /// What objects held when they were read last: a container restarts while the server is away.
    remembered: Mutex<BTreeMap<String, Data>>,
}

impl Sources {
    pub(crate) fn new(client: Client) -> Self {
        // A reader that falls behind by more than this reads everything again, so the bound loses nothing.
        Sources { client, changes: broadcast::channel(256).0, remembered: Mutex::default() }
    }

    /// Namespaces whose Secrets or ConfigMaps changed, from now on.
    pub(crate) fn changes(&self) -> broadcast::Receiver<String> {
        self.changes.subscribe()
    }

    /// Watches until it is dropped.
    pub(crate) async fn watch(&self) {
        // Only what changed is told, so the data is not asked for.
        let secrets = Api::<PartialObjectMeta<Secret>>::all(self.client.clone());
        let maps = Api::<PartialObjectMeta<ConfigMap>>::all(self.client.clone());
        let everything = watcher::Config::default;
        tokio::join!(self.tell(watcher(secrets, everything())), self.tell(watcher(maps, everything())));
    }

    async fn tell<K: kube::ResourceExt>(
        &self,
        stream: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send,
    ) {
        let mut stream = std::pin::pin!(stream.backoff(Soon).touched_objects());
        while let Some(event) = stream.next().await {
            match event {
                // Nobody listening is fine: then no pod uses any.
                Ok(object) => drop(self.changes.send(object.namespace().unwrap_or_default())),
                Err(error) => tracing::debug!(%error, "watch of secrets and configmaps"),
            }
        }
    }

    /// The data of an object, or None if it does not exist. While the server is away, what it said before.
    async fn data(&self, kind: Kind, namespace: &str, name: &str) -> anyhow::Result<Option<Data>> {
        let key = format!("{} {namespace}/{name}", kind.word());
        let read = self.read(kind, namespace, name).await;
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(Some(data)) => {
                remembered.insert(key, data.clone());
                Ok(Some(data))
            }
            Ok(None) => {
                remembered.remove(&key);
                Ok(None)
            }
            Err(error) => match remembered.get(&key) {
                Some(data) => Ok(Some(data.clone())),
                None => Err(error).with_context(|| format!("{key} cannot be read")),
            },
        }
    }

    async fn read(&self, kind: Kind, namespace: &str, name: &str) -> kube::Result<Option<Data>> {
        match kind {
            Kind::Secret => {
                let api = Api::<Secret>::namespaced(self.client.clone(), namespace);
                let data = within(api.get_opt(name)).await?.map(|secret| secret.data.unwrap_or_default());
                Ok(data.map(|d| d.into_iter().map(|(k, v)| (k, v.0)).collect()))
            }
            Kind::ConfigMap => {
                let api = Api::<ConfigMap>::namespaced(self.client.clone(), namespace);
                Ok(within(api.get_opt(name)).await?.map(|map| {
                    let text = map.data.unwrap_or_default().into_iter().map(|(k, v)| (k, v.into_bytes()));
                    let binary = map.binary_data.unwrap_or_default().into_iter().map(|(k, v)| (k, v.0));
                    text.chain(binary).collect()
                }))
            }
        }
    }

    /// The data of an object that has to exist, unless it is marked optional.
    pub(crate) async fn required(
        &self,
        kind: Kind,
        namespace: &str,
        name: &str,
        optional: Option<bool>,
    ) -> anyhow::Result<Option<Data>> {
        let data = self.data(kind, namespace, name).await?;
        if data.is_none() && optional != Some(true) {
            bail!("{} \"{name}\" not found", kind.word());
        }
        Ok(data)
    }

    /// The folder behind a claim: a bound volume of kind hostPath or local.
    pub(crate) async fn claim(&self, namespace: &str, name: &str) -> anyhow::Result<PathBuf> {
        let claims = Api::<PersistentVolumeClaim>::namespaced(self.client.clone(), namespace);
        let Some(claim) = claims.get_opt(name).await? else {
            bail!("persistentvolumeclaim \"{name}\" not found");
        };
        let Some(volume) = claim.spec.and_then(|spec| spec.volume_name).filter(|v| !v.is_empty()) else {
            bail!("persistentvolumeclaim \"{name}\" is not bound");
        };
        let volumes = Api::<PersistentVolume>::all(self.client.clone());
        let spec = volumes.get(&volume).await?.spec.unwrap_or_default();
        let path = spec.host_path.map(|h| h.path).or(spec.local.map(|l| l.path));
        let path = path.with_context(|| {
            format!("volume \"{volume}\" is neither hostPath nor local; name a folder for the claim")
        })?;
        Ok(path.into())
    }

    /// A token of a service account for a pod, as the `serviceAccountToken` projection holds it.
    pub(crate) async fn token(
        &self,
        (namespace, account): (&str, &str),
        (pod, uid): (&str, &str),
        audience: Option<&str>,
        lifetime: Duration,
    ) -> anyhow::Result<String> {
        let accounts = Api::<ServiceAccount>::namespaced(self.client.clone(), namespace);
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": audience.into_iter().collect::<Vec<_>>(),
                "expirationSeconds": lifetime.as_secs(),
                "boundObjectRef": { "kind": "Pod", "apiVersion": "v1", "name": pod, "uid": uid },
            },
        });
        let answer: Value =
            accounts.create_subresource("token", account, &PostParams::default(), &request).await?;
        let token = answer["status"]["token"].as_str();
        Ok(token.context("the token request came back without a token")?.to_owned())
    }
}
