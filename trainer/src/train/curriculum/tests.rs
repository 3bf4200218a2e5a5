//! Compares lengths with DeepSpeed's, and trains with a curriculum on ranks that are threads.

use std::fmt::Write as _;
use std::path::Path;

use candle_core::{Device, Tensor};
use serde_json::Value;
use zero_config::Config;

use super::Lengths;
use crate::Trainer;
use crate::data::{Dataset, InMemory, Unwatched};
use crate::python::python;
use crate::train::configured_data;
use crate::train::trained::run;
use crate::train::{Resume, Summary};

/// Returns the configuration section with this curriculum.
fn section(seqlen: &str) -> String {
    format!(
        "data_efficiency: {{enabled: true, data_sampling: {{enabled: true, curriculum_learning: {{enabled: true, \
         curriculum_metrics: {{seqlen: {{{seqlen}}}}}}}}}}}\n"
    )
}

/// Returns the lengths of the first `steps` steps.
fn lengths(seqlen: &str, steps: u64) -> Vec<usize> {
    let config = Config::parse("ds.yaml", format!("train_batch_size: 1\n{}", section(seqlen))).unwrap();
    let curriculum = config.data_efficiency.curriculum().unwrap().clone();
    let lengths = Lengths { curriculum, whole: usize::MAX };
    (1..=steps).map(|step| lengths.at(step)).collect()
}

fn seqlen(min: usize, max: usize, kind: &str, config: &str) -> String {
    format!("min_difficulty: {min}, max_difficulty: {max}, schedule_type: {kind}, schedule_config: {{{config}}}")
}

/// The expected lengths are the results of `CurriculumScheduler` in DeepSpeed 0.19.8.
#[test]
fn lengths_match_deepspeed() {
    let linear = |min, max, total, multiple| {
        seqlen(min, max, "fixed_linear", &format!("total_curriculum_step: {total}, difficulty_step: {multiple}"))
    };
    let root = |min, max, total, multiple, degree| {
        let config = format!("total_curriculum_step: {total}, difficulty_step: {multiple}, root_degree: {degree}");
        seqlen(min, max, "fixed_root", &config)
    };
    let discrete = |min, max, difficulty: &str, max_step: &str| {
        seqlen(min, max, "fixed_discrete", &format!("difficulty: {difficulty}, max_step: {max_step}"))
    };
    for (seqlen, expected) in [
        (linear(8, 64, 10, 8), vec![8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64, 64]),
        (linear(5, 50, 9, 4), vec![8, 12, 20, 24, 28, 32, 40, 44, 48, 50, 50, 50]),
        (root(8, 1024, 20, 8, 2), vec![232, 328, 400, 456, 512, 560, 608, 648, 688, 720, 760, 792, 824, 856, 880, 912]),
        (root(1, 100, 7, 1, 3), vec![52, 66, 75, 83, 89, 95, 100, 100]),
        // Once the length has reached the largest value, it stays there.
        (discrete(8, 64, "[8, 64, 16, 32]", "[2, 4, 6]"), vec![8, 8, 64, 64, 64, 64, 64, 64]),
        (discrete(8, 64, "[16, 8, 32]", "[2, 4]"), vec![16, 16, 8, 8, 32, 32]),
        (discrete(8, 8, "[8, 8]", "[2]"), vec![8, 8, 8]),
    ] {
        assert_eq!(lengths(&seqlen, expected.len() as u64), expected, "{seqlen}");
    }
}

