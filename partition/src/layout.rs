//! Segments and shards: which flat range of which parameters each rank holds.
//!
//! A *segment* is parameters of one layer, one behind the other in the order of construction, without padding.
//! A layer has up to four kinds: its ordinary parameters; those small enough to stay gathered at stage 3
//! (`stage3_param_persistence_threshold`); each parameter that other layers use too (tied), alone, so that
//! those layers gather no more than that; and each large parameter, alone, so that it is gathered into the storage of its
//! leaf, where several would be gathered into one buffer and copied out of it.
//!
//! A rank's shard is a contiguous range of the segment. Cuts fall on blocks of 1,024 elements counted from the
//! start of each parameter, or on parameter ends: then a shard's share of the gradient norm is a sum of whole
//! blocks, and does not depend on the number of ranks.

use std::ops::Range;

use zero_model::{Model, ParameterId};
use zero_optim::norm::BLOCK;
use zero_pipeline::{LayerShape, ModelShape, Placement, Placements, SegmentShape, Tier, Tiers, ZeroStage};

/// From so many elements on a parameter is a segment of its own: copying it would cost more than a collective for it alone.
const LARGE: usize = 1 << 18;

/// What decides how parameters are grouped and placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutOptions {
    /// `zero_optimization.stage`.
    pub zero_stage: ZeroStage,
    /// Data-parallel degree.
    pub ranks: usize,
    /// Parameters of at most this many elements stay gathered at stage 3.
    pub persistence_threshold: usize,
    /// At most this many elements stay gathered because of that.
    pub model_persistence_threshold: usize,
}

/// What lives on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierOptions {
    /// Optimizer state and masters, where they are sharded.
    pub optimizer: bool,
    /// Accumulated gradients too, where they are sharded.
    pub gradients: bool,
    /// Parameters, where they are sharded.
    pub parameters: bool,
    /// Elements of parameters that stay in memory all the same: `max_in_cpu`, of a rank.
    pub parameters_in_memory: usize,
    /// Elements of a tile: `sub_group_size`. It is rounded up to [`PAGE`]; 0 is a rank's shard of the largest parameter.
    pub sub_group_size: usize,
    /// Segments of which each rank has fewer elements stay in memory: a request for them would cost more than it saves.
    pub smallest: usize,
}

/// Elements whose bytes are whole pages of a disk, in f32 and in 16 bits.
pub const PAGE: usize = 2048;

impl TierOptions {
    /// All in memory.
    pub const MEMORY: Self = Self {
        optimizer: false,
        gradients: false,
        parameters: false,
        parameters_in_memory: 0,
        sub_group_size: PAGE,
        smallest: 0,
    };

    /// Elements of a tile.
    #[must_use]
    pub fn tile(&self) -> usize {
        self.sub_group_size.max(1).checked_next_multiple_of(PAGE).unwrap_or(usize::MAX / PAGE * PAGE)
    }
}

/// One parameter inside a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Which parameter.
    pub parameter: ParameterId,
    /// Its range in the segment.
    pub range: Range<usize>,
}

/// Parameters that are placed, gathered and reduced together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// `layer`, `layer (persistent)`, or the parameter's name where it is alone.
    pub name: String,
    /// The layer that owns them.
    pub layer: usize,
    /// In order, without gaps.
    pub pieces: Vec<Piece>,
    /// Shard of rank `r` is `bounds[r]..bounds[r + 1]`.
    pub bounds: Vec<usize>,
    /// Over which ranks its parameters, gradients and optimizer state are spread.
    pub placements: Placements,
    /// Where each rank's parts of them live.
    pub tiers: Tiers,
}

impl Segment {
    /// Its parameter, if it has one only: then the storage of the segment is the storage of the leaf.
    #[must_use]
    pub fn only_parameter(&self) -> Option<ParameterId> {
        match self.pieces[..] {
            [Piece { parameter, .. }] => Some(parameter),
            _ => None,
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.range.end)
    }

    /// The range of a rank's shard.
    #[must_use]
    pub fn shard(&self, rank: usize) -> Range<usize> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// Where `own`, a rank's shard, begins in the reduced gradients that the rank holds: whole where they are replicated, and else that shard.
    #[must_use]
    pub fn begin_in_gradients(&self, own: &Range<usize>) -> usize {
        match self.placements.gradients {
            Placement::Replicated => own.start,
            Placement::Sharded => 0,
        }
    }

    /// Elements of each rank's shard, in the form that collectives want.
    #[must_use]
    pub fn counts(&self) -> Vec<usize> {
        self.bounds.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Parts of parameters that lie in `range`: (parameter, range in the parameter, range in `range`).
    pub fn overlaps(
        &self,
        range: Range<usize>,
    ) -> impl Iterator<Item = (ParameterId, Range<usize>, Range<usize>)> + '_ {
        self.pieces.iter().filter_map(move |piece| {
            let start = piece.range.start.max(range.start);
            let end = piece.range.end.min(range.end);
            (start < end).then(|| {
                let offset = piece.range.start;
                (piece.parameter, start - offset..end - offset, start - range.start..end - range.start)
            })
        })
    }
}

