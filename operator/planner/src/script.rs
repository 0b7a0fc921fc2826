//! Planning stories: commands against a world in memory, and what came of them as text. For golden tests and for
//! support: `deepinfer script FILE`.
//!
//! ```text
//! target local | local ranks 2 | kubernetes   what is planned for
//! cluster FILE                               the user applies this file
//! set PATH JSON                              the user edits one field of it: set spec.decode.replicas 2
//! unset PATH                                 ... removes one
//! delete                                     kubectl delete
//! model ready | failed REASON MESSAGE        what is known of the model's files
//! plan                                       shows what would be done
//! run                                        plans, executes and schedules until there is nothing to do
//! step | schedule                            one plan, executed; or the scheduler's turn alone
//! start [PART]                               pods whose name has PART run, their agents load weights
//! serve [PART]                               ... serve
//! busy PART N                                ... have N requests
//! drained [PART]                             ... have nothing left to do
//! silent PART                                ... do not answer any more
//! fail PART REASON                           ... end with an error
//! lose PART                                  ... are gone without a trace
//! end [PART]                                 kubelets take pods away that are being deleted
//! advance SECONDS                            time passes
//! nodes COUNT domain NAME RESOURCE AMOUNT    nodes join (kubernetes), with so many accelerators each
//! node PART ready | notready | cordon | uncordon | gone | taint KEY | untaint KEY | label KEY=VALUE | unlabel KEY
//!           | used RESOURCE AMOUNT           something happens to the nodes whose name has PART
//! driver forms [PART] | cleans [PART]        the fabric driver holds ComputeDomains and marks the nodes of their pods,
//!                                            or lets them go and takes the marks away
//! blind                                      the operator may not read nodes
//! apis [native] [topology] [volcano] [kai] [kueue] [computedomain]   what the API server serves
//! show | status | fleet | explain            prints the world, the status, the fleet, resolved values
//! why | room                                 prints places and what is in the way; accelerators held by domain
//! ```
//!
//! Once there are nodes, a scheduler binds pods to them; pods without a node do not start, and pods on dead nodes do
//! not end.
//!
//! `PART` is part of a pod's name; `#` starts a comment.

mod nodes;
mod scheduler;
mod show;

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use deepinfer_crds::DeepInferCluster;
use deepinfer_protocol::agent_status::{AgentPhase, AgentStatus, Role};
use deepinfer_protocol::{AgentId, Generation, SupernodeId};
use k8s_openapi::api::core::v1::{PodCondition, PodStatus};
use serde_json::Value;
use thiserror::Error;

use crate::action::{Action, AgentCall};
use crate::check::check;
use crate::diff::describe;
use crate::emulate::has_ended;
use crate::nodes::{Apis, NativeVersion};
use crate::object::{Key, Kind, Object};
use crate::plan::{Plan, plan};
use crate::target::{KubernetesTarget, LocalTarget, Target};
use crate::world::{AgentWord, ModelState, World};

/// Plans in a row after which a story is said not to settle.
const MAX_ROUNDS: usize = 50;

/// What is wrong with a story.
#[derive(Debug, Error)]
#[error("line {line}: {message}")]
pub struct ScriptError {
    /// Line of the script, from 1.
    pub line: usize,
    /// What is wrong.
    pub message: String,
    /// The story up to there.
    pub told: String,
}

/// Reads the cluster of a file that a script names.
pub type Load<'a> = &'a dyn Fn(&str) -> Result<DeepInferCluster, String>;

/// Tells a story; gives its text.
///
/// # Errors
/// [`ScriptError`] at the first command that cannot be followed.
pub fn run(script: &str, load: Load<'_>) -> Result<String, ScriptError> {
    let mut story = Story {
        world: World::new("serving", 7),
        target: kubernetes(),
        text: String::new(),
        ports: 0,
        machines: nodes::Machines::default(),
    };
    story.world.now = 1_800_000_000;
    for (number, line) in script.lines().enumerate() {
        let command = line.split('#').next().unwrap_or_default().trim();
        if command.is_empty() {
            continue;
        }
        let _ = writeln!(story.text, "> {command}");
        let words: Vec<&str> = command.split_whitespace().collect();
        if let Err(message) = story.command(&words, load) {
            return Err(ScriptError { line: number + 1, message, told: story.text });
        }
    }
    Ok(story.text)
}

/// The operator as stories have it.
fn kubernetes() -> Target {
    Target::Kubernetes(KubernetesTarget::new("deepinfer-gateway:test", "http://deepinfer-operator:8082"))
}

