//! Agents of a test and the view that names them; what a planner would do.

use std::sync::Arc;
use std::time::Duration;

use deepinfer_agent::{AgentArgs, AgentHandle, AgentOptions, begin};
use deepinfer_protocol::agent_status::{AgentPhase, Role};
use deepinfer_protocol::fleet::{FleetMember, FleetView, Leader};
use deepinfer_protocol::{Epoch, Generation};
use deepinfer_transport::ClusterKey;
use tokio::sync::watch;

use crate::oracle::checkpoint_dir;

pub const DEADLINE: Duration = Duration::from_secs(120);

pub struct Fleet {
    pub key: ClusterKey,
    pub agents: Vec<AgentHandle>,
    view: watch::Sender<Arc<FleetView>>,
}

pub fn args(role: &str, name: &str, extra: &[&str]) -> AgentArgs {
    let checkpoint = checkpoint_dir().display().to_string();
    let mut flags = vec![
        format!("--name={name}"),
        format!("--role={role}"),
        format!("--checkpoint={checkpoint}"),
        "--data-listen=127.0.0.1:0".to_owned(),
        "--control-listen=127.0.0.1:0".to_owned(),
        "--threads=1".to_owned(),
        "--memory=256MiB".to_owned(),
        "--fault-injection".to_owned(),
        // Tests share a busy machine: a pause of a thread is not a lost peer.
        "--missed-heartbeats=40".to_owned(),
    ];
    if role == "decode" {
        flags.push("--supernode=sn-0".to_owned());
    }
    flags.extend(extra.iter().map(|&flag| flag.to_owned()));
    AgentArgs::from_flags(&flags).expect("good flags")
}

impl Fleet {
    pub fn new() -> Self {
        let key = ClusterKey::new(Generation(1), [9; 32]);
        Self { key, agents: Vec::new(), view: watch::channel(Arc::default()).0 }
    }

    /// One prefill worker and one supernode of one agent, ready.
    pub async fn pair(prefill: &[&str], decode: &[&str]) -> Self {
        let mut fleet = Self::new();
        fleet.add(args("prefill", "p-0", prefill)).await;
        fleet.add(args("decode", "sn-0-0", decode)).await;
        for agent in &fleet.agents {
            tokio::time::timeout(DEADLINE, agent.ready()).await.expect("in time").expect("ready");
        }
        fleet.publish();
        fleet
    }

    pub async fn add(&mut self, args: AgentArgs) {
        let handle = begin(AgentOptions::new(args), self.view.subscribe(), self.key.clone(), |_| {}).await;
        self.agents.push(handle.expect("ports are free"));
    }

    pub fn agent(&self, name: &str) -> &AgentHandle {
        self.agents.iter().find(|agent| agent.name().as_str() == name).expect("an agent of the test")
    }

    pub fn watch(&self) -> watch::Receiver<Arc<FleetView>> {
        self.view.subscribe()
    }

    /// Tells everybody who is there now; the first agent of a role leads.
    pub fn publish(&self) {
        let statuses: Vec<_> = self.agents.iter().map(|agent| (agent, agent.status())).collect();
        let before = self.view.borrow().clone();
        let leader = |role, before: &Option<Leader>| {
            let agent = statuses.iter().find(|(_, status)| status.role == role)?.1.name.clone();
            let epoch = match before {
                Some(before) if before.agent == agent => before.epoch,
                before => before.as_ref().map_or(Epoch(1), |before| before.epoch.next()),
            };
            Some(Leader { agent, epoch })
        };
        let members = statuses.iter().map(|(agent, status)| FleetMember {
            name: status.name.clone(),
            role: status.role,
            supernode: status.supernode.clone(),
            index: status.index,
            first_rank: 0,
            ranks: status.ranks,
            data: agent.data_addr(),
            control: agent.control_addr(),
            serving: status.accepting && status.phase == AgentPhase::Serving,
            kv_epoch: status.kv_epoch.clone(),
        });
        let view = FleetView {
            generation: before.generation.next(),
            cluster: "test".to_owned(),
            members: members.collect(),
            prefill_leader: leader(Role::Prefill, &before.prefill_leader),
            decode_leader: leader(Role::Decode, &before.decode_leader),
            closed: false,
            rebuilding: Vec::new(),
        };
        self.view.send_replace(Arc::new(view));
    }

    pub async fn stop(&self) {
        for agent in &self.agents {
            agent.stop().await;
        }
    }
}

/// Waits until a condition holds.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(DEADLINE, waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
}
