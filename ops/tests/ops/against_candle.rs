//! Values and gradients, compared with plain candle expressions.

use std::collections::HashMap;

use crate::check::{check, close, ids, normal, plain_attention_within, position_ids, rotated, same_bits, tanh_gelu};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Module, VarBuilder};
use zero_ops as ops;

#[test]
fn linear() {
    for (lead, inputs, outputs) in
        [(&[3, 5][..], 7, 9), (&[1], 4, 1), (&[130], 33, 65), (&[2, 2, 3], 1, 2), (&[1, 1], 600, 3)]
    {
        let x = [lead, &[inputs]].concat();
        let plain = |t: &[Tensor], weight: Tensor| -> Result<Tensor> {
            let flat = t[0].reshape(((), inputs))?.matmul(&weight)?;
            flat.reshape([lead, &[outputs]].concat())
        };
        check(
            &[&x, &[outputs, inputs], &[outputs]],
            |t| ops::Linear::from_tensors(t[1].clone(), Some(t[2].clone())).forward(&t[0]),
            |t| plain(t, t[1].t()?)?.broadcast_add(&t[2]),
        );
        check(
            &[&x, &[outputs, inputs]],
            |t| ops::Linear::from_tensors(t[1].clone(), None).forward(&t[0]),
            |t| plain(t, t[1].t()?),
        );
        check(
            &[&x, &[inputs, outputs], &[outputs]],
            |t| ops::Conv1D::from_tensors(t[1].clone(), t[2].clone()).forward(&t[0]),
            |t| plain(t, t[1].clone())?.broadcast_add(&t[2]),
        );
    }
}

#[test]
fn embedding() {
    let at = ids("ids", &[3, 4], 6);
    check(
        &[&[6, 5]],
        |t| ops::Embedding::from_tensor(t[0].clone()).forward(&at),
        |t| t[0].index_select(&at.flatten_all()?, 0)?.reshape((3, 4, 5)),
    );
    let at = at.to_dtype(DType::I64).unwrap().t().unwrap();
    check(
        &[&[6, 1]],
        |t| ops::Embedding::from_tensor(t[0].clone()).forward(&at),
        |t| t[0].index_select(&at.contiguous()?.flatten_all()?, 0)?.reshape((4, 3, 1)),
    );
}

#[test]
fn layer_norm() {
    for (rows, size) in [(3, 7), (1, 5), (130, 33), (67, 16)] {
        check(
            &[&[rows, size], &[size], &[size]],
            |t| ops::LayerNorm::from_tensors(t[1].clone(), t[2].clone(), 1e-5).forward(&t[0]),
            |t| candle_nn::ops::layer_norm_slow(&t[0], &t[1], &t[2], 1e-5),
        );
    }
}

#[test]
fn rms_norm() {
    for (rows, size) in [(3, 7), (1, 5), (130, 33), (67, 16)] {
        check(
            &[&[rows, size], &[size]],
            |t| ops::RmsNorm::from_tensor(t[1].clone(), 1e-6).forward(&t[0]),
            |t| candle_nn::ops::rms_norm_slow(&t[0], &t[1], 1e-6),
        );
    }
}

#[test]
fn activations() {
    let logistic = |x: &Tensor| -> Result<Tensor> { (x.neg()?.exp()? + 1.0)?.recip() };
    for shape in [&[5, 7][..], &[1], &[3, 2, 33]] {
        check(&[shape], |t| ops::gelu(&t[0]), |t| tanh_gelu(&t[0]));
        check(&[shape], |t| ops::gelu_erf(&t[0]), |t| t[0].gelu_erf());
        check(&[shape], |t| ops::relu(&t[0]), |t| t[0].relu());
        check(&[shape], |t| ops::silu(&t[0]), |t| &t[0] * logistic(&t[0])?);
        check(&[shape, shape], |t| ops::swiglu(&t[0], &t[1]), |t| (&t[0] * logistic(&t[0])?)? * &t[1]);
    }
}

fn plain_attention(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    plain_attention_within(q, k, v, |_, _| 0)
}

#[test]
fn attention() {
    for (batch, time, heads, kv_heads, size) in
        [(2, 5, 4, 2, 6), (1, 1, 1, 1, 1), (2, 67, 3, 3, 8), (1, 130, 4, 1, 5), (3, 64, 2, 2, 16), (1, 450, 2, 1, 6)]
    {
        let (q, kv) = ([batch, time, heads, size], [batch, time, kv_heads, size]);
        check(
            &[&q, &kv, &kv],
            |t| ops::causal_attention(&t[0], &t[1], &t[2]),
            |t| plain_attention(&t[0], &t[1], &t[2]),
        );
    }
}

/// Returns document numbers: documents of 1, 63, 70, … positions, shifted differently in each row.
fn documents(batch: usize, time: usize) -> Vec<u32> {
    let number = |sample: usize, at: usize| [1, 64, 134].iter().filter(|&&end| at + 7 * sample >= end).count();
    (0..batch * time).map(|at| number(at / time, at % time) as u32).collect()
}

