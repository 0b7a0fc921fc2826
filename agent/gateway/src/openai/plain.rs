//! Reading answers that hold no tool calls: reasoning, then the visible answer with its stop strings.
//!
//! It gives what [`crate::AnswerParser`] gives without tools (a property test compares them), at a tenth of its
//! cost: this is the path of almost every token.

use std::sync::Arc;

use deepseek_recipe_core::special_tokens::SpecialToken;

use super::stop::StopMatcher;
use crate::detokenizer::Detokenizer;
use crate::tokenizer::Tokenizer;

/// Where the answer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Reasoning,
    Content,
}

/// A reader of one answer.
#[derive(Clone, Debug)]
pub(crate) struct PlainReader {
    tokenizer: Arc<Tokenizer>,
    text: Detokenizer,
    stops: StopMatcher,
    stage: Stage,
    /// No character of this stage came yet: line breaks are left out.
    at_start: bool,
    /// Line breaks at the end of the reasoning so far: left out if it ends here.
    breaks: usize,
    thinking_end: Option<u32>,
    dsml: Option<u32>,
    /// Text as it is: nothing is left out at the start, no token ends anything.
    raw: bool,
}

impl PlainReader {
    /// A reader of a chat answer, which begins with reasoning if the prompt opened it.
    pub(crate) fn chat(tokenizer: Arc<Tokenizer>, thinking: bool, stops: &[String]) -> Self {
        let [thinking_end, dsml] = [SpecialToken::ThinkingEnd, SpecialToken::Dsml]
            .map(|token| tokenizer.special_id(token.default_str()));
        Self {
            text: Detokenizer::new(Arc::clone(&tokenizer)),
            stops: StopMatcher::new(stops),
            stage: if thinking { Stage::Reasoning } else { Stage::Content },
            at_start: true,
            breaks: 0,
            thinking_end,
            dsml,
            raw: false,
            tokenizer,
        }
    }

    /// A reader of a plain continuation.
    pub(crate) fn raw(tokenizer: Arc<Tokenizer>, stops: &[String]) -> Self {
        let chat = Self::chat(tokenizer, false, stops);
        Self { at_start: false, thinking_end: None, dsml: None, raw: true, ..chat }
    }

    /// Take an id; append to `reasoning` and `content` what is now certain.
    pub(crate) fn push(&mut self, id: u32, reasoning: &mut String, content: &mut String) {
        if self.raw || !self.tokenizer.is_special(id) {
            let piece = self.text.push(id);
            if piece.is_empty() {
                return;
            }
            match self.stage {
                Stage::Reasoning => Self::think(piece, &mut self.at_start, &mut self.breaks, reasoning),
                Stage::Content => Self::say(piece, &mut self.at_start, &mut self.stops, content),
            }
        } else if self.thinking_end == Some(id) {
            self.flush_text(reasoning, content);
            match self.stage {
                Stage::Reasoning => {
                    self.breaks = 0;
                    self.stage = Stage::Content;
                    self.at_start = true;
                }
                // A second one is not content, but it ends what stop strings could span.
                Stage::Content => {
                    self.stops.interrupt(content);
                    self.at_start = false;
                }
            }
        } else if self.dsml == Some(id) {
            self.flush_text(reasoning, content);
            match self.stage {
                Stage::Reasoning => Self::think("", &mut self.at_start, &mut self.breaks, reasoning),
                Stage::Content if !self.stops.stopped() => self.stops.interrupt(content),
                Stage::Content => {}
            }
            self.at_start = false;
        }
    }

    /// End the answer: release what is held back.
    pub(crate) fn finish(&mut self, reasoning: &mut String, content: &mut String) {
        self.flush_text(reasoning, content);
        match self.stage {
            Stage::Reasoning => Self::think("", &mut self.at_start, &mut self.breaks, reasoning),
            Stage::Content => {
                if !self.stops.stopped() {
                    self.stops.interrupt(content);
                }
            }
        }
    }

    /// A stop string was found.
    pub(crate) fn stopped(&self) -> bool {
        self.stops.stopped()
    }

