//! Requests: greedy completions whose tokens can be compared, one or many at once.

use std::net::SocketAddr;
use std::thread::JoinHandle;

use serde_json::json;

use crate::http::Call;

/// A prompt and how many tokens follow.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    pub number: u32,
    pub prompt: u32,
    pub tokens: usize,
}

/// Ids that are all ordinary tokens, different for each number.
fn prompt(number: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| 20 + (number * 131 + i * (7 + number % 5)) % 200).collect()
}

/// Asks a gateway; the error says what came instead of an answer.
pub fn ask(gateway: SocketAddr, question: Question) -> Result<Vec<u32>, String> {
    let body = json!({
        "model": "tiny", "prompt": prompt(question.number, question.prompt), "max_tokens": question.tokens,
        "temperature": 0, "ignore_eos": true, "return_token_ids": true,
    });
    let response = Call::new(gateway, "POST", "/v1/completions").body(&body).send();
    let response = response.map_err(|error| error.to_string())?;
    if response.status != 200 {
        return Err(format!("{}: {}", response.status, response.body));
    }
    let answer = response.json();
    let ids = answer["choices"][0]["token_ids"].as_array().ok_or("no ids")?.iter();
    Ok(ids.map(|id| u32::try_from(id.as_u64().expect("an id")).expect("an id")).collect())
}

/// Many at once, different from each other.
pub fn questions(count: u32, tokens: usize) -> Vec<Question> {
    (0..count).map(|number| Question { number, prompt: 20 + number * 17, tokens }).collect()
}

/// Tokens of an answer, or what went wrong.
type Outcome = Result<Vec<u32>, String>;

/// Requests that run.
pub struct Load(Vec<(Question, JoinHandle<Outcome>)>);

impl Load {
    pub fn start(gateway: SocketAddr, questions: &[Question]) -> Self {
        let one = |&question: &Question| (question, std::thread::spawn(move || ask(gateway, question)));
        Self(questions.iter().map(one).collect())
    }

    /// Waits for all; in the order of the questions.
    pub fn results(self) -> Vec<Result<Vec<u32>, String>> {
        self.0.into_iter().map(|(_, thread)| thread.join().expect("no panic")).collect()
    }

    /// Every request must have given these tokens.
    #[track_caller]
    pub fn expect(self, expected: &[Vec<u32>]) {
        for ((question, thread), expected) in self.0.into_iter().zip(expected) {
            let ids = thread.join().expect("no panic");
            assert_eq!(ids.as_ref(), Ok(expected), "{question:?}");
        }
    }
}

/// The tokens of an undisturbed run.
#[track_caller]
pub fn undisturbed(gateway: SocketAddr, questions: &[Question]) -> Vec<Vec<u32>> {
    let results = Load::start(gateway, questions).results();
    results.into_iter().map(|result| result.expect("nothing disturbs it")).collect()
}
