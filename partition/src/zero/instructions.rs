//! Executes the instructions that work on a rank's state.

use candle_core::backprop::GradStore;
use zero_comm::Buffer;
use zero_optim::norm::{Limits, Verdict};
use zero_optim::{ExactSum, Rate};
use zero_pipeline::{Item, LayerId, SegmentId};

use super::ShardedState;
use crate::error::ZeroError;
use crate::optimizer::StepInputs;
use crate::reductions::MicroBatch;
use crate::{gradients, leaves, parameters};

impl ShardedState {
    /// Starts gathering segments from all shards, in one collective.
    ///
    /// # Errors
    /// Fails if a segment is already being gathered.
    pub fn gather(&mut self, ids: &[SegmentId]) -> Result<(), ZeroError> {
        self.parameters.gather(&self.rank, &mut self.memory, &self.disk, ids)
    }

    /// Waits for the gather. Fills the segments' leaves, and this rank's secondary shards if there are any.
    ///
    /// # Errors
    /// Returns the error of the collective.
    pub fn await_gather(&mut self, ids: &[SegmentId]) -> Result<(), ZeroError> {
        self.parameters.await_gather(&self.rank, &mut self.memory, &self.disk, &mut self.secondary, ids)
    }

    /// Starts gathering segments from the secondary shards of the near group, in one collective.
    ///
    /// # Errors
    /// Fails if a segment has no secondary shards, or is already being gathered.
    pub fn gather_secondary(&mut self, ids: &[SegmentId]) -> Result<(), ZeroError> {
        self.secondary.gather(&self.rank, &mut self.memory, ids)
    }

    /// Waits for the gather from secondary shards and fills the segments' leaves.
    ///
    /// # Errors
    /// Returns the error of the collective.
    pub fn await_gather_secondary(&mut self, ids: &[SegmentId]) -> Result<(), ZeroError> {
        self.secondary.await_gather(&self.rank, &mut self.memory, ids)
    }

    /// Frees a segment's gathered parameters.
    ///
    /// # Errors
    /// Returns candle's error.
    pub fn release(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        leaves::release(&self.rank, &mut self.memory, &self.disk, id)
    }

    /// Starts gathering updated replicated parameters.
    ///
    /// # Errors
    /// Fails if candle cannot read them.
    pub fn refresh(&mut self, ids: &[SegmentId]) -> Result<(), ZeroError> {
        let Self { rank, memory, parameters, optimizer, .. } = self;
        parameters.refresh(rank, memory, |id| optimizer.master(id), ids)
    }

    /// Waits for the refresh and stores the parameters updated by other ranks.
    ///
    /// # Errors
    /// Returns the error of the collective.
    pub fn await_refresh(&mut self, ids: &[SegmentId]) -> Result<(), ZeroError> {
        self.parameters.await_refresh(&self.rank, &mut self.memory, ids)
    }

    /// Runs the backward of a layer and stores the gradients of its parameters in their segments.
    ///
    /// `backward` returns candle's gradients and a value for the caller (the gradient of the input).
    ///
    /// # Errors
    /// Returns the error of `backward`, or [`ZeroError::NoGradient`] for a parameter without a gradient.
    pub fn backward<T>(
        &mut self,
        layer: LayerId,
        backward: impl FnOnce() -> Result<(GradStore, T), ZeroError>,
    ) -> Result<T, ZeroError> {
        let value = self.local.backward(&self.rank, &mut self.memory, layer, backward)?;
        self.catch_up()?;
        Ok(value)
    }

    /// Runs the backward of a layer for the gradient of its input. Defers the gradients of its parameters to
    /// [`ShardedState::backward_weight`].
    ///
    /// # Errors
    /// See [`ShardedState::backward`].
    pub fn backward_input<T>(
        &mut self,
        layer: LayerId,
        micro_batch: usize,
        backward: impl FnOnce() -> Result<(GradStore, T), ZeroError>,
    ) -> Result<T, ZeroError> {
        self.local.backward_input(&self.rank, layer, micro_batch, backward)
    }

    /// Computes the deferred gradients of a layer's parameters.
    ///
    /// # Errors
    /// Fails if no gradients were deferred, or if an operation fails.
    pub fn backward_weight(&mut self, layer: LayerId, micro_batch: usize) -> Result<(), ZeroError> {
        self.local.backward_weight(&self.rank, &mut self.memory, layer, micro_batch)?;
        self.catch_up()
    }

