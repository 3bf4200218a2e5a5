//! The state of one rank: its parameters, gradients, optimizer state and operations in flight.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use candle_core::{DType, Storage};
use zero_comm::Communicator;
use zero_model::sink::{DeferredGradients, FlatBuffer};
use zero_model::{Model, init};
use zero_optim::{ExactSum, Optimizer};
use zero_pipeline::{LayerId, Placement, SegmentId, Stages};

use crate::accumulator::{Accumulator, Order};
use crate::disk::{Disk, DiskOptions, Stored, places};
use crate::error::ZeroError;
use crate::gpu::Gpu;
use crate::gradients::{Late, Open, PendingReduce};
use crate::groups::Groups;
use crate::layout::{Layout, Segment};
use crate::ledger::{Category, Ledger};
use crate::parameters::{Gathering, PendingRefresh};
use crate::placement::OnGpu;
use crate::pool::Pool;
use crate::rounding::working;
use crate::update::Judged;

/// Options of a rank's sharded state.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroOptions {
    /// The optimizer and its hyperparameters.
    pub optimizer: Optimizer,
    /// The order of the sum over this rank's micro-batches.
    pub order: Order,
    /// Dtype of gradients in collectives: f32, bf16 or f16.
    pub communication: DType,
    /// Whether sharded gradients use reduce-scatter. With `reduce_scatter: false` they use all-reduce, and each rank
    /// keeps its part.
    pub reduce_scatter: bool,
    /// Whether weight decay also applies to biases and norms (parameters of fewer than two dimensions).
    pub decay_all: bool,
    /// Whether a parameter without a gradient counts as having a zero gradient instead of being an error.
    pub ignore_unused: bool,
    /// Location and I/O options of offloaded state.
    pub disk: DiskOptions,
    /// State kept on the GPU that runs the layers.
    pub on_gpu: OnGpu,
}

/// A rank's share of one segment.
pub(crate) struct SegmentState {
    /// Shard of the working parameters, if they are sharded. `None` while a gather reads it.
    pub(crate) shard: Option<Storage>,
    /// f32 master copy of this rank's part, if the working dtype has 16 bits.
    pub(crate) master: FlatBuffer,
    pub(crate) gradients: Accumulator,
    /// Reduced gradients: the shard, or the whole segment if gradients are replicated.
    pub(crate) reduced: Option<FlatBuffer>,
    pub(crate) optimizer: Vec<FlatBuffer>,
    /// Local gradient of the current micro-batch.
    pub(crate) open: Option<Open>,
    pub(crate) gathering: Option<Gathering>,
    /// Sum of squares of reduced gradients that have been offloaded, for the norm.
    pub(crate) squares: Option<ExactSum>,
}

impl SegmentState {
    /// Creates the empty state of a segment that this pipeline stage does not use.
    fn of(order: Order) -> Self {
        Self {
            shard: None,
            master: FlatBuffer::default(),
            gradients: Accumulator::new(order),
            reduced: None,
            optimizer: vec![],
            open: None,
            gathering: None,
            squares: None,
        }
    }
}

/// One rank's share of a model. Its methods execute the instructions of a program.
pub struct ShardedState {
    pub(crate) model: Arc<Model>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) stages: Arc<Stages>,
    pub(crate) groups: Groups,
    /// Communicator over which this rank's segments are sharded: its pipeline stage.
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) options: ZeroOptions,
    pub(crate) segments: Vec<SegmentState>,
    /// Whether the state of each segment is on the GPU.
    pub(crate) residents: Vec<bool>,
    /// Inputs of the deferred parameter gradients, by layer and micro-batch.
    pub(crate) deferred: HashMap<(LayerId, usize), DeferredGradients>,
    pub(crate) reducing: VecDeque<PendingReduce>,
    /// Instructions that wait for gradients from the GPU, in program order.
    pub(crate) late: VecDeque<Late>,
    pub(crate) refreshing: VecDeque<PendingRefresh>,
    pub(crate) pool: Pool,
    /// The GPU that runs the layers, if they run on one.
    pub(crate) gpu: Option<Gpu>,
    /// Segments on the GPU whose update is pending, so that one launch can update all of them.
    pub(crate) updating: Vec<SegmentId>,
    /// The disk, if any state is offloaded.
    pub(crate) disk: Option<Disk>,
    pub(crate) ledger: Ledger,
    /// Elements of idle buffers already counted in the ledger.
    counted_idle: usize,
    pub(crate) dtype: DType,
    pub(crate) judged: Option<Judged>,
    pub(crate) updates: u64,
}

