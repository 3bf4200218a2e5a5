//! LoRA adapters: training is bit-identical at every layout. `peft.rs` compares it with PEFT.

use crate::world;

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor, safetensors};
use tempfile::TempDir;
use world::{BF16, Trajectory, assert_same, config, engine_of, gpt2_config, llama_config, run_of, trajectory, world};
use zero_engine::{Engine, Layers, zoo};

fn model() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_layer: 3, resid_pdrop: 0.1, ..gpt2_config() })
}

fn llama() -> Layers {
    zoo::llama(&llama_config())
}

pub(crate) const LORA: &str = "adapter: {r: 4, lora_alpha: 16, lora_dropout: 0.2, init_lora_weights: false, bias: lora_only, \
                    modules_to_save: [ln_f]}";
const OF_LLAMA: &str = "adapter: {r: 4, use_rslora: true, target_modules: [q_proj, down_proj], lora_dropout: 0.1}";

const DORA: &str = "adapter: {r: 4, use_dora: true, loraplus_lr_ratio: 4, lora_dropout: 0.1, bias: lora_only}";

fn text(stage: u8, micro_batches: usize, more: &str, zero: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {micro_batches}\n{more}\n\
         training: {{reproducible: true}}\n\
         zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40, \
         stage3_max_reuse_distance: 0{zero}}}"
    )
}

pub(crate) fn layouts_are_equal(layers: impl Fn() -> Layers + Sync + Copy, adapter: &str) {
    let folder = TempDir::new().unwrap();
    let nvme = format!(", offload_param: {{device: nvme, nvme_path: '{}'}}", folder.path().display());
    for dtype in ["", BF16] {
        let run = |ranks: usize, stage: u8, more: &str, zero: &str, data: usize| -> Trajectory {
            let more = format!("{adapter}\n{dtype}\n{more}\naio: {{block_size: 4096}}");
            run_of(layers, ranks, 4, &text(stage, 4 / data, &more, zero))
        };
        let expected = run(1, 0, "", "", 1);
        assert_ne!(expected.losses[0], expected.losses[3]);
        for (ranks, stage) in [(1, 3), (2, 1), (2, 2), (2, 3), (4, 3)] {
            let got = run(ranks, stage, "", "", ranks);
            assert_same(&expected, &got, &format!("{dtype} stage {stage} on {ranks} ranks"));
        }
        for schedule in ["1f1b", "zb_h1"] {
            let pipeline = format!("pipeline: {{stages: 2, schedule: {schedule}}}");
            assert_same(&expected, &run(2, 0, &pipeline, "", 1), schedule);
            assert_same(&expected, &run(4, 3, &pipeline, "", 2), schedule);
        }
        let recomputes = "activation_checkpointing: {enabled: true}";
        assert_same(&expected, &run(2, 3, recomputes, "", 2), recomputes);
        assert_same(&expected, &run(2, 3, recomputes, &nvme, 2), &nvme);
    }
}

#[test]
fn every_layout_is_bit_identical() {
    layouts_are_equal(model, LORA);
}

#[test]
fn every_layout_of_a_llama_is_bit_identical() {
    layouts_are_equal(llama, OF_LLAMA);
}

#[test]
fn every_layout_with_dora_is_bit_identical() {
    layouts_are_equal(model, DORA);
}

/// B starts at 0, so the first loss equals the base model's. Training changes the adapter only.
#[test]
fn training_starts_from_the_base_model_and_keeps_it() {
    let losses = |more: &str| {
        let mut all = world(1, |comm| {
            let config = config(1, &format!("train_micro_batch_size_per_gpu: 2\n{more}"));
            let mut engine = Engine::with_communicator(config, llama(), comm).unwrap();
            let before = trajectory(&mut engine, 0).parameters;
            let after = trajectory(&mut engine, 3);
            let is_adapter: Vec<bool> = engine.model().parameters().iter().map(|p| p.is_adapter()).collect();
            (before, after, is_adapter)
        });
        all.remove(0)
    };
    let (_, base, _) = losses("");
    for adapter in ["adapter: {}", "adapter: {init_lora_weights: gaussian, target_modules: o_proj}"] {
        let (before, after, is_adapter) = losses(adapter);
        assert_eq!(after.losses[0], base.losses[0]);
        assert_ne!(after.losses[1], base.losses[1]);
        for (index, ((name, old), (_, new))) in before.iter().zip(&after.parameters).enumerate() {
            // The gradient of A is zero in the first step, because B is zero. Later steps also change A.
            assert_eq!(old != new, is_adapter[index], "{name}");
        }
    }
}

/// DoRA's magnitudes start as the norms of the base model's weights, so the first loss equals the base model's.
#[test]
fn dora_starts_from_the_base_model() {
    let first = |adapter: &str| {
        let text = format!(
            "train_micro_batch_size_per_gpu: 2\n{adapter}\n\
             zero_optimization: {{stage: 3, stage3_param_persistence_threshold: 40}}"
        );
        world(2, |comm| {
            let mut engine = engine_of(model(), comm, &text);
            f32::from_bits(trajectory(&mut engine, 1).losses[0])
        })
        .remove(0)
    };
    let (base, dora) = (first(""), first("adapter: {use_dora: true}"));
    assert!((base - dora).abs() < 1e-6 * base, "{base} {dora}");
}

