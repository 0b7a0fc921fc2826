//! Vector kernels: the fenced folder for intrinsics.
//!
//! **Order of additions.** All kernels are written for 16 virtual lanes ([`lanes::Lanes`]): `[f32; 16]`, two AVX2
//! registers or one AVX-512 register. A multiply-add is always fused, a sum over lanes is always the same tree, so
//! the three implementations give the same bits.
//!
//! In a product with a stored weight, columns are cut in groups of 32, and lane `j` goes over the groups ascending,
//! in each over column `2 j`, then `2 j + 1`: `acc = fma(x, w, acc)` from +0, `w` being the exact float32 value. The
//! last group is filled up with zeros. Then the lanes are summed: `l[j] += l[j + 8]`, then 4, 2, 1.
//!
//! **How to add a kernel.** Write `#[inline(always)] fn thing_lanes<L: Lanes>(args) -> Out`, without closures and
//! iterator adaptors that take closures (a closure is compiled without the caller's instruction set), then
//!
//! ```text
//! dispatch_fn! {
//!     /// What it computes.
//!     pub(crate) fn thing(x: &[f32], y: &mut [f32]) -> f32 = thing_lanes;
//! }
//! ```
//!
//! which makes `thing(level, x, y)`: the generic body compiled once per instruction set, and a `match`. Call it
//! once per row or tile, not once per vector. Helpers called by the body must be `#[inline(always)]` too.
//!
//! The types `Avx2` and `Avx512` are named by `dispatch_fn!` only: their methods may run only where the level has
//! been detected, which [`super::Cpu`] does before it accepts a level.

pub(crate) mod attention;
pub(crate) mod bytes;
pub(crate) mod codec;
pub(crate) mod codes;
pub(crate) mod decode;
pub(crate) mod hyper;
pub(crate) mod index;
pub(crate) mod lanes;
pub(crate) mod math;
pub(crate) mod probe;
pub(crate) mod product;
pub(crate) mod route;
mod stored;
mod transcode;
pub(crate) mod vector;
pub(crate) mod weights;

/// Defines `fn name(level, args)` from a body that is generic over [`lanes::Lanes`]; see the module's text.
macro_rules! dispatch_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) $(-> $out:ty)? = $body:ident;) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(level: $crate::cpu::SimdLevel, $($arg: $ty),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            fn avx512($($arg: $ty),*) $(-> $out)? {
                $body::<$crate::cpu::simd::lanes::Avx512>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            fn avx2($($arg: $ty),*) $(-> $out)? {
                $body::<$crate::cpu::simd::lanes::Avx2>($($arg),*)
            }
            debug_assert!(level.is_available());
            match level {
                $crate::cpu::SimdLevel::Portable => $body::<$crate::cpu::simd::lanes::Portable>($($arg),*),
                // SAFETY: `Cpu` accepts a level only if the machine has it.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::SimdLevel::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::SimdLevel::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(not(target_arch = "x86_64"))]
                _ => $body::<$crate::cpu::simd::lanes::Portable>($($arg),*),
            }
        }
    };
}
pub(crate) use dispatch_fn;
