//! Fine-tuning as in PEFT and PyTorch: 100 steps from the same weights, and files in both directions.

use std::path::Path;

use crate::python;
use crate::world;

use candle_core::{DType, Device, Tensor};
use python::{TOKENS, python, results};
use world::{batch, configured_engine, relative_difference, world};
use zero_engine::{Batch, ExportDtype, StoredModel, Weights, export, merge};
use zero_model::ops::Cache;

const STEPS: u64 = 100;

/// A way to train a part of a model, in this project's keys and in Python.
struct Case {
    class: &'static str,
    /// Keys of the configuration. `ADAPTER` stands for the folder of the initial adapter.
    keys: &'static str,
    /// Arguments of `peft.LoraConfig`. If empty, `trains` says in Python which parameter names are trained.
    lora: &'static str,
    trains: &'static str,
    /// Arguments of `transformers.BitsAndBytesConfig`, for a base model with quantized weights.
    quantized: &'static str,
}

const CASES: [Case; 18] = [
    Case {
        class: "GPT2LMHeadModel",
        keys: "adapter: {r: 4, lora_alpha: 16, target_modules: [c_attn, mlp.c_proj], modules_to_save: [ln_f], \
               pretrained: ADAPTER}",
        lora: "r=4, lora_alpha=16, target_modules=['c_attn', 'mlp.c_proj'], modules_to_save=['ln_f'], fan_in_fan_out=True",
        trains: "",
        quantized: "",
    },
    Case {
        class: "LlamaForCausalLM",
        keys: "adapter: {r: 4, lora_alpha: 4, use_rslora: true, pretrained: ADAPTER}",
        lora: "r=4, lora_alpha=4, use_rslora=True, target_modules='all-linear'",
        trains: "",
        quantized: "",
    },
    Case {
        class: "GPT2LMHeadModel",
        keys: "adapter: {r: 4, lora_alpha: 16, use_dora: true, target_modules: [attn.c_proj, c_fc], bias: lora_only, \
               pretrained: ADAPTER}",
        lora: "r=4, lora_alpha=16, use_dora=True, target_modules=['attn.c_proj', 'c_fc'], bias='lora_only', fan_in_fan_out=True",
        trains: "",
        quantized: "",
    },
    Case {
        class: "LlamaForCausalLM",
        keys: "adapter: {r: 4, lora_alpha: 4, use_dora: true, pretrained: ADAPTER}",
        lora: "r=4, lora_alpha=4, use_dora=True, target_modules='all-linear'",
        trains: "",
        quantized: "",
    },
    Case {
        class: "GPT2LMHeadModel",
        keys: "adapter: {r: 4, loraplus_lr_ratio: 8, target_modules: [c_attn], modules_to_save: [ln_f], \
               pretrained: ADAPTER}",
        lora: "r=4, lora_alpha=8, target_modules=['c_attn'], modules_to_save=['ln_f'], fan_in_fan_out=True",
        trains: "",
        quantized: "",
    },
    Case {
        class: "GPT2LMHeadModel",
        keys: "training: {trainable: ['*.h.1.*', '*ln_f*']}",
        lora: "",
        trains: "'.h.1.' in name or 'ln_f' in name",
        quantized: "",
    },
    Case {
        class: "LlamaForCausalLM",
        keys: "training: {frozen: ['*embed_tokens*']}",
        lora: "",
        trains: "'embed_tokens' not in name",
        quantized: "",
    },
    // PEFT's rule selects `input_layernorm` and `post_attention_layernorm`, too.
    Case {
        class: "LlamaForCausalLM",
        keys: "adapter: {r: 4, lora_alpha: 4, modules_to_save: [norm], pretrained: ADAPTER}",
        lora: "r=4, lora_alpha=4, target_modules='all-linear', modules_to_save=['norm']",
        trains: "",
        quantized: "",
    },
    Case {
        class: "Phi3ForCausalLM",
        keys: "adapter: {r: 4, lora_alpha: 8, target_modules: [qkv_proj, gate_up_proj], pretrained: ADAPTER}",
        lora: "r=4, lora_alpha=8, target_modules=['qkv_proj', 'gate_up_proj']",
        trains: "",
        quantized: "",
    },
    Case {
        class: "Phi3ForCausalLM",
        keys: "adapter: {r: 4, lora_alpha: 8, use_dora: true, pretrained: ADAPTER}",
        lora: "r=4, lora_alpha=8, use_dora=True, target_modules='all-linear'",
        trains: "",
        quantized: "",
    },
    Case {
        class: "Gemma3ForCausalLM",
        keys: "adapter: {r: 4, lora_alpha: 4, modules_to_save: [q_norm], pretrained: ADAPTER}",
        lora: "r=4, lora_alpha=4, target_modules='all-linear', modules_to_save=['q_norm']",
        trains: "",
        quantized: "",
    },
    Case {
        class: "LlamaForCausalLM",
        keys: "adapter: {r: 4, lora_alpha: 4, pretrained: ADAPTER}\n\
               quantization_config: {load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true}",
        lora: "r=4, lora_alpha=4, target_modules='all-linear'",
        trains: "",
        quantized: "load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True",
    },
    Case {
        class: "LlamaForCausalLM",
        keys: "adapter: {r: 4, lora_alpha: 4, use_dora: true, pretrained: ADAPTER}\n\
               quantization_config: {load_in_4bit: true, bnb_4bit_quant_type: nf4}",
        lora: "r=4, lora_alpha=4, use_dora=True, target_modules='all-linear'",
        trains: "",
        quantized: "load_in_4bit=True, bnb_4bit_quant_type='nf4'",
    },
    Case {
        class: "Phi3ForCausalLM",
        keys: "adapter: {r: 4, lora_alpha: 4, pretrained: ADAPTER}\n\
               quantization_config: {load_in_4bit: true, bnb_4bit_quant_type: nf4, llm_int8_skip_modules: [o_proj]}",
        lora: "r=4, lora_alpha=4, target_modules='all-linear'",
        trains: "",
        quantized: "load_in_4bit=True, bnb_4bit_quant_type='nf4', llm_int8_skip_modules=['o_proj', 'lm_head']",
    },
    Case {
        class: "Gemma3ForCausalLM",
        keys: "adapter: {r: 4, lora_alpha: 4, pretrained: ADAPTER}\n\
               quantization_config: {load_in_4bit: true, bnb_4bit_quant_type: nf4}",
        lora: "r=4, lora_alpha=4, target_modules='all-linear'",
        trains: "",
        quantized: "load_in_4bit=True, bnb_4bit_quant_type='nf4'",
    },
    // A larger scale would amplify rounding errors in this case, also in PEFT.
    Case {
        class: "GPT2LMHeadModel",
        keys: "adapter: {r: 4, lora_alpha: 4, pretrained: ADAPTER}\nquantization_config: {load_in_4bit: true}",
        lora: "r=4, lora_alpha=4, target_modules=['c_attn', 'c_proj', 'c_fc']",
        trains: "",
        quantized: "load_in_4bit=True",
    },
    Case { class: "LlamaForCausalLM", keys: MASKED, lora: "", trains: "True", quantized: "" },
    Case { class: "GPT2LMHeadModel", keys: MASKED, lora: "", trains: "True", quantized: "" },
];