struct Story {
    world: World,
    target: Target,
    text: String,
    ports: u16,
    machines: nodes::Machines,
}

impl Story {
    fn command(&mut self, words: &[&str], load: Load<'_>) -> Result<(), String> {
        let part = words.get(1).copied().unwrap_or_default();
        match words[0] {
            "target" => self.target(&words[1..])?,
            "cluster" => self.world.user_applies(load(part)?),
            "set" => self.edit(part, Some(&words[2..].join(" ")))?,
            "unset" => self.edit(part, None)?,
            "delete" => self.world.user_deletes(),
            "model" => self.model(&words[1..])?,
            "plan" => self.show_plan(),
            "run" => self.run()?,
            "step" => drop(self.step(true)?),
            "schedule" => drop(self.schedule()?),
            "start" => self.agents(part, AgentPhase::Starting),
            "serve" => self.agents(part, AgentPhase::Serving),
            "drained" => self.agents(part, AgentPhase::Drained),
            "busy" => {
                let requests = words.get(2).and_then(|n| n.parse().ok()).ok_or("busy PART N")?;
                self.each_status(part, |status| status.inflight = requests);
            }
            "silent" => self.silent(part),
            "fail" => self.fail(part, words.get(2).copied().unwrap_or("Error")),
            "lose" => self.lose(part),
            "end" => self.end(part),
            "advance" => self.advance(part.parse().map_err(|_| "advance SECONDS")?),
            "nodes" => self.machines.add(&words[1..], self.world.now)?,
            "node" => self.machines.happen(&words[1..], self.world.now)?,
            "driver" => self.driver(&words[1..])?,
            "blind" => self.machines.blind = true,
            "apis" => self.apis(&words[1..])?,
            "why" => self.why(),
            "room" => self.room(),
            "show" => self.show(),
            "status" => self.status(),
            "fleet" => self.fleet(),
            "explain" => self.explain(),
            other => return Err(format!("unknown command {other:?}")),
        }
        Ok(())
    }

    fn target(&mut self, words: &[&str]) -> Result<(), String> {
        self.target = match words {
            ["kubernetes"] => kubernetes(),
            ["local"] => Target::Local(LocalTarget::new("/models/tiny", "127.0.0.1:8000")),
            ["local", "ranks", n] => {
                let ranks = n.parse().map_err(|_| "target local ranks N")?;
                let local = LocalTarget::new("/models/tiny", "127.0.0.1:8000");
                Target::Local(LocalTarget { ranks: Some(ranks), ..local })
            }
            _ => return Err("target local | local ranks N | kubernetes".to_owned()),
        };
        Ok(())
    }

    fn edit(&mut self, path: &str, value: Option<&str>) -> Result<(), String> {
        let cluster = self.world.cluster().ok_or("no cluster yet")?;
        let mut whole = serde_json::to_value(cluster).map_err(|e| e.to_string())?;
        let (parent, field) = path.rsplit_once('.').ok_or("a path such as spec.decode.replicas")?;
        let mut place = &mut whole;
        for part in parent.split('.') {
            if place[part].is_null() {
                place[part] = Value::Object(serde_json::Map::new());
            }
            place = &mut place[part];
        }
        match value {
            Some(json) => place[field] = serde_json::from_str(json).map_err(|e| format!("{json}: {e}"))?,
            None => {
                place.as_object_mut().ok_or("not an object")?.remove(field);
            }
        }
        let mut cluster: DeepInferCluster =
            serde_json::from_value(whole).map_err(|e| format!("{path}: {e}"))?;
        cluster.status = None;
        self.world.user_applies(cluster);
        Ok(())
    }

    fn model(&mut self, words: &[&str]) -> Result<(), String> {
        self.world.model = match words {
            ["ready"] => ModelState::Ready { digest: "d0d0".to_owned() },
            ["failed", reason, message @ ..] => {
                ModelState::Failed { reason: (*reason).to_owned(), message: message.join(" ") }
            }
            _ => return Err("model ready | failed REASON MESSAGE".to_owned()),
        };
        Ok(())
    }

