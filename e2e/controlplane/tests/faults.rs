//! The proxy and the pretend nodes with a real control plane.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use deepinfer_controlplane::ControlPlane;
use deepinfer_controlplane::nodes::NodeSpec;
use deepinfer_controlplane::pretend::{Agents, Behaviour, PretendNodes, PretendOptions, Script, Stages};
use deepinfer_controlplane::proxy::{Cut, On, Proxy, Verb, What, When, Which};
use deepinfer_protocol::Generation;
use deepinfer_protocol::agent_status::{AgentPhase, AgentStatus};
use deepinfer_transport::{ClusterKey, control_auth};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

const MINUTE: Duration = Duration::from_secs(60);

/// A proxy before the plane, and a client of an administrator through it.
async fn through_proxy(plane: &ControlPlane) -> Result<(Proxy, Client)> {
    let proxy = Proxy::start(plane.url(), plane.ca_pem().as_bytes(), 5).await?;
    let kubeconfig =
        kube::config::Kubeconfig::read_from(plane.kubeconfig_via(&proxy.url(), plane.admin_token())?)?;
    let options = kube::config::KubeConfigOptions::default();
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    // Each refusal is to be seen.
    config.default_retry = false;
    Ok((proxy, Client::try_from(config)?))
}

fn map(name: &str, value: &str) -> Result<ConfigMap> {
    Ok(serde_json::from_value(json!({"metadata": {"name": name}, "data": {"value": value}}))?)
}

/// Asks again and again until the answer is there.
async fn wait_for<T>(
    within: Duration,
    what: &str,
    mut ask: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = tokio::time::Instant::now() + within;
    loop {
        if let Some(answer) = ask().await? {
            return Ok(answer);
        }
        ensure!(tokio::time::Instant::now() < deadline, "not within {} s: {what}", within.as_secs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn every_verb_passes_the_proxy_and_watches_stream() -> Result<()> {
    let Some(plane) = deepinfer_controlplane::shared().await else { return Ok(()) };
    let (proxy, client) = through_proxy(plane).await?;
    let namespace = plane.namespace("proxy").await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    let mut watch = Box::pin(maps.watch(&WatchParams::default(), "0").await?);
    maps.create(&PostParams::default(), &map("one", "1")?).await?;
    let apply = PatchParams::apply("test").force();
    maps.patch(
        "two",
        &apply,
        &Patch::Apply(
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "two"}, "data": {"a": "b"}}),
        ),
    )
    .await?;
    maps.patch("one", &PatchParams::default(), &Patch::Merge(json!({"data": {"value": "2"}}))).await?;
    ensure!(maps.get("one").await?.data == Some(BTreeMap::from([("value".into(), "2".into())])));
    maps.delete("two", &DeleteParams::default()).await?;
    let mut seen = Vec::new();
    while let Some(event) = tokio::time::timeout(MINUTE, watch.next()).await? {
        match event? {
            WatchEvent::Deleted(map) if map.metadata.name.as_deref() == Some("two") => break,
            WatchEvent::Added(map) | WatchEvent::Modified(map) => seen.extend(map.metadata.name),
            _ => {}
        }
    }
    let ours: Vec<&str> =
        seen.iter().map(String::as_str).filter(|name| ["one", "two"].contains(name)).collect();
    ensure!(ours == ["one", "two", "one"], "{ours:?}");
    let verbs: Vec<Verb> =
        proxy.log(&On::any().namespace(&namespace)).iter().map(|entry| entry.asked.verb).collect();
    let expected = [Verb::Watch, Verb::Create, Verb::Apply, Verb::Patch, Verb::Get, Verb::Delete];
    ensure!(verbs == expected, "{verbs:?}");
    ensure!(proxy.log(&On::writes()).iter().all(|entry| matches!(entry.status, Some(200 | 201))));
    Ok(())
}

