//! Index 0 of a supernode of several agents speaks for all of them: it asks the others' control ports.

use std::time::Duration;

use deepinfer_protocol::fleet::FleetMember;
use deepinfer_protocol::load::ExpertLoadReport;
use deepinfer_serving::load::sum_of_agents;
use deepinfer_transport::call::{self, CallLimits};
use http::StatusCode;
use tokio::task::JoinSet;

use super::answers::ControlState;
use crate::driver::{LoadDetail, lock};

/// Bounds of a question to another agent: a report of every step of the real shape has a few megabytes.
const LIMITS: CallLimits = CallLimits { time: Duration::from_secs(2), bytes: 64 << 20 };

/// The load of the supernode, or of this agent alone if it is not the first or has no others beside it.
pub async fn load(state: &ControlState, detail: LoadDetail) -> Option<ExpertLoadReport> {
    let (own, others) = {
        let core = lock(&state.core);
        (core.load(detail), if core.is_first() { core.siblings() } else { Vec::new() })
    };
    if others.is_empty() {
        return own;
    }
    let mut asked = JoinSet::new();
    for member in others {
        let key = state.key.clone();
        asked.spawn(async move {
            let query = format!("detail={}&scope=agent", detail.as_str());
            let authority = member.control.to_string();
            let answer = call::get(&authority, "/v1/experts/load", &query, &key, LIMITS).await;
            (member, answer)
        });
    }
    let (mut reports, mut missing) = (Vec::new(), Vec::new());
    while let Some(joined) = asked.join_next().await {
        let Ok((FleetMember { name, .. }, answer)) = joined else { continue };
        match answer {
            // No window of it has closed yet: it has nothing to add.
            Ok(answer) if answer.status == StatusCode::NOT_FOUND => {}
            Ok(answer) => match serde_json::from_slice::<ExpertLoadReport>(&answer.body) {
                Ok(report) if answer.status == StatusCode::OK => reports.push(report),
                _ => missing.push(name),
            },
            Err(error) => {
                tracing::warn!(agent = %name, %error, "its expert counts are missing");
                missing.push(name);
            }
        }
    }
    // In the order of ranks, whoever was first to answer.
    reports.sort_unstable_by(|a, b| a.by_rank.cmp(&b.by_rank));
    let own = own.or_else(|| {
        // Before its own first window has closed it passes on what the others have.
        let first = reports.first()?.clone();
        reports.remove(0);
        Some(first)
    })?;
    let mut sum = sum_of_agents(own, reports, missing);
    sum.agent = lock(&state.core).name().clone();
    Some(sum)
}
