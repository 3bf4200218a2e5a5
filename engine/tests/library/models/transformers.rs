//! Small random models saved by Hugging Face's transformers: the engine's logits match those of transformers.

use crate::python;
use crate::world;

use serde_json::Value;

use python::python;
use world::{batch, world};
use zero_engine::{Config, Engine, configured_layers};

/// Model class, arguments of its configuration, and the format in which it is saved.
const CASES: [(&str, &str, &str); 8] = [
    ("GPT2", "n_inner=64, activation_function='gelu_pytorch_tanh'", "f32"),
    ("GPT2", "tie_word_embeddings=False, layer_norm_epsilon=1e-3", "bf16"),
    (
        "Llama",
        "num_key_value_heads=2, head_dim=12, rope_theta=500.0, rope_scaling=dict(rope_type='llama3', factor=8.0, \
         low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)",
        "sharded",
    ),
    ("Llama", "attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-3", "f16"),
    ("Mistral", "num_key_value_heads=2, sliding_window=5", "f32"),
    ("Mistral", "num_key_value_heads=1, sliding_window=None", "bf16"),
    ("Qwen2", "num_key_value_heads=2, tie_word_embeddings=True", "sharded"),
    ("Qwen2", "num_key_value_heads=4, use_sliding_window=True, sliding_window=5, max_window_layers=0", "bf16"),
];

#[test]
fn models_of_transformers_compute_the_same_logits() {
    let root = tempfile::tempdir().unwrap();
    let tokens = batch(9, 1).inputs;
    let ids = tokens.single().unwrap().to_vec2::<u32>().unwrap();
    let mut script = format!(
        "import json, torch, transformers\n\
         torch.manual_seed(1)\n\
         gpt2 = dict(vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=2, initializer_range=0.1)\n\
         llama = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, \
         max_position_embeddings=16, initializer_range=0.1)\n\
         def case(name, saved, folder, **more):\n  \
           head = 'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'\n  \
           config = getattr(transformers, name + 'Config')(**(gpt2 if name == 'GPT2' else llama) | more)\n  \
           model = getattr(transformers, name + head)(config)\n  \
           for parameter in model.parameters():\n    \
             if parameter.dim() == 1: parameter.data += 0.1 * torch.randn_like(parameter)\n  \
           model = model.to(dict(bf16=torch.bfloat16, f16=torch.float16).get(saved, torch.float32))\n  \
           model.save_pretrained(folder, max_shard_size='20KB' if saved == 'sharded' else '1GB')\n  \
           model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()\n  \
           with torch.no_grad(): logits = model(torch.tensor({ids:?})).logits\n  \
           print(json.dumps(logits.flatten().tolist()))\n"
    );
    let folder = |index: usize| root.path().join(format!("{index}"));
    for (index, (name, more, saved)) in CASES.into_iter().enumerate() {
        script += &format!("case({name:?}, {saved:?}, {:?}, {more})\n", folder(index));
    }
    let Some(theirs) = python(&["torch", "transformers"], &script) else { return };
    assert_eq!(theirs.lines().count(), CASES.len(), "{theirs}");
    for ((index, (name, more, saved)), line) in CASES.into_iter().enumerate().zip(theirs.lines()) {
        let is_sharded = folder(index).join("model.safetensors.index.json").is_file();
        assert_eq!(is_sharded, saved == "sharded", "{name}, {more}");
        let theirs: Vec<f32> = serde_json::from_str(line).unwrap();
        let (ours, checkpoint) = world(2, |comm| {
            let zero = "zero_optimization: {stage: 3, stage3_param_persistence_threshold: 64}";
            let text = format!("train_micro_batch_size_per_gpu: 1\nmodel: {{pretrained: {:?}}}\n{zero}", folder(index));
            let config =
                Config::with_world_size("test.yaml", text, 2).unwrap_or_else(|e| panic!("{name}, {more}\n{e}"));
            let layers = configured_layers(&config, None).unwrap();
            let mut engine =
                Engine::with_communicator(config, layers, comm).unwrap_or_else(|e| panic!("{name}, {more}\n{e}"));
            // Save a checkpoint, to export it and compare `config.json`.
            let saved = engine.save_checkpoint(folder(index).join("run")).unwrap();
            let logits = engine.forward(tokens.clone()).unwrap().tensors()[0].flatten_all().unwrap();
            (logits.to_vec1::<f32>().unwrap(), saved)
        })
        .remove(0);
        assert_eq!(ours.len(), theirs.len());
        let largest = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("{name}, {saved}: logits differ by {largest:.1e} at most");
        assert!(largest <= 1e-5, "{name}, {more}: {largest:e}");
        assert!(theirs.iter().any(|logit| logit.abs() > 0.1), "{name}, {more}: nothing to compare");
        let out = folder(index).join("exported");
        let options =
            zero_engine::Weights { dtype: zero_engine::ExportDtype::F32, max_shard_bytes: 1 << 30, averaged: false };
        zero_engine::export(&checkpoint, &out, options).unwrap();
        let architecture = |folder: std::path::PathBuf| {
            let config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
            config["architectures"].clone()
        };
        let (before, after) = (architecture(folder(index)), architecture(out));
        // A Mistral without a window is exported as a Llama.
        assert!(before == after || more.contains("sliding_window=None"), "{name}, {more}: {before} became {after}");
    }
}
