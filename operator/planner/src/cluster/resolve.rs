//! A spec becomes a resolved cluster: every value decided, each with where it came from.

use std::fmt::Display;

use deepinfer_crds::DeepInferCluster;
use deepinfer_crds::cluster::{
    ComputeDomainMode, RecoveryMode, SchedulingBackend, SpreadPolicy, Thinking, Vendor,
};
use deepinfer_crds::condition::reason;
use deepinfer_crds::source::SourceUri;

use super::defaults::{Default, Defaults};
use super::supported;
use crate::report::{Explained, Origin, Problem, Report};
use crate::target::Target;
use crate::topology::Profile;

/// A cluster with every value decided.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Resolved {
    pub name: String,
    pub vendor: Vendor,
    pub resource: Option<String>,
    pub model: Model,
    pub image: String,
    pub engine_args: Vec<String>,
    pub prefill: Prefill,
    pub decode: Decode,
    pub gateway: Gateway,
    pub min_prefill: u32,
    pub min_decode: u32,
    pub degraded_after: i64,
    pub suspended: bool,
    /// How gangs get their nodes; `None` on one machine.
    pub placing: Option<Placing>,
    /// Revisions that are kept beside those in use.
    pub revision_history: u32,
}

/// How gangs get their nodes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Placing {
    pub backend: Option<SchedulingBackend>,
    pub queue: Option<String>,
    pub priority_class: Option<String>,
    /// Seconds from the first bound pod until all must be.
    pub gang_timeout: i64,
    /// Seconds without a place after which a person must look.
    pub unplaceable_after: i64,
    pub profile_name: String,
    pub profile: Profile,
    pub compute_domain: Option<ComputeDomainMode>,
    /// Most ComputeDomains of one NVLink domain; 0 = no limit.
    pub per_clique: u32,
    /// Two supernodes of the pool never share a domain.
    pub spread_required: bool,
    /// Base URLs of the FleetView, as pods reach them.
    pub fleet_urls: String,
}

/// What is served.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Model {
    pub name: String,
    pub aliases: Vec<String>,
    /// Folder inside the engine's container.
    pub path: String,
    pub source: Source,
    /// Digest that the checkpoint must have, from `source.revision`.
    pub digest: Option<String>,
}

/// Where the folder comes from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Source {
    /// A folder of the node, mounted at the same path.
    Host(String),
    /// A folder of a claim.
    Claim(String),
}

/// The prefill pool.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prefill {
    pub chunk_budget_ms: u32,
    pub args: Vec<String>,
    /// Shape and life of a worker; one pod is a Deployment's, more are a gang.
    pub life: Life,
}

/// The decode pool.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Decode {
    pub extra_slots: u32,
    /// Shape and life of a supernode.
    pub life: Life,
}

/// Shape and life of the members of a pool.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Life {
    pub replicas: u32,
    /// Pods of a member.
    pub nodes: u32,
    /// Ranks of a pod.
    pub ranks_per_node: u32,
    /// Accelerators that a pod asks for.
    pub accelerators: u32,
    pub startup_deadline: i64,
    pub min_ready: i64,
    pub drain_seconds: u32,
    pub max_surge: u32,
    pub max_unavailable: u32,
    pub surge_timeout: i64,
    pub recovery: RecoveryMode,
    pub max_restarts: u32,
    pub backoff: i64,
    pub max_backoff: i64,
    pub reset_after: i64,
    pub node_lost_grace: i64,
    pub terminating_timeout: i64,
}

/// The gateways.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Gateway {
    pub replicas: u32,
    pub image: String,
    pub default_thinking: bool,
    pub listen: String,
    pub tls_secret: Option<String>,
    pub api_keys_secret: Option<String>,
}

