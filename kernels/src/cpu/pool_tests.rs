//! The pool under contention: every task once, nothing after the run, panics passed on.

use std::sync::atomic::AtomicU32;

use proptest::prelude::*;

use super::*;

/// Counts how often each task ran.
fn count(pool: &Pool, tasks: usize) -> Vec<u32> {
    let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
    pool.run(tasks, &|i, thread| {
        assert!(thread < pool.threads());
        counts[i].fetch_add(1, Ordering::Relaxed);
    });
    counts.into_iter().map(AtomicU32::into_inner).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_task_runs_exactly_once(threads in 1usize..9, runs in prop::collection::vec(0usize..70, 1..40)) {
        let pool = Pool::new(threads);
        for tasks in runs {
            prop_assert_eq!(count(&pool, tasks), vec![1; tasks]);
        }
    }
}

#[test]
fn many_short_runs_on_more_threads_than_cores_lose_no_task() {
    let pool = Pool::new(4 * std::thread::available_parallelism().map_or(4, usize::from));
    let total = AtomicUsize::new(0);
    for _ in 0..5_000 {
        pool.run(3, &|i, _| {
            total.fetch_add(i + 1, Ordering::Relaxed);
        });
    }
    assert_eq!(total.into_inner(), 5_000 * 6);
}

/// A worker that came late for the last run once waited for ever for a next one, and the pool for the worker.
#[test]
fn a_pool_that_is_dropped_right_after_a_run_ends() {
    // More pools than cores at a time, so that workers are interrupted anywhere.
    const MAKERS: usize = 8;
    let (done, ended) = std::sync::mpsc::sync_channel(MAKERS);
    for _ in 0..MAKERS {
        let done = done.clone();
        std::thread::spawn(move || {
            for i in 0..1_000 {
                let pool = Pool::new(4);
                pool.run(2 + i % 3, &|_, _| {});
            }
            done.send(()).expect("the test waits");
        });
    }
    let limit = std::time::Duration::from_secs(60);
    for _ in 0..MAKERS {
        assert!(ended.recv_timeout(limit).is_ok(), "a dropped pool still waits for its threads");
    }
}

#[test]
fn as_many_tasks_as_threads_run_at_the_same_time() {
    let pool = Pool::new(4);
    let all_here = std::sync::Barrier::new(4);
    pool.run(4, &|_, _| {
        all_here.wait();
    });
}

#[test]
fn callers_on_several_threads_take_turns() {
    let pool = Pool::new(3);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..300 {
                    assert_eq!(count(&pool, 5), [1; 5]);
                }
            });
        }
    });
}

#[test]
fn a_run_inside_a_task_stays_on_its_thread() {
    let pool = Pool::new(3);
    let total = AtomicUsize::new(0);
    pool.run(8, &|_, outer| {
        pool.run(4, &|_, inner| {
            assert_eq!(outer, inner);
            total.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(total.into_inner(), 32);
}

#[test]
fn a_panic_reaches_the_caller_after_all_threads_have_left() {
    for threads in [1, 4] {
        let pool = Pool::new(threads);
        let running = AtomicUsize::new(0);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(100, &|i, _| {
                running.fetch_add(1, Ordering::SeqCst);
                if i % 7 == 3 {
                    running.fetch_sub(1, Ordering::SeqCst);
                    panic!("task {i}");
                }
                running.fetch_sub(1, Ordering::SeqCst);
            });
        }));
        let payload = outcome.expect_err("a task has panicked");
        let text = payload.downcast_ref::<String>().expect("the payload of the task");
        assert!(text.starts_with("task "), "{text}");
        assert_eq!(running.into_inner(), 0);
        assert_eq!(count(&pool, 9), [1; 9], "the pool works on");
    }
}

#[test]
fn pieces_cover_a_slice_and_the_last_may_be_short() {
    let pool = Pool::new(2);
    let mut out = vec![0; 103];
    pool.run_pieces(&mut out, 10, &|i, _, piece| {
        assert_eq!(piece.len(), if i == 10 { 3 } else { 10 });
        piece.fill(i + 1);
    });
    let expected: Vec<usize> = (0..103).map(|i| i / 10 + 1).collect();
    assert_eq!(out, expected);
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "were claimed before")]
fn overlapping_claims_are_found_in_debug_builds() {
    let mut data = [0; 10];
    let slice = DisjointSlice::new(&mut data);
    slice.claim(0, 4)[0] = 1;
    slice.claim(3, 2)[0] = 2;
}

#[test]
#[should_panic(expected = "claim 8+3 of 10")]
fn claims_outside_the_slice_are_refused() {
    let mut data = [0; 10];
    DisjointSlice::new(&mut data).claim(8, 3)[0] = 1;
}

#[test]
#[should_panic(expected = "scratch of thread 0 is in use")]
fn scratch_is_not_given_away_twice() {
    let scratch = ThreadScratch::new(1);
    let _first = scratch.of(0);
    let _second = scratch.of(0);
}

#[test]
fn scratch_begins_on_a_cache_line_and_keeps_its_memory() {
    let scratch = ThreadScratch::new(1);
    let start = scratch.of(0).get(1000).as_ptr() as usize;
    assert_eq!(start % 64, 0);
    assert_eq!(scratch.of(0).get(10).as_ptr() as usize, start);
    assert_eq!(scratch.of(0).get(10).len(), 10);
}
