//! Segments and shards: the flat range of parameters that each rank holds.
//!
//! A *segment* is a flat parameter: parameters of one layer concatenated in the order of construction, without padding.
//! A layer has up to four kinds of segments: one for its ordinary parameters; one for its parameters that are small
//! enough to stay gathered at stage 3 (`stage3_param_persistence_threshold`); one for each parameter tied to other
//! layers, so that those layers gather only that parameter; and one for each large parameter. A large parameter is
//! gathered directly into the storage of its leaf, whereas a segment with several parameters is gathered into one
//! buffer and copied out of it. Trainable and frozen parameters never share a segment, and neither do parameters of
//! different optimizers. Three kinds of parameters always have their own segment: a quantized parameter, a matrix that
//! the optimizer updates as a whole, and a parameter with 8-bit optimizer states. If the ranks of a tensor group cut
//! some parameters, the parameters that each rank holds whole have separate segments, because their gradients are
//! summed over the group.
//!
//! A rank's shard is a contiguous range of the segment. Shard boundaries fall on multiples of 1,024 elements counted
//! from the start of each parameter, or on the ends of parameters. A shard's contribution to the gradient norm is then
//! a sum of whole blocks, so the norm does not depend on the number of ranks.
//!
//! Near groups can hold *secondary shards* (hpZ of ZeRO++: Wang et al., "ZeRO++: Extremely Efficient Collective
//! Communication for Giant Model Training", arXiv 2306.10209, section 4.2): each near group holds all parameters a
//! second time, in the working dtype. A secondary shard consists of consecutive shards, so its boundaries are shard
//! boundaries.
//!
//! A matrix that is updated as a whole is not cut: one rank, its owner, holds all of it as its shard. Its gradient is
//! therefore reduced to the owner, and the owner's update is gathered. Both use the same collectives as other segments.
//! The layout chooses owners in the order of the layers, each time the rank with the least work so far.

mod tiers;

use std::collections::BTreeSet;

use candle_core::DType;
use zero_model::{Model, Parameter, ParameterId};
use zero_optim::norm::BLOCK;
use zero_pipeline::{Exchanges, LayerShape, ModelShape, Placement, Placements, SegmentShape, Tier, Tiers, ZeroStage};

use crate::accumulator::Order;
use crate::options::ZeroOptions;
use crate::segment::{Matrix, Piece, Segment};
pub use tiers::{PAGE, TierOptions};

/// Minimum number of elements of a parameter that gets its own segment as a large parameter. Copying such a parameter
/// would cost more than a separate collective.
const LARGE: usize = 1 << 18;

/// Options for grouping and placing parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutOptions {
    /// `zero_optimization.stage`.
    pub zero_stage: ZeroStage,
    /// Number of ranks of a shard group.
    pub ranks: usize,
    /// Number of ranks of a near group, if near groups hold secondary shards; a divisor of `ranks`.
    pub secondary: Option<usize>,
    /// Number of ranks of a tensor group.
    pub tensor: usize,
    /// Maximum elements of a parameter that stays gathered at stage 3.
    pub persistence_threshold: usize,
    /// Maximum total elements of parameters that stay gathered at stage 3.
    pub model_persistence_threshold: usize,
}

/// All segments of a model, sharded over a number of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    segments: Vec<Segment>,
    shape: ModelShape,
    ranks: usize,
    secondary: Option<usize>,
    /// Number of elements per tile of offloaded segments.
    tile: usize,
}

