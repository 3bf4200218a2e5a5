//! Predicts the exact costs of a program and a layout: bytes of state and bytes sent.

use zero_pipeline::{
    Action, Content, Coordinates, Mesh, Placement, Program, SegmentId, Stages, Tier, Transfer, ZeroStage,
};

use crate::layout::Layout;
use crate::zero::{Widths, ZeroOptions};

/// State of one rank in memory, in bytes, at its peak between the backward and the update. State on a disk is not
/// counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateBytes {
    /// Persistent working parameters, and master copies.
    pub parameters: u64,
    /// Accumulated gradients.
    pub gradients: u64,
    /// Optimizer state and averages.
    pub optimizer: u64,
}

impl StateBytes {
    /// Returns the sum.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer
    }
}

/// Returns the state of the rank at `at`, for the segments that its pipeline stage uses: [`ZeroOptions::widths`] of each
/// element.
#[must_use]
pub fn expected_state(layout: &Layout, stages: &Stages, at: Coordinates, widths: &Widths) -> StateBytes {
    let mut bytes = StateBytes { parameters: 0, gradients: 0, optimizer: 0 };
    for (id, segment) in layout.segments().iter().enumerate().filter(|&(id, _)| stages.holds(at.stage, id)) {
        let held = |placement, tier| match (tier, placement) {
            (Tier::Nvme, _) => 0,
            (Tier::Memory, Placement::Replicated) => segment.elements(),
            (Tier::Memory, Placement::Sharded) => segment.shard(at.shard).len(),
        };
        let (placements, tiers) = (segment.placements, segment.tiers);
        let width = segment.width(widths.parameter);
        if stages.owner(id) != at.stage || !segment.is_trainable {
            bytes.parameters += (held(placements.parameters, tiers.parameters) * width) as u64;
            continue;
        }
        let own = held(placements.optimizer, tiers.optimizer);
        bytes.parameters += (held(placements.parameters, tiers.parameters) * width + own * widths.master) as u64;
        bytes.gradients += (held(placements.gradients, tiers.gradients) * widths.gradient) as u64;
        bytes.optimizer += segment.state_bytes(own, widths) as u64;
    }
    bytes
}

/// Returns the closed form for `elements` trainable f32 parameters and two optimizer states (Adam): 16Ψ, 8Ψ + 8Ψ/N,
/// 4Ψ + 12Ψ/N, 16Ψ/N.
///
/// Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
/// section 5, with f32 in place of mixed precision.
#[must_use]
pub fn state_formula(zero_stage: ZeroStage, elements: usize, ranks: usize) -> f64 {
    let (psi, n) = (elements as f64, ranks as f64);
    match zero_stage {
        ZeroStage::Zero => 16.0 * psi,
        ZeroStage::One => 8.0 * psi + 8.0 * psi / n,
        ZeroStage::Two => 4.0 * psi + 12.0 * psi / n,
        ZeroStage::Three => 16.0 * psi / n,
    }
}

/// Returns the payload bytes that the rank at `at` sends in a program's gathers, reductions, refreshes and messages. `width` is
/// the width in bytes of the working dtype. `activations` returns the bytes of a message with activations or their gradients,
/// which the layout does not know. The all-reduces of the gradient norm and of the loss are not included: about a kilobyte for
/// any model. Neither is that of the norms of LAMB and Adafactor, of 1,120 bytes for each parameter tensor.
#[must_use]
pub fn expected_payload(
    program: &Program,
    layout: &Layout,
    (mesh, at): (Mesh, Coordinates),
    width: usize,
    options: &ZeroOptions,
    activations: impl Fn(&Content) -> usize,
) -> u64 {
    let gradient_width = options.communication.size_in_bytes();
    let others = mesh.shards() - 1;
    let shard = |id: SegmentId| layout.segments()[id].shard(at.shard).len();
    let elements = |id: SegmentId| layout.segments()[id].elements();
    // A shard goes to every other rank. In a reduce-scatter, every range but the rank's own goes to its owner.
    let width = |id: SegmentId| layout.segments()[id].width(width);
    let gathered = |id: SegmentId| shard(id) * others * width(id);
    // The replicates of a shard all-reduce it afterwards.
    let scattered = |id: SegmentId| elements(id) - shard(id) + all_reduced(shard(id), mesh.replicates(), at.replicate);
    let reduced = |id: SegmentId| match layout.segments()[id].placements.optimizer {
        Placement::Sharded if options.reduce_scatter && mesh.shards() > 1 => scattered(id) * gradient_width,
        _ => all_reduced(elements(id), mesh.data(), mesh.replica(at)) * gradient_width,
    };
    let bytes: usize = program
        .instructions
        .iter()
        .map(|instruction| match instruction.effects().action {
            Action::Starts(Transfer::Gather(segments) | Transfer::Refresh(segments)) => {
                segments.iter().map(|&id| gathered(id)).sum()
            }
            Action::Starts(Transfer::Reduce(segments, _)) => segments.iter().map(|&id| reduced(id)).sum(),
            Action::Starts(Transfer::Send(message)) => match message.content {
                content @ (Content::Activations { .. } | Content::Gradients { .. }) => activations(&content),
                Content::TiedGradient { segment, .. } => elements(segment) * 4,
                Content::TiedParameters { segment } => match layout.segments()[segment].placements.parameters {
                    Placement::Replicated => elements(segment) * width(segment),
                    Placement::Sharded => shard(segment) * width(segment),
                },
            },
            _ => 0,
        })
        .sum();
    bytes as u64
}

/// Returns the elements that `rank` sends in an all-reduce: the other ranks' ranges to their owners, then its own
/// reduced range to every rank. As in the communicators, ranges differ by at most one element, and the longer ones come
/// first.
fn all_reduced(elements: usize, ranks: usize, rank: usize) -> usize {
    let own = elements / ranks + usize::from(rank < elements % ranks);
    elements - own + own * (ranks - 1)
}
