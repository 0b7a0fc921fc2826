//! Rendering against two independent sources: the prompts of the shipped model's answers, and the ids that the
//! Python package `deepseek-recipe` gives for some hundred random conversations.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use common::{read, shipped};
use deepinfer_gateway::{ChatRenderer, ChatRequest};
use serde_json::{Value, json};

fn renderer() -> ChatRenderer {
    ChatRenderer::new(shipped()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn every_prompt_of_the_shipped_answers_is_rendered_to_the_same_ids() {
    let rows: Vec<Value> = serde_json::from_slice(&read("examples/models/tiny-v41/answers.json")).unwrap();
    let renderer = renderer();
    let mut stable = 0;
    for (index, row) in rows.iter().enumerate() {
        let chat = json!({
            "messages": row["messages"],
            "tools": row["tools"],
            "thinking": row["thinking"],
            "reasoning_effort": row["effort"],
        });
        let rendered = renderer.render(&ChatRequest::from_value(chat).unwrap()).unwrap();
        assert_eq!(rendered.ids, ids(&row["prompt_ids"]), "row {index}");
        assert_eq!(rendered.answer.thinking, row["thinking"], "row {index}");
        assert_eq!(rendered.answer.tools, !row["tools"].is_null(), "row {index}");
        stable += usize::from(row["stable"] == true);
    }
    assert_eq!((rows.len(), stable), (96, 84));
}

#[test]
fn the_shipped_answers_are_the_text_of_their_ids() {
    let rows: Vec<Value> = serde_json::from_slice(&read("examples/models/tiny-v41/answers.json")).unwrap();
    for row in &rows {
        assert_eq!(shipped().decode(&ids(&row["answer_ids"]), false), row["answer"].as_str().unwrap());
    }
}

fn fnv1a64(bytes: &[u8]) -> String {
    let digest = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |digest, &byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    format!("{digest:016x}")
}

#[test]
fn some_hundred_conversations_are_rendered_as_the_python_package_renders_them() {
    let fixture: Value =
        serde_json::from_slice(&read("agent/gateway/tests/fixtures/conversations.json")).unwrap();
    let renderer = renderer();
    let rows = fixture["rows"].as_array().unwrap();
    assert!(rows.len() >= 300, "{} conversations", rows.len());
    for (index, row) in rows.iter().enumerate() {
        let request = ChatRequest::from_value(row["chat"].clone())
            .unwrap_or_else(|error| panic!("conversation {index}: {error}"));
        let rendered =
            renderer.render(&request).unwrap_or_else(|error| panic!("conversation {index}: {error}"));
        assert_eq!(rendered.ids, ids(&row["ids"]), "conversation {index}");
    }
}

#[test]
fn the_conversations_were_made_by_the_script_and_tokenizer_in_the_tree() {
    let fixture: Value =
        serde_json::from_slice(&read("agent/gateway/tests/fixtures/conversations.json")).unwrap();
    let advice = "run agent/gateway/tests/fixtures/make_conversations.py again";
    let script = fnv1a64(&read("agent/gateway/tests/fixtures/make_conversations.py"));
    assert_eq!(fixture["script_fnv1a64"], script, "{advice}");
    assert_eq!(fixture["tokenizer_fnv1a64"], fnv1a64(&read(common::SHIPPED)), "{advice}");
}

#[test]
fn a_request_decides_about_thinking_before_the_default_does() {
    let chat = |rest: Value| {
        let mut chat = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
        chat.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        ChatRequest::from_value(chat).unwrap()
    };
    for (default, rest, thinks) in [
        (true, json!({}), true),
        (false, json!({}), false),
        (false, json!({ "thinking": true }), true),
        (true, json!({ "thinking": false }), false),
        (true, json!({ "thinking": { "type": "disabled" } }), false),
        (false, json!({ "thinking": { "type": "enabled" } }), true),
        (false, json!({ "reasoning_effort": "low" }), true),
        (true, json!({ "reasoning_effort": "none" }), false),
        (true, json!({ "thinking": false, "reasoning_effort": "max" }), false),
    ] {
        let renderer = renderer().with_default_thinking(default);
        let rendered = renderer.render(&chat(rest.clone())).unwrap();
        let last = if thinks { "<think>" } else { "</think>" };
        assert_eq!(rendered.ids.last(), shipped().special_id(last).as_ref(), "{default} {rest}");
        assert_eq!(rendered.answer.thinking, thinks, "{default} {rest}");
    }
}
