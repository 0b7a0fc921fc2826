//! What keeps a pod from being ready, in one line.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

use crate::view::name_of;

/// Why a pod is not ready.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PodTrouble {
    /// Name of the pod.
    pub pod: String,
    /// Its node. Absent: not bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// One word.
    pub reason: String,
    /// For people; may be empty.
    pub message: String,
    /// Restarts of its containers.
    pub restarts: i32,
}

/// What is wrong with a pod; `None` if it is ready or has ended well.
pub fn trouble(pod: &Pod) -> Option<PodTrouble> {
    let status = pod.status.clone().unwrap_or_default();
    let conditions = status.conditions.unwrap_or_default();
    let condition = |kind: &str| conditions.iter().find(|c| c.type_ == kind);
    let containers: Vec<ContainerStatus> = status
        .init_container_statuses
        .into_iter()
        .flatten()
        .chain(status.container_statuses.into_iter().flatten())
        .collect();
    let restarts = containers.iter().map(|c| c.restart_count).sum();
    let say = |reason: String, message: String| {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        Some(PodTrouble { pod: name_of(&pod.metadata).to_owned(), node, reason, message, restarts })
    };
    if pod.metadata.deletion_timestamp.is_some() {
        return say("Terminating".to_owned(), String::new());
    }
    let phase = status.phase.unwrap_or_default();
    if phase == "Succeeded" || condition("Ready").is_some_and(|c| c.status == "True") {
        return None;
    }
    if let Some((reason, message)) = containers.iter().find_map(container) {
        return say(reason, message);
    }
    if let Some(reason) = status.reason {
        return say(reason, status.message.unwrap_or_default());
    }
    let bound = condition("PodScheduled").filter(|c| c.status == "False");
    if let Some(c) = bound {
        let reason = c.reason.clone().unwrap_or_else(|| "Unschedulable".to_owned());
        return say(reason, c.message.clone().unwrap_or_default());
    }
    if phase == "Failed" {
        return say("Failed".to_owned(), status.message.unwrap_or_default());
    }
    // The agent's own word stands in the readiness gate.
    let gate =
        conditions.iter().find(|c| c.type_ == deepinfer_crds::names::ROUTABLE_GATE && c.status != "True");
    let unready = gate.or_else(|| condition("Ready"));
    let reason = unready.and_then(|c| c.reason.clone()).filter(|r| !r.is_empty());
    let message = unready.and_then(|c| c.message.clone()).unwrap_or_default();
    say(
        reason.unwrap_or_else(|| if phase.is_empty() { "Pending".to_owned() } else { "NotReady".to_owned() }),
        message,
    )
}

/// What a container waits for, or how it ended.
fn container(status: &ContainerStatus) -> Option<(String, String)> {
    let state = status.state.as_ref()?;
    if let Some(waiting) = &state.waiting {
        let reason = waiting.reason.clone().unwrap_or_else(|| "Waiting".to_owned());
        // Every container of a pod that starts says this.
        if reason == "ContainerCreating" || reason == "PodInitializing" {
            return None;
        }
        let last = status.last_state.as_ref().and_then(|s| s.terminated.as_ref());
        let ended = last.map(|t| {
            let said = t.message.as_deref().map(last_line).unwrap_or_default();
            format!(
                "it ended with exit code {}{}",
                t.exit_code,
                if said.is_empty() { String::new() } else { format!(": {said}") }
            )
        });
        let message = ended.or_else(|| waiting.message.clone()).unwrap_or_default();
        return Some((reason, message));
    }
    let ended = state.terminated.as_ref().filter(|t| t.exit_code != 0)?;
    let reason = ended.reason.clone().unwrap_or_else(|| "Error".to_owned());
    let said = ended.message.as_deref().map(last_line).unwrap_or_default();
    let code = format!("exit code {}", ended.exit_code);
    Some((reason, if said.is_empty() { code } else { format!("{code}: {said}") }))
}

/// The last line that says something: where programs put their error.
fn last_line(text: &str) -> String {
    let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default().trim();
    line.chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: Value) -> Pod {
        let object = json!({"metadata": {"name": "p"}, "spec": {"containers": [], "nodeName": "n1"}, "status": status});
        serde_json::from_value(object).expect("a pod")
    }

    fn reason(status: Value) -> Option<(String, String)> {
        trouble(&pod(status)).map(|t| (t.reason, t.message))
    }

    #[test]
    fn a_ready_pod_has_no_trouble() {
        assert_eq!(
            reason(json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]})),
            None
        );
        assert_eq!(reason(json!({"phase": "Succeeded"})), None);
    }

    #[test]
    fn the_nearest_cause_is_named_first() {
        let crash = json!({"phase": "Running", "containerStatuses": [{
            "name": "engine", "image": "i", "imageID": "", "ready": false, "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
            "lastState": {"terminated": {"exitCode": 2, "message": "start\nerror: no such file\n"}},
        }]});
        let found = trouble(&pod(crash)).expect("trouble");
        assert_eq!(found.reason, "CrashLoopBackOff");
        assert_eq!(found.message, "it ended with exit code 2: error: no such file");
        assert_eq!((found.restarts, found.node.as_deref()), (3, Some("n1")));
        let unbound = json!({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]});
        assert_eq!(reason(unbound), Some(("Unschedulable".into(), "0/3 nodes".into())));
        let warming = json!({"phase": "Running", "conditions": [
            {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"},
            {"type": "deepinfer.io/routable", "status": "False", "reason": "Warming", "message": "loads weights"}]});
        assert_eq!(reason(warming), Some(("Warming".into(), "loads weights".into())));
    }
}
