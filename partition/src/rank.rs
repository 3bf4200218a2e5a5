//! The constant part of a rank's state: its model, its place among the ranks, and its options.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, TensorId};
use zero_comm::Communicator;
use zero_model::{Model, ParameterId};
use zero_optim::{BlockCodes, Optimizer};
use zero_pipeline::{Placement, Placements, SegmentId, Stages};

use crate::error::ZeroError;
use crate::groups::Groups;
use crate::layout::Layout;
use crate::options::{Widths, ZeroOptions};
use crate::segment::Segment;
use crate::storage::QUANTIZED;

/// The constants of one rank, which all components of its state read.
pub(crate) struct Rank {
    pub(crate) model: Arc<Model>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) stages: Arc<Stages>,
    pub(crate) groups: Groups,
    pub(crate) options: ZeroOptions,
    /// Dtype of the working parameters.
    pub(crate) dtype: DType,
    /// Whether the state of each segment is on the GPU.
    residents: Vec<bool>,
}

impl Rank {
    pub(crate) fn new(model: Arc<Model>, layout: Layout, stages: Stages, groups: Groups, options: ZeroOptions) -> Self {
        assert_eq!(
            groups.mesh().shards(),
            layout.ranks(),
            "the number of ranks of the layout must be the size of a shard group"
        );
        let near = layout.secondary();
        assert!(
            near.is_none_or(|near| near == groups.mesh().near()),
            "secondary shards must be those of the near groups"
        );
        assert_eq!(stages.count(), groups.mesh().pipe(), "the mesh and the model must have the same number of stages");
        let dtype = model.parameters().first().map_or(DType::F32, |p| p.dtype());
        let residents = options.on_gpu.residents(&layout);
        Self { model, layout: Arc::new(layout), stages: Arc::new(stages), groups, options, dtype, residents }
    }

    /// Returns the communicator over which this rank's segments are sharded.
    pub(crate) fn shards(&self) -> &Arc<dyn Communicator> {
        self.groups.shard()
    }

    /// Returns the communicator of the data-parallel group, over which gradients are summed.
    pub(crate) fn data(&self) -> &Arc<dyn Communicator> {
        self.groups.data()
    }

    /// Returns whether this rank adds its shard to norms and saves it. Of the ranks with the same shard, only the one
    /// in the first replicate does.
    pub(crate) fn speaks(&self) -> bool {
        self.groups.at().replicate == 0
    }

    pub(crate) fn segment(&self, id: SegmentId) -> &Segment {
        &self.layout.segments()[id]
    }

    pub(crate) fn placements(&self, id: SegmentId) -> Placements {
        self.segment(id).placements
    }

    /// Returns the range of this rank's shard of a segment.
    pub(crate) fn shard(&self, id: SegmentId) -> Range<usize> {
        self.segment(id).shard(self.groups.at().shard)
    }

    /// Returns the range of this rank's secondary shard of a segment; empty if the segment has none.
    pub(crate) fn secondary_shard(&self, id: SegmentId) -> Range<usize> {
        self.segment(id).secondary_shard(self.groups.at().shard)
    }

    /// Returns the range of a segment that this rank's optimizer updates.
    pub(crate) fn own_range(&self, id: SegmentId) -> Range<usize> {
        self.segment(id).held(self.placements(id).optimizer, self.groups.at().shard)
    }

    /// Returns whether this rank's stage uses the segment.
    pub(crate) fn holds(&self, id: SegmentId) -> bool {
        self.stages.holds(self.groups.at().stage, id)
    }

    /// Returns whether this rank's stage owns the segment. The owner reduces the segment's gradient, updates the
    /// segment and saves it.
    pub(crate) fn owns(&self, id: SegmentId) -> bool {
        self.stages.owner(id) == self.groups.at().stage
    }

    /// Returns whether this rank's stage updates the segment: the stage owns the segment, and the segment is trainable.
    pub(crate) fn updates(&self, id: SegmentId) -> bool {
        self.owns(id) && self.segment(id).is_trainable
    }

    /// Returns the segments that this rank's stage updates.
    pub(crate) fn updated(&self) -> Vec<SegmentId> {
        (0..self.layout.segments().len()).filter(|&id| self.updates(id)).collect()
    }

