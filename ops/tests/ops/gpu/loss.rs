//! Cross-entropy, alone and in the head of a language model: results are within rounding of the CPU's.

use super::{EVERYWHERE, FLOATS, Into, both, gpu, on_host};
use crate::check::{close, floats, ids, normal, same_bits};
use candle_core::{DType, Device, Result, Tensor, Var};
use zero_ops::device::{Array, check};
use zero_ops::sink::{FlatBuffer, Gradients};
use zero_ops::{IGNORE_INDEX, cross_entropy, cross_entropy_with_z_loss};
use zero_ops::{linear_cross_entropy, linear_cross_entropy_with_z_loss};

/// Returns a tolerance that allows for another order of the sums and for their rounding.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 5e-6,
        DType::BF16 => 2f64.powi(-7),
        _ => 2f64.powi(-10),
    }
}

/// Returns the factor by which `trained` multiplies a loss.
fn upstream() -> f32 {
    floats(&normal("weights of the result", &[]))[0]
}

#[test]
fn cross_entropy_of_logits() {
    let Some(gpu) = gpu() else { return };
    for dtype in FLOATS {
        for (lead, classes) in [(&[5][..], 7), (&[2, 3], 700), (&[1], 1)] {
            let logits = [normal("logits", &[lead, &[classes]].concat()).to_dtype(dtype).unwrap()];
            let targets = ids("targets", lead, classes as u32);
            let op = |t: &[Tensor]| cross_entropy(&t[0], &targets.to_device(t[0].device())?);
            let [got, want] = both(&gpu, &logits, Into::Store, op);
            assert_eq!(got.0.dtype(), DType::F32);
            close("loss", &got.0, &want.0, 1e-6);
            close("gradient", &got.1[0], &want.1[0], tolerance(dtype));
        }
    }
}

/// The case with 4,100 rows needs several chunks: a chunk has at most 4,096 rows on a GPU, and 1,024 on the CPU.
const SIZES: [(&[usize], usize, usize); 4] = [(&[5], 7, 3), (&[2, 3], 33, 8), (&[1], 1, 4), (&[4100], 9, 4)];

#[test]
fn cross_entropy_of_a_head() {
    let Some(gpu) = gpu() else { return };
    for dtype in FLOATS {
        for (lead, classes, inputs) in SIZES {
            if dtype != DType::F32 && lead[0] > 1000 {
                continue;
            }
            let inputs = [normal("x", &[lead, &[inputs]].concat()), normal("w", &[classes, inputs])];
            let inputs = inputs.map(|x| x.to_dtype(dtype).unwrap());
            let targets = ids("targets", lead, classes as u32);
            for into in EVERYWHERE {
                // Without a sink, the backward rescales the gradients, so the foreseen factor may be wrong.
                let foreseen = if into == Into::Store { 2.0 } else { upstream() };
                let op =
                    |t: &[Tensor]| linear_cross_entropy(&t[0], &t[1], &targets.to_device(t[0].device())?, foreseen);
                let [got, want] = both(&gpu, &inputs, into, op);
                close("loss", &got.0, &want.0, 1e-6);
                close(&format!("dx {into:?}"), &got.1[0], &want.1[0], tolerance(dtype));
                close(&format!("dW {into:?}"), &got.1[1], &want.1[1], tolerance(dtype));
            }
        }
    }
}

/// Checks both operations with a z-loss, and the part of the loss that the z-loss adds.
#[test]
fn z_losses() -> Result<()> {
    const Z_LOSS: f32 = 0.05;
    let Some(gpu) = gpu() else { return Ok(()) };
    for dtype in FLOATS {
        let targets = Tensor::new(&[3i64, IGNORE_INDEX, 8, 0], &Device::Cpu)?;
        let on = |t: &Tensor| targets.to_device(t.device());
        let logits = [normal("logits", &[4, 70]).to_dtype(dtype)?];
        let [got, want] = both(&gpu, &logits, Into::Store, |t| cross_entropy_with_z_loss(&t[0], &on(&t[0])?, Z_LOSS));
        close("loss", &got.0, &want.0, 1e-6);
        close("gradient", &got.1[0], &want.1[0], tolerance(dtype));
        let inputs = [normal("x", &[4, 5]).to_dtype(dtype)?, normal("w", &[9, 5]).to_dtype(dtype)?];
        for into in EVERYWHERE {
            let op =
                |t: &[Tensor]| Ok(linear_cross_entropy_with_z_loss(&t[0], &t[1], &on(&t[0])?, upstream(), Z_LOSS)?.0);
            let [got, want] = both(&gpu, &inputs, into, op);
            close("loss", &got.0, &want.0, 1e-6);
            close(&format!("dx {into:?}"), &got.1[0], &want.1[0], tolerance(dtype));
            close(&format!("dW {into:?}"), &got.1[1], &want.1[1], tolerance(dtype));
        }
        let part = |device: &Device| {
            let [x, w] = inputs.each_ref().map(|t| t.to_device(device));
            let (_, z) = linear_cross_entropy_with_z_loss(&x?, &w?, &targets.to_device(device)?, 1.0, Z_LOSS)?;
            z.expect("its part").to_scalar::<f32>()
        };
        let [got, want] = [part(&gpu)?, part(&Device::Cpu)?];
        assert!(want > 0.0 && (got - want).abs() <= 1e-5 * want, "{got} for {want}");
    }
    check(&gpu)
}

