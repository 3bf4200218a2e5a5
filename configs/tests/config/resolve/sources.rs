//! Resolution of values that overrides, aliases or other spellings set, and where each value comes from.

use zero_config::*;

use super::with;
use crate::texts::{overridden, source, valid};

fn set(text: &str, sets: &[&str]) -> Config {
    overridden(text, sets).unwrap_or_else(|errors| panic!("{errors}"))
}

#[test]
fn alternative_spellings_of_types_are_read_and_never_written() {
    let config = with("communication_data_type: bfp16\ndata_types: {grad_accum_dtype: float32}\nlog_level: warn");
    assert_eq!(config.communication_data_type, Some(Dtype::Bf16));
    assert_eq!(config.data_types.grad_accum_dtype, Some(Dtype::F32));
    let yaml = config.to_yaml();
    assert!(yaml.contains("communication_data_type: bf16") && yaml.contains("grad_accum_dtype: fp32"), "{yaml}");
    assert!(yaml.contains("log_level: warning"), "{yaml}");
}

#[test]
fn null_counts_as_missing() {
    let text =
        "gradient_clipping: null\noptimizer: null\nzero_optimization:\n  overlap_comm: null\n  stage: ~\nmodel:\n";
    assert_eq!(with(text), with(""));
}

#[test]
fn overrides_win_over_the_file_and_later_ones_over_earlier_ones() {
    let text = "train_micro_batch_size_per_gpu: 1\nzero_optimization: {stage: 1, overlap_comm: true}\n";
    let config = set(
        text,
        &[
            "zero_optimization.stage=2",
            "zero_optimization.stage=3",
            "optimizer.type=SGD",
            "optimizer.params={lr: 0.1, momentum: 0.9}",
            "data.train=[a, b]",
            "training.output_dir=a=b",
            "zero_optimization.overlap_comm=",
        ],
    );
    assert_eq!(config.zero.stage, ZeroStage::Three);
    assert_eq!(config.optimizer.lr(), 0.1);
    assert_eq!(config.data.as_ref().and_then(|data| data.train.as_deref()).expect("data"), ["a", "b"]);
    assert_eq!(config.training.output_dir, "a=b");
    assert_eq!(config.origins.get("zero_optimization.stage"), Origin::Set);
    assert_eq!(config.origins.get("zero_optimization.overlap_comm"), Origin::Default);
    let config = set("", &["train_batch_size=4", "data.train=**/*.rs"]);
    assert_eq!((config.train_batch_size, config.data.expect("data").train), (4, Some(vec!["**/*.rs".to_string()])));
}

#[test]
fn each_value_knows_where_it_comes_from() {
    let text = "# first\ntrain_micro_batch_size_per_gpu: 1\ngradient_clipping: auto\noptimizer:\n  type: AdamW\n  params:\n    lr: 0.1\n";
    let sets = ["zero_optimization.stage=1".to_string()];
    let mut config = load(source(text), &sets).and_then(|typed| typed.resolve(Some(2))).expect("valid");
    let cases = [
        ("train_micro_batch_size_per_gpu", Origin::Line(2)),
        ("train_batch_size", Origin::Auto),
        ("gradient_clipping", Origin::Auto),
        ("optimizer.type", Origin::Line(5)),
        ("optimizer.params.lr", Origin::Line(7)),
        ("optimizer.params.eps", Origin::Default),
        ("zero_optimization.stage", Origin::Set),
        ("launcher.num_processes", Origin::Launch),
        ("training.seed", Origin::Default),
    ];
    for (path, origin) in cases {
        assert_eq!(config.origins.get(path), origin, "{path}");
    }
    config.training.seed = 7;
    let yaml = config.to_yaml_with_origins();
    let comment = |key: &str| {
        let line = yaml.lines().find(|line| line.trim_start().starts_with(key)).expect("the key is written");
        line.split_once("# ").expect("a comment").1.to_string()
    };
    assert_eq!(comment("lr:"), "line 7");
    assert_eq!(comment("stage:"), "--set");
    assert_eq!(comment("num_processes:"), "ranks started");
    assert_eq!(comment("seed:"), "program");
    assert_eq!(comment("eps:"), "default");
}

#[test]
fn aliases_repeat_the_value_of_their_anchor() {
    let config = with("csv_monitor: &monitor {enabled: true, job_name: a}\ntensorboard: *monitor");
    assert_eq!(config.csv_monitor, config.tensorboard);
    assert!(config.tensorboard.enabled);
}

#[test]
fn hostile_strings_survive_a_round_trip() {
    let mut config = with("model: {type: gpt2}\ntraining: {sample: {prompt: x}}");
    for prompt in [
        "",
        "- a: [b",
        "null",
        "\"quoted\" \\ back",
        "line\nbreak\ttab\r",
        "\u{0}\u{7}\u{85}\u{2028}\u{feff}",
        "émoji 🦀",
        "# no",
        " ",
    ] {
        config.training.sample.as_mut().expect("sample").prompt = prompt.to_string();
        config.training.output_dir = prompt.to_string();
        assert_eq!(valid(&config.to_yaml()), config, "{prompt:?}");
    }
}

#[test]
fn the_run_folder_is_named_after_the_file() {
    for (name, folder) in [("a/b.c.yaml", "runs/b.c"), ("<stdin>", "runs/stdin"), ("", "runs/run"), ("x", "runs/x")] {
        let config = Config::parse(name, "train_batch_size: 1").expect("valid");
        assert_eq!(config.training.output_dir, folder);
    }
}
