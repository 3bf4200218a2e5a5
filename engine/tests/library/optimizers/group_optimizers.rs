//! Groups with their own optimizer or clipping: the losses match PyTorch on the same groups, and runs are bit-identical
//! in every layout, resume in another one, and have the planned bytes of state.

use candle_core::DType;
use zero_checkpoint::Manifest;
use zero_config::Config;
use zero_engine::{Engine, configured_model, parameter_groups};

use crate::python::{TOKENS, python, results};
use crate::sharding::bytes::{assert_optimizer_state, state_values};
use crate::sharding::on_disk::offloaded;
use crate::world::{
    BF16, FP16, agreed, assert_same, batch, configured_engine, engine, gpt2, relative_difference, reproducible, resume,
    run, save, trajectory, world,
};

/// Element-wise optimizers with two states, one state and none.
pub(crate) const BY_ELEMENTS: &str = "\
    {kinds: embedding, optimizer: {type: SGD, params: {lr: 0.05, momentum: 0.9}}}, \
    {params: '*.h.0.mlp.*', optimizer: {type: Lion, params: {lr: 0.001, weight_decay: 0.2}}}, \
    {params: '*.h.0.attn.*', layers: [0], lr_scale: 0.5, betas: [0.8, 0.95]}, \
    {params: '*.h.1.attn.c_proj.*', optimizer: {type: RMSprop, params: {lr: 0.002, weight_decay: 0.3}}}, \
    {kinds: norm, optimizer: {type: SGD, params: {lr: 0.02}}}";

/// Optimizers that update whole parameters.
pub(crate) const OF_WHOLE: &str = "\
    {params: '*.wpe.*', optimizer: {type: Adafactor, params: {lr: 0.02}}}, \
    {params: ['*.h.0.mlp.c_fc.*', '*.h.1.mlp.*'], optimizer: {type: Muon, params: {lr: 0.02, adam_lr: 0.003}}}, \
    {params: '*.h.0.mlp.c_proj.*', optimizer: {type: Lamb, params: {lr: 0.01, weight_decay: 0.1}}}, \
    {kinds: norm, optimizer: {type: SGD, params: {lr: 0.02}}}";

/// Returns keys for `world::config`, for a run whose bits do not depend on the layout.
fn keys(groups: &str, stage: u8, replicas: usize, more: &str) -> String {
    let groups = format!("reproducible: true, param_groups: [{groups}]");
    reproducible(stage, replicas, more).replace("reproducible: true", &groups)
}

#[test]
fn fifty_steps_agree_with_pytorch() {
    const SCRIPT: &str = "
import json, transformers
torch.set_num_threads(1)
torch.manual_seed(3)
def case(folder, of, clip=lambda model, groups: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)):
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=61, initializer_range=0.1, n_positions=16, n_embd=32,
        n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().train()
    groups = {}
    for name, p in model.named_parameters(): groups.setdefault(of(name, p), []).append(p)
    of_name = dict(
        adamw=lambda ps: torch.optim.AdamW([dict(params=[p], weight_decay=0.1 if p.dim() > 1 else 0.0) for p in ps], lr=1e-3, eps=1e-6),
        sgd=lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9),
        plain=lambda ps: torch.optim.SGD(ps, lr=0.01, weight_decay=0.1),
        adafactor=lambda ps: torch.optim.Adafactor(ps, lr=0.01),
        radam=lambda ps: torch.optim.RAdam(ps, lr=2e-3, weight_decay=0.05))
    optimizers, losses = [of_name[name](ps) for name, ps in groups.items()], []
    for step in range(50):
        inputs, targets = tokens(step % 2, 4)
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        clip(model, groups)
        for optimizer in optimizers: optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
    print('result', json.dumps(losses))
