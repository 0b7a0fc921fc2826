//! Fields that are not built yet (decisions.md): refused by name, or ignored by name; never silent. A field leaves
//! this file with the change that builds it.

use deepinfer_crds::DeepInferClusterSpec;
use deepinfer_crds::cluster::{Drain, ExpertMode, HandoffMode, KvMode, PodShape, Rollout};
use deepinfer_crds::condition::reason;
use deepinfer_crds::source::SourceUri;

use crate::report::Problem;
use crate::target::Target;

/// Problems that stop everything, and fields without effect.
pub(crate) fn check(spec: &DeepInferClusterSpec, target: &Target) -> (Vec<Problem>, Vec<Problem>) {
    let mut notes = Notes { refused: Vec::new(), ignored: Vec::new() };
    notes.scaling(spec);
    notes.model(spec, target);
    notes.kv(spec);
    notes.gateway(spec, target);
    notes.decode(spec, target);
    notes.operation(spec);
    notes.rollout("spec.prefill.rollout", spec.prefill.rollout.as_ref());
    notes.rollout("spec.decode.rollout", spec.decode.rollout.as_ref());
    notes.drain("spec.prefill.drain", spec.prefill.drain.as_ref());
    notes.drain("spec.decode.drain", spec.decode.drain.as_ref());
    if target.local().is_some() {
        notes.one_machine(spec);
    }
    (notes.refused, notes.ignored)
}

struct Notes {
    refused: Vec<Problem>,
    ignored: Vec<Problem>,
}

impl Notes {
    fn refuse(&mut self, set: bool, path: &str, fix: &str) {
        if set {
            let message = format!("this release does not do it yet; {fix}");
            self.refused.push(Problem { path: path.to_owned(), reason: reason::NOT_SUPPORTED, message });
        }
    }

    fn ignore(&mut self, set: bool, path: &str, why: &str) {
        if set {
            let message = why.to_owned();
            self.ignored.push(Problem { path: path.to_owned(), reason: "FieldsIgnored", message });
        }
    }

    fn scaling(&mut self, spec: &DeepInferClusterSpec) {
        self.refuse(
            spec.prefill.scaling.is_some(),
            "spec.prefill.scaling",
            "set spec.prefill.replicas instead",
        );
        self.refuse(spec.decode.scaling.is_some(), "spec.decode.scaling", "set spec.decode.replicas instead");
        self.refuse(spec.vision.is_some(), "spec.vision", "remove it: images are not served");
    }

    fn model(&mut self, spec: &DeepInferClusterSpec, target: &Target) {
        let path = "spec.model.source.uri";
        match SourceUri::parse(&spec.model.source.uri) {
            Err(error) => {
                let message = error.to_string();
                self.refused.push(Problem { path: path.to_owned(), reason: reason::INVALID_SPEC, message });
            }
            Ok(SourceUri::File(_)) => {}
            Ok(SourceUri::Claim { .. }) => {
                let local = target.local().is_some();
                self.refuse(local, path, "a claim needs Kubernetes; use file:// on one machine");
            }
            Ok(_) => self.refuse(true, path, "use file:// (a folder on the node) or pvc://"),
        }
        let source = &spec.model.source;
        let used = "only remote sources read it";
        let local = target.local().is_some();
        let digest = "one machine does not compare the digest yet";
        self.ignore(local && source.revision.is_some(), "spec.model.source.revision", digest);
        self.ignore(
            source.credentials_secret_name.is_some(),
            "spec.model.source.credentialsSecretName",
            used,
        );
        self.ignore(spec.model.cache.is_some(), "spec.model.cache", used);
    }

    fn kv(&mut self, spec: &DeepInferClusterSpec) {
        let Some(kv) = &spec.kv_cache else { return };
        let tier = kv.mode.is_some_and(|mode| mode != KvMode::None);
        self.refuse(tier, "spec.kvCache.mode", "set it to None: there is no KV tier beyond the nodes");
        let why = "there is no KV tier yet; --parked-memory and --checkpoint-memory in engine.extraArgs size host memory";
        self.ignore(kv.host_memory_gib_per_node.is_some(), "spec.kvCache.hostMemoryGiBPerNode", why);
        self.ignore(kv.required.is_some(), "spec.kvCache.required", why);
    }

    fn gateway(&mut self, spec: &DeepInferClusterSpec, target: &Target) {
        let Some(gateway) = &spec.gateway else { return };
        self.refuse(gateway.scaling.is_some(), "spec.gateway.scaling", "set spec.gateway.replicas instead");
        let pool = gateway.inference_pool.as_ref().is_some_and(|p| p.enabled == Some(true));
        self.refuse(pool, "spec.gateway.inferencePool.enabled", "set it to false: use the gateway's Service");
        self.refuse(gateway.route.is_some(), "spec.gateway.route", "remove it: use the gateway's Service");
        self.ignore(gateway.activator.is_some(), "spec.gateway.activator", "nothing scales to zero yet");
        if target.local().is_some() {
            let secret = "one machine has no Secrets; give `deepinfer up` the files";
            let keys = "one machine has no Secrets; give `deepinfer up` --api-keys FILE";
            self.ignore(gateway.tls_secret_name.is_some(), "spec.gateway.tlsSecretName", secret);
            self.ignore(gateway.api_keys_secret_name.is_some(), "spec.gateway.apiKeysSecretName", keys);
            self.ignore(gateway.service.is_some(), "spec.gateway.service", "one machine has no Services");
            self.ignore(gateway.image.is_some(), "spec.gateway.image", "one machine runs this binary");
        }
    }

