//! GET of a probe: one connection, any certificate.

use std::sync::Arc;

use anyhow::Context as _;
use bytes::Bytes;
use http_body_util::Empty;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, IpAddr, ServerName, UnixTime};
use tokio_rustls::rustls::{self, ClientConfig, DigitallySignedStruct, SignatureScheme};

/// The status that a server answers.
pub(crate) async fn get(
    (host, port): (&str, u16),
    path: &str,
    headers: &[(&str, &str)],
    tls: bool,
) -> anyhow::Result<u16> {
    let stream = TcpStream::connect((host, port)).await?;
    let mut request = http::Request::get(path).header("user-agent", "kube-probe/process-node");
    let named = headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host"));
    if !named {
        request = request.header("host", format!("{host}:{port}"));
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Empty::new())?;
    if !tls {
        return send(stream, request).await;
    }
    let address: std::net::IpAddr = host.parse().context("a probe over TLS goes to an address")?;
    let name = ServerName::IpAddress(IpAddr::from(address));
    send(connector()?.connect(name, stream).await?, request).await
}

async fn send<S>(stream: S, request: http::Request<Empty<Bytes>>) -> anyhow::Result<u16>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // The connection lives as long as the answer is awaited: its task ends with this future.
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(connection);
    Ok(sender.send_request(request).await?.status().as_u16())
}

fn connector() -> anyhow::Result<TlsConnector> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate))
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Probes do not check certificates, as Kubernetes says.
#[derive(Debug)]
struct AnyCertificate;

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}
