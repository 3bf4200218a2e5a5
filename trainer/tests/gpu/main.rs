//! Compares training on a GPU with training on the CPU. The GPU is the emulated GPU that docs/gpu-kernels.md describes
//! or, with `ZERO_TRAIN_CUDA_TESTS=1`, a GPU of this machine.

mod ahead;
mod codes;
mod faults;
mod groups;
mod local_steps;
mod memory;
#[path = "../../../cuda/emulator/mock/mod.rs"]
mod mock;
mod step;
mod tensor_and_sequence_parallel;
mod timeline;
#[path = "../../../engine/tests/world/mod.rs"]
mod world;

use world::{BF16, FP16, Trajectory, assert_same, batch, config, gpt2, llama_config, train, world};
use zero_train::zoo::llama;
use zero_train::{Config, Engine, Layers};

/// Returns a configuration with two samples per micro-batch, in which only the layers run on the GPU. All state is on
/// the host.
fn settings(device: &str, zero_stage: u8, micro_batches: usize, more: &str) -> String {
    let param =
        if zero_stage == 3 { ", offload_param: {device: cpu}, stage3_param_persistence_threshold: 0" } else { "" };
    format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {micro_batches}\ntraining: {{device: {device}}}\n\
         zero_optimization: {{stage: {zero_stage}, offload_optimizer: {{device: cpu}}{param}}}\n{more}"
    )
}

/// Returns the configuration of `settings`, but with all state on the GPU.
fn resident(device: &str, zero_stage: u8, micro_batches: usize, more: &str) -> String {
    let zero = format!("{{stage: {zero_stage}, stage3_param_persistence_threshold: 0}}");
    format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {micro_batches}\ntraining: {{device: {device}}}\n\
         zero_optimization: {zero}\n{more}"
    )
}

/// Returns whether a GPU and kernels for it are available. If not, prints the reason.
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
        Err(error) if mock::has_no_kernels(error) => false,
        Err(error) => panic!("{error}"),
    }
}

/// Returns the largest relative difference between the losses of two runs.
fn apart(a: &Trajectory, b: &Trajectory) -> f32 {
    assert_eq!(a.losses.len(), b.losses.len());
    let pairs: Vec<_> = a.loss_values().into_iter().zip(b.loss_values()).collect();
    assert!(pairs.iter().all(|(a, b)| a.is_finite() && b.is_finite()), "{pairs:?}");
    pairs.iter().map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f32::max)
}

#[test]
fn matches_the_losses_of_the_cpu_over_20_steps() {
    if !has_gpu() {
        return;
    }
    let of = |device: &str| world::run(1, 20, &settings(device, 1, 1, ""));
    let (gpu, cpu) = (of("cuda"), of("cpu"));
    assert!(apart(&gpu, &cpu) < 1e-4, "{}", apart(&gpu, &cpu));
    let [first, last] = [0, 19].map(|step| f32::from_bits(gpu.losses[step]));
    assert!(last < first - 0.1, "{first} -> {last}");
}

