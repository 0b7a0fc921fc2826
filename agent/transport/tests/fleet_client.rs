//! Following the fleet over HTTP: an operator of the test that answers by a script, goes away and comes back.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use deepinfer_protocol::Generation;
use deepinfer_protocol::fleet::FleetView;
use deepinfer_transport::fleet_client::{FleetClientOptions, FleetProbe, start};
use deepinfer_transport::{ClusterKey, control_auth};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

const DEADLINE: Duration = Duration::from_secs(60);
const PATH: &str = "/v1/fleet/ns/c";

/// What the operator does with the next question.
#[derive(Clone, Debug)]
enum Next {
    View(FleetView),
    Raw(u16, String),
    /// No news, at once.
    Nothing,
    /// Closes the connection without a word.
    HangUp,
}

#[derive(Clone)]
struct Operator {
    script: Arc<Mutex<VecDeque<Next>>>,
    /// Targets that were asked for.
    asked: Arc<Mutex<Vec<String>>>,
    url: String,
    stop: CancellationToken,
}

fn key() -> ClusterKey {
    ClusterKey::new(Generation(1), [3; 32])
}

fn view(generation: u64) -> FleetView {
    FleetView { generation: Generation(generation), cluster: "c".to_owned(), ..FleetView::default() }
}

impl Operator {
    /// Answers by the script, then that there is no news.
    async fn new(script: Vec<Next>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let operator = Self {
            script: Arc::new(Mutex::new(script.into())),
            asked: Arc::default(),
            url: format!("http://{}", listener.local_addr().unwrap()),
            stop: CancellationToken::new(),
        };
        let (serving, stop) = (operator.clone(), operator.stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = serving.serve(listener) => {}
            }
        });
        operator
    }

    async fn serve(&self, listener: TcpListener) {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut bytes = Vec::new();
            while !bytes.ends_with(b"\r\n\r\n") {
                if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
                    break;
                }
            }
            let text = String::from_utf8(bytes).unwrap();
            let target = text.split(' ').nth(1).unwrap_or_default().to_owned();
            let header = text.lines().find_map(|line| line.strip_prefix("authorization: "));
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
            let path = target.split('?').next().unwrap();
            let (status, body) = match control_auth::check(&key(), now, "GET", path, header) {
                Err(why) => (401, why.to_owned()),
                Ok(()) => {
                    self.asked.lock().unwrap().push(target);
                    let next = self.script.lock().unwrap().pop_front().unwrap_or(Next::Nothing);
                    match next {
                        Next::View(view) => (200, serde_json::to_string(&view).unwrap()),
                        Next::Raw(status, body) => (status, body),
                        Next::Nothing => (204, String::new()),
                        Next::HangUp => continue,
                    }
                }
            };
            let head = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n", body.len());
            let _ = stream.write_all((head + &body).as_bytes()).await;
        }
    }

    fn then(&self, next: Next) {
        self.script.lock().unwrap().push_back(next);
    }
}

struct Client {
    view: watch::Receiver<Arc<FleetView>>,
    probe: FleetProbe,
    stop: CancellationToken,
}

impl Client {
    fn start(operators: &[&Operator], ledger: Option<&std::path::Path>) -> Self {
        let stop = CancellationToken::new();
        let options = FleetClientOptions {
            urls: operators.iter().map(|operator| operator.url.clone()).collect(),
            path: PATH.to_owned(),
            key: key(),
            ledger: ledger.map(Into::into),
        };
        let (view, probe) = start(options, stop.clone()).unwrap();
        Self { view, probe, stop }
    }

    async fn reaches(&mut self, generation: u64) {
        let seen = self.view.wait_for(|view| view.generation.0 == generation);
        tokio::time::timeout(DEADLINE, seen).await.expect("in time").unwrap();
    }

    async fn until(&self, what: &str, holds: impl Fn(&FleetProbe) -> bool) {
        let waiting = async {
            while !holds(&self.probe) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(DEADLINE, waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
    }
}

#[tokio::test]
async fn news_are_followed_and_the_next_question_names_what_is_known() {
    let operator = Operator::new(vec![Next::View(view(3)), Next::Nothing, Next::View(view(5))]).await;
    let mut client = Client::start(&[&operator], None);
    client.reaches(5).await;
    assert_eq!(client.probe.health().generation, Generation(5));
    assert_eq!(client.probe.health().failures, 0);
    let asked = operator.asked.lock().unwrap().clone();
    assert!(asked[0].starts_with("/v1/fleet/ns/c?after=0&waitSeconds="), "{asked:?}");
    assert!(asked[1].contains("after=3") && asked[2].contains("after=3"), "{asked:?}");
    client.stop.cancel();
}

#[tokio::test]
async fn lower_generations_other_clusters_and_nonsense_are_refused_and_the_last_view_stays() {
    let other = FleetView { cluster: "d".to_owned(), ..view(99) };
    let script = vec![
        Next::View(view(7)),
        Next::View(view(6)),
        Next::View(other),
        Next::Raw(200, "{}".to_owned()),
        Next::Raw(503, String::new()),
        Next::HangUp,
    ];
    let operator = Operator::new(script).await;
    let mut client = Client::start(&[&operator], None);
    client.reaches(7).await;
    client.until("five failures", |probe| probe.health().failures == 5).await;
    assert_eq!(client.probe.health().refused, 2);
    assert_eq!(client.view.borrow().generation, Generation(7));
    operator.then(Next::View(view(8)));
    client.reaches(8).await;
    client.stop.cancel();
}

#[tokio::test]
async fn another_replica_is_asked_when_one_is_gone() {
    let (first, second) = (Operator::new(vec![Next::View(view(1))]).await, Operator::new(vec![]).await);
    let mut client = Client::start(&[&first, &second], None);
    client.reaches(1).await;
    assert!(second.asked.lock().unwrap().is_empty(), "one is enough");
    first.stop.cancel();
    second.then(Next::View(view(2)));
    client.reaches(2).await;
    client.stop.cancel();
}

#[tokio::test]
async fn a_start_without_the_operator_has_the_view_of_the_ledger() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().join("fleet.json");
    let operator = Operator::new(vec![Next::View(view(4))]).await;
    let mut client = Client::start(&[&operator], Some(&ledger));
    client.reaches(4).await;
    let written = async {
        while !ledger.exists() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(DEADLINE, written).await.expect("the ledger is written");
    client.stop.cancel();
    operator.stop.cancel();

    let again = Client::start(&[&operator], Some(&ledger));
    assert_eq!(again.view.borrow().generation, Generation(4), "at once");
    again.until("it tries", |probe| probe.health().failures > 1).await;
    assert_eq!(again.view.borrow().generation, Generation(4), "it stays");
    again.stop.cancel();
}

#[tokio::test]
async fn metrics_tell_age_generation_and_failures() {
    let operator = Operator::new(vec![Next::View(view(4)), Next::HangUp]).await;
    let mut client = Client::start(&[&operator], None);
    client.reaches(4).await;
    client.until("a failure", |probe| probe.health().failures == 1).await;
    let text = client.probe.families("pod-7");
    assert!(text.contains("deepinfer_fleet_generation{pod=\"pod-7\"} 4"), "{text}");
    assert!(text.contains("deepinfer_fleet_failures_total{pod=\"pod-7\"} 1"), "{text}");
    assert!(text.contains("# TYPE deepinfer_fleet_age_seconds gauge"), "{text}");
    client.stop.cancel();
}
