//! The fitted time of a step: learns what it is shown, shrugs off outliers, follows a machine that changed.

use deepinfer_protocol::{Span, Time};
use deepinfer_serving::batch::{FIT_STEPS, StepLoad, TimeModel, profile_ladder};
use proptest::prelude::*;

/// Nanoseconds of a machine that obeys the model: 2 ms a step, 3 ns per 1000 operations, 5 us a row, 40 us a
/// sequence.
fn machine(load: StepLoad) -> u64 {
    2_000_000 + load.work as u64 * 3 / 1_000 + load.rows as u64 * 5_000 + load.sequences as u64 * 40_000
}

/// The `i`-th step of a varied day; rows and work do not move together.
fn load(i: u64) -> StepLoad {
    let rows = 1 + (i * 7_919) % 2_000;
    let work = rows * (20_000_000 + (i * 104_729) % 9_000_000);
    StepLoad { work: u128::from(work), rows: rows as usize, sequences: 1 + (i % 16) as usize }
}

fn trained(steps: u64) -> TimeModel {
    let mut model = TimeModel::new(1_000_000_000, &[]);
    for i in 0..steps {
        model.observe(Time(i), load(i), Span(machine(load(i))));
    }
    model
}

fn error_ppm(model: &TimeModel, load: StepLoad, actual: u64) -> u64 {
    model.predict(load).0.abs_diff(actual) * 1_000_000 / actual
}

#[test]
fn steps_that_obey_the_model_are_predicted_after_a_few() {
    let model = trained(200);
    for i in 1_000..1_100 {
        assert!(error_ppm(&model, load(i), machine(load(i))) < 10_000, "step {i}: {:?}", model.fit());
    }
}

#[test]
fn before_any_step_the_guessed_rate_is_believed() {
    let model = TimeModel::new(4_000_000_000, &[]);
    let half_a_second = StepLoad { work: 2_000_000_000, rows: 100, sequences: 1 };
    assert!(error_ppm(&model, half_a_second, 500_000_000) < 1_000, "{:?}", model.predict(half_a_second));
    assert_eq!(model.error_p90_ppm(), None);
}

#[test]
fn a_guess_however_wrong_is_gone_after_the_first_steps() {
    for guess in [0, 1_000, 1_000_000_000_000, u64::MAX] {
        let mut model = TimeModel::new(guess, &[]);
        model.observe(Time(0), load(0), Span(machine(load(0))));
        let twice = StepLoad { work: 2 * load(0).work, ..load(0) };
        let more = model.predict(twice).0.saturating_sub(machine(load(0)));
        assert!(more > machine(load(0)) / 4, "twice the work takes longer even after one step: {more}");
        for i in 1..20 {
            model.observe(Time(i), load(i), Span(machine(load(i))));
        }
        assert!(error_ppm(&model, load(500), machine(load(500))) < 20_000, "{guess}: {:?}", model.fit());
    }
}

#[test]
fn a_profile_taken_at_start_replaces_the_guess() {
    let profile: Vec<_> = (0..40).map(|i| (load(i), Span(machine(load(i))))).collect();
    let model = TimeModel::new(1, &profile);
    assert_eq!(model.steps(), 40);
    assert!(error_ppm(&model, load(500), machine(load(500))) < 20_000, "{:?}", model.fit());
}

#[test]
fn an_outlier_moves_nothing_but_the_error() {
    let mut model = trained(300);
    let before = model.fit();
    assert!(!model.observe(Time(300), load(7), Span(machine(load(7)) * 40)));
    assert_eq!(model.fit(), before);
    assert!(model.observe(Time(301), load(8), Span(machine(load(8)))));
}

#[test]
fn a_machine_that_became_slower_for_good_is_followed() {
    let mut model = trained(300);
    for i in 300..3_000 {
        model.observe(Time(i), load(i), Span(machine(load(i)) * 3));
    }
    assert!(error_ppm(&model, load(9_000), machine(load(9_000)) * 3) < 30_000, "{:?}", model.fit());
}

