//! What a pod finds when it starts, and how it ends.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;

use super::bed::{Bed, alive, condition, eventually, first, phase, running, waits};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn environment_and_files_arrive_and_follow_their_objects() {
    let Some(bed) = Bed::start(1).await else { return };
    let secrets = Api::<Secret>::namespaced(bed.client.clone(), &bed.namespace);
    let maps = Api::<ConfigMap>::namespaced(bed.client.clone(), &bed.namespace);
    let secret = json!({"metadata": {"name": "keys"}, "stringData": {"1": "first key"}});
    secrets.create(&PostParams::default(), &serde_json::from_value(secret).unwrap()).await.unwrap();
    let map = json!({"metadata": {"name": "settings"}, "data": {"mode": "fast", "file.txt": "from a map"}});
    maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
    let script = "echo name=$NAME ip=$ADDRESS mode=$S_mode key=$KEY arg=$0; cat /keys/1 /all/info/app; echo; \
                  while ! grep -q second /keys/2 || ! grep -q soon /all/drain; do sleep 0.05; done; echo followed; \
                  cat /all/token | wc -c; echo said > /dev/termination-log";
    bed.annotated_pod(
        "reader",
        json!({"deepinfer.io/drain": ""}),
        json!({
            "restartPolicy": "Never",
            "containers": [{
                "name": "main", "image": "busybox", "args": ["-c", script, "$(NAME)-$$(NAME)"],
                "env": [
                    {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "1"}}},
                ],
                "envFrom": [{"prefix": "S_", "configMapRef": {"name": "settings"}}],
                "volumeMounts": [
                    {"name": "keys", "mountPath": "/keys"},
                    {"name": "all", "mountPath": "/all"},
                ],
            }],
            "volumes": [
                {"name": "keys", "secret": {"secretName": "keys"}},
                {"name": "all", "projected": {"sources": [
                    {"configMap": {"name": "settings", "items": [{"key": "file.txt", "path": "info/app"}]}},
                    {"downwardAPI": {"items": [{"path": "drain",
                        "fieldRef": {"fieldPath": "metadata.annotations['deepinfer.io/drain']"}}]}},
                    {"serviceAccountToken": {"path": "token", "expirationSeconds": 600}},
                ]}},
            ],
        }),
    )
    .await;
    bed.until("reader", "running", running).await;
    bed.until_logged("reader", "from a map").await;
    let log = bed.nodes.pod_log(&bed.namespace, "reader", "main");
    let address = bed.pods().get("reader").await.unwrap().status.unwrap().pod_ip.unwrap();
    assert!(
        log.contains(&format!("name=reader ip={address} mode=fast key=first key arg=reader-$(NAME)")),
        "{log}"
    );
    assert!(log.contains("first keyfrom a map"), "{log}");

    let more = json!({"stringData": {"2": "second key"}});
    secrets.patch("keys", &PatchParams::default(), &Patch::Merge(&more)).await.unwrap();
    let drain = json!({"metadata": {"annotations": {"deepinfer.io/drain": "soon"}}});
    bed.pods().patch("reader", &PatchParams::default(), &Patch::Merge(&drain)).await.unwrap();
    let pod = bed.until("reader", "done", |pod| phase(pod) == "Succeeded").await;
    let end = first(&pod).unwrap().state.clone().unwrap().terminated.unwrap();
    assert_eq!(
        (end.exit_code, end.reason.as_deref(), end.message.as_deref()),
        (0, Some("Completed"), Some("said\n"))
    );
    assert_eq!(condition(&pod, "Ready"), ("False", "PodCompleted"));
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_reads_logs() {
    let Some(bed) = Bed::start(1).await else { return };
    let script =
        "echo one; echo two >&2; sleep 1; echo three; test -e again || { touch again; exit 7; }; sleep 600";
    bed.script("talker", "Always", script).await;
    bed.until("talker", "restarted", |pod| running(pod) && first(pod).unwrap().restart_count == 1).await;
    bed.until_logged("talker", "three\none\ntwo\nthree\n").await;
    assert_eq!(bed.kubectl_logs("talker", &[]).await, "one\ntwo\nthree\n");
    assert_eq!(bed.kubectl_logs("talker", &["--tail=1"]).await, "three\n");
    assert_eq!(bed.kubectl_logs("talker", &["--previous"]).await, "one\ntwo\nthree\n");
    let stamped = bed.kubectl_logs("talker", &["--timestamps", "-c", "main"]).await;
    assert!(stamped.lines().all(|line| line.starts_with("20")), "{stamped}");
    let last = bed.pods().get("talker").await.unwrap();
    assert_eq!(first(&last).unwrap().last_state.clone().unwrap().terminated.unwrap().exit_code, 7);

    bed.script("counter", "Never", "for i in 1 2 3; do echo line $i; sleep 0.3; done").await;
    bed.until("counter", "started", |pod| phase(pod) != "Pending").await;
    assert_eq!(bed.kubectl_logs("counter", &["--follow"]).await, "line 1\nline 2\nline 3\n");
    let refused = bed.plane.kubectl(&["exec", "-n", &bed.namespace, "talker", "--", "true"]).await.unwrap();
    assert!(!refused.status.success());
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_restart_policy_decides_what_an_exit_code_means() {
    let Some(bed) = Bed::start(1).await else { return };
    bed.pod(
        "never",
        json!({"restartPolicy": "Never", "containers": [{
            "name": "main", "image": "busybox", "args": ["-c", "echo no such model; exit 3"],
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }]}),
    )
    .await;
    bed.script("on-failure", "OnFailure", "test -e tried && exit 0; touch tried; kill -s SEGV $$$$").await;
    let pod = bed.until("never", "failed", |pod| phase(pod) == "Failed").await;
    let end = first(&pod).unwrap().state.clone().unwrap().terminated.unwrap();
    assert_eq!((end.exit_code, end.reason.as_deref()), (3, Some("Error")));
    assert_eq!(end.message.as_deref(), Some("no such model\n"));
    let pod = bed.until("on-failure", "done", |pod| phase(pod) == "Succeeded").await;
    assert_eq!(first(&pod).unwrap().restart_count, 1);
    assert_eq!(first(&pod).unwrap().last_state.clone().unwrap().terminated.unwrap().exit_code, 128 + 11);
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn init_containers_run_in_order_and_sidecars_go_on_beside_the_others() {
    let Some(bed) = Bed::start(1).await else { return };
    let step = |name: &str, script: &str| {
        json!({"name": name, "image": "busybox", "args": ["-c", script],
            "volumeMounts": [{"name": "shared", "mountPath": "/shared"}]})
    };
    let mut sidecar = step(
        "sidecar",
        "touch /shared/up; trap 'sleep 0.5; echo down >> /shared/order; exit 0' TERM; \
        while :; do sleep 0.05; done",
    );
    sidecar["restartPolicy"] = json!("Always");
    sidecar["startupProbe"] =
        json!({"exec": {"command": ["/bin/sh", "-c", "test -e /shared/up"]}, "periodSeconds": 1});
    bed.pod(
        "ordered",
        json!({
            "restartPolicy": "Never",
            "initContainers": [step("first", "echo first >> /shared/order"), sidecar,
                step("last", "test -e /shared/up && echo last >> /shared/order")],
            "containers": [step("main", "echo main >> /shared/order; cat /shared/order")],
            "volumes": [{"name": "shared", "emptyDir": {}}],
        }),
    )
    .await;
    let pod = bed.until("ordered", "done", |pod| phase(pod) == "Succeeded").await;
    assert_eq!(bed.nodes.pod_log(&bed.namespace, "ordered", "main"), "first\nlast\nmain\n");
    let folder = bed.nodes.pod_folder(&bed.namespace, "ordered").unwrap();
    let order = std::fs::read_to_string(folder.join("volumes/shared/order")).unwrap();
    assert_eq!(order, "first\nlast\nmain\ndown\n", "the sidecar ends after the others");
    assert_eq!(condition(&pod, "Initialized").0, "True");
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_missing_is_named_and_waited_for() {
    let Some(bed) = Bed::start(1).await else { return };
    let env = json!([{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "late", "key": "k"}}}]);
    let container =
        json!({"name": "main", "image": "busybox", "args": ["-c", "echo $KEY; sleep 600"], "env": env});
    bed.pod("no-secret", json!({"containers": [container]})).await;
    bed.pod("no-image", json!({"containers": [{"name": "main", "image": "registry.example/unknown:1"}]}))
        .await;
    let volume = json!([{"name": "v", "configMap": {"name": "none"}}]);
    bed.pod("no-map", json!({"containers": [{"name": "main", "image": "busybox"}], "volumes": volume})).await;

    let pod = bed.until("no-secret", "waiting", |pod| waits(pod, "CreateContainerConfigError")).await;
    let message = first(&pod).unwrap().state.clone().unwrap().waiting.unwrap().message.unwrap();
    assert!(message.contains("secret \"late\" not found"), "{message}");
    let pod = bed.until("no-image", "waiting", |pod| waits(pod, "ImagePullBackOff")).await;
    let message = first(&pod).unwrap().state.clone().unwrap().waiting.unwrap().message.unwrap();
    assert!(message.contains("registry.example/unknown:1"), "{message}");
    bed.until("no-map", "waiting", |pod| waits(pod, "ContainerCreating")).await;
    eventually("an event names the missing volume", async || {
        let events = ["get", "events", "-n", &bed.namespace, "-o", "jsonpath={.items[*].message}"];
        bed.plane.kubectl_ok(&events).await.unwrap().contains("configmap \"none\" not found")
    })
    .await;

    let secrets = Api::<Secret>::namespaced(bed.client.clone(), &bed.namespace);
    let data = BTreeMap::from([("k".to_owned(), "here now".to_owned())]);
    let mut secret = Secret { string_data: Some(data), ..Secret::default() };
    secret.metadata.name = Some("late".to_owned());
    secrets.create(&PostParams::default(), &secret).await.unwrap();
    bed.until("no-secret", "running", running).await;
    bed.until_logged("no-secret", "here now").await;
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_pod_may_end_in_peace_until_its_grace_is_over() {
    let Some(bed) = Bed::start(1).await else { return };
    bed.script("polite", "Always", "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done")
        .await;
    let container = json!({"name": "main", "image": "busybox",
        "args": ["-c", "trap '' TERM; echo up; while :; do sleep 1; done"],
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", "touch stopping"]}}}});
    for name in ["deaf", "hurried"] {
        let spec = json!({"terminationGracePeriodSeconds": if name == "deaf" { 2 } else { 600 },
            "containers": [container.clone()]});
        bed.pod(name, spec).await;
    }
    for name in ["polite", "deaf", "hurried"] {
        bed.until(name, "running", running).await;
        bed.until_logged(name, "up").await;
    }
    let deaf = bed.pid("deaf");
    let folder = bed.nodes.pod_folder(&bed.namespace, "deaf").unwrap();
    bed.delete("polite").await;
    bed.until_gone("polite").await;
    bed.until_logged("polite", "bye").await;

    let begin = Instant::now();
    bed.delete("deaf").await;
    eventually("the hook runs before the end", async || folder.join("stopping").exists()).await;
    assert!(alive(deaf));
    bed.until_gone("deaf").await;
    assert!(begin.elapsed() >= Duration::from_secs(2) && !alive(deaf), "{:?}", begin.elapsed());

    // A second delete with a shorter grace counts from now.
    let hurried = bed.pid("hurried");
    bed.delete("hurried").await;
    bed.until("hurried", "leaving", |pod| pod.metadata.deletion_timestamp.is_some()).await;
    assert!(alive(hurried));
    bed.pods().delete("hurried", &DeleteParams::default().grace_period(1)).await.unwrap();
    bed.until_gone("hurried").await;
    assert!(!alive(hurried));
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_outlives_the_nodes() {
    let Some(bed) = Bed::start(1).await else { return };
    bed.script("parent", "Always", "sleep 1000 & echo child=$!; trap '' TERM; wait; sleep 1000").await;
    bed.until("parent", "running", running).await;
    bed.until_logged("parent", "child=").await;
    let pid = bed.pid("parent");
    let log = bed.nodes.pod_log(&bed.namespace, "parent", "main");
    let child: u32 = log.trim().strip_prefix("child=").unwrap().parse().unwrap();
    let folder = bed.nodes.pod_folder(&bed.namespace, "parent").unwrap();
    assert!(alive(pid) && alive(child));
    let name = bed.node(0);
    let nodes = Api::<k8s_openapi::api::core::v1::Node>::all(bed.client.clone());
    assert!(nodes.get_opt(&name).await.unwrap().is_some());
    bed.end().await;
    eventually("both processes end", async || !alive(pid) && !alive(child)).await;
    assert!(!folder.exists());
    assert!(nodes.get_opt(&name).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_of_pods_starts_and_ends_together() {
    let Some(bed) = Bed::start(8).await else { return };
    let begin = Instant::now();
    let names: Vec<_> = (0..32).map(|index| format!("p-{index}")).collect();
    for name in &names {
        bed.script(name, "Always", "echo up; exec sleep 600").await;
    }
    let mut addresses = std::collections::BTreeSet::new();
    for name in &names {
        let pod = bed.until(name, "ready", super::bed::ready).await;
        addresses.insert(pod.status.unwrap().pod_ip.unwrap());
    }
    assert_eq!(addresses.len(), names.len());
    let up = begin.elapsed();
    bed.pods().delete_collection(&DeleteParams::default(), &Default::default()).await.unwrap();
    for name in &names {
        bed.until_gone(name).await;
    }
    println!("32 pods ready in {up:?}, gone in {:?}", begin.elapsed() - up);
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_of_two_rolls() {
    let Some(bed) = Bed::start(2).await else { return };
    let deployment = |version: &str| {
        format!(
            r#"
apiVersion: apps/v1
kind: Deployment
metadata: {{name: web, namespace: {ns}}}
spec:
  replicas: 2
  selector: {{matchLabels: {{app: web}}}}
  template:
    metadata: {{labels: {{app: web}}}}
    spec:
      nodeSelector: {{test: {ns}}}
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: server
        args: [serve, "$(ADDRESS):8080", "{version}"]
        env: [{{name: ADDRESS, valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}}}]
        ports: [{{name: web, containerPort: 8080}}]
        readinessProbe: {{httpGet: {{port: web, path: /}}, periodSeconds: 1}}
"#,
            ns = bed.namespace
        )
    };
    for version in ["one", "two"] {
        bed.plane.apply_yaml(&deployment(version)).await.unwrap();
        let wait = ["rollout", "status", "-n", &bed.namespace, "deployment/web", "--timeout=90s"];
        bed.plane.kubectl_ok(&wait).await.unwrap();
    }
    eventually("the old pods are gone", async || {
        let pods = bed.pods().list(&Default::default()).await.unwrap();
        let args = |pod: &k8s_openapi::api::core::v1::Pod| {
            format!("{:?}", pod.spec.as_ref().unwrap().containers[0].args)
        };
        pods.items.len() == 2 && pods.items.iter().all(|pod| args(pod).contains("two"))
    })
    .await;
    bed.end().await;
}
