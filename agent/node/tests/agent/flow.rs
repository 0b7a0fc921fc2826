//! Requests through a prefill worker and ranks: the tokens are those of an engine alone.

use deepinfer_protocol::generate::{FinishReason, GenerateSpec};

use crate::edge::Edge;
use crate::fleet::{Fleet, eventually};
use crate::oracle::{alone, prompt, spec};

/// Prompts of different lengths side by side; greedy and drawn.
async fn answers_equal_an_engine_alone(decode: &[&str]) {
    let fleet = Fleet::pair(&[], decode).await;
    let mut edge = Edge::new(&fleet);
    let drawn = GenerateSpec { temperature: 0.9, top_p: 0.95, seed: 11, ..spec(9) };
    let wanted: Vec<(Vec<u32>, GenerateSpec)> = vec![
        (prompt(5, 1), spec(12)),
        (prompt(128, 2), spec(7)),
        (prompt(333, 3), drawn.clone()),
        (prompt(700, 4), spec(5)),
        (prompt(1, 5), GenerateSpec { logprobs: Some(2), ..drawn }),
        (prompt(40, 6), spec(1)),
    ];
    let ids: Vec<_> = wanted.iter().map(|(prompt, spec)| edge.submit(prompt, spec.clone())).collect();
    edge.finish(&ids).await;
    for (id, (prompt, spec)) in ids.iter().zip(&wanted) {
        let record = &edge.records[id];
        assert_eq!(record.ids(), alone(prompt, spec), "{record:?}");
        assert_eq!(record.finish, Some(FinishReason::Length));
        assert!(record.tokens.iter().all(|t| t.logprob.is_some() == spec.logprobs.is_some()));
    }
    for name in ["p-0", "sn-0-0"] {
        let agent = fleet.agent(name);
        eventually("everything is freed", || {
            let status = agent.status();
            (status.inflight, status.kv_blocks_used, status.parked_bytes) == (0, 0, 0)
        })
        .await;
        assert!(agent.status().steps > 0);
    }
    fleet.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_rank_gives_the_tokens_of_an_engine_alone() {
    answers_equal_an_engine_alone(&[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_ranks_with_replicas_give_the_tokens_of_an_engine_alone() {
    answers_equal_an_engine_alone(&["--ranks=2", "--extra-slots-per-rank=1"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_time_a_prompt_is_found_in_blocks_and_answered_the_same() {
    let fleet = Fleet::pair(&[], &[]).await;
    let mut edge = Edge::new(&fleet);
    let text = prompt(650, 9);
    let first = edge.submit(&text, spec(6));
    edge.finish(&[first]).await;
    let second = edge.submit(&text, spec(6));
    edge.finish(&[second]).await;
    assert_eq!(edge.records[&first].cached_tokens, Some(0));
    assert!(edge.records[&second].cached_tokens > Some(0), "{:?}", edge.records[&second]);
    assert_eq!(edge.records[&first].ids(), edge.records[&second].ids());
    assert_eq!(edge.records[&second].ids(), alone(&text, &spec(6)));
    fleet.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_token_ends_a_sequence_wherever_it_is_drawn() {
    let fleet = Fleet::pair(&[], &[]).await;
    let mut edge = Edge::new(&fleet);
    let text = prompt(60, 3);
    let free = alone(&text, &spec(12));
    for at in [0, 5] {
        let first = free.iter().position(|id| *id == free[at]).expect("it is there");
        let stop = GenerateSpec { stop_tokens: vec![free[at]], ..spec(12) };
        let id = edge.submit(&text, stop);
        edge.finish(&[id]).await;
        assert_eq!(edge.records[&id].finish, Some(FinishReason::Stop));
        assert_eq!(edge.records[&id].ids(), free[..=first]);
    }
    fleet.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_request_frees_its_blocks_and_others_go_on() {
    let fleet = Fleet::pair(&[], &[]).await;
    let mut edge = Edge::new(&fleet);
    let gone = edge.submit(&prompt(200, 1), spec(2000));
    let stays = edge.submit(&prompt(200, 2), spec(40));
    edge.reach(gone, 3).await;
    edge.cancel(gone);
    edge.finish(&[stays]).await;
    assert_eq!(edge.records[&stays].ids(), alone(&prompt(200, 2), &spec(40)));
    let rank = fleet.agent("sn-0-0");
    eventually("blocks are freed", || rank.status().kv_blocks_used == 0 && rank.status().inflight == 0).await;
    fleet.stop().await;
}

/// More sequences than the cache holds: some give way, are parked, and go on where they were.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preempted_sequences_lose_no_token() {
    let fleet = Fleet::pair(&[], &["--kv-blocks=6", "--context-limit=600", "--max-requests=4"]).await;
    let mut edge = Edge::new(&fleet);
    let wanted: Vec<_> = (0..4).map(|i| (prompt(100 + i, i as u32), spec(220))).collect();
    let ids: Vec<_> = wanted.iter().map(|(prompt, spec)| edge.submit(prompt, spec.clone())).collect();
    edge.finish(&ids).await;
    for (id, (prompt, spec)) in ids.iter().zip(&wanted) {
        assert_eq!(edge.records[id].ids(), alone(prompt, spec));
    }
    fleet.stop().await;
}