/// Returns a generator of random numbers that are the same in every run.
fn random() -> impl FnMut(u64) -> u64 {
    let mut state = 1u64;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

#[test]
fn lengths_match_an_installed_deepspeed() {
    const STEPS: u64 = 300;
    let mut random = random();
    let mut all = vec![];
    for index in 0..450 {
        let min = 1 + random(100);
        let max = min + random(4000);
        let (total, multiple) = (1 + random(400), 1 + random(80));
        let config = format!("total_curriculum_step: {total}, difficulty_step: {multiple}");
        let seqlen = match index % 3 {
            0 => seqlen(min as usize, max as usize, "fixed_linear", &config),
            1 => {
                let degree = [1.0, 2.0, 3.0, 1.5, 0.5, 7.0][random(6) as usize];
                let config = format!("{config}, root_degree: {degree}");
                seqlen(min as usize, max as usize, "fixed_root", &config)
            }
            _ => {
                let count = 1 + random(6);
                let difficulty: Vec<u64> =
                    (0..=count).map(|_| if random(4) == 0 { max } else { min + random(max - min + 1) }).collect();
                let mut last = 0;
                let max_step: Vec<u64> = (0..count)
                    .map(|_| {
                        last += 1 + random(60);
                        last
                    })
                    .collect();
                let config = format!("difficulty: {difficulty:?}, max_step: {max_step:?}");
                seqlen(min as usize, max as usize, "fixed_discrete", &config)
            }
        };
        all.push(seqlen);
    }
    // Python needs quotes around the keys and the types.
    let configs: Vec<String> = all.iter().map(|seqlen| format!("{{{}}}", quoted(seqlen))).collect();
    let script = format!(
        "import logging\nfrom deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler\n\
         logging.disable()\nfor config in [{}]:\n    scheduler = CurriculumScheduler(config)\n    \
         print('lengths', *[scheduler.update_difficulty(step) for step in range(1, {STEPS} + 1)])\n",
        configs.join(",")
    );
    let Some(output) = python(&["deepspeed"], &script) else { return };
    let found: Vec<Vec<usize>> = output
        .lines()
        .filter_map(|line| line.strip_prefix("lengths "))
        .map(|line| line.split(' ').map(|word| word.parse().unwrap()).collect())
        .collect();
    assert_eq!(found.len(), all.len());
    for (seqlen, found) in all.iter().zip(found) {
        assert_eq!(lengths(seqlen, STEPS), found, "{seqlen}");
    }
}

/// Puts the words of a mapping in quotes.
fn quoted(yaml: &str) -> String {
    let mut out = String::new();
    let mut word = String::new();
    for c in yaml.chars().chain([' ']) {
        if c.is_ascii_lowercase() || c == '_' {
            word.push(c);
            continue;
        }
        if !word.is_empty() {
            let _ = write!(out, "'{}'", std::mem::take(&mut word));
        }
        out.push(c);
    }
    out
}

/// Returns a configuration with 4 micro-batches of 2 samples of 16 tokens per step.
fn text(folder: &Path, seqlen: &str, keys: &str, training: &str) -> String {
    let letters: String = (0..16 * 64 + 1).map(|index| char::from(b'a' + (index * index % 23) as u8)).collect();
    std::fs::write(folder.join("a.txt"), letters).unwrap();
    format!(
        "train_batch_size: 8\ntrain_micro_batch_size_per_gpu: 2\n\
         optimizer: {{type: AdamW, params: {{lr: 1.0e-2}}}}\n\
         model: {{type: gpt2, vocab_size: 256, n_positions: 16, n_embd: 8, n_head: 2, n_layer: 2}}\n\
         data: {{train: {:?}, eval_fraction: 0.1}}\n\
         training: {{output_dir: {:?}, reproducible: true, {training}}}\n{keys}{}",
        folder.join("a.txt"),
        folder.join("run"),
        section(seqlen),
    )
}

/// The lengths are 4 tokens at steps 1 and 2, 8 at steps 3 to 6, then 16.
const LENGTHS: &str = "min_difficulty: 4, max_difficulty: 16, schedule_type: fixed_discrete, \
                       schedule_config: {difficulty: [4, 8, 16], max_step: [2, 6]}";

fn metrics(summary: &Summary) -> Vec<Value> {
    let text = std::fs::read_to_string(summary.folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_step_trains_on_the_first_tokens_of_the_same_samples() {
    let folder = tempfile::tempdir().unwrap();
    let text = text(folder.path(), LENGTHS, "", "max_steps: 8, eval_every: 8, eval_batches: 1");
    let corpus = configured_data::open(&Config::parse("ds.yaml", &text).unwrap(), false, &Unwatched).unwrap();
    assert!(corpus.notes.iter().any(|note| note == "curriculum: 4 tokens of each sample at step 1, at most 16 of 16"));
    for (step, length) in [(1, 4), (2, 4), (3, 8), (6, 8), (7, 16), (1000, 16)] {
        let position = (step - 1) * 8;
        let whole = corpus.sampler.batch(position).unwrap();
        let micro_batches = corpus.sampler.distribute(step, position).unwrap();
        let batch = corpus.sampler.load(position, &micro_batches[0]).unwrap();
        assert_eq!((micro_batches.len(), micro_batches[0].positions()), (4, 2 * length));
        assert_eq!(batch.tensors().count(), 2);
        for (whole, cut) in whole.tensors().zip(batch.tensors()) {
            let expected = whole.narrow(1, 0, length).unwrap().to_vec2::<u32>().unwrap();
            assert_eq!(cut.to_vec2::<u32>().unwrap(), expected, "step {step}");
        }
    }
    let (summary, _) = run(&text, 1, None);
    let lines = metrics(&summary.unwrap());
    let found: Vec<(u64, u64)> =
        lines.iter().map(|line| (line["seqlen"].as_u64().unwrap(), line["tokens"].as_u64().unwrap())).collect();
    assert_eq!(found, [4, 4, 8, 8, 8, 8, 16, 16].map(|length| (length, 8 * length)));
}

#[test]
fn lengths_do_not_depend_on_ranks_layout_and_loading() {
    let folder = tempfile::tempdir().unwrap();
    let of = |keys: &str, training: &str| {
        let training = format!("max_steps: 9, {training}");
        run(&text(folder.path(), LENGTHS, keys, &training), if keys.contains("stages") { 2 } else { 1 }, None)
    };
    let (summary, all) = of("", "");
    summary.unwrap();
    assert_eq!(all.len(), 9);
    for (keys, training) in [
        ("pipeline: {stages: 2}\n", ""),
        ("zero_optimization: {stage: 3}\n", ""),
        ("activation_checkpointing: {interval: 1}\n", ""),
        ("", "dataloader_num_workers: 0"),
        ("", "dataloader_num_workers: 3, dataloader_prefetch_factor: 9"),
    ] {
        let (summary, losses) = of(keys, training);
        summary.unwrap();
        assert_eq!(losses, all, "{keys}{training}");
    }
    for (ranks, stage) in [(2, 0), (2, 3), (4, 2)] {
        let keys = format!("zero_optimization: {{stage: {stage}}}\n");
        let (summary, losses) = run(&text(folder.path(), LENGTHS, &keys, "max_steps: 9"), ranks, None);
        summary.unwrap();
        assert_eq!(losses, all, "{ranks} ranks, stage {stage}");
    }
}

/// Each run stops after a step and resumes, mostly on a different number of ranks.
#[test]
fn a_run_gives_the_same_losses_wherever_it_stops() {
    let folder = tempfile::tempdir().unwrap();
    let of = |steps: u64| text(folder.path(), LENGTHS, "", &format!("max_steps: {steps}"));
    let (summary, all) = run(&of(9), 1, None);
    summary.unwrap();
    for stop in 1..9 {
        let ranks = [1, 2, 4][stop as usize % 3];
        std::fs::remove_dir_all(folder.path().join("run")).unwrap();
        let (summary, mut losses) = run(&of(stop), ranks, None);
        summary.unwrap();
        let (summary, rest) = run(&of(9), 4 / ranks, Some(Resume::Auto));
        losses.extend(rest);
        assert_eq!(losses, all, "stopped after step {stop} on {ranks} ranks");
        let found: Vec<u64> = metrics(&summary.unwrap()).iter().map(|line| line["seqlen"].as_u64().unwrap()).collect();
        assert_eq!(found, [4, 4, 8, 8, 8, 8, 16, 16, 16]);
    }
}

#[test]
fn the_programs_own_data_are_not_truncated() {
    let x = Tensor::zeros((4, 16), candle_core::DType::U32, &Device::Cpu).unwrap();
    let data = InMemory::new(x.clone(), x).unwrap();
    assert_eq!(data.len(), 4);
    let text = format!(
        "train_batch_size: 1\nmodel: {{type: gpt2, vocab_size: 8, n_positions: 16, n_embd: 8, n_head: 2, n_layer: 1}}\n\
         training: {{max_steps: 1}}\n{}",
        section(LENGTHS)
    );
    let error = Trainer::new(Config::parse("ds.yaml", text).unwrap()).train_data(data).fit().unwrap_err();
    assert!(error.to_string().contains("a curriculum can truncate only the samples of a `data` section"), "{error}");
}
