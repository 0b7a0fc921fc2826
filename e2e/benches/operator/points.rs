//! What is measured.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use deepinfer_controlplane::Operator;
use futures_util::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, WatchEvent, WatchParams};
use serde_json::json;

use crate::World;
use crate::args::Args;
use crate::figures::{Metrics, cpu_of_all, cpu_seconds, median};
use crate::world::{cluster, is_ready};

const RECONCILE: &str = "deepinfer_operator_reconcile_duration_seconds";
const REQUEST: &str = "deepinfer_operator_api_request_seconds";
const PLAN: &str = "deepinfer_operator_plan_seconds";
const LOOKS: &str = "deepinfer_operator_reconcile_duration_seconds_count";
const QUESTIONS: &str = "deepinfer_operator_agent_call_seconds_count";
const WRITES: &str = "deepinfer_operator_api_writes_total";
/// Clusters of one namespace: Kubernetes' own controllers look through a whole namespace for each pod.
const TEAM: usize = 5;
/// Nodes of a rack.
const RACK: usize = 18;
const POLL: Duration = Duration::from_millis(100);
/// Pause between two words about a long wait.
const PROGRESS: Duration = Duration::from_secs(60);

/// Apply to all pods of a supernode of 16 nodes with 8 accelerators created, and to Ready; the median of some.
pub async fn supernode(args: &Args) -> Result<()> {
    let world = World::start(args, RACK, 8, RACK, 1).await?;
    let (mut created, mut ready, mut writes, mut kinds) = (Vec::new(), Vec::new(), 0.0, String::new());
    for n in 0..args.repeat {
        let name = format!("s{n}");
        let spec = cluster(&name, 1, 16, 8);
        let params = WatchParams::default().labels("deepinfer.io/supernode");
        let version = world.all_pods().list(&ListParams::default()).await?.metadata.resource_version;
        let mut watch = Box::pin(world.all_pods().watch(&params, &version.unwrap_or_default()).await?);
        let before = metrics(&world.operator).await?;
        let began = Instant::now();
        world.apply(0, &spec).await?;
        let mut pods = BTreeSet::new();
        while pods.len() < 16 {
            let Ok(event) = tokio::time::timeout(args.limit(), watch.next()).await else {
                let cluster = world.clusters(0).get(&name).await?;
                bail!("{} of 16 pods are created; {name} says {:#}", pods.len(), cluster.data["status"]);
            };
            if let WatchEvent::Added(pod) = event.context("the watch ended")?? {
                pods.insert(Pod::name_any(&pod));
            }
        }
        created.push(began.elapsed());
        eprintln!("  run {n}: all pods created after {:.3} s", began.elapsed().as_secs_f64());
        wait_ready(&world, 1, args.limit()).await?;
        ready.push(began.elapsed());
        let after = metrics(&world.operator).await?;
        (writes, kinds) = (after.sum(WRITES, "") - before.sum(WRITES, ""), by_kind(&after, &before));
        world.clusters(0).delete(&name, &DeleteParams::default()).await?;
        wait_gone(&world, args.limit()).await?;
    }
    println!("supernode of 128 accelerators (16 nodes of 8), median of {}:", args.repeat);
    println!("  apply to all 16 pods created  {:>8.3} s (goal 1 s)", median(created).as_secs_f64());
    println!("  apply to cluster Ready        {:>8.3} s (minReadySeconds 0)", median(ready).as_secs_f64());
    println!("  API writes of the operator    {writes:>8.0}: {kinds}");
    Ok(())
}

/// One point: so many clusters from nothing to Ready, then at rest, then one change.
pub async fn curve(args: &Args, clusters: usize) -> Result<()> {
    let nodes = nodes(args, clusters);
    let world = World::start(args, nodes, 4 * args.pods_per_node, RACK, clusters.div_ceil(TEAM)).await?;
    let before = metrics(&world.operator).await?;
    let (cpu, cpu_all) = (cpu_seconds(world.operator.pid()), cpu_of_all());
    let began = Instant::now();
    let apply = stream::iter(0..clusters).map(|n| {
        let (spec, world) = (cluster(&name(n), args.supernodes, args.nodes, 4), &world);
        async move { world.apply(n, &spec).await }
    });
    apply.buffer_unordered(8).collect::<Vec<_>>().await.into_iter().collect::<Result<()>>()?;
    let reached = wait_ready(&world, clusters, args.limit()).await;
    let took = began.elapsed();
    let after = metrics(&world.operator).await?;
    let pods = count_pods(&world).await?;
    let writes = after.sum(WRITES, "") - before.sum(WRITES, "");
    let p95 = after.quantile(RECONCILE, 0.95, &before);
    println!(
        "{clusters:>4} clusters {:>5} supernodes {pods:>6} pods {nodes:>5} nodes: {:>7.1} s{}  reconcile p95 <= {:>6.3} s  \
         {writes:>6.0} writes  operator {:>4} MiB (kwok {})",
        clusters * args.supernodes,
        took.as_secs_f64(),
        if reached.is_ok() { " to Ready" } else { " NOT READY" },
        p95,
        world.operator.memory() >> 20,
        world.nodes.memory() >> 20,
    );
    let cpu = cpu_seconds(world.operator.pid()) - cpu;
    let cpu_all = cpu_of_all().since(&cpu_all);
    println!("       CPU: operator {cpu:.1} s, everything {:.1} s: {cpu_all}", cpu_all.seconds());
    println!("       writes: {}", by_kind(&after, &before));
    if let Err(error) = reached {
        println!("       {error:#}");
        return Ok(());
    }
    at_rest(args, &world).await?;
    changes(args, &world).await?;
    edits(args, &world, clusters).await
}

