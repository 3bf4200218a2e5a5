//! Evaluation and inference, which run only forward passes.

use zero_comm::{Buffer, ReduceOp};
use zero_model::Activations;
use zero_model::ops::SequenceGroup;
use zero_optim::norm::Limits;
use zero_optim::{ExactSum, Rate};
use zero_pipeline::Program;

use super::Engine;
use crate::batch::Batch;
use crate::error::Error;
use crate::executor::messages::share;
use crate::executor::{Context, Load, Observe, Observed, StepOutput, run};
use crate::loss_weights::{LossWeights, Mean};

/// The mean loss, over all replicas, of the micro-batches with the same index.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeanLoss {
    /// The mean; 0 if the weight is 0.
    pub loss: f32,
    /// The number of targets in the mean, or another [weight](zero_model::Layers::loss_weight). `None` if all
    /// micro-batches have the same weight.
    pub weight: Option<u64>,
}

impl Engine {
    /// Returns the mean loss over one micro-batch per replica, without dropout and without an update. Collective: all
    /// ranks of a pipeline pass the same batch.
    ///
    /// # Errors
    /// Fails in the same cases as [`Engine::train_batch`].
    pub fn eval_batch(&mut self, batch: &Batch) -> Result<f32, Error> {
        Ok(self.eval_with(1, |_| Ok(batch.clone()))?[0])
    }

    /// Returns `count` mean losses over all replicas, one per micro-batch. The micro-batches pass through the pipeline
    /// one after another. `load` returns this replica's micro-batch for an index below `count`, with whole sequences.
    /// Ranks that share sequences return the same micro-batch, and the engine takes each rank's slice.
    ///
    /// # Errors
    /// Fails in the same cases as [`Engine::train_with`].
    pub fn eval_with(
        &mut self,
        count: usize,
        load: impl FnMut(usize) -> Result<Batch, Error>,
    ) -> Result<Vec<f32>, Error> {
        Ok(self.eval_weighted(count, load)?.into_iter().map(|mean| mean.loss).collect())
    }

    /// Like [`Engine::eval_with`], but also returns the weight that each loss has in a mean over several losses.
    ///
    /// # Errors
    /// Fails in the same cases as [`Engine::train_with`].
    pub fn eval_weighted(
        &mut self,
        count: usize,
        load: impl FnMut(usize) -> Result<Batch, Error>,
    ) -> Result<Vec<MeanLoss>, Error> {
        self.mean_losses(count, load, None)
    }

