//! Lanes that codecs and rotations work with: weaving, swapping, and E4M3 rounding with the bits of
//! [`crate::formats`].

#![allow(unsafe_code)]
#![allow(clippy::needless_range_loop)] // Lanes are counted in several arrays at once.

use super::decode::Decode;
use super::lanes::{LANES, Lanes, Portable};
use crate::formats;

/// What codecs and rotations need beyond [`Decode`].
pub(crate) trait Codes: Decode {
    /// `even[0], odd[0], even[1], ..`: the first sixteen, the last sixteen.
    fn interleave(even: Self, odd: Self) -> (Self, Self);
    /// Lanes 2i and 2i + 1 change places.
    fn swap_pairs(self) -> Self;
    /// Nearest E4M3 value of finite lanes, ties to even, saturating at +-448.
    fn e4m3_round(self) -> Self;
    /// The codes of [`Codes::e4m3_round`].
    fn e4m3_codes(self) -> [u8; LANES];
}

impl Codes for Portable {
    #[inline(always)]
    fn interleave(even: Self, odd: Self) -> (Self, Self) {
        let (even, odd) = (even.to_array(), odd.to_array());
        let (mut low, mut high) = ([0.0; LANES], [0.0; LANES]);
        for j in 0..LANES / 2 {
            (low[2 * j], low[2 * j + 1]) = (even[j], odd[j]);
            (high[2 * j], high[2 * j + 1]) = (even[j + 8], odd[j + 8]);
        }
        (Self::from_array(low), Self::from_array(high))
    }
    #[inline(always)]
    fn swap_pairs(self) -> Self {
        let mut v = self.to_array();
        for j in 0..LANES / 2 {
            v.swap(2 * j, 2 * j + 1);
        }
        Self::from_array(v)
    }
    #[inline(always)]
    fn e4m3_round(self) -> Self {
        let mut v = self.to_array();
        for v in &mut v {
            *v = formats::e4m3_decode(formats::e4m3_encode(*v));
        }
        Self::from_array(v)
    }
    #[inline(always)]
    fn e4m3_codes(self) -> [u8; LANES] {
        let v = self.to_array();
        let mut codes = [0; LANES];
        for j in 0..LANES {
            codes[j] = formats::e4m3_encode(v[j]);
        }
        codes
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Codes;
    use crate::cpu::simd::lanes::{Avx2, Avx512, LANES};
    use std::arch::x86_64::*;

    const MAGNITUDE: i32 = 0x7fff_ffff;
    /// Bits of 2^-6, the smallest normal E4M3 value.
    const SMALLEST_NORMAL: i32 = 121 << 23;
    /// Bits of 448.
    const LARGEST: i32 = 0x43e0_0000;
    /// The last place of 2^14 is 2^-9, the step of subnormal E4M3 values: adding it rounds to that step.
    const SHIFT: f32 = 16_384.0;

    impl Codes for Avx512 {
        #[inline(always)]
        fn interleave(even: Self, odd: Self) -> (Self, Self) {
            // SAFETY: the level is available.
            unsafe {
                let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
                let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
                (
                    Avx512(_mm512_permutex2var_ps(even.0, low, odd.0)),
                    Avx512(_mm512_permutex2var_ps(even.0, high, odd.0)),
                )
            }
        }
        #[inline(always)]
        fn swap_pairs(self) -> Self {
            // SAFETY: the level is available.
            unsafe { Avx512(_mm512_permute_ps::<0xb1>(self.0)) }
        }
        #[inline(always)]
        fn e4m3_round(self) -> Self {
            // SAFETY: the level is available.
            unsafe {
                let bits = _mm512_castps_si512(self.0);
                let magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(MAGNITUDE));
                let normal = round_bit_20(magnitude);
                let normal = _mm512_and_si512(normal, _mm512_set1_epi32(0xfff0_0000u32 as i32));
                let normal = _mm512_min_epu32(normal, _mm512_set1_epi32(LARGEST));
                let shift = _mm512_set1_ps(SHIFT);
                let small = _mm512_sub_ps(_mm512_add_ps(_mm512_castsi512_ps(magnitude), shift), shift);
                let is_small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(SMALLEST_NORMAL));
                let value = _mm512_mask_blend_epi32(is_small, normal, _mm512_castps_si512(small));
                // Per bit: mask ? value : bits.
                let mask = _mm512_set1_epi32(MAGNITUDE);
                Avx512(_mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xca>(mask, value, bits)))
            }
        }
        #[inline(always)]
        fn e4m3_codes(self) -> [u8; LANES] {
            let mut codes = [0; LANES];
            // SAFETY: the level is available, and the array has room for 16 bytes.
            unsafe {
                let bits = _mm512_castps_si512(self.0);
                let magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(MAGNITUDE));
                let normal = _mm512_srli_epi32::<20>(round_bit_20(magnitude));
                let normal = _mm512_sub_epi32(normal, _mm512_set1_epi32(120 << 3));
                let normal = _mm512_min_epi32(normal, _mm512_set1_epi32(0x7e));
                let shift = _mm512_set1_ps(SHIFT);
                let small = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(magnitude), shift));
                let small = _mm512_sub_epi32(small, _mm512_castps_si512(shift));
                let is_small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(SMALLEST_NORMAL));
                let code = _mm512_mask_blend_epi32(is_small, normal, small);
                let sign = _mm512_and_si512(_mm512_srli_epi32::<24>(bits), _mm512_set1_epi32(0x80));
                let code = _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
                _mm_storeu_si128(codes.as_mut_ptr().cast(), code);
            }
            codes
        }
    }

    /// Rounds to bit 20, ties to even; a carry runs into the exponent. The bits below stay as they fall.
    #[inline(always)]
    unsafe fn round_bit_20(magnitude: __m512i) -> __m512i {
        // SAFETY: called by code that has AVX-512.
        unsafe {
            let odd = _mm512_and_si512(_mm512_srli_epi32::<20>(magnitude), _mm512_set1_epi32(1));
            _mm512_add_epi32(_mm512_add_epi32(magnitude, _mm512_set1_epi32(0x7_ffff)), odd)
        }
    }

    impl Codes for Avx2 {
        #[inline(always)]
        fn interleave(even: Self, odd: Self) -> (Self, Self) {
            // SAFETY: the level is available.
            unsafe {
                let (a, b) = weave(even.0, odd.0);
                let (c, d) = weave(even.1, odd.1);
                (Avx2(a, b), Avx2(c, d))
            }
        }
        #[inline(always)]
        fn swap_pairs(self) -> Self {
            // SAFETY: the level is available.
            unsafe { Avx2(_mm256_permute_ps::<0xb1>(self.0), _mm256_permute_ps::<0xb1>(self.1)) }
        }
        #[inline(always)]
        fn e4m3_round(self) -> Self {
            // SAFETY: the level is available.
            unsafe { Avx2(round_8(self.0), round_8(self.1)) }
        }
        #[inline(always)]
        fn e4m3_codes(self) -> [u8; LANES] {
            let mut codes = [0; LANES];
            // SAFETY: the level is available, and the array has room for 16 bytes.
            unsafe {
                // Words of both halves, by 128-bit parts: a0 b0 a1 b1; then bytes.
                let words = _mm256_packus_epi32(codes_8(self.0), codes_8(self.1));
                let words = _mm256_permute4x64_epi64::<0xd8>(words);
                let bytes = _mm256_packus_epi16(words, words);
                let bytes = _mm256_permute4x64_epi64::<0x08>(bytes);
                _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm256_castsi256_si128(bytes));
            }
            codes
        }
    }

    #[inline(always)]
    unsafe fn weave(even: __m256, odd: __m256) -> (__m256, __m256) {
        // SAFETY: called by code that has AVX2.
        unsafe {
            let (a, b) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
            (_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
        }
    }

    /// Magnitude bits, whether they are below the normal range, and the bits rounded at bit 20.
    #[inline(always)]
    unsafe fn parts_8(v: __m256) -> (__m256i, __m256i, __m256i) {
        // SAFETY: called by code that has AVX2.
        unsafe {
            let magnitude = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(MAGNITUDE));
            let small = _mm256_cmpgt_epi32(_mm256_set1_epi32(SMALLEST_NORMAL), magnitude);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<20>(magnitude), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(_mm256_add_epi32(magnitude, _mm256_set1_epi32(0x7_ffff)), odd);
            (magnitude, small, rounded)
        }
    }

    #[inline(always)]
    unsafe fn round_8(v: __m256) -> __m256 {
        // SAFETY: called by code that has AVX2.
        unsafe {
            let (magnitude, is_small, rounded) = parts_8(v);
            let normal = _mm256_and_si256(rounded, _mm256_set1_epi32(0xfff0_0000u32 as i32));
            let normal = _mm256_min_epu32(normal, _mm256_set1_epi32(LARGEST));
            let shift = _mm256_set1_ps(SHIFT);
            let small = _mm256_sub_ps(_mm256_add_ps(_mm256_castsi256_ps(magnitude), shift), shift);
            let value = _mm256_blendv_epi8(normal, _mm256_castps_si256(small), is_small);
            let sign = _mm256_andnot_si256(_mm256_set1_epi32(MAGNITUDE), _mm256_castps_si256(v));
            _mm256_castsi256_ps(_mm256_or_si256(value, sign))
        }
    }

    #[inline(always)]
    unsafe fn codes_8(v: __m256) -> __m256i {
        // SAFETY: called by code that has AVX2.
        unsafe {
            let (magnitude, is_small, rounded) = parts_8(v);
            let normal = _mm256_sub_epi32(_mm256_srli_epi32::<20>(rounded), _mm256_set1_epi32(120 << 3));
            let normal = _mm256_min_epi32(normal, _mm256_set1_epi32(0x7e));
            let shift = _mm256_set1_ps(SHIFT);
            let small = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(magnitude), shift));
            let small = _mm256_sub_epi32(small, _mm256_castps_si256(shift));
            let code = _mm256_blendv_epi8(normal, small, is_small);
            let sign = _mm256_srli_epi32::<24>(_mm256_castps_si256(v));
            _mm256_or_si256(code, _mm256_and_si256(sign, _mm256_set1_epi32(0x80)))
        }
    }
}
