//! Buffers of modules: BatchNorm's running statistics are updated in training, equal on all ranks, loaded, saved and
//! exported, but have no gradient.

use std::fs;

use candle_core::{Device, Result, Tensor};
use candle_nn::{BatchNorm, Func, Module, ModuleT, VarBuilder, batch_norm, linear};
use zero_engine::ops::{self, cross_entropy};
use zero_engine::{Activations, Batch, Engine, ExportDtype, Layer, Layers, Pass, Weights};

use crate::python::python;
use crate::world::{engine_of, world};

/// candle's BatchNorm, in training mode if the pass trains. If the flag is set, it is always in training mode.
struct Norm(BatchNorm, bool);

impl Layer for Norm {
    fn run(&self, x: &Activations, pass: &Pass) -> Result<Activations> {
        Ok(self.0.forward_t(x.single()?, pass.training || self.1)?.into())
    }
}

/// A linear layer, a norm, and a linear layer.
fn model<L: Layer + 'static>(norm: impl Fn(VarBuilder<'static>) -> Result<L> + Send + Sync + 'static) -> Layers {
    let head = |vb: VarBuilder<'static>| -> Result<Func<'static>> {
        let last = linear(8, 3, vb)?;
        Ok(Func::new(move |x| last.forward(x)))
    };
    // Inputs are f32, whatever the dtype of the parameters.
    let first = |vb: VarBuilder<'static>| -> Result<Func<'static>> {
        let (dtype, first) = (vb.dtype(), linear(4, 8, vb)?);
        Ok(Func::new(move |x| first.forward(&x.to_dtype(dtype)?)))
    };
    Layers::new().layer("first", first).layer("norm", norm).layer("head", head).loss(cross_entropy)
}

fn of_candle() -> Layers {
    model(|vb| Ok(Norm(batch_norm(8, 1e-5, vb)?, false)))
}

fn of_ops() -> Layers {
    model(|vb| ops::BatchNorm::new(8, 1e-5, 0.1, vb))
}

/// Returns the samples of a step, which differ from those of other steps.
fn batch(step: usize, samples: usize) -> Batch {
    let values: Vec<f32> = (0..samples * 4).map(|i| ((i + step * 31) * 7 % 13) as f32 / 3.0 - 2.0).collect();
    let classes: Vec<u32> = (0..samples).map(|i| ((i + step) % 3) as u32).collect();
    Batch::new(
        Tensor::from_vec(values, (samples, 4), &Device::Cpu).unwrap(),
        Tensor::from_vec(classes, samples, &Device::Cpu).unwrap(),
    )
}

/// Bits of a run: the losses, then the values of all buffers, then the values of one parameter.
#[derive(Debug, PartialEq, Eq, Clone)]
struct Bits(Vec<u32>);

fn bits(values: impl IntoIterator<Item = f32>) -> Bits {
    Bits(values.into_iter().map(f32::to_bits).collect())
}

const STEPS: usize = 6;

/// Trains steps of 16 samples, and returns the bits of each rank.
fn trained(ranks: usize, model: fn() -> Layers, text: &str) -> Vec<Bits> {
    world(ranks, |comm| {
        let text = format!("train_batch_size: 16\n{text}");
        let mut engine = engine_of(model(), comm, &text);
        let mut seen: Vec<f32> = (0..STEPS).map(|step| engine.train_batch(&batch(step, 16)).unwrap().loss).collect();
        seen.push(engine.eval_batch(&batch(9, 4)).unwrap());
        assert!(engine.model().buffers().iter().all(|buffer| buffer.values().iter().all(|x| x.is_finite())));
        assert_ne!(engine.model().buffers()[0].values(), [0.0; 8]);
        assert_ne!(engine.model().buffers()[1].values(), [1.0; 8]);
        seen.extend(engine.model().buffers().iter().flat_map(|buffer| buffer.values()));
        seen.extend(engine.full_parameter("first.weight").unwrap());
        bits(seen)
    })
}