impl Layout {
    /// Groups a model's parameters into segments and shards them.
    ///
    /// # Panics
    /// Panics if `options.ranks` is 0 or not a multiple of `options.secondary`.
    #[must_use]
    pub fn new(model: &Model, options: &LayoutOptions) -> Self {
        assert!(options.ranks > 0, "a layout needs at least one rank");
        let near = options.secondary.unwrap_or(options.ranks);
        assert!(near > 0 && options.ranks.is_multiple_of(near), "near groups must divide a shard group");
        // In a near group of one rank or of all ranks, secondary shards would only duplicate values that are already in
        // memory.
        let options =
            &LayoutOptions { secondary: options.secondary.filter(|_| 1 < near && near < options.ranks), ..*options };
        let persistent = persistent(model, options);
        let is_shared = |p: ParameterId| options.tensor > 1 && model.parameters()[p].cut().is_none();
        let mut work = vec![0; options.ranks];
        let mut segments: Vec<Segment> = vec![];
        for (index, layer) in model.layers().iter().enumerate() {
            let owned = || layer.uses().iter().copied().filter(|&p| model.parameters()[p].layer() == index);
            let is_tied = |p: ParameterId| model.layers().iter().filter(|l| l.uses().contains(&p)).count() > 1;
            let is_large = |p: ParameterId| model.parameters()[p].elements() >= LARGE;
            let is_quantized = |p: ParameterId| model.parameters()[p].quantization().is_some();
            let is_alone = |p: ParameterId| {
                let parameter = &model.parameters()[p];
                // 8-bit states have their own format, and their blocks begin with the parameter.
                let is_whole = is_quantized(p) || parameter.is_matrix() || parameter.tuning().eight_bit;
                is_tied(p) || is_whole || (is_large(p) && !persistent[p])
            };
            let mut groups: Vec<(String, Vec<ParameterId>)> = vec![];
            // Trainable parameters come first, grouped by optimizer, and then frozen ones.
            let kind = |p: ParameterId| match model.parameters()[p].is_trainable() {
                true => (false, model.parameters()[p].tuning().optimizer, is_shared(p)),
                false => (true, 0, is_shared(p)),
            };
            for of in owned().map(kind).collect::<BTreeSet<_>>() {
                let more = match of {
                    (false, 0, _) => String::new(),
                    (false, optimizer, _) => format!(" (optimizer {optimizer})"),
                    (true, ..) => " (frozen)".to_string(),
                };
                let more = if of.2 { format!("{more} (whole)") } else { more };
                let owned = || owned().filter(|&p| kind(p) == of && !is_alone(p));
                groups.push((format!("{}{more}", layer.name()), owned().filter(|&p| !persistent[p]).collect()));
                groups.push((
                    format!("{} (persistent){more}", layer.name()),
                    owned().filter(|&p| persistent[p]).collect(),
                ));
            }
            groups
                .extend(owned().filter(|&p| is_alone(p)).map(|p| (model.parameters()[p].name().to_string(), vec![p])));
            for (name, parameters) in groups.into_iter().filter(|(_, parameters)| !parameters.is_empty()) {
                let mut placements = options.zero_stage.placements();
                if persistent[parameters[0]] {
                    placements.parameters = Placement::Replicated;
                }
                let mut segment = segment(model, name, index, &parameters, placements, options.ranks);
                segment.is_shared = is_shared(parameters[0]);
                if let Some(matrix) = &segment.matrix {
                    let owner = (0..options.ranks).min_by_key(|&rank| work[rank]).unwrap_or(0);
                    work[owner] += matrix.states.multiply_adds;
                    let elements = segment.elements();
                    segment.bounds = (0..=options.ranks).map(|r| if r > owner { elements } else { 0 }).collect();
                }
                if let (Some(near), Placement::Sharded) = (options.secondary, placements.parameters) {
                    segment.secondary = segment.bounds.iter().copied().step_by(options.ranks / near).collect();
                }
                segments.push(segment);
            }
        }
        let shape = shape(model, &segments);
        Self { segments, shape, ranks: options.ranks, secondary: options.secondary, tile: PAGE }
    }

    /// Returns the segments, in the order of the layers that own them.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the model shape used by schedules and passes.
    #[must_use]
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Returns whether any segment is offloaded to a disk.
    #[must_use]
    pub fn uses_disk(&self) -> bool {
        self.segments.iter().any(|segment| segment.tiers != Tiers::default())
    }

    /// Returns the number of elements per tile of offloaded segments.
    #[must_use]
    pub fn tile(&self) -> usize {
        self.tile
    }

    /// Returns whether sharded gradients are first summed over the micro-batches and then once over the replicates of a
    /// shard. This second sum runs while further backwards run. Returns `false` if the sums follow a tree, if gradients
    /// are on a disk, or if a step has a single micro-batch whose gradient would be rounded before the second sum. The
    /// gradients of each micro-batch are then summed over the replicates.
    #[must_use]
    pub fn sums_before_replicates(&self, options: &ZeroOptions, micro_batches: usize) -> bool {
        let is_exact = options.gradient_dtype == DType::F32 || options.gradient_dtype == options.communication;
        let may_wait = if micro_batches > 1 { options.order == Order::Arrival } else { is_exact };
        let waits = |segment: &Segment| {
            segment.placements.gradients == Placement::Sharded && segment.tiers.gradients == Tier::Memory
        };
        may_wait && self.segments.iter().filter(|segment| segment.is_trainable).all(waits)
    }

    /// Returns whether the reduction of a micro-batch includes the sum over the replicates of a shard.
    #[must_use]
    pub fn replicates_sum(&self, options: &ZeroOptions, micro_batch: usize, micro_batches: usize) -> bool {
        micro_batch + 1 == micro_batches || !self.sums_before_replicates(options, micro_batches)
    }