";
    let cases = [
        (
            "lambda name, p: 'sgd' if 'wte' in name or 'wpe' in name else 'adamw'",
            "{kinds: embedding, optimizer: {type: SGD, params: {lr: 0.02, momentum: 0.9}}}",
        ),
        (
            "lambda name, p: 'plain' if 'ln_' in name else 'radam' if '.mlp.' in name and p.dim() > 1 else 'adafactor' if 'wpe' in name \
             else 'adamw'",
            "{kinds: norm, optimizer: {type: SGD, params: {lr: 0.01, weight_decay: 0.1}}}, \
             {params: '*.mlp.*.weight', optimizer: {type: RAdam, params: {lr: 2.0e-3, weight_decay: 0.05}}}, \
             {params: '*wpe*', optimizer: {type: Adafactor, params: {lr: 0.01}}}",
        ),
        // `plain` is clipped by value, `sgd` by its norm, `radam` not at all, and the rest by its norm.
        (
            "lambda name, p: 'plain' if 'ln_' in name else 'radam' if '.mlp.' in name and p.dim() > 1 else 'sgd' if 'wpe' in name \
             else 'adamw', lambda model, groups: (torch.nn.utils.clip_grad_value_(groups['plain'], 0.01), \
             torch.nn.utils.clip_grad_norm_(groups['sgd'], 0.05), torch.nn.utils.clip_grad_norm_(groups['adamw'], 0.5))",
            "{kinds: norm, gradient_clipping_value: 0.01, optimizer: {type: SGD, params: {lr: 0.01, weight_decay: 0.1}}}, \
             {params: '*.mlp.*.weight', gradient_clipping: 0, optimizer: {type: RAdam, params: {lr: 2.0e-3, weight_decay: 0.05}}}, \
             {params: '*wpe*', gradient_clipping: 0.05, optimizer: {type: SGD, params: {lr: 0.02, momentum: 0.9}}}",
        ),
    ];
    let root = tempfile::tempdir().unwrap();
    let folder = |index: usize| root.path().join(format!("{index}"));
    let mut script = TOKENS.to_string() + SCRIPT;
    for (index, (of, _)) in cases.iter().enumerate() {
        script += &format!("case({:?}, {of})\n", folder(index));
    }
    let Some(theirs) = python(&["torch", "transformers"], &script) else { return };
    let theirs: Vec<Vec<f32>> = results(&theirs).map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(theirs.len(), cases.len());
    for (index, ((_, groups), theirs)) in cases.iter().zip(theirs).enumerate() {
        let text = format!(
            "train_micro_batch_size_per_gpu: 2\ngradient_clipping: 0.5\n\
             optimizer: {{type: AdamW, params: {{lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1}}}}\n\
             training: {{param_groups: [{groups}]}}\nmodel: {{pretrained: {:?}}}\n\
             zero_optimization: {{stage: 3, stage3_param_persistence_threshold: 64}}",
            folder(index)
        );
        let trained = |text: &str| {
            let losses = world(2, |comm| {
                let mut engine = configured_engine(comm, text);
                (0..50).map(|step| engine.train_batch(&batch(step % 2, 4)).unwrap().loss).collect::<Vec<f32>>()
            });
            agreed(losses, text)
        };
        let losses = trained(&text);
        let relative = relative_difference(&losses, &theirs);
        println!("{groups}: losses differ by {relative:.1e} at most");
        assert!(relative < 1e-6, "{groups}: {relative}");
        assert!(theirs[49] < 0.99 * theirs[0], "{groups}: {theirs:?}");
        for clipping in ["gradient_clipping_value: 0.01, ", "gradient_clipping: 0, ", "gradient_clipping: 0.05, "] {
            if groups.contains(clipping) {
                let without = relative_difference(&trained(&text.replace(clipping, "")), &theirs);
                assert!(without > 1e-4, "{clipping} has no effect: {without}");
            }
        }
    }
}

