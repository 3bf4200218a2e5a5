//! Families of language models, compared with transformers: the same logits, the same training, and exports that
//! transformers reads.

use std::path::{Path, PathBuf};

use crate::python;
use crate::world;

use python::{TOKENS, python, results};
use world::{batch, relative_difference, world};
use zero_engine::{Config, Engine, ExportDtype, Weights, configured_layers, export};

const STEPS: u64 = 20;

/// Names of classes without the suffix `ForCausalLM`, and configuration arguments in addition to the sizes in
/// [`PREAMBLE`]. A row has 16 tokens, so it is longer than every sliding window.
const CASES: [(&str, &str); 14] = [
    ("Qwen3", "head_dim=12, tie_word_embeddings=True"),
    ("Qwen3", "attention_bias=True, use_sliding_window=True, sliding_window=5, max_window_layers=2"),
    ("SmolLM3", "no_rope_layers=[1, 0, 1, 0]"),
    ("SmolLM3", "use_sliding_window=True, sliding_window=5, tie_word_embeddings=False, mlp_bias=True"),
    ("Qwen2", "use_sliding_window=True, sliding_window=5, layer_types=['full_attention', 'sliding_attention'] * 2"),
    (
        "Llama",
        "tie_word_embeddings=True, rope_parameters=dict(rope_type='llama3', rope_theta=500.0, factor=8.0, \
         low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8), eos_token_id=[1, 2, 3]",
    ),
    ("Mistral", "sliding_window=None, head_dim=12"),
    ("Mistral", "sliding_window=5, rope_scaling=dict(type='linear', factor=2.0), rope_theta=100.0"),
    ("Gemma3", "head_dim=12, sliding_window=5, query_pre_attn_scalar=10"),
    (
        "Gemma3",
        "head_dim=8, sliding_window=5, query_pre_attn_scalar=8, attention_bias=True, sliding_window_pattern=2, \
         tie_word_embeddings=False, rope_theta=500.0, rope_local_base_freq=50.0, \
         rope_scaling=dict(rope_type='linear', factor=8.0)",
    ),
    ("Gemma3", "head_dim=8, query_pre_attn_scalar=8, layer_types=['full_attention'] * 4"),
    ("Phi3", "rope_theta=250.0"),
    (
        "Phi3",
        "sliding_window=5, tie_word_embeddings=True, partial_rotary_factor=0.75, original_max_position_embeddings=16, \
         rope_scaling=dict(type='longrope', short_factor=[1.0, 1.5, 2.5], long_factor=[3.0, 4.5, 6.5])",
    ),
    (
        "Phi3",
        "original_max_position_embeddings=8, rope_scaling=dict(type='longrope', short_factor=[1.0, 1.5, 2.5, 3.5], \
         long_factor=[2.0, 2.5, 4.5, 5.5], attention_factor=1.3)",
    ),
];

const PREAMBLE: &str = "
import json, torch, transformers
torch.set_num_threads(1)
torch.manual_seed(5)
def logits(model):
    model.eval()
    with torch.no_grad(): return model(tokens(999, 1)[0]).logits.flatten().tolist()
def load(folder):
    model, said = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not said['missing_keys'] and not said['unexpected_keys'] and not said['mismatched_keys'], said
    return model.float()
def case(name, folder, **more):
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.1, pad_token_id=None)
    text = 'Text' if name == 'Gemma3' else ''
    config = getattr(transformers, name + text + 'Config')(**(sizes | more))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1: parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    model = load(folder)
    first = logits(model)
    groups = [dict(params=[p for p in model.parameters() if p.dim() > 1], weight_decay=0.1),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6), []
    model.train()
    for step in range(20):
        inputs, targets = tokens(step % 2, 4)
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
    print('result', json.dumps([first, losses]))
";

/// Returns the largest difference, relative to the largest value.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let largest = b.iter().fold(0.0f32, |largest, b| largest.max(b.abs()));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest
}

