//! Exchanges of values in GPU memory: from GPU to GPU if the communicator supports it ([`ByGpu`](super::ByGpu)),
//! otherwise through the host.

use super::{Element, SequenceGroup, of_element};
use crate::device::{copied_to_host, copied_to_send, room_to_receive, sent, storage_of};
use crate::gpu::tensor;
use candle_core::{DType, Device, Result, Shape, Tensor, WithDType, bail};
use zero_comm::{Buffer, ReduceOp};

const OP: &str = "sequence-exchange";

/// Waits for an exchange and returns the received values.
pub(crate) type Arriving = Box<dyn FnOnce() -> Result<Tensor>>;

impl SequenceGroup {
    /// Starts to gather the elements of all ranks, `[ranks, …]`. All ranks pass an `x` of the same shape.
    pub(crate) fn gather_on_gpu(&self, x: &Tensor) -> Result<Arriving> {
        let (by_gpu, count) = (self.by_gpu.moves, x.elem_count());
        let (own, room) = (leaving(x, by_gpu)?, self.room(x, by_gpu, count * self.size)?);
        let counts = vec![count; self.size];
        let exchange = self.start(|comm| comm.all_gather(own, room, &counts))?;
        let shape = [&[self.size], x.dims()].concat();
        let device = x.device().clone();
        Ok(Box::new(move || arrived(&device, exchange.wait()?.output, shape)))
    }

    /// Starts to sum the `x` of all ranks, `[ranks, …]`. The result is this rank's part of the sum, `[…]`.
    pub(crate) fn reduce_scatter_on_gpu(&self, x: &Tensor) -> Result<Arriving> {
        let (by_gpu, shape) = (self.by_gpu.sums, x.dims()[1..].to_vec());
        let part = shape.iter().product();
        let (input, room) = (leaving(x, by_gpu)?, self.room(x, by_gpu, part)?);
        let counts = vec![part; self.size];
        let exchange = self.start(|comm| comm.reduce_scatter(input, room, &counts, ReduceOp::Sum))?;
        let device = x.device().clone();
        Ok(Box::new(move || arrived(&device, exchange.wait()?.shard, shape)))
    }

    /// Starts to send a copy of `x` to the next rank, and to receive a tensor of the same shape from the previous rank.
    pub(crate) fn pass_on_on_gpu(&self, x: &Tensor) -> Result<Arriving> {
        let by_gpu = self.by_gpu.moves;
        let (own, room) = (leaving(x, by_gpu)?, self.room(x, by_gpu, x.elem_count())?);
        let exchange = self.start_to_pass_on(own, room, x.elem_count())?;
        let (device, shape) = (x.device().clone(), x.shape().clone());
        Ok(Box::new(move || arrived(&device, exchange.wait()?.output, shape)))
    }

    /// Sends consecutive parts of `x` to the ranks and concatenates the parts that the ranks send. `send` and `receive`
    /// hold the number of elements for each rank.
    pub(crate) fn all_to_all_on_gpu(&self, x: &Tensor, [send, receive]: [&[usize]; 2]) -> Result<Tensor> {
        let (by_gpu, received) = (self.by_gpu.moves, receive.iter().sum());
        let room = self.room(x, by_gpu, received)?;
        arrived(x.device(), self.all_to_all(leaving(x, by_gpu)?, room, [send, receive])?, received)
    }

    /// Allocates a buffer for received elements.
    fn room(&self, like: &Tensor, by_gpu: bool, elements: usize) -> Result<Buffer> {
        match by_gpu {
            true => room_to_receive(like.device(), like.dtype(), elements),
            false => of_element!(OP, like.dtype(), T => Ok(T::buffer(vec![T::from_f64(0.0); elements]))),
        }
    }
}

/// Copies the elements of a tensor into a buffer. With `by_gpu` the buffer is in GPU memory; otherwise it is on the
/// host, and the call waits for the GPU.
fn leaving(x: &Tensor, by_gpu: bool) -> Result<Buffer> {
    if by_gpu { copied_to_send(x) } else { copied_to_host(x) }
}

/// Moves the elements of a buffer to GPU memory, if necessary, and returns them.
fn arrived(device: &Device, buffer: Buffer, shape: impl Into<Shape>) -> Result<Tensor> {
    if buffer.is_on_device() {
        return Ok(tensor(storage_of(buffer)?, shape));
    }
    let dtype = match &buffer {
        Buffer::F32(_) => DType::F32,
        Buffer::Bf16(_) => DType::BF16,
        _ => DType::F16,
    };
    let values = of_element!(OP, dtype, T => T::to_cpu_storage_owned(T::values(buffer)?));
    match device {
        Device::Cuda(device) => Ok(tensor(sent(device, values)?, shape)),
        other => bail!("{OP}: expected a GPU, got {other:?}"),
    }
}
