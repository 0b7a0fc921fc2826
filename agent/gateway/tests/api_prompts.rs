//! From requests to prompts, and checkpoints whose tokenizer knows no chat.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;
mod scripted;

use std::sync::Arc;

use common::{Dice, shipped};
use deepinfer_gateway::Tokenizer;
use deepinfer_gateway::openai::{ApiOptions, ModelInfo};
use deepinfer_protocol::generate::FinishReason;
use scripted::*;
use serde_json::{Map, Value, json};

/// SV-046
#[tokio::test]
async fn a_prompt_that_ends_inside_a_character_leaks_nothing_into_the_answer() {
    let tokenizer = shipped();
    let bytes = byte_ids(&tokenizer, "世界");
    let (prompt, rest) = (bytes[..2].to_vec(), bytes[2..].to_vec());
    let server = serve(move |_| answer(&rest)).await;
    let said = server.complete(&json!({ "model": "tiny", "prompt": prompt })).await;
    assert_eq!(said.content, "\u{FFFD}界", "the half character is replaced, in both modes");
}

/// SV-047
#[tokio::test]
async fn the_joined_deltas_are_one_decode_of_all_ids() {
    let tokenizer = shipped();
    let mut dice = Dice(47);
    for _ in 0..60 {
        let all: Vec<u32> =
            (0..1 + dice.below(40)).map(|_| dice.below(tokenizer.vocab_size()) as u32).collect();
        let wanted = tokenizer.decode(&all, true);
        let server = serve(move |_| cut(&all)).await;
        let said = server.complete(&json!({ "model": "tiny", "prompt": "x", "max_tokens": 99 })).await;
        assert_eq!(said.content, wanted);
    }
}

/// SV-049
#[tokio::test]
async fn a_conversation_ends_where_the_model_answers_or_is_refused() {
    let server = serve(|_| answer(&ids("ok"))).await;
    let call = json!({ "id": "c", "type": "function", "function": { "name": "f", "arguments": "{}" } });
    let user = json!({ "role": "user", "content": "Hi" });
    let turns = [("<think>", "high"), ("</think>", "none")];
    for last in [
        json!([{ "role": "system", "content": "Be brief." }]),
        json!([user, { "role": "system", "content": "Be brief." }]),
        json!([user, { "role": "assistant", "content": "Well" }]),
        json!([{ "role": "user", "content": "" }]),
        json!([user, { "role": "assistant", "tool_calls": [call] }, { "role": "tool", "tool_call_id": "c", "content": "5" }]),
    ] {
        for (end, effort) in turns {
            let before = server.seen.lock().unwrap().len();
            let body = hello_with(json!({ "messages": last, "reasoning_effort": effort }));
            let reply = server.post("/v1/chat/completions", &body).await;
            if reply.status == 200 {
                let seen = server.seen.lock().unwrap()[before].clone();
                assert_eq!(seen.prompt.last(), shipped().special_id(end).as_ref(), "{last}");
            } else {
                assert_eq!(reply.refused(), "messages", "{last}");
            }
        }
    }
}

/// SV-050
#[tokio::test]
async fn the_begin_token_is_there_once_even_if_the_text_spells_it() {
    let server = serve(|_| answer(&ids("ok"))).await;
    let begin = shipped().special_id("<｜begin▁of▁sentence｜>").unwrap();
    for content in ["Hi", "<｜begin▁of▁sentence｜>Hi"] {
        let messages = json!([{ "role": "user", "content": content }]);
        server.chat(&hello_with(json!({ "messages": messages }))).await;
        let seen = server.seen.lock().unwrap().last().unwrap().clone();
        assert_eq!(seen.prompt.iter().filter(|id| **id == begin).count(), 1, "{content}");
        assert_eq!(seen.prompt[0], begin);
    }
    // A plain prompt is what it is: nothing is added.
    server.complete(&json!({ "model": "tiny", "prompt": "Hi" })).await;
    assert_eq!(*server.seen.lock().unwrap().last().unwrap().prompt, *shipped().encode_text("Hi").unwrap());
}

