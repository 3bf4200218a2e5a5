//! Messages for an invalid configuration: all errors together, each with its location.

mod schedules;
mod unsupported;
mod values;

use zero_config::{Config, ErrorKind, Errors};

use crate::texts::{only_error, overridden, spots};

pub(crate) const HEAD: &str = "train_micro_batch_size_per_gpu: 1\n";

pub(crate) fn errors(text: &str) -> Errors {
    match Config::parse("ds.yaml", text) {
        Ok(config) => panic!("accepted:\n{text}\n{}", config.to_yaml()),
        Err(errors) => errors,
    }
}

/// Returns the only error of a text: kind; path, line and column of its first location; message and help.
pub(crate) fn only(text: &str) -> (ErrorKind, String, usize, usize, String, String) {
    let error = only_error(Config::parse("ds.yaml", text));
    let (line, column) = spots(&error).first().copied().unwrap_or_default();
    (error.kind, error.places[0].path.clone(), line, column, error.message, error.help.unwrap_or_default())
}

#[test]
fn an_unknown_key_is_shown_with_its_place_and_the_nearest_known_key() {
    let text = "train_batch_size: 8\n\nzero_optimization:\n  # a comment\n  stagee: 3\n";
    let expected = "\
error: unknown key `zero_optimization.stagee`
  in: zero_optimization.stagee (ds.yaml:5:3)
      5 |   stagee: 3
        |   ^^^^^^
  help: did you mean `stage`?";
    assert_eq!(errors(text).to_string(), expected);
}

#[test]
fn json_keeps_lines_and_columns() {
    let text = "{\n\t\"train_batch_size\": 8,\n\t\"zero_optimization\": {\"stage\": 3, \"overlap_com\": true}\n}";
    let (kind, path, line, column, _, help) = only(text);
    assert_eq!((kind, path.as_str(), line, column), (ErrorKind::UnknownKey, "zero_optimization.overlap_com", 3, 36));
    assert_eq!(help, "did you mean `overlap_comm`?");
    let minified =
        format!("{{\"train_batch_size\":8,\"data\":{{\"train\":[{}\"x\"],\"formt\":\"text\"}}}}", "\"a\",".repeat(500));
    let shown = errors(&minified).to_string();
    assert!(shown.lines().all(|line| line.chars().count() < 200), "{shown}");
    let lines: Vec<&str> = shown.lines().collect();
    let start = lines[3].find('^').expect("the location is marked");
    assert_eq!(&lines[2][start..start + 7], "\"formt\"", "{shown}");
}

#[test]
fn all_errors_are_reported_together_in_the_order_of_the_file() {
    let text = "\
train_batch_size: 7
train_micro_batch_size_per_gpu: 2
gradient_accumulation_steps: 3
gradient_clippin: 1
optimizer: {type: AdamW, params: {lr: -1, betas: [0.9, 1.5]}}
zero_optimization:
  stage: 4
  mics_shard_size: 8
  load_from_fp32_weights: false
fp16: {enabled: true, auto_cast: true}
model: {type: gpt2, n_embd: 100, n_head: 12}
data: {format: txt}
";
    let found: Vec<(ErrorKind, String)> =
        errors(text).iter().map(|error| (error.kind, error.places[0].path.clone())).collect();
    let expected = [
        (ErrorKind::Contradiction, "train_batch_size"),
        (ErrorKind::UnknownKey, "gradient_clippin"),
        (ErrorKind::Value, "optimizer.params.lr"),
        (ErrorKind::Value, "optimizer.params.betas"),
        (ErrorKind::Value, "zero_optimization.stage"),
        (ErrorKind::Rejected, "zero_optimization.mics_shard_size"),
        (ErrorKind::NotImplemented, "zero_optimization.load_from_fp32_weights"),
        (ErrorKind::NotImplemented, "fp16.auto_cast"),
        (ErrorKind::Contradiction, "model.n_head"),
        (ErrorKind::Missing, "data.train"),
        (ErrorKind::Value, "data.format"),
    ];
    assert_eq!(found, expected.map(|(kind, path)| (kind, path.to_string())));
}

