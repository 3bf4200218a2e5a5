//! Linear maps and the operations fused with them: results are within rounding of the CPU's and of f64, bit-identical
//! in every run, and take the expected number of launches.

use super::{EVERYWHERE, FLOATS, Into, both, gpu, mock, trained};
use crate::check::{close, normal, same_bits};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::Module;
use std::process::Command;
use zero_ops::graph;
use zero_ops::{Conv1D, Linear};

/// Returns a tolerance that allows for another order of the sums, for their rounding, and for GELU of unrounded sums.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::BF16 => 2f64.powi(-6),
        _ => 2f64.powi(-9),
    }
}

/// Rows, inputs and outputs: sizes that cuBLASLt supports in every dtype, only in f32 (rows of 12 elements), and
/// never.
const SIZES: [(&[usize], usize, usize); 5] =
    [(&[2, 65], 16, 24), (&[3], 200, 8), (&[70], 8, 12), (&[9], 7, 5), (&[1], 1, 1)];

fn network(t: &[Tensor]) -> [Conv1D; 2] {
    [1, 3].map(|at| Conv1D::from_tensors(t[at].clone(), t[at + 1].clone()))
}

#[test]
fn linear_layers_and_their_gradients() {
    let Some(gpu) = gpu() else { return };
    for dtype in FLOATS {
        for (lead, inputs, outputs) in SIZES {
            let x = normal("x", &[lead, &[inputs]].concat());
            let small = |name, shape: &[usize]| (normal(name, shape) * 0.3).unwrap();
            let (wide, turned) = (small("w", &[inputs, outputs]), small("w", &[outputs, inputs]));
            let of = |weight: Tensor| [x.clone(), weight, normal("b", &[outputs])].map(|t| t.to_dtype(dtype).unwrap());
            for into in EVERYWHERE {
                let what = |what: &str| format!("{what} of {dtype:?} {lead:?}x{inputs}x{outputs} into {into:?}");
                let compare = |inputs: &[Tensor], op: &dyn Fn(&[Tensor]) -> Result<Tensor>| {
                    let [got, want] = both(&gpu, inputs, into, op);
                    close(&what("y"), &got.0, &want.0, tolerance(dtype));
                    for (name, (got, want)) in ["dx", "dW", "db"].iter().zip(got.1.iter().zip(&want.1)) {
                        close(&what(name), got, want, tolerance(dtype));
                    }
                    // Another run is bit-identical.
                    let again = trained(&gpu, inputs, into, op).unwrap();
                    same_bits(&what("y"), &again.0, &got.0);
                    again.1.iter().zip(&got.1).for_each(|(a, b)| same_bits(&what("gradient"), a, b));
                };
                let conv = |t: &[Tensor]| Conv1D::from_tensors(t[1].clone(), t[2].clone());
                let linear = |t: &[Tensor]| Linear::from_tensors(t[1].clone(), t.get(2).cloned()).forward(&t[0]);
                compare(&of(wide.clone()), &|t| conv(t).forward(&t[0]));
                compare(&of(wide.clone()), &|t| conv(t).forward_gelu(&t[0]));
                compare(&of(turned.clone()), &linear);
                compare(&of(turned.clone())[..2], &linear);
            }
        }
    }
}

/// The gradient of a bias is summed in f32 in the CPU's order, so from the same upstream gradient it is
/// bit-identical.
#[test]
fn bias_gradients_are_bit_identical_to_the_cpus() {
    let Some(gpu) = gpu() else { return };
    for dtype in FLOATS {
        for (rows, outputs) in [(200, 24), (64, 6), (1100, 5), (1, 8)] {
            let inputs = [normal("x", &[rows, 8]), normal("w", &[8, outputs]), normal("b", &[outputs])];
            let inputs = inputs.map(|t| t.to_dtype(dtype).unwrap());
            for into in EVERYWHERE {
                let op = |t: &[Tensor]| Conv1D::from_tensors(t[1].clone(), t[2].clone()).forward(&t[0]);
                let [got, want] = both(&gpu, &inputs, into, op);
                same_bits(&format!("db of {dtype:?} {rows}x{outputs} into {into:?}"), &got.1[2], &want.1[2]);
            }
        }
    }
}