    /// What the fabric driver does with ComputeDomains, by the name of their supernode.
    fn driver(&mut self, words: &[&str]) -> Result<(), String> {
        let (forms, part) = match *words {
            ["forms", ref part @ ..] => (true, part.first().copied().unwrap_or_default()),
            ["cleans", ref part @ ..] => (false, part.first().copied().unwrap_or_default()),
            _ => return Err("driver forms [PART] | driver cleans [PART]".to_owned()),
        };
        let all = self.world.of(Kind::ComputeDomain).filter(|domain| domain.name().contains(part));
        let domains: Vec<(Key, Option<String>)> = all.map(|d| (d.key(), d.meta().uid.clone())).collect();
        if domains.is_empty() {
            return Err(format!("no ComputeDomain has {part:?} in its name"));
        }
        for (key, uid) in domains {
            if forms {
                self.machines.mark(&self.world, &key.name, &uid.unwrap_or_default());
            } else {
                self.machines.unmark(&uid.unwrap_or_default());
            }
            self.world.others_hold(&key, "resource.nvidia.com/computeDomain", forms);
        }
        Ok(())
    }

    fn apis(&mut self, words: &[&str]) -> Result<(), String> {
        let mut apis = Apis::default();
        for word in words {
            match *word {
                "native" => apis.native_gang = Some(NativeVersion::V1Alpha2),
                "topology" => apis.native_topology = true,
                "volcano" => apis.volcano = true,
                "kai" => apis.kai = true,
                "kueue" => apis.kueue = true,
                "computedomain" => apis.compute_domain = true,
                other => return Err(format!("unknown API {other:?}")),
            }
        }
        self.world.apis = apis;
        Ok(())
    }

    /// What a driver gathers before each plan.
    fn observe(&mut self) {
        if self.target.local().is_none() {
            self.world.nodes = Arc::new(self.machines.observe(&self.world));
        }
    }

    fn show_plan(&mut self) {
        self.observe();
        let plan = plan(&self.world, &self.target);
        self.write_plan(&plan);
    }

    fn write_plan(&mut self, plan: &Plan) {
        if plan.actions.is_empty() {
            self.text.push_str("nothing to do\n");
        }
        self.text.push_str(&describe(&self.world, plan));
        self.text.push_str(&plan.report.to_string());
    }

    fn run(&mut self) -> Result<(), String> {
        for round in 0..MAX_ROUNDS {
            let quiet = self.step(round == 0)?;
            let bound = self.schedule()?;
            if quiet && !bound {
                return Ok(());
            }
        }
        Err(format!("there is still something to do after {MAX_ROUNDS} plans"))
    }

    /// One plan, executed. Gives whether nothing was to be done.
    fn step(&mut self, always_told: bool) -> Result<bool, String> {
        self.observe();
        let plan = plan(&self.world, &self.target);
        let findings = check(&self.world, &plan);
        if let Some(finding) = findings.first() {
            return Err(format!("the plan breaks a rule: {finding}"));
        }
        let quiet = plan.actions.is_empty();
        if !quiet || always_told {
            self.write_plan(&plan);
        }
        self.world.blueprint = Some(plan.blueprint.clone());
        for action in &plan.actions {
            self.world.apply(action).map_err(|conflict| format!("{action}: {conflict}"))?;
            self.obey(action);
        }
        let pods = self.world.of(Kind::Pod).count();
        self.world.settle();
        Ok(quiet && self.world.of(Kind::Pod).count() == pods)
    }

    /// Gives whether a pod was bound, or refused for the first time.
    fn schedule(&mut self) -> Result<bool, String> {
        let changed = scheduler::schedule(&self.machines, &mut self.world);
        self.machines.verify(&self.world)?;
        Ok(changed)
    }

    /// Agents do what they are told.
    fn obey(&mut self, action: &Action) {
        let Action::CallAgent { agent, call } = action else { return };
        let Some(status) = self.world.agents.get_mut(agent).and_then(|w| w.status.as_mut()) else { return };
        status.accepting = matches!(call, AgentCall::Undrain);
        status.phase = match call {
            AgentCall::Undrain => AgentPhase::Serving,
            AgentCall::Drain { .. } if status.inflight > 0 => AgentPhase::Draining,
            AgentCall::Drain { .. } => AgentPhase::Drained,
        };
    }

    /// Names of pods that a command is about.
    fn pods(&self, part: &str) -> Vec<String> {
        let names = self.world.of(Kind::Pod).map(|object| object.name().to_owned());
        names.filter(|name| name.contains(part)).collect()
    }

