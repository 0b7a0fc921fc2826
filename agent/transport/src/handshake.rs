//! The first words on a connection: both sides prove that they hold a key of the cluster.
//!
//! ```text
//! acceptor                       dialer
//!   Challenge{nonce a} ------------>
//!   <------------ Hello{version, name, process, nonce d, key generation, HMAC("hello" a process name)}
//!   Welcome{name, HMAC("welcome" d name)} ---->        (or Refused{reason})
//! ```
//!
//! Invariant: until the peer is known, frames are short and the whole exchange has a deadline.

use std::time::Duration;

use deepinfer_protocol::frame::{self, FrameError};
use deepinfer_protocol::limits::{MAX_HELLO_BYTES, PROTOCOL_VERSION};
use deepinfer_protocol::message::{Message, Peer};
use deepinfer_protocol::{AgentId, Generation};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::key::{ClusterKey, random_bytes};

/// Time for the whole exchange: two round trips and the slowest start of a process.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// Longest name of a peer: what Kubernetes allows for a pod.
const MAX_NAME_BYTES: usize = 253;

/// Why a connection did not open.
#[derive(Debug, Error)]
pub enum HandshakeError {
    /// The socket failed, or the peer went away.
    #[error("the connection broke during the handshake: {0}")]
    Io(#[from] std::io::Error),
    /// The peer sent what is not a frame.
    #[error("not a frame during the handshake: {0}")]
    Frame(#[from] FrameError),
    /// The exchange took too long.
    #[error("no handshake within {} s", HANDSHAKE_DEADLINE.as_secs())]
    TooSlow,
    /// The peer said something else than the handshake asks for.
    #[error("the peer sent {0} where the handshake expects something else")]
    Unexpected(&'static str),
    /// We refused the peer, and told it.
    #[error("refused: {0}")]
    WeRefused(String),
    /// The peer refused us.
    #[error("refused by the peer: {0}")]
    TheyRefused(String),
    /// The acceptor does not hold the cluster's key.
    #[error("{0} does not hold the cluster's key of the generation we signed with")]
    BadWelcome(AgentId),
    /// The address belongs to somebody else.
    #[error("expected {expected} at this address, found {found}")]
    WrongPeer {
        /// Asked for.
        expected: AgentId,
        /// Who answered.
        found: AgentId,
    },
}

/// Who is at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Its name.
    pub name: AgentId,
    /// Its kind.
    pub peer: Peer,
    /// The process behind the name; `None` of who was dialed, whose answer does not say.
    pub process: Option<u64>,
}

/// The acceptor's part. Gives who connected, and bytes that already followed the hello.
pub async fn accept(
    stream: &mut TcpStream,
    own: &AgentId,
    key: &ClusterKey,
) -> Result<(Remote, Vec<u8>), HandshakeError> {
    tokio::time::timeout(HANDSHAKE_DEADLINE, accept_untimed(stream, own, key))
        .await
        .unwrap_or(Err(HandshakeError::TooSlow))
}

async fn accept_untimed(
    stream: &mut TcpStream,
    own: &AgentId,
    key: &ClusterKey,
) -> Result<(Remote, Vec<u8>), HandshakeError> {
    let challenge = random_bytes()?;
    write(stream, &Message::Challenge { nonce: challenge }).await?;
    let mut bytes = Vec::new();
    let hello = read(stream, &mut bytes).await?;
    let Message::Hello { version, name, peer, process, nonce, key: generation, mac } = hello else {
        return Err(HandshakeError::Unexpected("another message than a hello"));
    };
    let problem = check_hello(key, (version, &name, process, generation), &challenge, &mac).err();
    if let Some(reason) = problem.or_else(|| (name == *own).then(|| format!("{name} is my own name"))) {
        write(stream, &Message::Refused { reason: reason.clone() }).await?;
        return Err(HandshakeError::WeRefused(reason));
    }
    let mac = key
        .sign_as(generation, &[b"welcome", &nonce, own.as_str().as_bytes()])
        .expect("the generation was accepted above");
    write(stream, &Message::Welcome { name: own.clone(), mac }).await?;
    Ok((Remote { name, peer, process: Some(process) }, bytes))
}

fn check_hello(
    key: &ClusterKey,
    (version, name, process, generation): (u32, &AgentId, u64, Generation),
    challenge: &[u8; 32],
    mac: &[u8; 32],
) -> Result<(), String> {
    if version != PROTOCOL_VERSION {
        return Err(format!("protocol version {version}, this side speaks {PROTOCOL_VERSION}"));
    }
    if name.as_str().is_empty() || name.as_str().len() > MAX_NAME_BYTES {
        return Err(format!("a name must have 1 to {MAX_NAME_BYTES} bytes"));
    }
    if !key.accepts(generation) {
        return Err(format!("key generation {generation} is not accepted here"));
    }
    if !key.verify(generation, &[b"hello", challenge, &process.to_le_bytes(), name.as_str().as_bytes()], mac)
    {
        return Err("the signature does not match the cluster's key".to_owned());
    }
    Ok(())
}

/// The dialer's part. Gives bytes that already followed the welcome.
pub async fn dial(
    stream: &mut TcpStream,
    own: &Remote,
    expected: &AgentId,
    key: &ClusterKey,
) -> Result<Vec<u8>, HandshakeError> {
    tokio::time::timeout(HANDSHAKE_DEADLINE, dial_untimed(stream, own, expected, key))
        .await
        .unwrap_or(Err(HandshakeError::TooSlow))
}

async fn dial_untimed(
    stream: &mut TcpStream,
    own: &Remote,
    expected: &AgentId,
    key: &ClusterKey,
) -> Result<Vec<u8>, HandshakeError> {
    let mut bytes = Vec::new();
    let Message::Challenge { nonce: challenge } = read(stream, &mut bytes).await? else {
        return Err(HandshakeError::Unexpected("another message than a challenge"));
    };
    let own_nonce = random_bytes()?;
    let process = own.process.unwrap_or_default();
    let (generation, mac) =
        key.sign(&[b"hello", &challenge, &process.to_le_bytes(), own.name.as_str().as_bytes()]);
    let hello = Message::Hello {
        version: PROTOCOL_VERSION,
        name: own.name.clone(),
        peer: own.peer,
        process,
        nonce: own_nonce,
        key: generation,
        mac,
    };
    write(stream, &hello).await?;
    match read(stream, &mut bytes).await? {
        Message::Welcome { name, mac } => {
            let signed = [&b"welcome"[..], &own_nonce, name.as_str().as_bytes()];
            if !key.verify(generation, &signed, &mac) {
                return Err(HandshakeError::BadWelcome(name));
            }
            if name != *expected {
                return Err(HandshakeError::WrongPeer { expected: expected.clone(), found: name });
            }
            Ok(bytes)
        }
        Message::Refused { reason } => Err(HandshakeError::TheyRefused(reason)),
        _ => Err(HandshakeError::Unexpected("another message than a welcome")),
    }
}

async fn write(stream: &mut TcpStream, message: &Message) -> Result<(), HandshakeError> {
    let mut bytes = Vec::with_capacity(256);
    frame::encode_head(message, 0, &mut bytes)?;
    stream.write_all(&bytes).await?;
    Ok(())
}

/// Reads one frame; what came after it stays in `bytes`.
async fn read(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> Result<Message, HandshakeError> {
    loop {
        if let Some((frame, used)) = frame::decode(bytes, MAX_HELLO_BYTES)? {
            let message = frame.message;
            bytes.drain(..used);
            return Ok(message);
        }
        let mut part = [0; 1024];
        let got = stream.read(&mut part).await?;
        if got == 0 {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
        }
        bytes.extend_from_slice(&part[..got]);
    }
}
