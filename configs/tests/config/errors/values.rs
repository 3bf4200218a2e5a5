//! Errors about batch sizes, types and ranges of values.

use zero_config::{Config, ErrorKind};

use super::{HEAD, errors, only};

#[test]
fn batch_sizes_that_contradict_each_other_are_one_error_with_the_equation() {
    let text = "train_batch_size: 7\ntrain_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 3\n";
    let errors = errors(text);
    assert_eq!(errors.count(), 1);
    let error = errors.iter().next().expect("at least one error");
    assert_eq!(
        error.message,
        "train_batch_size 7 is not train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks = 2 × 3 × 1 = 6"
    );
    let paths: Vec<_> = error.places.iter().map(|place| place.path.as_str()).collect();
    assert_eq!(
        paths,
        ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "launcher.num_processes"]
    );
}

#[test]
fn a_world_size_that_does_not_divide_the_batch_is_an_error() {
    let error = |text: &str, ranks| {
        let errors = Config::with_world_size("ds.yaml", text, ranks).expect_err("it does not divide");
        errors.iter().next().expect("at least one error").to_string()
    };
    let text = error("train_batch_size: 16", 3);
    assert!(text.contains("train_batch_size 16 is not a multiple of the number of ranks 3"), "{text}");
    assert!(text.contains("the next multiple is 18") && text.contains("3 ranks started"), "{text}");
    let text = error("train_batch_size: 16\ntrain_micro_batch_size_per_gpu: 3", 2);
    assert!(text.contains("train_micro_batch_size_per_gpu × ranks = 3 × 2 = 6"), "{text}");
    let text = error("train_batch_size: 16\ngradient_accumulation_steps: 5", 2);
    assert!(text.contains("gradient_accumulation_steps × ranks = 5 × 2 = 10"), "{text}");
    assert!(error("train_batch_size: 16", 0).contains("0 ranks"));
}

#[test]
fn no_batch_size_at_all_is_an_error() {
    for text in ["steps_per_print: 1", "gradient_accumulation_steps: 2"] {
        let (kind, path, _, _, message, _) = only(text);
        assert_eq!((kind, path.as_str()), (ErrorKind::Missing, "train_micro_batch_size_per_gpu"));
        assert!(message.contains("`train_batch_size`"), "{message}");
    }
    // A mistyped key is not also reported as missing.
    assert_eq!(only("train_micro_batch_size_per_gpuu: 2").0, ErrorKind::UnknownKey);
    assert_eq!(only("train_micro_batch_size_per_gpu: two").0, ErrorKind::Value);
}

#[test]
fn wrong_types_and_ranges_say_what_is_expected() {
    let cases = [
        ("gradient_clipping: .nan", "expected a number, at least 0, found NaN", ""),
        ("gradient_clipping: -.inf", "expected a number, at least 0, found an infinite number", ""),
        ("gradient_clipping: 1e999", "expected a number, at least 0, found an infinite number", ""),
        ("gradient_clipping: -1", "expected a number, at least 0, found `-1`", ""),
        ("gradient_clipping: [1]", "expected a number, at least 0, found a list", ""),
        ("steps_per_print: 1.5", "expected an integer of at least 0, found `1.5`", ""),
        ("steps_per_print: -1", "expected an integer of at least 0, found `-1`", ""),
        ("steps_per_print: 1_000", "expected an integer of at least 0, found the string \"1_000\"", "use 1000"),
        ("dump_state: yes", "expected true or false, found the string \"yes\"", "use `true`"),
        ("dump_state: \"true\"", "expected true or false, found the string \"true\"", ""),
        ("dump_state: 1", "expected true or false, found `1`", ""),
        ("zero_optimization: {stage: 4}", "expected an integer from 0 to 3, found `4`", ""),
        ("zero_optimization: {stage: auto}", "expected an integer from 0 to 3, found the string \"auto\"", ""),
        ("zero_optimization: {reduce_bucket_size: -1}", "at least 0, or `auto`, found `-1`", ""),
        ("zero_optimization: 3", "expected a section, found `3`", ""),
        ("optimizer: AdamW", "expected a section, found the string \"AdamW\"", ""),
        ("optimizer: {type: AdamW, params: {betas: [0.9]}}", "expected a list of two numbers", ""),
        ("optimizer: {type: AdamW, params: {betas: [0.9, 1]}}", "at least 0 and less than 1, found a list", ""),
        ("gradient_allreduce_op: men", "expected `mean` or `sum`", "did you mean `mean`?"),
        ("data: {train: []}", "expected a path, a glob, or a list of them, found a list", ""),
        ("data: {train: x, text_key: 5}", "expected a string, found `5`", "put it in quotes if it is a string"),
        ("model: {type: mlp, input_size: 1, output_size: 1, hidden_sizes: [8, 0]}", "expected a list of integers", ""),
        ("training: {seed: 18446744073709551616}", "found `18446744073709551616`", ""),
        ("launcher: {timeout_seconds: 0}", "greater than 0 and at most 86400, found `0`", ""),
    ];
    for (text, message, help) in cases {
        let (kind, _, line, _, found, advice) = only(&format!("{HEAD}{text}"));
        assert_eq!((kind, line), (ErrorKind::Value, 2), "{text}");
        assert!(found.contains(message), "{text}: {found}");
        assert_eq!(advice, help, "{text}");
    }
}

#[test]
fn tiled_mlp_rows_are_multiples_of_64() {
    for model in ["gpt2", "llama"] {
        let of = |rows: &str| format!("{HEAD}model: {{type: {model}, tiled_mlp_rows: {rows}}}");
        for (rows, help) in [
            ("100", "the next multiple is 128"),
            ("0", ""),
            ("-64", ""),
            ("true", ""),
            ("64.5", ""),
            ("1_024", "use 1024"),
        ] {
            let (kind, path, _, _, message, advice) = only(&of(rows));
            assert_eq!((kind, path.as_str()), (ErrorKind::Value, "model.tiled_mlp_rows"), "{rows}");
            assert!(message.contains("expected a multiple of 64, at most 1073741824, found"), "{message}");
            assert_eq!(advice, help, "{rows}");
        }
        for (rows, expected) in [("64", Some(64)), ("4096", Some(4096)), ("null", None)] {
            let config = Config::parse("ds.yaml", of(rows)).unwrap_or_else(|errors| panic!("{errors}"));
            assert_eq!(config.model.and_then(|model| model.tiled_mlp_rows()), expected);
        }
    }
    let (kind, path, ..) =
        only(&format!("{HEAD}model: {{type: mlp, input_size: 1, output_size: 1, tiled_mlp_rows: 64}}"));
    assert_eq!((kind, path.as_str()), (ErrorKind::UnknownKey, "model.tiled_mlp_rows"));
}
