//! The few changes of a pod that is there.

use deepinfer_crds::names::{GANG_GATE, ROUTABLE_GATE, annotation, manager};
use deepinfer_planner::{Key, Kind, Object, PodChange, time};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::{Done, Executor, On};
use crate::error::Error;
use crate::gather::now;
use crate::rest::{Call, Resource, Verb};

impl Executor {
    /// Changes the pod that the plan saw; another one of the name is not touched.
    pub(super) async fn change_pod(
        &self,
        on: &On<'_>,
        key: &Key,
        uid: Option<&str>,
        change: &PodChange,
    ) -> Result<Done, Error> {
        let live = self.live(on, key).ok_or_else(|| Error::Gone { key: key.clone() })?;
        let Object::Pod(pod) = &*live else { return Err(Error::Gone { key: key.clone() }) };
        if uid.is_some() && pod.metadata.uid.as_deref() != uid {
            return Err(Error::Gone { key: key.clone() });
        }
        let Some((subresource, content, body)) = patch(pod, change) else {
            return Ok(Done::Nothing);
        };
        let resource = Resource::of(Kind::Pod).expect("a core kind");
        let path = resource.path(Some(on.namespace()));
        let call = Call {
            verb: Verb::Patch,
            kind: Some(Kind::Pod),
            what: key.to_string(),
            uri: format!("{path}/{}{subresource}?fieldManager={}", key.name, manager::MAIN),
            content,
            body,
        };
        match self.rest.call(call).await {
            Ok(value) => self.remember(on, "patch", key, value).map(|_| Done::Wrote),
            // Gone, another one, or its gates are not what they were.
            Err(error) if matches!(error.status(), Some(404 | 409 | 422)) => {
                self.learn(on, &resource, key).await?;
                Err(Error::Gone { key: key.clone() })
            }
            Err(error) => Err(error),
        }
    }
}

/// The patch of a change: subresource, content type, body. `None`: it is so already.
fn patch(pod: &Pod, change: &PodChange) -> Option<(&'static str, &'static str, Value)> {
    let uid = &pod.metadata.uid;
    match change {
        PodChange::LiftGate => {
            let gates = pod.spec.as_ref()?.scheduling_gates.as_ref()?;
            let at = gates.iter().position(|gate| gate.name == GANG_GATE)?;
            let path = format!("/spec/schedulingGates/{at}");
            let body = json!([
                {"op": "test", "path": "/metadata/uid", "value": uid},
                {"op": "test", "path": format!("{path}/name"), "value": GANG_GATE},
                {"op": "remove", "path": path},
            ]);
            Some(("", "application/json-patch+json", body))
        }
        PodChange::Routable { holds, reason } => {
            let word = if *holds { "True" } else { "False" };
            let conditions =
                pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
            let before = conditions.iter().find(|condition| condition.type_ == ROUTABLE_GATE);
            let same = before.filter(|before| before.status == word);
            if same.is_some_and(|same| same.reason.as_deref() == Some(reason)) {
                return None;
            }
            let since =
                same.and_then(|same| same.last_transition_time.clone()).unwrap_or_else(|| time(now()));
            let condition =
                json!({"type": ROUTABLE_GATE, "status": word, "reason": reason, "lastTransitionTime": since});
            // Conditions are merged by type: those of the kubelet stay.
            let body = json!({"metadata": {"uid": uid}, "status": {"conditions": [condition]}});
            Some(("/status", "application/strategic-merge-patch+json", body))
        }
        PodChange::Drain(drain) => {
            let before = pod.metadata.annotations.as_ref().and_then(|all| all.get(annotation::DRAIN));
            if before == drain.as_ref() {
                return None;
            }
            let body = json!({"metadata": {"uid": uid, "annotations": {annotation::DRAIN: drain}}});
            Some(("", "application/merge-patch+json", body))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(value: Value) -> Pod {
        serde_json::from_value(value).expect("a pod")
    }

    #[test]
    fn only_our_own_gate_is_lifted_and_only_once() {
        let gated = pod(json!({
            "metadata": {"name": "a", "uid": "u"},
            "spec": {"containers": [], "schedulingGates": [{"name": "example.com/other"}, {"name": GANG_GATE}]},
        }));
        let (_, _, body) = patch(&gated, &PodChange::LiftGate).expect("there is a gate");
        assert_eq!(body[2], json!({"op": "remove", "path": "/spec/schedulingGates/1"}));
        assert_eq!(body[0]["value"], "u");
        let free = pod(json!({"metadata": {"name": "a"}, "spec": {"containers": []}}));
        assert!(patch(&free, &PodChange::LiftGate).is_none());
    }

    #[test]
    fn a_condition_that_holds_is_not_written_again() {
        let routed = pod(json!({
            "metadata": {"name": "a", "uid": "u"},
            "status": {"conditions": [{"type": ROUTABLE_GATE, "status": "True", "reason": "Serving"}]},
        }));
        let change = |holds, reason: &str| PodChange::Routable { holds, reason: reason.to_owned() };
        assert!(patch(&routed, &change(true, "Serving")).is_none());
        let (_, _, body) = patch(&routed, &change(false, "Draining")).expect("it changed");
        assert_eq!(body["status"]["conditions"][0]["status"], "False");
    }

    #[test]
    fn the_drain_annotation_is_set_changed_and_removed() {
        let plain = pod(json!({"metadata": {"name": "a", "uid": "u"}}));
        let (_, _, body) = patch(&plain, &PodChange::Drain(Some("60".into()))).expect("it is new");
        assert_eq!(body["metadata"]["annotations"][annotation::DRAIN], "60");
        assert!(patch(&plain, &PodChange::Drain(None)).is_none());
        let drains = pod(json!({"metadata": {"name": "a", "annotations": {annotation::DRAIN: "60"}}}));
        let (_, _, body) = patch(&drains, &PodChange::Drain(None)).expect("it goes");
        assert_eq!(body["metadata"]["annotations"][annotation::DRAIN], Value::Null);
    }
}
