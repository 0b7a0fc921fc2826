//! With nothing to change nothing is written.

use std::time::Duration;

use anyhow::{Result, ensure};
use deepinfer_controlplane::proxy::{On, Verb};
use futures_util::{StreamExt, stream};
use serde_json::json;

use super::rig::{Rig, cluster, run, until};

/// Shortened resync, and how many of them must be silent: longer than an agent may be silent, and shorter than the pause
/// between two questions to most agents.
const RESYNC: Duration = Duration::from_secs(1);
const RESYNCS: u32 = 35;

/// OP-043, OP-044: twenty clusters in one namespace, resynced again and again: no write, no delete, no Service that
/// comes and goes.
#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn twenty_clusters_at_rest_cost_no_write() {
    run("OP-043, OP-044", async |mut rig: Rig| {
        let resync = format!("--resync-seconds={}", RESYNC.as_secs());
        let operator = rig.operator_with(&[&resync]).await?;
        // On CPU nodes many pods share a node, so that twenty clusters find room.
        let at_rest = |n: usize| {
            let mut spec = cluster(&format!("c{n:02}"), 1);
            spec["spec"]["accelerator"] = json!({"vendor": "cpu"});
            spec
        };
        let names: Vec<String> = (0..20).map(|n| format!("c{n:02}")).collect();
        let applied = stream::iter(0..20).map(|n| {
            let (spec, rig) = (at_rest(n), &rig);
            async move { rig.apply(&spec).await }
        });
        applied.buffer_unordered(8).collect::<Vec<_>>().await.into_iter().collect::<Result<()>>()?;
        for name in &names {
            rig.ready(name).await?;
        }
        let writes = On::writes().not("events");
        // Statuses follow the last pods for a moment; then it must be quiet.
        let mut last = u64::MAX;
        until(Duration::from_secs(60), async || {
            tokio::time::sleep(RESYNC * 2).await;
            let now = rig.proxy.count(&writes);
            Ok((std::mem::replace(&mut last, now) == now).then_some(()))
        })
        .await?;
        let before = reconciles(&operator.metrics_text().await?);
        rig.proxy.reset();
        tokio::time::sleep(RESYNC * RESYNCS).await;
        let noise = rig.proxy.log(&writes);
        ensure!(
            noise.is_empty(),
            "{} writes with nothing to change, first {:#?}",
            noise.len(),
            noise.first()
        );
        let after = reconciles(&operator.metrics_text().await?);
        let times = after - before;
        ensure!(times >= 20.0 * f64::from(RESYNCS) / 2.0, "only {times} reconciles: were they resynced?");
        println!("  {times} reconciles, 0 writes");
        // Service accounts may be read and not watched: each look costs one read of each.
        let reads = rig.proxy.log(&On::verbs(&[Verb::Get, Verb::List]).not("serviceaccounts"));
        ensure!(reads.is_empty(), "{} reads with nothing to change: {:#?}", reads.len(), reads.first());
        Ok(())
    });
}

/// The operator's own count of reconciles.
fn reconciles(metrics: &str) -> f64 {
    let lines = metrics.lines().filter(|line| line.starts_with("deepinfer_operator_reconcile_total"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}
