//! Calls to the API server: one place for paths, deadlines, errors and the rule that only a leader writes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_planner::{Key, Kind, Object};
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use kube::core::GroupVersionKind;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{Answer, Error};
use crate::lease::Permit;
use crate::metrics::{self, Metrics};

/// Most bytes of an answer that says no which are read: more says nothing new.
const MAX_REFUSAL_BYTES: usize = 16 * 1024;

/// A kind as the API server's paths name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Resource {
    /// Group; empty for the core.
    pub group: String,
    /// Version in the group.
    pub version: String,
    /// Kind in objects.
    pub kind: String,
    /// Kind in paths.
    pub plural: String,
}

impl Resource {
    /// A kind by its parts.
    pub fn new(group: &str, version: &str, kind: &str, plural: &str) -> Self {
        Self { group: group.into(), version: version.into(), kind: kind.into(), plural: plural.into() }
    }

    fn typed<K: kube::Resource<DynamicType = ()>>() -> Self {
        Self::new(&K::group(&()), &K::version(&()), &K::kind(&()), &K::plural(&()))
    }

    /// `apiVersion` of its objects.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// Path of all its objects, or of those of a namespace.
    pub fn path(&self, namespace: Option<&str>) -> String {
        let root = if self.group.is_empty() { "api" } else { "apis" };
        let within = namespace.map(|name| format!("namespaces/{name}/")).unwrap_or_default();
        format!("/{root}/{}/{within}{}", self.api_version(), self.plural)
    }

    /// The kind of our own or of the core; `None` for those that are found by probing.
    pub fn of(kind: Kind) -> Option<Self> {
        use k8s_openapi::api::{apps, core, networking, policy};
        Some(match kind {
            Kind::Cluster => Self::typed::<deepinfer_crds::DeepInferCluster>(),
            Kind::ServiceAccount => Self::typed::<core::v1::ServiceAccount>(),
            Kind::Secret => Self::typed::<core::v1::Secret>(),
            Kind::ConfigMap => Self::typed::<core::v1::ConfigMap>(),
            Kind::ControllerRevision => Self::typed::<apps::v1::ControllerRevision>(),
            Kind::NetworkPolicy => Self::typed::<networking::v1::NetworkPolicy>(),
            Kind::Pool => Self::typed::<deepinfer_crds::DeepInferPool>(),
            Kind::Supernode => Self::typed::<deepinfer_crds::Supernode>(),
            Kind::Placement => Self::typed::<deepinfer_crds::ExpertPlacement>(),
            Kind::Service => Self::typed::<core::v1::Service>(),
            Kind::Budget => Self::typed::<policy::v1::PodDisruptionBudget>(),
            Kind::Deployment => Self::typed::<apps::v1::Deployment>(),
            Kind::Pod => Self::typed::<core::v1::Pod>(),
            Kind::PodTemplate => Self::typed::<core::v1::PodTemplate>(),
            Kind::Claim => Self::typed::<core::v1::PersistentVolumeClaim>(),
            Kind::Gang | Kind::ComputeDomain => return None,
        })
    }

    /// The kind of an object.
    pub fn of_object(object: &Object) -> Self {
        if let Some(known) = Self::of(object.kind()) {
            return known;
        }
        let (api_version, kind) = object.type_meta();
        let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
        let gvk = GroupVersionKind::gvk(group, version, &kind);
        let guess = kube::core::ApiResource::from_gvk(&gvk);
        Self::new(group, version, &kind, &guess.plural)
    }

    /// Nodes.
    pub fn nodes() -> Self {
        Self::typed::<k8s_openapi::api::core::v1::Node>()
    }

    /// Leases.
    pub fn leases() -> Self {
        Self::typed::<k8s_openapi::api::coordination::v1::Lease>()
    }
}

/// What a write is, for logs and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// One object is read.
    Get,
    /// Objects are read.
    List,
    /// An object is made.
    Create,
    /// Server-side apply.
    Apply,
    /// Any other patch.
    Patch,
    /// Server-side apply of a status.
    Status,
    /// An object is replaced.
    Update,
    /// An object goes.
    Delete,
}

