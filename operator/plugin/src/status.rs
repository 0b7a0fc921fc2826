//! `status`: what `kubectl get` shows of a cluster and its children, in one page, with what waits.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Result, bail};
use deepinfer_crds::condition::{self, kind};
use deepinfer_crds::{DeepInferCluster, PoolRole, Supernode};

use crate::args::StatusArgs;
use crate::client::{Session, now};
use crate::output::{self, Outcome};
use crate::view::{self, View, name_of};
use deepinfer_crds::table::{age, columns, or_dash, since};

/// Between two looks of `--watch`.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Shows the status.
///
/// # Errors
/// If there is no such cluster, or the API server cannot be asked.
pub async fn run(session: &Session, args: &StatusArgs) -> Result<Outcome> {
    let mut shown = None;
    loop {
        let page = page(session, args).await;
        if !args.watch {
            let page = page?;
            output::print(&page.text)?;
            return Ok(Outcome::problem_if(page.problem));
        }
        match page {
            Ok(page) if shown.as_ref() != Some(&page.facts) => {
                output::print(&format!("{}\n", page.text))?;
                shown = Some(page.facts);
            }
            Ok(_) => {}
            // The first look must work; later the API server may be away for a while.
            Err(error) if shown.is_none() => return Err(error),
            Err(error) => eprintln!("{error:#}"),
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

struct Page {
    text: String,
    /// The text without ages: what counts as a change.
    facts: String,
    problem: bool,
}

async fn page(session: &Session, args: &StatusArgs) -> Result<Page> {
    let clusters = view::clusters(session).await?;
    if args.cluster.is_none() && clusters.len() != 1 {
        if clusters.is_empty() {
            bail!("{}", view::none(&session.namespace));
        }
        let problem = clusters.iter().any(is_problem);
        if args.output.is_some() {
            let text = serde_json::to_string_pretty(&clusters)? + "\n";
            return Ok(Page { facts: text.clone(), text, problem });
        }
        let facts = list(&clusters, None);
        return Ok(Page { text: list(&clusters, Some(now())), facts, problem });
    }
    let cluster = view::choose(session, args.cluster.as_deref()).await?;
    let problem = is_problem(&cluster);
    let view = view::gather(session, cluster).await?;
    if args.output.is_some() {
        let text = serde_json::to_string_pretty(&view)? + "\n";
        let facts = serde_json::to_string(&View { now: 0, ..view })?;
        return Ok(Page { text, facts, problem });
    }
    let facts = text(&view, None);
    Ok(Page { text: text(&view, Some(view.now)), facts, problem })
}

/// Whether somebody should look.
fn is_problem(cluster: &DeepInferCluster) -> bool {
    let conditions = cluster.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    let on = |kind| condition::is_true(conditions, kind);
    let at_rest = condition::get(conditions, kind::READY)
        .is_some_and(|c| c.status == "True" || c.reason == condition::reason::SUSPENDED);
    on(kind::STALLED) || on(kind::DEGRADED) || !(on(kind::AVAILABLE) || at_rest)
}

/// A line for each of several clusters. Without a time, ages are left out.
pub fn list(clusters: &[DeepInferCluster], now: Option<i64>) -> String {
    let row = |cluster: &DeepInferCluster| {
        let status = cluster.status.clone().unwrap_or_default();
        let summary = status.summary.unwrap_or_default();
        let ready = condition::get(&status.conditions, kind::READY);
        let stale = status.observed_generation.is_none_or(|seen| Some(seen) < cluster.metadata.generation);
        vec![
            name_of(&cluster.metadata).to_owned(),
            status.phase.map_or_else(|| "Pending".to_owned(), |phase| format!("{phase:?}")),
            ready.map_or_else(|| "Unknown".to_owned(), |c| c.status.clone()),
            or_dash(summary.prefill.as_deref()),
            or_dash(summary.decode.as_deref()),
            or_dash(summary.gateway.as_deref()),
            if stale { "NotSeenYet".to_owned() } else { or_dash(ready.map(|c| c.reason.as_str())) },
            or_dash(status.revision.as_deref()),
            now.map_or_else(String::new, |now| age(&cluster.metadata, now)),
        ]
    };
    let head = ["NAME", "PHASE", "READY", "PREFILL", "DECODE", "GATEWAY", "REASON", "REVISION", "AGE"];
    columns(&head, &clusters.iter().map(row).collect::<Vec<_>>())
}

/// The page of one cluster. Without a time, ages are left out.
pub fn text(view: &View, now: Option<i64>) -> String {
    let mut text = list(std::slice::from_ref(&view.cluster), now);
    if let Some(url) = view.cluster.status.as_ref().and_then(|s| s.url.as_deref()) {
        let _ = writeln!(text, "\nurl      {url}");
    }
    if !view.pools.is_empty() {
        text.push('\n');
        text += &pools(view, now);
    }
    if !view.supernodes.is_empty() {
        text.push('\n');
        text += &supernodes(&view.supernodes, now);
    }
    text + &remarks(view, now)
}

fn pools(view: &View, now: Option<i64>) -> String {
    let rows: Vec<Vec<String>> = view
        .pools
        .iter()
        .map(|pool| {
            let status = pool.status.clone().unwrap_or_default();
            let number = |n: Option<u32>| n.unwrap_or(0).to_string();
            vec![
                name_of(&pool.metadata).to_owned(),
                role(pool.spec.role).to_owned(),
                number(pool.spec.replicas),
                number(status.ready_replicas),
                number(status.available_replicas),
                number(status.updated_replicas),
                number(status.draining_replicas),
                format!("{:?}", pool.spec.mode),
                now.map_or_else(String::new, |now| age(&pool.metadata, now)),
            ]
        })
        .collect();
    let head = ["POOL", "ROLE", "DESIRED", "READY", "AVAILABLE", "UPDATED", "DRAINING", "SCALING", "AGE"];
    columns(&head, &rows)
}

/// A role as labels spell it.
pub fn role(role: PoolRole) -> &'static str {
    match role {
        PoolRole::Prefill => "prefill",
        PoolRole::Decode => "decode",
        PoolRole::Vision => "vision",
    }
}

fn supernodes(list: &[Supernode], now: Option<i64>) -> String {
    let row = |supernode: &Supernode| {
        let status = supernode.status.clone().unwrap_or_default();
        let failure = status.last_failure.as_ref().map(|f| f.reason.as_str());
        vec![
            name_of(&supernode.metadata).to_owned(),
            status.phase.map_or_else(|| "Pending".to_owned(), |phase| format!("{phase:?}")),
            or_dash(status.ready.as_deref()),
            or_dash(status.domain.as_deref()),
            supernode.spec.revision.clone(),
            status.inflight.map_or_else(|| "-".to_owned(), |n| n.to_string()),
            status.restart_count.unwrap_or(0).to_string(),
            or_dash(failure),
            now.map_or_else(String::new, |now| age(&supernode.metadata, now)),
        ]
    };
    let head =
        ["SUPERNODE", "PHASE", "NODES", "DOMAIN", "REVISION", "INFLIGHT", "RESTARTS", "LAST FAILURE", "AGE"];
    columns(&head, &list.iter().map(row).collect::<Vec<_>>())
}

/// What is worth a sentence.
fn remarks(view: &View, now: Option<i64>) -> String {
    let status = view.cluster.status.clone().unwrap_or_default();
    let mut text = String::new();
    for waiting in &status.waiting {
        let long = now.map_or_else(String::new, |now| format!(" for {}", since(&waiting.since, now)));
        let _ =
            writeln!(text, "\nwaiting  {}{long}: {}: {}", waiting.object, waiting.reason, waiting.message);
    }
    let words = [
        (kind::STALLED, "stalled"),
        (kind::DEGRADED, "degraded"),
        (kind::PAUSED, "paused"),
        (kind::SCALING_CONFLICT, "scaling"),
        (kind::FIELDS_IGNORED, "ignored"),
    ];
    for (kind, word) in words {
        if let Some(c) = condition::get(&status.conditions, kind).filter(|c| c.status == "True") {
            let _ = writeln!(text, "\n{word:8} {}: {}", c.reason, c.message);
        }
    }
    if is_problem(&view.cluster) {
        let _ = writeln!(text, "\nwhy      kubectl deepinfer why {}", name_of(&view.cluster.metadata));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::fixture;

    #[test]
    fn the_page_shows_what_serves_what_waits_and_where_to_ask_why() {
        let view = fixture::view();
        let wanted = "\
NAME   PHASE      READY   PREFILL   DECODE   GATEWAY   REASON                 REVISION       AGE
v41    Creating   False   0/1       1/2      2/2       CapacityBelowDesired   v41-7c9d1e42   20m

url      http://v41-gateway.serving

POOL          ROLE      DESIRED   READY   AVAILABLE   UPDATED   DRAINING   SCALING   AGE
v41-decode    decode    2         1       1           2         0          Fixed     20m
v41-prefill   prefill   1         0       0           1         0          Fixed     20m

SUPERNODE          PHASE     NODES   DOMAIN   REVISION       INFLIGHT   RESTARTS   LAST FAILURE   AGE
v41-decode-bcdfg   Serving   8/8     rack-a   v41-7c9d1e42   12         0          -              15m
v41-decode-x4k2b   Placing   0/8     -        v41-7c9d1e42   -          1          NodeLost       15m

waiting  Supernode/v41-decode-x4k2b for 15m: NotEnoughFree: rack-b has 5 of 8 nodes free

why      kubectl deepinfer why v41
";
        assert_eq!(text(&view, Some(view.now)), wanted);
        assert!(is_problem(&view.cluster));
    }

    #[test]
    fn time_alone_is_no_change_for_watch() {
        let early = fixture::view();
        let late = View { now: early.now + 3600, ..early.clone() };
        assert_eq!(text(&early, None), text(&late, None));
    }

    #[test]
    fn a_change_that_the_operator_has_not_seen_is_told() {
        let mut view = fixture::view();
        view.cluster.metadata.generation = Some(3);
        assert!(text(&view, None).contains("NotSeenYet"));
    }
}
