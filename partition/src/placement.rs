//! Where a rank's own values are: in the memory of the host, or in that of the GPU that its layers are on.

use candle_core::{CpuStorage, DType, Storage};
use half::{bf16, f16};
use zero_model::sink::FlatBuffer;
use zero_pipeline::SegmentId;

use crate::error::ZeroError;
use crate::layout::{Layout, Segment};
use crate::rounding::working;
use crate::zero::ShardedState;

/// What is in the memory of the GPU that layers are on. All of it is on the host where they are on the processor.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OnGpu {
    /// Layers run there.
    pub layers: bool,
    /// Optimizer state, master copies and gradients: of this share of the elements, from 0 to 1.
    pub states: f64,
    /// Shards of parameters.
    pub parameters: bool,
    /// The groups carry parameters from GPU to GPU, and not by way of the host.
    pub gathers: bool,
    /// Gradients are added up on their way from GPU to GPU. The order of such sums is not that of the host.
    pub sums: bool,
}

impl OnGpu {
    /// Of each segment, whether its state is on the GPU: those of the first layers are on the host, until their share is reached.
    #[must_use]
    pub fn residents(&self, layout: &Layout) -> Vec<bool> {
        let elements: Vec<usize> = layout.segments().iter().map(Segment::elements).collect();
        let on_host = (1.0 - self.states) * elements.iter().sum::<usize>() as f64;
        let ends = elements.iter().scan(0, |end, elements| {
            *end += elements;
            Some(*end)
        });
        // A segment that is cut by the border goes where its larger half is.
        ends.zip(&elements).map(|(end, &elements)| end as f64 - elements as f64 / 2.0 > on_host).collect()
    }
}

#[cfg(feature = "cuda")]
impl ShardedState {
    pub(crate) fn gpu(&self) -> Result<&candle_core::CudaDevice, ZeroError> {
        match self.model.device() {
            candle_core::Device::Cuda(device) => Ok(device),
            _ => Err(ZeroError::internal("something on a GPU, and layers that are on none")),
        }
    }
}

impl ShardedState {
    /// Whether optimizer state, master and gradients of a segment are on the GPU.
    pub(crate) fn is_resident(&self, id: SegmentId) -> bool {
        self.residents[id]
    }

    /// Memory of the GPU to which parameters were uploaded has been given back, as far as there is any.
    #[cfg_attr(not(feature = "cuda"), expect(clippy::unused_self))]
    pub(crate) fn released_on_gpu(&mut self) {
        #[cfg(feature = "cuda")]
        if let Some(staging) = &mut self.staging {
            staging.released();
        }
    }

    /// Room for gradients or state, to be overwritten. On a GPU the driver keeps what was given back; on the host the pool does.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub(crate) fn room(&mut self, id: SegmentId, len: usize) -> Result<FlatBuffer, ZeroError> {
        #[cfg(feature = "cuda")]
        if self.is_resident(id) {
            return Ok(FlatBuffer::Device(zero_model::device::Array::room(self.gpu()?, len)?));
        }
        Ok(FlatBuffer::Host(self.pool.take(len)))
    }

    /// State that begins as zeros.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub(crate) fn zeros(&self, id: SegmentId, len: usize) -> Result<FlatBuffer, ZeroError> {
        #[cfg(feature = "cuda")]
        if self.is_resident(id) {
            let mut zeros = zero_model::device::Array::room(self.gpu()?, len)?;
            zeros.zero(0..len)?;
            return Ok(FlatBuffer::Device(zeros));
        }
        // Asked for as zeros, which the system gives without touching them.
        Ok(FlatBuffer::Host(vec![0.0; len]))
    }

    /// Values of the host, to where state is.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub(crate) fn settled(&self, id: SegmentId, values: Vec<f32>) -> Result<FlatBuffer, ZeroError> {
        #[cfg(feature = "cuda")]
        if self.is_resident(id) {
            let mut array = zero_model::device::Array::room(self.gpu()?, values.len())?;
            array.upload(0, &values)?;
            return Ok(FlatBuffer::Device(array));
        }
        Ok(FlatBuffer::Host(values))
    }

    /// f32 values in the working dtype, to where shards of parameters are.
    pub(crate) fn shard_of(&self, values: Vec<f32>) -> Result<Storage, ZeroError> {
        let values = working(values, self.dtype);
        #[cfg(feature = "cuda")]
        if self.options.on_gpu.parameters {
            return Ok(Storage::Cuda(zero_model::device::upload(self.gpu()?, &values)?));
        }
        Ok(Storage::Cpu(values))
    }

    /// A buffer of the working dtype to be overwritten: on the GPU, or on the host.
    pub(crate) fn blank(&mut self, len: usize, on_gpu: bool) -> Result<Storage, ZeroError> {
        #[cfg(feature = "cuda")]
        if on_gpu {
            return Ok(Storage::Cuda(zero_model::device::room(self.gpu()?, self.dtype, len)?));
        }
        debug_assert!(!on_gpu);
        Ok(Storage::Cpu(self.blank_on_host(len)))
    }

    pub(crate) fn blank_on_host(&mut self, len: usize) -> CpuStorage {
        match self.dtype {
            DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; len]),
            DType::F16 => CpuStorage::F16(vec![f16::ZERO; len]),
            _ => CpuStorage::F32(self.pool.take(len)),
        }
    }
}