/// Checks rows that are ignored because their target is −100: every third row, or all rows.
#[test]
fn ignored_rows() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for dtype in FLOATS {
        for none in [false, true] {
            let targets: Vec<i64> =
                (0..12).map(|row| if none || row % 3 == 1 { IGNORE_INDEX } else { row % 9 }).collect();
            let targets = Tensor::from_vec(targets, (3, 4), &Device::Cpu)?;
            let on = |t: &Tensor| targets.to_device(t.device());
            let logits = [normal("logits", &[3, 4, 70]).to_dtype(dtype)?];
            let [got, want] = both(&gpu, &logits, Into::Store, |t| cross_entropy(&t[0], &on(&t[0])?));
            close("loss", &got.0, &want.0, 1e-6);
            close("gradient", &got.1[0], &want.1[0], tolerance(dtype));
            assert_eq!(floats(&got.0)[0] == 0.0, none);
            let inputs = [normal("x", &[3, 4, 5]).to_dtype(dtype)?, normal("w", &[9, 5]).to_dtype(dtype)?];
            for into in EVERYWHERE {
                let op = |t: &[Tensor]| linear_cross_entropy(&t[0], &t[1], &on(&t[0])?, upstream());
                let [got, want] = both(&gpu, &inputs, into, op);
                close("loss", &got.0, &want.0, 1e-6);
                close(&format!("dx {into:?}"), &got.1[0], &want.1[0], tolerance(dtype));
                close(&format!("dW {into:?}"), &got.1[1], &want.1[1], tolerance(dtype));
                assert!(floats(&got.1[0])[5..10].iter().all(|&x| x == 0.0));
            }
        }
    }
    check(&gpu)?;
    let targets = Tensor::new(&[-100i64, -99], &gpu)?;
    assert!(cross_entropy(&normal("logits", &[2, 9]).to_device(&gpu)?, &targets)?.to_scalar::<f32>()?.is_nan());
    let error = check(&gpu).expect_err("an error").to_string();
    assert!(error.contains("cross-entropy: index -99 at position 1 is not below 9"), "{error}");
    Ok(())
}

#[test]
fn frozen_inputs_get_no_gradient() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let targets = ids("targets", &[6], 9).to_device(&gpu)?;
    let (x, w) = (normal("x", &[6, 4]).to_device(&gpu)?, normal("w", &[9, 4]).to_device(&gpu)?);
    let (x_var, w_var) = (Var::from_tensor(&x)?.into_inner(), Var::from_tensor(&w)?.into_inner());
    let both = linear_cross_entropy(&x_var, &w_var, &targets, 1.0)?;
    let all = both.backward()?;
    let same = |what: &str, got: &Tensor, want: &Tensor| same_bits(what, &on_host(got), &on_host(want));
    let grads = linear_cross_entropy(&x_var, &w, &targets, 1.0)?.backward()?;
    assert!(grads.get(&w).is_none());
    same("dx", grads.get(&x_var).expect("a gradient"), all.get(&x_var).expect("a gradient"));
    let grads = linear_cross_entropy(&x, &w_var, &targets, 1.0)?.backward()?;
    assert!(grads.get(&x).is_none());
    same("dW", grads.get(&w_var).expect("a gradient"), all.get(&w_var).expect("a gradient"));
    let loss = linear_cross_entropy(&x, &w, &targets, 1.0)?;
    same("the loss alone", &loss, &both);
    assert!(!loss.track_op());
    // A graph may run its backward twice.
    let again = (both * 3.0)?.backward()?;
    close("dx", &on_host(again.get(&x_var).expect("a gradient")), &on_host(&(all.get(&x_var).unwrap() * 3.0)?), 1e-6);
    Ok(())
}

#[test]
fn invalid_input_is_an_error_later() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let (x, w) = (normal("x", &[3, 4]).to_device(&gpu)?, normal("w", &[9, 4]).to_device(&gpu)?);
    let w = Var::from_tensor(&w)?.into_inner();
    let targets = Tensor::new(&[0i64, 8, 9], &Device::Cpu)?.to_device(&gpu)?;
    let loss = linear_cross_entropy(&x, &w, &targets, 1.0)?;
    assert!(loss.to_scalar::<f32>()?.is_nan());
    let error = check(&gpu).expect_err("an error").to_string();
    assert!(error.contains("linear-cross-entropy: index 9 at position 2 is not below 9"), "{error}");
    let logits = normal("logits", &[3, 9]).to_device(&gpu)?;
    assert!(cross_entropy(&logits, &targets)?.to_scalar::<f32>()?.is_nan());
    let error = check(&gpu).expect_err("an error").to_string();
    assert!(error.contains("cross-entropy: index 9 at position 2 is not below 9"), "{error}");

    // A gradient that the forward has already written to the sink cannot be rescaled.
    let targets = ids("targets", &[3], 9).to_device(&gpu)?;
    let mut sink = Gradients::default();
    sink.add_buffer(FlatBuffer::Device(Array::room(gpu.as_cuda_device()?, 36)?), [(w.id(), 0..36, false)]);
    let (_, store) = sink.capture(|| (linear_cross_entropy(&x, &w, &targets, 1.0)? * 2.0)?.backward());
    assert!(store?.get(&w).is_none());
    let error = check(&gpu).expect_err("an error").to_string();
    assert!(error.contains("the gradient of the loss is 2, but the forward assumed 1"), "{error}");
    let targets = ids("targets", &[3], 9);
    let error = linear_cross_entropy(&x, &w, &targets, 1.0).expect_err("an error").to_string();
    assert!(error.contains("expected indices on a GPU"), "{error}");
    Ok(())
}
