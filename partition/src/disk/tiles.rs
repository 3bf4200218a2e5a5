//! Executes the instructions that transfer offloaded state.

use candle_core::{CpuStorage, DType, Storage};
use zero_optim::ExactSum;
use zero_pipeline::{Item, SegmentId, Tier};
use zero_tier::{align, lies_on_pages};

use crate::disk::{MovingGradients, MovingShard, Tile};
use crate::error::ZeroError;
use crate::ledger::Category;
use crate::threads::add_parameter_range;
use crate::zero::ShardedState;

impl ShardedState {
    /// Starts reading an item. Activations are handled by the executor.
    ///
    /// # Errors
    /// Fails if the item is not on the disk, or the system is out of memory.
    pub fn fetch(&mut self, item: Item) -> Result<(), ZeroError> {
        let disk = self.disk.as_mut().ok_or_else(no_disk)?;
        match item {
            Item::Parameters { segment } => {
                let place = disk.place(segment)?;
                let (file, at) = (disk.parameters()?, place.parameters_at(0));
                let shard = match self.dtype {
                    DType::BF16 => MovingShard::Bf16(file.read_vec(at, place.elements)?),
                    DType::F16 => MovingShard::F16(file.read_vec(at, place.elements)?),
                    _ => MovingShard::F32(file.read_vec(at, place.elements)?),
                };
                disk.shards.insert(segment, shard);
                self.ledger.add(Category::Staging, place.elements, place.width);
            }
            Item::Gradients { segment } => {
                let place = disk.place(segment)?;
                let (at, len) = (place.gradients_at(0), align((place.elements * 4) as u64) as usize);
                if len > 0 {
                    let sum = self.pool.take(place.elements);
                    let moving = match lies_on_pages(&sum) {
                        true => {
                            self.ledger.add(Category::Gradients, sum.len(), 4);
                            MovingGradients::Lent(disk.optimizer()?.read_over(at, sum)?)
                        }
                        false => {
                            self.pool.give(sum);
                            let buffer = disk.buffers.take(len)?;
                            MovingGradients::Copied(disk.optimizer()?.read(at, buffer, len))
                        }
                    };
                    disk.gradients.insert(segment, moving);
                }
            }
            Item::Tile { segment, index } => {
                let place = disk.place(segment)?;
                let mut tile = Tile::empty();
                let elements = place.range(index).len();
                if elements > 0 && place.tiers.optimizer == Tier::Nvme {
                    let len = place.record(index) as usize;
                    let buffer = disk.buffers.take(len)?;
                    tile.state = Some(disk.optimizer()?.read(place.state_at(index), buffer, len));
                }
                if elements > 0 && place.tiers.gradients == Tier::Nvme {
                    let len = align((elements * 4) as u64) as usize;
                    let buffer = disk.buffers.take(len)?;
                    tile.gradients = Some(disk.optimizer()?.read(place.gradients_at(index), buffer, len));
                }
                if elements > 0 && place.tiers.parameters == Tier::Nvme {
                    let len = align((elements * place.width) as u64) as usize;
                    let buffer = disk.buffers.take(len)?;
                    // With masters, an update overwrites all values, but a skipped step writes them back as read.
                    tile.parameters = Some(disk.parameters()?.read(place.parameters_at(index), buffer, len));
                }
                disk.moving_tiles.insert(item, tile);
            }
            Item::Activations { .. } => return Err(ZeroError::internal("activations are not the optimizer's")),
        }
        self.count_buffers();
        Ok(())
    }

