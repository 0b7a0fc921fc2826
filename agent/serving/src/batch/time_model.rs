//! How long a step takes, learned from the steps that ran (PF-1, PF-2).
//!
//! `t = b0 + b1 work + b2 rows + b3 sequences` by least squares over recent steps, the older the lighter, with
//! `b >= 0`. The only floating point of the scheduler; what leaves this file is rounded integers.
//!
//! Invariant: predictions never fall when work, rows or sequences grow.

use std::collections::VecDeque;

use deepinfer_protocol::{Span, Time};

/// Steps that the fit remembers.
pub const FIT_STEPS: usize = 2_000;
/// Weight of a step against the next one.
const FORGETTING: f64 = 0.999;
/// A step farther from its prediction than this many median deviations says nothing about the next one.
const OUTLIER_DEVIATIONS: f64 = 5.0;
/// Errors that are looked back at for outliers and percentiles. Refused steps are among them: when the machine
/// really changed, the median follows within half of these and steps count again.
const RECENT_ERRORS: usize = 256;
/// No step is an outlier before this many are known.
const ERRORS_TO_JUDGE: usize = 32;
/// Deviations below this share of a prediction are noise of any machine.
const LEAST_DEVIATION: f64 = 0.02;
/// A 90th percentile of the error above this is worth a warning (PF-2).
const WARNING_ERROR: f64 = 0.15;
/// For this long.
const WARNING_AFTER: Span = Span::secs(300);
/// Weight of the belief that all time is work, which decides while steps are too few or too much alike.
const BELIEF_WEIGHT: f64 = 0.01;
/// Keeps the equations solvable when two columns always move together.
const RIDGE: f64 = 1e-9;

const TERMS: usize = 4;
type Vector = [f64; TERMS];
type Matrix = [Vector; TERMS];

/// What a step has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepLoad {
    /// Estimated operations (of the slowest rank).
    pub work: u128,
    /// Rows.
    pub rows: usize,
    /// Sequences.
    pub sequences: usize,
}

impl StepLoad {
    fn terms(self) -> Vector {
        [1.0, self.work as f64, self.rows as f64, self.sequences as f64]
    }
}

/// The fitted coefficients, rounded, for logs and status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fit {
    /// Nanoseconds of any step.
    pub base_ns: u64,
    /// Nanoseconds per 10^9 operations.
    pub giga_work_ns: u64,
    /// Nanoseconds per row.
    pub row_ns: u64,
    /// Nanoseconds per sequence.
    pub sequence_ns: u64,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct TimeModel {
    /// Operations per second before any step.
    guess: f64,
    steps: VecDeque<(StepLoad, f64)>,
    gram: Matrix,
    moment: Vector,
    /// Steps counted since the sums were made anew.
    since_rebuild: usize,
    coefficients: Vector,
    /// Signed relative errors of predictions.
    errors: VecDeque<f64>,
    error_p90: Option<f64>,
    inaccurate_since: Option<Time>,
}

impl TimeModel {
    /// A model that believes in `work_per_second` (at least 1) until steps have run, and has seen the steps of
    /// `profile`: those that were timed at start, see [`profile_ladder`].
    pub fn new(work_per_second: u64, profile: &[(StepLoad, Span)]) -> Self {
        let mut model = Self {
            guess: work_per_second.max(1) as f64,
            steps: VecDeque::new(),
            gram: [[0.0; TERMS]; TERMS],
            moment: [0.0; TERMS],
            since_rebuild: 0,
            coefficients: [0.0; TERMS],
            errors: VecDeque::new(),
            error_p90: None,
            inaccurate_since: None,
        };
        for &(load, elapsed) in profile {
            model.learn(load, elapsed.0 as f64);
        }
        model.refit();
        model
    }

    /// Predicted time, rounded up.
    pub fn predict(&self, load: StepLoad) -> Span {
        // A float beyond the range becomes the largest integer.
        Span(self.expect(load).ceil() as u64)
    }