/// The ZeRO stage and the number of ranks make no difference, because the host adds gradients in the same order for
/// every layout.
#[test]
fn layouts_are_bit_identical() {
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
fn half_precision_other_models_and_recomputation() {
    if !has_gpu() {
        return;
    }
    let llama: fn() -> Layers = || llama(&llama_config());
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

/// Frozen parameters have no state, whether the state of the trained parameters is on the GPU or on the host. Adapters
/// leave all other parameters frozen. Each parameter group is updated by its own kernel launches.
#[test]
fn frozen_parameters_and_adapters() {
    if !has_gpu() {
        return;
    }
    let lora = "adapter: {r: 4, lora_alpha: 16, lora_dropout: 0.1, init_lora_weights: false}";
    let dora = "adapter: {r: 4, lora_alpha: 16, use_dora: true, loraplus_lr_ratio: 4, lora_dropout: 0.1, \
                bias: lora_only, init_lora_weights: false}";
    let groups = "ema: {decay: 0.5}, layerwise_lr_decay: 0.5, param_groups: [{kinds: bias, lr_scale: 3, weight_decay: 0.2}, \
                  {params: '*attn*', betas: [0.8, 0.95]}]";
    for (part, more) in [
        ("trainable: ['*.h.1.*']", ""),
        ("frozen: ['*wte*']", BF16),
        ("seed: 5", lora),
        ("seed: 5", dora),
        ("trainable: ['*.bias']", FP16),
        (groups, ""),
    ] {
        let of = |text: String| world::run(1, 3, &text.replace("training: {", &format!("training: {{{part}, ")));
        let bound = if more.is_empty() || more == lora || more == dora { 1e-4 } else { 5e-3 };
        let (gpu, cpu) = (of(settings("cuda", 1, 2, more)), of(settings("cpu", 1, 2, more)));
        assert!(apart(&gpu, &cpu) < bound, "{part}, {more}: {}", apart(&gpu, &cpu));
        for zero_stage in [1, 3] {
            let resident = of(resident("cuda", zero_stage, 2, more));
            let on_host = of(settings("cuda", zero_stage, 2, more));
            assert_same(&resident, &on_host, &format!("{part}, {more}, ZeRO {zero_stage}"));
        }
    }
}

#[test]
fn a_checkpoint_resumes_on_the_other_device() {
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
    // If the run resumes on the same device, the losses are bit-identical.
    assert_eq!(losses("cuda", Some("gpu"), None, 2), whole[2..]);
    for (device, from) in [("cpu", "gpu"), ("cuda", "cpu")] {
        for (a, b) in losses(device, Some(from), None, 2).iter().zip(&whole[2..]) {
            assert!(((a - b) / b).abs() < 1e-4, "{from} on {device}: {a} for {b}");
        }
    }
}

/// The optimizer on the GPU is bit-identical to the optimizer on the host, even if its state is offloaded completely or
/// in part.
#[test]
fn optimizer_state_on_gpu_or_host_is_bit_identical() {
    if !has_gpu() {
        return;
    }
    for (more, zero_stages) in [("", &[0, 1, 2, 3][..]), (BF16, &[1, 3]), (FP16, &[3])] {
        for &zero_stage in zero_stages {
            // Transferred gradients are rounded once per step, and from stage 2 on once per micro-batch. In 16 bits,
            // the result therefore depends on the stage.
            let expected = world::run(1, 3, &settings("cuda", zero_stage.max(1), 2, more));
            let on_gpu = resident("cuda", zero_stage, 2, more);
            assert_same(&world::run(1, 3, &on_gpu), &expected, &format!("ZeRO {zero_stage} on the GPU, {more:?}"));
            for offload in ["{device: cpu}", "{device: cpu, ratio: 0.4}"] {
                if zero_stage == 3 {
                    let text = on_gpu.replace("{stage: 3", &format!("{{stage: 3, offload_optimizer: {offload}"));
                    assert_same(&world::run(1, 3, &text), &expected, &format!("ZeRO 3, {offload}, {more:?}"));
                }
            }
        }
    }
    // The kernels of the groups' optimizers are launched one after the other.
    let groups = "{type: AdamW}\ngroups: {kinds: embedding, optimizer: {type: SGD, params: {lr: 0.01, momentum: 0.9}}}, \
                  {kinds: norm, optimizer: {type: Lion, params: {lr: 0.001}}}";
    for optimizer in [
        groups,
        "{type: SGD, params: {lr: 0.01, momentum: 0.9}}",
        "{type: Lion, params: {lr: 0.001}}",
        "{type: RMSprop, params: {lr: 0.001, centered: true}}",
        "{type: NAdam}",
        "{type: AdamWScheduleFree}",
        "{type: AdamW}\nscheduler: {type: OneCycle, params: {cycle_min_lr: 0.0001, cycle_max_lr: 0.001}}",
    ] {
        let of = |text: String| {
            let (optimizer, groups) = optimizer.split_once("\ngroups: ").unwrap_or((optimizer, ""));
            let text = match groups {
                "" => text,
                groups => text.replace("training: {", &format!("training: {{param_groups: [{groups}], ")),
            };
            let text = format!("optimizer: {optimizer}\n{text}");
            let mut all = world(1, |comm| {
                let config = Config::with_world_size("test.yaml", text.clone(), 1).unwrap();
                let mut engine = Engine::with_communicator(config, gpt2(), comm).unwrap();
                train(&mut engine, 3).iter().map(|step| step.loss.to_bits()).collect::<Vec<_>>()
            });
            all.remove(0)
        };
        assert_eq!(of(resident("cuda", 1, 1, "")), of(settings("cuda", 1, 1, "")), "{optimizer}");
    }
}

#[test]
fn unsupported_group_settings_on_a_gpu_are_errors() {
    for (group, key, message) in [
        (
            "gradient_clipping: 1",
            "training.param_groups.0",
            "clipping the gradients of one group is implemented on the CPU only",
        ),
        ("optimizer: {type: Lamb}", "training.param_groups.0.optimizer.type", "LAMB is implemented on the CPU only"),
    ] {
        let text = format!("train_batch_size: 1\ntraining: {{device: cuda, param_groups: [{{kinds: norm, {group}}}]}}");
        let errors = world(1, |comm| {
            let config = Config::with_world_size("test.yaml", text.as_str(), 1).unwrap();
            Engine::with_communicator(config, gpt2(), comm).err().expect(group).to_string()
        });
        assert!(errors[0].contains(key) && errors[0].contains(message), "{errors:?}");
    }
}

/// Updates on the GPU clip gradient elements in the same way as updates on the host. The head on the GPU adds the same
/// z-loss as the head on the CPU.
#[test]
fn clipping_by_value_and_a_z_loss() {
    if !has_gpu() {
        return;
    }
    for (more, bound) in [("", 1e-4), (FP16, 5e-3)] {
        let of = |text: String, clip: &str| {
            let text = text.replace("training: {", "training: {z_loss: 0.01, ");
            let text =
                format!("gradient_clipping_value: {clip}\noptimizer: {{type: SGD, params: {{lr: 0.1}}}}\n{text}");
            let mut all = world(1, |comm| {
                let config = Config::with_world_size("test.yaml", text.clone(), 1).unwrap();
                let mut engine = Engine::with_communicator(config, gpt2(), comm).unwrap();
                train(&mut engine, 8).iter().map(|step| (step.loss, step.z_loss.unwrap())).collect::<Vec<_>>()
            });
            all.remove(0)
        };
        let host = of(settings("cuda", 1, 1, more), "0.001");
        assert_eq!(of(resident("cuda", 1, 1, more), "0.001"), host, "{more:?}");
        assert_ne!(of(resident("cuda", 1, 1, more), "1000"), host, "{more:?}");
        for (gpu, cpu) in host.iter().zip(of(settings("cpu", 1, 1, more), "0.001")) {
            assert!(
                (gpu.0 - cpu.0).abs() <= bound * cpu.0 && (gpu.1 - cpu.1).abs() <= bound * cpu.1,
                "{gpu:?} {cpu:?}"
            );
        }
    }
}

/// When the updates begin, only the GPU knows the gradient norm. The host receives it together with the loss.
#[test]
fn a_norm_beyond_the_limit_skips_the_update() {
    if !has_gpu() {
        return;
    }
    let of = |text: String| {
        let mut all = world(1, |comm| {
            let mut engine = Engine::with_communicator(config(1, &text), gpt2(), comm).unwrap();
            let step = |number| {
                engine.skip_beyond(if number == 1 { 0.0 } else { f64::INFINITY });
                let step = engine.train_batch(&batch(number, 2)).unwrap();
                (step.loss.to_bits(), step.grad_norm.to_bits(), step.skipped, engine.zero().updates())
            };
            (0..4).map(step).collect::<Vec<_>>()
        });
        all.remove(0)
    };
    let steps = of(resident("cuda", 1, 1, ""));
    assert_eq!(
        steps.iter().map(|step| (step.2, step.3)).collect::<Vec<_>>(),
        [(false, 1), (true, 1), (false, 2), (false, 3)]
    );
    assert_eq!(steps, of(settings("cuda", 1, 1, "")));
}

/// Trains at every ZeRO stage. Collectives go over NCCL or through the host.
#[test]
fn ranks_with_a_gpu_each() {
    if !mock::has_gpus(4) || !has_gpu() {
        return;
    }
    let travel = |text: String, way: &str| format!("{text}\nlauncher: {{gpu_transport: {way}}}");
    // With `reproducible`, gradients are added in a fixed order, whatever the ZeRO stage.
    let reproducible = |ranks: usize, zero_stage, way| {
        let text = travel(resident("cuda", zero_stage, 4 / ranks, ""), way);
        world::run(ranks, 2, &text.replace("{device: cuda}", "{device: cuda, reproducible: true}"))
    };
    let expected = reproducible(1, 0, "host");
    for (ranks, zero_stage, way) in [(2, 0, "nccl"), (2, 1, "nccl"), (4, 2, "nccl"), (2, 3, "host"), (4, 3, "nccl")] {
        let run = reproducible(ranks, zero_stage, way);
        assert_same(&run, &expected, &format!("ZeRO {zero_stage} of {ranks} ranks, {way}"));
    }
    let one = world::run(1, 3, &resident("cuda", 2, 4, ""));
    for zero_stage in [0, 1, 2, 3] {
        let fast = world::run(2, 3, &travel(resident("cuda", zero_stage, 2, ""), "nccl"));
        assert!(apart(&fast, &one) < 1e-5, "ZeRO {zero_stage}: {}", apart(&fast, &one));
    }
    for more in [BF16, FP16] {
        let of = |ranks: usize, way| world::run(ranks, 2, &travel(resident("cuda", 3, 4 / ranks, more), way));
        assert!(apart(&of(2, "nccl"), &of(1, "host")) < 5e-3, "{more}: {}", apart(&of(2, "nccl"), &of(1, "host")));
    }
    let split =
        resident("cuda", 2, 2, "").replace("{stage: 2", "{stage: 2, offload_optimizer: {device: cpu, ratio: 0.5}");
    let split = world::run(2, 3, &travel(split, "nccl"));
    assert!(apart(&split, &one) < 1e-5, "a part on the host: {}", apart(&split, &one));
    for zero_stage in [2, 3] {
        let offloaded = world::run(2, 3, &travel(settings("cuda", zero_stage, 2, ""), "nccl"));
        assert!(apart(&offloaded, &one) < 1e-5, "ZeRO {zero_stage} on the host: {}", apart(&offloaded, &one));
    }
}

/// Two pipeline stages are bit-identical to one stage, whether each stage has its own GPU or both share a GPU.
#[test]
fn pipelines_with_everything_on_gpus() {
    if !has_gpu() {
        return;
    }
    let expected = world::run(1, 3, &resident("cuda", 1, 4, ""));
    for schedule in ["1f1b", "zb_h1"] {
        let pipeline = format!("pipeline: {{stages: 2, schedule: {schedule}}}");
        assert_same(&world::run(2, 3, &resident("cuda", 1, 4, &pipeline)), &expected, schedule);
    }
}

#[test]
fn unsupported_gpu_settings_are_rejected_before_the_run() {
    for (text, said) in [
        (
            "training: {device: cuda}\nzero_optimization: {stage: 3, offload_param: {device: cpu}}",
            "parameters on the host are updated on the host",
        ),
        ("training: {device: cuda}\nmodel: {type: llama, tiled_mlp_rows: 64}", "tiled MLPs are unsupported on a GPU"),
    ] {
        let text = format!("train_micro_batch_size_per_gpu: 2\n{text}");
        let mut all = world(1, |comm| Engine::with_communicator(config(1, &text), gpt2(), comm).err());
        let error = all.remove(0).expect("an error").to_string();
        assert!(error.contains(said), "{error}");
    }
}
