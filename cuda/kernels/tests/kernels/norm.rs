//! Compares layer norm and RMS norm with f64.

use zero_kernels::Dtype;
use zero_kernels::norm::{self, Parameter, Rows, Weights};

use crate::{Memory, assert_near, numbers, on_device, rounded};

const EPS: f64 = 1e-5;

/// The f64 results of a norm: y and the gradients of x, weight and bias.
struct Exact {
    y: Vec<f64>,
    dx: Vec<f64>,
    d_weight: Vec<f64>,
    d_bias: Vec<f64>,
}

fn exact(centred: bool, [x, dy, weight, bias]: [&[f32]; 4]) -> Exact {
    let size = weight.len();
    let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let (x, dy, weight, bias) = (wide(x), wide(dy), wide(weight), wide(bias));
    let mut all = Exact { y: vec![], dx: vec![], d_weight: vec![0.0; size], d_bias: vec![0.0; size] };
    for (x, dy) in x.chunks(size).zip(dy.chunks(size)) {
        let n = size as f64;
        let mean = if centred { x.iter().sum::<f64>() / n } else { 0.0 };
        let scale = 1.0 / (x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n + EPS).sqrt();
        let normal: Vec<f64> = x.iter().map(|x| (x - mean) * scale).collect();
        let g: Vec<f64> = dy.iter().zip(&weight).map(|(d, w)| d * w).collect();
        let mean_g = if centred { g.iter().sum::<f64>() / n } else { 0.0 };
        let mean_gx = g.iter().zip(&normal).map(|(g, x)| g * x).sum::<f64>() / n;
        for i in 0..size {
            all.y.push(normal[i] * weight[i] + if centred { bias[i] } else { 0.0 });
            all.dx.push(scale * (g[i] - mean_g - normal[i] * mean_gx));
            all.d_weight[i] += dy[i] * normal[i];
            all.d_bias[i] += dy[i];
        }
    }
    all
}

#[test]
fn norms_and_their_gradients() {
    // Sizes: fewer elements than threads, more than threads, and more than fit the threads' registers. Numbers of rows:
    // more than one partial sum of eight rows covers, and more than 512 such sums cover.
    for (rows, size) in [(1, 1), (3, 100), (21, 48), (10, 1000), (2, 8208), (4101, 1)] {
        for dtype in Dtype::ALL {
            for centred in [true, false] {
                check(rows, size, dtype, centred);
            }
        }
    }
}

fn check(rows: u32, size: u32, dtype: Dtype, centred: bool) {
    let (count, width) = ((rows * size) as usize, size as usize);
    let of = Rows { rows, size, dtype, eps: EPS as f32 };
    let x: Vec<f32> = numbers(1, count).iter().map(|x| 2.0 * x + 0.5).collect();
    let (x, dy) = (rounded(dtype, &x), rounded(dtype, &numbers(2, count)));
    let [weight, bias] = [3, 4].map(|seed| rounded(dtype, &numbers(seed, width)));
    let Some((y, dx, d_weight, d_bias)) = on_device(|device| {
        let [mut at_x, mut at_dy] = [&x, &dy].map(|values| Memory::floats(dtype, values));
        let [mut w, mut b] = [&weight, &bias].map(|values| Memory::floats(dtype, values));
        let [mut y, mut dx] = [(); 2].map(|()| Memory::floats(dtype, &vec![f32::NAN; count]));
        let [mut d_weight, mut d_bias] = [(); 2].map(|()| Memory::floats(Dtype::F32, &vec![1.0; width]));
        let weights = match centred {
            true => Weights::Layer { weight: w.address(), bias: b.address() },
            false => Weights::Rms { weight: w.address() },
        };
        device.run(&norm::forward(&of, weights, at_x.address(), y.address()));
        let mut partials = Memory::unwritten(of.partials(weights) * 4);
        let (from, to) = ([at_x.address(), at_dy.address(), 0], [dx.address(), partials.address()]);
        device.run(&norm::backward(&of, weights, from, to));
        // `true` adds the sums to the existing gradients.
        let at = [partials.address(), d_weight.address()];
        device.run(&norm::sums(&of, weights, Parameter::Weight, at, true));
        if centred {
            let at = [partials.address(), d_bias.address()];
            device.run(&norm::sums(&of, weights, Parameter::Bias, at, true));
        }
        let floats = |memory: &Memory| memory.to_floats(Dtype::F32);
        (y.to_floats(dtype), dx.to_floats(dtype), floats(&d_weight), floats(&d_bias))
    }) else {
        return;
    };
    let want = exact(centred, [&x, &dy, &weight, &bias]);
    let what = format!("{rows} × {size}, centred {centred}");
    assert_near(&format!("y of {what}"), dtype, &y, &want.y, 3.0, 4.0);
    // A row of one element has variance 0, so its scale is 1/√ε.
    let scale = if size == 1 { EPS.powf(-0.5) * 4.0 } else { 16.0 };
    assert_near(&format!("dx of {what}"), dtype, &dx, &want.dx, 3.0, scale);
    let plus_one = |sums: &[f64]| sums.iter().map(|x| x + 1.0).collect::<Vec<_>>();
    let (scale, want_bias) = (f64::from(rows), if centred { plus_one(&want.d_bias) } else { vec![1.0; width] });
    assert_near(&format!("weight of {what}"), Dtype::F32, &d_weight, &plus_one(&want.d_weight), 4.0, scale);
    assert_near(&format!("bias of {what}"), Dtype::F32, &d_bias, &want_bias, 4.0, scale);
}