/// Steps have four micro-batches of 4 samples, on any number of ranks.
#[test]
fn running_statistics_do_not_depend_on_the_layout() {
    let text = "train_micro_batch_size_per_gpu: 4\ntraining: {reproducible: true}\n";
    for model in [of_candle, of_ops] {
        let expected = trained(1, model, text)[0].clone();
        for ranks in [1, 2, 4] {
            for more in ["", "zero_optimization: {stage: 1}\n", "zero_optimization: {stage: 3}\n"] {
                for again in ["", "activation_checkpointing: {interval: 2}\n"] {
                    let got = trained(ranks, model, &format!("{text}{more}{again}"));
                    assert!(got.iter().all(|got| *got == expected), "{ranks} ranks, {more}{again}");
                }
            }
        }
        let got = trained(4, model, &format!("{text}pipeline: {{stages: 2}}\nzero_optimization: {{stage: 1}}\n"));
        assert!(got.iter().all(|got| *got == expected), "two pipeline stages");
    }
}

/// By default, gradients of micro-batches are added in the order of the program.
#[test]
fn recomputation_updates_statistics_once() {
    for more in ["", "bf16: {enabled: true}\n"] {
        for ranks in [1, 2] {
            let text = format!("train_micro_batch_size_per_gpu: 2\n{more}");
            let plain = trained(ranks, of_ops, &text);
            assert!(plain.iter().all(|rank| *rank == plain[0]), "all ranks have the same values");
            assert_eq!(plain, trained(ranks, of_ops, &format!("{text}activation_checkpointing: {{}}\n")));
        }
    }
}

const FOUR: &str = "train_batch_size: 16\ntrain_micro_batch_size_per_gpu: 4\ntraining: {reproducible: true}\n";

#[test]
fn a_run_resumes_with_its_statistics_on_other_ranks() {
    let root = tempfile::tempdir().unwrap();
    let state = |engine: &mut Engine| {
        let next = engine.train_batch(&batch(3, 16)).unwrap().loss;
        bits(engine.model().buffers().iter().flat_map(|buffer| buffer.values()).chain([next]))
    };
    let expected = world(1, |comm| {
        let mut engine = engine_of(of_ops(), comm, FOUR);
        for step in 0..3 {
            engine.train_batch(&batch(step, 16)).unwrap();
        }
        engine.save_checkpoint(root.path()).unwrap();
        state(&mut engine)
    });
    for (ranks, zero_stage) in [(1, 0), (2, 3), (4, 1)] {
        let text = format!("{FOUR}zero_optimization: {{stage: {zero_stage}}}\n");
        let got = world(ranks, |comm| {
            let mut engine = engine_of(of_ops(), comm, &text);
            engine.resume(root.path()).unwrap();
            state(&mut engine)
        });
        assert!(got.iter().all(|got| *got == expected[0]), "{ranks} ranks");
    }
}

/// In f16, the first steps overflow and are skipped.
#[test]
fn a_skipped_step_leaves_the_statistics() {
    world(2, |comm| {
        let text = "train_batch_size: 16\nfp16: {enabled: true, initial_scale_power: 30, hysteresis: 1}\n";
        let mut engine = engine_of(of_ops(), comm, text);
        let mut skipped = 0;
        for step in 0..30 {
            let values = |engine: &Engine| engine.model().buffers().iter().map(|b| b.values()).collect::<Vec<_>>();
            let before = values(&engine);
            let skips = engine.train_batch(&batch(step, 16)).unwrap().skipped;
            assert_eq!(skips, before == values(&engine), "step {step}");
            skipped += usize::from(skips);
        }
        assert!((1..30).contains(&skipped), "{skipped} steps were skipped");
    });
}

