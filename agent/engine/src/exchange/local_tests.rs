//! Ranks on threads: layers that add up, and every way in which an exchange ends.

use std::thread;

use super::*;

const LONG: Duration = Duration::from_secs(60);
const WIDTH: usize = 3;

/// A layer in which the rank sends `rows` rows to every rank and each result is ten times its row plus the
/// rank that made it; sums of its rows.
fn layer(end: &mut LocalEnd, layer: usize, rows: usize) -> Result<Vec<f32>, ExchangeError> {
    let ranks = end.ranks();
    let x: Vec<f32> = (0..rows * WIDTH).map(|i| (end.rank() * 100 + layer + i) as f32).collect();
    let pick = |row, rank: usize| Pick { row, rank: rank as u32, slot: row % 2, weight: 1.0 };
    let picks: Vec<Pick> = (0..rows as u32).flat_map(|r| (0..ranks).map(move |d| pick(r, d))).collect();
    end.dispatch(layer, WIDTH, &x, &picks)?;
    let arrived = end.arrivals().len();
    assert!(end.arrivals().is_sorted_by_key(|a| a.slot));
    // In pieces of two.
    for first in (0..arrived).step_by(2) {
        let mut part = vec![0.0; 2.min(arrived - first) * WIDTH];
        end.load(first, &mut part)?;
        part.iter_mut().for_each(|v| *v = *v * 10.0 + end.rank() as f32);
        end.store(first, &part)?;
    }
    end.finish()?;
    let mut sums = vec![0.0; x.len()];
    end.collect(&mut sums)?;
    let made: usize = (0..ranks).sum();
    for (sum, x) in sums.iter().zip(&x) {
        assert_eq!(*sum, x * 10.0 * ranks as f32 + made as f32, "rank {}, layer {layer}", end.rank());
    }
    Ok(sums)
}

#[test]
fn ranks_without_rows_keep_step_over_ten_thousand_layers_with_pauses() {
    let ends = LocalExchange::new(4, LONG);
    let layers = thread::scope(|scope| {
        let run = |mut end: LocalEnd| {
            move || {
                for step in 0..10_000usize {
                    if step.wrapping_mul(2_654_435_769).wrapping_add(end.rank()) % 7 == 0 {
                        thread::yield_now();
                    }
                    let rows = usize::from(end.rank() == 0);
                    layer(&mut end, step, rows).unwrap();
                }
                end.phase
            }
        };
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(run(end))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(layers, [20_000; 4], "two meetings a layer, the same for all");
}

#[test]
fn results_come_back_to_their_rows_whatever_the_ranks_send() {
    for ranks in [1, 2, 5] {
        let ends = LocalExchange::new(ranks, LONG);
        thread::scope(|scope| {
            for mut end in ends {
                scope.spawn(move || {
                    for step in 0..200 {
                        let rows = (step * 7 + end.rank() * 3) % 5;
                        let sums = layer(&mut end, step, rows).unwrap();
                        assert_eq!(sums.len(), rows * WIDTH);
                    }
                });
            }
        });
    }
}

/// Runs layers on all ranks until the exchange ends; what each rank heard. Rank 1 calls `fault` at layer 3.
fn ends_with(limit: Duration, fault: impl Fn(&LocalEnd) + Send + Sync) -> Vec<ExchangeError> {
    let ends = LocalExchange::new(3, limit);
    thread::scope(|scope| {
        let run = |mut end: LocalEnd| {
            let fault = &fault;
            move || {
                for step in 0.. {
                    if step == 3 && end.rank() == 1 {
                        fault(&end);
                    }
                    if let Err(error) = layer(&mut end, step, 2) {
                        assert_eq!(layer(&mut end, step, 2), Err(error.clone()), "it stays over");
                        return error;
                    }
                }
                unreachable!("a fault ends the loop")
            }
        };
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(run(end))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or(ExchangeError::Panicked)).collect()
    })
}

#[test]
fn a_panic_of_one_rank_ends_the_exchange_of_all() {
    let heard = ends_with(LONG, |_| panic!("injected"));
    let gone = ExchangeError::RankGone { rank: 1 };
    assert_eq!(heard, [gone.clone(), ExchangeError::Panicked, gone]);
}

#[test]
fn an_abort_from_another_thread_is_heard_by_all_with_its_reason() {
    let heard = ends_with(LONG, |end| {
        let aborter = end.aborter();
        thread::spawn(move || aborter.abort("step hung")).join().unwrap();
    });
    let aborted = ExchangeError::Aborted { reason: "step hung".to_string() };
    assert_eq!(heard, vec![aborted; 3]);
}

#[test]
fn a_rank_that_does_not_come_ends_the_wait_of_the_others_by_its_number() {
    let limit = Duration::from_millis(50);
    let heard = ends_with(limit, |end| {
        // Until the others have given up on it.
        while end.aborter().over().is_none() {
            thread::yield_now();
        }
    });
    assert_eq!(heard, vec![ExchangeError::TimedOut { rank: 1, limit }; 3]);
}

#[test]
fn ranks_at_different_layers_are_found_out() {
    let mut ends = LocalExchange::new(2, LONG);
    let (mut b, mut a) = (ends.pop().unwrap(), ends.pop().unwrap());
    let errors = thread::scope(|scope| {
        let a = scope.spawn(move || a.dispatch(4, WIDTH, &[], &[]).unwrap_err());
        [b.dispatch(5, WIDTH, &[], &[]).unwrap_err(), a.join().unwrap()]
    });
    assert!(
        errors.iter().all(|e| matches!(e, ExchangeError::OutOfStep { .. } | ExchangeError::RankGone { .. }))
    );
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn a_rank_that_leaves_after_its_last_layer_does_not_hurt_that_layer() {
    let ends = LocalExchange::new(2, LONG);
    let counts = thread::scope(|scope| {
        let run = |mut end: LocalEnd| {
            move || (0..50).map(|step| layer(&mut end, step, 3)).filter(Result::is_ok).count()
        };
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(run(end))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(counts, [50, 50]);
}
