//! Data, models and checkpoints in object stores and on web servers.

mod checkpoints;
mod services;
mod web;

use std::fs;

use crate::case::Case;

/// Returns two texts that together are too large to be tokenized in memory.
fn corpus() -> Vec<(&'static str, String)> {
    let text = |from: usize| {
        let line = |i: usize| format!("line {i} of a text with {} words of its own\n", i * i % 977);
        (from..from + 60_000).map(line).collect::<String>()
    };
    vec![("a.txt", text(0)), ("b.txt", text(60_000))]
}

/// Trains on local copies of the corpus. Returns the losses.
fn local_losses(case: &Case) -> Vec<String> {
    for (name, content) in corpus() {
        fs::write(case.path(name), content).unwrap();
    }
    let cache = case.path("local-cache").display().to_string();
    case.train(&["--quiet", "--max-steps", "4", "--out", "local", "--set", &data("[a.txt, b.txt]", &cache)]);
    case.losses("local")
}

fn data(train: &str, cache: &str) -> String {
    format!("data={{train: {train}, eval_fraction: 0.1, cache_dir: {cache:?}}}")
}
