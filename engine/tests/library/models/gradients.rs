//! A missing gradient is an error that names the parameter or layer. The gradient of a tied parameter is the sum over
//! its uses.

use crate::world;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{Linear, Module, VarBuilder, linear, linear_no_bias};
use world::world;
use zero_engine::ops::cross_entropy;
use zero_engine::{Batch, Config, Engine, Layers};

const WIDTH: usize = 6;
const SAMPLES: usize = 4;

/// Plain gradient descent with a learning rate of 1, so a step subtracts exactly the gradient.
fn config(ranks: usize, zero_stage: u8, more: &str) -> Config {
    let text = format!(
        "train_batch_size: {SAMPLES}\ngradient_clipping: 0\noptimizer: {{type: SGD, params: {{lr: 1.0}}}}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 0{more}}}"
    );
    Config::with_world_size("gradients.yaml", text, ranks).unwrap_or_else(|e| panic!("{e}"))
}

fn batch() -> Batch {
    let inputs: Vec<f32> = (0..SAMPLES * WIDTH).map(|i| (i as f32 * 0.7).sin()).collect();
    let targets: Vec<u32> = (0..SAMPLES).map(|i| (i * 5 % WIDTH) as u32).collect();
    let inputs = Tensor::from_vec(inputs, (SAMPLES, WIDTH), &Device::Cpu).unwrap();
    Batch::new(inputs, Tensor::from_vec(targets, SAMPLES, &Device::Cpu).unwrap())
}

/// Two linear layers, between which the function `between` runs.
struct Between {
    inner: Linear,
    outer: Linear,
    between: fn(&Tensor) -> Result<Tensor>,
}

impl Between {
    fn new(vb: &VarBuilder, between: fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let (inner, outer) = (linear(WIDTH, WIDTH, vb.pp("inner"))?, linear(WIDTH, WIDTH, vb.pp("outer"))?);
        Ok(Self { inner, outer, between })
    }
}

impl Module for Between {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.outer.forward(&(self.between)(&self.inner.forward(x)?)?)
    }
}

/// candle's fused softmax has no backward. It cuts the gradient without an error.
#[expect(clippy::disallowed_methods, reason = "this test is about the cut")]
fn fused_softmax(x: &Tensor) -> Result<Tensor> {
    candle_nn::ops::softmax_last_dim(x)
}

fn differentiable_softmax(x: &Tensor) -> Result<Tensor> {
    candle_nn::ops::softmax(x, D::Minus1)
}

fn detached(x: &Tensor) -> Result<Tensor> {
    Ok(x.detach())
}

fn model_with(between: fn(&Tensor) -> Result<Tensor>) -> Layers {
    Layers::new().layer("body", move |vb| Between::new(&vb, between)).loss(cross_entropy)
}

/// Returns each rank's loss or error of the first step.
fn first_step(
    ranks: usize,
    config: &Config,
    model: impl Fn() -> Layers + Sync,
) -> Vec<std::result::Result<f32, String>> {
    world(ranks, |comm| {
        let mut engine = Engine::with_communicator(config.clone(), model(), comm).unwrap();
        engine.train_batch(&batch()).map(|step| step.loss).map_err(|e| e.to_string())
    })
}

#[test]
fn a_parameter_without_gradient_is_named() {
    for ranks in [1, 2] {
        for zero_stage in [0, 3] {
            let config = config(ranks, zero_stage, "");
            for cut in [fused_softmax, detached] {
                for said in first_step(ranks, &config, || model_with(cut)) {
                    let error = said.expect_err("the cut went unnoticed");
                    assert!(error.contains("`body.inner.weight` received no gradient"), "{error}");
                    assert!(error.contains("layer `body`"), "{error}");
                }
            }
            for said in first_step(ranks, &config, || model_with(differentiable_softmax)) {
                assert!(said.is_ok(), "{said:?}");
            }
        }
    }
}

/// A layer with a parameter that its forward does not use.
struct Unused {
    used: Linear,
}

#[test]
fn an_unused_parameter_is_named() {
    let model = || {
        let build = |vb: VarBuilder| {
            vb.get(3, "spare")?;
            Ok(Unused { used: linear(WIDTH, WIDTH, vb)? })
        };
        Layers::new().layer("body", build).loss(cross_entropy)
    };
    for said in first_step(2, &config(2, 2, ""), model) {
        let error = said.expect_err("the unused parameter went unnoticed");
        assert!(error.contains("`body.spare` received no gradient in the backward pass of layer `body`"), "{error}");
    }
}

impl Module for Unused {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.used.forward(x)
    }
}

/// A layer with a variable that it does not get from a `VarBuilder`.
struct Hidden {
    linear: Linear,
    scale: Var,
}

impl Module for Hidden {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.linear.forward(x)?.broadcast_mul(&self.scale)
    }
}