    /// Learns from a step. `false`: it was too far off to say anything, and only counts as an error.
    pub fn observe(&mut self, now: Time, load: StepLoad, elapsed: Span) -> bool {
        let actual = elapsed.0 as f64;
        let error = (actual - self.expect(load)) / actual.max(1.0);
        let accepted = self.plausible(error);
        self.errors.push_back(error);
        if self.errors.len() > RECENT_ERRORS {
            self.errors.pop_front();
        }
        if accepted {
            self.learn(load, actual);
            self.refit();
        }
        self.judge(now);
        accepted
    }

    /// 90th percentile of `|predicted - actual| / actual` of recent steps, in parts per million; `None` before
    /// the first.
    pub fn error_p90_ppm(&self) -> Option<u32> {
        self.error_p90.map(|error| (error * 1e6).round() as u32)
    }

    /// Whether predictions have been off for so long that it is worth a warning.
    pub fn inaccurate(&self, now: Time) -> bool {
        self.inaccurate_since.is_some_and(|since| now.since(since) >= WARNING_AFTER)
    }

    /// A budget, wider by the error while [`TimeModel::inaccurate`].
    pub fn widen(&self, now: Time, budget: Span) -> Span {
        let error = self.error_p90_ppm().filter(|_| self.inaccurate(now)).unwrap_or(0);
        let extra = u128::from(budget.0) * u128::from(error) / 1_000_000;
        budget.plus(Span(u64::try_from(extra).unwrap_or(u64::MAX)))
    }

    /// Steps that the fit rests on.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// The coefficients.
    pub fn fit(&self) -> Fit {
        let [base, work, row, sequence] = self.coefficients;
        let round = |x: f64| x.round() as u64;
        Fit {
            base_ns: round(base),
            giga_work_ns: round(work * 1e9),
            row_ns: round(row),
            sequence_ns: round(sequence),
        }
    }

    /// Solves for the coefficients, with one light step more: all of the mean time for the mean work, or the guess
    /// if no step has run.
    fn refit(&mut self) {
        let (mut gram, mut moment) = (self.gram, self.moment);
        let (steps, work) = (gram[0][0], gram[0][1]);
        let (work, elapsed) = if steps > 0.0 { (work / steps, moment[0] / steps) } else { (self.guess, 1e9) };
        add(&mut gram, &mut moment, [0.0, work, 0.0, 0.0], elapsed, BELIEF_WEIGHT);
        self.coefficients = solve(&gram, &moment);
    }

    fn expect(&self, load: StepLoad) -> f64 {
        load.terms().iter().zip(&self.coefficients).map(|(x, b)| x * b).sum()
    }

    /// Whether an error is among the usual ones: not farther from their median than a few median deviations.
    fn plausible(&self, error: f64) -> bool {
        if self.errors.len() < ERRORS_TO_JUDGE {
            return true;
        }
        let mut errors: Vec<f64> = self.errors.iter().copied().collect();
        let middle = quantile(&mut errors, 0.5);
        errors.iter_mut().for_each(|e| *e = (*e - middle).abs());
        let deviation = quantile(&mut errors, 0.5).max(LEAST_DEVIATION);
        (error - middle).abs() <= OUTLIER_DEVIATIONS * deviation
    }

    fn learn(&mut self, load: StepLoad, elapsed: f64) {
        for row in &mut self.gram {
            row.iter_mut().for_each(|x| *x *= FORGETTING);
        }
        self.moment.iter_mut().for_each(|x| *x *= FORGETTING);
        add(&mut self.gram, &mut self.moment, load.terms(), elapsed, 1.0);
        self.steps.push_back((load, elapsed));
        self.since_rebuild += 1;
        if self.steps.len() > FIT_STEPS
            && let Some((oldest, took)) = self.steps.pop_front()
        {
            let weight = FORGETTING.powi(FIT_STEPS as i32);
            add(&mut self.gram, &mut self.moment, oldest.terms(), took, -weight);
        }
        if self.since_rebuild > FIT_STEPS {
            self.rebuild();
        }
    }

    /// Makes the sums anew: taking steps out leaves rounding errors behind.
    fn rebuild(&mut self) {
        self.gram = [[0.0; TERMS]; TERMS];
        self.moment = [0.0; TERMS];
        let mut weight = 1.0;
        for (load, elapsed) in self.steps.iter().rev() {
            add(&mut self.gram, &mut self.moment, load.terms(), *elapsed, weight);
            weight *= FORGETTING;
        }
        self.since_rebuild = 0;
    }

