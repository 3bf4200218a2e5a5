//! Tests mixtures of data sets in runs on ranks that are threads.

use std::path::Path;

use serde_json::{Value, json};
use zero_config::Config;

use crate::data::Unwatched;
use crate::train::configured_data;
use crate::train::token_batches::MicroBatchSamples;
use crate::train::trained::run;
use crate::train::{Resume, Summary};

/// Creates a folder with data sets of 40, 20 and 5 samples of 8 tokens. All bytes of a data set are the same.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, byte, samples) in [("a.txt", "a", 40), ("b.txt", "b", 20), ("c.jsonl", "c", 5)] {
        let text = byte.repeat(8 * samples + 1);
        let text = if name == "c.jsonl" { format!("{{\"body\": {text:?}}}\n") } else { text };
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

/// Returns a configuration with these keys of the data sets a, b and c.
fn text(folder: &Path, keys: [&str; 3], training: &str) -> String {
    let path = |name: &str| folder.join(name);
    let [a, b, c] = keys;
    format!(
        "train_batch_size: 4\noptimizer: {{type: AdamW, params: {{lr: 1.0e-2}}}}\n\
         model: {{type: gpt2, vocab_size: 256, n_positions: 8, n_embd: 8, n_head: 1, n_layer: 1}}\n\
         data:\n  datasets:\n  - {{name: a, path: {:?}, {a}}}\n  - {{name: b, path: {:?}, {b}}}\n\
         {:4}- {{name: c, path: {:?}, text_key: body, {c}}}\n\
         training: {{output_dir: {:?}, {training}}}\n",
        path("a.txt"),
        path("b.txt"),
        "",
        path("c.jsonl"),
        path("run"),
    )
    .replace("    - {name: c", "  - {name: c")
}

/// Returns how many samples of each data set are at these positions of the run.
fn given(text: &str, positions: std::ops::Range<u64>) -> [usize; 3] {
    let corpus = configured_data::open(&Config::parse("ds.yaml", text).unwrap(), false, &Unwatched).unwrap();
    let micro_batch =
        MicroBatchSamples { samples: (0..(positions.end - positions.start) as usize).collect(), length: 8 };
    let batch = corpus.sampler.load(positions.start, &micro_batch).unwrap();
    let tokens = batch.only_target().unwrap().to_vec2::<u32>().unwrap();
    b"abc".map(|byte| tokens.iter().filter(|sample| sample[7] == u32::from(byte)).count())
}

#[test]
fn shares_decide_how_many_samples_of_each_data_set_an_epoch_has() {
    let folder = folder();
    for (keys, expected) in [
        (["weight: 2", "weight: 1", "weight: 0"], [43, 22, 0]),
        (["proportion: 0.2", "proportion: 0.2", "proportion: 0.6"], [13, 13, 39]),
        (["repeat: 0.5", "repeat: 1", "repeat: 3"], [20, 20, 15]),
        (["choose: 3", "choose: 50", "repeat: 1"], [3, 50, 5]),
    ] {
        let text = text(folder.path(), keys, "max_steps: 1");
        let samples = expected.iter().sum::<usize>() as u64;
        assert_eq!(given(&text, 0..samples), expected, "{keys:?}");
        assert_eq!(given(&text, samples..3 * samples), expected.map(|count| 2 * count), "{keys:?}");
    }
    let none = text(folder.path(), ["repeat: 0.001", "repeat: 0.001", "repeat: 0.001"], "max_steps: 1");
    let error = configured_data::open(&Config::parse("ds.yaml", none).unwrap(), false, &Unwatched).err().unwrap();
    assert!(error.to_string().contains("an epoch would contain no samples"), "{error}");
}