    /// Waits for a fetch.
    ///
    /// # Errors
    /// Returns the error of the disk.
    pub fn await_fetch(&mut self, item: Item) -> Result<(), ZeroError> {
        let disk = self.disk.as_mut().ok_or_else(no_disk)?;
        match item {
            Item::Parameters { segment } => {
                let shard = match disk.shards.remove(&segment).ok_or_else(|| not_moving(item))? {
                    MovingShard::F32(pending) => CpuStorage::F32(pending.wait()?),
                    MovingShard::Bf16(pending) => CpuStorage::BF16(pending.wait()?),
                    MovingShard::F16(pending) => CpuStorage::F16(pending.wait()?),
                };
                self.segments[segment].shard = Some(Storage::Cpu(shard));
            }
            Item::Gradients { segment } => {
                let elements = disk.place(segment)?.elements;
                let sum = match disk.gradients.remove(&segment) {
                    Some(MovingGradients::Lent(pending)) => pending.wait()?,
                    Some(MovingGradients::Copied(pending)) => {
                        let buffer = pending.wait()?;
                        let mut sum = self.pool.take(elements);
                        sum.copy_from_slice(&buffer.as_f32()[..elements]);
                        self.ledger.add(Category::Gradients, elements, 4);
                        disk.buffers.put(buffer);
                        sum
                    }
                    None => vec![],
                };
                self.segments[segment].gradients.add(sum.into(), drop)?;
            }
            Item::Tile { .. } => {
                let pending = disk.moving_tiles.remove(&item).ok_or_else(|| not_moving(item))?;
                let tile = pending.map(|pending| Ok(pending.wait()?))?;
                disk.tiles.insert(item, tile);
            }
            Item::Activations { .. } => return Err(not_moving(item)),
        }
        self.count_buffers();
        Ok(())
    }

    /// Starts writing an item.
    ///
    /// # Errors
    /// Fails if the item is not in memory.
    pub fn offload(&mut self, item: Item) -> Result<(), ZeroError> {
        match item {
            Item::Gradients { segment } => self.offload_gradients(segment)?,
            Item::Tile { segment, index } => {
                let disk = self.disk.as_mut().ok_or_else(no_disk)?;
                let place = disk.place(segment)?;
                let tile = disk.tiles.remove(&item).ok_or_else(|| not_moving(item))?;
                let mut moving = Tile::empty();
                if let Some(buffer) = tile.state {
                    let len = buffer.len();
                    moving.state = Some(disk.optimizer()?.write(place.state_at(index), buffer, len));
                }
                if let Some(buffer) = tile.parameters {
                    let len = buffer.len();
                    moving.parameters = Some(disk.parameters()?.write(place.parameters_at(index), buffer, len));
                }
                tile.gradients.into_iter().for_each(|buffer| disk.buffers.put(buffer));
                disk.moving_tiles.insert(item, moving);
            }
            Item::Parameters { .. } | Item::Activations { .. } => return Err(not_moving(item)),
        }
        self.count_buffers();
        Ok(())
    }

    /// Offloads accumulated gradients, and keeps their sum of squares for the norm.
    fn offload_gradients(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        self.settle(id)?;
        let gradients = self.take_reduced(id)?.into_host()?;
        let segment = &self.layout.segments()[id];
        let mut squares = ExactSum::new();
        for (_, _, at) in segment.overlaps(segment.shard(self.comm.rank())) {
            add_parameter_range(&mut squares, &gradients[at]);
        }
        self.segments[id].squares = Some(squares);
        let disk = self.disk.as_mut().ok_or_else(no_disk)?;
        let place = disk.place(id)?;
        let len = align((gradients.len() * 4) as u64) as usize;
        if len > 0 && lies_on_pages(&gradients) {
            self.ledger.add(Category::Staging, gradients.len(), 4);
            let pending = disk.optimizer()?.write_vec(place.gradients_at(0), gradients)?;
            disk.gradients.insert(id, MovingGradients::Lent(pending));
            return Ok(());
        }
        if len > 0 {
            let mut buffer = disk.buffers.take(len)?;
            buffer.as_f32_mut()[..gradients.len()].copy_from_slice(&gradients);
            let pending = disk.optimizer()?.write(place.gradients_at(0), buffer, len);
            disk.gradients.insert(id, MovingGradients::Copied(pending));
        }
        self.pool.give(gradients);
        Ok(())
    }

