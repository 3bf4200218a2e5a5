//! Edits of a configuration's text: the result has the expected meaning, and everything else is preserved.

use proptest::prelude::*;
use zero_config::{Config, ErrorKind, edit, load};

use crate::texts::source;

const PRESETS: [&str; 4] = [
    include_str!("../../../quickstart.yaml"),
    include_str!("../../../gpt2-124m.yaml"),
    include_str!("../../../llama-tiny.yaml"),
    include_str!("../../../ds_config.json"),
];

const ANEW: &str = "# Rewritten";

fn changes(list: &[(&str, &str)]) -> Vec<(String, Option<String>)> {
    // `-` removes the key.
    list.iter().map(|(path, value)| (path.to_string(), (*value != "-").then(|| value.to_string()))).collect()
}

fn edited(text: &str, list: &[(&str, &str)]) -> String {
    edit(&source(text), &changes(list)).unwrap_or_else(|errors| panic!("{errors}"))
}

/// Resolves a text with overrides. Returns its errors without their locations.
fn meaning(text: &str, sets: &[String]) -> Result<Config, Vec<String>> {
    let resolved = load(source(text), sets).and_then(|typed| typed.resolve(Some(2)));
    resolved.map_err(|errors| {
        let mut messages: Vec<_> = errors.iter().map(|error| format!("{:?} {}", error.kind, error.message)).collect();
        messages.sort();
        messages
    })
}

#[test]
fn a_value_is_changed_and_nothing_else() {
    let cases = [
        ("a: 1 # c\nb: 2\n", "a", "5", "a: 5 # c\nb: 2\n"),
        ("# t\n\na:   1\t# c\tc\n\n\nb: 2", "a", "5", "# t\n\na:   5\t# c\tc\n\n\nb: 2"),
        ("a: 1\r\nb: 2 # c\r\n", "b", "x y", "a: 1\r\nb: \"x y\" # c\r\n"),
        ("a: 'it''s # no' # c\n", "a", "5", "a: 5 # c\n"),
        ("\"a\": \"x\\\" # no\" # c\n", "a", "5", "\"a\": 5 # c\n"),
        ("é: é # é\na: é # é\n", "a", "5", "é: é # é\na: 5 # é\n"),
        ("\u{feff}a: 1\n", "a", "5", "\u{feff}a: 5\n"),
        ("---\na: 1\n...\n", "a", "5", "---\na: 5\n...\n"),
        ("a:\n  # c\n  1 # d\nb: 2\n", "a", "5", "a:\n  # c\n  5 # d\nb: 2\n"),
        ("a: x\n  y # c\nb: 2\n", "a", "5", "a: 5 # c\nb: 2\n"),
        ("a: |-  # c\n    x\n    # no\n\n    y\n\n# d\nb: 2\n", "a", "5", "a: 5  # c\n\n# d\nb: 2\n"),
        ("a: >\n  x\n", "a", "5", "a: 5\n"),
        ("a: [1,\n  2] # c\nb: 2\n", "a", "5", "a: 5 # c\nb: 2\n"),
        ("a: # c\n- 1\n- 2 # d\n# e\nb: 2\n", "a", "[3, 4]", "a: [3, 4] # c\n# e\nb: 2\n"),
        ("s: {a: 1, b: 2} # c\n", "s.a", "[5]", "s: {a: [5], b: 2} # c\n"),
        ("s: {a: 1, # x\n    b: 2} # c\n", "s.b", "5", "s: {a: 1, # x\n    b: 5} # c\n"),
        ("{\"a\":1,\"b\":{\"c\":[1]}}", "b.c", "x", "{\"a\":1,\"b\":{\"c\":\"x\"}}"),
        ("? a\n: 1\n", "a", "5", "? a\n: 5\n"),
        ("a: !!str 1 # c\n", "a", "5", "a: 5 # c\n"),
        ("a: &x 1 # c\n", "a", "5", "a: 5 # c\n"),
        ("a: &x 1\nb: *x # c\n", "b", "5", "a: &x 1\nb: 5 # c\n"),
        ("a:\nb: 2\n", "a", "5", "a: 5\nb: 2\n"),
        ("a: # c\nb: 2\n", "a", "5", "a: 5 # c\nb: 2\n"),
        ("a:", "a", "5", "a: 5"),
        ("a: 1 # c\n", "a", "", "a: null # c\n"),
        ("bfloat16:\n  enabled: false\n", "bf16.enabled", "true", "bfloat16:\n  enabled: true\n"),
        ("a: 1\n", "a", "{b: {c: [null, 0.5, 'on']}}", "a: {b: {c: [null, 0.5, \"on\"]}}\n"),
    ];
    for (text, path, value, expected) in cases {
        assert_eq!(edited(text, &[(path, value)]), expected, "{text:?}");
    }
}

