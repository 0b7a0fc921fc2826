//! Sixteen float32 lanes, three times: plain Rust, AVX2 and AVX-512, with the same bits.
//!
//! Invariant: every method is exact or rounds once as IEEE 754 says, so equal inputs give equal outputs in all
//! three (NaN payloads aside). The methods of [`Avx2`] and [`Avx512`] may be called only on machines that have the
//! instruction set; `dispatch_fn!` sees to it.

#![allow(unsafe_code)]

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Sixteen float32 lanes.
pub(crate) trait Lanes: Copy {
    /// All lanes `v`.
    fn splat(v: f32) -> Self;
    /// Lanes from an array.
    fn from_array(v: [f32; LANES]) -> Self;
    /// Lanes to an array.
    fn to_array(self) -> [f32; LANES];
    /// Reads 16 floats, any alignment.
    ///
    /// # Safety
    /// `p` points to 16 readable floats.
    unsafe fn load_ptr(p: *const f32) -> Self;
    /// Writes 16 floats, any alignment.
    ///
    /// # Safety
    /// `p` points to 16 writable floats.
    unsafe fn store_ptr(self, p: *mut f32);

    /// `self + o`.
    fn add(self, o: Self) -> Self;
    /// `self - o`.
    fn sub(self, o: Self) -> Self;
    /// `self * o`.
    fn mul(self, o: Self) -> Self;
    /// `self / o`.
    fn div(self, o: Self) -> Self;
    /// `self * m + a`, rounded once.
    fn fma(self, m: Self, a: Self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// `if self > o { self } else { o }`: the second operand if one is NaN or both are zeros.
    fn max(self, o: Self) -> Self;
    /// `if self < o { self } else { o }`: the second operand if one is NaN or both are zeros.
    fn min(self, o: Self) -> Self;
    /// Sign bit flipped.
    fn neg(self) -> Self;
    /// Sign bit cleared.
    fn abs(self) -> Self;
    /// Magnitude of `self`, sign of `sign`.
    fn copysign(self, sign: Self) -> Self;
    /// Rounded to the nearest integer, ties to even; for magnitudes below 2^31.
    fn round(self) -> Self;
    /// `2^self` for lanes that are integers in `-126 ..= 127`, by writing the exponent.
    fn pow2(self) -> Self;
    /// `if a > b { yes } else { no }` per lane; `no` where one is NaN.
    fn select_gt(a: Self, b: Self, yes: Self, no: Self) -> Self;

    /// Sum over lanes in the fixed tree: `l[j] += l[j + 8]`, then 4, 2, 1.
    fn reduce_add(self) -> f32;
    /// Highest lane.
    fn reduce_max(self) -> f32;
    /// `reduce_add` of sixteen vectors: lane `i` of the result is the sum of `v[i]`.
    fn reduce_add_16(v: [Self; LANES]) -> Self;

    /// All lanes +0.
    #[inline(always)]
    fn zero() -> Self {
        Self::splat(0.0)
    }
    /// The first 16 floats of `s`.
    #[inline(always)]
    fn load(s: &[f32]) -> Self {
        assert!(s.len() >= LANES);
        // SAFETY: 16 floats are there.
        unsafe { Self::load_ptr(s.as_ptr()) }
    }
    /// The floats of `s`, at most 16; the other lanes are +0.
    #[inline(always)]
    fn load_partial(s: &[f32]) -> Self {
        let mut v = [0.0; LANES];
        let n = s.len().min(LANES);
        v[..n].copy_from_slice(&s[..n]);
        Self::from_array(v)
    }
    /// Writes the first 16 floats of `s`.
    #[inline(always)]
    fn store(self, s: &mut [f32]) {
        assert!(s.len() >= LANES);
        // SAFETY: 16 floats are there.
        unsafe { self.store_ptr(s.as_mut_ptr()) }
    }
    /// Writes as many lanes as `s` has room for, at most 16.
    #[inline(always)]
    fn store_partial(self, s: &mut [f32]) {
        let n = s.len().min(LANES);
        s[..n].copy_from_slice(&self.to_array()[..n]);
    }
}

/// The tree of [`Lanes::reduce_add`] on an array.
#[inline(always)]
pub(crate) fn tree_sum(mut l: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for j in 0..width {
            l[j] += l[j + width];
        }
        width /= 2;
    }
    l[0]
}

