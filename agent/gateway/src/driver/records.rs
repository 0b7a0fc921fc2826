//! The machine and what surrounds it: streams, open connections, counts. No task and no clock in here.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::generate::{FinishReason, Token};
use deepinfer_protocol::{RequestId, Span, Time};
use deepinfer_serving::gateway::{
    EndedEarly, Gateway, GatewayAction, GatewayEvent, GatewayOptions as RequestOptions,
};
use deepinfer_transport::{PeerEvent, Transport};

use super::stream::{End, Handed, Stream};
use crate::core::{Left, Submitted};
use crate::fleet::{Reach, peers, unready_reason};
use crate::metrics::{Metrics, RequestResult};
use crate::signals::{GatewayStatus, Recent};

/// How long the last messages may take to be written.
const FAREWELL: Duration = Duration::from_millis(500);

/// Requests and tokens that have no result yet.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    running: u64,
    waiting: u64,
    waiting_tokens: u64,
}

pub(super) struct Records {
    machine: Gateway,
    transport: Transport,
    metrics: Arc<Metrics>,
    /// Limits of what waits for a client that does not read.
    waiting_tokens: usize,
    write_stall: Span,

    streams: HashMap<RequestId, Stream>,
    /// Streams with something to hand over.
    dirty: Vec<RequestId>,
    /// Streams whose handler's buffer was full.
    stalled: Vec<RequestId>,
    actions: Vec<GatewayAction>,
    view: Arc<FleetView>,
    reach: Reach,
    readiness_changed: bool,
    shutting_down: bool,

    counts: Counts,
    requests: u64,
    refused: u64,
    retries_seen: u64,
    /// First-token times and tokens since the last publication.
    first_tokens: Vec<(Time, Span)>,
    tokens: u64,
    now: Time,
    nothing: Arc<[u8]>,
}

impl Records {
    pub(super) fn new(
        requests: RequestOptions,
        transport: Transport,
        metrics: Arc<Metrics>,
        waiting_tokens: usize,
        write_stall: Span,
    ) -> Self {
        Self {
            machine: Gateway::new(requests),
            transport,
            metrics,
            waiting_tokens,
            write_stall,
            streams: HashMap::new(),
            dirty: Vec::new(),
            stalled: Vec::new(),
            actions: Vec::new(),
            view: Arc::default(),
            reach: Reach::default(),
            readiness_changed: false,
            shutting_down: false,
            counts: Counts::default(),
            requests: 0,
            refused: 0,
            retries_seen: 0,
            first_tokens: Vec::new(),
            tokens: 0,
            now: Time(0),
            nothing: Arc::from([]),
        }
    }

    /// A newer view; older ones are refused.
    pub(super) fn follow(&mut self, now: Time, view: &Arc<FleetView>) {
        if view.generation < self.view.generation {
            tracing::warn!(
                followed = view.generation.0,
                newest = self.view.generation.0,
                "an older fleet view is refused"
            );
            return;
        }
        self.view = Arc::clone(view);
        self.transport.set_peers(&peers(view));
        self.readiness_changed = true;
        self.tell(now, GatewayEvent::Fleet(Arc::clone(view)));
    }

    pub(super) fn peer(&mut self, now: Time, event: PeerEvent) {
        match event {
            PeerEvent::Frame { from, message, .. } => {
                self.tell(now, GatewayEvent::Message { from, message });
            }
            PeerEvent::Up { peer, .. } => {
                tracing::info!(agent = %peer, "connected");
                self.reach.up(&peer);
                self.readiness_changed = true;
                self.tell(now, GatewayEvent::PeerUp(peer));
            }
            PeerEvent::Down { peer } => {
                tracing::warn!(agent = %peer, "lost: its requests resume elsewhere");
                self.reach.down(now, &peer);
                self.readiness_changed = true;
                self.tell(now, GatewayEvent::PeerLost(peer));
            }
        }
    }

    pub(super) fn submit(&mut self, now: Time, submitted: Submitted) {
        let Submitted { request, client_id, events } = submitted;
        let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        let stream = Stream::new(events, Arc::clone(&request.tenant), client_id, prompt_tokens, now);
        self.streams.insert(request.id, stream);
        self.requests += 1;
        self.counts.waiting += 1;
        self.counts.waiting_tokens += u64::from(prompt_tokens);
        self.tell(now, GatewayEvent::Arrived(request));
    }

