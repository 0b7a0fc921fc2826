//! Stored weights to lanes, in registers.
//!
//! A row of a weight is cut in groups of 32 columns. A group decodes to two vectors, the even columns and the odd
//! columns: that is how BF16 (two in a dword), FP8 (two in a word) and FP4 (two in a byte) come apart without
//! moving anything between lanes. Inputs are brought into the same layout once per call.
//!
//! Invariant: a decoded lane is exactly the dequantised float32, `value * scale`, for all scale bytes that the
//! function allows, at every level.

#![allow(unsafe_code)]

use super::lanes::{LANES, Lanes, Portable};

/// Columns of a group.
pub(crate) const GROUP: usize = 32;
/// Highest scale byte for which [`Decode::fp8`] is exact; above it `2^8 * scale` is no float32.
pub(crate) const FP8_MAX_SCALE: u8 = 246;

/// Scale bytes for which [`Decode::fp8_rows`] is exact at every level: the upper end as above, and at the lower one
/// `value * scale` keeps its four significant bits in the upper half of a float32.
pub(crate) const FP8_PLAIN_SCALES: std::ops::RangeInclusive<u8> = 3..=FP8_MAX_SCALE;

/// `2^8` times the scale of a byte up to [`FP8_MAX_SCALE`]: the decoders of FP8 give `2^-8 * value`.
#[inline(always)]
pub(crate) const fn fp8_scale_value(byte: u8) -> f32 {
    f32::from_bits((byte as u32 + 8) << 23)
}

/// Lanes that can be read from stored weights.
///
/// # Safety
/// Of all methods with a pointer: it points to a whole group of the format, any alignment.
pub(crate) trait Decode: Lanes {
    /// Record of the FP8 bytes of a row, to find a NaN among them.
    type Seen: Copy;
    /// Vector registers of 16 lanes that the machine has.
    const REGISTERS: usize;

    /// 128 bytes of float32.
    unsafe fn f32(p: *const u8) -> (Self, Self);
    /// 64 bytes of BF16.
    unsafe fn bf16(p: *const u8) -> (Self, Self);
    /// 32 bytes of E4M3 times `scale / 2^8`; NaN bytes come out as some number and are noted in `seen`.
    unsafe fn fp8(p: *const u8, scale: f32, seen: &mut Self::Seen) -> (Self, Self);
    /// Groups of `O` rows of E4M3, 32 bytes each at `p`, times the scale of byte `scale`, which is one of
    /// [`FP8_PLAIN_SCALES`]. NaN bytes come out as NaN, or as some number and are noted.
    unsafe fn fp8_rows<const O: usize>(
        p: [*const u8; O],
        scale: u8,
        seen: &mut [Self::Seen; O],
    ) -> [(Self, Self); O];
    /// A record without a NaN.
    fn nothing_seen() -> Self::Seen;
    /// Whether a NaN was among the bytes.
    fn saw_nan(seen: Self::Seen) -> bool;
    /// 16 bytes of E2M1 times `scale`.
    unsafe fn fp4(p: *const u8, scale: f32) -> (Self, Self);
    /// 16 bytes of E2M1 through a table: the value of each nibble.
    unsafe fn fp4_table(p: *const u8, table: &[f32; LANES]) -> (Self, Self);
    /// The upper halves of both, two to a float: the even one below the odd one.
    fn pack_bf16(even: Self, odd: Self) -> Self;
    /// Asks for the cache line at `p`, which need not be readable, in the second-level cache.
    fn prefetch(p: *const u8);
}

/// E2M1 by nibble: magnitudes, then their negatives.
const FP4: [f32; LANES] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

#[repr(align(64))]
pub(super) struct Fp4Tables(pub(super) [[f32; LANES]; 256]);

