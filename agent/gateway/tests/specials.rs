//! Text that spells a special token stays text, wherever in a request it stands.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::collections::BTreeMap;

use common::shipped;
use deepinfer_gateway::{
    ChatError, ChatMessage, ChatRenderer, ChatRequest, ChatTool, ChatToolCall, RECIPE_TOKENS, RenderError,
    Tokenizer,
};
use serde_json::{Value, json};

const GROUNDING: [&str; 8] = [
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
];

/// A request whose text field number `field` holds `text`; `None` past the last field.
fn request_with(field: usize, text: &str) -> Option<(ChatRequest, &'static str)> {
    let names = [
        "system",
        "user",
        "assistant",
        "reasoning",
        "call id",
        "argument key",
        "argument value",
        "arguments",
        "tool result",
        "tool description",
        "parameter description",
        "parameter name",
        "earlier user",
    ];
    let name = *names.get(field)?;
    let at = |which: &str| {
        if which == name { text.to_owned() } else { "plain".to_owned() }
    };
    let arguments = match name {
        "arguments" => text.to_owned(),
        _ => json!({ at("argument key"): at("argument value") }).to_string(),
    };
    let messages = vec![
        ChatMessage::system(at("system")),
        ChatMessage::user(at("earlier user")),
        ChatMessage::Assistant {
            content: at("assistant"),
            reasoning_content: Some(at("reasoning")),
            tool_calls: vec![ChatToolCall { id: at("call id"), name: "look".to_owned(), arguments }],
        },
        ChatMessage::Tool { tool_call_id: at("call id"), content: at("tool result") },
        ChatMessage::user(at("user")),
    ];
    let properties =
        json!({ at("parameter name"): { "type": "string", "description": at("parameter description") } });
    let tools = vec![ChatTool {
        name: "look".to_owned(),
        description: Some(at("tool description")),
        parameters: Some(json!({ "type": "object", "properties": properties })),
        strict: None,
    }];
    Some((ChatRequest { messages, tools, thinking: Some(true), reasoning_effort: None }, name))
}

/// How often each special id appears.
fn special_counts(tokenizer: &Tokenizer, ids: &[u32]) -> BTreeMap<u32, usize> {
    let mut counts = BTreeMap::new();
    for &id in ids.iter().filter(|&&id| tokenizer.is_special(id)) {
        *counts.entry(id).or_default() += 1;
    }
    counts
}

#[test]
fn every_special_token_in_every_text_field_stays_text() {
    let tokenizer = shipped();
    let renderer = ChatRenderer::new(shipped()).unwrap();
    let specials: Vec<String> = tokenizer.special_tokens().map(|(content, _)| content.to_owned()).collect();
    assert_eq!(specials.len(), 20);
    let mut fields = 0;
    while let Some((plain, name)) = request_with(fields, "plain") {
        let expected = special_counts(&tokenizer, &renderer.render(&plain).unwrap().ids);
        for special in &specials {
            for text in [special.clone(), format!("a{special}b {special}{special}\n")] {
                let (request, _) = request_with(fields, &text).unwrap();
                let ids = renderer.render(&request).unwrap().ids;
                let mut expected = expected.clone();
                if ["assistant", "reasoning"].contains(&name) && GROUNDING.contains(&special.as_str()) {
                    // The model's own markup in its own earlier answer becomes its ids again.
                    let id = tokenizer.special_id(special).unwrap();
                    *expected.entry(id).or_default() += text.matches(special).count();
                }
                assert_eq!(special_counts(&tokenizer, &ids), expected, "{special} in {name}");
                // A call's id connects messages and is not part of the prompt.
                if name != "call id" {
                    let decoded = tokenizer.decode(&ids, false);
                    let escaped = json!(text).to_string();
                    let found = decoded.contains(&text) || decoded.contains(escaped.trim_matches('"'));
                    assert!(found, "{text:?} in {name} is still in the prompt");
                }
            }
        }
        fields += 1;
    }
    assert_eq!(fields, 13);
}

#[test]
fn special_tokens_in_names_are_refused_with_the_name_of_the_field() {
    let renderer = ChatRenderer::new(shipped()).unwrap();
    for special in RECIPE_TOKENS {
        let tool = ChatTool { name: special.to_owned(), description: None, parameters: None, strict: None };
        let request = ChatRequest { tools: vec![tool], ..ChatRequest::new(vec![ChatMessage::user("hi")]) };
        let error = renderer.render(&request).unwrap_err();
        assert!(
            matches!(error, RenderError::Refused(_)) && error.to_string().contains("tools[0].function.name")
        );
    }
}

