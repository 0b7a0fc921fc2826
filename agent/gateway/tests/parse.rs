//! Reading generated ids: reasoning, answer and tool calls.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::sync::Arc;

use common::{Dice, shipped};
use deepinfer_gateway::{AnswerEvent, AnswerOptions, AnswerParser, EndReason, Tokenizer};

/// Ids of a text in which `⟨...⟩` holds a special token.
fn ids(tokenizer: &Tokenizer, marked: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    for (index, part) in marked.split('⟨').enumerate() {
        let text = match part.split_once('⟩') {
            Some((special, text)) if index > 0 => {
                ids.push(
                    tokenizer.special_id(special).unwrap_or_else(|| panic!("no special token {special}")),
                );
                text
            }
            _ => part,
        };
        ids.extend(tokenizer.encode_text(text).unwrap());
    }
    ids
}

/// Neighbouring pieces of one kind joined.
fn joined(events: Vec<AnswerEvent>) -> Vec<AnswerEvent> {
    let mut all: Vec<AnswerEvent> = Vec::new();
    for event in events {
        match (all.last_mut(), event) {
            (Some(AnswerEvent::Text(text)), AnswerEvent::Text(more))
            | (Some(AnswerEvent::Reasoning(text)), AnswerEvent::Reasoning(more))
            | (Some(AnswerEvent::ToolArguments(text)), AnswerEvent::ToolArguments(more)) => {
                text.push_str(&more)
            }
            (_, event) => all.push(event),
        }
    }
    all
}

fn read(options: AnswerOptions, marked: &str, cut: bool) -> (Vec<AnswerEvent>, EndReason) {
    let tokenizer = shipped();
    let mut parser = AnswerParser::new(Arc::clone(&tokenizer), options);
    let mut events = Vec::new();
    for id in ids(&tokenizer, marked) {
        events.extend(parser.push(id).unwrap());
    }
    let (rest, end) = parser.finish(cut).unwrap();
    events.extend(rest);
    (joined(events), end)
}

fn thinking() -> AnswerOptions {
    AnswerOptions { thinking: true, ..AnswerOptions::default() }
}

fn text(text: &str) -> AnswerEvent {
    AnswerEvent::Text(text.to_owned())
}

fn reasoning(text: &str) -> AnswerEvent {
    AnswerEvent::Reasoning(text.to_owned())
}

#[test]
fn reasoning_ends_at_the_token_and_not_at_its_spelling() {
    let answer = "I write </think> here: 你好.⟨</think>⟩Blue </think>.⟨<｜end▁of▁sentence｜>⟩";
    let (events, end) = read(thinking(), answer, false);
    assert_eq!(events, [reasoning("I write </think> here: 你好."), text("Blue </think>.")]);
    assert_eq!(end, EndReason::Stop);
}

#[test]
fn an_answer_that_never_ends_its_thinking_has_no_visible_text() {
    let (events, end) = read(thinking(), "on and on", true);
    assert_eq!(events, [reasoning("on and on")]);
    assert_eq!(end, EndReason::Length);
}

#[test]
fn tool_calls_are_read_from_their_tokens() {
    let options = AnswerOptions { tools: true, ..AnswerOptions::default() };
    let answer = "Let me look.\n\n<⟨｜DSML｜⟩ calls>\n<⟨｜DSML｜⟩ invoke name=\"get_weather\">\n\
                  <⟨｜DSML｜⟩ parameter name=\"city\" string=\"true\">Mün\"chen</⟨｜DSML｜⟩ parameter>\n\
                  <⟨｜DSML｜⟩ parameter name=\"days\" string=\"false\">[1, 2]</⟨｜DSML｜⟩ parameter>\n\
                  </⟨｜DSML｜⟩ invoke>\n</⟨｜DSML｜⟩ calls>⟨<｜end▁of▁sentence｜>⟩";
    let (events, end) = read(options.clone(), answer, false);
    assert_eq!(end, EndReason::ToolCalls);
    let [before, call, AnswerEvent::ToolArguments(arguments)] = events.as_slice() else {
        panic!("{events:?}")
    };
    assert_eq!(before, &text("Let me look."));
    assert_eq!(call, &AnswerEvent::ToolCall { name: "get_weather".to_owned() });
    let arguments: serde_json::Value = serde_json::from_str(arguments).unwrap();
    assert_eq!(arguments, serde_json::json!({ "city": "Mün\"chen", "days": [1, 2] }));

    // The same characters from ordinary tokens are an answer like any other.
    let spelled = answer.replace(['⟨', '⟩'], "").replace("<｜end▁of▁sentence｜>", "");
    assert_eq!(read(options, &spelled, false), (vec![text(&spelled)], EndReason::Stop));
}

