//! The first pass of LAMB and Adafactor, which need norms of whole parameters although shards are on several ranks.
//!
//! Before the first update of a step, each rank adds its gradients to its moments and sums the squares of its shards,
//! tile by tile if they are on a disk. One all-reduce of exact sums then gives the norms of all parameters, with the
//! same bits in every layout.

use std::ops::Range;

use candle_core::{CpuStorage, Storage};
use zero_comm::{Buffer, Communicator, ReduceOp};
use zero_model::{ParameterId, ops::in_parallel};
use zero_optim::exact_sum::LIMBS;
use zero_optim::{ExactSum, LengthError, Optimizer, SecondMoment, Squares, Step};
use zero_pipeline::{Placement, SegmentId};
use zero_tier::AlignedBuffer;

use crate::accounting::ledger::Category;
use crate::disk::Tile;
use crate::error::ZeroError;
use crate::narrow::Values;
use crate::optimizer::{OptimizerState, Scaling, StepInputs, tuned};
use crate::rank::Rank;
use crate::threads::{factor, share};

/// The sums of squares that one step needs, by parameter.
#[derive(Default)]
pub(crate) struct Trust {
    /// The squares of this rank's tiles so far. Empty before the first tile.
    own: Vec<Squares>,
    /// The squares of whole parameters. Empty before they are summed, and for other optimizers.
    whole: Vec<Squares>,
}

impl Trust {
    /// Returns the optimizer and the step with which the second pass updates a whole parameter of `elements` elements.
    pub(crate) fn applied(
        &self,
        parameter: ParameterId,
        elements: usize,
        optimizer: Optimizer,
        step: Step,
    ) -> (Optimizer, Step) {
        match (optimizer, self.whole.get(parameter)) {
            (Optimizer::Lamb(lamb), Some(squares)) => {
                (Optimizer::Lamb(lamb), Step { lr: step.lr * lamb.trust_ratio(squares), ..step })
            }
            (Optimizer::Adafactor(of), Some(squares)) => {
                (Optimizer::Adafactor(of.with_rate(&step, squares, elements)), step)
            }
            (optimizer, _) => (optimizer, step),
        }
    }
}

impl OptimizerState {
    /// Runs the first pass of a step on all segments in memory, unless the optimizer takes only one pass or this step
    /// has already run the first pass. Then sums the squares of segments and tiles over the ranks. Collective over the
    /// stage.
    pub(crate) fn measure_trust(&mut self, with: &mut StepInputs<'_>, scalings: &[Scaling]) -> Result<(), ZeroError> {
        let rank = with.rank;
        let mut segments = rank.updated();
        segments.retain(|&id| rank.segment(id).two_passes);
        if segments.is_empty() || !self.trust.whole.is_empty() {
            return Ok(());
        }
        let mut squares = self.own_squares(rank);
        for &id in segments.iter().filter(|&&id| rank.segment(id).tiers.tiles == 0) {
            let own = 0..rank.own_range(id).len();
            self.accumulate(with, id, own, &mut Tile::empty(), scalings, &mut squares)?;
        }
        reduce(rank, segments, &mut squares)?;
        self.trust.whole = squares;
        Ok(())
    }

    /// Runs the first pass of a step on a tile, unless the step is skipped.
    pub(crate) fn measure_tile(
        &mut self,
        with: &mut StepInputs<'_>,
        id: SegmentId,
        part: Range<usize>,
        tile: &mut Tile<AlignedBuffer>,
    ) -> Result<(), ZeroError> {
        let Some(scalings) = self.scalings()? else { return Ok(()) };
        let mut squares = self.own_squares(with.rank);
        if !part.is_empty() {
            self.accumulate(with, id, part, tile, &scalings, &mut squares)?;
        }
        self.trust.own = squares;
        Ok(())
    }

    /// Takes the squares of the tiles that have been measured.
    fn own_squares(&mut self, rank: &Rank) -> Vec<Squares> {
        let mut squares = std::mem::take(&mut self.trust.own);
        squares.resize(rank.model.parameters().len(), Squares::default());
        squares
    }

    /// Runs the first pass on `part`, a range of this rank's part of a segment: adds the gradients to the moments and
    /// adds the squares to `squares`. Takes values from `tile` if it has them, and from memory otherwise.
    fn accumulate(
        &mut self,
        with: &mut StepInputs<'_>,
        id: SegmentId,
        part: Range<usize>,
        tile: &mut Tile<AlignedBuffer>,
        scalings: &[Scaling],
        squares: &mut [Squares],
    ) -> Result<(), ZeroError> {
        let (rank, step) = (with.rank, self.updates() + 1);
        let (segment, own, options) = (rank.segment(id), rank.own_range(id), &rank.options);
        if !own.is_empty() {
            let bytes = segment.update_bytes();
            with.memory.count(Category::Staging, bytes, 1);
            with.memory.uncount(Category::Staging, bytes, 1);
        }
        let Tile { state: in_tile, gradients: of_tile, parameters: params_of_tile } = tile;
        let gradients = with.gradients.part(rank, id, &part, of_tile.as_ref())?.f32()?;
        // States in memory cover this rank's whole part, not only `part`.
        let skipped = if in_tile.is_some() { 0 } else { part.start };
        let (kinds, master) = self.segment_mut(id).part(in_tile, rank, id, &part)?;
        let states = kinds.into_iter().skip(options.averages()).map(Values::f32);
        let mut states: Vec<&mut [f32]> = states.collect::<Result<_, ZeroError>>()?;
        for (index, inside, at) in segment.overlaps(own.start + part.start..own.start + part.end) {
            let parameter = &rank.model.parameters()[index];
            let (optimizer, lr) = tuned(rank.optimizer(id), &with.rate, &parameter.tuning());
            let Scaling { grad_scale, grad_limit } = scalings[parameter.tuning().clipping];
            let step = Step { step, lr, grad_scale, grad_limit, decay: options.decays(parameter) };
            let (grads, in_state) = (&gradients[at.clone()], at.start + skipped..at.end + skipped);
            let moments = states.iter_mut().enumerate();
            let moments = moments.map(|(index, state)| &mut state[segment.in_state(index, in_state.clone())]).collect();
            let shape = segment.matrix.as_ref().map(|matrix| matrix.shape);
            let run = |params: &[f32]| add(&optimizer, &step, shape, params, grads, moments, &mut squares[index]);
            match (&master, &*params_of_tile, with.parameters.shard(id)) {
                (Some(master), ..) => run(&master[at])?,
                (None, Some(buffer), _) => run(&buffer.as_f32()[at])?,
                (None, None, Some(Storage::Cpu(CpuStorage::F32(shard)))) => {
                    run(&shard[part.start + at.start..part.start + at.end])?;
                }
                (None, None, None) => match &*parameter.leaf().storage_and_layout().0 {
                    Storage::Cpu(CpuStorage::F32(full)) => run(&full[inside])?,
                    _ => return Err(not_in_f32()),
                },
                _ => return Err(not_in_f32()),
            }
        }
        Ok(())
    }
}

