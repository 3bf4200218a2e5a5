//! What a program needs to know about a model: which layer needs which segments, and where those live.

use crate::instruction::{LayerId, SegmentId};
use crate::tier::Tiers;

/// DeepSpeed's `zero_optimization.stage`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ZeroStage {
    /// Everything replicated: plain data parallelism.
    Zero,
    /// Optimizer state sharded.
    One,
    /// Optimizer state and gradients sharded.
    Two,
    /// Optimizer state, gradients and parameters sharded.
    Three,
}

impl ZeroStage {
    /// The stage of a number from 0 to 3.
    #[must_use]
    pub fn from_number(stage: u8) -> Option<Self> {
        [Self::Zero, Self::One, Self::Two, Self::Three].get(usize::from(stage)).copied()
    }

    /// The number of the stage.
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The placements that the stage stands for.
    #[must_use]
    pub fn placements(self) -> Placements {
        let from = |stage| if self >= stage { Placement::Sharded } else { Placement::Replicated };
        Placements { parameters: from(Self::Three), gradients: from(Self::Two), optimizer: from(Self::One) }
    }
}

/// Whether every rank has all of something or a shard of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank has all of it.
    Replicated,
    /// Every rank has its shard.
    Sharded,
}

/// The three placements that make a ZeRO stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Placements {
    /// Of the working parameters.
    pub parameters: Placement,
    /// Of the accumulated gradients.
    pub gradients: Placement,
    /// Of the optimizer state, and of the master parameters.
    pub optimizer: Placement,
}

/// A layer, as a program sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerShape {
    /// Its name.
    pub name: String,
    /// Segments whose parameters it needs, its own and tied ones.
    pub segments: Vec<SegmentId>,
    /// Those of them whose parameters its backward reads.
    pub read_backward: Vec<SegmentId>,
    /// Whether its backward can put off the gradients of its weights.
    pub splits: bool,
}

/// A segment, as a program sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentShape {
    /// Number of elements.
    pub elements: usize,
    /// Over which ranks its parameters, gradients and optimizer state are spread.
    pub placements: Placements,
    /// Where this rank's parts of them live.
    pub tiers: Tiers,
}

/// A model, as a program sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelShape {
    /// In the order of the forward pass.
    pub layers: Vec<LayerShape>,
    /// Every segment is needed by at least one layer.
    pub segments: Vec<SegmentShape>,
}

impl ModelShape {
    /// The layer after whose backward the segment's gradient of a micro-batch is complete: the first one that
    /// uses it in the forward pass.
    #[must_use]
    pub fn first_user(&self, segment: SegmentId) -> Option<LayerId> {
        self.layers.iter().position(|layer| layer.segments.contains(&segment))
    }

    /// Segments whose gradient is complete after the backward of `layer`.
    #[must_use]
    pub fn completed_by(&self, layer: LayerId) -> Vec<SegmentId> {
        self.layers[layer].segments.iter().copied().filter(|&s| self.first_user(s) == Some(layer)).collect()
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
