//! Input that is not a configuration, by accident or by intent. It must give one clear error and use little memory.

use std::fmt::Debug;
use std::fs;

use zero_config::{Config, ErrorKind, Errors, Source};

use crate::texts::only_error;

fn error_of(text: impl Into<String>) -> (ErrorKind, String) {
    only(Config::parse("ds.yaml", text))
}

fn only<T: Debug>(parsed: Result<T, Errors>) -> (ErrorKind, String) {
    let error = only_error(parsed);
    (error.kind, error.message)
}

const TOO_DEEP: &str = "more than 64 levels of nesting";
const TOO_MANY: &str = "more than 20000 values after aliases are expanded";

#[test]
fn an_alias_bomb_is_refused() {
    let mut text = "a: &a [x, x, x, x, x, x, x, x, x]\n".to_string();
    for (name, before) in ('b'..='i').zip('a'..) {
        let aliases = vec![format!("*{before}"); 9].join(", ");
        text.push_str(&format!("{name}: &{name} [{aliases}]\n"));
    }
    assert_eq!(error_of(text), (ErrorKind::Syntax, TOO_MANY.to_string()));
}

#[test]
fn an_alias_inside_its_own_value_is_refused() {
    let (kind, message) = error_of("a: &a [*a]");
    assert_eq!(kind, ErrorKind::Syntax);
    assert!(message.contains("inside the value that it refers to"), "{message}");
    assert_eq!(error_of("a: *nowhere").0, ErrorKind::Syntax);
}

#[test]
fn deep_nesting_is_rejected() {
    let levels = 200_000;
    for text in ["[", "{a: ", "- ", "? ", ": ", "[{"] {
        let (kind, message) = error_of(text.repeat(levels));
        assert_eq!(kind, ErrorKind::Syntax);
        assert!(message == TOO_DEEP || message.contains("a key must be a string"), "{text}: {message}");
    }
    assert_eq!(error_of("[".repeat(levels) + &"]".repeat(levels)), (ErrorKind::Syntax, TOO_DEEP.to_string()));
    let block: String = (0..1400).map(|depth| " ".repeat(depth) + "a:\n").collect();
    assert_eq!(error_of(block), (ErrorKind::Syntax, TOO_DEEP.to_string()));
}

#[test]
fn too_many_values_are_rejected() {
    let list = format!("train_batch_size: 1\ndata: {{train: [{}]}}", "a, ".repeat(30_000));
    assert_eq!(error_of(list), (ErrorKind::Syntax, TOO_MANY.to_string()));
    let keys: String = (0..30_000).map(|index| format!("k{index}: 1\n")).collect();
    assert_eq!(error_of(keys), (ErrorKind::Syntax, TOO_MANY.to_string()));
}

#[test]
fn thousands_of_errors_are_counted_and_fifty_are_shown() {
    let keys: String = (0..5000).map(|index| format!("stag{index}: 1\n")).collect();
    let errors = Config::parse("ds.yaml", format!("train_batch_size: 1\n{keys}")).expect_err("unknown keys");
    assert_eq!((errors.count(), errors.iter().count()), (5000, 50));
    assert!(errors.to_string().ends_with("error: 4950 more errors are not shown"));
    let same = Config::parse("ds.yaml", "a: 1\n".repeat(9000)).expect_err("a duplicate key is an error");
    assert_eq!(same.iter().filter(|error| error.kind == ErrorKind::DuplicateKey).count(), 50);
}

#[test]
fn a_large_file_is_refused_without_being_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("large.yaml");
    // A sparse file of 50 MB.
    fs::File::create(&path).and_then(|file| file.set_len(50 << 20)).expect("the file is made");
    let (kind, message) = only(Config::from_path(&path));
    assert_eq!((kind, message.as_str()), (ErrorKind::Unreadable, "larger than 1024 KiB: this is not a configuration"));
    assert_eq!(error_of("a: b\n".repeat(10_000_000)).0, ErrorKind::Unreadable);
}

