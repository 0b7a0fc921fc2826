//! Which worker takes a prompt (PF-10): of those that have room, the one that will finish it first.
//!
//! Credits (PD-4): a worker whose parked sequences fill their memory takes no more prompts until decode has
//! fetched some; so the queue grows here, where it can be ordered and shed, and prefill never outruns decode by
//! more than the parked limit.

//!
//! Short prompts do not wait for a long one: a worker chooses again at every chunk (PF-8), so one whose backlog is
//! over the limit still takes a prompt much shorter than what it has, as long as it has few.

use deepinfer_protocol::{AgentId, Span};

/// A prompt is much shorter if it takes at most this part of the mean of what is there.
const SHORT: u64 = 4;
/// Most prompts at a worker that is over its limit: the long one and the short ones that go before it.
const MOST_OVER_LIMIT: u32 = 4;

/// What a worker is known to have, own assignments included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerLoad {
    /// Which.
    pub name: AgentId,
    /// Reports are fresh, it does not drain, the fleet says it serves.
    pub open: bool,
    /// Time to finish everything it has.
    pub backlog: Span,
    /// Prompts that this is for.
    pub requests: u32,
    /// Blocks that are free or can be evicted.
    pub free_blocks: u32,
    /// Blocks in all.
    pub total_blocks: u32,
    /// Free state slots.
    pub free_slots: u32,
    /// Its parked sequences are at their limit.
    pub parked_full: bool,
    /// Its time for this prompt.
    pub estimate: Span,
}

/// What a prompt needs.
#[derive(Clone, Copy, Debug)]
pub struct PromptNeed<'a> {
    /// Blocks of the whole sequence.
    pub blocks: u32,
    /// Workers that others are preferred to: it failed there.
    pub exclude: &'a [AgentId],
    /// A worker with more work than this takes no more.
    pub backlog_limit: Span,
}

/// The decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// This worker, by index.
    Worker(usize),
    /// No worker wants any prompt now.
    Busy,
    /// Workers want prompts, but none has the blocks for this one.
    NoBlocks,
    /// It has more blocks than any known worker at all.
    TooLarge,
}

impl WorkerLoad {
    /// Whether it wants a prompt that takes `estimate` of its time; `Some(true)` if only because that is short.
    fn wants(&self, limit: Span) -> Option<bool> {
        if !self.open || self.parked_full || self.free_slots == 0 {
            return None;
        }
        if self.backlog <= limit {
            return Some(false);
        }
        let mean = self.backlog.0 / u64::from(self.requests.max(1));
        let short = self.estimate.times(SHORT).0 <= mean && self.requests < MOST_OVER_LIMIT;
        short.then_some(true)
    }
}

/// Chooses among `workers`, which are in the order of their names.
pub fn pick(workers: &[WorkerLoad], need: PromptNeed<'_>) -> Pick {
    if !workers.is_empty() && workers.iter().all(|w| w.total_blocks < need.blocks) {
        return Pick::TooLarge;
    }
    // A worker where the request failed before is better than none at all, but only then.
    let large_enough = |w: &WorkerLoad| w.open && w.total_blocks >= need.blocks;
    let others = workers.iter().any(|w| large_enough(w) && !need.exclude.contains(&w.name));
    let mut wanted = false;
    let mut best: Option<(bool, Span, usize)> = None;
    for (index, worker) in workers.iter().enumerate() {
        let avoided = others && need.exclude.contains(&worker.name);
        let Some(short) = worker.wants(need.backlog_limit).filter(|_| !avoided) else { continue };
        wanted = true;
        let order = (short, worker.backlog.plus(worker.estimate), index);
        if worker.free_blocks >= need.blocks && best.is_none_or(|least| order < least) {
            best = Some(order);
        }
    }
    match best {
        Some((_, _, index)) => Pick::Worker(index),
        None if wanted => Pick::NoBlocks,
        None => Pick::Busy,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(name: &str) -> WorkerLoad {
        WorkerLoad {
            name: name.into(),
            open: true,
            backlog: Span::millis(50),
            requests: 4,
            free_blocks: 10,
            total_blocks: 20,
            free_slots: 2,
            parked_full: false,
            estimate: Span::millis(10),
        }
    }

    fn choose(workers: &[WorkerLoad], blocks: u32, exclude: &[AgentId]) -> Pick {
        pick(workers, PromptNeed { blocks, exclude, backlog_limit: Span::millis(200) })
    }

    #[test]
    fn the_worker_that_finishes_first_is_chosen_and_ties_go_to_the_first_name() {
        let mut workers = [worker("a"), worker("b"), worker("c")];
        assert_eq!(choose(&workers, 1, &[]), Pick::Worker(0));
        workers[2].backlog = Span::millis(49);
        assert_eq!(choose(&workers, 1, &[]), Pick::Worker(2));
        workers[1].estimate = Span::millis(1);
        assert_eq!(choose(&workers, 1, &[]), Pick::Worker(1));
    }

    #[test]
    fn closed_loaded_parked_and_full_workers_are_left_out_and_it_is_said_why_none_is_left() {
        let mut workers = [worker("a"), worker("b"), worker("c"), worker("d")];
        workers[0].open = false;
        workers[1].backlog = Span::millis(201);
        workers[2].parked_full = true;
        workers[3].free_slots = 0;
        assert_eq!(choose(&workers, 1, &[]), Pick::Busy);
        workers[3].free_slots = 1;
        assert_eq!(choose(&workers, 11, &[]), Pick::NoBlocks);
        assert_eq!(choose(&workers, 21, &[]), Pick::TooLarge);
        assert_eq!(choose(&workers, 10, &[]), Pick::Worker(3));
    }

    #[test]
    fn a_short_prompt_goes_to_a_worker_that_runs_a_long_one_but_not_many_do() {
        let mut workers = [worker("a")];
        (workers[0].backlog, workers[0].requests) = (Span::secs(2), 1);
        assert_eq!(choose(&workers, 1, &[]), Pick::Worker(0));
        workers[0].estimate = Span::millis(501);
        assert_eq!(choose(&workers, 1, &[]), Pick::Busy, "not much shorter");
        (workers[0].estimate, workers[0].requests) = (Span::millis(1), 4);
        assert_eq!(choose(&workers, 1, &[]), Pick::Busy, "enough go before the long one");
        let workers = [workers[0].clone(), worker("b"), WorkerLoad { requests: 1, ..workers[0].clone() }];
        assert_eq!(choose(&workers, 1, &[]), Pick::Worker(1), "a worker within its limit is better");
    }

    #[test]
    fn an_excluded_worker_is_used_only_when_there_is_no_other() {
        let mut workers = [worker("a"), worker("b")];
        let exclude = [AgentId::from("a")];
        workers[1].backlog = Span::millis(300);
        assert_eq!(choose(&workers, 1, &exclude), Pick::Busy, "it waits for the other");
        workers[1].open = false;
        assert_eq!(choose(&workers, 1, &exclude), Pick::Worker(0));
    }
}