/// Resolves a cluster. `None` with [`Report::refused`] filled if the spec cannot be followed.
pub(crate) fn resolve(cluster: &DeepInferCluster, target: &Target, report: &mut Report) -> Option<Resolved> {
    let spec = &cluster.spec;
    let (refused, ignored) = supported::check(spec, target);
    report.refused.extend(refused);
    report.ignored.extend(ignored);
    let d = target.defaults();
    let mut resolver = Resolver { report, target, d: d.clone() };
    let suspended = spec.operation.as_ref().and_then(|o| o.suspend).unwrap_or(false);
    let placing = match target {
        Target::Kubernetes(_) => Some(resolver.placing(cluster)?),
        Target::Local(_) => None,
    };
    let resolved = Resolved {
        name: cluster.metadata.name.clone().unwrap_or_default(),
        vendor: spec.accelerator.vendor,
        resource: resolver.resource(cluster),
        model: resolver.model(cluster)?,
        image: spec.engine.image.clone(),
        engine_args: spec.engine.extra_args.clone(),
        prefill: resolver.prefill(cluster, suspended),
        decode: resolver.decode(cluster, suspended),
        gateway: resolver.gateway(cluster, suspended),
        min_prefill: resolver.availability(cluster, "minPrefill", d.min_prefill, |a| a.min_prefill),
        min_decode: resolver.availability(cluster, "minDecode", d.min_decode, |a| a.min_decode),
        degraded_after: i64::from(resolver.availability(
            cluster,
            "degradedAfterSeconds",
            d.degraded_after,
            |a| a.degraded_after_seconds,
        )),
        suspended,
        placing,
        revision_history: resolver.pick(
            "spec.revisionHistoryLimit",
            spec.revision_history_limit,
            d.revision_history,
        ),
    };
    report.refused.is_empty().then_some(resolved)
}

struct Resolver<'a> {
    report: &'a mut Report,
    target: &'a Target,
    d: Defaults,
}

