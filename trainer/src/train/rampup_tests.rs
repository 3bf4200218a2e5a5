//! Tests runs whose batch size grows (`training.rampup_batch_size`), on ranks that are threads.

use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use zero_config::Config;

use super::trained::run;
use super::{Output, Resume, Summary};
use crate::Trainer;
use crate::data::from_fn;

/// Returns a configuration with four steps of 4 samples, followed by steps of 8 samples.
fn text(folder: &Path, keys: &str, training: &str) -> String {
    let letters: String = (0..16 * 64 + 1).map(|index| char::from(b'a' + (index * index % 23) as u8)).collect();
    std::fs::write(folder.join("a.txt"), letters).unwrap();
    format!(
        "train_batch_size: 8\ntrain_micro_batch_size_per_gpu: 1\noptimizer: {{type: AdamW, params: {{lr: 1.0e-2}}}}\n\
         model: {{type: gpt2, vocab_size: 256, n_positions: 16, n_embd: 8, n_head: 2, n_layer: 2}}\n\
         data: {{train: {:?}}}\n\
         training: {{output_dir: {:?}, reproducible: true, rampup_batch_size: {{start: 4, increment: 4, samples: 16}}, \
         {training}}}\n{keys}",
        folder.join("a.txt"),
        folder.join("run")
    )
}

fn samples(summary: &Summary) -> Vec<u64> {
    let text = std::fs::read_to_string(summary.folder.join("metrics.jsonl")).unwrap();
    let samples = |line: &str| serde_json::from_str::<Value>(line).unwrap()["samples"].as_u64().unwrap();
    text.lines().map(samples).collect()
}

/// An epoch of 64 samples has four steps of 4 samples and six steps of 8, and contains each sample once.
#[test]
fn an_epoch_has_each_sample_once() {
    let text = "train_batch_size: 8\ntrain_micro_batch_size_per_gpu: 1\nmodel: {type: mlp, input_size: 1, output_size: 2}\n\
                training: {epochs: 1, rampup_batch_size: {start: 4, increment: 4, samples: 16}, dataloader_num_workers: WORKERS, output_dir: OUT}";
    for workers in ["0", "2"] {
        let folder = tempfile::tempdir().unwrap();
        let used = Arc::new(Mutex::new(vec![]));
        let noted = Arc::clone(&used);
        let sample = move |index: usize| {
            noted.lock().unwrap().push(index);
            Ok((Tensor::zeros(1, DType::F32, &Device::Cpu)?, Tensor::zeros((), DType::U32, &Device::Cpu)?))
        };
        let config =
            Config::parse("ds.yaml", text.replace("WORKERS", workers).replace("OUT", &format!("{:?}", folder.path())))
                .unwrap();
        let summary = Trainer::new(config).train_data(from_fn(64, sample)).output(Output::Quiet).fit().unwrap();
        assert_eq!(samples(&summary), [4, 4, 4, 4, 8, 8, 8, 8, 8, 8]);
        let mut used = used.lock().unwrap().split_off(0);
        used.sort_unstable();
        assert_eq!(used, (0..64).collect::<Vec<_>>());
    }
}

/// Runs on several ranks, with pipeline stages, and with or without data workers load the same samples.
#[test]
fn losses_do_not_depend_on_layout_and_loading() {
    let folder = tempfile::tempdir().unwrap();
    let (summary, all) = run(&text(folder.path(), "", "epochs: 1"), 1, None);
    assert_eq!(samples(&summary.unwrap()), [4, 4, 4, 4, 8, 8, 8, 8, 8, 8]);
    for (ranks, keys, training) in [
        (2, "zero_optimization: {stage: 3}\n", "epochs: 1"),
        (2, "pipeline: {stages: 2}\n", "epochs: 1"),
        (1, "", "epochs: 1, dataloader_num_workers: 0"),
        (1, "", "epochs: 1, dataloader_num_workers: 3, dataloader_prefetch_factor: 9"),
    ] {
        let (summary, losses) = run(&text(folder.path(), keys, training), ranks, None);
        summary.unwrap();
        assert_eq!(losses, all, "{ranks} ranks, {keys}{training}");
    }
}

/// Each run stops after a step and resumes, mostly on a different number of ranks.
#[test]
fn a_run_gives_the_same_losses_wherever_it_stops() {
    let folder = tempfile::tempdir().unwrap();
    let (summary, all) = run(&text(folder.path(), "", "max_steps: 6"), 1, None);
    summary.unwrap();
    for stop in 1..6 {
        let ranks = [1, 2, 4][stop % 3];
        std::fs::remove_dir_all(folder.path().join("run")).unwrap();
        let (summary, mut losses) = run(&text(folder.path(), "", &format!("max_steps: {stop}")), ranks, None);
        summary.unwrap();
        let (summary, rest) = run(&text(folder.path(), "", "max_steps: 6"), 4 / ranks, Some(Resume::Auto));
        losses.extend(rest);
        assert_eq!(losses, all, "stopped after step {stop} on {ranks} ranks");
        assert_eq!(samples(&summary.unwrap()), [4, 4, 4, 4, 8, 8]);
    }
}
