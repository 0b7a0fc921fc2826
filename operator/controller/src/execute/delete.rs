//! Objects that go: only the one that the plan saw, in the background.

use deepinfer_planner::Key;
use serde_json::json;

use super::{Done, Executor, On};
use crate::error::Error;
use crate::rest::{Call, Verb};

impl Executor {
    /// Deletes an object. One that is gone, or another of the same name, was deleted by somebody else.
    pub(super) async fn delete(
        &self,
        on: &On<'_>,
        key: &Key,
        uid: Option<&str>,
        grace_seconds: Option<i64>,
    ) -> Result<Done, Error> {
        let resource = self.resource(on, key)?;
        let uid = uid.or_else(|| on.uid(key));
        let mut body = json!({
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
        });
        if let Some(uid) = uid {
            body["preconditions"] = json!({"uid": uid});
        }
        if let Some(seconds) = grace_seconds {
            body["gracePeriodSeconds"] = json!(seconds);
        }
        let call = Call {
            verb: Verb::Delete,
            kind: Some(key.kind),
            what: key.to_string(),
            uri: format!("{}/{}", resource.path(Some(on.namespace())), key.name),
            content: "application/json",
            body,
        };
        match self.rest.call(call).await {
            // It stays for a while: finalizers, or a pod that ends.
            Ok(value) if value["kind"] != "Status" => {
                self.remember(on, "delete", key, value)?;
                Ok(Done::Wrote)
            }
            Ok(_) => {
                self.forget(on, key, uid);
                Ok(Done::Wrote)
            }
            Err(error) if error.is_missing() => {
                self.forget(on, key, uid);
                Ok(Done::Nothing)
            }
            Err(error) if error.status() == Some(409) => {
                self.learn(on, &resource, key).await?;
                Err(error)
            }
            Err(error) => Err(error),
        }
    }
}
