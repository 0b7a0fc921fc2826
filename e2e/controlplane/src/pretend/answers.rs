//! What the control port of a pretend agent answers: the words of `deepinfer_protocol`, filled in by script.

use std::time::Duration;

use deepinfer_crds::names::label;
use deepinfer_protocol::agent_status::{
    AgentPhase, AgentStatus, DrainRequest, DrainState, DrainStatus, Role,
};
use deepinfer_protocol::{AgentId, Generation, SupernodeId};
use http::StatusCode;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::pods::PodState;
use super::script::{Drains, Script};

/// Blocks of a pretend engine.
const KV_BLOCKS: u64 = 1024;

/// An agent at a moment.
pub(super) struct View<'a> {
    pub(super) name: &'a str,
    pub(super) pod: &'a mut PodState,
    pub(super) script: &'a Script,
    pub(super) now: Instant,
}

impl View<'_> {
    /// The answer to a signed call.
    pub(super) fn answer(&mut self, method: &str, path: &str, body: &[u8]) -> (StatusCode, Value) {
        match (method, path) {
            ("GET", "/v1/status") => (StatusCode::OK, json!(self.status())),
            ("GET", "/v1/drain") => (StatusCode::OK, json!(self.drain_status())),
            ("POST", "/v1/drain") => match serde_json::from_slice::<DrainRequest>(body) {
                Ok(asked) => self.drain(&asked),
                Err(error) => refuse(StatusCode::BAD_REQUEST, &format!("body: {error}")),
            },
            ("POST", "/v1/undrain") if self.drain_state() == DrainState::Drained => {
                refuse(StatusCode::CONFLICT, "drained: nothing is left to undrain")
            }
            ("POST", "/v1/undrain") => {
                self.pod.drain = None;
                (StatusCode::OK, json!(self.drain_status()))
            }
            ("GET", "/v1/experts/load") => {
                refuse(StatusCode::NOT_FOUND, "no window of 100 steps has closed yet")
            }
            _ => refuse(StatusCode::NOT_FOUND, "no such path; see /v1/status, /v1/drain"),
        }
    }

    fn drain(&mut self, asked: &DrainRequest) -> (StatusCode, Value) {
        let deadline = Duration::from_secs(u64::from(asked.deadline_seconds));
        // Asked again it says the same, but an earlier deadline counts.
        let (began, before) = self.pod.drain.unwrap_or((self.now, deadline));
        let left = self.now + deadline;
        let sooner = left.min(began + before);
        self.pod.drain = Some((began, sooner.saturating_duration_since(began)));
        (StatusCode::ACCEPTED, json!(self.drain_status()))
    }

    fn drain_state(&self) -> DrainState {
        let Some((began, deadline)) = self.pod.drain else { return DrainState::Accepting };
        let took = self.now.saturating_duration_since(began);
        let done = match self.script.drains {
            Drains::AtOnce => true,
            Drains::After(time) => took >= time || took >= deadline,
            Drains::Never => false,
        };
        if done { DrainState::Drained } else { DrainState::Draining }
    }

    fn drain_status(&self) -> DrainStatus {
        let state = self.drain_state();
        let cut = match (self.pod.drain, self.script.drains, state) {
            (Some((_, deadline)), Drains::After(time), DrainState::Drained) if deadline < time => {
                self.script.inflight
            }
            _ => 0,
        };
        DrainStatus { state, inflight: self.inflight(state), handed_off: 0, cut, remaining_kv_bytes: 0 }
    }

    fn inflight(&self, state: DrainState) -> u32 {
        if state == DrainState::Drained { 0 } else { self.script.inflight }
    }

    fn status(&self) -> AgentStatus {
        let drain = self.drain_state();
        let up = self.pod.since.map_or(Duration::ZERO, |since| self.now.saturating_duration_since(since));
        let (phase, reason) = match (&self.script.stuck, drain) {
            (Some((phase, reason)), _) => (*phase, reason.clone()),
            (None, DrainState::Drained) => (AgentPhase::Drained, String::new()),
            (None, DrainState::Draining) => (AgentPhase::Draining, String::new()),
            (None, DrainState::Accepting) if up < self.script.warm_up => (AgentPhase::Warming, String::new()),
            (None, DrainState::Accepting) => (AgentPhase::Serving, String::new()),
        };
        let pod = &self.pod;
        let supernode = pod.label(label::SUPERNODE).map(SupernodeId::from);
        let prefill = pod.label(label::APP_COMPONENT) == Some("prefill");
        AgentStatus {
            name: AgentId::from(self.name),
            role: if prefill { Role::Prefill } else { Role::Decode },
            supernode,
            index: pod.label(label::NODE_INDEX).and_then(|index| index.parse().ok()).unwrap_or(0),
            ranks: 1,
            phase,
            reason,
            accepting: phase == AgentPhase::Serving,
            inflight: self.inflight(drain),
            kv_blocks_used: 0,
            kv_blocks_cached: 0,
            kv_blocks_total: KV_BLOCKS,
            parked_bytes: 0,
            steps: 0,
            abandoned_threads: 0,
            replaced_engines: 0,
            fleet_generation: Generation(0),
            leads: None,
            placement: Generation(0),
            engine: "pretend".to_owned(),
            kv_epoch: pod.label(label::KV_EPOCH).unwrap_or_default().to_owned(),
            reason_code: String::new(),
            model_digest: String::new(),
            fabric: "ok".to_owned(),
            device_health: "ok".to_owned(),
            uptime_seconds: up.as_secs(),
        }
    }
}