#[test]
fn a_misplaced_key_suggests_the_right_section() {
    for (text, place) in [
        ("stage: 3", "`zero_optimization.stage`"),
        ("max_steps: 4", "`training.max_steps` or `autotuning.sweep.max_steps`"),
    ] {
        let help = format!("it belongs at {place}; `--ignore-unknown-keys` turns it into a warning");
        assert_eq!(only(&format!("{HEAD}{text}")).5, help);
    }
    assert_eq!(only(&format!("{HEAD}zero_optimization: {{lr: 1}}")).5, "it belongs at `optimizer.params.lr`");
    let help = only(&format!("{HEAD}optimizer: {{type: SGD, params: {{betas: [0.9, 0.99]}}}}")).5;
    assert!(help.starts_with("it belongs to another `type`; the keys of this type are `lr`, `momentum`"), "{help}");
    assert!(only(&format!("{HEAD}<<: {{a: 1}}")).5.contains("merge keys"));
}

#[test]
fn errors_in_overrides_name_the_override() {
    let sets = ["zero_optimization.stage=9", "nonsense", "=1", "a..b=1", "training.trace=[", "optimizer.tipe=AdamW"];
    let text = overridden(HEAD, &sets).expect_err("every override is invalid").to_string();
    assert!(text.contains("  in: zero_optimization.stage (--set zero_optimization.stage=9)"), "{text}");
    for set in &sets[1..] {
        assert!(text.contains(&format!("--set {set}")), "{set}: {text}");
    }
}

#[test]
fn common_slips_of_yaml_get_advice() {
    let cases = [
        ("data: {train: **/*.rs}", "put a glob in quotes"),
        ("data:\n  train: *.rs", "put a glob in quotes"),
        ("data:\n\ttrain: a", "indent with spaces"),
    ];
    for (text, advice) in cases {
        let (kind, _, line, _, _, help) = only(&format!("{HEAD}{text}"));
        assert!(kind == ErrorKind::Syntax && line > 1 && help.contains(advice), "{text}: {help}");
    }
}

#[test]
fn missing_model_and_data_are_errors_that_name_them() {
    let config = Config::parse("ds.yaml", HEAD).expect("valid");
    let errors = config.model_and_data().expect_err("neither is there");
    let found: Vec<_> = errors.iter().map(|error| (error.kind, error.places[0].path.as_str())).collect();
    assert_eq!(found, [(ErrorKind::Missing, "model"), (ErrorKind::Missing, "data")]);
    assert!(errors.to_string().contains("  in: model (not in ds.yaml)"), "{errors}");
    let config = Config::parse("ds.yaml", format!("{HEAD}model: {{type: gpt2}}\ndata: {{train: a}}")).expect("valid");
    assert!(config.model_and_data().is_ok());
}

#[test]
fn a_wrong_split_is_shown_with_its_place() {
    for (split, expected) in [
        ("train[5]", "`[5]` is not a slice; use `[from:to]`"),
        ("tra in", "`tra in` is not a split such as `train`, `train[:90%]` or `train[1000:2000]`"),
        ("train[:200%]", "200 % is not between -100 % and 100 %"),
    ] {
        let text = format!("{HEAD}data:\n  datasets:\n  - {{path: a}}\n  - {{path: b, split: {split:?}}}\n");
        let (_, path, line, _, message, _) = only(&text);
        assert_eq!((path.as_str(), line, message.as_str()), ("data.datasets.1.split", 5, expected));
    }
}

#[test]
fn bfloat16_is_an_alias_of_bf16() {
    let config =
        Config::parse("ds.yaml", format!("{HEAD}bfloat16: {{enabled: true}}")).expect("DeepSpeed's other name");
    assert!(config.bf16.enabled);
    let errors = errors(&format!("{HEAD}bfloat16: {{enabled: true}}\nbf16: {{enabled: false}}"));
    assert_eq!(errors.iter().next().expect("at least one error").kind, ErrorKind::DuplicateKey);
}

#[test]
fn z_loss_contradicts_preference_training() {
    let text = |z_loss: &str| {
        format!(
            "{HEAD}preference: {{}}\ntraining: {{z_loss: {z_loss}}}\ndata: {{train: a, format: chat, tokenizer: b}}\n\
             model: {{type: gpt2, n_layer: 1, n_head: 1, n_embd: 8}}\n"
        )
    };
    let error = Config::parse("ds.yaml", text("1.0e-4")).unwrap_err().to_string();
    assert!(error.contains("`z_loss` has no effect with `preference`"), "{error}");
    Config::parse("ds.yaml", text("0")).unwrap_or_else(|e| panic!("{e}"));
}
