//! Holds master parameters and optimizer states, checks the gradient norm and runs the optimizer step.

use std::ops::Range;

use bytemuck::cast_slice_mut;
use candle_core::{CpuStorage, DType, Storage};
use zero_comm::{Buffer, ReduceOp};
use zero_model::sink::FlatBuffer;
use zero_model::{Parameter, Tuning};
use zero_optim::exact_sum::LIMBS;
use zero_optim::norm::{Limits, Verdict};
use zero_optim::{AverageSums, ExactSum, Optimizer, Rate, SecondMoment, Step};
use zero_pipeline::{Placement, SegmentId};
use zero_tier::AlignedBuffer;

use crate::accounting::ledger::Category;
use crate::accounting::memory::Memory;
use crate::disk::{Tile, states_in};
use crate::error::ZeroError;
use crate::gpu::Gpu;
use crate::narrow::{Stochastic, Values, update};
use crate::parameters::ParameterState;
use crate::rank::Rank;
use crate::reductions::{Reductions, no_squares};
use crate::rounding::{round_bytes, round_to, working};
use crate::states::StateBuffer;
use crate::storage::{copy, overwrite};
use crate::threads::{advance, average, update_matrix};
use crate::trust::Trust;

/// The optimizer state of one rank.
#[derive(Default)]
pub(crate) struct OptimizerState {
    segments: Vec<SegmentState>,
    judged: Option<Judged>,
    pub(crate) trust: Trust,
    /// Segments on the GPU whose update is pending, so that one launch can update all of them.
    updating: Vec<SegmentId>,
    /// Number of optimizer steps taken.
    updates: u64,
    /// The sums of a schedule-free optimizer's averages so far.
    sums: AverageSums,
}

/// This rank's part of the state of one segment.
#[derive(Default)]
pub(crate) struct SegmentState {
    /// f32 master copy, if the working dtype has 16 bits. Empty if there is none in memory.
    pub(crate) master: FlatBuffer,
    /// The average of the weights, if there is one, and the optimizer's states.
    pub(crate) states: Vec<StateBuffer>,
}

impl SegmentState {
    /// Returns the optimizer states and, if there is one, the master of `part`, a range of this rank's part of a
    /// segment. With a tile's buffer, the states cover `part` only; otherwise they are the states in memory and cover
    /// this rank's whole part.
    pub(crate) fn part<'a>(
        &'a mut self,
        in_tile: &'a mut Option<AlignedBuffer>,
        rank: &Rank,
        id: SegmentId,
        part: &Range<usize>,
    ) -> Result<(Vec<Values<'a>>, Option<&'a mut [f32]>), ZeroError> {
        if let Some(buffer) = in_tile {
            let mut kinds = states_in(buffer, rank, id, part.len());
            let master = (kinds.len() > rank.states(id)).then(|| kinds.pop()).flatten();
            return Ok((kinds, master.map(Values::f32).transpose()?));
        }
        let kinds = self.states.iter_mut().map(|kind| on_host(kind.host_mut()));
        let master = (!self.master.is_empty()).then(|| on_host(self.master.host_mut())).transpose()?;
        Ok((kinds.collect::<Result<_, _>>()?, master.map(|master| &mut master[part.clone()])))
    }
}

/// The result of checking the current step's gradient norm.
#[derive(Debug, Clone)]
struct Judged {
    /// `None` while the verdict is on the GPU; the host does not wait for it.
    verdict: Option<Verdict>,
    /// How each clipping scales and limits gradients.
    scalings: Vec<Scaling>,
}

/// How the host scales and limits gradients before the update.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scaling {
    pub(crate) grad_scale: f32,
    pub(crate) grad_limit: f32,
}

/// The components that an optimizer step reads and writes besides the optimizer's state.
pub(crate) struct StepInputs<'a> {
    pub(crate) rank: &'a Rank,
    pub(crate) memory: &'a mut Memory,
    pub(crate) parameters: &'a mut ParameterState,
    pub(crate) gradients: &'a mut Reductions,
    pub(crate) rate: Rate,
}

impl OptimizerState {
    /// Adds the state of the next segment.
    pub(crate) fn push(&mut self, state: SegmentState) {
        self.segments.push(state);
    }

    pub(crate) fn segment(&self, id: SegmentId) -> &SegmentState {
        &self.segments[id]
    }

    pub(crate) fn segment_mut(&mut self, id: SegmentId) -> &mut SegmentState {
        &mut self.segments[id]
    }

    /// Returns the master copy of this rank's part; empty if there is none in memory.
    pub(crate) fn master(&self, id: SegmentId) -> &FlatBuffer {
        &self.segments[id].master
    }

