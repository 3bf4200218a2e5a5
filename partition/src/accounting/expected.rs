//! Predicts the exact costs of a program and a layout: bytes of state and bytes sent.

use std::iter::Sum;
use std::ops::Range;

use zero_pipeline::{
    Action, Content, Coordinates, Instruction, Mesh, Message, Placement, Program, SegmentId, Stages, Tier, Transfer,
    ZeroStage,
};

use crate::coded::CodedLevel;
use crate::layout::Layout;
use crate::options::{Widths, ZeroOptions};

/// State of one rank in memory, in bytes, at its peak between the backward and the update. State on a disk is not
/// counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateBytes {
    /// Working parameters that stay in memory, including secondary shards, and master copies.
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

/// Returns the bytes of state of the rank at `at`, for the segments that its pipeline stage uses. `widths` are the
/// bytes per element: [`ZeroOptions::widths`].
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
        bytes.parameters += (segment.secondary_shard(at.shard).len() * width) as u64;
        if stages.owner(id) != at.stage || !segment.is_trainable {
            bytes.parameters += (held(placements.parameters, tiers.parameters) * width) as u64;
            continue;
        }
        let own = held(placements.optimizer, tiers.optimizer);
        bytes.parameters += (held(placements.parameters, tiers.parameters) * width + own * widths.master) as u64;
        bytes.gradients += (held(placements.gradients, tiers.gradients) * widths.gradient) as u64;
        bytes.optimizer += segment.state_bytes(own, widths) as u64;
        bytes.optimizer += widths.outer.map_or(0, |share| share.of(own).len() * share.width) as u64;
    }
    bytes
}

/// Returns the bytes of state by the closed formula, for `elements` (Ψ) trainable f32 parameters with two optimizer
/// states (Adam) on N ranks: 16Ψ, 8Ψ + 8Ψ/N, 4Ψ + 12Ψ/N and 16Ψ/N at stages 0 to 3.
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

/// Bytes that a rank sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Payload {
    /// Bytes for the other ranks of the rank's near group: consecutive ranks of its shard group on one host. An
    /// undivided shard group is one near group.
    pub within: u64,
    /// Bytes for all other ranks.
    pub across: u64,
}

impl Payload {
    /// Returns the sum.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.within + self.across
    }

    /// Counts `elements` of `width` bytes each, `within` of which go to the near group.
    fn of(within: usize, elements: usize, width: usize) -> Self {
        Self { within: (within * width) as u64, across: ((elements - within) * width) as u64 }
    }
}

impl Sum for Payload {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        let add = |a: Self, b: Self| Self { within: a.within + b.within, across: a.across + b.across };
        parts.fold(Self::default(), add)
    }
}

