//! Operations with large kernels on shapes that nobody chose: the same bits at every level, thread count and
//! number of rows.

use proptest::prelude::*;

use crate::data::Rng;
use crate::harness::{Case, differences};

fn same_bits(case: &impl Case) -> Result<(), TestCaseError> {
    let found = differences(case);
    prop_assert!(found.is_empty(), "{}", found.join("\n"));
    Ok(())
}

proptest! {
    // The fixed cases of each operation cover the edges; these look for what they forgot.
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_product_has_the_same_bits_everywhere(seed in any::<u64>()) {
        same_bits(&crate::dense::any_product(&mut Rng::new(seed)))?;
    }

    #[test]
    fn any_attention_has_the_same_bits_everywhere(seed in any::<u64>()) {
        same_bits(&crate::attention::any_attention(&mut Rng::new(seed)))?;
    }

    #[test]
    fn any_index_has_the_same_bits_everywhere(seed in any::<u64>()) {
        same_bits(&crate::index::any_index(&mut Rng::new(seed)))?;
    }

    #[test]
    fn any_experts_have_the_same_bits_everywhere(seed in any::<u64>()) {
        same_bits(&crate::experts::any_experts(&mut Rng::new(seed)))?;
    }
}