#[test]
fn a_feed_forward_network_and_its_gradients() {
    let Some(gpu) = gpu() else { return };
    for dtype in FLOATS {
        for (lead, width, inner) in SIZES {
            let small = |name, shape: &[usize]| (normal(name, shape) * 0.3).unwrap();
            let exact = [
                normal("x", &[lead, &[width]].concat()),
                small("up", &[width, inner]),
                small("up bias", &[inner]),
                small("down", &[inner, width]),
                small("down bias", &[width]),
            ]
            .map(|t| t.to_dtype(dtype).unwrap());
            let plain = |t: &[Tensor]| -> Result<Tensor> {
                let x = t[0].reshape(((), width))?;
                let sum = x.matmul(&t[1])?.broadcast_add(&t[2])?;
                let y = sum.gelu()?.matmul(&t[3])?.broadcast_add(&t[4])?;
                y.reshape([lead, &[width]].concat())
            };
            let wide = exact.clone().map(|t| t.to_dtype(DType::F64).unwrap());
            let want = trained(&Device::Cpu, &wide, Into::Store, plain).unwrap();
            for into in EVERYWHERE {
                let op = |t: &[Tensor]| {
                    let [up, down] = network(t);
                    up.forward_gelu_then(&t[0], &down)
                };
                let [got, cpu] = both(&gpu, &exact, into, op);
                let times = if into == Into::Sink(2) { 2.0 } else { 1.0 };
                let what = |what: &str| format!("{what} of {dtype:?} {lead:?}x{width}x{inner} into {into:?}");
                for (of, run) in [("the GPU's", &got), ("the processor's", &cpu)] {
                    close(&what(&format!("{of} y")), &run.0, &want.0, tolerance(dtype));
                    for (at, (got, want)) in run.1.iter().zip(&want.1).enumerate() {
                        let want = (want * times).unwrap();
                        close(&what(&format!("{of} gradient {at}")), got, &want, 2.0 * tolerance(dtype));
                    }
                }
                let again = trained(&gpu, &exact, into, op).unwrap();
                same_bits(&what("y"), &again.0, &got.0);
                again.1.iter().zip(&got.1).for_each(|(a, b)| same_bits(&what("gradient"), a, b));
            }
        }
    }
}

/// Environment variable that is set in a child process. The child runs a single test, so all launches that it counts
/// belong to this test.
const CHILD: &str = "ZERO_TRAIN_TEST_CHILD";

/// Runs one forward and backward of a feed-forward network with `inner` inner columns in a process of its own. The
/// gradients of the parameters go to a sink. Returns the number of launches of each kernel that may run, and the number
/// of products by cuBLAS and by cuBLASLt.
fn counted(inner: usize) -> Option<[u32; 7]> {
    let name = "gpu::linear::launches_of_a_feed_forward_network";
    if let Ok(inner) = std::env::var(CHILD) {
        let (gpu, inner) = (gpu().expect("a device"), inner.parse().unwrap());
        let shapes: [&[usize]; 5] = [&[128, 16], &[16, inner], &[inner], &[inner, 16], &[16]];
        let inputs = shapes.map(|shape| normal("any", shape).to_dtype(DType::BF16).unwrap());
        let op = |t: &[Tensor]| {
            let [up, down] = network(t);
            up.forward_gelu_then(&t[0], &down)
        };
        trained(&gpu, &inputs, Into::Sink(1), op).unwrap();
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", name, "--nocapture"]).env(CHILD, inner.to_string()).env("MOCK_COUNTS", "1");
    let output = output.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stdout));
    let count = |name: &str| {
        let of = said.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u32>().ok());
        of.sum()
    };
    let kernels = ["spread_bf16", "gelu_tanh_bf16", "gelu_tanh_backward_bf16", "partial_sums"];
    let [spread, gelu, slope, sums] = kernels.map(|kernel| count(&format!("launches {kernel}")));
    let rows = count("launches row_sums_wide_bf16") + count("launches row_sums_bf16");
    Some([spread, gelu, slope, rows, sums, count("mock_products"), count("mock_lt_products")])
}

#[test]
fn launches_of_a_feed_forward_network() {
    if mock::is_real() || gpu().is_none() {
        return;
    }
    let Some(fused) = counted(64) else { return };
    // Fused products include the bias, GELU and its derivative; the gradients of the weights and of x are plain
    // products.
    assert_eq!(fused, [0, 0, 0, 2, 2, 3, 3]);
    // Inner rows have 126 bytes, so only the map back to 16 columns can use an epilogue.
    assert_eq!(counted(63), Some([2, 1, 1, 2, 2, 6, 0]));
}

/// In an evaluation, GELU's input is freed before the second product, as on the CPU.
#[test]
fn an_evaluation_frees_the_input_of_gelu() {
    if mock::is_real() || gpu().is_none() {
        return;
    }
    if std::env::var_os(CHILD).is_none() {
        let name = "gpu::linear::an_evaluation_frees_the_input_of_gelu";
        let mut command = Command::new(std::env::current_exe().unwrap());
        let output = command.args(["--exact", name]).env(CHILD, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let gpu = gpu().expect("a device");
    let (rows, inner) = (256, 128);
    let shapes: [&[usize]; 5] = [&[rows, 8], &[8, inner], &[inner], &[inner, inner], &[inner]];
    let [x, parameters @ ..] = shapes.map(|shape| normal("any", shape).to_device(&gpu).unwrap());
    let [up, down] = [0, 2].map(|at| Conv1D::from_tensors(parameters[at].clone(), parameters[at + 1].clone()));
    let network = candle_nn::func(move |x| up.forward_gelu_then(x, &down));
    let peak = || zero_ops::device::peak(&gpu).unwrap().expect("a pool");
    let before = peak();
    graph::untracked(|| network.forward(&x)).unwrap();
    // At the peak, two activations are allocated (the sum and its GELU, or the GELU and the result), never three.
    let activation = (rows * inner * 4) as u64;
    let taken = peak() - before;
    assert!((2 * activation..5 * activation / 2).contains(&taken), "{taken} bytes, activations of {activation}");
}
