//! Sums of gradients: over the micro-batches of a rank, and over the ranks.

use std::collections::VecDeque;
use std::ops::Range;

use candle_core::DType;
use half::{bf16, f16};
use zero_comm::{Buffer, Dtype, Pending, ReduceOp, Scattered};
use zero_model::ParameterId;
use zero_model::sink::FlatBuffer;
use zero_optim::ExactSum;
use zero_pipeline::{Placement, SegmentId};

use crate::accumulator::{Accumulator, Order};
use crate::error::ZeroError;
use crate::gpu::{self, Gpu};
use crate::gradients::{LocalGradients, Open};
use crate::ledger::Category;
use crate::memory::Memory;
use crate::rank::Rank;
use crate::threads::{add_parameter_range, round_in_place};

/// The gradient sums of one rank.
pub(crate) struct Reductions {
    segments: Vec<Sums>,
    /// Instructions that wait for gradients from the GPU, in program order.
    late: VecDeque<Late>,
    reducing: VecDeque<PendingReduce>,
    /// Squares of this rank's gradients of single micro-batches, if they are summed.
    of_micro_batches: ExactSum,
}

/// The sums of one segment.
struct Sums {
    accumulated: Accumulator,
    /// Reduced gradients: the shard, or the whole segment if gradients are replicated.
    reduced: Option<FlatBuffer>,
    /// Sums of squares of reduced gradients that have been offloaded, for the norms.
    squares: Option<Vec<ExactSum>>,
}

/// An instruction that waits for gradients from the GPU. It runs after the next layer's backward has been launched.
enum Late {
    Accumulate(SegmentId, Box<Open>),
    Reduce(Vec<SegmentId>, usize, Vec<Option<Open>>),
}

/// A bucket whose reduction is in flight.
struct PendingReduce {
    segments: Vec<SegmentId>,
    micro_batch: usize,
    started: Vec<Reduction>,
}

enum Reduction {
    /// With one rank, the local gradient is the sum.
    Alone(FlatBuffer),
    All(Pending<Buffer>),
    Scatter(Pending<Scattered>),
}

impl Reductions {
    /// Creates the state of `segments` segments without gradients.
    pub(crate) fn new(segments: usize, order: Order) -> Self {
        let empty = |_| Sums { accumulated: Accumulator::new(order), reduced: None, squares: None };
        Self {
            segments: (0..segments).map(empty).collect(),
            late: VecDeque::new(),
            reducing: VecDeque::new(),
            of_micro_batches: ExactSum::new(),
        }
    }

    /// Runs the instructions that wait for gradients from the GPU.
    pub(crate) fn catch_up(&mut self, rank: &Rank, memory: &mut Memory) -> Result<(), ZeroError> {
        while let Some(late) = self.late.pop_front() {
            match late {
                Late::Accumulate(id, open) => {
                    let summand = open.into_buffer(memory)?;
                    self.add_micro_batch(rank, id, &summand);
                    self.add_up(memory, id, summand)?;
                }
                Late::Reduce(ids, micro_batch, opens) => self.start_reduce(rank, memory, ids, micro_batch, opens)?,
            }
        }
        Ok(())
    }

    /// Runs an instruction immediately, unless gradients come from a GPU. It then runs once the next layer's backward
    /// has been launched.
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

    /// Starts reducing a bucket over the ranks: the micro-batch's gradients if they are sharded, or the accumulated
    /// ones if they are replicated.
    pub(crate) fn reduce(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        local: &mut LocalGradients,
        ids: &[SegmentId],
        micro_batch: usize,
    ) -> Result<(), ZeroError> {
        let mut opens = Vec::with_capacity(ids.len());
        for &id in ids {
            let is_sharded = rank.placements(id).gradients == Placement::Sharded;
            opens.push(if is_sharded { Some(local.take(id)?) } else { None });
        }
        self.run(rank, memory, Late::Reduce(ids.to_vec(), micro_batch, opens))
    }

