//! Verification of drafts: what is accepted, how many drafts of each sequence are worth a row, and how many of
//! the whole batch (model.md section 10). Pure functions over numbers; no model, no clock.
//!
//! Words. The *confidence* of a draft estimates the probability that it is accepted if all drafts before it were.
//! Its *survival* is the product of the confidences up to and including its own: the probability that it is
//! emitted. Survival never rises along a sequence, so the best drafts of a batch are always a prefix of each
//! sequence, and every sequence verifies its known token besides.

use std::cmp::Ordering;

/// What a verified step of one sequence emits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Accepted drafts: the first `accepted` of them are emitted.
    pub accepted: usize,
    /// The token after them, from the target model itself. Not run yet.
    pub next: u32,
}

/// Greedy acceptance: drafts are kept while each equals the target's best token at the row before it.
///
/// `target_argmax` has one token per verified row, `drafts.len() + 1` of them: row 0 follows the known token, row
/// `j` follows draft `j - 1`.
///
/// # Panics
/// If the lengths do not fit.
pub fn accept_greedy(drafts: &[u32], target_argmax: &[u32]) -> Verdict {
    assert_eq!(target_argmax.len(), drafts.len() + 1, "one target row per draft and one more");
    let accepted = drafts.iter().zip(target_argmax).take_while(|(draft, target)| draft == target).count();
    Verdict { accepted, next: target_argmax[accepted] }
}

/// Probability of accepting a sampled draft: `min(1, target / draft)`, both probabilities of the drafted token
/// under the same temperature and filters. A draft that its own distribution gives nothing is never accepted.
pub fn accept_probability(target: f64, draft: f64) -> f64 {
    if draft > 0.0 { (target / draft).min(1.0) } else { 0.0 }
}

/// Distribution to sample from after a rejection: `max(target - draft, 0)`, renormalised, written over `target`.
///
/// Equal distributions leave nothing; a rejection is then impossible up to rounding, and `target` is kept.
///
/// # Panics
/// If the lengths differ.
pub fn residual(target: &mut [f64], draft: &[f64]) {
    assert_eq!(target.len(), draft.len(), "both distributions cover the vocabulary");
    let rest: f64 = target.iter().zip(draft).map(|(t, d)| (t - d).max(0.0)).sum();
    if rest <= 0.0 {
        return;
    }
    for (t, d) in target.iter_mut().zip(draft) {
        *t = (*t - d).max(0.0) / rest;
    }
}

/// Survival of every draft of the batch, highest first; the input of [`drafts_to_verify`].
///
/// `confidence[i]` holds the confidences of sequence `i`'s drafts in order; a sequence that drafts nothing has an
/// empty row, one without estimates yet has ones.
pub fn survivals<R: AsRef<[f64]>>(confidence: &[R]) -> Vec<f64> {
    ranked(confidence).into_iter().map(|d| d.survival).collect()
}

/// Query rows of each sequence, its known token included, when `total_rows` rows are spread over the batch by
/// survival. Ties go to the lower sequence, then to the earlier draft. Every sequence gets at least one row even if
/// `total_rows` is smaller than the batch, and none gets more than its drafts plus one.
pub fn rows_per_sequence<R: AsRef<[f64]>>(confidence: &[R], total_rows: usize) -> Vec<usize> {
    let mut rows = vec![1; confidence.len()];
    let drafts = total_rows.saturating_sub(confidence.len());
    for draft in ranked(confidence).into_iter().take(drafts) {
        rows[draft.sequence] += 1;
    }
    rows
}

/// How many of the batch's drafts to verify in this step: the `k` with the most expected tokens per millisecond,
/// `(sequences + sum of the k highest survivals) / step_ms(sequences + k)`. The smallest such `k`.
///
/// `survivals` is highest first ([`survivals`]); `step_ms(rows)` is the time of a step with that many query rows,
/// in milliseconds, greater than zero.
pub fn drafts_to_verify(survivals: &[f64], sequences: usize, step_ms: impl Fn(usize) -> f64) -> usize {
    let mut expected = sequences as f64;
    let mut best = (expected / step_ms(sequences), 0);
    for (i, survival) in survivals.iter().enumerate() {
        expected += survival;
        let rate = expected / step_ms(sequences + i + 1);
        if rate > best.0 {
            best = (rate, i + 1);
        }
    }
    best.1
}

