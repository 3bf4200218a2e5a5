//! Parses random input. The result must be a configuration whose YAML output is valid, or errors that can be printed.

use proptest::prelude::*;
use zero_config::{Config, Source, load};

const PRESETS: [&str; 4] = [
    include_str!("../../../quickstart.yaml"),
    include_str!("../../../gpt2-124m.yaml"),
    include_str!("../../../llama-tiny.yaml"),
    include_str!("../../../ds_config.json"),
];

/// Fragments with a meaning in YAML or in the schema.
const PIECES: [&str; 53] = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ": ",
    ",",
    "- ",
    "? ",
    "&a ",
    "*a",
    "!!str ",
    "|",
    ">",
    "\"",
    "'",
    "#",
    "\n",
    "\n  ",
    "\t",
    "auto",
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    ".nan",
    "18446744073709551615",
    "---\n",
    "%",
    "stage: ",
    "type: ",
    "params:",
    "SGD",
    "zero_optimization: ",
    "\u{feff}",
    "\u{0}",
    "é",
    "<<: ",
    "train_batch_size: 4294967295\n",
    "pipeline: {stages: 2}\n",
    "partition: ",
    "type:(",
    "offload_optimizer: ",
    "device: nvme",
    "nvme_path: ",
    "activation_checkpointing:\n  ",
    "layers: [",
    "training: {memory_limit: 6GiB}\n",
    "autotuning: {space: {",
    "training.seed: ",
    "{from: 0, to: 8, step: 3}",
    "{low: 1, high: 1e9, log: true}",
];

/// Values and fragments of values in a search space.
const SPACE_PIECES: [&str; 16] = [
    "{from: 1, to: 8, times: 2}",
    "{from: 0, to: 1e300, step: 1}",
    "{low: 1, high: 18446744073709551615, log: true}",
    "[1, 2]",
    "[",
    "]",
    ", ",
    "{",
    "}",
    "stage: 1",
    "null",
    "0.1",
    "-9223372036854775809",
    "1e999",
    "SGD",
    "from: ",
];

fn try_all(source: Source, overrides: &[String], ranks: usize) {
    let name = source.name.clone();
    match load(source, overrides).and_then(|typed| typed.resolve(Some(ranks))) {
        Ok(config) => {
            for warning in &config.warnings {
                assert!(!warning.to_string().is_empty());
            }
            let again = Config::parse(name, config.to_yaml_with_origins()).unwrap_or_else(|errors| panic!("{errors}"));
            assert_eq!(again, config);
        }
        Err(errors) => assert!(errors.count() > 0 && errors.to_string().starts_with("error: ")),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        if let Ok(source) = Source::from_bytes("fuzz", bytes) {
            try_all(source, &[], 1);
        }
    }

    #[test]
    fn random_text(text in "\\PC{0,200}") {
        try_all(Source { name: "fuzz".to_string(), text: text.clone() }, &[text], 1);
    }

    #[test]
    fn random_yaml_fragments(pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..60)) {
        let text = pieces.concat();
        try_all(Source { name: "fuzz".to_string(), text: text.clone() }, &[format!("training.seed={text}")], 2);
    }

    #[test]
    fn mutated_presets(
        preset in prop::sample::select(&PRESETS[..]),
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0..12usize, prop::sample::select(&PIECES[..])), 1..4),
        ranks in 1..9usize,
    ) {
        let mut characters: Vec<char> = preset.chars().collect();
        for (place, cut, piece) in edits {
            let start = place.index(characters.len() + 1);
            let end = (start + cut).min(characters.len());
            characters.splice(start..end, piece.chars());
        }
        try_all(Source { name: "fuzz".to_string(), text: characters.into_iter().collect() }, &[], ranks);
    }

    #[test]
    fn presets_with_removed_and_doubled_lines(
        preset in prop::sample::select(&PRESETS[..]),
        out in any::<prop::sample::Index>(),
        doubled in any::<prop::sample::Index>(),
    ) {
        let mut lines: Vec<&str> = preset.lines().collect();
        lines.remove(out.index(lines.len()));
        let at = doubled.index(lines.len());
        lines.insert(at, lines[at]);
        try_all(Source { name: "fuzz".to_string(), text: lines.join("\n") }, &[], 2);
    }

    #[test]
    fn search_spaces_of_random_values(
        path in prop::sample::select(&["training.seed", "optimizer.params.lr", "zero_optimization", "optimizer.type", "data.train"][..]),
        pieces in prop::collection::vec(prop::sample::select(&SPACE_PIECES[..]), 0..8),
        sweep in any::<bool>(),
    ) {
        let space = format!("space: {{{path}: {}}}", pieces.concat());
        let space = if sweep { format!("sweep: {{method: random, {space}}}") } else { space };
        let text = format!("train_batch_size: 1\noptimizer: {{type: SGD}}\nautotuning: {{{space}}}");
        try_all(Source { name: "fuzz".to_string(), text }, &[], 1);
    }

    #[test]
    fn overrides_of_random_paths(path in "[a-z_]{1,12}(\\.[a-z_.]{1,12}){0,3}", value in "[\\[\\]{}:, a-z0-9.\"-]{0,12}") {
        let source = Source { name: "fuzz".to_string(), text: PRESETS[0].to_string() };
        try_all(source, &[format!("{path}={value}")], 2);
    }
}