    /// Adds the squares of a micro-batch's gradient, if they are summed.
    fn add_micro_batch(&mut self, rank: &Rank, id: SegmentId, local: &FlatBuffer) {
        let Some(local) = local.host().filter(|_| rank.options.sums_micro_batches) else { return };
        for piece in &rank.segment(id).pieces {
            add_parameter_range(&mut self.of_micro_batches, &local[piece.range.clone()]);
        }
    }

    /// Takes the squares of this rank's gradients of single micro-batches since the last call.
    pub(crate) fn take_micro_batch_squares(&mut self) -> ExactSum {
        std::mem::replace(&mut self.of_micro_batches, ExactSum::new())
    }

    /// Adds a summand, which the ledger counts as staging, to the accumulator. The summand's memory moves to the
    /// gradients only if it opens a partial sum; in order of arrival, only the first summand does.
    fn add_up(&mut self, memory: &mut Memory, id: SegmentId, summand: FlatBuffer) -> Result<(), ZeroError> {
        let (elements, mut merged) = (summand.len(), 0);
        self.segments[id].accumulated.add(summand, |done| {
            merged += 1;
            memory.give_back(done);
        })?;
        memory.uncount(Category::Staging, elements, 4);
        match merged {
            0 => memory.count(Category::Gradients, elements, 4),
            _ => memory.uncount(Category::Gradients, (merged - 1) * elements, 4),
        }
        Ok(())
    }

    /// Adds accumulated gradients that were read from the disk, and that the ledger counts already.
    pub(crate) fn add_stored(&mut self, id: SegmentId, sum: Vec<f32>) -> Result<(), ZeroError> {
        self.segments[id].accumulated.add(sum.into(), drop)
    }

    fn total(&mut self, memory: &mut Memory, id: SegmentId) -> Result<FlatBuffer, ZeroError> {
        let total = self.segments[id].accumulated.take(|done| {
            memory.uncount(Category::Gradients, done.len(), 4);
            memory.give_back(done);
        })?;
        total.ok_or_else(|| ZeroError::internal("no gradient was accumulated"))
    }

    fn start_reduce(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        segments: Vec<SegmentId>,
        micro_batch: usize,
        opens: Vec<Option<Open>>,
    ) -> Result<(), ZeroError> {
        let mut started = Vec::with_capacity(segments.len());
        for (&id, open) in segments.iter().zip(opens) {
            let local = match open {
                Some(open) => {
                    let local = open.into_buffer(memory)?;
                    self.add_micro_batch(rank, id, &local);
                    local
                }
                None => self.total(memory, id)?,
            };
            let is_shared = rank.comm().size() > 1;
            let is_sharded = rank.placements(id).optimizer == Placement::Sharded;
            started.push(if is_shared && is_sharded && rank.options.reduce_scatter {
                Reduction::Scatter(scatter(rank, memory, id, local)?)
            } else if !is_shared {
                Reduction::Alone(alone(local, rank.options.communication)?)
            } else {
                let local = memory.packed(rank, local)?;
                Reduction::All(rank.comm().all_reduce(local, ReduceOp::Sum))
            });
        }
        self.reducing.push_back(PendingReduce { segments, micro_batch, started });
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
        let position = self.reducing.iter().position(|p| p.segments == ids && p.micro_batch == micro_batch);
        let pending = position
            .and_then(|position| self.reducing.remove(position))
            .ok_or_else(|| ZeroError::internal("no such reduction was started"))?;
        for (id, reduction) in pending.segments.into_iter().zip(pending.started) {
            match reduction {
                Reduction::Alone(full) => self.file_all(rank, memory, id, full)?,
                Reduction::All(pending) => {
                    let full = memory.unpacked(rank, id, pending.wait()?)?;
                    self.file_all(rank, memory, id, full)?;
                }
                Reduction::Scatter(pending) => {
                    let Scattered { input, shard } = pending.wait()?;
                    let shard = memory.unpacked(rank, id, shard)?;
                    self.file(rank, memory, id, input, shard)?;
                }
            }
        }
        Ok(())
    }

