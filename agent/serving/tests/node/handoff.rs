//! The two sides of a handoff over a wire that loses, repeats, reorders and damages: the rank gets exactly what was
//! parked, or it gives up in bounded time.

use std::collections::VecDeque;
use std::sync::Arc;

use deepinfer_protocol::message::{Message, PieceKind};
use deepinfer_protocol::{AgentId, Attempt, RequestId, Span, Time};
use deepinfer_serving::handoff::{Fetch, Fetched, Parking, Piece, WINDOW, blocks_of};
use deepinfer_serving::node::{NodeAction, Pieces};
use proptest::prelude::*;

use crate::engine::Dice;

const ID: (RequestId, Attempt) = (RequestId(4), Attempt(2));
const TIMEOUT: Span = Span::secs(5);

fn holder() -> AgentId {
    AgentId::from("p-0")
}

fn rank() -> AgentId {
    AgentId::from("d-0")
}

/// The pieces of a sequence, each with its own bytes.
fn pieces(tokens: u32, flavour: u8) -> Pieces {
    let blocks =
        (0..blocks_of(tokens - 1)).map(|i| (PieceKind::Block(i), vec![flavour ^ i as u8; 40].into()));
    blocks.chain([(PieceKind::State, vec![flavour ^ 0xff; 90].into())]).collect()
}

fn parking(tokens: u32, flavour: u8) -> Parking {
    let mut parking = Parking::default();
    parking.park(Time(0), ID, AgentId::from("g-0"), tokens, pieces(tokens, flavour));
    parking
}

fn to_piece(message: &Message, payload: Arc<[u8]>) -> Option<Piece> {
    match message {
        Message::KvPiece { kind, pieces, tokens, crc, .. } => {
            Some(Piece { kind: *kind, pieces: *pieces, tokens: *tokens, crc: *crc, payload })
        }
        _ => None,
    }
}

/// How bad the wire is, one in so many.
#[derive(Clone, Copy, Debug)]
struct Wire {
    loses: usize,
    repeats: usize,
    damages: usize,
}

/// Runs a fetch to its end; the result and the most pieces that were under way at once.
fn run(tokens: u32, wire: Wire, seed: u64) -> (Fetched, Option<Pieces>, usize) {
    let mut dice = Dice(seed);
    let parked = parking(tokens, 7);
    let earlier = parking(tokens - 1, 99);
    let (mut now, mut out) = (Time(0), Vec::new());
    let mut fetch = Fetch::begin(now, ID, holder(), tokens, TIMEOUT, &mut out);
    let mut queue: VecDeque<(Message, Arc<[u8]>)> = VecDeque::new();
    let mut most = 0;
    // Pieces of an earlier parking of the same attempt are still on the wire.
    let mut late = Vec::new();
    earlier.answer(&rank(), ID.0, ID.1, None, &mut late);
    let fetches = |out: &mut Vec<NodeAction>| std::mem::take(out);
    let mut actions = late;
    for _ in 0..100_000 {
        actions.extend(fetches(&mut out));
        for action in std::mem::take(&mut actions) {
            let NodeAction::Send { message, payload, .. } = action else { continue };
            if let Message::FetchKv { only, .. } = message {
                parked.answer(&rank(), ID.0, ID.1, only, &mut actions);
            } else if !dice.one_in(wire.loses) {
                let damaged = dice.one_in(wire.damages).then(|| flip(&payload, &mut dice));
                if dice.one_in(wire.repeats) {
                    queue.push_back((message.clone(), payload.clone()));
                }
                queue.push_back((message, damaged.unwrap_or(payload)));
                let (last, other) = (queue.len() - 1, dice.roll(queue.len()));
                queue.swap(last, other);
            }
        }
        most = most.max(queue.len());
        if !actions.is_empty() {
            continue;
        }
        let fetched = match queue.pop_front() {
            Some((message, payload)) => match to_piece(&message, payload) {
                Some(piece) => fetch.on_piece(now, &holder(), piece, &mut out),
                None => fetch.on_gone(&holder()),
            },
            None => {
                now = now + TIMEOUT;
                fetch.on_tick(now, &mut out)
            }
        };
        match fetched {
            Fetched::Complete => return (fetched, Some(fetch.into_pieces()), most),
            Fetched::Lost => return (fetched, None, most),
            _ => {}
        }
    }
    panic!("neither complete nor lost");
}

