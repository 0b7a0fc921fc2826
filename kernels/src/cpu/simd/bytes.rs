//! Lanes that multiply bytes: sixteen FP4 keys at a time, one per lane, with exact integer sums.
//!
//! **Layout of a tile of sixteen keys.** Per group of 32 channels eight [`Line`]s; line `2j` holds, for each key in
//! turn, channels `8j, 8j + 2, 8j + 4, 8j + 6` (the low nibbles of a dword of the stored row), line `2j + 1` the odd
//! ones. A byte is twice the value plus 12, so that it has no sign and byte products of unsigned keys with signed
//! queries apply; what the 12 adds is subtracted as the query's `bias`.

#![allow(unsafe_code)]
#![allow(clippy::needless_range_loop)] // Lanes are counted in several arrays at once.

use super::codes::Codes;
use super::lanes::{LANES, Lanes, Portable};
use crate::formats::e8m0_decode;

/// Four bytes of each of sixteen keys.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Line(pub(crate) [u8; 64]);

/// Lines of a group of 32 channels.
pub(crate) const GROUP_LINES: usize = 8;

/// Twice the value of a nibble, plus 12.
const KEY_BYTES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
/// Lanes that multiply bytes.
pub(crate) trait Bytes: Codes {
    /// Sixteen keys of a group, loaded.
    type Keys: Copy;
    /// Loads the [`GROUP_LINES`] lines of a group.
    fn load_keys(lines: &[Line]) -> Self::Keys;
    /// `bias + sum of key bytes * query bytes` for two tiles, exact.
    fn dot_keys(keys: [Self::Keys; 2], query: &[i32; GROUP_LINES], bias: i32) -> [Self; 2];
    /// Writes the lines of a group from the 16 value bytes that begin at each of `starts` in `data`.
    ///
    /// # Safety
    /// 16 bytes are readable there; any alignment.
    unsafe fn unpack_keys(data: *const u8, starts: &[usize; LANES], lines: &mut [Line]);
    /// Sixteen E8M0 scales.
    fn e8m0(codes: [u8; LANES]) -> Self;
}

impl Bytes for Portable {
    type Keys = [Line; GROUP_LINES];

