//! Compares sums of log-probabilities and the losses of preference pairs with candle and finite differences.

use crate::check::{check, close, ids, normal, run, same_bits};
use candle_core::{D, DType, Device, Result, Tensor};
use zero_ops::PreferenceLoss as Loss;
use zero_ops::{IGNORE_INDEX, linear_log_probs, preference_loss};

/// Returns labels, of which every third is ignored, and the group of each label.
fn labels(batch: usize, time: usize, classes: usize, groups: usize) -> (Tensor, Tensor) {
    let labels: Vec<u32> = ids("labels", &[batch * time], classes as u32).to_vec1().unwrap();
    let labels =
        labels.iter().enumerate().map(|(at, &label)| if at % 3 == 1 { IGNORE_INDEX } else { i64::from(label) });
    let labels = Tensor::from_iter(labels, &Device::Cpu).unwrap().reshape((batch, time)).unwrap();
    (labels, ids("groups", &[batch, time], groups as u32).to_dtype(DType::U8).unwrap())
}

/// Computes the sums from the logits of all rows at once.
fn in_one_piece(x: &Tensor, weight: &Tensor, labels: &Tensor, of_group: &Tensor, groups: usize) -> Result<Tensor> {
    let log_p = candle_nn::ops::log_softmax(&x.broadcast_matmul(&weight.t()?)?, D::Minus1)?;
    let counts = labels.ge(0i64)?;
    let of_labels = log_p.gather(&labels.maximum(0i64)?.unsqueeze(2)?, 2)?.squeeze(2)?;
    let sum = |group: usize| {
        let mask = of_group.eq(group as u8)?.mul(&counts)?.to_dtype(of_labels.dtype())?;
        (&of_labels * mask)?.sum(1)
    };
    Tensor::stack(&(0..groups).map(sum).collect::<Result<Vec<_>>>()?, 1)
}

/// Compares with candle, with one chunk of rows and with several.
#[test]
fn sums_of_log_probabilities_against_candle() {
    for (batch, time, classes, inputs, groups) in [(2, 6, 7, 3, 3), (1, 1, 4, 2, 1), (3, 700, 9, 5, 2)] {
        let (labels, of_group) = labels(batch, time, classes, groups);
        check(
            &[&[batch, time, inputs], &[classes, inputs]],
            |t| linear_log_probs(&t[0], &t[1], &labels, &of_group, groups),
            |t| in_one_piece(&t[0], &t[1], &labels, &of_group, groups),
        );
    }
}

#[test]
fn samples_of_a_batch_do_not_depend_on_each_other() {
    let (batch, time, classes, inputs, groups) = (4, 600, 11, 6, 3);
    let (labels, of_group) = labels(batch, time, classes, groups);
    let (x, weight) = (normal("x", &[batch, time, inputs]), normal("w", &[classes, inputs]));
    let whole = linear_log_probs(&x, &weight, &labels, &of_group, groups).unwrap();
    for sample in 0..batch {
        let of = |t: &Tensor| t.narrow(0, sample, 1).unwrap();
        let alone = linear_log_probs(&of(&x), &weight, &of(&labels), &of(&of_group), groups).unwrap();
        same_bits("sums", &alone, &of(&whole));
    }
}

#[test]
fn gradients_of_16_bit_models_are_those_of_f32_rounded() {
    let (batch, time, classes, inputs, groups) = (2, 40, 13, 8, 3);
    let (labels, of_group) = labels(batch, time, classes, groups);
    for (dtype, tolerance) in [(DType::BF16, 2e-2), (DType::F16, 3e-3)] {
        let inputs = [normal("x", &[batch, time, inputs]), normal("w", &[classes, inputs])];
        let narrow = inputs.clone().map(|t| t.to_dtype(dtype).unwrap());
        let wide = narrow.clone().map(|t| t.to_dtype(DType::F32).unwrap());
        let op = |t: &[Tensor]| linear_log_probs(&t[0], &t[1], &labels, &of_group, groups);
        let ((sums, grads), (sums_wide, grads_wide)) = (run(&narrow, op), run(&wide, op));
        assert_eq!((sums.dtype(), grads[0].dtype()), (DType::F32, dtype));
        close("sums", &sums, &sums_wide, 1e-6);
        grads.iter().zip(&grads_wide).for_each(|(got, want)| close("gradient", got, want, tolerance));
    }
}

