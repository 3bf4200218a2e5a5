//! `autotuning.space`: values, ranges, and errors with their locations.

use std::path::PathBuf;

use zero_config::{Config, ErrorKind, Origin};

use super::{HEAD, only, parse};
use crate::texts::overridden;

fn space(text: &str) -> Vec<(String, Vec<String>)> {
    let space = parse(&format!("autotuning: {{space: {{{text}}}}}")).autotuning.space;
    assert!(space.iter().all(|dimension| dimension.range.is_none()));
    space.into_iter().map(|dimension| (dimension.path, dimension.values)).collect()
}

fn values(text: &str) -> Vec<String> {
    let mut space = space(text);
    assert_eq!(space.len(), 1);
    space.remove(0).1
}

#[test]
fn a_space_keeps_the_order_of_the_file_and_the_shape_of_values() {
    let found = space(
        "zero_optimization.stage: [3, 0], training.reproducible: [true], training.output_dir: 'on',\
         optimizer.params.betas: [[0.9, 0.95], [0.9, 0.999]],\
         zero_optimization.offload_optimizer: [null, {device: nvme, nvme_path: /a b}],\
         optimizer.type: AdamW, launcher.threads_per_rank: [auto, 2], training.memory_limit: [6GiB]",
    );
    let expected = [
        ("zero_optimization.stage", vec!["3", "0"]),
        ("training.reproducible", vec!["true"]),
        ("training.output_dir", vec!["\"on\""]),
        ("optimizer.params.betas", vec!["[0.9, 0.95]", "[0.9, 0.999]"]),
        ("zero_optimization.offload_optimizer", vec!["null", "{device: nvme, nvme_path: \"/a b\"}"]),
        ("optimizer.type", vec!["AdamW"]),
        ("launcher.threads_per_rank", vec!["auto", "2"]),
        ("training.memory_limit", vec!["\"6GiB\""]),
    ];
    let expected = expected.map(|(path, values)| (path.to_string(), values.into_iter().map(String::from).collect()));
    assert_eq!(found, expected);
}

#[test]
fn every_value_can_be_set() {
    let text = format!(
        "{HEAD}zero_optimization: {{stage: 1}}\nautotuning: {{space: {{optimizer.params.betas: [[0.9, 0.95]], training.output_dir: ['*', 'a b', ''],\
         zero_optimization.offload_optimizer: [{{device: nvme, nvme_path: 'a: {{b}}'}}, null], optimizer.params.lr: 5e-324}}}}"
    );
    let config = Config::parse("ds.yaml", text.as_str()).unwrap_or_else(|errors| panic!("{errors}"));
    for dimension in &config.autotuning.space {
        for value in &dimension.values {
            let set = format!("{}={value}", dimension.path);
            let set = overridden(&text, &[set.as_str()]).unwrap_or_else(|e| panic!("{e}"));
            match (dimension.path.as_str(), value.as_str()) {
                ("zero_optimization.offload_optimizer", "null") => {
                    assert_eq!(set.zero.offload_optimizer.nvme_path, None)
                }
                ("zero_optimization.offload_optimizer", _) => {
                    assert_eq!(set.zero.offload_optimizer.nvme_path, Some(PathBuf::from("a: {b}")));
                }
                ("training.output_dir", value) => assert!(["\"*\"", "\"a b\"", "\"\""].contains(&value)),
                ("optimizer.params.lr", _) => assert_eq!(set.optimizer.lr(), 5e-324),
                _ => {}
            }
        }
    }
}