#[test]
fn unreadable_files_give_a_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let (kind, message) = only(Config::from_path(folder.path().join("absent.yaml")));
    assert_eq!(kind, ErrorKind::Unreadable);
    assert!(message.starts_with("cannot read the configuration: "), "{message}");
    assert_eq!(only(Config::from_path(folder.path())).0, ErrorKind::Unreadable);
    let (kind, message) = only(Source::from_bytes("x", b"a: \xff\xfe".to_vec()));
    assert_eq!((kind, message.as_str()), (ErrorKind::Unreadable, "not UTF-8 text: the byte at offset 3 is invalid"));
}

#[test]
fn documents_without_keys_are_rejected() {
    for text in ["", "\n\n", "# only a comment\n", "~", "null", "---\n", "\u{feff}", "\t\t"] {
        assert_eq!(error_of(text), (ErrorKind::Missing, "the configuration is empty".to_string()), "{text:?}");
    }
    for (text, found) in [("- a\n- b", "a list"), ("hello", "the string \"hello\""), ("12", "`12`"), ("[]", "a list")] {
        let message = format!("the file must consist of keys with values (`key: value`), found {found}");
        assert_eq!(error_of(text), (ErrorKind::Value, message));
    }
}

#[test]
fn only_one_document_is_accepted() {
    let (kind, message) = error_of("train_batch_size: 1\n---\ntrain_batch_size: 2\n");
    assert_eq!(kind, ErrorKind::Syntax);
    assert!(message.starts_with("a second document starts here"), "{message}");
    assert!(Config::parse("ds.yaml", "---\ntrain_batch_size: 1\n...\n").is_ok());
    assert!(Config::parse("ds.yaml", "\u{feff}train_batch_size: 1\r\ndump_state: true\r\n").is_ok());
}

#[test]
fn a_key_written_twice_is_refused() {
    for text in ["train_batch_size: 1\ntrain_batch_size: 2", "{\"train_batch_size\": 1, \"train_batch_size\": 1}"] {
        assert_eq!(error_of(text), (ErrorKind::DuplicateKey, "`train_batch_size` is written twice".to_string()));
    }
}

#[test]
fn nan_infinite_and_huge_numbers_are_rejected() {
    for number in [".nan", ".inf", "-.inf", "1e999", "-1e999", "99999999999999999999999999999999999999999999999"] {
        for key in [
            "train_batch_size: X",
            "train_batch_size: 1\nzero_optimization: {stage3_max_live_parameters: X}",
            "train_batch_size: 1\noptimizer: {type: AdamW, params: {betas: [X, 0.9]}}",
            "train_batch_size: 1\nlauncher: {timeout_seconds: X}",
            "train_batch_size: 1\nmodel: {type: mlp, input_size: 1, output_size: 1, hidden_sizes: [X]}",
        ] {
            assert_eq!(error_of(key.replace('X', number)).0, ErrorKind::Value, "{key} {number}");
        }
    }
}

#[test]
fn unsafe_tags_and_directives_are_rejected() {
    assert_eq!(error_of("train_batch_size: !!python/object:os.system 1").0, ErrorKind::Syntax);
    assert_eq!(error_of("%YAML 1.2\n---\ntrain_batch_size: 1").0, ErrorKind::Syntax);
    assert_eq!(error_of("[a, b]: 1").0, ErrorKind::Syntax);
    assert!(Config::parse("ds.yaml", "train_batch_size: 1\ntraining: {output_dir: !!str 12}").is_ok());
}

#[test]
fn control_characters_do_not_reach_the_terminal() {
    let text = "train_batch_size: 1\n\"\\e[31mred\": 1\ndata: {train: x, format: \"\\e]0;title\\a\"}\n";
    let errors = Config::parse("ds\u{1b}[2J.yaml", text).expect_err("unknown key");
    let shown = errors.to_string();
    assert!(shown.chars().all(|c| !c.is_control() || c == '\n'), "{shown:?}");
    assert_eq!(errors.count(), 2);
}