/// All parameters are trained, on batches with ignored targets.
const MASKED: &str = "gradient_accumulation_steps: 1";

/// Ignores every second target of the first two samples of [`batch`], and every third one of the others.
fn masked(batch: Batch) -> Batch {
    let targets = batch.targets.as_ref().unwrap().to_dtype(DType::I64).unwrap();
    let shape = targets.shape().clone();
    let targets = targets.flatten_all().unwrap().to_vec1::<i64>().unwrap();
    let targets = targets.iter().enumerate().map(|(i, &target)| if i % (2 + i / 32) == 0 { -100 } else { target });
    let targets = Tensor::from_vec(targets.collect::<Vec<_>>(), shape, &Device::Cpu).unwrap();
    Batch::new(batch.inputs, targets)
}

/// The model and its adapter, in Python.
const PREAMBLE: &str = "
import json, torch, transformers, peft, peft.optimizers
torch.set_num_threads(1)
def show(result): print('result', json.dumps(result))
torch.manual_seed(3)
gpt2 = dict(vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=2, initializer_range=0.1,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
llama = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.1)
def sizes(wide): return llama | (dict(hidden_size=64, intermediate_size=128) if wide else {})
configs = dict(
    GPT2LMHeadModel=lambda wide: transformers.GPT2Config(**gpt2 | (dict(n_embd=64) if wide else {})),
    LlamaForCausalLM=lambda wide: transformers.LlamaConfig(**sizes(wide)),
    Phi3ForCausalLM=lambda wide: transformers.Phi3Config(**sizes(wide), pad_token_id=None, partial_rotary_factor=0.75),
    Gemma3ForCausalLM=lambda wide: transformers.Gemma3TextConfig(
        **sizes(wide), pad_token_id=None, head_dim=16 if wide else 8, sliding_window=5, sliding_window_pattern=2,
        query_pre_attn_scalar=8))