    /// Runs the instructions that wait for the gradients of an earlier backward, while the GPU runs the current one.
    fn catch_up(&mut self) -> Result<(), ZeroError> {
        self.gradients.catch_up(&self.rank, &mut self.memory)
    }

    /// Adds the micro-batch's complete gradient to this rank's accumulator.
    ///
    /// # Errors
    /// Fails if the segment has no gradient.
    pub fn accumulate(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        self.gradients.accumulate(&self.rank, &mut self.memory, &mut self.local, id)
    }

    /// Starts reducing a bucket over the ranks: the micro-batch's gradients if gradients are sharded, or the
    /// accumulated gradients if they are replicated. `micro_batches` is the number of micro-batches in the step.
    ///
    /// # Errors
    /// Fails if a gradient is incomplete.
    pub fn reduce(&mut self, ids: &[SegmentId], micro_batch: usize, micro_batches: usize) -> Result<(), ZeroError> {
        let micro_batch = MicroBatch { index: micro_batch, of: micro_batches };
        self.gradients.reduce(&self.rank, &mut self.memory, &mut self.local, ids, micro_batch)
    }

    /// Takes the sum of the squared norms of this rank's gradients in each micro-batch since the last call; zero unless
    /// [`ZeroOptions::sums_micro_batches`](crate::ZeroOptions::sums_micro_batches) is set.
    pub fn take_micro_batch_squares(&mut self) -> ExactSum {
        self.gradients.take_micro_batch_squares()
    }

    /// Waits for a bucket's reduction and stores the result.
    ///
    /// # Errors
    /// Returns the error of the collective.
    pub fn await_reduce(&mut self, ids: &[SegmentId], micro_batch: usize) -> Result<(), ZeroError> {
        self.gradients.await_reduce(&self.rank, &mut self.memory, ids, micro_batch)
    }

    /// Computes the norm of all reduced gradients and checks it against `limits`. Collective: every rank must call it.
    /// The norm is bit-identical for every layout. Updates act on the verdict, which [`ShardedState::finish_step`]
    /// returns.
    ///
    /// # Errors
    /// Returns the error of the collective.
    pub fn gradient_norm(&mut self, limits: &Limits) -> Result<(), ZeroError> {
        self.optimizer.gradient_norm(&self.rank, &mut self.memory, &mut self.gradients, limits)?;
        self.disk.drop_buffers(&mut self.memory);
        Ok(())
    }

    /// Runs the optimizer step on this rank's part of a segment, or skips it if the norm was not admitted, and frees
    /// the gradients. Segments on a GPU are only queued: [`ShardedState::carry_out_updates`] updates them with few
    /// launches.
    ///
    /// # Errors
    /// Fails if the gradients are not reduced.
    pub fn update(&mut self, id: SegmentId, rate: Rate) -> Result<(), ZeroError> {
        let Self { rank, memory, parameters, gradients, optimizer, .. } = self;
        optimizer.update(StepInputs { rank, memory, parameters, gradients, rate }, id)
    }

    /// Runs the pending updates on the GPU, in as few launches as possible.
    ///
    /// # Errors
    /// Returns the error of the GPU driver.
    pub fn carry_out_updates(&mut self, rate: Rate) -> Result<(), ZeroError> {
        let Self { rank, memory, parameters, gradients, optimizer, .. } = self;
        optimizer.carry_out_updates(StepInputs { rank, memory, parameters, gradients, rate })
    }

    /// Runs, on one tile, the first pass of an optimizer that takes two passes. Skips the tile if the gradient norm was
    /// not admitted.
    ///
    /// # Errors
    /// Fails if the tile is not in memory, or its gradients are not reduced.
    pub fn measure_tile(&mut self, id: SegmentId, index: usize, rate: Rate) -> Result<(), ZeroError> {
        let Self { rank, memory, parameters, gradients, optimizer, disk, .. } = self;
        disk.measure_tile(optimizer, StepInputs { rank, memory, parameters, gradients, rate }, id, index)
    }

    /// Runs the optimizer step on a tile, unless the gradient norm was not admitted.
    ///
    /// # Errors
    /// Fails if the tile is not in memory, or its gradients are not reduced.
    pub fn update_tile(&mut self, id: SegmentId, index: usize, rate: Rate) -> Result<(), ZeroError> {
        let Self { rank, memory, parameters, gradients, optimizer, disk, .. } = self;
        disk.update_tile(optimizer, StepInputs { rank, memory, parameters, gradients, rate }, id, index)
    }

