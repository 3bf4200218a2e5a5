//! Placement of a rank's own values: in host memory, or in the memory of the GPU that runs its layers.

use candle_core::{CpuStorage, DType, Storage};
use half::{bf16, f16};
use zero_model::sink::FlatBuffer;
use zero_pipeline::SegmentId;

use crate::error::ZeroError;
use crate::gpu::{Gpu, elsewhere};
use crate::layout::{Layout, Segment};
use crate::rounding::working;
use crate::zero::ShardedState;

/// Values kept in GPU memory. When layers run on the CPU, everything is in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OnGpu {
    /// Whether layers run on the GPU.
    pub layers: bool,
    /// Fraction of the elements, from 0 to 1, whose optimizer state, master copies and gradients are on the GPU.
    pub states: f64,
    /// Whether shards of parameters are on the GPU.
    pub parameters: bool,
    /// Whether the communicators transfer parameters directly between GPUs instead of through the host.
    pub gathers: bool,
    /// Whether gradients are reduced on the GPUs. Such sums have another order than those on the host.
    pub sums: bool,
}

impl OnGpu {
    /// Returns whether the state of each segment is on the GPU. The segments of the first layers are on the host, up to
    /// the host's share.
    #[must_use]
    pub fn residents(&self, layout: &Layout) -> Vec<bool> {
        let elements: Vec<usize> = layout.segments().iter().map(Segment::elements).collect();
        let on_host = (1.0 - self.states) * elements.iter().sum::<usize>() as f64;
        let ends = elements.iter().scan(0, |end, elements| {
            *end += elements;
            Some(*end)
        });
        // A segment that straddles the boundary goes to the side of its larger half.
        ends.zip(&elements).map(|(end, &elements)| end as f64 - elements as f64 / 2.0 > on_host).collect()
    }
}

impl ShardedState {
    pub(crate) fn gpu(&self) -> Result<&Gpu, ZeroError> {
        self.gpu.as_ref().ok_or_else(elsewhere)
    }

    pub(crate) fn gpu_mut(&mut self) -> Result<&mut Gpu, ZeroError> {
        self.gpu.as_mut().ok_or_else(elsewhere)
    }

    /// Returns whether the optimizer state, master and gradients of a segment are on the GPU.
    pub(crate) fn is_resident(&self, id: SegmentId) -> bool {
        self.residents[id]
    }

    /// Notes that GPU memory to which parameters were uploaded has been freed. Does nothing without a GPU.
    pub(crate) fn released_on_gpu(&mut self) {
        if let Some(gpu) = &mut self.gpu {
            gpu.released();
        }
    }

    /// Allocates uninitialized memory for gradients or state. The driver's pool reuses freed GPU memory, and `Pool`
    /// reuses host memory.
    pub(crate) fn room(&mut self, id: SegmentId, len: usize) -> Result<FlatBuffer, ZeroError> {
        if self.is_resident(id) {
            return self.gpu()?.room(len);
        }
        Ok(FlatBuffer::Host(self.pool.take(len)))
    }

    /// Allocates zeroed state.
    pub(crate) fn zeros(&self, id: SegmentId, len: usize) -> Result<FlatBuffer, ZeroError> {
        if self.is_resident(id) {
            return self.gpu()?.zeros(len);
        }
        // `vec![0.0; len]` asks for zeroed pages, which the system provides without touching them.
        Ok(FlatBuffer::Host(vec![0.0; len]))
    }

    /// Moves host values to the device of the segment's state.
    pub(crate) fn settled(&self, id: SegmentId, values: Vec<f32>) -> Result<FlatBuffer, ZeroError> {
        if self.is_resident(id) {
            return self.gpu()?.buffer_of(&values);
        }
        Ok(FlatBuffer::Host(values))
    }

    /// Rounds f32 values to the working dtype and moves them to the device of parameter shards.
    pub(crate) fn shard_of(&self, values: Vec<f32>) -> Result<Storage, ZeroError> {
        let values = working(values, self.dtype);
        if self.options.on_gpu.parameters {
            return self.gpu()?.upload(&values);
        }
        Ok(Storage::Cpu(values))
    }

    /// Allocates an uninitialized buffer of the working dtype, on the GPU or on the host.
    pub(crate) fn blank(&mut self, len: usize, on_gpu: bool) -> Result<Storage, ZeroError> {
        if on_gpu {
            return self.gpu()?.blank(self.dtype, len);
        }
        Ok(Storage::Cpu(match self.dtype {
            DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; len]),
            DType::F16 => CpuStorage::F16(vec![f16::ZERO; len]),
            _ => CpuStorage::F32(self.pool.take(len)),
        }))
    }
}