impl Verb {
    /// For labels and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::List => "list",
            Self::Create => "create",
            Self::Apply => "apply",
            Self::Patch => "patch",
            Self::Status => "status",
            Self::Update => "update",
            Self::Delete => "delete",
        }
    }

    /// As the metrics name it; `None`: it only reads.
    fn write(self) -> Option<metrics::Verb> {
        Some(match self {
            Self::Get | Self::List => return None,
            Self::Create => metrics::Verb::Create,
            Self::Apply => metrics::Verb::Apply,
            Self::Patch => metrics::Verb::Patch,
            Self::Status => metrics::Verb::Status,
            Self::Update => metrics::Verb::Update,
            Self::Delete => metrics::Verb::Delete,
        })
    }

    fn method(self) -> Method {
        match self {
            Self::Get | Self::List => Method::GET,
            Self::Create => Method::POST,
            Self::Apply | Self::Patch | Self::Status => Method::PATCH,
            Self::Update => Method::PUT,
            Self::Delete => Method::DELETE,
        }
    }
}

/// One call.
#[derive(Debug)]
pub struct Call {
    /// What it does.
    pub verb: Verb,
    /// With an object of which kind, to be counted; the Lease is not.
    pub kind: Option<Kind>,
    /// With what, for people: `Pod/a`.
    pub what: String,
    /// Path and query.
    pub uri: String,
    /// Type of the body.
    pub content: &'static str,
    /// The body; null: none.
    pub body: Value,
}

/// The API server as this replica talks to it.
#[derive(Clone)]
pub struct Rest {
    client: Client,
    deadline: Duration,
    permit: Option<Arc<Permit>>,
    metrics: Arc<Metrics>,
}

impl Rest {
    /// A way to the API server on which everything may be written: the lease itself goes this way.
    pub fn new(client: Client, deadline: Duration, metrics: Arc<Metrics>) -> Self {
        Self { client, deadline, permit: None, metrics }
    }

    /// The same way, with writes only while the permit holds.
    #[must_use]
    pub fn guarded(&self, permit: Arc<Permit>) -> Self {
        Self { permit: Some(permit), ..self.clone() }
    }

    /// The client below.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Longest wait for an answer.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Reads one object as it is.
    ///
    /// # Errors
    /// [`Error`]; [`Error::is_missing`] if it does not exist.
    pub async fn get(&self, kind: &Resource, namespace: &str, key: &Key) -> Result<Value, Error> {
        let uri = format!("{}/{}", kind.path(Some(namespace)), key.name);
        let (kind, what) = (Some(key.kind), key.to_string());
        self.call(Call { verb: Verb::Get, kind, what, uri, content: "", body: Value::Null }).await
    }

    /// Sends a call and reads the answer.
    ///
    /// # Errors
    /// [`Error`]. After [`Error::TimedOut`] and [`Error::Transport`] nobody knows whether a write was done: every write
    /// of ours may be repeated.
    pub async fn call(&self, call: Call) -> Result<Value, Error> {
        let Call { verb, kind, what, uri, content, body } = call;
        let write = verb.write();
        if write.is_some() && self.permit.as_ref().is_some_and(|permit| !permit.may_write()) {
            return Err(Error::NotLeader);
        }
        let mut request = Request::builder().method(verb.method()).uri(uri);
        if !content.is_empty() {
            request = request.header(http::header::CONTENT_TYPE, content);
        }
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let request = request.body(body).map_err(|error| Error::Shape {
            verb: verb.as_str(),
            what: what.clone(),
            message: error.to_string(),
        })?;
        if let (Some(kind), Some(verb)) = (kind, write) {
            self.metrics.wrote(kind, verb);
        }
        self.send(verb, &what, request).await
    }

