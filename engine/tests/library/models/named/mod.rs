//! Models that are not a plain list of layers: named inputs, several targets, auxiliary outputs. Bits do not depend on
//! the layout, and equal those of plain candle.

mod errors;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Device, Result, Tensor, Var};
use candle_nn::loss::{cross_entropy, mse};
use candle_nn::{Embedding, Linear, Module, VarBuilder, embedding, linear};
use zero_engine::{Activations, Batch, Config, Engine, Layer, Layers, Pass, ops};
use zero_optim::{AdamW, Optimizer, Step, update};

use crate::world::{Trajectory, agreed, assert_same, parameters, world};

const SAMPLES: usize = 8;
const STEPS: u64 = 4;
const LR: f64 = 0.05;

/// A name, a model, and the batch of each step.
type Case = (&'static str, fn() -> Layers, fn(u64) -> Batch);

const CASES: [Case; 4] = [
    ("two inputs", two_inputs, |step| features(step).target("label", labels(step))),
    ("two tasks", two_tasks, |step| features(step).target("label", labels(step)).target("words", words(step))),
    ("autoencoder", autoencoder, features),
    ("two towers", two_towers, features),
];

/// Adds the embedding of each token's segment, and averages over the tokens.
struct Segments(Embedding);

impl Layer for Segments {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        let [hidden, segment] = x.array()?;
        Ok((hidden + self.0.forward(segment)?)?.tanh()?.mean(1)?.into())
    }
}

/// A linear layer. A named input, which gets no gradient, weights the outputs of each sample.
struct Weighted(Linear);

impl Layer for Weighted {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        let [hidden, weight] = x.array()?;
        Ok(self.0.forward(hidden)?.broadcast_mul(weight)?.into())
    }
}

fn two_inputs() -> Layers {
    Layers::new()
        .layer("tokens", |vb: VarBuilder| embedding(61, 12, vb))
        .inputs(["text"])
        .layer("mix", |vb: VarBuilder| linear(12, 12, vb))
        .layer("segments", |vb: VarBuilder| Ok(Segments(embedding(2, 12, vb)?)))
        .with(["segment"])
        .layer("hidden", |vb: VarBuilder| linear(12, 12, vb))
        .layer("weighted", |vb: VarBuilder| Ok(Weighted(linear(12, 12, vb)?)))
        .with(["weight"])
        .layer("classes", |vb: VarBuilder| linear(12, 5, vb))
        .loss(cross_entropy)
}

fn two_tasks() -> Layers {
    Layers::new()
        .layer("tokens", |vb: VarBuilder| embedding(61, 12, vb))
        .inputs(["text"])
        .layer("segments", |vb: VarBuilder| Ok(Segments(embedding(2, 12, vb)?)))
        .with(["segment"])
        .layer("encoder", |vb: VarBuilder| linear(12, 12, vb))
        .layer("hidden", |vb: VarBuilder| linear(12, 12, vb))
        .layer("topic", |vb: VarBuilder| linear(12, 5, vb))
        .layer("length", |vb: VarBuilder| linear(12, 1, vb))
        .inputs(["encoder"])
        .loss_of(["topic", "length"], ["label", "words"], |[topic, length], [label, words]| {
            cross_entropy(topic, label)? + (mse(length, words)? * 0.3)?
        })
}

/// Outputs the mean and the logarithm of the variance of a code.
struct Encoder([Linear; 3]);

impl Layer for Encoder {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        let hidden = self.0[0].forward(x.single()?)?.tanh()?;
        Ok(Activations::new(vec![self.0[1].forward(&hidden)?, self.0[2].forward(&hidden)?]))
    }
}

/// Samples the code of an autoencoder without random noise: the mean plus one standard deviation.
struct Code;

impl Layer for Code {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        let [mean, log_variance] = x.array()?;
        Ok((mean + (log_variance * 0.5)?.exp()?)?.into())
    }
}

/// A variational autoencoder: its target is its input, and its loss uses outputs of the encoder.
fn autoencoder() -> Layers {
    let encoder = |vb: VarBuilder| {
        let [hidden, mean, variance] = ["hidden", "mean", "variance"].map(|name| vb.pp(name));
        Ok(Encoder([linear(6, 8, hidden)?, linear(8, 2, mean)?, linear(8, 2, variance)?]))
    };
    Layers::new()
        .layer("encoder", encoder)
        .inputs(["pixels"])
        .exposes(["mean", "log_variance"])
        .layer("code", |_: VarBuilder| Ok(Code))
        .inputs(["encoder.mean", "encoder.log_variance"])
        .layer("decoder", |vb: VarBuilder| linear(2, 8, vb))
        .layer("output", |vb: VarBuilder| linear(8, 6, vb))
        .loss_of(
            ["output", "encoder.mean", "encoder.log_variance"],
            ["pixels"],
            |[output, mean, variance], [pixels]| {
                let divergence = ((mean.sqr()? + variance.exp()?)? - variance)?.mean_all()?;
                mse(output, pixels)? + (divergence * 0.1)?
            },
        )
}

