//! Parameter groups: tests which parameters they select, and that their learning rates, weight decays and betas work
//! like those of PyTorch's optimizers.

use candle_core::DType;
use zero_engine::{Config, Engine, Layers, configured_model};
use zero_model::Tuning;

use crate::python::{TOKENS, python, results};
use crate::sharding::on_disk::offloaded;
use crate::world::{BF16, agreed, assert_same, batch, gpt2, relative_difference, run, world};

const GROUPS: &str = "training:\n  \
    layerwise_lr_decay: 0.5\n  \
    param_groups:\n  \
    - {kinds: [norm, bias], lr: 2.0e-3, weight_decay: 0.05}\n  \
    - {params: '*attn.*', layers: [0], lr_scale: 0.5, betas: [0.8, 0.95]}\n  \
    - {params: '*.mlp.*', weight_decay: 0.3}\n";

fn configured(groups: &str, more: &str) -> Config {
    let optimizer = if more.contains("optimizer:") {
        ""
    } else {
        "optimizer: {type: AdamW, params: {lr: 1.0e-3, weight_decay: 0.1}}\n"
    };
    let text = format!("train_micro_batch_size_per_gpu: 2\n{optimizer}{groups}{more}");
    Config::with_world_size("test.yaml", text, 1).unwrap_or_else(|error| panic!("{error}"))
}

fn tunings(config: &Config) -> Vec<(String, Tuning)> {
    let model = configured_model::build(config, gpt2(), DType::F32).unwrap_or_else(|error| panic!("{error}"));
    model.parameters().iter().map(|parameter| (parameter.name().to_string(), parameter.tuning())).collect()
}

#[test]
fn the_first_group_that_selects_a_parameter_wins() {
    let tunings = tunings(&configured(GROUPS, ""));
    let of = |end: &str| {
        let found = tunings.iter().find(|(name, _)| name.ends_with(end)).unwrap_or_else(|| panic!("no {end}"));
        (found.1.lr_factor, found.1.weight_decay, found.1.betas)
    };
    // Each layer below the last multiplies the rate by 0.5. Depths are 0 for the embeddings, 1 and 2 for the blocks,
    // and 3 for the final norm.
    assert_eq!(of("wte.weight"), (0.125, None, None));
    assert_eq!(of("h.0.attn.c_attn.weight"), (0.25 * 0.5, None, Some((0.8, 0.95))));
    assert_eq!(of("h.0.attn.c_attn.bias"), (0.25 * 2.0, Some(0.05), None));
    assert_eq!(of("h.0.ln_1.weight"), (0.25 * 2.0, Some(0.05), None));
    assert_eq!(of("h.1.attn.c_attn.weight"), (0.5, None, None));
    assert_eq!(of("h.1.mlp.c_fc.weight"), (0.5, Some(0.3), None));
    assert_eq!(of("ln_f.bias"), (2.0, Some(0.05), None));
}

#[test]
fn kinds_and_layers_select_parameters() {
    let of_kind = |kind: &str| {
        let groups = format!("training: {{param_groups: [{{kinds: {kind}, lr_scale: 7}}]}}\n");
        let tunings = tunings(&configured(&groups, ""));
        let names = tunings.into_iter().filter(|(_, tuning)| tuning.lr_factor == 7.0).map(|(name, _)| name);
        names.collect::<Vec<_>>()
    };
    assert_eq!(of_kind("embedding"), ["transformer.wte.weight", "transformer.wpe.weight"]);
    assert_eq!(of_kind("norm").len(), 2 * (2 * 2 + 1));
    assert_eq!(of_kind("bias").len(), 2 * 6 + 1);
    let layers = configured("training: {param_groups: [{layers: [1], lr_scale: 7}]}\n", "");
    let selected = tunings(&layers).into_iter().filter(|(_, tuning)| tuning.lr_factor == 7.0);
    assert!(
        selected
            .map(|(name, _)| name)
            .eq(tunings(&layers).into_iter().map(|(name, _)| name).filter(|name| name.contains("h.1.")))
    );
}