/// Returns the initial logits, the losses of training on two ranks, the final logits, and the exported folder.
fn ours(folder: &Path) -> (Vec<f32>, Vec<f32>, Vec<f32>, PathBuf) {
    let text = format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_clipping: 0.5\n\
         optimizer: {{type: AdamW, params: {{lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1}}}}\n\
         model: {{pretrained: {folder:?}}}\nzero_optimization: {{stage: 3, stage3_param_persistence_threshold: 64}}"
    );
    let (first, losses, last, saved) = world(2, |comm| {
        let config = Config::with_world_size("test.yaml", text.clone(), 2).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(config.warnings, []);
        let layers = configured_layers(&config, None).unwrap();
        let mut engine = Engine::with_communicator(config, layers, comm).unwrap_or_else(|e| panic!("{text}\n{e}"));
        let logits = |engine: &mut Engine| {
            let logits = engine.forward(batch(999, 1).inputs).unwrap().tensors()[0].flatten_all().unwrap();
            logits.to_vec1::<f32>().unwrap()
        };
        let first = logits(&mut engine);
        let losses = (0..STEPS).map(|step| engine.train_batch(&batch(step % 2, 4)).unwrap().loss).collect();
        let saved = engine.save_checkpoint(folder.join("run")).unwrap();
        (first, losses, logits(&mut engine), saved)
    })
    .remove(0);
    let out = folder.join("exported");
    let weights = Weights { dtype: ExportDtype::F32, max_shard_bytes: 1 << 30, averaged: false };
    let (_, left_out) = export(&saved, &out, weights).unwrap();
    assert_eq!(left_out, ["no tokenizer: the checkpoint names no tokenizer"]);
    (first, losses, last, out)
}

#[test]
fn families_agree_with_transformers() {
    let root = tempfile::tempdir().unwrap();
    let folder = |index: usize| root.path().join(format!("{index}"));
    let mut script = TOKENS.to_string() + PREAMBLE;
    for (index, (class, more)) in CASES.iter().enumerate() {
        script += &format!("case({class:?}, {:?}, {more})\n", folder(index));
    }
    let Some(theirs) = python(&["torch", "transformers"], &script) else { return };
    let theirs = results(&theirs).collect::<Vec<_>>();
    assert_eq!(theirs.len(), CASES.len());
    let (mut script, mut expected) = (TOKENS.to_string() + PREAMBLE, vec![]);
    for (index, ((class, more), line)) in CASES.iter().zip(theirs).enumerate() {
        let [their_first, their_losses]: [Vec<f32>; 2] = serde_json::from_str(line).unwrap();
        let (first, losses, last, out) = ours(&folder(index));
        let logits = difference(&first, &their_first);
        let training = relative_difference(&losses, &their_losses);
        println!("{class}, {more}: logits differ by {logits:.1e}, losses by {training:.1e}");
        assert!(logits <= 1e-5, "{class}, {more}: {logits:e}");
        assert!(training <= 1e-4, "{class}, {more}: {training:e}\n{losses:?}\n{their_losses:?}");
        assert!(losses[STEPS as usize - 1] < 0.95 * losses[0], "{class}, {more}: {losses:?}");
        script += &format!(
            "model = load({out:?})\n\
             names = [sorted(m.state_dict()) for m in (model, load({:?}))]\n\
             assert names[0] == names[1], (names[0], names[1])\n\
             print('result', json.dumps([type(model).__name__, logits(model)]))\n",
            folder(index)
        );
        expected.push(last);
    }
    let theirs = python(&["torch", "transformers"], &script).unwrap();
    for (((class, more), line), ours) in CASES.iter().zip(results(&theirs)).zip(&expected) {
        let (name, theirs): (String, Vec<f32>) = serde_json::from_str(line).unwrap();
        // A Mistral without a window is exported as a Llama, which computes the same logits.
        let is_same = name == format!("{class}ForCausalLM") || (*class == "Mistral" && name == "LlamaForCausalLM");
        assert!(is_same, "{class}, {more}: {name}");
        let logits = difference(ours, &theirs);
        println!("{class}, {more}: exported logits differ by {logits:.1e}");
        assert!(logits <= 1e-5, "{class}, {more}: {logits:e}");
    }
}
