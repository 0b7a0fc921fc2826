//! Accelerators of a node: which container holds which, and whether they are healthy.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, ResourceHealth, ResourceStatus};

use super::quantity;

/// One device of an extended resource.
#[derive(Clone, Debug)]
struct Device {
    healthy: bool,
    /// The pod's UID and the container.
    owner: Option<(String, String)>,
}

/// All devices of a node by resource, e.g. `nvidia.com/gpu`.
#[derive(Debug, Default)]
pub(crate) struct Devices(BTreeMap<String, Vec<Device>>);

impl Devices {
    /// Devices for every extended resource (a name with a slash) of a node.
    pub(crate) fn new(allocatable: &BTreeMap<String, String>) -> Self {
        let extended = allocatable.iter().filter(|(name, _)| name.contains('/'));
        let devices = extended.map(|(name, amount)| {
            let count = quantity::parse(amount).unwrap_or(0.0).clamp(0.0, 1024.0) as usize;
            (name.clone(), vec![Device { healthy: true, owner: None }; count])
        });
        Devices(devices.collect())
    }

    /// How many devices of a resource work; None if this is no device.
    pub(crate) fn healthy(&self, resource: &str) -> Option<usize> {
        Some(self.0.get(resource)?.iter().filter(|device| device.healthy).count())
    }

    /// Gives a container the devices that it asks for. Holding them already is fine.
    pub(crate) fn allocate(&mut self, uid: &str, container: &Container) {
        let resources = container.resources.as_ref();
        let limits = resources.and_then(|r| r.limits.as_ref().or(r.requests.as_ref()));
        let owner = (uid.to_owned(), container.name.clone());
        for (name, amount) in limits.into_iter().flatten() {
            let Some(devices) = self.0.get_mut(name) else { continue };
            let wanted = quantity::parse(&amount.0).unwrap_or(0.0) as usize;
            let held = devices.iter().filter(|d| d.owner.as_ref() == Some(&owner)).count();
            let free = devices.iter_mut().filter(|d| d.owner.is_none() && d.healthy);
            free.take(wanted.saturating_sub(held)).for_each(|d| d.owner = Some(owner.clone()));
        }
    }

    /// Takes back everything a pod holds.
    pub(crate) fn release(&mut self, uid: &str) {
        for device in self.0.values_mut().flatten() {
            if device.owner.as_ref().is_some_and(|(pod, _)| pod == uid) {
                device.owner = None;
            }
        }
    }

    /// Breaks one device, one that is in use if there is one. False if there is none to break.
    pub(crate) fn break_one(&mut self, resource: &str) -> bool {
        let Some(devices) = self.0.get_mut(resource) else { return false };
        let used = devices.iter().position(|d| d.healthy && d.owner.is_some());
        let found = used.or_else(|| devices.iter().position(|d| d.healthy));
        if let Some(at) = found {
            devices[at].healthy = false;
        }
        found.is_some()
    }

    /// Heals all devices of a resource.
    pub(crate) fn heal(&mut self, resource: &str) {
        self.0.get_mut(resource).into_iter().flatten().for_each(|device| device.healthy = true);
    }

    /// What a container's status says about its devices (`allocatedResourcesStatus`).
    pub(crate) fn status(&self, uid: &str, container: &str) -> Option<Vec<ResourceStatus>> {
        let held = self.0.iter().filter_map(|(name, devices)| {
            let mine = devices.iter().enumerate().filter(|(_, d)| {
                d.owner.as_ref().is_some_and(|(pod, holder)| pod == uid && holder == container)
            });
            let resources: Vec<_> = mine
                .map(|(at, device)| ResourceHealth {
                    resource_id: format!("{}-{at}", name.rsplit('/').next().unwrap_or(name)),
                    health: Some(if device.healthy { "Healthy" } else { "Unhealthy" }.to_owned()),
                    message: None,
                })
                .collect();
            (!resources.is_empty()).then(|| ResourceStatus { name: name.clone(), resources: Some(resources) })
        });
        let held: Vec<_> = held.collect();
        (!held.is_empty()).then_some(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_device_is_counted_and_named() {
        let offer = BTreeMap::from([
            ("nvidia.com/gpu".to_owned(), "4".to_owned()),
            ("cpu".to_owned(), "8".to_owned()),
        ]);
        let mut devices = Devices::new(&offer);
        let container: Container = serde_json::from_value(serde_json::json!({
            "name": "engine", "resources": {"limits": {"nvidia.com/gpu": "2", "cpu": "1"}}
        }))
        .unwrap();
        devices.allocate("u1", &container);
        devices.allocate("u1", &container);
        devices.allocate("u2", &container);
        assert!(devices.break_one("nvidia.com/gpu"));
        assert_eq!(devices.healthy("nvidia.com/gpu"), Some(3));
        assert_eq!(devices.healthy("cpu"), None);
        let status = devices.status("u1", "engine").unwrap();
        let healths: Vec<_> = status[0]
            .resources
            .iter()
            .flatten()
            .map(|r| (r.resource_id.as_str(), r.health.as_deref()))
            .collect();
        assert_eq!(healths, [("gpu-0", Some("Unhealthy")), ("gpu-1", Some("Healthy"))]);
        assert!(!devices.break_one("huawei.com/npu"));
        devices.release("u1");
        assert!(devices.status("u1", "engine").is_none() && devices.status("u2", "engine").is_some());
        devices.heal("nvidia.com/gpu");
        assert_eq!(devices.healthy("nvidia.com/gpu"), Some(4));
    }
}