/// Files of weights contain the statistics and `num_batches_tracked` under PyTorch's names.
#[test]
fn initial_weights_load_running_statistics() {
    let root = tempfile::tempdir().unwrap();
    let weights = root.path().join("weights.safetensors");
    let zeros = |shape: &[usize]| Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
    let mean = [0.5f32, -0.25, 0.125, 0.0, 1.0, 0.1, 0.2, 0.3];
    let tensors = [
        ("first.weight", Tensor::arange(0f32, 32.0, &Device::Cpu).unwrap().reshape((8, 4)).unwrap()),
        ("first.bias", zeros(&[8])),
        ("norm.weight", zeros(&[8]).affine(1.0, 1.0).unwrap()),
        ("norm.bias", zeros(&[8])),
        ("norm.running_mean", Tensor::new(&mean, &Device::Cpu).unwrap()),
        ("norm.running_var", zeros(&[8]).affine(1.0, 4.0).unwrap()),
        ("norm.num_batches_tracked", Tensor::new(7i64, &Device::Cpu).unwrap()),
        ("head.weight", zeros(&[3, 8])),
        ("head.bias", zeros(&[3])),
    ];
    candle_core::safetensors::save(&tensors.into_iter().collect(), &weights).unwrap();
    let text = format!("{FOUR}  initial_weights: [\"{}\"]\n", weights.display());
    let text = text.replace("{reproducible: true}", "\n  reproducible: true");
    world(2, |comm| {
        let engine = engine_of(of_candle(), comm, &text);
        let names: Vec<&str> = engine.model().buffers().iter().map(|buffer| buffer.name()).collect();
        assert_eq!(names, ["norm.running_mean", "norm.running_var"]);
        assert_eq!(engine.model().buffers()[0].values(), mean);
        assert_eq!(engine.model().buffers()[1].values(), [4.0; 8]);
        assert_eq!(engine.model().parameters().len(), 6, "buffers are no parameters");
    });
}

#[test]
fn an_evaluation_in_training_mode_is_refused() {
    let errors = world(2, |comm| {
        let model = model(|vb| Ok(Norm(batch_norm(8, 1e-5, vb)?, true)));
        let mut engine = engine_of(model, comm, FOUR);
        engine.train_batch(&batch(0, 16)).unwrap();
        engine.eval_batch(&batch(1, 4)).unwrap_err().to_string()
    });
    assert!(errors.iter().any(|error| error.contains("changed the buffer `norm.running_mean`")), "{errors:?}");
}

/// A convolution, a norm and a linear layer, in PyTorch. `{0}` is a folder. A step has four micro-batches of three
/// images. The running statistics are the mean over the micro-batches, as if each micro-batch were a rank of
/// DistributedDataParallel.
const TORCH: &str = r#"
import copy, torch
from safetensors.torch import load_file
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(3, eps=1e-3, momentum=0.3)
        self.head = torch.nn.Linear(3, 4)
    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
def load(name):
    net = Net()
    net.load_state_dict(load_file(f"{0}/{name}/model.safetensors"), strict=True)
    return net
net, data = load("first"), load_file("{0}/data.safetensors")
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
for x, y in zip(data["x"], data["y"]):
    before, after, total = copy.deepcopy(dict(net.named_buffers())), [], 0
    for x, y in zip(x.split(3), y.split(3)):
        for name, buffer in net.named_buffers():
            buffer.copy_(before[name])
        loss = torch.nn.functional.cross_entropy(net(x), y) / 4
        loss.backward()
        total += loss.item()
        after.append(copy.deepcopy(dict(net.named_buffers())))
    for name, buffer in net.named_buffers():
        buffer.copy_(sum(each[name] for each in after) / 4)
    optimizer.step()
    optimizer.zero_grad()
    print(total)
last = load("last").eval()
for name, parameter in net.state_dict().items():
    if "num_batches" not in name:
        print(*last.state_dict()[name].flatten().tolist(), *parameter.flatten().tolist())
x = data["x"][0]
print(*last(x).flatten().tolist(), *net.eval()(x).flatten().tolist())
"#;

