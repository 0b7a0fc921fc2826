//! One program that answers for all pretend agents. The operator's `--agent-proxy` sends each call here, with the pod's
//! name in the header `x-deepinfer-pod`; calls are checked with the cluster's key as a real agent does.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use deepinfer_crds::names::label;
use deepinfer_protocol::Generation;
use deepinfer_transport::{ClusterKey, control_auth};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::answers::{View, refuse};
use super::pods::{PodState, Pods};
use super::script::{Answering, Script};
use crate::proxy::fits;

/// Header with the name of the pod that is called.
const POD: &str = "x-deepinfer-pod";
/// Longest body of a call.
const MAX_BODY_BYTES: usize = 64 << 10;
/// Calls that are remembered.
const MAX_CALLS: usize = 100_000;
/// Generations of a cluster's key that are looked for.
const KEY_GENERATIONS: std::ops::RangeInclusive<u64> = 1..=3;

/// A call that an agent got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Name of the pod.
    pub pod: String,
    /// HTTP method.
    pub method: String,
    /// Path without query.
    pub path: String,
    /// The answer; `None` where none was given.
    pub status: Option<u16>,
}

/// The agents of all pretend pods. They end when it is dropped.
pub struct Agents {
    address: SocketAddr,
    state: Arc<State>,
    stop: CancellationToken,
}

struct State {
    client: Client,
    pods: Pods,
    scripts: Mutex<Vec<(String, Script)>>,
    calls: Mutex<VecDeque<Call>>,
    keys: Mutex<BTreeMap<(String, String), ClusterKey>>,
}

impl Agents {
    /// Listens on loopback, on a free port. The client must read pods and Secrets.
    ///
    /// # Errors
    /// There is no port.
    pub async fn start(client: Client) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.context("no port for the pretend agents")?;
        let address = listener.local_addr()?;
        let stop = CancellationToken::new();
        let state = Arc::new(State {
            client: client.clone(),
            pods: Pods::default(),
            scripts: Mutex::default(),
            calls: Mutex::default(),
            keys: Mutex::default(),
        });
        tokio::spawn(state.pods.clone().follow(client, stop.clone()));
        tokio::spawn(accept(listener, state.clone(), stop.clone()));
        Ok(Self { address, state, stop })
    }

    /// For the operator's `--agent-proxy`.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on agents of pods whose names fit the pattern (`*` is any text) follow this script. The last script that
    /// fits a pod is the one that it follows; without any it serves at once.
    pub fn script(&self, pattern: &str, script: Script) {
        let mut scripts = lock(&self.state.scripts);
        scripts.retain(|(known, _)| known != pattern);
        scripts.push((pattern.to_owned(), script));
    }

    /// All agents serve at once again.
    pub fn forget_scripts(&self) {
        lock(&self.state.scripts).clear();
    }

    /// Calls of the pods whose names fit the pattern, oldest first, of the last 100,000.
    pub fn calls(&self, pattern: &str) -> Vec<Call> {
        lock(&self.state.calls).iter().filter(|call| fits(pattern, &call.pod)).cloned().collect()
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl State {
    fn script_of(&self, pod: &str) -> Script {
        let scripts = lock(&self.scripts);
        let found = scripts.iter().rev().find(|(pattern, _)| fits(pattern, pod));
        found.map(|(_, script)| script.clone()).unwrap_or_default()
    }

    fn remember(&self, call: Call) {
        let mut calls = lock(&self.calls);
        if calls.len() == MAX_CALLS {
            calls.pop_front();
        }
        calls.push_back(call);
    }

    /// Whether a call is signed with the key of the pod's cluster, which is read again if it does not fit: a cluster of
    /// the same name may be another one by now.
    async fn check(
        &self,
        pod: &PodState,
        method: &str,
        path: &str,
        header: Option<&str>,
    ) -> Result<(), String> {
        let cluster = pod.label(label::CLUSTER).unwrap_or_default().to_owned();
        let place = (pod.namespace.clone(), cluster);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let held = lock(&self.keys).get(&place).cloned();
        if let Some(key) = held
            && control_auth::check(&key, now, method, path, header).is_ok()
        {
            return Ok(());
        }
        let key = self.read_key(&place).await.map_err(|error| format!("{error:#}"))?;
        control_auth::check(&key, now, method, path, header)?;
        lock(&self.keys).insert(place, key);
        Ok(())
    }

    async fn read_key(&self, (namespace, cluster): &(String, String)) -> Result<ClusterKey> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let mut keys = Vec::new();
        for generation in KEY_GENERATIONS {
            let Some(secret) = api.get_opt(&format!("{cluster}-agent-{generation}")).await? else { continue };
            for (name, value) in secret.data.unwrap_or_default() {
                let generation =
                    name.parse().with_context(|| format!("the key's name {name} is no number"))?;
                keys.push((Generation(generation), key_bytes(&value.0)?));
            }
        }
        anyhow::ensure!(!keys.is_empty(), "cluster {namespace}/{cluster} has no Secret with a key");
        Ok(ClusterKey::of(keys))
    }
}

