//! The API in front of a scripted core: given tokens in given steps, over real HTTP.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deepinfer_gateway::Tokenizer;
use deepinfer_gateway::core::{Arrival, CoreHandle, CoreInbox, Left, StreamEvent};
use deepinfer_gateway::openai::{Api, ApiOptions, ModelInfo, router};
use deepinfer_protocol::generate::{FinishReason, Logprob, Token};
use deepinfer_serving::gateway::NewRequest;
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::common::shipped;

/// Longer than any machine needs; only a test that fails waits for it.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// One line of a script.
#[derive(Clone)]
pub enum Play {
    Say(StreamEvent),
    /// Wait until the test says go.
    Hold(Arc<Notify>),
    /// Drop the channel without an end: the driver died.
    Die,
}

pub struct Server {
    pub address: SocketAddr,
    pub seen: Arc<Mutex<Vec<NewRequest>>>,
    pub left: Arc<Mutex<Vec<Left>>>,
    pub api: Arc<Api>,
}

pub fn model() -> ModelInfo {
    let tokenizer = shipped();
    ModelInfo {
        name: "tiny".to_owned(),
        aliases: vec!["other/name".to_owned()],
        context_limit: 4096,
        vocab_size: tokenizer.vocab_size() as u32,
        stop_tokens: vec![1],
        tokenizer,
        default_thinking: false,
        created: 1_700_000_000,
    }
}

/// A server whose core says `script(request)` to each request.
pub async fn serve(script: impl Fn(&NewRequest) -> Vec<StreamEvent> + Send + Sync + 'static) -> Server {
    let play = move |request: &NewRequest| script(request).into_iter().map(Play::Say).collect();
    serve_with(model(), ApiOptions::default(), play).await
}

pub async fn serve_with(
    model: ModelInfo,
    options: ApiOptions,
    script: impl Fn(&NewRequest) -> Vec<Play> + Send + Sync + 'static,
) -> Server {
    let (core, inbox) = CoreHandle::pair(7);
    inbox.set_ready(true);
    let api = Arc::new(Api::new(model, core, options));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = router(Arc::clone(&api));
    tokio::spawn(async move { axum::serve(listener, app).await });
    let server = Server { address, seen: Arc::default(), left: Arc::default(), api };
    tokio::spawn(act(inbox, script, Arc::clone(&server.seen), Arc::clone(&server.left)));
    server
}

async fn act(
    mut inbox: CoreInbox,
    script: impl Fn(&NewRequest) -> Vec<Play> + Send + Sync + 'static,
    seen: Arc<Mutex<Vec<NewRequest>>>,
    left: Arc<Mutex<Vec<Left>>>,
) {
    loop {
        match inbox.arrival().await {
            Arrival::Request(submitted) => {
                let lines = script(&submitted.request);
                seen.lock().unwrap().push(submitted.request.clone());
                tokio::spawn(async move {
                    for line in lines {
                        match line {
                            Play::Say(event) => {
                                if submitted.events.send(event).await.is_err() {
                                    return;
                                }
                            }
                            Play::Hold(go) => go.notified().await,
                            Play::Die => return,
                        }
                    }
                    submitted.events.closed().await;
                });
            }
            Arrival::Left => inbox.take_left(&mut left.lock().unwrap()),
            Arrival::Closed => return,
        }
    }
}

/// A response that was read to its end.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: HeaderMap,
    pub text: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The `error` object of an answer with this status.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text);
        assert!(self.text.len() < 4096, "an error of {} bytes", self.text.len());
        let error = self.json()["error"].clone();
        for key in ["message", "type", "code"] {
            assert!(error[key].is_string(), "{key} in {error}");
        }
        error
    }

    /// The name of the field that a 400 is about.
    pub fn refused(&self) -> String {
        let error = self.error(400);
        let param = error["param"].as_str().unwrap_or_default().to_owned();
        assert!(error["message"].as_str().unwrap().contains(&param), "{error}");
        param
    }
}