#[test]
fn a_section_becomes_a_value_and_a_value_a_section() {
    let cases = [
        ("s: # c\n  a: 1\n  # x\n  b: 2 # d\n\n# e\nt: 1\n", "s", "5", "s: 5 # c\n\n# e\nt: 1\n"),
        ("s: &x # c\n  a: 1\nt: 1\n", "s", "5", "s: 5 # c\nt: 1\n"),
        ("s:\n  t:\n    a: 1\n  u: 2\n", "s.t", "null", "s:\n  t: null\n  u: 2\n"),
        ("s: 3 # c\n", "s.a", "5", "s: {a: 5} # c\n"),
        ("s: null # c\n", "s.a.b", "5", "s: {a: {b: 5}} # c\n"),
        ("s:\nt: 1\n", "s.a", "5", "s: {a: 5}\nt: 1\n"),
        ("s: [1,\n 2] # c\n", "s.a", "5", "s: {a: 5} # c\n"),
        ("{\"s\": null}", "s.a", "5", "{\"s\": {\"a\":5}}"),
    ];
    for (text, path, value, expected) in cases {
        assert_eq!(edited(text, &[(path, value)]), expected, "{text:?}");
    }
}

#[test]
fn a_missing_key_is_added_where_it_belongs() {
    let cases = [
        ("a: 1 # c", "b", "5", "a: 1 # c\nb: 5"),
        ("a: 1\r\n", "s.b", "5", "a: 1\r\ns:\r\n  b: 5\r\n"),
        (
            "s:\n    a: 1 # c\n    # d\n# e\nt: 1\n",
            "s.b.c",
            "5",
            "s:\n    a: 1 # c\n    b:\n      c: 5\n    # d\n# e\nt: 1\n",
        ),
        ("s:\n  a: 1\n  # d\n# e\n", "t", "5", "s:\n  a: 1\n  # d\nt: 5\n# e\n"),
        ("s:\n  a: |\n    x\n\n    y\n\nt: 1\n", "s.b", "5", "s:\n  a: |\n    x\n\n    y\n  b: 5\n\nt: 1\n"),
        ("s:\n  a:\n  - 1\n  - 2\nt: 1\n", "s.b", "5", "s:\n  a:\n  - 1\n  - 2\n  b: 5\nt: 1\n"),
        ("s: {a: 1} # c\n", "s.b.c", "5", "s: {a: 1, b: {c: 5}} # c\n"),
        ("s: {a: 1,} # c\n", "s.b", "5", "s: {a: 1, b: 5,} # c\n"),
        ("s: {} # c\n", "s.b", "5", "s: {b: 5} # c\n"),
        ("s: {a: 1,\n    b: 2} # c\n", "s.d", "5", "s: {a: 1,\n    b: 2, d: 5} # c\n"),
        ("{\n  a: 1, # x\n  b: 2 # y\n}\n", "c", "5", "{\n  a: 1, # x\n  b: 2, # y\n  c: 5\n}\n"),
        ("{\n  a: 1, # x\n  b: 2, # y\n}\n", "c", "5", "{\n  a: 1, # x\n  b: 2, # y\n  c: 5,\n}\n"),
        (
            "{\n  \"a\": 1,\n  \"b\": {\n    \"c\": 2\n  }\n}\n",
            "b.d",
            "x",
            "{\n  \"a\": 1,\n  \"b\": {\n    \"c\": 2,\n    \"d\": \"x\"\n  }\n}\n",
        ),
        ("{\n  \"a\": 1\n}", "b.c", "5", "{\n  \"a\": 1,\n  \"b\": {\"c\":5}\n}"),
        ("---\na: 1\n...\n", "b", "5", "---\na: 1\nb: 5\n...\n"),
        ("# only a comment", "s.a", "5", "# only a comment\ns:\n  a: 5\n"),
        ("", "a", "5", "a: 5\n"),
    ];
    for (text, path, value, expected) in cases {
        assert_eq!(edited(text, &[(path, value)]), expected, "{text:?}");
    }
}