    /// Like [`Engine::eval_weighted`]. In addition, ranks that have the last layer call `observe` with the results of
    /// each micro-batch of this replica, or of this rank's slices if ranks share sequences. Micro-batches may differ in
    /// their number of samples.
    ///
    /// # Errors
    /// Fails in the same cases as [`Engine::eval_with`], and returns the errors of `observe`.
    pub fn eval_observed(
        &mut self,
        count: usize,
        load: impl FnMut(usize) -> Result<Batch, Error>,
        mut observe: impl FnMut(Observed<'_>) -> Result<(), Error>,
    ) -> Result<Vec<MeanLoss>, Error> {
        self.mean_losses(count, load, Some(&mut observe))
    }

    /// Computes, for each micro-batch index, the mean loss over all replicas.
    fn mean_losses(
        &mut self,
        count: usize,
        mut load: impl FnMut(usize) -> Result<Batch, Error>,
        observe: Option<&mut Observe<'_>>,
    ) -> Result<Vec<MeanLoss>, Error> {
        if count == 0 {
            return Ok(vec![]);
        }
        self.has_equal_replicates("an evaluation")?;
        let (model, sequence) = (self.zero.model().clone(), self.sequence.clone());
        let signature = model.signature().clone();
        let load = |micro_batch: usize| {
            let batch = load(micro_batch)?;
            batch.fits(&signature, true)?;
            batch.own_slice(sequence.as_ref(), model.whole_inputs().unwrap_or_default())
        };
        let (data, weights) = (self.zero.groups().evaluating().clone(), LossWeights::default());
        let stage = (&*model, &*data, self.has_last_layer());
        let mut load = weights.loader(stage, (Mean::EachMicroBatch, count), load);
        let mut observe = observe.map(|observe| move |seen: Observed<'_>| observe(seen));
        let observe = observe.as_mut().map(|observe| observe as &mut Observe<'_>);
        let outcome = self.evaluate(count, Some(&weights), &mut load, observe)?;
        let losses = match self.has_last_layer() {
            true => self
                .zero
                .groups()
                .evaluating()
                .all_reduce(Buffer::F32(outcome.losses), ReduceOp::Sum)
                .wait()?
                .into_f32()?,
            false => vec![0.0; count],
        };
        let ranks = data.size() as f32;
        let totals = weights.totals();
        let weight = |index: usize| totals.map_or(-1, |totals| totals[index].cast_signed());
        // Only the stage that computes the loss knows whether the loss has weights.
        let pair = |(index, loss): (usize, f32)| [i64::from((loss / ranks).to_bits()), weight(index)];
        let told = Buffer::I64(losses.into_iter().enumerate().flat_map(pair).collect());
        let told = self.told_by_the_last(told)?.into_i64()?;
        let mean =
            |pair: &[i64]| MeanLoss { loss: f32::from_bits(pair[0] as u32), weight: u64::try_from(pair[1]).ok() };
        Ok(told.chunks_exact(2).map(mean).collect())
    }

    /// Adds up the sums of all ranks. Only the final results are rounded, so they are bit-identical however the numbers
    /// are distributed across ranks. Collective; every rank must pass the same number of sums.
    ///
    /// # Errors
    /// Fails if a rank is lost.
    pub fn sum_exactly(&self, sums: &[ExactSum]) -> Result<Vec<f64>, Error> {
        let limbs = Buffer::I64(sums.iter().flat_map(ExactSum::limbs).copied().collect());
        let limbs = self.comm.all_reduce(limbs, ReduceOp::Sum).wait()?.into_i64()?;
        let total = |limbs: &[i64]| ExactSum::from_limbs(limbs).map_or(f64::NAN, |sum| sum.to_f64());
        Ok(limbs.chunks_exact(ExactSum::new().limbs().len()).map(total).collect())
    }

    /// Returns the outputs of the last layer, or the outputs that the loss names ([`Layers::loss_of`]), without
    /// dropout. Collective: every rank calls it. Each replica passes its own inputs, and all ranks of a pipeline pass
    /// the same inputs. Sequences are not split: ranks that share sequences in training compute whole sequences here.
    /// The ranks of a tensor group pass the same inputs, and the number of positions must be a multiple of
    /// `tensor_parallel.autotp_size`.
    ///
    /// [`Layers::loss_of`]: zero_model::Layers::loss_of
    ///
    /// # Errors
    /// Fails if the batch lacks an input of a layer, a layer fails or a rank is lost.
    pub fn forward(&mut self, inputs: impl Into<Batch>) -> Result<Activations, Error> {
        let inputs = inputs.into();
        inputs.fits(self.model().signature(), false)?;
        let mut outcome = self.evaluate(1, None, &mut |_| Ok(inputs.clone()), None)?;
        self.ahead.settle(self.model().device(), &*self.comm)?;
        let stages = &self.stage_plan.stages;
        share(self.zero.groups(), stages.stage_of(stages.layers() - 1), outcome.outputs.pop())
    }

    /// Runs the forward of `count` micro-batches. The last layer computes the loss if `weights` is given.
    fn evaluate<'a>(
        &mut self,
        count: usize,
        weights: Option<&LossWeights>,
        load: &'a mut Load<'a>,
        observe: Option<&'a mut Observe<'a>>,
    ) -> Result<StepOutput, Error> {
        self.ahead.agree(&*self.comm, "the micro-batches of the evaluation", &count)?;
        let stage = self.zero.groups().at().stage;
        let program = match self.evaluations.remove(&count) {
            Some(program) => program,
            None => {
                let shape = self.zero.layout().shape();
                self.stage_plan.kept(self.stage_plan.evaluation(shape, count), stage, shape)?
            }
        };
        let outcome = self.run_without_training(&program, weights, load, observe);
        self.evaluations.insert(count, program);
        let outcome = outcome.and_then(|outcome| self.buffers_unchanged().map(|()| outcome));
        outcome.inspect_err(|error| self.comm.abort(&error.to_string()))
    }

    /// Runs a program that has no backward and no update of the optimizer.
    pub(super) fn run_without_training<'a>(
        &mut self,
        program: &Program,
        weights: Option<&LossWeights>,
        load: &'a mut Load<'a>,
        observe: Option<&'a mut Observe<'a>>,
    ) -> Result<StepOutput, Error> {
        let even = LossWeights::default();
        let of_whole = self.sequence.as_ref().and_then(SequenceGroup::of_whole_batch);
        let mut context = Context {
            zero: &mut self.zero,
            timing: &mut self.timing,
            tracked: self.tracked,
            memory_limit: self.memory_limit,
            kept: None,
            load,
            // If the program returns outputs, it runs on whole sequences.
            sequence: if weights.is_some() { self.sequence.as_ref() } else { of_whole.as_ref() },
            sample: &|_| 0,
            training: false,
            scored: weights.is_some(),
            seed: self.config.training.seed,
            step: self.step,
            loss_gradient: 0.0,
            weights: weights.unwrap_or(&even),
            limits: Limits {
                loss_scale: 1.0,
                max_norm: 0.0,
                max_value: 0.0,
                limit: f64::INFINITY,
                skips_overflow: false,
            },
            rate: Rate { lr: 0.0, betas: None },
            observe: match observe {
                Some(observe) => Some(observe),
                None => None,
            },
        };
        run(program, &mut context)
    }
}
