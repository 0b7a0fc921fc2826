//! Every operation of [`Backend`](deepinfer_kernels::Backend): `cpu` against `reference` within a tolerance that is
//! explained next to it, and `cpu` against itself bit for bit between instruction sets, thread counts and numbers
//! of rows. Shapes are odd on purpose: one, primes, one above a tile, empty lists.

mod attention;
mod data;
mod dense;
mod experts;
mod harness;
mod hyper;
mod index;
mod memory;
mod properties;
mod vectors;

/// The checks of an operation, one test for each level and one for the bits.
macro_rules! parity {
    ($($operation:ident: $case:ty = $cases:expr;)*) => {$(
        mod $operation {
            use std::sync::LazyLock;

            use deepinfer_kernels::SimdLevel;

            use crate::harness::{self, Judged};

            static CASES: LazyLock<Vec<Judged<$case>>> = LazyLock::new(|| harness::judge($cases));

            #[test]
            fn of_a_row_on_the_reference_does_not_depend_on_other_rows() {
                harness::reference_rows_stand_alone(&CASES);
            }

            #[test]
            fn on_cpu_portable_matches_the_reference() {
                harness::matches_the_reference(&CASES, SimdLevel::Portable);
            }

            #[test]
            fn on_cpu_avx2_matches_the_reference() {
                harness::matches_the_reference(&CASES, SimdLevel::Avx2);
            }

            #[test]
            fn on_cpu_avx512_matches_the_reference() {
                harness::matches_the_reference(&CASES, SimdLevel::Avx512);
            }

            #[test]
            fn on_cpu_has_the_same_bits_on_every_level_with_any_threads_and_in_any_company() {
                harness::has_the_same_bits_everywhere(&CASES);
            }
        }
    )*};
}

mod operations {
    parity! {
        stored_rows: crate::memory::Store = crate::memory::stores();
        gather: crate::memory::Gather = crate::memory::gathers();
        copies: crate::memory::Copies = crate::memory::copies();
        matmul: crate::dense::Product = crate::dense::products();
        matmul_grouped: crate::dense::Product = crate::dense::grouped_products();
        matmul_with_extreme_scales: crate::dense::Product = crate::dense::products_with_extreme_scales();
        rmsnorm: crate::dense::Norm = crate::dense::norms();
        rope: crate::dense::Rotation = crate::dense::rotations();
        elementwise: crate::dense::Elements = crate::dense::elements();
        hc_mixes: crate::hyper::Mixes = crate::hyper::mixes();
        hc_stream: crate::hyper::Stream = crate::hyper::streams();
        engram_gate: crate::hyper::Gate = crate::hyper::gates();
        attention: crate::attention::Attention = crate::attention::attentions();
        compress_pool: crate::attention::Pool = crate::attention::pools();
        index: crate::index::Index = crate::index::indexes();
        route: crate::experts::Route = crate::experts::routes();
        experts: crate::experts::Experts = crate::experts::experts();
    }
}