#[test]
fn every_layout_is_bit_identical() {
    for groups in [BY_ELEMENTS, OF_WHOLE] {
        for more in ["", BF16, "training_ema"] {
            let text = |stage: u8, replicas: usize, extra: &str| {
                let (more, groups) = match more {
                    "training_ema" => ("", format!("{groups}], ema: {{decay: 0.9}}, frozen: ['*.h.1.ln_2.*'")),
                    more => (more, groups.to_string()),
                };
                // `keys` appends the bracket that closes the last list in `groups`.
                keys(&groups, stage, replicas, &format!("{more}\n{extra}"))
            };
            let expected = run(1, 6, &text(0, 1, ""));
            assert_ne!(expected.losses[0], expected.losses[5]);
            for ranks in [1, 2, 4] {
                for stage in 0..=3 {
                    assert_same(
                        &expected,
                        &run(ranks, 6, &text(stage, ranks, "")),
                        &format!("{more} {stage} on {ranks}"),
                    );
                }
            }
            for (replicas, stage) in [(1, 0), (2, 1), (2, 3)] {
                let piped = text(stage, replicas, "pipeline: {stages: 2}");
                assert_same(&expected, &run(2 * replicas, 6, &piped), &piped);
            }
            let on_host = text(2, 2, "").replace("stage: 2", "stage: 2, offload_optimizer: {device: cpu}");
            assert_same(&expected, &run(2, 6, &on_host), &on_host);
            let folder = tempfile::tempdir().unwrap();
            let on_disk = offloaded(&text(3, 2, ""), folder.path());
            assert_same(&expected, &run(2, 6, &on_disk), &on_disk);
        }
    }
}

/// The norm of a group is bit-identical in every layout. The reported norm covers all gradients.
#[test]
fn clipping_of_groups_is_bit_identical() {
    const CLIPPED: &str = "{kinds: embedding, gradient_clipping: 0.05}, {layers: [0], gradient_clipping_value: 0.001, lr_scale: 0.5}, \
        {params: '*.h.1.mlp.*', gradient_clipping: 0, optimizer: {type: Lamb, params: {lr: 0.01}}}";
    for more in ["", BF16, FP16] {
        let whole = run(1, 6, &reproducible(0, 1, more));
        let expected = run(1, 6, &keys(CLIPPED, 0, 1, more));
        assert_eq!(whole.norms[0], expected.norms[0], "{more}");
        assert_ne!(whole.parameters, expected.parameters, "{more}");
        for (ranks, stage) in [(2, 0), (2, 1), (4, 2), (4, 3)] {
            let got = run(ranks, 6, &keys(CLIPPED, stage, ranks, more));
            assert_same(&expected, &got, &format!("{more} {stage} on {ranks}"));
        }
        let piped = keys(CLIPPED, 3, 2, &format!("{more}\npipeline: {{stages: 2}}"));
        assert_same(&expected, &run(4, 6, &piped), &piped);
        let folder = tempfile::tempdir().unwrap();
        let on_disk = offloaded(&keys(CLIPPED, 2, 2, more), folder.path());
        assert_same(&expected, &run(2, 6, &on_disk), &on_disk);
    }
}

/// A clipping limit of a group that contains all parameters has the same effect as that limit for the whole run.
#[test]
fn clipping_one_group_of_all_parameters_clips_the_run() {
    for (of_group, of_run) in [
        ("gradient_clipping: 0.2", "gradient_clipping: 0.2"),
        ("gradient_clipping_value: 0.001", "gradient_clipping: 0\ngradient_clipping_value: 0.001"),
        ("gradient_clipping: 0", "gradient_clipping: 0"),
    ] {
        let trained = |text: String| {
            let text = format!("train_batch_size: 4\noptimizer: {{type: AdamW, params: {{lr: 0.01}}}}\n{text}");
            let config = Config::with_world_size("test.yaml", text, 1).unwrap_or_else(|error| panic!("{error}"));
            let comm = zero_engine::comm::threads(1, &Default::default()).remove(0);
            trajectory(&mut Engine::with_communicator(config, gpt2(), comm).unwrap(), 4)
        };
        let group = format!("gradient_clipping: 0.01\ntraining: {{param_groups: [{{params: '*', {of_group}}}]}}");
        assert_same(&trained(of_run.to_string()), &trained(group), of_group);
    }
}