/// Plain Rust.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Portable([f32; LANES]);

/// One lane of [`Lanes::pow2`].
#[inline(always)]
fn pow2_lane(v: f32) -> f32 {
    f32::from_bits(((v as i32 + 127) << 23) as u32)
}

/// `Portable` of an expression per lane.
macro_rules! per_lane {
    ($i:ident => $e:expr) => {{
        let mut out = [0.0f32; LANES];
        let mut $i = 0;
        while $i < LANES {
            out[$i] = $e;
            $i += 1;
        }
        Portable(out)
    }};
}

impl Lanes for Portable {
    #[inline(always)]
    fn splat(v: f32) -> Self {
        Portable([v; LANES])
    }
    #[inline(always)]
    fn from_array(v: [f32; LANES]) -> Self {
        Portable(v)
    }
    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        self.0
    }
    #[inline(always)]
    unsafe fn load_ptr(p: *const f32) -> Self {
        // SAFETY: the caller promises 16 floats; `read_unaligned` takes any address.
        Portable(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store_ptr(self, p: *mut f32) {
        // SAFETY: the caller promises 16 floats; `write_unaligned` takes any address.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        per_lane!(i => self.0[i] + o.0[i])
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        per_lane!(i => self.0[i] - o.0[i])
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        per_lane!(i => self.0[i] * o.0[i])
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        per_lane!(i => self.0[i] / o.0[i])
    }
    #[inline(always)]
    fn fma(self, m: Self, a: Self) -> Self {
        per_lane!(i => self.0[i].mul_add(m.0[i], a.0[i]))
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        per_lane!(i => self.0[i].sqrt())
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        per_lane!(i => if self.0[i] > o.0[i] { self.0[i] } else { o.0[i] })
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        per_lane!(i => if self.0[i] < o.0[i] { self.0[i] } else { o.0[i] })
    }
    #[inline(always)]
    fn neg(self) -> Self {
        per_lane!(i => -self.0[i])
    }
    #[inline(always)]
    fn abs(self) -> Self {
        per_lane!(i => self.0[i].abs())
    }
    #[inline(always)]
    fn copysign(self, sign: Self) -> Self {
        per_lane!(i => self.0[i].copysign(sign.0[i]))
    }
    #[inline(always)]
    fn round(self) -> Self {
        per_lane!(i => self.0[i].round_ties_even())
    }
    #[inline(always)]
    fn pow2(self) -> Self {
        per_lane!(i => pow2_lane(self.0[i]))
    }
    #[inline(always)]
    fn select_gt(a: Self, b: Self, yes: Self, no: Self) -> Self {
        per_lane!(i => if a.0[i] > b.0[i] { yes.0[i] } else { no.0[i] })
    }
    #[inline(always)]
    fn reduce_add(self) -> f32 {
        tree_sum(self.0)
    }
    #[inline(always)]
    fn reduce_max(self) -> f32 {
        let mut best = self.0[0];
        let mut i = 1;
        while i < LANES {
            if self.0[i] > best {
                best = self.0[i];
            }
            i += 1;
        }
        best
    }
    #[inline(always)]
    fn reduce_add_16(v: [Self; LANES]) -> Self {
        per_lane!(i => tree_sum(v[i].0))
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, Lanes};
    use std::arch::x86_64::*;

    /// Two AVX2 registers: lanes 0..8, lanes 8..16.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(pub(crate) __m256, pub(crate) __m256);

    /// One AVX-512 register.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(pub(crate) __m512);

    /// `Avx2` of an expression on both halves.
    macro_rules! both {
        ($f:ident($($v:expr),*)) => {
            // SAFETY: the machine has AVX2, FMA and F16C, see the file's invariant.
            unsafe { Avx2($f($($v.0),*), $f($($v.1),*)) }
        };
    }

    /// `Avx512` of an intrinsic.
    macro_rules! one {
        ($e:expr) => {
            // SAFETY: the machine has AVX-512 F, BW, VL and DQ, see the file's invariant.
            unsafe { $e }
        };
    }

    const SIGN: i32 = i32::MIN;

    impl Lanes for Avx2 {
        #[inline(always)]
        fn splat(v: f32) -> Self {
            // SAFETY: as in `both!`.
            unsafe { Avx2(_mm256_set1_ps(v), _mm256_set1_ps(v)) }
        }
        #[inline(always)]
        fn from_array(v: [f32; LANES]) -> Self {
            // SAFETY: the array has 16 floats.
            unsafe { Self::load_ptr(v.as_ptr()) }
        }
        #[inline(always)]
        fn to_array(self) -> [f32; LANES] {
            let mut v = [0.0; LANES];
            // SAFETY: the array has 16 floats.
            unsafe { self.store_ptr(v.as_mut_ptr()) };
            v
        }
        #[inline(always)]
        unsafe fn load_ptr(p: *const f32) -> Self {
            // SAFETY: the caller promises 16 floats.
            unsafe { Avx2(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
        }
        #[inline(always)]
        unsafe fn store_ptr(self, p: *mut f32) {
            // SAFETY: the caller promises 16 floats.
            unsafe {
                _mm256_storeu_ps(p, self.0);
                _mm256_storeu_ps(p.add(8), self.1);
            }
        }
        #[inline(always)]
        fn add(self, o: Self) -> Self {
            both!(_mm256_add_ps(self, o))
        }
        #[inline(always)]
        fn sub(self, o: Self) -> Self {
            both!(_mm256_sub_ps(self, o))
        }
        #[inline(always)]
        fn mul(self, o: Self) -> Self {
            both!(_mm256_mul_ps(self, o))
        }
        #[inline(always)]
        fn div(self, o: Self) -> Self {
            both!(_mm256_div_ps(self, o))
        }
        #[inline(always)]
        fn fma(self, m: Self, a: Self) -> Self {
            both!(_mm256_fmadd_ps(self, m, a))
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            both!(_mm256_sqrt_ps(self))
        }
        #[inline(always)]
        fn max(self, o: Self) -> Self {
            both!(_mm256_max_ps(self, o))
        }
        #[inline(always)]
        fn min(self, o: Self) -> Self {
            both!(_mm256_min_ps(self, o))
        }
        #[inline(always)]
        fn neg(self) -> Self {
            let sign = Self::splat(-0.0);
            both!(_mm256_xor_ps(self, sign))
        }
        #[inline(always)]
        fn abs(self) -> Self {
            let sign = Self::splat(-0.0);
            both!(_mm256_andnot_ps(sign, self))
        }
        #[inline(always)]
        fn copysign(self, sign: Self) -> Self {
            let mask = Self::splat(-0.0);
            let magnitude = self.abs();
            let sign = both!(_mm256_and_ps(mask, sign));
            both!(_mm256_or_ps(magnitude, sign))
        }
        #[inline(always)]
        fn round(self) -> Self {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            // SAFETY: as in `both!`.
            unsafe { Avx2(_mm256_round_ps::<NEAREST>(self.0), _mm256_round_ps::<NEAREST>(self.1)) }
        }
        #[inline(always)]
        fn pow2(self) -> Self {
            // SAFETY: as in `both!`.
            unsafe {
                let bias = _mm256_set1_epi32(127);
                let a = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvttps_epi32(self.0), bias));
                let b = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvttps_epi32(self.1), bias));
                Avx2(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b))
            }
        }
        #[inline(always)]
        fn select_gt(a: Self, b: Self, yes: Self, no: Self) -> Self {
            // SAFETY: as in `both!`.
            let mask =
                unsafe { Avx2(_mm256_cmp_ps::<_CMP_GT_OQ>(a.0, b.0), _mm256_cmp_ps::<_CMP_GT_OQ>(a.1, b.1)) };
            both!(_mm256_blendv_ps(no, yes, mask))
        }
        #[inline(always)]
        fn reduce_add(self) -> f32 {
            // SAFETY: as in `both!`.
            unsafe { add_8(_mm256_add_ps(self.0, self.1)) }
        }
        #[inline(always)]
        fn reduce_max(self) -> f32 {
            // SAFETY: as in `both!`.
            unsafe { max_8(_mm256_max_ps(self.0, self.1)) }
        }
        #[inline(always)]
        fn reduce_add_16(v: [Self; LANES]) -> Self {
            let mut out = [0.0; LANES];
            let mut i = 0;
            while i < LANES {
                out[i] = v[i].reduce_add();
                i += 1;
            }
            Self::from_array(out)
        }
    }

    /// The last three steps of the tree.
    #[inline(always)]
    unsafe fn add_8(v: __m256) -> f32 {
        // SAFETY: called by code that has AVX2 or more.
        unsafe {
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }

    /// Highest of eight lanes.
    #[inline(always)]
    unsafe fn max_8(v: __m256) -> f32 {
        // SAFETY: called by code that has AVX2 or more.
        unsafe {
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        }
    }

    impl Lanes for Avx512 {
        #[inline(always)]
        fn splat(v: f32) -> Self {
            one!(Avx512(_mm512_set1_ps(v)))
        }
        #[inline(always)]
        fn from_array(v: [f32; LANES]) -> Self {
            // SAFETY: the array has 16 floats.
            unsafe { Self::load_ptr(v.as_ptr()) }
        }
        #[inline(always)]
        fn to_array(self) -> [f32; LANES] {
            let mut v = [0.0; LANES];
            // SAFETY: the array has 16 floats.
            unsafe { self.store_ptr(v.as_mut_ptr()) };
            v
        }
        #[inline(always)]
        unsafe fn load_ptr(p: *const f32) -> Self {
            // SAFETY: the caller promises 16 floats.
            unsafe { Avx512(_mm512_loadu_ps(p)) }
        }
        #[inline(always)]
        unsafe fn store_ptr(self, p: *mut f32) {
            // SAFETY: the caller promises 16 floats.
            unsafe { _mm512_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        fn add(self, o: Self) -> Self {
            one!(Avx512(_mm512_add_ps(self.0, o.0)))
        }
        #[inline(always)]
        fn sub(self, o: Self) -> Self {
            one!(Avx512(_mm512_sub_ps(self.0, o.0)))
        }
        #[inline(always)]
        fn mul(self, o: Self) -> Self {
            one!(Avx512(_mm512_mul_ps(self.0, o.0)))
        }
        #[inline(always)]
        fn div(self, o: Self) -> Self {
            one!(Avx512(_mm512_div_ps(self.0, o.0)))
        }
        #[inline(always)]
        fn fma(self, m: Self, a: Self) -> Self {
            one!(Avx512(_mm512_fmadd_ps(self.0, m.0, a.0)))
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            one!(Avx512(_mm512_sqrt_ps(self.0)))
        }
        #[inline(always)]
        fn max(self, o: Self) -> Self {
            one!(Avx512(_mm512_max_ps(self.0, o.0)))
        }
        #[inline(always)]
        fn min(self, o: Self) -> Self {
            one!(Avx512(_mm512_min_ps(self.0, o.0)))
        }
        #[inline(always)]
        fn neg(self) -> Self {
            one!({
                let sign = _mm512_set1_epi32(SIGN);
                Avx512(_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(self.0), sign)))
            })
        }
        #[inline(always)]
        fn abs(self) -> Self {
            one!({
                let sign = _mm512_set1_epi32(SIGN);
                Avx512(_mm512_castsi512_ps(_mm512_andnot_si512(sign, _mm512_castps_si512(self.0))))
            })
        }
        #[inline(always)]
        fn copysign(self, sign: Self) -> Self {
            one!({
                // Per bit: mask ? sign : self.
                let mask = _mm512_set1_epi32(SIGN);
                let (a, b) = (_mm512_castps_si512(sign.0), _mm512_castps_si512(self.0));
                Avx512(_mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xca>(mask, a, b)))
            })
        }
        #[inline(always)]
        fn round(self) -> Self {
            one!(Avx512(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)))
        }
        #[inline(always)]
        fn pow2(self) -> Self {
            one!({
                let n = _mm512_add_epi32(_mm512_cvttps_epi32(self.0), _mm512_set1_epi32(127));
                Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(n)))
            })
        }
        #[inline(always)]
        fn select_gt(a: Self, b: Self, yes: Self, no: Self) -> Self {
            one!(Avx512(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a.0, b.0), no.0, yes.0)))
        }
        #[inline(always)]
        fn reduce_add(self) -> f32 {
            one!(add_8(_mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0))))
        }
        #[inline(always)]
        fn reduce_max(self) -> f32 {
            one!(max_8(_mm256_max_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0))))
        }
        #[inline(always)]
        fn reduce_add_16(v: [Self; LANES]) -> Self {
            one!({
                // Each step adds the halves (then quarters, ...) of two vectors and packs both sums into one.
                let mut a = [_mm512_setzero_ps(); 8];
                let mut i = 0;
                while i < 8 {
                    let (x, y) = (v[i].0, v[i + 8].0);
                    a[i] =
                        _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(x, y), _mm512_shuffle_f32x4::<0xee>(x, y));
                    i += 1;
                }
                let mut b = [_mm512_setzero_ps(); 4];
                i = 0;
                while i < 4 {
                    let (x, y) = (a[i], a[i + 4]);
                    b[i] =
                        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(x, y), _mm512_shuffle_f32x4::<0xdd>(x, y));
                    i += 1;
                }
                // 128-bit parts of b[i] now belong to vectors i, i + 8, i + 4, i + 12.
                let (p, q) = (pairs(b[0], b[1]), pairs(b[2], b[3]));
                let r = _mm512_add_ps(_mm512_shuffle_ps::<0x88>(p, q), _mm512_shuffle_ps::<0xdd>(p, q));
                // Within a part: vectors of b[0], b[1], b[2], b[3]; parts: +0, +8, +4, +12.
                Avx512(_mm512_shuffle_f32x4::<0xd8>(r, r))
            })
        }
    }

    /// Within each 128-bit part, `l[0] + l[2]` and `l[1] + l[3]` of x, then of y.
    #[inline(always)]
    unsafe fn pairs(x: __m512, y: __m512) -> __m512 {
        // SAFETY: called by code that has AVX-512.
        unsafe { _mm512_add_ps(_mm512_shuffle_ps::<0x44>(x, y), _mm512_shuffle_ps::<0xee>(x, y)) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::dispatch_fn;
    use super::*;
    use crate::cpu::SimdLevel;

    #[inline(always)]
    fn every_method_lanes<L: Lanes>(x: &[f32], out: &mut Vec<u32>) {
        let (a, b, c) = (L::load(x), L::load(&x[16..]), L::load(&x[32..]));
        let n = b.round().min(L::splat(127.0)).max(L::splat(-126.0));
        for v in [
            a.add(b),
            a.sub(b),
            a.mul(b),
            a.div(b),
            a.fma(b, c),
            a.abs().sqrt(),
            a.max(b),
            a.min(b),
            a.neg(),
            a.abs(),
            a.copysign(b),
            b.round(),
            n.pow2(),
            L::select_gt(a, b, b, c),
            L::load_partial(&x[3..8]),
            L::splat(a.reduce_add()),
            L::splat(a.reduce_max()),
        ] {
            out.extend(v.to_array().map(f32::to_bits));
        }
        let mut many = [L::zero(); 16];
        for i in 0..16 {
            many[i] = L::load(&x[i..]);
        }
        let sums = L::reduce_add_16(many).to_array();
        for i in 0..16 {
            assert_eq!(sums[i].to_bits(), many[i].reduce_add().to_bits(), "vector {i}");
        }
        let mut part = [1.0; 5];
        a.store_partial(&mut part);
        out.extend(part.map(f32::to_bits));
    }

    dispatch_fn! {
        fn every_method(x: &[f32], out: &mut Vec<u32>) = every_method_lanes;
    }

    #[test]
    fn all_levels_give_the_same_bits_for_every_method() {
        let mut state = 7u32;
        let mut x = vec![0.0f32; 64];
        for _ in 0..200 {
            for v in &mut x {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let mantissa = (state >> 9) as f32 / 4_194_304.0 - 1.0;
                *v = mantissa * (f32::from((state & 15) as u8) - 7.5).exp2() * 16.0;
            }
            x[5] = 0.0;
            x[20] = -0.0;
            let mut expected = Vec::new();
            every_method(SimdLevel::Portable, &x, &mut expected);
            for level in SimdLevel::available() {
                let mut got = Vec::new();
                every_method(level, &x, &mut got);
                assert_eq!(got, expected, "{level}");
            }
        }
    }
}
