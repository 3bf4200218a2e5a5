//! Tied segments across pipeline stages: exchanges partial gradient sums and updated parameters.

use candle_core::{DType, Storage};
use zero_comm::{Buffer, Dtype};
use zero_pipeline::{Placement, SegmentId};

use crate::disk::Stored;
use crate::error::ZeroError;
use crate::gradients::Open;
use crate::ledger::Category;
use crate::parameters::{buffer, copy, overwrite, storage};
use crate::rounding::to_f32;
use crate::transfer::outgoing;
use crate::zero::ShardedState;

impl ShardedState {
    /// Takes the partial gradient of the current micro-batch out of a tied segment, to be sent. It counts as staging
    /// until [`ShardedState::give_gradient_back`].
    ///
    /// # Errors
    /// Fails if the segment has no gradient.
    pub fn take_tied_gradient(&mut self, id: SegmentId) -> Result<Buffer, ZeroError> {
        Ok(Buffer::F32(self.complete(id)?.into_host()?))
    }

    /// Recycles a gradient buffer after it was sent.
    pub fn give_gradient_back(&mut self, sent: Buffer) {
        if let Buffer::F32(values) = sent {
            self.ledger.remove(Category::Staging, values.len(), 4);
            self.pool.give(values);
        }
    }

    /// Allocates a buffer to receive the partial gradient of a tied segment.
    pub fn room_for_tied_gradient(&mut self, id: SegmentId) -> Buffer {
        let elements = self.layout.segments()[id].elements();
        self.ledger.add(Category::Staging, elements, 4);
        Buffer::F32(self.pool.take(elements))
    }

    /// Opens a tied segment's gradient with the partial sum of another stage, to which this stage adds.
    ///
    /// # Errors
    /// Fails if the segment already has a gradient.
    pub fn open_tied_gradient(&mut self, id: SegmentId, sum: Buffer) -> Result<(), ZeroError> {
        let pieces = self.layout.segments()[id].pieces.len();
        let buffer = self.settled(id, sum.into_f32()?)?;
        match self.segments[id].open.replace(Open::with(buffer, pieces)) {
            None => Ok(()),
            Some(_) => Err(ZeroError::internal("a tied gradient came when there was one")),
        }
    }

    /// Copies this rank's part of a tied segment's updated parameters, to be sent. It counts as staging until
    /// [`ShardedState::give_parameters_back`].
    ///
    /// # Errors
    /// Fails if candle cannot read them.
    pub fn tied_parameters(&mut self, id: SegmentId) -> Result<Buffer, ZeroError> {
        if self.stored(id, Stored::Parameters) {
            let values = buffer(self.stored_shard(id)?)?;
            self.ledger.add(Category::Staging, values.len(), self.dtype.size_in_bytes());
            return Ok(values);
        }
        let layout = self.layout.clone();
        let segment = &layout.segments()[id];
        let own = match self.segments[id].shard {
            Some(_) => segment.shard(self.comm.rank()).len(),
            None => segment.elements(),
        };
        let mut values = self.blank(own, false)?;
        match &self.segments[id].shard {
            Some(shard) => copy(shard, 0..own, &mut values, 0..own)?,
            None => {
                for piece in &segment.pieces {
                    let (full, _) = self.model.parameters()[piece.parameter].leaf().storage_and_layout();
                    copy(&full, 0..piece.range.len(), &mut values, piece.range.clone())?;
                }
            }
        }
        self.ledger.add(Category::Staging, own, self.dtype.size_in_bytes());
        outgoing(values, own, false)
    }

    /// Recycles a buffer of parameters after it was sent or stored.
    pub fn give_parameters_back(&mut self, sent: Buffer) {
        self.ledger.remove(Category::Staging, sent.len(), self.dtype.size_in_bytes());
        if let Buffer::F32(values) = sent {
            self.pool.give(values);
        }
    }

    /// Allocates a buffer to receive parameters. It counts as staging until they are stored.
    pub fn room_for_tied_parameters(&mut self, id: SegmentId) -> Buffer {
        let segment = &self.layout.segments()[id];
        let elements = match segment.placements.parameters {
            Placement::Replicated => segment.elements(),
            Placement::Sharded => segment.shard(self.comm.rank()).len(),
        };
        self.ledger.add(Category::Staging, elements, self.dtype.size_in_bytes());
        match self.dtype {
            DType::BF16 => Buffer::zeros(Dtype::Bf16, elements),
            DType::F16 => Buffer::zeros(Dtype::F16, elements),
            _ => Buffer::F32(self.pool.take(elements)),
        }
    }

    /// Stores the parameters that the owner has updated.
    ///
    /// # Errors
    /// Fails if candle cannot write them.
    pub fn set_tied_parameters(&mut self, id: SegmentId, values: Buffer) -> Result<(), ZeroError> {
        let values = storage(values)?;
        if self.stored(id, Stored::Parameters) {
            self.write_stored(id, Stored::Parameters, 0, &to_f32(&values)?)?;
            self.give_parameters_back(buffer(values)?);
            return Ok(());
        }
        let mut values = Storage::Cpu(values);
        let layout = self.layout.clone();
        let segment = &layout.segments()[id];
        match &mut self.segments[id].shard {
            // Swap, so that the old shard's memory is recycled.
            Some(shard @ Storage::Cpu(_)) => std::mem::swap(shard, &mut values),
            Some(shard) => {
                let own = segment.shard(self.comm.rank()).len();
                copy(&values, 0..own, shard, 0..own)?;
            }
            None => {
                for piece in &segment.pieces {
                    let parameter = &self.model.parameters()[piece.parameter];
                    overwrite(parameter, 0..piece.range.len(), &values, piece.range.clone())?;
                }
            }
        }
        if let Storage::Cpu(values) = values {
            self.give_parameters_back(buffer(values)?);
        }
        Ok(())
    }
}
