//! The state of one rank.
//!
//! It consists of components. Each component owns its fields: [`ParameterState`], [`SecondaryShards`],
//! [`LocalGradients`], [`Reductions`], [`OptimizerState`], [`OuterState`] and [`Disk`] hold values, and [`Memory`]
//! creates and counts them. The components read [`Rank`], which does not change. The methods of [`ShardedState`] pass
//! components to each other.

mod averages;
mod full;
mod instructions;
mod outer;
mod quantized;
mod replicas;
mod shards;

use std::sync::Arc;

use candle_core::{DType, Storage};
use half::bf16;
use zero_model::ops::quantized_storage;
use zero_model::{Model, Parameter};
use zero_optim::AverageSums;
use zero_pipeline::{Placement, SegmentId, Stages};

pub use shards::{Kind, Range};

use crate::accounting::ledger::{Category, Ledger};
use crate::accounting::memory::Memory;
use crate::disk::{Disk, DiskUse, Stored};
use crate::error::ZeroError;
use crate::gradients::LocalGradients;
use crate::groups::Groups;
use crate::layout::Layout;
use crate::optimizer::{OptimizerState, SegmentState};
use crate::options::{Widths, ZeroOptions};
use crate::outer::OuterState;
use crate::parameters::ParameterState;
use crate::rank::Rank;
use crate::reductions::Reductions;
use crate::rounding::working;
use crate::secondary::SecondaryShards;
use crate::states::{Column, Format, StateBuffer};

/// One rank's share of a model. Its methods execute the instructions of a program.
pub struct ShardedState {
    rank: Rank,
    memory: Memory,
    parameters: ParameterState,
    secondary: SecondaryShards,
    local: LocalGradients,
    gradients: Reductions,
    optimizer: OptimizerState,
    outer: OuterState,
    disk: Disk,
    /// The weights of this rank's ranges while the averages of a schedule-free optimizer replace them. An entry is
    /// `None` if its weights are on the disk.
    weights: Vec<Option<Vec<f32>>>,
}

/// Returns the maximum elements of a buffer that a rank keeps for reuse.
#[must_use]
pub fn longest_kept(layout: &Layout, options: &ZeroOptions) -> usize {
    if layout.uses_disk() || options.gradient_dtype != DType::F32 { KEPT } else { usize::MAX }
}

/// Maximum elements of a buffer kept for reuse while state is offloaded or gradients are in bf16, since memory is
/// scarce then. In f32, this is 16 MiB.
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
        let memory = Memory::new(&rank, longest_kept(&rank.layout, &rank.options))?;
        let disk = Disk::new(&rank)?;
        let mut zero = Self {
            memory,
            parameters: ParameterState::default(),
            secondary: SecondaryShards::default(),
            local: LocalGradients::new(segments),
            gradients: Reductions::new(segments, rank.options.order),
            optimizer: OptimizerState::default(),
            outer: OuterState::default(),
            disk,
            weights: vec![],
            rank,
        };
        zero.memory.count(Category::Staging, zero.disk.bounce_bytes() as usize, 1);
        for id in 0..segments {
            zero.initialise(id, seed)?;
            zero.secondary.push(&zero.rank, &mut zero.memory, id)?;
            zero.outer.push(&zero.rank, &mut zero.memory, id, seed);
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
        // Allocate each state as zeros. Cloning the first state would touch all memory before the first step needs it.
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

    /// Returns whether this rank's stage owns the segment. The owner reduces the segment's gradient, updates the
    /// segment and saves it.
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

    /// Returns the sums of a schedule-free optimizer's averages so far.
    #[must_use]
    pub fn average_sums(&self) -> AverageSums {
        self.optimizer.sums()
    }

    /// Sets the number of optimizer steps taken and the sums of a schedule-free optimizer's averages, to resume from a
    /// checkpoint.
    pub fn set_progress(&mut self, updates: u64, sums: AverageSums) {
        self.optimizer.set_progress(updates, sums);
    }

    /// Returns the bytes per element of each kind of value.
    #[must_use]
    pub fn widths(&self) -> Widths {
        self.rank.widths()
    }

    /// Returns the names of the states of all optimizers, preceded by the average of the weights if there is one.
    #[must_use]
    pub fn state_names(&self) -> Vec<&'static str> {
        self.rank.options.states()
    }

    /// Returns the names of the states that a parameter has if it is trainable.
    #[must_use]
    pub fn state_names_of(&self, parameter: &Parameter) -> Vec<&'static str> {
        self.rank.options.states_of(parameter)
    }
}