    /// Give up on an incomplete character.
    fn flush_text(&mut self, reasoning: &mut String, content: &mut String) {
        let piece = self.text.finish();
        if piece.is_empty() {
            return;
        }
        match self.stage {
            Stage::Reasoning => Self::think(piece, &mut self.at_start, &mut self.breaks, reasoning),
            Stage::Content => Self::say(piece, &mut self.at_start, &mut self.stops, content),
        }
    }

    /// Reasoning: line breaks wait for what follows them; an empty piece releases them.
    fn think(piece: &str, at_start: &mut bool, breaks: &mut usize, out: &mut String) {
        let piece = if *at_start { piece.trim_start_matches('\n') } else { piece };
        let text = piece.trim_end_matches('\n');
        if !text.is_empty() || piece.is_empty() {
            out.extend(std::iter::repeat_n('\n', *breaks));
            *breaks = 0;
        }
        out.push_str(text);
        *breaks += piece.len() - text.len();
        *at_start &= piece.is_empty();
    }

    /// Visible text: line breaks at the start are left out, unless one is a stop string.
    fn say(piece: &str, at_start: &mut bool, stops: &mut StopMatcher, out: &mut String) {
        let mut rest = piece;
        while *at_start && let Some(after) = rest.strip_prefix('\n') {
            if stops.push_alone("\n") {
                return;
            }
            rest = after;
        }
        if !rest.is_empty() {
            *at_start = false;
            stops.push(rest, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fuzzing::sample_chat_tokenizer;
    use crate::parse::{AnswerEvent, AnswerOptions, AnswerParser};

    /// Reasoning, content, and whether a stop string ended it.
    type Read = (String, String, bool);

    fn by_the_recipe(ids: &[u32], thinking: bool, stops: &[String]) -> Read {
        let mut stop = stops.to_vec();
        stop.sort_by_key(|stop| std::cmp::Reverse(stop.len()));
        let options = AnswerOptions { thinking, tools: false, stop };
        let mut parser = AnswerParser::new(sample_chat_tokenizer(), options);
        let mut events = Vec::new();
        for id in ids {
            events.extend(parser.push(*id).unwrap());
        }
        let (rest, end) = parser.finish(false).unwrap();
        events.extend(rest);
        let mut read = Read::default();
        for event in events {
            match event {
                AnswerEvent::Reasoning(text) => read.0.push_str(&text),
                AnswerEvent::Text(text) => read.1.push_str(&text),
                other => panic!("{other:?} without tools"),
            }
        }
        read.2 = matches!(end, crate::parse::EndReason::StopString(_));
        read
    }

    fn by_the_reader(ids: &[u32], thinking: bool, stops: &[String]) -> Read {
        let mut reader = PlainReader::chat(sample_chat_tokenizer(), thinking, stops);
        let mut read = Read::default();
        for id in ids {
            reader.push(*id, &mut read.0, &mut read.1);
        }
        reader.finish(&mut read.0, &mut read.1);
        read.2 = reader.stopped();
        read
    }

    /// Ids that make the cases likely: line breaks, special tokens, a few letters, parts of characters.
    fn id() -> impl Strategy<Value = u32> {
        let tokenizer = sample_chat_tokenizer();
        let special = |token: SpecialToken| tokenizer.special_id(token.default_str()).unwrap();
        let specials = [SpecialToken::ThinkingEnd, SpecialToken::Dsml, SpecialToken::User].map(special);
        let byte = |byte: u8| {
            let mut ids = 0..tokenizer.vocab_size() as u32;
            ids.find(|id| !tokenizer.is_special(*id) && tokenizer.token_bytes(*id) == [byte]).unwrap()
        };
        let bytes = *b"\n\n\nab\xC3\xA9\xE4\xB8";
        let mut ids = bytes.map(byte).to_vec();
        ids.extend(specials);
        prop::sample::select(ids)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn it_reads_what_the_recipes_parser_reads(
            ids in prop::collection::vec(id(), 0..24),
            thinking in any::<bool>(),
            stops in prop::collection::vec("[ab\n]{1,3}", 0..3),
        ) {
            prop_assert_eq!(by_the_reader(&ids, thinking, &stops), by_the_recipe(&ids, thinking, &stops));
        }
    }
}
