//! Entries for fuzzing; the corpus is replayed by an ordinary test.

use crate::{manifest, yaml};

/// Any bytes as a cluster file. Panics only on a bug: an accepted file must survive writing and reading.
pub fn fuzz_yaml(bytes: &[u8]) {
    let Ok(accepted) = manifest::parse_bytes(bytes) else { return };
    let text = yaml::to_yaml(&accepted.cluster).expect("an accepted cluster can be written");
    let again =
        manifest::parse(&text).unwrap_or_else(|e| panic!("written and not read again: {e:?}\n{text}"));
    assert_eq!(again.cluster, accepted.cluster, "written and read differently");
}
