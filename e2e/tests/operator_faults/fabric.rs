//! ComputeDomains on the real API server, controllers and scheduler; a small program plays NVIDIA's driver.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use deepinfer_controlplane::proxy::{On, Verb};
use deepinfer_crds::names::label;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use super::rig::{CLUSTER, NODES, PATIENCE, Rig, cluster, names, node_name, run, until};

const DRIVER: &str = "compute-domain.nvidia.com";
const CHANNELS: &str = "compute-domain-default-channel.nvidia.com";
/// The node label that says which ComputeDomain a node is in.
const LABEL: &str = "resource.nvidia.com/computeDomain";
/// The driver's own finalizer.
const FINALIZER: &str = "resource.nvidia.com/computeDomain";
/// Nodes of a supernode: two of these fit into no domain of eight.
const WIDTH: usize = 5;

/// What the driver installs: its kind, the class of its devices, and a channel on each node.
fn installed() -> String {
    let mut text = format!(
        "---\napiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\n\
         metadata: {{name: computedomains.resource.nvidia.com}}\nspec:\n  group: resource.nvidia.com\n  \
         scope: Namespaced\n  names: {{plural: computedomains, kind: ComputeDomain, singular: computedomain}}\n  \
         versions:\n  - name: v1beta1\n    served: true\n    storage: true\n    subresources: {{status: {{}}}}\n    \
         schema:\n      openAPIV3Schema: {{type: object, x-kubernetes-preserve-unknown-fields: true}}\n\
         ---\napiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {{name: {CHANNELS}}}\nspec:\n  \
         selectors: [{{cel: {{expression: \"device.driver == '{DRIVER}'\"}}}}]\n"
    );
    for n in 0..NODES {
        let node = node_name(n);
        text += &format!(
            "---\napiVersion: resource.k8s.io/v1\nkind: ResourceSlice\nmetadata: {{name: {node}-channels}}\n\
             spec:\n  driver: {DRIVER}\n  nodeName: {node}\n  \
             pool: {{name: {node}, generation: 1, resourceSliceCount: 1}}\n  devices: [{{name: channel-0}}]\n"
        );
    }
    text
}

/// Plays the driver: makes the template of claims, marks the nodes of bound pods, reports them, and cleans up after a
/// ComputeDomain that is deleted, once it may.
struct Driver {
    client: Client,
    namespace: String,
    may_clean: Arc<AtomicBool>,
}

