//! The state of one rank.
//!
//! It consists of components, each of which owns its fields: [`ParameterState`], [`LocalGradients`],
//! [`Reductions`], [`OptimizerState`] and [`Disk`] hold values, and [`Memory`] creates and counts them. They read
//! [`Rank`], which does not change. The methods of [`ShardedState`] pass them to each other.

mod averages;
mod instructions;
mod quantized;
mod replicas;
mod shards;

use std::sync::Arc;

use candle_core::{DType, Storage};
use half::bf16;
use zero_model::ops::quantized_storage;
use zero_model::{Model, Parameter};
use zero_optim::norm::Clipping;
use zero_optim::{Average, AverageSums, Optimizer};
use zero_pipeline::{Placement, SegmentId, Stages};

pub(crate) use shards::missing;
pub use shards::{Kind, Range};

use crate::accumulator::Order;
use crate::disk::{Disk, DiskOptions, DiskUse, Stored};
use crate::error::ZeroError;
use crate::gradients::LocalGradients;
use crate::groups::Groups;
use crate::layout::Layout;
use crate::ledger::{Category, Ledger};
use crate::memory::Memory;
use crate::optimizer::{OptimizerState, SegmentState};
use crate::parameters::ParameterState;
use crate::placement::OnGpu;
use crate::rank::Rank;
use crate::reductions::Reductions;
use crate::rounding::working;
use crate::states::{Column, Format, StateBuffer};

/// Options of a rank's sharded state.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroOptions {
    /// The optimizers and their hyperparameters. Each segment has the index of its own. A schedule-free one is the only one.
    pub optimizers: Vec<Optimizer>,
    /// How gradients are clipped by the norms of groups, in the order of [`Tuning::clipping`](zero_model::Tuning::clipping),
    /// from 1 on. Not on a GPU.
    pub clippings: Vec<Clipping>,
    /// The moving average of the weights, if there is one.
    pub average: Option<Average>,
    /// Dtype of the optimizer's states: f32 or bf16. The average is f32.
    pub state_dtype: DType,
    /// Whether 16-bit parameters have an f32 copy, which the optimizer updates.
    pub has_master: bool,
    /// Seed of random rounding of bf16 parameters without an f32 copy; `None` rounds to nearest.
    pub stochastic_rounding: Option<u64>,
    /// The order of the sum over this rank's micro-batches.
    pub order: Order,
    /// Whether the squares of the gradients of single micro-batches are summed.
    pub sums_micro_batches: bool,
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

impl ZeroOptions {
    /// Returns the names of the values that elements have beside the parameter: the average of the weights, then the
    /// states of all optimizers.
    #[must_use]
    pub fn states(&self) -> Vec<&'static str> {
        let mut names: Vec<&str> = self.average.map(|_| Average::STATE).into_iter().collect();
        for name in self.optimizers.iter().flat_map(Optimizer::states) {
            if !names.contains(name) {
                names.push(name);
            }
        }
        names
    }

    /// Returns the names of those values that the elements of a parameter have: the average of the weights, then the states of
    /// its optimizer. A matrix that is updated as a whole may lack the last ones.
    #[must_use]
    pub fn states_of(&self, parameter: &Parameter) -> Vec<&'static str> {
        let states = self.optimizer(parameter.tuning().optimizer).states();
        let held = parameter.matrix().map_or(states.len(), |matrix| matrix.values.len());
        self.average.map(|_| Average::STATE).into_iter().chain(states.iter().copied().take(held)).collect()
    }

    /// Returns the optimizer with this index.
    pub(crate) fn optimizer(&self, index: usize) -> &Optimizer {
        &self.optimizers[index]
    }

    /// Returns the bytes of each element, of which those of the parameter in the working dtype are given.
    #[must_use]
    pub fn widths(&self, parameter: usize) -> Widths {
        Widths {
            parameter,
            master: if self.has_master && parameter < 4 { 4 } else { 0 },
            average: if self.average.is_some() { 4 } else { 0 },
            state: self.state_dtype.size_in_bytes(),
            states: self.optimizers.iter().map(|optimizer| optimizer.states().len()).collect(),
        }
    }

    /// Returns how many of the states precede the optimizer's: 1 if there is an average of the weights, else 0.
    pub(crate) fn averages(&self) -> usize {
        usize::from(self.average.is_some())
    }

    /// Returns whether the first of the states has averages of the weights, which can take their place.
    #[must_use]
    pub fn has_averages(&self) -> bool {
        self.average.is_some() || self.is_schedule_free()
    }

    /// Returns whether the optimizer is schedule-free: its averages are the sums of the weights and the first state.
    #[must_use]
    pub fn is_schedule_free(&self) -> bool {
        matches!(self.optimizers[..], [Optimizer::ScheduleFree(_)])
    }

    /// Returns the share of the new weights in their average after the optimizer step of this number; 0 without an
    /// average.
    pub(crate) fn average_weight(&self, step: u64) -> f32 {
        self.average.map_or(0.0, |average| average.weight(step))
    }

    /// Returns whether weight decay applies to a parameter.
    pub(crate) fn decays(&self, parameter: &Parameter) -> bool {
        self.decay_all || parameter.tuning().weight_decay.is_some() || parameter.shape().rank() >= 2
    }
}

