//! Dropout of attention probabilities, compared with the whole probability matrix times an explicit mask, and with the
//! same rows in other batches and tiles.

use crate::check::{check, floats, normal, run, same_bits};
use candle_core::{D, DType, Device, Result, Tensor};
use zero_ops as ops;
use zero_ops::random::Stream;
use zero_ops::{AttentionSpan, Dropout, Pass};

const PASS: Pass = Pass { training: true, seed: 7, step: 3, sample: 40, layer: 5 };

fn dropout(probability: f32) -> Dropout {
    Dropout { probability, name: "here" }
}

/// Returns the factor of the probability of each (sample, head, query, key): 0 or 1/(1 − probability).
fn mask(pass: &Pass, probability: f32, [batch, heads, time]: [usize; 3]) -> Tensor {
    let factor = |at: usize| {
        let (key, query, head, sample) =
            (at % time, at / time % time, at / time / time % heads, at / time / time / heads);
        let stream = Stream::new(pass.seed, &format!("dropout/{}/here", pass.layer), pass.sample + sample as u64);
        let index = ((head as u64) << 48) | ((query as u64) << 24) | key as u64;
        if stream.f32_at(index) < probability { 0.0 } else { 1.0 / f64::from(1.0 - probability) }
    };
    let factors: Vec<f64> = (0..batch * heads * time * time).map(factor).collect();
    Tensor::from_vec(factors, (batch, heads, time, time), &Device::Cpu).unwrap()
}

/// Computes attention with the whole probability matrix times a mask. A position sees at most `window` positions.
fn plain([q, k, v]: [&Tensor; 3], window: usize, mask: &Tensor) -> Result<Tensor> {
    let (batch, time, heads, size) = q.dims4()?;
    let kv_heads = k.dim(2)?;
    let spread = |x: &Tensor| -> Result<Tensor> {
        let shape = (batch, time, kv_heads, heads / kv_heads, size);
        x.unsqueeze(3)?.broadcast_as(shape)?.reshape((batch, time, heads, size))?.transpose(1, 2)?.contiguous()
    };
    let (q, k, v) = (q.transpose(1, 2)?.contiguous()?, spread(k)?, spread(v)?);
    let scores = (q.matmul(&k.t()?.contiguous()?)? / (size as f64).sqrt())?;
    let sees = |at: usize| at % time <= at / time && at / time < at % time + window;
    let seen = (0..time * time).map(|at| if sees(at) { 0.0 } else { f64::NEG_INFINITY });
    let seen = Tensor::from_vec(seen.collect::<Vec<f64>>(), (1, 1, time, time), &Device::Cpu)?;
    let probabilities = candle_nn::ops::softmax(&scores.broadcast_add(&seen)?, D::Minus1)?;
    (probabilities * mask)?.matmul(&v)?.transpose(1, 2)?.contiguous()
}

#[test]
fn against_an_explicit_mask() {
    for (batch, time, heads, kv_heads, size, window) in [
        (2, 5, 4, 2, 6, 9),
        (1, 1, 1, 1, 4, 9),
        (2, 67, 3, 3, 8, 100),
        (1, 150, 4, 1, 5, 70),
        (1, 200, 1, 1, 4, 3),
        (1, 450, 2, 1, 4, 210),
    ] {
        for probability in [0.1, 0.6] {
            let mask = mask(&PASS, probability, [batch, heads, time]);
            let (q, kv) = ([batch, time, heads, size], [batch, time, kv_heads, size]);
            let span = AttentionSpan::default().window(window);
            let with = (&dropout(probability), &PASS);
            check(
                &[&q, &kv, &kv],
                |t| ops::causal_attention_with_dropout(&t[0], &t[1], &t[2], &span, with),
                |t| plain([&t[0], &t[1], &t[2]], window, &mask),
            );
        }
    }
}

#[test]
fn packed_against_an_explicit_mask() {
    for (batch, time, heads, size) in [(2, 5, 4, 6), (1, 70, 2, 8)] {
        let (width, mask) = (heads * size, mask(&PASS, 0.3, [batch, heads, time]));
        let (span, with) = (AttentionSpan::default(), (&dropout(0.3), &PASS));
        check(
            &[&[batch, time, 3 * width]],
            |t| ops::causal_attention_packed_with_dropout(&t[0], heads, &span, with),
            |t| {
                let part = |i| t[0].narrow(2, i * width, width)?.contiguous()?.reshape((batch, time, heads, size));
                plain([&part(0)?, &part(1)?, &part(2)?], time, &mask)?.reshape((batch, time, width))
            },
        );
    }
}

