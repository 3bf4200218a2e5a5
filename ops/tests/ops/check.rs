//! Helpers that compare an operation with an oracle.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use zero_ops::random::Stream;

/// Returns standard normal numbers.
pub(crate) fn normal(name: &str, shape: &[usize]) -> Tensor {
    let mut values = vec![0.0f32; shape.iter().product()];
    Stream::new(11, name, 0).fill_normal(0, &mut values);
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Returns numbers below `limit`.
pub(crate) fn ids(name: &str, shape: &[usize], limit: u32) -> Tensor {
    let mut values = vec![0.0f32; shape.iter().product()];
    Stream::new(12, name, 0).fill_uniform(0, &mut values);
    let values: Vec<u32> = values.iter().map(|u| (u * limit as f32) as u32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

pub(crate) fn floats(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

pub(crate) fn bits(x: &Tensor) -> Vec<u32> {
    floats(x).into_iter().map(f32::to_bits).collect()
}

fn doubles(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the result and the gradients of Σ y·(fixed random weights).
pub(crate) fn run(inputs: &[Tensor], op: impl Fn(&[Tensor]) -> Result<Tensor>) -> (Tensor, Vec<Tensor>) {
    let vars: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let leaves: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = op(&leaves).unwrap();
    let weights = normal("weights of the result", y.dims()).to_dtype(y.dtype()).unwrap();
    let grads = (&y * weights).unwrap().sum_all().unwrap().backward().unwrap();
    let grads = leaves.iter().map(|x| grads.get(x).expect("a gradient for each input").clone()).collect();
    (y, grads)
}

/// Returns whether candle rounds its own sums of this dtype to nearest. On aarch64, candle-core 0.11.1 truncates
/// those of bf16, so they are no oracle there; training does not use them.
pub(crate) fn candle_rounds(dtype: DType) -> bool {
    // Three quarters of the way from 1 to the next bf16, with enough elements that candle uses vectors.
    let [one, little] =
        [1.0, 3.0 / 512.0].map(|x: f32| Tensor::full(x, 64, &Device::Cpu).unwrap().to_dtype(dtype).unwrap());
    floats(&(one + little).unwrap())[0] > 1.0
}

/// Returns each token's position in its document, for rows of `time` tokens. A document begins where the number
/// changes.
pub(crate) fn position_ids(documents: &[u32], time: usize) -> Vec<u32> {
    let mut positions = vec![0; documents.len()];
    for at in (0..documents.len()).filter(|at| at % time > 0) {
        positions[at] = if documents[at] == documents[at - 1] { positions[at - 1] + 1 } else { 0 };
    }
    positions
}

/// Computes GELU with the approximation by tanh.
pub(crate) fn tanh_gelu(x: &Tensor) -> Result<Tensor> {
    let u = ((x + ((x * x)? * x)?.affine(0.044715, 0.0)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
    (x * 0.5)? * (u.tanh()? + 1.0)?
}

/// Rotates pairs of components of each head, `[batch, time, heads, size]`: component i, up to `half`, and component
/// i + `half`, by `angle(position, i)`. Multiplies these components by `factor`.
pub(crate) fn rotated(x: &Tensor, half: usize, factor: f64, angle: impl Fn(usize, usize) -> f64) -> Result<Tensor> {
    let (_, time, _, size) = x.dims4()?;
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f64> = (0..time * half).map(|at| factor * f(angle(at / half, at % half))).collect();
        Tensor::from_vec(values, (1, time, 1, half), x.device())
    };
    let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
    let (a, b) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
    let left = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let right = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    let mut parts = vec![left, right];
    if size > 2 * half {
        parts.push(x.narrow(3, 2 * half, size - 2 * half)?);
    }
    Tensor::cat(&parts, 3)
}

/// Computes attention with the whole score matrix, on [batch, time, heads, size]. A position of a sample sees the
/// positions starting at `first(sample, position)`.
pub(crate) fn plain_attention_within(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    first: impl Fn(usize, usize) -> usize,
) -> Result<Tensor> {
    let (batch, time, heads, size) = q.dims4()?;
    let kv_heads = k.dim(2)?;
    let spread = |x: &Tensor| -> Result<Tensor> {
        x.unsqueeze(3)?
            .broadcast_as((batch, time, kv_heads, heads / kv_heads, size))?
            .reshape((batch, time, heads, size))?
            .transpose(1, 2)?
            .contiguous()
    };
    let (q, k, v) = (q.transpose(1, 2)?.contiguous()?, spread(k)?, spread(v)?);
    let scores = (q.matmul(&k.t()?.contiguous()?)? / (size as f64).sqrt())?;
    let seen = |sample, row, column| column <= row && column >= first(sample, row);
    let masked = |at: usize| seen(at / (time * time), at / time % time, at % time);
    let masked: Vec<f64> =
        (0..batch * time * time).map(|at| if masked(at) { 0.0 } else { f64::NEG_INFINITY }).collect();
    let mask = Tensor::from_vec(masked, (batch, 1, time, time), q.device())?.to_dtype(q.dtype())?;
    let probabilities = candle_nn::ops::softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
    probabilities.matmul(&v)?.transpose(1, 2)?.contiguous()
}

/// Checks that two tensors are bit-identical. Reports the first difference instead of printing both.
#[track_caller]
pub(crate) fn same_bits(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()), "{what}");
    let (got, want) = (floats(got), floats(want));
    if let Some(i) = (0..got.len()).find(|&i| got[i].to_bits() != want[i].to_bits()) {
        panic!("{what}: element {i} of {} is {:e}, expected {:e}", got.len(), got[i], want[i]);
    }
}

#[track_caller]
pub(crate) fn close(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) {
    assert_eq!(got.dims(), want.dims(), "{what}: shape");
    let (got, want) = (doubles(got), doubles(want));
    let size = want.iter().fold(1e-3f64, |m, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        assert!((g - w).abs() <= tolerance * size, "{what}: element {i} is {g}, expected {w} (largest {size})");
    }
}

/// Checks an operation on standard normal inputs: the result and gradients against `plain` in f64, the gradients
/// against central differences, and views against their contiguous copies.
#[track_caller]
pub(crate) fn check(
    shapes: &[&[usize]],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
    plain: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let inputs: Vec<Tensor> = shapes.iter().enumerate().map(|(i, s)| normal(&format!("input {i}"), s)).collect();
    let wide: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
    let (y, grads) = run(&inputs, &op);
    let (y64, grads64) = run(&wide, plain);
    close("result", &y, &y64, 3e-6);
    for (i, (g, g64)) in grads.iter().zip(&grads64).enumerate() {
        close(&format!("gradient of input {i}"), g, g64, 1e-5);
    }
    differences(&inputs, &grads, &op);
    views(&inputs, &y, &grads, &op);
}

/// Compares the derivative along a random direction, from finite differences, with gradient · direction.
#[track_caller]
fn differences(inputs: &[Tensor], grads: &[Tensor], op: impl Fn(&[Tensor]) -> Result<Tensor>) {
    const STEP: f64 = 1e-2;
    for (i, (x, g)) in inputs.iter().zip(grads).enumerate() {
        let direction = normal("direction", x.dims());
        let value = |step: f64| {
            let mut moved = inputs.to_vec();
            moved[i] = (x + (&direction * step).unwrap()).unwrap();
            let y = op(&moved).unwrap();
            let weights = normal("weights of the result", y.dims());
            doubles(&y).iter().zip(doubles(&weights)).map(|(y, w)| y * w).sum::<f64>()
        };
        // Richardson's combination of two step sizes removes the error of order step².
        let slope = |step: f64| (value(step) - value(-step)) / (2.0 * step);
        let difference = (4.0 * slope(STEP) - slope(2.0 * STEP)) / 3.0;
        let (g, d) = (doubles(g), doubles(&direction));
        let exact: f64 = g.iter().zip(&d).map(|(g, d)| g * d).sum();
        let size: f64 = g.iter().zip(&d).map(|(g, d)| (g * d).powi(2)).sum::<f64>().sqrt().max(1e-2);
        assert!(
            (difference - exact).abs() < 2e-2 * size,
            "input {i}: {exact} along a direction, measured {difference}"
        );
    }
}

/// Checks that the results are bit-identical if each input is a view of a larger, transposed tensor.
#[track_caller]
fn views(inputs: &[Tensor], y: &Tensor, grads: &[Tensor], op: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let (y_view, grads_view) = run(inputs, |leaves| {
        let views: Vec<Tensor> = leaves
            .iter()
            .map(|x| {
                let last = x.rank() - 1;
                let padded = x.pad_with_zeros(last, 2, 1).unwrap().transpose(0, last).unwrap().contiguous().unwrap();
                let view = padded.transpose(0, last).unwrap().narrow(last, 2, x.dim(last).unwrap()).unwrap();
                assert!(!view.is_contiguous() || x.elem_count() < 2 || view.layout().start_offset() > 0);
                view
            })
            .collect();
        op(&views)
    });
    same_bits("result of views", &y_view, y);
    for (i, (a, b)) in grads_view.iter().zip(grads).enumerate() {
        same_bits(&format!("gradient of view {i}"), a, b);
    }
}
