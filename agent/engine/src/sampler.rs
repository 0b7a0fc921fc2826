//! From logits to a token: pure, with the random draw given by (seed, position, use) alone.
//!
//! The draws follow serving.md DS-1, so a retry, another rank or another batch gives the same token; greedy
//! choice and its ties follow DS-2. Probabilities are added in float64 in ascending token order.
//! Log-probabilities are those of the model itself: temperature, top-p and forbidden tokens do not change them.

use deepinfer_protocol::generate::{Logprob, Token};
use deepinfer_protocol::limits::MAX_TOP_LOGPROBS;
use deepinfer_serving::node::Sample;

/// Temperatures below this are greedy.
pub const GREEDY_BELOW: f32 = 1e-5;
/// Added to a request's seed for what the draft layers sample themselves.
pub const DRAFT_SEED: u64 = 1_000_000_007;
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// How one request samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; below [`GREEDY_BELOW`] the highest logit wins.
    pub temperature: f32,
    /// Smallest probability mass kept, from the most likely token down; 1 keeps all.
    pub top_p: f32,
    /// Seed of the request's draws.
    pub seed: u64,
}

impl Default for Sampling {
    /// Greedy.
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, seed: 0 }
    }
}

/// What a draw is used for; each has its own stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draw {
    /// A direct sample from the model's distribution.
    Sample,
    /// A sample from the residual after a draft was refused.
    Resample,
    /// The test whether a draft is accepted.
    Accept,
}

/// The 53 random bits of a draw for the token at sequence position `position`.
pub fn draw_bits(seed: u64, position: u64, draw: Draw) -> u64 {
    let stream = |c: u64| position.wrapping_mul(3).wrapping_add(c).wrapping_mul(GOLDEN);
    let state = match draw {
        Draw::Sample | Draw::Resample => {
            let s = stream(u64::from(draw == Draw::Resample));
            seed.wrapping_add(s ^ (s << 13))
        }
        Draw::Accept => seed ^ stream(2),
    };
    split_mix(state) >> 11
}

/// The draw as a number in [0, 1).
pub fn uniform(seed: u64, position: u64, draw: Draw) -> f64 {
    // 53 bits fit a float64 exactly.
    draw_bits(seed, position, draw) as f64 / (1u64 << 53) as f64
}

/// The output function of SplitMix64 applied to one state.
fn split_mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The token with the highest logit; the lowest id of equal ones. NaN never wins; without any number: 0.
pub fn greedy(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (id, &logit) in logits.iter().enumerate() {
        if logit > best.0 {
            best = (logit, id);
        }
    }
    best.1 as u32
}

/// The token at sequence position `position`, drawn with [`Draw::Sample`].
///
/// Allocates once per call if the request is not greedy; a decode loop keeps a [`Sampler`].
pub fn sample(logits: &[f32], sampling: &Sampling, position: u64) -> u32 {
    Sampler::default().sample(logits, sampling, position)
}

/// Buffers for sampling, kept between tokens.
#[derive(Clone, Debug, Default)]
pub struct Sampler {
    probabilities: Vec<f64>,
    order: Vec<u32>,
    allowed: Vec<f32>,
}

impl Sampler {
    /// The token at sequence position `position`, drawn with [`Draw::Sample`].
    pub fn sample(&mut self, logits: &[f32], sampling: &Sampling, position: u64) -> u32 {
        self.choose(logits, sampling, uniform(sampling.seed, position, Draw::Sample))
    }