/// A contrastive model without targets: for each query, the documents of the other samples are the negatives.
fn two_towers() -> Layers {
    Layers::new()
        .layer("query", |vb: VarBuilder| linear(6, 4, vb))
        .inputs(["pixels"])
        .layer("document", |vb: VarBuilder| linear(6, 4, vb))
        .inputs(["others"])
        .loss_of(["query", "document"], [], |[query, document], []| {
            let scores = query.matmul(&document.t()?)?;
            cross_entropy(&scores, &Tensor::arange(0, query.dim(0)? as u32, query.device())?)
        })
}

fn numbers(step: u64, width: usize, factor: f32) -> Tensor {
    let number = |i: usize| ((i as f32 * 0.71 + step as f32 * 1.3) * factor).sin();
    let values: Vec<f32> = (0..SAMPLES * width).map(number).collect();
    Tensor::from_vec(values, (SAMPLES, width), &Device::Cpu).unwrap()
}

fn integers(step: u64, width: usize, below: u64) -> Tensor {
    let integer = |i: usize| ((i as u64 * 7 + step * 13 + (i as u64 * i as u64) % 11) % below) as u32;
    Tensor::from_vec((0..SAMPLES * width).map(integer).collect(), (SAMPLES, width), &Device::Cpu).unwrap()
}

fn labels(step: u64) -> Tensor {
    integers(step, 1, 5).flatten_all().unwrap()
}

fn words(step: u64) -> Tensor {
    numbers(step, 1, 0.9)
}

fn features(step: u64) -> Batch {
    Batch::named([
        ("text", integers(step, 7, 61)),
        ("segment", integers(step, 7, 2)),
        ("pixels", numbers(step, 6, 1.0)),
    ])
    .input("others", numbers(step, 6, 0.6))
    .input("weight", numbers(step, 1, 0.4))
}

fn config(ranks: usize, more: &str) -> Config {
    let text = format!(
        "train_batch_size: {SAMPLES}\ngradient_clipping: 0\n\
         optimizer: {{type: AdamW, params: {{lr: {LR}, weight_decay: 0.1}}}}\n{more}"
    );
    Config::with_world_size("named.yaml", text, ranks).unwrap_or_else(|e| panic!("{e}"))
}

fn bits(values: &Activations) -> Vec<u32> {
    let of = |x: &Tensor| x.flatten_all().and_then(|x| x.to_vec1::<f32>()).unwrap();
    values.tensors().iter().flat_map(of).map(f32::to_bits).collect()
}

/// The training trajectory, the loss of an evaluation, and the outputs for the same batch.
type Found = (Trajectory, u32, Vec<u32>);

fn found((name, layers, batch): Case, ranks: usize, more: &str) -> Found {
    let all = world(ranks, |comm| {
        let engine = Engine::with_communicator(config(ranks, more), layers(), comm);
        let mut engine = engine.unwrap_or_else(|e| panic!("{name}, {more}: {e}"));
        let train = |step| engine.train_batch(&batch(step)).unwrap_or_else(|e| panic!("{name}, {more}: {e}"));
        let steps: Vec<_> = (0..STEPS).map(train).collect();
        let trajectory = Trajectory {
            losses: steps.iter().map(|step| step.loss.to_bits()).collect(),
            norms: steps.iter().map(|step| step.grad_norm.to_bits()).collect(),
            parameters: parameters(&mut engine),
        };
        let evaluated = engine.eval_batch(&batch(50)).unwrap();
        (trajectory, evaluated.to_bits(), bits(&engine.forward(batch(50)).unwrap()))
    });
    agreed(all, &format!("{name}, {more}"))
}

/// Micro-batches of two samples: four in total, over all replicas.
const MICRO: &str = "train_micro_batch_size_per_gpu: 2\ntraining: {reproducible: true}";

