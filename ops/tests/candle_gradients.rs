//! Candle's operations whose gradients are wrong or missing without an error, and the replacements that
//! `docs/your-model.md` recommends. If a test that expects a wrong gradient fails, candle is fixed: remove the
//! operation from the page and from `clippy.toml`.

#![expect(clippy::disallowed_methods, reason = "the subject of the tests")]

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::kv_cache::{ConcatKvCache, KvCache, RotatingKvCache};
use candle_nn::loss::binary_cross_entropy_with_logit;

/// Returns the largest difference between candle's gradient of `op` and finite differences, relative to the largest
/// finite difference.
fn error(shape: &[usize], op: impl Fn(&Tensor) -> Result<Tensor>) -> f64 {
    let values: Vec<f64> =
        (0..shape.iter().product()).map(|i: usize| (i * 7919 + 13) as f64 % 1009.0 / 500.0).collect();
    let run = |values: &[f64]| -> Result<(f64, Vec<f64>)> {
        let x = Var::from_vec(values.to_vec(), shape, &Device::Cpu)?;
        let y = op(x.as_tensor())?.flatten_all()?;
        let count = y.elem_count();
        let weights: Vec<f64> = (0..count).map(|i| (i * 31 % 17) as f64 / 17.0 + 0.3).collect();
        let loss = (y * Tensor::from_vec(weights, count, &Device::Cpu)?)?.sum_all()?;
        let gradient = loss.backward()?.get(&x).expect("a gradient").flatten_all()?.to_vec1()?;
        Ok((loss.to_scalar()?, gradient))
    };
    let gradient = run(&values).unwrap().1;
    let difference = |i: usize| {
        let [up, down] = [1e-5, -1e-5].map(|step| {
            let mut values = values.clone();
            values[i] += step;
            run(&values).unwrap().0
        });
        (up - down) / 2e-5
    };
    let differences: Vec<f64> = (0..values.len()).map(difference).collect();
    let largest = differences.iter().fold(0.0, |largest: f64, it| largest.max(it.abs()));
    differences.iter().zip(&gradient).fold(0.0, |worst: f64, (a, b)| worst.max((a - b).abs())) / largest
}

fn numbers(shape: &[usize]) -> Tensor {
    let count = shape.iter().product();
    Tensor::from_vec((0..count).map(|i: usize| (i * 37 % 23) as f64 / 23.0 - 0.4).collect(), shape, &Device::Cpu)
        .unwrap()
}

#[test]
fn conv1d_is_wrong_and_the_replacement_is_right() {
    let (x, kernel) = (numbers(&[2, 2, 8]), numbers(&[4, 2, 3]));
    assert!(error(&[4, 2, 3], |kernel| x.conv1d(kernel, 0, 1, 1, 1)) > 0.1);
    assert!(error(&[2, 2, 8], |x| x.conv1d(&kernel, 0, 1, 1, 1)) > 0.1);
    for (padding, dilation, groups) in [(0, 1, 1), (1, 1, 1), (2, 2, 1), (1, 1, 2)] {
        let kernel = numbers(&[4, 2 / groups, 3]);
        let replacement = |x: &Tensor, kernel: &Tensor| zero_ops::conv1d(x, kernel, padding, 1, dilation, groups);
        let [own, expected] = [replacement(&x, &kernel), x.conv1d(&kernel, padding, 1, dilation, groups)]
            .map(|y| y.unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap());
        assert!(own.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12), "{padding} {dilation} {groups}");
        assert!(error(&[4, 2 / groups, 3], |kernel| replacement(&x, kernel)) < 1e-6, "{padding} {dilation} {groups}");
        assert!(error(&[2, 2, 8], |x| replacement(x, &kernel)) < 1e-6, "{padding} {dilation} {groups}");
    }
}

