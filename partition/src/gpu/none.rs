//! The interface of `device` for a program without CUDA. No value of [`Gpu`] exists, so its methods cannot be called.
//! Functions that take values on a GPU, but no [`Gpu`], return an error, because without CUDA no value is on a GPU.

use std::convert::Infallible;
use std::ops::Range;

use candle_core::{CpuStorage, CudaStorage, DType, Device, Storage, Tensor, TensorId};
use zero_comm::Buffer;
use zero_model::Tuning;
use zero_model::sink::{FlatBuffer, Gradients};
use zero_optim::norm::{Limits, Verdict};
use zero_optim::{BlockCodes, ExactSum, Factors};
use zero_pipeline::SegmentId;

use super::{CodedRange, elsewhere};
use crate::error::ZeroError;
use crate::optimizer::SegmentState;
use crate::rank::Rank;

/// A GPU. No value exists.
pub(crate) struct Gpu(Infallible);

/// A download in flight. No value exists.
pub(crate) struct Arriving(Infallible);

/// Values that an optimizer step on a GPU reads and updates. No value exists.
pub(crate) struct Updated<'a>(Infallible, std::marker::PhantomData<&'a ()>);

impl Arriving {
    pub(crate) fn len(&self) -> usize {
        match self.0 {}
    }
}

impl Gpu {
    pub(crate) fn open(_: &Device) -> Result<Option<Self>, ZeroError> {
        Ok(None)
    }

    pub(crate) fn room(&self, _: usize) -> Result<FlatBuffer, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn zeros(&self, _: usize) -> Result<FlatBuffer, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn buffer_of(&self, _: &[f32]) -> Result<FlatBuffer, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn upload(&self, _: &CpuStorage) -> Result<Storage, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn blank(&self, _: DType, _: usize) -> Result<Storage, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn blank_to_receive(&self, _: DType, _: usize) -> Result<Buffer, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn upload_staged(&mut self, _: &CpuStorage) -> Result<Storage, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn upload_rounded(&mut self, _: &[f32], _: DType) -> Result<Storage, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn codes(&self, _: usize) -> Result<CudaStorage, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn arrived(&self, _: Buffer) -> Result<CudaStorage, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn released(&mut self) {
        match self.0 {}
    }

    pub(crate) fn start_download(&mut self, _: FlatBuffer, _: DType) -> Result<Arriving, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn await_download(&mut self, _: Arriving, _: &mut [f32]) -> Result<(), ZeroError> {
        match self.0 {}
    }

    pub(crate) fn squares(&mut self, _: &[(&FlatBuffer, Vec<Range<usize>>)]) -> Result<ExactSum, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn judge(&mut self, _: &[(&FlatBuffer, Vec<Range<usize>>)], _: &Limits) -> Result<(), ZeroError> {
        match self.0 {}
    }

    pub(crate) fn verdict(&mut self) -> Result<Verdict, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn to_update<'a>(
        &self,
        _: &'a Rank,
        _: SegmentId,
        _: &'a FlatBuffer,
        _: &'a mut SegmentState,
        _: Option<&'a mut Storage>,
    ) -> Result<Vec<(Tuning, Updated<'a>)>, ZeroError> {
        match self.0 {}
    }

    pub(crate) fn step(&self, _: [&Factors; 2], _: &[Updated<'_>], _: f32, _: bool) -> Result<(), ZeroError> {
        match self.0 {}
    }
}

pub(crate) fn add_to_host(_: &mut Gradients, _: &Gradients, _: &[TensorId]) -> Result<(), ZeroError> {
    Err(elsewhere())
}

pub(crate) fn copy(_: &Storage, _: Range<usize>, _: &mut Storage, _: Range<usize>) -> Result<(), ZeroError> {
    Err(elsewhere())
}

pub(crate) fn download(_: &CudaStorage, _: Range<usize>) -> Result<CpuStorage, ZeroError> {
    Err(elsewhere())
}

pub(crate) fn packed(_: FlatBuffer, _: DType) -> Result<Buffer, ZeroError> {
    Err(elsewhere())
}

pub(crate) fn unpacked(_: Buffer) -> Result<FlatBuffer, ZeroError> {
    Err(elsewhere())
}

pub(crate) fn quantize(_: BlockCodes, _: &CudaStorage, _: &[CodedRange], _: &mut CudaStorage) -> Result<(), ZeroError> {
    Err(elsewhere())
}

pub(crate) fn leaving(_: CudaStorage, _: usize, _: bool) -> Result<Buffer, ZeroError> {
    Err(elsewhere())
}

pub(crate) fn dequantized(
    _: BlockCodes,
    _: &CudaStorage,
    _: &[CodedRange],
    _: (DType, usize),
) -> Result<Storage, ZeroError> {
    Err(elsewhere())
}

pub(crate) fn add_codes(
    _: BlockCodes,
    _: &CudaStorage,
    _: (usize, usize),
    _: &[CodedRange],
    _: &mut FlatBuffer,
) -> Result<(), ZeroError> {
    Err(elsewhere())
}

pub(crate) fn values_of(_: &FlatBuffer) -> Result<&CudaStorage, ZeroError> {
    Err(elsewhere())
}

pub(crate) fn communicated(_: FlatBuffer, _: DType) -> Result<FlatBuffer, ZeroError> {
    Err(elsewhere())
}

pub(crate) fn to_send(_: CudaStorage, _: usize) -> Result<Buffer, ZeroError> {
    Err(elsewhere())
}

pub(crate) fn storage_of(_: Buffer) -> Result<CudaStorage, ZeroError> {
    Err(elsewhere())
}

/// Copies a GPU tensor of dtype f32, bf16 or f16 into a buffer that can be sent directly from the GPU.
///
/// # Errors
/// Fails if the tensor is on another device or has a different dtype, or if the GPU is out of memory.
pub fn gpu_copy(tensor: &Tensor) -> Result<Buffer, ZeroError> {
    Err(on_no_gpu(tensor.device()))
}

/// Allocates a buffer on a GPU to receive values from another GPU.
///
/// # Errors
/// Fails if the GPU is out of memory, or the dtype is not f32, bf16 or f16.
pub fn gpu_room(device: &Device, _: DType, _: usize) -> Result<Buffer, ZeroError> {
    Err(on_no_gpu(device))
}

fn on_no_gpu(device: &Device) -> ZeroError {
    ZeroError::internal(format!("values sent between GPUs must be on a GPU, but are on {device:?}"))
}