/// Returns the payload bytes that the rank at `at` sends in a program's gathers, reductions, refreshes and messages.
/// `width` is the width in bytes of the working dtype. `activations` returns the bytes of a message with activations or
/// their gradients, because the layout does not contain their shapes. The result excludes the all-reduces of the
/// gradient norm and of the loss, which take about a kilobyte for any model, and the all-reduce of the norms of LAMB
/// and Adafactor, which takes 1,120 bytes for each parameter tensor.
#[must_use]
pub fn expected_payload(
    program: &Program,
    layout: &Layout,
    (mesh, at): (Mesh, Coordinates),
    width: usize,
    options: &ZeroOptions,
    activations: impl Fn(&Content) -> usize,
) -> Payload {
    let segment = |id: SegmentId| &layout.segments()[id];
    let (near, hosted) = (mesh.near() - 1, mesh.near_shards(at));
    let shard = |id: SegmentId| segment(id).shard(at.shard).len();
    let elements = |id: SegmentId| segment(id).elements();
    let (working, width) = (width, |id: SegmentId| segment(id).width(width));
    // A gather sends the rank's shard to every other rank. A reduce-scatter sends every range except the rank's own to
    // its owner.
    let gathered = |id: SegmentId| {
        let (own, codes) = (segment(id).shard(at.shard), segment(id).gathered_as(options.coded));
        let bytes = codes.map_or(own.len() * width(id), |codes| segment(id).code_bytes(codes, &own));
        Payload::of(bytes * near, bytes * (mesh.shards() - 1), 1)
    };
    let secondary = |id: SegmentId| {
        let sent = segment(id).secondary_shard(at.shard).len() * near;
        Payload::of(sent, sent, width(id))
    };
    // The replicates of a shard all-reduce the reduced gradients, either after each micro-batch or once, as a sum,
    // after the last micro-batch.
    let replicates_sum = |micro_batch| layout.replicates_sum(options, micro_batch, program.micro_batches);
    let replicated = |id: SegmentId, micro_batch: usize| match replicates_sum(micro_batch) {
        true => all_reduced(shard(id), 0..mesh.replicates(), mesh.replicates(), at.replicate),
        false => 0,
    };
    let coded = |id: SegmentId, levels: &[CodedLevel]| {
        let leaving = |level: &CodedLevel| level.leaving(segment(id));
        let within = levels.iter().filter(|level| level.is_near).map(leaving).sum();
        Payload::of(within, levels.iter().map(leaving).sum(), 1)
    };
    let reduced = |id: SegmentId, micro_batch: usize| {
        let levels = segment(id).reduced_as(options.coded, mesh, at);
        if !levels.is_empty() {
            let replicated = replicated(id, micro_batch) * options.communication.size_in_bytes();
            return [coded(id, &levels), Payload::of(0, replicated, 1)].into_iter().sum();
        }
        let (within, sent) = match segment(id).placements.optimizer {
            Placement::Sharded if options.reduce_scatter && mesh.shards() > 1 => {
                let bounds = &segment(id).bounds;
                (
                    bounds[hosted.end] - bounds[hosted.start] - shard(id),
                    elements(id) - shard(id) + replicated(id, micro_batch),
                )
            }
            _ => {
                let (ranks, replica) = (mesh.data(), mesh.replica(at));
                let first = replica - (at.shard - hosted.start);
                let to = |members| all_reduced(elements(id), members, ranks, replica);
                (to(first..first + mesh.near()), to(0..ranks))
            }
        };
        Payload::of(within, sent, options.communication.size_in_bytes())
    };
    let outer = |id: SegmentId| {
        let own = segment(id).held(segment(id).placements.optimizer, at.shard).len();
        Payload::of(0, options.outer.map_or(0, |outer| outer.share.sent_bytes(own)), 1)
    };
    let of_instruction = |instruction: &Instruction| match instruction.effects().action {
        Action::Starts(Transfer::Gather(segments) | Transfer::Refresh(segments)) => {
            segments.iter().map(|&id| gathered(id)).sum()
        }
        Action::Starts(Transfer::GatherSecondary(segments)) => segments.iter().map(|&id| secondary(id)).sum(),
        Action::Starts(Transfer::Reduce(segments, micro_batch)) => {
            segments.iter().map(|&id| reduced(id, micro_batch)).sum()
        }
        Action::Starts(Transfer::OuterStep(&id)) => outer(id),
        Action::Starts(Transfer::Send(message)) => {
            Payload::of(0, message_bytes(message, layout, at, working, &activations), 1)
        }
        _ => Payload::default(),
    };
    program.instructions.iter().map(of_instruction).sum()
}

/// Returns the payload bytes that a rank sends per step when its tensor group sums the gradients of parameters that are
/// not cut. `at` is the rank's position in its plane. `index` is its position in the group of `ranks` ranks.
#[must_use]
pub fn expected_tensor_sum(
    (layout, stages): (&Layout, &Stages),
    at: Coordinates,
    (index, ranks): (usize, usize),
) -> u64 {
    if ranks == 1 {
        return 0;
    }
    (all_reduced(shared_elements((layout, stages), at), 0..ranks, ranks, index) * size_of::<f32>()) as u64
}

/// Returns the number of elements that the rank at `at` updates in parameters that are not cut.
#[must_use]
pub fn shared_elements((layout, stages): (&Layout, &Stages), at: Coordinates) -> usize {
    let segments = layout.segments().iter().enumerate();
    let summed = segments.filter(|(id, of)| of.is_shared && of.is_trainable && stages.owner(*id) == at.stage);
    summed.map(|(_, segment)| segment.held(segment.placements.optimizer, at.shard).len()).sum()
}

/// Returns the bytes of a message that the rank at `at` sends. `width` and `activations` are as in
/// [`expected_payload`].
pub(crate) fn message_bytes(
    message: &Message,
    layout: &Layout,
    at: Coordinates,
    width: usize,
    activations: impl Fn(&Content) -> usize,
) -> usize {
    let segment = |id: SegmentId| &layout.segments()[id];
    match message.content {
        content @ (Content::Activations { .. } | Content::Gradients { .. }) => activations(&content),
        Content::TiedGradient { segment: id, .. } => segment(id).elements() * 4,
        Content::TiedParameters { segment: id } => {
            segment(id).held(segment(id).placements.parameters, at.shard).len() * segment(id).width(width)
        }
    }
}

/// Returns the number of elements that rank `rank` of `ranks` sends to the ranks `members` in an all-reduce. `members`
/// includes the rank itself. The rank first sends every other member the range that this member reduces, and later
/// sends all of them its own reduced range. As in the communicators, ranges differ by at most one element, and the
/// longer ones come first.
fn all_reduced(elements: usize, members: Range<usize>, ranks: usize, rank: usize) -> usize {
    let range = |rank: usize| elements / ranks + usize::from(rank < elements % ranks);
    let others = members.filter(|&other| other != rank);
    others.map(|other| range(other) + range(rank)).sum()
}