#[test]
fn max_pooling_is_wrong_and_the_replacement_is_right() {
    assert!(error(&[1, 2, 4, 4], |x| x.max_pool2d(2)) > 0.5);
    let pool = |kernel, stride, padding| {
        move |x: &Tensor| zero_ops::max_pool2d(&x.to_dtype(DType::F32)?, kernel, stride, padding)?.to_dtype(DType::F64)
    };
    for (kernel, stride, padding) in [(2, 2, 0), (3, 2, 1), (2, 1, 0)] {
        // The replacement computes in f32, so finite differences have few digits.
        assert!(error(&[1, 2, 5, 6], pool(kernel, stride, padding)) < 0.02, "{kernel} {stride} {padding}");
    }
}

#[test]
fn average_pooling_is_wrong_unless_the_size_is_a_multiple_of_the_kernel() {
    assert!(error(&[1, 1, 5, 5], |x| x.avg_pool2d(2)) > 0.1);
    assert!(error(&[1, 1, 4, 4], |x| x.avg_pool2d(2)) < 1e-6);
    assert!(error(&[1, 1, 5, 5], |x| x.narrow(2, 0, 4)?.narrow(3, 0, 4)?.avg_pool2d(2)) < 1e-6);
}

#[test]
fn upsampling_drops_the_gradients_of_other_uses() {
    let both = |up: fn(&Tensor) -> Result<Tensor>| {
        move |x: &Tensor| {
            let x = (x * 1.0)?;
            up(&x)?.flatten_all()?.sum(0)? + x.sqr()?.sum_all()?
        }
    };
    assert!(error(&[1, 2, 2, 2], both(|x| x.upsample_nearest2d(4, 4))) > 0.1);
    assert!(error(&[1, 2, 3], both(|x| x.upsample_nearest1d(6))) > 0.1);
    let repeat = |x: &Tensor| {
        let x = x.reshape((1, 2, 2, 1, 2, 1))?.broadcast_as((1, 2, 2, 2, 2, 2))?;
        x.reshape((1, 2, 4, 4))
    };
    assert!(error(&[1, 2, 2, 2], both(repeat)) < 1e-6);
}

#[test]
fn scatter_and_scatter_add_are_wrong_in_their_first_tensor() {
    let index = Tensor::new(&[[0u32, 2, 2], [1, 0, 1]], &Device::Cpu).unwrap();
    let source = numbers(&[2, 3]);
    assert!(error(&[2, 3], |x| (x * 1.0)?.scatter(&index, &source, 1)) > 0.1);
    assert!(error(&[2, 3], |x| (x * 1.0)?.scatter_add(&index, &source, 1)) > 0.1);
    let zeros = Tensor::zeros((2, 3), DType::F64, &Device::Cpu).unwrap();
    assert!(error(&[2, 3], |x| (x * 1.0)? + zeros.scatter_add(&index, &source, 1)?) < 1e-6);
    assert!(error(&[2, 3], |source| zeros.scatter_add(&index, source, 1)) < 1e-6);
    // The backward of `scatter_add` fails if its first tensor differs in shape from the index.
    let wide = Tensor::zeros((2, 4), DType::F64, &Device::Cpu).unwrap();
    let source = Var::from_tensor(&source).unwrap();
    assert!(wide.scatter_add(&index, source.as_tensor(), 1).unwrap().sum_all().unwrap().backward().is_err());
}