#[test]
fn bits_do_not_depend_on_the_layout() {
    let stage = |stage| format!("zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 0}}");
    let recomputed = "activation_checkpointing: {}";
    for case in CASES {
        let (expected, loss, outputs) = found(case, 1, MICRO);
        let mut layouts = vec![(1, recomputed.to_string()), (2, format!("{}\n{recomputed}", stage(3)))];
        layouts.extend((0..=3).map(|zero_stage| (2, stage(zero_stage))));
        for schedule in ["gpipe", "1f1b", "zb_h1"] {
            layouts.push((2, format!("pipeline: {{stages: 2, schedule: {schedule}}}")));
        }
        layouts.push((4, format!("pipeline: {{stages: 2}}\n{}\n{recomputed}", stage(1))));
        if case.0.starts_with("two i") || case.0.starts_with("two ta") {
            // Six layers, one per stage or chunk, so that every value crosses boundaries.
            layouts.push((6, "pipeline: {stages: 6, partition_method: uniform}".into()));
            let chunks = "pipeline: {stages: 3, virtual_stages: 2, schedule: interleaved_1f1b}";
            layouts.push((3, format!("{chunks}\n{recomputed}")));
        }
        for (ranks, layout) in layouts {
            let what = format!("{}, {ranks} ranks, {layout}", case.0);
            let got = found(case, ranks, &format!("{MICRO}\n{layout}"));
            assert_same(&expected, &got.0, &what);
            assert!((loss, &outputs) == (got.1, &got.2), "{what}: evaluation");
        }
    }
}

/// Trains on a single micro-batch, so that candle can compute the gradient in one backward over the whole model.
#[test]
fn results_are_bit_identical_to_plain_candle() {
    for (name, layers, batch) in CASES {
        let more = format!("train_micro_batch_size_per_gpu: {SAMPLES}");
        let got = found((name, layers, batch), 1, &more).0;
        let mut weights: BTreeMap<String, Var> = initial(layers, &more);
        let mut moments: BTreeMap<String, [Vec<f32>; 2]> = BTreeMap::new();
        let mut losses = vec![];
        for step in 0..STEPS {
            let loss = plain(name, &weights, &batch(step)).unwrap();
            let gradients = loss.backward().unwrap();
            losses.push(loss.to_scalar::<f32>().unwrap().to_bits());
            for (name, weight) in &mut weights {
                let gradient = gradients.get(weight).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let [m, v] = moments.entry(name.clone()).or_insert_with(|| [(); 2].map(|()| vec![0.0; gradient.len()]));
                let mut values = weight.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let optimizer = Optimizer::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() });
                let step = Step {
                    step: step + 1,
                    lr: LR,
                    grad_scale: 1.0,
                    grad_limit: f32::INFINITY,
                    decay: weight.dims().len() >= 2,
                };
                update(&optimizer, &step, &mut values, &gradient, &mut [m, v]).unwrap();
                weight.set(&Tensor::from_vec(values, weight.shape(), &Device::Cpu).unwrap()).unwrap();
            }
        }
        assert_eq!(got.losses, losses, "{name}");
        for (parameter, values) in &got.parameters {
            let plain = weights[parameter].flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(plain.iter().map(|value| value.to_bits()).eq(values.iter().copied()), "{name}: {parameter}");
        }
        assert!(losses[0] != losses[STEPS as usize - 1], "{name} does not train");
    }
}

/// Returns the initial parameters.
fn initial(layers: fn() -> Layers, more: &str) -> BTreeMap<String, Var> {
    let comm = zero_engine::comm::threads(1, &zero_engine::comm::Options::default()).remove(0);
    let mut engine = Engine::with_communicator(config(1, more), layers(), comm).unwrap();
    let parameters = engine.model().parameters().iter();
    let parameters: Vec<_> = parameters.map(|p| (p.name().to_string(), p.shape().clone())).collect();
    let var = |(name, shape): (String, _)| {
        let values = Tensor::from_vec(engine.full_parameter(&name).unwrap(), shape, &Device::Cpu).unwrap();
        (name, Var::from_tensor(&values).unwrap())
    };
    parameters.into_iter().map(var).collect()
}

