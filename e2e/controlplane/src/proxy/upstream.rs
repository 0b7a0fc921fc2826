//! Connections to the API server: TLS with the control plane's own authority, HTTP/1.1, used again and again.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http::header::HOST;
use http::{HeaderValue, Request, Response, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Idle and busy connections that are remembered.
const MAX_CONNECTIONS: usize = 512;
/// Tries on connections that turn out to be closed before the request went out.
const MAX_TRIES: usize = 4;

type Sender = SendRequest<Full<Bytes>>;

/// The API server.
pub(super) struct Upstream {
    authority: String,
    host: HeaderValue,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    connections: Mutex<Vec<Sender>>,
}

impl Upstream {
    /// `url` is `https://host:port` with the authority's certificates in PEM, or `http://host:port`.
    pub(super) fn new(url: &str, ca_pem: &[u8]) -> Result<Self> {
        let uri: Uri = url.trim_end_matches('/').parse().with_context(|| format!("not a URL: {url}"))?;
        let authority = uri.authority().with_context(|| format!("no host in {url}"))?;
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let https = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => bail!("{url}: expected https:// or http://"),
        };
        let default = if https { 443 } else { 80 };
        let port = authority.port_u16().unwrap_or(default);
        let tls = if https {
            let name = ServerName::try_from(host.clone()).with_context(|| format!("not a host: {host}"))?;
            Some((connector(ca_pem)?, name))
        } else {
            None
        };
        Ok(Self {
            authority: format!("{}:{port}", authority.host()),
            host: HeaderValue::from_str(authority.as_str())?,
            tls,
            connections: Mutex::new(Vec::new()),
        })
    }

    /// Sends a request whose URI is path and query.
    ///
    /// # Errors
    /// The server cannot be reached, or it closed the connection instead of answering.
    pub(super) async fn send(&self, mut request: Request<Full<Bytes>>) -> Result<Response<Incoming>> {
        request.headers_mut().insert(HOST, self.host.clone());
        for attempt in 0..MAX_TRIES {
            let idle = if attempt + 1 < MAX_TRIES { self.take() } else { None };
            let mut sender = match idle {
                Some(sender) => sender,
                None => self.connect().await?,
            };
            match sender.try_send_request(request).await {
                Ok(response) => {
                    self.give_back(sender);
                    return Ok(response);
                }
                Err(mut error) => match error.take_message() {
                    // It never went out: the server had closed an idle connection.
                    Some(message) => request = message,
                    None => return Err(error.into_error().into()),
                },
            }
        }
        bail!("the API server closes every connection at once")
    }

    /// A connection on which nothing runs.
    fn take(&self) -> Option<Sender> {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|sender| !sender.is_closed());
        let at = connections.iter().position(Sender::is_ready)?;
        Some(connections.swap_remove(at))
    }

    /// Keeps a connection; it is ready again when its answer's body has ended.
    fn give_back(&self, sender: Sender) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if connections.len() < MAX_CONNECTIONS {
            connections.push(sender);
        }
    }

    async fn connect(&self) -> Result<Sender> {
        let stream = TcpStream::connect(&self.authority)
            .await
            .with_context(|| format!("cannot reach the API server at {}", self.authority))?;
        stream.set_nodelay(true)?;
        match &self.tls {
            Some((connector, name)) => {
                let stream = connector.connect(name.clone(), stream).await.context("TLS")?;
                handshake(stream).await
            }
            None => handshake(stream).await,
        }
    }
}

async fn handshake(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Result<Sender> {
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to the API server ended");
        }
    });
    Ok(sender)
}

fn connector(ca_pem: &[u8]) -> Result<TlsConnector> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(ca_pem) {
        roots.add(certificate.context("the authority's certificate is not PEM")?)?;
    }
    if roots.is_empty() {
        bail!("no certificate of the API server's authority was given");
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}
