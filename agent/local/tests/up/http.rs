//! A plain HTTP client for tests: one request, one connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

/// Longer than any answer of a small model takes on a machine that does other things too.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A response.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub body: String,
}

impl Response {
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

/// Asks; `host` is `127.0.0.1:port`. An error is one of the connection.
pub fn ask(host: &str, method: &str, path: &str, headers: &str, body: &str) -> std::io::Result<Response> {
    let mut reader = open(host, method, path, headers, body)?;
    let (status, chunked, length) = head(&mut reader)?;
    let mut bytes = Vec::new();
    if chunked {
        while let Some(chunk) = chunk(&mut reader)? {
            bytes.extend(chunk);
        }
    } else if let Some(length) = length {
        bytes.resize(length, 0);
        reader.read_exact(&mut bytes)?;
    } else {
        reader.read_to_end(&mut bytes)?;
    }
    Ok(Response { status, body: String::from_utf8_lossy(&bytes).into_owned() })
}

/// Sends a request and leaves the response to be read.
pub fn open(
    host: &str,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> std::io::Result<BufReader<TcpStream>> {
    let mut stream = TcpStream::connect(host)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
         connection: close\r\n{headers}\r\n{body}"
    )?;
    stream.flush()?;
    Ok(BufReader::new(stream))
}

/// Reads a response's head: status, whether chunks follow, or how many bytes.
pub fn head(reader: &mut impl BufRead) -> std::io::Result<(u16, bool, Option<usize>)> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| std::io::Error::other(format!("no response: {line:?}")))?;
    let (mut chunked, mut length) = (false, None);
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let header = line.trim().to_ascii_lowercase();
        if header.is_empty() {
            return Ok((status, chunked, length));
        }
        chunked |= header == "transfer-encoding: chunked";
        if let Some(value) = header.strip_prefix("content-length: ") {
            length = value.parse().ok();
        }
    }
}

/// The next chunk of a chunked body.
pub fn chunk(reader: &mut impl BufRead) -> std::io::Result<Option<Vec<u8>>> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let size =
        usize::from_str_radix(line.trim(), 16).map_err(|_| std::io::Error::other("the stream broke off"))?;
    let mut bytes = vec![0; size + 2];
    reader.read_exact(&mut bytes)?;
    bytes.truncate(size);
    Ok((size > 0).then_some(bytes))
}