fn flip(payload: &[u8], dice: &mut Dice) -> Arc<[u8]> {
    let mut bytes = payload.to_vec();
    let at = dice.roll(bytes.len());
    bytes[at] ^= 1 << dice.roll(8);
    bytes.into()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_fetch_gives_what_was_parked_or_gives_up(
        tokens in 2_u32..9_000,
        loses in 3_usize..200,
        repeats in 2_usize..50,
        damages in 3_usize..200,
        seed in any::<u64>(),
    ) {
        let (fetched, got, _) = run(tokens, Wire { loses, repeats, damages }, seed);
        if fetched == Fetched::Complete {
            prop_assert_eq!(got.expect("complete"), pieces(tokens, 7));
        }
    }

    #[test]
    fn a_good_wire_always_completes(tokens in 2_u32..9_000, seed in any::<u64>()) {
        let never = usize::MAX;
        let (fetched, got, most) = run(tokens, Wire { loses: never, repeats: never, damages: never }, seed);
        prop_assert_eq!(fetched, Fetched::Complete);
        prop_assert_eq!(got.expect("complete"), pieces(tokens, 7));
        // The earlier parking's pieces, which nobody asked for, are not bounded by the window.
        prop_assert!(most <= WINDOW + 1 + blocks_of(tokens) as usize + 1);
    }
}

#[test]
fn a_long_sequence_never_has_more_than_the_window_under_way() {
    let tokens = 200 * 128 + 1;
    let parked = parking(tokens, 7);
    let mut out = Vec::new();
    let mut fetch = Fetch::begin(Time(0), ID, holder(), tokens, TIMEOUT, &mut out);
    let (mut under_way, mut done) = (VecDeque::new(), false);
    while !done {
        for action in std::mem::take(&mut out) {
            let NodeAction::Send { message: Message::FetchKv { only, .. }, .. } = action else {
                panic!("only fetches are sent: {action:?}")
            };
            let mut sent = Vec::new();
            parked.answer(&rank(), ID.0, ID.1, only, &mut sent);
            under_way.extend(sent);
        }
        assert!(under_way.len() <= WINDOW, "{} pieces are under way", under_way.len());
        let Some(NodeAction::Send { message, payload, .. }) = under_way.pop_front() else { panic!("stuck") };
        let piece = to_piece(&message, payload).expect("a piece");
        done = fetch.on_piece(Time(0), &holder(), piece, &mut out) == Fetched::Complete;
    }
    assert_eq!(fetch.into_pieces(), pieces(tokens, 7));
}

#[test]
fn pieces_of_another_holder_or_of_another_parking_are_not_taken() {
    let mut out = Vec::new();
    let mut fetch = Fetch::begin(Time(0), ID, holder(), 300, TIMEOUT, &mut out);
    out.clear();
    parking(300, 7).answer(&rank(), ID.0, ID.1, Some(PieceKind::State), &mut out);
    parking(301, 8).answer(&rank(), ID.0, ID.1, Some(PieceKind::State), &mut out);
    let mut pieces = out.drain(..).filter_map(|action| match action {
        NodeAction::Send { message, payload, .. } => to_piece(&message, payload),
        NodeAction::Engine(_) => None,
    });
    let (right, longer) = (pieces.next().expect("a piece"), pieces.next().expect("a piece"));
    drop(pieces);
    let stranger = AgentId::from("x-0");
    assert_eq!(fetch.on_piece(Time(0), &stranger, right.clone(), &mut out), Fetched::Ignored);
    assert_eq!(fetch.on_piece(Time(0), &holder(), longer, &mut out), Fetched::Ignored);
    assert_eq!(fetch.on_gone(&stranger), Fetched::Ignored);
    assert_eq!(fetch.on_piece(Time(0), &holder(), right.clone(), &mut out), Fetched::More);
    assert_eq!(fetch.on_piece(Time(0), &holder(), right, &mut out), Fetched::Ignored, "a second copy");
}

#[test]
fn bytes_parked_add_up_whatever_is_released_replaced_or_cancelled() {
    let mut parking = Parking::default();
    let mut dice = Dice(5);
    for _ in 0..2_000 {
        let id = (RequestId(dice.roll(6) as u128), Attempt(dice.roll(3) as u32));
        match dice.roll(3) {
            0 => {
                let tokens = 2 + dice.roll(700) as u32;
                parking.park(Time(0), id, AgentId::from("g-0"), tokens, pieces(tokens, 1));
            }
            1 => drop(parking.release(id.0, id.1)),
            _ => drop(parking.cancel(id.0, id.1)),
        }
        assert_eq!(parking.bytes(), parking.iter().map(|(_, p)| p.bytes).sum::<u64>());
    }
}