    /// Returns the number of ranks of a shard group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the number of ranks of a near group, if near groups hold secondary shards.
    #[must_use]
    pub fn secondary(&self) -> Option<usize> {
        self.secondary
    }

    /// Returns the number of elements of all parameters: Ψ in the ZeRO paper.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.segments.iter().map(Segment::parameters).sum()
    }

    /// Returns the number of trainable elements.
    #[must_use]
    pub fn trainable(&self) -> usize {
        self.segments.iter().filter(|segment| segment.is_trainable).map(Segment::elements).sum()
    }
}

/// Selects the parameters that stay gathered, by DeepSpeed's rule: in order, up to the model's threshold.
fn persistent(model: &Model, options: &LayoutOptions) -> Vec<bool> {
    let mut kept = 0usize;
    let mut mark = |elements: usize| {
        let keep = options.zero_stage == ZeroStage::Three
            && elements <= options.persistence_threshold
            && kept.saturating_add(elements) <= options.model_persistence_threshold;
        kept += if keep { elements } else { 0 };
        keep
    };
    let mut is_kept = |parameter: &Parameter| parameter.quantization().is_none() && mark(parameter.elements());
    model.parameters().iter().map(&mut is_kept).collect()
}

fn segment(
    model: &Model,
    name: String,
    layer: usize,
    parameters: &[ParameterId],
    placements: Placements,
    ranks: usize,
) -> Segment {
    let mut end = 0;
    let pieces: Vec<Piece> = parameters
        .iter()
        .map(|&parameter| {
            let start = end;
            end += model.parameters()[parameter].stored_elements();
            Piece { parameter, range: start..end }
        })
        .collect();
    let quantization = parameters.first().and_then(|&parameter| model.parameters()[parameter].quantization());
    let unit = quantization.map_or(BLOCK, |quantization| quantization.record_bytes());
    let bounds = cut(&pieces, end, ranks, unit);
    let is_trainable = parameters.iter().any(|&parameter| model.parameters()[parameter].is_trainable());
    let matrix = parameters.first().and_then(|&parameter| {
        let parameter = &model.parameters()[parameter];
        let states = parameter.matrix()?.clone();
        Some(Matrix { shape: parameter.shape().dims2().ok()?.into(), states })
    });
    let tuning = parameters.first().map(|&parameter| model.parameters()[parameter].tuning()).unwrap_or_default();
    Segment {
        name,
        layer,
        pieces,
        bounds,
        secondary: vec![],
        placements,
        tiers: Tiers::default(),
        is_trainable,
        is_shared: false,
        quantization,
        matrix,
        is_eight_bit: tuning.eight_bit,
        two_passes: tuning.two_passes,
        optimizer: tuning.optimizer,
    }
}

/// Returns the shard boundaries for shards of nearly equal size. Each boundary is a multiple of `unit` from the start
/// of its piece, or the end of a piece.
fn cut(pieces: &[Piece], elements: usize, ranks: usize, unit: usize) -> Vec<usize> {
    let nearest = |target: usize| {
        let piece = pieces.iter().find(|p| p.range.end >= target).map_or(0..elements, |p| p.range.clone());
        let below = piece.start + (target - piece.start) / unit * unit;
        let above = (below + unit).min(piece.end);
        if target - below <= above - target { below } else { above }
    };
    (0..=ranks).map(|rank| if rank == ranks { elements } else { nearest(elements * rank / ranks) }).collect()
}

fn shape(model: &Model, segments: &[Segment]) -> ModelShape {
    let of_parameter = |p: ParameterId| segments.iter().position(|s| s.pieces.iter().any(|piece| piece.parameter == p));
    let layers = model
        .layers()
        .iter()
        .map(|layer| {
            let of_parameters = |parameters: &[ParameterId]| {
                let mut needed: Vec<usize> = parameters.iter().filter_map(|&p| of_parameter(p)).collect();
                needed.sort_unstable();
                needed.dedup();
                needed
            };
            LayerShape {
                name: layer.name().to_string(),
                segments: of_parameters(layer.uses()),
                read_backward: of_parameters(layer.read_backward()),
                splits: layer.splits(),
                reads_batch: !layer.route().reads().is_empty(),
                exchanges: Exchanges { context: layer.exchanges(), tensor: layer.exchanges_parts() },
            }
        })
        .collect();
    let segments = segments
        .iter()
        .map(|s| SegmentShape {
            elements: s.elements(),
            placements: s.placements,
            tiers: s.tiers,
            has_secondary: s.has_secondary(),
            is_trainable: s.is_trainable,
        })
        .collect();
    ModelShape { layers, segments }
}