impl Server {
    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        self.send(Method::POST, path, &[("content-type", "application/json")], body.to_string()).await
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.send(Method::GET, path, &[], String::new()).await
    }

    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<bytes::Bytes>,
    ) -> Reply {
        let exchange = async {
            let stream = TcpStream::connect(self.address).await.unwrap();
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
            tokio::spawn(connection);
            let mut request = Request::builder().method(method).uri(path).header("host", "test");
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let response = sender.send_request(request.body(Full::new(body.into())).unwrap()).await.unwrap();
            let (parts, body) = response.into_parts();
            let text = body.collect().await.unwrap().to_bytes();
            let text = String::from_utf8(text.to_vec()).expect("every payload is valid UTF-8");
            Reply { status: parts.status.as_u16(), headers: parts.headers, text }
        };
        tokio::time::timeout(PATIENCE, exchange).await.expect("an answer in time")
    }

    /// The same chat streamed and whole; what both say, which is the same.
    pub async fn chat(&self, body: &Value) -> Said {
        self.both("/v1/chat/completions", body).await
    }

    /// As [`Self::chat`], of a completion.
    pub async fn complete(&self, body: &Value) -> Said {
        self.both("/v1/completions", body).await
    }

    async fn both(&self, path: &str, body: &Value) -> Said {
        let whole = self.post(path, body).await;
        assert_eq!(whole.status, 200, "{}", whole.text);
        let whole = Said::whole(&whole.json());
        let mut body = body.clone();
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        let streamed = self.post(path, &body).await;
        assert_eq!(streamed.status, 200, "{}", streamed.text);
        let streamed = Said::streamed(&Frames::read(&streamed.text));
        assert_eq!(streamed, whole, "streamed and whole answers say the same");
        whole
    }
}

/// The frames of a stream.
#[derive(Debug)]
pub struct Frames {
    pub chunks: Vec<Value>,
    pub comments: usize,
    pub done: bool,
}

impl Frames {
    pub fn read(text: &str) -> Self {
        let mut frames = Self { chunks: Vec::new(), comments: 0, done: false };
        assert!(text.ends_with("\n\n"), "the last event is complete: {text:?}");
        for event in text.strip_suffix("\n\n").unwrap().split("\n\n") {
            assert!(!frames.done, "nothing follows the end mark");
            if event.starts_with(':') {
                frames.comments += 1;
            } else if event == "data: [DONE]" {
                frames.done = true;
            } else {
                let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("a frame {event:?}"));
                frames.chunks.push(serde_json::from_str(data).unwrap());
            }
        }
        frames
    }
}

/// What an answer says, from a stream or a whole object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    pub content: String,
    pub reasoning: String,
    /// Id (without the request's part), name and arguments.
    pub calls: Vec<(String, String, String)>,
    pub finish: String,
    pub usage: Value,
    /// Of the content and of the reasoning.
    pub logprobs: [Vec<Value>; 2],
    pub ids: Vec<Value>,
}

impl Said {
    pub fn streamed(frames: &Frames) -> Self {
        let mut said = Self::default();
        assert!(frames.done, "the end mark is there");
        let mut finishes = 0;
        for (index, chunk) in frames.chunks.iter().enumerate() {
            assert!(chunk["error"].is_null(), "{chunk}");
            if index + 1 == frames.chunks.len() {
                assert_eq!(chunk["choices"], json!([]), "the usage chunk is the last");
                said.usage = chunk["usage"].clone();
                continue;
            }
            assert_eq!(chunk["usage"], Value::Null);
            let choice = &chunk["choices"][0];
            assert_eq!(finishes, 0, "nothing follows the finish reason");
            if let Some(finish) = choice["finish_reason"].as_str() {
                finishes += 1;
                said.finish = finish.to_owned();
            }
            said.add(choice, &choice["delta"]);
        }
        assert_eq!(finishes, 1, "one finish reason");
        said
    }

    pub fn whole(answer: &Value) -> Self {
        let choice = &answer["choices"][0];
        let finish = choice["finish_reason"].as_str().unwrap().to_owned();
        let mut said = Self { finish, usage: answer["usage"].clone(), ..Self::default() };
        said.add(choice, &choice["message"]);
        said
    }

