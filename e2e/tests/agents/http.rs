//! A plain HTTP client: one request, one connection, every wait bounded.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use deepinfer_transport::{ClusterKey, control_auth};
use serde_json::Value;

/// Longer than any answer of a small model takes on a machine that does other things too.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A response.
#[derive(Clone, Debug)]
pub struct Response {
    pub status: u16,
    /// Head, in lower case.
    pub head: String,
    pub body: String,
}

impl Response {
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

/// A call. `headers`: whole lines.
pub struct Call<'a> {
    pub address: SocketAddr,
    pub method: &'a str,
    pub target: &'a str,
    pub headers: String,
    pub body: String,
    pub patience: Duration,
}

impl<'a> Call<'a> {
    pub fn new(address: SocketAddr, method: &'a str, target: &'a str) -> Self {
        Self { address, method, target, headers: String::new(), body: String::new(), patience: PATIENCE }
    }

    /// Signed with the cluster's key.
    pub fn signed(mut self, key: &ClusterKey) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let path = self.target.split('?').next().unwrap();
        let header = control_auth::authorization(key, now, self.method, path);
        self.headers = format!("authorization: {header}\r\n");
        self
    }

    pub fn body(mut self, body: &Value) -> Self {
        self.body = body.to_string();
        self
    }

    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    pub fn send(&self) -> std::io::Result<Response> {
        let Self { address, method, target, headers, body, patience } = self;
        let mut stream = TcpStream::connect_timeout(address, *patience)?;
        stream.set_read_timeout(Some(*patience))?;
        let length = body.len();
        write!(
            stream,
            "{method} {target} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\nconnection: close\r\n{headers}\r\n{body}"
        )?;
        let mut reader = BufReader::new(stream);
        let (status, head) = head(&mut reader)?;
        let mut bytes = Vec::new();
        if head.contains("transfer-encoding: chunked") {
            while let Some(chunk) = chunk(&mut reader)? {
                bytes.extend(chunk);
            }
        } else {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length = length.and_then(|length| length.trim().parse().ok()).unwrap_or(0);
            bytes.resize(length, 0);
            reader.read_exact(&mut bytes)?;
        }
        Ok(Response { status, head, body: String::from_utf8_lossy(&bytes).into_owned() })
    }
}

fn head(reader: &mut impl BufRead) -> std::io::Result<(u16, String)> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Err(std::io::Error::other(format!("no response: {head:?}")));
        }
    }
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| std::io::Error::other(format!("no status: {head:?}")))?;
    Ok((status, head.to_ascii_lowercase()))
}

fn chunk(reader: &mut impl BufRead) -> std::io::Result<Option<Vec<u8>>> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let size =
        usize::from_str_radix(line.trim(), 16).map_err(|_| std::io::Error::other("the stream broke off"))?;
    let mut bytes = vec![0; size + 2];
    reader.read_exact(&mut bytes)?;
    bytes.truncate(size);
    Ok((size > 0).then_some(bytes))
}
