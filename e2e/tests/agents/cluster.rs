//! A cluster of processes in a folder of its own.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use deepinfer_protocol::Generation;
use deepinfer_protocol::agent_status::AgentStatus;
use deepinfer_transport::ClusterKey;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::http::{Call, Response};
use crate::operator::{Operator, PATH};
use crate::pods::{Pod, address, model, until};

/// What a cluster is made of.
#[derive(Clone, Debug)]
pub struct Spec {
    pub prefill: usize,
    /// Pods of each supernode.
    pub supernodes: Vec<u16>,
    pub gateways: usize,
    /// Further flags of all agents.
    pub agent_flags: Vec<&'static str>,
    /// Further flags of all gateways.
    pub gateway_flags: Vec<&'static str>,
}

impl Spec {
    pub fn of(prefill: usize, supernodes: &[u16], gateways: usize) -> Self {
        Self {
            prefill,
            supernodes: supernodes.to_vec(),
            gateways,
            // Tests share a busy machine: a pause of a thread is not a lost peer. A killed process is noticed by its
            // connection.
            agent_flags: vec!["--missed-heartbeats=40"],
            gateway_flags: vec!["--missed-heartbeats=40"],
        }
    }
}

/// See the module.
pub struct Cluster {
    pub operator: Operator,
    pub key: ClusterKey,
    pub agents: Vec<Pod>,
    pub gateways: Vec<Pod>,
    spec: Spec,
    folder: TempDir,
}

pub const FIRST_KEY: [u8; 32] = [0x11; 32];

impl Cluster {
    /// Starts and waits until the gateways are ready and every agent serves.
    #[track_caller]
    pub fn start(spec: Spec) -> Self {
        let mut cluster = Self::empty(spec.clone());
        for n in 0..spec.prefill {
            cluster.prefill(&format!("p-{n}"));
        }
        for (n, pods) in spec.supernodes.iter().enumerate() {
            cluster.supernode(&format!("sn-{n}"), *pods);
        }
        for n in 0..spec.gateways {
            cluster.gateway(&format!("g-{n}"));
        }
        cluster.wait_ready();
        cluster
    }

