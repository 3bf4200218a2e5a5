//! Compares the engine with plain candle: one graph over the whole model, built from candle's own operations, with
//! candle's backward.

use crate::world;

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::{log_softmax, softmax};
use world::{batch, world};
use zero_engine::{Batch, Config, Engine, zoo};
use zero_optim::norm::clip_coefficient;
use zero_optim::{AdamW, Optimizer, Step, update};

const HEADS: usize = 2;
const LAYERS: usize = 2;
const STEPS: u64 = 20;
const LR: f64 = 0.003;
const WEIGHT_DECAY: f64 = 0.1;
const MAX_NORM: f64 = 0.5;
const CONFIG: &str = "train_micro_batch_size_per_gpu: 4\ngradient_clipping: 0.5\n\
                      optimizer: {type: AdamW, params: {lr: 0.003, weight_decay: 0.1}}";

fn model() -> zero_engine::Layers {
    zoo::gpt2(&zoo::Gpt2Config {
        vocab_size: 61,
        n_positions: 16,
        n_embd: 32,
        n_layer: LAYERS,
        n_head: HEADS,
        initializer_range: 0.1,
        ..zoo::Gpt2Config::default()
    })
}

/// A GPT-2 made of elementary candle operations.
struct Plain {
    weights: BTreeMap<String, Var>,
}

impl Plain {
    fn get(&self, name: &str) -> &Tensor {
        &self.weights[&format!("transformer.{name}")]
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let deviation = (centred.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?.sqrt()?;
        let scaled = centred.broadcast_div(&deviation)?.broadcast_mul(self.get(&format!("{name}.weight")))?;
        scaled.broadcast_add(self.get(&format!("{name}.bias")))
    }

    fn conv1d(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let y = x.broadcast_matmul(self.get(&format!("{name}.weight")))?;
        y.broadcast_add(self.get(&format!("{name}.bias")))
    }

    fn attention(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let (batch, time, width) = x.dims3()?;
        let qkv = self.conv1d(x, &format!("{name}.c_attn"))?;
        let part = |i: usize| {
            qkv.narrow(2, i * width, width)?.reshape((batch, time, HEADS, width / HEADS))?.transpose(1, 2)?.contiguous()
        };
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        let scores = (q.matmul(&k.t()?)? / ((width / HEADS) as f64).sqrt())?;
        let masked = |i: usize| (0..time).map(move |j| if j > i { f32::NEG_INFINITY } else { 0.0 });
        let mask = Tensor::from_iter((0..time).flat_map(masked), &Device::Cpu)?.reshape((time, time))?;
        let weights = softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
        let mixed = weights.matmul(&v)?.transpose(1, 2)?.reshape((batch, time, width))?;
        self.conv1d(&mixed, &format!("{name}.c_proj"))
    }

    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        let ids = batch.inputs.single()?;
        let (rows, time) = ids.dims2()?;
        let width = self.get("wte.weight").dim(1)?;
        let tokens = self.get("wte.weight").index_select(&ids.flatten_all()?, 0)?.reshape((rows, time, width))?;
        let mut x = tokens.broadcast_add(&self.get("wpe.weight").narrow(0, 0, time)?)?;
        for i in 0..LAYERS {
            let attended = self.attention(&self.norm(&x, &format!("h.{i}.ln_1"))?, &format!("h.{i}.attn"))?;
            x = (x + attended)?;
            let inner = self.conv1d(&self.norm(&x, &format!("h.{i}.ln_2"))?, &format!("h.{i}.mlp.c_fc"))?.gelu()?;
            x = (x + self.conv1d(&inner, &format!("h.{i}.mlp.c_proj"))?)?;
        }
        let logits = self.norm(&x, "ln_f")?.broadcast_matmul(&self.get("wte.weight").t()?)?;
        let picked =
            log_softmax(&logits, D::Minus1)?.gather(&batch.targets.as_ref().expect("a target").unsqueeze(2)?, 2)?;
        picked.mean_all()?.neg()
    }

    /// Trains one step. Returns the loss before the update and the norm of the gradient.
    fn step(&self, batch: &Batch, number: u64, moments: &mut BTreeMap<String, [Vec<f32>; 2]>) -> Result<(f32, f64)> {
        let loss = self.loss(batch)?;
        let gradients = loss.backward()?;
        let mut flat = BTreeMap::new();
        for (name, weight) in &self.weights {
            let gradient = gradients.get(weight).unwrap_or_else(|| panic!("`{name}` has no gradient"));
            flat.insert(name, gradient.flatten_all()?.to_vec1::<f32>()?);
        }
        let norm = flat.values().flatten().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt();
        let optimizer = Optimizer::AdamW(AdamW { weight_decay: WEIGHT_DECAY, ..AdamW::default() });
        let grad_scale = clip_coefficient(norm, MAX_NORM) as f32;
        for (name, weight) in &self.weights {
            let step =
                Step { step: number, lr: LR, grad_scale, grad_limit: f32::INFINITY, decay: weight.dims().len() >= 2 };
            let mut values = weight.flatten_all()?.to_vec1::<f32>()?;
            let [m, v] =
                moments.entry(name.clone()).or_insert_with(|| [vec![0.0; values.len()], vec![0.0; values.len()]]);
            update(&optimizer, &step, &mut values, &flat[name], &mut [m, v]).unwrap();
            weight.set(&Tensor::from_vec(values, weight.shape(), &Device::Cpu)?)?;
        }
        Ok((loss.to_scalar()?, norm))
    }
}

#[test]
fn losses_match_plain_candle() {
    world(1, |comm| {
        let config = Config::with_world_size("plain.yaml", CONFIG, 1).unwrap();
        let mut engine = Engine::with_communicator(config, model(), comm).unwrap();
        let names: Vec<_> =
            engine.model().parameters().iter().map(|p| (p.name().to_string(), p.shape().clone())).collect();
        let mut weights = BTreeMap::new();
        for (name, shape) in names {
            let values = Tensor::from_vec(engine.full_parameter(&name).unwrap(), shape, &Device::Cpu).unwrap();
            weights.insert(name, Var::from_tensor(&values).unwrap());
        }
        assert!(weights.values().all(|w| w.dtype() == DType::F32));
        let (plain, mut moments) = (Plain { weights }, BTreeMap::new());
        let mut clipped = 0;
        for number in 1..=STEPS {
            let batch = batch(number, 4);
            let ours = engine.train_batch(&batch).unwrap();
            let (loss, norm) = plain.step(&batch, number, &mut moments).unwrap();
            let off = (ours.loss - loss).abs() / loss;
            assert!(off <= 1e-5, "step {number}: {} and {loss} differ by {off:e}", ours.loss);
            let off = (ours.grad_norm - norm).abs() / norm;
            assert!(off <= 1e-4, "step {number}: norms {} and {norm} differ by {off:e}", ours.grad_norm);
            clipped += usize::from(norm > MAX_NORM);
        }
        assert!(clipped > 0, "no step was clipped");
    });
}
