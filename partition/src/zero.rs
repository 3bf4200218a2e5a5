//! The state of one rank: its parameters, gradients, optimizer state and what is under way.

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
use crate::gradients::{Late, Open, PendingReduce};
use crate::groups::Groups;
use crate::layout::{Layout, Segment};
use crate::ledger::{Category, Ledger};
use crate::parameters::{Gathering, PendingRefresh};
use crate::placement::OnGpu;
use crate::pool::Pool;
use crate::rounding::working;
use crate::update::Judged;

/// How a rank carries out its program.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroOptions {
    /// The optimizer and its hyperparameters.
    pub optimizer: Optimizer,
    /// The order of the sum over this rank's micro-batches.
    pub order: Order,
    /// The dtype in which gradients travel: f32, bf16 or f16.
    pub communication: DType,
    /// Reduce sharded gradients by reduce-scatter; otherwise all-reduce them and keep one's own part, as
    /// `reduce_scatter: false` asks for.
    pub reduce_scatter: bool,
    /// Whether biases and norms (parameters of fewer than two dimensions) are decayed too.
    pub decay_all: bool,
    /// Take a parameter without gradient as one with a zero gradient, instead of an error.
    pub ignore_unused: bool,
    /// Where lives what the layout puts on a disk.
    pub disk: DiskOptions,
    /// What lives on the GPU that layers run on.
    pub on_gpu: OnGpu,
}

/// One segment's share of a rank.
pub(crate) struct SegmentState {
    /// Shard of the working parameters where they are sharded. Taken while a gather reads it.
    pub(crate) shard: Option<Storage>,
    /// f32 master of this rank's part where the working dtype is of 16 bits.
    pub(crate) master: FlatBuffer,
    pub(crate) gradients: Accumulator,
    /// Reduced gradients: the shard, or all of it where gradients are replicated.
    pub(crate) reduced: Option<FlatBuffer>,
    pub(crate) optimizer: Vec<FlatBuffer>,
    /// Gradient of the running micro-batch.
    pub(crate) open: Option<Open>,
    pub(crate) gathering: Option<Gathering>,
    /// What the norm needs of reduced gradients that have left memory.
    pub(crate) squares: Option<ExactSum>,
}

impl SegmentState {
    /// Of a segment that another pipeline stage has.
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

/// One rank's share of a model, and the instructions on it.
pub struct ShardedState {
    pub(crate) model: Arc<Model>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) stages: Arc<Stages>,
    pub(crate) groups: Groups,
    /// The ranks over which this rank's segments are sharded: its pipeline stage.
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) options: ZeroOptions,
    pub(crate) segments: Vec<SegmentState>,
    /// Of each segment, whether its state is on the GPU.
    pub(crate) residents: Vec<bool>,
    /// By layer and micro-batch, what it takes to make the gradients of the layer's parameters.
    pub(crate) deferred: HashMap<(LayerId, usize), DeferredGradients>,
    pub(crate) reducing: VecDeque<PendingReduce>,
    /// What begins when gradients have come from the GPU, in the order of the program.
    pub(crate) late: VecDeque<Late>,
    pub(crate) refreshing: VecDeque<PendingRefresh>,
    pub(crate) pool: Pool,
    /// Ways between the GPU and the host.
    #[cfg(feature = "cuda")]
    pub(crate) staging: Option<zero_model::device::Staging>,
    /// Of the gradients on the GPU.
    #[cfg(feature = "cuda")]
    pub(crate) norms: Option<zero_model::device::optimizer::Norms>,
    /// Segments on the GPU that are updated at once, with the last of them.
    #[cfg(feature = "cuda")]
    pub(crate) updating: Vec<SegmentId>,
    /// What does not live in memory.
    pub(crate) disk: Option<Disk>,
    pub(crate) ledger: Ledger,
    /// Elements of waiting buffers that the ledger counts.
    counted_idle: usize,
    pub(crate) dtype: DType,
    pub(crate) judged: Option<Judged>,
    pub(crate) updates: u64,
}