    pub(super) fn leave(&mut self, now: Time, left: Left) {
        let (id, result, event) = match left {
            Left::Gone(id) => (id, RequestResult::Cancelled, GatewayEvent::ClientGone(id)),
            Left::Satisfied(id) => (id, RequestResult::Finished, GatewayEvent::Satisfied(id)),
        };
        // What has ended meanwhile was counted then.
        if self.streams.get(&id).is_some_and(|stream| !stream.over) {
            self.conclude(now, id, result, "");
            self.streams.remove(&id);
            self.tell(now, event);
        }
        self.streams.remove(&id);
    }

    pub(super) fn shut_down(&mut self, now: Time, deadline: Time) {
        self.shutting_down = true;
        self.readiness_changed = true;
        self.tell(now, GatewayEvent::Shutdown { deadline });
    }

    pub(super) fn tick(&mut self, now: Time) {
        self.tell(now, GatewayEvent::Tick);
        self.readiness_changed |= self.reach.expire(now);
        self.dirty.append(&mut self.stalled);
        let retries = self.machine.stats().resumed;
        self.metrics.retries.inc_by(retries - self.retries_seen);
        self.retries_seen = retries;
    }

    fn tell(&mut self, now: Time, event: GatewayEvent) {
        self.now = now;
        let mut actions = std::mem::take(&mut self.actions);
        self.machine.on_event(now, event, &mut actions);
        for action in actions.drain(..) {
            self.act(now, action);
        }
        self.actions = actions;
    }

    fn act(&mut self, now: Time, action: GatewayAction) {
        match action {
            GatewayAction::Send { to, message } => {
                // A peer that cannot be reached is reported as lost by its connection.
                self.transport.send(&to, &message, Arc::clone(&self.nothing));
            }
            GatewayAction::Started { request, cached_tokens } => self.started(now, request, cached_tokens),
            GatewayAction::Tokens { request, tokens, finish } => self.arrived(now, request, tokens, finish),
            GatewayAction::Ended { request, why } => self.ended(now, request, why),
        }
    }

