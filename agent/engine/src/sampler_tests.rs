//! Draws against golden integers and by hand; log-probabilities and forbidden tokens.

use super::*;

fn sampling(temperature: f32, top_p: f32, seed: u64) -> Sampling {
    Sampling { temperature, top_p, seed }
}

#[test]
fn draws_equal_the_golden_integers() {
    let golden: [(u64, u64, [u64; 3]); 5] = [
        (0, 0, [7956156453446585, 8489620135415275, 238094247788840]),
        (0, 1, [7700819626800645, 5832869612967052, 2948288379523028]),
        (42, 1, [824488335370028, 2252205421657654, 1779117297199549]),
        (42, 1000, [6709487753447196, 6396172995683057, 5244166860846684]),
        (u64::MAX, 7, [1551862994110997, 1207576308598159, 3249931508587125]),
    ];
    for (seed, position, want) in golden {
        let got = [Draw::Sample, Draw::Resample, Draw::Accept].map(|d| draw_bits(seed, position, d));
        assert_eq!(got, want, "seed {seed}, position {position}");
    }
}

#[test]
fn greedy_takes_the_lowest_of_equal_logits() {
    assert_eq!(greedy(&[1.0, 3.0, 3.0, f32::NAN]), 1);
    assert_eq!(sample(&[0.0, 2.0, 2.0], &sampling(9e-6, 1.0, 5), 3), 1);
    assert_eq!(greedy(&[f32::NAN, f32::NEG_INFINITY]), 0);
}

#[test]
fn a_draw_picks_the_first_index_whose_cumulative_mass_exceeds_it() {
    let mut sampler = Sampler::default();
    let logits = [0.25f32.ln(), 0.25f32.ln(), 0.5f32.ln()];
    let s = sampling(1.0, 1.0, 0);
    let picks: Vec<u32> = [0.0, 0.2, 0.3, 0.49, 0.51, 0.999].map(|x| sampler.choose(&logits, &s, x)).to_vec();
    assert_eq!(picks, [0, 0, 1, 1, 2, 2]);
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_the_mass() {
    let mut sampler = Sampler::default();
    let logits = [0.1f32.ln(), 0.5f32.ln(), 0.1f32.ln(), 0.3f32.ln()];
    let kept = |sampler: &mut Sampler, top_p| -> Vec<usize> {
        let p = sampler.probabilities(&logits, &sampling(1.0, top_p, 0));
        (0..4).filter(|&i| p[i] > 0.0).collect()
    };
    assert_eq!(kept(&mut sampler, 0.4), [1]);
    assert_eq!(kept(&mut sampler, 0.75), [1, 3]);
    assert_eq!(kept(&mut sampler, 0.85), [0, 1, 3], "the lower of two equal ids comes first");
    assert_eq!(kept(&mut sampler, 1.0), [0, 1, 2, 3]);
    assert_eq!(kept(&mut sampler, 0.0), [1], "one token always stays");
}

#[test]
fn excluded_tokens_are_never_drawn() {
    let mut sampler = Sampler::default();
    let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
    for position in 0..100 {
        assert_eq!(sampler.sample(&logits, &sampling(0.7, 0.9, 1), position), 1);
    }
}

#[test]
fn frequencies_follow_the_distribution() {
    let mut sampler = Sampler::default();
    let logits = [0.0, 1.0f32, 2.0];
    let s = sampling(0.5, 1.0, 99);
    let mut counts = [0.0f64; 3];
    for position in 0..20_000 {
        counts[sampler.sample(&logits, &s, position) as usize] += 1.0 / 20_000.0;
    }
    let weights = [1.0, 2f64.exp(), 4f64.exp()];
    let total: f64 = weights.iter().sum();
    for (count, weight) in counts.iter().zip(weights) {
        assert!((count - weight / total).abs() < 0.01, "{counts:?}");
    }
}

fn how(temperature: f32, seed: u64, forbidden: &[u32], logprobs: Option<u8>) -> Sample {
    Sample { temperature, top_p: 1.0, seed, position: 9, logprobs, forbidden: forbidden.to_vec() }
}

#[test]
fn log_probabilities_are_finite_even_where_the_model_allows_one_token_only() {
    let logits = [f32::NEG_INFINITY, 3.0, f32::NEG_INFINITY, f32::NAN, -1e30];
    let got = logprob(&logits, 1, 5);
    assert_eq!(got.logprob, 0.0);
    let floor = Logprob::FLOOR;
    assert_eq!(got.top, [(1, 0.0), (4, floor), (0, floor), (2, floor), (3, floor)]);
    assert_eq!(logprob(&logits, 0, 0), Logprob { logprob: floor, top: Vec::new() });
    for odd in [vec![f32::NEG_INFINITY; 4], vec![f32::NAN; 4], vec![f32::INFINITY, 0.0, 1.0, f32::NAN]] {
        let got = logprob(&odd, 1, 20);
        let all = got.top.iter().map(|(_, l)| *l).chain([got.logprob]);
        assert_eq!(got.top.len(), 4);
        assert!(all.into_iter().all(|l| (floor..=0.0).contains(&l)), "{odd:?}: {got:?}");
    }
}

#[test]
fn log_probabilities_are_those_of_a_softmax_in_float64() {
    let logits: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 1000) as f32 / 50.0).collect();
    let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
    let got = logprob(&logits, 17, 20);
    let want = |id: usize| (f64::from(logits[id]).exp() / total).ln();
    assert!((f64::from(got.logprob) - want(17)).abs() < 1e-6);
    assert_eq!(got.top.len(), 20);
    let mut order: Vec<usize> = (0..1000).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    for ((id, value), want_id) in got.top.iter().zip(order) {
        assert_eq!(*id as usize, want_id);
        assert!((f64::from(*value) - want(want_id)).abs() < 1e-6);
    }
}

