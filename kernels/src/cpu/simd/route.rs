//! Router scores.

#![allow(unsafe_code)] // `dispatch_fn!`

use super::dispatch_fn;
use super::lanes::{LANES, Lanes};
use super::math;
use super::vector::{load_up_to, store_up_to};

#[inline(always)]
fn scores_row_lanes<L: Lanes>(z: &mut [f32]) {
    let mut i = 0;
    while i < z.len() {
        let to = (i + LANES).min(z.len());
        let part = &mut z[i..to];
        store_up_to(math::softplus(load_up_to::<L>(part)).sqrt(), part);
        i = to;
    }
}

dispatch_fn! {
    /// `z = sqrt(ln(1 + e^z))`, in place.
    pub(crate) fn scores_row(z: &mut [f32]) = scores_row_lanes;
}