#[test]
fn attention_within_a_window_and_documents() {
    for (batch, time, heads, kv_heads, size) in
        [(2, 5, 4, 2, 6), (2, 150, 2, 1, 5), (1, 200, 1, 1, 4), (1, 450, 2, 1, 4)]
    {
        let numbers = documents(batch, time);
        let begin = |sample: usize, at: usize| {
            let row = &numbers[sample * time..];
            (0..=at).rev().take_while(|&before| row[before] == row[at]).last().unwrap_or(at)
        };
        let tensor = Tensor::from_vec(position_ids(&numbers, time), (batch, time), &Device::Cpu).unwrap();
        let (q, kv) = ([batch, time, heads, size], [batch, time, kv_heads, size]);
        for (window, packed) in [(Some(2), false), (Some(3), true), (Some(70), false), (None, true), (Some(500), true)]
        {
            let mut span = ops::AttentionSpan::default();
            if let Some(window) = window {
                span = span.window(window);
            }
            if packed {
                span = span.position_ids(tensor.clone());
            }
            let first = |sample, at: usize| {
                let document = if packed { begin(sample, at) } else { 0 };
                document.max((at + 1).saturating_sub(window.unwrap_or(time)))
            };
            check(
                &[&q, &kv, &kv],
                |t| ops::causal_attention_within(&t[0], &t[1], &t[2], &span),
                |t| plain_attention_within(&t[0], &t[1], &t[2], first),
            );
        }
    }
}

/// The output and the gradient of a document are bit-identical alone and packed with others.
#[test]
fn a_packed_document_is_bit_identical_to_the_document_alone() {
    let (time, heads, size) = (200, 2, 6);
    let numbers = documents(1, time);
    let packed = normal("qkv", &[1, time, 3 * heads * size]);
    let positions = Tensor::from_vec(position_ids(&numbers, time), (1, time), &Device::Cpu).unwrap();
    let span = ops::AttentionSpan::default().position_ids(positions.clone());
    let rotary = ops::Rotary::new(size, time, 100.0).unwrap();
    let upstream = normal("upstream", &[1, time, heads * size]);
    let gradients = |x: &Tensor, dy: &Tensor, span: &ops::AttentionSpan| {
        let x = candle_core::Var::from_tensor(x).unwrap();
        let heads_of_all = x.reshape((1, (), 3 * heads, size)).unwrap();
        let turned = match x.dim(1).unwrap() == time {
            true => rotary.apply_at(&heads_of_all, &positions),
            false => rotary.apply(&heads_of_all),
        };
        let turned = turned.unwrap().reshape(x.dims()).unwrap();
        let y = ops::causal_attention_packed_within(&turned, heads, span).unwrap();
        let grads = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
        (y, grads.get(x.as_tensor()).unwrap().clone())
    };
    let (y, dx) = gradients(&packed, &upstream, &span);
    for document in 0..=3 {
        let begin = numbers.iter().position(|&n| n == document).unwrap();
        let len = numbers.iter().filter(|&&n| n == document).count();
        let part = |t: &Tensor| t.narrow(1, begin, len).unwrap();
        let (y_alone, dx_alone) = gradients(&part(&packed), &part(&upstream), &ops::AttentionSpan::default());
        same_bits("result", &part(&y), &y_alone);
        same_bits("gradient", &part(&dx), &dx_alone);
    }
}

#[test]
fn packed_attention() {
    for (batch, time, heads, size) in [(2, 5, 4, 6), (1, 70, 2, 8)] {
        let width = heads * size;
        check(
            &[&[batch, time, 3 * width]],
            |t| ops::causal_attention_packed(&t[0], heads),
            |t| {
                let part = |i| t[0].narrow(2, i * width, width)?.contiguous()?.reshape((batch, time, heads, size));
                plain_attention(&part(0)?, &part(1)?, &part(2)?)?.reshape((batch, time, width))
            },
        );
    }
}

/// Compares `rotary` for heads of `size` with pairs that rotate at `frequency(pair)` radians per position.
fn check_rotary(rotary: &ops::Rotary, size: usize, frequency: impl Fn(usize) -> f64) {
    let angle = |position: usize, pair: usize| position as f64 * frequency(pair);
    check(&[&[2, 9, 3, size]], |t| rotary.apply(&t[0]), |t| rotated(&t[0], size / 2, 1.0, angle));
}

#[test]
fn rotary() {
    let (size, theta) = (6, 100.0f64);
    let plain = |pair: usize| theta.powf(-(pair as f64) / 3.0);
    check_rotary(&ops::Rotary::new(size, 12, theta).unwrap(), size, plain);
    let linear = ops::RopeScaling::Linear { factor: 4.0 };
    check_rotary(&ops::Rotary::scaled(size, 12, theta, &linear).unwrap(), size, |pair| plain(pair) / 4.0);
}