#[test]
fn ranges_are_expanded() {
    let cases = [
        ("training.seed: {from: 1, to: 16, times: 2}", "1 2 4 8 16"),
        ("training.seed: {from: 0, to: 64, step: 16}", "0 16 32 48 64"),
        ("training.seed: {from: 3, to: 20, times: 2}", "3 6 12"),
        ("training.seed: {from: 5, to: 5, step: 1}", "5"),
        ("training.seed: 7", "7"),
        ("optimizer.params.lr: {from: 0.1, to: 0.3, step: 0.1}", "0.1 0.2 0.3"),
        ("optimizer.params.lr: {from: 1e-5, to: 1e-2, times: 10}", "1.0e-5 0.0001 0.001 0.01"),
        ("optimizer.params.lr: {from: 1, to: 4, times: 2.0}", "1.0 2.0 4.0"),
    ];
    for (text, expected) in cases {
        assert_eq!(values(text).join(" "), expected, "{text}");
    }
    assert_eq!(values("training.seed: {from: 1, to: 1000, step: 1}").len(), 1000);
    assert!(only("autotuning: {space: {training.seed: {from: 1, to: 1001, step: 1}}}").4.contains("at most 1000"));
    assert!(
        only("autotuning: {space: {optimizer.params.lr: {from: 0, to: 1, step: 1e-9}}}").4.contains("at most 1000")
    );
}

#[test]
fn invalid_ranges_are_rejected_at_their_location() {
    let cases = [
        ("{from: 4, to: 1, step: 1}", 7, "`from` is more than `to`"),
        ("{from: 0, to: 8, times: 2}", 7, "`from` more than 0"),
        ("{from: 1, to: 8, times: 1}", 24, "`times` must be more than 1"),
        ("{from: 1, to: 8, step: 0}", 23, "`step` must be more than 0"),
        ("{from: 1, to: 8}", 0, "either `times` or `step`"),
        ("{from: 1, to: 8, step: 1, times: 2}", 0, "either `times` or `step`"),
        ("{from: 1, step: 1}", 0, "found a section"),
        ("{from: 1, to: 8, by: 1}", 17, "found `by`"),
        ("{from: a, to: 8, step: 1}", 7, "expected a number, found the string \"a\""),
        ("{low: 1, high: 8}", 0, "only `autotuning.sweep.space` accepts continuous ranges"),
        ("[]", 0, "found an empty list"),
        ("[1, 2, 1]", 7, "1 is listed twice"),
    ];
    for (text, column, message) in cases {
        let start = "autotuning: {space: {training.seed: ";
        let found = only(&format!("{start}{text}}}}}"));
        assert_eq!((found.0, found.1.as_str()), (ErrorKind::Value, "autotuning.space.training.seed"), "{text}");
        assert_eq!((found.2, found.3), (1, start.len() + 1 + column), "{text}: {}", found.4);
        assert!(found.4.contains(message), "{text}: {}", found.4);
    }
}

#[test]
fn unknown_paths_suggest_the_nearest_key() {
    let cases = [
        ("zero_optimization.stagee", "did you mean `zero_optimization.stage`?"),
        ("zero_optimisation.stage", "did you mean `zero_optimization.stage`?"),
        ("stage3_prefetch_bucket_size", "it belongs at `zero_optimization.stage3_prefetch_bucket_size`"),
        ("optimizer.params.beta", "did you mean `optimizer.params.betas`?"),
        ("optimizer.param.lr", "did you mean `optimizer.params.lr`?"),
        ("training.seed.x", "use `training.seed`"),
    ];
    for (path, help) in cases {
        let found = only(&format!("autotuning:\n  space:\n    {path}: [1]\n"));
        assert_eq!((found.0, found.2, found.3), (ErrorKind::UnknownKey, 3, 5), "{path}");
        assert_eq!((found.1, found.5), (format!("autotuning.space.{path}"), help.to_string()));
    }
    assert!(only("autotuning: {space: {autotuning.fast: [true]}}").4.contains("`autotuning` itself"));
    assert!(only("autotuning: {space: {vocabulary_size: [8]}}").4.contains("has no effect"));
    assert_eq!(only("autotuning: {space: {amp.enabled: [true]}}").0, ErrorKind::Rejected);
    assert_eq!(only("autotuning: {space: {fp16.auto_cast: [true]}}").0, ErrorKind::NotImplemented);
}

