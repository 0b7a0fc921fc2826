//! A cluster that somebody gave to the tests instead of one of our own.

use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};

use super::access::{self, Access};
use super::{ControlPlane, objects};
use crate::binaries::{self, Need};
use crate::runs::Run;

/// Namespace and name of the account whose token the tests use.
const ACCOUNT: (&str, &str) = ("kube-system", "deepinfer-tests");

/// The account and its rights. It stays: the next run wants it again.
const OBJECTS: &str = "apiVersion: v1
kind: ServiceAccount
metadata: {name: deepinfer-tests, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: deepinfer-tests}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects: [{kind: ServiceAccount, name: deepinfer-tests, namespace: kube-system}]
";

impl ControlPlane {
    /// A way into an existing cluster, whatever its users authenticate with: the tests make themselves an account with
    /// a token there.
    ///
    /// # Errors
    /// If the kubeconfig does not lead to an administrator of a cluster.
    pub async fn given(kubeconfig: &Path) -> anyhow::Result<ControlPlane> {
        let context = || format!("using the cluster of {}", kubeconfig.display());
        let parsed = Kubeconfig::read_from(kubeconfig).with_context(context)?;
        let config = Config::from_custom_kubeconfig(parsed, &KubeConfigOptions::default())
            .await
            .with_context(context)?;
        let url = config.cluster_url.to_string().trim_end_matches('/').to_owned();
        let ca_pem = access::pem(config.root_cert.as_deref().unwrap_or_default());
        let client = Client::try_from(config)?;
        objects::apply(&client, OBJECTS).await.with_context(context)?;
        let token = token(client, ACCOUNT.0, ACCOUNT.1).await.with_context(context)?;
        let binary = tokio::task::spawn_blocking(|| binaries::ensure(Need::Kubernetes)).await??;
        Ok(ControlPlane {
            access: Access { url, ca_pem, token },
            binary,
            programs: None,
            run: Run::new()?,
            files: AtomicU32::new(0),
            started_in: Duration::ZERO,
        })
    }
}

/// A token of a service account, good for a day.
pub(super) async fn token(client: Client, namespace: &str, account: &str) -> anyhow::Result<String> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client, namespace);
    let spec = TokenRequestSpec { expiration_seconds: Some(86_400), ..TokenRequestSpec::default() };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let answer = accounts.create_token_request(account, &PostParams::default(), &request).await;
    let answer = answer.with_context(|| format!("a token for service account {namespace}/{account}"))?;
    answer.status.and_then(|status| status.token).context("the answer to a token request has no token")
}
