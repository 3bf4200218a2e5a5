//! Sums of gradients: over the micro-batches of a rank, and over the ranks.

mod coded;
mod in_flight;
mod reduced;
mod squares;
mod tensor;

use std::collections::VecDeque;

use candle_core::DType;
use half::{bf16, f16};
use zero_comm::{Buffer, Dtype, Pending, ReduceOp, ToScatter};
use zero_model::sink::FlatBuffer;
use zero_optim::ExactSum;
use zero_pipeline::{Placement, SegmentId};

use in_flight::{ByPlace, PendingReduce, Reduction, Started};
pub(crate) use squares::no_squares;

use crate::accounting::ledger::Category;
use crate::accounting::memory::Memory;
use crate::accumulator::{Accumulator, Order};
use crate::error::ZeroError;
use crate::gpu;
use crate::grad_buffer::GradBuffer;
use crate::gradients::{LocalGradients, Open};
use crate::rank::Rank;
use crate::threads::round_in_place;

/// The gradient sums of one rank.
pub(crate) struct Reductions {
    segments: Vec<Sums>,
    /// Instructions that wait for gradients from the GPU, in program order.
    late: VecDeque<Late>,
    reducing: VecDeque<PendingReduce>,
    /// All-reduces in flight. Each sums, over the replicates of shards, gradients that are already sums of several
    /// micro-batches.
    over_replicates: Vec<(Vec<SegmentId>, Pending<Vec<Buffer>>)>,
    /// The sum of the squared norms of this rank's gradients in each micro-batch; zero unless the options ask for it.
    of_micro_batches: ExactSum,
}

/// The sums of one segment.
struct Sums {
    accumulated: Accumulator,
    /// Reduced gradients: the shard, or the whole segment if gradients are replicated.
    reduced: Option<GradBuffer>,
    /// Sums of squares of reduced gradients that have been offloaded, for the norms.
    squares: Option<Vec<ExactSum>>,
}

/// A micro-batch of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MicroBatch {
    pub(crate) index: usize,
    /// Number of micro-batches in the step.
    pub(crate) of: usize,
}

impl MicroBatch {
    fn is_last(self) -> bool {
        self.index + 1 == self.of
    }
}

/// An instruction that waits for gradients from the GPU. It runs after the next layer's backward has been launched.
enum Late {
    Accumulate(SegmentId, Box<Open>),
    Reduce(Vec<SegmentId>, MicroBatch, Vec<Option<Open>>),
}

impl Reductions {
    /// Creates the state of `segments` segments without gradients.
    pub(crate) fn new(segments: usize, order: Order) -> Self {
        let empty = |_| Sums { accumulated: Accumulator::new(order), reduced: None, squares: None };
        Self {
            segments: (0..segments).map(empty).collect(),
            late: VecDeque::new(),
            reducing: VecDeque::new(),
            over_replicates: vec![],
            of_micro_batches: ExactSum::new(),
        }
    }

    /// Starts the next collectives of reductions that can continue, and runs the instructions that wait for gradients
    /// from the GPU.
    pub(crate) fn catch_up(&mut self, rank: &Rank, memory: &mut Memory) -> Result<(), ZeroError> {
        self.pass_on(rank, memory, 0)?;
        while let Some(late) = self.late.pop_front() {
            match late {
                Late::Accumulate(id, open) => {
                    let summand = open.into_buffer(memory)?;
                    self.add_micro_batch(rank, id, &summand);
                    let summand = memory.kept(rank, summand)?;
                    self.add_up(memory, id, summand)?;
                }
                Late::Reduce(ids, micro_batch, opens) => self.start_reduce(rank, memory, ids, micro_batch, opens)?,
            }
        }
        Ok(())
    }

    /// Runs an instruction immediately or, if gradients come from a GPU, once the next layer's backward has been
    /// launched.
    fn run(&mut self, rank: &Rank, memory: &mut Memory, late: Late) -> Result<(), ZeroError> {
        self.late.push_back(late);
        if rank.brings_gradients() { Ok(()) } else { self.catch_up(rank, memory) }
    }

    /// Adds the micro-batch's complete gradient to this rank's accumulator.
    pub(crate) fn accumulate(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        local: &mut LocalGradients,
        id: SegmentId,
    ) -> Result<(), ZeroError> {
        self.run(rank, memory, Late::Accumulate(id, Box::new(local.take(id)?)))
    }