/// Muon as the optimizer of a group equals Muon as the optimizer of the run, which uses AdamW for the other parameters.
#[test]
fn muon_in_a_group_matches_the_muon_optimizer() {
    let muon = "optimizer: {type: Muon, params: {muon_lr: 0.02, adam_lr: 0.0025, weight_decay: 0.1}}";
    let expected = run(1, 6, &reproducible(0, 1, muon));
    let group = "{params: ['*.attn.*.weight', '*.mlp.*.weight'], optimizer: {type: Muon, params: {lr: 0.02, weight_decay: 0.1}}}";
    let adamw = "optimizer: {type: AdamW, params: {lr: 0.0025, weight_decay: 0.1}}";
    for (ranks, stage) in [(1, 0), (2, 3)] {
        assert_same(&expected, &run(ranks, 6, &keys(group, stage, ranks, adamw)), "Muon in a group");
    }
}

#[test]
fn a_run_is_resumed_in_another_layout() {
    for groups in [BY_ELEMENTS, OF_WHOLE] {
        let whole = run(1, 6, &keys(groups, 0, 1, ""));
        for (from, to) in
            [((2, 3, 1), (1, 0, 1)), ((1, 0, 1), (4, 3, 1)), ((2, 2, 2), (2, 1, 1)), ((4, 3, 1), (4, 1, 2))]
        {
            let folder = tempfile::tempdir().unwrap();
            let text = |(ranks, stage, pipes): (usize, u8, usize)| {
                keys(groups, stage, ranks / pipes, &format!("pipeline: {{stages: {pipes}}}"))
            };
            save((from.0, 3), folder.path(), |comm| engine(comm, &text(from)));
            let rest = resume((to.0, 3), folder.path(), |comm| engine(comm, &text(to)));
            assert_same(&whole.after(3), &rest, &format!("{from:?} to {to:?}"));
        }
    }
}

/// The order of the groups affects only the order in which a checkpoint names the states.
#[test]
fn a_run_is_resumed_with_its_groups_in_another_order() {
    let groups = [
        "{params: '*.wte.*', optimizer: {type: SGD, params: {lr: 0.1, momentum: 0.9}}}",
        "{params: '*.mlp.*', optimizer: {type: RMSprop, params: {lr: 0.002, momentum: 0.5}}}",
        "{kinds: norm, optimizer: {type: Adagrad, params: {lr: 0.01}}}",
    ];
    let [before, after] = [[0, 1, 2], [2, 1, 0]].map(|order| order.map(|index| groups[index]).join(", "));
    let whole = run(1, 6, &keys(&before, 0, 1, ""));
    let folder = tempfile::tempdir().unwrap();
    save((2, 3), folder.path(), |comm| engine(comm, &keys(&before, 3, 2, "")));
    let rest = resume((1, 3), folder.path(), |comm| engine(comm, &keys(&after, 0, 1, "")));
    assert_same(&whole.after(3), &rest, "in another order");
}

/// A checkpoint with the same set of states is rejected if the group's optimizer updated other parameters.
#[test]
fn another_optimizer_of_a_group_is_refused_on_resume() {
    let folder = tempfile::tempdir().unwrap();
    let text = |selected: &str| {
        let group = format!("{{params: '{selected}', optimizer: {{type: SGD, params: {{momentum: 0.9}}}}}}");
        keys(&group, 0, 1, "")
    };
    let saved = save((1, 1), folder.path(), |comm| engine(comm, &text("*.wte.*")));
    assert_eq!(zero_checkpoint::verify(&saved), []);
    let errors = world(1, |comm| engine(comm, &text("*.wpe.*")).resume(folder.path()).unwrap_err().to_string());
    for part in ["wte.weight", "exp_avg", "momentum_buffer"] {
        assert!(errors[0].contains(part), "{part}: {errors:?}");
    }
}

