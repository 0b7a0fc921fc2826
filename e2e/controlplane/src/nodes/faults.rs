//! What a test wants to go wrong with containers that match a pattern.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Container;

/// What goes wrong when a container starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Starting takes this much longer.
    SlowStart(Duration),
    /// The image cannot be pulled.
    PullError,
    /// The process ends at once with an error.
    CrashLoop,
}

/// Faults by pattern: part of an image, of `namespace/pod` or of a container's name.
#[derive(Debug, Default)]
pub(crate) struct Faults(Mutex<Vec<(String, Fault)>>);

impl Faults {
    pub(crate) fn add(&self, pattern: &str, fault: Fault) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((pattern.to_owned(), fault));
    }

    /// Takes back all faults of a pattern.
    pub(crate) fn clear(&self, pattern: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|(known, _)| known != pattern);
    }

    /// The faults of a container, newest last.
    fn of(&self, pod: &str, container: &Container) -> Vec<Fault> {
        let image = container.image.as_deref().unwrap_or_default();
        let rules = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let hits = rules.iter().filter(|(pattern, _)| {
            [image, pod, &container.name].iter().any(|text| text.contains(pattern.as_str()))
        });
        hits.map(|(_, fault)| *fault).collect()
    }

    /// Whether a fault applies.
    pub(crate) fn has(&self, pod: &str, container: &Container, fault: Fault) -> bool {
        self.of(pod, container).contains(&fault)
    }

    /// How much longer a start takes.
    pub(crate) fn delay(&self, pod: &str, container: &Container) -> Duration {
        let delays = self.of(pod, container).into_iter().filter_map(|fault| match fault {
            Fault::SlowStart(delay) => Some(delay),
            _ => None,
        });
        delays.max().unwrap_or(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_hits_what_its_pattern_names_until_it_is_cleared() {
        let faults = Faults::default();
        let container: Container =
            serde_json::from_value(serde_json::json!({"name": "engine", "image": "registry/agent:1"}))
                .unwrap();
        faults.add("agent:1", Fault::SlowStart(Duration::from_secs(1)));
        faults.add("demo/p-0", Fault::SlowStart(Duration::from_secs(5)));
        faults.add("engine", Fault::CrashLoop);
        assert_eq!(faults.delay("demo/p-0", &container), Duration::from_secs(5));
        assert_eq!(faults.delay("demo/p-1", &container), Duration::from_secs(1));
        assert!(faults.has("demo/p-1", &container, Fault::CrashLoop));
        assert!(!faults.has("demo/p-1", &container, Fault::PullError));
        faults.clear("engine");
        assert!(!faults.has("demo/p-1", &container, Fault::CrashLoop));
    }
}