#[tokio::test]
async fn tokens_pass_the_proxy_and_rights_are_the_servers() -> Result<()> {
    let Some(plane) = deepinfer_controlplane::shared().await else { return Ok(()) };
    let proxy = Proxy::start(plane.url(), plane.ca_pem().as_bytes(), 5).await?;
    let kubeconfig = plane.kubeconfig_via(&proxy.url(), "no-such-token")?;
    let kubeconfig = kube::config::Kubeconfig::read_from(kubeconfig)?;
    let options = kube::config::KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    let pods: Api<Pod> = Api::all(Client::try_from(config)?);
    let refused = pods.list(&ListParams::default()).await;
    ensure!(matches!(&refused, Err(kube::Error::Api(status)) if status.code == 401), "{refused:?}");
    Ok(())
}

#[tokio::test]
async fn a_write_may_be_refused_or_lost_before_or_after_it_is_done() -> Result<()> {
    let Some(plane) = deepinfer_controlplane::shared().await else { return Ok(()) };
    let (proxy, client) = through_proxy(plane).await?;
    let namespace = plane.namespace("writes").await?;
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let create =
        async |name: &str| maps.create(&PostParams::default(), &map(name, "1")?).await.context("create");
    for status in [409, 429, 500, 503] {
        let fault = proxy.inject(On::writes().kind("configmaps"), Which::Nth(1), What::status(status));
        let refused = create("refused").await.unwrap_err();
        let code = match refused.downcast_ref::<kube::Error>() {
            Some(kube::Error::Api(answer)) => answer.code,
            _ => 0,
        };
        ensure!(code == status, "{refused:#}");
        ensure!(maps.get_opt("refused").await?.is_none());
        proxy.remove(fault);
    }
    proxy.inject(On::writes(), Which::Nth(1), What::Drop);
    ensure!(create("dropped").await.is_err());
    ensure!(maps.get_opt("dropped").await?.is_none());
    proxy.heal();
    proxy.inject(On::writes(), Which::Nth(1), What::LoseAnswer);
    ensure!(create("lost").await.is_err());
    ensure!(maps.get_opt("lost").await?.is_some());
    proxy.heal();
    let mut held = proxy.hold(On::writes(), 1, When::After);
    let creating = tokio::spawn({
        let (maps, map) = (maps.clone(), map("held", "1")?);
        async move { maps.create(&PostParams::default(), &map).await }
    });
    ensure!(held.reached(MINUTE).await?.name == "held");
    ensure!(maps.get_opt("held").await?.is_some());
    ensure!(!creating.is_finished());
    held.release();
    creating.await??;
    Ok(())
}

#[tokio::test]
async fn a_watcher_finds_what_happened_while_its_watch_was_cut() -> Result<()> {
    let Some(plane) = deepinfer_controlplane::shared().await else { return Ok(()) };
    let (proxy, client) = through_proxy(plane).await?;
    let namespace = plane.namespace("cuts").await?;
    let direct: Api<ConfigMap> = Api::namespaced(plane.client(), &namespace);
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let config = kube::runtime::watcher::Config::default();
    let (seen, mut names) = tokio::sync::mpsc::channel(64);
    tokio::spawn(async move {
        use kube::runtime::watcher::Event;
        let mut watch = Box::pin(kube::runtime::watcher(maps, config));
        while let Some(event) = watch.next().await {
            if let Ok(Event::Apply(map) | Event::InitApply(map)) = event {
                let name = map.metadata.name.unwrap_or_default();
                if seen.send(name).await.is_err() {
                    return;
                }
            }
        }
    });
    let cuts = [Cut::Clean, Cut::Broken, Cut::Clean, Cut::Broken];
    for (round, how) in cuts.into_iter().enumerate() {
        let on = On::any().kind("configmaps").namespace(&namespace);
        if round > 0 {
            ensure!(proxy.cut_watches(&on, how) == 1);
        }
        let name = format!("round-{round}");
        direct.create(&PostParams::default(), &map(&name, "1")?).await?;
        while tokio::time::timeout(MINUTE, names.recv()).await?.context("the watcher ended")? != name {}
        wait_for(MINUTE, "a watch is open", async || Ok((proxy.watches(&on).len() == 1).then_some(())))
            .await?;
    }
    Ok(())
}

