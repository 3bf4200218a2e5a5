//! The parameter buffers of `ShardedState`: for gathers, refreshes and outer steps.

use zero_partition::Category;
use zero_pipeline::{SegmentId, Tier};

use super::Walk;

impl Walk<'_> {
    /// Adds gathered parameters, in the working dtype.
    fn add_gathered(&mut self, elements: u64) {
        match (self.on_gpu().layers, self.is_half()) {
            (true, _) => self.meter.add_at(Category::Staging, elements * self.work.width, true),
            (false, true) => self.meter.add(Category::Staging, elements * 2),
            (false, false) => self.take_on_host(Category::Staging, elements),
        }
    }

    fn free_gathered(&mut self, elements: u64) {
        match (self.on_gpu().layers, self.is_half()) {
            (true, _) => self.meter.free_at(Category::Staging, elements * self.work.width, true),
            (false, true) => self.meter.free(Category::Staging, elements * 2),
            (false, false) => self.give_on_host(Category::Staging, elements),
        }
    }

    /// Returns whether a gather of the segment needs no buffer of its own, because its only shard is read from the
    /// disk.
    fn is_whole(&self, id: SegmentId) -> bool {
        let sends_codes = self.segment(id).gathered_as(self.work.options.coded).is_some();
        self.work.layout.ranks() == 1 && self.segment(id).tiers.parameters == Tier::Nvme && !sends_codes
    }

    /// Returns the bytes of the codes (quantized values) that a gather of the segment sends and receives, and whether
    /// the codes are on a GPU; `None` if the gather sends no codes.
    fn gathered_codes(&self, id: SegmentId) -> Option<(u64, bool)> {
        let (segment, own) = (self.segment(id), self.segment(id).shard(self.work.at.shard));
        let codes = segment.gathered_as(self.work.options.coded)?;
        let bytes = segment.code_bytes(codes, &own) + segment.code_bytes(codes, &(0..segment.elements()));
        let is_by_gpu = self.on_gpu().gathers && self.on_gpu().parameters;
        Some(((bytes + if is_by_gpu { segment.flat_code_bytes(codes) } else { 0 }) as u64, is_by_gpu))
    }

    pub(super) fn gather(&mut self, id: SegmentId) {
        if self.is_whole(id) {
            return;
        }
        if let Some((bytes, is_by_gpu)) = self.gathered_codes(id) {
            return self.meter.add_at(Category::Staging, bytes, is_by_gpu);
        }
        let flat = self.flat(id);
        self.meter.add_at(Category::Staging, flat, true);
        self.gather_values(id);
    }

    /// Returns the bytes of the flat buffer through which NCCL gathers the segment.
    fn flat(&self, id: SegmentId) -> u64 {
        let is_by_gpu = self.on_gpu().gathers && self.on_gpu().layers && self.segment(id).quantization.is_none();
        match is_by_gpu {
            true => self.segment(id).flat_bytes(self.width_of(id) as usize) as u64,
            false => 0,
        }
    }

    /// Starts a gather of values rather than codes. Gathers from secondary shards always send values.
    pub(super) fn gather_values(&mut self, id: SegmentId) {
        match self.segment(id).quantization {
            // Buffers of bytes are not kept for reuse.
            Some(_) => self.meter.add(Category::Staging, self.elements(id)),
            None => self.add_gathered(self.elements(id)),
        }
    }

    pub(super) fn await_gather(&mut self, id: SegmentId) {
        match self.gathered_codes(id) {
            Some((bytes, is_by_gpu)) => {
                self.add_gathered(self.elements(id));
                self.meter.free_at(Category::Staging, bytes, is_by_gpu);
            }
            None if !self.is_whole(id) => {
                let flat = self.flat(id);
                self.meter.free_at(Category::Staging, flat, true);
            }
            None => {}
        }
        self.await_values(id);
    }

    /// Awaits a gather of values.
    pub(super) fn await_values(&mut self, id: SegmentId) {
        let (segment, is_whole) = (self.segment(id), self.is_whole(id));
        if segment.tiers.parameters == Tier::Nvme && !is_whole {
            self.meter.free(Category::Staging, self.shard(id) * self.width_of(id));
        }
        if segment.only_parameter().is_some() {
            return;
        }
        let pieces: Vec<u64> = segment.pieces.iter().map(|piece| piece.range.len() as u64).collect();
        match self.is_half() || self.on_gpu().layers {
            true => {
                self.add_gathered(self.elements(id));
                self.free_gathered(self.elements(id));
            }
            false => {
                pieces.into_iter().for_each(|elements| self.take_on_host(Category::Staging, elements));
                match is_whole {
                    true => self.meter.free(Category::Staging, self.elements(id) * 4),
                    false => self.give_on_host(Category::Staging, self.elements(id)),
                }
            }
        }
    }

    pub(super) fn release(&mut self, id: SegmentId) {
        if self.is_whole(id) && self.segment(id).only_parameter().is_some() {
            return self.meter.free(Category::Staging, self.elements(id) * self.width_of(id));
        }
        if self.segment(id).quantization.is_some() {
            return self.meter.free(Category::Staging, self.elements(id));
        }
        let pieces: Vec<u64> = self.segment(id).pieces.iter().map(|piece| piece.range.len() as u64).collect();
        pieces.into_iter().for_each(|elements| self.free_gathered(elements));
    }

    /// Adds a buffer of the working dtype on the host.
    pub(super) fn blank(&mut self, elements: u64) {
        match self.is_half() {
            true => self.meter.add(Category::Staging, elements * 2),
            false => self.take_on_host(Category::Staging, elements),
        }
    }

    pub(super) fn reuse(&mut self, elements: u64) {
        match self.is_half() {
            true => self.meter.free(Category::Staging, elements * 2),
            false => self.give_on_host(Category::Staging, elements),
        }
    }

    pub(super) fn refresh(&mut self, id: SegmentId) {
        let flat = self.flat(id);
        self.meter.add_at(Category::Staging, flat, true);
        for elements in self.refreshed(id) {
            match self.on_gpu().gathers {
                true => self.add_gathered(elements),
                false => self.blank(elements),
            }
        }
    }

    pub(super) fn await_refresh(&mut self, id: SegmentId) {
        let flat = self.flat(id);
        self.meter.free_at(Category::Staging, flat, true);
        for elements in self.refreshed(id) {
            match self.on_gpu().gathers {
                true => self.free_gathered(elements),
                false => self.reuse(elements),
            }
        }
    }

    /// Returns the sizes, in elements, of the temporary buffers that a refresh needs: it gathers a segment's parameters
    /// again after an update of their shards.
    fn refreshed(&self, id: SegmentId) -> Vec<u64> {
        let on_gpu = self.on_gpu();
        if on_gpu.layers && self.work.layout.ranks() == 1 {
            return vec![];
        }
        let is_gathered_in_place = self.segment(id).only_parameter().is_some() && (on_gpu.gathers || !on_gpu.layers);
        if is_gathered_in_place { vec![self.shard(id)] } else { vec![self.shard(id), self.elements(id)] }
    }

    /// Takes two buffers for an outer step: a copy of the parameters that this rank updates, and the sum for its share
    /// of these parameters.
    pub(super) fn outer_step(&mut self, id: SegmentId) {
        let own = self.part(id, self.segment(id).placements.optimizer);
        self.take_on_host(Category::Staging, own);
        self.take_on_host(Category::Staging, self.outer_share(id).map_or(0, |(share, _)| share));
    }

    pub(super) fn await_outer_step(&mut self, id: SegmentId) {
        let own = self.part(id, self.segment(id).placements.optimizer);
        self.give_on_host(Category::Staging, self.outer_share(id).map_or(0, |(share, _)| share));
        self.give_on_host(Category::Staging, own);
    }
}