#[test]
fn equal_alternatives_come_in_ascending_id_and_no_more_than_twenty() {
    let logits = [1.0f32; 40];
    let ids: Vec<u32> = logprob(&logits, 0, 255).top.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, (0..20).collect::<Vec<u32>>());
    let ids: Vec<u32> = logprob(&[0.0, 2.0, 1.0, 2.0, 1.0], 0, 4).top.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, [1, 3, 2, 4]);
}

#[test]
fn forbidden_tokens_are_not_drawn_and_log_probabilities_do_not_know_them() {
    let mut sampler = Sampler::default();
    let logits = [0.5f32, 4.0, 1.0, 3.0];
    let free = sampler.token(&logits, &how(0.0, 0, &[], Some(2)));
    assert_eq!(free.id, 1);
    let held = sampler.token(&logits, &how(0.0, 0, &[1, 900], Some(2)));
    assert_eq!(held.id, 3);
    let (free, held) = (free.logprob.unwrap(), held.logprob.unwrap());
    assert_eq!(free.top, held.top);
    assert_eq!(held.logprob, held.top[1].1, "its own, from the whole distribution");
    for seed in 0..200 {
        let token = sampler.token(&logits, &how(1.0, seed, &[1, 3], None));
        assert!(matches!(token.id, 0 | 2) && token.logprob.is_none());
    }
}

#[test]
fn a_seeded_draw_does_not_change_with_what_was_drawn_before() {
    let rows: Vec<Vec<f32>> =
        (0..32).map(|r| (0..50).map(|i| ((i * 31 + r * 17) % 23) as f32 / 4.0).collect()).collect();
    let seeded = how(0.8, 42, &[3], Some(3));
    let alone = Sampler::default().token(&rows[5], &seeded);
    for others in [0u64, 1, 99] {
        let mut sampler = Sampler::default();
        for (r, row) in rows.iter().enumerate() {
            let drawn = match r {
                5 => sampler.token(row, &seeded),
                _ => sampler.token(row, &how(others as f32 / 40.0, others + r as u64, &[7], None)),
            };
            assert!(r != 5 || drawn == alone, "after neighbours of kind {others}");
        }
    }
    let ids: std::collections::BTreeSet<u32> =
        (0..50).map(|seed| Sampler::default().token(&rows[5], &how(0.8, seed, &[], None)).id).collect();
    assert!(ids.len() > 3, "the seed matters: {ids:?}");
}
