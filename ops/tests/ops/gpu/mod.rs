//! Compares the operations on a GPU with those on the CPU, on the emulated GPU of docs/gpu-kernels.md or, with
//! `ZERO_TRAIN_CUDA_TESTS=1`, on the first GPU of this machine.

mod elements;
mod embedding;
mod linear;
mod loss;
#[path = "../../../../cuda/emulator/mock/mod.rs"]
mod mock;
mod parts;
mod reference;

use crate::check::normal;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use zero_ops::device::{self, Array};
use zero_ops::sink::{FlatBuffer, Gradients};

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Opens a device with its own stream. If it has no kernels, prints why and returns `None`.
fn gpu() -> Option<Device> {
    if !mock::ready() {
        return None;
    }
    let gpu = device::open(0).expect("a device");
    match Tensor::ones(1, DType::F32, &gpu) {
        Ok(_) => Some(gpu),
        Err(error) if mock::has_no_kernels(&error) => None,
        Err(error) => panic!("{error}"),
    }
}

fn on_host(x: &Tensor) -> Tensor {
    x.to_device(&Device::Cpu).unwrap()
}

/// The destination of the gradients of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Into {
    /// candle's gradient store.
    Store,
    /// A sink, which accumulates the gradients of this many runs of forward and backward.
    Sink(usize),
}

const EVERYWHERE: [Into; 3] = [Into::Store, Into::Sink(1), Into::Sink(2)];

/// Runs an operation on a device with trained copies of the inputs. Returns the result, and the gradients of the inputs
/// for a fixed upstream gradient.
fn trained(
    on: &Device,
    inputs: &[Tensor],
    into: Into,
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<(Tensor, Vec<Tensor>)> {
    let inputs = inputs.iter().map(|x| Ok(Var::from_tensor(&x.to_device(on)?)?.into_inner()));
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    let run = || -> Result<(Tensor, GradStore)> {
        let y = op(&inputs)?;
        let weights = normal("weights of the result", y.dims()).to_dtype(y.dtype())?.to_device(on)?;
        // candle's sum of a tensor without dimensions requests an allocation of size zero on a GPU.
        let store = (&y * weights)?.flatten_all()?.sum_all()?.backward()?;
        Ok((y, store))
    };
    let Into::Sink(times) = into else {
        let (y, store) = run()?;
        return Ok((on_host(&y), inputs.iter().map(|x| on_host(store.get(x).expect("a gradient"))).collect()));
    };
    let mut sink = Gradients::default();
    for x in &inputs {
        // The first three elements of each buffer do not belong to the operation.
        let len = x.elem_count() + 3;
        let buffer = match on {
            Device::Cuda(device) => FlatBuffer::Device(Array::room(device, len)?),
            _ => vec![f32::NAN; len].into(),
        };
        sink.add_buffer(buffer, [(x.id(), 3..len, false)]);
    }
    let mut y = None;
    for _ in 0..times {
        let (mut after, result) = sink.capture(run);
        let (made, mut store) = result?;
        y = Some(made);
        inputs.iter().try_for_each(|x| after.absorb(&mut store, x))?;
        sink = after;
    }
    device::check(on)?;
    let gradients = sink.into_flat().into_iter().zip(&inputs).map(|(flat, x)| {
        let mut values = vec![0.0; x.elem_count()];
        match flat {
            FlatBuffer::Device(array) => array.to_host(3..array.len(), &mut values)?,
            FlatBuffer::Host(all) => values.copy_from_slice(&all[3..]),
        }
        Tensor::from_vec(values, x.shape(), &Device::Cpu)
    });
    Ok((on_host(&y.expect("it ran")), gradients.collect::<Result<_>>()?))
}

/// Runs [`trained`] on the GPU and on the CPU.
fn both(
    gpu: &Device,
    inputs: &[Tensor],
    into: Into,
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> [(Tensor, Vec<Tensor>); 2] {
    [gpu, &Device::Cpu].map(|on| trained(on, inputs, into, &op).unwrap())
}