    /// Stores the result of an all-reduce: the whole segment, or this rank's part if gradients are sharded.
    fn file_all(&mut self, rank: &Rank, memory: &mut Memory, id: SegmentId, full: FlatBuffer) -> Result<(), ZeroError> {
        if rank.placements(id).gradients == Placement::Replicated {
            self.segments[id].reduced = Some(full);
            return Ok(());
        }
        let own = rank.shard(id);
        if own.len() == full.len() {
            return self.add_up(memory, id, full);
        }
        let mut shard = memory.room(rank, id, own.len())?;
        shard.copy(0, &full, own)?;
        memory.count(Category::Staging, shard.len(), 4);
        memory.uncount(Category::Staging, full.len(), 4);
        memory.give_back(full);
        self.add_up(memory, id, shard)
    }

    /// Stores this rank's part of a reduce-scatter. Reuses the memory of the input, which is in the communication
    /// dtype.
    fn file(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        id: SegmentId,
        input: Buffer,
        shard: FlatBuffer,
    ) -> Result<(), ZeroError> {
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
            Buffer::F32(input) if !rank.is_resident(id) => FlatBuffer::Host(input),
            Buffer::Device(_) if input.dtype() == Dtype::F32 => memory.unpacked(rank, id, input)?,
            _ => memory.room(rank, id, elements)?,
        };
        full.copy(own.start, &shard, 0..own.len())?;
        memory.give_back(shard);
        self.segments[id].reduced = Some(full);
        Ok(())
    }

    /// Turns the accumulated sharded gradients into the reduced ones, after the last micro-batch.
    pub(crate) fn settle(&mut self, rank: &Rank, memory: &mut Memory, id: SegmentId) -> Result<(), ZeroError> {
        self.catch_up(rank, memory)?;
        if self.segments[id].reduced.is_none() {
            self.segments[id].reduced = Some(self.total(memory, id)?);
        }
        Ok(())
    }

    /// Returns the reduced gradients of a segment.
    pub(crate) fn reduced(&self, id: SegmentId) -> Result<&FlatBuffer, ZeroError> {
        self.segments[id].reduced.as_ref().ok_or_else(not_reduced)
    }

    /// Takes the reduced gradients out of a segment.
    pub(crate) fn take_reduced(&mut self, memory: &mut Memory, id: SegmentId) -> Result<FlatBuffer, ZeroError> {
        let gradients = self.segments[id].reduced.take().ok_or_else(not_reduced)?;
        memory.uncount(Category::Gradients, gradients.len(), 4);
        Ok(gradients)
    }

    /// Frees a segment's reduced gradients, after an update or in a skipped step. If parameters are sharded, memory
    /// matters more than the time to clear it, so the gradients are freed and the activations of the next forward can
    /// use their memory.
    pub(crate) fn discard(&mut self, rank: &Rank, memory: &mut Memory, id: SegmentId) -> Result<(), ZeroError> {
        let gradients = self.take_reduced(memory, id)?;
        match rank.placements(id).parameters {
            Placement::Replicated => memory.give_back(gradients),
            Placement::Sharded => drop(gradients),
        }
        Ok(())
    }

    /// Takes the accumulated gradients of a segment, to be offloaded, and keeps their sum of squares for the norm.
    pub(crate) fn take_to_offload(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        id: SegmentId,
    ) -> Result<Vec<f32>, ZeroError> {
        self.settle(rank, memory, id)?;
        let gradients = self.take_reduced(memory, id)?.into_host()?;
        let mut squares = no_squares(rank);
        for (parameter, _, at) in rank.segment(id).overlaps(rank.shard(id)) {
            add_parameter_range(&mut squares[clipping(rank, parameter)], &gradients[at]);
        }
        self.segments[id].squares = Some(squares);
        Ok(gradients)
    }

    /// Adds the squares of this rank's share of the reduced gradients that are not on the GPU, to the sum of each clipping.
    pub(crate) fn add_squares(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        sums: &mut [ExactSum],
    ) -> Result<(), ZeroError> {
        for id in rank.updated() {
            if let Some(squares) = self.segments[id].squares.take() {
                sums.iter_mut().zip(&squares).for_each(|(sum, squares)| sum.merge(squares));
                continue;
            }
            self.settle(rank, memory, id)?;
            let Some(gradients) = self.reduced(id)?.host() else { continue };
            for (parameter, range) in shares(rank, id) {
                add_parameter_range(&mut sums[clipping(rank, parameter)], &gradients[range]);
            }
        }
        Ok(())
    }

    /// Passes this rank's share of the reduced gradients on the GPU to `then`, as ranges of buffers.
    pub(crate) fn on_gpu<T>(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        then: impl FnOnce(&mut Gpu, &[(&FlatBuffer, Vec<Range<usize>>)]) -> Result<T, ZeroError>,
    ) -> Result<T, ZeroError> {
        let resident: Vec<SegmentId> = rank.updated().into_iter().filter(|&id| rank.is_resident(id)).collect();
        resident.iter().try_for_each(|&id| self.settle(rank, memory, id))?;
        let ranges = |id| shares(rank, id).into_iter().map(|(_, range)| range).collect();
        let gradients = resident.iter().map(|&id| Ok((self.reduced(id)?, ranges(id))));
        let gradients = gradients.collect::<Result<Vec<_>, ZeroError>>()?;
        then(memory.gpu()?, &gradients)
    }
}

