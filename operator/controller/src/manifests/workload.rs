//! What runs: the Deployment, and what stands around it.

use std::collections::BTreeMap;

use deepinfer_crds::Quantity;
use deepinfer_crds::names::port;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec};
use k8s_openapi::api::core::v1::{
    Affinity, Capabilities, Container, ContainerPort, EnvVar, EnvVarSource, HTTPGetAction, KeyToPath,
    ObjectFieldSelector, PodAffinityTerm, PodAntiAffinity, PodSecurityContext, PodSpec, PodTemplateSpec,
    Probe, ResourceRequirements, SeccompProfile, SecretVolumeSource, SecurityContext, Service, ServicePort,
    ServiceSpec, Volume, VolumeMount, WeightedPodAffinityTerm,
};
use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::ObjectMeta;

use super::{InstallOptions, NAME, document, labels};
use crate::args::MASTER_KEY_FILE;
use crate::keys::{MASTER_ITEM, MASTER_SECRET};

/// Any user but root.
const USER: i64 = 65532;
/// Metrics, probes, FleetView.
const PORTS: [(&str, u16); 3] = [("metrics", 8080), ("health", 8081), ("fleet", port::FLEET_VIEW)];
const REPLICAS: i32 = 2;

pub(super) fn objects(options: &InstallOptions) -> Vec<String> {
    vec![
        document(&service(options)),
        document(&deployment(options)),
        document(&budget(options)),
        document(&network_policy(options)),
    ]
}

fn selector() -> LabelSelector {
    LabelSelector { match_labels: Some(labels()), ..LabelSelector::default() }
}

/// Gateways and agents reach the FleetView of any ready replica by this name.
fn service(options: &InstallOptions) -> Service {
    let fleet = ServicePort {
        name: Some("fleet".to_owned()),
        port: i32::from(port::FLEET_VIEW),
        target_port: Some(IntOrString::String("fleet".to_owned())),
        ..ServicePort::default()
    };
    Service {
        metadata: options.meta(NAME),
        spec: Some(ServiceSpec {
            selector: Some(labels()),
            ports: Some(vec![fleet]),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    }
}

fn deployment(options: &InstallOptions) -> Deployment {
    Deployment {
        metadata: options.meta(NAME),
        spec: Some(DeploymentSpec {
            replicas: Some(REPLICAS),
            selector: selector(),
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta { labels: Some(labels()), ..ObjectMeta::default() }),
                spec: Some(pod(options)),
            },
            ..DeploymentSpec::default()
        }),
        ..Deployment::default()
    }
}

fn pod(options: &InstallOptions) -> PodSpec {
    PodSpec {
        service_account_name: Some(NAME.to_owned()),
        priority_class_name: Some("system-cluster-critical".to_owned()),
        // A leader that is told to go frees its Lease and ends its calls well within this.
        termination_grace_period_seconds: Some(30),
        affinity: Some(apart()),
        security_context: Some(PodSecurityContext {
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            run_as_group: Some(USER),
            fs_group: Some(USER),
            seccomp_profile: Some(SeccompProfile {
                type_: "RuntimeDefault".to_owned(),
                ..SeccompProfile::default()
            }),
            ..PodSecurityContext::default()
        }),
        containers: vec![container(options)],
        volumes: Some(vec![master_key()]),
        ..PodSpec::default()
    }
}

/// Replicas on different nodes where there are some.
fn apart() -> Affinity {
    let term = PodAffinityTerm {
        label_selector: Some(selector()),
        topology_key: "kubernetes.io/hostname".to_owned(),
        ..PodAffinityTerm::default()
    };
    Affinity {
        pod_anti_affinity: Some(PodAntiAffinity {
            preferred_during_scheduling_ignored_during_execution: Some(vec![WeightedPodAffinityTerm {
                weight: 100,
                pod_affinity_term: term,
            }]),
            ..PodAntiAffinity::default()
        }),
        ..Affinity::default()
    }
}