/// Computes the loss of a case without this library.
fn plain(case: &str, weights: &BTreeMap<String, Var>, batch: &Batch) -> Result<Tensor> {
    let weight = |name: &str| weights[name].as_tensor().clone();
    let linear = |name: &str, x: &Tensor| {
        Linear::new(weight(&format!("{name}.weight")), Some(weight(&format!("{name}.bias")))).forward(x)
    };
    let embed = |name: &str, x: &Tensor| Embedding::new(weight(&format!("{name}.weight")), 12).forward(x);
    let of = |name: &str| batch.get(&[name]).expect("a tensor of the batch").remove(0);
    let pooled = |hidden: &Tensor| (hidden + embed("segments", &of("segment"))?)?.tanh()?.mean(1);
    match case {
        "two inputs" => {
            let hidden = linear("hidden", &pooled(&linear("mix", &embed("tokens", &of("text"))?)?)?)?;
            let hidden = linear("weighted", &hidden)?.broadcast_mul(&of("weight"))?;
            cross_entropy(&linear("classes", &hidden)?, &of("label"))
        }
        "two tasks" => {
            let encoded = linear("encoder", &pooled(&embed("tokens", &of("text"))?)?)?;
            let topic = linear("topic", &linear("hidden", &encoded)?)?;
            cross_entropy(&topic, &of("label"))? + (mse(&linear("length", &encoded)?, &of("words"))? * 0.3)?
        }
        "autoencoder" => {
            let hidden = linear("encoder.hidden", &of("pixels"))?.tanh()?;
            let [mean, variance] = [linear("encoder.mean", &hidden)?, linear("encoder.variance", &hidden)?];
            let code = (&mean + (&variance * 0.5)?.exp()?)?;
            let output = linear("output", &linear("decoder", &code)?)?;
            let divergence = ((mean.sqr()? + variance.exp()?)? - &variance)?.mean_all()?;
            mse(&output, &of("pixels"))? + (divergence * 0.1)?
        }
        _ => {
            let [query, document] = [linear("query", &of("pixels"))?, linear("document", &of("others"))?];
            let scores = query.matmul(&document.t()?)?;
            cross_entropy(&scores, &Tensor::arange(0, SAMPLES as u32, &Device::Cpu)?)
        }
    }
}

/// A layer that defers its weight gradients in a zero-bubble pipeline. Values that it does not take bypass it.
struct Splits(ops::Linear);

impl Layer for Splits {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        Ok(self.0.forward(x.single()?)?.into())
    }

    fn splits(&self) -> bool {
        true
    }
}

#[test]
fn deferred_weight_gradients_work_with_bypassing_values() {
    fn layers() -> Layers {
        let splits = |_, vb: VarBuilder| Ok(Splits(ops::Linear::new(6, 6, 0.3, vb)?));
        Layers::new()
            .layer("first", |vb: VarBuilder| linear(6, 6, vb))
            .inputs(["pixels"])
            .layers("inner", 4, splits)
            .layer("last", |vb: VarBuilder| linear(6, 1, vb))
            .loss_of(["last", "first", "inner.1"], ["words"], |[last, first, inner], [words]| {
                mse(last, words)? + ((first.sqr()?.mean_all()? + inner.sqr()?.mean_all()?)? * 0.1)?
            })
    }
    let case: Case = ("split", layers, |step| features(step).target("words", words(step)));
    let expected = found(case, 1, MICRO);
    for schedule in ["1f1b", "zb_h1"] {
        let more = format!("{MICRO}\npipeline: {{stages: 3, schedule: {schedule}}}\nactivation_checkpointing: {{}}");
        let got = found(case, 3, &more);
        assert_same(&expected.0, &got.0, schedule);
        assert!((expected.1, &expected.2) == (got.1, &got.2), "{schedule}: evaluation");
    }
}

/// Stages are cut by measured layer times.
#[test]
fn layers_with_named_values_can_be_partitioned_by_time() {
    for (name, layers, batch) in CASES {
        let expected = found((name, layers, batch), 1, MICRO).0.losses[0];
        let losses = world(2, |comm| {
            let config = config(2, &format!("{MICRO}\npipeline: {{stages: 2, partition_method: time}}"));
            let micro_batch = batch(0).narrow(0, 2).unwrap();
            let mut engine = Engine::measured(config, layers(), comm, &micro_batch).unwrap();
            engine.train_batch(&batch(0)).unwrap().loss.to_bits()
        });
        assert!(losses.iter().all(|&loss| loss == expected), "{name}");
    }
}

/// A stage loads a micro-batch if it has the first layer, the last layer, or a layer that names an input.
#[test]
fn only_stages_that_need_the_batch_load_it() {
    let loads = |(_, layers, batch): Case, stages: usize| {
        world(stages, |comm| {
            let more = format!("{MICRO}\npipeline: {{stages: {stages}, partition_method: uniform}}");
            let mut engine = Engine::with_communicator(config(stages, &more), layers(), comm).unwrap();
            let calls = AtomicUsize::new(0);
            let load = |index: usize| {
                calls.fetch_add(1, Ordering::Relaxed);
                batch(0).narrow(index * 2, 2)
            };
            engine.train_with(load).unwrap();
            calls.into_inner()
        })
    };
    assert_eq!(loads(CASES[0], 6), [4, 0, 4, 0, 4, 4]);
    assert_eq!(loads(CASES[1], 6), [4, 4, 0, 0, 0, 4]);
    assert_eq!(loads(CASES[1], 3), [4, 0, 4]);
}
