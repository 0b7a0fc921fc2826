//! Single numbers: E4M3, E8M0, E2M1 and BF16 to float32 and back.
//!
//! All encoders round to nearest, ties to the even code. Every function is total: NaN and infinities have a
//! documented answer.

/// Largest E4M3 value.
pub const E4M3_MAX: f32 = 448.0;
/// Largest E2M1 value.
pub const E2M1_MAX: f32 = 6.0;

/// Code of the E4M3 NaN (sign clear).
pub const E4M3_NAN: u8 = 0x7F;
/// Code of the E8M0 NaN.
pub const E8M0_NAN: u8 = 0xFF;

/// Value of every E4M3 code: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinities, NaN at 0x7F and 0xFF.
pub static E4M3_VALUES: [f32; 256] = e4m3_table();

/// Value of every E2M1 code: 0, 0.5, 1, 1.5, 2, 3, 4, 6, then the same with a minus sign.
pub static E2M1_VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let exponent = (code >> 3) & 15;
        let mantissa = code & 7;
        let magnitude = if code & 0x7F == 0x7F {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 / 512.0
        } else {
            // Bias 7 becomes bias 127; three mantissa bits move to the top of 23.
            f32::from_bits((exponent as u32 + 120) << 23 | (mantissa as u32) << 20)
        };
        table[code] = if code & 0x80 != 0 { -magnitude } else { magnitude };
        code += 1;
    }
    table
}

/// Value of an E4M3 code; NaN for 0x7F and 0xFF.
#[inline]
pub fn e4m3_decode(code: u8) -> f32 {
    E4M3_VALUES[code as usize]
}

/// Nearest E4M3 code, ties to even, saturating at +-448 (infinities too). NaN gives the NaN code of its sign.
#[inline]
pub fn e4m3_encode(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) as u8 & 0x80;
    let magnitude = bits & 0x7FFF_FFFF;
    if magnitude > 0x7F80_0000 {
        return sign | E4M3_NAN;
    }
    // 2^-6, the smallest normal E4M3 value.
    const SMALLEST_NORMAL: u32 = (127 - 6) << 23;
    let code = if magnitude >= SMALLEST_NORMAL {
        // Round at bit 20; a carry runs into the exponent, which is what it should do.
        let rounded = magnitude + 0x7_FFFF + ((magnitude >> 20) & 1);
        ((rounded >> 20) - (120 << 3)).min(0x7E)
    } else {
        // Below 2^-6 codes are multiples of 2^-9, which is the last place of 2^14: the addition rounds.
        const SHIFT: f32 = 16384.0;
        (f32::from_bits(magnitude) + SHIFT).to_bits() - SHIFT.to_bits()
    };
    sign | code as u8
}

/// Value of an E8M0 code: `2^(code - 127)`, NaN for 255.
#[inline]
pub fn e8m0_decode(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22), // 2^-127 is subnormal in float32
        E8M0_NAN => f32::NAN,
        _ => f32::from_bits((code as u32) << 23),
    }
}

/// Code of a positive power of two, read off the exponent bits. Anything at or below 2^-127 gives 0, NaN and
/// infinity give the NaN code; the sign and the mantissa of other values are dropped.
#[inline]
pub fn e8m0_encode(scale: f32) -> u8 {
    (scale.to_bits() >> 23) as u8
}

/// Smallest normal power of two that is at least `x`, for `x > 0`: computed on the bits (exponent, plus one if
/// any mantissa bit is set). 0 gives 0; values above 2^127 give infinity; NaN gives NaN; the sign is ignored.
#[inline]
pub fn pow2_ceil(x: f32) -> f32 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    if bits > 0x7F80_0000 {
        return f32::NAN;
    }
    let exponent = (bits >> 23) + u32::from(bits & 0x7F_FFFF != 0);
    f32::from_bits(exponent << 23)
}

/// Value of the E2M1 code in the low four bits.
#[inline]
pub fn e2m1_decode(code: u8) -> f32 {
    E2M1_VALUES[(code & 15) as usize]
}

/// Nearest E2M1 code (four bits, sign in bit 3), ties to the even code, saturating at +-6. E2M1 has no NaN: a NaN
/// gives the zero of its sign, which is why the row encoders mark such a group in its scale.
#[inline]
pub fn e2m1_encode(x: f32) -> u8 {
    let a = x.abs();
    // A midpoint above an even code stays, one above an odd code moves up.
    let code = u8::from(a > 0.25)
        + u8::from(a >= 0.75)
        + u8::from(a > 1.25)
        + u8::from(a >= 1.75)
        + u8::from(a > 2.5)
        + u8::from(a >= 3.5)
        + u8::from(a > 5.0);
    code | ((x.to_bits() >> 28) as u8 & 8)
}

/// Value of BF16 bits: the upper half of a float32.
#[inline]
pub fn bf16_decode(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Nearest BF16, ties to even; large values round to infinity. A NaN stays a (quiet) NaN.
#[inline]
pub fn bf16_encode(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}
