//! `zero_quantized_weights`, `zero_quantized_nontrainable_weights` and `zero_quantized_gradients`: the stages that they
//! need, and the settings that they exclude.

use zero_config::{Config, Error, ErrorKind};

use crate::texts::only_error;

/// Returns the only error of a text on two ranks.
fn only(text: &str) -> Error {
    only_error(Config::with_world_size("ds.yaml", format!("train_micro_batch_size_per_gpu: 2\n{text}"), 2))
}

#[test]
fn quantized_collectives_are_off_by_default() {
    let text = "train_micro_batch_size_per_gpu: 2\nzero_optimization: {stage: 3, zero_quantized_weights: true, zero_quantized_gradients: true}";
    let config = Config::with_world_size("ds.yaml", text, 2).unwrap_or_else(|errors| panic!("{errors}"));
    let zero = &config.zero;
    assert!(zero.zero_quantized_weights && zero.zero_quantized_gradients && !zero.zero_quantized_nontrainable_weights);
    let plain = Config::with_world_size("ds.yaml", "train_micro_batch_size_per_gpu: 2", 2).unwrap();
    assert!(!plain.zero.zero_quantized_weights && !plain.zero.zero_quantized_gradients);
    assert_eq!(Config::with_world_size("ds.yaml", config.to_yaml(), 2).unwrap().zero, config.zero);
}

#[test]
fn quantized_collectives_need_a_stage_that_shards() {
    for (key, stage, lowest) in [
        ("zero_quantized_weights", 2, 3),
        ("zero_quantized_nontrainable_weights", 0, 3),
        ("zero_quantized_gradients", 1, 2),
    ] {
        let error = only(&format!("zero_optimization: {{stage: {stage}, {key}: true}}"));
        assert_eq!(error.kind, ErrorKind::Contradiction);
        assert!(error.message.contains(key) && error.message.contains(&format!("stage {stage} has none")), "{error}");
        let help = error.help.as_deref().unwrap_or_default();
        assert!(help.contains(&format!("zero_optimization.stage: {lowest}")), "{error}");
    }
}

#[test]
fn quantized_gradients_exclude_all_reduce_and_reproducible() {
    let zero = "zero_optimization: {stage: 2, zero_quantized_gradients: true";
    for (text, other) in [
        (format!("{zero}, reduce_scatter: false}}"), "zero_optimization.reduce_scatter"),
        (format!("{zero}}}\ntraining: {{reproducible: true}}"), "training.reproducible"),
    ] {
        let error = only(&text);
        assert_eq!(error.kind, ErrorKind::Contradiction);
        assert!(error.places.iter().any(|place| place.path == other) && error.help.is_some(), "{error}");
    }
}