/// The shapes of an adapter's parameters do not determine its scale, so a resume compares the configured scale with the
/// saved one.
#[test]
fn resuming_with_another_lora_scale_is_an_error() {
    let folder = TempDir::new().unwrap();
    let engine = |adapter: &str, resumes: bool| {
        let text = format!("train_micro_batch_size_per_gpu: 2\nadapter: {{r: 4, {adapter}}}");
        let mut all = world(1, |comm| {
            let mut engine = engine_of(llama(), comm, &text);
            match resumes {
                true => engine.resume(folder.path()).map(drop),
                false => engine.save_checkpoint(folder.path()).map(drop),
            }
        });
        all.remove(0)
    };
    engine("lora_alpha: 8", false).unwrap();
    engine("lora_alpha: 8", true).unwrap();
    for other in ["lora_alpha: 16", "lora_alpha: 8, use_rslora: true", "lora_alpha: 8, use_dora: true"] {
        let error = engine(other, true).unwrap_err().to_string();
        assert!(
            ["lora_alpha", "use_rslora", "use_dora"].iter().any(|key| error.contains(&format!("adapter.{key}"))),
            "{error}"
        );
        assert!(error.contains("manifest.json"), "{error}");
    }
}

#[test]
fn names_and_keys_without_effect_are_errors() {
    let error = |more: &str| {
        let text = format!("train_micro_batch_size_per_gpu: 2\n{more}");
        let mut all = world(1, |comm| Engine::with_communicator(config(1, &text), llama(), comm).map(drop));
        all.remove(0).unwrap_err().to_string()
    };
    let unknown = error("adapter: {target_modules: [q_proj, c_attn]}");
    assert!(unknown.contains("adapter.target_modules") && unknown.contains("`c_attn`"), "{unknown}");
    assert!(unknown.contains("q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"), "{unknown}");
    assert!(error("adapter: {modules_to_save: [score]}").contains("adapter.modules_to_save"));
    assert!(error("adapter: {}\ntraining: {frozen: ['*']}").contains("training.frozen"));
    // The adapter of a model with different sizes is rejected.
    let folder = TempDir::new().unwrap();
    let settings = serde_json::json!({"peft_type": "LORA", "r": 8, "lora_alpha": 8});
    let write = |settings: &serde_json::Value| {
        std::fs::write(folder.path().join("adapter_config.json"), settings.to_string()).unwrap();
    };
    for (key, value) in [
        ("alpha_pattern", serde_json::json!({"q_proj": 64})),
        ("init_lora_weights", "pissa_niter_4".into()),
        ("alora_invocation_tokens", serde_json::json!([1])),
    ] {
        let mut settings = settings.clone();
        settings[key] = value.clone();
        write(&settings);
        let other = error(&format!("adapter: {{pretrained: {:?}}}", folder.path()));
        let expected = format!("adapter_config.json: its `{key}` is {value}, which is unsupported");
        assert!(other.contains(&expected), "{other}");
    }
    for (key, value, expected) in [
        ("r", serde_json::json!("4"), "an integer"),
        ("use_dora", "yes".into(), "true or false"),
        ("lora_alpha", "8".into(), "a number"),
    ] {
        let mut settings = settings.clone();
        settings[key] = value.clone();
        write(&settings);
        let other = error(&format!("adapter: {{pretrained: {:?}}}", folder.path()));
        assert!(other.contains(&format!("adapter_config.json: its `{key}` is {value}, not {expected}")), "{other}");
    }
    write(&settings);
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    let tensor = Tensor::zeros((8, 3), DType::F32, &Device::Cpu).unwrap();
    let file = folder.path().join("adapter_model.safetensors");
    safetensors::save(&HashMap::from([(name, tensor)]), file).unwrap();
    let other = error(&format!("adapter: {{pretrained: {:?}}}", folder.path()));
    assert!(other.contains("q_proj.lora_A.weight` has shape [8, 3] in the file and [8, 32]"), "{other}");
    assert!(other.contains("use the base model that the adapter was trained for"), "{other}");
    let file = folder.path().join("adapter_model.safetensors");
    safetensors::save(&HashMap::<String, Tensor>::new(), &file).unwrap();
    let empty = error(&format!("adapter: {{pretrained: {:?}}}", folder.path()));
    assert!(empty.contains("the safetensors files contain no tensors"), "{empty}");
    std::fs::write(file, "").unwrap();
    let empty = error(&format!("adapter: {{pretrained: {:?}}}", folder.path()));
    assert!(empty.contains("adapter_model.safetensors is damaged: the file is empty"), "{empty}");
    let missing = error("adapter: {pretrained: nowhere}");
    assert!(missing.contains("adapter.pretrained") && missing.contains("nowhere"), "{missing}");
}