/// Bytes of each element that the rank which updates it holds in memory, beside the gradient.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Widths {
    /// The parameter as layers read it.
    pub parameter: usize,
    /// The f32 copy that the optimizer updates; 0 if there is none.
    pub master: usize,
    /// The average of the weights; 0 if there is none.
    pub average: usize,
    /// One state of an optimizer.
    pub state: usize,
    /// Number of the states of each optimizer.
    pub states: Vec<usize>,
}

/// One rank's share of a model. Its methods execute the instructions of a program.
pub struct ShardedState {
    rank: Rank,
    memory: Memory,
    parameters: ParameterState,
    local: LocalGradients,
    gradients: Reductions,
    optimizer: OptimizerState,
    disk: Disk,
    /// The weights of this rank's ranges while the averages of a schedule-free optimizer are in their place.
    weights: Vec<Vec<f32>>,
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
        let rank = Rank::new(model, layout, stages, groups, options);
        let segments = rank.layout.segments().len();
        let memory = Memory::new(&rank, longest_kept(&rank.layout))?;
        let disk = Disk::new(&rank)?;
        let mut zero = Self {
            memory,
            parameters: ParameterState::default(),
            local: LocalGradients::new(segments),
            gradients: Reductions::new(segments, rank.options.order),
            optimizer: OptimizerState::default(),
            disk,
            weights: vec![],
            rank,
        };
        zero.memory.count(Category::Staging, zero.disk.bounce_bytes() as usize, 1);
        for id in 0..segments {
            zero.initialise(id, seed)?;
            zero.disk.initialise(&zero.rank, id, seed)?;
        }
        zero.disk.drop_buffers(&mut zero.memory);
        Ok(zero)
    }

    /// Adds the next segment, with its initial values.
    fn initialise(&mut self, id: SegmentId, seed: u64) -> Result<(), ZeroError> {
        let Self { rank, memory, disk, .. } = self;
        if !rank.holds(id) {
            self.parameters.push(None);
            self.optimizer.push(SegmentState::default());
            return Ok(());
        }
        let own = if rank.updates(id) { rank.own_range(id) } else { 0..0 };
        let in_memory = if disk.has(id, Stored::State(0)) { 0 } else { own.len() };
        let widths = rank.widths();
        memory.count(Category::OptimizerState, rank.segment(id).state_bytes(in_memory, &widths), 1);
        let has_master = (widths.master > 0 || rank.mirrors(id)) && in_memory > 0;
        let mut master = vec![0.0; if has_master { own.len() } else { 0 }];
        memory.count(Category::Parameters, master.len(), 4);
        let shard = match rank.placements(id).parameters {
            Placement::Sharded if disk.has(id, Stored::Parameters) => {
                if has_master {
                    master = rank.initial_values(id, own.clone(), seed);
                }
                None
            }
            Placement::Sharded => {
                let held = rank.own_range(id);
                memory.count(Category::Parameters, held.len(), rank.width(id));
                if rank.is_quantized(id) {
                    let bytes = rank.initial_bytes(id, held, seed)?;
                    self.parameters.push(Some(Storage::Cpu(quantized_storage(bytes))));
                    self.optimizer.push(SegmentState::default());
                    return Ok(());
                }
                let values = rank.initial_values(id, held, seed);
                if has_master && !master.is_empty() {
                    master.copy_from_slice(&values);
                }
                Some(memory.shard_of(rank, values)?)
            }
            Placement::Replicated => {
                memory.count(Category::Parameters, rank.segment(id).elements(), rank.width(id));
                for piece in &rank.segment(id).pieces {
                    if rank.is_quantized(id) {
                        let bytes = rank.initial_bytes(id, piece.range.clone(), seed)?;
                        rank.model.parameters()[piece.parameter].fill(quantized_storage(bytes))?;
                        continue;
                    }
                    let full = rank.initial_values(id, piece.range.clone(), seed);
                    let (start, end) = (own.start.max(piece.range.start), own.end.min(piece.range.end));
                    if has_master && start < end {
                        let kept = &full[start - piece.range.start..end - piece.range.start];
                        master[start - own.start..end - own.start].copy_from_slice(kept);
                    }
                    rank.model.parameters()[piece.parameter].fill(working(full, rank.dtype))?;
                }
                None
            }
        };
        // Allocate each state as zeros: cloning the first would touch all memory before the first step does.
        let state = |(column, name): (Column, &str)| match column.format {
            Format::EightBit => Ok(StateBuffer::eight_bit(name, in_memory)),
            Format::Bf16 => Ok(StateBuffer::Bf16(vec![bf16::ZERO; column.values(in_memory)])),
            Format::F32 => memory.zeros(rank, id, column.values(in_memory)).map(StateBuffer::F32),
        };
        let columns = rank.segment(id).columns(&widths).into_iter().zip(rank.state_names(id));
        let states = columns.map(state).collect::<Result<_, ZeroError>>()?;
        let master = memory.settled(rank, id, master)?;
        self.parameters.push(shard);
        self.optimizer.push(SegmentState { master, states });
        Ok(())
    }

    /// Returns whether this rank's stage uses the segment.
    #[must_use]
    pub fn holds(&self, id: SegmentId) -> bool {
        self.rank.holds(id)
    }

    /// Returns whether this rank's stage owns the segment: it reduces its gradient, updates it and saves it.
    #[must_use]
    pub fn owns(&self, id: SegmentId) -> bool {
        self.rank.owns(id)
    }

    /// Returns whether ranks exchange values directly between GPUs.
    #[must_use]
    pub fn transfers_by_gpu(&self) -> bool {
        self.rank.options.on_gpu.layers && self.rank.options.on_gpu.gathers
    }

    /// Returns the assignment of layers to pipeline stages.
    #[must_use]
    pub fn stages(&self) -> &Arc<Stages> {
        &self.rank.stages
    }

    /// Returns the communicators of this rank.
    #[must_use]
    pub fn groups(&self) -> &Groups {
        &self.rank.groups
    }

    /// Returns the model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.rank.model
    }

    /// Returns the layout.
    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.rank.layout
    }

    /// Returns the disk statistics of this rank; `None` if nothing is offloaded.
    #[must_use]
    pub fn disk_use(&self) -> Option<DiskUse> {
        self.disk.statistics()
    }

    /// Updates the ledger's count of idle buffers. Called between instructions.
    pub fn count_idle(&mut self) {
        self.memory.count_idle();
    }

    /// Returns the bytes of idle buffers counted in the ledger.
    #[must_use]
    pub fn idle_bytes(&self) -> u64 {
        self.memory.idle_bytes()
    }

    /// Records the measured peak bytes of activations, and of the whole process.
    pub fn note_activations(&mut self, bytes: u64, total: u64) {
        self.memory.note_activations(bytes, total);
    }

    /// Returns the tracked memory of this rank.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        self.memory.ledger()
    }

    /// Returns the number of optimizer steps taken, excluding skipped ones.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.optimizer.updates()
    }

    /// Returns what a schedule-free optimizer has averaged so far.
    #[must_use]
    pub fn average_sums(&self) -> AverageSums {
        self.optimizer.sums()
    }

    /// Sets the number of optimizer steps taken, and what a schedule-free optimizer has averaged, to resume from a
    /// checkpoint.
    pub fn set_progress(&mut self, updates: u64, sums: AverageSums) {
        self.optimizer.set_progress(updates, sums);
    }

    /// Returns the bytes of each element.
    #[must_use]
    pub fn widths(&self) -> Widths {
        self.rank.widths()
    }

    /// Returns the names of the states of all optimizers, with the average of the weights if there is one.
    #[must_use]
    pub fn state_names(&self) -> Vec<&'static str> {
        self.rank.options.states()
    }

    /// Returns the names of those states that a parameter has if it is trained.
    #[must_use]
    pub fn state_names_of(&self, parameter: &Parameter) -> Vec<&'static str> {
        self.rank.options.states_of(parameter)
    }
}
