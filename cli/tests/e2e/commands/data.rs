//! `zero-train data prepare`, `stats` and `verify`.

use std::fs;

use crate::case::{Case, text};

/// More than the 4 MiB that are tokenized in memory.
const LINES: usize = 60_000;

fn case() -> Case {
    let case = Case::new();
    let line = |i: usize| format!("{{\"text\": \"{}\"}}\n", "abcdefgh ".repeat(1 + i % 20));
    fs::write(case.path("large.jsonl"), (0..LINES).map(line).collect::<String>()).unwrap();
    case
}

fn run(case: &Case, what: &str) -> (Option<i32>, String, String) {
    let data = "data={train: large.jsonl, eval: large.jsonl, cache_dir: cache}";
    let output = case.command(&["data", what, "--config", "ds.yaml", "--set", data]).output().unwrap();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_prepared_corpus_is_not_tokenized_again() {
    let case = case();
    let (status, out, err) = run(&case, "prepare");
    assert_eq!(status, Some(0), "{err}");
    let tokens = "60,000 documents, 5,729,999 tokens";
    assert!(out.contains(&format!("training data: 1 file, 1 tokenized now, 0 in the cache before; {tokens}")), "{out}");
    assert!(
        out.contains(&format!("evaluation data: 1 file, 0 tokenized now, 1 in the cache before; {tokens}")),
        "{out}"
    );
    let (_, out, _) = run(&case, "prepare");
    assert!(out.contains("training data: 1 file, 0 tokenized now, 1 in the cache before"), "{out}");
    // A run reads the same entry.
    case.train(&["--set", "data={train: large.jsonl, cache_dir: cache}", "--set", "training.eval_every=0"]);
    assert_eq!(fs::read_dir(case.path("cache/tokens")).unwrap().count(), 2, "an entry and the lock");
}

#[test]
fn facts_about_a_corpus_are_printed() {
    let (status, out, err) = run(&case(), "stats");
    assert_eq!(status, Some(0), "{err}");
    for line in [
        "training data\n  documents   60,000, 59,980 of them exact duplicates\n",
        "  tokens      5,670,000\n  lengths     min 9, median 90, mean 94.5, 99 % 180, max 180 tokens\n",
        "  padding     0.0 % of positions",
    ] {
        assert!(out.contains(line), "{out}");
    }
}

#[test]
fn damage_and_a_folder_that_cannot_be_written_are_found() {
    let case = case();
    run(&case, "prepare");
    let (status, out, _) = run(&case, "verify");
    assert_eq!(status, Some(0));
    assert!(out.contains("samples, no problem found"), "{out}");
    let entries = fs::read_dir(case.path("cache/tokens")).unwrap().map(|entry| entry.unwrap().path());
    let entry = entries.into_iter().find(|path| !path.ends_with(".lock")).unwrap();
    let mut bytes = fs::read(&entry).unwrap();
    bytes[1 << 20] ^= 1;
    fs::write(&entry, bytes).unwrap();
    let (status, _, err) = run(&case, "verify");
    assert_eq!(status, Some(3));
    assert!(err.contains("byte 1048576: the cached tokens are damaged\n  help: start again"), "{err}");

    fs::remove_dir_all(case.path("cache")).unwrap();
    fs::write(case.path("cache"), "not a folder").unwrap();
    let (status, _, err) = run(&case, "prepare");
    assert_eq!(status, Some(3));
    assert!(err.contains("in: data.cache_dir\n  help: set it to a folder that this process can write"), "{err}");
}