impl Resolver<'_> {
    /// A value of the spec, or its default.
    fn pick<T: Copy + Display>(&mut self, path: &str, given: Option<T>, default: Default<T>) -> T {
        let value = given.unwrap_or(default.value);
        let origin = if given.is_some() { Origin::Spec } else { Origin::Default(default.why) };
        self.explain(path, &value, origin);
        value
    }

    fn explain(&mut self, path: &str, value: &impl Display, origin: Origin) {
        if !self.report.explained.iter().any(|known| known.path == path) {
            self.report.explained.push(Explained { path: path.to_owned(), value: value.to_string(), origin });
        }
    }

    /// A count that the machine may not be able to give.
    fn cap(&mut self, path: &str, asked: u32, limit: u32, why: &str) -> u32 {
        if asked <= limit {
            return asked;
        }
        let origin = Origin::ScaledDown { asked: asked.to_string(), why: why.to_owned() };
        let scaled = Explained { path: path.to_owned(), value: limit.to_string(), origin };
        self.report.explained.retain(|e| e.path != path);
        self.report.explained.push(scaled.clone());
        self.report.scaled_down.push(scaled);
        limit
    }

    fn resource(&mut self, cluster: &DeepInferCluster) -> Option<String> {
        let accelerator = &cluster.spec.accelerator;
        if self.target.local().is_some() {
            if accelerator.vendor != Vendor::Cpu {
                let asked = format!("{:?}", accelerator.vendor).to_lowercase();
                let why = "one machine runs on its CPU".to_owned();
                let origin = Origin::ScaledDown { asked, why };
                let path = "spec.accelerator.vendor".to_owned();
                let scaled = Explained { path, value: "cpu".to_owned(), origin };
                self.report.explained.push(scaled.clone());
                self.report.scaled_down.push(scaled);
            }
            return None;
        }
        let default = match accelerator.vendor {
            Vendor::Nvidia => "nvidia.com/gpu",
            Vendor::Ascend => "huawei.com/npu",
            Vendor::Cpu => return None,
        };
        let origin = if accelerator.resource_name.is_some() {
            Origin::Spec
        } else {
            Origin::Derived("spec.accelerator.vendor".to_owned())
        };
        let name = accelerator.resource_name.clone().unwrap_or_else(|| default.to_owned());
        self.explain("spec.accelerator.resourceName", &name, origin);
        Some(name)
    }

    fn model(&mut self, cluster: &DeepInferCluster) -> Option<Model> {
        let model = &cluster.spec.model;
        let (path, source) = match SourceUri::parse(&model.source.uri).ok()? {
            SourceUri::File(path) => {
                let path = path.to_string_lossy().into_owned();
                (path.clone(), Source::Host(path))
            }
            SourceUri::Claim { claim, path } => {
                (format!("/models/{path}").trim_end_matches('/').to_owned(), Source::Claim(claim))
            }
            SourceUri::Oci(_) | SourceUri::HuggingFace(_) | SourceUri::S3(_) => return None,
        };
        let path = self.target.local().map_or(path, |local| local.model_path.clone());
        self.explain("spec.model.name", &model.name, Origin::Spec);
        self.explain("spec.model.source.uri", &model.source.uri, Origin::Spec);
        let digest = model.source.revision.clone();
        Some(Model { name: model.name.clone(), aliases: model.aliases.clone(), path, source, digest })
    }

    /// `None` if the profile is not known; the report says so.
    fn placing(&mut self, cluster: &DeepInferCluster) -> Option<Placing> {
        let target = self.target.kubernetes()?;
        let spec = &cluster.spec;
        let per_node = self.per_node(cluster);
        let scheduling = spec.scheduling.clone().unwrap_or_default();
        let path = "spec.accelerator.topologyProfile";
        let profile_name = match &spec.accelerator.topology_profile {
            Some(name) => {
                self.explain(path, name, Origin::Spec);
                name.clone()
            }
            None => {
                let name = Profile::default_name(spec.accelerator.vendor, per_node);
                let from = "spec.accelerator.vendor and acceleratorsPerNode".to_owned();
                self.explain(path, &name, Origin::Derived(from));
                name.to_owned()
            }
        };
        let Some(profile) = target.profiles.get(&profile_name) else {
            let known: Vec<&str> = target.profiles.keys().map(String::as_str).collect();
            let message =
                format!("there is no profile {profile_name:?}: the operator knows {}", known.join(", "));
            self.report.refused.push(Problem {
                path: path.to_owned(),
                reason: reason::INVALID_SPEC,
                message,
            });
            return None;
        };
        let (gang, unplaceable) = (self.d.gang_timeout, self.d.unplaceable_after);
        let spread = spec.decode.spread.as_ref().and_then(|spread| spread.policy);
        Some(Placing {
            backend: scheduling.backend,
            queue: scheduling.queue,
            priority_class: scheduling.priority_class_name,
            gang_timeout: i64::from(self.pick(
                "spec.scheduling.gangTimeoutSeconds",
                scheduling.gang_timeout_seconds,
                gang,
            )),
            unplaceable_after: i64::from(self.pick(
                "spec.scheduling.unplaceableAfterSeconds",
                scheduling.unplaceable_after_seconds,
                unplaceable,
            )),
            profile_name,
            profile: profile.clone(),
            compute_domain: spec.accelerator.compute_domain,
            per_clique: target.compute_domains_per_clique,
            spread_required: spread == Some(SpreadPolicy::Require),
            fleet_urls: target.fleet_urls.clone(),
        })
    }

    fn per_node(&mut self, cluster: &DeepInferCluster) -> u32 {
        let cpu = cluster.spec.accelerator.vendor == Vendor::Cpu;
        let default = if cpu { self.d.cpu_per_node } else { self.d.accelerators_per_node };
        let given = cluster.spec.accelerator.accelerators_per_node;
        self.pick("spec.accelerator.acceleratorsPerNode", given, default)
    }

    fn prefill(&mut self, cluster: &DeepInferCluster, suspended: bool) -> Prefill {
        let spec = &cluster.spec.prefill;
        let mut replicas = self.pick("spec.prefill.replicas", spec.replicas, self.d.replicas);
        let nodes = self.pick("spec.prefill.nodesPerWorker", spec.nodes_per_worker, self.d.nodes_per_worker);
        let accelerators = self.per_node(cluster);
        if let Some(local) = self.target.local() {
            let limit = local.max_prefill;
            replicas =
                self.cap("spec.prefill.replicas", replicas, limit, "workers share the cores of one machine");
            self.cap("spec.prefill.nodesPerWorker", nodes, 1, "a worker is one engine with one rank");
        }
        let cpu = self.target.local().is_some() || cluster.spec.accelerator.vendor == Vendor::Cpu;
        let budget = if cpu { self.d.cpu_chunk_budget_ms } else { self.d.chunk_budget_ms };
        let drain = spec.drain.as_ref().and_then(|drain| drain.timeout_seconds);
        let nodes = if self.target.local().is_some() { 1 } else { nodes };
        let d = self.d.clone();
        Prefill {
            chunk_budget_ms: self.pick("spec.prefill.chunkBudgetMs", spec.chunk_budget_ms, budget),
            args: spec.overrides.as_ref().map(|o| o.engine_args.clone()).unwrap_or_default(),
            life: Life {
                replicas: if suspended { 0 } else { replicas },
                nodes,
                ranks_per_node: 1,
                accelerators,
                startup_deadline: i64::from(d.startup_deadline.value),
                min_ready: 0,
                drain_seconds: self.pick("spec.prefill.drain.timeoutSeconds", drain, d.drain_timeout),
                max_surge: d.max_surge.value,
                max_unavailable: d.max_unavailable.value,
                surge_timeout: i64::from(d.surge_timeout.value),
                recovery: RecoveryMode::Auto,
                max_restarts: d.max_restarts.value,
                backoff: i64::from(d.backoff.value),
                max_backoff: i64::from(d.max_backoff.value),
                reset_after: i64::from(d.reset_after.value),
                node_lost_grace: i64::from(d.node_lost_grace.value),
                terminating_timeout: i64::from(d.terminating_timeout.value),
            },
        }
    }

    fn decode(&mut self, cluster: &DeepInferCluster, suspended: bool) -> Decode {
        let spec = &cluster.spec.decode;
        let shape = &spec.supernode;
        let mut replicas = self.pick("spec.decode.replicas", spec.replicas, self.d.replicas);
        let per_node = shape.accelerators_per_node.unwrap_or_else(|| self.per_node(cluster));
        let (mut nodes, mut ranks_per_node) = (shape.nodes, per_node);
        self.explain("spec.decode.supernode.nodes", &nodes, Origin::Spec);
        if let Some(local) = self.target.local() {
            let (limit, max_ranks) = (local.max_supernodes, local.max_ranks);
            replicas = self.cap(
                "spec.decode.replicas",
                replicas,
                limit,
                "supernodes share the cores of one machine",
            );
            ranks_per_node = match local.ranks {
                Some(ranks) => {
                    self.explain("ranks of a supernode", &ranks, Origin::Derived("--ranks".to_owned()));
                    ranks
                }
                None => {
                    let asked = nodes * per_node;
                    self.explain(
                        "ranks of a supernode",
                        &asked,
                        Origin::Derived("nodes x acceleratorsPerNode".to_owned()),
                    );
                    self.cap(
                        "ranks of a supernode",
                        asked,
                        max_ranks,
                        "ranks take turns on the cores of one machine",
                    )
                }
            };
            nodes = 1;
        }
        let ranks = nodes * ranks_per_node;
        let rollout = spec.rollout.clone().unwrap_or_default();
        let recovery = spec.recovery.clone().unwrap_or_default();
        let drain = spec.drain.as_ref().and_then(|drain| drain.timeout_seconds);
        let slots = spec.experts.as_ref().and_then(|experts| experts.extra_slots_per_rank);
        let extra_slots = self.pick("spec.decode.experts.extraSlotsPerRank", slots, self.d.extra_slots);
        let min_ready = if self.target.local().is_some() { self.d.local_min_ready } else { self.d.min_ready };
        let at = |field: &str| format!("spec.decode.{field}");
        let extra_slots = if ranks > 1 { extra_slots } else { 0 };
        let life = Life {
            replicas: if suspended { 0 } else { replicas },
            nodes,
            ranks_per_node,
            accelerators: per_node,
            surge_timeout: i64::from(self.pick(
                &at("rollout.surgeTimeoutSeconds"),
                rollout.surge_timeout_seconds,
                self.d.surge_timeout,
            )),
            recovery: recovery.mode.unwrap_or(RecoveryMode::Auto),
            node_lost_grace: i64::from(self.pick(
                &at("recovery.nodeLostGraceSeconds"),
                recovery.node_lost_grace_seconds,
                self.d.node_lost_grace,
            )),
            terminating_timeout: i64::from(self.pick(
                &at("recovery.terminatingTimeoutSeconds"),
                recovery.terminating_timeout_seconds,
                self.d.terminating_timeout,
            )),
            startup_deadline: i64::from(self.pick(
                &at("supernode.startupDeadlineSeconds"),
                shape.startup_deadline_seconds,
                self.d.startup_deadline,
            )),
            min_ready: i64::from(self.pick(
                &at("supernode.minReadySeconds"),
                shape.min_ready_seconds,
                min_ready,
            )),
            drain_seconds: self.pick(&at("drain.timeoutSeconds"), drain, self.d.drain_timeout),
            max_surge: self.pick(&at("rollout.maxSurge"), rollout.max_surge, self.d.max_surge),
            max_unavailable: self.pick(
                &at("rollout.maxUnavailable"),
                rollout.max_unavailable,
                self.d.max_unavailable,
            ),
            max_restarts: self.pick(&at("recovery.maxRestarts"), recovery.max_restarts, self.d.max_restarts),
            backoff: i64::from(self.pick(
                &at("recovery.backoffSeconds"),
                recovery.backoff_seconds,
                self.d.backoff,
            )),
            max_backoff: i64::from(self.pick(
                &at("recovery.maxBackoffSeconds"),
                recovery.max_backoff_seconds,
                self.d.max_backoff,
            )),
            reset_after: i64::from(self.pick(
                &at("recovery.resetAfterSeconds"),
                recovery.reset_after_seconds,
                self.d.reset_after,
            )),
        };
        Decode { extra_slots, life }
    }

    fn gateway(&mut self, cluster: &DeepInferCluster, suspended: bool) -> Gateway {
        let spec = cluster.spec.gateway.clone().unwrap_or_default();
        let local = self.target.local().is_some();
        let default = if local { self.d.local_gateway_replicas } else { self.d.gateway_replicas };
        let mut replicas = self.pick("spec.gateway.replicas", spec.replicas, default);
        if local {
            replicas = self.cap("spec.gateway.replicas", replicas, 1, self.d.local_gateway_replicas.why);
        }
        let thinking = spec.default_thinking.map(|thinking| thinking == Thinking::On);
        let (image, listen) = match self.target {
            Target::Kubernetes(target) => {
                (spec.image.unwrap_or_else(|| target.gateway_image.clone()), "0.0.0.0:8000".to_owned())
            }
            Target::Local(local) => ("this binary".to_owned(), local.listen.clone()),
        };
        Gateway {
            replicas: if suspended { 0 } else { replicas },
            image,
            default_thinking: self.pick("spec.gateway.defaultThinking", thinking, self.d.thinking),
            listen,
            tls_secret: spec.tls_secret_name.filter(|_| !local),
            api_keys_secret: spec.api_keys_secret_name.filter(|_| !local),
        }
    }

    fn availability(
        &mut self,
        cluster: &DeepInferCluster,
        field: &str,
        default: Default<u32>,
        get: impl Fn(&deepinfer_crds::cluster::Availability) -> Option<u32>,
    ) -> u32 {
        let given = cluster.spec.availability.as_ref().and_then(get);
        self.pick(&format!("spec.availability.{field}"), given, default)
    }
}
