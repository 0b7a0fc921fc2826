//! The world of one cluster, put together from what is known: no call to the API server but for the one kind that may
//! be read and not watched.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use deepinfer_crds::names::{label, port};
use deepinfer_planner::{Blueprint, Key, Kind, Namespaced, Object, World, has_ended, is_ready};
use deepinfer_protocol::AgentId;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use tokio::sync::watch;

use crate::agents::{AgentAddress, Agents, Cadence};
use crate::cache::Caches;
use crate::commit;
use crate::error::Error;
use crate::keys::ClusterRef;
use crate::probe::Probed;
use crate::rest::{Resource, Rest};

mod lessons;

use self::lessons::DOUBT_AGAIN;
pub use self::lessons::Lessons;

/// Clusters older than this have outlived the garbage of any predecessor.
const YOUNG_SECONDS: i64 = 600;
/// A pod that has a node and no container after this may lack something that it mounts.
const HELD_UP_SECONDS: i64 = 60;

/// A cluster as a plan sees it, and what committing and executing need beside it.
pub struct Gathered {
    /// What is planned for.
    pub world: World,
    /// Namespace, name and UID.
    pub cluster: ClusterRef,
    /// The cluster as a controller of children.
    pub owner: OwnerReference,
    /// The ConfigMap that the world's blueprint came from.
    pub blueprint: Option<ConfigMap>,
    /// Each agent was asked once, so silence means something.
    pub settled: bool,
    /// A pod may turn out to be held up by then, though nothing happens: look again.
    pub look_within: Option<Duration>,
}

/// Everything that a world is made of.
pub struct Gatherer {
    /// Objects.
    pub caches: Arc<Caches>,
    /// Words of agents.
    pub agents: Arc<Agents>,
    /// What the API server offers.
    pub probed: watch::Receiver<Probed>,
    /// Refusals.
    pub lessons: Arc<Lessons>,
    /// For service accounts.
    pub rest: Rest,
    /// How often a service account is read again.
    pub resync: Duration,
}

impl Gatherer {
    /// The world of a cluster; `None` if there is no such cluster. `fresh`: with the very last state of the nodes.
    ///
    /// # Errors
    /// If something of it cannot be read.
    pub async fn gather(&self, key: &Namespaced, fresh: bool) -> Result<Option<Gathered>, Error> {
        let Some(cluster) = self.caches.get(Kind::Cluster, &key.0, &key.1) else {
            return match self.caches.family(key, false).unreadable.into_iter().next() {
                Some((name, why)) => Err(unreadable(Kind::Cluster, &name, &why)),
                None => Ok(None),
            };
        };
        self.read_account(key).await?;
        let created = cluster.meta().creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
        if now() - created < YOUNG_SECONDS && self.lessons.secret_in_doubt(key) {
            self.caches.unremember_secrets(key);
        }
        let mut family = self.caches.family(key, fresh);
        let held = family.objects.iter().filter_map(|object| held_up_in(object, now())).min();
        if held == Some(Duration::ZERO) && self.lessons.doubt_secret(key) {
            self.caches.forget_secrets(key);
            family = self.caches.family(key, fresh);
        }
        if let Some((name, why)) = family.unreadable.first() {
            return Err(unreadable(Kind::Supernode, name, why));
        }
        let uid = cluster.meta().uid.clone().unwrap_or_default();
        let reference = ClusterRef { namespace: key.0.clone(), name: key.1.clone(), uid };
        let mut world = World::new(&key.0, seed(&reference.uid));
        world.objects = family.objects.iter().map(|object| (object.key(), (**object).clone())).collect();
        world.nodes = family.nodes;
        world.now = now();
        world.refusals = self.lessons.refusals(key);
        world.namespace_terminating = self.lessons.is_terminating(&key.0);
        {
            let probed = self.probed.borrow();
            world.apis = probed.apis.clone();
            world.skew.clone_from(&probed.skew);
        }
        let map = match self.caches.get(Kind::ConfigMap, &key.0, &commit::name(&key.1)).as_deref() {
            Some(Object::ConfigMap(map)) => Some(map.clone()),
            _ => None,
        };
        // A foreign ConfigMap of the name is no memory; committing says so.
        let ours = map.as_ref().filter(|map| controlled_by(map, &reference.uid));
        world.blueprint = ours.and_then(commit::read);
        self.agents.follow(&reference, addresses(&world));
        world.agents = self.agents.words(&reference);
        let settled = self.agents.settled(&reference);
        Ok(Some(Gathered {
            world,
            cluster: reference,
            owner: cluster.owner_reference(),
            blueprint: map,
            settled,
            look_within: held.map(|within| if within.is_zero() { DOUBT_AGAIN } else { within }),
        }))
    }

    /// Service accounts may be read one by one and not watched: the cluster's is read when it is not known, and now and
    /// then.
    async fn read_account(&self, cluster: &Namespaced) -> Result<(), Error> {
        if !self.lessons.account_due(cluster, self.resync) {
            return Ok(());
        }
        let resource = Resource::of(Kind::ServiceAccount).expect("a core kind");
        let key = Key::new(Kind::ServiceAccount, format!("{}-engine", cluster.1));
        let known = self.caches.get(Kind::ServiceAccount, &cluster.0, &key.name);
        match self.rest.get(&resource, &cluster.0, &key).await {
            Ok(value) => {
                let object = Object::from_value(Kind::ServiceAccount, value).map_err(|error| {
                    Error::Shape { verb: "get", what: key.to_string(), message: error.to_string() }
                })?;
                if let Some(known) = known.filter(|known| known.meta().uid != object.meta().uid) {
                    self.lost(cluster, &known);
                }
                self.caches.wrote(&cluster.0, object);
                Ok(())
            }
            Err(error) if error.is_missing() => {
                if let Some(known) = known {
                    self.lost(cluster, &known);
                }
                Ok(())
            }
            Err(error) => {
                self.lessons.account_missed(cluster);
                Err(error)
            }
        }
    }

