//! What would help against a reason: one sentence for each that a person can act on.
//! Invariant: a reason without a remedy gets no sentence rather than an empty one.

/// What would help. `object` is what the reason is about (a node, a domain, a pod, a cluster), for commands.
pub fn of(reason: &str) -> Option<&'static str> {
    placement(reason).or_else(|| cluster(reason)).or_else(|| pod(reason)).or_else(|| failure(reason))
}

/// Reasons of placement (operator.md 6.4).
fn placement(reason: &str) -> Option<&'static str> {
    Some(match reason {
        "LabelMissing" => {
            "no node has the label that names its fabric domain: run GPU feature discovery (or the DRA driver's \
             compute-domain plugin), or label the nodes by hand with deepinfer.io/nvlink-domain=NAME; see kubectl \
             deepinfer topology"
        }
        "DomainTooSmall" => {
            "no domain has enough nodes even when all are free: lower spec.decode.supernode.nodes, or choose another \
             spec.accelerator.topologyProfile"
        }
        "NotEnoughFree" => {
            "domains are large enough but busy: wait for other workloads to end, remove them, or lower the replicas"
        }
        "CliqueBusy" => {
            "the domain already has a ComputeDomain, and two in one NVLink clique can break each other: wait until it \
             is gone, or raise the operator's computeDomainsPerClique if your driver allows it"
        }
        "Cordoned" => "nodes are cordoned: kubectl uncordon NODE when their maintenance is over",
        "TaintNotTolerated" => {
            "nodes have taints that the pods do not tolerate: remove them, or add tolerations in spec.decode.pod"
        }
        "NotReady" => "nodes are not Ready: see kubectl describe node NODE",
        "Quarantined" => {
            "nodes or domains are avoided after repeated failures: repair them; the quarantine ends by itself"
        }
        "QuotaExceeded" => "a ResourceQuota of the namespace is used up: raise it, or lower the replicas",
        "GateOff" => {
            "the scheduler lacks a feature gate that this gang backend needs: turn it on, or set \
             spec.scheduling.backend: Builtin"
        }
        "SchedulerPending" => {
            "the scheduler has not placed the gang yet: its message below says why; check other gangs in its queue"
        }
        "NotSelected" => {
            "nodes lack the labels of spec.decode.pod.nodeSelector: label them, or change the selector"
        }
        "SpreadRequired" => {
            "domains already have a supernode of this pool and spec.decode.spread.policy is Require: add a domain, or \
             set Prefer"
        }
        "FabricCleanup" => {
            "the fabric of the supernode before it is still being taken down: this ends by itself"
        }
        "SurgeUnplaceable" => "there is no room for one more: an old supernode goes first",
        "NodesUnreadable" => {
            "the operator may not read nodes: allow it (topology.readNodes), or use another scheduling backend"
        }
        "Unplaceable" => {
            "it has waited longer than spec.scheduling.unplaceableAfterSeconds: make room, or lower the size"
        }
        "GangTimeout" => {
            "some pods got nodes and others did not, so all were given back and the next domain is tried"
        }
        _ => return None,
    })
}

/// Reasons of a cluster's conditions.
fn cluster(reason: &str) -> Option<&'static str> {
    Some(match reason {
        "InvalidSpec" => {
            "correct the named fields: kubectl deepinfer validate -f FILE finds them before you apply"
        }
        "NotSupported" => {
            "remove the named fields, or set them as the message says: this release does not build them yet"
        }
        "RefNotFound" => {
            "create the named object in the namespace of the cluster, or correct its name in the spec"
        }
        "PlanRefused" => {
            "the operator refused its own plan: a fault of ours; send a kubectl deepinfer support-bundle"
        }
        "Denied" => {
            "the API server forbids the operator to write: compare its role with what deepinfer-operator manifests \
             prints, and look for admission policies of others"
        }
        "Contested" => {
            "somebody else keeps changing a field that the operator owns: the message names who; make the change in \
             the DeepInferCluster instead"
        }
        "NameCollision" => "an object of that name belongs to somebody else: delete or rename it",
        "RetriesExhausted" => {
            "it failed too often and is given up: repair the cause (kubectl deepinfer trace and the pod's log), then \
             change the spec or spec.operation.restartToken to try again"
        }
        "CRDSkew" => {
            "the installed definitions are older than the operator: kubectl deepinfer crds print | kubectl apply \
             --server-side -f -"
        }
        "ProgressDeadlineExceeded" => "nothing has moved for too long: look at the supernodes below",
        "ModelUnavailable" | "SourceUnreachable" => {
            "the model's files are not where spec.model.source.uri says: check the path or the claim on the nodes"
        }
        "ChecksumMismatch" => {
            "nodes hold different model files under the same path: copy the right ones, or name a new path"
        }
        "CredentialsMissing" => "create the Secret that spec.model.source.credentialsSecretName names",
        "TwoScalers" => "two autoscalers write the replicas of one pool: delete one",
        "WrongTarget" => {
            "an autoscaler targets an object that the operator owns: let it target the DeepInferPool"
        }
        "PausedAll" | "PausedRollouts" => "set spec.operation.pause: None to go on",
        "Suspended" => "set spec.operation.suspend: false to serve again",
        "GatewayUnavailable" => "no gateway pod is ready: see their state below",
        _ => return None,
    })
}