#[test]
fn a_variable_that_would_not_be_trained_is_an_error() {
    let model = || {
        let build = |vb: VarBuilder| {
            Ok(Hidden { linear: linear(WIDTH, WIDTH, vb)?, scale: Var::ones(WIDTH, DType::F32, &Device::Cpu)? })
        };
        Layers::new().layer("body", build).loss(cross_entropy)
    };
    for (ranks, zero_stage) in [(1, 0), (2, 3)] {
        for said in first_step(ranks, &config(ranks, zero_stage, ""), model) {
            let error = said.expect_err("the variable went unnoticed");
            assert!(error.contains("layer `body` uses a variable that its `VarBuilder` did not create"), "{error}");
        }
    }
}

#[test]
fn ignoring_unused_parameters_makes_their_gradient_zero() {
    for zero_stage in 0..=3 {
        world(2, |comm| {
            let config = config(2, zero_stage, ", ignore_unused_parameters: true");
            let mut engine = Engine::with_communicator(config, model_with(detached), comm).unwrap();
            let all = |engine: &mut Engine| {
                let names = ["inner.weight", "inner.bias", "outer.weight", "outer.bias"];
                names.map(|name| engine.full_parameter(&format!("body.{name}")).unwrap())
            };
            let before = all(&mut engine);
            engine.train_batch(&batch()).unwrap();
            let after = all(&mut engine);
            assert_eq!(before[..2], after[..2], "stage {zero_stage}: parameters without a gradient changed");
            assert!(
                before[2] != after[2] && before[3] != after[3],
                "stage {zero_stage}: other parameters did not change"
            );
        });
    }
}

/// A layer whose own parameters get gradients, but which detaches its input.
struct Cut {
    linear: Linear,
}

impl Module for Cut {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.linear.forward(&x.detach())
    }
}

#[test]
fn a_layer_that_passes_no_gradient_on_is_named() {
    let model = || {
        Layers::new()
            .layer("first", |vb| linear(WIDTH, WIDTH, vb))
            .layer("second", |vb| Ok(Cut { linear: linear(WIDTH, WIDTH, vb)? }))
            .layer("third", |vb| linear(WIDTH, WIDTH, vb))
            .loss(cross_entropy)
    };
    for zero_stage in [0, 3] {
        for said in first_step(2, &config(2, zero_stage, ""), model) {
            let error = said.expect_err("the cut went unnoticed");
            assert!(error.contains("layer `second` passes no gradient to the previous layer"), "{error}");
        }
    }
}

/// Three linear layers. The first and the last share their weight.
fn tied() -> Layers {
    Layers::new()
        .layer("first", |vb| linear_no_bias(WIDTH, WIDTH, vb))
        .layer("middle", |vb| linear_no_bias(WIDTH, WIDTH, vb))
        .layer("last", |vb| linear_no_bias(WIDTH, WIDTH, vb))
        .tie("first.weight", "last.weight")
        .loss(cross_entropy)
}

/// Computes the gradients of both parameters with candle alone.
fn plain_gradients(first: &Var, middle: &Var) -> Result<[Vec<f32>; 2]> {
    let batch = batch();
    let (inputs, targets) = (&batch.inputs, batch.only_target().expect("a target"));
    let hidden = inputs.single()?.matmul(&first.t()?)?.matmul(&middle.t()?)?;
    let logits = hidden.matmul(&first.t()?)?;
    let log = candle_nn::ops::log_softmax(&logits, D::Minus1)?;
    let loss = log.gather(&targets.unsqueeze(1)?, 1)?.mean_all()?.neg()?;
    let gradients = loss.backward()?;
    let of = |var: &Var| gradients.get(var).expect("candle has a gradient").flatten_all()?.to_vec1::<f32>();
    Ok([of(first)?, of(middle)?])
}

#[test]
fn a_tied_parameter_gets_the_sum_of_both_uses() {
    let mut bits = vec![];
    for zero_stage in 0..=3 {
        let all = world(2, |comm| {
            let mut engine = Engine::with_communicator(config(2, zero_stage, ""), tied(), comm).unwrap();
            let names = ["first.weight", "middle.weight"];
            assert_eq!(engine.model().parameters().iter().map(|p| p.name()).collect::<Vec<_>>(), names);
            let before = names.map(|name| engine.full_parameter(name).unwrap());
            engine.train_batch(&batch()).unwrap();
            let after = names.map(|name| engine.full_parameter(name).unwrap());
            let vars = before.clone().map(|values| {
                let values = Tensor::from_vec(values, (WIDTH, WIDTH), &Device::Cpu).unwrap();
                Var::from_tensor(&values.to_dtype(DType::F32).unwrap()).unwrap()
            });
            let expected = plain_gradients(&vars[0], &vars[1]).unwrap();
            for (name, (expected, (before, after))) in names.iter().zip(expected.iter().zip(before.iter().zip(&after)))
            {
                assert!(expected.iter().any(|g| g.abs() > 1e-2), "all gradients are too small to compare");
                for (i, g) in expected.iter().enumerate() {
                    // `before - after` is rounded, and the engine and plain candle add in different orders.
                    let off = (before[i] - after[i] - g).abs();
                    assert!(off < 1e-6, "stage {zero_stage}, {name}[{i}]: {} and {g}", before[i] - after[i]);
                }
            }
            after.map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
        });
        bits.extend(all);
    }
    assert!(bits.windows(2).all(|pair| pair[0] == pair[1]), "stages or ranks differ");
}
