//! `controlplane up`: everything at once for a person, until Ctrl-C.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{UpArgs, cache_folder};
use crate::binaries::{self, Need, workspace_binary};
use crate::nodes::{NodeOptions, NodeSpec, ProcessNodes};
use crate::pretend::{PretendNodes, PretendOptions};
use crate::{ControlPlane, Operator, OperatorOptions, Options, install};

/// How long the operator may take to be ready.
const OPERATOR_READY: Duration = Duration::from_secs(60);
/// The resource that nodes claim to have.
const ACCELERATOR: &str = "nvidia.com/gpu";
/// The label that names a fabric domain.
const DOMAIN: &str = "nvidia.com/gpu.clique";

/// The gateways' pods.
const GATEWAYS: &str = "app.kubernetes.io/component=gateway";
/// A first request, for the model of the example.
const QUESTION: &str = r#"{"model": "tiny-v41", "temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}"#;

/// Everything that is up, in the order in which it ends.
struct Cluster {
    operator: Option<Operator>,
    nodes: ProcessNodes,
    pretend: Option<PretendNodes>,
    plane: ControlPlane,
}

/// Starts it, says what to type, waits for Ctrl-C or SIGTERM, and cleans up.
///
/// # Errors
/// If something does not start.
pub fn run(args: &UpArgs) -> anyhow::Result<()> {
    if args.nodes == 0 && args.pretend == 0 {
        bail!("--nodes 0: without nodes no pod can run; give --nodes or --pretend at least 1");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let ended = async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        tokio::pin!(ended);
        let cluster = tokio::select! {
            cluster = start(args) => cluster?,
            () = &mut ended => return Ok(()),
        };
        let kubeconfig = cluster.plane.kubeconfig()?;
        if !args.unlisted {
            remember(&kubeconfig)?;
        }
        explain(&cluster, &kubeconfig)?;
        ended.await;
        eprintln!("controlplane: ending");
        stop(cluster, args.keep).await
    })
}

/// The kubeconfig of the cluster that was started last and is still there.
///
/// # Errors
/// If there is none.
pub fn current_kubeconfig() -> anyhow::Result<PathBuf> {
    let note = fs::read_to_string(note_path()).unwrap_or_default();
    let path = PathBuf::from(note.trim());
    if !path.is_file() {
        bail!("no cluster is up: start one with `cargo run -p deepinfer-controlplane -- up`");
    }
    Ok(path)
}

fn note_path() -> PathBuf {
    cache_folder().join("current")
}

fn remember(kubeconfig: &Path) -> anyhow::Result<()> {
    let path = note_path();
    fs::write(&path, kubeconfig.display().to_string()).with_context(|| format!("writing {}", path.display()))
}

async fn start(args: &UpArgs) -> anyhow::Result<Cluster> {
    let agent = tokio::task::spawn_blocking(|| workspace_binary("deepinfer-agent")).await??;
    let gateway = tokio::task::spawn_blocking(|| workspace_binary("deepinfer-gateway")).await??;
    let plane = ControlPlane::start(Options::default()).await?;
    if args.keep {
        plane.keep_files();
    }
    say(&format!("control plane ready in {:.1} s", plane.started_in().as_secs_f32()));
    install::crds(&plane).await?;

    let begin = Instant::now();
    let images = NodeOptions::default()
        .image("gateway", gateway)
        .image("engine", agent)
        .host_path("/models", args.models.clone());
    let specs = (0..args.nodes).map(|index| node(args, "node", index)).collect();
    let nodes = ProcessNodes::start(plane.client(), images, specs).await?;
    let pretend = pretend(args, &plane).await?;
    say(&format!("nodes registered in {:.1} s", begin.elapsed().as_secs_f32()));

    let operator = if args.without_operator { None } else { Some(operator(args, &plane, &nodes).await?) };
    Ok(Cluster { operator, nodes, pretend, plane })
}