/// The values of E2M1 times each scale. A model uses a few of them, which stay in the cache: a load is cheaper
/// than a multiplication for each group of a row.
pub(super) static FP4_TABLES: Fp4Tables = {
    let mut tables = [[0.0; LANES]; 256];
    let mut byte = 0;
    while byte < 256 {
        // Byte 0 is 2^-127, a subnormal whose bits are 1 << 22.
        let scale = match byte {
            0 => f32::from_bits(1 << 22),
            255 => f32::NAN,
            _ => f32::from_bits((byte as u32) << 23),
        };
        let mut i = 0;
        while i < LANES {
            tables[byte][i] = FP4[i] * scale;
            i += 1;
        }
        byte += 1;
    }
    Fp4Tables(tables)
};

/// For each scale byte, the upper halves of the float32 values of the 128 positive E4M3 codes, cut in bytes: first
/// the upper bytes of all codes, then the lower ones.
#[repr(align(64))]
struct Fp8Tables([[u8; 256]; 256]);

static FP8_TABLES: Fp8Tables = {
    let mut tables = [[0; 256]; 256];
    let mut byte = 0;
    while byte < 256 {
        let scale = match byte {
            0 => f32::from_bits(1 << 22),
            255 => f32::NAN,
            _ => f32::from_bits((byte as u32) << 23),
        };
        let mut code = 0;
        while code < 128 {
            let value = if code == 127 { f32::NAN } else { 256.0 * fp8_lane(code as u8) };
            let half = ((value * scale).to_bits() >> 16) as u16;
            tables[byte][code] = (half >> 8) as u8;
            tables[byte][128 + code] = half as u8;
            code += 1;
        }
        byte += 1;
    }
    Fp8Tables(tables)
};

/// [`fp8_scale_value`] by byte.
static FP8_FACTORS: [f32; 256] = {
    let mut factors = [f32::NAN; 256];
    let mut byte = 0;
    while byte <= FP8_MAX_SCALE as usize {
        factors[byte] = fp8_scale_value(byte as u8);
        byte += 1;
    }
    factors
};

/// `2^-8` times an E4M3 byte that is no NaN.
#[inline(always)]
const fn fp8_lane(byte: u8) -> f32 {
    let magnitude = (byte & 0x7f) as u32;
    let value = if magnitude >= 8 {
        f32::from_bits((magnitude << 20) + (112 << 23))
    } else {
        magnitude as f32 * (1.0 / 131_072.0)
    };
    f32::from_bits(value.to_bits() | ((byte & 0x80) as u32) << 24)
}

impl Decode for Portable {
    type Seen = bool;
    const REGISTERS: usize = 16;

