//! Who comes in: API keys, the cluster's key, TLS; and changes of all three while the gateway runs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use deepinfer_gateway::server::start;
use deepinfer_transport::{ClusterKey, control_auth};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::common::repository;
use crate::fleet::FakeFleet;
use crate::http::Client;
use crate::setup::{House, PATIENCE, body, expected, ids, options};

#[tokio::test(flavor = "multi_thread")]
async fn without_a_known_key_requests_are_answered_401_in_the_form_of_the_api() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys.yaml");
    std::fs::write(&keys, "alpha: [key-of-alpha, key-two-of-alpha]\nbeta: key-of-beta0\n").unwrap();
    let house = House::with(FakeFleet::start(1).await, |o| o.api_keys = Some(keys.clone())).await;
    let mut client = house.client().await;
    for header in ["", "authorization: Bearer wrong-key\r\n", "authorization: Basic key-of-alpha\r\n"] {
        for path in ["/v1/completions", "/v1/chat/completions"] {
            client.send("POST", path, header, &body(1, 3, false)).await;
            let answer = client.answer().await.unwrap();
            assert_eq!(answer.status(), 401);
            assert_eq!(answer.json()["error"]["code"], "invalid_api_key");
            assert_eq!(answer.head.header("www-authenticate"), Some("Bearer"));
        }
    }
    assert_eq!(client.get("/v1/models").await.status(), 401);
    assert_eq!(client.get("/readyz").await.status(), 200);
    assert_eq!(house.metric("deepinfer_refusals_total", "reason=\"unauthorized\""), 0.0);
    assert_eq!(house.metric("deepinfer_refusals_total", "reason=\"invalid_api_key\""), 7.0);
    for key in ["key-of-alpha", "key-two-of-alpha", "key-of-beta0"] {
        client
            .send("POST", "/v1/completions", &format!("authorization: Bearer {key}\r\n"), &body(1, 3, false))
            .await;
        assert_eq!(ids(&client.answer().await.unwrap()), expected(1, 3));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_keys_file_is_in_force_without_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys.yaml");
    std::fs::write(&keys, "alpha: key-of-alpha\n").unwrap();
    let house = House::with(FakeFleet::start(1).await, |o| o.api_keys = Some(keys.clone())).await;
    std::fs::write(&keys, "alpha: another-key\n").unwrap();
    let mut client = house.client().await;
    let end = tokio::time::Instant::now() + PATIENCE;
    loop {
        client.send("GET", "/v1/models", "authorization: Bearer another-key\r\n", "").await;
        if client.answer().await.unwrap().status() == 200 {
            break;
        }
        assert!(tokio::time::Instant::now() < end);
    }
    client.send("GET", "/v1/models", "authorization: Bearer key-of-alpha\r\n", "").await;
    assert_eq!(client.answer().await.unwrap().status(), 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_opens_with_the_cluster_key_and_says_what_the_gateway_does() {
    let house = House::open().await;
    let mut client = house.client().await;
    assert_eq!(client.get("/v1/status").await.status(), 401);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let strange = ClusterKey::new(deepinfer_protocol::Generation(1), [1; 32]);
    for (key, status) in [(&strange, 401), (&house.fleet.key, 200)] {
        let header = control_auth::authorization(key, now, "GET", "/v1/status");
        client.send("GET", "/v1/status", &format!("authorization: {header}\r\n"), "").await;
        let answer = client.answer().await.unwrap();
        assert_eq!(answer.status(), status);
        if status == 200 {
            let said = answer.json();
            assert_eq!((said["name"].clone(), said["ready"].clone()), ("gw-0".into(), true.into()));
            assert_eq!(said["running"], 0);
        }
    }
    client.post("/v1/completions", &body(1, 30, false)).await;
    let status = house.gateway.stats();
    assert_eq!((status.requests, status.ttft.count), (1, 1));
    assert!(status.ttft.p50_ms > 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_files_are_named_at_start() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = FakeFleet::start(1).await;
    let missing = dir.path().join("nothing.yaml");
    let mut bad = options(&fleet);
    bad.api_keys = Some(missing.clone());
    let error = start(bad, fleet.view.subscribe()).await.err().unwrap().to_string();
    assert!(error.contains("nothing.yaml"), "{error}");
    let cases = [
        (tls("a.pem"), missing.clone(), "nothing.yaml"),
        (tls("a.key"), tls("a.key"), "a.key holds no certificate"),
        (tls("a.pem"), tls("a.pem"), "a.pem holds no private key"),
        (tls("a.pem"), tls("b.key"), "cannot be used"),
    ];
    for (certificate, key, expected) in cases {
        let mut bad = options(&fleet);
        bad.tls = Some((certificate, key));
        let error = start(bad, fleet.view.subscribe()).await.err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

fn tls(name: &str) -> PathBuf {
    repository("agent/gateway/tests/tls").join(name)
}

async fn tls_client(house: &House, trusted: &str) -> std::io::Result<Client<TlsStream<TcpStream>>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(tls(trusted)).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(house.gateway.addr()).await?;
    let connector = TlsConnector::from(Arc::new(config));
    Ok(Client::over(connector.connect("localhost".try_into().unwrap(), stream).await?))
}

#[tokio::test(flavor = "multi_thread")]
async fn with_tls_answers_are_encrypted_and_a_new_certificate_takes_over_without_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    let install = |name: &str| {
        std::fs::copy(tls(&format!("{name}.key")), &key).unwrap();
        std::fs::copy(tls(&format!("{name}.pem")), &certificate).unwrap();
    };
    install("a");
    let pair = (certificate.clone(), key.clone());
    let house = House::with(FakeFleet::start(1).await, |options| options.tls = Some(pair)).await;
    assert!(house.gateway.url().starts_with("https://127.0.0.1:"));
    let mut client = tls_client(&house, "a.pem").await.unwrap();
    assert_eq!(ids(&client.post("/v1/completions", &body(1, 30, false)).await), expected(1, 30));
    assert!(tls_client(&house, "b.pem").await.is_err());
    // Plain text is no handshake.
    let mut plain = house.client().await;
    plain.write(b"GET /healthz HTTP/1.1\r\nhost: test\r\n\r\n").await.unwrap();
    assert!(plain.head().await.is_err() || plain.head().await.is_err());

    install("b");
    let end = tokio::time::Instant::now() + PATIENCE;
    while tls_client(&house, "b.pem").await.is_err() {
        assert!(tokio::time::Instant::now() < end);
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    // Connections that were open go on.
    assert_eq!(ids(&client.post("/v1/completions", &body(2, 30, false)).await), expected(2, 30));
}