    fn agents(&mut self, part: &str, phase: AgentPhase) {
        for name in self.pods(part) {
            let Some(Object::Pod(pod)) = self.world.objects.get_mut(&Key::new(Kind::Pod, &name)) else {
                continue;
            };
            if has_ended(pod) || (self.machines.any() && !self.machines.runs(pod)) {
                continue;
            }
            let ready = phase == AgentPhase::Serving;
            let bound = pod.status.take().and_then(|status| status.conditions).unwrap_or_default();
            let bound = bound.into_iter().filter(|condition| condition.type_ == "PodScheduled");
            pod.status = Some(running(ready, bound.collect()));
            let role = match Object::from(pod.clone()).label(deepinfer_crds::names::label::ROLE) {
                Some("prefill") => Role::Prefill,
                Some("decode") => Role::Decode,
                _ => continue,
            };
            self.ports += 2;
            let port = |n: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, 10_000 + n));
            let word = AgentWord {
                data: port(self.ports),
                control: port(self.ports + 1),
                status: None,
                heard: self.world.now,
                silent_since: None,
            };
            let id = AgentId::from(name.as_str());
            let word = self.world.agents.entry(id.clone()).or_insert(word);
            (word.heard, word.silent_since) = (self.world.now, None);
            let inflight = word.status.as_ref().map_or(0, |s| s.inflight);
            let inflight = if phase == AgentPhase::Drained { 0 } else { inflight };
            word.status = Some(status(id, role, phase, inflight));
        }
        self.world.settle();
    }

    fn each_status(&mut self, part: &str, change: impl Fn(&mut AgentStatus)) {
        for name in self.pods(part) {
            if let Some(status) =
                self.world.agents.get_mut(&AgentId::from(name.as_str())).and_then(|w| w.status.as_mut())
            {
                change(status);
            }
        }
    }

    fn silent(&mut self, part: &str) {
        for name in self.pods(part) {
            if let Some(word) = self.world.agents.get_mut(&AgentId::from(name.as_str())) {
                word.status = None;
                word.silent_since.get_or_insert(self.world.now);
            }
        }
    }

    fn fail(&mut self, part: &str, reason: &str) {
        for name in self.pods(part) {
            if let Some(Object::Pod(pod)) = self.world.objects.get_mut(&Key::new(Kind::Pod, &name)) {
                pod.status = Some(PodStatus {
                    phase: Some("Failed".to_owned()),
                    reason: Some(reason.to_owned()),
                    message: Some("exit code 101".to_owned()),
                    ..PodStatus::default()
                });
            }
            self.world.agents.remove(&AgentId::from(name.as_str()));
        }
        self.world.settle();
    }

    fn lose(&mut self, part: &str) {
        for name in self.pods(part) {
            self.world.pod_ended(&name);
            self.world.agents.remove(&AgentId::from(name.as_str()));
        }
        self.world.settle();
    }

    fn end(&mut self, part: &str) {
        let going = self.pods(part).into_iter().filter(|name| match self.world.get(Kind::Pod, name) {
            Some(Object::Pod(pod)) => {
                pod.metadata.deletion_timestamp.is_some() && !self.machines.is_stuck(pod)
            }
            _ => false,
        });
        for name in going.collect::<Vec<_>>() {
            self.world.pod_ended(&name);
            self.world.agents.remove(&AgentId::from(name.as_str()));
        }
        self.world.settle();
    }

    fn advance(&mut self, seconds: i64) {
        self.world.now += seconds;
        let now = self.world.now;
        for word in self.world.agents.values_mut().filter(|w| w.status.is_some()) {
            word.heard = now;
        }
    }
}

fn running(ready: bool, mut conditions: Vec<PodCondition>) -> PodStatus {
    conditions.push(PodCondition {
        type_: "Ready".to_owned(),
        status: if ready { "True" } else { "False" }.to_owned(),
        ..PodCondition::default()
    });
    PodStatus { phase: Some("Running".to_owned()), conditions: Some(conditions), ..PodStatus::default() }
}

fn status(name: AgentId, role: Role, phase: AgentPhase, inflight: u32) -> AgentStatus {
    let supernode = name.as_str().rsplit_once('-').map(|(supernode, _)| SupernodeId::from(supernode));
    AgentStatus {
        supernode: supernode.filter(|_| role == Role::Decode),
        name,
        role,
        index: 0,
        ranks: 1,
        phase,
        reason: String::new(),
        accepting: phase == AgentPhase::Serving,
        inflight,
        kv_blocks_used: 0,
        kv_blocks_cached: 0,
        kv_blocks_total: 64,
        parked_bytes: 0,
        steps: 0,
        abandoned_threads: 0,
        replaced_engines: 0,
        fleet_generation: Generation(0),
        leads: None,
        placement: Generation(0),
        engine: "scripted".to_owned(),
        kv_epoch: "k".to_owned(),
        reason_code: String::new(),
        model_digest: String::new(),
        fabric: String::new(),
        device_health: String::new(),
        uptime_seconds: 0,
    }
}