    #[inline(always)]
    unsafe fn f32(p: *const u8) -> (Self, Self) {
        // SAFETY: the caller promises 32 floats.
        let v = unsafe { p.cast::<[[u8; 4]; GROUP]>().read_unaligned() };
        let (mut even, mut odd) = ([0.0; LANES], [0.0; LANES]);
        for j in 0..LANES {
            even[j] = f32::from_le_bytes(v[2 * j]);
            odd[j] = f32::from_le_bytes(v[2 * j + 1]);
        }
        (Self::from_array(even), Self::from_array(odd))
    }
    #[inline(always)]
    unsafe fn bf16(p: *const u8) -> (Self, Self) {
        // SAFETY: the caller promises 32 halves.
        let v = unsafe { p.cast::<[[u8; 2]; GROUP]>().read_unaligned() };
        let (mut even, mut odd) = ([0.0; LANES], [0.0; LANES]);
        for j in 0..LANES {
            even[j] = f32::from_bits(u32::from(u16::from_le_bytes(v[2 * j])) << 16);
            odd[j] = f32::from_bits(u32::from(u16::from_le_bytes(v[2 * j + 1])) << 16);
        }
        (Self::from_array(even), Self::from_array(odd))
    }
    #[inline(always)]
    unsafe fn fp8(p: *const u8, scale: f32, seen: &mut bool) -> (Self, Self) {
        // SAFETY: the caller promises 32 bytes.
        let v = unsafe { p.cast::<[u8; GROUP]>().read_unaligned() };
        let (mut even, mut odd) = ([0.0; LANES], [0.0; LANES]);
        for j in 0..LANES {
            even[j] = fp8_lane(v[2 * j]) * scale;
            odd[j] = fp8_lane(v[2 * j + 1]) * scale;
            *seen |= v[2 * j] & 0x7f == 0x7f || v[2 * j + 1] & 0x7f == 0x7f;
        }
        (Self::from_array(even), Self::from_array(odd))
    }
    #[inline(always)]
    unsafe fn fp8_rows<const O: usize>(
        p: [*const u8; O],
        scale: u8,
        seen: &mut [Self::Seen; O],
    ) -> [(Self, Self); O] {
        let mut out = [(Self::zero(), Self::zero()); O];
        for i in 0..O {
            // SAFETY: the caller's promise.
            out[i] = unsafe { Self::fp8(p[i], FP8_FACTORS[usize::from(scale)], &mut seen[i]) };
        }
        out
    }
    #[inline(always)]
    fn nothing_seen() -> bool {
        false
    }
    #[inline(always)]
    fn saw_nan(seen: bool) -> bool {
        seen
    }
    #[inline(always)]
    unsafe fn fp4(p: *const u8, scale: f32) -> (Self, Self) {
        // SAFETY: the caller's promise.
        unsafe { Self::fp4_table(p, &Self::from_array(FP4).mul(Self::splat(scale)).to_array()) }
    }
    #[inline(always)]
    unsafe fn fp4_table(p: *const u8, table: &[f32; LANES]) -> (Self, Self) {
        // SAFETY: the caller promises 16 bytes.
        let v = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        let (mut even, mut odd) = ([0.0; LANES], [0.0; LANES]);
        for j in 0..LANES {
            even[j] = table[usize::from(v[j] & 15)];
            odd[j] = table[usize::from(v[j] >> 4)];
        }
        (Self::from_array(even), Self::from_array(odd))
    }
    #[inline(always)]
    fn pack_bf16(even: Self, odd: Self) -> Self {
        let (even, mut out) = (even.to_array(), odd.to_array());
        for j in 0..LANES {
            out[j] = f32::from_bits(out[j].to_bits() & 0xffff_0000 | even[j].to_bits() >> 16);
        }
        Self::from_array(out)
    }
    #[inline(always)]
    fn prefetch(_: *const u8) {}
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::lanes::{Avx2, Avx512, Lanes};
    use super::{Decode, FP4, FP8_FACTORS, FP8_TABLES, LANES};
    use std::arch::x86_64::*;

    /// Sixteen words, each an E4M3 byte in its high half, to float16 bits of `2^-8 * value`: sign, a zero, then
    /// the seven bits of the byte where float16 has its exponent and mantissa. Subnormals come out right too.
    #[inline(always)]
    unsafe fn half_bits(words: __m256i) -> __m256i {
        // SAFETY: called by code that has AVX2 or more.
        unsafe { _mm256_and_si256(_mm256_srai_epi16::<1>(words), _mm256_set1_epi16(0xbf80u16 as i16)) }
    }

    /// Even bytes and odd bytes of a group as float16 bits.
    #[inline(always)]
    unsafe fn halves(p: *const u8, seen: &mut __m256i) -> (__m256i, __m256i) {
        // SAFETY: called by code that has AVX2 or more; 32 bytes are readable.
        unsafe {
            let bytes = _mm256_loadu_si256(p.cast());
            // Without its sign, only a NaN doubles to 0xfe.
            *seen = _mm256_max_epu8(*seen, _mm256_add_epi8(bytes, bytes));
            (half_bits(_mm256_slli_epi16::<8>(bytes)), half_bits(bytes))
        }
    }

    #[inline(always)]
    unsafe fn saw(seen: __m256i) -> bool {
        // SAFETY: called by code that has AVX2 or more.
        unsafe { _mm256_movemask_epi8(_mm256_cmpeq_epi8(seen, _mm256_set1_epi8(-2))) != 0 }
    }

