//! Streams: frames, errors inside them, usage, characters, comments, ids.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;
mod scripted;

use std::sync::Arc;
use std::time::Duration;

use common::shipped;
use deepinfer_gateway::core::{Left, StreamEvent};
use deepinfer_gateway::openai::ApiOptions;
use deepinfer_protocol::Span;
use deepinfer_protocol::generate::FinishReason;
use deepinfer_protocol::message::Refusal;
use deepinfer_serving::gateway::EndedEarly;
use http::Method;
use scripted::*;
use serde_json::{Value, json};
use tokio::sync::Notify;

fn failed(detail: &str) -> StreamEvent {
    StreamEvent::Ended(EndedEarly::Failed { detail: detail.to_owned() })
}

fn streamed(more: Value) -> Value {
    let mut body = hello_with(more);
    body["stream"] = json!(true);
    body
}

/// SV-001
#[tokio::test]
async fn a_failure_in_the_middle_of_a_stream_is_one_error_frame_and_no_end_mark() {
    let server = serve(|_| {
        let mut events: Vec<_> = ids("one two three four five").iter().map(|id| tokens(&[*id])).collect();
        events.push(failed("the engines were lost three times"));
        events
    })
    .await;
    let reply = server.post("/v1/chat/completions", &streamed(json!({}))).await;
    assert_eq!(reply.status, 200);
    let frames = Frames::read(&reply.text);
    assert!(!frames.done, "no end mark");
    let (error, chunks) = frames.chunks.split_last().unwrap();
    for key in ["message", "type", "code"] {
        assert!(error["error"][key].is_string(), "{error}");
    }
    let text: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "one two three four five");
    for chunk in chunks {
        assert!(chunk["error"].is_null());
        assert!(chunk["choices"][0]["finish_reason"].is_null());
    }
}

/// SV-002
#[tokio::test]
async fn an_error_with_line_breaks_forges_no_frame() {
    let detail = "a\r\n\r\ndata: [DONE]\nb";
    let server = serve(move |request| {
        if request.prompt.len() > 20 { answer(&ids("fine")) } else { vec![tokens(&ids("x")), failed(detail)] }
    })
    .await;
    let reply = server.post("/v1/chat/completions", &streamed(json!({}))).await;
    let frames = Frames::read(&reply.text);
    assert!(!frames.done);
    assert_eq!(frames.chunks.last().unwrap()["error"]["message"], detail);
    let long =
        json!([{ "role": "user", "content": "one two three four five six seven eight nine ten eleven" }]);
    assert_eq!(server.chat(&hello_with(json!({ "messages": long }))).await.content, "fine");
}

/// SV-116: overload is 429 with Retry-After, a missing pool 503, before the first byte also in a stream.
#[tokio::test]
async fn an_error_before_the_first_byte_has_its_own_status() {
    let overloaded = EndedEarly::Overloaded {
        reason: Refusal::QueueFull,
        detail: "2,048 requests are waiting".to_owned(),
        retry_after: Span::millis(2500),
    };
    let unavailable = EndedEarly::Unavailable { detail: "no pool".to_owned(), retry_after: Span::secs(7) };
    let failed = EndedEarly::Failed { detail: "gone".to_owned() };
    let too_large = EndedEarly::TooLarge { detail: "needs 9 blocks of 8".to_owned() };
    for (why, status, after) in [
        (overloaded, 429, Some("3")),
        (unavailable, 503, Some("7")),
        (failed, 500, None),
        (too_large, 400, None),
        (EndedEarly::Cancelled, 503, Some("5")),
    ] {
        let server = serve(move |_| vec![StreamEvent::Ended(why.clone())]).await;
        for body in [hello(), streamed(json!({}))] {
            let reply = server.post("/v1/chat/completions", &body).await;
            reply.error(status);
            assert_eq!(reply.headers.get("retry-after").map(|after| after.to_str().unwrap()), after);
        }
    }
}