/// Returns the maximum elements of a buffer that a rank keeps for reuse.
#[must_use]
pub fn longest_kept(layout: &Layout) -> usize {
    if layout.uses_disk() { KEPT } else { usize::MAX }
}

/// Maximum elements of a buffer kept for reuse while state is offloaded, since memory is scarce then: 16 MiB.
const KEPT: usize = 1 << 22;

impl ShardedState {
    /// Initializes this rank's share. Shards of other ranks and other pipeline stages are never in memory.
    ///
    /// # Errors
    /// Fails if a parameter rejects its values, or if the disk or the GPU fails.
    ///
    /// # Panics
    /// Panics if the groups, the layout and the stages have different sizes.
    pub fn new(
        model: Arc<Model>,
        layout: Layout,
        stages: Stages,
        groups: Groups,
        options: ZeroOptions,
        seed: u64,
    ) -> Result<Self, ZeroError> {
        let comm = groups.data().clone();
        assert_eq!(comm.size(), layout.ranks(), "the layout is for another number of ranks");
        assert_eq!(stages.count(), groups.mesh().pipe(), "the model is cut for another number of stages");
        let dtype = model.parameters().first().map_or(DType::F32, |p| p.dtype());
        let residents = options.on_gpu.residents(&layout);
        let gpu = Gpu::open(model.device())?;
        let mut zero = Self {
            model,
            layout: Arc::new(layout),
            stages: Arc::new(stages),
            groups,
            comm,
            options,
            segments: vec![],
            residents,
            deferred: HashMap::new(),
            reducing: VecDeque::new(),
            late: VecDeque::new(),
            refreshing: VecDeque::new(),
            pool: Pool::default(),
            gpu,
            updating: vec![],
            disk: None,
            ledger: Ledger::default(),
            counted_idle: 0,
            dtype,
            judged: None,
            updates: 0,
        };
        zero.disk = zero.make_disk()?;
        let bounce = zero.disk.as_ref().map_or(0, Disk::bounce_bytes);
        zero.ledger.add(Category::Staging, bounce as usize, 1);
        zero.pool = Pool::of_at_most(longest_kept(&zero.layout));
        for segment in 0..zero.layout.segments().len() {
            let state = zero.initial(segment, seed)?;
            zero.segments.push(state);
            zero.initialise_stored(segment, seed)?;
        }
        zero.drop_buffers();
        Ok(zero)
    }

    fn make_disk(&self) -> Result<Option<Disk>, ZeroError> {
        if !self.layout.uses_disk() {
            return Ok(None);
        }
        let (width, states) = (self.dtype.size_in_bytes(), self.options.optimizer.states().len());
        let places = places(&self.layout, &self.stages, self.groups.at(), width, states);
        Disk::new(&self.options.disk, places).map(Some)
    }

    fn initial(&mut self, id: SegmentId, seed: u64) -> Result<SegmentState, ZeroError> {
        let segment = self.layout.segments()[id].clone();
        if !self.holds(id) {
            return Ok(SegmentState::of(self.options.order));
        }
        let own = if self.owns(id) { self.own_range(id) } else { 0..0 };
        let states = self.options.optimizer.states().len();
        let in_memory = if self.stored(id, Stored::State(0)) { 0 } else { own.len() };
        self.ledger.add(Category::OptimizerState, in_memory * states, 4);
        let has_master = (self.dtype != DType::F32 || self.mirrors(id)) && in_memory > 0;
        let mut master = vec![0.0; if has_master { own.len() } else { 0 }];
        self.ledger.add(Category::Parameters, master.len(), 4);
        let width = self.dtype.size_in_bytes();
        let shard = match segment.placements.parameters {
            Placement::Sharded if self.stored(id, Stored::Parameters) => {
                if has_master {
                    master = self.initial_values(&segment, own.clone(), seed);
                }
                None
            }
            Placement::Sharded => {
                let held = self.own_range(id);
                self.ledger.add(Category::Parameters, held.len(), width);
                let values = self.initial_values(&segment, held, seed);
                if has_master && !master.is_empty() {
                    master.copy_from_slice(&values);
                }
                Some(self.shard_of(values)?)
            }
            Placement::Replicated => {
                self.ledger.add(Category::Parameters, segment.elements(), width);
                for piece in &segment.pieces {
                    let full = self.initial_values(&segment, piece.range.clone(), seed);
                    let (start, end) = (own.start.max(piece.range.start), own.end.min(piece.range.end));
                    if has_master && start < end {
                        let kept = &full[start - piece.range.start..end - piece.range.start];
                        master[start - own.start..end - own.start].copy_from_slice(kept);
                    }
                    self.model.parameters()[piece.parameter].fill(working(full, self.dtype))?;
                }
                None
            }
        };
        // Allocate each state as zeros: cloning the first would touch all memory before the first step does.
        let optimizer = (0..states).map(|_| self.zeros(id, in_memory)).collect::<Result<_, _>>()?;
        let master = self.settled(id, master)?;
        Ok(SegmentState { shard, master, optimizer, ..SegmentState::of(self.options.order) })
    }

