//! The properties of a model that programs depend on: the segments of each layer and their placement.

use crate::ids::{LayerId, SegmentId};
use crate::tier::Tiers;

/// ZeRO stage: DeepSpeed's `zero_optimization.stage`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ZeroStage {
    /// Nothing is sharded: plain data parallelism.
    Zero,
    /// The optimizer state is sharded.
    One,
    /// The optimizer state and the gradients are sharded.
    Two,
    /// The optimizer state, the gradients and the parameters are sharded.
    Three,
}

impl ZeroStage {
    /// Returns the ZeRO stage for a number from 0 to 3, and `None` for any other.
    #[must_use]
    pub fn from_number(stage: u8) -> Option<Self> {
        [Self::Zero, Self::One, Self::Two, Self::Three].get(usize::from(stage)).copied()
    }

    /// Returns the number of the stage.
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Returns the placements that define the stage.
    #[must_use]
    pub fn placements(self) -> Placements {
        let from = |stage| if self >= stage { Placement::Sharded } else { Placement::Replicated };
        Placements { parameters: from(Self::Three), gradients: from(Self::Two), optimizer: from(Self::One) }
    }
}

/// Whether a value is replicated or sharded over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank holds the whole value.
    Replicated,
    /// Every rank holds its shard.
    Sharded,
}

/// The three placements that define a ZeRO stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Placements {
    /// Placement of the working parameters.
    pub parameters: Placement,
    /// Placement of the accumulated gradients.
    pub gradients: Placement,
    /// Placement of the optimizer state and the master parameters.
    pub optimizer: Placement,
}

impl Placements {
    /// Returns whether every rank holds the whole parameters but updates only its part of them.
    #[must_use]
    pub fn need_refresh(self) -> bool {
        self.parameters == Placement::Replicated && self.optimizer == Placement::Sharded
    }
}

/// The properties of a layer that programs depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerShape {
    /// Name of the layer.
    pub name: String,
    /// Segments with parameters that the layer uses, both its own and tied ones.
    pub segments: Vec<SegmentId>,
    /// The subset of `segments` with parameters that the backward reads.
    pub read_backward: Vec<SegmentId>,
    /// Whether the layer's backward can defer the gradients of its weights.
    pub splits: bool,
    /// Whether the layer takes named inputs of the micro-batch.
    pub reads_batch: bool,
    /// The groups of ranks with which the layer's forward and backward exchange values.
    pub exchanges: Exchanges,
}

/// Groups of ranks with which a layer exchanges values in the middle of a computation. All ranks of such a group run
/// the same computation at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Exchanges {
    /// The context group, whose ranks have slices of the same sequences.
    pub context: bool,
    /// The tensor group, whose ranks have parts of the layer.
    pub tensor: bool,
}

/// The properties of a segment that programs depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentShape {
    /// Number of elements.
    pub elements: usize,
    /// Whether its parameters, gradients and optimizer state are replicated or sharded over the ranks.
    pub placements: Placements,
    /// Memory tiers of each rank's part of the parameters, gradients and optimizer state.
    pub tiers: Tiers,
    /// Whether the near groups hold secondary shards of its parameters (hpZ).
    pub has_secondary: bool,
    /// Whether training changes the parameters. A frozen segment has no gradient and no optimizer state.
    pub is_trainable: bool,
}

/// The properties of a model that programs depend on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelShape {
    /// Layers in the order of the forward pass.
    pub layers: Vec<LayerShape>,
    /// Segments, each used by at least one layer.
    pub segments: Vec<SegmentShape>,
}

impl ModelShape {
    /// Returns whether the forward of `layer` needs its micro-batch loaded. The first layer takes the inputs, the last
    /// layer the targets, and other layers the inputs that they name.
    #[must_use]
    pub fn loads(&self, layer: LayerId) -> bool {
        layer == 0 || layer + 1 == self.layers.len() || self.layers[layer].reads_batch
    }

    /// Returns whether `layer` has a trainable segment.
    #[must_use]
    pub fn trains(&self, layer: LayerId) -> bool {
        self.layers[layer].segments.iter().any(|&segment| self.segments[segment].is_trainable)
    }

    /// Returns the first layer with a trainable segment. The layers before it run forward only.
    #[must_use]
    pub fn first_trained(&self) -> LayerId {
        (0..self.layers.len()).find(|&layer| self.trains(layer)).unwrap_or(0)
    }

    /// Returns the first layer that uses a segment in the forward pass. The backward reaches this layer last, so it
    /// completes the segment's gradient of a micro-batch.
    #[must_use]
    pub fn first_user(&self, segment: SegmentId) -> Option<LayerId> {
        self.layers.iter().position(|layer| layer.segments.contains(&segment))
    }

    /// Returns the trainable segments whose gradient is complete after the backward of `layer`.
    #[must_use]
    pub fn completed_by(&self, layer: LayerId) -> Vec<SegmentId> {
        let is_complete = |&s: &SegmentId| self.segments[s].is_trainable && self.first_user(s) == Some(layer);
        self.layers[layer].segments.iter().copied().filter(is_complete).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zero_stage_is_three_placements() {
        use Placement::{Replicated as R, Sharded as S};
        let expected = [(R, R, R), (R, R, S), (R, S, S), (S, S, S)];
        for (stage, (parameters, gradients, optimizer)) in expected.into_iter().enumerate() {
            let stage = ZeroStage::from_number(stage as u8).unwrap();
            assert_eq!(stage.placements(), Placements { parameters, gradients, optimizer });
        }
        assert_eq!(ZeroStage::from_number(4), None);
    }
}