    /// Returns the number of optimizer steps taken, excluding skipped ones.
    pub(crate) fn updates(&self) -> u64 {
        self.updates
    }

    pub(crate) fn sums(&self) -> AverageSums {
        self.sums
    }

    pub(crate) fn set_progress(&mut self, updates: u64, sums: AverageSums) {
        (self.updates, self.sums) = (updates, sums);
    }

    /// Computes the norm of all reduced gradients and checks it against `limits`.
    pub(crate) fn gradient_norm(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        gradients: &mut Reductions,
        limits: &Limits,
    ) -> Result<(), ZeroError> {
        let world = rank.groups.world();
        let is_alone = world.size() == 1 && rank.groups.tensor().is_none();
        if is_alone && rank.has_residents() && !rank.brings_gradients() {
            gradients.on_gpu(rank, memory, |gpu, gradients| gpu.judge(gradients, limits))?;
            let scaling = Scaling { grad_scale: 1.0, grad_limit: limits.grad_limit() };
            self.judged = Some(Judged { verdict: None, scalings: vec![scaling] });
            return Ok(());
        }
        gradients.sum_over_tensor_group(rank, memory)?;
        let mut sums = no_squares(rank);
        if rank.has_residents() {
            sums[0] = gradients.on_gpu(rank, memory, Gpu::squares)?;
        }
        gradients.add_squares(rank, memory, &mut sums)?;
        let mut limbs = sums.iter().flat_map(ExactSum::limbs).copied().collect();
        for group in std::iter::once(world).chain(rank.groups.tensor()) {
            limbs = group.all_reduce(Buffer::I64(limbs), ReduceOp::Sum).wait()?.into_i64()?;
        }
        let of_clippings = rank.options.clippings.iter().map(|&clipping| limits.of_group(clipping));
        let (mut total, mut scalings) = (ExactSum::new(), vec![]);
        for (limits, limbs) in std::iter::once(*limits).chain(of_clippings).zip(limbs.chunks(LIMBS)) {
            let squares = ExactSum::from_limbs(limbs)?;
            scalings.push(Scaling { grad_scale: limits.judge(&squares).scale, grad_limit: limits.grad_limit() });
            total.merge(&squares);
        }
        // The norm of all gradients decides whether the update runs.
        self.judged = Some(Judged { verdict: Some(limits.judge(&total)), scalings });
        Ok(())
    }

    /// Returns, for each clipping, how the host scales gradients; `None` if the step is skipped. If the verdict is
    /// still on a GPU, the kernels apply the factor of the verdict.
    pub(crate) fn scalings(&self) -> Result<Option<Vec<Scaling>>, ZeroError> {
        let Some(Judged { verdict, scalings }) = &self.judged else {
            return Err(ZeroError::internal("the update ran before the gradient norm"));
        };
        Ok(verdict.is_none_or(|verdict| verdict.is_admitted).then(|| scalings.clone()))
    }

    /// Runs the optimizer step on this rank's part of a segment, or skips it, and frees the gradients. Segments on a
    /// GPU are only queued: [`OptimizerState::carry_out_updates`] updates them with few launches.
    pub(crate) fn update(&mut self, mut with: StepInputs<'_>, id: SegmentId) -> Result<(), ZeroError> {
        if let Some(scalings) = self.scalings()? {
            self.measure_trust(&mut with, &scalings)?;
            if with.rank.is_resident(id) {
                self.updating.push(id);
                return Ok(());
            }
            let own = 0..with.rank.own_range(id).len();
            self.update_part(&mut with, id, own, &mut Tile::empty())?;
        }
        with.gradients.discard(with.rank, with.memory, id)
    }

    /// Runs the pending updates on the GPU, in as few launches as possible.
    pub(crate) fn carry_out_updates(&mut self, with: StepInputs<'_>) -> Result<(), ZeroError> {
        if self.updating.is_empty() {
            return Ok(());
        }
        let StepInputs { rank, memory, parameters, gradients, rate } = with;
        let ids = std::mem::take(&mut self.updating);
        let Some(scalings) = self.scalings()? else { return Ok(()) };
        let Self { segments, judged, updates, sums, .. } = self;
        let gpu = memory.gpu()?;
        let mut updated = vec![];
        let states = segments.iter_mut().zip(parameters.shards_mut()).enumerate();
        for (id, (state, shard)) in states.filter(|(id, _)| ids.contains(id)) {
            updated.extend(gpu.to_update(rank, id, gradients.reduced(id)?.f32()?, state, shard.as_mut())?);
        }
        // One launch for each group of parameters.
        while let Some(&(tuning, _)) = updated.first() {
            let (now, later): (Vec<_>, Vec<_>) = updated.into_iter().partition(|(other, _)| *other == tuning);
            updated = later;
            let shared = rank.options.optimizer(tuning.optimizer).clone().with_share(*sums, *updates + 1, rate.lr);
            let (optimizer, lr) = tuned(&shared, &rate, &tuning);
            let Scaling { grad_scale, grad_limit } = scalings[tuning.clipping];
            let factors = [true, false]
                .map(|decay| optimizer.factors(&Step { step: *updates + 1, lr, grad_scale, grad_limit, decay }));
            let now: Vec<_> = now.into_iter().map(|(_, updated)| updated).collect();
            let average_weight = rank.options.average_weight(*updates + 1);
            gpu.step(factors.each_ref(), &now, average_weight, matches!(judged, Some(Judged { verdict: None, .. })))?;
        }
        ids.into_iter().try_for_each(|id| gradients.discard(rank, memory, id))
    }