/// With Muon, `lr_factor` is relative to `muon_lr`, also for parameters that AdamW updates. LoRA+ multiplies the rate
/// of a group.
#[test]
fn group_rates_with_muon_and_lora_plus() {
    let groups = "training: {param_groups: [{layers: [1], lr: 0.1}]}\n";
    let muon = configured(groups, "optimizer: {type: Muon, params: {muon_lr: 0.02, adam_lr: 0.004}}\n");
    let of = |tunings: &[(String, Tuning)], end: &str| {
        tunings.iter().find(|(name, _)| name.ends_with(end)).map(|(_, tuning)| tuning.lr_factor).unwrap()
    };
    let of_muon = tunings(&muon);
    assert_eq!(of(&of_muon, "h.1.attn.c_attn.weight"), 0.1 / 0.02);
    assert_eq!(of(&of_muon, "h.1.attn.c_attn.bias"), 0.1 / 0.02);
    assert_eq!(of(&of_muon, "h.0.attn.c_attn.weight"), 1.0);
    assert_eq!(of(&of_muon, "h.0.attn.c_attn.bias"), 0.004 / 0.02);
    let of_lora = tunings(&configured(groups, "adapter: {r: 2, loraplus_lr_ratio: 16}\n"));
    assert_eq!(of(&of_lora, "h.1.attn.c_attn.lora_A.weight"), 100.0);
    assert_eq!(of(&of_lora, "h.1.attn.c_attn.lora_B.weight"), 1600.0);
    assert_eq!(of(&of_lora, "h.0.attn.c_attn.lora_B.weight"), 16.0);
}

const PREAMBLE: &str = "
import json, torch, transformers
torch.set_num_threads(1)
torch.manual_seed(3)
common = dict(vocab_size=61, initializer_range=0.1)
def build(name):
    if name == 'GPT2': return transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, n_positions=16, n_embd=32,
        n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16))
def group(name, p):
    depth = 0 if 'embed' in name or 'wte' in name or 'wpe' in name else 3
    if '.0.' in name: depth = 1
    if '.1.' in name: depth = 2
    lr, options = 1e-3, dict(weight_decay=0.1 if p.dim() > 1 else 0.0)
    if p.dim() == 1: lr, options = 2e-3, dict(weight_decay=0.05)
    elif 'attn.' in name and depth == 1: lr, options = 5e-4, dict(weight_decay=0.1, betas=(0.8, 0.95))
    elif '.mlp.' in name: options = dict(weight_decay=0.3)
    return dict(params=[p], lr=lr * 0.5 ** (3 - depth), **options)
def case(name, folder, optimizer, **more):
    build(name).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().train()
    groups = [group(name, p) for name, p in model.named_parameters()]
    if 'betas' not in optimizer.__init__.__code__.co_varnames:
        for one in groups: one.pop('betas', None)
    optimizer, losses = optimizer(groups, lr=1e-3, **more), []
    for step in range(50):
        inputs, targets = tokens(step % 2, 4)
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
    print('result', json.dumps(losses))
";

/// Model, optimizer in Python with its arguments, and our optimizer.
const CASES: [[&str; 3]; 4] = [
    ["GPT2", "torch.optim.AdamW, eps=1e-6", "type: AdamW, params: {lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1}"],
    ["Llama", "torch.optim.AdamW, eps=1e-6", "type: AdamW, params: {lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1}"],
    ["Llama", "torch.optim.RAdam", "type: RAdam, params: {lr: 1.0e-3, weight_decay: 0.1}"],
    ["Llama", "torch.optim.SGD, momentum=0.9", "type: SGD, params: {lr: 1.0e-3, momentum: 0.9, weight_decay: 0.1}"],
];

#[test]
fn fifty_steps_agree_with_the_groups_of_pytorch() {
    fifty_steps_agree(&["torch", "transformers"], "", &CASES);
}

/// Compares losses with those of optimizers in Python. The Python code `definitions` may define these optimizers.
pub(crate) fn fifty_steps_agree(packages: &[&str], definitions: &str, cases: &[[&str; 3]]) {
    fifty_steps_agree_of(packages, definitions, cases, |_, layers| layers);
}