    fn started(&mut self, now: Time, id: RequestId, cached_tokens: u32) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if stream.started.is_none() {
            stream.started = Some(now);
            self.counts.waiting -= 1;
            self.counts.waiting_tokens -= u64::from(stream.prompt_tokens);
            self.counts.running += 1;
            self.metrics.queue.observe(now.since(stream.arrived).as_secs_f64());
            self.metrics.prompt_tokens.inc_by(u64::from(stream.prompt_tokens));
        }
        stream.cached_tokens = cached_tokens;
        stream.push_started();
        self.metrics.cached_tokens.inc_by(u64::from(cached_tokens));
        mark(&mut self.dirty, stream, id);
    }

    fn arrived(&mut self, now: Time, id: RequestId, tokens: Vec<Token>, finish: Option<FinishReason>) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let count = tokens.len() as u64;
        if count > 0 {
            let gaps = if stream.first_token.is_none() {
                let wait = now.since(stream.arrived);
                stream.first_token = Some(now);
                self.metrics.ttft.observe(wait.as_secs_f64());
                self.first_tokens.push((now, wait));
                count - 1
            } else {
                count
            };
            // Tokens of one step share its time.
            let gap = now.since(stream.last_token).as_secs_f64() / count as f64;
            for _ in 0..gaps {
                self.metrics.inter_token.observe(gap);
            }
            stream.last_token = now;
            stream.generated += count as u32;
            self.metrics.generated_tokens.inc_by(count);
            self.tokens += count;
        }
        stream.push_tokens(tokens);
        if let Some(reason) = finish {
            stream.push_end(End::Finish(reason));
        }
        mark(&mut self.dirty, stream, id);
        if finish.is_some() {
            self.conclude(now, id, RequestResult::Finished, "");
        }
    }

    fn ended(&mut self, now: Time, id: RequestId, why: EndedEarly) {
        let (result, reason, detail) = match &why {
            EndedEarly::Overloaded { reason, detail, .. } => {
                (RequestResult::Refused, reason.as_str(), &**detail)
            }
            EndedEarly::TooLarge { detail } => (RequestResult::Refused, "too_large", &**detail),
            EndedEarly::Unavailable { detail, .. } => (RequestResult::Refused, "unavailable", &**detail),
            EndedEarly::Failed { detail } => (RequestResult::Failed, "", &**detail),
            EndedEarly::Cancelled => (RequestResult::Cancelled, "", ""),
        };
        if !self.streams.contains_key(&id) {
            return;
        }
        if result == RequestResult::Refused {
            self.metrics.refused(reason);
            self.refused += 1;
        }
        self.conclude(now, id, result, detail);
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.push_end(End::Early(why));
            mark(&mut self.dirty, stream, id);
        }
    }

    /// Counts and logs a request's result, once.
    fn conclude(&mut self, now: Time, id: RequestId, result: RequestResult, detail: &str) {
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| !stream.over) else { return };
        stream.over = true;
        if stream.started.is_some() {
            self.counts.running -= 1;
        } else {
            self.counts.waiting -= 1;
            self.counts.waiting_tokens -= u64::from(stream.prompt_tokens);
        }
        let took = now.since(stream.arrived);
        self.metrics.ended(result, took);
        let ttft_ms = stream.first_token.map(|at| at.since(stream.arrived).as_millis());
        // Neither prompt nor answer nor key: lengths and names only.
        tracing::info!(
            request = %id,
            client_id = stream.client_id.as_deref(),
            tenant = &*stream.tenant,
            result = result.as_str(),
            detail,
            prompt_tokens = stream.prompt_tokens,
            cached_tokens = stream.cached_tokens,
            tokens = stream.generated,
            ttft_ms,
            ms = took.as_millis(),
            "request"
        );
    }

    /// What was queued for agents (cancels) may still go out.
    pub(super) async fn close(self) {
        self.transport.close(FAREWELL).await;
    }

    /// Hands everything over that waits.
    pub(super) fn flush(&mut self, now: Time) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for id in dirty.drain(..) {
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            stream.dirty = false;
            match stream.hand_over(now) {
                Handed::All => {}
                Handed::End => {
                    self.streams.remove(&id);
                }
                Handed::Gone => self.leave(now, Left::Gone(id)),
                Handed::Stalled => {
                    let since = stream.stalled_since.unwrap_or(now);
                    let too_much = stream.weight() > self.waiting_tokens;
                    if too_much || now.since(since) > self.write_stall {
                        tracing::warn!(request = %id, too_much, "the client does not read: cancelled");
                        self.metrics.slow_clients.inc();
                        self.leave(now, Left::Gone(id));
                    } else {
                        stream.dirty = true;
                        self.stalled.push(id);
                    }
                }
            }
        }
        // Leaving may have marked nothing new: the list's memory is kept.
        dirty.append(&mut self.dirty);
        self.dirty = dirty;
    }

    /// Whether requests would be served, if that may have changed: why not.
    pub(super) fn take_readiness(&mut self) -> Option<Option<String>> {
        if !std::mem::take(&mut self.readiness_changed) {
            return None;
        }
        let reason = if self.shutting_down {
            Some("the gateway is shutting down".to_owned())
        } else {
            unready_reason(&self.view, &self.reach)
        };
        self.metrics.ready.set(i64::from(reason.is_none()));
        Some(reason)
    }

    /// Brings what others see up to date.
    pub(super) fn publish(&mut self, status: &mut GatewayStatus, recent: &mut Recent) {
        let Counts { running, waiting, waiting_tokens } = self.counts;
        self.metrics.running.set(running as i64);
        self.metrics.waiting.set(waiting as i64);
        status.fleet_generation = self.view.generation.0;
        (status.running, status.waiting, status.waiting_tokens) = (running, waiting, waiting_tokens);
        (status.requests, status.refused) = (self.requests, self.refused);
        for (at, wait) in self.first_tokens.drain(..) {
            recent.first_token(at, wait);
        }
        if self.tokens > 0 {
            recent.tokens(self.now, std::mem::take(&mut self.tokens));
        }
    }
}

fn mark(dirty: &mut Vec<RequestId>, stream: &mut Stream, id: RequestId) {
    if !std::mem::replace(&mut stream.dirty, true) {
        dirty.push(id);
    }
}