#[tokio::test]
async fn a_driver_that_dies_is_an_error_and_not_a_finished_answer() {
    let script = |_: &_| vec![Play::Say(tokens(&ids("half an"))), Play::Die];
    let server = serve_with(model(), ApiOptions::default(), script).await;
    server.post("/v1/chat/completions", &hello()).await.error(500);
    let frames = Frames::read(&server.post("/v1/chat/completions", &streamed(json!({}))).await.text);
    assert!(!frames.done && frames.chunks.last().unwrap()["error"].is_object());
}

/// SV-004
#[tokio::test]
async fn a_thousand_streams_with_tools_have_one_finish_reason_each() {
    let call = "⟨｜DSML｜⟩";
    let with_call =
        format!("Look:\n\n<{call} calls>\n<{call} invoke name=\"f\">\n</{call} invoke>\n</{call} calls>");
    let scripts = [answer(&ids("no call")), answer(&ids(&with_call)), cut(&ids(&with_call[..40]))];
    let server = serve(move |request| scripts[(request.id.0 % 3) as usize].clone()).await;
    let server = Arc::new(server);
    let body = streamed(json!({
        "tools": [{ "type": "function", "function": { "name": "f" } }],
        "tool_choice": "auto",
        "stream_options": { "include_usage": true },
    }));
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let (server, body) = (Arc::clone(&server), body.clone());
            tokio::spawn(async move {
                let mut finishes = Vec::new();
                for _ in 0..50 {
                    let reply = server.post("/v1/chat/completions", &body).await;
                    // Checks that there is one, before the usage and the end mark.
                    let said = Said::streamed(&Frames::read(&reply.text));
                    assert_eq!(said.finish == "tool_calls", !said.calls.is_empty());
                    finishes.push(said.finish);
                }
                finishes
            })
        })
        .collect();
    let mut finishes = Vec::new();
    for task in tasks {
        finishes.extend(task.await.unwrap());
    }
    assert_eq!(finishes.len(), 1000);
    for finish in ["stop", "tool_calls", "length"] {
        assert!(finishes.iter().any(|seen| seen == finish), "{finish}");
    }
}

/// SV-005
#[tokio::test]
async fn usage_is_on_one_chunk_if_it_was_asked_for_and_equals_the_whole_answers() {
    let server = serve(|_| {
        let mut events = answer(&ids("Paris is the capital."));
        events[0] = StreamEvent::Started { cached_tokens: 3 };
        events
    })
    .await;
    // `chat` checks that one chunk has it and that it equals the whole answer's.
    let usage = server.chat(&hello()).await.usage;
    let prompt = server.seen.lock().unwrap()[0].prompt.len();
    let completion = ids("Paris is the capital.").len() + 1;
    assert_eq!(usage["prompt_tokens"], prompt);
    assert_eq!(usage["completion_tokens"], completion);
    assert_eq!(usage["total_tokens"], prompt + completion);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 3);
    let reply = server.post("/v1/chat/completions", &streamed(json!({}))).await;
    assert!(!reply.text.contains("usage"), "{}", reply.text);
}

/// SV-007, SV-047
#[tokio::test]
async fn characters_are_never_cut_however_their_bytes_come() {
    let tokenizer = shipped();
    let text = "A 世ab 👨‍👩‍👧‍👦 สวัสดี é.";
    let bytes = byte_ids(&tokenizer, text);
    for size in 1..=bytes.len() {
        let bytes = bytes.clone();
        let server = serve(move |_| {
            let mut events: Vec<_> = bytes.chunks(size).map(tokens).collect();
            events.push(last(&[1], FinishReason::Stop));
            events
        })
        .await;
        let said = server.chat(&hello()).await;
        assert_eq!(said.content, text, "{size} bytes a step");
        let reply = server.post("/v1/chat/completions", &streamed(json!({}))).await;
        assert!(!reply.text.contains('\u{FFFD}'), "{}", reply.text);
    }
}

