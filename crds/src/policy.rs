//! Who may touch the kinds that the operator owns, as ValidatingAdmissionPolicies: no webhook, so nothing of ours has
//! to run for the API server to refuse (operator.md 3.12).
//! Invariants: a pure function of the operator's account; what Kubernetes itself must do (garbage collection, the end
//! of a namespace) always passes; `/scale` is nobody's business here.

use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MatchResources, NamedRuleWithOperations, ValidatingAdmissionPolicy,
    ValidatingAdmissionPolicyBinding, ValidatingAdmissionPolicyBindingSpec, ValidatingAdmissionPolicySpec,
    Validation, Variable,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::crd::Kind;
use crate::names::{self, annotation, policy, rbac};

/// A policy with the binding that puts it into force.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// What is refused, and with which words.
    pub policy: ValidatingAdmissionPolicy,
    /// Everywhere, by refusing.
    pub binding: ValidatingAdmissionPolicyBinding,
}

/// The policies for an operator that runs under this account, as
/// `system:serviceaccount:deepinfer-system:deepinfer-operator`.
pub fn policies(operator: &str) -> Vec<Policy> {
    vec![owned_kinds(operator), deletion_protection()]
}

/// All of them as YAML documents, with a note on where they come from.
pub fn yaml(operator: &str) -> String {
    let mut text = String::from(
        "# Generated from crds/src/policy.rs: cargo run -p deepinfer-crds --bin crdgen -- crds/yaml\n",
    );
    for Policy { policy, binding } in policies(operator) {
        for document in [crate::yaml::to_yaml(&policy), crate::yaml::to_yaml(&binding)] {
            text += "---\n";
            text += &document.expect("Kubernetes objects are JSON");
        }
    }
    text
}

/// Supernodes and placements are the operator's alone; of a pool others may write the replicas.
fn owned_kinds(operator: &str) -> Policy {
    let owned = [Kind::Pool, Kind::Supernode, Kind::Placement];
    let resources = owned.iter().flat_map(|k| [k.plural().to_owned(), format!("{}/status", k.plural())]);
    let trusted = [
        ("operator", operator),
        // Children of a deleted cluster go by it.
        ("garbage-collector", "system:serviceaccount:kube-system:generic-garbage-collector"),
        ("namespace-controller", NAMESPACE_CONTROLLER),
        // Re-writes every object as it is when the storage version of a kind moves.
        ("storage-migration", "system:serviceaccount:kube-system:storage-version-migrator-controller"),
    ];
    let mut conditions: Vec<MatchCondition> = trusted.iter().map(|(name, user)| is_not(name, user)).collect();
    conditions.push(MatchCondition {
        name: "not-an-administrator".to_owned(),
        expression: format!(
            "!has(request.userInfo.groups) || !('{}' in request.userInfo.groups)",
            rbac::ADMINS_GROUP
        ),
    });
    let spec = ValidatingAdmissionPolicySpec {
        failure_policy: Some("Fail".to_owned()),
        match_constraints: Some(matching(&["CREATE", "UPDATE", "DELETE"], resources.collect())),
        match_conditions: Some(conditions),
        variables: Some(owned_variables()),
        validations: Some(vec![
            // Absent, not empty, where the object itself is written.
            refuse(
                "!has(request.subResource) || request.subResource != 'status'",
                "'the status of a ' + variables.kind + ' is written by the operator only; ' + variables.way_out",
            ),
            refuse(
                "request.operation != 'CREATE'",
                "'a ' + variables.kind + ' is made by the operator: create or edit a DeepInferCluster instead; ' + \
                 variables.way_out",
            ),
            refuse(
                "request.operation != 'DELETE'",
                "'a ' + variables.kind + ' is deleted by the operator: ' + (variables.pool ? \
                 'delete or edit the DeepInferCluster instead; ' : \
                 'to have a supernode rebuilt delete one of its pods, to have fewer edit the DeepInferCluster or \
                 scale the DeepInferPool; ') + variables.way_out",
            ),
            refuse(
                "request.operation != 'UPDATE' || variables.pool",
                "'a ' + variables.kind + ' is written by the operator only: edit the DeepInferCluster instead; ' + \
                 variables.way_out",
            ),
            refuse(
                "request.operation != 'UPDATE' || !variables.pool || variables.only_replicas",
                "'only spec.replicas of a DeepInferPool can be changed (kubectl scale dip ' + request.name + \
                 ' --replicas=N): everything else comes from the DeepInferCluster; ' + variables.way_out",
            ),
        ]),
        ..ValidatingAdmissionPolicySpec::default()
    };
    bound(policy::OWNED_KINDS, spec)
}

