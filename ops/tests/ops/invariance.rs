//! Results must not depend on the other rows of a batch, and 16-bit storage may only add one rounding.

use crate::check::{close, ids, normal, run, same_bits};
use candle_core::{DType, Result, Tensor};
use candle_nn::Module;
use zero_ops as ops;

type Op = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// Returns every operation with its inputs and the number of inputs whose first dimension is `batch`. These inputs come
/// first; parameters follow.
fn all(batch: usize) -> Vec<(&'static str, Vec<Tensor>, usize, Op)> {
    let n = |name: &str, shape: &[usize]| normal(name, shape);
    let rotary = ops::Rotary::new(6, 70, 1e4).unwrap();
    vec![
        (
            "linear",
            vec![n("x", &[batch, 3, 600]), n("w", &[5, 600]), n("b", &[5])],
            1,
            Box::new(|t| ops::Linear::from_tensors(t[1].clone(), Some(t[2].clone())).forward(&t[0])),
        ),
        (
            "conv1d",
            vec![n("x", &[batch, 3, 40]), n("w", &[40, 70]), n("b", &[70])],
            1,
            Box::new(|t| ops::Conv1D::from_tensors(t[1].clone(), t[2].clone()).forward(&t[0])),
        ),
        (
            "linear and gelu",
            vec![n("x", &[batch, 3, 40]), n("w", &[40, 70]), n("b", &[70])],
            1,
            Box::new(|t| ops::Conv1D::from_tensors(t[1].clone(), t[2].clone()).forward_gelu(&t[0])),
        ),
        (
            "layer norm",
            vec![n("x", &[batch, 3, 37]), n("w", &[37]), n("b", &[37])],
            1,
            Box::new(|t| ops::LayerNorm::from_tensors(t[1].clone(), t[2].clone(), 1e-5).forward(&t[0])),
        ),
        (
            "rms norm",
            vec![n("x", &[batch, 3, 37]), n("w", &[37])],
            1,
            Box::new(|t| ops::RmsNorm::from_tensor(t[1].clone(), 1e-5).forward(&t[0])),
        ),
        ("gelu", vec![n("x", &[batch, 37])], 1, Box::new(|t| ops::gelu(&t[0]))),
        ("gelu erf", vec![n("x", &[batch, 37])], 1, Box::new(|t| ops::gelu_erf(&t[0]))),
        ("relu", vec![n("x", &[batch, 37])], 1, Box::new(|t| ops::relu(&t[0]))),
        ("silu", vec![n("x", &[batch, 37])], 1, Box::new(|t| ops::silu(&t[0]))),
        ("swiglu", vec![n("x", &[batch, 37]), n("y", &[batch, 37])], 2, Box::new(|t| ops::swiglu(&t[0], &t[1]))),
        ("geglu", vec![n("x", &[batch, 37]), n("y", &[batch, 37])], 2, Box::new(|t| ops::geglu(&t[0], &t[1]))),
        ("columns", vec![n("x", &[batch, 37])], 1, Box::new(|t| ops::columns(&t[0], 5..20))),
        (
            "attention",
            vec![n("q", &[batch, 70, 4, 6]), n("k", &[batch, 70, 2, 6]), n("v", &[batch, 70, 2, 6])],
            3,
            Box::new(|t| ops::causal_attention(&t[0], &t[1], &t[2])),
        ),
        ("packed attention", vec![n("x", &[batch, 70, 36])], 1, Box::new(|t| ops::causal_attention_packed(&t[0], 2))),
        ("rotary", vec![n("x", &[batch, 70, 2, 6])], 1, Box::new(move |t| rotary.apply(&t[0]))),
    ]
}

#[test]
fn rows_do_not_depend_on_the_rest_of_the_batch() {
    let batch = 8;
    let each =
        || [DType::F32, DType::F16].into_iter().flat_map(|dtype| all(batch).into_iter().map(move |op| (dtype, op)));
    for (dtype, (name, inputs, batched, op)) in each() {
        let inputs: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(dtype).unwrap()).collect();
        let y = op(&inputs).unwrap();
        for parts in [2, 4, 8] {
            let size = batch / parts;
            for part in 0..parts {
                let cut: Vec<Tensor> = inputs
                    .iter()
                    .enumerate()
                    .map(|(i, x)| if i < batched { x.narrow(0, part * size, size).unwrap() } else { x.clone() })
                    .collect();
                let want = y.narrow(0, part * size, size).unwrap();
                same_bits(&format!("{name} of {dtype:?}, part {part} of {parts}"), &op(&cut).unwrap(), &want);
            }
        }
    }
}

