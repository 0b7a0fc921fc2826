//! Configurations that must be refused: every problem at once, each with its field and what to write instead.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::path::Path;

use deepinfer_engine::config::{self, ConfigError};
use serde_json::{Value, json};

fn tiny() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/golden/tiny-quant/config.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The configuration of tiny-quant with fields replaced; paths like `/text_config/vocab_size`, null removes.
fn with(changes: &[(&str, Value)]) -> Vec<u8> {
    let mut config = tiny();
    for (path, value) in changes {
        let (parent, key) = path.rsplit_once('/').unwrap();
        let parent = config.pointer_mut(parent).unwrap().as_object_mut().unwrap();
        match value {
            Value::Null => parent.remove(key),
            value => parent.insert(key.to_string(), value.clone()),
        };
    }
    serde_json::to_vec(&config).unwrap()
}

fn problems(changes: &[(&str, Value)]) -> Vec<String> {
    match config::parse(&with(changes)) {
        Err(ConfigError::Problems(problems)) => problems,
        other => panic!("expected problems, got {other:?}"),
    }
}

/// The one problem of a configuration with one field changed.
fn problem(field: &str, value: Value) -> String {
    let found = problems(&[(field, value.clone())]);
    assert_eq!(found.len(), 1, "{field} = {value}: {found:#?}");
    found.into_iter().next().unwrap()
}

#[test]
fn values_that_the_code_does_not_support_are_refused_by_name() {
    let cases = [
        ("/model_type", json!("llama"), "model_type is \"llama\", only \"deepseek_v41\" is supported"),
        (
            "/architectures",
            json!(["X"]),
            "architectures is [\"X\"], only [\"DeepseekV41ForCausalLM\"] is supported",
        ),
        ("/dtype", json!("float16"), "dtype is \"float16\", supported are bfloat16 and float32"),
        ("/quantization_config/quant_method", json!("awq"), "quantization_config.quant_method is \"awq\""),
        (
            "/quantization_config/weight_block_size",
            json!([128, 128]),
            "weight_block_size is [128,128], only [32,32]",
        ),
        ("/quantization_config/expert_dtype", json!("fp8"), "expert_dtype is \"fp8\", only \"fp4\""),
        ("/quantization_config/scale_fmt", json!("float"), "scale_fmt is \"float\""),
        ("/quantization_config/activation_scheme", json!("static"), "activation_scheme is \"static\""),
        ("/text_config/model_type", json!("x"), "text_config.model_type is \"x\""),
        ("/text_config/num_key_value_heads", json!(4), "text_config.num_key_value_heads is 4, only 1"),
        ("/text_config/n_shared_experts", json!(2), "text_config.n_shared_experts is 2, only 1"),
        ("/text_config/hidden_act", json!("gelu"), "text_config.hidden_act is \"gelu\", only \"silu\""),
        ("/text_config/attention_bias", json!(true), "text_config.attention_bias is true, only false"),
        ("/text_config/attention_dropout", json!(0.1), "text_config.attention_dropout is 0.1"),
        ("/text_config/tie_word_embeddings", json!(true), "text_config.tie_word_embeddings is true"),
        ("/text_config/scoring_func", json!("softmax"), "text_config.scoring_func is \"softmax\""),
        ("/text_config/topk_method", json!("greedy"), "text_config.topk_method is \"greedy\""),
        ("/text_config/hc_shifted", json!(false), "text_config.hc_shifted is false, only true"),
        ("/text_config/use_fp4_sparse_kv", json!(false), "text_config.use_fp4_sparse_kv is false"),
        (
            "/text_config/dspark_target_attn_input",
            json!(false),
            "text_config.dspark_target_attn_input is false",
        ),
        (
            "/text_config/index_k_source_layer_ids",
            json!([2, 5]),
            "index_k_source_layer_ids is [2,5], only [2,3,5]",
        ),
        (
            "/text_config/rope_scaling/rope_type",
            json!("linear"),
            "rope_scaling.rope_type is \"linear\", only \"yarn\"",
        ),
    ];
    for (field, value, expected) in cases {
        let found = problem(field, value);
        assert!(found.contains(expected), "{found}");
    }
}