fn owned_variables() -> Vec<Variable> {
    let variable = |name: &str, expression: String| Variable { name: name.to_owned(), expression };
    let kinds = [Kind::Pool, Kind::Supernode]
        .iter()
        .map(|k| format!("request.resource.resource == '{}' ? '{}' : ", k.plural(), k.name()))
        .collect::<String>();
    // Kinds differ in their fields, so the specs are compared as maps.
    let same_but_replicas = "dyn(object.spec).all(k, k == 'replicas' || (k in dyn(oldObject.spec) && \
         dyn(object.spec)[k] == dyn(oldObject.spec)[k])) && \
         dyn(oldObject.spec).all(k, k == 'replicas' || k in dyn(object.spec))";
    let same_meta = ["labels", "annotations", "finalizers", "ownerReferences"]
        .map(|field| {
            let (new, old) = (format!("object.metadata.{field}"), format!("oldObject.metadata.{field}"));
            format!("has({new}) == has({old}) && (!has({new}) || {new} == {old})")
        })
        .join(" && ");
    vec![
        variable("kind", format!("{kinds}'{}'", Kind::Placement.name())),
        variable("pool", format!("request.resource.resource == '{}'", Kind::Pool.plural())),
        variable("only_replicas", format!("{same_but_replicas} && {same_meta}")),
        variable("way_out", format!("\"group {} may do it by hand\"", rbac::ADMINS_GROUP)),
    ]
}

/// An annotation keeps a cluster from being deleted by mistake.
fn deletion_protection() -> Policy {
    let protect = annotation::PROTECT;
    let spec = ValidatingAdmissionPolicySpec {
        failure_policy: Some("Fail".to_owned()),
        match_constraints: Some(matching(&["DELETE"], vec![Kind::Cluster.plural().to_owned()])),
        // Its pods are gone with the namespace anyway; refusing would leave the namespace half deleted for ever.
        match_conditions: Some(vec![is_not("namespace-controller", NAMESPACE_CONTROLLER)]),
        validations: Some(vec![refuse(
            &format!(
                "!has(oldObject.metadata.annotations) || !('{protect}' in oldObject.metadata.annotations) || \
                 oldObject.metadata.annotations['{protect}'] != 'true'"
            ),
            &format!(
                "'DeepInferCluster ' + request.name + ' is protected from deletion by its annotation {protect}: to \
                 delete it run first: kubectl annotate dic ' + request.name + ' -n ' + request.namespace + ' {protect}-'"
            ),
        )]),
        ..ValidatingAdmissionPolicySpec::default()
    };
    bound(policy::DELETION_PROTECTION, spec)
}

/// Deletes what a namespace holds when it goes.
const NAMESPACE_CONTROLLER: &str = "system:serviceaccount:kube-system:namespace-controller";

fn is_not(name: &str, user: &str) -> MatchCondition {
    MatchCondition {
        name: format!("not-the-{name}"),
        expression: format!("request.userInfo.username != '{user}'"),
    }
}

fn refuse(unless: &str, message: &str) -> Validation {
    Validation {
        expression: unless.to_owned(),
        message_expression: Some(message.to_owned()),
        reason: Some("Forbidden".to_owned()),
        ..Validation::default()
    }
}

fn matching(operations: &[&str], resources: Vec<String>) -> MatchResources {
    MatchResources {
        resource_rules: Some(vec![NamedRuleWithOperations {
            api_groups: Some(vec![names::GROUP.to_owned()]),
            api_versions: Some(vec![names::VERSION.to_owned()]),
            operations: Some(operations.iter().map(|o| (*o).to_owned()).collect()),
            resources: Some(resources),
            scope: Some("Namespaced".to_owned()),
            ..NamedRuleWithOperations::default()
        }]),
        // Another version of the kinds that is served one day is the same object.
        match_policy: Some("Equivalent".to_owned()),
        ..MatchResources::default()
    }
}

fn bound(name: &str, spec: ValidatingAdmissionPolicySpec) -> Policy {
    let labels = [
        (names::label::APP_NAME, names::label::APP_NAME_VALUE),
        (names::label::APP_MANAGED_BY, names::label::APP_MANAGED_BY_VALUE),
    ];
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        labels: Some(labels.map(|(k, v)| (k.to_owned(), v.to_owned())).into()),
        ..ObjectMeta::default()
    };
    let binding = ValidatingAdmissionPolicyBindingSpec {
        policy_name: name.to_owned(),
        validation_actions: vec!["Deny".to_owned()],
        ..ValidatingAdmissionPolicyBindingSpec::default()
    };
    Policy {
        policy: ValidatingAdmissionPolicy {
            metadata: metadata.clone(),
            spec: Some(spec),
            ..ValidatingAdmissionPolicy::default()
        },
        binding: ValidatingAdmissionPolicyBinding { metadata, spec: binding },
    }
}
