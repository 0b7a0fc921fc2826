//! Nodes of a story: what users and machines do to them, and what the planner sees of them.

use std::collections::{BTreeMap, BTreeSet};

use deepinfer_crds::names::label;
use k8s_openapi::api::core::v1::{Pod, Taint};

use crate::emulate::has_ended;
use crate::nodes::{Labels, Namespaced, NodeFacts, Nodes, Promise};
use crate::object::Kind;
use crate::supernode::fabric::CLAIM;
use crate::supernode::phase::is_gated;
use crate::supernode::place::DOMAIN;
use crate::topology::COMPUTE_DOMAIN_LABEL;
use crate::world::World;

/// The label that names the domain of a story's nodes.
pub(super) const CLIQUE: &str = "nvidia.com/gpu.clique";

/// The machines of a story.
#[derive(Default)]
pub(super) struct Machines {
    /// By name; `used` is what pods of nobody we know hold.
    pub by_name: BTreeMap<String, NodeFacts>,
    /// The operator may not read nodes.
    pub blind: bool,
}

impl Machines {
    /// `nodes COUNT domain NAME RESOURCE AMOUNT`: racks them; domain `-` is none.
    pub fn add(&mut self, words: &[&str], now: i64) -> Result<(), String> {
        let usage = "nodes COUNT domain NAME RESOURCE AMOUNT";
        let &[count, "domain", domain, resource, amount] = words else { return Err(usage.to_owned()) };
        let count: usize = count.parse().map_err(|_| usage)?;
        let amount: i64 = amount.parse().map_err(|_| usage)?;
        for at in 0..count {
            let name = format!("{}-{at:02}", if domain == "-" { "node" } else { domain });
            let mut labels: Labels = [("kubernetes.io/hostname", name.as_str())].into_iter().collect();
            if domain != "-" {
                labels.insert(CLIQUE, domain);
            }
            let facts = NodeFacts {
                name: name.clone(),
                labels,
                ready: true,
                ready_since: now,
                allocatable: [(resource.to_owned(), amount)].into(),
                ..NodeFacts::default()
            };
            self.by_name.insert(name, facts);
        }
        Ok(())
    }

    /// `node PART WHAT ...`: something happens to the nodes whose name has PART.
    pub fn happen(&mut self, words: &[&str], now: i64) -> Result<(), String> {
        let [part, what @ ..] = words else { return Err("node PART WHAT".to_owned()) };
        let names: Vec<String> = self.by_name.keys().filter(|name| name.contains(part)).cloned().collect();
        if names.is_empty() {
            return Err(format!("no node has {part:?} in its name"));
        }
        for name in names {
            if what == ["gone"] {
                self.by_name.remove(&name);
                continue;
            }
            let node = self.by_name.get_mut(&name).expect("its name was read above");
            match what {
                ["ready" | "notready"] => (node.ready, node.ready_since) = (what == ["ready"], now),
                ["cordon" | "uncordon"] => node.unschedulable = what == ["cordon"],
                ["taint", key] => node.taints.push(Taint {
                    key: (*key).to_owned(),
                    effect: "NoSchedule".to_owned(),
                    ..Taint::default()
                }),
                ["untaint", key] => node.taints.retain(|taint| taint.key != *key),
                ["label", pair] => {
                    let (key, value) = pair.split_once('=').ok_or("node PART label KEY=VALUE")?;
                    node.labels.insert(key, value);
                }
                ["unlabel", key] => node.labels.remove(key),
                ["used", resource, amount] => {
                    let amount = amount.parse().map_err(|_| "node PART used RESOURCE AMOUNT")?;
                    node.used.insert((*resource).to_owned(), amount);
                }
                _ => {
                    let all = "ready, notready, cordon, uncordon, gone, taint KEY, untaint KEY, label KEY=VALUE, \
                               unlabel KEY, used RESOURCE AMOUNT";
                    return Err(format!("what happens to a node: {all}"));
                }
            }
        }
        Ok(())
    }

    /// The label of a ComputeDomain on the nodes where pods of its supernode are bound.
    pub fn mark(&mut self, world: &World, supernode: &str, uid: &str) {
        let of_it = |pod: &&Pod| {
            let labels = pod.metadata.labels.as_ref();
            labels.and_then(|labels| labels.get(label::SUPERNODE)).is_some_and(|name| name == supernode)
        };
        for node in world.pods().filter(of_it).filter_map(node_of) {
            if let Some(node) = self.by_name.get_mut(node) {
                node.labels.insert(COMPUTE_DOMAIN_LABEL, uid);
            }
        }
    }

    /// Takes it away.
    pub fn unmark(&mut self, uid: &str) {
        for node in self.by_name.values_mut() {
            if node.labels.get(COMPUTE_DOMAIN_LABEL) == Some(uid) {
                node.labels.remove(COMPUTE_DOMAIN_LABEL);
            }
        }
    }

    /// The story has nodes.
    pub fn any(&self) -> bool {
        !self.by_name.is_empty()
    }

