//! What is known about the containers of a pod: written by those who run them, read by the status and by tests.

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, Pod,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

/// The part that a container plays in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Runs to its end before the next one starts.
    Init,
    /// An init container that goes on beside the others.
    Sidecar,
    /// What the pod is for.
    Main,
}

/// Where a container is in its life.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum State {
    Waiting { reason: String, message: Option<String> },
    Running { since: Timestamp },
    Terminated(Box<ContainerStateTerminated>),
}

impl State {
    /// Waiting without more to say.
    pub(crate) fn waiting(reason: &str) -> Self {
        State::Waiting { reason: reason.to_owned(), message: None }
    }

    fn to_api(&self) -> ContainerState {
        let mut state = ContainerState::default();
        match self {
            State::Waiting { reason, message } => {
                let (reason, message) = (Some(reason.clone()), message.clone());
                state.waiting = Some(ContainerStateWaiting { reason, message });
            }
            State::Running { since } => {
                state.running = Some(ContainerStateRunning { started_at: Some(Time(*since)) });
            }
            State::Terminated(end) => state.terminated = Some((**end).clone()),
        }
        state
    }
}

/// One container.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct View {
    pub name: String,
    pub image: String,
    pub role: Role,
    pub state: State,
    /// How it ended the time before.
    pub last: Option<ContainerStateTerminated>,
    pub restarts: i32,
    /// Whether it has run at all: the next start is a restart.
    pub began: bool,
    /// Past its startup probe.
    pub started: bool,
    pub ready: bool,
    pub pid: Option<u32>,
    pub id: Option<String>,
    /// It will not run again, and whether it ended well.
    pub done: Option<bool>,
}

impl View {
    /// The status of this container as the API has it.
    pub(crate) fn to_api(&self) -> ContainerStatus {
        let last = self.last.clone().map(|end| State::Terminated(Box::new(end)).to_api());
        ContainerStatus {
            name: self.name.clone(),
            image: self.image.clone(),
            image_id: self.id.as_ref().map(|_| format!("process://{}", self.image)).unwrap_or_default(),
            container_id: self.id.clone(),
            state: Some(self.state.to_api()),
            last_state: last,
            // An init container is ready when it has done its work.
            ready: self.ready || self.role == Role::Init && self.done == Some(true),
            started: Some(self.started),
            restart_count: self.restarts,
            ..ContainerStatus::default()
        }
    }

    /// Takes the end of a run into the record of the time before.
    pub(crate) fn retire(&mut self) {
        if let State::Terminated(end) = &self.state {
            self.last = Some((**end).clone());
        }
    }
}

/// All containers of a pod in the order in which they start, as they are before anything has run here.
///
/// What the status already says is kept: after a node was off, a container that ran is restarted, and counted.
pub(crate) fn views(pod: &Pod) -> Vec<View> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let status = pod.status.as_ref();
    let inits = spec.init_containers.iter().flatten().map(|container| {
        let sidecar = container.restart_policy.as_deref() == Some("Always");
        let old = status.and_then(|s| find(s.init_container_statuses.as_deref(), &container.name));
        (container, if sidecar { Role::Sidecar } else { Role::Init }, old)
    });
    let mains = spec.containers.iter().map(|container| {
        (container, Role::Main, status.and_then(|s| find(s.container_statuses.as_deref(), &container.name)))
    });
    let first = if spec.init_containers.as_ref().is_some_and(|c| !c.is_empty()) {
        "PodInitializing"
    } else {
        "ContainerCreating"
    };
    inits.chain(mains).map(|(container, role, old)| fresh(container, role, first, old)).collect()
}

fn find<'a>(statuses: Option<&'a [ContainerStatus]>, name: &str) -> Option<&'a ContainerStatus> {
    statuses.into_iter().flatten().find(|status| status.name == name)
}

fn fresh(container: &Container, role: Role, first: &str, old: Option<&ContainerStatus>) -> View {
    let state = old.and_then(|o| o.state.as_ref());
    let ended = state.and_then(|s| s.terminated.clone());
    let lost = state.and_then(|s| s.running.as_ref()).map(|running| ContainerStateTerminated {
        exit_code: 255,
        reason: Some("Unknown".to_owned()),
        started_at: running.started_at.clone(),
        finished_at: Some(Time(Timestamp::now())),
        container_id: old.and_then(|o| o.container_id.clone()),
        ..ContainerStateTerminated::default()
    });
    let end = ended.or(lost);
    View {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        role,
        began: end.is_some() || old.is_some_and(|o| o.restart_count > 0),
        state: match end {
            Some(end) => State::Terminated(Box::new(end)),
            None => State::waiting(first),
        },
        last: old.and_then(|o| o.last_state.as_ref()).and_then(|s| s.terminated.clone()),
        restarts: old.map_or(0, |o| o.restart_count),
        started: false,
        ready: false,
        pid: None,
        id: old.and_then(|o| o.container_id.clone()),
        done: None,
    }
}
