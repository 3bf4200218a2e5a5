//! The gradient buffers of `ShardedState`, and the pool that buffers come from.

use zero_partition::{Category, CodedLevel, Order};
use zero_pipeline::{LayerId, Placement, SegmentId};

use super::Walk;

impl Walk<'_> {
    /// Takes a gradient buffer. On a GPU, the driver keeps freed buffers in a pool, which is not counted.
    pub(super) fn take(&mut self, category: Category, elements: u64) {
        match self.is_resident {
            true => self.meter.add_at(category, elements * 4, true),
            false => self.take_on_host(category, elements),
        }
    }

    pub(super) fn give(&mut self, category: Category, elements: u64) {
        match self.is_resident {
            true => self.meter.free_at(category, elements * 4, true),
            false => self.give_on_host(category, elements),
        }
    }

    /// Sets the segment (flat parameter) that the following calls are about.
    fn about(&mut self, id: SegmentId) {
        self.is_resident = self.residents[id];
    }

    /// Adds the buffer of a gradient in transit, in addition to the gradient's own buffer.
    fn add(&mut self, category: Category, bytes: u64) {
        self.meter.add_at(category, bytes, self.is_resident && self.on_gpu().sums);
    }

    fn free(&mut self, category: Category, bytes: u64) {
        self.meter.free_at(category, bytes, self.is_resident && self.on_gpu().sums);
    }

    /// Returns whether gradients are kept in bf16; such buffers are not reused.
    fn keeps_narrow(&self) -> bool {
        self.work.options.gradient_dtype.size_in_bytes() < 4
    }

    /// Takes a buffer for gradients that are kept until the update.
    fn take_kept(&mut self, category: Category, elements: u64) {
        match self.keeps_narrow() {
            true => self.meter.add(category, elements * 2),
            false => self.take(category, elements),
        }
    }

    fn give_kept(&mut self, category: Category, elements: u64) {
        match self.keeps_narrow() {
            true => self.meter.free(category, elements * 2),
            false => self.give(category, elements),
        }
    }

    /// Takes a buffer of floats from the pool, or allocates one in the category.
    pub(super) fn take_on_host(&mut self, category: Category, elements: u64) {
        if self.pool.take(elements) {
            self.meter.free(Category::Staging, elements * 4);
        }
        self.meter.add(category, elements * 4);
    }

    /// Returns a buffer of floats to the pool, if the pool keeps buffers of this size.
    pub(super) fn give_on_host(&mut self, category: Category, elements: u64) {
        self.meter.free(category, elements * 4);
        if elements > 0 && elements <= self.longest {
            self.pool.give(elements);
            self.meter.add(Category::Staging, elements * 4);
        }
    }

    pub(super) fn open_all(&mut self, layer: LayerId) {
        let mut made = 0;
        let layout = self.work.layout;
        for &id in layout.shape().layers[layer].segments.iter().filter(|&&id| layout.segments()[id].is_trainable) {
            self.about(id);
            made += if self.is_resident { 0 } else { self.elements(id) * 4 };
            if !std::mem::replace(&mut self.open[id], true) {
                self.take(Category::Staging, self.elements(id));
            }
        }
        if self.on_gpu().layers {
            // A gradient that goes to the host is computed on the GPU, and stays on the GPU until the gradient of the
            // next layer is computed.
            self.meter.add_at(Category::Staging, made, true);
            let before = std::mem::replace(&mut self.brought, made);
            self.meter.free_at(Category::Staging, before, true);
        }
    }

    /// Adds an f32 summand, which is in staging, to the sum.
    pub(super) fn add_up(&mut self, id: SegmentId, elements: u64) {
        self.about(id);
        if self.keeps_narrow() {
            self.take_kept(Category::Staging, elements);
            self.give(Category::Staging, elements);
        }
        self.add_up_kept(id, elements);
    }

    /// Adds a summand in the kept dtype, which is in staging, to the sum.
    fn add_up_kept(&mut self, id: SegmentId, elements: u64) {
        let bytes = elements * self.work.options.gradient_dtype.size_in_bytes() as u64;
        self.meter.free_at(Category::Staging, bytes, self.is_resident);
        self.meter.add_at(Category::Gradients, bytes, self.is_resident);
        self.sums[id].push(0);
        while let [.., below, top] = self.sums[id][..]
            && (self.work.options.order == Order::Arrival || below == top)
        {
            self.merge(id, elements);
        }
    }

    pub(super) fn merge(&mut self, id: SegmentId, elements: u64) {
        let sums = &mut self.sums[id];
        if let (Some(top), Some(below)) = (sums.pop(), sums.last_mut()) {
            *below = top.max(*below) + 1;
            self.give_kept(Category::Gradients, elements);
        }
    }

    pub(super) fn total(&mut self, id: SegmentId, elements: u64) {
        self.about(id);
        while self.sums[id].len() > 1 {
            self.merge(id, elements);
        }
        self.sums[id].clear();
    }

    pub(super) fn reduce(&mut self, ids: &[SegmentId]) {
        let (coded, plain): (Vec<_>, Vec<_>) = ids.iter().copied().partition(|&id| !self.coded(id).is_empty());
        plain.into_iter().for_each(|id| self.reduce_values(id));
        coded.iter().for_each(|&id| self.open[id] = false);
        self.by_place(coded, |walk, ids| walk.send_codes(ids, 0));
    }

    fn reduce_values(&mut self, id: SegmentId) {
        self.about(id);
        let (segment, elements) = (self.segment(id), self.elements(id));
        let category = match segment.placements.gradients {
            Placement::Sharded => {
                self.open[id] = false;
                Category::Staging
            }
            Placement::Replicated => {
                self.total(id, elements);
                Category::Gradients
            }
        };
        let sends_narrow = self.sends_narrow();
        if self.scatters(id) {
            let flat = self.flat_sums(id);
            self.add(Category::Staging, flat);
            match sends_narrow {
                true => self.add(Category::Staging, self.shard(id) * 2),
                false => self.take(Category::Staging, self.shard(id)),
            }
        }
        let is_narrow = segment.placements.gradients == Placement::Replicated && self.keeps_narrow();
        self.pack(category, elements, is_narrow);
    }

    /// Returns the bytes of the flat buffer through which NCCL reduces the segment's gradients.
    fn flat_sums(&self, id: SegmentId) -> u64 {
        let width = if self.sends_narrow() { 2 } else { 4 };
        if self.is_resident && self.on_gpu().sums { self.segment(id).flat_bytes(width) as u64 } else { 0 }
    }

    /// Converts a gradient to the communication dtype, from bf16 if `is_narrow`, otherwise from f32.
    fn pack(&mut self, category: Category, elements: u64, is_narrow: bool) {
        match (is_narrow, self.sends_narrow()) {
            (false, true) => {
                self.add(category, elements * 2);
                self.give(category, elements);
            }
            (true, false) => {
                self.take(category, elements);
                self.give_kept(category, elements);
            }
            _ => {}
        }
    }

    fn sends_narrow(&self) -> bool {
        self.work.options.communication.size_in_bytes() < 4
    }

    /// Converts a received gradient to the dtype in which gradients are kept.
    fn receive(&mut self, category: Category, elements: u64) {
        match (self.sends_narrow(), self.keeps_narrow()) {
            (true, false) => {
                self.take(category, elements);
                self.free(category, elements * 2);
            }
            (false, true) => {
                self.take_kept(category, elements);
                self.give(category, elements);
            }
            _ => {}
        }
    }

    pub(super) fn scatters(&self, id: SegmentId) -> bool {
        let is_sharded = self.segment(id).placements.optimizer == Placement::Sharded;
        is_sharded && self.work.options.reduce_scatter && self.work.layout.ranks() > 1
    }

    pub(super) fn await_reduce(&mut self, ids: &[SegmentId], micro_batch: usize) {
        let (coded, plain): (Vec<_>, Vec<_>) = ids.iter().copied().partition(|&id| !self.coded(id).is_empty());
        self.by_place(coded, |walk, ids| {
            walk.await_codes(ids);
            ids.iter().for_each(|&id| walk.is_reduced(id, micro_batch));
        });
        for id in plain {
            self.await_values_of(id);
            self.is_reduced(id, micro_batch);
        }
    }

    fn await_values_of(&mut self, id: SegmentId) {
        self.about(id);
        let (placements, elements, shard) = (self.segment(id).placements, self.elements(id), self.shard(id));
        let is_sharded = placements.gradients == Placement::Sharded;
        let category = if is_sharded { Category::Staging } else { Category::Gradients };
        if self.scatters(id) {
            let flat = self.flat_sums(id);
            self.free(Category::Staging, flat);
            self.receive(Category::Staging, shard);
            if !is_sharded {
                self.receive(category, elements);
                self.give_kept(Category::Staging, shard);
            } else if self.sends_narrow() {
                self.add_up_kept(id, shard);
                self.free(category, elements * 2);
            } else {
                self.give(category, elements);
                self.add_up_kept(id, shard);
            }
        } else {
            self.receive(category, elements);
            if is_sharded && shard != elements {
                self.take_kept(Category::Staging, shard);
                self.give_kept(Category::Staging, elements);
            }
            if is_sharded {
                self.add_up_kept(id, shard);
            }
        }
    }

    /// Marks a gradient as reduced. After the last micro-batch, sends the sum of a shard to its replicates.
    fn is_reduced(&mut self, id: SegmentId, micro_batch: usize) {
        self.about(id);
        let shard = self.shard(id);
        self.reduced[id] = self.segment(id).placements.gradients == Placement::Replicated;
        if micro_batch + 1 == self.micro_batches && self.sums_first(id) {
            self.total(id, shard);
            self.pack(Category::Gradients, shard, self.keeps_narrow());
            self.over_replicates[id] = true;
        }
    }

    /// Returns whether gradients are summed over micro-batches before they are summed over replicates.
    fn sums_first(&self, id: SegmentId) -> bool {
        let is_cut = self.scatters(id) || !self.coded(id).is_empty();
        self.work.mesh.replicates() > 1
            && is_cut
            && self.work.layout.sums_before_replicates(self.work.options, self.micro_batches)
    }

    /// Returns the all-to-all levels of a reduction that sends codes (quantized gradients); empty for any other
    /// reduction.
    fn coded(&self, id: SegmentId) -> Vec<CodedLevel> {
        self.segment(id).reduced_as(self.work.options.coded, self.work.mesh, self.work.at)
    }

    /// Calls `then` with the segments whose gradients are on the host, and again with those whose gradients are on the
    /// GPU.
    fn by_place(&mut self, ids: Vec<SegmentId>, then: impl Fn(&mut Self, &[SegmentId])) {
        let (on_gpu, on_host): (Vec<_>, Vec<_>) = ids.into_iter().partition(|&id| self.residents[id]);
        for ids in [on_host, on_gpu] {
            if let Some(&first) = ids.first() {
                self.about(first);
                then(self, &ids);
            }
        }
    }

    /// Returns the bytes of the codes that an all-to-all sends and receives.
    fn code_bytes(&self, ids: &[SegmentId], level: usize) -> [u64; 2] {
        ids.iter().fold([0, 0], |[sent, received], &id| {
            let (segment, of) = (self.segment(id), &self.coded(id)[level]);
            let leaving = of.leaving(segment);
            [sent + leaving as u64, received + (of.bytes(segment) - leaving) as u64]
        })
    }

    /// Starts the all-to-all of a level. Codes replace the values (the gradients, or the sums of the previous level),
    /// except for the rank's own part. Codes that travel through the host are created on the GPU.
    fn send_codes(&mut self, ids: &[SegmentId], level: usize) {
        let [sent, received] = self.code_bytes(ids, level);
        self.meter.add_at(Category::Staging, sent, self.is_resident);
        for &id in ids {
            let levels = self.coded(id);
            let values = level.checked_sub(1).map_or(self.elements(id), |before| levels[before].elements() as u64);
            self.take(Category::Staging, levels[level].elements() as u64);
            self.give(Category::Staging, values);
        }
        self.meter.free_at(Category::Staging, sent, self.is_resident);
        self.add(Category::Staging, sent + received);
    }

    /// Adds up the codes of each level and sends the sums to the next level. Adds the sums of the last level to the
    /// shards.
    fn await_codes(&mut self, ids: &[SegmentId]) {
        let levels = self.coded(ids[0]).len();
        for level in 0..levels {
            let [sent, received] = self.code_bytes(ids, level);
            self.free(Category::Staging, sent + received);
            self.meter.add_at(Category::Staging, received, self.is_resident);
            self.meter.free_at(Category::Staging, received, self.is_resident);
            if level + 1 < levels {
                self.send_codes(ids, level + 1);
            }
        }
        if self.work.mesh.replicates() == 1 || self.sums_first(ids[0]) {
            return ids.iter().for_each(|&id| self.add_up(id, self.shard(id)));
        }
        if self.sends_narrow() {
            for &id in ids {
                self.add(Category::Staging, self.shard(id) * 2);
                self.give(Category::Staging, self.shard(id));
            }
        }
        for &id in ids {
            self.receive(Category::Staging, self.shard(id));
            self.add_up_kept(id, self.shard(id));
        }
    }

    /// Finishes the sum of a segment's gradients, and marks the gradients as reduced.
    pub(super) fn settle(&mut self, id: SegmentId) {
        self.about(id);
        let elements = self.part(id, self.segment(id).placements.gradients);
        match std::mem::take(&mut self.over_replicates[id]) {
            true => self.receive(Category::Gradients, elements),
            false => self.total(id, elements),
        }
        self.reduced[id] = true;
    }

    pub(super) fn done_with(&mut self, id: SegmentId) {
        self.about(id);
        self.reduced[id] = false;
        let placements = self.segment(id).placements;
        let elements = self.part(id, placements.gradients);
        match placements.parameters {
            Placement::Sharded if !self.keeps_narrow() => {
                self.meter.free_at(Category::Gradients, elements * 4, self.is_resident);
            }
            _ => self.give_kept(Category::Gradients, elements),
        }
    }
}