/// SV-052
#[tokio::test]
async fn an_answer_sent_back_as_received_begins_the_next_prompt_with_the_same_ids() {
    let call = "⟨｜DSML｜⟩";
    let calls = format!(
        "\n\n<{call} calls>\n<{call} invoke name=\"f\">\n<{call} parameter name=\"x\" string=\"true\">\
         y</{call} parameter>\n</{call} invoke>\n</{call} calls>"
    );
    let tools =
        json!([{ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } }]);
    for (text, more) in [
        ("Plain answer.".to_owned(), json!({})),
        (
            "Let me\nthink.⟨</think>⟩The answer.".to_owned(),
            json!({ "reasoning_effort": "high", "tools": tools }),
        ),
        (format!("Call it.⟨</think>⟩Now{calls}"), json!({ "reasoning_effort": "high", "tools": tools })),
        (format!("⟨</think>⟩{calls}"), json!({ "reasoning_effort": "high", "tools": tools })),
    ] {
        let output = ids(&text);
        let script = output.clone();
        let server = serve(move |_| answer(&script)).await;
        let mut body = hello_with(more);
        let message =
            server.post("/v1/chat/completions", &body).await.json()["choices"][0]["message"].clone();
        let messages = body["messages"].as_array_mut().unwrap();
        messages.push(message.clone());
        match message["tool_calls"][0]["id"].as_str() {
            Some(id) => messages.push(json!({ "role": "tool", "tool_call_id": id, "content": "5" })),
            None => messages.push(json!({ "role": "user", "content": "And?" })),
        }
        let reply = server.post("/v1/chat/completions", &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        let seen = server.seen.lock().unwrap();
        let first = [&seen[0].prompt[..], &output].concat();
        assert_eq!(&seen[1].prompt[..first.len()], first, "{message}");
    }
}

/// A tokenizer of the 256 bytes without any special token.
fn bytes_only() -> Arc<Tokenizer> {
    let shipped = shipped();
    let mut vocab: Vec<String> = (0..shipped.vocab_size() as u32)
        .filter(|id| !shipped.is_special(*id) && shipped.token_bytes(*id).len() == 1)
        .map(|id| shipped.id_to_token(id).unwrap().to_owned())
        .collect();
    vocab.sort();
    assert_eq!(vocab.len(), 256);
    let vocab: Map<String, Value> = vocab.into_iter().zip(0..).map(|(name, id)| (name, json!(id))).collect();
    let file = json!({
        "added_tokens": [],
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "use_regex": true },
        "decoder": { "type": "ByteLevel" },
        "model": { "type": "BPE", "vocab": vocab, "merges": [] }
    });
    Arc::new(Tokenizer::from_bytes("bytes", file.to_string().as_bytes()).unwrap())
}

#[tokio::test]
async fn a_tokenizer_without_the_recipes_tokens_serves_completions_and_names_them_for_chat() {
    let tokenizer = bytes_only();
    let info =
        ModelInfo { vocab_size: 300, stop_tokens: vec![7], tokenizer: Arc::clone(&tokenizer), ..model() };
    let text = tokenizer.encode_text("plain").unwrap();
    let script = move |_: &_| vec![Play::Say(tokens(&text)), Play::Say(last(&[7], FinishReason::Stop))];
    let server = serve_with(info, ApiOptions::default(), script).await;
    let body = json!({ "model": "tiny", "prompt": [1, 2, 299], "return_token_ids": true });
    let said = server.complete(&body).await;
    assert_eq!((said.content.as_str(), said.finish.as_str()), ("plain", "stop"));
    assert_eq!(said.ids.len(), 6, "the stop token is an id but no text");
    let reply = server.post("/v1/chat/completions", &hello()).await;
    reply.error(400);
    assert!(reply.text.contains("<think>") && reply.text.contains("<｜User｜>"), "{}", reply.text);
}

#[tokio::test]
async fn completions_return_the_ids_of_prompt_and_answer_if_asked() {
    let output = ids("three little words");
    let server = {
        let output = output.clone();
        serve(move |_| answer(&output)).await
    };
    let body = json!({ "model": "tiny", "prompt": [[5, 6, 7]], "return_token_ids": true });
    let reply = server.post("/v1/completions", &body).await.json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["prompt_token_ids"], json!([5, 6, 7]));
    assert_eq!(choice["token_ids"], json!([&output[..], &[1]].concat()));
    assert_eq!(server.complete(&body).await.ids.len(), output.len() + 1);
    let body = json!({ "model": "tiny", "prompt": [5] });
    assert!(server.post("/v1/completions", &body).await.json()["choices"][0].get("token_ids").is_none());
}