    /// Ends the step that used this rate. Counts it if its norm was admitted. On a GPU, this waits for all work queued
    /// on its stream. Returns the verdict; `None` if there was no norm since the last call.
    ///
    /// # Errors
    /// Returns the error of the GPU.
    pub fn finish_step(&mut self, rate: Rate) -> Result<Option<Verdict>, ZeroError> {
        let verdict = self.optimizer.finish_step(&self.rank, &mut self.memory, rate)?;
        if verdict.is_some_and(|verdict| verdict.is_admitted) {
            self.disk.drop_buffers(&mut self.memory);
        }
        Ok(verdict)
    }

    /// Starts reading an item. Activations are handled by the executor.
    ///
    /// # Errors
    /// Fails if the item is not on the disk, or the system is out of memory.
    pub fn fetch(&mut self, item: Item) -> Result<(), ZeroError> {
        self.disk.fetch(&self.rank, &mut self.memory, item)
    }

    /// Waits for a fetch.
    ///
    /// # Errors
    /// Returns the error of the disk.
    pub fn await_fetch(&mut self, item: Item) -> Result<(), ZeroError> {
        self.disk.await_fetch(&mut self.memory, &mut self.parameters, &mut self.gradients, item)
    }

    /// Starts writing an item.
    ///
    /// # Errors
    /// Fails if the item is not in memory.
    pub fn offload(&mut self, item: Item) -> Result<(), ZeroError> {
        self.disk.offload(&self.rank, &mut self.memory, &mut self.gradients, item)
    }

    /// Waits for an offload and frees its memory.
    ///
    /// # Errors
    /// Returns the error of the disk.
    pub fn await_offload(&mut self, item: Item) -> Result<(), ZeroError> {
        self.disk.await_offload(&mut self.memory, item)
    }

    /// Takes the partial gradient of the current micro-batch out of a tied segment, to send it. It counts as staging
    /// until [`ShardedState::give_gradient_back`].
    ///
    /// # Errors
    /// Fails if the segment has no gradient.
    pub fn take_tied_gradient(&mut self, id: SegmentId) -> Result<Buffer, ZeroError> {
        Ok(Buffer::F32(self.local.take(id)?.into_buffer(&mut self.memory)?.into_host()?))
    }

    /// Recycles a gradient buffer after it was sent.
    pub fn give_gradient_back(&mut self, sent: Buffer) {
        gradients::give_tied_back(&mut self.memory, sent);
    }

    /// Allocates a buffer to receive the partial gradient of a tied segment.
    pub fn room_for_tied_gradient(&mut self, id: SegmentId) -> Buffer {
        gradients::room_for_tied(&self.rank, &mut self.memory, id)
    }

    /// Opens a tied segment's gradient with the partial sum of another stage. This stage adds its own gradient to it.
    ///
    /// # Errors
    /// Fails if the segment already has a gradient.
    pub fn open_tied_gradient(&mut self, id: SegmentId, sum: Buffer) -> Result<(), ZeroError> {
        self.local.open_tied(&self.rank, &mut self.memory, id, sum)
    }

    /// Copies this rank's part of a tied segment's updated parameters, to send it. It counts as staging until
    /// [`ShardedState::give_parameters_back`].
    ///
    /// # Errors
    /// Fails if candle cannot read them.
    pub fn tied_parameters(&mut self, id: SegmentId) -> Result<Buffer, ZeroError> {
        self.parameters.tied(&self.rank, &mut self.memory, &self.disk, id)
    }

    /// Recycles a buffer of parameters after it was sent or stored.
    pub fn give_parameters_back(&mut self, sent: Buffer) {
        parameters::give_tied_back(&self.rank, &mut self.memory, sent);
    }

    /// Allocates a buffer to receive parameters. It counts as staging until they are stored.
    pub fn room_for_tied_parameters(&mut self, id: SegmentId) -> Buffer {
        parameters::room_for_tied(&self.rank, &mut self.memory, id)
    }

    /// Stores the parameters that the owner has updated.
    ///
    /// # Errors
    /// Fails if candle cannot write them.
    pub fn set_tied_parameters(&mut self, id: SegmentId, values: Buffer) -> Result<(), ZeroError> {
        self.parameters.set_tied(&self.rank, &mut self.memory, &self.disk, id, values)
    }
}
