//! Addresses of pods: the same port in each, reached from the host and from each other, cut and mended.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::json;

use super::bed::{Bed, eventually, phase, ready};

/// What a server at an address answers, or None if it does not.
fn ask(address: SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_millis(500)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    text.rsplit("\r\n").next().map(str::to_owned)
}

async fn server(bed: &Bed<'_>, name: &str) -> SocketAddr {
    bed.pod(
        name,
        json!({"containers": [{
            "name": "main", "image": "server", "args": ["serve", "0.0.0.0:8080", format!("I am {name}")],
            "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        }]}),
    )
    .await;
    let pod = bed.until(name, "ready", ready).await;
    SocketAddr::new(pod.status.unwrap().pod_ip.unwrap().parse().unwrap(), 8080)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_talk_by_their_own_addresses_on_the_same_port() {
    let Some(bed) = Bed::start(2).await else { return };
    if !bed.nodes.has_namespaces() {
        println!("skipped: pods get addresses of their own only where network namespaces can be made (root)");
        return bed.end().await;
    }
    let (one, two) = (server(&bed, "one").await, server(&bed, "two").await);
    assert_ne!(one.ip(), two.ip());
    let call = json!({"name": "main", "image": "server", "args": ["get", two.to_string()]});
    bed.pod("caller", json!({"restartPolicy": "Never", "containers": [call]})).await;
    bed.until("caller", "done", |pod| phase(pod) == "Succeeded").await;
    assert_eq!(bed.nodes.pod_log(&bed.namespace, "caller", "main").trim(), "I am two");
    assert_eq!(tokio::task::spawn_blocking(move || ask(one)).await.unwrap().as_deref(), Some("I am one"));

    // A pod reaches a server of the host at the bridge's address.
    let host = TcpListener::bind((bed.nodes.host_address(), 0)).unwrap();
    let address = host.local_addr().unwrap();
    let serving = tokio::task::spawn_blocking(move || {
        let (mut stream, _) = host.accept().unwrap();
        // Read first: closing with unread bytes would reset the connection.
        let mut buffer = [0; 1024];
        let _ = stream.read(&mut buffer).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nI am the host").unwrap();
    });
    let call = json!({"name": "main", "image": "server", "args": ["get", address.to_string()]});
    bed.pod("outward", json!({"restartPolicy": "Never", "containers": [call]})).await;
    bed.until("outward", "done", |pod| phase(pod) == "Succeeded").await;
    serving.await.unwrap();
    assert_eq!(bed.nodes.pod_log(&bed.namespace, "outward", "main").trim(), "I am the host");

    // A cut cable: nothing answers, the pod runs on, and its node still calls it ready.
    let reachable = async |wanted: bool| {
        let asked = tokio::task::spawn_blocking(move || ask(two)).await.unwrap();
        asked.is_some() == wanted
    };
    bed.nodes.cut_pod(&bed.namespace, "two").unwrap();
    eventually("the cut pod is not reached", async || reachable(false).await).await;
    assert!(ready(&bed.pods().get("two").await.unwrap()));
    bed.nodes.mend_pod(&bed.namespace, "two").unwrap();
    eventually("the mended pod is reached", async || reachable(true).await).await;
    let node = bed.pods().get("two").await.unwrap().spec.unwrap().node_name.unwrap();
    bed.nodes.cut_node(&node).unwrap();
    eventually("the pods of a cut node are not reached", async || reachable(false).await).await;
    assert!(super::bed::alive(bed.pid("two")));
    bed.nodes.mend_node(&node).unwrap();
    eventually("the pods of a mended node are reached", async || reachable(true).await).await;
    bed.end().await;
}