    /// Starts reducing a bucket over the ranks: the micro-batch's gradients if gradients are sharded, or the
    /// accumulated gradients if they are replicated.
    pub(crate) fn reduce(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        local: &mut LocalGradients,
        ids: &[SegmentId],
        micro_batch: MicroBatch,
    ) -> Result<(), ZeroError> {
        let mut opens = Vec::with_capacity(ids.len());
        for &id in ids {
            let is_sharded = rank.placements(id).gradients == Placement::Sharded;
            opens.push(if is_sharded { Some(local.take(id)?) } else { None });
        }
        self.run(rank, memory, Late::Reduce(ids.to_vec(), micro_batch, opens))
    }

    /// Adds a summand, which the ledger counts as staging, to the accumulator. If the summand starts a new partial sum,
    /// its memory then counts as gradients. With `Order::Arrival`, only the first summand starts one.
    fn add_up(&mut self, memory: &mut Memory, id: SegmentId, summand: GradBuffer) -> Result<(), ZeroError> {
        let (elements, width, mut merged) = (summand.len(), summand.width(), 0);
        self.segments[id].accumulated.add(summand, |done| {
            merged += 1;
            memory.give_kept_back(done);
        })?;
        memory.uncount(Category::Staging, elements, 4);
        match merged {
            0 => memory.count(Category::Gradients, elements, width),
            _ => memory.uncount(Category::Gradients, (merged - 1) * elements, width),
        }
        Ok(())
    }

    /// Adds accumulated gradients that were read from the disk. The ledger already counts them.
    pub(crate) fn add_stored(&mut self, id: SegmentId, sum: Vec<f32>) -> Result<(), ZeroError> {
        self.segments[id].accumulated.add(GradBuffer::F32(sum.into()), drop)
    }

    fn total(&mut self, memory: &mut Memory, id: SegmentId) -> Result<GradBuffer, ZeroError> {
        let total = self.segments[id].accumulated.take(|done| {
            memory.uncount(Category::Gradients, done.len(), done.width());
            memory.give_kept_back(done);
        })?;
        total.ok_or_else(|| ZeroError::internal("no gradient was accumulated"))
    }

    /// Starts the reduction of gradients over the ranks that share these segments.
    fn start_reduce(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        segments: Vec<SegmentId>,
        micro_batch: MicroBatch,
        opens: Vec<Option<Open>>,
    ) -> Result<(), ZeroError> {
        let (mut coded, mut cut, mut whole) = (ByPlace::default(), ByPlace::default(), ByPlace::default());
        let mut alone = vec![];
        for (&id, open) in segments.iter().zip(opens) {
            let local = match open {
                Some(open) => {
                    let local = open.into_buffer(memory)?;
                    self.add_micro_batch(rank, id, &local);
                    GradBuffer::F32(local)
                }
                None => self.total(memory, id)?,
            };
            let is_shared = rank.data().size() > 1;
            let is_cut = rank.shards().size() > 1 && rank.placements(id).optimizer == Placement::Sharded;
            if !coded::levels(rank, id).is_empty() {
                coded.add(local.host().is_none(), id, local);
            } else if is_cut && rank.options.reduce_scatter {
                let vector = to_scatter(rank, memory, id, local)?;
                cut.add(vector.input.is_on_device(), id, vector);
            } else if is_shared {
                let local = memory.packed(rank, local)?;
                whole.add(local.is_on_device(), id, local);
            } else {
                alone.push(match local {
                    GradBuffer::F32(local) => memory.kept(rank, rounded(local, rank.options.communication)?)?,
                    kept => kept,
                });
            }
        }
        let mut started =
            coded.start(|ids, local| Ok(Reduction::Coded(coded::exchange(rank, memory, ids, 0, local)?)))?;
        started.extend(cut.start(|_, vectors| {
            Ok(Reduction::Scatter(rank.shards().reduce_scatter_coalesced(vectors, ReduceOp::Sum)))
        })?);
        started.extend(
            whole.start(|_, buffers| Ok(Reduction::All(rank.data().all_reduce_coalesced(buffers, ReduceOp::Sum))))?,
        );
        if !alone.is_empty() {
            started.push(Started { segments: segments.clone(), reduction: Reduction::Alone(alone) });
        }
        let sums_first = rank.layout.sums_before_replicates(&rank.options, micro_batch.of);
        self.reducing.push_back(PendingReduce { segments, micro_batch, sums_first, started });
        Ok(())
    }

