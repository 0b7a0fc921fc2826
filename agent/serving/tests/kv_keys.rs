//! Keys of blocks: the same content has one key in every process, different content never shares one.

use std::collections::BTreeSet;

use deepinfer_serving::kv::{BlockKey, ExtraInput, KeyDomain, ReplayMode, block_key, chain};
use proptest::prelude::*;

fn domain() -> KeyDomain {
    KeyDomain {
        weights_digest: [1; 32],
        kv_format: "fp8 ring, fp4 blocks of 128".to_owned(),
        tokenizer_digest: [2; 32],
        replay: ReplayMode::Exact,
        numeric_class: "f32".to_owned(),
    }
}

/// Made with another implementation of BLAKE3. SV-064: a key does not depend on the process that made it.
#[test]
fn every_process_computes_the_same_key_for_the_same_prompt() {
    let root = domain().root("", &[3; 32]);
    assert_eq!(root.to_string(), "da444584324f79ff5efda7cc76a5a6fc915e18ce369d530bd21fa612185139ad");
    let tokens: Vec<u32> = (0..256).collect();
    let first = block_key(&root, &tokens[..128], &[]);
    assert_eq!(first.to_string(), "11cdf58158b82402325e667c6856f460d0d7af684f4f034ecd508c79528c706b");
    let image = ExtraInput { position: 130, digest: [4; 32] };
    let second = block_key(&first, &tokens[128..], &[image]);
    assert_eq!(second.to_string(), "7b6cd625d5fc03054a7556f1bbbc85cf0c812846c779af3afc9e82fb12cbd929");
    assert_eq!(chain(&root, &tokens[..255]), [first]);
}

/// SV-062.
#[test]
fn a_salt_never_stands_for_an_adapter_or_an_input() {
    let tokens: Vec<u32> = (0..1_280).collect();
    let mut salt = [0; 32];
    salt[..1].copy_from_slice(b"X");
    let salted = chain(&domain().root("", &salt), &tokens);
    let adapted = chain(&domain().root("X", &[0; 32]), &tokens);
    let moved = KeyDomain { numeric_class: "f32X".to_owned(), ..domain() };
    let other = chain(&moved.root("", &[0; 32]), &tokens);
    let all: BTreeSet<&BlockKey> = salted.iter().chain(&adapted).chain(&other).collect();
    assert_eq!(all.len(), 30);
}

#[test]
fn every_part_of_the_domain_changes_the_key() {
    let base = domain();
    let variants = [
        base.clone(),
        KeyDomain { weights_digest: [9; 32], ..base.clone() },
        KeyDomain { kv_format: "fp8".to_owned(), ..base.clone() },
        KeyDomain { tokenizer_digest: [9; 32], ..base.clone() },
        KeyDomain { replay: ReplayMode::Bounded, ..base.clone() },
        KeyDomain { numeric_class: "quantized".to_owned(), ..base.clone() },
        // Fields keep their borders.
        KeyDomain { kv_format: String::new(), numeric_class: base.kv_format.clone(), ..base.clone() },
    ];
    let keys: BTreeSet<BlockKey> = variants.iter().map(|d| d.root("", &[3; 32])).collect();
    assert_eq!(keys.len(), variants.len());
}

type Content = ([u8; 32], String, Vec<u32>, Vec<ExtraInput>);

fn last_key((salt, adapter, tokens, extra): &Content) -> BlockKey {
    let mut key = domain().root(adapter, salt);
    let mut extra = extra.clone();
    extra.sort();
    for (block, tokens) in tokens.chunks_exact(128).enumerate() {
        let range = 128 * block as u32..128 * (block as u32 + 1);
        let inside: Vec<ExtraInput> = extra.iter().filter(|e| range.contains(&e.position)).copied().collect();
        key = block_key(&key, tokens, &inside);
    }
    key
}

/// Small alphabets, so that contents come close to each other.
fn content() -> impl Strategy<Value = Content> {
    let salt = prop_oneof![Just([0; 32]), Just([1; 32])];
    let adapter = prop_oneof![Just(String::new()), Just("a".to_owned()), Just("\u{1}".to_owned())];
    let block = prop_oneof![Just(vec![0; 128]), Just((0..128).collect::<Vec<u32>>()), Just(vec![1; 128])];
    let tokens = prop::collection::vec(block, 1..4).prop_map(|blocks| blocks.concat());
    let input = (0_u32..256, 0_u8..2).prop_map(|(position, d)| ExtraInput { position, digest: [d; 32] });
    let extra = prop::collection::vec(input, 0..3).prop_map(|mut extra| {
        extra.sort();
        extra.dedup_by_key(|e| e.position);
        extra
    });
    (salt, adapter, tokens, extra)
}

proptest! {
    /// SV-062.
    #[test]
    fn no_two_different_contents_give_one_key(contents in prop::collection::vec(content(), 2..12)) {
        // Inputs beyond the last block are in no block.
        let visible = |c: &Content| {
            let (salt, adapter, tokens, mut extra) = c.clone();
            extra.retain(|e| (e.position as usize) < tokens.len());
            (salt, adapter, tokens, extra)
        };
        for a in &contents {
            for b in &contents {
                prop_assert_eq!(last_key(a) == last_key(b), visible(a) == visible(b));
            }
        }
    }

    #[test]
    fn sequences_share_keys_exactly_as_far_as_their_tokens_agree(
        tokens in prop::collection::vec(0_u32..130_000, 512..900), at in 0_usize..512,
    ) {
        let root = domain().root("", &[0; 32]);
        let mut other = tokens.clone();
        other[at] += 1;
        let (ours, theirs) = (chain(&root, &tokens), chain(&root, &other));
        let shared = ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
        prop_assert_eq!(shared, at / 128);
        prop_assert!(ours[shared..].iter().all(|key| !theirs.contains(key)));
    }
}
