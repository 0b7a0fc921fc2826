//! `/livez`, `/readyz`, `/metrics` on real ports.

use std::time::Duration;

use deepinfer_operator::health::Health;
use deepinfer_operator::metrics::Metrics;
use deepinfer_operator::serve;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::support::{get, listener};

/// OP-092: ready says no until the caches are there, and says what is missing.
#[tokio::test]
async fn readiness_is_refused_until_everything_was_listed_once_and_says_what_is_missing() {
    let ((metrics_listener, metrics_at), (health_listener, health_at)) = (listener().await, listener().await);
    let health = Health::new(Duration::from_secs(300));
    let metrics = Metrics::new("9.9.9");
    let stop = CancellationToken::new();
    let served = tokio::spawn(serve::observability(
        metrics_listener,
        health_listener,
        metrics.clone(),
        health.clone(),
        stop.clone(),
    ));
    health.missing("caches", "pods, nodes are being listed");
    drop(health.watch("Pod"));
    let got = get(health_at, "/readyz", None).await;
    assert_eq!(got.status, 503);
    let report: Value = serde_json::from_str(&got.body).unwrap();
    assert_eq!(report["missing"]["caches"], "pods, nodes are being listed");
    assert!(report["watch_age_seconds"]["Pod"].is_number(), "{report}");
    assert_eq!(get(health_at, "/livez", None).await.status, 200);
    health.satisfied("caches");
    assert_eq!(get(health_at, "/readyz", None).await.status, 200);

    let text = get(metrics_at, "/metrics", None).await.body;
    for line in
        ["deepinfer_operator_build_info{version=\"9.9.9\"} 1", "watch_age_seconds{kind=\"Pod\"}", "# EOF"]
    {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
    assert_eq!(get(metrics_at, "/", None).await.status, 404);
    health.fail("the lease thread is gone");
    assert_eq!(get(health_at, "/livez", None).await.status, 503);
    stop.cancel();
    tokio::time::timeout(crate::support::SOON, served).await.unwrap().unwrap();
}
