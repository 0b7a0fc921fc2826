//! What the downward API says about a pod: `fieldRef` and `resourceFieldRef`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};
use kube::ResourceExt as _;

use super::super::quantity;

/// Addresses of a pod, known before its status says them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses<'a> {
    pub pod: &'a str,
    pub host: &'a str,
}

/// The value of a field, or None if the path is not one that Kubernetes defines.
pub(crate) fn field(pod: &Pod, path: &str, addresses: Addresses<'_>) -> Option<String> {
    let spec = pod.spec.as_ref();
    if let Some((map, key)) = subscript(path) {
        let value = match map {
            "metadata.labels" => pod.labels().get(key),
            "metadata.annotations" => pod.annotations().get(key),
            _ => return None,
        };
        return Some(value.cloned().unwrap_or_default());
    }
    Some(match path {
        "metadata.name" => pod.name_any(),
        "metadata.namespace" => pod.namespace().unwrap_or_default(),
        "metadata.uid" => pod.uid().unwrap_or_default(),
        "metadata.labels" => lines(pod.labels()),
        "metadata.annotations" => lines(pod.annotations()),
        "spec.nodeName" => spec.and_then(|s| s.node_name.clone()).unwrap_or_default(),
        "spec.serviceAccountName" => spec.and_then(|s| s.service_account_name.clone()).unwrap_or_default(),
        "status.podIP" | "status.podIPs" => addresses.pod.to_owned(),
        "status.hostIP" | "status.hostIPs" => addresses.host.to_owned(),
        _ => return None,
    })
}

/// `metadata.labels['key']`, taken apart.
fn subscript(path: &str) -> Option<(&str, &str)> {
    let (map, rest) = path.split_once('[')?;
    let key = rest.strip_suffix(']')?;
    let key = key.strip_prefix('\'').and_then(|k| k.strip_suffix('\'')).unwrap_or(key);
    Some((map, key))
}

/// All labels or annotations, one `key="value"` a line, in order of keys.
fn lines(map: &BTreeMap<String, String>) -> String {
    let lines: Vec<_> = map.iter().map(|(key, value)| format!("{key}={value:?}")).collect();
    lines.join("\n")
}

/// A request or limit of a container in units of the divisor, rounded up.
pub(crate) fn resource(container: &Container, selector: &ResourceFieldSelector) -> Option<String> {
    let (kind, name) = selector.resource.split_once('.')?;
    let resources = container.resources.as_ref();
    let map = match kind {
        "limits" => resources.and_then(|r| r.limits.as_ref().or(r.requests.as_ref())),
        "requests" => resources.and_then(|r| r.requests.as_ref()),
        _ => return None,
    };
    let amount = map.and_then(|m| m.get(name)).and_then(|q| quantity::parse(&q.0)).unwrap_or(0.0);
    let divisor = selector.divisor.as_ref().and_then(|q| quantity::parse(&q.0)).filter(|d| *d > 0.0);
    Some(format!("{}", (amount / divisor.unwrap_or(1.0)).ceil()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_say_what_kubernetes_says() {
        let mut pod = Pod::default();
        pod.metadata.name = Some("p".into());
        pod.labels_mut().insert("a".into(), "1".into());
        pod.annotations_mut().insert("deepinfer.io/drain".into(), "{\"deadline\":5}".into());
        let addresses = Addresses { pod: "10.1.0.2", host: "10.1.0.1" };
        for (path, want) in [
            ("metadata.name", Some("p")),
            ("metadata.labels['a']", Some("1")),
            ("metadata.labels['b']", Some("")),
            ("metadata.annotations['deepinfer.io/drain']", Some("{\"deadline\":5}")),
            ("metadata.annotations", Some("deepinfer.io/drain=\"{\\\"deadline\\\":5}\"")),
            ("status.podIP", Some("10.1.0.2")),
            ("status.hostIP", Some("10.1.0.1")),
            ("spec.priority", None),
        ] {
            assert_eq!(field(&pod, path, addresses).as_deref(), want, "{path}");
        }
    }

    #[test]
    fn resources_are_divided_and_rounded_up() {
        let container: Container = serde_json::from_value(serde_json::json!({
            "name": "c", "resources": {"limits": {"cpu": "1500m", "memory": "2Gi"}}
        }))
        .unwrap();
        let ask = |resource: &str, divisor: Option<&str>| {
            let divisor = divisor.map(|d| k8s_openapi::apimachinery::pkg::api::resource::Quantity(d.into()));
            let selector = ResourceFieldSelector { resource: resource.into(), divisor, container_name: None };
            super::resource(&container, &selector)
        };
        assert_eq!(ask("limits.cpu", None).as_deref(), Some("2"));
        assert_eq!(ask("limits.cpu", Some("1m")).as_deref(), Some("1500"));
        assert_eq!(ask("limits.memory", Some("1Mi")).as_deref(), Some("2048"));
        assert_eq!(ask("cpu", None), None);
    }
}
