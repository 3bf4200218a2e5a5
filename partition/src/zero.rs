//! The state of one rank: its parameters, gradients, optimizer state and what is under way.

use std::collections::VecDeque;
use std::sync::Arc;

use candle_core::{CpuStorage, DType};
use half::bf16;
use zero_comm::{Communicator, Gathered, Pending};
use zero_model::{Model, init};
use zero_optim::{Optimizer, write_bf16};
use zero_pipeline::{Placement, SegmentId};

use crate::accumulator::{Accumulator, Order};
use crate::error::ZeroError;
use crate::gradients::{Open, PendingReduce};
use crate::layout::{Layout, Segment};
use crate::ledger::{Category, Ledger};
use crate::pool::Pool;

/// How a rank carries out its program.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroOptions {
    /// The optimizer and its hyperparameters.
    pub optimizer: Optimizer,
    /// The order of the sum over this rank's micro-batches.
    pub order: Order,
    /// The dtype in which gradients travel: f32 or bf16.
    pub communication: DType,
    /// Reduce sharded gradients by reduce-scatter; otherwise all-reduce them and keep one's own part, as
    /// `reduce_scatter: false` asks for.
    pub reduce_scatter: bool,
    /// Largest allowed global gradient norm; 0 does not clip.
    pub gradient_clipping: f64,
    /// Whether biases and norms (parameters of fewer than two dimensions) are decayed too.
    pub decay_all: bool,
    /// Take a parameter without gradient as one with a zero gradient, instead of an error.
    pub ignore_unused: bool,
}

/// One segment's share of a rank.
pub(crate) struct SegmentState {
    /// Shard of the working parameters where they are sharded. Taken while a gather reads it.
    pub(crate) shard: Option<CpuStorage>,
    /// f32 master of this rank's part where the working dtype is bf16.
    pub(crate) master: Vec<f32>,
    pub(crate) gradients: Accumulator,
    /// Reduced gradients: the shard, or all of it where gradients are replicated.
    pub(crate) reduced: Option<Vec<f32>>,
    pub(crate) optimizer: Vec<Vec<f32>>,
    /// Gradient of the running micro-batch.
    pub(crate) open: Option<Open>,
    pub(crate) gathering: Option<Pending<Gathered>>,
}

/// One rank's share of a model, and the instructions on it.
pub struct Zero {
    pub(crate) model: Arc<Model>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) options: ZeroOptions,
    pub(crate) segments: Vec<SegmentState>,
    pub(crate) reducing: VecDeque<PendingReduce>,
    pub(crate) refreshing: VecDeque<(Vec<SegmentId>, Vec<Pending<Gathered>>)>,
    pub(crate) pool: Pool,
    pub(crate) ledger: Ledger,
    pub(crate) dtype: DType,
    pub(crate) grad_scale: f32,
    pub(crate) updates: u64,
}

impl Zero {
    /// Initialises this rank's share; what belongs to other ranks is never in memory.
    ///
    /// # Errors
    /// If a parameter refuses its values.
    ///
    /// # Panics
    /// If the communicator has another size than the layout: the caller's defect.
    pub fn new(
        model: Arc<Model>,
        layout: Layout,
        comm: Arc<dyn Communicator>,
        options: ZeroOptions,
        seed: u64,
    ) -> Result<Self, ZeroError> {
        assert_eq!(comm.size(), layout.ranks(), "the layout is for another number of ranks");
        let dtype = model.parameters().first().map_or(DType::F32, |p| p.dtype());
        let mut zero = Self {
            model,
            layout: Arc::new(layout),
            comm,
            options,
            segments: vec![],
            reducing: VecDeque::new(),
            refreshing: VecDeque::new(),
            pool: Pool::default(),
            ledger: Ledger::default(),
            dtype,
            grad_scale: 1.0,
            updates: 0,
        };
        for segment in 0..zero.layout.segments().len() {
            let state = zero.initial(segment, seed)?;
            zero.segments.push(state);
        }
        Ok(zero)
    }

    fn initial(&mut self, id: SegmentId, seed: u64) -> Result<SegmentState, ZeroError> {
        let segment = self.layout.segments()[id].clone();
        let own = self.own_range(id);
        let states = self.options.optimizer.states().len();
        self.ledger.add(Category::OptimizerState, own.len() * states, 4);
        let has_master = self.dtype == DType::BF16;
        let mut master = vec![0.0; if has_master { own.len() } else { 0 }];
        self.ledger.add(Category::Parameters, master.len(), 4);
        let width = self.dtype.size_in_bytes();
        let shard = match segment.placements.parameters {
            Placement::Sharded => {
                self.ledger.add(Category::Parameters, own.len(), width);
                let values = self.initial_values(&segment, own.clone(), seed);
                if has_master {
                    master.copy_from_slice(&values);
                }
                Some(self.working(values)?)
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
                    self.model.parameters()[piece.parameter].fill(self.working(full)?)?;
                }
                None
            }
        };
        Ok(SegmentState {
            shard,
            master,
            gradients: Accumulator::new(self.options.order),
            reduced: None,
            // Each asked for as zeros: a clone of the first would touch all memory before the first step does.
            optimizer: (0..states).map(|_| vec![0.0; own.len()]).collect(),
            open: None,
            gathering: None,
        })
    }

    fn initial_values(&self, segment: &Segment, range: std::ops::Range<usize>, seed: u64) -> Vec<f32> {
        let mut values = vec![0.0; range.len()];
        for (id, inside, at) in segment.overlaps(range) {
            let parameter = &self.model.parameters()[id];
            init::fill(&parameter.init(), parameter.shape(), parameter.name(), seed, inside.start, &mut values[at]);
        }
        values
    }

    /// f32 values in the working dtype.
    pub(crate) fn working(&self, values: Vec<f32>) -> Result<CpuStorage, ZeroError> {
        if self.dtype != DType::BF16 {
            return Ok(CpuStorage::F32(values));
        }
        let mut rounded = vec![bf16::ZERO; values.len()];
        write_bf16(&values, &mut rounded)?;
        Ok(CpuStorage::BF16(rounded))
    }

    /// The part of a segment that this rank's optimizer updates.
    pub(crate) fn own_range(&self, id: SegmentId) -> std::ops::Range<usize> {
        let segment = &self.layout.segments()[id];
        match segment.placements.optimizer {
            Placement::Replicated => 0..segment.elements(),
            Placement::Sharded => segment.shard(self.comm.rank()),
        }
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
