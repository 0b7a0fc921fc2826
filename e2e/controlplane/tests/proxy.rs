//! The proxy in front of a plain HTTP server that counts what reaches it; `faults.rs` has it before a real one.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use bytes::Bytes;
use deepinfer_controlplane::proxy::{Cut, On, Proxy, Verb, What, When, Which};
use futures_util::{AsyncBufReadExt, StreamExt, stream};
use http::{Request, Response};
use kube::Client;

const PODS: &str = "/api/v1/namespaces/a/pods";
const WATCH: &str = "/api/v1/namespaces/a/pods?watch=true";
const TIME: Duration = Duration::from_secs(10);

#[derive(Clone, Default)]
struct Server(Arc<Mutex<Vec<String>>>);

impl Server {
    fn seen(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

async fn answer(State(server): State<Server>, request: Request<Body>) -> Response<Body> {
    let line = format!("{} {}", request.method(), request.uri().path());
    let number = {
        let mut seen = server.0.lock().unwrap();
        seen.push(line);
        seen.len()
    };
    if request.uri().query().is_some_and(|query| query.contains("watch=true")) {
        let lines = stream::unfold(0u64, |n| async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            Some((Ok::<_, Infallible>(Bytes::from(format!("{{\"n\":{n}}}\n"))), n + 1))
        });
        return Response::new(Body::from_stream(lines));
    }
    Response::new(Body::from(format!("{{\"number\":{number}}}")))
}

async fn start(seed: u64) -> (Server, Proxy) {
    let server = Server::default();
    let app = Router::new().fallback(answer).with_state(server.clone());
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    (server, Proxy::start(&url, b"", seed).await.unwrap())
}

fn client(proxy: &Proxy) -> Client {
    let mut config = kube::Config::new(proxy.url().parse().unwrap());
    // Each refusal is to be seen.
    config.default_retry = false;
    Client::try_from(config).unwrap()
}

async fn get(client: &Client, path: &str) -> Result<String, kube::Error> {
    client.request_text(Request::get(path).body(vec![]).unwrap()).await
}

async fn create(client: &Client, name: &str) -> Result<String, kube::Error> {
    let body = format!(r#"{{"metadata":{{"name":"{name}"}}}}"#);
    let request = Request::post(PODS).header("content-type", "application/json").body(body.into_bytes());
    client.request_text(request.unwrap()).await
}

fn status(answer: Result<String, kube::Error>) -> u16 {
    match answer {
        Ok(_) => 200,
        Err(kube::Error::Api(status)) => status.code,
        Err(_) => 0,
    }
}

#[tokio::test]
async fn requests_pass_and_are_written_down() {
    let (server, proxy) = start(1).await;
    let client = client(&proxy);
    assert_eq!(get(&client, "/api/v1/namespaces/a/pods/p").await.unwrap(), r#"{"number":1}"#);
    create(&client, "new").await.unwrap();
    assert_eq!(server.seen(), ["GET /api/v1/namespaces/a/pods/p", "POST /api/v1/namespaces/a/pods"]);
    let log = proxy.log(&On::any());
    assert_eq!((log[0].asked.verb, log[0].status, log[0].bytes_out), (Verb::Get, Some(200), 12));
    assert_eq!((log[1].asked.verb, log[1].asked.name.as_str()), (Verb::Create, "new"));
    assert_eq!(proxy.count(&On::writes()), 1);
    proxy.reset();
    assert!(proxy.counts().is_empty());
}

#[tokio::test]
async fn a_refused_request_never_reaches_the_server() {
    let (server, proxy) = start(1).await;
    let client = client(&proxy);
    proxy.inject(On::writes().kind("pods"), Which::Nth(2), What::status(409));
    let third = proxy.inject(On::writes(), Which::Nth(3), What::too_many(7));
    let answers = [create(&client, "a").await, create(&client, "b").await, create(&client, "c").await];
    let [first, second, third_answer] = answers.map(status);
    assert_eq!((first, second, third_answer), (200, 409, 429));
    assert_eq!(server.seen().len(), 1);
    assert_eq!(proxy.figures(third), (3, 1));
    proxy.heal();
    assert_eq!(status(create(&client, "b").await), 200);
}

#[tokio::test]
async fn a_dropped_request_is_not_done_and_a_lost_answer_is() {
    let (server, proxy) = start(1).await;
    let client = client(&proxy);
    proxy.inject(On::writes(), Which::Nth(1), What::Drop);
    proxy.inject(On::writes(), Which::Nth(2), What::LoseAnswer);
    assert_eq!(status(create(&client, "a").await), 0);
    assert_eq!(server.seen().len(), 0);
    assert_eq!(status(create(&client, "a").await), 0);
    assert_eq!(server.seen().len(), 1);
    assert_eq!(status(create(&client, "a").await), 200);
}

#[tokio::test]
async fn a_silent_proxy_answers_nothing_and_a_slow_one_late() {
    let (server, proxy) = start(1).await;
    let client = client(&proxy);
    let silence = proxy.inject(On::any(), Which::All, What::Silence);
    let asked = tokio::time::timeout(Duration::from_millis(200), get(&client, PODS)).await;
    assert!(asked.is_err());
    assert_eq!(server.seen().len(), 0);
    proxy.remove(silence);
    proxy.inject(On::any(), Which::All, What::Delay(Duration::from_millis(150)));
    let before = std::time::Instant::now();
    get(&client, PODS).await.unwrap();
    assert!(before.elapsed() >= Duration::from_millis(150));
}

/// Lines of a watch until it ends, and whether it ended well.
async fn lines(client: &Client) -> (usize, bool) {
    let request = Request::get(WATCH).body(vec![]).unwrap();
    let mut lines = client.request_stream(request).await.unwrap().lines();
    let mut count = 0;
    while let Some(line) = lines.next().await {
        match line {
            Ok(_) => count += 1,
            Err(_) => return (count, false),
        }
    }
    (count, true)
}

#[tokio::test]
async fn watches_are_cut_after_their_lines() {
    let (_server, proxy) = start(1).await;
    let client = client(&proxy);
    for (after, how, well) in [(3, Cut::Clean, true), (2, Cut::Broken, false), (0, Cut::Clean, true)] {
        let on = On::verbs(&[Verb::Watch]);
        let fault = proxy.inject(on, Which::All, What::CutWatch { after, how });
        assert_eq!(lines(&client).await, (after as usize, well));
        proxy.remove(fault);
    }
}

#[tokio::test]
async fn all_open_watches_are_cut_at_once() {
    let (_server, proxy) = start(1).await;
    let client = client(&proxy);
    let open = async || {
        let request = Request::get(WATCH).body(vec![]).unwrap();
        let mut lines = client.request_stream(request).await.unwrap().lines();
        lines.next().await.unwrap().unwrap();
        lines
    };
    let (mut first, mut second) = (open().await, open().await);
    assert_eq!(proxy.watches(&On::any().kind("pods")).len(), 2);
    assert_eq!(proxy.cut_watches(&On::any().kind("nodes"), Cut::Broken), 0);
    assert_eq!(proxy.cut_watches(&On::any().kind("pods"), Cut::Broken), 2);
    for lines in [&mut first, &mut second] {
        while let Some(Ok(_)) = tokio::time::timeout(TIME, lines.next()).await.unwrap() {}
    }
    let mut third = open().await;
    proxy.inject(On::writes(), Which::All, What::CutAllWatches(Cut::Clean));
    create(&client, "a").await.unwrap();
    while let Some(line) = tokio::time::timeout(TIME, third.next()).await.unwrap() {
        line.unwrap();
    }
    assert_eq!(proxy.watches(&On::any()).len(), 0);
}

#[tokio::test]
async fn a_black_hole_gives_no_byte_and_no_reset_and_all_goes_on_after_it() {
    let (server, proxy) = start(1).await;
    let client = client(&proxy);
    let mut lines = client.request_stream(Request::get(WATCH).body(vec![]).unwrap()).await.unwrap().lines();
    lines.next().await.unwrap().unwrap();
    proxy.black_hole(true);
    let asking = tokio::spawn({
        let client = client.clone();
        async move { get(&client, "/api/v1/nodes").await }
    });
    let quiet = Duration::from_millis(150);
    // What was on its way still comes; then nothing.
    while let Ok(line) = tokio::time::timeout(quiet, lines.next()).await {
        line.unwrap().unwrap();
    }
    assert!(!asking.is_finished());
    assert_eq!(server.seen().len(), 1);
    proxy.black_hole(false);
    tokio::time::timeout(TIME, lines.next()).await.unwrap().unwrap().unwrap();
    tokio::time::timeout(TIME, asking).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_held_write_stands_still_before_or_after_the_server() {
    let (server, proxy) = start(1).await;
    let client = client(&proxy);
    for (when, reached) in [(When::Before, 1), (When::After, 4)] {
        let mut held = proxy.hold(On::writes(), 2, when);
        create(&client, "a").await.unwrap();
        let asking = tokio::spawn({
            let client = client.clone();
            async move { create(&client, "b").await }
        });
        assert_eq!(held.reached(TIME).await.unwrap().name, "b");
        assert_eq!(server.seen().len(), reached);
        assert!(!asking.is_finished());
        held.release();
        tokio::time::timeout(TIME, asking).await.unwrap().unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_write_whose_sender_died_before_it_was_forwarded_is_never_done() {
    let (server, proxy) = start(1).await;
    let client = client(&proxy);
    let mut held = proxy.hold(On::writes(), 1, When::Before);
    let asking = tokio::spawn({
        let client = client.clone();
        async move { create(&client, "a").await }
    });
    held.reached(TIME).await.unwrap();
    asking.abort();
    assert!(asking.await.is_err());
    // The proxy sees the end of the connection and gives up what it held.
    let deadline = std::time::Instant::now() + TIME;
    while proxy.log(&On::writes())[0].took.is_none() {
        assert!(std::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    held.release();
    get(&client, PODS).await.unwrap();
    assert_eq!(server.seen(), ["GET /api/v1/namespaces/a/pods"]);
}

#[tokio::test]
async fn a_server_that_is_gone_looks_like_a_closed_connection_and_one_that_is_back_is_found() {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let proxy = Proxy::start(&format!("http://{address}"), b"", 1).await.unwrap();
    let client = client(&proxy);
    assert_eq!(status(get(&client, PODS).await), 0);
    let app = Router::new().fallback(answer).with_state(Server::default());
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    assert_eq!(status(get(&client, PODS).await), 200);
}