/// One draft of the batch.
struct Ranked {
    survival: f64,
    sequence: usize,
}

/// All drafts, highest survival first; equal ones in the order of sequences and positions.
fn ranked<R: AsRef<[f64]>>(confidence: &[R]) -> Vec<Ranked> {
    let mut all = Vec::new();
    for (sequence, row) in confidence.iter().enumerate() {
        let mut survival = 1.0;
        for c in row.as_ref() {
            survival *= c;
            all.push(Ranked { survival, sequence });
        }
    }
    // The sort is stable, so equal survivals stay in the order in which they were listed.
    all.sort_by(|a, b| b.survival.partial_cmp(&a.survival).unwrap_or(Ordering::Equal));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_acceptance_stops_at_the_first_difference_and_emits_the_targets_token() {
        let drafts = [5, 6, 7];
        assert_eq!(accept_greedy(&drafts, &[5, 6, 7, 9]), Verdict { accepted: 3, next: 9 });
        assert_eq!(accept_greedy(&drafts, &[5, 8, 7, 9]), Verdict { accepted: 1, next: 8 });
        assert_eq!(accept_greedy(&drafts, &[4, 6, 7, 9]), Verdict { accepted: 0, next: 4 });
        assert_eq!(accept_greedy(&[], &[3]), Verdict { accepted: 0, next: 3 });
    }

    #[test]
    fn sampled_acceptance_and_residual_together_reproduce_the_target_distribution() {
        let target = [0.5, 0.2, 0.3];
        let draft = [0.1, 0.6, 0.3];
        let rejected: f64 = (0..3).map(|i| draft[i] * (1.0 - accept_probability(target[i], draft[i]))).sum();
        let mut rest = target;
        residual(&mut rest, &draft);
        for i in 0..3 {
            let emitted = draft[i] * accept_probability(target[i], draft[i]) + rejected * rest[i];
            assert!((emitted - target[i]).abs() < 1e-12, "token {i}: {emitted} for {}", target[i]);
        }
    }

    #[test]
    fn equal_distributions_accept_everything_and_keep_the_target() {
        let mut target = [0.25, 0.75];
        assert_eq!(accept_probability(0.25, 0.25), 1.0);
        residual(&mut target, &[0.25, 0.75]);
        assert_eq!(target, [0.25, 0.75]);
        assert_eq!(accept_probability(0.5, 0.0), 0.0);
    }

    #[test]
    fn rows_go_to_the_likeliest_drafts_and_ties_to_the_lower_sequence() {
        let confidence = [vec![0.5, 0.5], vec![0.9, 0.1], vec![0.5, 1.0], vec![]];
        assert_eq!(rows_per_sequence(&confidence, 4), [1, 1, 1, 1]);
        assert_eq!(rows_per_sequence(&confidence, 5), [1, 2, 1, 1]);
        assert_eq!(rows_per_sequence(&confidence, 6), [2, 2, 1, 1]);
        assert_eq!(rows_per_sequence(&confidence, 8), [2, 2, 3, 1]);
        assert_eq!(rows_per_sequence(&confidence, 100), [3, 3, 3, 1]);
        assert_eq!(rows_per_sequence(&confidence, 2), [1, 1, 1, 1], "never less than the known token");
    }

    #[test]
    fn survivals_are_running_products_highest_first() {
        assert_eq!(survivals(&[vec![0.5, 0.5], vec![0.75]]), [0.75, 0.5, 0.25]);
        assert!(survivals::<Vec<f64>>(&[]).is_empty());
    }

    #[test]
    fn no_draft_is_verified_when_rows_are_dear_and_all_when_they_are_free() {
        let survivals = [0.9, 0.5, 0.1];
        assert_eq!(drafts_to_verify(&survivals, 2, |rows| rows as f64), 0);
        assert_eq!(drafts_to_verify(&survivals, 2, |_| 1.0), 3);
        // One more row is free, the next doubles the step.
        assert_eq!(drafts_to_verify(&survivals, 2, |rows| if rows <= 3 { 1.0 } else { 2.0 }), 1);
    }

    #[test]
    fn equal_rates_choose_the_fewer_drafts() {
        assert_eq!(drafts_to_verify(&[1.0, 1.0], 1, |rows| rows as f64), 0);
        assert_eq!(drafts_to_verify(&[], 3, |_| 1.0), 0);
    }
}
