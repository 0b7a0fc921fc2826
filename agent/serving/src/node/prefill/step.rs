//! Steps: which chunks of which prompts run, and what is done with them when they have.

use deepinfer_protocol::{RequestId, Time};

use super::PrefillWorker;
use super::sequence::{Running, Sequence, Stage};
use crate::batch::{
    Aged, BLOCK_TOKENS, BlockId, Chunk, Logits, PackItem, PackLimits, Room, SequenceStep, aged_srpt, pack,
};
use crate::kv::{Start, blocks_for, plan_prefix};
use crate::node::desk::{send, send_tokens};
use crate::node::{EngineCommand, NodeAction, StepResult, StepWork, Ticket, ending};

impl PrefillWorker {
    /// The next step, if a prompt can run and no step is under way. Asked when the engine is idle; the actions in
    /// `out` are carried out before the step.
    pub fn poll_step(&mut self, now: Time, out: &mut Vec<NodeAction>) -> Option<StepWork> {
        if !self.engine || self.stepping.is_some() {
            return None;
        }
        let waiting = self.sequences.values().filter(|s| s.stage == Stage::Waiting);
        for request in waiting.map(|s| s.subject.request).collect::<Vec<_>>() {
            self.enter(request, out);
        }
        let queue = self.queue(now);
        let items: Vec<PackItem> = queue.iter().map(|request| self.sequences[request].item()).collect();
        let budget = self.options.time.widen(now, self.options.limits.budget);
        let limits = PackLimits { budget, ..self.options.limits };
        // Whoever is here holds its blocks and slot.
        let pack = pack(&items, &limits, Room::default(), &self.cost());
        if pack.chunks.is_empty() {
            return None;
        }
        let mut work = StepWork::default();
        let mut stepping = Vec::with_capacity(pack.chunks.len());
        for Chunk { item, tokens } in pack.chunks {
            let running = self.add_chunk(queue[item], tokens, &mut work, out);
            stepping.push(running);
        }
        self.stepping = Some((stepping, pack.load));
        Some(work)
    }

    /// Prompts in the order in which they go next: least remaining time first, less the time they waited (PF-8).
    fn queue(&self, now: Time) -> Vec<RequestId> {
        let ready: Vec<&Sequence> = self.sequences.values().filter(|s| s.stage == Stage::Running).collect();
        let aged: Vec<Aged> = ready
            .iter()
            .map(|s| Aged { remaining: self.remaining(s), waited: now.since(s.arrived) })
            .collect();
        aged_srpt(&aged).into_iter().map(|i| ready[i].subject.request).collect()
    }

    /// Brings a prompt into the engine: by the prefix that is known by now, which can only be longer than at its
    /// arrival (PF-12).
    fn enter(&mut self, request: RequestId, out: &mut Vec<NodeAction>) {
        let sequence = self.sequences.get(&request).expect("only what is held enters");
        if sequence.keys.get(sequence.sealed).is_some_and(|key| self.pool.find(key).is_some()) {
            self.improve(request);
        }
        let ticket = Ticket(self.next_ticket + 1);
        let sequence = self.sequences.get_mut(&request).expect("only what is held enters");
        let slot = sequence.slot;
        sequence.stage = Stage::Running;
        match &sequence.start {
            Start::Fresh => {}
            Start::Checkpoint { state, .. } => {
                let state = state.clone();
                sequence.stage = Stage::Restoring(ticket);
                self.next_ticket = ticket.0;
                self.restores.insert(ticket, request);
                out.push(NodeAction::Engine(EngineCommand::Restore { ticket, slot, state }));
            }
            Start::Replay { from } => {
                let (start, history) = (*from as u32, sequence.work.tokens[..*from].to_vec());
                out.push(NodeAction::Engine(EngineCommand::BeginReplay { slot, start, history }));
            }
        }
    }

