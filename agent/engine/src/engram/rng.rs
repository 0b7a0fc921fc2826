//! The generator behind the Engram multipliers (model.md 8, rule 5): numpy's `default_rng(seed)` in plain
//! integers.
//!
//! A seed is stretched to 256 bits by hashing words into a pool of four and back out; they set state and
//! stream of a 128-bit linear congruential generator whose output is a rotated xor of its halves (PCG XSL-RR
//! 128/64). Numbers below a bound are the high half of a product with the bound, with rejection of the few
//! biased low halves.

const POOL: usize = 4;
const MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;

/// Hashes 32-bit words one after the other; the constant moves with every word.
struct WordHash {
    constant: u32,
    factor: u32,
}

impl WordHash {
    fn next(&mut self, word: u32) -> u32 {
        let word = word ^ self.constant;
        self.constant = self.constant.wrapping_mul(self.factor);
        let word = word.wrapping_mul(self.constant);
        word ^ (word >> 16)
    }
}

fn mix(x: u32, y: u32) -> u32 {
    let z = x.wrapping_mul(0xCA01_F9DD).wrapping_sub(y.wrapping_mul(0x4973_F715));
    z ^ (z >> 16)
}

/// 256 bits from a 64-bit seed.
fn stretch(seed: u64) -> [u64; 4] {
    let mut hash = WordHash { constant: 0x43B0_D7E5, factor: 0x931E_8875 };
    let words = [seed as u32, (seed >> 32) as u32, 0, 0];
    let mut pool = words.map(|word| hash.next(word));
    for from in 0..POOL {
        for to in (0..POOL).filter(|&to| to != from) {
            let hashed = hash.next(pool[from]);
            pool[to] = mix(pool[to], hashed);
        }
    }
    let mut hash = WordHash { constant: 0x8B51_F9DD, factor: 0x58F3_8DED };
    std::array::from_fn(|i| {
        let low = hash.next(pool[2 * i % POOL]);
        let high = hash.next(pool[(2 * i + 1) % POOL]);
        u64::from(low) | u64::from(high) << 32
    })
}

/// The generator.
pub(super) struct Pcg64 {
    state: u128,
    increment: u128,
}

impl Pcg64 {
    pub(super) fn new(seed: u64) -> Self {
        let [a, b, c, d] = stretch(seed);
        let wide = |high: u64, low: u64| u128::from(high) << 64 | u128::from(low);
        let mut rng = Self { state: 0, increment: wide(c, d) << 1 | 1 };
        rng.step();
        rng.state = rng.state.wrapping_add(wide(a, b));
        rng.step();
        rng
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    /// Uniform in `0..bound`. The bound is above 2^32, where numpy uses this method.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 1 << 32, "bound {bound} would take numpy's 32-bit path");
        let biased = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.next()) * u128::from(bound);
            if product as u64 >= biased {
                return (product >> 64) as u64;
            }
        }
    }
}
