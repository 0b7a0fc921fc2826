//! What is known of the model's files: on one machine the driver looks, in a cluster the agents tell.

use std::collections::BTreeMap;

use deepinfer_crds::condition::reason;
use deepinfer_crds::names::label;
use deepinfer_protocol::AgentId;

use crate::object::Kind;
use crate::world::{ModelState, World};

/// Reasons of agents that are about the model.
const ABOUT_MODEL: [&str; 3] =
    [reason::SOURCE_UNREACHABLE, reason::CHECKSUM_MISMATCH, reason::CREDENTIALS_MISSING];

/// The state of the model's files.
pub(crate) fn state(world: &World) -> ModelState {
    if world.model != ModelState::Unknown {
        return world.model.clone();
    }
    let words = || world.agents.iter().filter_map(|(name, word)| Some((name, word.status.as_ref()?)));
    if let Some((name, word)) = words().find(|(_, word)| ABOUT_MODEL.contains(&word.reason_code.as_str())) {
        let message = format!("{name}: {}", word.reason);
        return ModelState::Failed { reason: word.reason_code.clone(), message };
    }
    // Pods of another epoch may serve other files: the model is being replaced then.
    let epoch = |name: &AgentId| {
        let pod = world.get(Kind::Pod, name.as_str())?;
        pod.label(label::KV_EPOCH).map(str::to_owned)
    };
    let mut digests: BTreeMap<Option<String>, (&str, &AgentId)> = BTreeMap::new();
    for (name, word) in words().filter(|(_, word)| !word.model_digest.is_empty()) {
        let known = digests.entry(epoch(name)).or_insert((&word.model_digest, name));
        if known.0 != word.model_digest {
            let (one, a) = *known;
            let other = &word.model_digest;
            let message = format!("pods serve different files: {a} has digest {one}, {name} has {other}");
            return ModelState::Failed { reason: reason::CHECKSUM_MISMATCH.to_owned(), message };
        }
    }
    match digests.into_values().next() {
        None => ModelState::Unknown,
        Some((digest, _)) => ModelState::Ready { digest: digest.to_owned() },
    }
}