fn pretend_nodes(prefix: &str, count: usize) -> Vec<NodeSpec> {
    let node = |n: usize| {
        NodeSpec::new(format!("{prefix}-{n:03}"))
            .label("nvidia.com/gpu.clique", format!("{prefix}-{}", n / 16))
            .resource("nvidia.com/gpu", "8")
    };
    (0..count).map(node).collect()
}

/// A pod that only pretend nodes take.
fn pod(name: &str, extra: &Value) -> Result<Pod> {
    let mut pod = json!({
        "metadata": {"name": name, "labels": {}, "annotations": {}},
        "spec": {
            "restartPolicy": "Never",
            "nodeSelector": {"deepinfer.io/pretend": "true"},
            "containers": [{"name": "engine", "image": "pretend", "resources": {"limits": {"nvidia.com/gpu": "4"}}}],
        },
    });
    merge(&mut pod, extra);
    Ok(serde_json::from_value(pod)?)
}

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            from.iter().for_each(|(key, value)| merge(into.entry(key).or_insert(Value::Null), value));
        }
        (into, from) => *into = from.clone(),
    }
}

fn condition(pod: &Pod, kind: &str) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind).map(|condition| condition.status.clone())
}

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("")
}

/// One test for all of it: a control plane has room for one kwok.
#[tokio::test]
async fn two_hundred_pretend_nodes_run_pods() -> Result<()> {
    let Some(plane) = deepinfer_controlplane::shared().await else { return Ok(()) };
    let namespace = plane.namespace("pretend").await?;
    let stages = Stages { pods: vec![("/slow-never".into(), Behaviour::NeverReady)], ..Stages::default() };
    let options = PretendOptions { stages, ..PretendOptions::default() };
    let began = std::time::Instant::now();
    let nodes =
        PretendNodes::start(plane.client(), &plane.kubeconfig()?, pretend_nodes("p", 200), &options).await?;
    nodes.wait_ready(MINUTE).await?;
    println!("200 pretend nodes are ready after {:.1} s", began.elapsed().as_secs_f64());
    let pods: Api<Pod> = Api::namespaced(plane.client(), &namespace);
    many_pods_run(&pods).await?;
    readiness_gates_decide(&pods).await?;
    behaviours(&nodes, &pods, &namespace).await?;
    power(&nodes, &pods).await?;
    agents(plane, &namespace, &pods).await?;
    println!("kwok holds {} MiB", nodes.memory() >> 20);
    nodes.remove().await
}

async fn many_pods_run(pods: &Api<Pod>) -> Result<()> {
    let began = std::time::Instant::now();
    let create = futures_util::stream::iter(0..400).for_each_concurrent(16, |n| async move {
        let pod = pod(&format!("many-{n:03}"), &json!({"metadata": {"labels": {"many": "yes"}}})).unwrap();
        pods.create(&PostParams::default(), &pod).await.unwrap();
    });
    create.await;
    let list = ListParams::default().labels("many=yes");
    wait_for(MINUTE, "400 pods run and are ready", async || {
        let all = pods.list(&list).await?;
        let ready = all.items.iter().filter(|pod| condition(pod, "Ready").as_deref() == Some("True")).count();
        Ok((ready == 400).then_some(()))
    })
    .await?;
    println!("400 pods are ready after {:.1} s", began.elapsed().as_secs_f64());
    let addresses: std::collections::BTreeSet<String> =
        pods.list(&list).await?.items.into_iter().filter_map(|pod| pod.status?.pod_ip).collect();
    ensure!(addresses.len() == 400, "pods share addresses: {}", addresses.len());
    pods.delete_collection(&DeleteParams::default(), &list).await?;
    wait_for(MINUTE, "deleted pods go", async || Ok(pods.list(&list).await?.items.is_empty().then_some(())))
        .await
}