/// Optional: on the first start the operator makes the Secret itself, and the kubelet brings it later.
fn master_key() -> Volume {
    Volume {
        name: "master-key".to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(MASTER_SECRET.to_owned()),
            optional: Some(true),
            default_mode: Some(0o440),
            items: Some(vec![KeyToPath {
                key: MASTER_ITEM.to_owned(),
                path: MASTER_ITEM.to_owned(),
                mode: None,
            }]),
        }),
        ..Volume::default()
    }
}

fn container(options: &InstallOptions) -> Container {
    let mut args = vec!["run".to_owned(), format!("--gateway-image={}", options.gateway_image)];
    args.extend(options.watch_namespaces.iter().map(|namespace| format!("--watch-namespace={namespace}")));
    if !options.read_nodes {
        args.push("--read-nodes=false".to_owned());
    }
    let folder = MASTER_KEY_FILE.rsplit_once('/').map_or(MASTER_KEY_FILE, |(folder, _)| folder);
    Container {
        name: "operator".to_owned(),
        image: Some(options.image.clone()),
        args: Some(args),
        env: Some(vec![of_pod("POD_NAME", "metadata.name"), of_pod("POD_NAMESPACE", "metadata.namespace")]),
        ports: Some(
            PORTS
                .iter()
                .map(|(name, number)| ContainerPort {
                    name: Some((*name).to_owned()),
                    container_port: i32::from(*number),
                    ..ContainerPort::default()
                })
                .collect(),
        ),
        liveness_probe: Some(Probe { failure_threshold: Some(3), ..probe("/livez") }),
        readiness_probe: Some(probe("/readyz")),
        resources: Some(ResourceRequirements {
            requests: Some(quantities(&[("cpu", "200m"), ("memory", "256Mi")])),
            limits: Some(quantities(&[("memory", "1Gi")])),
            ..ResourceRequirements::default()
        }),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), add: None }),
            ..SecurityContext::default()
        }),
        volume_mounts: Some(vec![VolumeMount {
            name: "master-key".to_owned(),
            mount_path: folder.to_owned(),
            read_only: Some(true),
            ..VolumeMount::default()
        }]),
        ..Container::default()
    }
}

fn of_pod(name: &str, field: &str) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector { field_path: field.to_owned(), api_version: None }),
            ..EnvVarSource::default()
        }),
        ..EnvVar::default()
    }
}

fn probe(path: &str) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String("health".to_owned()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(10),
        timeout_seconds: Some(5),
        ..Probe::default()
    }
}

fn quantities(pairs: &[(&str, &str)]) -> BTreeMap<String, Quantity> {
    pairs.iter().map(|(name, amount)| ((*name).to_owned(), Quantity((*amount).to_owned()))).collect()
}

/// One replica may be evicted at a time: the other leads and serves the FleetView.
fn budget(options: &InstallOptions) -> PodDisruptionBudget {
    PodDisruptionBudget {
        metadata: options.meta(NAME),
        spec: Some(PodDisruptionBudgetSpec {
            max_unavailable: Some(IntOrString::Int(1)),
            selector: Some(selector()),
            unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
            ..PodDisruptionBudgetSpec::default()
        }),
        ..PodDisruptionBudget::default()
    }
}

/// Only our ports are open; calls to the API server and to agents go wherever those are.
fn network_policy(options: &InstallOptions) -> NetworkPolicy {
    let ports = PORTS.iter().map(|(_, number)| NetworkPolicyPort {
        port: Some(IntOrString::Int(i32::from(*number))),
        protocol: Some("TCP".to_owned()),
        ..NetworkPolicyPort::default()
    });
    NetworkPolicy {
        metadata: options.meta(NAME),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(selector()),
            policy_types: Some(vec!["Ingress".to_owned()]),
            ingress: Some(vec![NetworkPolicyIngressRule {
                ports: Some(ports.collect()),
                ..NetworkPolicyIngressRule::default()
            }]),
            ..NetworkPolicySpec::default()
        }),
    }
}
