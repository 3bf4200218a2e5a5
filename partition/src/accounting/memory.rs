//! Manages the memory of a rank's state: it creates values on the right device, reuses buffers and counts the bytes in
//! use.
//!
//! Values on a GPU are sent directly if the communicators transfer between GPUs, and through the host otherwise.

use candle_core::{CpuStorage, DType, Storage};
use half::{bf16, f16};
use zero_comm::Buffer;
use zero_model::ops::quantized_storage;
use zero_model::sink::FlatBuffer;
use zero_optim::HalfFloat;
use zero_pipeline::SegmentId;

use crate::accounting::ledger::{Category, Ledger};
use crate::error::ZeroError;
use crate::gpu::{self, Gpu, elsewhere};
use crate::grad_buffer::GradBuffer;
use crate::pool::Pool;
use crate::rank::Rank;
use crate::rounding::working;
use crate::storage::QUANTIZED;
use crate::threads::{rounded, widen};

/// Memory of one rank.
pub(crate) struct Memory {
    pool: Pool,
    /// The GPU that runs the layers; `None` if they run on the CPU.
    gpu: Option<Gpu>,
    ledger: Ledger,
    /// Number of elements of idle buffers already counted in the ledger.
    counted_idle: usize,
}

impl Memory {
    /// Prepares the memory of a rank, with buffers of at most `longest` elements kept for reuse.
    pub(crate) fn new(rank: &Rank, longest: usize) -> Result<Self, ZeroError> {
        let gpu = Gpu::open(rank.model.device())?;
        Ok(Self { pool: Pool::of_at_most(longest), gpu, ledger: Ledger::default(), counted_idle: 0 })
    }

    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Counts `elements` of `width` bytes each.
    pub(crate) fn count(&mut self, category: Category, elements: usize, width: usize) {
        self.ledger.add(category, elements, width);
    }

    /// Undoes [`Memory::count`].
    pub(crate) fn uncount(&mut self, category: Category, elements: usize, width: usize) {
        self.ledger.remove(category, elements, width);
    }

    /// Records measured peak bytes of activations, and of the whole process.
    pub(crate) fn note_activations(&mut self, bytes: u64, total: u64) {
        self.ledger.note(Category::Activations, bytes, total);
    }

    /// Updates the ledger's count of idle buffers.
    pub(crate) fn count_idle(&mut self) {
        let before = std::mem::replace(&mut self.counted_idle, self.pool.idle());
        match self.counted_idle.checked_sub(before) {
            Some(more) => self.ledger.add(Category::Staging, more, 4),
            None => self.ledger.remove(Category::Staging, before - self.counted_idle, 4),
        }
    }

    /// Returns the bytes of idle buffers counted in the ledger.
    pub(crate) fn idle_bytes(&self) -> u64 {
        (self.counted_idle * 4) as u64
    }

    pub(crate) fn gpu(&mut self) -> Result<&mut Gpu, ZeroError> {
        self.gpu.as_mut().ok_or_else(elsewhere)
    }

    /// Records that GPU memory to which parameters were uploaded has been freed. Does nothing without a GPU.
    pub(crate) fn released_on_gpu(&mut self) {
        if let Some(gpu) = &mut self.gpu {
            gpu.released();
        }
    }

    /// Takes a buffer of floats on the host. Its content is arbitrary.
    pub(crate) fn take(&mut self, len: usize) -> Vec<f32> {
        self.pool.take(len)
    }

    pub(crate) fn give(&mut self, buffer: Vec<f32>) {
        self.pool.give(buffer);
    }

    /// Keeps a host buffer for reuse, and frees a GPU buffer.
    pub(crate) fn give_back(&mut self, buffer: FlatBuffer) {
        self.pool.give_back(buffer);
    }

    pub(crate) fn reuse(&mut self, used: CpuStorage) {
        if let CpuStorage::F32(used) = used {
            self.pool.give(used);
        }
    }

    /// Allocates uninitialized memory for gradients or state. The driver's pool reuses freed GPU memory, and [`Pool`]
    /// reuses host memory.
    pub(crate) fn room(&mut self, rank: &Rank, id: SegmentId, len: usize) -> Result<FlatBuffer, ZeroError> {
        match rank.is_resident(id) {
            true => self.gpu()?.room(len),
            false => Ok(FlatBuffer::Host(self.pool.take(len))),
        }
    }

    /// Allocates zeroed state.
    pub(crate) fn zeros(&mut self, rank: &Rank, id: SegmentId, len: usize) -> Result<FlatBuffer, ZeroError> {
        match rank.is_resident(id) {
            true => self.gpu()?.zeros(len),
            // `vec![0.0; len]` asks for zeroed pages, which the system provides without touching them.
            false => Ok(FlatBuffer::Host(vec![0.0; len])),
        }
    }

    /// Moves host values to the device of the segment's state.
    pub(crate) fn settled(&mut self, rank: &Rank, id: SegmentId, values: Vec<f32>) -> Result<FlatBuffer, ZeroError> {
        match rank.is_resident(id) {
            true => self.gpu()?.buffer_of(&values),
            false => Ok(FlatBuffer::Host(values)),
        }
    }

    /// Rounds f32 values to the working dtype and moves them to the device of parameter shards.
    pub(crate) fn shard_of(&mut self, rank: &Rank, values: Vec<f32>) -> Result<Storage, ZeroError> {
        let values = working(values, rank.dtype);
        match rank.options.on_gpu.parameters {
            true => self.gpu()?.upload(&values),
            false => Ok(Storage::Cpu(values)),
        }
    }

