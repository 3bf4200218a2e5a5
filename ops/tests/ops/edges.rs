//! Tests that bad input produces errors that name the cause, that extreme input stays finite where it should, and that
//! frozen parameters cost nothing. Also tests dropout.

use crate::check::{close, floats, ids, normal, run, same_bits};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor, Var, op::BackpropOp};
use candle_nn::Module;
use zero_ops as ops;
use zero_ops::Pass;

#[track_caller]
fn refuses(result: candle_core::Result<Tensor>, words: &str) {
    let message = result.expect_err("an error was expected").to_string();
    assert!(message.contains(words), "`{message}` does not contain `{words}`");
}

#[test]
fn errors_name_the_cause() {
    let n = |shape: &[usize]| normal("x", shape);
    let linear = ops::Linear::from_tensors(n(&[3, 4]), Some(n(&[3])));
    refuses(linear.forward(&n(&[2, 5])), "4 inputs");
    refuses(ops::Linear::from_tensors(n(&[3, 4]), Some(n(&[2]))).forward(&n(&[2, 4])), "bias");
    refuses(ops::Linear::from_tensors(n(&[0, 4]), None).forward(&n(&[2, 4])), "no elements");
    refuses(linear.forward(&n(&[2, 4]).to_dtype(DType::F64).unwrap()), "F64");
    let table = ops::Embedding::from_tensor(n(&[5, 2]));
    let at = |id: i64| Tensor::new(&[0i64, id], &Device::Cpu).unwrap();
    refuses(table.forward(&at(5)), "index 5 at position 1 is not below 5");
    refuses(table.forward(&at(-1)), "index -1 at position 1");
    refuses(table.forward(&n(&[2])), "dtype");
    refuses(ops::cross_entropy(&n(&[2, 3]), &at(3)), "index 3 at position 1 is not below 3");
    refuses(ops::cross_entropy(&n(&[3, 3]), &at(0)), "match");
    refuses(ops::cross_entropy(&n(&[0, 3]), &ids("t", &[0], 3)), "match");
    refuses(ops::linear_cross_entropy(&n(&[2, 4]), &n(&[3, 4]), &at(3), 1.0), "index 3 at position 1 is not below 3");
    refuses(ops::linear_cross_entropy(&n(&[2, 4]), &n(&[3, 5]), &at(0), 1.0), "match the weight");
    refuses(ops::linear_cross_entropy(&n(&[2, 4]), &n(&[0, 4]), &at(0), 1.0), "match the weight");
    refuses(ops::linear_cross_entropy(&n(&[3, 4]), &n(&[3, 4]), &at(0), 1.0), "match the targets");
    refuses(ops::linear_cross_entropy(&n(&[0, 4]), &n(&[3, 4]), &ids("t", &[0], 3), 1.0), "match the targets");
    refuses(ops::LayerNorm::from_tensors(n(&[3]), n(&[4]), 1e-5).forward(&n(&[2, 3])), "bias");
    refuses(ops::RmsNorm::from_tensor(n(&[4]), 1e-5).forward(&n(&[2, 3])), "weight");
    refuses(ops::swiglu(&n(&[2, 3]), &n(&[3, 2])), "shape");
    refuses(ops::causal_attention(&n(&[1, 2, 3, 4]), &n(&[1, 2, 2, 4]), &n(&[1, 2, 2, 4])), "not a multiple of 2");
    refuses(ops::causal_attention(&n(&[1, 2, 2, 4]), &n(&[1, 3, 2, 4]), &n(&[1, 3, 2, 4])), "do not match");
    refuses(ops::causal_attention_packed(&n(&[1, 2, 8]), 2), "three times 2 heads");
    refuses(ops::causal_attention_packed(&n(&[1, 2, 6]), 0), "0 heads");
    let within = |span| ops::causal_attention_packed_within(&n(&[1, 2, 12]), 2, &span);
    refuses(within(ops::AttentionSpan::default().window(0)), "at least 1 position");
    refuses(within(ops::AttentionSpan::default().position_ids(at(0))), "do not match 1 rows of 2 positions");
    refuses(within(ops::AttentionSpan::default().position_ids(n(&[1, 2]))), "dtype");
    let rotary = ops::Rotary::new(4, 3, 1e4).unwrap();
    refuses(rotary.apply(&n(&[1, 4, 1, 4])), "longer than the 3 positions");
    refuses(rotary.apply(&n(&[1, 2, 1, 6])), "heads of size 4");
    refuses(rotary.apply_at(&n(&[1, 2, 1, 4]), &ids("p", &[2, 1], 3)), "do not match 1 rows of 2 tokens");
    let three = Tensor::new(&[[0u32, 3]], &Device::Cpu).unwrap();
    refuses(rotary.apply_at(&n(&[1, 2, 1, 4]), &three), "index 3 at position 1 is not below 3");
    refuses(within(ops::AttentionSpan::default().position_ids(three)), "position_ids[0, 1] is 3");
    assert!(ops::Rotary::new(5, 3, 1e4).is_err());
    let llama3 = |factor, low_freq_factor, high_freq_factor| ops::RopeScaling::Llama3 {
        factor,
        low_freq_factor,
        high_freq_factor,
        original_max_position_embeddings: 8,
    };
    assert!(ops::Rotary::scaled(4, 3, 1e4, &llama3(8.0, 1.0, 4.0)).is_ok());
    for scaling in [
        ops::RopeScaling::Linear { factor: 0.0 },
        ops::RopeScaling::Linear { factor: f64::NAN },
        llama3(-1.0, 1.0, 4.0),
        llama3(8.0, 0.0, 4.0),
        llama3(8.0, 4.0, 4.0),
        llama3(8.0, 1.0, f64::INFINITY),
    ] {
        assert!(ops::Rotary::scaled(4, 3, 1e4, &scaling).is_err(), "{scaling:?}");
    }
    let pass = Pass { training: true, seed: 1, step: 1, sample: 0, layer: 0 };
    refuses(ops::dropout(&n(&[2]), 1.0, "d", &pass), "probability");
    refuses(ops::dropout(&n(&[2]), f32::NAN, "d", &pass), "probability");
}