async fn readiness_gates_decide(pods: &Api<Pod>) -> Result<()> {
    let gate = "deepinfer.io/routable";
    let gated = pod("gated", &json!({"spec": {"readinessGates": [{"conditionType": gate}]}}))?;
    pods.create(&PostParams::default(), &gated).await?;
    let ready = async |status: &str| {
        wait_for(MINUTE, &format!("Ready becomes {status}"), async || {
            let pod = pods.get("gated").await?;
            Ok((condition(&pod, "Ready").as_deref() == Some(status)).then_some(()))
        })
        .await
    };
    ready("False").await?;
    ensure!(phase(&pods.get("gated").await?) == "Running");
    for status in ["True", "False"] {
        let patch = json!({"status": {"conditions": [{"type": gate, "status": status}]}});
        pods.patch_status("gated", &PatchParams::default(), &Patch::Strategic(patch)).await?;
        ready(status).await?;
    }
    Ok(())
}

async fn behaviours(nodes: &PretendNodes, pods: &Api<Pod>, namespace: &str) -> Result<()> {
    let annotated = |word: &str| json!({"metadata": {"annotations": {"deepinfer.io/pretend-pod": word}}});
    for (name, extra) in [
        ("slow-never", json!({})),
        ("failing", annotated("fails")),
        ("done", annotated("completes")),
        ("creating", annotated("never-starts")),
        ("breaks", json!({})),
        ("stuck", annotated("stuck")),
        ("later", json!({"metadata": {"annotations": {"deepinfer.io/pretend-delay": "1h"}}})),
    ] {
        pods.create(&PostParams::default(), &pod(name, &extra)?).await?;
    }
    let reaches = async |name: &str, wanted: &str| {
        wait_for(MINUTE, &format!("{name} becomes {wanted}"), async || {
            Ok((phase(&pods.get(name).await?) == wanted).then_some(()))
        })
        .await
    };
    for (name, wanted) in
        [("slow-never", "Running"), ("failing", "Failed"), ("done", "Succeeded"), ("breaks", "Running")]
    {
        reaches(name, wanted).await?;
    }
    reaches("stuck", "Running").await?;
    ensure!(condition(&pods.get("slow-never").await?, "Ready").as_deref() == Some("False"));
    ensure!(phase(&pods.get("creating").await?) == "Pending");
    ensure!(phase(&pods.get("later").await?) == "Pending");
    nodes.behave(namespace, "breaks", Behaviour::Fails).await?;
    reaches("breaks", "Failed").await?;
    pods.delete("failing", &DeleteParams::default()).await?;
    pods.delete("stuck", &DeleteParams::default()).await?;
    wait_for(MINUTE, "a deleted pod goes", async || {
        Ok(pods.get_opt("failing").await?.is_none().then_some(()))
    })
    .await?;
    ensure!(pods.get("stuck").await?.metadata.deletion_timestamp.is_some());
    nodes.behave(namespace, "stuck", Behaviour::Ready).await?;
    wait_for(MINUTE, "a stuck pod goes", async || Ok(pods.get_opt("stuck").await?.is_none().then_some(())))
        .await
}