    /// Returns whether the host keeps a master copy of parameters that it updates but that live on a GPU. The master
    /// avoids downloading them.
    fn mirrors(&self, id: SegmentId) -> bool {
        let is_on_gpu =
            self.layout.segments()[id].placements.parameters == Placement::Replicated || self.options.on_gpu.parameters;
        self.model.device().is_cuda() && !self.is_resident(id) && is_on_gpu
    }

    /// Returns whether this rank's stage uses the segment.
    #[must_use]
    pub fn holds(&self, id: SegmentId) -> bool {
        self.stages.holds(self.groups.at().stage, id)
    }

    /// Returns whether this rank's stage owns the segment: it reduces its gradient, updates it and saves it.
    #[must_use]
    pub fn owns(&self, id: SegmentId) -> bool {
        self.stages.owner(id) == self.groups.at().stage
    }

    pub(crate) fn initial_values(&self, segment: &Segment, range: std::ops::Range<usize>, seed: u64) -> Vec<f32> {
        let mut values = vec![0.0; range.len()];
        for (id, inside, at) in segment.overlaps(range) {
            let parameter = &self.model.parameters()[id];
            init::fill(&parameter.init(), parameter.shape(), parameter.name(), seed, inside.start, &mut values[at]);
        }
        values
    }

    /// Returns the range of a segment that this rank's optimizer updates.
    pub(crate) fn own_range(&self, id: SegmentId) -> std::ops::Range<usize> {
        let segment = &self.layout.segments()[id];
        match segment.placements.optimizer {
            Placement::Replicated => 0..segment.elements(),
            Placement::Sharded => segment.shard(self.comm.rank()),
        }
    }

    /// Returns the assignment of layers to pipeline stages.
    #[must_use]
    pub fn stages(&self) -> &Arc<Stages> {
        &self.stages
    }

    /// Returns the communicators of this rank.
    #[must_use]
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Returns the model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Returns the layout.
    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Updates the ledger's count of idle buffers. Called between instructions.
    pub fn count_idle(&mut self) {
        let before = std::mem::replace(&mut self.counted_idle, self.pool.idle());
        match self.counted_idle.checked_sub(before) {
            Some(more) => self.ledger.add(Category::Staging, more, 4),
            None => self.ledger.remove(Category::Staging, before - self.counted_idle, 4),
        }
    }

    /// Returns the bytes of idle buffers counted in the ledger.
    #[must_use]
    pub fn idle_bytes(&self) -> u64 {
        (self.counted_idle * 4) as u64
    }

    /// Records the measured peak bytes of activations, and of the whole process.
    pub fn note_activations(&mut self, bytes: u64, total: u64) {
        self.ledger.note(Category::Activations, bytes, total);
    }

    /// Returns the tracked memory of this rank.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the number of optimizer steps taken, excluding skipped ones.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Sets the number of optimizer steps taken, to resume from a checkpoint.
    pub fn set_updates(&mut self, updates: u64) {
        self.updates = updates;
    }

    /// Returns the names of the optimizer states.
    #[must_use]
    pub fn state_names(&self) -> &'static [&'static str] {
        self.options.optimizer.states()
    }
}
