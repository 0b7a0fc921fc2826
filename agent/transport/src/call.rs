//! Calls to control ports and to the operator: one signed request, one answer, everything bounded.
//!
//! Each call has a connection of its own. There are few calls, and one that hangs must not hold up the next.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::header::{AUTHORIZATION, HOST};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty, LengthLimitError, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;

use crate::control_auth;
use crate::key::ClusterKey;

/// Longest wait for a TCP connection, name look-up included.
const CONNECT_DEADLINE: Duration = Duration::from_secs(3);

/// Why a call gave no answer.
#[derive(Debug, Error)]
pub enum CallError {
    /// No connection.
    #[error("no connection: {0}")]
    Connect(std::io::Error),
    /// It took too long.
    #[error("no answer within {:.1} s", .0.as_secs_f64())]
    TooSlow(Duration),
    /// The address or path cannot be written as a request.
    #[error("not an address and path of a call: {0}")]
    Request(#[from] http::Error),
    /// The connection broke, or what came is not HTTP.
    #[error("the connection broke: {0}")]
    Broken(#[from] hyper::Error),
    /// The answer is longer than anybody should send.
    #[error("the answer is longer than {0} bytes")]
    TooLong(usize),
}

/// What came back.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The body, whole.
    pub body: Bytes,
}

/// Bounds of a call.
#[derive(Clone, Copy, Debug)]
pub struct CallLimits {
    /// For the answer, body included, from the moment the connection is open.
    pub time: Duration,
    /// Longest body.
    pub bytes: usize,
}

/// `GET path?query` at `authority` (host and port), signed with the cluster's key. `query` may be empty.
///
/// # Errors
/// [`CallError`]; an answer with any status is none.
pub async fn get(
    authority: &str,
    path: &str,
    query: &str,
    key: &ClusterKey,
    limits: CallLimits,
) -> Result<Answer, CallError> {
    let connect = tokio::time::timeout(CONNECT_DEADLINE, TcpStream::connect(authority));
    let stream =
        connect.await.map_err(|_| CallError::TooSlow(CONNECT_DEADLINE))?.map_err(CallError::Connect)?;
    let _ = stream.set_nodelay(true);
    tokio::time::timeout(limits.time, exchange(stream, authority, path, query, key, limits.bytes))
        .await
        .map_err(|_| CallError::TooSlow(limits.time))?
}

async fn exchange(
    stream: TcpStream,
    authority: &str,
    path: &str,
    query: &str,
    key: &ClusterKey,
    most: usize,
) -> Result<Answer, CallError> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Ends with this call, whatever becomes of it.
    let _driven = AbortOnDropHandle::new(tokio::spawn(connection));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let target = if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") };
    let request = Request::get(target)
        .header(HOST, authority)
        .header(AUTHORIZATION, control_auth::authorization(key, now, "GET", path))
        .body(Empty::<Bytes>::new())?;
    let answer = sender.send_request(request).await?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), most).collect().await;
    let body = body.map_err(|error| match error.downcast::<hyper::Error>() {
        Ok(broken) => CallError::Broken(*broken),
        Err(other) => {
            debug_assert!(other.is::<LengthLimitError>(), "the only other error of a limited body");
            CallError::TooLong(most)
        }
    })?;
    Ok(Answer { status, body: body.to_bytes() })
}