/// Returns a sum for each clipping.
pub(crate) fn no_squares(rank: &Rank) -> Vec<ExactSum> {
    vec![ExactSum::new(); 1 + rank.options.clippings.len()]
}

/// Returns how the gradient of a parameter is clipped.
fn clipping(rank: &Rank, parameter: ParameterId) -> usize {
    rank.model.parameters()[parameter].tuning().clipping
}

/// Returns this rank's share of a segment, as parameters with their ranges of the reduced gradients. With replicated
/// gradients too, each rank has only its shard, so that no element is counted twice.
fn shares(rank: &Rank, id: SegmentId) -> Vec<(ParameterId, Range<usize>)> {
    let (segment, shard) = (rank.segment(id), rank.shard(id));
    let offset = segment.begin_in_gradients(&shard);
    segment.overlaps(shard).map(|(parameter, _, at)| (parameter, at.start + offset..at.end + offset)).collect()
}

/// Rounds a gradient to the communication dtype, as a rank of several does before it sends it. Values on a GPU are rounded
/// when they are read.
fn alone(local: FlatBuffer, dtype: DType) -> Result<FlatBuffer, ZeroError> {
    if local.host().is_none() {
        return gpu::travelled(local, dtype);
    }
    let mut values = local.into_host()?;
    match dtype {
        DType::BF16 => round_in_place::<bf16>(&mut values),
        DType::F16 => round_in_place::<f16>(&mut values),
        _ => {}
    }
    Ok(FlatBuffer::Host(values))
}

fn scatter(
    rank: &Rank,
    memory: &mut Memory,
    id: SegmentId,
    local: FlatBuffer,
) -> Result<Pending<Scattered>, ZeroError> {
    let counts = rank.segment(id).counts();
    let own = counts[rank.comm().rank()];
    memory.count(Category::Staging, own, 4);
    let shard = memory.room_for_packed(rank, id, own)?;
    let input = memory.packed(rank, local)?;
    Ok(rank.comm().reduce_scatter(input, shard, &counts, ReduceOp::Sum))
}

fn not_reduced() -> ZeroError {
    ZeroError::internal("the gradients of the update are not reduced yet")
}
