//! Trains with the unchanged DeepSpeed configurations of `examples/deepspeed`, on two ranks, with a second file for
//! model and data. The loss must fall, and the run must be bit-identical to one with the same settings in a single YAML
//! file.

use crate::case;

use std::fs;
use std::path::Path;

use case::{Case, text};

/// The content of `examples/deepspeed/run.yaml`, with the corpus of the test.
const RUN: &str = "
model: {type: gpt2, vocab_size: auto, n_positions: 64, n_embd: 64, n_layer: 2, n_head: 4}
data: {train: corpus.txt}
training: {max_steps: 12}
";

const ZERO2: &str = "
train_micro_batch_size_per_gpu: 4
gradient_accumulation_steps: 2
fp16: {enabled: true}
optimizer: {type: AdamW, params: {lr: 0.001, weight_decay: 0.01}}
scheduler: {type: WarmupLR, params: {warmup_num_steps: 10}}
zero_optimization: {stage: 2, overlap_comm: true, reduce_bucket_size: 200000000, allgather_bucket_size: 200000000}
";

const ZERO3_OFFLOAD: &str = "
train_micro_batch_size_per_gpu: 8
bf16: {enabled: true}
optimizer: {type: AdamW, params: {lr: 0.001, betas: [0.9, 0.95], weight_decay: 0.1}}
scheduler: {type: WarmupDecayLR, params: {warmup_num_steps: 10, total_num_steps: 200}}
zero_optimization: {stage: 3, reduce_bucket_size: 500000000, sub_group_size: 1000000000}
activation_checkpointing: {enabled: true}
";

/// The values that Hugging Face's Trainer substitutes for `auto` with its default arguments.
const AUTO: &str = "
train_micro_batch_size_per_gpu: 8
optimizer: {type: AdamW, params: {lr: 0.00005}}
scheduler: {type: WarmupLR, params: {warmup_max_lr: 0.00005, warmup_num_steps: 0}}
zero_optimization: {stage: 3, stage3_prefetch_bucket_size: 3686, stage3_param_persistence_threshold: 640}
";

fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/deepspeed").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn three_deepspeed_configurations_train_unchanged() {
    let case = Case::new();
    // The globs in the example refer to files of the repository.
    let run = example("run.yaml").replace("docs/*.md", "corpus.txt").replace("max_steps: 60", "max_steps: 12");
    fs::write(case.path("run.yaml"), run).unwrap();
    for (name, yaml) in [("zero2", ZERO2), ("zero3_offload", ZERO3_OFFLOAD), ("auto", AUTO)] {
        let file = format!("{name}.json");
        fs::write(case.path(&file), example(&file)).unwrap();
        let said = case.succeed(&["--config", &file, "--config", "run.yaml", "-n", "2", "--plain", "--out", name]);
        let autos = "\nauto: train_batch_size 16, train_micro_batch_size_per_gpu 8, ";
        assert_eq!(said.contains(autos), name == "auto", "{said}");

        fs::write(case.path("one.yaml"), format!("{yaml}{RUN}")).unwrap();
        let out = format!("{name}-yaml");
        case.succeed(&["--config", "one.yaml", "-n", "2", "--quiet", "--out", &out]);
        let losses = case.losses(name);
        assert_eq!(losses.len(), 12);
        assert_eq!((&losses, case.shards(name, 12)), (&case.losses(&out), case.shards(&out, 12)), "{name}");
        let [first, last] = [0, 11].map(|step: usize| losses[step].parse::<f64>().unwrap());
        assert!(last < first - 0.05, "{name}: {first} -> {last}");
    }
}

#[test]
fn the_examples_have_only_deepspeed_sections() {
    for name in ["zero2.json", "zero3_offload.json", "auto.json"] {
        let keys = serde_json::from_str::<serde_json::Value>(&example(name)).unwrap();
        for own in ["model", "data", "training", "launcher"] {
            assert!(keys.get(own).is_none(), "{name} has a section that DeepSpeed does not know: {own}");
        }
    }
}

#[test]
fn autotune_takes_one_file_and_stdin_is_given_only_once() {
    let case = Case::new();
    let refused = |args: &[&str], told: &str| {
        let output = case.command(args).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains(told), "{}", text(&output.stderr));
    };
    refused(&["autotune", "--config", "ds.yaml", "--config", "ds.yaml"], "autotune takes one --config");
    refused(&["--config", "-", "--config", "-"], "standard input (-) can be given only once");
    fs::write(case.path("wrong.yaml"), "training: {max_step: 3}").unwrap();
    refused(&["--config", "ds.yaml", "--config", "wrong.yaml"], "in: training.max_step (wrong.yaml:1:12)");
}
