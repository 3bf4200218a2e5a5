//! Compares candle's own tensor operations on a GPU with those on the CPU, on the emulated GPU of docs/gpu-kernels.md
//! or, with `ZERO_TRAIN_CUDA_TESTS=1`, on the first GPU of this machine. Operations other than sums and elementary
//! functions must be bit-identical.
#![allow(clippy::disallowed_methods, reason = "operations that layers should not use must work on a GPU, too")]
#![allow(clippy::needless_range_loop, reason = "dimensions are numbers")]

#[path = "../../cuda/emulator/mock/mod.rs"]
mod mock;

use std::process::Command;

use candle_core::{D, DType, Device, IndexOp, Result, Tensor, Var};
use candle_nn::{Linear, Module};

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Opens the device. If it has no kernels, prints why and returns `None`.
fn device(ordinal: usize) -> Option<Device> {
    if !mock::ready() {
        return None;
    }
    let device = Device::new_cuda_with_stream(ordinal).expect("a device");
    match Tensor::ones(1, DType::F32, &device) {
        Ok(_) => Some(device),
        Err(error) if mock::has_no_kernels(&error) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Returns numbers between about −2 and 2 on the CPU. In f32, no two of the first 10,007 numbers are equal.
fn numbers(dims: &[usize], dtype: DType) -> Tensor {
    let count = dims.iter().product();
    let value = |i: usize| ((i * 7919 + 13) % 10007) as f32 / 2501.0 - 2.0;
    let values: Vec<f32> = (0..count).map(value).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Returns indices in 0..below, some of them more than once.
fn places(dims: &[usize], below: u32, dtype: DType) -> Tensor {
    let count: usize = dims.iter().product();
    let values: Vec<u32> = (0..count as u32).map(|i| (i * 7 + 3) % below).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Returns the results of an operation on the GPU and on the CPU, for the same inputs.
fn both<const N: usize>(
    device: &Device,
    inputs: [&Tensor; N],
    run: impl Fn([&Tensor; N]) -> Result<Tensor>,
) -> (Tensor, Tensor) {
    let moved = inputs.map(|input| input.to_device(device).unwrap());
    (run(moved.each_ref()).unwrap(), run(inputs).unwrap())
}

fn doubles(x: &Tensor) -> Vec<f64> {
    x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Compares two results bit by bit. All numbers in these tests convert to f64 exactly, so equal f64 mean equal bits.
fn equal(what: &str, (got, want): (Tensor, Tensor)) {
    assert!(got.device().is_cuda(), "{what}");
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()), "{what}");
    let (got, want) = (doubles(&got), doubles(&want));
    for (i, (a, b)) in got.iter().zip(&want).enumerate() {
        assert!(a.to_bits() == b.to_bits(), "{what} [{i}]: {a} for {b}");
    }
}

/// Compares with a tolerance of `units` rounding units of the dtype, relative to the number or to one.
fn close(what: &str, units: f64, (got, want): (Tensor, Tensor)) {
    assert!(got.device().is_cuda(), "{what}");
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()), "{what}");
    let unit = match got.dtype() {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F64 => 2f64.powi(-53),
        _ => 2f64.powi(-24),
    };
    let (got, want) = (doubles(&got), doubles(&want));
    for (i, (a, b)) in got.iter().zip(&want).enumerate() {
        let allowed = units * unit * b.abs().max(1.0);
        assert!((a - b).abs() <= allowed, "{what} [{i}]: {a} for {b}");
    }
}

#[test]
fn tensors_are_copied_and_freed() -> Result<()> {
    let Some(device) = device(0) else { return Ok(()) };
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64, DType::U32, DType::I64, DType::U8] {
        for (fill, value) in [("zeros", 0.0), ("ones", 1.0)] {
            let make = |on: &Device| match fill {
                "zeros" => Tensor::zeros((3, 1025), dtype, on).unwrap(),
                _ => Tensor::ones((3, 1025), dtype, on).unwrap(),
            };
            assert!(doubles(&make(&device)).iter().all(|&x| x == value), "{dtype:?} {fill}");
        }
    }
    let values: Vec<i64> = (0..3000).map(|i| i - 1500 + (i << 40)).collect();
    assert_eq!(Tensor::from_vec(values.clone(), 3000, &device)?.to_vec1::<i64>()?, values);
    for dtype in FLOATS {
        let x = numbers(&[5, 6, 7], dtype);
        equal("there and back", both(&device, [&x], |[x]| x.copy()));
        equal("transposed", both(&device, [&x], |[x]| x.transpose(0, 2)?.contiguous()));
        equal("narrowed", both(&device, [&x], |[x]| x.narrow(1, 2, 3)?.contiguous()));
        equal("both", both(&device, [&x], |[x]| x.i((1..4, .., 2..6))?.transpose(1, 2)?.contiguous()));
        equal("repeated", both(&device, [&x], |[x]| x.unsqueeze(2)?.broadcast_as((5, 6, 3, 7))?.contiguous()));
        for dim in 0..3 {
            equal("cat", both(&device, [&x], |[x]| Tensor::cat(&[x, &x.copy()?, x], dim)));
        }
    }
    Ok(())
}