/// A released parameter holds an empty F4 storage under its full shape.
#[test]
fn a_released_parameter_is_an_error() {
    let released =
        |shape: &[usize]| Tensor::from_storage(Storage::Cpu(CpuStorage::F4(vec![])), shape, BackpropOp::none(), true);
    let x = normal("x", &[2, 4]);
    refuses(ops::Linear::from_tensors(released(&[3, 4]), None).forward(&x), "linear");
    refuses(ops::linear_cross_entropy(&x, &released(&[3, 4]), &ids("i", &[2], 3), 1.0), "linear-cross-entropy");
    refuses(ops::LayerNorm::from_tensors(released(&[4]), released(&[4]), 1e-5).forward(&x), "layer-norm");
    refuses(ops::RmsNorm::from_tensor(released(&[4]), 1e-5).forward(&x), "rms-norm");
    refuses(ops::Embedding::from_tensor(released(&[4, 2])).forward(&ids("i", &[2], 4)), "embedding");
    let empty = Tensor::from_storage(Storage::Cpu(CpuStorage::F32(vec![])), &[3, 4][..], BackpropOp::none(), true);
    refuses(ops::Linear::from_tensors(empty, None).forward(&x), "the storage has 0");
}

#[test]
fn empty_batches_pass_through() {
    let n = |shape: &[usize]| normal("x", shape);
    let (y, grads) = run(&[n(&[0, 4]), n(&[3, 4])], |t| ops::Linear::from_tensors(t[1].clone(), None).forward(&t[0]));
    assert_eq!((y.dims(), floats(&grads[1])), (&[0, 3][..], vec![0.0; 12]));
    let (y, _) = run(&[n(&[0, 5, 2, 4])], |t| ops::causal_attention(&t[0], &t[0], &t[0]));
    assert_eq!(y.dims(), [0, 5, 2, 4]);
    let (y, _) = run(&[n(&[2, 0, 12])], |t| ops::causal_attention_packed(&t[0], 2));
    assert_eq!(y.dims(), [2, 0, 4]);
    let none = ops::AttentionSpan::default().window(3).position_ids(ids("position_ids", &[2, 0], 3));
    assert_eq!(ops::causal_attention_packed_within(&n(&[2, 0, 12]), 2, &none).unwrap().dims(), [2, 0, 4]);
    let (y, _) = run(&[n(&[0, 4]), n(&[4]), n(&[4])], |t| {
        ops::LayerNorm::from_tensors(t[1].clone(), t[2].clone(), 1e-5).forward(&t[0])
    });
    assert_eq!(y.dims(), [0, 4]);
}

#[test]
fn extreme_values_stay_finite() {
    let x = Tensor::new(&[-1e30f32, -1e4, -100.0, -50.0, 0.0, 50.0, 100.0, 1e4, 1e30], &Device::Cpu).unwrap();
    for (name, op) in
        [("gelu", ops::gelu as fn(&Tensor) -> _), ("gelu erf", ops::gelu_erf), ("silu", ops::silu), ("relu", ops::relu)]
    {
        let (y, grads) = run(std::slice::from_ref(&x), |t| op(&t[0]));
        assert!(floats(&y).iter().chain(&floats(&grads[0])).all(|v| v.is_finite()), "{name}: {y} {}", grads[0]);
        assert!(floats(&y)[..4].iter().all(|v| v.abs() < 1e-7) && floats(&y)[5] == 50.0, "{name}: {y}");
    }
    let logits = Tensor::new(&[[1e30f32, -1e30, 0.0], [500.0, 499.0, -500.0]], &Device::Cpu).unwrap();
    let targets = Tensor::new(&[0u32, 0], &Device::Cpu).unwrap();
    let (loss, grads) = run(&[logits], |t| ops::cross_entropy(&t[0], &targets));
    assert!((floats(&loss)[0] - 0.5 * (1.0 + (-1f32).exp()).ln()).abs() < 1e-6, "{loss}");
    assert!(floats(&grads[0]).iter().all(|v| v.is_finite()));
    let q = (normal("q", &[1, 70, 1, 4]) * 1e4).unwrap();
    let (y, grads) = run(&[q], |t| ops::causal_attention(&t[0], &t[0], &t[0]));
    assert!(floats(&y).iter().chain(&floats(&grads[0])).all(|v| v.is_finite()));
}