#[test]
fn a_key_is_removed() {
    let cases = [
        ("a: 1 # c\n# d\nb: 2\n", "a", "# d\nb: 2\n"),
        ("a: 1\nb: 2", "b", "a: 1\n"),
        (
            "s:\n  a: 1\n  b:\n    c: 1\n    # x\n    d: 2\n\n# about t\nt: 2\n",
            "s.b",
            "s:\n  a: 1\n\n# about t\nt: 2\n",
        ),
        ("s: # c\n  a: 1\nb: 2\n", "s.a", "s: {} # c\nb: 2\n"),
        ("s: {a: 1} # c\n", "s.a", "s: {} # c\n"),
        ("{a: 1, b: 2}\n", "a", "{b: 2}\n"),
        ("{a: 1, b: 2}\n", "b", "{a: 1}\n"),
        ("{a: 1, b: 2, c: 3}\n", "b", "{a: 1, c: 3}\n"),
        ("{a: 1, b: 2,}\n", "b", "{a: 1, }\n"),
        ("{\n  \"a\": 1,\n  \"b\": 2\n}\n", "b", "{\n  \"a\": 1\n}\n"),
        ("{\n  \"a\": 1,\n  \"b\": 2\n}\n", "a", "{\n  \"b\": 2\n}\n"),
        ("{\n  # one\n  a: 1, # x\n  # two\n  b: 2, # y\n}\n", "a", "{\n  # one\n  # two\n  b: 2, # y\n}\n"),
        ("{\n  # one\n  a: 1, # x\n  # two\n  b: 2 # y\n}\n", "b", "{\n  # one\n  a: 1 # x\n  # two\n}\n"),
        ("a: 1\r\nb: 2\r\n", "a", "b: 2\r\n"),
        ("a: 1 # c\n", "b", "a: 1 # c\n"),
        ("a: 1 # c\n", "a.b", "a: 1 # c\n"),
        ("bfloat16: {}\na: 1\n", "bf16", "a: 1\n"),
    ];
    for (text, path, expected) in cases {
        assert_eq!(edited(text, &[(path, "-")]), expected, "{text:?}");
    }
}

#[test]
fn changes_are_applied_in_order() {
    let text = "a: 1 # c\ns:\n  b: 2\n";
    let list = [("s.b", "-"), ("s.d", "5"), ("t.u", "6"), ("t.v", "7"), ("a", "8"), ("a", "9")];
    assert_eq!(edited(text, &list), "a: 9 # c\ns: {d: 5}\nt:\n  u: 6\n  v: 7\n");
    assert_eq!(edited(text, &[]), text);
}

#[test]
fn an_edit_never_changes_other_uses_of_an_anchor() {
    // A changed copy replaces the alias. The anchor keeps its value.
    assert_eq!(
        edited("a: &x {b: 1, c: 2} # k\nd: *x # l\n", &[("d.b", "5")]),
        "a: &x {b: 1, c: 2} # k\nd: {b: 5, c: 2} # l\n"
    );
    // An edit of the anchored value in place would change the alias as well.
    for (text, path, expected) in [
        ("a: &x {b: 1} # k\nc: *x\n", "a.b", "a:\n  b: 5\nc:\n  b: 1\n"),
        ("a: &x 1\nc: *x\n", "a", "a: 5\nc: 1\n"),
        ("a: {b: &x 1}\nc: *x\n", "a.b", "a:\n  b: 5\nc: 1\n"),
    ] {
        let result = edited(text, &[(path, "5")]);
        let (head, rest) = result.split_once('\n').expect("several lines");
        assert!(head.starts_with(ANEW), "{result}");
        assert_eq!(rest, expected);
    }
    assert!(edited("a: &x 1\nc: *x\n", &[("a", "-")]).ends_with("\nc: 1\n"));
    assert!(edited("a: 1\n", &[("a", "-")]).ends_with("\n{}\n"));
}

#[test]
fn invalid_edits_are_errors() {
    let error = |text: &str, path: &str, value: &str| {
        let errors = edit(&source(text), &changes(&[(path, value)])).expect_err("the text must be rejected");
        errors.iter().next().expect("at least one error").kind
    };
    assert_eq!(error("a: [", "a", "1"), ErrorKind::Syntax);
    assert_eq!(error("a: 1\n---\nb: 1", "a", "1"), ErrorKind::Syntax);
    assert_eq!(error("a: 1\na: 2", "a", "1"), ErrorKind::DuplicateKey);
    assert_eq!(error("a: 1", "a..b", "1"), ErrorKind::Override);
    assert_eq!(error("a: 1", "", "-"), ErrorKind::Override);
    assert_eq!(error("a: 1", "a", "["), ErrorKind::Override);
    assert_eq!(error(&" ".repeat((1 << 20) + 1), "a", "1"), ErrorKind::Unreadable);
}