/// Elements of the longest buffer that a rank keeps for its next use.
#[must_use]
pub fn longest_kept(layout: &Layout) -> usize {
    if layout.uses_disk() { KEPT } else { usize::MAX }
}

/// Elements of the longest buffer that is kept for its next use where something lives on a disk, since there is no memory for it:
/// 16 MiB.
const KEPT: usize = 1 << 22;

impl ShardedState {
    /// Initialises this rank's share; what belongs to other ranks, and to other pipeline stages, is never in memory.
    ///
    /// # Errors
    /// If a parameter refuses its values.
    ///
    /// # Panics
    /// If the groups, the layout and the stages are of different sizes: the caller's defect.
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
            #[cfg(feature = "cuda")]
            staging: None,
            #[cfg(feature = "cuda")]
            norms: None,
            #[cfg(feature = "cuda")]
            updating: vec![],
            disk: None,
            ledger: Ledger::default(),
            counted_idle: 0,
            dtype,
            judged: None,
            updates: 0,
        };
        #[cfg(feature = "cuda")]
        if zero.model.device().is_cuda() {
            zero.staging = Some(zero_model::device::Staging::new(zero.gpu()?)?);
            zero.norms = Some(zero_model::device::optimizer::Norms::new(zero.gpu()?)?);
        }
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
        // Each asked for as zeros: a clone of the first would touch all memory before the first step does.
        let optimizer = (0..states).map(|_| self.zeros(id, in_memory)).collect::<Result<_, _>>()?;
        let master = self.settled(id, master)?;
        Ok(SegmentState { shard, master, optimizer, ..SegmentState::of(self.options.order) })
    }

    /// Whether the host keeps a copy of the parameters that it updates, since they themselves are on a GPU: then they never come back.
    fn mirrors(&self, id: SegmentId) -> bool {
        let is_on_gpu =
            self.layout.segments()[id].placements.parameters == Placement::Replicated || self.options.on_gpu.parameters;
        self.model.device().is_cuda() && !self.is_resident(id) && is_on_gpu
    }

    /// Whether this rank's stage uses the segment.
    #[must_use]
    pub fn holds(&self, id: SegmentId) -> bool {
        self.stages.holds(self.groups.at().stage, id)
    }

    /// Whether this rank's stage reduces its gradient, updates it and saves it.
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

    /// The part of a segment that this rank's optimizer updates.
    pub(crate) fn own_range(&self, id: SegmentId) -> std::ops::Range<usize> {
        let segment = &self.layout.segments()[id];
        match segment.placements.optimizer {
            Placement::Replicated => 0..segment.elements(),
            Placement::Sharded => segment.shard(self.comm.rank()),
        }
    }

    /// Which pipeline stage has which layers.
    #[must_use]
    pub fn stages(&self) -> &Arc<Stages> {
        &self.stages
    }

    /// The ranks that this rank acts with.
    #[must_use]
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Which rank holds what.
    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Counts the buffers that wait for their next use, between instructions.
    pub fn count_idle(&mut self) {
        let before = std::mem::replace(&mut self.counted_idle, self.pool.idle());
        match self.counted_idle.checked_sub(before) {
            Some(more) => self.ledger.add(Category::Staging, more, 4),
            None => self.ledger.remove(Category::Staging, before - self.counted_idle, 4),
        }
    }

    /// Bytes of buffers that wait for their next use, as the ledger counts them.
    #[must_use]
    pub fn idle_bytes(&self) -> u64 {
        (self.counted_idle * 4) as u64
    }

    /// Takes down what was measured of the memory of layers, and of everything together.
    pub fn note_activations(&mut self, bytes: u64, total: u64) {
        self.ledger.note(Category::Activations, bytes, total);
    }

    /// Tracked bytes of this rank.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Optimizer steps taken; skipped ones do not count.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Continues the count of a checkpoint.
    pub fn set_updates(&mut self, updates: u64) {
        self.updates = updates;
    }

    /// Names of the optimizer's states.
    #[must_use]
    pub fn state_names(&self) -> &'static [&'static str] {
        self.options.optimizer.states()
    }
}
