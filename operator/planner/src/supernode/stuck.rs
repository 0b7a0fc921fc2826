//! Pods that hang in Terminating on a node that does not answer (operator.md 7.4). They block nobody: a new incarnation
//! has new names. They are removed by force only when the node is certainly gone; else they are reported.

use crate::action::Action;
use crate::cluster::resolve::Resolved;
use crate::object::{Key, Kind, Object};
use crate::step::Step;
use crate::supernode::phase::node_of;
use crate::supernode::signals::OUT_OF_SERVICE;

/// Plans what becomes of them.
pub(crate) fn plan(step: &mut Step<'_>, resolved: &Resolved) {
    let nodes = &step.world.nodes;
    if resolved.placing.is_none() || nodes.unreadable || nodes.by_name.is_empty() {
        return;
    }
    let timeout = resolved.decode.life.terminating_timeout;
    let mut gone = Vec::new();
    let mut waits = Vec::new();
    for object in step.world.of(Kind::Pod) {
        let Object::Pod(pod) = object else { continue };
        // The API server writes the moment at which the pod should be gone, its grace included.
        let Some(due) = pod.metadata.deletion_timestamp.as_ref().map(|t| t.0.as_second()) else { continue };
        let Some(node) = node_of(pod) else { continue };
        if step.world.now - due <= timeout {
            continue;
        }
        let facts = nodes.by_name.get(node);
        let dead = facts.is_none_or(|facts| facts.taints.iter().any(|taint| taint.key == OUT_OF_SERVICE));
        if dead {
            let why = format!("node {node} is gone for good");
            let (key, uid) = (Key::new(Kind::Pod, object.name()), pod.metadata.uid.clone());
            gone.push(Action::Delete { key, uid, grace_seconds: Some(0), why });
        } else if facts.is_some_and(|facts| !facts.ready) {
            let message = format!(
                "hangs in Terminating on node {node}, which does not answer; if the machine is off for good, taint \
                 the node with {OUT_OF_SERVICE}=nodeshutdown:NoExecute"
            );
            waits.push((Key::new(Kind::Pod, object.name()), due, message));
        }
    }
    step.actions.extend(gone);
    for (key, since, message) in waits {
        step.wait(&key, "PodStuckTerminating", since, message);
    }
}