fn not_in_f32() -> ZeroError {
    ZeroError::internal("this optimizer needs parameters in f32, in host memory")
}

/// Sums squares over the ranks that hold parts of the same parameters: those of sharded segments over the shard group,
/// then those of cut parameters over the tensor group.
fn reduce(rank: &Rank, segments: Vec<SegmentId>, squares: &mut [Squares]) -> Result<(), ZeroError> {
    let parameters_of = |is_one: &dyn Fn(SegmentId) -> bool| {
        let pieces = segments.iter().filter(|&&id| is_one(id)).flat_map(|&id| &rank.segment(id).pieces);
        pieces.map(|piece| piece.parameter).collect()
    };
    let sharded = parameters_of(&|id| rank.placements(id).optimizer == Placement::Sharded);
    let cut = parameters_of(&|id| !rank.segment(id).is_shared);
    sum_over(&**rank.shards(), sharded, squares)?;
    rank.groups.tensor().map_or(Ok(()), |tensor| sum_over(&**tensor, cut, squares))
}

/// Sums the squares of these parameters over the ranks of a group.
fn sum_over(group: &dyn Communicator, parameters: Vec<ParameterId>, squares: &mut [Squares]) -> Result<(), ZeroError> {
    if group.size() == 1 || parameters.is_empty() {
        return Ok(());
    }
    let sums = parameters.iter().flat_map(|&p| [&squares[p].params, &squares[p].direction]);
    let limbs = Buffer::I64(sums.flat_map(|sum| sum.limbs().iter().copied()).collect());
    let limbs = group.all_reduce(limbs, ReduceOp::Sum).wait()?.into_i64()?;
    for (&parameter, limbs) in parameters.iter().zip(limbs.chunks(2 * LIMBS)) {
        let (params, direction) = limbs.split_at(LIMBS.min(limbs.len()));
        let sum = ExactSum::from_limbs;
        squares[parameter] = Squares { params: sum(params)?, direction: sum(direction)? };
    }
    Ok(())
}

/// Runs the first pass on a range of a parameter, on several threads. For a matrix with factors, `shape` is its shape
/// and the range is the whole matrix.
fn add(
    optimizer: &Optimizer,
    step: &Step,
    shape: Option<[usize; 2]>,
    params: &[f32],
    grads: &[f32],
    mut moments: Vec<&mut [f32]>,
    squares: &mut Squares,
) -> Result<(), LengthError> {
    let (size, mut factored) = (share(params.len()), None);
    if let (Optimizer::Adafactor(of), Some(shape), true) = (optimizer, shape, moments.len() == 1) {
        let factors = moments.remove(0);
        let mean = factor(of, step, shape, grads, factors)?;
        factored = Some((&*factors, shape[0], mean));
    }
    let mut moments: Vec<_> = moments.into_iter().map(|moment| moment.chunks_mut(size)).collect();
    let mut parts: Vec<_> = params
        .chunks(size)
        .zip(grads.chunks(size))
        .enumerate()
        .map(|(part, (params, grads))| {
            let moments: Vec<&mut [f32]> = moments.iter_mut().filter_map(Iterator::next).collect();
            (part * size, params, grads, moments, Squares::default(), Ok(()))
        })
        .collect();
    in_parallel(&mut parts, |(first, params, grads, moments, squares, result)| {
        *result = match (optimizer, factored, &mut moments[..]) {
            (Optimizer::Lamb(lamb), None, [m, v]) => lamb.accumulate(step, params, grads, [m, v], squares),
            (Optimizer::Adafactor(of), Some((factors, rows, mean)), []) => {
                let moment = SecondMoment::Factored { factors, rows, mean, first: *first };
                of.add_squares(step, params, grads, moment, squares)
            }
            (Optimizer::Adafactor(of), None, [v]) => of
                .add(step, grads, v)
                .and_then(|()| of.add_squares(step, params, grads, SecondMoment::Full(v), squares)),
            (optimizer, _, moments) => {
                Err(LengthError { what: "states", expected: optimizer.states().len(), found: moments.len() })
            }
        };
    });
    parts.into_iter().try_for_each(|(.., part, result)| {
        squares.merge(&part);
        result
    })
}