    /// Runs the optimizer step on `part`, a range of this rank's part of a segment. Takes values from `tile` if it has
    /// them, and from memory otherwise.
    pub(crate) fn update_part(
        &mut self,
        with: &mut StepInputs<'_>,
        id: SegmentId,
        part: Range<usize>,
        tile: &mut Tile<AlignedBuffer>,
    ) -> Result<(), ZeroError> {
        let Some(scalings) = self.scalings()? else { return Ok(()) };
        let StepInputs { rank, memory, parameters, gradients, rate } = with;
        let (segment, own, options) = (rank.segment(id), rank.own_range(id), &rank.options);
        let Tile { state: in_tile, gradients: of_tile, parameters: updated } = tile;
        let is_refreshed =
            rank.shards().size() > 1 && in_tile.is_none() && segment.placements.optimizer == Placement::Sharded;
        let gradients = gradients.part(rank, id, &part, of_tile.as_ref())?;
        // The first pass has already counted Adafactor's buffers.
        if !own.is_empty() && !matches!(rank.optimizer(id), Optimizer::Adafactor(_)) {
            let bytes = segment.update_bytes();
            memory.count(Category::Staging, bytes, 1);
            memory.uncount(Category::Staging, bytes, 1);
        }
        let shared = rank.optimizer(id).clone().with_share(self.sums, self.updates + 1, rate.lr);
        // States in memory cover this rank's whole part, not only `part`.
        let skipped = if in_tile.is_some() { 0 } else { part.start };
        let (mut kinds, mut master) = self.segments[id].part(in_tile, rank, id, &part)?;
        // The average of the weights is the first state.
        let (averages, kinds) = kinds.split_at_mut(options.averages());
        let average_weight = options.average_weight(self.updates + 1);
        let mut shard = parameters.shard_mut(id);
        for (index, inside, at) in segment.overlaps(own.start + part.start..own.start + part.end) {
            let parameter = &rank.model.parameters()[index];
            let (optimizer, lr) = tuned(&shared, rate, &parameter.tuning());
            let decay = options.decays(parameter);
            let Scaling { grad_scale, grad_limit } = scalings[parameter.tuning().clipping];
            let step = Step { step: self.updates + 1, lr, grad_scale, grad_limit, decay };
            let (optimizer, step) = self.trust.applied(index, parameter.elements(), optimizer, step);
            let in_state = at.start + skipped..at.end + skipped;
            let cut = parameter.cut();
            let stochastic =
                options.stochastic_rounding.map(|seed| Stochastic::new(seed, index, step.step, inside.start, cut));
            let mut run = |mut values: Values<'_>| -> Result<(), ZeroError> {
                let grads = gradients.part(at.clone());
                let moments = kinds.iter_mut().enumerate();
                let moments = moments.map(|(state, kind)| kind.part(segment.in_state(state, in_state.clone())));
                let mut moments: Vec<Values<'_>> = moments.collect();
                match (&optimizer, segment.matrix.as_ref().map(|matrix| matrix.shape)) {
                    (Optimizer::Custom(custom), Some(shape)) => {
                        let states = moments.into_iter().map(Values::f32).collect::<Result<Vec<_>, _>>();
                        custom.advance_matrix(&step, shape, values.reborrow().f32()?, grads.f32()?, &mut states?)?;
                    }
                    (Optimizer::Muon(muon), Some(shape)) => {
                        let (momentum, grads) = (moments.remove(0).f32()?, grads.f32()?);
                        update_matrix(muon, &step, shape, values.reborrow().f32()?, grads, momentum)?;
                    }
                    (Optimizer::Adafactor(of), Some([rows, _])) => {
                        let factors = &*moments.remove(0).f32()?;
                        let mean = of.mean(&factors[..rows]);
                        let moment = |first| SecondMoment::Factored { factors, rows, mean, first };
                        advance(of, &step, values.reborrow().f32()?, grads.f32()?, moment)?;
                    }
                    _ => update(&optimizer, &step, values.reborrow(), grads, moments, stochastic)?,
                }
                match averages.first_mut() {
                    Some(averages) => {
                        Ok(average(average_weight, values.f32()?, averages.part(in_state.clone()).f32()?)?)
                    }
                    None => Ok(()),
                }
            };
            let in_shard = part.start + at.start..part.start + at.end;
            if let Some(master) = &mut master {
                let master = &mut master[at.clone()];
                run(Values::F32(master))?;
                match (&mut *updated, shard.as_deref_mut()) {
                    (Some(buffer), _) => round_bytes(master, parameter.dtype(), buffer.as_bytes_mut(), at)?,
                    (None, Some(Storage::Cpu(shard))) => round_to(master, shard, in_shard)?,
                    (None, Some(shard)) => {
                        let rounded = Storage::Cpu(working(&*master, parameter.dtype()));
                        copy(&rounded, 0..in_shard.len(), shard, in_shard)?;
                    }
                    // A refresh will gather these parameters from the masters.
                    _ if parameter.is_on_gpu() && is_refreshed => {}
                    _ if parameter.is_on_gpu() => refill(memory, parameter, inside, master)?,
                    _ => parameter.update(|full| round_to(master, full, inside).map_err(candle_core::Error::wrap))?,
                }
                continue;
            }
            match (&mut *updated, shard.as_deref_mut()) {
                (Some(buffer), _) if parameter.dtype() == DType::BF16 => {
                    run(Values::Bf16(&mut cast_slice_mut(buffer.as_bytes_mut())[at.clone()]))?;
                }
                (Some(buffer), _) => run(Values::F32(&mut buffer.as_f32_mut()[at.clone()]))?,
                (None, Some(Storage::Cpu(CpuStorage::F32(shard)))) => run(Values::F32(&mut shard[in_shard]))?,
                (None, Some(Storage::Cpu(CpuStorage::BF16(shard)))) => run(Values::Bf16(&mut shard[in_shard]))?,
                _ => parameter.update(|values| match values {
                    CpuStorage::F32(full) => run(Values::F32(&mut full[inside])).map_err(candle_core::Error::wrap),
                    CpuStorage::BF16(full) => run(Values::Bf16(&mut full[inside])).map_err(candle_core::Error::wrap),
                    _ => candle_core::bail!("a released parameter cannot be updated"),
                })?,
            }
        }
        Ok(())
    }

    /// Ends the step, and counts it if its norm was admitted. On a GPU, this waits for all work queued on its stream.
    /// Returns the verdict; `None` if there was no norm since the last call.
    pub(crate) fn finish_step(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        rate: Rate,
    ) -> Result<Option<Verdict>, ZeroError> {
        self.trust = Trust::default();
        let verdict = match self.judged.take() {
            None => return Ok(None),
            Some(Judged { verdict: Some(verdict), .. }) => verdict,
            Some(Judged { verdict: None, .. }) => memory.gpu()?.verdict()?,
        };
        if verdict.is_admitted {
            self.updates += 1;
            if let [Optimizer::ScheduleFree(free)] = &rank.options.optimizers[..] {
                self.sums = self.sums.after(free, self.updates, rate.lr);
            }
        }
        Ok(Some(verdict))
    }
}