#[test]
fn dtypes_are_converted() {
    let Some(device) = device(0) else { return };
    let all = [DType::F32, DType::BF16, DType::F16, DType::F64, DType::U32, DType::I64, DType::U8];
    for from in all {
        for to in all {
            // candle has no kernels for these conversions.
            let narrow = [DType::BF16, DType::F16];
            if (from == DType::I64 && narrow.contains(&to)) || (to == DType::I64 && narrow.contains(&from)) {
                continue;
            }
            // Multiples of one half, in more than one block. Float dtypes represent them exactly; integer dtypes
            // truncate them.
            let x = places(&[3, 700], 200, DType::F32).affine(0.5, 0.0).unwrap().to_dtype(from).unwrap();
            equal(&format!("{from:?} to {to:?}"), both(&device, [&x], |[x]| x.to_dtype(to)));
            equal(&format!("{from:?} to {to:?}, turned"), both(&device, [&x], |[x]| x.t()?.to_dtype(to)));
        }
    }
    // Rounded to nearest, ties to even.
    for to in [DType::BF16, DType::F16] {
        let ties = places(&[4096], 4096, DType::F32).affine(1.0 / 1024.0, 1.0).unwrap();
        equal("ties", both(&device, [&ties], |[x]| x.to_dtype(to)));
        equal("many", both(&device, [&numbers(&[9000], DType::F32)], |[x]| x.to_dtype(to)));
    }
}

#[test]
fn elementwise_operations_are_computed() {
    let Some(device) = device(0) else { return };
    for dtype in FLOATS {
        // Odd sizes too: candle's kernels process four or eight elements at a time if they can.
        for dims in [[4, 512], [3, 77]] {
            let (x, y) = (numbers(&dims, dtype), numbers(&dims, dtype).affine(-0.7, 0.3).unwrap());
            let row = numbers(&[1, dims[1]], dtype);
            equal("add", both(&device, [&x, &y], |[x, y]| x + y));
            equal("sub", both(&device, [&x, &y], |[x, y]| x - y));
            equal("mul", both(&device, [&x, &y], |[x, y]| x * y));
            equal("div", both(&device, [&x, &y], |[x, y]| y / x));
            equal("maximum", both(&device, [&x, &y], |[x, y]| x.maximum(y)));
            equal("minimum", both(&device, [&x, &y], |[x, y]| x.minimum(y)));
            equal("views", both(&device, [&x, &y], |[x, y]| x.t()?.add(&y.t()?)));
            equal("broadcast", both(&device, [&x, &row], |[x, y]| x.broadcast_mul(y)));
            equal("less", both(&device, [&x, &y], |[x, y]| x.lt(y)));
            equal("where", both(&device, [&x, &y], |[x, y]| x.ge(y)?.where_cond(x, &y.affine(0.0, 5.0)?)));
            close("affine", 2.0, both(&device, [&x], |[x]| x.affine(1.7, -0.4)));
            for name in ["neg", "abs", "sqr", "relu", "floor", "ceil", "round", "sign"] {
                equal(name, both(&device, [&x], |[x]| unary(name, x)));
            }
            let positive = x.abs().unwrap();
            for name in ["sqrt", "log", "recip"] {
                close(name, 4.0, both(&device, [&positive], |[x]| unary(name, x)));
            }
            for name in ["exp", "sin", "cos", "tanh", "gelu", "gelu_erf", "erf", "silu", "elu"] {
                close(name, 8.0, both(&device, [&x], |[x]| unary(name, x)));
                close(name, 8.0, both(&device, [&x], |[x]| unary(name, &x.t()?)));
            }
            close("powf", 8.0, both(&device, [&positive], |[x]| x.powf(1.5)));
        }
    }
}

fn unary(name: &str, x: &Tensor) -> Result<Tensor> {
    match name {
        "neg" => x.neg(),
        "abs" => x.abs(),
        "sqr" => x.sqr(),
        "relu" => x.relu(),
        "floor" => x.floor(),
        "ceil" => x.ceil(),
        "round" => x.round(),
        "sign" => x.sign(),
        "sqrt" => x.sqrt(),
        "log" => x.log(),
        "recip" => x.recip(),
        "exp" => x.exp(),
        "sin" => x.sin(),
        "cos" => x.cos(),
        "tanh" => x.tanh(),
        "gelu" => x.gelu(),
        "gelu_erf" => x.gelu_erf(),
        "erf" => x.erf(),
        "silu" => x.silu(),
        "elu" => x.elu(0.7),
        other => panic!("{other} is no operation"),
    }
}