/// Compares losses, trained parameters, running statistics and the outputs of the exported model over eight steps.
#[test]
fn batch_norm_equals_that_of_pytorch() {
    const STEPS: usize = 8;
    let root = tempfile::tempdir().unwrap();
    let model = || {
        let pooled = |vb: VarBuilder<'static>| -> Result<Func<'static>> {
            let last = linear(3, 4, vb)?;
            Ok(Func::new(move |x: &Tensor| last.forward(&x.relu()?.mean((2, 3))?)))
        };
        let convolution = candle_nn::Conv2dConfig { padding: 1, ..Default::default() };
        Layers::new()
            .layer("conv", move |vb| candle_nn::conv2d(2, 3, 3, convolution, vb))
            .layer("norm", |vb| ops::BatchNorm::new(3, 1e-3, 0.3, vb))
            .layer("head", pooled)
            .loss(cross_entropy)
    };
    let values = (0..STEPS * 12 * 2 * 16).map(|i| (i * 37 % 101) as f32 / 25.0 + (i / 16 % 5) as f32 - 3.0).collect();
    let x = Tensor::from_vec::<_, f32>(values, (STEPS, 12, 2, 4, 4), &Device::Cpu).unwrap();
    let y: Vec<i64> = (0..STEPS * 12).map(|i| (i * 7 % 4) as i64).collect();
    let y = Tensor::from_vec(y, (STEPS, 12), &Device::Cpu).unwrap();
    let tensors = [("x", x.clone()), ("y", y.clone())].into_iter().collect();
    candle_core::safetensors::save(&tensors, root.path().join("data.safetensors")).unwrap();
    let losses = world(2, |comm| {
        let text = "train_batch_size: 12\ntrain_micro_batch_size_per_gpu: 3\nzero_optimization: {stage: 3}\n\
                    optimizer: {type: SGD, params: {lr: 0.2}}\n";
        let config = zero_engine::Config::with_world_size("test.yaml", text, 2).unwrap();
        let mut engine = Engine::with_communicator(config, model(), comm).unwrap();
        let export = |engine: &mut Engine, name: &str| {
            let saved = engine.save_checkpoint(root.path().join("saved")).unwrap();
            if engine.communicator().rank() == 0 {
                let weights = Weights { dtype: ExportDtype::F32, max_shard_bytes: 1 << 30, averaged: false };
                let (exported, _) = zero_engine::export(&saved, &root.path().join(name), weights).unwrap();
                assert_eq!(exported.tensors, 8, "six parameters and two buffers");
            }
        };
        export(&mut engine, "first");
        let step = |step| engine.train_batch(&Batch::new(x.get(step).unwrap(), y.get(step).unwrap())).unwrap().loss;
        let losses: Vec<f32> = (0..STEPS).map(step).collect();
        export(&mut engine, "last");
        losses
    })
    .remove(0);
    let size = fs::metadata(root.path().join("last/model.safetensors")).unwrap().len();
    assert!(size > 4 * (54 + 3 + 4 * 3 + 12 + 4), "{size} bytes hold all tensors");
    let script = TORCH.replace("{0}", &root.path().display().to_string());
    let Some(printed) = python(&["torch", "safetensors"], &script) else { return };
    let rows: Vec<Vec<f64>> =
        printed.lines().map(|line| line.split(' ').map(|value| value.parse().unwrap()).collect()).collect();
    assert_eq!(rows.len(), STEPS + 8 + 1);
    // PyTorch adds in a different order: after eight steps, results differ by a few f32 units in the last place.
    let close = |a: f64, b: f64| (a - b).abs() <= 2e-6 * (1.0 + b.abs());
    for (loss, row) in losses.iter().zip(&rows) {
        assert!(close(f64::from(*loss), row[0]), "{loss} and {}", row[0]);
    }
    for row in &rows[STEPS..] {
        let (ours, theirs) = row.split_at(row.len() / 2);
        assert!(ours.iter().zip(theirs).all(|(a, b)| close(*a, *b)), "{row:?}");
    }
}