#[test]
fn gradients_of_rows_do_not_depend_on_the_rest_of_the_batch() {
    let batch = 8;
    for (name, inputs, batched, op) in all(batch) {
        // One weight for each element of a sample, so that a part gets the same upstream gradient as the whole.
        let forward = |t: &[Tensor]| op(t);
        let sample_weights = normal("sample", &forward(&inputs).unwrap().dims()[1..]);
        let grads = |inputs: &[Tensor]| -> Vec<Tensor> {
            let vars: Vec<_> = inputs.iter().map(|x| candle_core::Var::from_tensor(x).unwrap()).collect();
            let leaves: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
            let store =
                op(&leaves).unwrap().broadcast_mul(&sample_weights).unwrap().sum_all().unwrap().backward().unwrap();
            leaves[..batched].iter().map(|x| store.get(x).unwrap().clone()).collect()
        };
        let whole = grads(&inputs);
        for part in 0..batch {
            let cut: Vec<Tensor> = inputs
                .iter()
                .enumerate()
                .map(|(i, x)| if i < batched { x.narrow(0, part, 1).unwrap() } else { x.clone() })
                .collect();
            for (got, want) in grads(&cut).iter().zip(&whole) {
                same_bits(&format!("{name}, sample {part}"), got, &want.narrow(0, part, 1).unwrap());
            }
        }
    }
}

#[test]
fn linear_gelu_is_bit_identical_to_linear_then_gelu() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let inputs = [normal("x", &[5, 3, 40]), normal("w", &[40, 70]), normal("b", &[70])];
        let inputs = inputs.map(|x| x.to_dtype(dtype).unwrap());
        let conv = |t: &[Tensor]| ops::Conv1D::from_tensors(t[1].clone(), t[2].clone());
        let (y, grads) = run(&inputs, |t| conv(t).forward_gelu(&t[0]));
        let (want, grads_want) = run(&inputs, |t| ops::gelu(&conv(t).forward(&t[0])?));
        same_bits(&format!("{dtype:?}: result"), &y, &want);
        for (i, (got, want)) in grads.iter().zip(&grads_want).enumerate() {
            same_bits(&format!("{dtype:?}: gradient {i}"), got, want);
        }
    }
}

#[test]
fn bf16_and_f16_are_f32_rounded_once() {
    // The unit in the last place of bf16 is 8 times that of f16.
    for (dtype, tolerance) in [(DType::BF16, 2e-2), (DType::F16, 2.5e-3)] {
        // The fused linear layer and GELU round twice, as the two operations do.
        for (name, inputs, _, op) in all(2).into_iter().filter(|(name, ..)| *name != "linear and gelu") {
            let narrow: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(dtype).unwrap()).collect();
            let wide: Vec<Tensor> = narrow.iter().map(|x| x.to_dtype(DType::F32).unwrap()).collect();
            let (y, grads) = run(&narrow, &op);
            assert!(y.dtype() == dtype && grads.iter().all(|g| g.dtype() == dtype), "{name}");
            let want = op(&wide).unwrap().to_dtype(dtype).unwrap();
            same_bits(name, &y, &want);
            let (_, grads_wide) = run(&wide, |t| {
                // The upstream gradient of the 16-bit run: the same weights, rounded.
                let y = op(t)?;
                let weights = normal("weights of the result", y.dims());
                let rounded = weights.to_dtype(dtype)?.to_dtype(DType::F32)?;
                (y * rounded)?.broadcast_div(&weights)
            });
            for (i, (g, want)) in grads.iter().zip(&grads_wide).enumerate() {
                close(&format!("{name} of {dtype:?}, input {i}"), g, want, tolerance);
            }
        }
    }
}

#[test]
fn logits_and_tables_in_16_bits() {
    [DType::BF16, DType::F16].into_iter().for_each(logits_and_tables);
}

fn logits_and_tables(dtype: DType) {
    let targets = ids("targets", &[5], 9);
    let logits = normal("logits", &[5, 9]).to_dtype(dtype).unwrap();
    let wide = logits.to_dtype(DType::F32).unwrap();
    let loss = ops::cross_entropy(&logits, &targets).unwrap();
    assert_eq!(loss.dtype(), DType::F32);
    same_bits("loss", &loss, &ops::cross_entropy(&wide, &targets).unwrap());
    let (_, grads) = run(&[logits], |t| ops::cross_entropy(&t[0], &targets));
    let (_, want) = run(std::slice::from_ref(&wide), |t| ops::cross_entropy(&t[0], &targets));
    same_bits("d logits", &grads[0], &want[0].to_dtype(dtype).unwrap());

    let table = wide.to_dtype(dtype).unwrap();
    let rows = ops::Embedding::from_tensor(table.clone()).forward(&ids("rows", &[4], 5)).unwrap();
    assert_eq!((rows.dtype(), rows.dims()), (dtype, &[4, 9][..]));
}
