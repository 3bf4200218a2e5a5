//! The trust ratios of LAMB: norms of whole parameters, whose shards are on several ranks.
//!
//! Before the first update of a step, each rank adds its gradients to its moments and sums the squares of its shards. One
//! all-reduce of exact sums then gives the norms of all parameters, with the same bits in every layout.

use candle_core::{CpuStorage, Storage};
use zero_comm::{Buffer, ReduceOp};
use zero_model::{ParameterId, ops::in_parallel};
use zero_optim::exact_sum::LIMBS;
use zero_optim::{ExactSum, Lamb, LengthError, Optimizer, Squares, Step};
use zero_pipeline::{Placement, SegmentId};

use crate::error::ZeroError;
use crate::optimizer::{OptimizerState, Scaling, SegmentState, StepInputs, on_host, tuned};
use crate::threads::share;

/// The ratios of one step, by parameter. Empty before they are computed, and for other optimizers.
#[derive(Default)]
pub(crate) struct TrustRatios(Vec<f64>);

impl TrustRatios {
    /// Returns the factor of a parameter's learning rate.
    pub(crate) fn of(&self, parameter: ParameterId) -> f64 {
        self.0.get(parameter).copied().unwrap_or(1.0)
    }
}

impl OptimizerState {
    /// Takes the first pass of a step of LAMB over all segments, unless this step has taken it. Collective over the stage.
    pub(crate) fn measure_trust(&mut self, with: &StepInputs<'_>, scaling: Scaling) -> Result<(), ZeroError> {
        let rank = with.rank;
        if !matches!(rank.options.optimizer, Optimizer::Lamb(_)) || !self.trust.0.is_empty() {
            return Ok(());
        }
        let mut squares: Vec<Squares> = vec![Squares::default(); rank.model.parameters().len()];
        for id in rank.updated() {
            self.accumulate(with, id, scaling, &mut squares)?;
        }
        let is_sharded = |&id: &SegmentId| rank.placements(id).optimizer == Placement::Sharded;
        let pieces = rank.updated().into_iter().filter(is_sharded).flat_map(|id| &rank.segment(id).pieces);
        let sharded: Vec<ParameterId> = pieces.map(|piece| piece.parameter).collect();
        if rank.comm().size() > 1 && !sharded.is_empty() {
            let sums = sharded.iter().flat_map(|&p| [&squares[p].params, &squares[p].direction]);
            let limbs = Buffer::I64(sums.flat_map(|sum| sum.limbs().iter().copied()).collect());
            let Buffer::I64(limbs) = rank.comm().all_reduce(limbs, ReduceOp::Sum).wait()? else {
                return Err(ZeroError::internal("a collective returned values of an unexpected dtype"));
            };
            for (&parameter, limbs) in sharded.iter().zip(limbs.chunks(2 * LIMBS)) {
                let (params, direction) = limbs.split_at(LIMBS.min(limbs.len()));
                let sum = ExactSum::from_limbs;
                squares[parameter] = Squares { params: sum(params)?, direction: sum(direction)? };
            }
        }
        let ratio = |(squares, parameter): (&Squares, &zero_model::Parameter)| match tuned(
            rank.options.optimizer,
            &with.rate,
            &parameter.tuning(),
        )
        .0
        {
            Optimizer::Lamb(lamb) => lamb.trust_ratio(squares),
            _ => 1.0,
        };
        self.trust = TrustRatios(squares.iter().zip(rank.model.parameters()).map(ratio).collect());
        Ok(())
    }

    /// Adds the gradients of this rank's part of a segment to its moments, and the squares of the part to those of the
    /// parameters.
    fn accumulate(
        &mut self,
        with: &StepInputs<'_>,
        id: SegmentId,
        scaling: Scaling,
        squares: &mut [Squares],
    ) -> Result<(), ZeroError> {
        let (rank, step) = (with.rank, self.updates() + 1);
        let (segment, own, options) = (rank.segment(id), rank.own_range(id), &rank.options);
        let offset = segment.begin_in_gradients(&own);
        let gradients = on_host(with.gradients.reduced(id)?.host())?;
        let SegmentState { master, states } = self.segment_mut(id);
        let master = if master.is_empty() { None } else { Some(on_host(master.host())?) };
        let averages = usize::from(options.average.is_some());
        let mut moments = states.iter_mut().skip(averages).map(|state| on_host(state.host_mut())?.f32());
        let (Some(m), Some(v)) = (moments.next().transpose()?, moments.next().transpose()?) else {
            return Err(ZeroError::internal("LAMB needs two moments"));
        };
        for (index, inside, at) in segment.overlaps(own.clone()) {
            let parameter = &rank.model.parameters()[index];
            let (Optimizer::Lamb(lamb), lr) = tuned(options.optimizer, &with.rate, &parameter.tuning()) else {
                continue;
            };
            let Scaling { grad_scale, grad_limit } = scaling;
            let step = Step { step, lr, grad_scale, grad_limit, decay: options.decays(parameter) };
            let grads = &gradients[at.start + offset..at.end + offset];
            let moments = [&mut m[at.clone()], &mut v[at.clone()]];
            let run = |params: &[f32]| add_range(&lamb, &step, params, grads, moments, &mut squares[index]);
            match (&master, with.parameters.shard(id)) {
                (Some(master), _) => run(&master[at])?,
                (None, Some(Storage::Cpu(CpuStorage::F32(shard)))) => run(&shard[at])?,
                (None, None) => match &*parameter.leaf().storage_and_layout().0 {
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
    ZeroError::internal("LAMB needs parameters in f32, in host memory")
}

/// Runs [`Lamb::accumulate`] on several threads.
fn add_range(
    lamb: &Lamb,
    step: &Step,
    params: &[f32],
    grads: &[f32],
    [m, v]: [&mut [f32]; 2],
    squares: &mut Squares,
) -> Result<(), LengthError> {
    let size = share(params.len());
    let moments = m.chunks_mut(size).zip(v.chunks_mut(size));
    let mut parts: Vec<_> = params
        .chunks(size)
        .zip(grads.chunks(size))
        .zip(moments)
        .map(|((params, grads), (m, v))| (params, grads, [m, v], Squares::default(), Ok(())))
        .collect();
    in_parallel(&mut parts, |(params, grads, [m, v], squares, result)| {
        *result = lamb.accumulate(step, params, grads, [m, v], squares);
    });
    parts.into_iter().try_for_each(|(.., part, result)| {
        squares.merge(&part);
        result
    })
}
