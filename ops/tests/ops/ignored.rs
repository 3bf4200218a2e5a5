//! Rows without a target are ignored: cross-entropy, alone and in the head, gives the results of the other rows alone.

use crate::check::{check, close, floats, ids, normal, run, same_bits};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use zero_ops::sink::Gradients;
use zero_ops::{IGNORE_INDEX, count_targets, cross_entropy, linear_cross_entropy};

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Returns masks of ignored rows: none, the first, the last, every third, blocks as in a chat, all but one.
fn masks(rows: usize) -> Vec<Vec<bool>> {
    let of = |ignored: &dyn Fn(usize) -> bool| (0..rows).map(ignored).collect::<Vec<_>>();
    vec![
        of(&|_| false),
        of(&|row| row == 0),
        of(&|row| row + 1 == rows),
        of(&|row| row % 3 == 1),
        of(&|row| row / 7 % 2 == 0),
        of(&|row| row != rows / 2),
    ]
}

/// Replaces the targets of ignored rows. Returns the i64 targets of all rows, and the u32 targets and indices of the
/// other rows.
fn masked(targets: &Tensor, mask: &[bool]) -> (Tensor, Tensor, Tensor) {
    let all: Vec<u32> = targets.flatten_all().unwrap().to_vec1().unwrap();
    let some = all.iter().zip(mask).map(|(&target, &ignored)| if ignored { IGNORE_INDEX } else { target.into() });
    let kept: Vec<u32> = (0..all.len() as u32).filter(|&row| !mask[row as usize]).collect();
    let others: Vec<u32> = kept.iter().map(|&row| all[row as usize]).collect();
    let on = &Device::Cpu;
    let of_kept = |values: Vec<u32>| Tensor::from_vec(values, kept.len(), on).unwrap();
    let some = Tensor::from_vec(some.collect::<Vec<i64>>(), targets.shape(), on).unwrap();
    (some, of_kept(others), of_kept(kept.clone()))
}

fn i64s(targets: &Tensor) -> Tensor {
    targets.to_dtype(DType::I64).unwrap()
}

fn select(x: &Tensor, rows: &Tensor) -> Tensor {
    x.flatten(0, x.rank() - 2).unwrap().index_select(rows, 0).unwrap()
}

/// Checks that a gradient equals `want` in the kept rows and is zero in the ignored rows.
fn check_rows(what: &str, got: &Tensor, want: &Tensor, kept: &Tensor) {
    same_bits(what, &select(got, kept), want);
    let (got, width) = (floats(got), got.dim(D::Minus1).unwrap());
    let kept: Vec<u32> = kept.to_vec1().unwrap();
    let ignored = (0..got.len() / width).filter(|row| !kept.contains(&(*row as u32)));
    let ignored = ignored.flat_map(|row| got[row * width..(row + 1) * width].iter());
    assert!(ignored.into_iter().all(|x| x.to_bits() == 0), "{what}");
}

#[test]
fn known_values() {
    // Two classes. Row 0: softmax (3/4, 1/4). Row 1 is ignored. Row 2: softmax (1/2, 1/2).
    let logits = Tensor::new(&[[3f32.ln(), 0.0], [f32::INFINITY, f32::NAN], [5.0, 5.0]], &Device::Cpu).unwrap();
    let targets = Tensor::new(&[1i64, -100, 0], &Device::Cpu).unwrap();
    let logits = Var::from_tensor(&logits).unwrap().into_inner();
    let loss = cross_entropy(&logits, &targets).unwrap();
    // (ln 4 + ln 2)/2
    assert!((floats(&loss)[0] - 1.5 * 2f32.ln()).abs() < 1e-6, "{loss}");
    let gradient = floats(loss.backward().unwrap().get(&logits).unwrap());
    let want = [0.375, -0.375, 0.0, 0.0, -0.25, 0.25];
    assert!(gradient.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6), "{gradient:?}");
    assert_eq!(count_targets(&targets).unwrap(), 2);
    assert_eq!(count_targets(&ids("t", &[3, 4], 5)).unwrap(), 12);
}

#[test]
fn against_candle_and_finite_differences() {
    let (rows, classes, inputs) = (23, 9, 5);
    for mask in masks(rows) {
        let (targets, others, kept) = masked(&ids("targets", &[rows], classes as u32), &mask);
        let plain = |logits: &Tensor| candle_nn::loss::cross_entropy(&logits.index_select(&kept, 0)?, &others);
        check(&[&[rows, classes]], |t| cross_entropy(&t[0], &targets), |t| plain(&t[0]));
        check(
            &[&[rows, inputs], &[classes, inputs]],
            |t| linear_cross_entropy(&t[0], &t[1], &targets, 1.0),
            |t| plain(&t[0].matmul(&t[1].t()?)?),
        );
    }
}

#[test]
fn ignored_rows_do_not_change_the_other_rows() {
    for (lead, classes) in [(&[4, 5][..], 7), (&[1, 60], 401), (&[1, 1], 3)] {
        let (rows, targets) = (lead.iter().product(), ids("targets", lead, classes as u32));
        for dtype in FLOATS {
            let logits = normal("logits", &[lead, &[classes]].concat()).to_dtype(dtype).unwrap();
            let of = |targets: &Tensor, logits: &Tensor| {
                run(std::slice::from_ref(logits), |t| cross_entropy(&t[0], targets))
            };
            let (want, grads) = of(&targets, &logits);
            let (got, got_grads) = of(&i64s(&targets), &logits);
            same_bits("loss of i64 targets", &got, &want);
            same_bits("gradient of i64 targets", &got_grads[0], &grads[0]);
            for mask in masks(rows) {
                let (some, others, kept) = masked(&targets, &mask);
                if others.elem_count() == 0 {
                    continue;
                }
                let (got, got_grads) = of(&some, &logits);
                let (want, grads) = of(&others, &select(&logits, &kept));
                same_bits("loss", &got, &want);
                check_rows(&format!("gradient {dtype:?}"), &got_grads[0], &grads[0], &kept);
            }
        }
    }
}