/// SV-008
#[tokio::test]
async fn a_stream_that_waits_says_comments_until_it_begins() {
    let go = Arc::new(Notify::new());
    let script = {
        let go = Arc::clone(&go);
        move |_: &_| {
            let mut lines = vec![Play::Hold(Arc::clone(&go))];
            lines.extend(answer(&ids("at last")).into_iter().map(Play::Say));
            lines
        }
    };
    let options = ApiOptions {
        comment_every: Duration::from_millis(20),
        status_wait: Duration::from_millis(20),
        ..ApiOptions::default()
    };
    let server = Arc::new(serve_with(model(), options, script).await);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(
        tokio::net::TcpStream::connect(server.address).await.unwrap(),
    ))
    .await
    .unwrap();
    tokio::spawn(connection);
    let request = http::Request::post("/v1/chat/completions").header("host", "test");
    let body = http_body_util::Full::<bytes::Bytes>::from(streamed(json!({})).to_string());
    let mut response = sender.send_request(request.body(body).unwrap()).await.unwrap();
    let mut text = String::new();
    while text.matches(": waiting\n\n").count() < 4 {
        let frame = tokio::time::timeout(PATIENCE, http_body_util::BodyExt::frame(&mut response)).await;
        text.push_str(std::str::from_utf8(&frame.unwrap().unwrap().unwrap().into_data().unwrap()).unwrap());
    }
    go.notify_one();
    while let Some(frame) = http_body_util::BodyExt::frame(&mut response).await {
        text.push_str(std::str::from_utf8(&frame.unwrap().into_data().unwrap()).unwrap());
    }
    let frames = Frames::read(&text);
    assert!(frames.done && frames.comments >= 4);
    let said: String =
        frames.chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(said, "at last");
}

/// SV-115
#[tokio::test]
async fn twenty_requests_with_one_client_id_each_get_their_own_answer() {
    let server = Arc::new(serve(|request| answer(&request.prompt[..])).await);
    let tasks: Vec<_> = (0..20_u32)
        .map(|index| {
            let server = Arc::clone(&server);
            tokio::spawn(async move {
                let body = json!({ "model": "tiny", "prompt": [100 + index], "return_token_ids": true });
                let headers = [
                    ("content-type", "application/json"),
                    ("x-request-id", "the-same"),
                    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
                ];
                let reply = server.send(Method::POST, "/v1/completions", &headers, body.to_string()).await;
                assert_eq!(reply.headers["x-request-id"], "the-same");
                assert_eq!(reply.json()["choices"][0]["token_ids"], json!([100 + index, 1]));
                reply.json()["id"].as_str().unwrap().to_owned()
            })
        })
        .collect();
    let mut inner = Vec::new();
    for task in tasks {
        inner.push(task.await.unwrap());
    }
    inner.sort();
    inner.dedup();
    assert_eq!(inner.len(), 20, "ids inside are distinct");
    let reply = server.post("/v1/completions", &json!({ "model": "tiny", "prompt": [100] })).await;
    let own = reply.headers["x-request-id"].to_str().unwrap();
    assert_eq!(reply.json()["id"], format!("cmpl-{own}"), "without one the request's id is told");
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_before_and_after_the_first_byte() {
    for begun in [false, true] {
        let script = move |_: &_| {
            let mut lines = vec![Play::Hold(Arc::new(Notify::new()))];
            if begun {
                lines.insert(0, Play::Say(tokens(&ids("word"))));
            }
            lines
        };
        let server = Arc::new(serve_with(model(), ApiOptions::default(), script).await);
        let request = {
            let server = Arc::clone(&server);
            tokio::spawn(async move { server.post("/v1/chat/completions", &streamed(json!({}))).await })
        };
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while server.seen.lock().unwrap().is_empty() {
            assert!(tokio::time::Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        request.abort();
        let id = server.seen.lock().unwrap()[0].id;
        while *server.left.lock().unwrap() != [Left::Gone(id)] {
            assert!(tokio::time::Instant::now() < deadline, "begun: {begun}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

#[tokio::test]
async fn steps_that_are_ready_together_keep_their_own_chunks() {
    let server = serve(|_| answer(&ids("one two three"))).await;
    let reply = server.post("/v1/chat/completions", &streamed(json!({}))).await;
    let frames = Frames::read(&reply.text);
    // The role, one for each token, the finish reason.
    assert_eq!(frames.chunks.len(), 1 + ids("one two three").len() + 1);
    assert_eq!(frames.chunks[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
    for chunk in &frames.chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["model"], "tiny");
        assert_eq!(chunk["id"], frames.chunks[0]["id"]);
    }
}