#[test]
fn plain_encoding_never_yields_a_special_id_and_decodes_to_the_same_text() {
    let tokenizer = shipped();
    for (content, id) in tokenizer.special_tokens() {
        for text in [content.to_owned(), format!("{content}{content} x{content}"), format!(" {content}\n")] {
            let ids = tokenizer.encode_text(&text).unwrap();
            assert!(!ids.contains(&id) && !ids.iter().any(|&id| tokenizer.is_special(id)), "{text:?}");
            assert_eq!(tokenizer.decode(&ids, true), text);
        }
    }
}

#[test]
fn a_tokenizer_without_the_recipes_tokens_opens_but_cannot_render_chats() {
    let tokenizer = Tokenizer::open(common::repository("e2e/golden/tiny-bf16/tokenizer.json")).unwrap();
    assert_eq!(tokenizer.vocab_size(), 512);
    let ids = tokenizer.encode_text("Hello <think> wörld").unwrap();
    assert_eq!(tokenizer.decode(&ids, true), "Hello <think> wörld");
    let error = ChatRenderer::new(std::sync::Arc::new(tokenizer)).unwrap_err();
    let RenderError::MissingTokens(missing) = &error else { panic!("{error}") };
    assert!(
        missing.contains(&"<｜User｜>".to_owned())
            && !missing.contains(&"<｜begin▁of▁sentence｜>".to_owned())
    );
    assert!(error.to_string().contains("<｜Assistant｜>"));
}

fn field_of(chat: Value) -> String {
    match ChatRequest::from_value(chat).unwrap_err() {
        ChatError::Field { field, .. } => field,
        other => panic!("{other}"),
    }
}

#[test]
fn errors_in_a_chat_name_the_field() {
    let user = json!({ "role": "user", "content": "hi" });
    let call =
        |id: &str| json!({ "id": id, "type": "function", "function": { "name": "f", "arguments": "{}" } });
    let calls = |calls: Value| json!({ "role": "assistant", "content": null, "tool_calls": calls });
    let result = |id: &str| json!({ "role": "tool", "tool_call_id": id, "content": "ok" });
    for (chat, field) in [
        (json!("hi"), "top level"),
        (json!({}), "messages"),
        (json!([]), "messages"),
        (json!({ "messages": "hi" }), "messages"),
        (json!({ "messages": [user], "temperature": 1 }), "temperature"),
        (json!({ "messages": [user], "thinking": "yes" }), "thinking"),
        (json!({ "messages": [user], "thinking": { "type": "yes" } }), "thinking.type"),
        (json!({ "messages": [user], "reasoning_effort": "huge" }), "reasoning_effort"),
        (json!({ "messages": [user], "tools": {} }), "tools"),
        (json!({ "messages": [user], "tools": [{ "type": "function" }] }), "tools[0].function"),
        (json!({ "messages": [user], "tools": [{ "type": "web", "function": {} }] }), "tools[0].type"),
        (json!([user, 7]), "messages[1]"),
        (json!([user, { "role": "bot", "content": "x" }]), "messages[1].role"),
        (json!([user, user, { "role": "user" }]), "messages[2].content"),
        (json!([{ "role": "user", "content": 7 }]), "messages[0].content"),
        (json!([{ "role": "user", "content": [{ "type": "text" }] }]), "messages[0].content[0].text"),
        (json!([{ "role": "user", "content": [{ "type": "image_url" }] }]), "messages[0].content[0]"),
        (json!([{ "role": "user", "content": "x", "colour": "red" }]), "messages[0].colour"),
        (json!([{ "role": "assistant" }]), "messages[0].content"),
        (
            json!([{ "role": "assistant", "content": "", "reasoning_content": 1 }]),
            "messages[0].reasoning_content",
        ),
        (json!([calls(json!([{ "type": "function", "function": {} }]))]), "messages[0].tool_calls[0].id"),
        (json!([user, calls(json!([call("a")]))]), "messages[1].tool_calls"),
        (json!([calls(json!([call("a"), call("b")])), result("a"), user]), "messages[0].tool_calls"),
        (
            json!([calls(json!([call("a"), call("a")])), result("a"), result("a")]),
            "messages[0].tool_calls[1].id",
        ),
        (json!([calls(json!([call("a")])), result("b")]), "messages[1].tool_call_id"),
        (json!([calls(json!([call("a")])), result("a"), result("a")]), "messages[2].tool_call_id"),
        (json!([user, result("a")]), "messages[1].tool_call_id"),
    ] {
        assert_eq!(field_of(chat.clone()), field, "{chat}");
    }
    assert!(ChatRequest::parse("[{").unwrap_err().to_string().contains("not valid JSON"));
}

#[test]
fn a_pasted_answer_with_empty_extra_fields_is_accepted() {
    let answer = json!({ "role": "assistant", "content": "yes", "refusal": null, "annotations": [], "tool_calls": [] });
    let request = ChatRequest::from_value(json!([{ "role": "developer", "content": "s" }, answer])).unwrap();
    assert_eq!(request.messages, [ChatMessage::system("s"), ChatMessage::assistant("yes")]);
}