impl Driver {
    async fn follow(self) {
        loop {
            // Objects come and go while it looks; the next look sees it.
            if let Err(error) = self.look().await {
                println!("  the driver: {error:#}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn look(&self) -> Result<()> {
        let domains = computedomains(&self.client, &self.namespace);
        for domain in domains.list(&ListParams::default()).await?.items {
            if domain.metadata.deletion_timestamp.is_none() {
                self.serve(&domain).await?;
            } else if self.may_clean.load(Ordering::Relaxed) {
                self.clean(&domain).await?;
            }
        }
        Ok(())
    }

    async fn serve(&self, domain: &DynamicObject) -> Result<()> {
        let name = domain.name_any();
        let domains = computedomains(&self.client, &self.namespace);
        if domain.finalizers().is_empty() {
            let hold = json!({"metadata": {"finalizers": [FINALIZER]}});
            domains.patch(&name, &PatchParams::default(), &Patch::Merge(hold)).await?;
        }
        let wanted = &domain.data["spec"]["channel"]["resourceClaimTemplate"]["name"];
        let template = wanted.as_str().context("the ComputeDomain names no template of claims")?;
        let templates = self.templates();
        if templates.get_opt(template).await?.is_none() {
            let object: ResourceClaimTemplate = serde_json::from_value(json!({
                "metadata": {"name": template},
                "spec": {"spec": {"devices": {"requests": [{
                    "name": "channel",
                    "exactly": {"deviceClassName": CHANNELS, "allocationMode": "ExactCount", "count": 1},
                }]}}},
            }))?;
            templates.create(&PostParams::default(), &object).await?;
        }
        let uid = domain.uid().unwrap_or_default();
        let mut members = BTreeSet::new();
        for pod in self.pods(&name).await? {
            if let Some(node) = pod.spec.and_then(|spec| spec.node_name) {
                self.mark(&node, Some(&uid)).await?;
                members.insert(node);
            }
        }
        let nodes: Vec<Value> = members.iter().map(|node| json!({"name": node, "status": "Ready"})).collect();
        let status = json!({"status": {"status": "Ready", "nodes": nodes}});
        if domain.data["status"] != status["status"] {
            domains.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await?;
        }
        Ok(())
    }

    async fn clean(&self, domain: &DynamicObject) -> Result<()> {
        let name = domain.name_any();
        if !self.pods(&name).await?.is_empty() {
            return Ok(());
        }
        for node in marked(&self.client, domain.uid().as_deref()).await? {
            self.mark(&node, None).await?;
        }
        let _ = self.templates().delete(&format!("{name}-imex"), &DeleteParams::default()).await;
        let free = json!({"metadata": {"finalizers": null}});
        let domains = computedomains(&self.client, &self.namespace);
        domains.patch(&name, &PatchParams::default(), &Patch::Merge(free)).await?;
        Ok(())
    }

    async fn mark(&self, node: &str, uid: Option<&str>) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let label = json!({"metadata": {"labels": {LABEL: uid}}});
        nodes.patch(node, &PatchParams::default(), &Patch::Merge(label)).await?;
        Ok(())
    }

    async fn pods(&self, supernode: &str) -> Result<Vec<Pod>> {
        pods_of(&self.client, &self.namespace, supernode).await
    }

    fn templates(&self) -> Api<ResourceClaimTemplate> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}

fn computedomains(client: &Client, namespace: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("resource.nvidia.com", "v1beta1", "ComputeDomain");
    Api::namespaced_with(client.clone(), namespace, &ApiResource::from_gvk(&kind))
}

async fn pods_of(client: &Client, namespace: &str, supernode: &str) -> Result<Vec<Pod>> {
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let of_it = ListParams::default().labels(&format!("{}={supernode}", label::SUPERNODE));
    Ok(api.list(&of_it).await?.items)
}

/// Nodes in this ComputeDomain, or in any.
async fn marked(client: &Client, uid: Option<&str>) -> Result<BTreeSet<String>> {
    let api: Api<Node> = Api::all(client.clone());
    let which = uid.map_or_else(|| LABEL.to_owned(), |uid| format!("{LABEL}={uid}"));
    let nodes = api.list(&ListParams::default().labels(&which)).await?.items;
    Ok(nodes.iter().map(ResourceExt::name_any).collect())
}

/// Where the pods of a supernode are.
async fn places(rig: &Rig, supernode: &str) -> Result<BTreeSet<String>> {
    let pods = pods_of(&rig.client, &rig.namespace, supernode).await?;
    Ok(pods.into_iter().filter_map(|pod| pod.spec?.node_name).collect())
}

/// Each supernode has one ComputeDomain that it owns, made before its pods, and each of its pods a channel of it, on the
/// node where it runs.
async fn has_its_fabric(rig: &Rig, supernode: &DynamicObject) -> Result<()> {
    let name = supernode.name_any();
    let domain = computedomains(&rig.client, &rig.namespace).get(&name).await?;
    let owner = domain.owner_references().first().context("the ComputeDomain has no owner")?;
    ensure!(Some(&owner.uid) == supernode.uid().as_ref(), "{name} is not the owner: {owner:?}");
    let claims: Api<ResourceClaim> = Api::namespaced(rig.client.clone(), &rig.namespace);
    let pods = pods_of(&rig.client, &rig.namespace, &name).await?;
    ensure!(pods.len() == WIDTH, "{name} has pods {:?}", names(&pods));
    for pod in &pods {
        let of_pod = pod.status.as_ref().and_then(|s| s.resource_claim_statuses.as_ref()?.first());
        let claim = of_pod.and_then(|c| c.resource_claim_name.as_deref());
        let claim = claims.get(claim.with_context(|| format!("{} has no claim", pod.name_any()))?).await?;
        let given = claim.status.and_then(|status| status.allocation?.devices?.results);
        let given = given.into_iter().flatten().next().context("the claim has no device")?;
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        ensure!(given.driver == DRIVER && Some(&given.pool) == node.as_ref(), "{given:?}, pod on {node:?}");
    }
    let made = rig.proxy.log(&On::verbs(&[Verb::Create]).kind("computedomains").kind("pods"));
    let at = |kind: &str, start: &str| {
        let mut these = made.iter().filter(|entry| entry.asked.resource == kind);
        these.find(|entry| entry.asked.name.starts_with(start)).map(|entry| entry.number)
    };
    let (fabric, first) = (at("computedomains", &name), at("pods", &name));
    ensure!(fabric.is_some() && fabric < first, "ComputeDomain {fabric:?}, first pod {first:?}");
    Ok(())
}

#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn a_rebuild_on_the_same_nodes_waits_until_the_driver_has_cleaned_up() {
    run("ComputeDomains", async |mut rig: Rig| {
        rig.plane.apply_yaml(&installed()).await?;
        let may_clean = Arc::new(AtomicBool::new(true));
        let driver = Driver {
            client: rig.client.clone(),
            namespace: rig.namespace.clone(),
            may_clean: may_clean.clone(),
        };
        let driver = tokio::spawn(driver.follow());
        let told = life(&mut rig, &may_clean).await;
        driver.abort();
        let domains = computedomains(&rig.client, &rig.namespace);
        for domain in domains.list(&ListParams::default()).await?.items {
            let free = json!({"metadata": {"finalizers": null}});
            domains.patch(&domain.name_any(), &PatchParams::default(), &Patch::Merge(free)).await?;
        }
        // The other tests know no driver.
        let away = ["delete", "--ignore-not-found", "-f", "-"];
        let gone = rig.plane.kubectl_with(&away, &installed()).await?;
        told?;
        ensure!(gone.status.success(), "{}", String::from_utf8_lossy(&gone.stderr));
        Ok(())
    });
}

async fn life(rig: &mut Rig, may_clean: &AtomicBool) -> Result<()> {
    let operator = rig.operator().await?;
    let mut spec = cluster(CLUSTER, 2);
    spec["spec"]["accelerator"]["topologyProfile"] = json!("nvl72");
    spec["spec"]["accelerator"]["computeDomain"] = json!("Required");
    spec["spec"]["decode"]["supernode"]["nodes"] = json!(WIDTH);
    rig.apply(&spec).await?;
    rig.ready(CLUSTER).await?;
    let first = rig.supernodes().await?;
    ensure!(first.len() == 2, "{:?}", names(&first));
    for supernode in &first {
        has_its_fabric(rig, supernode).await?;
    }
    let busy = marked(&rig.client, None).await?;
    ensure!(busy.len() == 2 * WIDTH, "in a ComputeDomain: {busy:?}");

    // A lost pod: no domain has room beside what is there, so the same nodes are used again.
    may_clean.store(false, Ordering::Relaxed);
    let lost = first[0].name_any();
    let old_places = places(rig, &lost).await?;
    rig.pods().delete(&format!("{lost}-00"), &DeleteParams::default().grace_period(0)).await?;
    let waits = until(Duration::from_secs(60), async || {
        let status = rig.api("DeepInferCluster").get(CLUSTER).await?.data["status"].clone();
        let all = status["waiting"].as_array().into_iter().flatten();
        let fabric = all.clone().find(|waiting| waiting["reason"] == "FabricCleanup").cloned();
        Ok(fabric.map(|line| line["message"].as_str().unwrap_or_default().to_owned()))
    });
    let Ok(waits) = waits.await else {
        let cluster = rig.api("DeepInferCluster").get(CLUSTER).await?.data["status"].clone();
        let supernodes = rig.supernodes().await?;
        let supernodes: Vec<_> = supernodes.iter().map(|s| (s.name_any(), &s.data)).collect();
        bail!("nothing says that the driver is waited for: {cluster:#}\n{supernodes:#?}");
    };
    ensure!(waits.contains(&lost) || waits.contains(LABEL), "{waits}");
    // It goes on waiting, and nothing is bound meanwhile.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let known: BTreeSet<String> = names(&first).into_iter().collect();
    let now = rig.supernodes().await?;
    let new = now.iter().map(ResourceExt::name_any).find(|name| !known.contains(name));
    let new = new.context("there is no new incarnation")?;
    ensure!(places(rig, &new).await?.is_empty(), "pods are bound beside the old ComputeDomain");

    may_clean.store(true, Ordering::Relaxed);
    until(PATIENCE, async || {
        let supernode = rig.api("Supernode").get(&new).await?;
        Ok((supernode.data["status"]["phase"] == "Serving").then_some(()))
    })
    .await
    .with_context(|| format!("{new} does not serve"))?;
    rig.ready(CLUSTER).await?;
    let new_places = places(rig, &new).await?;
    ensure!(!new_places.is_disjoint(&old_places), "{new_places:?} has none of {old_places:?}");
    has_its_fabric(rig, &rig.api("Supernode").get(&new).await?).await?;

    rig.delete(CLUSTER).await?;
    rig.gone(CLUSTER).await?;
    until(PATIENCE, async || {
        let domains = computedomains(&rig.client, &rig.namespace).list(&ListParams::default()).await?;
        let left = (domains.items.len(), marked(&rig.client, None).await?.len());
        Ok((left == (0, 0)).then_some(()))
    })
    .await
    .context("ComputeDomains stay behind")?;
    ensure!(operator.exit_status().is_none(), "the operator ended");
    Ok(())
}