    fn add(&mut self, choice: &Value, message: &Value) {
        self.content.push_str(choice["text"].as_str().or(message["content"].as_str()).unwrap_or_default());
        self.reasoning.push_str(message["reasoning_content"].as_str().unwrap_or_default());
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            let function = &call["function"];
            if let Some(id) = call["id"].as_str() {
                assert_eq!(call["type"], "function");
                let id = id[..id.len() - 32].to_owned();
                self.calls.push((id, function["name"].as_str().unwrap().to_owned(), String::new()));
            }
            if let Some(index) = call["index"].as_u64() {
                assert_eq!(index as usize + 1, self.calls.len());
            }
            let arguments = &mut self.calls.last_mut().unwrap().2;
            arguments.push_str(function["arguments"].as_str().unwrap());
        }
        for (list, name) in self.logprobs.iter_mut().zip(["content", "reasoning_content"]) {
            list.extend(choice["logprobs"][name].as_array().into_iter().flatten().cloned());
        }
        if let Some(tokens) = choice["logprobs"]["tokens"].as_array() {
            for (index, token) in tokens.iter().enumerate() {
                let at = |name: &str| choice["logprobs"][name][index].clone();
                self.logprobs[0].push(json!([
                    token,
                    at("token_logprobs"),
                    at("top_logprobs"),
                    at("text_offset")
                ]));
            }
        }
        self.ids.extend(choice["token_ids"].as_array().into_iter().flatten().cloned());
    }

    pub fn arguments(&self) -> Vec<Value> {
        self.calls.iter().map(|(_, _, text)| serde_json::from_str(text).unwrap()).collect()
    }
}

/// Ids of a text in which `⟨...⟩` holds a special token.
pub fn ids(marked: &str) -> Vec<u32> {
    let tokenizer = shipped();
    let mut ids = Vec::new();
    for (index, part) in marked.split('⟨').enumerate() {
        let text = match part.split_once('⟩') {
            Some((special, text)) if index > 0 => {
                ids.push(tokenizer.special_id(special).unwrap_or_else(|| panic!("no token {special}")));
                text
            }
            _ => part,
        };
        ids.extend(tokenizer.encode_text(text).unwrap());
    }
    ids
}

/// The ids of a text, one for each byte.
pub fn byte_ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let id_of = |byte: u8| {
        let mut ids = 0..tokenizer.vocab_size() as u32;
        ids.find(|id| !tokenizer.is_special(*id) && tokenizer.token_bytes(*id) == [byte]).unwrap()
    };
    text.bytes().map(id_of).collect()
}

pub fn token(id: u32) -> Token {
    Token { id, logprob: None }
}

/// A token with its log-probability and alternatives.
pub fn likely(id: u32, logprob: f32, top: &[(u32, f32)]) -> Token {
    Token { id, logprob: Some(Box::new(Logprob { logprob, top: top.to_vec() })) }
}

pub fn tokens(ids: &[u32]) -> StreamEvent {
    StreamEvent::Tokens { tokens: ids.iter().copied().map(token).collect(), finish: None }
}

pub fn last(ids: &[u32], finish: FinishReason) -> StreamEvent {
    StreamEvent::Tokens { tokens: ids.iter().copied().map(token).collect(), finish: Some(finish) }
}

/// The ids one step at a time, ended by the model: the end-of-sentence token is the last.
pub fn answer(ids: &[u32]) -> Vec<StreamEvent> {
    let mut events = vec![StreamEvent::Started { cached_tokens: 0 }];
    events.extend(ids.iter().map(|id| tokens(&[*id])));
    events.push(last(&[1], FinishReason::Stop));
    events
}

/// The same, cut by the token limit at the last id.
pub fn cut(ids: &[u32]) -> Vec<StreamEvent> {
    let (end, before) = ids.split_last().unwrap();
    let mut events = vec![StreamEvent::Started { cached_tokens: 0 }];
    events.extend(before.iter().map(|id| tokens(&[*id])));
    events.push(last(&[*end], FinishReason::Length));
    events
}

pub fn hello() -> Value {
    json!({ "model": "tiny", "messages": [{ "role": "user", "content": "Hi" }] })
}

/// [`hello`] with more fields.
pub fn hello_with(more: Value) -> Value {
    let mut body = hello();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}