#[test]
fn nan_propagates() {
    let mut values = floats(&normal("x", &[2, 8]));
    values[3] = f32::NAN;
    let x = Tensor::from_vec(values, (2, 8), &Device::Cpu).unwrap();
    let loss = ops::cross_entropy(&x, &Tensor::new(&[0u32, 0], &Device::Cpu).unwrap()).unwrap();
    assert!(floats(&loss)[0].is_nan());
    for op in [ops::gelu, ops::gelu_erf, ops::silu, ops::relu] {
        assert!(floats(&op(&x).unwrap())[3].is_nan());
    }
    // Position 0 does not see the key with the NaN.
    let mut keys = floats(&normal("k", &[1, 20, 1, 4]));
    keys[4] = f32::NAN;
    let (q, k) = (normal("q", &[1, 20, 1, 4]), Tensor::from_vec(keys, (1, 20, 1, 4), &Device::Cpu).unwrap());
    let y = floats(&ops::causal_attention(&q, &k, &q).unwrap());
    assert!(y[..4].iter().all(|v| v.is_finite()) && y[4..].iter().all(|v| v.is_nan()), "{y:?}");
    let norm = ops::LayerNorm::from_tensors(normal("w", &[8]), normal("b", &[8]), 1e-5);
    assert!(floats(&norm.forward(&x).unwrap())[..8].iter().all(|v| v.is_nan()));
}

#[test]
fn frozen_parameters_get_no_gradient() {
    let x = Var::from_tensor(&normal("x", &[3, 4])).unwrap();
    let (w, b) = (normal("w", &[5, 4]), normal("b", &[5]));
    let y = ops::Linear::from_tensors(w.clone(), Some(b.clone())).forward(x.as_tensor()).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert!(grads.get(x.as_tensor()).is_some() && grads.get(&w).is_none() && grads.get(&b).is_none());

    // If the weight is trained and the input is frozen, the backward computes no dx.
    let (x, w) = (normal("x", &[3, 4]), Var::from_tensor(&w).unwrap());
    let y = ops::Linear::from_tensors(w.as_tensor().clone(), None).forward(&x).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert!(grads.get(w.as_tensor()).is_some() && grads.get(&x).is_none());

    let (w, b) = (normal("w", &[4]), Var::from_tensor(&normal("b", &[4])).unwrap());
    let y = ops::LayerNorm::from_tensors(w.clone(), b.as_tensor().clone(), 1e-5).forward(&x).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert!(grads.get(b.as_tensor()).is_some() && grads.get(&w).is_none() && grads.get(&x).is_none());
}

#[test]
fn dropout() {
    let pass = Pass { training: true, seed: 5, step: 1, sample: 40, layer: 2 };
    let x = Tensor::ones((8, 30, 50), DType::F32, &Device::Cpu).unwrap();
    let (y, grads) = run(std::slice::from_ref(&x), |t| ops::dropout(&t[0], 0.25, "d", &pass));
    let kept = floats(&y).iter().filter(|v| **v != 0.0).count() as f64 / y.elem_count() as f64;
    assert!((kept - 0.75).abs() < 0.01, "kept {kept}");
    assert!(floats(&y).iter().all(|v| *v == 0.0 || *v == 1.0 / 0.75));
    // The backward uses the mask of the forward.
    let weights = normal("weights of the result", y.dims());
    close("gradient", &grads[0], &(&y * weights).unwrap(), 0.0);
    // A sample keeps its mask in another micro-batch; other layers, names and seeds have other masks.
    let later = ops::dropout(&x.narrow(0, 3, 5).unwrap(), 0.25, "d", &Pass { sample: 43, ..pass }).unwrap();
    same_bits("another micro-batch", &later, &y.narrow(0, 3, 5).unwrap());
    for other in [Pass { layer: 3, ..pass }, Pass { seed: 6, ..pass }, Pass { sample: 80, ..pass }] {
        assert!(floats(&ops::dropout(&x, 0.25, "d", &other).unwrap()) != floats(&y));
    }
    assert!(floats(&ops::dropout(&x, 0.25, "e", &pass).unwrap()) != floats(&y));
    // Evaluation returns the input unchanged.
    let evaluation = ops::dropout(&x, 0.25, "d", &Pass { training: false, ..pass }).unwrap();
    same_bits("evaluation", &evaluation, &x);
}
