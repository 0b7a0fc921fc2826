//! What is watched: one source for each kind, and for each namespace where not all are watched.

use deepinfer_crds::names::label;
use deepinfer_planner::{Apis, Kind, Namespaced, NativeVersion};

use super::store::{Cached, Entry};
use crate::rest::Resource;

/// Which store the objects of a source go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Shelf {
    /// Objects of a kind of the planner.
    Kind(Kind),
    /// Nodes.
    Node,
}

/// Kinds of which all objects are watched.
const WHOLE: [Kind; 4] = [Kind::Cluster, Kind::Pod, Kind::PodTemplate, Kind::Claim];
/// Kinds of which those with our label are watched.
const LABELLED: [Kind; 9] = [
    Kind::ConfigMap,
    Kind::ControllerRevision,
    Kind::NetworkPolicy,
    Kind::Pool,
    Kind::Supernode,
    Kind::Placement,
    Kind::Service,
    Kind::Budget,
    Kind::Deployment,
];

/// A watch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// Where its objects go.
    pub shelf: Shelf,
    /// What the API server calls the kind.
    pub resource: Resource,
    /// Only this namespace.
    pub namespace: Option<String>,
    /// Only objects with our label.
    pub labelled: bool,
}

impl Source {
    /// Name in metrics and `/livez`: `pods`, or `pods/ns`.
    pub fn name(&self) -> String {
        let foreign = matches!(self.shelf, Shelf::Kind(Kind::Gang));
        let plural = &self.resource.plural;
        let kind = if foreign { format!("{plural}.{}", self.resource.group) } else { plural.clone() };
        match &self.namespace {
            Some(namespace) => format!("{kind}/{namespace}"),
            None => kind,
        }
    }

    /// Path of its objects.
    pub fn path(&self) -> String {
        self.resource.path(self.namespace.as_deref())
    }

    /// Label selector.
    pub fn selector(&self) -> Option<&'static str> {
        self.labelled.then_some(label::CLUSTER)
    }

    /// Whether an object of its shelf would come from it.
    pub fn covers(&self, key: &Namespaced, entry: &Entry) -> bool {
        let place = self.namespace.as_ref().is_none_or(|namespace| *namespace == key.0);
        place
            && match &entry.cached {
                Cached::Object(object) => match self.shelf {
                    Shelf::Kind(Kind::Gang | Kind::ComputeDomain) => {
                        object.type_meta().0 == self.resource.api_version()
                    }
                    _ => true,
                },
                Cached::Pod(..) | Cached::Use(_) | Cached::Node(_) | Cached::Unreadable(_) => true,
            }
    }
}

/// Sources that there always are.
pub fn fixed(namespaces: &[String], read_nodes: bool) -> Vec<Source> {
    let mut sources = Vec::new();
    for kind in WHOLE.into_iter().chain(LABELLED) {
        let resource = Resource::of(kind).expect("these kinds have fixed paths");
        sources.extend(within(namespaces, Shelf::Kind(kind), &resource, LABELLED.contains(&kind)));
    }
    if read_nodes {
        sources.extend(within(&[], Shelf::Node, &Resource::nodes(), false));
    }
    sources
}

/// Sources of kinds that not every cluster has.
pub fn optional(namespaces: &[String], apis: &Apis) -> Vec<Source> {
    let mut resources = Vec::new();
    let gang =
        |group: &str, version: &str| (Kind::Gang, Resource::new(group, version, "PodGroup", "podgroups"));
    match apis.native_gang {
        Some(NativeVersion::V1Alpha2) => resources.push(gang("scheduling.k8s.io", "v1alpha2")),
        Some(NativeVersion::V1Beta1) => resources.push(gang("scheduling.k8s.io", "v1beta1")),
        None => {}
    }
    if apis.volcano {
        resources.push(gang("scheduling.volcano.sh", "v1beta1"));
    }
    if apis.kai {
        resources.push(gang("scheduling.run.ai", "v2alpha2"));
    }
    if apis.compute_domain {
        let domains = Resource::new("resource.nvidia.com", "v1beta1", "ComputeDomain", "computedomains");
        resources.push((Kind::ComputeDomain, domains));
    }
    let sources =
        resources.iter().map(|(kind, resource)| within(namespaces, Shelf::Kind(*kind), resource, true));
    sources.flatten().collect()
}

fn within(namespaces: &[String], shelf: Shelf, resource: &Resource, labelled: bool) -> Vec<Source> {
    let source = |namespace: Option<&String>| Source {
        shelf,
        resource: resource.clone(),
        namespace: namespace.cloned(),
        labelled,
    };
    if namespaces.is_empty() {
        return vec![source(None)];
    }
    namespaces.iter().map(|namespace| source(Some(namespace))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_watched_once_in_each_namespace_and_nodes_in_none() {
        assert_eq!(fixed(&[], true).len(), 14);
        let two = fixed(&["a".into(), "b".into()], true);
        assert_eq!(two.len(), 27);
        assert!(two.iter().any(|source| source.path() == "/api/v1/namespaces/b/pods"));
        assert!(two.iter().any(|source| source.path() == "/api/v1/nodes"));
        assert!(!fixed(&[], false).iter().any(|source| source.shelf == Shelf::Node));
    }

    #[test]
    fn secrets_are_never_read() {
        let all = fixed(&[], true);
        assert!(all.iter().all(|source| source.resource.kind != "Secret"));
    }

    #[test]
    fn kinds_that_the_cluster_does_not_have_are_not_watched() {
        assert!(optional(&[], &Apis::default()).is_empty());
        let apis =
            Apis { native_gang: Some(NativeVersion::V1Alpha2), compute_domain: true, ..Apis::default() };
        let paths: Vec<String> = optional(&[], &apis).iter().map(Source::path).collect();
        assert_eq!(
            paths,
            [
                "/apis/scheduling.k8s.io/v1alpha2/podgroups",
                "/apis/resource.nvidia.com/v1beta1/computedomains"
            ]
        );
    }
}
