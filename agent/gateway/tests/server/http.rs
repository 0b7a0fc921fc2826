//! A client that shows every byte: connections are kept, left, or not read, as a test wants.
#![allow(dead_code, reason = "the tests and the bench use their parts")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::net::SocketAddr;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// One connection.
pub struct Client<S = TcpStream> {
    pub stream: BufReader<S>,
    chunked: bool,
    left: usize,
}

/// A response without its body.
#[derive(Debug)]
pub struct Head {
    pub status: u16,
    pub headers: Vec<(String, String)>,
}

impl Head {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// A whole response.
#[derive(Debug)]
pub struct Answer {
    pub head: Head,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.head.status
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }
}

impl Client<TcpStream> {
    pub async fn connect(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self::over(stream)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Client<S> {
    pub fn over(stream: S) -> Self {
        Self { stream: BufReader::new(stream), chunked: false, left: 0 }
    }

    pub async fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes).await?;
        self.stream.flush().await
    }

    /// Sends a request; `headers` are whole lines with their ends.
    pub async fn send(&mut self, method: &str, path: &str, headers: &str, body: &str) {
        let json = if body.is_empty() { "" } else { "content-type: application/json\r\n" };
        let text = format!(
            "{method} {path} HTTP/1.1\r\nhost: test\r\n{json}content-length: {}\r\n{headers}\r\n{body}",
            body.len()
        );
        self.write(text.as_bytes()).await.unwrap();
    }

    /// The status line and headers; an error if the connection ended before.
    pub async fn head(&mut self) -> std::io::Result<Head> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if self.stream.read_line(&mut line).await? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let line = line.trim_end().to_owned();
            if line.is_empty() {
                break;
            }
            lines.push(line);
        }
        let status = lines[0].split(' ').nth(1).unwrap().parse().unwrap();
        let headers: Vec<(String, String)> = lines[1..]
            .iter()
            .map(|line| line.split_once(": ").unwrap())
            .map(|(key, value)| (key.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let head = Head { status, headers };
        self.chunked = head.header("transfer-encoding") == Some("chunked");
        self.left = head.header("content-length").map_or(0, |length| length.parse().unwrap());
        Ok(head)
    }

    /// The next chunk of a body; `None` after the last one.
    pub async fn chunk(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let mut body = vec![0; self.left];
        if self.chunked {
            let mut line = String::new();
            if self.stream.read_line(&mut line).await? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let length = usize::from_str_radix(line.trim(), 16).unwrap();
            body = vec![0; length + 2];
        }
        self.left = 0;
        self.stream.read_exact(&mut body).await?;
        if self.chunked {
            body.truncate(body.len() - 2);
        }
        Ok(if body.is_empty() { None } else { Some(body) })
    }

    /// The whole response.
    pub async fn answer(&mut self) -> std::io::Result<Answer> {
        let head = self.head().await?;
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            body.extend(chunk);
            if !self.chunked {
                break;
            }
        }
        Ok(Answer { head, body })
    }

    pub async fn get(&mut self, path: &str) -> Answer {
        self.send("GET", path, "", "").await;
        self.answer().await.unwrap()
    }

    pub async fn post(&mut self, path: &str, body: &str) -> Answer {
        self.send("POST", path, "", body).await;
        self.answer().await.unwrap()
    }
}

/// The token ids in a stream's events, and whether it ended with `[DONE]`.
pub fn ids_of_stream(body: &str) -> (Vec<u32>, bool) {
    let (mut ids, mut done) = (Vec::new(), false);
    for data in body.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if data == "[DONE]" {
            done = true;
            continue;
        }
        let event: Value = serde_json::from_str(data).unwrap();
        let of = event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default();
        ids.extend(of.iter().map(|id| id.as_u64().unwrap() as u32));
    }
    (ids, done)
}
