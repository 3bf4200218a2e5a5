//! Where bytes live, and what moves between memory and a disk.

use std::fmt;

use crate::instruction::{LayerId, SegmentId};

/// Where something lives while nobody uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Tier {
    /// In memory. On a machine without accelerators the device's memory and the host's are the same.
    #[default]
    Memory,
    /// On an NVMe disk.
    Nvme,
}

/// The tiers of a segment: each rank's part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Tiers {
    /// Of its working parameters, which must be sharded if that is a disk.
    pub parameters: Tier,
    /// Of its accumulated gradients, which must be sharded and in order of arrival if that is a disk.
    pub gradients: Tier,
    /// Of its optimizer state and master parameters.
    pub optimizer: Tier,
    /// In how many parts the optimizer step goes, as many on each rank. With all in memory it goes in one, and this is 0; if any
    /// of the three is on a disk, it is at least 1.
    pub tiles: usize,
}

/// What is moved at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Item {
    /// This rank's shard of a segment's working parameters. A gather uses it up; what is on the disk stays.
    Parameters {
        /// Which segment.
        segment: SegmentId,
    },
    /// This rank's accumulated gradients of a segment.
    Gradients {
        /// Which segment.
        segment: SegmentId,
    },
    /// What the optimizer step needs of a part of this rank's share of a segment, as far as it is on the disk: state, masters,
    /// gradients, parameters.
    Tile {
        /// Which segment.
        segment: SegmentId,
        /// Which of its tiles.
        index: usize,
    },
    /// Inputs of a layer that is run again.
    Activations {
        /// Which layer.
        layer: LayerId,
        /// Of which micro-batch.
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