#[test]
fn contradictions_between_fields_name_both_sides() {
    let cases = [
        (
            "compress_ratios",
            json!(vec![0; 12]),
            "has 12 entries, expected 13 (num_hidden_layers 10 + num_nextn_predict_layers 3)",
        ),
        (
            "compress_ratios",
            json!([0, 0, 3, 3, 3, 1, 1, 1, 1, 1, 0, 0, 0]),
            "ratio 3 for layer 2, expected 0 or a divisor of 128",
        ),
        (
            "compress_ratios",
            json!([0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 1, 0]),
            "ratio 1 for draft layer 1, only 0",
        ),
        ("kv_source_layer_ids", json!([2, 5, 3]), "has 5 before 3, expected ascending"),
        ("kv_source_layer_ids", json!([2, 3, 5, 5]), "has 5 before 5"),
        ("kv_source_layer_ids", json!([3, 5]), "must begin with 2"),
        ("kv_source_layer_ids", json!([2, 3]), "gives layer 5 (ratio 1) the source 3 (ratio 2)"),
        ("kv_source_layer_ids", json!([1, 2, 5]), "names layer 1, whose compress_ratios entry is 0"),
        ("kv_source_layer_ids", json!([2, 3, 10]), "names layer 10, expected below num_hidden_layers (10)"),
        ("index_source_layer_ids", json!([2, 3, 7]), "gives layer 5 (ratio 1) the source 3 (ratio 2)"),
        ("candidate_source_layer_id", json!(6), "is 6, expected one of index_source_layer_ids"),
        (
            "candidate_source_layer_id",
            json!(3),
            "is 3 (ratio 2), but its blocks would restrict index source 5 (ratio 1)",
        ),
        ("qk_rope_head_dim", json!(15), "is 15, expected an even number"),
        ("qk_rope_head_dim", json!(34), "index_head_dim is 32, expected at least qk_rope_head_dim (34)"),
        ("head_dim", json!(14), "qk_rope_head_dim is 16, expected at most head_dim (14)"),
        ("o_groups", json!(3), "is 3, expected a divisor of num_attention_heads (4)"),
        ("num_experts_per_tok", json!(17), "is 17, expected at most n_routed_experts (16)"),
        ("dspark_num_experts_per_tok", json!(9), "is 9, expected at most dspark_n_routed_experts (8)"),
        ("dspark_target_layer_ids", json!([]), "is empty"),
        ("dspark_target_layer_ids", json!([9, 10]), "names layer 10"),
        ("dspark_target_layer_ids", json!([9, 8]), "has 9 before 8"),
        ("dspark_noise_token_id", json!(512), "is 512, expected an id below text_config.vocab_size (512)"),
        ("engram_pad_token_id", json!(600), "is 600, expected an id below"),
        (
            "engram_num_embeddings",
            json!([1092, 1855]),
            "is [1092, 1855], expected [1092, 1854] (the sums of the hash primes)",
        ),
        ("engram_num_embeddings", json!([1092]), "expected [1092, 1854]"),
        ("engram_layer_ids", json!([3, 1]), "has 3 before 1"),
        ("engram_compressed_vocab_size", json!(513), "is 513, expected at most vocab_size (512)"),
        ("engram_vocab_size", json!(4_294_967_290u32), "rows, at most 4294967295 are supported"),
        ("engram_n_heads", json!(256), "expected ["),
    ];
    for (field, value, expected) in cases {
        let found = problem(&format!("/text_config/{field}"), value);
        assert!(found.contains(expected), "{found}");
        assert!(found.starts_with("text_config."), "{found}");
    }
    assert!(
        problem("/image_token_id", json!(512)).starts_with("image_token_id is 512, expected an id below")
    );
}

