//! µP: losses and learning rates match the package `mup`, a model that is its own base model trains as it does without
//! µP, and the changes of logits do not grow with the width.

use candle_core::DType;
use zero_engine::{Batch, Config, Engine, ExportDtype, StoredModel, Weights, configured_layers, configured_model};
use zero_model::ops::Cache;

use crate::python::{TOKENS, python, results};
use crate::world::{
    Trajectory, agreed, assert_same, batch, configured_engine, relative_difference, reproducible, trajectory, world,
};

const GPT2: &str = "model: {type: gpt2, vocab_size: 61, n_positions: 16, n_embd: 64, n_layer: 2, n_head: HEADS, \
                    initializer_range: 0.1}\n";
const LLAMA: &str = "model: {type: llama, vocab_size: 61, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, \
                     num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 16, initializer_range: 0.1}\n";

/// Returns models that are wider than their base models: model section, `mup` section, class in Python, and sizes of
/// the base model in Python. Two GPT-2s, one with larger heads and one with more heads, are 4 times as wide as their
/// base models. A Llama has more heads, each of twice the size. Its feed-forward part, keys and values are twice as
/// wide as in its base model, and everything else is 4 times as wide, so that a matrix can have different factors for
/// inputs and outputs.
fn models() -> [(String, &'static str, &'static str, &'static str); 3] {
    [
        (GPT2.replace("HEADS", "2"), "mup: {base: {n_embd: 16}}\n", "GPT2", "n_embd=16, n_head=2"),
        (GPT2.replace("HEADS", "8"), "mup: {base: {n_embd: 16, n_head: 2}}\n", "GPT2", "n_embd=16, n_head=2"),
        (
            LLAMA.into(),
            "mup: {base: {hidden_size: 16, intermediate_size: 48, num_attention_heads: 2, num_key_value_heads: 2}}\n",
            "Llama",
            "hidden_size=16, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2",
        ),
    ]
}

/// Optimizer in Python with its arguments, and our optimizer.
const OPTIMIZERS: [[&str; 2]; 3] = [
    [
        "mup.MuAdam, lr=1e-3, eps=1e-5",
        "optimizer: {type: MuAdam, params: {lr: 0.001, eps: 1.0e-5, weight_decay: 0.01}}\n",
    ],
    [
        "mup.MuAdamW, lr=1e-3, eps=1e-5",
        "optimizer: {type: MuAdamW, params: {lr: 0.001, eps: 1.0e-5, weight_decay: 0.01}}\n",
    ],
    [
        "mup.MuSGD, lr=0.02, momentum=0.9",
        "optimizer: {type: MuSGD, params: {lr: 0.02, momentum: 0.9, weight_decay: 0.01}}\n",
    ],
];

const PREAMBLE: &str = "
import json, mup, transformers
from safetensors.torch import save_file
torch.set_num_threads(1)
common = dict(vocab_size=61, initializer_range=0.1)
class Mlp(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        sizes = [16, *hidden]
        hidden = [torch.nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]
        self.layers = torch.nn.ModuleList([*hidden, mup.MuReadout(sizes[-1], 61)])
    def forward(self, x):
        for layer in self.layers[:-1]: x = layer(x).relu()
        return self.layers[-1](x)
def build(name, **sizes):
    if name == 'Mlp': return Mlp(**sizes)
    if name == 'GPT2':
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, n_positions=16, n_layer=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, **sizes))
        model.lm_head = mup.MuSharedReadout(model.transformer.wte.weight, bias=False)
        return model
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, num_hidden_layers=2,
        max_position_embeddings=16, **sizes))
    model.lm_head = mup.MuReadout(sizes['hidden_size'], 61, bias=False)
    return model
def attentions(model): return [module for module in model.modules() if hasattr(module, 'o_proj') or hasattr(module, 'c_attn')]
def wide(name, sizes, base, delta):
    torch.manual_seed(3)
    model, base = build(name, **sizes), build(name, **base)
    mup.set_base_shapes(model, base, delta=build(name, **delta), rescale_params=False)
    for mine, small in zip(attentions(model), attentions(base)): mine.scaling *= (small.head_dim / mine.head_dim) ** 0.5
    return model
def outputs(model, inputs, targets):
    if isinstance(model, Mlp): return model(inputs / 64), targets[:, 0]
    return model(inputs).logits.flatten(0, 1), targets.flatten()
def optimizer_of(model, optimizer, **more):
    named = list(model.named_parameters())
    groups = [dict(params=[p for _, p in named if p.dim() > 1], weight_decay=0.01),
        dict(params=[p for _, p in named if p.dim() == 1], weight_decay=0.0)]
    return optimizer(groups, **more)
