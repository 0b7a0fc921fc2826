//! The control port over HTTP: keys, status, drains, expert load, metrics.

use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use deepinfer_protocol::agent_status::{AgentStatus, DrainState, DrainStatus};
use deepinfer_protocol::load::{ExpertLoadReport, LoadRole};
use deepinfer_transport::{ClusterKey, control_auth};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::edge::Edge;
use crate::fleet::{DEADLINE, Fleet, eventually};
use crate::oracle::{alone, checkpoint, prompt, spec};

pub struct Client {
    address: SocketAddr,
    key: ClusterKey,
}

impl Client {
    pub fn new(fleet: &Fleet, agent: &str) -> Self {
        Self { address: fleet.agent(agent).control_addr(), key: fleet.key.clone() }
    }

    pub async fn get(&self, path: &str) -> (u16, String) {
        self.signed("GET", path, "").await
    }

    pub async fn post(&self, path: &str, body: &str) -> (u16, String) {
        self.signed("POST", path, body).await
    }

    async fn signed(&self, method: &str, target: &str, body: &str) -> (u16, String) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let path = target.split('?').next().unwrap();
        let header = control_auth::authorization(&self.key, now, method, path);
        self.call(method, target, Some(&header), body).await
    }

    async fn call(&self, method: &str, target: &str, auth: Option<&str>, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let auth = auth.map(|value| format!("authorization: {value}\r\n")).unwrap_or_default();
        let head = format!(
            "{method} {target} HTTP/1.1\r\nhost: agent\r\nconnection: close\r\n{auth}content-length: {}\r\n\r\n",
            body.len()
        );
        // An answer may come before the whole body was read.
        let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
        let mut answer = String::new();
        tokio::time::timeout(DEADLINE, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        let body = answer.split_once("\r\n\r\n").unwrap().1.to_owned();
        (status, body)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_are_signed_and_probes_are_not() {
    let fleet = Fleet::pair(&[], &[]).await;
    let client = Client::new(&fleet, "p-0");
    for path in ["/v1/status", "/v1/drain", "/v1/experts/load", "/nothing"] {
        let (status, body) = client.call("GET", path, None, "").await;
        assert_eq!(status, 401, "{path}");
        assert!(body.contains("Authorization"), "{body}");
    }
    let other = Client { address: client.address, key: ClusterKey::random().unwrap() };
    assert_eq!(other.get("/v1/status").await.0, 401);
    assert_eq!(other.post("/v1/drain", "{}").await.0, 401);
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(client.call("GET", path, None, "").await.0, 200, "{path}");
    }
    let (status, body) = client.get("/v1/status").await;
    assert_eq!(status, 200);
    let told: AgentStatus = serde_json::from_str(&body).unwrap();
    assert_eq!(told.name.as_str(), "p-0");
    assert!(told.accepting && told.leads.is_some() && told.engine.contains("cpu"), "{told:?}");
    assert_eq!(client.get("/nothing").await.0, 404);
    assert_eq!(client.post("/v1/status", "").await.0, 405);
    assert_eq!(client.get("/v1/experts/load?detail=all").await.0, 400);
    assert_eq!(client.post("/v1/drain", "{").await.0, 400);
    assert_eq!(client.post("/v1/drain", "{\"deadlineSeconds\":1,\"handoff\":\"Peer\"}").await.0, 400);
    let (status, body) = client.post("/v1/drain", &"x".repeat(100_000)).await;
    assert_eq!(status, 413, "{body}");
    fleet.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expert_counts_equal_layers_times_choices_times_rows() {
    let fleet = Fleet::pair(&[], &["--ranks=2"]).await;
    let total = |body: &str| serde_json::from_str::<ExpertLoadReport>(body).unwrap();
    let clients = [Client::new(&fleet, "p-0"), Client::new(&fleet, "sn-0-0")];
    for client in &clients {
        // SV-091: warm-up is not counted.
        let report = total(&client.get("/v1/experts/load?detail=total").await.1);
        assert_eq!((report.rows, report.counts.counts.iter().sum::<u64>()), (0, 0));
        assert_eq!(client.get("/v1/experts/load").await.0, 404, "no window yet");
    }
    let mut edge = Edge::new(&fleet);
    let lengths = [(300, 120), (77, 30), (5, 2)];
    let ids: Vec<_> = lengths.iter().map(|&(p, n)| edge.submit(&prompt(p, 1), spec(n))).collect();
    edge.finish(&ids).await;
    let shape = &checkpoint().shape;
    let per_row = (shape.num_hidden_layers * shape.num_experts_per_tok) as u64;
    // Every prompt token runs in prefill, and every output token but the last in decode.
    let rows = [382, 119 + 29 + 1];
    for (client, (rows, role)) in
        clients.iter().zip(rows.into_iter().zip([LoadRole::Prefill, LoadRole::Decode]))
    {
        let report = total(&client.get("/v1/experts/load?detail=total").await.1);
        assert_eq!((report.rows, report.role), (rows, role));
        assert_eq!(report.counts.counts.iter().sum::<u64>(), rows * per_row);
        let layer = shape.n_routed_experts;
        for counts in report.counts.counts.chunks(layer) {
            assert_eq!(counts.iter().sum::<u64>(), rows * shape.num_experts_per_tok as u64);
        }
    }
    let window = total(&clients[1].get("/v1/experts/load").await.1);
    assert_eq!((window.steps, window.window, window.spans_change), (100, 0, false));
    let steps = total(&clients[1].get("/v1/experts/load?detail=steps").await.1);
    assert_eq!(steps.by_step.len(), 100);
    assert_eq!(steps.counts, window.counts);
    fleet.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_finishes_what_runs_and_cannot_be_undone_once_it_has() {
    let fleet = Fleet::pair(&[], &[]).await;
    let mut edge = Edge::new(&fleet);
    let client = Client::new(&fleet, "sn-0-0");
    let text = prompt(50, 4);
    let id = edge.submit(&text, spec(150));
    edge.reach(id, 3).await;
    let drained = |body: &str| serde_json::from_str::<DrainStatus>(body).unwrap();
    let (status, body) = client.post("/v1/drain", "{\"deadlineSeconds\":600,\"reason\":\"test\"}").await;
    assert_eq!((status, drained(&body).state), (202, DrainState::Draining));
    assert_eq!(client.get("/readyz").await.0, 503);
    // While something runs it can be undone, and done again.
    assert_eq!(client.post("/v1/undrain", "").await.0, 200);
    assert_eq!(client.get("/readyz").await.0, 200);
    assert_eq!(client.post("/v1/drain", "{\"deadlineSeconds\":600}").await.0, 202);
    edge.finish(&[id]).await;
    assert_eq!(edge.records[&id].ids(), alone(&text, &spec(150)));
    let agent = fleet.agent("sn-0-0");
    eventually("it is drained", || agent.drain_status().state == DrainState::Drained).await;
    assert_eq!(drained(&client.get("/v1/drain").await.1).cut, 0);
    assert_eq!(client.post("/v1/undrain", "").await.0, 409);
    fleet.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_cuts_at_its_deadline() {
    let fleet = Fleet::pair(&[], &[]).await;
    let mut edge = Edge::new(&fleet);
    let client = Client::new(&fleet, "sn-0-0");
    let id = edge.submit(&prompt(50, 4), spec(3000));
    edge.reach(id, 3).await;
    assert_eq!(client.post("/v1/drain", "{\"deadlineSeconds\":0}").await.0, 202);
    let agent = fleet.agent("sn-0-0");
    edge.until("it is drained", |_| agent.drain_status().state == DrainState::Drained).await;
    assert_eq!(agent.drain_status().cut, 1);
    fleet.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_tell_blocks_requests_and_step_times() {
    let fleet = Fleet::pair(&[], &[]).await;
    let mut edge = Edge::new(&fleet);
    let id = edge.submit(&prompt(260, 1), spec(4));
    edge.finish(&[id]).await;
    let text = Client::new(&fleet, "p-0").get("/metrics").await.1;
    let value = |line: &str| -> f64 {
        let found = text.lines().find(|l| l.starts_with(line));
        let found = found.unwrap_or_else(|| panic!("no {line} in\n{text}"));
        found.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(value("deepinfer_engine_prompt_tokens_total{pod=\"p-0\"}"), 260.0);
    assert_eq!(value("deepinfer_engine_generated_tokens_total{pod=\"p-0\"}"), 1.0);
    assert_eq!(value("deepinfer_kv_blocks_used{pod=\"p-0\"}"), 0.0);
    assert!(value("deepinfer_kv_blocks_cached{pod=\"p-0\"}") >= 2.0);
    assert!(value("deepinfer_engine_step_seconds_count{pod=\"p-0\"}") >= 1.0);
    assert_eq!(value("deepinfer_engine_broken_invariants_total{pod=\"p-0\"}"), 0.0);
    assert!(text.contains("deepinfer_engine_requests{") && text.ends_with("# EOF\n"), "{text}");
    fleet.stop().await;
}
