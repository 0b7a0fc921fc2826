//! Log-probabilities, seeds, and what is refused because it would change tokens.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;
mod scripted;

use common::shipped;
use deepinfer_gateway::core::StreamEvent;
use deepinfer_protocol::generate::FinishReason;
use scripted::*;
use serde_json::{Value, json};

fn entry(id: u32, logprob: f32, top: &[(u32, f32)]) -> Value {
    let tokenizer = shipped();
    let text = |id| String::from_utf8(tokenizer.token_bytes(id).to_vec()).unwrap();
    let one =
        |id, logprob| json!({ "token": text(id), "logprob": logprob, "bytes": tokenizer.token_bytes(id) });
    let mut entry = one(id, logprob);
    entry["top_logprobs"] = top.iter().map(|(id, logprob)| one(*id, *logprob)).collect();
    entry
}

/// SV-035 (steps of several tokens stand for speculation, which is not built)
#[tokio::test]
async fn each_token_has_its_own_alternatives_whatever_the_steps() {
    let all = ids("One two three, four five six. Seven!");
    let logprob = |index: usize| -(index as f32) / 4.0;
    let top = |index: usize| [(all[index], logprob(index)), (all[(index + 1) % all.len()], -7.25)];
    let expected: Vec<_> =
        (0..all.len()).map(|index| entry(all[index], logprob(index), &top(index))).collect();
    for size in [1, 2, 3, 7, 100] {
        let listed: Vec<_> =
            (0..all.len()).map(|index| likely(all[index], logprob(index), &top(index))).collect();
        let server = serve(move |_| {
            let mut events: Vec<_> = listed
                .chunks(size)
                .map(|step| StreamEvent::Tokens { tokens: step.to_vec(), finish: None })
                .collect();
            events.push(last(&[1], FinishReason::Stop));
            events
        })
        .await;
        let body = hello_with(json!({ "logprobs": true, "top_logprobs": 2, "stop": "never seen" }));
        let said = server.chat(&body).await;
        assert_eq!(said.logprobs[0], expected, "steps of {size}");
        assert_eq!(server.seen.lock().unwrap()[0].spec.logprobs, Some(2));
        let body = json!({ "model": "tiny", "prompt": "x", "logprobs": 2 });
        let said = server.complete(&body).await;
        assert_eq!(said.logprobs[0].len(), all.len());
        let mut offset = 0;
        for (got, want) in said.logprobs[0].iter().zip(&expected) {
            assert_eq!((&got[0], &got[1]), (&want["token"], &want["logprob"]));
            assert_eq!(got[3], offset);
            offset += want["token"].as_str().unwrap().chars().count();
        }
    }
}

#[tokio::test]
async fn thinking_and_answer_have_their_own_lists_of_logprobs() {
    let all = ids("Hm.⟨</think>⟩Yes.");
    let server = serve(move |_| {
        let tokens = all.iter().map(|id| likely(*id, -1.0, &[])).collect();
        vec![StreamEvent::Tokens { tokens, finish: None }, last(&[1], FinishReason::Stop)]
    })
    .await;
    let said = server.chat(&hello_with(json!({ "logprobs": true, "reasoning_effort": "high" }))).await;
    for (list, text) in said.logprobs.iter().zip([&said.content, &said.reasoning]) {
        let joined: String = list.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
        assert_eq!(joined, *text);
    }
    assert_eq!((said.reasoning.as_str(), said.content.as_str()), ("Hm.", "Yes."));
}

/// SV-037
#[tokio::test]
async fn logprobs_are_finite_whatever_the_engine_sends() {
    let id = ids("a")[0];
    let server = serve(move |_| {
        let top = [(id, f32::NEG_INFINITY), (id + 1, f32::NAN), (id + 2, -1e30)];
        let tokens = vec![likely(id, f32::NEG_INFINITY, &top), token(id)];
        vec![StreamEvent::Tokens { tokens, finish: Some(FinishReason::Length) }]
    })
    .await;
    let said = server.chat(&hello_with(json!({ "logprobs": true, "top_logprobs": 5 }))).await;
    assert_eq!(said.logprobs[0].len(), 2);
    let numbers = |entry: &Value| {
        let own = entry["logprob"].as_f64().unwrap();
        let top =
            entry["top_logprobs"].as_array().unwrap().iter().map(|top| top["logprob"].as_f64().unwrap());
        top.chain([own]).collect::<Vec<_>>()
    };
    for number in said.logprobs[0].iter().flat_map(numbers) {
        assert_eq!(number, -9999.0, "the documented floor");
    }
    let said = server.complete(&json!({ "model": "tiny", "prompt": "x", "logprobs": 5 })).await;
    assert_eq!(said.logprobs[0][0][1], -9999.0);
}

