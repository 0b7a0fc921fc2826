//! A client and a cluster.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use deepinfer_operator::keys::{ClusterRef, Keys};
use deepinfer_transport::{ClusterKey, control_auth};
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;

/// Longest wait of a test for something that must happen.
pub const SOON: Duration = Duration::from_secs(10);

pub fn cluster() -> ClusterRef {
    ClusterRef { namespace: "serving".into(), name: "c".into(), uid: "uid-1".into() }
}

pub fn keys() -> Arc<Keys> {
    Arc::new(Keys::new([3; 32]))
}

pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

pub async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// An answer as tests look at it.
#[derive(Debug)]
pub struct Got {
    pub status: u16,
    pub retry_after: Option<String>,
    pub body: String,
}

pub async fn send(request: Request<Full<Bytes>>) -> Got {
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let answer: Response<_> = client.request(request).await.unwrap();
    let header = |name| answer.headers().get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
    let (status, retry_after) = (answer.status().as_u16(), header("retry-after"));
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    Got { status, retry_after, body: String::from_utf8(body.to_vec()).unwrap() }
}

/// `GET` with a signature over the path, if there is a key.
pub async fn get(address: SocketAddr, path_and_query: &str, key: Option<&ClusterKey>) -> Got {
    let path = path_and_query.split('?').next().unwrap();
    let mut request = Request::get(format!("http://{address}{path_and_query}"));
    if let Some(key) = key {
        request = request.header("authorization", control_auth::authorization(key, now(), "GET", path));
    }
    send(request.body(Full::default()).unwrap()).await
}

/// Waits until something holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + SOON;
    while !holds() {
        assert!(tokio::time::Instant::now() < deadline, "it did not happen: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