/// Reasons of containers and pods.
fn pod(reason: &str) -> Option<&'static str> {
    Some(match reason {
        "ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" => {
            "the node cannot pull the image: check its name, the registry, and imagePullSecrets"
        }
        "CrashLoopBackOff" | "Error" => {
            "the container ends soon after its start: kubectl logs POD --previous"
        }
        "OOMKilled" => "the container needs more memory than its limit: raise spec.*.pod.resources",
        "CreateContainerConfigError" | "CreateContainerError" => {
            "a Secret, ConfigMap or volume of the pod is missing: its message names it"
        }
        "Unschedulable" => "no node fits the pod: the scheduler's message says which rule keeps it out",
        "SchedulingGated" => "the pod waits until its whole gang can start",
        "Evicted" | "Preempted" => {
            "the pod lost its node to something more important: give it a priorityClassName"
        }
        _ => return None,
    })
}

/// Reasons of an incarnation's end.
fn failure(reason: &str) -> Option<&'static str> {
    Some(match reason {
        "PodStuckTerminating" => {
            "its node does not answer, so the pod cannot end: bring the node back, delete it, or taint it \
             node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
        }
        "PodFailed" | "AgentFailed" => "a container ended with an error: its log says why",
        "PodLost" | "PodDeleted" | "PodReplaced" => {
            "one of its pods was deleted: the supernode is rebuilt as a whole"
        }
        "AgentLost" => {
            "an agent does not answer although its pod runs: look at the pod's log and its node's network"
        }
        "NodeLost" | "NodeNotReady" | "NodeGone" | "NodeOutOfService" => {
            "a node was lost: the supernode is rebuilt on others; repair or delete the node"
        }
        "StartupDeadlineExceeded" => {
            "the agents did not become ready in time: look at the log of the named pod, or raise \
             spec.decode.supernode.startupDeadlineSeconds"
        }
        "PlacementViolated" => {
            "the scheduler put the pods into several domains: a fault of the gang backend; try \
             spec.scheduling.backend: Builtin"
        }
        "FabricNotReady" | "FabricFault" => {
            "ranks cannot reach each other over the fabric: check the driver's fabric daemons on the named nodes"
        }
        "FabricCleanupStuck" => {
            "the old ComputeDomain is not gone: look at the DRA driver's log on the named nodes"
        }
        "DeviceUnhealthy" => "a device is unhealthy: drain and repair its node",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_of_placement_and_of_a_stalled_cluster_has_a_remedy() {
        let placement = [
            "LabelMissing",
            "DomainTooSmall",
            "NotEnoughFree",
            "CliqueBusy",
            "Cordoned",
            "TaintNotTolerated",
            "Quarantined",
            "QuotaExceeded",
            "GateOff",
            "SchedulerPending",
        ];
        use deepinfer_crds::condition::reason;
        let stalled = [
            reason::INVALID_SPEC,
            reason::NOT_SUPPORTED,
            reason::REF_NOT_FOUND,
            reason::UNPLACEABLE,
            reason::PROGRESS_DEADLINE_EXCEEDED,
            reason::RETRIES_EXHAUSTED,
            reason::CRD_SKEW,
            reason::MODEL_UNAVAILABLE,
        ];
        for reason in placement.into_iter().chain(stalled) {
            assert!(of(reason).is_some(), "{reason}");
        }
        assert_eq!(of("Serving"), None);
    }
}
