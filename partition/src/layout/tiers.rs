//! Offloads segments to a disk.

use zero_pipeline::{Placement, Placements, Tier, Tiers};

use super::Layout;
use crate::segment::Segment;

/// Options for offloading to a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierOptions {
    /// Offload optimizer state and master parameters, where they are sharded.
    pub optimizer: bool,
    /// Also offload accumulated gradients, where they are sharded.
    pub gradients: bool,
    /// Offload parameters, where they are sharded.
    pub parameters: bool,
    /// Parameter elements per rank that stay in memory even if parameters are offloaded: `max_in_cpu`.
    pub parameters_in_memory: usize,
    /// Elements per tile: `sub_group_size`, rounded up to [`PAGE`]. 0 means the size of a rank's shard of the largest
    /// parameter.
    pub sub_group_size: usize,
    /// Minimum elements per rank of an offloaded segment. Smaller segments stay in memory, because the disk request
    /// would cost more than the memory is worth.
    pub smallest: usize,
}

/// Number of elements whose bytes fill whole disk pages, both in f32 and in 16-bit dtypes.
pub const PAGE: usize = 2048;

impl TierOptions {
    /// Everything in memory.
    pub const MEMORY: Self = Self {
        optimizer: false,
        gradients: false,
        parameters: false,
        parameters_in_memory: 0,
        sub_group_size: PAGE,
        smallest: 0,
    };

    /// Returns the number of elements per tile.
    #[must_use]
    pub fn tile(&self) -> usize {
        self.sub_group_size.max(1).checked_next_multiple_of(PAGE).unwrap_or(usize::MAX / PAGE * PAGE)
    }
}

impl Layout {
    /// Assigns segments to the disk as requested by `options`.
    #[must_use]
    pub fn on_disk(mut self, options: &TierOptions) -> Self {
        // With a `sub_group_size` of 0, DeepSpeed updates parameter by parameter. A tile as large as the largest shard
        // needs no more memory at a time.
        let shards = self.segments.iter().flat_map(|s| &s.pieces).map(|p| p.range.len().div_ceil(self.ranks));
        let largest = shards.max().unwrap_or(0);
        let sub_group_size = if options.sub_group_size == 0 { largest } else { options.sub_group_size };
        self.tile = TierOptions { sub_group_size, ..*options }.tile();
        let tiles: Vec<usize> = self.segments.iter().map(|segment| self.tile_of(segment)).collect();
        let mut kept = 0;
        for ((segment, shape), tile) in self.segments.iter_mut().zip(&mut self.shape.segments).zip(tiles) {
            let held = |placement| match placement {
                Placement::Replicated => segment.elements(),
                Placement::Sharded => segment.counts().into_iter().max().unwrap_or(0),
            };
            let Placements { parameters, gradients, optimizer } = segment.placements;
            let elements = held(optimizer);
            if elements < options.smallest {
                continue;
            }
            let tier = |is_wanted: bool, placement| match is_wanted && placement == Placement::Sharded {
                true => Tier::Nvme,
                false => Tier::Memory,
            };
            let mut moves = options.parameters && parameters == Placement::Sharded;
            if moves && kept + elements <= options.parameters_in_memory {
                kept += elements;
                moves = false;
            }
            let mut tiers = Tiers {
                parameters: tier(moves, parameters),
                // The ranks of a tensor group sum the gradients of whole parameters in memory.
                gradients: tier(
                    options.optimizer && options.gradients && segment.is_trainable && !segment.is_shared,
                    gradients,
                ),
                optimizer: tier(options.optimizer && segment.is_trainable, optimizer),
                ..Tiers::default()
            };
            if tiers != Tiers::default() && segment.is_trainable {
                (tiers.tiles, tiers.two_passes) = (elements.div_ceil(tile), segment.two_passes);
            }
            (segment.tiers, shape.tiers) = (tiers, tiers);
        }
        self
    }

    /// Returns the number of elements per tile of a segment: a matrix that is updated as a whole is one tile.
    pub(crate) fn tile_of(&self, segment: &Segment) -> usize {
        if segment.matrix.is_some() { segment.elements() } else { self.tile }
    }
}