/// The fused sum and norm are bit-identical to the two run separately.
#[test]
fn a_fused_residual_norm_matches_separate_launches() {
    let of = Rows { rows: 5, size: 300, dtype: Dtype::Bf16, eps: EPS as f32 };
    let count = 1500;
    let [x, branch] = [1, 2].map(|seed| rounded(of.dtype, &numbers(seed, count)));
    let [weight, bias] = [3, 4].map(|seed| rounded(of.dtype, &numbers(seed, 300)));
    let Some((total, y, alone)) = on_device(|device| {
        let [mut x, mut branch, mut w, mut b] =
            [&x, &branch, &weight, &bias].map(|values| Memory::floats(of.dtype, values));
        let [mut y, mut alone] = [(); 2].map(|()| Memory::floats(of.dtype, &vec![f32::NAN; count]));
        let weights = Weights::Layer { weight: w.address(), bias: b.address() };
        // The sum overwrites x.
        let (from, to) = ([x.address(), branch.address()], [x.address(), y.address()]);
        device.run(&norm::forward_residual(&of, weights, from, to));
        device.run(&norm::forward(&of, weights, x.address(), alone.address()));
        (x.to_floats(of.dtype), y.to_floats(of.dtype), alone.to_floats(of.dtype))
    }) else {
        return;
    };
    assert_eq!(y, alone);
    assert_eq!(total, rounded(of.dtype, &x.iter().zip(&branch).map(|(x, b)| x + b).collect::<Vec<_>>()));
}

/// Adding the gradient of x to an existing gradient in the kernel is bit-identical to adding it afterwards.
#[test]
fn a_gradient_is_added_to_an_existing_one() {
    for dtype in Dtype::ALL {
        let of = Rows { rows: 11, size: 304, dtype, eps: EPS as f32 };
        let count = 11 * 304;
        let [x, dy, before] = [1, 2, 3].map(|seed| rounded(dtype, &numbers(seed, count)));
        let weight = rounded(dtype, &numbers(4, 304));
        let Some((alone, sum)) = on_device(|device| {
            let [mut x, mut dy, mut before, mut w] =
                [&x, &dy, &before, &weight].map(|values| Memory::floats(dtype, values));
            let weights = Weights::Rms { weight: w.address() };
            let mut partials = Memory::unwritten(of.partials(weights) * 4);
            let mut alone = Memory::unwritten(count * 4);
            let from = [x.address(), dy.address()];
            device.run(&norm::backward(&of, weights, [from[0], from[1], 0], [alone.address(), partials.address()]));
            // The result overwrites the existing gradient.
            let to = [before.address(), partials.address()];
            device.run(&norm::backward(&of, weights, [from[0], from[1], to[0]], to));
            (alone.to_floats(dtype)[..count].to_vec(), before.to_floats(dtype))
        }) else {
            return;
        };
        let want: Vec<f32> = alone.iter().zip(&before).map(|(dx, before)| before + dx).collect();
        assert_eq!(sum, rounded(dtype, &want), "{dtype:?}");
    }
}
