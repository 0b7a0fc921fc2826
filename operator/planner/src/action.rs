//! What a plan wants done. Executing an action needs no further choice.

use std::fmt;

use deepinfer_protocol::AgentId;
use serde_json::Value;

use crate::object::{Key, Object};

/// A call to an agent's control port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentCall {
    /// Take no new work and finish what runs within the seconds.
    Drain {
        /// After that, what runs is cut.
        deadline_seconds: u32,
        /// For people.
        reason: String,
    },
    /// Take work again.
    Undrain,
}

/// A change of a pod: pods are made once and hardly ever changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodChange {
    /// Take the scheduling gate of the gang off.
    LiftGate,
    /// Say with the readiness gate `deepinfer.io/routable` whether traffic may come.
    Routable {
        /// It may.
        holds: bool,
        /// One word.
        reason: String,
    },
    /// The wanted drain as annotation `deepinfer.io/drain`, for the agent's downward API file; `None` removes it.
    Drain(Option<String>),
}

/// Severity of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Something happened as planned.
    Normal,
    /// Somebody may want to look.
    Warning,
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Make an object that must not exist: immutable kinds, seeds. An object that is already there and ours counts
    /// as success.
    Create(Box<Object>),
    /// Server-side apply of the fields that we own.
    Apply(Box<Object>),
    /// Write `/status`.
    Status {
        /// Of what.
        key: Key,
        /// The whole status.
        status: Value,
    },
    /// Set our finalizers on an object; others' stay.
    Finalizers {
        /// Of what.
        key: Key,
        /// Ours, all of them.
        ours: Vec<String>,
    },
    /// Delete in the background.
    Delete {
        /// What.
        key: Key,
        /// Only if it is still this one.
        uid: Option<String>,
        /// Seconds for pods to end; the pod's own if absent.
        grace_seconds: Option<i64>,
        /// For people.
        why: String,
    },
    /// Change a pod that is there.
    Pod {
        /// Which.
        key: Key,
        /// Only if it is still this one.
        uid: Option<String>,
        /// How.
        change: PodChange,
    },
    /// Write `DeepInferPool.spec.replicas` under the field manager of the one who decides it.
    Replicas {
        /// The pool.
        key: Key,
        /// How many.
        replicas: u32,
    },
    /// Make the Secret with the key of a generation, derived from the master key that only the executor has.
    DeriveKey {
        /// The Secret, without data.
        secret: Box<Object>,
        /// Generation of the key.
        generation: u64,
    },
    /// Tell an agent.
    CallAgent {
        /// Whom.
        agent: AgentId,
        /// What.
        call: AgentCall,
    },
    /// Say what happened.
    Event {
        /// About what.
        regarding: Key,
        /// How bad.
        kind: EventKind,
        /// Of operator.md section 11.
        reason: &'static str,
        /// For people.
        note: String,
    },
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create(object) => write!(f, "create {}", object.key()),
            Self::Apply(object) => write!(f, "apply {}", object.key()),
            Self::Status { key, .. } => write!(f, "status {key}"),
            Self::Finalizers { key, ours } if ours.is_empty() => write!(f, "release {key}"),
            Self::Finalizers { key, .. } => write!(f, "hold {key}"),
            Self::Delete { key, why, .. } => write!(f, "delete {key}: {why}"),
            Self::Pod { key, change, .. } => match change {
                PodChange::LiftGate => write!(f, "ungate {key}"),
                PodChange::Routable { holds, reason } => {
                    write!(f, "route {key}: {} ({reason})", if *holds { "yes" } else { "no" })
                }
                PodChange::Drain(Some(drain)) => write!(f, "annotate {key}: drain {drain}"),
                PodChange::Drain(None) => write!(f, "annotate {key}: no drain"),
            },
            Self::Replicas { key, replicas } => write!(f, "replicas {key}: {replicas}"),
            Self::DeriveKey { secret, generation } => {
                write!(f, "derive {} (generation {generation})", secret.key())
            }
            Self::CallAgent { agent, call: AgentCall::Drain { deadline_seconds, reason } } => {
                write!(f, "drain {agent} within {deadline_seconds} s: {reason}")
            }
            Self::CallAgent { agent, call: AgentCall::Undrain } => write!(f, "undrain {agent}"),
            Self::Event { regarding, reason, note, .. } => write!(f, "event {regarding} {reason}: {note}"),
        }
    }
}
