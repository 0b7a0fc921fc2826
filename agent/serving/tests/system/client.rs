//! What clients ask and what they must get: the stream of one process without faults, and exactly one end.

use std::collections::BTreeMap;

use deepinfer_protocol::generate::{FinishReason, GenerateSpec};
use deepinfer_protocol::{RequestId, Span};
use deepinfer_serving::gateway::{EndedEarly, GatewayAction, NewRequest};
use deepinfer_serving::node::Sample;

use crate::dice::Dice;
use crate::engine::{STOP, draw, fold};

/// Longest sequence of the fleets in these tests.
pub const CONTEXT_LIMIT: u32 = 1_000;

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    /// With a finish reason.
    Finished(FinishReason),
    /// Without.
    Early(EndedEarly),
    /// The edge had enough and said so.
    Satisfied,
    /// The gateway died.
    Lost,
}

/// One request, from the client's side.
pub struct Asked {
    pub expected: Vec<u32>,
    pub finish: FinishReason,
    pub got: Vec<u32>,
    pub ending: Option<Ending>,
    pub started: u32,
    /// The client stops after so many tokens, without a word or satisfied.
    pub leaves_after: Option<(usize, bool)>,
}

/// All requests.
#[derive(Default)]
pub struct Clients {
    pub asked: BTreeMap<RequestId, Asked>,
}

/// A request with a random prompt, some of which share their beginning.
pub fn random_request(dice: &mut Dice, id: RequestId) -> NewRequest {
    let shared = [0, 128, 300][dice.below(3)];
    let longest = [5, 40, 400][dice.below(3)];
    let own = 1 + dice.below(longest);
    let most = [3, 40, 200][dice.below(3)];
    let mut prompt: Vec<u32> = (0..shared as u32).map(|i| i % 50).collect();
    prompt.extend((0..own).map(|_| dice.below(50) as u32));
    let stop_tokens = if dice.one_in(2) { vec![STOP] } else { Vec::new() };
    NewRequest {
        id,
        tenant: ["a", "b"][dice.below(2)].into(),
        prompt: prompt.into(),
        spec: GenerateSpec {
            temperature: 1.0,
            top_p: 1.0,
            seed: dice.below(1000) as u64,
            max_tokens: 1 + dice.below(most) as u32,
            min_tokens: dice.below(4) as u32,
            stop_tokens,
            logprobs: None,
        },
        salt: [0; 32],
        reuse: !dice.one_in(4),
        first_token_deadline: Span::secs(600),
    }
}

/// The stream of one process.
pub fn expected(new: &NewRequest) -> (Vec<u32>, FinishReason) {
    let mut hash = new.prompt.iter().fold(0, |hash, token| fold(hash, *token));
    let mut tokens = Vec::new();
    loop {
        let early = (tokens.len() as u32) < new.spec.min_tokens;
        let sample = Sample {
            temperature: new.spec.temperature,
            top_p: new.spec.top_p,
            seed: new.spec.seed,
            position: (new.prompt.len() + tokens.len()) as u64,
            logprobs: None,
            forbidden: if early { new.spec.stop_tokens.clone() } else { Vec::new() },
        };
        let token = draw(hash, &sample);
        tokens.push(token);
        hash = fold(hash, token);
        if new.spec.stop_tokens.contains(&token) {
            return (tokens, FinishReason::Stop);
        }
        let full = new.prompt.len() + tokens.len() >= CONTEXT_LIMIT as usize;
        if tokens.len() as u32 >= new.spec.max_tokens || full {
            return (tokens, FinishReason::Length);
        }
    }
}

impl Clients {
    /// A client asks; it may leave after some tokens.
    pub fn ask(&mut self, new: &NewRequest, leaves_after: Option<(usize, bool)>) {
        let (expected, finish) = expected(new);
        let asked = Asked { expected, finish, got: Vec::new(), ending: None, started: 0, leaves_after };
        assert!(self.asked.insert(new.id, asked).is_none(), "ids are new");
    }

    /// A word of the gateway to a client. Checks order, content and that nothing follows an end.
    pub fn hear(&mut self, action: &GatewayAction) {
        match action {
            GatewayAction::Send { .. } => {}
            GatewayAction::Started { request, .. } => {
                let asked = self.open(request, action);
                asked.started += 1;
                assert_eq!(asked.started, 1, "{request} was started twice");
            }
            GatewayAction::Tokens { request, tokens, finish } => {
                let asked = self.open(request, action);
                assert!(!tokens.is_empty(), "{request}: an event without tokens");
                asked.got.extend(tokens.iter().map(|t| t.id));
                assert!(asked.expected.starts_with(&asked.got), "{request}: the stream differs");
                if let Some(finish) = finish {
                    assert_eq!(asked.got.len(), asked.expected.len(), "{request}: it ended early");
                    assert_eq!(*finish, asked.finish, "{request}");
                    asked.ending = Some(Ending::Finished(*finish));
                }
            }
            GatewayAction::Ended { request, why } => {
                let asked = self.open(request, action);
                asked.ending = Some(Ending::Early(why.clone()));
            }
        }
    }

    /// The client of a request that has heard enough: whether it is satisfied or just leaves.
    pub fn leaver(&mut self, request: RequestId) -> Option<bool> {
        let asked = self.asked.get_mut(&request)?;
        let (after, satisfied) = asked.leaves_after?;
        if asked.ending.is_some() || asked.got.len() < after {
            return None;
        }
        asked.leaves_after = None;
        Some(satisfied)
    }

    fn open(&mut self, request: &RequestId, action: &GatewayAction) -> &mut Asked {
        let asked = self.asked.get_mut(request).expect("only asked requests are answered");
        assert!(asked.ending.is_none(), "{request} ended as {:?}, then {action:?}", asked.ending);
        asked
    }

    /// Endings by kind.
    pub fn endings(&self) -> BTreeMap<&'static str, usize> {
        let mut endings = BTreeMap::new();
        for asked in self.asked.values() {
            let kind = match &asked.ending {
                None => "open",
                Some(Ending::Finished(_)) => "finished",
                Some(Ending::Satisfied) => "satisfied",
                Some(Ending::Lost) => "lost",
                Some(Ending::Early(EndedEarly::Cancelled)) => "cancelled",
                Some(Ending::Early(EndedEarly::Failed { .. })) => "failed",
                Some(Ending::Early(_)) => "refused",
            };
            *endings.entry(kind).or_default() += 1;
        }
        endings
    }
}

/// Ids are made as gateways make them: the process in the high half, a count in the low.
pub fn request_id(gateway: usize, count: u64) -> RequestId {
    RequestId((gateway as u128 + 1) << 64 | u128::from(count))
}