pub(super) fn refuse(status: StatusCode, error: &str) -> (StatusCode, Value) {
    (status, json!({ "error": error }))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn pod() -> PodState {
        let labels = [(label::SUPERNODE, "c-decode-x"), (label::NODE_INDEX, "3"), (label::KV_EPOCH, "e")];
        let labels = labels.map(|(name, value)| (name.to_owned(), value.to_owned()));
        PodState {
            namespace: "ns".into(),
            uid: "u".into(),
            labels: BTreeMap::from(labels),
            since: Some(Instant::now()),
            drain: None,
        }
    }

    fn call(pod: &mut PodState, script: &Script, now: Instant, call: (&str, &str, &str)) -> (u16, Value) {
        let mut view = View { name: "c-decode-x-03", pod, script, now };
        let (status, value) = view.answer(call.0, call.1, call.2.as_bytes());
        (status.as_u16(), value)
    }

    #[test]
    fn an_agent_warms_up_and_says_what_its_labels_say() {
        let (mut pod, script) = (pod(), Script::warms_up(Duration::from_secs(5)));
        let now = pod.since.unwrap();
        let (_, status) = call(&mut pod, &script, now, ("GET", "/v1/status", ""));
        let status: AgentStatus = serde_json::from_value(status).unwrap();
        assert_eq!((status.phase, status.accepting, status.index), (AgentPhase::Warming, false, 3));
        assert_eq!(status.supernode, Some(SupernodeId::from("c-decode-x")));
        let later = now + Duration::from_secs(6);
        let (_, status) = call(&mut pod, &script, later, ("GET", "/v1/status", ""));
        assert_eq!((&status["phase"], &status["kvEpoch"]), (&json!("serving"), &json!("e")));
    }

    #[test]
    fn a_drain_ends_by_itself_or_at_its_deadline_or_never() {
        let now = Instant::now();
        for (drains, deadline, after, state, cut) in [
            (Drains::AtOnce, 60, 0, "Drained", 0),
            (Drains::After(Duration::from_secs(10)), 60, 9, "Draining", 0),
            (Drains::After(Duration::from_secs(10)), 60, 10, "Drained", 0),
            (Drains::After(Duration::from_secs(10)), 5, 6, "Drained", 7),
            (Drains::Never, 5, 600, "Draining", 0),
        ] {
            let (mut pod, script) = (pod(), Script::busy(7, drains));
            let body = format!(r#"{{"deadlineSeconds":{deadline}}}"#);
            assert_eq!(call(&mut pod, &script, now, ("POST", "/v1/drain", &body)).0, 202);
            let then = now + Duration::from_secs(after);
            let (_, drain) = call(&mut pod, &script, then, ("GET", "/v1/drain", ""));
            assert_eq!((&drain["state"], &drain["cut"]), (&json!(state), &json!(cut)), "{drains:?}");
            let undrained = call(&mut pod, &script, then, ("POST", "/v1/undrain", "")).0;
            assert_eq!(undrained, if state == "Drained" { 409 } else { 200 });
        }
    }
}
