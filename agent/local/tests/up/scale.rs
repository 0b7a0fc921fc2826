//! `deepinfer apply` to a running cluster under load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::json;

use crate::harness::{Spec, Up, complete, prompt, until};
use crate::http;

#[test]
fn scaling_workers_and_ranks_under_load_loses_no_request_and_changes_no_token() {
    let up = Up::start(&Spec { ranks: 2, ..Spec::shipped() });
    let expected: Arc<Vec<Vec<u32>>> = Arc::new((0..6).map(|n| up.complete(&prompt(n, 60), 40).0).collect());
    let (stop, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..6_u32)
        .map(|n| {
            let (host, expected) = (up.host.clone(), Arc::clone(&expected));
            let (stop, served) = (Arc::clone(&stop), Arc::clone(&served));
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let (ids, _) = complete(&host, &prompt(n, 60), 40).expect("no request is lost");
                    assert_eq!(ids, expected[n as usize], "prompt {n}");
                    served.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let more = |up: &Up| {
        let before = served.load(Ordering::Relaxed);
        until("requests are served", || (served.load(Ordering::Relaxed) > before + 6).then_some(up.status()))
    };
    let supernode =
        |status: &serde_json::Value| status["supernodes"][0]["metadata"]["name"].as_str().map(str::to_owned);
    let first = supernode(&more(&up));
    let text = up.apply(&Spec { prefill: 2, ranks: 2, ..Spec::shipped() });
    assert!(text.contains("replicas: 1 -> 2"), "{text}");
    let status = more(&up);
    assert_eq!(supernode(&status), first, "a worker more changes nothing about decode");
    let ready = |status: &serde_json::Value, role: &str| {
        let pods = status["pods"].as_array().expect("pods").iter();
        pods.filter(|pod| pod["role"] == role && pod["ready"] == true).count()
    };
    assert_eq!(ready(&status, "prefill"), 2);
    up.apply(&Spec { prefill: 2, ranks: 4, ..Spec::shipped() });
    let status = more(&up);
    assert_ne!(supernode(&status), first, "a rank change builds a new supernode");
    assert_eq!(status["supernodes"].as_array().map(Vec::len), Some(1), "the old one is gone");
    assert_eq!(status["supernodes"][0]["spec"]["acceleratorsPerNode"], 4);
    up.apply(&Spec { ranks: 1, ..Spec::shipped() });
    until("one worker is left", || (ready(&up.status(), "prefill") == 1).then_some(()));
    more(&up);
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.join().expect("every answer was right");
    }
}

#[test]
fn a_change_that_cannot_be_made_is_refused_and_nothing_changes() {
    let up = Up::start(&Spec::shipped());
    let before = up.status()["cluster"]["metadata"]["generation"].clone();
    let apply = |yaml: String| {
        let path = up.folder.path().join("bad.yaml");
        std::fs::write(&path, yaml).expect("a file");
        let output = up.run(&["apply", "-f", path.to_str().expect("UTF-8")]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let good = Spec::shipped().yaml();
    let error = apply(good.replace("vendor: cpu", "vendor: nvidia"));
    assert!(error.contains("spec.accelerator.vendor"), "an immutable field: {error}");
    let error = apply(Spec { args: vec!["--simd=sse"], ..Spec::shipped() }.yaml());
    assert!(error.contains("spec.engine.extraArgs"), "{error}");
    let error = apply(Spec { model: "nowhere", ..Spec::shipped() }.yaml());
    assert!(error.contains("spec.model.source.uri"), "{error}");
    let error = apply(good.replace("name: test", "name: other"));
    assert!(error.contains("other"), "{error}");
    assert_eq!(up.status()["cluster"]["metadata"]["generation"], before);
    assert_eq!(up.complete(&prompt(1, 10), 3).0.len(), 3);
}

#[test]
fn another_gateway_takes_over_the_address_while_the_old_one_finishes_its_streams() {
    let spec = Spec { args: vec!["--fault-injection"], ..Spec::shipped() };
    let up = Up::start(&spec);
    up.fault("decode", 0, &json!({"slow_ms": 20}));
    let body = json!({"model": "tiny", "prompt": prompt(1, 20), "max_tokens": 150, "stream": true, "ignore_eos": true});
    let mut stream =
        http::open(&up.host, "POST", "/v1/completions", "", &body.to_string()).expect("a response");
    http::head(&mut stream).expect("a head");
    http::chunk(&mut stream).expect("a first chunk");
    let pod = |up: &Up| {
        let status = up.status();
        let mut pods = status["pods"].as_array().expect("pods").iter();
        pods.find(|pod| pod["role"] == "gateway" && pod["ready"] == true).map(|pod| pod["name"].to_string())
    };
    let before = pod(&up).expect("a gateway");
    up.apply(&Spec { thinking: "On", ..spec });
    let after = until("another gateway serves", || pod(&up).filter(|name| *name != before));
    assert_ne!(before, after);
    assert_eq!(up.complete(&prompt(2, 10), 3).0.len(), 3, "at the same address");
    let mut text = String::new();
    while let Some(chunk) = http::chunk(&mut stream).expect("the stream goes on") {
        text.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    until("the old one is gone", || {
        let status = up.status();
        let pods = status["pods"].as_array().expect("pods").iter();
        (pods.filter(|pod| pod["role"] == "gateway").count() == 1).then_some(())
    });
}