    /// Waits for an offload and frees its memory.
    ///
    /// # Errors
    /// Returns the error of the disk.
    pub fn await_offload(&mut self, item: Item) -> Result<(), ZeroError> {
        let disk = self.disk.as_mut().ok_or_else(no_disk)?;
        match item {
            Item::Tile { .. } => {
                let pending = disk.moving_tiles.remove(&item).ok_or_else(|| not_moving(item))?;
                let Tile { state, parameters, .. } = pending.map(|pending| Ok(pending.wait()?))?;
                [state, parameters].into_iter().flatten().for_each(|buffer| disk.buffers.put(buffer));
            }
            Item::Gradients { segment } => match disk.gradients.remove(&segment) {
                Some(MovingGradients::Lent(pending)) => {
                    let gradients = pending.wait()?;
                    self.ledger.remove(Category::Staging, gradients.len(), 4);
                    self.pool.give(gradients);
                }
                Some(MovingGradients::Copied(pending)) => disk.buffers.put(pending.wait()?),
                None => {}
            },
            Item::Parameters { .. } | Item::Activations { .. } => return Err(not_moving(item)),
        }
        self.count_buffers();
        Ok(())
    }

    /// Runs the optimizer step on a tile, unless the norm was not admitted.
    ///
    /// # Errors
    /// Fails if the tile is not in memory, or its gradients are not reduced.
    pub fn update_tile(&mut self, id: SegmentId, index: usize, lr: f64) -> Result<(), ZeroError> {
        if self.scale()?.is_none() {
            return self.discard_tile(id, index);
        }
        let item = Item::Tile { segment: id, index };
        let disk = self.disk.as_mut().ok_or_else(no_disk)?;
        let place = disk.place(id)?;
        let mut tile = disk.tiles.remove(&item).ok_or_else(|| not_moving(item))?;
        let result = match place.range(index) {
            part if part.is_empty() => Ok(()),
            part => self.update_part(id, part, &mut tile, lr),
        };
        if let Some(disk) = &mut self.disk {
            disk.tiles.insert(item, tile);
        }
        result?;
        // Tile counts are equal on all ranks, so a rank with a smaller part may end with empty tiles.
        let is_last = index + 1 == place.tiers.tiles;
        if is_last && place.tiers.gradients == Tier::Memory {
            self.discard(id)?;
        }
        Ok(())
    }

    /// Frees the gradients of a segment with its last tile, in a skipped step.
    ///
    /// # Errors
    /// Fails if the gradients are not reduced.
    fn discard_tile(&mut self, id: SegmentId, index: usize) -> Result<(), ZeroError> {
        let tiers = self.layout.segments()[id].tiers;
        match index + 1 == tiers.tiles && tiers.gradients == Tier::Memory {
            true => self.discard(id),
            false => Ok(()),
        }
    }

    /// Updates the ledger's count of disk buffers, both lent and idle.
    pub(crate) fn count_buffers(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        let usage = disk.buffers.usage();
        let bytes = usage.idle_bytes + usage.lent_bytes;
        let before = std::mem::replace(&mut disk.counted, bytes);
        match bytes.checked_sub(before) {
            Some(more) => self.ledger.add(Category::Staging, more as usize, 1),
            None => self.ledger.remove(Category::Staging, (before - bytes) as usize, 1),
        }
    }

    /// Frees idle buffers, because the next part of the step needs other sizes.
    pub(crate) fn drop_buffers(&mut self) {
        if let Some(disk) = &self.disk {
            disk.buffers.clear();
        }
        self.count_buffers();
    }
}

pub(crate) fn no_disk() -> ZeroError {
    ZeroError::internal("nothing lives on a disk")
}

fn not_moving(item: Item) -> ZeroError {
    ZeroError::internal(format!("the {item} are not in memory, or not on their way"))
}
