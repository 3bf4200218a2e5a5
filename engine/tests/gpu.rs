//! Training on a GPU against training on the processor: on the emulated GPU of docs/gpu.md, or with `ZERO_TRAIN_CUDA_TESTS=1` on those of
//! this machine.
#![cfg(feature = "cuda")]

#[path = "../../cuda/tests/mock/mod.rs"]
mod mock;
mod world;

use world::{BF16, FP16, Trajectory, assert_same, batch, config, gpt2, train, world};
use zero_train::zoo::{LlamaConfig, llama};
use zero_train::{Engine, Layers};

/// Two samples a micro-batch; everything that can be offloaded is, as runs on a GPU must have it.
fn settings(device: &str, zero_stage: u8, micro_batches: usize, more: &str) -> String {
    let param =
        if zero_stage == 3 { ", offload_param: {device: cpu}, stage3_param_persistence_threshold: 0" } else { "" };
    format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {micro_batches}\ntraining: {{device: {device}}}\n\
         zero_optimization: {{stage: {zero_stage}, offload_optimizer: {{device: cpu}}{param}}}\n{more}"
    )
}

/// Whether there is a GPU, and there are kernels for it; if not, why is printed.
fn has_gpu() -> bool {
    if !mock::ready() {
        return false;
    }
    let alone = world(1, |comm| {
        let engine = Engine::with_communicator(config(1, &settings("cuda", 1, 1, "")), gpt2(), comm);
        engine.and_then(|mut engine| engine.train_batch(&batch(0, 2)))
    });
    match &alone[0] {
        Ok(_) => true,
        Err(error) if error.to_string().contains("CUDA_ERROR_INVALID_IMAGE") => {
            println!("skipped: built without kernels; scripts/emulated-nvcc makes some");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// The largest relative difference between two runs' losses.
fn apart(a: &Trajectory, b: &Trajectory) -> f32 {
    assert_eq!(a.losses.len(), b.losses.len());
    let pairs = a.losses.iter().zip(&b.losses).map(|(&a, &b)| (f32::from_bits(a), f32::from_bits(b)));
    pairs.map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f32::max)
}

#[test]
fn has_the_losses_of_the_processor_over_20_steps() {
    if !has_gpu() {
        return;
    }
    let of = |device: &str| world::run(1, 20, &settings(device, 1, 1, ""));
    let (gpu, cpu) = (of("cuda"), of("cpu"));
    assert!(apart(&gpu, &cpu) < 1e-4, "{}", apart(&gpu, &cpu));
    let [first, last] = [0, 19].map(|step| f32::from_bits(gpu.losses[step]));
    assert!(last < first - 0.1, "{first} -> {last}");
}

/// Whatever shards where: gradients are added up on the host, in the order of every layout.
#[test]
fn layouts_share_their_bits() {
    if !has_gpu() {
        return;
    }
    let reproducible = |ranks, zero_stage| {
        let text = settings("cuda", zero_stage, 4 / ranks, "");
        world::run(ranks, 3, &text.replace("{device: cuda}", "{device: cuda, reproducible: true}"))
    };
    let expected = reproducible(1, 1);
    for (ranks, zero_stage) in [(1, 3), (2, 2), (4, 3)] {
        assert_same(&reproducible(ranks, zero_stage), &expected, &format!("ZeRO {zero_stage} of {ranks} ranks"));
    }
    let expected = world::run(1, 3, &settings("cuda", 1, 4, ""));
    for schedule in ["1f1b", "zb_h1"] {
        let pipeline = format!("pipeline: {{stages: 2, schedule: {schedule}}}");
        assert_same(&world::run(2, 3, &settings("cuda", 1, 4, &pipeline)), &expected, schedule);
    }
}

#[test]
fn sixteen_bits_other_models_and_layers_that_run_again() {
    if !has_gpu() {
        return;
    }
    let llama: fn() -> Layers = || {
        llama(&LlamaConfig {
            vocab_size: 61,
            hidden_size: 32,
            intermediate_size: 48,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            max_position_embeddings: 16,
            initializer_range: 0.1,
            ..LlamaConfig::default()
        })
    };
    let again = "activation_checkpointing: {}";
    for (what, layers, more, bound) in [
        ("bf16", gpt2 as fn() -> Layers, BF16, 5e-3),
        ("fp16", gpt2, FP16, 2e-3),
        ("llama", llama, "", 1e-4),
        ("llama in bf16", llama, BF16, 5e-3),
        ("layers again", gpt2, again, 1e-4),
    ] {
        let of = |device: &str| world::run_of(layers, 1, 4, &settings(device, 2, 1, more));
        let apart = apart(&of("cuda"), &of("cpu"));
        assert!(apart < bound, "{what}: {apart}");
    }
}

#[test]
fn a_checkpoint_goes_on_on_the_other_device() {
    if !has_gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let losses = |device: &str, from: Option<&str>, save: Option<&str>, steps: u64| {
        let mut all = world(1, |comm| {
            let config = config(1, &settings(device, 3, 1, ""));
            let mut engine = Engine::with_communicator(config, gpt2(), comm).unwrap();
            if let Some(from) = from {
                assert!(engine.resume(folder.path().join(from)).unwrap().is_some());
            }
            let losses: Vec<f32> = train(&mut engine, steps).iter().map(|step| step.loss).collect();
            if let Some(save) = save {
                engine.save_checkpoint(folder.path().join(save)).unwrap();
            }
            losses
        });
        all.remove(0)
    };
    let whole = losses("cuda", None, None, 4);
    losses("cuda", None, Some("gpu"), 2);
    losses("cpu", None, Some("cpu"), 2);
    // On the same device to the bit.
    assert_eq!(losses("cuda", Some("gpu"), None, 2), whole[2..]);
    for (device, from) in [("cpu", "gpu"), ("cuda", "cpu")] {
        for (a, b) in losses(device, Some(from), None, 2).iter().zip(&whole[2..]) {
            assert!(((a - b) / b).abs() < 1e-4, "{from} on {device}: {a} for {b}");
        }
    }
}

#[test]
fn what_is_not_there_is_refused_before_anything_runs() {
    for (text, said) in [
        ("training: {device: cuda}", "optimizer state and master weights are in the memory of the host"),
        (
            "training: {device: cuda}\nzero_optimization: {stage: 3, offload_optimizer: {device: cpu}}",
            "shards of parameters are in the memory of the host",
        ),
    ] {
        let text = format!("train_micro_batch_size_per_gpu: 2\n{text}");
        let mut all = world(1, |comm| Engine::with_communicator(config(1, &text), gpt2(), comm).err());
        let error = all.remove(0).expect("an error").to_string();
        assert!(error.contains(said), "{error}");
    }
}