    fn decode(&mut self, spec: &DeepInferClusterSpec, target: &Target) {
        let decode = &spec.decode;
        let spares = decode.supernode.spare_nodes.is_some_and(|n| n > 0);
        self.refuse(spares, "spec.decode.supernode.spareNodes", "set it to 0");
        if let Some(experts) = &decode.experts {
            let pinned = experts.mode == Some(ExpertMode::Pinned) || experts.pinned_plan.is_some();
            self.refuse(pinned, "spec.decode.experts.mode", "set it to Off: placements do not move yet");
            let auto = experts.mode == Some(ExpertMode::Auto);
            self.ignore(auto, "spec.decode.experts.mode", "loads are counted, placements do not move yet");
            let policy = experts.policy.is_some();
            self.ignore(
                policy,
                "spec.decode.experts.policy",
                "loads are counted, placements do not move yet",
            );
        }
        let local = target.local().is_some();
        if let Some(recovery) = decode.recovery.as_ref().filter(|_| local) {
            let at = |field: &str| format!("spec.decode.recovery.{field}");
            let rebuilt = "a lost supernode is rebuilt at once";
            self.ignore(recovery.mode.is_some(), &at("mode"), rebuilt);
            self.ignore(recovery.node_lost_grace_seconds.is_some(), &at("nodeLostGraceSeconds"), rebuilt);
            let pods = "pods of a lost supernode are not waited for";
            self.ignore(
                recovery.terminating_timeout_seconds.is_some(),
                &at("terminatingTimeoutSeconds"),
                pods,
            );
        }
        let local = target.local().is_some();
        self.ignore(local && decode.spread.is_some(), "spec.decode.spread", "one machine is one domain");
    }

    fn operation(&mut self, spec: &DeepInferClusterSpec) {
        if let Some(operation) = &spec.operation {
            let rollback = operation.rollback_to.is_some();
            self.refuse(rollback, "spec.operation.rollbackTo", "apply the earlier spec instead");
            let adopt = operation.adopt_defaults.is_some();
            self.refuse(adopt, "spec.operation.adoptDefaults", "remove it: there is one set of defaults");
        }
        let deadline = spec.availability.as_ref().is_some_and(|a| a.maintenance_deadline_seconds.is_some());
        let why = "node maintenance is not followed yet";
        self.ignore(deadline, "spec.availability.maintenanceDeadlineSeconds", why);
        self.ignore(
            spec.engine.agent.is_some(),
            "spec.engine.agent",
            "only engines that are not ours need it",
        );
        self.ignore(
            !spec.engine.config.is_empty(),
            "spec.engine.config",
            "no key is known; use engine.extraArgs",
        );
    }

    fn rollout(&mut self, path: &str, rollout: Option<&Rollout>) {
        let Some(rollout) = rollout else { return };
        let at = |field: &str| format!("{path}.{field}");
        let remove = "remove it";
        self.refuse(rollout.max_updated.is_some(), &at("maxUpdated"), remove);
        self.refuse(rollout.analysis.is_some(), &at("analysis"), remove);
        self.refuse(rollout.auto_rollback == Some(true), &at("autoRollback"), remove);
        let why = "one supernode is replaced at a time, the new one before the old one where there is room";
        self.ignore(rollout.max_surge.is_some(), &at("maxSurge"), why);
        self.ignore(rollout.prefer_surge.is_some(), &at("preferSurge"), why);
        let decode = path == "spec.decode.rollout";
        // Of supernodes 0 and 1 are followed.
        let unavailable = rollout.max_unavailable.is_some_and(|most| !decode || most > 1);
        self.ignore(unavailable, &at("maxUnavailable"), why);
        self.ignore(!decode && rollout.surge_timeout_seconds.is_some(), &at("surgeTimeoutSeconds"), why);
        self.ignore(rollout.progress_deadline_seconds.is_some(), &at("progressDeadlineSeconds"), why);
    }

    fn drain(&mut self, path: &str, drain: Option<&Drain>) {
        let moved = drain.and_then(|d| d.handoff).is_some_and(|handoff| handoff != HandoffMode::None);
        let fix = "set it to None: running requests finish where they are";
        self.refuse(moved, &format!("{path}.handoff"), fix);
    }

    fn one_machine(&mut self, spec: &DeepInferClusterSpec) {
        let why = "has no meaning on one machine";
        self.ignore(spec.scheduling.is_some(), "spec.scheduling", why);
        self.ignore(spec.network.is_some(), "spec.network", why);
        let shaped = |pod: &Option<PodShape>| pod.is_some();
        self.ignore(shaped(&spec.prefill.pod), "spec.prefill.pod", why);
        self.ignore(shaped(&spec.decode.pod), "spec.decode.pod", why);
        let engine = &spec.engine;
        let binary = "one machine runs this binary";
        self.ignore(engine.image_pull_policy.is_some(), "spec.engine.imagePullPolicy", binary);
        self.ignore(!engine.image_pull_secrets.is_empty(), "spec.engine.imagePullSecrets", binary);
        self.ignore(!engine.env.is_empty(), "spec.engine.env", "the engine reads no environment");
        self.ignore(spec.accelerator.topology_profile.is_some(), "spec.accelerator.topologyProfile", why);
        self.ignore(spec.accelerator.compute_domain.is_some(), "spec.accelerator.computeDomain", why);
        self.ignore(spec.accelerator.resource_name.is_some(), "spec.accelerator.resourceName", why);
    }
}