/// Returns candle's gradient of the sum of `op`.
fn gradient<const N: usize>(values: [f32; N], op: impl Fn(&Tensor) -> Result<Tensor>) -> Option<Vec<f32>> {
    let x = Var::new(&values, &Device::Cpu).unwrap();
    let gradients = op(x.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
    gradients.get(&x).map(|gradient| gradient.to_vec1().unwrap())
}

fn cut(op: impl Fn(&Tensor) -> Result<Tensor>) -> bool {
    gradient([1.0, 2.0], |x| op(&x.reshape((1, 2, 1))?)).is_none()
}

#[test]
fn caches_and_operations_in_place_cut_the_gradient() {
    let sum = |(k, v): (Tensor, Tensor)| k + v;
    assert!(cut(|x| sum(KvCache::new(1, 4).append(x, x)?)));
    assert!(cut(|x| sum(RotatingKvCache::new(1, 4).append(x, x)?)));
    assert!(cut(|x| sum(ConcatKvCache::new(1).append(x, x)?)));
    let zeros = || Tensor::zeros((1, 4, 1), DType::F32, &Device::Cpu);
    assert!(cut(|x| {
        let y = zeros()?;
        y.slice_set(x, 1, 1)?;
        Ok(y)
    }));
    assert_eq!(gradient([1.0, 2.0], |x| zeros()?.slice_scatter(&x.reshape((1, 2, 1))?, 1, 1)), Some(vec![1.0, 1.0]));
}

#[test]
fn gradients_at_ties_and_at_zero_differ_from_those_of_pytorch() {
    let values = [0.0, 0.0, -1.0];
    assert_eq!(gradient(values, Tensor::relu), Some(vec![1.0, 1.0, 0.0]));
    assert_eq!(gradient(values, zero_ops::relu), Some(vec![0.0, 0.0, 0.0]));
    assert_eq!(gradient(values, Tensor::abs), Some(vec![1.0, 1.0, -1.0]));
    assert_eq!(gradient(values, |x| x.relu()? - zero_ops::relu(&x.neg()?)? * -1.0), Some(vec![1.0, 1.0, -1.0]));
    assert_eq!(gradient(values, |x| x.clamp(0.0, 1.0)), Some(vec![0.5, 0.5, 0.0]));
    assert_eq!(gradient(values, |x| x.max(0)), Some(vec![1.0, 1.0, 0.0]));
    assert_eq!(gradient(values, |x| x.gather(&x.argmax_keepdim(0)?, 0)), Some(vec![1.0, 0.0, 0.0]));
}

#[test]
fn binary_cross_entropy_is_nan_for_large_logits_and_the_replacement_is_right() {
    let targets = Tensor::new(&[1f32, 0.0, 1.0, 0.0], &Device::Cpu).unwrap();
    let logits = Tensor::new(&[20f32, -20.0, 0.0, 0.0], &Device::Cpu).unwrap();
    let loss = binary_cross_entropy_with_logit(&logits, &targets).unwrap();
    assert!(loss.to_scalar::<f32>().unwrap().is_nan());
    let replacement =
        |x: &Tensor| ((x.relu()? - (x * &targets)?)? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?)?.mean_all();
    let loss = replacement(&logits).unwrap().to_scalar::<f32>().unwrap();
    assert!((loss - std::f32::consts::LN_2 / 2.0).abs() < 1e-6);
    let gradient = gradient([20.0, -20.0, 0.0, 0.0], replacement).unwrap();
    assert!(gradient.iter().zip([0.0, 0.0, -0.125, 0.125]).all(|(a, b)| (a - b).abs() < 1e-6), "{gradient:?}");
}

#[test]
fn convolution_with_a_stride_has_no_gradient_unless_the_remainders_are_equal() {
    let (x, kernel) = (numbers(&[1, 2, 8, 7]), numbers(&[3, 2, 3, 3]));
    let own = |x: &Tensor, kernel: &Tensor| {
        x.pad_with_zeros(2, 1, 1)?.pad_with_zeros(3, 1, 1)?.narrow(2, 0, 9)?.narrow(3, 0, 9)?.conv2d(kernel, 0, 2, 1, 1)
    };
    let convolve = |x: &Tensor| x.conv2d(&kernel, 1, 2, 1, 1);
    let all = |y: Tensor| y.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    assert_eq!(all(convolve(&x).unwrap()), all(own(&x, &kernel).unwrap()));
    let variable = Var::from_tensor(&x).unwrap();
    let failure = convolve(variable.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(failure.starts_with("shape mismatch in add"), "{failure}");
    assert!(error(&[1, 2, 8, 7], |x| own(x, &kernel)) < 1e-6);
    assert!(error(&[3, 2, 3, 3], |kernel| own(&x, kernel)) < 1e-6);
}
