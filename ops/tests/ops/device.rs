//! Elementwise operations are bit-identical on a GPU: runs the kernels of `zero-kernels` on their emulator.
#![allow(unsafe_code)]

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use zero_emulator::{Emulator, Memory};
use zero_kernels::activation::{self, Function};
use zero_kernels::rotary::{Turn, rotary};
use zero_kernels::{Dtype, Launch};
use zero_ops as ops;

const TYPES: [(Dtype, DType); 3] = [(Dtype::F32, DType::F32), (Dtype::Bf16, DType::BF16), (Dtype::F16, DType::F16)];

fn run<A>(emulator: &Emulator, launch: Option<Launch<A>>) {
    // SAFETY: the tests below hold the memory that their launches name, in the sizes that the launches require.
    unsafe { emulator.run(&launch.unwrap(), 0) }.unwrap();
}

/// Returns numbers that cover the special ranges of the functions: the tails, both sides of 0, and 0 itself.
fn numbers(count: usize, step: f32) -> Vec<f32> {
    (0..count).map(|i| (i as f32 - count as f32 / 2.0) * step).chain([0.0, -0.0, 1e4, -1e4, 1e-30]).collect()
}

fn tensor(values: &[f32], dtype: DType) -> Result<Tensor> {
    Tensor::new(values, &Device::Cpu)?.to_dtype(dtype)
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    let values = tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

fn gradient(gradients: &GradStore, of: &Tensor) -> Result<Vec<u32>> {
    let values = gradients.get(of).unwrap().flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    Ok(bits_of_gradient(&values))
}

fn bits_of(memory: &Memory, dtype: Dtype) -> Vec<u32> {
    memory.to_floats(dtype).into_iter().map(f32::to_bits).collect()
}

/// Returns the bits of a gradient. candle adds each gradient to zeros, which turns −0 and subnormal bf16 into 0.
fn bits_of_gradient(values: &[f32]) -> Vec<u32> {
    values.iter().map(|&x| if x.is_subnormal() { 0 } else { (x + 0.0).to_bits() }).collect()
}

/// Returns the result of an operation with one input, and its gradient for an upstream gradient.
fn on_cpu(x: &[f32], dy: &[f32], dtype: DType, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<[Vec<u32>; 2]> {
    let x = Var::from_tensor(&tensor(x, dtype)?)?;
    let y = f(&x)?;
    let gradients = (&y * tensor(dy, dtype)?.reshape(y.shape())?)?.backward()?;
    Ok([bits(&y)?, gradient(&gradients, &x)?])
}

#[test]
fn activations_are_bit_identical_to_the_cpus() -> Result<()> {
    let Some(emulator) = Emulator::shared() else { return Ok(()) };
    let functions: [fn(&Tensor) -> Result<Tensor>; 4] = [ops::gelu, ops::gelu_erf, ops::silu, ops::relu];
    let x = numbers(3000, 0.011);
    let dy: Vec<f32> = x.iter().map(|x| (x * 7.7).sin()).collect();
    let count = x.len() as u64;
    for (dtype, of_candle) in TYPES {
        for (f, on_candle) in Function::ALL.into_iter().zip(functions) {
            let [y, dx] = on_cpu(&x, &dy, of_candle, on_candle)?;
            let [mut from, mut upstream, mut out] = [&x, &dy, &x].map(|values| Memory::floats(dtype, values));
            run(emulator, activation::forward(f, dtype, count, from.address(), out.address()));
            assert!(bits_of(&out, dtype) == y, "{f:?} in {dtype:?}");
            let launch = activation::backward(f, dtype, count, from.address(), upstream.address(), out.address());
            run(emulator, launch);
            assert!(bits_of_gradient(&out.to_floats(dtype)) == dx, "the slope of {f:?} in {dtype:?}");
        }
        let up: Vec<f32> = x.iter().map(|x| (x * 3.1).cos()).collect();
        let (gate_var, up_var) =
            (Var::from_tensor(&tensor(&x, of_candle)?)?, Var::from_tensor(&tensor(&up, of_candle)?)?);
        let y = ops::swiglu(&gate_var, &up_var)?;
        let gradients = (&y * tensor(&dy, of_candle)?)?.backward()?;
        let [mut gate, mut up, mut upstream, mut out] = [&x, &up, &dy, &x].map(|values| Memory::floats(dtype, values));
        let from = [gate.address(), up.address()];
        run(emulator, activation::swiglu(dtype, count, from, out.address()));
        assert!(bits_of(&out, dtype) == bits(&y)?, "swiglu in {dtype:?}");
        run(emulator, activation::swiglu_backward(dtype, count, from, upstream.address(), from));
        for (memory, var) in [(&gate, &gate_var), (&up, &up_var)] {
            let found = bits_of_gradient(&memory.to_floats(dtype));
            assert!(found == gradient(&gradients, var)?, "swiglu's gradients in {dtype:?}");
        }
    }
    Ok(())
}

#[test]
fn rotary_embedding_is_bit_identical_to_the_cpus() -> Result<()> {
    let Some(emulator) = Emulator::shared() else { return Ok(()) };
    let shape @ [batch, time, heads, size] = [2u32, 9, 3, 16];
    let (half, count) = (size as usize / 2, (batch * time * heads * size) as usize);
    let x = &numbers(count, 0.01)[..count];
    let dy: Vec<f32> = x.iter().map(|x| (x * 7.7).sin()).collect();
    // Computes the tables as the operation does.
    let frequency = |pair: usize| libm::pow(10000.0, -2.0 * pair as f64 / f64::from(size));
    let angles: Vec<f64> = (0..time as usize * half).map(|at| (at / half) as f64 * frequency(at % half)).collect();
    let [mut cos, mut sin] = [libm::cos, libm::sin]
        .map(|of| Memory::floats(Dtype::F32, &angles.iter().map(|&angle| of(angle) as f32).collect::<Vec<_>>()));
    let tables = [cos.address(), sin.address()];
    let rotation = ops::Rotary::new(size as usize, time as usize, 10000.0)?;
    let packed: Vec<u32> = (0..batch * time).map(|at| at * 5 % time).collect();
    let position_ids = Tensor::from_slice(&packed, (batch as usize, time as usize), &Device::Cpu)?;
    let mut packed = Memory::integers(&packed);
    for ((dtype, of_candle), positions) in TYPES.into_iter().flat_map(|of| [(of, 0), (of, packed.address())]) {
        let dims = shape.map(|n| n as usize);
        let [y, dx] = on_cpu(x, &dy, of_candle, |x| match positions {
            0 => rotation.apply(&x.reshape(&dims[..])?),
            _ => rotation.apply_at(&x.reshape(&dims[..])?, &position_ids),
        })?;
        for (values, turn, want) in [(x, Turn::Forth, y), (&dy, Turn::Back, dx)] {
            let mut memory = Memory::floats(dtype, values);
            run(emulator, rotary(dtype, shape, tables, positions, [memory.address(); 2], turn));
            let found = match turn {
                Turn::Forth => bits_of(&memory, dtype),
                Turn::Back => bits_of_gradient(&memory.to_floats(dtype)),
            };
            assert!(found == want, "{turn:?} in {dtype:?}");
        }
    }
    Ok(())
}