/// Returns the optimizer and the learning rate for parameters with this tuning.
pub(crate) fn tuned(optimizer: &Optimizer, rate: &Rate, tuning: &Tuning) -> (Optimizer, f64) {
    let optimizer =
        optimizer.clone().with_betas(rate.betas).with_betas(tuning.betas).with_weight_decay(tuning.weight_decay);
    (optimizer, rate.lr * tuning.lr_factor)
}

/// Rounds new values to the dtype of a parameter on a GPU and overwrites a range of the parameter, after all work
/// queued on the GPU's stream.
fn refill(memory: &mut Memory, parameter: &Parameter, range: Range<usize>, master: &[f32]) -> Result<(), ZeroError> {
    let gpu = memory.gpu()?;
    let values = gpu.upload_rounded(master, parameter.dtype())?;
    if range.len() == parameter.elements() {
        parameter.put(values)?;
    } else {
        overwrite(parameter, range.clone(), &values, 0..range.len())?;
        drop(values);
    }
    // Either the old storage or the uploaded values have been freed.
    gpu.released();
    Ok(())
}

pub(crate) fn on_host<T>(values: Option<T>) -> Result<T, ZeroError> {
    values.ok_or_else(|| ZeroError::internal("cannot update the state on the host: it is on a GPU"))
}