#[test]
fn missing_and_mistyped_fields_say_what_belongs_there() {
    let cases = [
        ("vocab_size", json!(null), "is missing, expected a whole number from 1"),
        ("vocab_size", json!("512"), "is \"512\", expected a whole number"),
        ("vocab_size", json!(512.5), "is 512.5, expected a whole number"),
        ("hidden_size", json!(0), "is 0, expected a whole number from 1"),
        ("hidden_size", json!(-64), "is -64, expected a whole number"),
        ("hidden_size", json!(1u64 << 40), "is 1099511627776, expected a whole number from 1 to 1048576"),
        ("rms_norm_eps", json!(0), "is 0, expected a number from"),
        ("rms_norm_eps", json!("tiny"), "is \"tiny\", expected a number"),
        ("norm_topk_prob", json!(1), "is 1, expected true or false"),
        ("norm_topk_prob", json!(null), "is missing, expected true or false"),
        ("compress_ratios", json!([0, "1"]), "expected a list of whole numbers from 0 to 128"),
        ("compress_ratios", json!(null), "is missing, expected a list"),
        ("rope_scaling", json!(7), "is 7, expected an object"),
    ];
    for (field, value, expected) in cases {
        let found = problem(&format!("/text_config/{field}"), value);
        assert!(found.starts_with(&format!("text_config.{field} ")) && found.contains(expected), "{found}");
    }
    assert!(problem("/text_config", json!(null)).contains("text_config is missing"));
    let factor = problem("/text_config/rope_scaling/factor", json!(null));
    assert!(factor.contains("text_config.rope_scaling.factor is missing"), "{factor}");
    let long = problem("/text_config/hidden_act", json!("x".repeat(500)));
    assert!(long.len() < 200, "a long value is cut: {long}");
}

#[test]
fn all_problems_are_named_at_once() {
    let found = problems(&[
        ("/model_type", json!("llama")),
        ("/quantization_config/expert_dtype", json!("int4")),
        ("/text_config/hidden_size", json!(null)),
        ("/text_config/o_groups", json!(3)),
        ("/text_config/scoring_func", json!("softmax")),
        ("/text_config/compress_ratios", json!(vec![0; 12])),
        ("/text_config/rope_scaling/rope_type", json!("linear")),
    ]);
    for field in [
        "model_type",
        "expert_dtype",
        "hidden_size",
        "o_groups",
        "scoring_func",
        "compress_ratios",
        "rope_type",
    ] {
        assert_eq!(
            found.iter().filter(|p| p.contains(&format!("{field} "))).count(),
            1,
            "{field}: {found:#?}"
        );
    }
    assert_eq!(found.len(), 7);
    let text = ConfigError::Problems(found).to_string();
    assert!(text.starts_with("config.json has 7 problem(s):\n  model_type is"), "{text}");
}

#[test]
fn keys_that_nobody_reads_are_listed_and_ignored() {
    let bytes = with(&[
        ("/transformers_version", json!("5.1")),
        ("/text_config/initializer_range", json!(0.02)),
        ("/text_config/rope_scaling/mscale", json!(1.0)),
        ("/quantization_config/modules_to_not_convert", json!([])),
        ("/vision_config/anything", json!(true)),
    ]);
    let (_, ignored) = config::parse(&bytes).unwrap();
    assert_eq!(
        ignored,
        [
            "quantization_config.modules_to_not_convert",
            "text_config.initializer_range",
            "text_config.rope_scaling.mscale",
            "transformers_version"
        ]
    );
}

