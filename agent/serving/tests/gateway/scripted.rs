//! A gateway whose agents are played by the test: p0 leads prefill, d0 leads decode, p1 and d1 are there too.

use std::sync::Arc;

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::{FleetMember, FleetView, Leader};
use deepinfer_protocol::generate::{FinishReason, GenerateSpec, Token, TokenEvent};
use deepinfer_protocol::message::{Assignment, Failure, Message, Refusal};
use deepinfer_protocol::{AgentId, Attempt, Epoch, Generation, Rank, RankId, RequestId, Span, Time};
use deepinfer_serving::gateway::{Gateway, GatewayAction, GatewayEvent, GatewayOptions, NewRequest};

pub struct Scripted {
    pub gateway: Gateway,
    pub now: Time,
    decisions: u64,
}

/// A request of tenant `a` for ten tokens.
pub fn request(id: u128, prompt: usize) -> NewRequest {
    NewRequest {
        id: RequestId(id),
        tenant: "a".into(),
        prompt: (0..prompt as u32).collect(),
        spec: GenerateSpec {
            temperature: 0.0,
            top_p: 1.0,
            seed: 0,
            max_tokens: 10,
            min_tokens: 0,
            stop_tokens: vec![1],
            logprobs: None,
        },
        salt: [0; 32],
        reuse: true,
        first_token_deadline: Span::secs(600),
    }
}

pub fn view(generation: u64) -> FleetView {
    let member = |name: &str, role, ranks| FleetMember {
        name: name.into(),
        role,
        supernode: None,
        index: 0,
        first_rank: 0,
        ranks,
        data: ([127, 0, 0, 1], 1).into(),
        control: ([127, 0, 0, 1], 2).into(),
        serving: true,
        kv_epoch: "kv".to_owned(),
    };
    let leader = |name: &str| Some(Leader { agent: name.into(), epoch: Epoch(1) });
    FleetView {
        generation: Generation(generation),
        cluster: "test".to_owned(),
        members: vec![
            member("p0", Role::Prefill, 1),
            member("p1", Role::Prefill, 1),
            member("d0", Role::Decode, 2),
            member("d1", Role::Decode, 2),
        ],
        prefill_leader: leader("p0"),
        decode_leader: leader("d0"),
        closed: false,
        rebuilding: Vec::new(),
    }
}

impl Scripted {
    /// Connected to everybody.
    pub fn new(options: GatewayOptions) -> Self {
        let mut test = Self::bare(options);
        test.tell(GatewayEvent::Fleet(Arc::new(view(1))));
        test.connect();
        test
    }

    /// Knows nobody yet.
    pub fn bare(options: GatewayOptions) -> Self {
        Self { gateway: Gateway::new(options), now: Time(0) + Span::secs(1), decisions: 0 }
    }

    pub fn connect(&mut self) {
        for name in ["p0", "p1", "d0", "d1"] {
            self.tell(GatewayEvent::PeerUp(name.into()));
        }
    }

    pub fn tell(&mut self, event: GatewayEvent) -> Vec<GatewayAction> {
        let mut out = Vec::new();
        self.gateway.on_event(self.now, event, &mut out);
        self.gateway.check().expect("the counts are right");
        out
    }

    pub fn arrive(&mut self, new: NewRequest) -> Vec<GatewayAction> {
        self.tell(GatewayEvent::Arrived(new))
    }

    pub fn hear(&mut self, from: &str, message: Message) -> Vec<GatewayAction> {
        self.tell(GatewayEvent::Message { from: from.into(), message })
    }

    /// Lets time pass, then ticks.
    pub fn after(&mut self, span: Span) -> Vec<GatewayAction> {
        self.now = self.now + span;
        self.tell(GatewayEvent::Tick)
    }

    pub fn lose(&mut self, agent: &str) -> Vec<GatewayAction> {
        self.tell(GatewayEvent::PeerLost(agent.into()))
    }

    pub fn decision(&mut self) -> Assignment {
        self.decisions += 1;
        Assignment { epoch: Epoch(1), number: self.decisions }
    }

    pub fn assign(&mut self, id: u128, attempt: u32, worker: &str) -> Vec<GatewayAction> {
        let assignment = self.decision();
        let (request, attempt) = (RequestId(id), Attempt(attempt));
        self.hear("p0", Message::PrefillAssigned { request, attempt, assignment, worker: worker.into() })
    }

    pub fn progress(&mut self, from: &str, id: u128, attempt: u32, last_chunk: bool) -> Vec<GatewayAction> {
        let (request, attempt) = (RequestId(id), Attempt(attempt));
        self.hear(from, Message::PrefillProgress { request, attempt, cached_tokens: 0, last_chunk })
    }

    pub fn tokens(
        &mut self,
        from: &str,
        id: u128,
        attempt: u32,
        index: u32,
        ids: &[u32],
    ) -> Vec<GatewayAction> {
        self.event(from, id, attempt, index, ids, None)
    }