    /// A kubelet runs the pod.
    pub fn runs(&self, pod: &Pod) -> bool {
        node_of(pod).and_then(|node| self.by_name.get(node)).is_some_and(|node| node.ready)
    }

    /// Its kubelet does not answer: it cannot end.
    pub fn is_stuck(&self, pod: &Pod) -> bool {
        node_of(pod).and_then(|node| self.by_name.get(node)).is_some_and(|node| !node.ready)
    }

    /// What must hold whatever happens: no node gives more than it has, no supernode spans domains, and no domain has two
    /// ComputeDomains.
    pub fn verify(&self, world: &World) -> Result<(), String> {
        let nodes = self.observe(world);
        let mut domains: BTreeMap<&Namespaced, BTreeSet<&str>> = BTreeMap::new();
        let mut fabrics: BTreeMap<&str, BTreeSet<&Namespaced>> = BTreeMap::new();
        for (name, node) in &nodes.by_name {
            let others = &self.by_name[&**name].used;
            for (resource, used) in &node.used {
                let pods = used - others.get(resource).copied().unwrap_or(0);
                let offered = node.allocatable.get(resource).copied().unwrap_or(0);
                if pods > offered {
                    return Err(format!("pods on {name} hold {pods} {resource} of {offered}"));
                }
            }
            let Some(domain) = node.labels.get(CLIQUE) else { continue };
            for who in node.occupants.keys() {
                domains.entry(who).or_default().insert(domain);
                if nodes.fabrics.contains(who) {
                    fabrics.entry(domain).or_default().insert(who);
                }
            }
        }
        if let Some((who, domains)) = domains.into_iter().find(|(_, domains)| domains.len() > 1) {
            return Err(format!("{} spans {domains:?}", who.1));
        }
        match fabrics.into_iter().find(|(_, fabrics)| fabrics.len() > 1) {
            Some((domain, fabrics)) => Err(format!("{domain} has several ComputeDomains: {fabrics:?}")),
            None => Ok(()),
        }
    }

    /// What a driver would have counted now. A story without nodes is one whose operator may not read them.
    pub fn observe(&self, world: &World) -> Nodes {
        let unreadable = self.blind || !self.any();
        let mut nodes = Nodes { unreadable, ..Nodes::default() };
        for node in self.by_name.values() {
            nodes.insert(node.clone());
        }
        for pod in world.pods().filter(|pod| !has_ended(pod)) {
            let labels = pod.metadata.labels.as_ref();
            let supernode = labels.and_then(|labels| labels.get(label::SUPERNODE));
            let who = supernode.map(|supernode| (world.namespace.clone(), supernode.clone()));
            let bound = node_of(pod);
            match (bound.and_then(|node| nodes.node_mut(node)), who) {
                (Some(node), who) => {
                    for (resource, amount) in asks(pod) {
                        *node.used.entry(resource).or_default() += amount;
                    }
                    if let Some(who) = who {
                        *node.occupants.entry(who).or_default() += 1;
                    }
                }
                (None, Some(who)) if bound.is_none() && pod.metadata.deletion_timestamp.is_none() => {
                    let promise = nodes.promised.entry(who).or_insert_with(|| Promise {
                        domain: domain(pod).unwrap_or_default(),
                        pods: 0,
                        lifted: 0,
                        resource: asks(pod).into_iter().next(),
                    });
                    promise.pods += 1;
                    promise.lifted += u32::from(!is_gated(pod));
                }
                (None, _) => {}
            }
        }
        // A domain ends with its last pod, not with its object.
        let fabrics = world.of(Kind::ComputeDomain).map(|object| object.name().to_owned());
        let claims = world.pods().filter(|pod| claims_channel(pod) && !has_ended(pod));
        let claiming = claims.filter_map(|pod| pod.metadata.labels.as_ref()?.get(label::SUPERNODE).cloned());
        nodes.fabrics = fabrics.chain(claiming).map(|name| (world.namespace.clone(), name)).collect();
        nodes
    }
}

/// The pod is in a ComputeDomain.
fn claims_channel(pod: &Pod) -> bool {
    let claims = pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_ref());
    claims.is_some_and(|claims| claims.iter().any(|claim| claim.name == CLAIM))
}

fn node_of(pod: &Pod) -> Option<&String> {
    pod.spec.as_ref()?.node_name.as_ref()
}

/// Accelerators of a pod: resources whose name has a domain.
pub(super) fn asks(pod: &Pod) -> BTreeMap<String, i64> {
    let mut asks = BTreeMap::new();
    let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
    for container in containers {
        let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
        for (resource, quantity) in limits.into_iter().flatten().filter(|(name, _)| name.contains('/')) {
            let amount: i64 = quantity.0.parse().unwrap_or(0);
            *asks.entry(resource.clone()).or_default() += amount;
        }
    }
    asks
}

/// The domain that a pod's gang was given.
fn domain(pod: &Pod) -> Option<String> {
    let (_, domain) = pod.metadata.annotations.as_ref()?.get(DOMAIN)?.split_once('=')?;
    Some(domain.to_owned())
}
