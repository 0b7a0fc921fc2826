//! Requests that are wrong, strange or hostile: a clear answer that names the field and repeats nothing.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;
mod scripted;

use std::time::Duration;

use deepinfer_gateway::openai::ApiOptions;
use http::Method;
use scripted::*;
use serde_json::{Value, json};

const JSON: (&str, &str) = ("content-type", "application/json");
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

async fn ok() -> Server {
    serve(|_| answer(&ids("ok"))).await
}

/// SV-109
#[tokio::test]
async fn numbers_out_of_range_are_refused_by_the_name_of_their_field() {
    let server = ok().await;
    let outside = |field| match field {
        "seed" => vec!["-1", "9223372036854775808", "1e400", "1.5", "\"1\"", "true", "[]"],
        "temperature" => vec!["-1", "3072", "2147483648", "9223372036854775808", "1e400", "\"1\"", "{}"],
        "max_tokens" => vec!["-1", "0", "2147483648", "9223372036854775808", "1e400", "2.5", "\"1\"", "true"],
        _ => vec!["-1", "3072", "2147483648", "9223372036854775808", "1e400", "0.5", "\"1\"", "true"],
    };
    let fields = ["temperature", "max_tokens", "max_completion_tokens", "seed", "top_logprobs"];
    for field in fields {
        let field_values =
            if field == "max_completion_tokens" { outside("max_tokens") } else { outside(field) };
        for value in field_values {
            let body = format!(
                r#"{{"model":"tiny","messages":[{{"role":"user","content":"Hi"}}],"logprobs":true,"{field}":{value}}}"#
            );
            let reply = server.send(Method::POST, CHAT, &[JSON], body).await;
            assert_eq!(reply.refused(), field, "{value}");
        }
    }
    for (field, values) in [
        ("logprobs", outside("logprobs")),
        ("top_p", vec!["-1", "0", "3072", "1e400", "1.0001", "\"1\""]),
        ("min_tokens", vec!["-1", "2147483648", "1e400", "\"1\""]),
        ("n", vec!["-1", "0", "3072", "1e400", "\"1\""]),
        ("top_k", vec!["-2", "3072", "1e400", "\"1\""]),
        ("presence_penalty", vec!["-1", "1e400", "\"0\""]),
        ("stream", vec!["1", "\"true\""]),
        ("ignore_eos", vec!["1", "\"true\""]),
        ("stop", vec!["1", "[1]", "\"\"", "[\"\"]", "{}"]),
        ("stream_options", vec!["1", "[]", "{\"include_usage\":true}"]),
    ] {
        for value in values {
            let body = format!(r#"{{"model":"tiny","prompt":"x","{field}":{value}}}"#);
            let reply = server.send(Method::POST, COMPLETIONS, &[JSON], body).await;
            assert_eq!(reply.refused(), field, "{value}");
        }
    }
    assert!(server.seen.lock().unwrap().is_empty(), "nothing reached the engines");
}

/// SV-109: the report was about token ids.
#[tokio::test]
async fn a_token_id_outside_the_vocabulary_is_refused_by_its_place() {
    let server = ok().await;
    let size = model().vocab_size;
    for wrong in [
        "-1",
        &size.to_string(),
        "2147483648",
        "4294967296",
        "9223372036854775808",
        "1e400",
        "null",
        "1.5",
        "\"1\"",
    ] {
        let body = format!(r#"{{"model":"tiny","prompt":[5, 6, {wrong}, 7]}}"#);
        let reply = server.send(Method::POST, COMPLETIONS, &[JSON], body).await;
        assert_eq!(reply.refused(), "prompt[2]", "{wrong}");
    }
    for (wrong, field) in [
        ("null", "prompt"),
        ("5", "prompt"),
        ("{}", "prompt"),
        ("[[1],[2]]", "prompt"),
        ("[\"a\",\"b\"]", "prompt"),
    ] {
        let body = format!(r#"{{"model":"tiny","prompt":{wrong}}}"#);
        assert_eq!(server.send(Method::POST, COMPLETIONS, &[JSON], body).await.refused(), field, "{wrong}");
    }
    let body = json!({ "model": "tiny", "prompt": [0, size - 1] });
    assert_eq!(server.post(COMPLETIONS, &body).await.status, 200);
}

/// OpenAI's schema lets these be null, and clients send it for "not given".
#[tokio::test]
async fn null_is_the_same_as_leaving_a_field_out() {
    let server = ok().await;
    let names = [
        "temperature",
        "top_p",
        "max_tokens",
        "max_completion_tokens",
        "seed",
        "stop",
        "logprobs",
        "top_logprobs",
        "n",
        "stream",
        "stream_options",
        "tools",
        "tool_choice",
        "reasoning_effort",
        "thinking",
        "response_format",
        "presence_penalty",
        "logit_bias",
        "user",
        "metadata",
    ];
    let body = hello_with(
        names.iter().map(|name| ((*name).to_owned(), Value::Null)).collect::<serde_json::Map<_, _>>().into(),
    );
    let reply = server.post(CHAT, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
}

/// SV-110
#[tokio::test]
async fn errors_are_small_and_repeat_nothing_of_what_was_sent() {
    let server = ok().await;
    let canary = "CANARY-9f31";
    let many = |item: Value| Value::Array(vec![item; 10_000]);
    let long = canary.repeat(5_000);
    for (path, body) in [
        (CHAT, hello_with(json!({ "messages": many(json!(canary)) }))),
        (CHAT, hello_with(json!({ "messages": many(json!({ "role": canary, "content": canary })) }))),
        (CHAT, hello_with(json!({ "messages": [{ "role": long, "content": "x" }] }))),
        (CHAT, hello_with(json!({ "messages": [{ "role": "user", "content": many(json!(canary)) }] }))),
        (CHAT, hello_with(json!({ "messages": [{ "role": "user", "content": [{ "type": long }] }] }))),
        (CHAT, hello_with(json!({ "messages": [{ "role": "tool", "tool_call_id": long, "content": "x" }] }))),
        (CHAT, hello_with(json!({ "tools": many(json!({ "type": canary })) }))),
        (CHAT, hello_with(json!({ "tools": [{ "type": "function", "function": { "name": long } }] }))),
        (
            CHAT,
            hello_with(
                json!({ "tools": many(json!({ "type": "function", "function": { "name": canary } })) }),
            ),
        ),
        (CHAT, hello_with(json!({ "stop": many(json!(canary)) }))),
        (CHAT, hello_with(json!({ "temperature": long }))),
        (CHAT, hello_with(json!({ "model": long }))),
        (CHAT, hello_with(json!({ "reasoning_effort": long }))),
        (CHAT, hello_with(json!({ "thinking": { "type": long } }))),
        (CHAT, hello_with(json!({ "tool_choice": long }))),
        (COMPLETIONS, json!({ "model": "tiny", "prompt": many(json!(canary)) })),
        (COMPLETIONS, json!({ "model": "tiny", "prompt": [1, long] })),
        (COMPLETIONS, json!({ "model": "tiny", "prompt": { "text": long } })),
    ] {
        let reply = server.post(path, &body).await;
        let shown: String = body.to_string().chars().take(120).collect();
        assert!(reply.status == 400 || reply.status == 404, "{} for {shown}", reply.status);
        assert!(reply.text.len() < 4096, "{} bytes for {shown}", reply.text.len());
        assert!(!reply.text.contains(canary), "{} for {shown}", reply.text);
    }
}

#[tokio::test]
async fn what_is_not_json_or_not_an_object_is_400() {
    let server = ok().await;
    for body in
        ["", "  ", "{", "{\"model\"", "nonsense", "[]", "5", "\"x\"", "{\"a\":1,}", "{\"a\":\u{1}}", "{} {}"]
    {
        let reply = server.send(Method::POST, CHAT, &[JSON], body).await;
        let error = reply.error(400);
        assert_eq!(error["param"], Value::Null, "{body}");
    }
    let reply = server.send(Method::POST, CHAT, &[JSON], &b"{\"model\":\"\xff\xfe\"}"[..]).await;
    reply.error(400);
    let twice = r#"{"model":"tiny","prompt":"x","max_tokens":1,"max_tokens":2}"#;
    assert_eq!(server.send(Method::POST, COMPLETIONS, &[JSON], twice).await.refused(), "max_tokens");
}

#[tokio::test]
async fn deeply_nested_json_is_400_wherever_it_is() {
    let server = ok().await;
    let deep = |open: &str, close: &str| format!("{}1{}", open.repeat(200_000), close.repeat(200_000));
    for (name, value) in
        [("messages", deep("[", "]")), ("tools", deep("{\"a\":", "}")), ("logit_bias", deep("[", "]"))]
    {
        let body = format!(r#"{{"model":"tiny","{name}":{value}}}"#);
        assert_eq!(server.send(Method::POST, CHAT, &[JSON], body).await.refused(), name);
    }
    let body = deep("[", "]");
    server.send(Method::POST, CHAT, &[JSON], body).await.error(400);
    // Of no known API: nobody reads it.
    let body = format!(r#"{{"model":"tiny","prompt":"x","mine":{}}}"#, deep("[", "]"));
    assert_eq!(server.send(Method::POST, COMPLETIONS, &[JSON], body).await.status, 200);
}

#[tokio::test]
async fn fields_of_no_known_api_are_named_in_a_header_and_counted() {
    let server = ok().await;
    let more = json!({ "zoom": 3, "my_field": { "a": 1 }, "user": "me", "metadata": {}, "store": true, "service_tier": "auto" });
    let reply = server.post(CHAT, &hello_with(more)).await;
    assert_eq!(reply.status, 200);
    let named = reply.headers["x-deepinfer-ignored"].to_str().unwrap();
    let mut named: Vec<_> = named.split(", ").collect();
    named.sort_unstable();
    assert_eq!(named, ["my_field", "zoom"]);
    assert_eq!(server.api.ignored_fields(), 2);
    let reply = server.post(CHAT, &hello_with(json!({ "a\r\nb: c": 1 }))).await;
    assert_eq!(reply.headers["x-deepinfer-ignored"], "a??b??c");
}

#[tokio::test]
async fn media_types_methods_and_paths_have_their_own_errors() {
    let server = ok().await;
    let body = hello().to_string();
    for kind in ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"] {
        server.send(Method::POST, CHAT, &[("content-type", kind)], body.clone()).await.error(415);
    }
    for kind in ["application/json; charset=utf-8", "Application/JSON"] {
        assert_eq!(
            server.send(Method::POST, CHAT, &[("content-type", kind)], body.clone()).await.status,
            200
        );
    }
    assert_eq!(server.send(Method::POST, CHAT, &[], body.clone()).await.status, 200);
    server.get(CHAT).await.error(405);
    server.send(Method::POST, "/v1/models", &[JSON], body.clone()).await.error(405);
    server.send(Method::POST, "/v1/embeddings", &[JSON], body).await.error(404);
}

#[tokio::test]
async fn bodies_have_a_limit_and_a_time() {
    let options =
        ApiOptions { body_limit: 1000, body_timeout: Duration::from_millis(100), ..ApiOptions::default() };
    let server =
        serve_with(model(), options, |_: &_| answer(&ids("ok")).into_iter().map(Play::Say).collect()).await;
    let long = json!({ "model": "tiny", "prompt": "x".repeat(2000) });
    server.post(COMPLETIONS, &long).await.error(413);
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    for (head, rest, status) in [
        ("content-length: 500\r\n\r\n{", "", "408"),
        ("transfer-encoding: chunked\r\n\r\n", "400\r\n", "413"),
    ] {
        let mut stream = tokio::net::TcpStream::connect(server.address).await.unwrap();
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{head}{rest}");
        stream.write_all(head.as_bytes()).await.unwrap();
        if !rest.is_empty() {
            stream.write_all(&[b' '; 0x400]).await.unwrap();
            stream.write_all(b"\r\n0\r\n\r\n").await.unwrap();
        }
        let mut text = String::new();
        tokio::time::timeout(PATIENCE, stream.read_to_string(&mut text)).await.unwrap().unwrap();
        assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{text}");
    }
}

#[tokio::test]
async fn a_model_is_served_under_its_name_and_aliases_and_no_other() {
    let server = ok().await;
    for name in ["tiny", "other/name"] {
        let reply = server.post(COMPLETIONS, &json!({ "model": name, "prompt": "x" })).await;
        assert_eq!(reply.json()["model"], "tiny");
        assert_eq!(server.get(&format!("/v1/models/{name}")).await.json()["id"], "tiny");
    }
    let reply = server.post(COMPLETIONS, &json!({ "model": "gpt-7", "prompt": "x" })).await;
    assert_eq!(reply.error(404)["code"], "model_not_found");
    server.get("/v1/models/gpt-7").await.error(404);
    let reply = server.post(COMPLETIONS, &json!({ "prompt": "x" })).await;
    assert_eq!(reply.refused(), "model");
    let list = server.get("/v1/models").await.json();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("tiny")));
    assert_eq!(list["data"][0]["created"], 1_700_000_000);
}

/// SV-104
#[tokio::test]
async fn a_model_is_listed_only_while_requests_would_be_served() {
    let (core, inbox) = deepinfer_gateway::core::CoreHandle::pair(1);
    let api = deepinfer_gateway::openai::Api::new(model(), core, ApiOptions::default());
    let api = std::sync::Arc::new(api);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = deepinfer_gateway::openai::router(std::sync::Arc::clone(&api));
    tokio::spawn(async move { axum::serve(listener, app).await });
    let server = Server { address, seen: Default::default(), left: Default::default(), api };
    assert_eq!(server.get("/v1/models").await.json()["data"], json!([]));
    let reply = server.get("/v1/models/tiny").await;
    reply.error(503);
    assert!(reply.headers.contains_key("retry-after"));
    inbox.set_ready(true);
    assert_eq!(server.get("/v1/models").await.json()["data"][0]["id"], "tiny");
    assert_eq!(server.get("/v1/models/tiny").await.status, 200);
}

#[tokio::test]
async fn long_prompts_take_the_other_thread_and_give_the_same() {
    let server = serve(|request| answer(&request.prompt[request.prompt.len() - 5..])).await;
    let text = "a long and winding text ".repeat(400);
    let said = server.complete(&json!({ "model": "tiny", "prompt": text })).await;
    let prompt = common::shipped().encode_text(&text).unwrap();
    assert_eq!(*server.seen.lock().unwrap()[0].prompt, *prompt);
    assert_eq!(said.content, common::shipped().decode(&prompt[prompt.len() - 5..], true));
}

#[test]
fn the_corpus_of_odd_bodies_is_accepted_or_refused_as_its_names_say() {
    let mut seen = [0, 0];
    for entry in std::fs::read_dir(common::repository("agent/gateway/tests/corpus/http")).unwrap() {
        let path = entry.unwrap().path();
        let accepted = deepinfer_gateway::fuzzing::fuzz_http_body(&std::fs::read(&path).unwrap());
        let ok = path.file_name().unwrap().to_str().unwrap().starts_with("ok-");
        assert_eq!(accepted > 0, ok, "{}", path.display());
        seen[usize::from(ok)] += 1;
    }
    assert!(seen[0] >= 10 && seen[1] >= 5, "{seen:?}");
}