/// Compares with the formula of Hugging Face's `_compute_llama3_parameters`.
#[test]
fn rotary_with_llama3_scaling() {
    let (size, theta, factor, low, high, before) = (16, 50.0f64, 8.0, 1.0, 4.0, 64);
    let scaling = ops::RopeScaling::Llama3 {
        factor,
        low_freq_factor: low,
        high_freq_factor: high,
        original_max_position_embeddings: before,
    };
    let mut ranges = [0; 3];
    let mut scaled = vec![];
    for pair in 0..size / 2 {
        let frequency = theta.powf(-(pair as f64) / 8.0);
        let wavelength = 2.0 * std::f64::consts::PI / frequency;
        let context = before as f64;
        let range = usize::from(wavelength >= context / high) + usize::from(wavelength > context / low);
        ranges[range] += 1;
        scaled.push(match range {
            0 => frequency,
            2 => frequency / factor,
            _ => {
                let smooth = (context / wavelength - low) / (high - low);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        });
    }
    assert!(ranges.iter().all(|&pairs| pairs > 0), "{ranges:?} pairs of high, medium and low frequency");
    check_rotary(&ops::Rotary::scaled(size, 12, theta, &scaling).unwrap(), size, |pair| scaled[pair]);
}

#[test]
fn cross_entropy() {
    for (lead, classes) in [(&[5][..], 7), (&[2, 3], 33), (&[1], 1)] {
        let targets = ids("targets", lead, classes as u32);
        check(
            &[&[lead, &[classes]].concat()],
            |t| ops::cross_entropy(&t[0], &targets),
            |t| {
                let logits = t[0].reshape(((), classes))?;
                candle_nn::loss::cross_entropy(&logits, &targets.flatten_all()?)
            },
        );
    }
}

/// The backward treats the norm of DoRA as a constant, so finite differences would not agree.
#[test]
fn dora() {
    let (inputs, outputs, rank, scale) = (7, 70, 3, 0.5);
    let values = |name: &str, shape: &[usize]| normal(name, shape);
    for has_bias in [true, false] {
        for inputs_first in [true, false] {
            let shape = if inputs_first { [inputs, outputs] } else { [outputs, inputs] };
            let tensors: HashMap<String, Tensor> = [
                ("weight", values("weight", &shape)),
                ("bias", values("bias", &[outputs])),
                ("lora_A.weight", values("a", &[rank, inputs])),
                ("lora_B.weight", values("b", &[outputs, rank])),
                (ops::MAGNITUDES, values("m", &[outputs])),
            ]
            .map(|(name, tensor)| (name.to_string(), Var::from_tensor(&tensor).unwrap().into_inner()))
            .into();
            let of = |name: &str| tensors[name].clone();
            let [weight, bias, a, b, m] = ["weight", "bias", "lora_A.weight", "lora_B.weight", ops::MAGNITUDES].map(of);
            let vb = VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu);
            let options = ops::LoraOptions {
                rank,
                scale: scale as f32,
                dropout: 0.0,
                init: ops::LoraInit::Zero,
                magnitudes: true,
                targets: None,
            };
            let x = Var::from_tensor(&values("x", &[3, 5, inputs])).unwrap().into_inner();
            let y = match (inputs_first, has_bias) {
                (true, _) => {
                    ops::with_lora(options, || ops::Conv1D::new(inputs, outputs, 1.0, vb)).0.unwrap().forward(&x)
                }
                (false, true) => {
                    ops::with_lora(options, || ops::Linear::new(inputs, outputs, 1.0, vb)).0.unwrap().forward(&x)
                }
                (false, false) => {
                    ops::with_lora(options, || ops::Linear::no_bias(inputs, outputs, 1.0, vb)).0.unwrap().forward(&x)
                }
            };
            let y = y.unwrap();
            let rows_first = if inputs_first { weight.t().unwrap() } else { weight.clone() };
            let sum = (&rows_first + (b.matmul(&a).unwrap() * scale).unwrap()).unwrap();
            let norms = sum.detach().sqr().unwrap().sum(1).unwrap().sqrt().unwrap();
            let c = (&m / norms).unwrap();
            let flat = x.reshape(((), inputs)).unwrap().matmul(&sum.t().unwrap()).unwrap();
            let mut plain = flat.broadcast_mul(&c).unwrap();
            if has_bias || inputs_first {
                plain = plain.broadcast_add(&bias).unwrap();
            }
            close("y", &y.reshape(((), outputs)).unwrap(), &plain, 1e-5);
            let dy = values("dy", &[15, outputs]);
            let ours = (y.reshape(((), outputs)).unwrap() * &dy).unwrap().sum_all().unwrap().backward().unwrap();
            let theirs = (plain * dy).unwrap().sum_all().unwrap().backward().unwrap();
            for (name, tensor) in [("x", &x), ("weight", &weight), ("a", &a), ("b", &b), ("m", &m)] {
                close(name, ours.get(tensor).unwrap(), theirs.get(tensor).unwrap(), 1e-5);
            }
        }
    }
}