#[test]
fn dimensions_are_reduced() {
    let Some(device) = device(0) else { return };
    for dtype in FLOATS {
        // Rows that are much shorter than a block, shorter than a block, and longer than a block.
        for dims in [[5, 6, 7], [3, 4, 100], [2, 3, 2500]] {
            let x = numbers(&dims, dtype);
            for dim in 0..3 {
                // The CPU rounds each partial sum to 16 bits, so f32 sums are the reference.
                let wide = x.to_dtype(DType::F32).unwrap();
                let sum = x.to_device(&device).unwrap().sum(dim).unwrap();
                let units = if dtype == DType::F16 { 4.0 * dims[dim] as f64 } else { 200.0 };
                close("sum", units, (sum, wide.sum(dim).unwrap().to_dtype(dtype).unwrap()));
                equal("max", both(&device, [&x], |[x]| x.max(dim)));
                equal("min", both(&device, [&x], |[x]| x.min_keepdim(dim)));
            }
            equal("views", both(&device, [&x], |[x]| x.transpose(0, 2)?.max(1)));
        }
    }
    let x = numbers(&[4, 2500], DType::F32);
    equal("argmax", both(&device, [&x], |[x]| x.argmax(D::Minus1)));
    equal("argmin", both(&device, [&x], |[x]| x.t()?.argmin(0)));
    close("mean", 10.0, both(&device, [&x], |[x]| x.mean(D::Minus1)));
    close("sum of all", 2000.0, both(&device, [&x], |[x]| x.sum_all()));
    let whole = places(&[40, 333], 1000, DType::U32);
    equal("whole numbers", both(&device, [&whole], |[x]| x.sum(1)));
    equal("order", both(&device, [&numbers(&[7, 100], DType::F32)], |[x]| x.arg_sort_last_dim(false)));
}

#[test]
fn matrices_are_multiplied() {
    let Some(device) = device(0) else { return };
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        // Sizes with one row, partial tiles, whole tiles, and more than one tile.
        for (m, k, n) in [(1, 5, 3), (64, 64, 64), (70, 130, 9), (3, 300, 130)] {
            let (a, b) = (numbers(&[m, k], dtype), numbers(&[k, n], dtype));
            // The tolerance is relative to the sum of the products' magnitudes, not to the result.
            let units = if dtype == DType::F64 { 8.0 } else { 4.0 } * k as f64;
            let plain = both(&device, [&a, &b], |[a, b]| a.matmul(b));
            close("plain", units, plain);
            let (turned_a, turned_b) = (a.t().unwrap().contiguous().unwrap(), b.t().unwrap().contiguous().unwrap());
            close("first turned", units, both(&device, [&turned_a, &b], |[a, b]| a.t()?.matmul(b)));
            close("second turned", units, both(&device, [&a, &turned_b], |[a, b]| a.matmul(&b.t()?)));
            close("both turned", units, both(&device, [&turned_a, &turned_b], |[a, b]| a.t()?.matmul(&b.t()?)));
        }
        let (a, b) = (numbers(&[2, 3, 5, 8], dtype), numbers(&[2, 3, 8, 4], dtype));
        close("batches", 32.0, both(&device, [&a, &b], |[a, b]| a.matmul(b)));
        close("one for all", 32.0, both(&device, [&a, &b], |[a, b]| a.broadcast_matmul(&b.i((1, 2))?)));
        let (a, b) = (numbers(&[2, 5, 3, 8], dtype), numbers(&[2, 4, 3, 8], dtype));
        let heads =
            |[a, b]: [&Tensor; 2]| a.transpose(1, 2)?.contiguous()?.matmul(&b.permute((0, 2, 3, 1))?.contiguous()?);
        close("heads", 32.0, both(&device, [&a, &b], heads));
    }
}

#[test]
fn elements_are_gathered_and_scattered() {
    let Some(device) = device(0) else { return };
    for dtype in FLOATS {
        for of_places in [DType::U32, DType::I64] {
            let (table, rows) = (numbers(&[50, 33], dtype), places(&[40], 50, of_places));
            equal("index_select", both(&device, [&table, &rows], |[x, i]| x.index_select(i, 0)));
            equal("columns", both(&device, [&table, &rows], |[x, i]| x.t()?.contiguous()?.index_select(i, 1)));
            equal("embedding", both(&device, [&table, &rows], |[x, i]| x.embedding(i)));
            let columns = places(&[50, 4], 33, of_places);
            equal("gather", both(&device, [&table, &columns], |[x, i]| x.gather(i, 1)));
            // Both devices add in the order of the indices.
            let source = numbers(&[40, 33], dtype);
            equal("index_add", both(&device, [&table, &rows, &source], |[x, i, y]| x.index_add(i, y, 0)));
            let values = numbers(&[50, 4], dtype);
            equal("scatter_add", both(&device, [&table, &columns, &values], |[x, i, y]| x.scatter_add(i, y, 1)));
            equal("scatter", both(&device, [&table, &columns, &values], |[x, i, y]| x.scatter(i, y, 1)));
        }
    }
}