async fn operator(args: &UpArgs, plane: &ControlPlane, nodes: &ProcessNodes) -> anyhow::Result<Operator> {
    install::operator(plane, &install::InstallOptions::default()).await?;
    let options = OperatorOptions {
        fleet_host: IpAddr::from(nodes.host_address()),
        flags: args.operator_flags.clone(),
        ..OperatorOptions::default()
    };
    let begin = Instant::now();
    let operator = Operator::start(plane, options).await?;
    operator.wait_ready(OPERATOR_READY).await?;
    say(&format!("operator ready in {:.1} s", begin.elapsed().as_secs_f32()));
    Ok(operator)
}

async fn pretend(args: &UpArgs, plane: &ControlPlane) -> anyhow::Result<Option<PretendNodes>> {
    if args.pretend == 0 {
        return Ok(None);
    }
    tokio::task::spawn_blocking(|| binaries::ensure(Need::Kwok)).await??;
    let specs = (0..args.pretend).map(|index| node(args, "pretend", index)).collect();
    let kubeconfig = plane.kubeconfig()?;
    let nodes = PretendNodes::start(plane.client(), &kubeconfig, specs, &PretendOptions::default()).await?;
    nodes.wait_ready(Duration::from_secs(120)).await?;
    Ok(Some(nodes))
}

/// Nodes fill one domain after the other, as racks do.
fn node(args: &UpArgs, prefix: &str, index: usize) -> NodeSpec {
    let count = if prefix == "node" { args.nodes } else { args.pretend };
    let domain = index * args.domains.max(1) / count.max(1);
    let spec = NodeSpec::new(format!("{prefix}-{index}"))
        .label(DOMAIN, format!("{prefix}-domain-{domain}"))
        .label("topology.kubernetes.io/zone", "local");
    match args.accelerators {
        0 => spec,
        count => spec.resource(ACCELERATOR, count.to_string()),
    }
}

fn explain(cluster: &Cluster, kubeconfig: &Path) -> anyhow::Result<()> {
    let tools = binaries::kubectl_folder()?;
    let ours = workspace_binary("kubectl-deepinfer").ok();
    let plugin =
        ours.as_deref().and_then(Path::parent).map(|p| format!("{}:", p.display())).unwrap_or_default();
    println!("\nThe cluster is up. In another terminal:\n");
    println!("  export KUBECONFIG={}", kubeconfig.display());
    println!("  export PATH={}:{plugin}$PATH\n", tools.display());
    println!("  kubectl get nodes");
    if cluster.operator.is_some() {
        println!("  kubectl apply -f examples/clusters/kubernetes.yaml");
        println!("  kubectl get dic --watch                # until READY is True");
        println!("  kubectl deepinfer status");
        println!(
            "  IP=$(kubectl get pods -l {GATEWAYS} -o jsonpath='{{.items[0].status.podIP}}')\n  \
             curl -s http://$IP:8000/v1/chat/completions -H 'content-type: application/json' -d '{QUESTION}'"
        );
        println!("  kubectl delete -f examples/clusters/kubernetes.yaml");
    }
    println!("\nLogs and data: {}", cluster.plane.folder().display());
    println!("Ctrl-C here ends everything.");
    Ok(())
}

/// The operator first, so that it does not mend what is being taken apart.
async fn stop(cluster: Cluster, keep: bool) -> anyhow::Result<()> {
    let Cluster { operator, nodes, pretend, plane } = cluster;
    if let Some(operator) = operator {
        operator.terminate(Duration::from_secs(10)).await?;
    }
    nodes.stop().await?;
    drop(pretend);
    let folder = plane.folder().to_path_buf();
    plane.stop();
    // Another one may have been started meanwhile.
    if current_kubeconfig().is_err() {
        let _ = fs::remove_file(note_path());
    }
    if keep {
        eprintln!("controlplane: data and logs are in {}", folder.display());
    }
    Ok(())
}

fn say(text: &str) {
    eprintln!("controlplane: {text}");
}