/// All segments of a model, for a number of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    segments: Vec<Segment>,
    shape: ModelShape,
    ranks: usize,
    /// Elements of a tile of what is on a disk.
    tile: usize,
}

impl Layout {
    /// Groups and cuts a model's parameters.
    ///
    /// # Panics
    /// If `options.ranks` is 0.
    #[must_use]
    pub fn new(model: &Model, options: &LayoutOptions) -> Self {
        assert!(options.ranks > 0, "a layout needs at least one rank");
        let persistent = persistent(model, options);
        let mut segments: Vec<Segment> = vec![];
        for (index, layer) in model.layers().iter().enumerate() {
            let owned = || layer.uses().iter().copied().filter(|&p| model.parameters()[p].layer() == index);
            let is_tied = |p: ParameterId| model.layers().iter().filter(|l| l.uses().contains(&p)).count() > 1;
            let is_large = |p: ParameterId| model.parameters()[p].elements() >= LARGE;
            let is_alone = |p: ParameterId| is_tied(p) || (is_large(p) && !persistent[p]);
            let ordinary = owned().filter(|&p| !is_alone(p) && !persistent[p]).collect();
            let kept = owned().filter(|&p| !is_tied(p) && persistent[p]).collect();
            let mut groups: Vec<(String, Vec<ParameterId>)> =
                vec![(layer.name().to_string(), ordinary), (format!("{} (persistent)", layer.name()), kept)];
            groups
                .extend(owned().filter(|&p| is_alone(p)).map(|p| (model.parameters()[p].name().to_string(), vec![p])));
            for (name, parameters) in groups.into_iter().filter(|(_, parameters)| !parameters.is_empty()) {
                let mut placements = options.zero_stage.placements();
                if persistent[parameters[0]] {
                    placements.parameters = Placement::Replicated;
                }
                segments.push(segment(model, name, index, &parameters, placements, options.ranks));
            }
        }
        let shape = shape(model, &segments);
        Self { segments, shape, ranks: options.ranks, tile: PAGE }
    }

    /// The same with what `options` ask for on a disk.
    #[must_use]
    pub fn on_disk(mut self, options: &TierOptions) -> Self {
        // DeepSpeed's 0 updates parameter by parameter: such tiles need no more memory at a time.
        let shards = self.segments.iter().flat_map(|s| &s.pieces).map(|p| p.range.len().div_ceil(self.ranks));
        let largest = shards.max().unwrap_or(0);
        let sub_group_size = if options.sub_group_size == 0 { largest } else { options.sub_group_size };
        self.tile = TierOptions { sub_group_size, ..*options }.tile();
        let mut kept = 0;
        for (segment, shape) in self.segments.iter_mut().zip(&mut self.shape.segments) {
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
                gradients: tier(options.optimizer && options.gradients, gradients),
                optimizer: tier(options.optimizer, optimizer),
                tiles: 0,
            };
            if tiers != Tiers::default() {
                tiers.tiles = elements.div_ceil(self.tile);
            }
            (segment.tiers, shape.tiers) = (tiers, tiers);
        }
        self
    }

    /// In the order of the layers that own them.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The same, as schedules and passes see it.
    #[must_use]
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Whether anything lives on a disk.
    #[must_use]
    pub fn uses_disk(&self) -> bool {
        self.segments.iter().any(|segment| segment.tiers != Tiers::default())
    }

    /// Elements of a tile of what lives on a disk.
    #[must_use]
    pub fn tile(&self) -> usize {
        self.tile
    }

    /// Data-parallel degree.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Number of elements of all segments: Ψ in the ZeRO paper.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.segments.iter().map(Segment::elements).sum()
    }
}

/// Which parameters stay gathered, as DeepSpeed marks them: in order, while the model's threshold holds.
fn persistent(model: &Model, options: &LayoutOptions) -> Vec<bool> {
    let mut kept = 0usize;
    let mut mark = |elements: usize| {
        let keep = options.zero_stage == ZeroStage::Three
            && elements <= options.persistence_threshold
            && kept.saturating_add(elements) <= options.model_persistence_threshold;
        kept += if keep { elements } else { 0 };
        keep
    };
    model.parameters().iter().map(|parameter| mark(parameter.elements())).collect()
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
            end += model.parameters()[parameter].elements();
            Piece { parameter, range: start..end }
        })
        .collect();
    let bounds = cut(&pieces, end, ranks);
    Segment { name, layer, pieces, bounds, placements, tiers: Tiers::default() }
}

/// The cuts nearest to equal shards that fall on blocks.
fn cut(pieces: &[Piece], elements: usize, ranks: usize) -> Vec<usize> {
    let nearest = |target: usize| {
        let piece = pieces.iter().find(|p| p.range.end >= target).map_or(0..elements, |p| p.range.clone());
        let below = piece.start + (target - piece.start) / BLOCK * BLOCK;
        let above = (below + BLOCK).min(piece.end);
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
            }
        })
        .collect();
    let segments = segments
        .iter()
        .map(|s| SegmentShape { elements: s.elements(), placements: s.placements, tiers: s.tiers })
        .collect();
    ModelShape { layers, segments }
}