#[test]
fn invalid_values_are_rejected_at_their_location() {
    let cases = [
        ("zero_optimization.stage: [1, 7]", 26 + 3, ErrorKind::Value, "from 0 to 3, found `7`"),
        ("zero_optimization.stage: {from: 1, to: 4, step: 1}", 25, ErrorKind::Value, "found `4`"),
        ("pipeline.schedule: [1f1b, zigzag]", 26, ErrorKind::Value, "found the string \"zigzag\""),
        ("zero_optimization.offload_optimizer: [{device: cup}]", 47, ErrorKind::Value, "\"cup\""),
        ("zero_optimization.offload_optimizer: [{devise: cpu}]", 39, ErrorKind::UnknownKey, "devise"),
        ("optimizer.type: [AdamW, Adan]", 24, ErrorKind::Value, "\"Adan\""),
        ("optimizer.params.lr: [1.0, -1.0]", 27, ErrorKind::Value, "found `-1.0`"),
        ("zero_optimization: {stage: [0, 9]}", 31, ErrorKind::Value, "found `9`"),
    ];
    for (text, column, kind, message) in cases {
        let found = only(&format!("autotuning:\n  space: {{{text}}}\n"));
        assert_eq!((found.0, found.2), (kind, 2), "{text}: {}", found.4);
        assert_eq!(found.3, "  space: {".len() + 1 + column, "{text}: {}", found.4);
        assert!(found.4.contains(message), "{text}: {}", found.4);
    }
}

#[test]
fn keys_depend_on_the_type_of_their_section() {
    let sgd = "autotuning: {space: {optimizer.type: [SGD, AdamW], optimizer.params.momentum: [0.5]}}";
    assert_eq!(parse(sgd).autotuning.space.len(), 2);
    assert_eq!(only("autotuning: {space: {optimizer.params.momentum: [0.5]}}").0, ErrorKind::UnknownKey);
    let found = only("autotuning: {space: {scheduler.params.warmup_num_steps: [5]}}");
    assert_eq!(found.0, ErrorKind::Missing);
    assert!(found.4.contains("`scheduler.type`"), "{}", found.4);
    // The invalid type is reported once, at its location in the file.
    assert_eq!(only("model: {type: gpt3}\nautotuning: {space: {model.n_layer: [5]}}").1, "model.type");
}

#[test]
fn a_key_given_twice_is_rejected() {
    let twice = [
        "training.seed: [1], training.seed: [2]",
        "training.seed: [1], training: {seed: [2]}",
        "bf16.enabled: [true], bfloat16.enabled: [false]",
        "zero_optimization: [{stage: 1}], zero_optimization.stage: [2]",
        "zero_optimization.stage: [2], zero_optimization: [{stage: 1}]",
    ];
    for text in twice {
        assert_eq!(only(&format!("autotuning: {{space: {{{text}}}}}")).0, ErrorKind::DuplicateKey, "{text}");
    }
    assert_eq!(values("fp16.enabled: [false, true]"), ["false", "true"]);
    // None of these paths lies inside another, although their names share prefixes.
    let apart = "train_batch_size: [1, 2], training.save_every: [1], training.save_last: [true]";
    assert_eq!(space(apart).len(), 3);
}

#[test]
fn the_command_line_narrows_a_search_space() {
    let text =
        format!("{HEAD}autotuning: {{space: {{bfloat16.enabled: [true], training.seed: [1, 2]}}}}\nbfloat16: {{}}\n");
    let sets =
        ["autotuning.space.training.seed=[3]", "autotuning.space.training.save_last=[false]", "bf16.enabled=true"];
    let config = overridden(&text, &sets).unwrap_or_else(|errors| panic!("{errors}"));
    assert!(config.bf16.enabled);
    let found: Vec<_> = config.autotuning.space.iter().map(|d| (d.path.as_str(), d.values.join(" "))).collect();
    let expected = [("bf16.enabled", "true"), ("training.seed", "3"), ("training.save_last", "false")];
    assert_eq!(found, expected.map(|(path, values)| (path, values.to_string())));
    assert_eq!(config.origins.get("autotuning.space.training.seed"), Origin::Set);
    assert_eq!(config.origins.get("autotuning.space.bf16.enabled"), Origin::Line(3));
}