def base(name, folder, **quantized):
    # With AVX-512, bitsandbytes 0.50.2 takes wrong scales where the columns are a multiple of 32 and not of 64.
    getattr(transformers, name)(configs[name](bool(quantized))).save_pretrained(folder)
    return load(folder, **quantized)
def load(folder, **quantized):
    head = transformers.AutoModelForCausalLM
    if not quantized: return head.from_pretrained(folder).float()
    quantized = transformers.BitsAndBytesConfig(**quantized)
    model = head.from_pretrained(folder, dtype=torch.float32, device_map='cpu', quantization_config=quantized)
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
def masked(targets):
    kept = torch.tensor([i % (2 + i // 32) != 0 for i in range(targets.numel())]).view(targets.shape)
    return targets.where(kept, -100)
def train(model, steps, lr_ratio=None, masks=False):
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in trained if p.dim() > 1], weight_decay=0.1),
              dict(params=[p for p in trained if p.dim() < 2], weight_decay=0.0)]
    optimizer, losses = torch.optim.AdamW(groups, lr=5e-4, eps=1e-6), []
    if lr_ratio: optimizer = peft.optimizers.create_loraplus_optimizer(model, torch.optim.AdamW, lr=5e-4, eps=1e-6,
        loraplus_lr_ratio=lr_ratio, loraplus_weight_decay=0.1)
    model.train()
    for step in range(steps):
        inputs, targets = tokens(step % 2, 4)
        if masks: targets = masked(targets)
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
    return losses
def logits(model):
    # No model has dropout, and in eval mode bitsandbytes multiplies in bf16 on some processors.
    model.train()
    with torch.no_grad(): return model(tokens(999, 1)[0]).logits.flatten().tolist()
";