    fn judge(&mut self, now: Time) {
        let mut sizes: Vec<f64> = self.errors.iter().map(|e| e.abs()).collect();
        let p90 = quantile(&mut sizes, 0.9);
        self.error_p90 = Some(p90);
        if p90 <= WARNING_ERROR {
            self.inaccurate_since = None;
        } else {
            self.inaccurate_since.get_or_insert(now);
        }
    }
}

/// Steps to time at start, as (new rows, position of the last), cheapest first: every power of two from 128 to
/// 32,768 rows at every power of two of context up to 1,048,576, none beyond `context_limit`. The caller stops
/// when its time for this is over: two seconds on the cpu.
pub fn profile_ladder(context_limit: usize) -> Vec<(usize, usize)> {
    let rows = (7..=15).map(|n| 1_usize << n);
    let pairs = rows.flat_map(|q| (7..=20).map(|n| 1_usize << n).map(move |k| (q, k)));
    pairs.filter(|&(q, k)| q <= k && k <= context_limit).collect()
}

/// The value below which the share `q` of the values lies. Reorders them; there is at least one.
fn quantile(values: &mut [f64], q: f64) -> f64 {
    let rank = (values.len() as f64 * q).ceil() as usize;
    let (_, value, _) = values.select_nth_unstable_by(rank.saturating_sub(1), f64::total_cmp);
    *value
}

fn add(gram: &mut Matrix, moment: &mut Vector, terms: Vector, value: f64, weight: f64) {
    for i in 0..TERMS {
        for j in 0..TERMS {
            gram[i][j] += weight * terms[i] * terms[j];
        }
        moment[i] += weight * terms[i] * value;
    }
}

/// Least squares with coefficients of at least 0: the best of all choices of terms. Four terms make fifteen.
fn solve(gram: &Matrix, moment: &Vector) -> Vector {
    // Columns differ by many orders of magnitude, so they are scaled to one first.
    let scale: Vector = std::array::from_fn(|i| gram[i][i].max(0.0).sqrt());
    let mut best = ([0.0; TERMS], 0.0);
    for chosen in 1_u32..1 << TERMS {
        let terms: Vec<usize> = (0..TERMS).filter(|&i| chosen & (1 << i) != 0 && scale[i] > 0.0).collect();
        if terms.len() != chosen.count_ones() as usize {
            continue;
        }
        let Some(solution) = solve_chosen(gram, moment, &scale, &terms) else {
            continue;
        };
        // How much this choice takes off the sum of squares.
        let gain: f64 = (0..TERMS).map(|i| solution[i] * moment[i]).sum();
        if solution.iter().all(|&b| b >= 0.0 && b.is_finite()) && gain > best.1 {
            best = (solution, gain);
        }
    }
    best.0
}

/// Solves the scaled equations of some terms by Cholesky's method; `None` if they are not positive definite.
fn solve_chosen(gram: &Matrix, moment: &Vector, scale: &Vector, terms: &[usize]) -> Option<Vector> {
    let n = terms.len();
    let mut lower = [[0.0; TERMS]; TERMS];
    let mut solution = [0.0; TERMS];
    for i in 0..n {
        for j in 0..=i {
            let (a, b) = (terms[i], terms[j]);
            let mut sum = gram[a][b] / (scale[a] * scale[b]);
            if i == j {
                sum += RIDGE;
            }
            sum -= (0..j).map(|k| lower[i][k] * lower[j][k]).sum::<f64>();
            if i == j {
                if sum <= 0.0 {
                    return None;
                }
                lower[i][i] = sum.sqrt();
            } else {
                lower[i][j] = sum / lower[j][j];
            }
        }
    }
    let mut half = [0.0; TERMS];
    for i in 0..n {
        let sum: f64 = (0..i).map(|k| lower[i][k] * half[k]).sum();
        half[i] = (moment[terms[i]] / scale[terms[i]] - sum) / lower[i][i];
    }
    for i in (0..n).rev() {
        let sum: f64 = (i + 1..n).map(|k| lower[k][i] * solution[terms[k]]).sum();
        solution[terms[i]] = (half[i] - sum) / lower[i][i];
    }
    for &i in terms {
        solution[i] /= scale[i];
    }
    Some(solution)
}
