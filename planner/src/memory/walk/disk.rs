//! Aligned buffers for data that is offloaded to a disk.

use zero_comm::SharedAllocator;
use zero_partition::{Category, disk_buffers};
use zero_pipeline::{Item, Tier};
use zero_tier::{ALIGNMENT, BufferPool};

use super::{Values, Walk};

/// Returns whether a vector of this size is read and written in place, without an aligned buffer: the allocator aligns
/// large vectors to pages.
fn is_lent(bytes: u64) -> bool {
    bytes >= SharedAllocator::LARGE as u64
}

impl Walk<'_> {
    /// Takes the buffer for the last, partial page of a vector. This buffer is not kept for reuse.
    fn page(&mut self, bytes: u64) -> Vec<u64> {
        let page = ALIGNMENT as u64;
        if bytes.is_multiple_of(page) {
            return vec![];
        }
        self.meter.add(Category::Staging, page);
        vec![page]
    }

    pub(super) fn await_offload(&mut self, item: Item) {
        let moved = self.moving.remove(&item).unwrap_or_default();
        match item {
            Item::Activations { .. } => moved.into_iter().for_each(|class| self.kept_buffers.give(class)),
            Item::Gradients { segment } if is_lent(self.shard(segment) * 4) => {
                moved.into_iter().for_each(|bytes| self.meter.free(Category::Staging, bytes));
                self.give(Category::Staging, self.shard(segment));
            }
            _ => moved.into_iter().for_each(|class| self.buffers.give(class)),
        }
    }

    /// Takes an aligned buffer.
    pub(super) fn buffer(&mut self, bytes: u64) -> u64 {
        let class = BufferPool::size_class(bytes as usize) as u64;
        if !self.buffers.take(class) {
            self.meter.add(Category::Staging, class);
        }
        class
    }

    pub(super) fn drop_buffers(&mut self) {
        let idle = self.buffers.clear();
        self.meter.free(Category::Staging, idle);
    }

    pub(super) fn fetch(&mut self, item: Item) {
        if let Item::Activations { layer, .. } = item {
            let class = self.kept_buffer(layer);
            self.moving.insert(item, vec![class]);
            return;
        }
        let sizes = disk_buffers(self.work.layout, self.work.stages, self.work.at, &self.widths(), item);
        let classes = match item {
            Item::Parameters { segment } => {
                let bytes = self.shard(segment) * self.width_of(segment);
                if is_lent(bytes) {
                    self.meter.add(Category::Staging, bytes);
                    self.page(bytes)
                } else {
                    // These buffers are not kept for reuse.
                    sizes.iter().for_each(|&bytes| self.meter.add(Category::Staging, bytes));
                    sizes
                }
            }
            Item::Gradients { segment } if is_lent(self.shard(segment) * 4) => {
                self.take(Category::Gradients, self.shard(segment));
                self.page(self.shard(segment) * 4)
            }
            _ => sizes.into_iter().map(|bytes| self.buffer(bytes)).collect(),
        };
        self.moving.insert(item, classes);
    }

    pub(super) fn await_fetch(&mut self, item: Item) {
        let moved = self.moving.remove(&item).unwrap_or_default();
        match item {
            Item::Parameters { segment } => {
                let bytes = self.shard(segment) * self.width_of(segment);
                self.meter.add(Category::Staging, if is_lent(bytes) { 0 } else { bytes });
                moved.into_iter().for_each(|bytes| self.meter.free(Category::Staging, bytes));
            }
            Item::Gradients { segment } => {
                self.sums[segment].push(0);
                match is_lent(self.shard(segment) * 4) {
                    true => moved.into_iter().for_each(|bytes| self.meter.free(Category::Staging, bytes)),
                    false => {
                        self.take(Category::Gradients, self.shard(segment));
                        moved.into_iter().for_each(|class| self.buffers.give(class));
                    }
                }
            }
            Item::Tile { .. } => drop(self.tiles.insert(item, moved)),
            Item::Activations { layer, micro_batch } => {
                let bytes = self.work.table.map_or(0, |table| table.inputs[layer]);
                // The inputs are copied from the disk's buffer into a buffer of their own dtype.
                self.meter.add(Category::Activations, bytes);
                if let Some(before) = layer.checked_sub(1) {
                    self.values.insert((before, micro_batch), Values { bytes, kept: true, ..Values::default() });
                }
                moved.into_iter().for_each(|class| self.kept_buffers.give(class));
            }
        }
    }

    /// Takes a buffer for inputs that are kept on the disk.
    fn kept_buffer(&mut self, layer: usize) -> u64 {
        let bytes = self.work.table.map_or(0, |table| table.inputs[layer]);
        let class = BufferPool::size_class(zero_tier::align(bytes) as usize) as u64;
        if !self.kept_buffers.take(class) {
            self.meter.add(Category::Staging, class);
        }
        class
    }

    pub(super) fn offload(&mut self, item: Item) {
        match item {
            Item::Gradients { segment } => {
                self.settle(segment);
                self.reduced[segment] = false;
                let bytes = self.shard(segment) * 4;
                if is_lent(bytes) {
                    self.meter.free(Category::Gradients, bytes);
                    self.meter.add(Category::Staging, bytes);
                    let page = self.page(bytes);
                    self.moving.insert(item, page);
                    return;
                }
                let sizes = disk_buffers(self.work.layout, self.work.stages, self.work.at, &self.widths(), item);
                let classes = sizes.into_iter().map(|bytes| self.buffer(bytes)).collect();
                self.give(Category::Gradients, self.shard(segment));
                self.moving.insert(item, classes);
            }
            Item::Tile { segment, .. } => {
                let mut classes = self.tiles.remove(&item).unwrap_or_default();
                // Gradients are not written back, so their buffer is freed immediately. In `classes`, it comes directly
                // after the buffer of the state.
                let tiers = self.segment(segment).tiers;
                if tiers.gradients == Tier::Nvme && !classes.is_empty() {
                    // If there is neither a state (plain SGD) nor a master copy, the buffer of the gradients comes
                    // first.
                    let (of, widths) = (self.segment(segment), self.widths());
                    let has_state = tiers.optimizer == Tier::Nvme && of.state_bytes(1, &widths) + widths.master > 0;
                    let class = classes.remove(usize::from(has_state));
                    self.buffers.give(class);
                }
                self.moving.insert(item, classes);
            }
            Item::Activations { layer, micro_batch } => {
                let class = self.kept_buffer(layer);
                // A temporary copy of the inputs, freed before the write begins.
                let bytes = self.work.table.map_or(0, |table| table.inputs[layer]);
                self.meter.flash(Category::Staging, bytes);
                if let Some(before) = layer.checked_sub(1) {
                    self.let_go(before, micro_batch, |values| values.kept = false);
                }
                self.moving.insert(item, vec![class]);
            }
            Item::Parameters { .. } => {}
        }
    }
}
