//! Tests the head with its loss: compares it with the complete logits, and checks where its gradients are written.

use crate::check::{bits, check, close, floats, ids, normal, run, same_bits};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::Module;
use zero_ops as ops;
use zero_ops::sink::Gradients;

/// Computes the loss from the logits of all rows.
fn in_one_piece(x: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Tensor> {
    ops::cross_entropy(&ops::Linear::from_tensors(weight.clone(), None).forward(x)?, targets)
}

/// Rows, classes and inputs of cases with one chunk of rows and with several. A chunk has 1024 rows for few classes,
/// and fewer for many.
const SIZES: [(&[usize], usize, usize); 5] =
    [(&[5], 7, 3), (&[2, 3], 33, 8), (&[1], 1, 4), (&[2, 520], 9, 5), (&[520], 2100, 3)];

#[test]
fn against_candle() {
    for (lead, classes, inputs) in SIZES {
        let targets = ids("targets", lead, classes as u32);
        check(
            &[&[lead, &[inputs]].concat(), &[classes, inputs]],
            |t| ops::linear_cross_entropy(&t[0], &t[1], &targets, 1.0),
            |t| {
                let logits = t[0].reshape(((), inputs))?.matmul(&t[1].t()?)?;
                candle_nn::loss::cross_entropy(&logits, &targets.flatten_all()?)
            },
        );
    }
}

#[test]
fn chunks_do_not_change_results() {
    for (lead, classes, inputs) in SIZES {
        let targets = ids("targets", lead, classes as u32);
        let tensors = [normal("x", &[lead, &[inputs]].concat()), normal("w", &[classes, inputs])];
        let (want, grads_want) = run(&tensors, |t| in_one_piece(&t[0], &t[1], &targets));
        // `run` multiplies the loss by `gradient`. The head is given this factor, and then a wrong one that it must
        // correct.
        let gradient = floats(&normal("weights of the result", &[]))[0];
        for (foreseen, tolerance) in [(gradient, 0.0), (0.7, 3e-6)] {
            let (loss, grads) = run(&tensors, |t| ops::linear_cross_entropy(&t[0], &t[1], &targets, foreseen));
            same_bits("loss", &loss, &want);
            for (got, want) in grads.iter().zip(&grads_want) {
                close("gradient", got, want, tolerance);
            }
        }
    }
}

#[test]
fn rows_do_not_depend_on_the_rest_of_the_batch() {
    let (batch, rows) = (8, 160);
    let (x, weight) = (normal("x", &[batch, rows, 20]), normal("w", &[70, 20]));
    let targets = ids("targets", &[batch, rows], 70);
    let dx = |x: Tensor, targets: Tensor, gradient: f32| {
        let x = Var::from_tensor(&x).unwrap();
        let loss = ops::linear_cross_entropy(x.as_tensor(), &weight, &targets, gradient).unwrap();
        let grads = (loss * f64::from(gradient)).unwrap().backward().unwrap();
        grads.get(x.as_tensor()).unwrap().clone()
    };
    let whole = dx(x.clone(), targets.clone(), 1.0);
    for parts in [2, 4, 8] {
        let size = batch / parts;
        for part in 0..parts {
            let cut = |t: &Tensor| t.narrow(0, part * size, size).unwrap();
            let got = dx(cut(&x), cut(&targets), 1.0 / parts as f32);
            same_bits(&format!("part {part} of {parts}"), &got, &cut(&whole));
        }
    }
}

/// Creates a sink of two parameters with a gap between them.
fn sink(w: &Tensor, other: &Tensor, written: bool) -> Gradients {
    let n = w.elem_count();
    let mut sink = Gradients::default();
    let buffer = vec![if written { 0.5 } else { f32::NAN }; n + 1 + other.elem_count()];
    sink.add_buffer(buffer, [(w.id(), 0..n, written), (other.id(), n + 1..n + 1 + other.elem_count(), written)]);
    sink
}

#[test]
fn gradients_are_in_the_sink_before_the_backward() {
    let (rows, classes, inputs) = (1100, 9, 5);
    let targets = ids("targets", &[rows], classes as u32);
    let [x, w] = [normal("x", &[rows, inputs]), normal("w", &[classes, inputs])].map(|t| Var::from_tensor(&t).unwrap());
    let (x, w) = (x.as_tensor(), w.as_tensor());
    let plain = ops::linear_cross_entropy(x, w, &targets, 1.0).unwrap().backward().unwrap();
    for (gradient, written) in [(1.0f32, false), (0.25, false), (1.0, true), (0.25, true)] {
        let (sink, store) = sink(w, x, written).capture(|| {
            let loss = ops::linear_cross_entropy(x, w, &targets, gradient).unwrap();
            (loss * f64::from(gradient)).unwrap().backward().unwrap()
        });
        assert!(store.get(w).is_none() && sink.is_written(w.id()));
        let scaled = |t: &Tensor| (plain.get(t).unwrap() * f64::from(gradient)).unwrap();
        same_bits("dx", store.get(x).unwrap(), &scaled(x));
        let buffer = sink.into_buffers().remove(0);
        let before = if written { 0.5 } else { 0.0 };
        let want: Vec<u32> = floats(&scaled(w)).iter().map(|g| (before + g).to_bits()).collect();
        let got: Vec<u32> = buffer[..want.len()].iter().map(|v| v.to_bits()).collect();
        assert_eq!(got, want, "a gradient of {gradient}, existing contribution: {written}");
        assert!(buffer[want.len()..].iter().all(|v| v.is_nan() || written));
    }
    // A gradient that the forward has already written to the sink cannot be rescaled.
    let (_, error) = sink(w, x, false)
        .capture(|| ops::linear_cross_entropy(x, w, &targets, 1.0).unwrap().affine(2.0, 0.0).unwrap().backward());
    let error = error.expect_err("an error was expected").to_string();
    assert!(error.contains("the gradient of the loss is 2, but the forward assumed 1"), "{error}");
}

#[test]
fn frozen_inputs_get_no_gradient() {
    let targets = ids("targets", &[6], 9);
    let (x, w) = (normal("x", &[6, 4]), normal("w", &[9, 4]));
    let [x_var, w_var] = [&x, &w].map(|t| Var::from_tensor(t).unwrap().into_inner());
    let both = ops::linear_cross_entropy(&x_var, &w_var, &targets, 1.0).unwrap();
    let all = both.backward().unwrap();
    let grads = ops::linear_cross_entropy(&x_var, &w, &targets, 1.0).unwrap().backward().unwrap();
    assert!(bits(grads.get(&x_var).unwrap()) == bits(all.get(&x_var).unwrap()) && grads.get(&w).is_none());
    let grads = ops::linear_cross_entropy(&x, &w_var, &targets, 1.0).unwrap().backward().unwrap();
    assert!(bits(grads.get(&w_var).unwrap()) == bits(all.get(&w_var).unwrap()) && grads.get(&x).is_none());
    let loss = ops::linear_cross_entropy(&x, &w, &targets, 1.0).unwrap();
    same_bits("the loss alone", &loss, &both);
    assert!(!loss.track_op());
}

#[test]
fn in_16_bits_only_gradients_of_logits_are_rounded() {
    [DType::BF16, DType::F16].into_iter().for_each(the_gradients_of_logits_are_rounded);
}

fn the_gradients_of_logits_are_rounded(dtype: DType) {
    let targets = ids("targets", &[40], 9);
    let narrow = [normal("x", &[40, 6]), normal("w", &[9, 6])].map(|t| t.to_dtype(dtype).unwrap());
    let leaves = narrow.each_ref().map(|t| Var::from_tensor(t).unwrap().into_inner());
    let loss = ops::linear_cross_entropy(&leaves[0], &leaves[1], &targets, 1.0).unwrap();
    let grads = loss.backward().unwrap();

    let [x, w] = narrow.each_ref().map(|t| t.to_dtype(DType::F32).unwrap());
    let product = |rows: &Tensor, by: &Tensor| {
        let by = ops::Linear::from_tensors(by.t().unwrap().contiguous().unwrap(), None);
        by.forward(&rows.contiguous().unwrap()).unwrap()
    };
    let logits = Var::from_tensor(&product(&x, &w.t().unwrap())).unwrap().into_inner();
    let want = ops::cross_entropy(&logits, &targets).unwrap();
    same_bits("loss", &loss, &want);
    let narrow = |t: &Tensor| t.to_dtype(dtype).unwrap();
    let d_logits = narrow(want.backward().unwrap().get(&logits).unwrap()).to_dtype(DType::F32).unwrap();
    same_bits("dx", grads.get(&leaves[0]).unwrap(), &narrow(&product(&d_logits, &w)));
    same_bits("dW", grads.get(&leaves[1]).unwrap(), &narrow(&product(&d_logits.t().unwrap(), &x)));
}