async fn power(nodes: &PretendNodes, pods: &Api<Pod>) -> Result<()> {
    let node = &nodes.names()[7];
    let bound = pod("on-dead-node", &json!({"spec": {"nodeName": node}}))?;
    pods.create(&PostParams::default(), &bound).await?;
    wait_for(MINUTE, "the pod runs", async || {
        Ok((phase(&pods.get("on-dead-node").await?) == "Running").then_some(()))
    })
    .await?;
    nodes.power_off(node).await?;
    pods.delete("on-dead-node", &DeleteParams::default()).await?;
    // The API server's own view: nobody renews the lease, so the node is not ready any more.
    wait_for(MINUTE * 2, "the node is lost", async || {
        let lost = nodes.wait_ready(Duration::ZERO).await;
        Ok(lost.is_err().then_some(()))
    })
    .await?;
    ensure!(pods.get("on-dead-node").await?.metadata.deletion_timestamp.is_some());
    nodes.power_on(node).await?;
    wait_for(MINUTE, "the pod goes when its node is back", async || {
        Ok(pods.get_opt("on-dead-node").await?.is_none().then_some(()))
    })
    .await?;
    nodes.wait_ready(MINUTE).await
}

async fn agents(plane: &ControlPlane, namespace: &str, pods: &Api<Pod>) -> Result<()> {
    let agents = Agents::start(plane.client()).await?;
    let labels = json!({"metadata": {"labels": {
        "deepinfer.io/cluster": "c", "deepinfer.io/supernode": "c-decode-x", "deepinfer.io/node-index": "2",
        "app.kubernetes.io/component": "decode",
    }}});
    pods.create(&PostParams::default(), &pod("c-decode-x-02", &labels)?).await?;
    let key = ClusterKey::new(Generation(1), [7; 32]);
    let secret: Secret = serde_json::from_value(json!({
        "metadata": {"name": "c-agent-1"}, "stringData": {"1": "07".repeat(32)},
    }))?;
    Api::namespaced(plane.client(), namespace).create(&PostParams::default(), &secret).await?;
    let status = wait_for(MINUTE, "the agent answers", async || {
        Ok(Some(call(&agents, &key, "GET", "/v1/status", "").await?).filter(|(status, _)| *status == 200))
    })
    .await?;
    let status: AgentStatus = serde_json::from_slice(&status.1)?;
    ensure!((status.phase, status.index, status.accepting) == (AgentPhase::Serving, 2, true));
    let stranger = ClusterKey::new(Generation(1), [8; 32]);
    ensure!(call(&agents, &stranger, "GET", "/v1/status", "").await?.0 == 401);
    agents.script("c-decode-*", Script::failed("no weights"));
    let (_, body) = call(&agents, &key, "GET", "/v1/status", "").await?;
    let status: AgentStatus = serde_json::from_slice(&body)?;
    ensure!((status.phase, status.reason.as_str()) == (AgentPhase::Failed, "no weights"));
    agents.script("c-decode-*", Script::lost());
    let asked = call(&agents, &key, "GET", "/v1/status", "");
    ensure!(tokio::time::timeout(Duration::from_millis(300), asked).await.is_err());
    agents.forget_scripts();
    let drained = call(&agents, &key, "POST", "/v1/drain", r#"{"deadlineSeconds": 5}"#).await?;
    ensure!(drained.0 == 202, "{drained:?}");
    let (_, body) = call(&agents, &key, "GET", "/v1/status", "").await?;
    ensure!(serde_json::from_slice::<AgentStatus>(&body)?.phase == AgentPhase::Drained);
    ensure!(agents.calls("c-decode-*").len() >= 5);
    Ok(())
}

/// A signed call, as the operator makes it.
async fn call(
    agents: &Agents,
    key: &ClusterKey,
    method: &str,
    path: &str,
    body: &str,
) -> Result<(u16, Vec<u8>)> {
    use http_body_util::{BodyExt, Full};
    let stream = tokio::net::TcpStream::connect(agents.address()).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    let request = http::Request::builder()
        .method(method)
        .uri(path)
        .header("host", "10.64.0.9:9810")
        .header("x-deepinfer-pod", "c-decode-x-02")
        .header("authorization", control_auth::authorization(key, now, method, path))
        .body(Full::new(bytes::Bytes::from(body.to_owned())))?;
    let answer = sender.send_request(request).await?;
    let status = answer.status().as_u16();
    Ok((status, answer.into_body().collect().await?.to_bytes().to_vec()))
}