#[test]
fn younger_steps_weigh_more_and_those_beyond_the_window_nothing() {
    // A drift of 9 % is no outlier.
    let slower = |i| machine(load(i)) * 109 / 100;
    let mut model = trained(2_001);
    for i in 2_001..3_201 {
        assert!(model.observe(Time(i), load(i), Span(slower(i))), "step {i}");
    }
    // 800 old steps are left; if they weighed as much as the 1,200 young ones it would be 33,000.
    assert!((12_000..20_000).contains(&error_ppm(&model, load(9_000), slower(9_000))), "{:?}", model.fit());
    for i in 3_201..4_001 {
        assert!(model.observe(Time(i), load(i), Span(slower(i))), "step {i}");
    }
    assert!(error_ppm(&model, load(9_000), slower(9_000)) < 1_000, "{:?}", model.fit());
}

#[test]
fn coefficients_are_never_negative_whatever_the_steps_say() {
    let mut model = TimeModel::new(1_000_000_000, &[]);
    // More rows take less time: no such machine exists, the fit may only say "rows cost nothing".
    for i in 0..500_u64 {
        let rows = 1 + i % 100;
        let load = StepLoad { work: 1_000, rows: rows as usize, sequences: 1 };
        model.observe(Time(i), load, Span(10_000_000 - rows * 50_000));
    }
    let small = model.predict(StepLoad { work: 1_000, rows: 1, sequences: 1 });
    let large = model.predict(StepLoad { work: 1_000, rows: 100, sequences: 1 });
    assert!(small <= large && large.0 < 20_000_000, "{small:?} {large:?}");
}

#[test]
fn errors_that_last_five_minutes_warn_and_widen_the_budget() {
    let mut model = trained(300);
    let budget = Span::millis(100);
    let mut at = Time(0);
    for i in 0..400_u64 {
        // Alternately twice as fast and twice as slow: nothing can predict that.
        let actual = if i % 2 == 0 { machine(load(i)) / 2 } else { machine(load(i)) * 2 };
        at = Time(i * 1_000_000_000);
        model.observe(at, load(i), Span(actual));
        if i == 250 {
            assert_eq!(model.widen(at, budget), budget, "not for five minutes yet");
        }
    }
    let error = u64::from(model.error_p90_ppm().unwrap());
    assert!(model.inaccurate(at) && error > 150_000, "{error}");
    assert_eq!(model.widen(at, budget), Span(100_000_000 + 100 * error));
    for i in 400..1_000_u64 {
        at = Time(i * 1_000_000_000);
        model.observe(at, load(i), model.predict(load(i)));
    }
    assert!(!model.inaccurate(at));
    assert_eq!(model.widen(at, budget), budget);
}

#[test]
fn the_fit_forgets_after_its_window_and_stays_exact_over_long_runs() {
    let model = trained(2 * FIT_STEPS as u64 + 100);
    assert_eq!(model.steps(), FIT_STEPS);
    assert!(error_ppm(&model, load(12_345), machine(load(12_345))) < 1_000, "{:?}", model.fit());
}

#[test]
fn the_profile_ladder_stays_within_the_context() {
    let ladder = profile_ladder(2_000);
    assert_eq!(ladder.first(), Some(&(128, 128)));
    assert!(ladder.iter().all(|&(q, k)| q <= k && k <= 2_000));
    assert_eq!(profile_ladder(1 << 20).last(), Some(&(32_768, 1 << 20)));
    assert!(profile_ladder(100).is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn predictions_grow_with_the_load_and_never_panic(
        steps in prop::collection::vec((0_u128..1 << 60, 0_usize..40_000, 0_usize..100, any::<u64>()), 0..60),
        work in 0_u128..1 << 60, rows in 0_usize..40_000, sequences in 0_usize..100,
        more in (0_u128..1 << 50, 0_usize..1_000, 0_usize..10),
    ) {
        let mut model = TimeModel::new(1_000, &[]);
        for (i, (work, rows, sequences, took)) in steps.into_iter().enumerate() {
            model.observe(Time(i as u64), StepLoad { work, rows, sequences }, Span(took));
        }
        let less = StepLoad { work, rows, sequences };
        let more = StepLoad { work: work + more.0, rows: rows + more.1, sequences: sequences + more.2 };
        prop_assert!(model.predict(less) <= model.predict(more));
    }
}