/// A key from its 64 hex digits.
fn key_bytes(text: &[u8]) -> Result<[u8; 32]> {
    let text = std::str::from_utf8(text)?.trim();
    anyhow::ensure!(text.len() == 64 && text.is_ascii(), "a key is 64 hex digits");
    let mut key = [0; 32];
    for (at, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).context("a key is 64 hex digits")?;
    }
    Ok(key)
}

async fn accept(listener: TcpListener, state: Arc<State>, stop: CancellationToken) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, _)) = accepted else {
            tokio::task::yield_now().await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let (state, stop) = (state.clone(), stop.clone());
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(state.clone(), request));
            let served = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            if let Some(Err(error)) = stop.run_until_cancelled(served).await {
                tracing::debug!(%error, "a connection to the pretend agents ended");
            }
        });
    }
}

/// Answers a call; an error closes the connection.
async fn answer(state: Arc<State>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, io::Error> {
    let (parts, body) = request.into_parts();
    let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
    let name = header(POD).unwrap_or("").rsplit('/').next().unwrap_or_default().to_owned();
    let (method, path) = (parts.method.as_str().to_owned(), parts.uri.path().to_owned());
    let script = state.script_of(&name);
    let call = |status| Call { pod: name.clone(), method: method.clone(), path: path.clone(), status };
    match script.answering {
        Answering::AtOnce => {}
        Answering::After(time) => tokio::time::sleep(time).await,
        Answering::Never => {
            state.remember(call(None));
            return std::future::pending().await;
        }
        Answering::Closed => {
            state.remember(call(None));
            return Err(io::Error::other("closed by script"));
        }
        Answering::Status(status) => {
            state.remember(call(Some(status)));
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            return Ok(json_answer(refuse(status, "by script")));
        }
    }
    let body = Limited::new(body, MAX_BODY_BYTES).collect().await.map_err(io::Error::other)?.to_bytes();
    let known = state.pods.lock().get(&name).cloned();
    let answer = match known {
        None => {
            let host = header(HOST.as_str()).unwrap_or("nobody");
            refuse(StatusCode::NOT_FOUND, &format!("no pod {name:?} is known (called as {host})"))
        }
        Some(pod) => match state.check(&pod, &method, &path, header(AUTHORIZATION.as_str())).await {
            Err(why) => refuse(StatusCode::UNAUTHORIZED, &why),
            Ok(()) => {
                let (now, mut gone) = (Instant::now(), pod);
                let mut pods = state.pods.lock();
                // It may have been deleted while its key was read; then nobody keeps what it is told.
                let pod = pods.get_mut(&name).unwrap_or(&mut gone);
                pod.since.get_or_insert(now);
                View { name: &name, pod, script: &script, now }.answer(&method, &path, &body)
            }
        },
    };
    state.remember(call(Some(answer.0.as_u16())));
    Ok(json_answer(answer))
}

fn json_answer((status, value): (StatusCode, Value)) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(Bytes::from(value.to_string())));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_64_hex_digits() {
        assert_eq!(key_bytes("0a".repeat(32).as_bytes()).unwrap(), [10; 32]);
        for bad in [String::new(), "0a".repeat(31), "zz".repeat(32), "é".repeat(32)] {
            assert!(key_bytes(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
