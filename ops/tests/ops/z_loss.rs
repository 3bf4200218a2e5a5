//! Tests cross-entropy plus the z-loss of PaLM (ln²Z) against the unfused expression and finite differences.

use crate::check::{check, close, floats, ids, normal, run, same_bits};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use zero_ops::{
    IGNORE_INDEX, cross_entropy, cross_entropy_with_z_loss, linear_cross_entropy, linear_cross_entropy_with_z_loss,
};

const Z_LOSS: f32 = 0.03;

/// Computes the mean loss over the rows with a target, with candle's operations.
fn plain(logits: &Tensor, targets: &[i64]) -> Result<Tensor> {
    let counted = (0..targets.len() as u32).filter(|&row| targets[row as usize] != IGNORE_INDEX);
    let rows: Vec<u32> = counted.collect();
    let of_rows: Vec<u32> = rows.iter().map(|&row| targets[row as usize] as u32).collect();
    let count = rows.len();
    let (rows, of_rows) =
        (Tensor::from_vec(rows, count, &Device::Cpu)?, Tensor::from_vec(of_rows, (count, 1), &Device::Cpu)?);
    let logits = logits.index_select(&rows, 0)?;
    let ln_z = logits.log_sum_exp(D::Minus1)?;
    let loss = (&ln_z - logits.gather(&of_rows, 1)?.squeeze(1)?)?;
    (loss + (ln_z.sqr()? * f64::from(Z_LOSS))?)?.mean_all()
}

#[test]
fn known_values() {
    // Two classes with Z = 4, and an ignored row.
    let logits = Tensor::new(&[[3f32.ln(), 0.0], [f32::INFINITY, f32::NAN]], &Device::Cpu).unwrap();
    let targets = Tensor::new(&[1i64, IGNORE_INDEX], &Device::Cpu).unwrap();
    let logits = Var::from_tensor(&logits).unwrap().into_inner();
    let loss = cross_entropy_with_z_loss(&logits, &targets, 0.5).unwrap();
    let ln_z = 4f32.ln();
    assert!((floats(&loss)[0] - (ln_z + 0.5 * ln_z * ln_z)).abs() < 1e-6, "{loss}");
    let gradient = floats(loss.backward().unwrap().get(&logits).unwrap());
    let want = [0.75 * (1.0 + ln_z), 0.25 * (1.0 + ln_z) - 1.0, 0.0, 0.0];
    assert!(gradient.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6), "{gradient:?}");
}

#[test]
fn against_candle_and_finite_differences() {
    let (rows, classes, inputs) = (23, 9, 5);
    for ignored in [0, 3] {
        let of = |row: i64| if ignored > 0 && row % ignored == 1 { IGNORE_INDEX } else { row * 5 % classes as i64 };
        let targets: Vec<i64> = (0..rows as i64).map(of).collect();
        let tensor = Tensor::new(&*targets, &Device::Cpu).unwrap();
        check(&[&[rows, classes]], |t| cross_entropy_with_z_loss(&t[0], &tensor, Z_LOSS), |t| plain(&t[0], &targets));
        check(
            &[&[rows, inputs], &[classes, inputs]],
            |t| Ok(linear_cross_entropy_with_z_loss(&t[0], &t[1], &tensor, 1.0, Z_LOSS)?.0),
            |t| plain(&t[0].matmul(&t[1].t()?)?, &targets),
        );
    }
}

/// Checks the part of the loss that the z-loss adds, in every dtype and with several chunks of rows.
#[test]
fn the_z_loss_is_reported_separately() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (rows, classes, inputs) in [(6, 9, 5), (2100, 7, 3)] {
            let [x, w] = [normal("x", &[rows, inputs]), normal("w", &[classes, inputs])].map(|t| t.to_dtype(dtype));
            let (x, w, targets) = (x.unwrap(), w.unwrap(), ids("targets", &[rows], classes as u32));
            let plain = linear_cross_entropy(&x, &w, &targets, 1.0).unwrap();
            let (loss, none) = linear_cross_entropy_with_z_loss(&x, &w, &targets, 1.0, 0.0).unwrap();
            same_bits("without a z-loss", &loss, &plain);
            assert!(none.is_none());
            let (loss, z) = linear_cross_entropy_with_z_loss(&x, &w, &targets, 1.0, Z_LOSS).unwrap();
            let z = z.expect("its part");
            close("the sum of both", &loss, &(&plain + &z).unwrap(), 1e-6);
            let [wide_x, wide_w] = [&x, &w].map(|t| t.to_dtype(DType::F32).unwrap());
            let ln_z = wide_x.matmul(&wide_w.t().unwrap()).unwrap().log_sum_exp(D::Minus1).unwrap();
            let want = (ln_z.sqr().unwrap().mean_all().unwrap() * f64::from(Z_LOSS)).unwrap();
            close("its part", &z, &want, 1e-5);
        }
        let (logits, targets) = (normal("logits", &[6, 9]).to_dtype(dtype).unwrap(), ids("targets", &[6], 9));
        let [got, want] = [false, true].map(|plain| {
            run(std::slice::from_ref(&logits), |t| match plain {
                true => cross_entropy(&t[0], &targets),
                false => cross_entropy_with_z_loss(&t[0], &targets, 0.0),
            })
        });
        same_bits("loss", &got.0, &want.0);
        same_bits("gradient", &got.1[0], &want.1[0]);
    }
}
