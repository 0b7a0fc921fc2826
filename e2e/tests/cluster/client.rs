//! A client of the gateways: plain HTTP, streamed or whole, and load that checks every answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// Longest that a request may take while nodes are lost.
const PATIENCE: Duration = Duration::from_secs(180);

/// A greedy request of so many tokens.
pub fn request(prompt: &str, max_tokens: u32) -> Value {
    json!({
        "model": "tiny-v41",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": false,
    })
}

/// POST; the status and the body.
pub async fn post(url: &str, body: &Value) -> anyhow::Result<(u16, Value)> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let request = http::Request::post(url)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))?;
    let call = async {
        let answer = client.request(request).await?;
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await?.to_bytes();
        anyhow::Ok((status, serde_json::from_slice(&body).unwrap_or(Value::Null)))
    };
    tokio::time::timeout(PATIENCE, call).await.context("no answer in time")?
}

/// The answer to "What is the capital of France?".
pub async fn capital(gateway: &str) -> anyhow::Result<String> {
    let body = json!({
        "model": "tiny-v41",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    });
    let (status, answer) = post(&format!("{gateway}/v1/chat/completions"), &body).await?;
    ensure!(status == 200, "status {status}: {answer}");
    Ok(answer["choices"][0]["message"]["content"].as_str().context("an answer has content")?.to_owned())
}

/// The text of a greedy completion.
pub async fn complete(gateway: &str, prompt: &str, max_tokens: u32) -> anyhow::Result<String> {
    let (status, answer) = post(&format!("{gateway}/v1/completions"), &request(prompt, max_tokens)).await?;
    ensure!(status == 200, "status {status}: {answer}");
    Ok(answer["choices"][0]["text"].as_str().context("a completion has text")?.to_owned())
}

/// Clients that ask over and over until told to stop, each answer compared with the one of a quiet moment.
pub struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicUsize>,
    tasks: JoinSet<anyhow::Result<()>>,
}

/// Prompts of the load, and how long their answers are.
const PROMPTS: [(&str, u32); 3] =
    [("The capital of France is", 48), ("Once upon a time", 96), ("One two three four", 64)];

impl Load {
    /// Asks once in quiet, then begins with so many clients on these gateways.
    pub async fn start(gateways: &[String], clients: usize) -> anyhow::Result<Self> {
        let mut expected = Vec::new();
        for (prompt, tokens) in PROMPTS {
            expected.push(complete(&gateways[0], prompt, tokens).await?);
        }
        let expected = Arc::new(expected);
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let mut tasks = JoinSet::new();
        for client in 0..clients {
            let gateway = gateways[client % gateways.len()].clone();
            let (stop, done, expected) = (Arc::clone(&stop), Arc::clone(&done), Arc::clone(&expected));
            tasks.spawn(async move {
                let mut turn = client;
                while !stop.load(Ordering::Relaxed) {
                    let at = turn % PROMPTS.len();
                    let (prompt, tokens) = PROMPTS[at];
                    let text = complete(&gateway, prompt, tokens).await?;
                    if text != expected[at] {
                        bail!("a wrong answer to {prompt:?}: {text:?} instead of {:?}", expected[at]);
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                    turn += 1;
                }
                Ok(())
            });
        }
        Ok(Self { stop, done, tasks })
    }

    /// Answers so far.
    pub fn done(&self) -> usize {
        self.done.load(Ordering::Relaxed)
    }

    /// Waits for so many more answers.
    pub async fn more(&mut self, answers: usize) -> anyhow::Result<()> {
        let goal = self.done() + answers;
        let deadline = std::time::Instant::now() + PATIENCE;
        while self.done() < goal {
            if let Some(ended) = self.tasks.try_join_next() {
                ended??;
            }
            ensure!(std::time::Instant::now() < deadline, "{} of {goal} answers came", self.done());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Lets what runs come to its end; an error if any request failed or was answered wrongly. Gives the answers.
    pub async fn finish(mut self) -> anyhow::Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended??;
        }
        Ok(self.done())
    }
}
