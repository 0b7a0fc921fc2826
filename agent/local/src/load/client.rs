//! One streamed request, and when each of its tokens came.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

use super::args::LoadArgs;

/// Longest frame of a stream that is kept, in bytes.
const MAX_FRAME_BYTES: usize = 4 << 20;

/// What became of a request.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Status of the response, or a word: `connection`, `stream`.
    pub error: Option<String>,
    /// From sending to the first token.
    pub first: Option<Duration>,
    /// Between tokens; tokens that came together share their time evenly.
    pub gaps: Vec<Duration>,
    /// From sending to the end.
    pub total: Duration,
    /// As the server counts.
    pub prompt_tokens: u64,
    /// The same, of the cached part.
    pub cached_tokens: u64,
    /// Of the answer.
    pub output_tokens: u64,
}

/// Sends requests.
#[derive(Clone)]
pub struct Sender {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
    key: Option<String>,
    model: String,
    chat: bool,
    vocab: u32,
    seed: u64,
}

impl Sender {
    /// Of flags.
    pub fn new(args: &LoadArgs, model: String) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Self {
            client: Client::builder(TokioExecutor::new()).build(connector),
            url: args.url.trim_end_matches('/').to_owned(),
            key: args.api_key.clone(),
            model,
            chat: args.chat,
            vocab: args.vocab,
            seed: args.seed,
        }
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Request<Full<Bytes>>, http::Error> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        request = request.header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        request.body(Full::from(body))
    }

    /// The first model that the server lists, and its longest sequence in tokens.
    ///
    /// # Errors
    /// What the server said instead.
    pub async fn first_model(&self) -> Result<(String, Option<u32>), String> {
        let request =
            self.request(Method::GET, "/v1/models", Vec::new()).map_err(|error| format!("--url: {error}"))?;
        let response =
            self.client.request(request).await.map_err(|error| format!("--url {}: {error}", self.url))?;
        let status = response.status();
        let body = response.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
        let list: Value = serde_json::from_slice(&body).unwrap_or_default();
        let first = &list["data"][0];
        let longest = first["max_model_len"].as_u64().and_then(|length| u32::try_from(length).ok());
        let first = first["id"].as_str().map(|id| (id.to_owned(), longest));
        first.ok_or_else(|| format!("{} lists no model (status {status}): is it ready?", self.url))
    }

    fn body(&self, number: u64, prompt: u32, output: u32) -> Value {
        let mut random = Random(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number);
        let mut body = json!({
            "model": self.model,
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": true,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if self.chat {
            // About a token a word.
            let words: Vec<String> = (0..prompt).map(|_| format!("w{}", random.below(1000))).collect();
            body["messages"] = json!([{"role": "user", "content": words.join(" ")}]);
            body["thinking"] = json!(false);
        } else {
            let ids: Vec<u32> = (0..prompt).map(|_| 3 + random.below(self.vocab - 3)).collect();
            body["prompt"] = json!(ids);
            body["return_token_ids"] = json!(true);
        }
        body
    }

    /// Sends a request and follows its stream to the end.
    pub async fn send(&self, number: u64, prompt: u32, output: u32) -> Sample {
        let begun = Instant::now();
        let mut sample = Sample::default();
        if let Err(error) = self.follow(begun, &self.body(number, prompt, output), &mut sample).await {
            sample.error = Some(error);
        }
        sample.total = begun.elapsed();
        sample
    }

    async fn follow(&self, begun: Instant, body: &Value, sample: &mut Sample) -> Result<(), String> {
        let path = if self.chat { "/v1/chat/completions" } else { "/v1/completions" };
        let request =
            self.request(Method::POST, path, body.to_string().into_bytes()).map_err(|e| e.to_string())?;
        let response = self.client.request(request).await.map_err(|_| "connection".to_owned())?;
        if !response.status().is_success() {
            return Err(response.status().as_u16().to_string());
        }
        let mut body = response.into_body();
        let mut buffer: Vec<u8> = Vec::new();
        let (mut last, mut ended) = (begun, false);
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_| "stream".to_owned())?.into_data() else { continue };
            let now = Instant::now();
            buffer.extend_from_slice(&data);
            let mut tokens = 0;
            while let Some(end) = buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = buffer.drain(..end + 2).collect();
                tokens += event_tokens(&event, sample, &mut ended)?;
            }
            if buffer.len() > MAX_FRAME_BYTES {
                return Err("stream".to_owned());
            }
            if tokens > 0 {
                note(sample, tokens, now, begun, &mut last);
            }
        }
        if ended { Ok(()) } else { Err("stream".to_owned()) }
    }
}

