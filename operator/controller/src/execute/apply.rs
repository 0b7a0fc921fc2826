//! Objects that are kept as wanted: server-side apply of exactly the fields that are ours.

use deepinfer_crds::names::manager;
use deepinfer_planner::{Key, Kind, Object};
use serde_json::{Value, json};

use super::{Done, Executor, On, body};
use crate::error::Error;
use crate::rest::{Call, Resource, Verb};

impl Executor {
    /// Makes or changes an object. A foreign one of the name is never touched: the apply names the UID of the object
    /// that it is for, and one that is not known is looked for first.
    pub(super) async fn apply(&self, on: &On<'_>, object: &Object) -> Result<Done, Error> {
        let key = object.key();
        let resource = Resource::of_object(object);
        let known = self.caches.get(key.kind, on.namespace(), &key.name).map(|live| (*live).clone());
        let live = match known {
            Some(live) => Some(live),
            None => self.learn(on, &resource, &key).await?,
        };
        let mut body = body(object, on.namespace());
        if let Some(live) = &live {
            if live.controller_uid() != object.controller_uid() {
                return Err(Error::Collision { key });
            }
            body["metadata"]["uid"] = json!(live.meta().uid);
        }
        if key.kind == Kind::Pool {
            // Somebody else decides how many: this manager must never own the field.
            if let Some(spec) = body["spec"].as_object_mut() {
                spec.remove("replicas");
            }
        }
        self.patch(on, &resource, &key, Verb::Apply, "", manager::MAIN, body).await
    }

    /// Writes the count of a pool in the name of the cluster's `replicas`.
    pub(super) async fn write_replicas(&self, on: &On<'_>, key: &Key, replicas: u32) -> Result<Done, Error> {
        let live = self.live(on, key).ok_or_else(|| Error::Gone { key: key.clone() })?;
        let resource = Resource::of_object(&live);
        let body = json!({
            "apiVersion": resource.api_version(),
            "kind": resource.kind,
            "metadata": {"name": key.name, "namespace": on.namespace(), "uid": live.meta().uid},
            "spec": {"replicas": replicas},
        });
        self.patch(on, &resource, key, Verb::Apply, "", manager::FIXED, body).await
    }

    /// A server-side apply; after a conflict the caches know what is there.
    #[allow(clippy::too_many_arguments)]
    pub(super) async fn patch(
        &self,
        on: &On<'_>,
        resource: &Resource,
        key: &Key,
        verb: Verb,
        subresource: &str,
        manager: &str,
        body: Value,
    ) -> Result<Done, Error> {
        let path = resource.path(Some(on.namespace()));
        let call = Call {
            verb,
            kind: Some(key.kind),
            what: key.to_string(),
            uri: format!("{path}/{}{subresource}?fieldManager={manager}&force=true", key.name),
            content: "application/apply-patch+yaml",
            body,
        };
        match self.rest.call(call).await {
            Ok(value) => self.remember(on, "apply", key, value).map(|_| Done::Wrote),
            Err(error) if matches!(error.status(), Some(404 | 409)) => {
                self.learn(on, resource, key).await?;
                // A status of an object that is gone is no fault.
                if error.is_missing() { Err(Error::Gone { key: key.clone() }) } else { Err(error) }
            }
            // Between our look and our write somebody else made an object of the name.
            Err(error) if two_controllers(&error) => Err(Error::Collision { key: key.clone() }),
            Err(error) => Err(error),
        }
    }
}

fn two_controllers(error: &Error) -> bool {
    error.answer().is_some_and(|answer| {
        answer.code == 422 && answer.message.contains("Only one reference can have Controller set to true")
    })
}
