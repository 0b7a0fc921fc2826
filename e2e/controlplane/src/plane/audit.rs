//! Who asked the API server for what: read from its audit log.

use std::collections::BTreeMap;
use std::fs;

use anyhow::Context as _;
use serde::Deserialize;

use super::ControlPlane;

/// One answered request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEvent {
    /// The user's name; of a service account `system:serviceaccount:NAMESPACE:NAME`.
    pub user: String,
    /// get, list, watch, create, update, patch, delete, deletecollection.
    pub verb: String,
    /// The group of the resource, empty for the core group.
    pub group: String,
    /// Plural name of the resource; empty for a path that is no object.
    pub resource: String,
    /// status, scale, binding, ...; mostly empty.
    pub subresource: String,
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object; empty for lists.
    pub name: String,
    /// Path and query.
    pub uri: String,
    /// What the client calls itself.
    pub user_agent: String,
    /// HTTP status of the answer.
    pub code: u16,
}

/// The parts of an audit line that are read.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Line {
    stage: String,
    verb: String,
    #[serde(rename = "requestURI")]
    request_uri: String,
    user: User,
    user_agent: String,
    object_ref: ObjectRef,
    response_status: ResponseStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct User {
    username: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ObjectRef {
    resource: String,
    namespace: String,
    name: String,
    api_group: String,
    subresource: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ResponseStatus {
    code: u16,
}

impl ControlPlane {
    /// All requests that were answered so far, oldest first. A watch counts when it ends.
    ///
    /// # Errors
    /// If the control plane was started without [`super::Options::audit`].
    pub fn audit(&self) -> anyhow::Result<Vec<AuditEvent>> {
        let path = self.programs()?.setting.audit_log();
        let text = fs::read_to_string(&path).context("no audit log: start with Options::audited()")?;
        // The last line may be half written.
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
        Ok(lines.filter(|l| l.stage != "ResponseStarted").map(AuditEvent::from).collect())
    }

    /// How often a user used each verb on each resource (`pods`, `pods/status`).
    ///
    /// # Errors
    /// As [`Self::audit`].
    pub fn audit_counts(&self, user: &str) -> anyhow::Result<BTreeMap<(String, String), usize>> {
        let mut counts = BTreeMap::new();
        for event in self.audit()?.into_iter().filter(|e| e.user == user) {
            let slash = if event.subresource.is_empty() { "" } else { "/" };
            let resource = format!("{}{slash}{}", event.resource, event.subresource);
            *counts.entry((event.verb, resource)).or_insert(0) += 1;
        }
        Ok(counts)
    }
}

impl From<Line> for AuditEvent {
    fn from(line: Line) -> AuditEvent {
        AuditEvent {
            user: line.user.username,
            verb: line.verb,
            group: line.object_ref.api_group,
            resource: line.object_ref.resource,
            subresource: line.object_ref.subresource,
            namespace: line.object_ref.namespace,
            name: line.object_ref.name,
            uri: line.request_uri,
            user_agent: line.user_agent,
            code: line.response_status.code,
        }
    }
}