    #[inline(always)]
    fn load_keys(lines: &[Line]) -> Self::Keys {
        let mut keys = [Line([0; 64]); GROUP_LINES];
        keys.copy_from_slice(&lines[..GROUP_LINES]);
        keys
    }
    #[inline(always)]
    fn dot_keys(keys: [Self::Keys; 2], query: &[i32; GROUP_LINES], bias: i32) -> [Self; 2] {
        let mut out = [Self::zero(); 2];
        for (out, keys) in out.iter_mut().zip(&keys) {
            let mut sums = [bias; LANES];
            for (line, query) in keys.iter().zip(query) {
                let query = query.to_le_bytes();
                for (lane, sum) in sums.iter_mut().enumerate() {
                    for i in 0..4 {
                        *sum += i32::from(line.0[4 * lane + i]) * i32::from(query[i] as i8);
                    }
                }
            }
            let mut floats = [0.0; LANES];
            for lane in 0..LANES {
                floats[lane] = sums[lane] as f32;
            }
            *out = Self::from_array(floats);
        }
        out
    }
    #[inline(always)]
    fn e8m0(codes: [u8; LANES]) -> Self {
        let mut scales = [0.0; LANES];
        for (scale, &code) in scales.iter_mut().zip(&codes) {
            *scale = e8m0_decode(code);
        }
        Self::from_array(scales)
    }
    #[inline(always)]
    unsafe fn unpack_keys(data: *const u8, starts: &[usize; LANES], lines: &mut [Line]) {
        for (lane, &start) in starts.iter().enumerate() {
            // SAFETY: the caller promises 16 bytes.
            let bytes = unsafe { data.add(start).cast::<[u8; LANES]>().read_unaligned() };
            for (i, &byte) in bytes.iter().enumerate() {
                let (line, at) = (i / 4 * 2, 4 * lane + i % 4);
                lines[line].0[at] = KEY_BYTES[usize::from(byte & 15)];
                lines[line + 1].0[at] = KEY_BYTES[usize::from(byte >> 4)];
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Bytes, GROUP_LINES, KEY_BYTES, Line};
    use crate::cpu::simd::lanes::{Avx2, Avx512, LANES};
    use std::arch::x86_64::*;

    impl Bytes for Avx512 {
        type Keys = [__m512i; GROUP_LINES];

        #[inline(always)]
        fn load_keys(lines: &[Line]) -> Self::Keys {
            assert!(lines.len() >= GROUP_LINES);
            // SAFETY: the level is available; a line is 64 bytes.
            unsafe {
                let mut keys = [_mm512_setzero_si512(); GROUP_LINES];
                let mut i = 0;
                while i < GROUP_LINES {
                    keys[i] = _mm512_loadu_si512(lines[i].0.as_ptr().cast());
                    i += 1;
                }
                keys
            }
        }
        #[inline(always)]
        fn dot_keys(keys: [Self::Keys; 2], query: &[i32; GROUP_LINES], bias: i32) -> [Self; 2] {
            // SAFETY: the level is available.
            unsafe {
                let (mut a, mut b) = (_mm512_set1_epi32(bias), _mm512_set1_epi32(bias));
                // Two sums each: an instruction takes four or five cycles, and one can begin in every cycle.
                let (mut c, mut d) = (_mm512_setzero_si512(), _mm512_setzero_si512());
                let mut i = 0;
                while i < GROUP_LINES {
                    let (q, r) = (_mm512_set1_epi32(query[i]), _mm512_set1_epi32(query[i + 1]));
                    a = _mm512_dpbusd_epi32(a, keys[0][i], q);
                    b = _mm512_dpbusd_epi32(b, keys[1][i], q);
                    c = _mm512_dpbusd_epi32(c, keys[0][i + 1], r);
                    d = _mm512_dpbusd_epi32(d, keys[1][i + 1], r);
                    i += 2;
                }
                let (a, b) = (_mm512_add_epi32(a, c), _mm512_add_epi32(b, d));
                [Avx512(_mm512_cvtepi32_ps(a)), Avx512(_mm512_cvtepi32_ps(b))]
            }
        }
        #[inline(always)]
        fn e8m0(codes: [u8; LANES]) -> Self {
            // SAFETY: the level is available.
            unsafe {
                let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.as_ptr().cast()));
                // Code 0 is 2^-127, a subnormal; code 255 is NaN.
                let scales = _mm512_max_epu32(_mm512_slli_epi32::<23>(codes), _mm512_set1_epi32(1 << 22));
                let is_nan = _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(255));
                let scales = _mm512_castsi512_ps(scales);
                Avx512(_mm512_mask_blend_ps(is_nan, scales, _mm512_set1_ps(f32::NAN)))
            }
        }
        #[inline(always)]
        unsafe fn unpack_keys(data: *const u8, starts: &[usize; LANES], lines: &mut [Line]) {
            assert!(lines.len() >= GROUP_LINES);
            // SAFETY: the level is available; the caller promises the rows.
            unsafe {
                // Part p of vector i is key 4p + i, so that transposing the dwords of each part leaves keys in order.
                let mut v = [_mm512_setzero_si512(); 4];
                let mut i = 0;
                while i < 4 {
                    let part = _mm512_castsi128_si512(_mm_loadu_si128(data.add(starts[i]).cast()));
                    let part = _mm512_inserti32x4::<1>(part, _mm_loadu_si128(data.add(starts[i + 4]).cast()));
                    let part = _mm512_inserti32x4::<2>(part, _mm_loadu_si128(data.add(starts[i + 8]).cast()));
                    v[i] = _mm512_inserti32x4::<3>(part, _mm_loadu_si128(data.add(starts[i + 12]).cast()));
                    i += 1;
                }
                let (a, b) = (_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
                let (c, d) = (_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
                let dwords = [
                    _mm512_unpacklo_epi64(a, c),
                    _mm512_unpackhi_epi64(a, c),
                    _mm512_unpacklo_epi64(b, d),
                    _mm512_unpackhi_epi64(b, d),
                ];
                let table = _mm512_broadcast_i32x4(_mm_loadu_si128(KEY_BYTES.as_ptr().cast()));
                let nibble = _mm512_set1_epi8(15);
                let mut j = 0;
                while j < 4 {
                    let low = _mm512_and_si512(dwords[j], nibble);
                    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(dwords[j]), nibble);
                    _mm512_storeu_si512(lines[2 * j].0.as_mut_ptr().cast(), _mm512_shuffle_epi8(table, low));
                    _mm512_storeu_si512(
                        lines[2 * j + 1].0.as_mut_ptr().cast(),
                        _mm512_shuffle_epi8(table, high),
                    );
                    j += 1;
                }
            }
        }
    }

    /// The lower or upper eight keys of a line.
    #[inline(always)]
    unsafe fn half(line: &Line, upper: usize) -> __m256i {
        // SAFETY: called by code that has AVX2; a line is 64 bytes and `upper` is 0 or 1.
        unsafe { _mm256_loadu_si256(line.0.as_ptr().add(32 * upper).cast()) }
    }