/// The results of a sample are bit-identical in any micro-batch. The results of a sequence are bit-identical to the
/// first rows of a longer sequence that begins with it.
#[test]
fn masks_do_not_depend_on_the_batch() {
    let (batch, time, heads, size) = (5, 100, 3, 8);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let qkv = normal("qkv", &[batch, time, 3 * heads * size]).to_dtype(dtype).unwrap();
        let of = |qkv: &Tensor, pass: &Pass| {
            let (y, grads) = run(std::slice::from_ref(qkv), |t| {
                ops::causal_attention_packed_with_dropout(
                    &t[0],
                    heads,
                    &AttentionSpan::default(),
                    (&dropout(0.2), pass),
                )
            });
            (y, grads.into_iter().next().unwrap())
        };
        let (y, dx) = of(&qkv, &PASS);
        let zeros = floats(&dx).iter().filter(|x| **x == 0.0).count();
        assert!(zeros < floats(&dx).len() / 10, "{zeros}");
        for sample in 0..batch {
            let (alone, _) = of(&qkv.narrow(0, sample, 1).unwrap(), &Pass { sample: 40 + sample as u64, ..PASS });
            same_bits("result", &alone, &y.narrow(0, sample, 1).unwrap());
        }
        let (shorter, _) = of(&qkv.narrow(1, 0, 37).unwrap().contiguous().unwrap(), &PASS);
        same_bits("the first rows", &shorter, &y.narrow(1, 0, 37).unwrap());
        for other in [Pass { seed: 8, ..PASS }, Pass { layer: 6, ..PASS }, Pass { sample: 41, ..PASS }] {
            assert!(floats(&of(&qkv, &other).0) != floats(&y));
        }
        same_bits("another step", &of(&qkv, &Pass { step: 4, ..PASS }).0, &y);
    }
}

/// In sequences of more than 4096 positions, the forward passes over the keys in chunks.
#[test]
fn the_first_rows_of_a_long_sequence_are_bit_identical_to_a_shorter_one() {
    let (time, shorter) = (4200, 4096);
    let qkv = normal("qkv", &[1, time, 12]);
    for (window, probability) in [(time, 0.0), (300, 0.0), (time, 0.2)] {
        let (span, with) = (AttentionSpan::default().window(window), (&dropout(probability), &PASS));
        let of = |qkv: &Tensor| ops::causal_attention_packed_with_dropout(qkv, 1, &span, with).unwrap();
        let first = |t: &Tensor| t.narrow(1, 0, shorter).unwrap().contiguous().unwrap();
        same_bits("result", &of(&first(&qkv)), &first(&of(&qkv)));
    }
}

#[test]
fn an_evaluation_and_a_probability_of_zero_drop_nothing() {
    let (qkv, span) = (normal("qkv", &[2, 20, 24]), AttentionSpan::default());
    let want = ops::causal_attention_packed(&qkv, 2).unwrap();
    let evaluation = Pass { training: false, ..PASS };
    for with in [(&dropout(0.0), &PASS), (&dropout(0.5), &evaluation)] {
        same_bits("result", &ops::causal_attention_packed_with_dropout(&qkv, 2, &span, with).unwrap(), &want);
    }
    for wrong in [1.0, -0.1, f32::NAN] {
        let error = ops::causal_attention_packed_with_dropout(&qkv, 2, &span, (&dropout(wrong), &PASS)).unwrap_err();
        assert!(error.to_string().contains("expected a dropout probability in [0, 1)"), "{error}");
    }
}

/// The mean converges to the result without dropout.
#[test]
fn the_mean_over_many_samples_is_unbiased() {
    let (heads, time, size) = (2, 16, 4);
    let qkv = normal("qkv", &[1, time, 3 * heads * size]);
    let want = floats(&ops::causal_attention_packed(&qkv, heads).unwrap());
    let many = qkv.broadcast_as((4000, time, 3 * heads * size)).unwrap().contiguous().unwrap();
    let with = (&dropout(0.25), &PASS);
    let y = ops::causal_attention_packed_with_dropout(&many, heads, &AttentionSpan::default(), with).unwrap();
    let mean = floats(&y.mean(0).unwrap());
    // Six standard deviations of about √(1/3)·|v|/√4000, for values of up to 3.
    assert!(mean.iter().zip(&want).all(|(mean, want)| (mean - want).abs() < 0.17), "{mean:?}\n{want:?}");
}
