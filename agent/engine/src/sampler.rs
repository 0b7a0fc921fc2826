//! From logits to a token: pure, with the random draw given by (seed, position, use) alone.
//!
//! The draws follow serving.md DS-1, so a retry, another rank or another batch gives the same token; greedy
//! choice and its ties follow DS-2. Probabilities are added in float64 in ascending token order.

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
}

impl Sampler {
    /// The token at sequence position `position`, drawn with [`Draw::Sample`].
    pub fn sample(&mut self, logits: &[f32], sampling: &Sampling, position: u64) -> u32 {
        self.choose(logits, sampling, uniform(sampling.seed, position, Draw::Sample))
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
mod tests {
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
        let picks: Vec<u32> =
            [0.0, 0.2, 0.3, 0.49, 0.51, 0.999].map(|x| sampler.choose(&logits, &s, x)).to_vec();
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
}