#[test]
fn gradients_are_computed() -> Result<()> {
    let Some(device) = device(0) else { return Ok(()) };
    let gradients = |on: &Device| -> Result<Vec<Tensor>> {
        let var = |dims: &[usize]| Var::from_tensor(&numbers(dims, DType::F32).affine(0.2, 0.0)?.to_device(on)?);
        let vars = [var(&[64, 20])?, var(&[64])?, var(&[10, 64])?, var(&[10])?];
        let linear = |i: usize| Linear::new(vars[i].as_tensor().clone(), Some(vars[i + 1].as_tensor().clone()));
        let x = numbers(&[32, 20], DType::F32).to_device(on)?;
        let logits = linear(2).forward(&linear(0).forward(&x)?.gelu()?)?;
        let loss = candle_nn::loss::cross_entropy(&logits, &places(&[32], 10, DType::U32).to_device(on)?)?;
        let grads = loss.backward()?;
        Ok(vars.iter().map(|var| grads.get(var).expect("a gradient").clone()).chain([loss]).collect())
    };
    for (got, want) in gradients(&device)?.into_iter().zip(gradients(&Device::Cpu)?) {
        close("gradient", 40.0, (got, want));
    }
    Ok(())
}

#[test]
fn random_numbers_follow_from_a_seed() -> Result<()> {
    let Some(device) = device(0) else { return Ok(()) };
    let draw = |seed| -> Result<[Vec<f32>; 2]> {
        device.set_seed(seed)?;
        let (uniform, normal) =
            (Tensor::rand(-1f32, 3f32, 20_000, &device)?, Tensor::randn(2f32, 3f32, 20_001, &device)?);
        Ok([uniform.to_vec1()?, normal.to_vec1()?])
    };
    let drawn = draw(5)?;
    assert!(drawn == draw(5)? && drawn != draw(6)?);
    for (values, mean, deviation) in [(&drawn[0], 1.0, 4.0 / 12f64.sqrt()), (&drawn[1], 2.0, 3.0)] {
        let count = values.len() as f64;
        let found = values.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
        let squares = values.iter().map(|&x| (f64::from(x) - found).powi(2)).sum::<f64>() / count;
        assert!((found - mean).abs() < 0.1 && (squares.sqrt() - deviation).abs() < 0.1, "{found} {squares}");
    }
    Ok(())
}

#[test]
fn memory_is_counted() -> Result<()> {
    if !mock::only_the_mock() {
        return Ok(());
    }
    let Some(device) = device(2) else { return Ok(()) };
    let free = || device.as_cuda_device().unwrap().cuda_stream().context().mem_get_info().unwrap();
    device.synchronize()?;
    let (before, total) = free();
    assert_eq!(total, 8 << 30);
    let held = Tensor::zeros(1 << 20, DType::F32, &device)?;
    assert_eq!(before - free().0, 4 << 20);
    drop(held);
    device.synchronize()?;
    assert_eq!(free().0, before);
    let error = Tensor::zeros(3 << 30, DType::F32, &device).unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    Ok(())
}

/// A device-side assertion fails the next call that synchronizes and all later ones, so the test needs a process of its
/// own.
#[test]
fn an_index_out_of_range_is_an_error() -> Result<()> {
    const CHILD: &str = "ZERO_TRAIN_TEST_CHILD";
    if !mock::only_the_mock() {
        return Ok(());
    }
    let Some(device) = device(0) else { return Ok(()) };
    if std::env::var_os(CHILD).is_none() {
        let mut command = Command::new(std::env::current_exe()?);
        let output = command.args(["--exact", "an_index_out_of_range_is_an_error"]).env(CHILD, "1").output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("assertion failed: ids[id_i] < src_dim_size"), "{said}");
        return Ok(());
    }
    let (table, rows) = (numbers(&[5, 3], DType::F32).to_device(&device)?, Tensor::new(&[4u32, 5], &device)?);
    let picked = table.index_select(&rows, 0)?;
    let error = picked.to_vec2::<f32>().unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_LAUNCH_FAILED"), "{error}");
    Ok(())
}