/// The states of a parameter depend on its optimizer, in memory, in plans and in checkpoints.
#[test]
fn bytes_match_the_formula() {
    let values = |parameter: &zero_model::Parameter| {
        let (name, elements) = (parameter.name(), parameter.elements());
        let is_norm = name.contains("ln_");
        match () {
            () if name.contains("wte") || name.contains("wpe") => elements,
            () if name.contains("h.0.mlp") || name.contains("h.1.attn.c_proj") => elements,
            () if is_norm => 0,
            () => 2 * elements,
        }
    };
    for (ranks, stage, ema) in [(1, 0, false), (2, 0, false), (2, 1, true), (2, 2, false), (4, 3, true)] {
        let folder = tempfile::tempdir().unwrap();
        let groups =
            if ema { format!("{BY_ELEMENTS}], ema: {{decay: 0.9}}, frozen: [") } else { BY_ELEMENTS.to_string() };
        let text = keys(&groups, stage, ranks, "");
        let of_ranks = world(ranks, |comm| {
            let mut engine = engine(comm, &text);
            engine.train_batch(&batch(0, 4)).unwrap();
            engine.save_checkpoint(folder.path()).unwrap();
            let held = assert_optimizer_state(&engine, &text);
            assert_eq!(held, 4 * state_values(engine.zero()), "{text}");
            let averaged = if ema { engine.model().elements() } else { 0 };
            (held, engine.model().parameters().iter().map(values).sum::<usize>() + averaged, engine.model().elements())
        });
        let copies = if stage == 0 { ranks } else { 1 };
        let (_, states, parameters) = of_ranks[0];
        assert_eq!(of_ranks.iter().map(|(held, ..)| held).sum::<u64>(), (4 * states * copies) as u64, "{text}");
        let step = zero_checkpoint::newest(folder.path()).unwrap().unwrap();
        assert_eq!(zero_checkpoint::verify(&step), []);
        let manifest = Manifest::read(&step).unwrap();
        let stored = manifest.parameters.values().map(|entry| entry.stored_values(manifest.states.len()));
        assert_eq!(stored.sum::<usize>(), parameters + states, "{text}");
    }
}

/// A run prints these lines when it starts.
#[test]
fn the_run_prints_its_parameter_groups() {
    let groups = "{kinds: norm, optimizer: {type: SGD, params: {lr: 0.02}}, gradient_clipping: 0}, \
                  {kinds: embedding, gradient_clipping: 0.5}";
    let text = format!("train_batch_size: 1\ntraining: {{param_groups: [{groups}]}}");
    let config = Config::with_world_size("test.yaml", text, 1).unwrap_or_else(|error| panic!("{error}"));
    let model = configured_model::build(&config, gpt2(), DType::F32).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        parameter_groups::described(&config, &model).unwrap(),
        [
            "group 0: 320 parameters in 10 tensors, SGD with lr 0.02, gradients not clipped",
            "group 1: 2,464 parameters in 2 tensors, gradient norm of at most 0.5",
            "no group: 16,832 parameters in 16 tensors",
        ]
    );
}

#[test]
fn groups_that_cannot_be_updated_are_errors() {
    let error = |groups: &str, more: &str| {
        let text = format!("train_batch_size: 1\n{more}\ntraining: {{param_groups: [{groups}]}}");
        let config = Config::with_world_size("test.yaml", text, 1).unwrap_or_else(|error| panic!("{error}"));
        configured_model::build(&config, gpt2(), DType::F32).map(drop).unwrap_err().to_string()
    };
    let sgd = "optimizer: {type: SGD}";
    let expect = |groups: &str, more: &str, parts: &[&str]| {
        let error = error(groups, more);
        assert!(parts.iter().all(|part| error.contains(part)), "{groups}: {error}");
    };
    expect(&format!("{{params: '*.q_proj.*', {sgd}}}"), "", &["param_groups.0.params", "`*.q_proj.*`"]);
    expect(&format!("{{kinds: head, {sgd}}}"), "", &["param_groups.0", "selects no parameter"]);
    expect(&format!("{{params: '*', {sgd}}}"), "", &["in: optimizer", "groups with their own optimizers"]);
    let muon = "{kinds: norm, optimizer: {type: Muon}}";
    expect(muon, "", &["param_groups.0.optimizer.params.matrices", "no trainable matrix"]);
    let wrong = "{layers: [0], optimizer: {type: Muon, params: {matrices: ['*.h.1.mlp.c_fc.weight']}}}";
    expect(wrong, "", &["param_groups.0.optimizer.params.matrices", "no parameter that matches"]);
}