fn metrics(summary: &Summary) -> Vec<Value> {
    let text = std::fs::read_to_string(summary.folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn ranks_and_restarts_do_not_change_a_mixture() {
    let folder = folder();
    let keys = ["weight: 2", "weight: 1", "weight: 1"];
    let of = |training: &str| text(folder.path(), keys, training);
    let (whole, all) = run(&of("max_steps: 40"), 1, None);
    whole.unwrap();
    let (part, first) = run(&of("max_steps: 23"), 2, None);
    part.unwrap();
    let (rest, second) = run(&of("max_steps: 40"), 4, Some(Resume::Auto));
    rest.unwrap();
    let near = all.iter().zip(first.iter().chain(&second)).all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(near && first.len() + second.len() == all.len(), "{all:?}\n{first:?}\n{second:?}");
}

#[test]
fn changed_shares_take_effect_when_a_run_is_resumed() {
    let folder = folder();
    let of = |keys, training: &str| text(folder.path(), keys, training);
    let (before, after) = (["choose: 10", "choose: 10", "repeat: 0.001"], ["choose: 1", "choose: 1", "choose: 30"]);
    run(&of(before, "max_steps: 7"), 1, None).0.unwrap();
    let (summary, losses) = run(&of(after, "max_steps: 40"), 1, Some(Resume::Auto));
    let checkpoint = summary.unwrap().checkpoint.unwrap();
    assert_eq!(losses.len(), 33);
    let state = |checkpoint: &Path| {
        let manifest = std::fs::read_to_string(checkpoint.join("manifest.json")).unwrap();
        serde_json::from_str::<Value>(&manifest).unwrap()["engine"]["mixture"].to_string()
    };
    // The first 28 samples are an epoch of 20 samples and 8 samples of the next epoch. They contain 14 samples of `a`
    // and 14 of `b`.
    let expected =
        r#"{"name":"a","samples":40,"per_epoch":1,"taken":14},{"name":"b","samples":20,"per_epoch":1,"taken":14}"#;
    let expected = format!(r#"{{"start":28,"sets":[{expected},{{"name":"c","samples":5,"per_epoch":30,"taken":0}}]}}"#);
    assert_eq!(state(&checkpoint), expected);
    // If the run is resumed again with the same shares, the mixture does not change.
    let (summary, _) = run(&of(after, "max_steps: 41"), 1, Some(Resume::Auto));
    assert_eq!(state(&summary.unwrap().checkpoint.unwrap()), expected);
}

#[test]
fn a_resumed_run_reports_changed_data() {
    let folder = folder();
    let text = format!(
        "train_batch_size: 4\nmodel: {{type: gpt2, vocab_size: 256, n_positions: 8, n_embd: 8, n_head: 1, n_layer: 1}}\n\
         data: {{train: {:?}}}\ntraining: {{max_steps: 1}}\n",
        folder.path().join("a.txt")
    );
    let config = Config::parse("ds.yaml", text).unwrap();
    let notes = |before: Value| {
        let mut corpus = configured_data::open(&config, false, &Unwatched).unwrap();
        corpus.restore(&json!({"training_samples": before}), 7, &config);
        corpus.notes
    };
    assert!(notes(json!(40)).is_empty() && notes(Value::Null).is_empty());
    let expected = "the training data changed from 39 to 40 samples: the current epoch may use some samples twice, and \
                    others not at all";
    assert_eq!(notes(json!(39)), [expected]);
    let mut corpus = configured_data::open(&config, false, &Unwatched).unwrap();
    corpus.restore(&json!({"tokenizer": "byte"}), 7, &config);
    assert!(corpus.notes.is_empty());
    corpus.restore(&json!({"tokenizer": "0123"}), 7, &config);
    assert!(corpus.notes[0].starts_with("the tokenizer differs from that of the checkpoint"), "{:?}", corpus.notes);
}

#[test]
fn each_data_set_is_evaluated() {
    let folder = folder();
    let eval = |name: &str| format!("eval: {:?}", folder.path().join(name));
    let keys = [eval("a.txt"), "choose: 1".into(), eval("c.jsonl")];
    let text =
        text(folder.path(), keys.each_ref().map(String::as_str), "max_steps: 12, eval_every: 6, eval_batches: 2");
    let mut found = vec![];
    for ranks in [1, 2] {
        let (summary, _) = run(&text, ranks, None);
        let summary = summary.unwrap();
        let evaluation = summary.evaluation.clone().unwrap();
        let [(a, first), (c, third)] = &evaluation.by_dataset[..] else { panic!("{evaluation:?}") };
        assert_eq!((a.as_str(), c.as_str()), ("a", "c"));
        // Two micro-batches have 8 samples, more than the evaluation data of `c`.
        let (of_a, of_c) = (8.0, evaluation.samples as f64 - 8.0);
        let mean = (of_a * f64::from(*first) + of_c * f64::from(*third)) / (of_a + of_c);
        assert!(of_c < of_a && (f64::from(evaluation.loss) - mean).abs() < 1e-6, "{evaluation:?}");
        // 40 of the 46 samples of an epoch are from the first data set.
        assert!(first < third, "{evaluation}");
        let last = &metrics(&summary)[11];
        assert_eq!(last["eval_loss_a"].as_f64().unwrap() as f32, *first);
        found.push(evaluation.to_string());
    }
    assert!(found[0] == found[1] && found[0].contains("  a 3.") && found[0].contains("  c 4."), "{found:?}");

    let fraction = text_with_fraction(folder.path());
    let corpus = configured_data::open(&Config::parse("ds.yaml", fraction).unwrap(), false, &Unwatched).unwrap();
    let lengths: Vec<(String, usize)> = corpus.eval_sets.iter().map(|set| (set.name.clone(), set.data.len())).collect();
    assert_eq!(lengths, [("a".into(), 8), ("b".into(), 4), ("c".into(), 1)]);
    assert_eq!((corpus.eval.unwrap().len(), corpus.sampler.data.len()), (13, 52));
}

fn text_with_fraction(folder: &Path) -> String {
    text(folder, ["repeat: 1"; 3], "max_steps: 1").replace("data:\n", "data:\n  eval_fraction: 0.2\n")
}

/// Each run stops after a random step and resumes, mostly on a different number of ranks.
#[test]
fn a_run_gives_the_same_losses_wherever_it_stops() {
    let folder = folder();
    let keys = ["weight: 2", "weight: 1", "weight: 1"];
    let of = |steps: u64| {
        let training = format!("max_steps: {steps}, reproducible: true");
        let text = text(folder.path(), keys, &training);
        text.replace("train_batch_size: 4\n", "train_batch_size: 4\ntrain_micro_batch_size_per_gpu: 1\n")
    };
    let (summary, all) = run(&of(30), 1, None);
    summary.unwrap();
    let mut random = 1u64;
    for _ in 0..100 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (stop, ranks) = (1 + (random >> 33) % 29, [1, 2, 4][(random >> 50) as usize % 3]);
        std::fs::remove_dir_all(folder.path().join("run")).unwrap();
        let (summary, mut losses) = run(&of(stop), ranks, None);
        summary.unwrap();
        let (summary, rest) = run(&of(30), 4 / ranks, Some(Resume::Auto));
        summary.unwrap();
        losses.extend(rest);
        assert_eq!(losses, all, "stopped after step {stop} on {ranks} ranks");
    }
}

#[test]
fn data_sets_are_splits_of_a_folder_and_slices_of_them() {
    let folder = folder();
    let set = folder.path().join("set");
    std::fs::create_dir_all(&set).unwrap();
    let line = |byte: &str, length| format!("{{\"text\": {:?}}}\n", byte.repeat(length));
    std::fs::write(set.join("train.jsonl"), line("a", 79) + &line("b", 79) + &line("c", 81)).unwrap();
    std::fs::write(set.join("dev.jsonl"), line("c", 33)).unwrap();
    let text = |split: &str| {
        format!(
            "train_batch_size: 1\nmodel: {{type: gpt2, vocab_size: 256, n_positions: 8, n_embd: 8, n_head: 1, n_layer: 1}}\n\
             data: {{shuffle: false, datasets: [{{path: {set:?}, split: {split:?}}}]}}\n"
        )
    };
    // A document includes the newline that separates it from the next one. If a split has several parts, each part is
    // cut into its own samples.
    for (split, expected) in [
        ("train", [9, 10, 11]),
        ("train[:2]", [9, 10, 0]),
        ("train[34%:]", [0, 9, 11]),
        ("train[:1]+validation", [9, 0, 4]),
        ("validation[:100%] + train[-1:]", [0, 0, 14]),
    ] {
        let count = expected.iter().sum::<usize>() as u64;
        let text = text(split);
        let found = given(&text, 0..count);
        assert_eq!(found, expected, "{split}");
        let corpus = configured_data::open(&Config::parse("ds.yaml", &text).unwrap(), false, &Unwatched).unwrap();
        assert_eq!(corpus.sampler.data.len() as u64, count, "{split}");
    }
    let error =
        configured_data::open(&Config::parse("ds.yaml", text("test")).unwrap(), false, &Unwatched).err().unwrap();
    let error = error.to_string();
    assert!(
        error.contains("data.datasets.0.path") && error.contains("no split `test`; it has train, validation"),
        "{error}"
    );
}