    pub fn last(&mut self, from: &str, id: u128, attempt: u32, index: u32, token: u32) -> Vec<GatewayAction> {
        self.event(from, id, attempt, index, &[token], Some(FinishReason::Stop))
    }

    fn event(
        &mut self,
        from: &str,
        id: u128,
        attempt: u32,
        index: u32,
        ids: &[u32],
        finish: Option<FinishReason>,
    ) -> Vec<GatewayAction> {
        let tokens = ids.iter().map(|id| Token { id: *id, logprob: None }).collect();
        let event = TokenEvent { request: RequestId(id), attempt: Attempt(attempt), index, tokens, finish };
        self.hear(from, Message::Tokens(vec![event]))
    }

    pub fn done(&mut self, from: &str, id: u128, attempt: u32) -> Vec<GatewayAction> {
        let (request, attempt) = (RequestId(id), Attempt(attempt));
        let kv_epoch = "kv".to_owned();
        self.hear(from, Message::PrefillDone { request, attempt, parked_bytes: 1, kv_epoch })
    }

    pub fn placed(&mut self, id: u128, attempt: u32, agent: &str, rank: u16) -> Vec<GatewayAction> {
        let assignment = self.decision();
        let (request, attempt) = (RequestId(id), Attempt(attempt));
        let rank = RankId { agent: agent.into(), rank: Rank(rank) };
        self.hear("d0", Message::Placed { request, attempt, assignment, rank })
    }

    pub fn running(&mut self, from: &str, id: u128, attempt: u32) -> Vec<GatewayAction> {
        let (request, attempt) = (RequestId(id), Attempt(attempt));
        self.hear(from, Message::DecodeRunning { request, attempt })
    }

    pub fn refuse(&mut self, from: &str, id: u128, attempt: u32, reason: Refusal) -> Vec<GatewayAction> {
        let (request, attempt) = (RequestId(id), Attempt(attempt));
        self.hear(from, Message::Refuse { request, attempt, reason, retry_after: Span::secs(2) })
    }

    pub fn fail(&mut self, from: &str, id: u128, attempt: u32, reason: Failure) -> Vec<GatewayAction> {
        let (request, attempt) = (RequestId(id), Attempt(attempt));
        self.hear(from, Message::Failed { request, attempt, reason })
    }

    /// Brings a request to `worker`, which runs its prompt and draws `first`.
    pub fn prefill(
        &mut self,
        id: u128,
        attempt: u32,
        index: u32,
        first: u32,
        worker: &str,
    ) -> Vec<GatewayAction> {
        let mut out = self.assign(id, attempt, worker);
        out.extend(self.progress(worker, id, attempt, true));
        out.extend(self.tokens(worker, id, attempt, index, &[first]));
        out.extend(self.done(worker, id, attempt));
        out
    }

    /// Brings a parked request to run on a rank of `agent`.
    pub fn decode(&mut self, id: u128, attempt: u32, agent: &str) -> Vec<GatewayAction> {
        let mut out = self.placed(id, attempt, agent, 0);
        out.extend(self.running(agent, id, attempt));
        out
    }

    /// A request that runs on d1 after p1, with token 50 sent.
    pub fn run(&mut self, id: u128) {
        self.arrive(request(id, 10));
        self.prefill(id, 0, 0, 50, "p1");
        self.decode(id, 0, "d1");
        assert_eq!(self.state(), "decode_running");
    }

    /// The state of the only request.
    pub fn state(&self) -> &'static str {
        let states = self.gateway.stats().by_state;
        assert_eq!(states.len(), 1, "{states:?}");
        states.into_keys().next().expect("one")
    }

    pub fn sent_cancel(&self, out: &[GatewayAction], to: &str, id: u128, attempt: u32) -> bool {
        let message = Message::Cancel { request: RequestId(id), attempt: Attempt(attempt) };
        out.contains(&GatewayAction::Send { to: AgentId::from(to), message })
    }

    pub fn sent_enqueue(&self, out: &[GatewayAction], id: u128) -> bool {
        out.iter().any(|a| {
            matches!(a, GatewayAction::Send { message: Message::Enqueue(e), .. } if e.request == RequestId(id))
        })
    }
}

/// Tokens that reached the client.
pub fn forwarded(out: &[GatewayAction]) -> Vec<u32> {
    let tokens = out.iter().filter_map(|a| match a {
        GatewayAction::Tokens { tokens, .. } => Some(tokens.iter().map(|t| t.id)),
        _ => None,
    });
    tokens.flatten().collect()
}

/// Messages that were sent, with their receivers.
pub fn sent(out: &[GatewayAction]) -> Vec<(&str, &Message)> {
    let sent = out.iter().filter_map(|a| match a {
        GatewayAction::Send { to, message } => Some((to.as_str(), message)),
        _ => None,
    });
    sent.collect()
}
