//! A gateway without HTTP: the gateway's machine on a transport.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::generate::{FinishReason, GenerateSpec, Token};
use deepinfer_protocol::message::Peer;
use deepinfer_protocol::{RequestId, Span, Time};
use deepinfer_serving::gateway::{
    EndedEarly, Gateway, GatewayAction, GatewayEvent, GatewayOptions, NewRequest,
};
use deepinfer_transport::{PeerEvent, Transport, TransportOptions};
use tokio::sync::{mpsc, watch};

use crate::fleet::{DEADLINE, Fleet};

/// What became of a request.
#[derive(Clone, Debug, Default)]
pub struct Record {
    pub cached_tokens: Option<u32>,
    pub tokens: Vec<Token>,
    pub finish: Option<FinishReason>,
    pub ended: Option<EndedEarly>,
}

impl Record {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    pub fn over(&self) -> bool {
        self.finish.is_some() || self.ended.is_some()
    }
}

pub struct Edge {
    pub machine: Gateway,
    pub records: BTreeMap<RequestId, Record>,
    transport: Transport,
    events: mpsc::Receiver<PeerEvent>,
    fleet: watch::Receiver<Arc<FleetView>>,
    begun: Instant,
    next: u128,
}

impl Edge {
    pub fn new(fleet: &Fleet) -> Self {
        let options = TransportOptions {
            missed: 40,
            process: 1,
            ..TransportOptions::new("edge".into(), Peer::Gateway, fleet.key.clone())
        };
        let (transport, events) = Transport::start(options, None);
        let mut edge = Self {
            machine: Gateway::new(GatewayOptions { seed: 3, ..GatewayOptions::default() }),
            records: BTreeMap::new(),
            transport,
            events,
            fleet: fleet.watch(),
            begun: Instant::now(),
            next: 1 << 64,
        };
        edge.follow();
        edge
    }

    fn now(&self) -> Time {
        Time(self.begun.elapsed().as_nanos() as u64)
    }

    fn follow(&mut self) {
        let view = self.fleet.borrow_and_update().clone();
        let peers: Vec<_> = view.members.iter().map(|m| (m.name.clone(), m.data)).collect();
        self.transport.set_peers(&peers);
        self.tell(GatewayEvent::Fleet(view));
    }

    pub fn submit(&mut self, prompt: &[u32], spec: GenerateSpec) -> RequestId {
        self.next += 1;
        let id = RequestId(self.next);
        self.records.insert(id, Record::default());
        self.tell(GatewayEvent::Arrived(NewRequest {
            id,
            tenant: "test".into(),
            prompt: prompt.into(),
            spec,
            salt: [1; 32],
            reuse: true,
            first_token_deadline: Span::secs(600),
        }));
        id
    }

    pub fn cancel(&mut self, id: RequestId) {
        self.tell(GatewayEvent::ClientGone(id));
    }

    fn tell(&mut self, event: GatewayEvent) {
        let now = self.now();
        let mut out = Vec::new();
        self.machine.on_event(now, event, &mut out);
        for action in out {
            match action {
                GatewayAction::Send { to, message } => {
                    self.transport.send(&to, &message, Arc::from([]));
                }
                GatewayAction::Started { request, cached_tokens } => {
                    self.record(request).cached_tokens = Some(cached_tokens);
                }
                GatewayAction::Tokens { request, tokens, finish } => {
                    let record = self.record(request);
                    assert!(!record.over(), "tokens after the end");
                    record.tokens.extend(tokens);
                    record.finish = finish;
                }
                GatewayAction::Ended { request, why } => {
                    let record = self.record(request);
                    assert!(!record.over(), "a second end");
                    record.ended = Some(why);
                }
            }
        }
    }

    fn record(&mut self, id: RequestId) -> &mut Record {
        self.records.get_mut(&id).expect("a request of this edge")
    }

    /// Lets things happen until a condition holds.
    pub async fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            assert!(begun.elapsed() < DEADLINE, "never: {what}; {:?}", self.records);
            tokio::select! {
                event = self.events.recv() => match event.expect("a transport") {
                    PeerEvent::Up { peer, .. } => self.tell(GatewayEvent::PeerUp(peer)),
                    PeerEvent::Down { peer } => self.tell(GatewayEvent::PeerLost(peer)),
                    PeerEvent::Frame { from, message, .. } => {
                        self.tell(GatewayEvent::Message { from, message });
                    }
                },
                _ = self.fleet.changed() => self.follow(),
                () = tokio::time::sleep(Duration::from_millis(20)) => self.tell(GatewayEvent::Tick),
            }
        }
    }

    /// Waits for requests to end.
    pub async fn finish(&mut self, ids: &[RequestId]) {
        self.until("requests end", |edge| ids.iter().all(|id| edge.records[id].over())).await;
    }

    /// Waits until a request has so many tokens.
    pub async fn reach(&mut self, id: RequestId, tokens: usize) {
        self.until("tokens come", |edge| edge.records[&id].tokens.len() >= tokens).await;
    }
}