    /// Waits for a bucket's reduction and stores the result.
    pub(crate) fn await_reduce(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        ids: &[SegmentId],
        micro_batch: usize,
    ) -> Result<(), ZeroError> {
        self.catch_up(rank, memory)?;
        let position = self.reducing.iter().position(|p| p.segments == ids && p.micro_batch.index == micro_batch);
        self.pass_on(rank, memory, position.map_or(0, |position| position + 1))?;
        let pending = position
            .and_then(|position| self.reducing.remove(position))
            .ok_or_else(|| ZeroError::internal("no such reduction was started"))?;
        let sums_replicates = pending.sums_first && pending.micro_batch.is_last();
        for Started { segments, reduction } in pending.started {
            let is_of_shards = matches!(reduction, Reduction::Scatter(_) | Reduction::Coded(_));
            self.store(rank, memory, &segments, reduction)?;
            if sums_replicates && is_of_shards {
                self.start_over_replicates(rank, memory, segments)?;
            }
        }
        Ok(())
    }

    /// Stores the result of an all-reduce: the whole segment, or this rank's part if gradients are sharded.
    fn file_all(&mut self, rank: &Rank, memory: &mut Memory, id: SegmentId, full: GradBuffer) -> Result<(), ZeroError> {
        if rank.placements(id).gradients == Placement::Replicated {
            self.segments[id].reduced = Some(full);
            return Ok(());
        }
        let own = rank.shard(id);
        if own.len() == full.len() {
            return self.add_up(memory, id, full);
        }
        let mut shard = memory.room_for_kept(rank, id, own.len())?;
        shard.copy(0, &full, own)?;
        memory.count(Category::Staging, shard.len(), 4);
        memory.uncount(Category::Staging, full.len(), 4);
        memory.give_kept_back(full);
        self.add_up(memory, id, shard)
    }

    /// Stores this rank's part of a reduce-scatter. Reuses the memory of `input`, which is in the communication dtype.
    fn file(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        id: SegmentId,
        input: Buffer,
        shard: Buffer,
    ) -> Result<(), ZeroError> {
        let shard = memory.received(rank, id, shard)?;
        let (own, elements) = (rank.shard(id), rank.segment(id).elements());
        if rank.placements(id).gradients == Placement::Sharded {
            memory.uncount(Category::Staging, elements, 4);
            if let Buffer::F32(input) = input {
                memory.give(input);
            }
            return self.add_up(memory, id, shard);
        }
        memory.uncount(Category::Staging, shard.len(), 4);
        let mut full = match input {
            Buffer::F32(input) if !rank.is_resident(id) => memory.kept(rank, FlatBuffer::Host(input))?,
            Buffer::Bf16(_) if shard.width() == 2 => memory.received(rank, id, input)?,
            Buffer::Device(_) if input.dtype() == Dtype::F32 => memory.received(rank, id, input)?,
            _ => memory.room_for_kept(rank, id, elements)?,
        };
        full.copy(own.start, &shard, 0..own.len())?;
        memory.give_kept_back(shard);
        self.segments[id].reduced = Some(full);
        Ok(())
    }
}

/// Rounds a gradient to the communication dtype, although this rank sends it to no other rank: in a larger group, it
/// would be rounded before it is sent. Values on a GPU are rounded when they are read.
fn rounded(local: FlatBuffer, dtype: DType) -> Result<FlatBuffer, ZeroError> {
    if local.host().is_none() {
        return gpu::communicated(local, dtype);
    }
    let mut values = local.into_host()?;
    match dtype {
        DType::BF16 => round_in_place::<bf16>(&mut values),
        DType::F16 => round_in_place::<f16>(&mut values),
        _ => {}
    }
    Ok(FlatBuffer::Host(values))
}

/// Returns the buffers that the reduce-scatter of a segment sends and receives.
fn to_scatter(rank: &Rank, memory: &mut Memory, id: SegmentId, local: GradBuffer) -> Result<ToScatter, ZeroError> {
    let counts = rank.segment(id).counts();
    let own = counts[rank.shards().rank()];
    memory.count(Category::Staging, own, 4);
    let shard = memory.room_for_packed(rank, id, own)?;
    let input = memory.packed(rank, local)?;
    Ok(ToScatter { input, shard, counts })
}
