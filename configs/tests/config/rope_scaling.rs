//! `model.rope_scaling` and biases: valid combinations, and messages for invalid ones.

use zero_config::{Config, Model, RopeScaling};

fn parse(keys: &str) -> Result<Config, String> {
    let text = format!("train_batch_size: 1\nmodel: {{type: llama, {keys}}}");
    Config::parse("ds.yaml", text).map_err(|errors| errors.to_string())
}

fn scaling(keys: &str) -> Option<RopeScaling> {
    match parse(&format!("rope_scaling: {keys}")).unwrap_or_else(|errors| panic!("{errors}")).model {
        Some(Model::Llama(model)) => model.rope_scaling,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_type_is_read_with_its_keys() {
    assert_eq!(scaling("null"), None);
    assert_eq!(scaling("{rope_type: default}"), None);
    assert_eq!(scaling("{rope_type: linear, factor: 2}"), Some(RopeScaling::Linear { factor: 2.0 }));
    let llama3 = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let keys = "{rope_type: llama3, factor: 32.0, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 8192}";
    assert_eq!(scaling(keys), Some(llama3));
    let config = parse(&format!("rope_scaling: {keys}")).unwrap();
    assert_eq!(Config::parse("again", config.to_yaml()).unwrap(), config);
}

#[test]
fn invalid_combinations_are_reported() {
    for (keys, said) in [
        ("rope_scaling: {factor: 2}", "`model.rope_scaling.rope_type` is missing"),
        ("rope_scaling: {rope_type: yarn, factor: 2}", "`model.rope_scaling.rope_type: yarn` is not implemented yet"),
        ("rope_scaling: {rope_type: default, factor: 2}", "`rope_type: default` does not use `factor`"),
        ("rope_scaling: {rope_type: linear}", "`rope_type: linear` needs `factor`"),
        ("rope_scaling: {rope_type: linear, factor: 2, low_freq_factor: 1}", "does not use `low_freq_factor`"),
        (
            "rope_scaling: {rope_type: llama3, factor: 2, low_freq_factor: 1, high_freq_factor: 4}",
            "`rope_type: llama3` needs `original_max_position_embeddings`",
        ),
        (
            "rope_scaling: {rope_type: llama3, factor: 2, low_freq_factor: 4, high_freq_factor: 4, original_max_position_embeddings: 9}",
            "high_freq_factor 4 is not larger than low_freq_factor 4",
        ),
        (
            "head_dim: 2, rope_scaling: {rope_type: longrope, short_factor: [1, 2], long_factor: [1], original_max_position_embeddings: 9}",
            "short_factor has 2 numbers, but needs 1: one for each pair of dimensions of a head",
        ),
        ("fused_projections: true, tiled_mlp_rows: 64", "`tiled_mlp_rows` is not implemented for fused projections"),
        ("rope_local_base_freq: 2.0", "`sliding_attention` layers need `sliding_window`"),
        ("partial_rotary_factor: 0", "`model.partial_rotary_factor`: expected"),
        ("head_dim: 4, partial_rotary_factor: 0.3", "in pairs: the number must be even"),
        ("qkv_bias: true, attention_bias: true", "`attention_bias` and `qkv_bias` both add biases"),
    ] {
        let errors = parse(keys).expect_err(keys);
        assert!(errors.contains(said) && errors.matches("error:").count() == 1, "{keys}\n{errors}");
    }
}

/// In longer samples, the angles of a packed conversation would depend on the length of its sample. The two answers of
/// a pair are packed, too.
#[test]
fn packed_samples_are_not_longer_than_the_original_length() {
    let parsed = |length: usize, packing: bool, more: &str| {
        let text = format!(
            "train_batch_size: 1\nmodel: {{type: llama, head_dim: 2, rope_scaling: {{rope_type: longrope, short_factor: [1], \
             long_factor: [2], original_max_position_embeddings: 64}}}}\n\
             data: {{train: a, format: chat, tokenizer: t, sample_packing: {packing}, sequence_length: {length}}}\n{more}"
        );
        Config::parse("ds.yaml", text).map_err(|errors| errors.to_string())
    };
    let of = |length: usize| parsed(length, true, "");
    assert!(of(64).is_ok());
    let errors = of(65).unwrap_err();
    assert!(
        errors.contains("samples of 65 tokens are too long: above 64 tokens")
            && errors.contains("`data.sequence_length: 64`")
    );
    let pairs = |length: usize| parsed(length, false, "preference: {}");
    assert!(pairs(32).is_ok());
    let errors = pairs(33).unwrap_err();
    assert!(
        errors.contains("two answers of 33 tokens in a sample are too long: above 64 tokens")
            && errors.contains("`data.sequence_length: 32`")
    );
}
