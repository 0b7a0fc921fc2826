//! Hash primes of the Engram tables (model.md 8, rule 4).

/// Bases that make Miller-Rabin exact for every 64-bit number.
const WITNESSES: [u64; 12] = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37];

fn power(mut base: u64, mut exponent: u64, modulus: u64) -> u64 {
    let mut result = 1;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = times(result, base, modulus);
        }
        base = times(base, base, modulus);
        exponent >>= 1;
    }
    result
}

fn times(a: u64, b: u64, modulus: u64) -> u64 {
    (u128::from(a) * u128::from(b) % u128::from(modulus)) as u64
}

fn is_prime(n: u64) -> bool {
    if let Some(&p) = WITNESSES.iter().find(|&&p| n.is_multiple_of(p)) {
        return n == p;
    }
    if n < 2 {
        return false;
    }
    let twos = (n - 1).trailing_zeros();
    let odd = (n - 1) >> twos;
    WITNESSES.iter().all(|&base| {
        let mut x = power(base, odd, n);
        let mut squares = 0;
        while x != 1 && x != n - 1 && squares + 1 < twos {
            x = times(x, x, n);
            squares += 1;
        }
        x == n - 1 || (x == 1 && squares == 0)
    })
}

/// The `count` smallest primes from `start` on, ascending.
///
/// The tables take "the smallest primes not used before", layer by layer and length by length, so all of them
/// together are simply the next ones.
pub(super) fn primes_from(start: u64, count: usize) -> Vec<u64> {
    (start..).filter(|&n| is_prime(n)).take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_numbers_agree_with_trial_division() {
        let slow = |n: u64| n >= 2 && (2..n).take_while(|d| d * d <= n).all(|d| !n.is_multiple_of(d));
        for n in 0..20_000 {
            assert_eq!(is_prime(n), slow(n), "{n}");
        }
    }

    #[test]
    fn products_of_two_large_primes_are_not_prime() {
        assert!(is_prime(16_000_057) && is_prime(4_294_967_291));
        assert!(!is_prime(16_000_057 * 16_000_079));
        assert!(!is_prime(4_294_967_291 * 4_294_967_279));
        // The smallest number that fools the bases 2, 3, 5 and 7.
        assert!(!is_prime(3_215_031_751));
    }
}
