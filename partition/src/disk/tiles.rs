//! Executes the instructions that transfer offloaded state.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Storage};
use zero_model::ops::quantized_storage;
use zero_pipeline::{Item, SegmentId, Tier};
use zero_tier::{AlignedBuffer, align, lies_on_pages};

use crate::accounting::ledger::Category;
use crate::accounting::memory::Memory;
use crate::disk::{Disk, MovingGradients, MovingShard, Tile};
use crate::error::ZeroError;
use crate::optimizer::{OptimizerState, StepInputs};
use crate::parameters::ParameterState;
use crate::rank::Rank;
use crate::reductions::Reductions;
use crate::storage::QUANTIZED;

impl Disk {
    /// Starts reading an item. Activations are handled by the executor.
    pub(crate) fn fetch(&mut self, rank: &Rank, memory: &mut Memory, item: Item) -> Result<(), ZeroError> {
        match item {
            Item::Parameters { segment } => {
                let place = self.place(segment)?.clone();
                let (file, at) = (self.parameters()?, place.parameters_at(0));
                let shard = match rank.stored_as(segment) {
                    DType::BF16 => MovingShard::Bf16(file.read_vec(at, place.elements)?),
                    DType::F16 => MovingShard::F16(file.read_vec(at, place.elements)?),
                    QUANTIZED => MovingShard::Quantized(file.read_vec(at, place.elements)?),
                    _ => MovingShard::F32(file.read_vec(at, place.elements)?),
                };
                self.shards.insert(segment, shard);
                memory.count(Category::Staging, place.elements, place.width);
            }
            Item::Gradients { segment } => {
                let place = self.place(segment)?.clone();
                let (at, len) = (place.gradients_at(0), align((place.elements * 4) as u64) as usize);
                if len > 0 {
                    let sum = memory.take(place.elements);
                    let moving = match lies_on_pages(&sum) {
                        true => {
                            memory.count(Category::Gradients, sum.len(), 4);
                            MovingGradients::Lent(self.optimizer()?.read_over(at, sum)?)
                        }
                        false => {
                            memory.give(sum);
                            let buffer = self.buffers.take(len)?;
                            MovingGradients::Copied(self.optimizer()?.read(at, buffer, len))
                        }
                    };
                    self.gradients.insert(segment, moving);
                }
            }
            Item::Tile { segment, index } => {
                let place = self.place(segment)?.clone();
                let mut tile = Tile::empty();
                let elements = place.range(index).len();
                if elements > 0 && place.tiers.optimizer == Tier::Nvme {
                    let len = place.record(index) as usize;
                    let buffer = self.buffers.take(len)?;
                    tile.state = Some(self.optimizer()?.read(place.state_at(index), buffer, len));
                }
                if elements > 0 && place.tiers.gradients == Tier::Nvme {
                    let len = align((elements * 4) as u64) as usize;
                    let buffer = self.buffers.take(len)?;
                    tile.gradients = Some(self.optimizer()?.read(place.gradients_at(index), buffer, len));
                }
                if elements > 0 && place.tiers.parameters == Tier::Nvme {
                    let len = align((elements * place.width) as u64) as usize;
                    let buffer = self.buffers.take(len)?;
                    // An update from masters overwrites all values, but a skipped step writes back what was read.
                    tile.parameters = Some(self.parameters()?.read(place.parameters_at(index), buffer, len));
                }
                self.moving_tiles.insert(item, tile);
            }
            Item::Activations { .. } => {
                return Err(ZeroError::internal("activations are not part of the optimizer state"));
            }
        }
        self.count_buffers(memory);
        Ok(())
    }

    /// Waits for a fetch.
    pub(crate) fn await_fetch(
        &mut self,
        memory: &mut Memory,
        parameters: &mut ParameterState,
        gradients: &mut Reductions,
        item: Item,
    ) -> Result<(), ZeroError> {
        match item {
            Item::Parameters { segment } => {
                let shard = match self.shards.remove(&segment).ok_or_else(|| not_moving(item))? {
                    MovingShard::F32(pending) => CpuStorage::F32(pending.wait()?),
                    MovingShard::Bf16(pending) => CpuStorage::BF16(pending.wait()?),
                    MovingShard::F16(pending) => CpuStorage::F16(pending.wait()?),
                    MovingShard::Quantized(pending) => quantized_storage(pending.wait()?),
                };
                parameters.set_shard(segment, Storage::Cpu(shard));
            }
            Item::Gradients { segment } => {
                let elements = self.place(segment)?.elements;
                let sum = match self.gradients.remove(&segment) {
                    Some(MovingGradients::Lent(pending)) => pending.wait()?,
                    Some(MovingGradients::Copied(pending)) => {
                        let buffer = pending.wait()?;
                        let mut sum = memory.take(elements);
                        sum.copy_from_slice(&buffer.as_f32()[..elements]);
                        memory.count(Category::Gradients, elements, 4);
                        self.buffers.put(buffer);
                        sum
                    }
                    None => vec![],
                };
                gradients.add_stored(segment, sum)?;
            }
            Item::Tile { .. } => {
                let pending = self.moving_tiles.remove(&item).ok_or_else(|| not_moving(item))?;
                let tile = pending.map(|pending| Ok(pending.wait()?))?;
                self.tiles.insert(item, tile);
            }
            Item::Activations { .. } => return Err(not_moving(item)),
        }
        self.count_buffers(memory);
        Ok(())
    }

