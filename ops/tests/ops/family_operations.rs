//! Operations that only some families of language models use: those of Gemma and Phi.

use crate::check::{bits, check, normal, rotated, tanh_gelu};
use candle_core::{DType, Tensor};
use candle_nn::Module;
use zero_ops as ops;

#[test]
fn norms_with_unit_offsets() {
    for (rows, size) in [(3, 7), (1, 5), (130, 33), (67, 16)] {
        check(
            &[&[rows, size], &[size]],
            |t| ops::RmsNorm::from_tensor(t[1].clone(), 1e-6).of_offsets().forward(&t[0]),
            |t| candle_nn::ops::rms_norm_slow(&t[0], &(&t[1] + 1.0)?, 1e-6),
        );
        check(
            &[&[rows, size], &[rows, size], &[size]],
            |t| {
                let norm = ops::RmsNorm::from_tensor(t[2].clone(), 1e-6).of_offsets();
                let (sum, normal) = norm.forward_residual(&t[0], &t[1])?;
                sum + normal
            },
            |t| {
                let sum = (&t[0] + &t[1])?;
                &sum + candle_nn::ops::rms_norm_slow(&sum, &(&t[2] + 1.0)?, 1e-6)?
            },
        );
    }
}

/// The sum 1 + weight is not rounded to 16 bits: a weight of 2⁻⁹ changes the result.
#[test]
fn the_offset_is_added_in_f32() {
    let x = normal("x", &[4, 64]).to_dtype(DType::BF16).unwrap();
    let of = |weight: f32| {
        let weight = Tensor::full(weight, 64, x.device()).unwrap().to_dtype(DType::BF16).unwrap();
        ops::RmsNorm::from_tensor(weight, 1e-6).of_offsets().forward(&x).unwrap()
    };
    assert_ne!(bits(&of(0.0)), bits(&of(2.0f32.powi(-9))));
}

#[test]
fn gated_activations() {
    for shape in [&[5, 7][..], &[1], &[3, 2, 33]] {
        check(&[shape, shape], |t| ops::geglu(&t[0], &t[1]), |t| tanh_gelu(&t[0])? * &t[1]);
    }
    let x = normal("x", &[3]);
    assert_eq!(bits(&ops::gated(&x, ops::Activation::Silu, &x).unwrap()), bits(&ops::swiglu(&x, &x).unwrap()));
    assert_eq!(bits(&ops::gated(&x, ops::Activation::GeluNew, &x).unwrap()), bits(&ops::geglu(&x, &x).unwrap()));
    assert!(ops::gated(&x, ops::Activation::Relu, &x).is_err());
    assert!(ops::geglu(&x, &normal("y", &[2])).is_err());
}

#[test]
fn scaling_and_column_slices() {
    check(&[&[3, 7]], |t| ops::scaled(&t[0], 2.5), |t| &t[0] * 2.5);
    for range in [0..3, 3..7, 2..5, 0..7] {
        check(
            &[&[2, 5, 7]],
            |t| ops::columns(&t[0], range.clone()),
            |t| t[0].narrow(2, range.start, range.len())?.contiguous(),
        );
    }
    let x = normal("x", &[2, 7]);
    for range in [5..8, 3..3] {
        assert!(ops::columns(&x, range).is_err());
    }
}

#[test]
fn partial_rotary_embedding() {
    let (size, theta) = (10, 100.0f64);
    let part = ops::Rotary::new(6, 12, theta).unwrap();
    let whole = part.clone().of_heads(size).unwrap();
    let angle = |position: usize, pair: usize| position as f64 * theta.powf(-(pair as f64) / 3.0);
    check(&[&[2, 9, 3, size]], |t| whole.apply(&t[0]), |t| rotated(&t[0], 3, 1.0, angle));
    assert!(ops::Rotary::new(6, 12, theta).unwrap().of_heads(4).is_err());
}

/// Follows `_compute_longrope_parameters` of transformers: the length of the row selects the factors.
#[test]
fn longrope_selects_factors_by_row_length() {
    let (size, theta, attention_factor) = (4, 100.0f64, 1.25);
    let (short_factor, long_factor) = (vec![1.0, 2.0], vec![3.0, 5.0]);
    let scaling = |short_factor: &[f64]| ops::RopeScaling::LongRope {
        short_factor: short_factor.to_vec(),
        long_factor: long_factor.clone(),
        factor: None,
        attention_factor: Some(attention_factor),
        original_max_position_embeddings: 6,
    };
    let rotary = ops::Rotary::scaled(size, 12, theta, &scaling(&short_factor)).unwrap();
    for (time, factors) in [(6, &short_factor), (7, &long_factor)] {
        let angle = |position: usize, pair: usize| position as f64 / (factors[pair] * theta.powf(pair as f64 / 2.0));
        check(&[&[2, time, 3, size]], |t| rotary.apply(&t[0]), |t| rotated(&t[0], 2, attention_factor, angle));
    }
    // A packed row of more than 6 tokens is rejected, because its length would select the long factors although its
    // documents may be short.
    let x = normal("x", &[1, 7, 3, size]);
    let positions = Tensor::new(&[[0u32, 1, 2, 0, 1, 2, 3]], x.device()).unwrap();
    let error = rotary.apply_at(&x, &positions).unwrap_err().to_string();
    assert!(error.contains("packed rows have 7 tokens, but the model was first trained on 6"), "{error}");
    let (short, positions) = (x.narrow(1, 0, 3).unwrap(), positions.narrow(1, 0, 3).unwrap());
    assert_eq!(bits(&rotary.apply_at(&short, &positions).unwrap()), bits(&rotary.apply(&short).unwrap()));
    for wrong in [&[1.0][..], &[1.0, 0.0], &[1.0, f64::NAN]] {
        assert!(ops::Rotary::scaled(size, 12, theta, &scaling(wrong)).is_err());
    }
}

/// Angles are computed only for positions that occur. Extending the table does not change the existing angles.
#[test]
fn a_rotary_table_grows_with_the_rows() {
    // A table of all positions would take 16 TiB.
    let rotary = ops::Rotary::new(4, 1 << 40, 1e4).unwrap();
    for time in [3, 8, 5, 9, 17] {
        let x = normal("x", &[2, time, 1, 4]);
        let whole = ops::Rotary::new(4, time, 1e4).unwrap();
        assert_eq!(bits(&rotary.apply(&x).unwrap()), bits(&whole.apply(&x).unwrap()));
    }
}
