//! The connection to an API server, and its errors in words that say what to do.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};
use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope};
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, Resource};
use serde::de::DeserializeOwned;

use crate::args::Connection;

/// Objects of one page of a list: a namespace of thousands of pods is read in several.
const PAGE: u32 = 500;

/// A connection with its namespace.
pub struct Session {
    /// The client.
    pub client: Client,
    /// Namespace of all namespaced objects.
    pub namespace: String,
    server: String,
}

impl Session {
    /// Connects as the flags say.
    ///
    /// # Errors
    /// If no kubeconfig is found, or it cannot be used.
    pub async fn open(connection: &Connection) -> Result<Self> {
        let mut config = config(connection).await?;
        if !connection.as_group.is_empty() && connection.as_user.is_none() {
            anyhow::bail!("--as-group needs --as: name the user to act as");
        }
        if let Some(user) = &connection.as_user {
            config.auth_info.impersonate = Some(user.clone());
            config.auth_info.impersonate_groups =
                Some(connection.as_group.clone()).filter(|groups| !groups.is_empty());
        }
        let namespace = connection.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let server = config.cluster_url.to_string();
        let client = Client::try_from(config).context("the kubeconfig cannot be used")?;
        Ok(Self { client, namespace, server })
    }

    /// The objects of a namespaced kind.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// The objects of a kind without namespaces.
    pub fn cluster_wide<K>(&self) -> Api<K>
    where
        K: Resource<Scope = ClusterResourceScope>,
        K::DynamicType: Default,
    {
        Api::all(self.client.clone())
    }

    /// All objects that the parameters choose, page by page.
    ///
    /// # Errors
    /// As [`Session::explain`] words them.
    pub async fn list<K>(&self, api: &Api<K>, params: ListParams, what: &str) -> Result<Vec<K>>
    where
        K: Clone + DeserializeOwned + std::fmt::Debug,
    {
        let mut params = params.limit(PAGE);
        let mut all = Vec::new();
        loop {
            let page =
                api.list(&params).await.map_err(|e| self.explain(e, &format!("cannot list {what}")))?;
            all.extend(page.items);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(all),
            }
        }
    }

    /// An error of the client, with what would help.
    pub fn explain(&self, error: kube::Error, doing: &str) -> anyhow::Error {
        match error {
            kube::Error::Api(status) => anyhow!("{doing}: {}", refusal(status.code, &status.message)),
            kube::Error::Service(cause) => anyhow!(
                "{doing}: the API server {} does not answer: {cause}; is it the right --context, and is the network up?",
                self.server
            ),
            other => anyhow!("{doing}: {other}"),
        }
    }
}

/// A refusal of the API server.
fn refusal(code: u16, message: &str) -> String {
    match code {
        404 if message.contains("could not find the requested resource") || message.trim() == "404 page not found" => {
            "the API server does not know the kinds of DeepInfer: install them with `kubectl deepinfer crds print | \
             kubectl apply --server-side -f -`"
                .to_owned()
        }
        401 => format!("{message}: log in again, or choose another --context"),
        403 => format!("{message} (ask for this right, or choose another --context or --namespace)"),
        _ => message.to_owned(),
    }
}

async fn config(connection: &Connection) -> Result<Config> {
    let options = KubeConfigOptions { context: connection.context.clone(), ..KubeConfigOptions::default() };
    let fix = "give --kubeconfig or set KUBECONFIG, as for kubectl";
    match &connection.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .with_context(|| format!("--kubeconfig {} cannot be read", path.display()))?;
            Config::from_custom_kubeconfig(file, &options)
                .await
                .with_context(|| format!("--kubeconfig {} cannot be used", path.display()))
        }
        None if connection.context.is_some() => {
            Config::from_kubeconfig(&options).await.with_context(|| format!("no usable kubeconfig: {fix}"))
        }
        None => Config::infer().await.with_context(|| format!("no usable kubeconfig: {fix}")),
    }
}

/// Now, in seconds since 1970.
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_without_our_kinds_is_told_how_to_get_them() {
        let text = refusal(404, "the server could not find the requested resource");
        assert!(text.contains("crds print | kubectl apply"), "{text}");
        let missing = refusal(404, "deepinferclusters.deepinfer.io \"a\" not found");
        assert!(!missing.contains("install"), "{missing}");
        assert!(refusal(403, "forbidden").contains("--context"));
    }
}