/// Compares with the head over the other rows alone, with one chunk and with several.
#[test]
fn the_head_skips_ignored_rows() {
    for (lead, classes, inputs) in [(&[4, 5][..], 7, 3), (&[2, 1300], 9, 5), (&[700, 1], 2100, 3)] {
        let (rows, targets) = (lead.iter().product(), ids("targets", lead, classes as u32));
        for dtype in FLOATS {
            if dtype == DType::F16 && rows > 100 {
                continue;
            }
            let to = |t: Tensor| t.to_dtype(dtype).unwrap();
            let x = to(normal("x", &[lead, &[inputs]].concat()));
            let w = to(normal("w", &[classes, inputs]));
            let of = |targets: &Tensor, x: &Tensor| {
                run(&[x.clone(), w.clone()], |t| linear_cross_entropy(&t[0], &t[1], targets, 0.7))
            };
            let (want, grads) = of(&targets, &x);
            let (got, got_grads) = of(&i64s(&targets), &x);
            same_bits("loss of i64 targets", &got, &want);
            got_grads.iter().zip(&grads).for_each(|(got, want)| same_bits("gradient of i64 targets", got, want));
            for mask in masks(rows) {
                let (some, others, kept) = masked(&targets, &mask);
                let (got, got_grads) = of(&some, &x);
                let (want, grads) = of(&others, &select(&x, &kept));
                same_bits("loss", &got, &want);
                check_rows(&format!("dx {dtype:?}"), &got_grads[0], &grads[0], &kept);
                same_bits(&format!("dW {dtype:?}"), &got_grads[1], &grads[1]);
                // The logits of all rows give the same result within rounding, because an ignored row adds zeros to dW.
                if dtype == DType::F32 && rows < 100 {
                    let all = |t: &[Tensor]| cross_entropy(&t[0].broadcast_matmul(&t[1].t()?)?, &some);
                    let (loss, grads) = run(&[x.clone(), w.clone()], all);
                    close("loss", &got, &loss, 1e-6);
                    got_grads.iter().zip(&grads).for_each(|(got, want)| close("gradient", got, want, 1e-5));
                }
            }
        }
    }
}

#[test]
fn without_any_target_loss_and_gradients_are_zero() -> Result<()> {
    let targets = Tensor::full(IGNORE_INDEX, (2, 3), &Device::Cpu)?;
    for dtype in FLOATS {
        let [x, w] = [normal("x", &[2, 3, 4]), normal("w", &[9, 4])].map(|t| t.to_dtype(dtype).unwrap());
        let is_zero = |t: &Tensor| floats(t).iter().all(|x| x.to_bits() == 0);
        let (loss, grads) = run(&[normal("logits", &[2, 3, 7]).to_dtype(dtype)?], |t| cross_entropy(&t[0], &targets));
        assert!(is_zero(&loss) && is_zero(&grads[0]), "{dtype:?}");
        let (loss, grads) = run(&[x.clone(), w.clone()], |t| linear_cross_entropy(&t[0], &t[1], &targets, 2.0));
        assert!(is_zero(&loss) && grads.iter().all(is_zero), "{dtype:?}");
        // With a sink that has no contribution yet: a loss with the factor 0 writes the gradient 0 to it.
        let [x, w] = [x, w].map(|t| Var::from_tensor(&t).unwrap().into_inner());
        let mut sink = Gradients::default();
        sink.add_buffer(vec![f32::NAN; 36], [(w.id(), 0..36, false)]);
        let (sink, store) = sink.capture(|| {
            let loss = linear_cross_entropy(&x, &w, &targets, 0.0)?;
            zero_ops::backward_from(&[(loss.clone(), loss.zeros_like()?)])
        });
        assert!(is_zero(store?.get(&x).expect("a gradient")) && sink.is_written(w.id()));
        assert!(sink.into_buffers().remove(0).iter().all(|&x| x == 0.0));
    }
    Ok(())
}

#[test]
fn other_targets_out_of_range_stay_errors() {
    let (x, w) = (normal("x", &[2, 4]), normal("w", &[9, 4]));
    for wrong in [-1i64, -99, -101, 9, i64::MIN] {
        let targets = Tensor::new(&[-100, wrong], &Device::Cpu).unwrap();
        let want = format!("index {wrong} at position 1 is not below 9");
        let errors = [cross_entropy(&normal("logits", &[2, 9]), &targets), linear_cross_entropy(&x, &w, &targets, 1.0)];
        for error in errors {
            let error = error.expect_err("an error").to_string();
            assert!(error.contains(&want), "{error}");
        }
    }
    // A u32 target with the bits of −100 is not ignored.
    let targets = Tensor::new(&[0, (-100i32).cast_unsigned()], &Device::Cpu).unwrap();
    assert!(cross_entropy(&normal("logits", &[2, 9]), &targets).is_err());
    // Only targets may be ignored, not the indices of an embedding.
    let ids = Tensor::new(&[0i64, -100], &Device::Cpu).unwrap();
    let table = zero_ops::Embedding::from_tensor(normal("table", &[9, 4]));
    let error = candle_nn::Module::forward(&table, &ids).expect_err("an error");
    assert!(error.to_string().contains("index -100 at position 1 is not below 9"), "{error}");
}
