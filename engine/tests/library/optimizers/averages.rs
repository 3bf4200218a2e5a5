//! The moving average of the weights: equal to PyTorch's, bit-identical at every layout, saved, evaluated and exported.

use std::path::Path;

use candle_core::Device;
use zero_engine::{Engine, ExportDtype, Weights, export};

use crate::optimizers::eight_bit::ADAMW as EIGHT_BITS;
use crate::python::{python, results, small_llama};
use crate::sharding::on_disk::offloaded;
use crate::world::{
    BF16, Trajectory, agreed, assert_same, batch, configured_engine, engine, gpt2, relative_difference, reproducible,
    trajectory, world,
};

const MUON: &str = "optimizer: {type: Muon, params: {lr: 0.02, adam_lr: 0.003}}";
const ADAFACTOR: &str = "optimizer: {type: Adafactor, params: {lr: 0.02}}";
const LAMB: &str = "optimizer: {type: Lamb, params: {lr: 0.01}}";
const FREE: &str = "optimizer: {type: AdamWScheduleFree, params: {lr: 0.01, warmup_steps: 3, weight_decay: 0.1}}";
const EMA: &str = "ema: {decay: 0.8, start_step: 1}";

fn text(stage: u8, replicas: usize, more: &str) -> String {
    let text = reproducible(stage, replicas, more);
    // A schedule-free optimizer has an average of its own.
    if more.contains(FREE) { text } else { text.replace("training: {", &format!("training: {{{EMA}, ")) }
}

/// Returns losses, norms and parameters, and the averages.
fn observed(engine: &mut Engine, steps: u64) -> (Trajectory, Vec<Vec<u32>>) {
    let trajectory = trajectory(engine, steps);
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let names: Vec<String> =
        engine.model().parameters().iter().filter(|p| p.is_trainable()).map(|p| p.name().to_string()).collect();
    let of =
        |engine: &mut Engine| names.iter().map(|name| bits(engine.full_parameter(name).unwrap())).collect::<Vec<_>>();
    let averages = engine.with_averages(|engine| Ok(of(engine))).unwrap();
    // Evaluating the averages leaves the weights unchanged.
    let after: Vec<_> = trajectory
        .parameters
        .iter()
        .filter(|(name, _)| names.contains(name))
        .map(|(_, values)| values.clone())
        .collect();
    assert!(of(engine) == after);
    (trajectory, averages)
}

fn run(ranks: usize, text: &str) -> (Trajectory, Vec<Vec<u32>>) {
    agreed(world(ranks, |comm| observed(&mut engine(comm, text), 5)), text)
}

#[test]
fn every_layout_is_bit_identical_and_training_is_unchanged() {
    let free_in_bf16 = format!("{FREE}\n{BF16}");
    let free = [FREE, free_in_bf16.as_str(), EIGHT_BITS];
    for more in ["", BF16, MUON, LAMB, ADAFACTOR, "adapter: {r: 4}", "optimizer: {type: SGD, params: {lr: 0.1}}"]
        .into_iter()
        .chain(free)
    {
        let (expected, averages) = run(1, &text(0, 1, more));
        let plain = agreed(world(1, |comm| trajectory(&mut engine(comm, &reproducible(0, 1, more)), 5)), more);
        assert_same(&plain, &expected, &format!("{more}, without averages"));
        assert!(averages.iter().ne(expected.parameters.iter().map(|(_, values)| values)), "{more}");
        let same = |ranks: usize, text: &str| {
            let (got, got_averages) = run(ranks, text);
            assert_same(&expected, &got, text);
            assert!(got_averages == averages, "{text}: averages");
        };
        for (ranks, stage) in [(2, 0), (2, 1), (4, 2), (4, 3)] {
            same(ranks, &text(stage, ranks, more));
        }
        for (replicas, stage) in [(1, 0), (2, 1), (2, 3)] {
            same(2 * replicas, &text(stage, replicas, &format!("{more}\npipeline: {{stages: 2}}")));
        }
        same(2, &text(2, 2, more).replace("stage: 2", "stage: 2, offload_optimizer: {device: cpu}"));
        let folder = tempfile::tempdir().unwrap();
        same(2, &offloaded(&text(3, 2, more), folder.path()));
    }
}