    /// Returns the optimizer of a segment.
    pub(crate) fn optimizer(&self, id: SegmentId) -> &Optimizer {
        self.options.optimizer(self.segment(id).optimizer)
    }

    /// Returns the names of a segment's optimizer states, preceded by the average of the weights if there is one.
    pub(crate) fn state_names(&self, id: SegmentId) -> Vec<&'static str> {
        let first = self.segment(id).pieces.first().map(|piece| &self.model.parameters()[piece.parameter]);
        first.map(|parameter| self.options.states_of(parameter)).unwrap_or_default()
    }

    /// Returns the number of a segment's optimizer states, including the average of the weights if there is one.
    pub(crate) fn states(&self, id: SegmentId) -> usize {
        self.state_names(id).len()
    }

    /// Converts an index into [`ZeroOptions::states`] to an index into the segment's own states. Returns `None` if the
    /// segment does not have the state.
    pub(crate) fn own_state(&self, id: SegmentId, index: usize) -> Option<usize> {
        let name = self.options.states().get(index).copied()?;
        self.state_names(id).into_iter().position(|own| own == name)
    }

    /// Returns the bytes per element of each kind of value.
    pub(crate) fn widths(&self) -> Widths {
        self.options.widths(self.dtype.size_in_bytes())
    }

    /// Returns the bytes of each stored element of a segment's working parameters.
    pub(crate) fn width(&self, id: SegmentId) -> usize {
        self.segment(id).width(self.dtype.size_in_bytes())
    }

    /// Returns the dtype of the storage of a segment's working parameters.
    pub(crate) fn stored_as(&self, id: SegmentId) -> DType {
        if self.is_quantized(id) { QUANTIZED } else { self.dtype }
    }

    /// Returns the codes that gathers of a segment send; `None` if they send values.
    pub(crate) fn gathered_as(&self, id: SegmentId) -> Option<BlockCodes> {
        self.segment(id).gathered_as(self.options.coded)
    }

    /// Returns whether a segment is quantized: its storage is bytes.
    pub(crate) fn is_quantized(&self, id: SegmentId) -> bool {
        self.segment(id).quantization.is_some()
    }

    pub(crate) fn leaf(&self, parameter: ParameterId) -> TensorId {
        self.model.parameters()[parameter].leaf().id()
    }

    /// Returns whether the layers run on a GPU.
    pub(crate) fn is_on_gpu(&self) -> bool {
        self.model.device().is_cuda()
    }

    /// Returns whether the optimizer state, master and gradients of a segment are on the GPU.
    pub(crate) fn is_resident(&self, id: SegmentId) -> bool {
        self.residents[id]
    }

    pub(crate) fn has_residents(&self) -> bool {
        self.residents.contains(&true)
    }

    /// Returns whether the host accumulates gradients of any segment that the GPU computes.
    pub(crate) fn brings_gradients(&self) -> bool {
        self.is_on_gpu() && self.residents.contains(&false)
    }

    /// Returns whether the host keeps a master copy of a segment's parameters because it updates them while they are on
    /// a GPU. With the master, the host need not download the parameters.
    pub(crate) fn mirrors(&self, id: SegmentId) -> bool {
        let is_there = self.placements(id).parameters == Placement::Replicated || self.options.on_gpu.parameters;
        self.is_on_gpu() && !self.is_resident(id) && is_there
    }

    /// Returns, for a quantized segment, a range of the bytes that store its initial values.
    pub(crate) fn initial_bytes(&self, id: SegmentId, range: Range<usize>, seed: u64) -> Result<Vec<u8>, ZeroError> {
        let quantized = self.segment(id).only_parameter().map(|parameter| &self.model.parameters()[parameter]);
        let bytes = quantized.map(|parameter| parameter.initial_bytes(seed, range)).transpose()?.flatten();
        bytes.ok_or_else(|| ZeroError::internal("the segment is not quantized"))
    }

    /// Returns the initial values of a range of a segment that is not quantized.
    pub(crate) fn initial_values(&self, id: SegmentId, range: Range<usize>, seed: u64) -> Vec<f32> {
        let mut values = vec![0.0; range.len()];
        for (parameter, inside, at) in self.segment(id).overlaps(range) {
            self.model.parameters()[parameter].initialise(seed, inside.start, &mut values[at]);
        }
        values
    }
}
