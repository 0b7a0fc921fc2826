//! Tool calls and reasoning over HTTP.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;
mod scripted;

use common::{Dice, shipped};
use deepinfer_gateway::core::StreamEvent;
use deepinfer_gateway::{ChatRenderer, ChatRequest};
use deepinfer_protocol::generate::FinishReason;
use scripted::*;
use serde_json::{Value, json};

const MARK: &str = "⟨｜DSML｜⟩";

/// Name, is a string, value.
type Parameter<'a> = (&'a str, bool, &'a str);

/// A block of calls: name and parameters.
fn block(calls: &[(&str, &[Parameter<'_>])]) -> String {
    let mut text = format!("\n\n<{MARK} calls>\n");
    for (name, parameters) in calls {
        text.push_str(&format!("<{MARK} invoke name=\"{name}\">\n"));
        for (parameter, is_string, value) in *parameters {
            text.push_str(&format!(
                "<{MARK} parameter name=\"{parameter}\" string=\"{is_string}\">{value}</{MARK} parameter>\n"
            ));
        }
        text.push_str(&format!("</{MARK} invoke>\n"));
    }
    text + &format!("</{MARK} calls>")
}

fn tool(name: &str) -> Value {
    json!({ "type": "function", "function": { "name": name, "parameters": { "type": "object" } } })
}

fn with_tools(more: Value) -> Value {
    let mut body = hello_with(json!({ "tools": [tool("bash"), tool("f")] }));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The ids in steps that end before the places in `cuts`.
fn in_steps(all: &[u32], cuts: &[usize]) -> Vec<StreamEvent> {
    let mut events = Vec::new();
    let mut start = 0;
    for end in cuts.iter().copied().chain([all.len()]) {
        if end > start {
            events.push(tokens(&all[start..end]));
            start = end;
        }
    }
    events.push(last(&[1], FinishReason::Stop));
    events
}

/// SV-023
#[tokio::test]
async fn an_argument_survives_a_cut_at_every_token_in_thinking_mode() {
    let all =
        ids(&format!("I should build.⟨</think>⟩{}", block(&[("bash", &[("command", true, "make 2>&1")])])));
    for at in 1..all.len() {
        let events = in_steps(&all, &[at]);
        let server = serve(move |_| events.clone()).await;
        let reply =
            server.post("/v1/chat/completions", &with_tools(json!({ "reasoning_effort": "high" }))).await;
        assert!(!reply.text.contains("DSML") && !reply.text.contains("parameter"), "{}", reply.text);
        let said = Said::whole(&reply.json());
        assert_eq!(said.arguments(), [json!({ "command": "make 2>&1" })], "cut at {at}");
        assert_eq!((said.reasoning.as_str(), said.content.as_str()), ("I should build.", ""));
        assert_eq!(said.finish, "tool_calls");
        assert_eq!(reply.json()["choices"][0]["message"]["content"], Value::Null);
    }
    let server = serve(move |_| answer(&all)).await;
    let said = server.chat(&with_tools(json!({ "reasoning_effort": "high" }))).await;
    assert_eq!(said.calls, [("call_00_".to_owned(), "bash".to_owned(), said.calls[0].2.clone())]);
}

/// SV-025
#[tokio::test]
async fn strings_stay_strings_arrays_stay_arrays_and_text_that_looks_like_markup_is_delivered() {
    let parameters: &[_] = &[("arguments", true, "123"), ("input", false, "[1, \"two\", {\"three\": null}]")];
    let text = format!("Two calls{}", block(&[("f", parameters), ("bash", &[])]));
    let server = serve(move |_| answer(&ids(&text))).await;
    let said = server.chat(&with_tools(json!({}))).await;
    let first = json!({ "arguments": "123", "input": [1, "two", { "three": null }] });
    assert_eq!(said.arguments(), [first, json!({})]);
    assert_eq!(said.content, "Two calls");
    let names: Vec<_> = said.calls.iter().map(|(id, name, _)| (id.as_str(), name.as_str())).collect();
    assert_eq!(names, [("call_00_", "f"), ("call_01_", "bash")]);
    for end in ["2 <", "1 < 2 <", "a\n\n<"] {
        let server = serve(move |_| answer(&ids(end))).await;
        assert_eq!(server.chat(&with_tools(json!({}))).await.content, end);
        let server = serve(move |_| cut(&ids(end))).await;
        assert_eq!(server.chat(&with_tools(json!({}))).await.content, end);
    }
}

/// SV-026
#[tokio::test]
async fn tools_with_choice_none_are_rendered_as_no_tools_and_give_no_call() {
    let text = block(&[("f", &[])]);
    let server = serve(move |_| answer(&ids(&format!("Here:{text}")))).await;
    let body = with_tools(json!({ "tool_choice": "none" }));
    let reply = server.post("/v1/chat/completions", &body).await;
    let message = reply.json()["choices"][0]["message"].clone();
    assert!(message.get("tool_calls").is_none(), "{message}");
    let said = server.chat(&body).await;
    assert!(said.calls.is_empty() && !said.content.contains("DSML"), "{said:?}");
    assert_eq!(said.finish, "stop");
    let renderer = ChatRenderer::new(shipped()).unwrap().with_default_thinking(false);
    let chat = ChatRequest::from_value(hello()["messages"].clone()).unwrap();
    let official = renderer.render(&chat).unwrap().ids;
    assert_eq!(*server.seen.lock().unwrap()[0].prompt, *official);
}

/// SV-028
#[tokio::test]
async fn a_large_nested_argument_survives_cuts_at_random_places_and_a_broken_one_does_not_look_valid() {
    let mut nested = json!([]);
    for index in 0..55 {
        nested = json!([index, "some text, with: [brackets] {and} \"quotes\" and \\ and 世界", { "next": nested }]);
    }
    let text = nested.to_string();
    assert!(text.len() > 4096, "{} bytes", text.len());
    let all = ids(&block(&[("f", &[("data", false, &text)])]));
    let mut dice = Dice(28);
    for _ in 0..5 {
        let mut cuts: Vec<_> = (0..100).map(|_| dice.below(all.len())).collect();
        cuts.sort_unstable();
        let events = in_steps(&all, &cuts);
        let server = serve(move |_| events.clone()).await;
        let said = server.chat(&with_tools(json!({}))).await;
        assert_eq!(said.arguments(), [json!({ "data": nested })]);
    }
    let broken = ids(&block(&[("f", &[("data", false, "[1, 2, {\"x\": ")])]));
    let server = serve(move |_| answer(&broken)).await;
    let said = server.chat(&with_tools(json!({}))).await;
    assert!(serde_json::from_str::<Value>(&said.calls[0].2).is_err(), "{}", said.calls[0].2);
}

/// SV-029
#[tokio::test]
async fn the_finish_reason_is_tool_calls_if_and_only_if_there_is_a_call() {
    let text = block(&[("f", &[])]);
    for (text, calls) in [(text.as_str(), 1), ("no call", 0), (&text[..text.len() / 4], 0)] {
        let text = text.to_owned();
        let server = serve(move |_| answer(&ids(&text))).await;
        let said = server.chat(&with_tools(json!({ "tool_choice": "auto" }))).await;
        assert_eq!(said.calls.len(), calls);
        assert_eq!(said.finish, if calls > 0 { "tool_calls" } else { "stop" });
    }
    let server = serve(|_| answer(&ids("no call"))).await;
    let named = json!({ "type": "function", "function": { "name": "f" } });
    for choice in [json!("required"), named, json!("sometimes"), json!(3)] {
        let body = with_tools(json!({ "tool_choice": choice }));
        assert_eq!(server.post("/v1/chat/completions", &body).await.refused(), "tool_choice");
    }
}

/// SV-031
#[tokio::test]
async fn thinking_that_never_closes_has_an_empty_answer_and_no_special_token_in_any_field() {
    let thinking = hello_with(json!({ "thinking": { "type": "enabled" } }));
    let all = ids("On and on\n\n⟨<｜User｜>⟩ it goes");
    let ended = {
        let all = all.clone();
        serve(move |_| answer(&all)).await
    };
    let limited = serve(move |_| cut(&all)).await;
    for (server, finish) in [(ended, "stop"), (limited, "length")] {
        let said = server.chat(&thinking).await;
        assert_eq!(said.reasoning, "On and on\n\n it goes");
        assert_eq!((said.content.as_str(), said.finish.as_str()), ("", finish));
        let reasoning = said.usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
        assert!(reasoning <= said.usage["completion_tokens"].as_u64().unwrap());
        let message = server.post("/v1/chat/completions", &thinking).await.json();
        assert_eq!(message["choices"][0]["message"]["content"], "");
    }
}

/// SV-032
#[tokio::test]
async fn only_the_special_token_ends_thinking_and_only_special_tokens_make_a_call() {
    let spelled = "</think> and <｜DSML｜tool_calls> <｜DSML｜invoke name=\"f\">";
    let text = format!("I talk of {spelled}.⟨</think>⟩\n\nThey are {spelled} you see.");
    let server = serve(move |_| answer(&ids(&text))).await;
    for body in
        [with_tools(json!({ "reasoning_effort": "high" })), hello_with(json!({ "reasoning_effort": "high" }))]
    {
        let said = server.chat(&body).await;
        assert_eq!(said.reasoning, format!("I talk of {spelled}."));
        assert_eq!(said.content, format!("They are {spelled} you see."));
        assert!(said.calls.is_empty());
        assert_eq!(said.finish, "stop");
        let counted = ids(&format!("I talk of {spelled}.")).len();
        assert_eq!(said.usage["completion_tokens_details"]["reasoning_tokens"], counted);
    }
}