    /// Only the operator and the folder.
    pub fn empty(spec: Spec) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let key = ClusterKey::new(Generation(1), FIRST_KEY);
        fs::create_dir(folder.path().join("keys")).unwrap();
        fs::write(folder.path().join("keys/1"), hex(&FIRST_KEY)).unwrap();
        let operator = Operator::start(key.clone());
        Self { operator, key, agents: Vec::new(), gateways: Vec::new(), spec, folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Flags of every pod.
    pub fn common(&self, name: &str) -> Vec<String> {
        vec![
            format!("--name={name}"),
            format!("--checkpoint={}", model().display()),
            format!("--key-dir={}", self.path("keys").display()),
            // The first replica is one that is never there.
            format!("--fleet-url=http://127.0.0.1:1,{}", self.operator.url()),
            format!("--fleet-path={PATH}"),
            format!("--ledger={}", self.path(&format!("{name}/fleet.json")).display()),
        ]
    }

    pub fn agent_flags(&self, name: &str, role: &str) -> Vec<String> {
        let mut flags = self.common(name);
        flags.extend([
            format!("--role={role}"),
            format!("--drain-file={}", self.path(&format!("{name}.drain")).display()),
            "--threads=1".to_owned(),
            "--memory=192MiB".to_owned(),
            "--fault-injection".to_owned(),
        ]);
        flags.extend(self.spec.agent_flags.iter().map(|flag| (*flag).to_owned()));
        flags
    }

    pub fn prefill(&mut self, name: &str) {
        let flags = self.agent_flags(name, "prefill");
        self.agent(name, flags);
    }

    pub fn supernode(&mut self, name: &str, pods: u16) {
        for index in 0..pods {
            let pod = format!("{name}-{index:02}");
            let mut flags = self.agent_flags(&pod, "decode");
            flags.extend([format!("--supernode={name}"), format!("--index={index}")]);
            flags.push(format!("--supernode-nodes={pods}"));
            self.agent(&pod, flags);
        }
    }

    pub fn agent(&mut self, name: &str, flags: Vec<String>) {
        let pod = Pod::start("deepinfer-agent", name, address(), flags);
        self.operator.add(name, pod.ip);
        self.agents.push(pod);
    }

    pub fn gateway(&mut self, name: &str) {
        let mut flags = self.common(name);
        flags.extend(["--model-name=tiny".to_owned(), "--default-thinking=off".to_owned()]);
        flags.extend(self.spec.gateway_flags.iter().map(|flag| (*flag).to_owned()));
        self.gateways.push(Pod::start("deepinfer-gateway", name, address(), flags));
    }

    #[track_caller]
    pub fn wait_ready(&self) {
        for agent in &self.agents {
            self.wait_serving(&agent.name);
        }
        self.wait_gateways();
    }

    #[track_caller]
    pub fn wait_gateways(&self) {
        for gateway in 0..self.gateways.len() {
            let ready = || (self.get(self.api(gateway), "/readyz").ok()?.status == 200).then_some(());
            until(&format!("gateway {gateway} is ready"), ready);
        }
    }

    /// Waits until the operator names it as one that serves.
    #[track_caller]
    pub fn wait_serving(&self, name: &str) {
        until(&format!("{name} serves"), || {
            self.operator.view().member(&name.into()).is_some_and(|member| member.serving).then_some(())
        });
    }

    pub fn get(&self, address: SocketAddr, path: &str) -> std::io::Result<Response> {
        Call::new(address, "GET", path).patience(Duration::from_secs(20)).send()
    }

    /// Port of a gateway's API.
    pub fn api(&self, gateway: usize) -> SocketAddr {
        self.gateways[gateway].port(8000)
    }

    #[track_caller]
    pub fn find(&self, agent: &str) -> &Pod {
        self.agents.iter().find(|pod| pod.name == agent).expect("an agent of the test")
    }

    #[track_caller]
    pub fn find_mut(&mut self, agent: &str) -> &mut Pod {
        self.agents.iter_mut().find(|pod| pod.name == agent).expect("an agent of the test")
    }

    /// A signed call to an agent's control port.
    #[track_caller]
    pub fn control(&self, agent: &str, method: &str, path: &str, body: &Value) -> Response {
        let call = Call::new(self.find(agent).port(9810), method, path).signed(&self.key).body(body);
        call.send().unwrap_or_else(|error| panic!("{agent} {path}: {error}"))
    }

    #[track_caller]
    pub fn status(&self, agent: &str) -> AgentStatus {
        let answer = self.control(agent, "GET", "/v1/status", &Value::Null);
        serde_json::from_str(&answer.body).unwrap_or_else(|error| panic!("{error}: {}", answer.body))
    }

    /// What a gateway says of itself.
    #[track_caller]
    pub fn gateway_status(&self, gateway: usize) -> Value {
        let call = Call::new(self.api(gateway), "GET", "/v1/status").signed(&self.key);
        call.send().expect("it answers").json()
    }

    /// Every step of every decode agent takes this much longer.
    pub fn slow_decode(&self, ms: u64) {
        for agent in self.agents.iter().filter(|pod| pod.name.starts_with("sn-")) {
            let fault = json!({"rank": 0, "fault": {"slow_ms": ms}});
            assert_eq!(self.control(&agent.name, "POST", "/v1/fault", &fault).status, 202);
        }
    }

    /// Waits until nobody holds anything: no request, no block.
    #[track_caller]
    pub fn wait_empty(&self, agents: &[&str]) {
        for name in agents {
            until(&format!("{name} holds nothing"), || {
                let status = self.status(name);
                (status.inflight == 0 && status.kv_blocks_used == 0 && status.parked_bytes == 0).then_some(())
            });
        }
    }
}

/// As key files have it.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