def case(folder, name, sizes, base, delta, optimizer, **more):
    model = wide(name, sizes, base, delta)
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, folder)
    optimizer, losses = optimizer_of(model, optimizer, **more), []
    rates = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group['params']: rates[names[id(p)]] = [group['lr'] / more['lr'], group['weight_decay']]
    for step in range(50):
        loss = torch.nn.functional.cross_entropy(*outputs(model, *tokens(step % 2, 4)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
    print('result', json.dumps([losses, rates]))
";

/// For each model, its sizes in Python, and the sizes of a model whose widths all differ from the base model's.
const SIZES: [[&str; 2]; 4] = [
    ["n_embd=64, n_head=2", "n_embd=32, n_head=2"],
    ["n_embd=64, n_head=8", "n_embd=32, n_head=2"],
    [
        "hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2",
        "hidden_size=40, intermediate_size=72, num_attention_heads=4, num_key_value_heads=2",
    ],
    ["hidden=[64, 96]", "hidden=[32, 72]"],
];

/// An MLP, in the format of [`models`].
const MLP: [&str; 4] = [
    "model: {type: mlp, input_size: 16, hidden_sizes: [64, 96], output_size: 61, activation: relu}\n",
    "mup: {base: {hidden_sizes: [16, 48]}}\n",
    "Mlp",
    "hidden=[16, 48]",
];

/// Returns a batch for a model of [`models`], or for [`MLP`], whose input vectors are rows of tokens.
fn batch_of(is_mlp: bool, step: u64) -> Batch {
    let batch = batch(step, 4);
    if !is_mlp {
        return batch;
    }
    let vectors = (batch.inputs.single().unwrap().to_dtype(DType::F32).unwrap() / 64.0).unwrap();
    let labels = batch.targets.unwrap().narrow(1, 0, 1).unwrap().flatten_all().unwrap();
    Batch::new(vectors, labels)
}

#[test]
fn fifty_steps_and_all_learning_rates_agree_with_mup() {
    let root = tempfile::tempdir().unwrap();
    let mut script = TOKENS.to_string() + PREAMBLE;
    let mut cases = vec![];
    let [model, mup, name, base] = MLP;
    let models = models().into_iter().chain([(model.to_string(), mup, name, base)]);
    for ((model, mup, name, base), [sizes, delta]) in models.zip(SIZES) {
        for [theirs, ours] in OPTIMIZERS {
            let file = root.path().join(format!("{}.safetensors", cases.len()));
            let sizes = [sizes, base, delta].map(|sizes| format!("dict({sizes})")).join(", ");
            script += &format!("case({file:?}, {name:?}, {sizes}, {theirs})\n");
            cases.push((format!("{model}{mup}{ours}"), file, format!("{name}, {sizes}, {theirs}")));
        }
    }
    let Some(theirs) = python(&["torch", "transformers", "safetensors", "mup"], &script) else { return };
    type Result = (Vec<f32>, std::collections::BTreeMap<String, (f64, f64)>);
    let theirs: Vec<Result> = results(&theirs).map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(theirs.len(), cases.len());
    for ((text, file, name), (theirs, rates)) in cases.iter().zip(theirs) {
        let text = format!(
            "train_micro_batch_size_per_gpu: 2\ngradient_clipping: 0.5\n{text}training: {{initial_weights: {file:?}}}\n\
             zero_optimization: {{stage: 3, stage3_param_persistence_threshold: 64}}"
        );
        let losses = world(2, |comm| {
            let mut engine = configured_engine(comm, &text);
            let batches = [0, 1].map(|step| batch_of(name.starts_with("Mlp"), step));
            (0..50).map(|step| engine.train_batch(&batches[step % 2]).unwrap().loss).collect::<Vec<f32>>()
        });
        let losses = agreed(losses, name);
        let relative = relative_difference(&losses, &theirs);
        println!("{name}: losses differ by {relative:.1e} at most, and fall from {} to {}", theirs[0], theirs[49]);
        assert!(relative < 1e-6, "{name}: {relative}\n{losses:?}\n{theirs:?}");
        assert!(theirs[49] < 0.97 * theirs[0], "{name}: {theirs:?}");
        let config = Config::with_world_size("test.yaml", &text, 1).unwrap();
        let model = configured_model::build(&config, configured_layers(&config, None).unwrap(), DType::F32).unwrap();
        assert_eq!(model.parameters().len(), rates.len());
        for parameter in model.parameters() {
            let tuning = parameter.tuning();
            let decay = tuning.weight_decay.unwrap_or(if parameter.shape().rank() > 1 { 0.01 } else { 0.0 });
            let (lr, weight_decay) = rates[parameter.name()];
            let is_near = |a: f64, b: f64| (a - b).abs() <= 1e-15 * b;
            assert!(is_near(tuning.lr_factor, lr), "{name}, {}: {tuning:?}, not {lr}", parameter.name());
            assert!(is_near(decay, weight_decay), "{name}, {}: {tuning:?}, not {weight_decay}", parameter.name());
        }
    }
}

fn run(ranks: usize, text: &str) -> Trajectory {
    agreed(world(ranks, |comm| trajectory(&mut configured_engine(comm, text), 6)), text)
}

#[test]
fn every_layout_is_bit_identical() {
    for (model, mup, ..) in models() {
        for [_, optimizer] in &OPTIMIZERS[1..] {
            let more = format!("{model}{mup}{optimizer}");
            let expected = run(1, &reproducible(0, 1, &more));
            assert_ne!(expected.losses[0], expected.losses[5]);
            for (ranks, stage) in [(1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)] {
                let got = run(ranks, &reproducible(stage, ranks, &more));
                assert_same(&expected, &got, &format!("{more}, stage {stage} on {ranks} ranks"));
            }
            let piped = reproducible(1, 1, &format!("{more}pipeline: {{stages: 2}}"));
            assert_same(&expected, &run(2, &piped), &piped);
        }
    }
}

/// A model that is its own base model trains bit-identically to a model without the section `mup`.
#[test]
fn a_model_as_its_own_base_trains_as_without_mup() {
    let [gpt2, llama] = [GPT2.replace("HEADS", "4"), LLAMA.to_string()];
    for (model, base) in [(gpt2, "n_embd: 64"), (llama, "hidden_size: 64")] {
        for [_, optimizer] in OPTIMIZERS {
            let plain = match optimizer.contains("MuAdam,") {
                true => optimizer.replace("MuAdam, params: {", "Adam, params: {adam_w_mode: false, "),
                false => optimizer.replace("type: Mu", "type: "),
            };
            let plain = run(1, &reproducible(0, 1, &format!("{model}{plain}")));
            let base = format!("{model}mup: {{base: {{{base}}}}}\n{optimizer}");
            assert_same(&plain, &run(1, &reproducible(0, 1, &base)), &base);
        }
    }
}

/// Returns the mean change of a logit in 4 steps, at this width with 2 heads.
fn change(width: usize, mup: &str, optimizer: &str) -> f32 {
    let text = format!(
        "train_micro_batch_size_per_gpu: 4\ngradient_clipping: 0\n{mup}optimizer: {{type: {optimizer}, params: {{lr: 0.002}}}}\n{}",
        GPT2.replace("HEADS", "2").replace("n_embd: 64", &format!("n_embd: {width}")).replace("0.1", "0.02")
    );
    world(1, |comm| {
        let mut engine = configured_engine(comm, &text);
        let logits = |engine: &mut Engine| {
            let inputs = batch(0, 4).inputs.single().unwrap().clone();
            let logits = engine.forward(inputs).unwrap();
            logits.single().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let before = logits(&mut engine);
        (0..4).for_each(|step| assert!(engine.train_batch(&batch(step % 2, 4)).unwrap().loss.is_finite()));
        let after = logits(&mut engine);
        let changes = before.iter().zip(&after).map(|(before, after)| (after - before).abs());
        changes.sum::<f32>() / before.len() as f32
    })[0]
}

/// The coordinate check of mup's README: as the width grows, logits change by about the same amount in µP, and by more
/// and more without it. The bounds are wide: relative to width 64, the changes at widths 128, 256 and 512 are 0.65 to
/// 0.78 times as large in µP, and 1.7, 3.0 and 5.5 times as large without it.
#[test]
fn coordinate_check_logits_change_equally_at_all_widths() {
    let [narrow, wide] = [64, 512];
    let middle = [128, 256];
    let of = |width: usize| change(width, "mup: {base: {n_embd: 64}}\n", "MuAdamW");
    let base = of(narrow);
    for width in middle.into_iter().chain([wide]) {
        let grown = of(width) / base;
        println!("width {width}: logits change {grown:.2} times as much in µP");
        assert!((0.4..2.0).contains(&grown), "width {width}: {grown}");
    }
    let base = change(narrow, "", "AdamW");
    let growth: Vec<f32> = [128, 256, 512].iter().map(|&width| change(width, "", "AdamW") / base).collect();
    println!("widths 128, 256, 512 without: {growth:.2?}");
    assert!(growth[2] > 3.0 && growth[0] < growth[1] && growth[1] < growth[2], "{growth:?}");
}

fn evaluated(engine: &mut Engine) -> u32 {
    engine.eval_batch(&batch(7, 2)).unwrap().to_bits()
}

/// Exports, stored models and resumed runs from a µP checkpoint have the same loss or logits as the run.
#[test]
fn exports_and_saved_models_match_the_trained_model() {
    let root = tempfile::tempdir().unwrap();
    let [[_, _], [_, optimizer], ..] = OPTIMIZERS;
    let of_llama = "mup: {base: {hidden_size: 16, num_attention_heads: 1, num_key_value_heads: 1}}\n";
    let cases = [
        (models()[1].0.clone(), models()[1].1, "transformer.ln_f.weight"),
        (LLAMA.to_string(), of_llama, "model.norm.weight"),
        // The heads are larger than those of the base model.
        (models()[0].0.clone(), models()[0].1, ""),
    ];
    for (index, (model, mup, norm)) in cases.iter().enumerate() {
        let text = format!("train_micro_batch_size_per_gpu: 2\n{model}{mup}{optimizer}");
        let folder = root.path().join(index.to_string());
        let (saved, loss, logits) = world(1, |comm| {
            let mut engine = configured_engine(comm, &text);
            (0..3).for_each(|step| assert!(engine.train_batch(&batch(step, 2)).unwrap().loss.is_finite()));
            let tokens = batch(7, 1).inputs.single().unwrap().clone();
            let logits = engine.forward(tokens).unwrap().single().unwrap().flatten_all().unwrap();
            (engine.save_checkpoint(&folder).unwrap(), evaluated(&mut engine), logits.to_vec1::<f32>().unwrap())
        })
        .remove(0);
        let stored = StoredModel::open(&saved, None).unwrap();
        let tokens = batch(7, 1).inputs.single().unwrap().clone();
        let last = stored.model.next_logits(&tokens, &mut [&mut Cache::default()]).unwrap();
        assert_eq!(last.flatten_all().unwrap().to_vec1::<f32>().unwrap(), logits[15 * 61..], "{text}");
        let out = folder.join("out");
        let weights = Weights { dtype: ExportDtype::F32, max_shard_bytes: 1 << 30, averaged: false };
        let (_, left_out) = zero_engine::export(&saved, &out, weights).unwrap();
        // If the export folded the division of the logits into the last norm, the exported weights need a model without
        // `mup`. Otherwise they need the `mup` section of the training run.
        let from_export = |text: &str| {
            let weights = out.join("model.safetensors");
            let text = format!("{text}training: {{initial_weights: [{weights:?}]}}\n");
            world(1, |comm| {
                let config = Config::with_world_size("test.yaml", &text, 1).unwrap_or_else(|error| panic!("{error}"));
                let layers = zero_engine::configured_layers(&config, None).unwrap();
                let engine = Engine::with_communicator(config, layers, comm);
                engine.map(|mut engine| evaluated(&mut engine)).map_err(|error| error.to_string())
            })
            .remove(0)
        };
        let without = text.replace(mup, "").replace("MuAdamW", "AdamW");
        let (right, wrong) = if norm.is_empty() { (&text, &without) } else { (&without, &text) };
        assert_eq!(from_export(right), Ok(loss), "{text}");
        let error = from_export(wrong).unwrap_err();
        let said = if norm.is_empty() { "use the same section" } else { "remove the section" };
        assert!(error.contains(said), "{error}");
        if norm.is_empty() {
            let said = "no config.json: folding the µP factor of the attention";
            assert!(left_out.iter().any(|line| line.starts_with(said)), "{left_out:?}");
            assert!(!out.join("config.json").exists());
            continue;
        }
        let plain = format!("train_micro_batch_size_per_gpu: 2\nmodel: {{pretrained: {out:?}}}\n");
        let resumed = |text: &str| {
            world(1, |comm| {
                let mut engine = configured_engine(comm, text);
                let error = engine.load_checkpoint(&saved).err().map(|error| error.to_string());
                (error, evaluated(&mut engine))
            })
            .remove(0)
        };
        assert_eq!(world(1, |comm| evaluated(&mut configured_engine(comm, &plain)))[0], loss, "{text}");
        assert_eq!(resumed(&text), (None, loss), "{text}");
        // The same base model, but with one default size set explicitly.
        let same =
            text.replace("n_head: 2}}", "n_head: 2, n_inner: 64}}").replace("size: 16,", "size: 16, head_dim: 16,");
        assert_ne!(same, text);
        assert_eq!(resumed(&same), (None, loss), "{same}");
        // Another base model is refused before any weight is overwritten.
        let none = text.replace(mup, "").replace("MuAdamW", "AdamW");
        for other in [text.replace("size: 16", "size: 32").replace("embd: 16", "embd: 32"), none] {
            let initial = world(1, |comm| evaluated(&mut configured_engine(comm, &other)))[0];
            let (error, now) = resumed(&other);
            let error = error.unwrap_or_default();
            assert!(error.contains("mup") && error.contains("was trained with another base model"), "{error}");
            assert!(now == initial && now != loss, "{other}");
        }
        let all = candle_core::safetensors::load(out.join("model.safetensors"), &candle_core::Device::Cpu).unwrap();
        let mean = all[*norm].mean_all().unwrap().to_scalar::<f32>().unwrap();
        assert!((0.24..0.26).contains(&mean), "{norm}: {mean}");
    }
}