/// Keys with valid values.
const KEYS: [(&str, &str); 12] = [
    ("zero_optimization.stage", "2"),
    ("zero_optimization.reduce_bucket_size", "1024"),
    ("zero_optimization.offload_param", "{device: nvme, nvme_path: \"/a b\"}"),
    ("zero_optimization.offload_optimizer.device", "none"),
    ("train_micro_batch_size_per_gpu", "4"),
    ("train_batch_size", "auto"),
    ("gradient_accumulation_steps", "2"),
    ("optimizer.params.betas", "[0.8, 0.9]"),
    ("activation_checkpointing.interval", "1"),
    ("autotuning.space.training.seed", "[1, 2]"),
    ("bf16.enabled", "true"),
    ("training.output_dir", "'# no'"),
];

fn lines(text: &str) -> Vec<&str> {
    // A JSON entry gains a comma when another entry is added after it.
    text.lines().map(|line| line.trim_end_matches(',')).collect()
}

fn is_subsequence(few: &[&str], many: &[&str]) -> bool {
    let mut rest = many.iter();
    few.iter().all(|line| rest.any(|other| other == line))
}

/// Returns whether a change may affect the line: the line's key is part of a changed path or of a replaced section, or
/// the line closes a section.
fn is_affected(line: &str, list: &[(&str, &str)]) -> bool {
    let name = line.trim().trim_start_matches('"').split([':', '"']).next().unwrap_or_default();
    let inside = ["device", "pin_memory"].contains(&name);
    let parts = |path: &str| path.split('.').any(|part| part == name) || inside && path.ends_with("offload_param");
    line.trim() == "}" || list.iter().any(|(path, _)| parts(path))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn presets_keep_all_lines_but_the_changed_ones(
        preset in 0..PRESETS.len(),
        picks in prop::collection::vec((prop::sample::select(&KEYS[..]), any::<bool>()), 1..5),
        unix in any::<bool>(),
    ) {
        let text = if unix { PRESETS[preset].to_string() } else { PRESETS[preset].replace('\n', "\r\n") };
        let list: Vec<(&str, &str)> = picks.iter().map(|((path, value), out)| (*path, if *out { "-" } else { value })).collect();
        let result = edited(&text, &list);
        prop_assert!(!result.starts_with(ANEW), "{}", result);
        prop_assert_eq!(result.matches('\r').count(), if unix { 0 } else { result.matches('\n').count() });
        // The edit preserves all comments and all keys that no change names.
        let kept: Vec<&str> = lines(&text).into_iter().filter(|line| !is_affected(line, &list)).collect();
        prop_assert!(is_subsequence(&kept, &lines(&result)), "{}\n=>\n{}", text, result);
        if preset == 3 {
            prop_assert!(serde_json::from_str::<serde_json::Value>(&result).is_ok(), "{}", result);
        }
    }

    #[test]
    fn an_edit_is_equivalent_to_overrides(
        preset in prop::sample::select(&PRESETS[..]),
        picks in prop::collection::vec(prop::sample::select(&KEYS[..]), 1..5),
    ) {
        let sets: Vec<String> = picks.iter().map(|(path, value)| format!("{path}={value}")).collect();
        prop_assert_eq!(meaning(&edited(preset, &picks), &[]), meaning(preset, &sets));
    }

    #[test]
    fn any_text_is_edited_or_rejected(
        pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..24),
        path in prop::sample::select(&["a", "a.b", "s", "s.a.b", "c", "bf16.x"][..]),
        value in prop::sample::select(&["5", "-", "{b: [1]}", "''", "", "x # y", "1e-7", "[a,"][..]),
    ) {
        let text = pieces.concat();
        let result = edit(&source(&text), &changes(&[(path, value), ("s.z", "1")]));
        if let Ok(result) = result {
            let sets: Vec<String> = if value == "-" { vec![] } else { vec![format!("{path}={value}")] };
            let sets = [sets, vec!["s.z=1".to_string()]].concat();
            if value != "-" {
                prop_assert_eq!(meaning(&result, &[]), meaning(&text, &sets), "{:?} => {:?}", text, result);
            }
            // Repeating an edit changes nothing.
            prop_assert_eq!(edited(&result, &[("s.z", "1")]), result);
        }
    }
}

/// Building blocks of random layouts.
const PIECES: [&str; 34] = [
    "a: ",
    "b: ",
    "s: ",
    "'a': ",
    "\"s\": ",
    "bfloat16:",
    "\n",
    "\n  ",
    "\n    ",
    "\r\n",
    "{",
    "}",
    "[",
    "]",
    ", ",
    "1",
    "x y",
    "'q # q'",
    " # c",
    "\n# d\n",
    "\t# e",
    "|\n  t\n",
    ">+\n  t\n\n",
    "- ",
    "&x ",
    "*x",
    "!!str ",
    "? ",
    "---\n",
    "...\n",
    "null",
    "\u{feff}",
    "é",
    "{a: 1, s: {b: 2}}",
];