    /// Takes a longer prefix, if that is what is found now: its blocks replace those that would have been filled.
    fn improve(&mut self, request: RequestId) {
        let sequence = self.sequences.get_mut(&request).expect("only what is held enters");
        let replay = self.options.replay_tokens as usize;
        let length = sequence.length();
        let plan = plan_prefix(&mut self.pool, &mut self.checkpoints, &sequence.keys, length, replay);
        let adopted = plan.adopt.len();
        if adopted <= sequence.sealed {
            return self.pool.release_all(&plan.adopt);
        }
        let replaced: Vec<BlockId> = sequence.blocks.splice(..adopted, plan.adopt.iter().copied()).collect();
        self.pool.release_all(&replaced);
        sequence.adopt(plan);
    }

    fn add_chunk(
        &mut self,
        request: RequestId,
        tokens: usize,
        work: &mut StepWork,
        out: &mut Vec<NodeAction>,
    ) -> Running {
        let sequence = self.sequences.get_mut(&request).expect("the queue names what is held");
        let (start, end) = (sequence.next, sequence.next + tokens);
        let (first, last) = (!sequence.started, end == sequence.length());
        let replay = start < sequence.resume_from;
        let mut step = SequenceStep::text(
            sequence.slot,
            start,
            sequence.work.tokens[start..end].to_vec(),
            sequence.blocks[..blocks_for(end)].to_vec(),
        );
        step.prompt_tokens = Some(sequence.length());
        step.replay = replay;
        step.logits = if last { Logits::Last } else { Logits::None };
        work.batch.sequences.push(step);
        let length = sequence.length() as u32;
        let emitted = length - sequence.work.prompt_tokens;
        work.samples.push(last.then(|| ending::sample(&sequence.work.spec, length, emitted)));
        sequence.started = true;
        sequence.told_last = last;
        if first || last {
            send(&sequence.subject.owner, sequence.progress(), out);
        }
        if first {
            self.desk.counts.prompt_tokens += u64::from(sequence.work.prompt_tokens);
            self.desk.counts.cached_tokens += u64::from(sequence.cached_tokens());
        }
        Running { request, attempt: sequence.subject.attempt, end, replay }
    }

    pub(super) fn on_step_done(&mut self, now: Time, result: StepResult, out: &mut Vec<NodeAction>) {
        let Some((stepped, load)) = self.stepping.take() else { return };
        self.options.time.observe(now, load, result.elapsed);
        let rate = load.rows as u64 * 1_000_000_000 / result.elapsed.0.max(1);
        self.tokens_per_second = u32::try_from(rate).unwrap_or(u32::MAX);
        self.desk.counts.steps += 1;
        self.desk.counts.rows += load.rows as u64;
        let mut events = Vec::new();
        let mut tokens = result.tokens.into_iter();
        for running in stepped {
            let token = tokens.next().flatten();
            let Some(sequence) = self.sequences.get_mut(&running.request) else { continue };
            if sequence.subject.attempt != running.attempt {
                continue;
            }
            if running.replay {
                self.desk.counts.replayed_rows += (running.end - sequence.next) as u64;
            }
            sequence.next = running.end;
            let ended = running.end == sequence.length();
            self.after_chunk(running.request, out);
            if ended {
                events.extend(self.end_prompt(running.request, token, out));
            }
        }
        send_tokens(events, out);
    }

    /// Names the blocks that are full now and asks for the checkpoint.
    fn after_chunk(&mut self, request: RequestId, out: &mut Vec<NodeAction>) {
        let sequence = self.sequences.get_mut(&request).expect("its chunk has just run");
        let full = (sequence.next / BLOCK_TOKENS).min(sequence.keys.len());
        for i in sequence.sealed..full {
            let parent = i.checked_sub(1).map(|parent| sequence.keys[parent]);
            sequence.blocks[i] = self.pool.seal(sequence.blocks[i], sequence.keys[i], parent);
        }
        sequence.sealed = sequence.sealed.max(full);
        let at = sequence.checkpoint_at().filter(|&at| at == sequence.next);
        let Some(position) = at else { return };
        let (key, slot) = (sequence.keys[position / BLOCK_TOKENS - 1], sequence.slot);
        if self.options.checkpoint_bytes == 0 || self.checkpoints.contains(&key) {
            return;
        }
        let ticket = self.ticket();
        self.cutting.insert(ticket, key);
        let position = position as u32;
        out.push(NodeAction::Engine(EngineCommand::Checkpoint { ticket, slot, position }));
    }
}