    /// Allocates an uninitialized buffer of a dtype, on the GPU or on the host.
    pub(crate) fn blank(&mut self, dtype: DType, len: usize, on_gpu: bool) -> Result<Storage, ZeroError> {
        if on_gpu {
            return self.gpu()?.blank(dtype, len);
        }
        Ok(Storage::Cpu(match dtype {
            DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; len]),
            DType::F16 => CpuStorage::F16(vec![f16::ZERO; len]),
            QUANTIZED => quantized_storage(vec![0; len]),
            _ => CpuStorage::F32(self.pool.take(len)),
        }))
    }

    /// Uploads host values to the GPU.
    pub(crate) fn upload(&mut self, values: &Storage) -> Result<Storage, ZeroError> {
        match values {
            Storage::Cpu(values) => self.gpu()?.upload_staged(values),
            _ => Err(ZeroError::internal("the values to upload are already on a GPU")),
        }
    }

    /// Converts a gradient to the dtype in which it is kept until the update.
    pub(crate) fn kept(&mut self, rank: &Rank, values: FlatBuffer) -> Result<GradBuffer, ZeroError> {
        if rank.options.gradient_dtype != DType::BF16 {
            return Ok(GradBuffer::F32(values));
        }
        let values = values.into_host()?;
        let kept = GradBuffer::Bf16(rounded(&values));
        self.pool.give(values);
        Ok(kept)
    }

    /// Allocates a gradient in the dtype in which it is kept until the update. Its content is arbitrary.
    pub(crate) fn room_for_kept(&mut self, rank: &Rank, id: SegmentId, len: usize) -> Result<GradBuffer, ZeroError> {
        match rank.options.gradient_dtype {
            DType::BF16 => Ok(GradBuffer::Bf16(vec![bf16::ZERO; len])),
            _ => self.room(rank, id, len).map(GradBuffer::F32),
        }
    }

    /// Keeps an f32 host buffer for reuse, and frees any other buffer.
    pub(crate) fn give_kept_back(&mut self, gradient: GradBuffer) {
        if let GradBuffer::F32(values) = gradient {
            self.give_back(values);
        }
    }

    /// Converts a kept gradient to the communication dtype.
    pub(crate) fn packed(&mut self, rank: &Rank, sum: GradBuffer) -> Result<Buffer, ZeroError> {
        let values = match sum {
            GradBuffer::F32(values) => values,
            GradBuffer::Bf16(values) if rank.options.communication == DType::BF16 => {
                return Ok(Buffer::Bf16(values));
            }
            GradBuffer::Bf16(values) => FlatBuffer::Host(self.widened(&values)?),
        };
        if values.host().is_none() && rank.options.on_gpu.sums {
            return gpu::packed(values, rank.options.communication);
        }
        let values = values.into_host()?;
        let packed = match rank.options.communication {
            DType::BF16 => Buffer::Bf16(rounded(&values)),
            DType::F16 => Buffer::F16(rounded(&values)),
            _ => return Ok(Buffer::F32(values)),
        };
        self.pool.give(values);
        Ok(packed)
    }

    /// Moves a received gradient to the device of the segment's gradients, in the dtype in which it is kept.
    pub(crate) fn received(&mut self, rank: &Rank, id: SegmentId, buffer: Buffer) -> Result<GradBuffer, ZeroError> {
        match buffer {
            Buffer::Bf16(values) if rank.options.gradient_dtype == DType::BF16 => Ok(GradBuffer::Bf16(values)),
            buffer => {
                let values = self.unpacked(rank, id, buffer)?;
                self.kept(rank, values)
            }
        }
    }

    /// Allocates a buffer for `len` gradient values in the communication dtype.
    pub(crate) fn room_for_packed(&mut self, rank: &Rank, id: SegmentId, len: usize) -> Result<Buffer, ZeroError> {
        let dtype = rank.options.communication;
        if rank.is_resident(id) && rank.options.on_gpu.sums {
            return self.gpu()?.blank_to_receive(dtype, len);
        }
        Ok(match dtype {
            DType::BF16 => Buffer::Bf16(vec![bf16::ZERO; len]),
            DType::F16 => Buffer::F16(vec![f16::ZERO; len]),
            _ => Buffer::F32(self.pool.take(len)),
        })
    }

    /// Allocates a buffer for received codes.
    pub(crate) fn room_for_codes(&mut self, bytes: usize, on_gpu: bool) -> Result<Buffer, ZeroError> {
        match on_gpu {
            true => self.gpu()?.blank_to_receive(DType::U8, bytes),
            false => Ok(Buffer::U8(vec![0; bytes])),
        }
    }

    /// Converts a received gradient to f32 on the device of the segment's gradients.
    fn unpacked(&mut self, rank: &Rank, id: SegmentId, buffer: Buffer) -> Result<FlatBuffer, ZeroError> {
        let values = match buffer {
            Buffer::F32(values) => values,
            Buffer::Bf16(rounded) => self.widened(&rounded)?,
            Buffer::F16(rounded) => self.widened(&rounded)?,
            Buffer::Device(_) => return gpu::unpacked(buffer),
            _ => return Err(ZeroError::internal("a collective returned values of an unexpected dtype")),
        };
        self.settled(rank, id, values)
    }

    fn widened<H: HalfFloat + Sync>(&mut self, rounded: &[H]) -> Result<Vec<f32>, ZeroError> {
        let mut values = self.pool.take(rounded.len());
        widen(rounded, &mut values)?;
        Ok(values)
    }
}
