//! How answers end: stop strings, limits, prompts that are too long or empty.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;
mod scripted;

use common::{Dice, shipped};
use deepinfer_gateway::core::{Left, StreamEvent};
use deepinfer_gateway::openai::ApiOptions;
use deepinfer_protocol::generate::FinishReason;
use scripted::*;
use serde_json::json;

/// The events of pieces of text, each the tokens of one step; ended by the model.
fn pieces(pieces: &[&str]) -> Vec<StreamEvent> {
    let mut events: Vec<_> = pieces.iter().map(|piece| tokens(&ids(piece))).collect();
    events.push(last(&[1], FinishReason::Stop));
    events
}

/// SV-013
#[tokio::test]
async fn no_character_of_a_stop_string_is_sent_and_none_that_only_looked_like_one_is_lost() {
    let stop = hello_with(json!({ "stop": "DEFGHIJ" }));
    let server = serve(|_| pieces(&["abc ", "DEF", "G", "HI", "J", " and more"])).await;
    let said = server.chat(&stop).await;
    assert_eq!((said.content.as_str(), said.finish.as_str()), ("abc ", "stop"));
    let server = serve(|_| pieces(&["DEF", "G", "X"])).await;
    let said = server.chat(&stop).await;
    assert_eq!((said.content.as_str(), said.finish.as_str()), ("DEFGX", "stop"));
}

#[tokio::test]
async fn a_stop_string_ends_the_request_at_the_engines() {
    let never_ends = || ids("so on END and on").iter().map(|id| tokens(&[*id])).collect::<Vec<_>>();
    let server = serve(move |_| never_ends()).await;
    let said = server.chat(&hello_with(json!({ "stop": ["nothing", "END"] }))).await;
    assert_eq!((said.content.as_str(), said.finish.as_str()), ("so on ", "stop"));
    let seen: Vec<_> =
        server.seen.lock().unwrap().iter().map(|request| Left::Satisfied(request.id)).collect();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while *server.left.lock().unwrap() != seen {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

/// SV-014
#[tokio::test]
async fn text_held_back_for_a_stop_string_is_not_lost_at_the_end() {
    let stop = hello_with(json!({ "stop": "ZZZZ" }));
    let server = serve(|_| pieces(&["the end is Z", "Z"])).await;
    let said = server.chat(&stop).await;
    assert_eq!((said.content.as_str(), said.finish.as_str()), ("the end is ZZ", "stop"));
    let server = serve(|_| cut(&ids("the end is ZZ"))).await;
    let said = server.chat(&stop).await;
    assert_eq!((said.content.as_str(), said.finish.as_str()), ("the end is ZZ", "length"));
}

/// SV-016
#[tokio::test]
async fn a_stop_inside_a_step_of_several_tokens_wins_over_the_limit_and_nothing_after_it_counts() {
    let tokenizer = shipped();
    let step = byte_ids(&tokenizer, "abSxyz");
    let events = {
        let step = step.clone();
        move |_: &_| {
            let tokens = step.iter().map(|id| likely(*id, -0.5, &[(*id, -0.5)])).collect();
            vec![StreamEvent::Tokens { tokens, finish: Some(FinishReason::Length) }]
        }
    };
    let server = serve(events).await;
    let body = json!({ "stop": "S", "max_tokens": 5, "logprobs": true, "top_logprobs": 1 });
    let said = server.chat(&hello_with(body)).await;
    assert_eq!((said.content.as_str(), said.finish.as_str()), ("ab", "stop"));
    let tokens: Vec<_> = said.logprobs[0].iter().map(|entry| entry["token"].clone()).collect();
    assert_eq!(tokens, ["a", "b"]);
    assert_eq!(said.usage["completion_tokens"], 3);
    // The same where a stop token ends the step that the engine sent.
    let server = serve(move |_| vec![last(&[step[0], step[1], 1], FinishReason::Stop)]).await;
    let said = server.chat(&hello_with(json!({ "max_tokens": 5 }))).await;
    assert_eq!((said.content.as_str(), said.finish.as_str()), ("ab", "stop"));
    assert_eq!(said.usage["completion_tokens"], 3);
}

/// SV-017: the text decides, not where the borders of tokens or steps are.
#[tokio::test]
async fn a_stop_string_is_found_for_any_tokens_and_steps() {
    let tokenizer = shipped();
    let mut dice = Dice(17);
    for round in 0..40 {
        let text = "some words ENENDING";
        let all = if round % 2 == 0 { ids(text) } else { byte_ids(&tokenizer, text) };
        let mut steps = vec![Vec::new()];
        for id in all {
            if dice.below(2) == 0 {
                steps.push(Vec::new());
            }
            steps.last_mut().unwrap().push(id);
        }
        let server = serve(move |_| {
            let mut events: Vec<_> =
                steps.iter().filter(|s| !s.is_empty()).map(|step| tokens(step)).collect();
            events.push(last(&[1], FinishReason::Stop));
            events
        })
        .await;
        let body = json!({ "stop": ["END", "NDING", "words x"] });
        let said = server.chat(&hello_with(body.clone())).await;
        assert_eq!((said.content.as_str(), said.finish.as_str()), ("some words EN", "stop"));
        let body = json!({ "model": "tiny", "prompt": "x", "stop": body["stop"] });
        let said = server.complete(&body).await;
        assert_eq!((said.content.as_str(), said.finish.as_str()), ("some words EN", "stop"));
    }
}

#[tokio::test]
async fn stop_strings_act_on_the_visible_answer_and_not_on_the_thinking() {
    let server = serve(|_| answer(&ids("I may say END here.⟨</think>⟩It is the END of it."))).await;
    let said = server.chat(&hello_with(json!({ "thinking": { "type": "enabled" }, "stop": "END" }))).await;
    assert_eq!(said.reasoning, "I may say END here.");
    assert_eq!((said.content.as_str(), said.finish.as_str()), ("It is the ", "stop"));
}

/// SV-019
#[tokio::test]
async fn a_prompt_that_leaves_no_room_is_refused_and_any_other_gets_a_token() {
    let limit = 40;
    let small = deepinfer_gateway::openai::ModelInfo { context_limit: limit, ..model() };
    let script = |request: &deepinfer_serving::gateway::NewRequest| {
        assert!(request.spec.max_tokens >= 1);
        assert!(request.prompt.len() as u32 + request.spec.max_tokens <= 40);
        cut(&vec![500; request.spec.max_tokens as usize]).into_iter().map(Play::Say).collect()
    };
    let server = serve_with(small, ApiOptions::default(), script).await;
    for length in limit - 3..=limit + 2 {
        let prompt = vec![100; length as usize];
        let body = json!({ "model": "tiny", "prompt": prompt, "max_tokens": 10 });
        if length < limit {
            let said = server.complete(&body).await;
            assert_eq!(said.finish, "length", "{length}");
            assert_eq!(said.usage["completion_tokens"], limit - length);
        } else {
            let reply = server.post("/v1/completions", &body).await;
            assert_eq!(reply.refused(), "prompt");
            let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.contains(&length.to_string()) && message.contains("40"), "{message}");
        }
    }
    let long = json!([{ "role": "user", "content": "word ".repeat(60) }]);
    let reply = server.post("/v1/chat/completions", &hello_with(json!({ "messages": long }))).await;
    assert_eq!(reply.refused(), "messages");
    assert_eq!(server.chat(&hello()).await.finish, "length", "a normal request is served afterwards");
}

/// SV-020
#[tokio::test]
async fn max_completion_tokens_is_a_limit_and_must_not_contradict_max_tokens() {
    let server = serve(|request| cut(&vec![500; request.spec.max_tokens.min(100) as usize])).await;
    for field in ["max_completion_tokens", "max_tokens"] {
        let said = server.chat(&hello_with(json!({ field: 3 }))).await;
        assert_eq!((&said.usage["completion_tokens"], said.finish.as_str()), (&json!(3), "length"));
    }
    let both = |old, new| hello_with(json!({ "max_tokens": old, "max_completion_tokens": new }));
    assert_eq!(server.chat(&both(3, 3)).await.usage["completion_tokens"], 3);
    let reply = server.post("/v1/chat/completions", &both(4, 3)).await;
    assert_eq!(reply.refused(), "max_completion_tokens");
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("`max_tokens`"));
}