    /// [`Bytes::dot_keys`] for one tile.
    #[inline(always)]
    fn dot_tile(keys: &[[__m256i; GROUP_LINES]; 2], query: &[i32; GROUP_LINES], bias: i32) -> Avx2 {
        // SAFETY: called by code that has AVX2.
        unsafe {
            // A word collects 16 products of at most 24 * 12.
            let (mut low, mut high) = (_mm256_setzero_si256(), _mm256_setzero_si256());
            let mut i = 0;
            while i < GROUP_LINES {
                let q = _mm256_set1_epi32(query[i]);
                low = _mm256_add_epi16(low, _mm256_maddubs_epi16(keys[0][i], q));
                high = _mm256_add_epi16(high, _mm256_maddubs_epi16(keys[1][i], q));
                i += 1;
            }
            let (one, bias) = (_mm256_set1_epi16(1), _mm256_set1_epi32(bias));
            let low = _mm256_add_epi32(_mm256_madd_epi16(low, one), bias);
            let high = _mm256_add_epi32(_mm256_madd_epi16(high, one), bias);
            Avx2(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }

    /// Eight E8M0 scales.
    ///
    /// # Safety
    /// 8 bytes are readable, and the machine has AVX2.
    #[inline(always)]
    unsafe fn scales_8(codes: *const u8) -> __m256 {
        // SAFETY: as the function's.
        unsafe {
            let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(codes.cast()));
            // Code 0 is 2^-127, a subnormal; code 255 is NaN.
            let scales = _mm256_max_epu32(_mm256_slli_epi32::<23>(codes), _mm256_set1_epi32(1 << 22));
            let is_nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(codes, _mm256_set1_epi32(255)));
            _mm256_blendv_ps(_mm256_castsi256_ps(scales), _mm256_set1_ps(f32::NAN), is_nan)
        }
    }

    impl Bytes for Avx2 {
        type Keys = [[__m256i; GROUP_LINES]; 2];

        #[inline(always)]
        fn load_keys(lines: &[Line]) -> Self::Keys {
            assert!(lines.len() >= GROUP_LINES);
            // SAFETY: the level is available.
            unsafe {
                let mut keys = [[_mm256_setzero_si256(); GROUP_LINES]; 2];
                let mut i = 0;
                while i < GROUP_LINES {
                    (keys[0][i], keys[1][i]) = (half(&lines[i], 0), half(&lines[i], 1));
                    i += 1;
                }
                keys
            }
        }
        #[inline(always)]
        fn dot_keys(keys: [Self::Keys; 2], query: &[i32; GROUP_LINES], bias: i32) -> [Self; 2] {
            [dot_tile(&keys[0], query, bias), dot_tile(&keys[1], query, bias)]
        }
        #[inline(always)]
        fn e8m0(codes: [u8; LANES]) -> Self {
            // SAFETY: the level is available.
            unsafe { Avx2(scales_8(codes.as_ptr()), scales_8(codes.as_ptr().add(8))) }
        }
        #[inline(always)]
        unsafe fn unpack_keys(data: *const u8, starts: &[usize; LANES], lines: &mut [Line]) {
            assert!(lines.len() >= GROUP_LINES);
            // SAFETY: the level is available; the caller promises the rows.
            unsafe {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(KEY_BYTES.as_ptr().cast()));
                let nibble = _mm256_set1_epi8(15);
                let mut upper = 0;
                while upper < 2 {
                    // Part p of vector i is key 8 upper + 4p + i.
                    let mut v = [_mm256_setzero_si256(); 4];
                    let mut i = 0;
                    while i < 4 {
                        let part =
                            _mm256_castsi128_si256(_mm_loadu_si128(data.add(starts[8 * upper + i]).cast()));
                        let next = _mm_loadu_si128(data.add(starts[8 * upper + i + 4]).cast());
                        v[i] = _mm256_inserti128_si256::<1>(part, next);
                        i += 1;
                    }
                    let (a, b) = (_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
                    let (c, d) = (_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
                    let dwords = [
                        _mm256_unpacklo_epi64(a, c),
                        _mm256_unpackhi_epi64(a, c),
                        _mm256_unpacklo_epi64(b, d),
                        _mm256_unpackhi_epi64(b, d),
                    ];
                    let mut j = 0;
                    while j < 4 {
                        let low = _mm256_shuffle_epi8(table, _mm256_and_si256(dwords[j], nibble));
                        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(dwords[j]), nibble);
                        let high = _mm256_shuffle_epi8(table, high);
                        _mm256_storeu_si256(lines[2 * j].0.as_mut_ptr().add(32 * upper).cast(), low);
                        _mm256_storeu_si256(lines[2 * j + 1].0.as_mut_ptr().add(32 * upper).cast(), high);
                        j += 1;
                    }
                    upper += 1;
                }
            }
        }
    }
}