    /// Starts writing an item.
    pub(crate) fn offload(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        gradients: &mut Reductions,
        item: Item,
    ) -> Result<(), ZeroError> {
        match item {
            Item::Gradients { segment } => {
                let gradients = gradients.take_to_offload(rank, memory, segment)?;
                self.offload_gradients(memory, segment, gradients)?;
            }
            Item::Tile { segment, index } => {
                let place = self.place(segment)?.clone();
                let tile = self.tiles.remove(&item).ok_or_else(|| not_moving(item))?;
                let mut moving = Tile::empty();
                if let Some(buffer) = tile.state {
                    let len = buffer.len();
                    moving.state = Some(self.optimizer()?.write(place.state_at(index), buffer, len));
                }
                if let Some(buffer) = tile.parameters {
                    let len = buffer.len();
                    moving.parameters = Some(self.parameters()?.write(place.parameters_at(index), buffer, len));
                }
                tile.gradients.into_iter().for_each(|buffer| self.buffers.put(buffer));
                self.moving_tiles.insert(item, moving);
            }
            Item::Parameters { .. } | Item::Activations { .. } => return Err(not_moving(item)),
        }
        self.count_buffers(memory);
        Ok(())
    }

    fn offload_gradients(&mut self, memory: &mut Memory, id: SegmentId, gradients: Vec<f32>) -> Result<(), ZeroError> {
        let at = self.place(id)?.gradients_at(0);
        let len = align((gradients.len() * 4) as u64) as usize;
        if len > 0 && lies_on_pages(&gradients) {
            memory.count(Category::Staging, gradients.len(), 4);
            let pending = self.optimizer()?.write_vec(at, gradients)?;
            self.gradients.insert(id, MovingGradients::Lent(pending));
            return Ok(());
        }
        if len > 0 {
            let mut buffer = self.buffers.take(len)?;
            buffer.as_f32_mut()[..gradients.len()].copy_from_slice(&gradients);
            let pending = self.optimizer()?.write(at, buffer, len);
            self.gradients.insert(id, MovingGradients::Copied(pending));
        }
        memory.give(gradients);
        Ok(())
    }

    /// Waits for an offload and frees its memory.
    pub(crate) fn await_offload(&mut self, memory: &mut Memory, item: Item) -> Result<(), ZeroError> {
        match item {
            Item::Tile { .. } => {
                let pending = self.moving_tiles.remove(&item).ok_or_else(|| not_moving(item))?;
                let Tile { state, parameters, .. } = pending.map(|pending| Ok(pending.wait()?))?;
                [state, parameters].into_iter().flatten().for_each(|buffer| self.buffers.put(buffer));
            }
            Item::Gradients { segment } => match self.gradients.remove(&segment) {
                Some(MovingGradients::Lent(pending)) => {
                    let gradients = pending.wait()?;
                    memory.uncount(Category::Staging, gradients.len(), 4);
                    memory.give(gradients);
                }
                Some(MovingGradients::Copied(pending)) => self.buffers.put(pending.wait()?),
                None => {}
            },
            Item::Parameters { .. } | Item::Activations { .. } => return Err(not_moving(item)),
        }
        self.count_buffers(memory);
        Ok(())
    }

    /// Runs, on one tile, the first pass of an optimizer that takes two passes. Skips the tile if the gradient norm was
    /// not admitted.
    pub(crate) fn measure_tile(
        &mut self,
        optimizer: &mut OptimizerState,
        mut with: StepInputs<'_>,
        id: SegmentId,
        index: usize,
    ) -> Result<(), ZeroError> {
        let (part, tile) = self.fetched(id, index)?;
        optimizer.measure_tile(&mut with, id, part, tile)
    }

    /// Returns the range and the values of a fetched tile.
    fn fetched(&mut self, id: SegmentId, index: usize) -> Result<(Range<usize>, &mut Tile<AlignedBuffer>), ZeroError> {
        let item = Item::Tile { segment: id, index };
        let part = self.place(id)?.range(index);
        Ok((part, self.tiles.get_mut(&item).ok_or_else(|| not_moving(item))?))
    }

    /// Runs the optimizer step on a tile, unless the gradient norm was not admitted. If the segment's gradients are in
    /// memory, the update of its last tile frees them.
    pub(crate) fn update_tile(
        &mut self,
        optimizer: &mut OptimizerState,
        mut with: StepInputs<'_>,
        id: SegmentId,
        index: usize,
    ) -> Result<(), ZeroError> {
        if let Some(scalings) = optimizer.scalings()? {
            optimizer.measure_trust(&mut with, &scalings)?;
            let (part, tile) = self.fetched(id, index)?;
            if !part.is_empty() {
                optimizer.update_part(&mut with, id, part, tile)?;
            }
        }
        // Tile counts are equal on all ranks, so a rank with a smaller part may end with empty tiles.
        let tiers = with.rank.segment(id).tiers;
        match index + 1 == tiers.tiles && tiers.gradients == Tier::Memory {
            true => with.gradients.discard(with.rank, with.memory, id),
            false => Ok(()),
        }
    }

    /// Updates the ledger's count of disk buffers, both lent and idle.
    fn count_buffers(&mut self, memory: &mut Memory) {
        let usage = self.buffers.usage();
        let bytes = usage.idle_bytes + usage.lent_bytes;
        let before = std::mem::replace(&mut self.counted, bytes);
        match bytes.checked_sub(before) {
            Some(more) => memory.count(Category::Staging, more as usize, 1),
            None => memory.uncount(Category::Staging, (before - bytes) as usize, 1),
        }
    }

    /// Frees idle buffers, because the next part of the step needs buffers of different sizes.
    pub(crate) fn drop_buffers(&mut self, memory: &mut Memory) {
        self.buffers.clear();
        self.count_buffers(memory);
    }
}

fn not_moving(item: Item) -> ZeroError {
    ZeroError::internal(format!("neither in memory nor in flight: {item}"))
}
