//! The curriculum of `data_efficiency`: its checks, and DeepSpeed's forms of it.

use zero_config::Config;

const HEAD: &str = "train_micro_batch_size_per_gpu: 1\n";

/// Returns the section `data_efficiency` with these keys of the curriculum `seqlen`.
fn curriculum(seqlen: &str) -> String {
    format!(
        "data_efficiency:\n  enabled: true\n  data_sampling:\n    enabled: true\n    curriculum_learning:\n      \
         enabled: true\n      curriculum_metrics: {{seqlen: {{{seqlen}}}}}\n"
    )
}

const LINEAR: &str = "min_difficulty: 8, max_difficulty: 64, schedule_type: fixed_linear, \
                      schedule_config: {total_curriculum_step: 100, difficulty_step: 8}";

#[test]
fn invalid_curricula_are_errors() {
    let seqlen = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen";
    let root = LINEAR.replace("fixed_linear", "fixed_root");
    let discrete = |config: &str| {
        format!("min_difficulty: 8, max_difficulty: 64, schedule_type: fixed_discrete, schedule_config: {{{config}}}")
    };
    for (text, key, expected) in [
        (LINEAR.replace("min_difficulty: 8, ", ""), ".min_difficulty", "is missing"),
        (LINEAR.replace("8, max", "0, max"), ".min_difficulty", "expected an integer of at least 1, found `0`"),
        (
            LINEAR.replace("8, max", "65, max"),
            ".min_difficulty",
            "`min_difficulty` 65 is more than `max_difficulty` 64",
        ),
        (LINEAR.replace(", difficulty_step: 8", ""), ".schedule_config.difficulty_step", "is missing"),
        (LINEAR.replace("_step: 8}", "_step: 0}"), ".schedule_config.difficulty_step", "found `0`"),
        (
            LINEAR.replace("8}", "8, root_degree: 2}"),
            ".schedule_config.root_degree",
            "no effect with `schedule_type: fixed_linear`",
        ),
        (LINEAR.replace("fixed_linear", "custom"), ".schedule_type", "schedule_type: custom` is not implemented yet"),
        (LINEAR.to_string() + ", difficulty_type: percentile", ".difficulty_type", "not implemented yet"),
        (LINEAR.to_string() + ", clustering_type: schedule_based", ".clustering_type", "not implemented yet"),
        (root, ".schedule_config.root_degree", "is missing"),
        (discrete("difficulty: [8, 64]"), ".schedule_config.max_step", "is missing"),
        (
            discrete("difficulty: [8, 64], max_step: [1, 2]"),
            ".schedule_config.difficulty",
            "2 lengths need 1 entries in `max_step`, found 2",
        ),
        (
            discrete("difficulty: [8], max_step: []"),
            ".schedule_config.difficulty",
            "1 lengths need 1 entries in `max_step`, found 0",
        ),
        (
            discrete("difficulty: [8, 16, 64], max_step: [9, 9]"),
            ".schedule_config.max_step",
            "the steps [9, 9] do not increase",
        ),
        (
            discrete("difficulty: [8, 65], max_step: [9]"),
            ".schedule_config.difficulty",
            "the length 65 is not between 8 and 64",
        ),
    ] {
        let errors = Config::parse("ds.yaml", format!("{HEAD}{}", curriculum(&text))).unwrap_err();
        let first = errors.iter().next().unwrap();
        assert_eq!(first.places[0].path, format!("{seqlen}{key}"), "{text}\n{errors}");
        assert!(errors.to_string().contains(expected), "{text}\n{errors}");
    }
    let one = |text: String| Config::parse("ds.yaml", format!("{HEAD}{text}")).unwrap_err().to_string();
    for (with, expected) in [
        ("data: {train: a, sequence_length: 63}\n", "`max_difficulty` is 64, but a sample has 63 tokens"),
        (
            "model: {type: gpt2, n_positions: 32}\ndata: {train: a}\n",
            "`max_difficulty` is 64, but a sample has 32 tokens",
        ),
        ("model: {type: mlp, input_size: 1, output_size: 1}\ndata: {train: a}\n", "an mlp trains on rows"),
        ("data: {train: a, format: csv}\n", "rows of a table have no length"),
        ("data: {train: a, format: chat, tokenizer: b}\n", "a conversation cannot be truncated"),
        (
            "data: {tokenizer: b, datasets: [{path: a}, {path: c, format: chat}]}\n",
            "a conversation cannot be truncated",
        ),
        ("data: {train: a, format: chat, tokenizer: b}\npreference: {}\n", "a pair of answers cannot be truncated"),
    ] {
        let error = one(format!("{with}{}", curriculum(LINEAR)));
        assert!(error.contains(expected), "{with}\n{error}");
    }
    let other = one(curriculum(LINEAR).replace("seqlen: {", "vocabularyrarity: {"));
    assert!(other.contains("unknown key") && other.contains("vocabularyrarity"), "{other}");
    let error = one(curriculum(LINEAR).replace("  enabled: true\n  data", "  data"));
    assert!(error.contains("enabled: true` has no effect without `data_efficiency.enabled: true`"), "{error}");
    let error = one(curriculum("").replace("{seqlen: {}}", "{}"));
    assert!(error.contains("seqlen` is missing"), "{error}");
}

#[test]
fn deepspeed_curricula_are_accepted_on_and_off() {
    let parse =
        |text: String| Config::parse("ds.yaml", format!("{HEAD}{text}")).unwrap_or_else(|e| panic!("{text}\n{e}"));
    // The keys of Megatron-DeepSpeed's examples.
    let megatron = format!(
        "index_to_sample_path: dummy, index_to_metric_path: dummy, difficulty_type: value, clustering_type: \
         single_cluster, {LINEAR}"
    );
    let text = curriculum(&megatron).replace("seqlen:", "seqlen_truncate:");
    let config = parse(text.clone());
    let found = config.data_efficiency.curriculum().unwrap();
    assert_eq!((found.min_difficulty, found.schedule_config.difficulty_step), (8, Some(8)));
    let paths: Vec<&str> =
        config.warnings.iter().map(|warning| warning.place.path.rsplit('.').next().unwrap()).collect();
    assert_eq!(paths, ["index_to_sample_path", "index_to_metric_path"]);
    // The YAML output is the same configuration.
    assert_eq!(Config::parse("ds.yaml", config.to_yaml()).unwrap(), config);

    let off = text.replacen("enabled: true", "enabled: false", 1).replace("single_cluster", "schedule_based");
    let config = parse(off);
    assert!(config.data_efficiency.curriculum().is_none());
    assert_eq!(config.warnings, []);
    let config = parse("data_efficiency: {enabled: true, data_sampling: {enabled: true}}\n".into());
    let message = "`data_efficiency.data_sampling.enabled` has no effect: \
                   `data_efficiency.data_sampling.curriculum_learning.enabled` is not true";
    assert_eq!(config.warnings.iter().map(|warning| warning.message.as_str()).collect::<Vec<_>>(), [message]);
}