#[tokio::test]
async fn without_a_limit_the_mode_decides_and_the_context_clips() {
    let large = deepinfer_gateway::openai::ModelInfo { context_limit: 1 << 20, ..model() };
    let script = |_: &_| answer(&ids("ok")).into_iter().map(Play::Say).collect();
    let server = serve_with(large, ApiOptions::default(), script).await;
    for (more, limit) in [
        (json!({}), 8_192),
        (json!({ "thinking": { "type": "enabled" } }), 65_536),
        (json!({ "reasoning_effort": "low" }), 65_536),
        (json!({ "reasoning_effort": "max" }), 131_072),
        (json!({ "reasoning_effort": "none" }), 8_192),
        (json!({ "max_tokens": 393_216 }), 393_216),
    ] {
        let reply = server.post("/v1/chat/completions", &hello_with(more.clone())).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        assert_eq!(server.seen.lock().unwrap().last().unwrap().spec.max_tokens, limit, "{more}");
    }
    let body = hello_with(json!({ "max_tokens": 393_217 }));
    assert_eq!(server.post("/v1/chat/completions", &body).await.refused(), "max_tokens");
    let server = serve(|_| answer(&ids("ok"))).await;
    server.post("/v1/chat/completions", &hello()).await;
    let seen = server.seen.lock().unwrap()[0].clone();
    assert_eq!(seen.spec.max_tokens as usize + seen.prompt.len(), 4096, "clipped to the context");
}

/// SV-022
#[tokio::test]
async fn empty_prompts_are_answered_or_refused_by_name() {
    let server = serve(|_| answer(&ids("ok"))).await;
    let chat = |more| hello_with(more);
    for (path, body, field) in [
        ("/v1/chat/completions", chat(json!({ "messages": [] })), "messages"),
        ("/v1/chat/completions", chat(json!({ "max_tokens": 0 })), "max_tokens"),
        ("/v1/chat/completions", json!({ "model": "tiny" }), "messages"),
        ("/v1/completions", json!({ "model": "tiny", "prompt": "" }), "prompt"),
        ("/v1/completions", json!({ "model": "tiny", "prompt": [] }), "prompt"),
        ("/v1/completions", json!({ "model": "tiny", "prompt": [""] }), "prompt"),
        ("/v1/completions", json!({ "model": "tiny" }), "prompt"),
        ("/v1/completions", json!({ "model": "tiny", "prompt": "x", "max_tokens": 0 }), "max_tokens"),
    ] {
        assert_eq!(server.post(path, &body).await.refused(), field, "{body}");
    }
    let empty = json!([{ "role": "user", "content": "" }]);
    assert_eq!(server.chat(&chat(json!({ "messages": empty }))).await.content, "ok");
}
