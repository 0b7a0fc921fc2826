//! Answers against every way of spreading ids over steps, and against one decode of all ids.

use proptest::prelude::*;

use super::*;
use crate::fuzzing::sample_chat_tokenizer;

/// Everything that an answer says, neighbours of one kind joined.
#[derive(Debug, PartialEq)]
struct Told {
    deltas: Vec<Delta>,
    logprobs: [Vec<u32>; 2],
    ids: Vec<u32>,
    usage: (u32, u32),
    end: Option<End>,
}

fn told(mut builder: AnswerBuilder, steps: &[Vec<u32>], finish: FinishReason, gathered: bool) -> Told {
    let mut all = Step::default();
    let mut step = Step::default();
    for (index, ids) in steps.iter().enumerate() {
        let tokens = ids.iter().map(|id| Token { id: *id, logprob: None }).collect();
        let finish = (index + 1 == steps.len()).then_some(finish);
        if gathered {
            builder.push(tokens, finish, &mut all).unwrap();
            continue;
        }
        step.clear();
        builder.push(tokens, finish, &mut step).unwrap();
        append(&mut all, &step);
    }
    let ids = |tokens: &[Token]| tokens.iter().map(|token| token.id).collect::<Vec<_>>();
    Told {
        logprobs: [ids(&all.content_logprobs), ids(&all.reasoning_logprobs)],
        deltas: all.deltas,
        ids: all.ids,
        usage: (builder.completion_tokens(), builder.reasoning_tokens()),
        end: builder.end(),
    }
}

fn append(all: &mut Step, step: &Step) {
    for delta in &step.deltas {
        match delta {
            Delta::Content(text) => all.content().push_str(text),
            Delta::Reasoning(text) => all.reasoning().push_str(text),
            Delta::Arguments { index, text } => all.arguments(*index, text),
            Delta::Call { .. } => all.deltas.push(delta.clone()),
        }
    }
    all.content_logprobs.extend(step.content_logprobs.iter().cloned());
    all.reasoning_logprobs.extend(step.reasoning_logprobs.iter().cloned());
    all.ids.extend(&step.ids);
}

/// Pieces of answers, so that blocks of calls, whole and broken, are likely.
fn piece() -> impl Strategy<Value = Vec<u32>> {
    let tokenizer = sample_chat_tokenizer();
    let special = |token: SpecialToken| tokenizer.special_id(token.default_str()).unwrap();
    let text = |text: &str| tokenizer.encode_text(text).unwrap();
    let mark = special(SpecialToken::Dsml);
    let tag = |before: &str, after: &str| [text(before), vec![mark], text(after)].concat();
    prop::sample::select(vec![
        text("word "),
        text("\n\n"),
        text("STO"),
        text("P"),
        text("é世")[..1].to_vec(),
        text("世"),
        vec![special(SpecialToken::ThinkingEnd)],
        vec![special(SpecialToken::User)],
        vec![mark],
        tag("\n\n<", " calls>\n"),
        tag("<", " invoke name=\"f\">\n"),
        tag("<", " parameter name=\"x\" string=\"true\">"),
        tag("<", " parameter name=\"y\" string=\"false\">"),
        tag("</", " parameter>\n"),
        tag("</", " invoke>\n"),
        tag("</", " calls>"),
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn an_answer_does_not_depend_on_how_its_ids_are_spread_over_steps(
        pieces in prop::collection::vec(piece(), 1..16),
        cuts in prop::collection::vec(any::<bool>(), 160),
        [thinking, tools, stop, cut, plain] in any::<[bool; 5]>(),
    ) {
        let ids = pieces.concat();
        let finish = if cut { FinishReason::Length } else { FinishReason::Stop };
        let builder = || {
            let stop = if stop { vec!["STOP".to_owned(), "word w".to_owned()] } else { Vec::new() };
            if plain {
                return AnswerBuilder::completion(sample_chat_tokenizer(), &stop, true, true);
            }
            AnswerBuilder::chat(sample_chat_tokenizer(), AnswerOptions { thinking, tools, stop }, true)
        };
        let single: Vec<_> = ids.iter().map(|id| vec![*id]).collect();
        let mut steps = vec![Vec::new()];
        for (id, cut) in ids.iter().zip(cuts) {
            if cut && steps.last().is_some_and(|step: &Vec<u32>| !step.is_empty()) {
                steps.push(Vec::new());
            }
            steps.last_mut().unwrap().push(*id);
        }
        let one_by_one = told(builder(), &single, finish, false);
        prop_assert!(one_by_one.end.is_some());
        let has_call = one_by_one.deltas.iter().any(|delta| matches!(delta, Delta::Call { .. }));
        prop_assert!(one_by_one.end != Some(End::ToolCalls) || has_call);
        prop_assert!(one_by_one.usage.1 <= one_by_one.usage.0);
        if ids.len() <= 160 {
            prop_assert_eq!(&told(builder(), &steps, finish, false), &one_by_one);
            prop_assert_eq!(&told(builder(), &steps, finish, true), &one_by_one);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// SV-047
    #[test]
    fn a_plain_continuation_is_one_decode_of_its_ids(ids in prop::collection::vec(0..270_u32, 1..40)) {
        let tokenizer = sample_chat_tokenizer();
        let steps: Vec<_> = ids.iter().map(|id| vec![*id]).collect();
        let builder = AnswerBuilder::completion(Arc::clone(&tokenizer), &[], false, true);
        let told = told(builder, &steps, FinishReason::Length, false);
        let text = tokenizer.decode(&ids, true);
        let wanted = if text.is_empty() { Vec::new() } else { vec![Delta::Content(text)] };
        prop_assert_eq!(told.deltas, wanted);
        prop_assert_eq!(told.usage.0 as usize, ids.len());
        prop_assert_eq!(told.ids, ids);
    }
}
