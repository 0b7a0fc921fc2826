//! What a test can do to nodes and pods, and see of them.

use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, bail};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::ProcessNodes;
use super::faults::Fault;
use super::log;
use super::node::{Link, Node};
use super::pod::context::Context;
use crate::children::{Signal, send};

impl ProcessNodes {
    /// Takes the power of a node: processes are dead when this returns, lease and status stop. Its pods stay as they
    /// are in the API server, which finds out by itself.
    ///
    /// # Errors
    /// If there is no such node.
    pub async fn power_off(&self, node: &str) -> anyhow::Result<()> {
        let node = self.node(node)?;
        node.link.send_replace(Link::Off);
        node.clear().await;
        Ok(())
    }

    /// Gives the power back: the node is ready again and starts what is still bound to it.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn power_on(&self, node: &str) -> anyhow::Result<()> {
        let node = self.node(node)?;
        *node.boot.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        node.link.send_replace(Link::On);
        Ok(())
    }

    /// Marks a node unschedulable, or schedulable again.
    ///
    /// # Errors
    /// If the API server cannot be reached.
    pub async fn cordon(&self, node: &str, cordoned: bool) -> anyhow::Result<()> {
        let api = Api::<NodeObject>::all(self.shared.client.clone());
        let change = json!({ "spec": { "unschedulable": cordoned } });
        api.patch(node, &PatchParams::default(), &Patch::Merge(&change)).await?;
        Ok(())
    }

    /// Cuts a node off: its pods run on and reach nobody, nobody reaches them, its lease is not renewed.
    ///
    /// # Errors
    /// If there is no such node, or pods have no namespaces.
    pub fn cut_node(&self, node: &str) -> anyhow::Result<()> {
        let node = self.node(node)?;
        node.link.send_replace(Link::Cut);
        self.set_cables(&node, false)
    }

    /// Undoes [`ProcessNodes::cut_node`].
    ///
    /// # Errors
    /// As for cutting.
    pub fn mend_node(&self, node: &str) -> anyhow::Result<()> {
        let node = self.node(node)?;
        self.set_cables(&node, true)?;
        node.link.send_replace(Link::On);
        Ok(())
    }

    fn set_cables(&self, node: &Node, up: bool) -> anyhow::Result<()> {
        node.contexts().iter().try_for_each(|context| self.set_cable(context, up))
    }

    fn set_cable(&self, context: &Context, up: bool) -> anyhow::Result<()> {
        context.cable_cut.store(!up, Ordering::Relaxed);
        self.shared.network.set_cable(&context.network, up)
    }

    /// Cuts the network of one pod. Its node still sees it, as the kubelet of a real node would.
    ///
    /// # Errors
    /// If there is no such pod, or pods have no namespaces.
    pub fn cut_pod(&self, namespace: &str, pod: &str) -> anyhow::Result<()> {
        self.set_cable(&*self.pod(namespace, pod)?, false)
    }

    /// Undoes [`ProcessNodes::cut_pod`].
    ///
    /// # Errors
    /// As for cutting.
    pub fn mend_pod(&self, namespace: &str, pod: &str) -> anyhow::Result<()> {
        self.set_cable(&*self.pod(namespace, pod)?, true)
    }

    /// Makes every start of matching containers take longer. A pattern is part of an image, of `namespace/pod` or of a
    /// container's name.
    pub fn slow_start(&self, pattern: &str, delay: Duration) {
        self.shared.faults.add(pattern, Fault::SlowStart(delay));
    }

    /// Makes the images of matching containers impossible to pull.
    pub fn image_pull_error(&self, pattern: &str) {
        self.shared.faults.add(pattern, Fault::PullError);
    }

    /// Makes matching containers end at once with exit code 1, from their next start on.
    pub fn crash_loop(&self, pattern: &str) {
        self.shared.faults.add(pattern, Fault::CrashLoop);
    }

    /// Takes back the faults of a pattern.
    pub fn clear_faults(&self, pattern: &str) {
        self.shared.faults.clear(pattern);
    }

    /// Breaks one device of a node, one in use if there is one: the node offers one less, and the status of the
    /// container that holds it says so.
    ///
    /// # Errors
    /// If there is no such node, or no healthy device.
    pub fn device_unhealthy(&self, node: &str, resource: &str) -> anyhow::Result<()> {
        let node = self.node(node)?;
        if !node.devices().break_one(resource) {
            bail!("node {} has no healthy {resource} to break", node.spec.name);
        }
        tell_all(&node);
        Ok(())
    }

    /// Heals all devices of a resource.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn device_healthy(&self, node: &str, resource: &str) -> anyhow::Result<()> {
        let node = self.node(node)?;
        node.devices().heal(resource);
        tell_all(&node);
        Ok(())
    }

    /// Sends a signal to the process of a container.
    ///
    /// # Errors
    /// If it does not run.
    pub fn signal(&self, namespace: &str, pod: &str, container: &str, signal: Signal) -> anyhow::Result<()> {
        let pid = self.pid_of(namespace, pod, container);
        let pid = pid.with_context(|| format!("container {container} of {namespace}/{pod} does not run"))?;
        Ok(send(pid, signal)?)
    }

    /// The process of a container, if it runs.
    pub fn pid_of(&self, namespace: &str, pod: &str, container: &str) -> Option<u32> {
        let context = self.shared.pod(namespace, pod)?;
        let views = context.board.borrow();
        views.iter().find(|view| view.name == container)?.pid
    }

    /// Everything a container has printed, over all its starts. Works after the pod is gone.
    pub fn pod_log(&self, namespace: &str, pod: &str, container: &str) -> String {
        let Some(folder) = self.shared.logs(namespace, pod) else { return String::new() };
        let runs = (0..).map(|run| folder.join(format!("{container}.{run}.log")));
        runs.take_while(|path| path.exists()).map(|path| log::text(&path)).collect()
    }

    /// The folder in which a pod's volumes and files lie, while it is there.
    pub fn pod_folder(&self, namespace: &str, pod: &str) -> Option<std::path::PathBuf> {
        Some(self.shared.pod(namespace, pod)?.folder.clone())
    }

    fn pod(&self, namespace: &str, pod: &str) -> anyhow::Result<Arc<Context>> {
        self.shared.pod(namespace, pod).with_context(|| format!("pod {namespace}/{pod} does not run here"))
    }
}

/// Has the status of a node and of its pods looked at again.
fn tell_all(node: &Node) {
    node.changed.notify_one();
    node.contexts().iter().for_each(|context| context.board.send_modify(|_| {}));
}