    /// The nibbles of 16 bytes through a table of 16.
    #[inline(always)]
    unsafe fn look_up_16(p: *const u8, table: __m512) -> (Avx512, Avx512) {
        // SAFETY: called by code that has AVX-512; 16 bytes are readable.
        unsafe {
            // The permutation looks at the low four bits of each index only.
            let t = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let odd = _mm512_srli_epi32::<4>(t);
            (Avx512(_mm512_permutexvar_ps(t, table)), Avx512(_mm512_permutexvar_ps(odd, table)))
        }
    }

    /// Two groups of E4M3 times one scale.
    #[inline(always)]
    unsafe fn fp8_pair(p: [*const u8; 2], scale: u8) -> [(Avx512, Avx512); 2] {
        // SAFETY: called by code that has AVX-512 with VBMI; 32 bytes are readable at both places.
        unsafe {
            // Eight bytes of the first row, eight of the second, and so on.
            let first = _mm512_castsi256_si512(_mm256_loadu_si256(p[0].cast()));
            let second = _mm512_castsi256_si512(_mm256_loadu_si256(p[1].cast()));
            let in_turn = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
            let codes = _mm512_permutex2var_epi64(first, in_turn, second);
            let table = FP8_TABLES.0[usize::from(scale)].as_ptr();
            let (a, b) = (_mm512_load_si512(table.cast()), _mm512_load_si512(table.add(64).cast()));
            let (c, d) = (_mm512_load_si512(table.add(128).cast()), _mm512_load_si512(table.add(192).cast()));
            // An index is the low seven bits of a byte; the sign is put back after.
            let upper = _mm512_permutex2var_epi8(a, codes, b);
            let lower = _mm512_permutex2var_epi8(c, codes, d);
            let upper = _mm512_ternarylogic_epi32::<0xf8>(upper, codes, _mm512_set1_epi8(i8::MIN));
            // The first row's columns two to a dword, as in BF16; then the second's.
            [bf16_pairs(_mm512_unpacklo_epi8(lower, upper)), bf16_pairs(_mm512_unpackhi_epi8(lower, upper))]
        }
    }

