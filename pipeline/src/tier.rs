//! Memory tiers, and the items that move between memory and a disk.

use std::fmt;

use crate::ids::{LayerId, SegmentId};

/// Where data is stored while it is not in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Tier {
    /// In memory. Without an accelerator, device memory and host memory are the same.
    #[default]
    Memory,
    /// On an NVMe disk.
    Nvme,
}

/// The tiers of each rank's part of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Tiers {
    /// Tier of the working parameters. Parameters on a disk must be sharded.
    pub parameters: Tier,
    /// Tier of the accumulated gradients. Gradients on a disk must be sharded and accumulated in the order in which
    /// they arrive.
    pub gradients: Tier,
    /// Tier of the optimizer state and master parameters.
    pub optimizer: Tier,
    /// Number of tiles in which the optimizer step is processed, equal on all ranks. 0 if everything is in memory, and
    /// at least 1 if parameters, gradients or optimizer state are on a disk.
    pub tiles: usize,
    /// Whether the optimizer step measures all tiles before it updates them.
    pub two_passes: bool,
}

/// A unit that is moved between memory and disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Item {
    /// This rank's shard of a segment's working parameters. A gather consumes the copy in memory; the copy on the disk
    /// stays.
    Parameters {
        /// The segment.
        segment: SegmentId,
    },
    /// This rank's accumulated gradients of a segment.
    Gradients {
        /// The segment.
        segment: SegmentId,
    },
    /// The data on the disk that the optimizer step of one tile needs. It can be optimizer state, master parameters,
    /// gradients and parameters.
    Tile {
        /// The segment.
        segment: SegmentId,
        /// Index of the tile within this rank's part of the segment.
        index: usize,
    },
    /// Inputs of a layer that will be recomputed.
    Activations {
        /// The layer.
        layer: LayerId,
        /// Their micro-batch.
        micro_batch: usize,
    },
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Parameters { segment } => write!(f, "parameters of segment {segment}"),
            Self::Gradients { segment } => write!(f, "gradients of segment {segment}"),
            Self::Tile { segment, index } => write!(f, "tile {index} of segment {segment}"),
            Self::Activations { layer, micro_batch } => {
                write!(f, "inputs of layer {layer} of micro-batch {micro_batch}")
            }
        }
    }
}