/// How long reconciles take beside so many others when users change one cluster after the other.
async fn edits(args: &Args, world: &World, clusters: usize) -> Result<()> {
    let before = metrics(&world.operator).await?;
    let mut times = Vec::new();
    for n in 0..args.edits {
        let mut spec = cluster(&name(n % clusters), args.supernodes, args.nodes, 4);
        // The first cluster has two gateways since `changes`.
        spec["spec"]["gateway"]["replicas"] = json!(3 + n / clusters);
        let began = Instant::now();
        world.apply(n % clusters, &spec).await?;
        wait_named_ready(world, n % clusters, args.limit()).await?;
        times.push(began.elapsed());
    }
    let after = metrics(&world.operator).await?;
    println!(
        "       {} edits one after the other: reconcile p50 <= {:.3} s, p95 <= {:.3} s (goal 0.25 s); edit to Ready {:.2} s",
        args.edits,
        after.quantile(RECONCILE, 0.5, &before),
        after.quantile(RECONCILE, 0.95, &before),
        median(times).as_secs_f64(),
    );
    println!(
        "       of these: plans p95 <= {:.3} s, requests to the API server p50 <= {:.3} s, p95 <= {:.3} s",
        after.quantile(PLAN, 0.95, &before),
        after.quantile(REQUEST, 0.5, &before),
        after.quantile(REQUEST, 0.95, &before),
    );
    Ok(())
}

/// Nodes for so many clusters. Prefill pods go anywhere and may leave a rack with one node too few for another gang.
fn nodes(args: &Args, clusters: usize) -> usize {
    let shared = args.pods_per_node as usize;
    let racks = (clusters * args.supernodes).div_ceil(RACK / args.nodes * shared);
    let wanted = racks * RACK + clusters.div_ceil(shared);
    wanted + wanted / 8 + RACK
}

/// CPU and writes of an operator that has nothing to do.
async fn at_rest(args: &Args, world: &World) -> Result<()> {
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (cpu, before) = (cpu_seconds(world.operator.pid()), metrics(&world.operator).await?);
    tokio::time::sleep(Duration::from_secs(args.idle_seconds)).await;
    let used = (cpu_seconds(world.operator.pid()) - cpu) / args.idle_seconds as f64;
    let after = metrics(&world.operator).await?;
    let grown = |name: &str| after.sum(name, "") - before.sum(name, "");
    println!(
        "       at rest for {} s: {:.1} % of a core, {} MiB, {:.0} writes, {:.0} looks, {:.0} questions to agents; \
         start to ready again {:.1} s",
        args.idle_seconds,
        used * 100.0,
        world.operator.memory() >> 20,
        grown(WRITES),
        grown(LOOKS),
        grown(QUESTIONS),
        restart_time(args, world).await?.as_secs_f64(),
    );
    Ok(())
}

/// How long a second replica takes to be ready with all of this in its caches.
async fn restart_time(args: &Args, world: &World) -> Result<Duration> {
    let began = Instant::now();
    let follower = Operator::start(&world.plane, World::options(args, &world.agents)).await?;
    follower.wait_ready(args.limit()).await?;
    Ok(began.elapsed())
}