/// Computes a loss with the formula as its authors write it.
fn written(loss: Loss, log_probs: &Tensor, reference: &Tensor, counts: &Tensor) -> Result<Tensor> {
    let column = |t: &Tensor, at: usize| t.narrow(1, at, 1);
    let log_sigmoid = |x: &Tensor| candle_nn::ops::sigmoid(x)?.log();
    let counts = counts.to_dtype(log_probs.dtype())?;
    let ratio = |at| column(log_probs, at)? - column(&reference.to_dtype(log_probs.dtype())?, at)?;
    let mean = |at| column(log_probs, at)? / column(&counts, at)?;
    let delta = (ratio(0)? - ratio(1)?)?;
    let each = match loss {
        Loss::Sigmoid { beta } => log_sigmoid(&(delta * beta)?)?.neg()?,
        Loss::Hinge { beta } => (1.0 - (delta * beta)?)?.relu()?,
        Loss::Ipo { beta } => {
            let delta = ((ratio(0)? / column(&counts, 0)?)? - (ratio(1)? / column(&counts, 1)?)?)?;
            (delta - 0.5 / beta)?.sqr()?
        }
        Loss::Robust { beta, label_smoothing: e } => {
            let (right, wrong) = (log_sigmoid(&(&delta * beta)?)?, log_sigmoid(&(&delta * -beta)?)?);
            (((right * (e - 1.0))? + (wrong * e)?)? / (1.0 - 2.0 * e))?
        }
        Loss::Orpo { beta } => {
            let odds = |at| -> Result<Tensor> { mean(at)?.exp()? / (1.0 - mean(at)?.exp()?)? };
            let ratio = log_sigmoid(&(odds(0)? / odds(1)?)?.log()?)?;
            let both = (column(log_probs, 0)? + column(log_probs, 2)?)?;
            ((both / (column(&counts, 0)? + column(&counts, 2)?)?)?.neg()? - (ratio * beta)?)?
        }
        Loss::SimPo { beta, gamma } => log_sigmoid(&((((mean(0)? - mean(1)?)? * beta)?) - gamma)?)?.neg()?,
    };
    each.mean_all()
}

#[test]
fn losses_against_their_formulas() {
    let pairs = 5;
    let counts = (ids("counts", &[pairs, 3], 6).to_dtype(DType::F32).unwrap() + 1.0).unwrap();
    let reference = (normal("reference", &[pairs, 2]) * 2.0).unwrap();
    for loss in [
        Loss::Sigmoid { beta: 0.3 },
        Loss::Hinge { beta: 0.2 },
        Loss::Ipo { beta: 0.5 },
        Loss::Robust { beta: 0.3, label_smoothing: 0.1 },
        Loss::Orpo { beta: 0.4 },
        Loss::SimPo { beta: 2.0, gamma: 0.5 },
    ] {
        // Logarithms of probabilities are negative.
        let negative = |t: &Tensor| t.sqr()?.neg()? - 0.5;
        check(
            &[&[pairs, 3]],
            |t| preference_loss(&negative(&t[0])?, &reference, &counts, loss),
            |t| written(loss, &negative(&t[0])?, &reference, &counts),
        );
    }
}

#[test]
fn large_margins_and_nan_are_exact() {
    let of = |loss, chosen: f32| {
        let log_probs = Tensor::new(&[[chosen, 0.0, 0.0]], &Device::Cpu).unwrap();
        let (reference, counts) = (Tensor::zeros((1, 2), DType::F32, &Device::Cpu), Tensor::ones_like(&log_probs));
        preference_loss(&log_probs, &reference.unwrap(), &counts.unwrap(), loss).unwrap().to_scalar::<f32>().unwrap()
    };
    assert_eq!(of(Loss::Sigmoid { beta: 1.0 }, -1e4), 1e4);
    assert_eq!(of(Loss::Sigmoid { beta: 1.0 }, 1e4), 0.0);
    for loss in [Loss::Sigmoid { beta: 1.0 }, Loss::Hinge { beta: 1.0 }] {
        assert!(of(loss, f32::NAN).is_nan(), "{loss:?}");
    }
}

#[test]
fn bad_operands_are_errors() {
    let (labels, of_group) = labels(2, 6, 7, 3);
    let of = |x: &[usize], w: &[usize], groups: usize| {
        linear_log_probs(&normal("x", x), &normal("w", w), &labels, &of_group, groups).unwrap_err().to_string()
    };
    assert!(of(&[2, 6, 3], &[7, 4], 3).contains("does not match the weight"));
    assert!(of(&[2, 5, 3], &[7, 3], 3).contains("does not match the labels"));
    assert!(of(&[2, 6, 3], &[5, 3], 3).contains("is not below 5"));
    assert!(of(&[2, 6, 3], &[7, 3], 2).contains("is not below 2"));
    let (two, three) = (normal("r", &[2, 2]), normal("c", &[2, 3]));
    let loss = |a: &Tensor, b: &Tensor, c: &Tensor| {
        preference_loss(a, b, c, Loss::Sigmoid { beta: 1.0 }).unwrap_err().to_string()
    };
    assert!(loss(&two, &two, &three).contains("do not match"));
    assert!(loss(&three, &three, &three).contains("do not match"));
    assert!(loss(&three, &two, &three.zeros_like().unwrap()).contains("of pair 0 has no tokens"));
}