/// Like `fifty_steps_agree`, but `with_optimizer` may add an optimizer to the layers. It gets the optimizer's name in
/// Python.
pub(crate) fn fifty_steps_agree_of(
    packages: &[&str],
    definitions: &str,
    cases: &[[&str; 3]],
    with_optimizer: impl Fn(&str, Layers) -> Layers + Sync,
) {
    let root = tempfile::tempdir().unwrap();
    let folder = |index: usize| root.path().join(format!("{index}"));
    let mut script = TOKENS.to_string() + PREAMBLE + definitions;
    for (index, [model, optimizer, _]) in cases.iter().enumerate() {
        script += &format!("case({model:?}, {:?}, {optimizer})\n", folder(index));
    }
    let Some(theirs) = python(packages, &script) else { return };
    let theirs: Vec<Vec<f32>> = results(&theirs).map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(theirs.len(), cases.len());
    for (index, ([model, name, optimizer], theirs)) in cases.iter().zip(theirs).enumerate() {
        let mut groups = GROUPS.to_string();
        if ["SGD", "Adafactor", "Custom"].iter().any(|without| (name.to_string() + optimizer).contains(without)) {
            groups = groups.replace(", betas: [0.8, 0.95]", "");
        }
        let text = format!(
            "train_micro_batch_size_per_gpu: 2\ngradient_clipping: 0.5\noptimizer: {{{optimizer}}}\n\
             model: {{pretrained: {:?}}}\n{groups}\
             zero_optimization: {{stage: 3, stage3_param_persistence_threshold: 64}}",
            folder(index)
        );
        let losses = world(2, |comm| {
            let config =
                Config::with_world_size("test.yaml", &text, comm.size()).unwrap_or_else(|error| panic!("{error}"));
            let layers = with_optimizer(name, zero_engine::configured_layers(&config, None).unwrap());
            let mut engine = Engine::with_communicator(config, layers, comm).unwrap_or_else(|error| panic!("{error}"));
            (0..50).map(|step| engine.train_batch(&batch(step % 2, 4)).unwrap().loss).collect::<Vec<f32>>()
        });
        let losses = agreed(losses, name);
        let relative = relative_difference(&losses, &theirs);
        println!("{model}, {name}: losses differ by {relative:.1e} at most");
        assert!(relative < 1e-6, "{model}, {name}: {relative}");
        assert!(theirs[49] < 0.99 * theirs[0], "{model}, {name}: {theirs:?}");
    }
}

#[test]
fn every_layout_is_bit_identical() {
    let groups = GROUPS.replace("training:", "training:\n  reproducible: true");
    for optimizer in ["AdamW", "Muon", "Lamb"] {
        for dtype in ["", BF16] {
            let text = |stage: u8, replicas: usize, more: &str| {
                format!(
                    "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {}\n{groups}{dtype}\n{more}\n\
                     optimizer: {{type: {optimizer}, params: {{lr: 0.01, weight_decay: 0.1}}}}\n\
                     zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40}}",
                    4 / replicas
                )
            };
            let run = |ranks: usize, text: &str| run(ranks, 4, text);
            let expected = run(1, &text(0, 1, ""));
            for (ranks, stage) in [(2, 0), (2, 1), (4, 2), (4, 3)] {
                assert_same(&expected, &run(ranks, &text(stage, ranks, "")), &format!("{dtype} {stage} on {ranks}"));
            }
            let piped = text(1, 2, "pipeline: {stages: 2}");
            assert_same(&expected, &run(4, &piped), &piped);
            let on_host = text(2, 2, "").replace("stage: 2", "stage: 2, offload_optimizer: {device: cpu}");
            assert_same(&expected, &run(2, &on_host), &on_host);
            let folder = tempfile::tempdir().unwrap();
            let on_disk = offloaded(&text(3, 2, ""), folder.path());
            assert_same(&expected, &run(2, &on_disk), &on_disk);
        }
    }
}

#[test]
fn groups_without_effect_are_errors() {
    let error = |groups: &str| {
        let config = configured(&format!("training: {{param_groups: [{groups}]}}\n"), "");
        configured_model::build(&config, gpt2(), DType::F32).map(drop).unwrap_err().to_string()
    };
    let expect = |groups: &str, parts: &[&str]| {
        let error = error(groups);
        assert!(parts.iter().all(|part| error.contains(part)), "{groups}: {error}");
    };
    expect("{params: '*.q_proj.*', lr: 1}", &["param_groups.0.params", "`*.q_proj.*`", "some of the parameters are"]);
    expect("{params: '[', lr: 1}", &["param_groups.0.params", "`[`"]);
    expect("{layers: [0, 2], lr: 1}", &["param_groups.0.layers", "no block 2", "the blocks are 0–1"]);
    expect("{kinds: norm, params: '*.mlp.*', lr: 1}", &["param_groups.0", "selects no parameter"]);
    expect("{kinds: bias, lr: 1}, {params: '*.c_fc.bias', lr: 2}", &["param_groups.1", "earlier groups"]);
    expect("{kinds: head, lr: 1}", &["param_groups.0", "selects no parameter"]);
    let frozen = configured("training: {frozen: ['*.h.0.*'], param_groups: [{layers: [0], lr: 1}]}\n", "");
    let error = configured_model::build(&frozen, gpt2(), DType::F32).map(drop).unwrap_err().to_string();
    assert!(error.contains("are frozen"), "{error}");
}
