//! `World::apply` and the API server make the same objects of the same actions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use deepinfer_crds::names::{ROUTABLE_GATE, finalizer, label, rbac};
use deepinfer_operator::agents::{AgentOptions, Agents};
use deepinfer_operator::cache::{Caches, Listener};
use deepinfer_operator::execute::{Executor, Limiter};
use deepinfer_operator::gather::Lessons;
use deepinfer_operator::keys::{ClusterRef, Keys};
use deepinfer_operator::lease::Permit;
use deepinfer_operator::metrics::Metrics;
use deepinfer_operator::recorder::Recorder;
use deepinfer_operator::rest::{Resource, Rest};
use deepinfer_planner::{
    Action, Blueprint, Key, Kind, KubernetesTarget, Namespaced, Object, PodChange, Target, World, covers,
    plan,
};
use kube::Client;
use kube::api::DynamicObject;
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::bed::{Bed, PATIENCE};

/// Kinds that a plan of this test makes, and the cluster.
const KINDS: [Kind; 12] = [
    Kind::Cluster,
    Kind::ServiceAccount,
    Kind::Secret,
    Kind::ControllerRevision,
    Kind::NetworkPolicy,
    Kind::Pool,
    Kind::Supernode,
    Kind::Placement,
    Kind::Service,
    Kind::Budget,
    Kind::Deployment,
    Kind::Pod,
];
/// What only the API server writes.
const OF_THE_SERVER: [&str; 6] =
    ["uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "deletionTimestamp"];
/// Rounds of plan and execute after which a cluster is said not to settle.
const ROUNDS: usize = 20;

struct Deaf;

impl Listener for Deaf {
    fn wake(&self, _: &Namespaced, _: Duration) {}
    fn committed(&self, _: &ClusterRef, _: &Blueprint) {}
    fn gone(&self, _: &Namespaced) {}
}

/// The executor as the operator has it, with the operator's rights, and an administrator who looks.
struct Bench {
    bed: Bed,
    admin: Client,
    client: Client,
    metrics: Arc<Metrics>,
    caches: Arc<Caches>,
    keys: Arc<Keys>,
    agents: Arc<Agents>,
    stop: CancellationToken,
}

impl Bench {
    async fn new() -> Option<Self> {
        let bed = Bed::new("agrees").await?;
        let path = bed
            .plane
            .kubeconfig_for(rbac::OPERATOR_NAMESPACE, rbac::OPERATOR_SERVICE_ACCOUNT)
            .await
            .expect("the operator's account");
        let file = Kubeconfig::read_from(path).expect("a kubeconfig");
        let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
        let client = Client::try_from(config.expect("a kubeconfig")).expect("a client");
        let metrics = Metrics::new("test");
        let keys = Arc::new(Keys::new([7; 32]));
        let (wake, _) = tokio::sync::mpsc::channel(1);
        let stop = CancellationToken::new();
        let agents =
            Agents::start(AgentOptions::default(), keys.clone(), metrics.clone(), wake, stop.clone());
        let caches = Arc::new(Caches::new(false, Box::new(Deaf)));
        let admin = bed.plane.client();
        Some(Self { bed, admin, client, metrics, caches, keys, agents, stop })
    }

    fn executor(&self) -> Executor {
        let rest = Rest::new(self.client.clone(), Duration::from_secs(30), self.metrics.clone());
        Executor {
            rest: rest.guarded(Arc::new(Permit::unlimited())),
            caches: self.caches.clone(),
            lessons: Arc::new(Lessons::default()),
            agents: self.agents.clone(),
            keys: self.keys.clone(),
            recorder: Recorder::start(self.client.clone(), "test", self.metrics.clone(), self.stop.clone()),
            metrics: self.metrics.clone(),
            limiter: Limiter::default(),
        }
    }

    /// What is there, of a cluster.
    async fn world(&self, cluster: &str, blueprint: Option<Blueprint>) -> World {
        let mut world = World::new(&self.bed.namespace, 7);
        world.now = deepinfer_operator::gather::now();
        world.blueprint = blueprint;
        for kind in KINDS {
            let resource = Resource::of(kind).expect("kinds of this test have fixed paths");
            let path = resource.path(Some(&self.bed.namespace));
            let list = self.list(&path).await;
            for item in list.items {
                let ours = item
                    .metadata
                    .labels
                    .as_ref()
                    .is_some_and(|l| l.get(label::CLUSTER).is_some_and(|c| c == cluster));
                let named = item.metadata.name.as_deref() == Some(cluster);
                if ours || (kind == Kind::Cluster && named) {
                    let value = serde_json::to_value(&item).expect("JSON");
                    let mut object = Object::from_value(kind, value).expect("an object of the kind");
                    object.meta_mut().managed_fields = None;
                    if let Object::Secret(secret) = &mut object {
                        // Its data is not in any world.
                        secret.data = None;
                    }
                    self.caches.wrote(&self.bed.namespace, object.clone());
                    world.objects.insert(object.key(), object);
                }
            }
        }
        world
    }

    /// A list; kinds that were just installed may not be served for a moment.
    async fn list(&self, path: &str) -> kube::core::ObjectList<DynamicObject> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let request = http::Request::get(path).body(Vec::new()).expect("a request");
            match self.admin.request(request).await {
                Ok(list) => return list,
                Err(error) => assert!(tokio::time::Instant::now() < deadline, "{path}: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Does actions in both worlds and compares what is there afterwards.
    async fn both(&self, world: &World, actions: &[Action]) {
        let mut model = world.clone();
        let uid = world.cluster().and_then(|c| c.metadata.uid.clone()).unwrap_or_default();
        let name = world.cluster().and_then(|c| c.metadata.name.clone()).expect("a cluster");
        let cluster = ClusterRef { namespace: self.bed.namespace.clone(), name: name.clone(), uid };
        let executor = self.executor();
        for action in actions {
            model.apply(action).unwrap_or_else(|error| panic!("in memory: {action}: {error}"));
            let outcome = executor.execute(&cluster, world, std::slice::from_ref(action)).await;
            assert!(outcome.error.is_none() && outcome.refused == 0, "{action}: {outcome:?}");
            assert!(!outcome.held_back, "{action} was held back");
        }
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let real = self.world(&name, None).await;
            let differences = differences(&model, &real);
            if differences.is_empty() {
                return;
            }
            // Garbage is collected in the background there, and at once in memory.
            let listed: Vec<String> = actions.iter().map(ToString::to_string).collect();
            assert!(
                tokio::time::Instant::now() < deadline,
                "after {listed:#?}\nthe worlds differ (memory | server):\n{}",
                differences.join("\n")
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Plans and executes until there is nothing to do; gives how many actions there were.
    async fn settle(&self, cluster: &str, blueprint: &mut Option<Blueprint>) -> usize {
        let target =
            Target::Kubernetes(KubernetesTarget::new("deepinfer-gateway:test", "http://operator:8082"));
        let mut done = 0;
        for _ in 0..ROUNDS {
            let world = self.world(cluster, blueprint.clone()).await;
            if world.cluster().is_none() {
                return done;
            }
            let plan = plan(&world, &target);
            *blueprint = Some(plan.blueprint);
            let writes: Vec<Action> =
                plan.actions.into_iter().filter(|action| !matches!(action, Action::Event { .. })).collect();
            if writes.is_empty() {
                return done;
            }
            done += writes.len();
            self.both(&world, &writes).await;
        }
        panic!("{cluster} does not settle in {ROUNDS} rounds");
    }
}

/// What differs between two worlds, but for what only the API server writes.
fn differences(model: &World, real: &World) -> Vec<String> {
    let mut found = Vec::new();
    let keys = |world: &World| world.objects.keys().cloned().collect::<Vec<Key>>();
    let (ours, theirs) = (keys(model), keys(real));
    // Pods of Deployments are made by controllers, which memory does not have.
    let foreign = |world: &World, key: &Key| world.objects.get(key).is_some_and(made_by_a_controller);
    for key in ours.iter().filter(|key| !theirs.contains(*key) && !foreign(model, key)) {
        if !ends_at_once(&model.objects[key]) {
            found.push(format!("{key}: there | gone"));
        }
    }
    for key in theirs.iter().filter(|key| !ours.contains(*key) && !foreign(real, key)) {
        found.push(format!("{key}: gone | there"));
    }
    for (key, object) in &model.objects {
        let Some(live) = real.objects.get(key) else { continue };
        let (expected, live) = (plain(object), plain(live));
        if !covers(&live, &expected) {
            found.push(format!("{key}{}", place("", &expected, &live)));
        }
        // Kinds that no defaulter and no controller touches must be equal in full.
        if matches!(key.kind, Kind::Pool | Kind::Supernode | Kind::Placement | Kind::ControllerRevision)
            && !covers(&expected, &live)
        {
            found.push(format!("{key} has more than it should{}", place("", &live, &expected)));
        }
        let deleted = |world: &World| world.objects.get(key).is_some_and(Object::is_deleted);
        if deleted(model) != deleted(real) {
            found.push(format!("{key} being deleted: {} | {}", deleted(model), deleted(real)));
        }
    }
    found
}

/// The first place where `has` says something that `lacks` does not.
fn place(path: &str, has: &Value, lacks: &Value) -> String {
    if let (Some(has), Some(lacks)) = (has.as_object(), lacks.as_object()) {
        for (field, value) in has {
            let other = lacks.get(field).unwrap_or(&Value::Null);
            if !covers(&json!({field: other}), &json!({field: value})) {
                return place(&format!("{path}.{field}"), value, other);
            }
        }
    }
    format!("{path}: {has} | {lacks}")
}

/// Memory leaves a pod that is being deleted to its kubelet; the API server does not wait for one that never had any.
fn ends_at_once(object: &Object) -> bool {
    match object {
        Object::Pod(pod) => {
            object.is_deleted() && pod.spec.as_ref().is_none_or(|spec| spec.node_name.is_none())
        }
        _ => false,
    }
}

fn made_by_a_controller(object: &Object) -> bool {
    object.kind() == Kind::Pod && object.label(label::SUPERNODE).is_none()
}

fn plain(object: &Object) -> Value {
    let mut value = object.to_value();
    if let Some(meta) = value["metadata"].as_object_mut() {
        for field in OF_THE_SERVER.iter().chain(&["deletionGracePeriodSeconds"]) {
            meta.remove(*field);
        }
    }
    if matches!(object.kind(), Kind::Deployment | Kind::Budget) {
        // Controllers count there.
        value["status"] = Value::Null;
    }
    if object.kind() == Kind::Pod {
        // Scheduler and kubelet write there; one condition is ours.
        let conditions = value["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let ours = conditions.into_iter().find(|condition| condition["type"] == ROUTABLE_GATE);
        value["status"] = ours.unwrap_or_default();
        if let Some(condition) = value["status"].as_object_mut() {
            // The two clocks are not one.
            condition.remove("lastTransitionTime");
        }
    }
    value
}

/// The same plans, carried out in memory and at the API server, leave the same objects: while a cluster is made, edited
/// and deleted.
#[tokio::test(flavor = "multi_thread")]
async fn world_apply_agrees_with_the_api_server_on_whole_plans() {
    let Some(bench) = Bench::new().await else { return };
    bench.bed.create("c").await.unwrap();
    let mut blueprint = None;
    let made = bench.settle("c", &mut blueprint).await;
    assert!(made > 10, "a cluster is made in {made} actions");
    let clusters = bench.bed.api::<deepinfer_crds::DeepInferCluster>();
    let edit = json!({"spec": {
        "decode": {"supernode": {"nodes": 3}},
        "gateway": {"replicas": 1, "service": {"annotations": {"example.com/zone": "a"}}},
    }});
    clusters.patch("c", &Default::default(), &kube::api::Patch::Merge(edit)).await.unwrap();
    assert!(bench.settle("c", &mut blueprint).await > 2);
    // What is not wanted any more goes: an annotation that was ours.
    let edit = json!({"spec": {"gateway": {"service": {"annotations": {"example.com/zone": null}}}}});
    clusters.patch("c", &Default::default(), &kube::api::Patch::Merge(edit)).await.unwrap();
    assert!(bench.settle("c", &mut blueprint).await >= 1);
    clusters.delete("c", &Default::default()).await.unwrap();
    bench.settle("c", &mut blueprint).await;
    bench.stop.cancel();
}

/// The actions that plans use only while something serves or drains, one by one.
#[tokio::test(flavor = "multi_thread")]
async fn world_apply_agrees_with_the_api_server_on_each_action_of_a_running_gang() {
    let Some(bench) = Bench::new().await else { return };
    bench.bed.create("c").await.unwrap();
    let mut blueprint = None;
    bench.settle("c", &mut blueprint).await;
    let first = |world: &World, kind: Kind| -> Key {
        let wanted = |object: &&Object| kind != Kind::Pod || object.label(label::SUPERNODE).is_some();
        world.of(kind).find(wanted).map(Object::key).expect("there is one")
    };
    type Make = Box<dyn Fn(&World) -> Action>;
    let pod = move |world: &World, change: PodChange| {
        let key = first(world, Kind::Pod);
        let uid = world.objects[&key].meta().uid.clone();
        Action::Pod { key, uid, change }
    };
    let routable = |holds, reason: &str| PodChange::Routable { holds, reason: reason.to_owned() };
    let steps: Vec<Make> = vec![
        Box::new(move |world| pod(world, PodChange::LiftGate)),
        Box::new(move |world| pod(world, routable(true, "Serving"))),
        Box::new(move |world| pod(world, routable(false, "Draining"))),
        Box::new(move |world| pod(world, PodChange::Drain(Some("60".to_owned())))),
        Box::new(move |world| pod(world, PodChange::Drain(None))),
        Box::new(move |world| Action::Replicas { key: first(world, Kind::Pool), replicas: 3 }),
        Box::new(move |world| Action::Finalizers {
            key: first(world, Kind::Supernode),
            ours: vec![finalizer::DRAIN.to_owned()],
        }),
        Box::new(move |world| delete(world, first(world, Kind::Supernode))),
        Box::new(move |world| Action::Finalizers { key: first(world, Kind::Supernode), ours: Vec::new() }),
    ];
    for make in steps {
        let world = bench.world("c", blueprint.clone()).await;
        let action = make(&world);
        bench.both(&world, &[action]).await;
    }
    bench.stop.cancel();
}

fn delete(world: &World, key: Key) -> Action {
    let uid = world.objects[&key].meta().uid.clone();
    Action::Delete { key, uid, grace_seconds: None, why: "a test".to_owned() }
}

/// Names are kept apart even where two clusters have the same children.
#[test]
fn differences_are_found() {
    let mut one = World::new("ns", 1);
    let two = World::new("ns", 1);
    let service = json!({"metadata": {"name": "a"}, "spec": {"clusterIP": "None"}});
    let object = Object::from_value(Kind::Service, service).expect("a service");
    one.objects = BTreeMap::from([(object.key(), object)]);
    assert_eq!(differences(&one, &two), ["Service/a: there | gone"]);
    assert!(differences(&one, &one.clone()).is_empty());
}