/// Writes of the operator for one small edit and for the loss of one pod.
async fn changes(args: &Args, world: &World) -> Result<()> {
    let mut spec = cluster(&name(0), args.supernodes, args.nodes, 4);
    spec["spec"]["gateway"]["replicas"] = json!(2);
    let before = metrics(&world.operator).await?;
    world.apply(0, &spec).await?;
    wait_named_ready(world, 0, args.limit()).await?;
    let edited = metrics(&world.operator).await?;
    let list = ListParams::default().labels("deepinfer.io/cluster=c0000,deepinfer.io/node-index=0");
    let pods = world.pods(0).list(&list).await?.items;
    let lost = pods.first().context("no supernode has a pod")?;
    let supernode = lost.labels().get("deepinfer.io/supernode").cloned().unwrap_or_default();
    world.pods(0).delete(&lost.name_any(), &DeleteParams::default().grace_period(0)).await?;
    let began = Instant::now();
    let gone = ListParams::default().labels(&format!("deepinfer.io/supernode={supernode}"));
    while !world.pods(0).list_metadata(&gone).await?.items.is_empty() {
        ensure!(began.elapsed() < args.limit(), "the supernode is not replaced");
        tokio::time::sleep(POLL).await;
    }
    wait_named_ready(world, 0, args.limit()).await?;
    let took = began.elapsed();
    let after = metrics(&world.operator).await?;
    println!(
        "       one more gateway: {:.0} writes; loss of a pod: {:.0} writes, Ready again after {:.1} s",
        edited.sum(WRITES, "") - before.sum(WRITES, ""),
        after.sum(WRITES, "") - edited.sum(WRITES, ""),
        took.as_secs_f64(),
    );
    Ok(())
}

/// From the death of a leader to the next one, with the default lease; the median of some.
pub async fn failover(args: &Args) -> Result<()> {
    let world = World::start(args, 4, 4, 4, 1).await?;
    let mut leader = world.operator;
    let mut times = Vec::new();
    for _ in 0..args.repeat.min(3) {
        let follower = Operator::start(&world.plane, World::options(args, &world.agents)).await?;
        follower.wait_ready(args.limit()).await?;
        leader.kill9();
        let began = Instant::now();
        follower.wait_leading(args.limit()).await?;
        times.push(began.elapsed());
        leader = follower;
    }
    println!(
        "fail-over after kill -9 with the default lease: {:.1} s (goal 20 s)",
        median(times).as_secs_f64()
    );
    Ok(())
}

/// What was written, by kind and verb.
fn by_kind(after: &Metrics, before: &Metrics) -> String {
    let grown = after.growth(WRITES, before);
    grown.iter().map(|(words, growth)| format!("{words} {growth:.0}")).collect::<Vec<_>>().join(", ")
}

async fn metrics(operator: &Operator) -> Result<Metrics> {
    Ok(Metrics::read(&operator.metrics_text().await?))
}

async fn wait_ready(world: &World, count: usize, within: Duration) -> Result<()> {
    let deadline = Instant::now() + within;
    // Whoever looks at hundreds of clusters ten times a second is most of the API server's work.
    let pause = POLL.max(Duration::from_millis(10) * u32::try_from(count)?);
    let (began, mut told) = (Instant::now(), Instant::now());
    loop {
        let all = world.all_clusters().list(&ListParams::default().match_any()).await?.items;
        let ready = all.iter().filter(|cluster| is_ready(cluster)).count();
        if ready >= count {
            return Ok(());
        }
        if told.elapsed() >= PROGRESS {
            told = Instant::now();
            eprintln!(
                "  {:>5.0} s: {ready} of {count} clusters are Ready, {} pods, operator {} MiB and {:.0} s of CPU",
                began.elapsed().as_secs_f64(),
                count_pods(world).await?,
                world.operator.memory() >> 20,
                cpu_seconds(world.operator.pid()),
            );
        }
        let waits = all
            .iter()
            .find(|cluster| !is_ready(cluster))
            .map(|cluster| &cluster.data["status"]["conditions"]);
        ensure!(Instant::now() < deadline, "{ready} of {count} clusters are Ready; one says {waits:?}");
        tokio::time::sleep(pause).await;
    }
}

/// Pods of all namespaces, counted by the API server.
async fn count_pods(world: &World) -> Result<i64> {
    let list = world.all_pods().list_metadata(&ListParams::default().limit(1)).await?;
    Ok(list.metadata.remaining_item_count.unwrap_or(0) + i64::try_from(list.items.len())?)
}

/// Name of the `n`th cluster of the curve.
fn name(n: usize) -> String {
    format!("c{n:04}")
}

async fn wait_named_ready(world: &World, n: usize, within: Duration) -> Result<()> {
    let deadline = Instant::now() + within;
    while !is_ready(&world.clusters(n).get(&name(n)).await?) {
        ensure!(Instant::now() < deadline, "{} is not Ready", name(n));
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}

async fn wait_gone(world: &World, within: Duration) -> Result<()> {
    let deadline = Instant::now() + within;
    loop {
        let clusters = world.all_clusters().list_metadata(&ListParams::default()).await?.items.len();
        let pods = world.all_pods().list_metadata(&ListParams::default()).await?.items.len();
        if clusters + pods == 0 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{clusters} clusters and {pods} pods are left");
        tokio::time::sleep(POLL).await;
    }
}