    /// Sends a request that only reads, and reads the answer as `T`.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn read<T: DeserializeOwned>(
        &self,
        verb: Verb,
        what: &str,
        request: Request<Vec<u8>>,
    ) -> Result<T, Error> {
        self.send(verb, what, request).await
    }

    async fn send<T: DeserializeOwned>(
        &self,
        verb: Verb,
        what: &str,
        request: Request<Vec<u8>>,
    ) -> Result<T, Error> {
        let answer = async {
            let response = self
                .client
                .send(request.map(Body::from))
                .await
                .map_err(|source| transport(verb, what, source))?;
            if !response.status().is_success() {
                let answer = refusal(response).await;
                return Err(Error::Answered { verb: verb.as_str(), what: what.to_owned(), answer });
            }
            let bytes = response.into_body().collect().await;
            Ok(bytes.map_err(|source| transport(verb, what, source))?.to_bytes())
        };
        let begun = Instant::now();
        let bytes = tokio::time::timeout(self.deadline, answer).await;
        self.metrics.requested(verb.as_str(), begun.elapsed());
        let bytes = bytes.map_err(|_| Error::TimedOut {
            verb: verb.as_str(),
            what: what.to_owned(),
            seconds: self.deadline.as_secs(),
        })??;
        serde_json::from_slice(&bytes).map_err(|error| Error::Shape {
            verb: verb.as_str(),
            what: what.to_owned(),
            message: error.to_string(),
        })
    }
}

/// A broken connection, as an error of a call.
pub(crate) fn transport(verb: Verb, what: &str, source: kube::Error) -> Error {
    Error::Transport { verb: verb.as_str(), what: what.to_owned(), source: Box::new(source) }
}

/// Reads an answer that says no: a `Status`, or the plain text of a proxy or of flow control.
async fn refusal(response: Response<Body>) -> Answer {
    let code = response.status().as_u16();
    let header = response.headers().get(http::header::RETRY_AFTER).and_then(|value| value.to_str().ok());
    let mut seconds: Option<u64> = header.and_then(|text| text.parse().ok());
    let bytes = response.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let status: Option<kube::core::Status> = serde_json::from_slice(&bytes).ok();
    let (reason, message) = match status {
        Some(status) => {
            let asked = status.details.map_or(0, |details| details.retry_after_seconds);
            seconds = seconds.or((asked > 0).then_some(u64::from(asked)));
            (status.reason, status.message)
        }
        None => {
            let shown = &bytes[..bytes.len().min(MAX_REFUSAL_BYTES)];
            (String::new(), String::from_utf8_lossy(shown).trim().to_owned())
        }
    };
    Answer { code, reason, message, retry_after: seconds.map(Duration::from_secs) }
}

#[cfg(test)]
mod tests {
    use deepinfer_planner::Foreign;

    use super::*;

    #[test]
    fn paths_are_those_of_the_api_server() {
        let pods = Resource::of(Kind::Pod).expect("a core kind");
        assert_eq!(pods.path(Some("a")), "/api/v1/namespaces/a/pods");
        assert_eq!(pods.path(None), "/api/v1/pods");
        let budgets = Resource::of(Kind::Budget).expect("a core kind");
        assert_eq!(budgets.path(Some("a")), "/apis/policy/v1/namespaces/a/poddisruptionbudgets");
        let ours = Resource::of(Kind::Cluster).expect("our kind");
        assert_eq!(ours.path(None), "/apis/deepinfer.io/v1alpha1/deepinferclusters");
        assert_eq!(Resource::of(Kind::NetworkPolicy).expect("a core kind").plural, "networkpolicies");
    }

    #[test]
    fn the_path_of_a_foreign_kind_comes_from_its_object() {
        let foreign = Foreign {
            api_version: "scheduling.k8s.io/v1alpha2".into(),
            kind: "PodGroup".into(),
            ..Foreign::default()
        };
        let path = Resource::of_object(&Object::Gang(foreign)).path(Some("a"));
        assert_eq!(path, "/apis/scheduling.k8s.io/v1alpha2/namespaces/a/podgroups");
        let foreign = Foreign {
            api_version: "resource.nvidia.com/v1beta1".into(),
            kind: "ComputeDomain".into(),
            ..Foreign::default()
        };
        assert_eq!(Resource::of_object(&Object::ComputeDomain(foreign)).plural, "computedomains");
    }
}
