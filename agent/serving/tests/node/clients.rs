//! Requests as their gateway sees them: a gateway of a few lines, which places, retries and resumes by itself unless a
//! test does that.

use std::sync::Arc;

use deepinfer_protocol::generate::{FinishReason, GenerateSpec, TokenEvent};
use deepinfer_protocol::message::{Assignment, DecodeWork, Failure, Message, PrefillWork};
use deepinfer_protocol::{AgentId, Attempt, Epoch, Rank, RequestId};

use crate::engine::reference;
use crate::rig::Rig;
use crate::setup::{gateway, worker_name};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Prefilling,
    /// Refused; asked again at a later round.
    Again,
    Placed,
    Done,
    Cancelled,
}

/// A request as the gateway sees it.
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub spec: GenerateSpec,
    pub reuse: bool,
    pub salt: u8,
    pub attempt: u32,
    pub output: Vec<u32>,
    pub finish: Option<FinishReason>,
    pub phase: Phase,
    pub at: AgentId,
    pub holder: Option<AgentId>,
    pub preemptions: u32,
    pub failures: Vec<Failure>,
    pub cached: Option<u32>,
}

impl Rig {
    /// Sends a request's prompt.
    pub fn submit(&mut self, id: u128, prompt: Vec<u32>, spec: GenerateSpec) -> RequestId {
        let request = Request {
            prompt,
            spec,
            reuse: true,
            salt: 1,
            attempt: 0,
            output: Vec::new(),
            finish: None,
            phase: Phase::Prefilling,
            at: worker_name(),
            holder: None,
            preemptions: 0,
            failures: Vec::new(),
            cached: None,
        };
        self.requests.insert(RequestId(id), request);
        self.place(RequestId(id));
        RequestId(id)
    }

    pub fn assignment(&mut self) -> Assignment {
        self.next_assignment += 1;
        Assignment { epoch: Epoch(1), number: self.next_assignment }
    }

    /// Sends the request to where it goes next.
    pub fn place(&mut self, id: RequestId) {
        let assignment = self.assignment();
        let ranks: Vec<AgentId> = self.nodes.keys().filter(|n| **n != worker_name()).cloned().collect();
        let chosen = ranks.get(self.dice.roll(ranks.len())).cloned();
        let request = self.requests.get_mut(&id).expect("a request of the test");
        let tokens = [&request.prompt[..], &request.output].concat();
        let (attempt, spec) = (Attempt(request.attempt), request.spec.clone());
        let prompt_tokens = request.prompt.len() as u32;
        let message = match &request.holder {
            None => {
                (request.at, request.phase) = (worker_name(), Phase::Prefilling);
                let (salt, reuse) = ([request.salt; 32], request.reuse);
                Message::Prefill(PrefillWork {
                    request: id,
                    attempt,
                    assignment,
                    spec,
                    tokens,
                    prompt_tokens,
                    salt,
                    reuse,
                })
            }
            Some(holder) => {
                (request.at, request.phase) = (chosen.expect("a rank"), Phase::Placed);
                Message::Decode(DecodeWork {
                    request: id,
                    attempt,
                    assignment,
                    rank: Rank(0),
                    spec,
                    tokens,
                    prompt_tokens,
                    holder: holder.clone(),
                    preemptions: request.preemptions,
                })
            }
        };
        let to = request.at.clone();
        self.post(&gateway(), &to, message, Arc::from([]));
    }

    pub fn cancel(&mut self, id: RequestId) {
        let request = self.requests.get_mut(&id).expect("a request of the test");
        let attempt = Attempt(request.attempt);
        request.phase = Phase::Cancelled;
        self.cancel_everywhere(id, attempt);
    }

    fn cancel_everywhere(&mut self, request: RequestId, attempt: Attempt) {
        for name in self.nodes.keys().cloned().collect::<Vec<_>>() {
            self.post(&gateway(), &name, Message::Cancel { request, attempt }, Arc::from([]));
        }
    }

    /// What the gateway was told about a request, without tokens.
    pub fn heard_of(&self, id: RequestId) -> Vec<&Message> {
        let about = |m: &&Message| m.subject().is_some_and(|(request, _)| request == id);
        self.heard.iter().map(|(_, m)| m).filter(about).collect()
    }

    pub fn on_gateway_message(&mut self, from: &AgentId, message: Message) {
        self.heard.push((from.clone(), message.clone()));
        if !self.auto && !matches!(message, Message::Tokens(_) | Message::PrefillProgress { .. }) {
            return;
        }
        if let Message::Tokens(events) = message {
            for event in events {
                self.on_tokens(event);
            }
            return;
        }
        let Some((id, attempt)) = message.subject() else { return };
        let Some(request) = self.requests.get_mut(&id) else { return };
        if attempt != Attempt(request.attempt) || matches!(request.phase, Phase::Done | Phase::Cancelled) {
            return;
        }
        let length = (request.prompt.len() + request.output.len()) as u32;
        match message {
            Message::Refuse { reason, .. } if *from == request.at && request.phase != Phase::Again => {
                request.phase = Phase::Again;
                self.refusals.push(reason);
            }
            Message::PrefillProgress { cached_tokens, .. } => {
                assert!(cached_tokens <= request.prompt.len() as u32, "more is cached than the prompt has");
                request.cached.get_or_insert(cached_tokens);
            }
            Message::PrefillDone { .. } if request.phase == Phase::Prefilling => {
                request.holder = Some(from.clone());
                self.place(id);
            }
            Message::Preempted { tokens, .. } if *from == request.at && request.phase == Phase::Placed => {
                assert_eq!(tokens, length, "every token of a preempted sequence was sent before");
                request.preemptions += 1;
                request.holder = Some(from.clone());
                self.place(id);
            }
            Message::Failed { reason, .. } => {
                request.failures.push(reason);
                request.attempt += 1;
                request.holder = None;
                self.cancel_everywhere(id, attempt);
                self.place(id);
            }
            _ => {}
        }
    }

    fn on_tokens(&mut self, event: TokenEvent) {
        let request = self.requests.get_mut(&event.request).expect("tokens of a request of the test");
        if event.attempt != Attempt(request.attempt) || request.phase == Phase::Cancelled {
            return;
        }
        let ids: Vec<u32> = event.tokens.iter().map(|t| t.id).collect();
        let at = event.index as usize;
        assert!(at <= request.output.len(), "a token is missing: {} after {}", at, request.output.len());
        for (i, id) in ids.into_iter().enumerate() {
            match request.output.get(at + i) {
                Some(sent) => assert_eq!(*sent, id, "a repeated token differs"),
                None => request.output.push(id),
            }
        }
        if event.finish.is_some() && request.phase != Phase::Done {
            (request.finish, request.phase) = (event.finish, Phase::Done);
            let (id, attempt) = (event.request, event.attempt);
            if self.faults.duplicates > 0 {
                // A repeated refusal may have sent it to two ranks.
                self.cancel_everywhere(id, attempt);
            }
        }
    }

    pub fn all_ended(&self) -> bool {
        self.requests.values().all(|r| matches!(r.phase, Phase::Done | Phase::Cancelled))
    }

    /// Every finished request has the tokens that it would have had alone.
    pub fn assert_outputs(&self) {
        for (id, request) in &self.requests {
            let (tokens, finish) = reference(&request.prompt, &request.spec, self.limit);
            match request.phase {
                Phase::Done => {
                    assert_eq!(request.output, tokens, "request {id}");
                    assert_eq!(request.finish, Some(finish), "request {id}");
                }
                _ => assert!(tokens.starts_with(&request.output), "request {id}"),
            }
        }
    }
}