/// Within `with_averages`, the loss equals that of an engine whose parameters are the averages.
#[test]
fn averages_are_evaluated() {
    let folder = tempfile::tempdir().unwrap();
    for (ranks, stage, more) in [
        (1, 0, ""),
        (2, 1, BF16),
        (2, 3, ""),
        (4, 1, "pipeline: {stages: 2}"),
        (2, 2, MUON),
        (1, 0, FREE),
        (2, 1, FREE),
        (2, 3, FREE),
        (4, 2, &format!("{FREE}\npipeline: {{stages: 2}}")),
        (2, 3, "# on a disk\nbf16: {enabled: true}"),
        (2, 2, &format!("# on a disk\n{FREE}")),
    ] {
        let text = text(stage, if more.contains("pipeline") { 2 } else { ranks }, more);
        let text = if more.starts_with('#') { offloaded(&text, folder.path()) } else { text };
        let losses = world(ranks, |comm| {
            let mut engine = engine(comm.clone(), &text);
            let loss = |engine: &mut Engine| engine.eval_batch(&batch(99, 1));
            assert!(!engine.has_averages());
            let before = loss(&mut engine).unwrap();
            assert_eq!(engine.with_averages(loss).unwrap(), before, "nothing is averaged yet");
            trajectory(&mut engine, 4);
            let (of_weights, of_averages) = (loss(&mut engine).unwrap(), engine.with_averages(loss).unwrap());
            assert_ne!(of_weights, of_averages);
            assert_eq!(loss(&mut engine).unwrap(), of_weights);
            let refused = engine.with_averages(|engine| {
                let folder = std::env::temp_dir();
                Ok([
                    engine.train_batch(&batch(5, engine.config().train_batch_size)).map(drop).unwrap_err(),
                    engine.save_checkpoint(&folder).map(drop).unwrap_err(),
                    engine.with_averages(|_| Ok(())).unwrap_err(),
                ])
            });
            assert!(refused.unwrap().iter().all(|error| error.to_string().contains("with_averages")));
            let names: Vec<String> = engine.model().parameters().iter().map(|p| p.name().to_string()).collect();
            let averages = engine.with_averages(|engine| {
                names.iter().map(|name| engine.full_parameter(name)).collect::<Result<Vec<_>, _>>()
            });
            let averages = averages.unwrap();
            for (name, values) in names.iter().zip(averages) {
                engine.set_parameter(name, &values).unwrap();
            }
            assert_eq!(loss(&mut engine).unwrap(), of_averages);
            of_averages.to_bits()
        });
        agreed(losses, &text);
    }
}

fn exported(folder: &Path, averaged: bool) -> Vec<(String, Vec<f32>)> {
    let out = tempfile::tempdir().unwrap();
    export(folder, &out.path().join("out"), Weights { dtype: ExportDtype::F32, max_shard_bytes: 1 << 30, averaged })
        .unwrap();
    let tensors = candle_core::safetensors::load(out.path().join("out/model.safetensors"), &Device::Cpu).unwrap();
    let values = |tensor: candle_core::Tensor| tensor.flatten_all().unwrap().to_vec1().unwrap();
    let mut tensors: Vec<_> = tensors.into_iter().map(|(name, tensor)| (name, values(tensor))).collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

#[test]
fn averages_are_saved_and_exported() {
    for more in ["", FREE] {
        saved_and_exported(more);
    }
}

fn saved_and_exported(more: &str) {
    let root = tempfile::tempdir().unwrap();
    let (whole, averages) = run(1, &text(0, 1, more));
    let saved = world(2, |comm| {
        let mut engine = engine(comm, &text(3, 2, more));
        trajectory(&mut engine, 3);
        engine.save_checkpoint(root.path()).unwrap()
    })
    .remove(0);
    for (ranks, stage) in [(1, 0), (4, 1)] {
        for (rest, got) in world(ranks, |comm| {
            let mut engine = engine(comm, &text(stage, ranks, more));
            engine.resume(root.path()).unwrap();
            observed(&mut engine, 2)
        }) {
            assert_eq!(rest.losses, whole.losses[3..]);
            assert!(rest.parameters == whole.parameters && got == averages, "stage {stage}");
        }
    }
    let mut of_engine = world(1, |comm| {
        let mut engine = engine(comm, &text(0, 1, more));
        engine.resume(root.path()).unwrap();
        engine
            .with_averages(|engine| {
                let names: Vec<String> = engine.model().parameters().iter().map(|p| p.name().to_string()).collect();
                names
                    .into_iter()
                    .map(|name| Ok((name.clone(), engine.full_parameter(&name)?)))
                    .collect::<Result<Vec<_>, _>>()
            })
            .unwrap()
    })
    .remove(0);
    of_engine.sort_by(|a, b| a.0.cmp(&b.0));
    let [weights, averages] = [false, true].map(|averaged| exported(&saved, averaged));
    if more == FREE {
        // Exports of a schedule-free run always contain the averages, because the weights at which such a run computes
        // gradients are not meant for evaluation.
        assert!(averages == of_engine && weights == of_engine);
        let model = gpt2().build(candle_core::DType::F32).unwrap();
        zero_checkpoint::fill_from_checkpoint(&saved, &model).unwrap();
        for (name, values) in &of_engine {
            let parameter = model.parameters().iter().find(|parameter| parameter.name() == name).unwrap();
            assert_eq!(parameter.leaf().flatten_all().unwrap().to_vec1::<f32>().unwrap(), *values, "{name}");
        }
        return;
    }
    assert!(averages == of_engine && averages != weights);

    let without = world(1, |comm| {
        let mut engine = engine(comm, &reproducible(0, 1, ""));
        trajectory(&mut engine, 1);
        engine.save_checkpoint(root.path().join("without")).unwrap()
    })
    .remove(0);
    let weights = Weights { dtype: ExportDtype::F32, max_shard_bytes: 1 << 30, averaged: true };
    let error = export(&without, &root.path().join("none"), weights).unwrap_err().to_string();
    assert!(error.contains("no averaged weights") && error.contains("training.ema"), "{error}");
}

#[test]
fn fifty_steps_agree_with_pytorch() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("base");
    let script = small_llama()
        + &format!(
            "
import json
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
model = llama({folder:?})
def loss(model, step):
    inputs, targets = tokens(step, 4)
    return torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1)
average, losses = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), []
for step in range(50):
    loss(model, step % 2).backward()
    optimizer.step(); optimizer.zero_grad()
    if step >= 5: average.update_parameters(model)
    with torch.no_grad(): losses.append(loss(average if step >= 5 else model, 0).item())
