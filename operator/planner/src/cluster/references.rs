//! What a spec names and the cluster must have: templates, claims, scheduling APIs.

use deepinfer_crds::cluster::PodShape;
use deepinfer_crds::condition::reason;

use super::resolve::{Resolved, Source};
use crate::object::Kind;
use crate::report::Problem;
use crate::step::Step;
use crate::supernode::{fabric, gang};

/// Names that are missing, each with its field and the fix.
pub(crate) fn missing(step: &Step<'_>, resolved: &Resolved) -> Vec<Problem> {
    let Some(placing) = &resolved.placing else {
        return Vec::new();
    };
    let mut problems = Vec::new();
    let mut find = |path: &str, message: String| {
        problems.push(Problem { path: path.to_owned(), reason: reason::REF_NOT_FOUND, message });
    };
    let spec = &step.cluster.spec;
    for (path, shape) in [
        ("spec.prefill.pod.templateRef.name", &spec.prefill.pod),
        ("spec.decode.pod.templateRef.name", &spec.decode.pod),
    ] {
        let name = shape.as_ref().and_then(|shape: &PodShape| shape.template_ref.as_ref()).map(|t| &t.name);
        if let Some(name) = name
            && step.world.get(Kind::PodTemplate, name).is_none()
        {
            let namespace = &step.world.namespace;
            find(path, format!("there is no PodTemplate {name:?} in namespace {namespace}: create it"));
        }
    }
    if let Source::Claim(claim) = &resolved.model.source
        && step.world.get(Kind::Claim, claim).is_none()
    {
        let namespace = &step.world.namespace;
        let text = format!("there is no PersistentVolumeClaim {claim:?} in namespace {namespace}: create it");
        find("spec.model.source.uri", text);
    }
    let apis = &step.world.apis;
    let unreadable = step.world.nodes.unreadable;
    let queue = placing.queue.as_deref();
    if let Err(message) = gang::backend(placing.backend, queue, apis, unreadable, &placing.profile) {
        let message = message.trim_start_matches("spec.scheduling.backend: ").to_owned();
        find("spec.scheduling.backend", message);
    }
    if let Err(message) = fabric::wanted(placing.compute_domain, resolved.vendor, &placing.profile, apis) {
        find("spec.accelerator.computeDomain", message);
    }
    problems
}