#[test]
fn parts_of_the_model_may_be_absent() {
    let (shape, _) = config::parse(&with(&[
        ("/quantization_config", json!(null)),
        ("/vision_config", json!(null)),
        ("/image_token_id", json!(null)),
        ("/text_config/rope_scaling", json!(null)),
        ("/text_config/engram_layer_ids", json!([])),
        ("/text_config/engram_vocab_size", json!(null)),
        ("/text_config/candidate_source_layer_id", json!(null)),
        ("/text_config/num_nextn_predict_layers", json!(0)),
        ("/text_config/compress_ratios", json!([0, 0, 2, 2, 2, 1, 1, 1, 1, 1])),
        ("/text_config/dspark_block_size", json!(null)),
    ]))
    .unwrap();
    assert!(!shape.quantized && !shape.vision && shape.image_token_id.is_none());
    assert!(shape.rope_scaling.is_none() && shape.engram.is_none() && shape.candidate.is_none());
    assert_eq!((shape.draft_layers(), shape.total_layers(), shape.draft_features()), (0, 10, 0));
    assert_eq!(shape.check_quantized(), Vec::<String>::new());
}

#[test]
fn the_derived_maps_of_the_real_configuration_are_those_of_the_specification() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/configs/v41-flash.json");
    let (shape, ignored) = config::parse(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(ignored, Vec::<String>::new());
    assert_eq!(shape.first_consumer(), Some(20));
    assert_eq!([0, 1, 40, 42].map(|l| shape.kv_source(l)), [None; 4]);
    assert_eq!([2, 7, 8, 13, 19, 20, 39].map(|l| shape.kv_source(l).unwrap()), [2, 2, 8, 8, 14, 20, 20]);
    assert_eq!([2, 19, 20, 23, 24, 39].map(|l| shape.index_source(l).unwrap()), [2, 14, 20, 20, 24, 36]);
    let restricted: Vec<usize> = (0..43).filter(|&l| shape.is_restricted(l)).collect();
    assert_eq!(restricted, [24, 28, 32, 36]);
    assert_eq!((shape.experts(39), shape.top_k(39), shape.experts(40), shape.top_k(40)), (384, 6, 128, 3));
    assert_eq!(
        (shape.layer_prefix(39), shape.layer_prefix(42)),
        ("layers.39.".to_string(), "mtp.2.".to_string())
    );
    assert_eq!(
        (shape.engram_ordinal(1), shape.engram_ordinal(14), shape.engram_ordinal(2)),
        (Some(0), Some(1), None)
    );
    assert_eq!(shape.engram.as_ref().unwrap().width(), 6144);
    assert_eq!((shape.hc_rows(), shape.draft_features()), (24, 15360));
    assert_eq!(shape.check_quantized(), Vec::<String>::new());
    assert_eq!(shape.check_truncation(), Vec::<String>::new());
}

#[test]
fn shapes_that_cannot_be_rounded_in_groups_are_refused_for_quantized_numerics_only() {
    let read = |changes: &[(&str, Value)]| config::parse(&with(changes)).unwrap().0.check_quantized();
    let found = read(&[
        ("/text_config/head_dim", json!(48)),
        ("/text_config/index_head_dim", json!(20)),
        ("/text_config/moe_intermediate_size", json!(16)),
    ]);
    assert_eq!(found.len(), 3, "{found:#?}");
    for field in
        ["text_config.head_dim is 48", "text_config.index_head_dim is 20", "moe_intermediate_size is 16"]
    {
        assert!(found.iter().any(|p| p.contains(field)), "{found:#?}");
    }
    // Without FP8 and FP4 weights no activation is rounded, only caches are.
    let plain = read(&[
        ("/quantization_config", json!(null)),
        ("/text_config/head_dim", json!(48)),
        ("/text_config/moe_intermediate_size", json!(16)),
    ]);
    assert_eq!(plain.len(), 1, "{plain:#?}");
}

#[test]
fn truncation_needs_a_decoder_half_behind_the_last_source() {
    let read = |changes: &[(&str, Value)]| config::parse(&with(changes)).unwrap().0.check_truncation();
    assert!(read(&[]).is_empty());
    let no_consumer =
        read(&[("/text_config/compress_ratios", json!([0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0]))]);
    assert!(no_consumer[0].contains("no layer with ratio 1"), "{no_consumer:?}");
    let late_source = read(&[("/text_config/kv_source_layer_ids", json!([2, 3, 5, 7]))]);
    assert!(late_source[0].contains("(5) must be the last KV source"), "{late_source:?}");
}
