//! `zero-train data prepare`, `stats` and `verify`.

use std::fs;
use std::process::Stdio;

use crate::case::{Case, signal, text, wait_for};

/// Number of lines of the corpus. The corpus is larger than 4 MiB; smaller ones are tokenized in memory.
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
    assert!(
        out.contains(&format!("training data: 1 file, 1 tokenized now, 0 already in the cache; {tokens}")),
        "{out}"
    );
    assert!(
        out.contains(&format!("evaluation data: 1 file, 0 tokenized now, 1 already in the cache; {tokens}")),
        "{out}"
    );
    let (_, out, _) = run(&case, "prepare");
    assert!(out.contains("training data: 1 file, 0 tokenized now, 1 already in the cache"), "{out}");
    // A run reads the same cache entry.
    case.train(&["--set", "data={train: large.jsonl, cache_dir: cache}", "--set", "training.eval_every=0"]);
    assert_eq!(fs::read_dir(case.path("cache/tokens")).unwrap().count(), 2, "an entry and the lock");
}

#[test]
fn stats_describes_a_corpus() {
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
fn damaged_tokens_and_an_unwritable_cache_are_errors() {
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
    assert!(err.contains("in: data.cache_dir\n  help: set it to a folder that is writable"), "{err}");
}

/// The signal arrives while the second of two files is tokenized.
#[test]
fn a_signal_ends_a_preparation_that_the_next_start_continues() {
    for (what, name, status) in [("prepare", "TERM", 143), ("verify", "INT", 130)] {
        let case = case();
        let line = format!("{{\"text\": \"{}\"}}\n", "abcdefgh ".repeat(200));
        fs::write(case.path("more.jsonl"), line.repeat(30_000)).unwrap();
        let data = "data={train: [large.jsonl, more.jsonl], cache_dir: cache}";
        let arguments = ["data", what, "--config", "ds.yaml", "--set", data];
        let started = case.command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let entries = || -> Vec<String> {
            let found = fs::read_dir(case.path("cache/tokens")).into_iter().flatten();
            found.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
        };
        let is_unfinished = |name: &String| name.ends_with(".tmp");
        let is_complete = |name: &&String| !is_unfinished(name) && !name.starts_with('.');
        wait_for(|| {
            let entries = entries();
            entries.iter().filter(is_complete).count() == 1 && entries.iter().any(is_unfinished)
        });
        signal(started.id(), name);
        let output = started.wait_with_output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{error}");
        assert_eq!(error, format!("error: stopped by SIG{name}; no unfinished file remains\n"));
        assert_eq!(entries().len(), 2, "an entry and the lock: {:?}", entries());
        let out = case.succeed(&["data", "prepare", "--config", "ds.yaml", "--set", data]);
        assert!(out.contains("2 files, 1 tokenized now, 1 already in the cache"), "{out}");
    }
}