#[test]
fn the_text_of_a_special_id_never_comes_out() {
    let tokenizer = shipped();
    let specials: Vec<u32> = tokenizer.special_tokens().map(|(_, id)| id).collect();
    let words = ids(&tokenizer, "<a></b>\n\"x\" calls> invoke name=\" parameter string=\"true\">ü🤭");
    let mut dice = Dice(7);
    for case in 0..400 {
        let options = AnswerOptions { thinking: case % 2 == 0, tools: case % 4 < 2, stop: Vec::new() };
        let mut parser = AnswerParser::new(Arc::clone(&tokenizer), options);
        let mut events = Vec::new();
        for _ in 0..dice.below(40) {
            let from = if dice.below(3) == 0 { &specials } else { &words };
            events.extend(parser.push(from[dice.below(from.len())]).unwrap());
        }
        events.extend(parser.finish(false).unwrap().0);
        for event in events {
            let (AnswerEvent::Text(text) | AnswerEvent::Reasoning(text) | AnswerEvent::ToolArguments(text)) =
                event
            else {
                continue;
            };
            let leaks = |c: char| c == '｜' || c == '▁' || c as u32 & 0xfffe == 0xfffe;
            assert!(!text.contains(leaks) && !text.contains("think>"), "{text:?}");
        }
    }
}

#[test]
fn text_comes_out_whole_and_in_order_whatever_its_characters() {
    let tokenizer = shipped();
    for answer in ["x < y </ z", "你好 🤭 \u{fffd} é\n\n", "<", "{\"a\": 1}\n```json\n{}\n```", "\u{fffd}"]
    {
        let (events, end) = read(AnswerOptions::default(), answer, false);
        assert_eq!((events, end), (vec![text(answer)], EndReason::Stop));
    }
    // A character that is cut off at the end is shown as such.
    let mut parser = AnswerParser::new(Arc::clone(&tokenizer), AnswerOptions::default());
    let first_byte = (0..3072).find(|&id| tokenizer.token_bytes(id) == [0xf0]).unwrap();
    assert_eq!(parser.push(first_byte).unwrap(), []);
    assert_eq!(parser.finish(true).unwrap(), (vec![text("\u{fffd}")], EndReason::Length));
}

#[test]
fn stop_strings_act_on_the_visible_answer_only() {
    let tokenizer = shipped();
    let options = AnswerOptions { stop: vec![String::new(), "END".to_owned()], ..thinking() };
    let mut parser = AnswerParser::new(Arc::clone(&tokenizer), options);
    let mut events = Vec::new();
    let mut after = 0;
    for id in ids(&tokenizer, "the END is near⟨</think>⟩one EN two END three") {
        after += usize::from(parser.stopped().is_some());
        events.extend(parser.push(id).unwrap());
    }
    assert_eq!(parser.stopped(), Some("END"));
    assert!(after > 0, "ids were pushed after the stop string");
    let (rest, end) = parser.finish(false).unwrap();
    events.extend(rest);
    assert_eq!(joined(events), [reasoning("the END is near"), text("one EN two ")]);
    assert_eq!(end, EndReason::StopString("END".to_owned()));
}