    /// The token after a row, drawn as a request wants it, with its log-probabilities if it wants them.
    ///
    /// Forbidden tokens are not drawn unless the vocabulary has no others; ids beyond it are ignored.
    pub fn token(&mut self, logits: &[f32], how: &Sample) -> Token {
        let sampling = Sampling { temperature: how.temperature, top_p: how.top_p, seed: how.seed };
        let id = if how.forbidden.is_empty() {
            self.sample(logits, &sampling, how.position)
        } else {
            let mut allowed = std::mem::take(&mut self.allowed);
            allowed.clear();
            allowed.extend_from_slice(logits);
            for &id in &how.forbidden {
                if let Some(logit) = allowed.get_mut(id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
            let id = self.sample(&allowed, &sampling, how.position);
            self.allowed = allowed;
            id
        };
        let logprob = how.logprobs.map(|top| Box::new(logprob(logits, id, top)));
        Token { id, logprob }
    }

    /// The token that the uniform draw `x` in [0, 1) picks.
    pub fn choose(&mut self, logits: &[f32], sampling: &Sampling, x: f64) -> u32 {
        if sampling.temperature < GREEDY_BELOW {
            return greedy(logits);
        }
        let probabilities = self.probabilities(logits, sampling);
        pick(probabilities, x).unwrap_or_else(|| greedy(logits))
    }

    /// Unnormalised probabilities after temperature and top-p, 0 where excluded, `[logits.len()]`.
    ///
    /// The temperature must not be greedy.
    pub fn probabilities(&mut self, logits: &[f32], sampling: &Sampling) -> &[f64] {
        let temperature = f64::from(sampling.temperature);
        let top = f64::from(logits[greedy(logits) as usize]);
        self.probabilities.clear();
        let weight = |&l: &f32| {
            if l.is_nan() { 0.0 } else { ((f64::from(l) - top) / temperature).exp() }
        };
        self.probabilities.extend(logits.iter().map(weight));
        if sampling.top_p < 1.0 {
            self.keep_top(f64::from(sampling.top_p));
        }
        &self.probabilities
    }

    /// Sets to 0 what is not among the most likely tokens that together reach `top_p` of the mass.
    fn keep_top(&mut self, top_p: f64) {
        let p = &mut self.probabilities;
        let target = p.iter().sum::<f64>() * top_p;
        self.order.clear();
        self.order.extend(0..p.len() as u32);
        self.order.sort_unstable_by(|&a, &b| p[b as usize].total_cmp(&p[a as usize]).then(a.cmp(&b)));
        let mut mass = 0.0;
        let mut kept = 0;
        for &id in &self.order {
            mass += p[id as usize];
            kept += 1;
            if mass >= target {
                break;
            }
        }
        for &id in &self.order[kept..] {
            p[id as usize] = 0.0;
        }
    }
}

/// Log-probability of `token` and of the `top` most likely tokens (20 at most; ties by lowest id), by a softmax
/// over the whole vocabulary at temperature 1. All are finite, at least [`Logprob::FLOOR`].
pub fn logprob(logits: &[f32], token: u32, top: u8) -> Logprob {
    let highest = f64::from(logits[greedy(logits) as usize]);
    let numbers = logits.iter().filter(|l| !l.is_nan());
    let sum: f64 = numbers.map(|&l| (f64::from(l) - highest).exp()).sum();
    let log_sum = sum.ln();
    let of = |logit: f32| {
        let value = f64::from(logit) - highest - log_sum;
        let floor = f64::from(Logprob::FLOOR);
        if value.is_nan() { Logprob::FLOOR } else { value.clamp(floor, 0.0) as f32 }
    };
    let top = highest_of(logits, top.min(MAX_TOP_LOGPROBS).into());
    Logprob {
        logprob: logits.get(token as usize).map_or(Logprob::FLOOR, |&logit| of(logit)),
        top: top.into_iter().map(|id| (id, of(logits[id as usize]))).collect(),
    }
}

/// The tokens with the `count` highest logits, highest first; the lower id of equal ones first. NaN is lowest.
fn highest_of(logits: &[f32], count: usize) -> Vec<u32> {
    let value = |id: u32| Some(logits[id as usize]).filter(|l| !l.is_nan()).unwrap_or(f32::NEG_INFINITY);
    let mut best: Vec<u32> = Vec::with_capacity(count + 1);
    for id in 0..logits.len() as u32 {
        let logit = value(id);
        if best.len() == count && best.last().is_none_or(|&last| logit <= value(last)) {
            continue;
        }
        best.insert(best.partition_point(|&b| value(b) >= logit), id);
        best.truncate(count);
    }
    best
}

/// The first index whose cumulative weight exceeds `x` times the total; `None` if the weights sum to nothing.
fn pick(weights: &[f64], x: f64) -> Option<u32> {
    let threshold = weights.iter().sum::<f64>() * x;
    let mut sum = 0.0;
    let mut last = None;
    for (id, &weight) in weights.iter().enumerate() {
        sum += weight;
        if weight > 0.0 {
            last = Some(id as u32);
        }
        if sum > threshold {
            return Some(id as u32);
        }
    }
    last
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