    /// Sixteen dwords of two BF16 each.
    #[inline(always)]
    unsafe fn bf16_pairs(v: __m512i) -> (Avx512, Avx512) {
        // SAFETY: called by code that has AVX-512.
        unsafe {
            let odd = _mm512_and_si512(v, _mm512_set1_epi32(0xffff_0000u32 as i32));
            (Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(v))), Avx512(_mm512_castsi512_ps(odd)))
        }
    }

    impl Decode for Avx512 {
        type Seen = __m256i;
        const REGISTERS: usize = 32;

        #[inline(always)]
        unsafe fn f32(p: *const u8) -> (Self, Self) {
            // SAFETY: the level is available, and the caller promises 128 bytes.
            unsafe {
                let (a, b) = (_mm512_loadu_ps(p.cast()), _mm512_loadu_ps(p.add(64).cast()));
                let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
                let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
                (Avx512(_mm512_permutex2var_ps(a, even, b)), Avx512(_mm512_permutex2var_ps(a, odd, b)))
            }
        }
        #[inline(always)]
        unsafe fn bf16(p: *const u8) -> (Self, Self) {
            // SAFETY: the level is available, and the caller promises 64 bytes.
            unsafe { bf16_pairs(_mm512_loadu_si512(p.cast())) }
        }
        #[inline(always)]
        unsafe fn fp8(p: *const u8, scale: f32, seen: &mut __m256i) -> (Self, Self) {
            // SAFETY: the level is available, and the caller promises 32 bytes.
            unsafe {
                let (even, odd) = halves(p, seen);
                let scale = _mm512_set1_ps(scale);
                (
                    Avx512(_mm512_mul_ps(_mm512_cvtph_ps(even), scale)),
                    Avx512(_mm512_mul_ps(_mm512_cvtph_ps(odd), scale)),
                )
            }
        }
        #[inline(always)]
        unsafe fn fp8_rows<const O: usize>(
            p: [*const u8; O],
            scale: u8,
            _: &mut [Self::Seen; O],
        ) -> [(Self, Self); O] {
            let mut out = [(Self::zero(), Self::zero()); O];
            let mut i = 0;
            while i < O {
                let j = (i + 1).min(O - 1);
                // SAFETY: the level is available, and the caller promises 32 bytes per row.
                let pair = unsafe { fp8_pair([p[i], p[j]], scale) };
                (out[i], out[j]) = (pair[0], if j > i { pair[1] } else { pair[0] });
                i += 2;
            }
            out
        }
        #[inline(always)]
        fn nothing_seen() -> __m256i {
            // SAFETY: the level is available.
            unsafe { _mm256_setzero_si256() }
        }
        #[inline(always)]
        fn saw_nan(seen: __m256i) -> bool {
            // SAFETY: the level is available.
            unsafe { saw(seen) }
        }
        #[inline(always)]
        unsafe fn fp4(p: *const u8, scale: f32) -> (Self, Self) {
            // SAFETY: the level is available, and the caller promises 16 bytes.
            unsafe {
                let table = _mm512_mul_ps(_mm512_loadu_ps(FP4.as_ptr()), _mm512_set1_ps(scale));
                look_up_16(p, table)
            }
        }
        #[inline(always)]
        unsafe fn fp4_table(p: *const u8, table: &[f32; LANES]) -> (Self, Self) {
            // SAFETY: the level is available, and the caller promises 16 bytes.
            unsafe { look_up_16(p, _mm512_loadu_ps(table.as_ptr())) }
        }
        #[inline(always)]
        fn pack_bf16(even: Self, odd: Self) -> Self {
            // SAFETY: the level is available.
            unsafe {
                // Per bit: mask ? odd : even.
                let mask = _mm512_set1_epi32(0xffff_0000u32 as i32);
                let (even, odd) = (_mm512_castps_si512(even.0), _mm512_castps_si512(odd.0));
                let even = _mm512_srli_epi32::<16>(even);
                Avx512(_mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xca>(mask, odd, even)))
            }
        }
        #[inline(always)]
        fn prefetch(p: *const u8) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
        }
    }

    /// The low nibbles of eight dwords through a table of magnitudes; bit 3 is the sign.
    #[inline(always)]
    unsafe fn look_up(t: __m256i, table: __m256) -> __m256 {
        // SAFETY: called by code that has AVX2.
        unsafe {
            let sign = _mm256_and_si256(_mm256_slli_epi32::<28>(t), _mm256_set1_epi32(i32::MIN));
            _mm256_xor_ps(_mm256_permutevar8x32_ps(table, t), _mm256_castsi256_ps(sign))
        }
    }

    /// The nibbles of 16 bytes through a table of eight magnitudes.
    #[inline(always)]
    unsafe fn look_up_8(p: *const u8, table: __m256) -> (Avx2, Avx2) {
        // SAFETY: called by code that has AVX2; 16 bytes are readable.
        unsafe {
            let a = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            let b = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            (
                Avx2(look_up(a, table), look_up(b, table)),
                Avx2(look_up(_mm256_srli_epi32::<4>(a), table), look_up(_mm256_srli_epi32::<4>(b), table)),
            )
        }
    }

    /// The upper halves of eight floats and of eight others, two to a dword.
    #[inline(always)]
    unsafe fn pack_8(even: __m256, odd: __m256) -> __m256 {
        // SAFETY: called by code that has AVX2.
        unsafe {
            let even = _mm256_srli_epi32::<16>(_mm256_castps_si256(even));
            _mm256_castsi256_ps(_mm256_blend_epi16::<0xaa>(even, _mm256_castps_si256(odd)))
        }
    }

    impl Decode for Avx2 {
        type Seen = __m256i;
        const REGISTERS: usize = 8;

        #[inline(always)]
        unsafe fn f32(p: *const u8) -> (Self, Self) {
            // SAFETY: the level is available, and the caller promises 128 bytes.
            unsafe {
                let mut even = [_mm256_setzero_ps(); 2];
                let mut odd = even;
                let mut h = 0;
                while h < 2 {
                    let a = _mm256_loadu_ps(p.add(64 * h).cast());
                    let b = _mm256_loadu_ps(p.add(64 * h + 32).cast());
                    // Shuffles work inside 128-bit parts: a0 a2 b0 b2 | a4 a6 b4 b6, put in order by quarters.
                    let e = _mm256_castps_pd(_mm256_shuffle_ps::<0x88>(a, b));
                    let o = _mm256_castps_pd(_mm256_shuffle_ps::<0xdd>(a, b));
                    even[h] = _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(e));
                    odd[h] = _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(o));
                    h += 1;
                }
                (Avx2(even[0], even[1]), Avx2(odd[0], odd[1]))
            }
        }
        #[inline(always)]
        unsafe fn bf16(p: *const u8) -> (Self, Self) {
            // SAFETY: the level is available, and the caller promises 64 bytes.
            unsafe {
                let (a, b) = (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast()));
                let mask = _mm256_set1_epi32(0xffff_0000u32 as i32);
                (
                    Avx2(
                        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)),
                        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b)),
                    ),
                    Avx2(
                        _mm256_castsi256_ps(_mm256_and_si256(a, mask)),
                        _mm256_castsi256_ps(_mm256_and_si256(b, mask)),
                    ),
                )
            }
        }
        #[inline(always)]
        unsafe fn fp8(p: *const u8, scale: f32, seen: &mut __m256i) -> (Self, Self) {
            // SAFETY: the level is available, and the caller promises 32 bytes.
            unsafe {
                let (even, odd) = halves(p, seen);
                let scale = Self::splat(scale);
                let even = Avx2(
                    _mm256_cvtph_ps(_mm256_castsi256_si128(even)),
                    _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(even)),
                );
                let odd = Avx2(
                    _mm256_cvtph_ps(_mm256_castsi256_si128(odd)),
                    _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(odd)),
                );
                (even.mul(scale), odd.mul(scale))
            }
        }
        #[inline(always)]
        unsafe fn fp8_rows<const O: usize>(
            p: [*const u8; O],
            scale: u8,
            seen: &mut [Self::Seen; O],
        ) -> [(Self, Self); O] {
            let mut out = [(Self::zero(), Self::zero()); O];
            for i in 0..O {
                // SAFETY: the caller's promise.
                out[i] = unsafe { Self::fp8(p[i], FP8_FACTORS[usize::from(scale)], &mut seen[i]) };
            }
            out
        }
        #[inline(always)]
        fn nothing_seen() -> __m256i {
            // SAFETY: the level is available.
            unsafe { _mm256_setzero_si256() }
        }
        #[inline(always)]
        fn saw_nan(seen: __m256i) -> bool {
            // SAFETY: the level is available.
            unsafe { saw(seen) }
        }
        #[inline(always)]
        unsafe fn fp4(p: *const u8, scale: f32) -> (Self, Self) {
            // SAFETY: the level is available, and the caller promises 16 bytes.
            unsafe {
                let table = _mm256_mul_ps(_mm256_loadu_ps(FP4.as_ptr()), _mm256_set1_ps(scale));
                look_up_8(p, table)
            }
        }
        #[inline(always)]
        unsafe fn fp4_table(p: *const u8, table: &[f32; LANES]) -> (Self, Self) {
            // SAFETY: the level is available, and the caller promises 16 bytes.
            unsafe { look_up_8(p, _mm256_loadu_ps(table.as_ptr())) }
        }
        #[inline(always)]
        fn pack_bf16(even: Self, odd: Self) -> Self {
            // SAFETY: the level is available.
            unsafe { Avx2(pack_8(even.0, odd.0), pack_8(even.1, odd.1)) }
        }
        #[inline(always)]
        fn prefetch(p: *const u8) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
        }
    }
}
