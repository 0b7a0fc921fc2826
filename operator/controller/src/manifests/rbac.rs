//! What the operator may do (operator.md 12.5, minus what is not built): no wildcard, no Secret ever read, nothing on
//! nodes but reading. What the garbage collector takes away the operator may not delete.
//!
//! Invariant: each verb is used by the operator; `tests/rbac.rs` looks into the audit log of a real API server.

use deepinfer_crds::crd;
use deepinfer_crds::names::GROUP;
use k8s_openapi::api::rbac::v1::{
    ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject,
};

use super::{InstallOptions, NAME, cluster_meta, document};

/// Name of what concerns the operator's own namespace.
const OWN: &str = "deepinfer-operator-own";
/// Name of what cannot be had by namespace.
const GLOBAL: &str = "deepinfer-operator-global";
const RBAC_GROUP: &str = "rbac.authorization.k8s.io";

/// Followed only.
const WATCH: &[&str] = &["list", "watch"];
/// Made and kept as planned; the garbage collector takes it away.
const APPLY: &[&str] = &["get", "list", "watch", "create", "patch"];
/// Made once and never changed.
const MAKE_ONCE: &[&str] = &["get", "list", "watch", "create", "delete"];
/// All of it.
const MANAGE: &[&str] = &["get", "list", "watch", "create", "patch", "delete"];

/// In each watched namespace.
pub fn namespaced_rules() -> Vec<PolicyRule> {
    vec![
        // The user's object: only its finalizer and its status are ours.
        rule(GROUP, &["deepinferclusters"], &["get", "list", "watch", "patch"]),
        rule(GROUP, &["deepinferpools"], APPLY),
        rule(GROUP, &["supernodes"], MANAGE),
        rule(GROUP, &["expertplacements"], WATCH),
        rule(GROUP, &["deepinferclusters/status", "deepinferpools/status", "supernodes/status"], &["patch"]),
        // Owner references that block the owner's deletion; asked for by the admission plugin
        // OwnerReferencesPermissionEnforcement where it is on.
        rule(
            GROUP,
            &["deepinferclusters/finalizers", "deepinferpools/finalizers", "supernodes/finalizers"],
            &["update"],
        ),
        rule("", &["pods"], MANAGE),
        rule("", &["pods/status"], &["patch"]),
        rule("", &["services", "configmaps"], APPLY),
        rule("", &["persistentvolumeclaims", "podtemplates"], WATCH),
        rule("", &["secrets"], &["create"]),
        rule("", &["serviceaccounts"], &["get", "create", "patch"]),
        rule("apps", &["deployments"], MANAGE),
        rule("apps", &["controllerrevisions"], MAKE_ONCE),
        rule("policy", &["poddisruptionbudgets"], APPLY),
        rule("networking.k8s.io", &["networkpolicies"], APPLY),
        rule("events.k8s.io", &["events"], &["create", "patch"]),
        rule("scheduling.k8s.io", &["podgroups"], MAKE_ONCE),
        rule("scheduling.volcano.sh", &["podgroups"], MAKE_ONCE),
        rule("scheduling.run.ai", &["podgroups"], MAKE_ONCE),
        rule("resource.nvidia.com", &["computedomains"], MAKE_ONCE),
    ]
}

/// In the operator's own namespace.
pub fn own_rules() -> Vec<PolicyRule> {
    vec![
        // A name cannot be demanded of something that is about to be made.
        rule("coordination.k8s.io", &["leases"], &["create"]),
        PolicyRule {
            resource_names: Some(vec![NAME.to_owned()]),
            ..rule("coordination.k8s.io", &["leases"], &["get", "update"])
        },
        // The master key, once.
        rule("", &["secrets"], &["create"]),
    ]
}

/// In no namespace.
pub fn global_rules(read_nodes: bool) -> Vec<PolicyRule> {
    let definitions = crd::Kind::ALL.into_iter().map(|kind| format!("{}.{GROUP}", kind.plural()));
    let mut rules = vec![PolicyRule {
        resource_names: Some(definitions.collect()),
        ..rule("apiextensions.k8s.io", &["customresourcedefinitions"], &["get"])
    }];
    if read_nodes {
        rules.push(rule("", &["nodes"], WATCH));
    }
    rules
}

fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> PolicyRule {
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(owned(resources)),
        verbs: owned(verbs),
        ..PolicyRule::default()
    }
}

/// Roles and bindings, as YAML documents.
pub(super) fn objects(options: &InstallOptions) -> Vec<String> {
    let mut documents = Vec::new();
    let global = cluster_role(GLOBAL, global_rules(options.read_nodes));
    documents.extend([document(&global), document(&cluster_binding(options, GLOBAL))]);
    if options.watch_namespaces.is_empty() {
        documents.push(document(&cluster_role(NAME, namespaced_rules())));
        documents.push(document(&cluster_binding(options, NAME)));
    }
    for namespace in &options.watch_namespaces {
        documents.extend(role(options, namespace, NAME, namespaced_rules()));
    }
    documents.extend(role(options, &options.namespace, OWN, own_rules()));
    documents
}

fn cluster_role(name: &str, rules: Vec<PolicyRule>) -> ClusterRole {
    ClusterRole { metadata: cluster_meta(name), rules: Some(rules), ..ClusterRole::default() }
}

fn cluster_binding(options: &InstallOptions, name: &str) -> ClusterRoleBinding {
    ClusterRoleBinding {
        metadata: cluster_meta(name),
        role_ref: role_ref("ClusterRole", name),
        subjects: Some(subjects(options)),
    }
}

fn role(options: &InstallOptions, namespace: &str, name: &str, rules: Vec<PolicyRule>) -> [String; 2] {
    let mut metadata = cluster_meta(name);
    metadata.namespace = Some(namespace.to_owned());
    let binding = RoleBinding {
        metadata: metadata.clone(),
        role_ref: role_ref("Role", name),
        subjects: Some(subjects(options)),
    };
    [document(&Role { metadata, rules: Some(rules) }), document(&binding)]
}

fn role_ref(kind: &str, name: &str) -> RoleRef {
    RoleRef { api_group: Some(RBAC_GROUP.to_owned()), kind: kind.to_owned(), name: name.to_owned() }
}

fn subjects(options: &InstallOptions) -> Vec<Subject> {
    vec![Subject {
        kind: "ServiceAccount".to_owned(),
        name: NAME.to_owned(),
        namespace: Some(options.namespace.clone()),
        api_group: None,
    }]
}