print('result', json.dumps(losses))
"
        );
    let Some(theirs) = python(&["torch", "transformers"], &script) else { return };
    let theirs: Vec<f32> = serde_json::from_str(results(&theirs).next().unwrap()).unwrap();
    let text = format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_clipping: 0\nmodel: {{pretrained: {folder:?}}}\n\
         optimizer: {{type: AdamW, params: {{lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1}}}}\n\
         training: {{weight_decay_on: all, ema: {{decay: 0.9, start_step: 5}}}}\nzero_optimization: {{stage: 2}}"
    );
    let losses = world(2, |comm| {
        let mut engine = configured_engine(comm.clone(), &text);
        let half = batch(0, 4).narrow(2 * comm.rank(), 2).unwrap();
        let losses = (0..50).map(|step| {
            engine.train_batch(&batch(step % 2, 4)).unwrap();
            engine.with_averages(|engine| engine.eval_batch(&half)).unwrap()
        });
        losses.collect::<Vec<f32>>()
    });
    let losses = agreed(losses, "averages");
    let relative = relative_difference(&losses, &theirs);
    println!("losses of the averages differ by {relative:.1e} at most");
    assert!(relative < 1e-6, "{relative}\n{losses:?}\n{theirs:?}");
}

/// Compares the losses of 50 steps, and the losses of the averages, with those of the package that the method's authors
/// published.
#[test]
fn schedule_free_steps_agree_with_the_package() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("base");
    let script = small_llama()
        + &format!(
            "
import json
from schedulefree import AdamWScheduleFree
model = llama({folder:?})
def loss(model, step):
    inputs, targets = tokens(step, 4)
    return torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
optimizer, losses = AdamWScheduleFree(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1, warmup_steps=10, r=0.5), []
for step in range(50):
    optimizer.train()
    of_step = loss(model, step % 2)
    of_step.backward()
    optimizer.step(); optimizer.zero_grad()
    optimizer.eval()
    with torch.no_grad(): losses += [of_step.item(), loss(model, 0).item()]
print('result', json.dumps(losses))
"
        );
    let Some(theirs) = python(&["torch", "transformers", "schedulefree"], &script) else { return };
    let theirs: Vec<f32> = serde_json::from_str(results(&theirs).next().unwrap()).unwrap();
    let text = format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_clipping: 0\nmodel: {{pretrained: {folder:?}}}\n\
         optimizer: {{type: AdamWScheduleFree, params: {{lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1, warmup_steps: 10, \
         r: 0.5}}}}\ntraining: {{weight_decay_on: all}}\nzero_optimization: {{stage: 2}}"
    );
    let losses = world(2, |comm| {
        let mut engine = configured_engine(comm.clone(), &text);
        let half = batch(0, 4).narrow(2 * comm.rank(), 2).unwrap();
        let losses = (0..50).flat_map(|step| {
            let of_step = engine.train_batch(&batch(step % 2, 4)).unwrap().loss;
            [of_step, engine.with_averages(|engine| engine.eval_batch(&half)).unwrap()]
        });
        losses.collect::<Vec<f32>>()
    });
    let losses = agreed(losses, "schedule-free");
    let relative = relative_difference(&losses, &theirs);
    println!("losses differ by {relative:.1e} at most");
    assert!(relative < 1e-6, "{relative}\n{losses:?}\n{theirs:?}");
}
