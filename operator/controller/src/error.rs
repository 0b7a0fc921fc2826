//! What can go wrong between the operator and the API server, and what to do about it.

use std::time::Duration;

use deepinfer_planner::Key;
use thiserror::Error;

/// What to do about an error: decides when to try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Somebody else wrote: look again at once.
    Conflict,
    /// The API server or the way to it: try again later, less and less often.
    Transient,
    /// We may not: a person must change rights or quotas.
    Denied,
    /// What we sent cannot be: trying the same again is useless.
    Invalid,
    /// The lease is lost: nothing may be written any more.
    NotLeader,
}

impl Class {
    /// For labels and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Conflict => "conflict",
            Self::Transient => "transient",
            Self::Denied => "denied",
            Self::Invalid => "invalid",
            Self::NotLeader => "not_leader",
        }
    }
}

/// An answer of the API server that is not a success.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// HTTP status.
    pub code: u16,
    /// Its one word, such as `AlreadyExists`; empty if the answer was not a `Status`.
    pub reason: String,
    /// For people.
    pub message: String,
    /// When it wants to be asked again.
    pub retry_after: Option<Duration>,
}

/// What went wrong.
#[derive(Debug, Error)]
pub enum Error {
    /// The API server said no.
    #[error("{verb} {what}: {} {}: {}", answer.code, answer.reason, answer.message)]
    Answered {
        /// What was tried.
        verb: &'static str,
        /// With what.
        what: String,
        /// What it said.
        answer: Answer,
    },
    /// No answer in time; what was sent may have been done.
    #[error("{verb} {what}: no answer within {seconds} s (--request-timeout-seconds)")]
    TimedOut {
        /// What was tried.
        verb: &'static str,
        /// With what.
        what: String,
        /// How long we waited.
        seconds: u64,
    },
    /// No connection, or it broke.
    #[error("{verb} {what}")]
    Transport {
        /// What was tried.
        verb: &'static str,
        /// With what.
        what: String,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
    /// The answer is not what the kind looks like.
    #[error("{verb} {what}: the answer does not have the shape of its kind: {message}")]
    Shape {
        /// What was tried.
        verb: &'static str,
        /// With what.
        what: String,
        /// What does not fit.
        message: String,
    },
    /// An object of the name exists and is not ours.
    #[error("{key} exists and is not ours: delete or rename it")]
    Collision {
        /// Which.
        key: Key,
    },
    /// An action names an object that is not there any more.
    #[error("{key} is gone: the world is looked at again")]
    Gone {
        /// Which.
        key: Key,
    },
    /// The lease ran out before this write.
    #[error("this replica does not lead any more: nothing is written")]
    NotLeader,
    /// A child or the cluster itself has a shape that this release does not know.
    #[error("{what} cannot be read by this release of the operator: {message}; upgrade the operator")]
    Unreadable {
        /// Which object.
        what: String,
        /// What does not fit.
        message: String,
    },
}

impl Error {
    /// What to do about it.
    pub fn class(&self) -> Class {
        match self {
            Self::Answered { answer, .. } => match answer.code {
                409 => Class::Conflict,
                403 => Class::Denied,
                400 | 404 | 405 | 413 | 415 | 422 => Class::Invalid,
                // 401 heals when the token is read again; everything else is the server's trouble.
                _ => Class::Transient,
            },
            Self::TimedOut { .. } | Self::Transport { .. } | Self::Shape { .. } => Class::Transient,
            Self::Collision { .. } | Self::Unreadable { .. } => Class::Denied,
            Self::Gone { .. } => Class::Conflict,
            Self::NotLeader => Class::NotLeader,
        }
    }

    /// HTTP status, if there was an answer.
    pub fn status(&self) -> Option<u16> {
        self.answer().map(|answer| answer.code)
    }

    /// The API server's answer, if there was one.
    pub fn answer(&self) -> Option<&Answer> {
        match self {
            Self::Answered { answer, .. } => Some(answer),
            _ => None,
        }
    }

    /// When the API server wants to be asked again.
    pub fn retry_after(&self) -> Option<Duration> {
        self.answer().and_then(|answer| answer.retry_after)
    }

    /// The object or path does not exist.
    pub fn is_missing(&self) -> bool {
        self.status() == Some(404)
    }

    /// A create found the name taken.
    pub fn already_exists(&self) -> bool {
        self.answer().is_some_and(|answer| answer.code == 409 && answer.reason == "AlreadyExists")
    }

    /// The list that a watch continues is too old.
    pub fn is_expired(&self) -> bool {
        self.status() == Some(410)
    }

    /// A create was refused because its namespace is being deleted.
    pub fn namespace_terminates(&self) -> bool {
        self.answer().is_some_and(|a| a.code == 403 && a.message.contains("because it is being terminated"))
    }

    /// The reason of a [`deepinfer_planner::Refusal`], if a retry does not heal it soon.
    pub fn refusal(&self) -> Option<&'static str> {
        match self {
            Self::Collision { .. } => Some("NameCollision"),
            Self::Answered { answer, .. } => match answer.code {
                403 if answer.message.contains("exceeded quota") => Some("QuotaExceeded"),
                403 => Some("Denied"),
                400 | 405 | 413 | 415 | 422 => Some("Invalid"),
                _ => None,
            },
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(code: u16, reason: &str, message: &str) -> Error {
        let answer = Answer { code, reason: reason.into(), message: message.into(), retry_after: None };
        Error::Answered { verb: "create", what: "Pod/a".into(), answer }
    }

    #[test]
    fn an_answer_says_what_to_do_about_it() {
        assert_eq!(answered(409, "Conflict", "").class(), Class::Conflict);
        assert_eq!(answered(429, "TooManyRequests", "").class(), Class::Transient);
        assert_eq!(answered(500, "InternalError", "").class(), Class::Transient);
        assert_eq!(answered(401, "Unauthorized", "").class(), Class::Transient);
        assert_eq!(answered(403, "Forbidden", "").class(), Class::Denied);
        assert_eq!(answered(422, "Invalid", "").class(), Class::Invalid);
    }

    #[test]
    fn a_quota_a_missing_right_and_a_dying_namespace_are_told_apart() {
        let quota = answered(403, "Forbidden", "pods \"a\" is forbidden: exceeded quota: small");
        assert_eq!(quota.refusal(), Some("QuotaExceeded"));
        let right = answered(403, "Forbidden", "User \"x\" cannot create resource \"pods\"");
        assert_eq!(right.refusal(), Some("Denied"));
        let dying = answered(
            403,
            "Forbidden",
            "unable to create new content in namespace a because it is being terminated",
        );
        assert!(dying.namespace_terminates());
        assert_eq!(answered(500, "", "").refusal(), None);
    }
}
