//! A configuration in several files: later files override earlier ones, and each error names its file.

use zero_config::{Config, Errors, Origin, Source, load_files};

fn source(name: &str, text: &str) -> Source {
    Source { name: name.to_string(), text: text.to_string() }
}

fn merged(texts: &[&str], overrides: &[&str]) -> Result<Config, Errors> {
    let name = |index: usize| ["ds_config.json", "run.yaml", "more.yaml"][index];
    let sources = texts.iter().enumerate().map(|(index, text)| source(name(index), text)).collect();
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    load_files(sources, &overrides)?.resolve(None)
}

const FIRST: &str = "{\"train_micro_batch_size_per_gpu\": 4, \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": \"auto\", \
                     \"eps\": 1e-6}},\n\"bfloat16\": {\"enabled\": true}}";

#[test]
fn sections_are_merged_and_later_files_and_overrides_win() {
    let further = "optimizer:\n  params:\n    lr: 0.01\nmodel: {type: gpt2}\nbf16:\n  enabled: false\n";
    let config = merged(&[FIRST, further], &[]).unwrap();
    let whole = "train_micro_batch_size_per_gpu: 4\noptimizer: {type: AdamW, params: {lr: 0.01, eps: 1.0e-6}}\n\
                 model: {type: gpt2}\ntraining: {output_dir: runs/ds_config}";
    assert_eq!(config, Config::parse("ds.yaml", whole).unwrap());
    assert_eq!(config.name, "ds_config.json");
    assert_eq!(config.origins.get("optimizer.params.lr"), Origin::LineOf { file: 2, line: 3 });
    assert_eq!(config.origins.get("optimizer.params.eps"), Origin::Line(1));
    assert!(config.to_yaml_with_origins().contains("# line 3 of file 2"));

    assert_eq!(merged(&[FIRST, further, "# nothing"], &[]).unwrap(), config);
    let config = merged(&[FIRST, further, "optimizer: {params: {lr: 0.02}}"], &["optimizer.params.eps=1e-7"]).unwrap();
    assert_eq!(config.optimizer.lr(), 0.02);
    assert!(config.to_yaml().contains("eps: 1.0e-7"));
}

#[test]
fn null_in_a_later_file_removes_a_key() {
    let config = merged(&[FIRST, "optimizer: null\nbf16: null"], &[]).unwrap();
    assert_eq!((config.optimizer.lr(), config.bf16.enabled), (1e-3, false));
}

#[test]
fn every_error_names_its_file() {
    let errors = merged(&["steps_per_print: no\n", "\nmodel: {type: gpt2, n_heads: 4}\ntrain_batch_size: 4"], &[])
        .expect_err("two mistakes")
        .to_string();
    let places: Vec<&str> = errors.lines().filter(|line| line.starts_with("  in: ")).collect();
    assert_eq!(places, ["  in: steps_per_print (ds_config.json:1:18)", "  in: model.n_heads (run.yaml:2:21)"]);
    assert!(errors.contains("model: {type: gpt2, n_heads: 4}"), "{errors}");

    let errors =
        merged(&["train_batch_size: 4", "zero_optimization:\n\tstage: 1"], &[]).expect_err("a tab").to_string();
    assert!(errors.contains("(run.yaml:2:") || errors.contains("in: run.yaml:2:"), "{errors}");
    assert!(errors.contains("indent with spaces"), "{errors}");

    let errors =
        merged(&["train_batch_size: 4", "- a list"], &[]).expect_err("a list at the top is an error").to_string();
    assert!(errors.contains("found a list") && errors.contains("run.yaml:1:1"), "{errors}");

    // A complete file after the list must not hide the error that the list would replace the keys of earlier files.
    for texts in [&["- a list", "train_batch_size: 4"][..], &["steps_per_print: 3", "- a list", "train_batch_size: 4"]]
    {
        let errors = merged(texts, &[]).expect_err("a list between files is an error").to_string();
        assert!(errors.contains("found a list"), "{errors}");
    }
}

#[test]
fn no_file_is_an_error() {
    assert_eq!(
        load_files(vec![], &[]).expect_err("an empty list is an error").to_string(),
        "error: there is no configuration"
    );
}