/// Trains on two ranks, and returns the losses, the final logits and the checkpoint.
fn ours(case: &Case, folder: &Path) -> (Vec<f32>, Vec<f32>, std::path::PathBuf) {
    let keys = case.keys.replace("ADAPTER", &format!("{:?}", folder.join("initial")));
    let text = format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_clipping: 0.5\n\
         optimizer: {{type: AdamW, params: {{lr: 5.0e-4, eps: 1.0e-6, weight_decay: 0.1}}}}\nmodel: {{pretrained: {:?}}}\n{keys}\n\
         zero_optimization: {{stage: 3, stage3_param_persistence_threshold: 64}}",
        folder.join("base")
    );
    world(2, |comm| {
        let mut engine = configured_engine(comm, &text);
        let batch_of = |step: u64| if case.keys == MASKED { masked(batch(step % 2, 4)) } else { batch(step % 2, 4) };
        let losses = (0..STEPS).map(|step| engine.train_batch(&batch_of(step)).unwrap().loss).collect();
        let saved = engine.save_checkpoint(folder.join("run")).unwrap();
        let logits = engine.forward(batch(999, 1).inputs).unwrap().tensors()[0].flatten_all().unwrap();
        (losses, logits.to_vec1::<f32>().unwrap(), saved)
    })
    .remove(0)
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn one_hundred_steps_agree_with_peft_and_pytorch() {
    let root = tempfile::tempdir().unwrap();
    let folder = |index: usize| root.path().join(format!("{index}"));
    let mut script = TOKENS.to_string() + PREAMBLE;
    for (index, case) in CASES.iter().enumerate() {
        let folder = folder(index);
        script += &format!("model = base({:?}, {:?}, {})\n", case.class, folder.join("base"), case.quantized);
        script += &match case.lora {
            "" => format!("for name, p in model.named_parameters(): p.requires_grad = {}\n", case.trains),
            lora => format!(
                "model = peft.get_peft_model(model, peft.LoraConfig({lora}, init_lora_weights=False))\n\
                 model.save_pretrained({:?})\n",
                folder.join("initial")
            ),
        };
        let way = match case.keys {
            MASKED => ", masks=True",
            keys if keys.contains("loraplus_lr_ratio: 8") => ", lr_ratio=8",
            _ => "",
        };
        script += &format!("show([train(model, {STEPS}{way}), logits(model)])\n");
    }
    let Some(theirs) = python(&["torch", "transformers", "peft", "bitsandbytes"], &script) else { return };
    let mut script = TOKENS.to_string() + PREAMBLE;
    let mut expected = vec![];
    for (index, (case, line)) in CASES.iter().zip(results(&theirs)).enumerate() {
        let [losses, their_logits]: [Vec<f32>; 2] = serde_json::from_str(line).unwrap();
        let (our_losses, our_logits, saved) = ours(case, &folder(index));
        let relative = relative_difference(&our_losses, &losses);
        println!("{}, {}: losses differ by {relative:.1e} at most", case.class, case.keys);
        assert!(relative <= 1e-4, "{}: {relative:e}\n{our_losses:?}\n{losses:?}", case.keys);
        assert!(losses[STEPS as usize - 1] < 0.95 * losses[0], "{}: {losses:?}", case.keys);
        assert!(largest_difference(&our_logits, &their_logits) < 1e-2, "{}", case.keys);
        // `zero-train generate` reads checkpoints without an engine, through `StoredModel`.
        let stored = StoredModel::open(&saved, None).unwrap();
        let tokens = batch(999, 1).inputs.single().unwrap().clone();
        let last = stored.model.next_logits(&tokens, &mut [&mut Cache::default()]).unwrap();
        assert_eq!(last.flatten_all().unwrap().to_vec1::<f32>().unwrap(), our_logits[15 * 61..], "{}", case.keys);
        if case.lora.is_empty() {
            continue;
        }
        let weights = Weights { dtype: ExportDtype::F32, max_shard_bytes: 1 << 30, averaged: false };
        export(&saved, &folder(index).join("ours"), weights).unwrap();
        if !case.quantized.is_empty() {
            let error = merge(&saved, &folder(index).join("merged"), weights).unwrap_err().to_string();
            assert!(error.contains("is quantized") && error.contains("merge_and_unload"), "{error}");
            let [base, ours] = ["base", "ours"].map(|name| folder(index).join(name));
            script += &format!(
                "model = peft.PeftModel.from_pretrained(load({base:?}, {}), {ours:?})\n\
                 show(logits(model))\nshow(0.0)\n",
                case.quantized
            );
            expected.push((case.keys, our_logits));
            continue;
        }
        merge(&saved, &folder(index).join("merged"), weights).unwrap();
        let [base, ours, merged] = ["base", "ours", "merged"].map(|name| folder(index).join(name));
        script += &format!(
            "model = peft.PeftModel.from_pretrained(load({base:?}), {ours:?})\n\
             show(logits(model))\n\
             a, b = model.merge_and_unload().state_dict(), load({merged:?}).state_dict()\n\
             assert a.keys() == b.keys(), a.keys() ^ b.keys()\n\
             show(max((a[name] - b[name]).abs().max().item() for name in a))\n"
        );
        expected.push((case.keys, our_logits));
    }
    let read_back = python(&["torch", "transformers", "peft"], &script).unwrap();
    let lines: Vec<&str> = results(&read_back).collect();
    assert_eq!(lines.len(), 2 * expected.len(), "{read_back}");
    for ((keys, ours), lines) in expected.iter().zip(lines.chunks(2)) {
        let theirs: Vec<f32> = serde_json::from_str(lines[0]).unwrap();
        let (logits, weights) = (largest_difference(ours, &theirs), lines[1].parse::<f32>().unwrap());
        println!("{keys}: logits in peft differ by {logits:.1e}, merged weights by {weights:.1e}");
        assert!(logits <= 1e-5, "{keys}: {logits:e}");
        assert!(weights <= 1e-6, "{keys}: {weights:e}");
    }
}