    fn lost(&self, cluster: &Namespaced, object: &Object) {
        let key = (cluster.0.clone(), object.name().to_owned());
        self.caches.lost(object.kind(), &key, object.meta().uid.as_deref().unwrap_or_default());
    }
}

fn unreadable(kind: Kind, name: &str, why: &str) -> Error {
    Error::Unreadable { what: Key::new(kind, name).to_string(), message: why.to_owned() }
}

/// When a pod that was bound and whose kubelet has not started its containers counts as held up: zero if it does.
fn held_up_in(object: &Object, now: i64) -> Option<Duration> {
    let Object::Pod(pod) = object else { return None };
    let status = pod.status.as_ref()?;
    let bound = status.conditions.iter().flatten().find(|c| c.type_ == "PodScheduled" && c.status == "True");
    let since = bound?.last_transition_time.as_ref()?.0.as_second();
    let mut containers = status.container_statuses.iter().flatten();
    let started = containers.any(|c| c.state.as_ref().is_none_or(|s| s.waiting.is_none()));
    if started || status.phase.as_deref() != Some("Pending") {
        return None;
    }
    let left = since + HELD_UP_SECONDS + 1 - now;
    Some(Duration::from_secs(u64::try_from(left).unwrap_or(0)))
}

fn controlled_by(map: &ConfigMap, uid: &str) -> bool {
    let owners = map.metadata.owner_references.as_deref().unwrap_or_default();
    owners.iter().any(|owner| owner.controller == Some(true) && owner.uid == uid)
}

/// Where the agents of a world's pods are, and how often each is asked.
fn addresses(world: &World) -> Vec<AgentAddress> {
    let leaders = leaders(world.blueprint.as_ref());
    let mut addresses = Vec::new();
    for object in world.of(Kind::Pod) {
        let Object::Pod(pod) = object else { continue };
        let engine = matches!(object.label(label::ROLE), Some("prefill" | "decode"));
        if !engine || has_ended(pod) {
            continue;
        }
        let Some(ip) = ip_of(pod) else { continue };
        let name = AgentId::from(object.name());
        let lead = object.label(label::LEAD) == Some("true");
        let cadence = if leaders.contains(&name) {
            Cadence::Leader
        } else if object.is_deleted() || drains(world, object) {
            Cadence::Draining
        } else if !is_ready(pod) {
            Cadence::Starting
        } else if lead {
            Cadence::First
        } else {
            Cadence::Other
        };
        addresses.push(AgentAddress { pod: name, ip, control: port::CONTROL, data: port::DATA, cadence });
    }
    addresses
}

fn leaders(blueprint: Option<&Blueprint>) -> BTreeSet<AgentId> {
    let Some(blueprint) = blueprint else { return BTreeSet::new() };
    let fleet = &blueprint.fleet;
    fleet.prefill_leader.iter().chain(&fleet.decode_leader).map(|leader| leader.agent.clone()).collect()
}

fn drains(world: &World, pod: &Object) -> bool {
    let supernode = pod.label(label::SUPERNODE).and_then(|name| world.get(Kind::Supernode, name));
    match supernode {
        Some(Object::Supernode(supernode)) => {
            supernode.spec.drain.is_some() || supernode.metadata.deletion_timestamp.is_some()
        }
        _ => false,
    }
}

fn ip_of(pod: &Pod) -> Option<IpAddr> {
    pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()
}

/// The same names for the same cluster object, whoever plans.
fn seed(uid: &str) -> u64 {
    use sha2::{Digest, Sha256};
    let hash = Sha256::digest(uid.as_bytes());
    u64::from_le_bytes(hash[..8].try_into().expect("a hash has 8 bytes and more"))
}

/// Wall clock in seconds since 1970.
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(phase: &str, bound: &str, containers: &Value) -> Object {
        let pod = json!({
            "metadata": {"name": "p"},
            "status": {
                "phase": phase,
                "conditions": [{"type": "PodScheduled", "status": bound, "lastTransitionTime": "1970-01-01T00:16:40Z"}],
                "containerStatuses": containers,
            },
        });
        Object::from_value(Kind::Pod, pod).expect("a pod")
    }

    #[test]
    fn the_seed_is_the_clusters_and_nobody_elses() {
        assert_eq!(seed("a"), seed("a"));
        assert_ne!(seed("a"), seed("b"));
    }

    #[test]
    fn only_a_bound_pod_whose_containers_never_began_is_held_up() {
        let container = |state: &Value| json!([{"name": "engine", "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state}]);
        let creating = container(&json!({"waiting": {"reason": "ContainerCreating"}}));
        let held_up = |pod: Object, now: i64| held_up_in(&pod, now).map(|within| within.as_secs());
        assert_eq!(held_up(pod("Pending", "True", &creating), 5000), Some(0));
        assert_eq!(held_up(pod("Pending", "True", &creating), 1061), Some(0));
        assert_eq!(held_up(pod("Pending", "True", &Value::Null), 1061), Some(0));
        assert_eq!(held_up(pod("Pending", "True", &creating), 1060), Some(1), "not yet");
        assert_eq!(held_up(pod("Pending", "True", &creating), 1000), Some(61), "not yet");
        assert_eq!(held_up(pod("Pending", "False", &Value::Null), 5000), None, "it has no node");
        assert_eq!(held_up(pod("Running", "True", &container(&json!({"running": {}}))), 5000), None);
        assert_eq!(
            held_up(pod("Pending", "True", &container(&json!({"terminated": {"exitCode": 1}}))), 5000),
            None
        );
    }
}