/// SV-041
#[tokio::test]
async fn what_would_change_tokens_and_is_not_built_is_refused_by_name_and_neutral_values_pass() {
    let server = serve(|_| answer(&ids("ok"))).await;
    let both = [
        ("presence_penalty", json!(1.5), json!(0)),
        ("frequency_penalty", json!(-0.1), json!(0.0)),
        ("repetition_penalty", json!(1.1), json!(1.0)),
        ("top_k", json!(40), json!(-1)),
        ("min_p", json!(0.1), json!(0)),
        ("logit_bias", json!({ "5": 1 }), json!({})),
        ("stop_token_ids", json!([3]), json!([])),
        ("n", json!(2), json!(1)),
        ("best_of", json!(3), json!(1)),
        ("guided_regex", json!("a+"), json!(null)),
        ("response_format", json!({ "type": "json_object" }), json!({ "type": "text" })),
        ("skip_special_tokens", json!(false), json!(true)),
        ("truncate_prompt_tokens", json!(5), json!(null)),
    ];
    let chat = [
        ("parallel_tool_calls", json!(false), json!(true)),
        ("modalities", json!(["text", "audio"]), json!(["text"])),
        ("functions", json!([{ "name": "f" }]), json!([])),
        ("verbosity", json!("low"), json!("medium")),
        ("chat_template_kwargs", json!({ "thinking": true }), json!({})),
        ("return_token_ids", json!(true), json!(false)),
    ];
    let completions = [
        ("echo", json!(true), json!(false)),
        ("suffix", json!("x"), json!("")),
        ("max_completion_tokens", json!(5), json!(null)),
    ];
    let prompt = json!({ "model": "tiny", "prompt": "x" });
    let mut cases: Vec<_> =
        both.iter().chain(&chat).map(|case| ("/v1/chat/completions", hello(), case)).collect();
    cases.extend(both.iter().chain(&completions).map(|case| ("/v1/completions", prompt.clone(), case)));
    for (path, mut body, (field, strong, neutral)) in cases {
        body[*field] = strong.clone();
        let reply = server.post(path, &body).await;
        assert_eq!(reply.refused(), *field, "{path}");
        assert_eq!(reply.json()["error"]["code"], "unsupported_parameter");
        body[*field] = neutral.clone();
        let reply = server.post(path, &body).await;
        assert_eq!(reply.status, 200, "{path} {field}: {}", reply.text);
        assert!(!reply.headers.contains_key("x-deepinfer-ignored"), "{field} is known");
    }
}

/// SV-043
#[tokio::test]
async fn more_than_one_choice_is_refused_naming_n() {
    let server = serve(|_| answer(&ids("ok"))).await;
    for _ in 0..200 {
        assert_eq!(server.post("/v1/chat/completions", &hello_with(json!({ "n": 4 }))).await.refused(), "n");
    }
    assert!(server.seen.lock().unwrap().is_empty(), "nothing was generated");
}

#[tokio::test]
async fn what_a_request_says_about_drawing_reaches_the_engines() {
    let server = serve(|_| answer(&ids("ok"))).await;
    let spec = |more: Value| {
        let server = &server;
        async move {
            let reply = server.post("/v1/chat/completions", &hello_with(more)).await;
            assert_eq!(reply.status, 200, "{}", reply.text);
            server.seen.lock().unwrap().last().unwrap().spec.clone()
        }
    };
    let said = spec(json!({
        "temperature": 0, "top_p": 0.5, "seed": i64::MAX, "max_tokens": 9, "min_tokens": 4, "ignore_eos": true,
    }))
    .await;
    assert_eq!((said.temperature, said.top_p, said.seed), (0.0, 0.5, i64::MAX as u64));
    assert_eq!((said.max_tokens, said.min_tokens, said.logprobs), (9, 4, None));
    assert!(said.stop_tokens.is_empty());
    // A temperature that is named counts in thinking mode too; without one it is 1.
    let said = spec(json!({ "temperature": 0.25, "reasoning_effort": "high" })).await;
    assert_eq!((said.temperature, said.stop_tokens), (0.25, vec![1]));
    let [one, other] = [spec(json!({ "seed": null })).await, spec(json!({})).await];
    assert_eq!((one.temperature, one.top_p), (1.0, 1.0));
    assert_ne!(one.seed, other.seed, "without a seed each request draws its own");
}
