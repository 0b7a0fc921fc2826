//! The work estimate of the released shape, filled from its config.json, against the published constants.

use std::path::Path;

use deepinfer_engine::config;
use deepinfer_serving::batch::{ChunkRows, Truncation, WorkShape, prefill_work};

#[test]
fn the_released_configuration_gives_the_constants_of_the_estimate() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/configs/v41-flash.json");
    let (shape, _) = config::parse(&std::fs::read(path).unwrap()).unwrap();
    let work = WorkShape::new(&shape.work_model()).unwrap();
    assert_eq!(work.all.attention_row, 10_291_773_440);
    assert_eq!(work.all.other_row, 21_155_348_480);
    assert_eq!(work.all.window_pair, 10_485_760);
    assert_eq!(work.all.candidate_block, 131_072);
    let ratio = |r: u64| work.all.ratios[&r];
    assert_eq!((ratio(2).key_entry, ratio(1).key_entry), (786_432, 262_144));
    assert_eq!((ratio(2).core_pair, ratio(1).core_pair), (4_718_592, 5_242_880));
    assert_eq!((ratio(2).index_pair, ratio(1).index_pair), (12_288, 4_096));
    assert_eq!((work.producers.attention_row, work.consumers.attention_row), (5_171_445_760, 5_120_327_680));
    assert_eq!((work.producers.other_row, work.consumers.other_row), (10_896_343_040, 10_259_005_440));
    assert_eq!(work.logit_row, 2_647_654_400);
    let off = prefill_work(&work, ChunkRows::last(8192, 1_048_576), Truncation::Off);
    assert_eq!((off.attention, off.total), (226_908_507_734_016, 400_215_770_136_576));
}