/// Tokens that have come.
fn note(sample: &mut Sample, tokens: u32, now: Instant, begun: Instant, last: &mut Instant) {
    let since = now.duration_since(*last);
    *last = now;
    let gaps = if sample.first.is_none() {
        sample.first = Some(now.duration_since(begun));
        // The others of the first frame came with it.
        sample.gaps.extend((1..tokens).map(|_| Duration::ZERO));
        return;
    } else {
        tokens
    };
    sample.gaps.extend((0..gaps).map(|_| since / tokens));
}

/// Tokens of one event; usage goes into the sample.
fn event_tokens(event: &[u8], sample: &mut Sample, ended: &mut bool) -> Result<u32, String> {
    let Some(data) = event.strip_prefix(b"data: ") else { return Ok(0) };
    if data.starts_with(b"[DONE]") {
        *ended = true;
        return Ok(0);
    }
    let value: Value = serde_json::from_slice(data).map_err(|_| "stream".to_owned())?;
    if let Some(error) = value.get("error") {
        return Err(error["code"].as_str().or(error["type"].as_str()).unwrap_or("error").to_owned());
    }
    if let Some(usage) = value.get("usage").filter(|usage| usage.is_object()) {
        sample.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap_or(0);
        sample.output_tokens = usage["completion_tokens"].as_u64().unwrap_or(0);
        sample.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    }
    let choice = &value["choices"][0];
    if let Some(ids) = choice["token_ids"].as_array() {
        return Ok(u32::try_from(ids.len()).unwrap_or(0));
    }
    let delta = &choice["delta"];
    let text = |field: &str| delta[field].as_str().is_some_and(|text| !text.is_empty());
    let tool = delta.get("tool_calls").is_some();
    Ok(u32::from(text("content") || text("reasoning_content") || tool))
}

/// Numbers that repeat with their seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        u32::try_from((z ^ (z >> 31)) % u64::from(limit)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_usage_and_errors_are_read_from_events() {
        let mut sample = Sample::default();
        let mut ended = false;
        let mut read = |text: &str, ended: &mut bool| event_tokens(text.as_bytes(), &mut sample, ended);
        assert_eq!(read("data: {\"choices\":[{\"token_ids\":[1,2]}]}\n\n", &mut ended), Ok(2));
        assert_eq!(read(": waiting\n\n", &mut ended), Ok(0));
        assert_eq!(read("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n", &mut ended), Ok(1));
        let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\n";
        assert_eq!(read(usage, &mut ended), Ok(0));
        assert_eq!(
            read("data: {\"error\":{\"code\":\"overloaded\"}}\n\n", &mut ended),
            Err("overloaded".into())
        );
        assert!(!ended);
        assert_eq!(read("data: [DONE]\n\n", &mut ended), Ok(0));
        assert!(ended);
        assert_eq!((sample.prompt_tokens, sample.output_tokens), (3, 2));
    }

    #[test]
    fn tokens_that_come_together_share_their_time() {
        let begun = Instant::now();
        let (mut sample, mut last) = (Sample::default(), begun);
        let at = |ms: u64| begun + Duration::from_millis(ms);
        note(&mut sample, 1, at(100), begun, &mut last);
        note(&mut sample, 2, at(120), begun, &mut last);
        assert_eq!(sample.first, Some(Duration::from_millis(100)));
        assert_eq!(sample.gaps, [Duration::from_millis(10); 2]);
    }
}
