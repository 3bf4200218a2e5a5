//! Evaluation and inference: runs the forward only.

use zero_comm::{Buffer, ReduceOp};
use zero_model::Activations;
use zero_optim::ExactSum;
use zero_optim::norm::Limits;

use super::Engine;
use crate::batch::Batch;
use crate::error::Error;
use crate::executor::messages::share;
use crate::executor::{Context, Load, Observe, Observed, StepOutput, run};

impl Engine {
    /// Returns the mean loss over one micro-batch per replica, without dropout and without an update. A collective: all
    /// ranks of a pipeline pass the same batch.
    ///
    /// # Errors
    /// The same as those of [`Engine::train_batch`].
    pub fn eval_batch(&mut self, batch: &Batch) -> Result<f32, Error> {
        Ok(self.eval_with(1, |_| Ok(batch.clone()))?[0])
    }

    /// Returns `count` mean losses over all replicas, one per micro-batch. The micro-batches go through a pipeline one
    /// after another. `load` returns this replica's micro-batch for an index below `count`.
    ///
    /// # Errors
    /// The same as those of [`Engine::train_with`].
    pub fn eval_with(
        &mut self,
        count: usize,
        load: impl FnMut(usize) -> Result<Batch, Error>,
    ) -> Result<Vec<f32>, Error> {
        self.mean_losses(count, load, None)
    }

    /// Does the same as [`Engine::eval_with`], and on the ranks that have the last layer calls `observe` with the
    /// outputs of each micro-batch of this replica. Micro-batches may differ in their number of samples.
    ///
    /// # Errors
    /// The same as those of [`Engine::eval_with`], and the errors of `observe`.
    pub fn eval_observed(
        &mut self,
        count: usize,
        load: impl FnMut(usize) -> Result<Batch, Error>,
        mut observe: impl FnMut(Observed<'_>) -> Result<(), Error>,
    ) -> Result<Vec<f32>, Error> {
        self.mean_losses(count, load, Some(&mut observe))
    }

    /// Computes the mean loss over all replicas of each micro-batch.
    fn mean_losses(
        &mut self,
        count: usize,
        mut load: impl FnMut(usize) -> Result<Batch, Error>,
        observe: Option<&mut Observe<'_>>,
    ) -> Result<Vec<f32>, Error> {
        if count == 0 {
            return Ok(vec![]);
        }
        let signature = self.model().signature().clone();
        let mut load = |micro_batch: usize| {
            let batch = load(micro_batch)?;
            batch.fits(&signature, true)?;
            Ok(batch)
        };
        let mut observe = observe.map(|observe| move |seen: Observed<'_>| observe(seen));
        let outcome =
            self.evaluate(count, true, &mut load, observe.as_mut().map(|observe| observe as &mut Observe<'_>))?;
        let losses = match self.has_last_layer() {
            true => self.sum_over_replicas(outcome.losses)?,
            false => vec![0.0; count],
        };
        let replicas = self.replicas() as f32;
        Ok(self.told_by_the_last(losses)?.into_iter().map(|loss| loss / replicas).collect())
    }

    /// Adds up the sums of all ranks. Only each final result is rounded, so its bits do not depend on which rank had
    /// which number. A collective: every rank must pass the same number of sums.
    ///
    /// # Errors
    /// Fails if a rank is lost.
    pub fn sum_exactly(&self, sums: &[ExactSum]) -> Result<Vec<f64>, Error> {
        let limbs = Buffer::I64(sums.iter().flat_map(ExactSum::limbs).copied().collect());
        let limbs = self.comm.all_reduce(limbs, ReduceOp::Sum).wait()?.into_i64()?;
        let total = |limbs: &[i64]| ExactSum::from_limbs(limbs).map_or(f64::NAN, |sum| sum.to_f64());
        Ok(limbs.chunks_exact(ExactSum::new().limbs().len()).map(total).collect())
    }

    /// Returns the outputs of the last layer, or those that the loss names ([`Layers::loss_of`]), without dropout. A
    /// collective: every rank calls it. Each replica passes its own inputs, and all ranks of a pipeline pass the same.
    ///
    /// [`Layers::loss_of`]: zero_model::Layers::loss_of
    ///
    /// # Errors
    /// Fails if the batch does not have what layers take, a layer fails or a rank is lost.
    pub fn forward(&mut self, inputs: impl Into<Batch>) -> Result<Activations, Error> {
        let inputs = inputs.into();
        inputs.fits(self.model().signature(), false)?;
        let mut outcome = self.evaluate(1, false, &mut |_| Ok(inputs.clone()), None)?;
        let stages = &self.stage_plan.stages;
        share(self.zero.groups(), stages.stage_of(stages.layers() - 1), outcome.outputs.pop())
    }

    fn evaluate<'a>(
        &mut self,
        count: usize,
        scored: bool,
        load: &'a mut Load<'a>,
        observe: Option<&'a mut Observe<'a>>,
    ) -> Result<StepOutput, Error> {
        let stage = self.zero.groups().at().stage;
        let program = match self.evaluations.remove(&count) {
            Some(program) => program,
            None => {
                let shape = self.zero.layout().shape();
                let mut programs = self.stage_plan.evaluation(shape, count);
                self.stage_plan.validate(&programs, shape)?;
                let mut program = programs.swap_remove(stage);
                program.instructions.shrink_to_fit();
                program
            }
        };
        let outcome = run(
            &program,
            &mut Context {
                zero: &mut self.zero,
                timing: &mut self.timing,
                tracked: self.tracked,
                memory_limit: self.memory_limit,
                kept: None,
                load,
                sample: &|_| 0,
                training: false,
                scored,
                seed: self.config.training.seed,
                step: self.step,
                loss_gradient: 0.0,
                limits: Limits { loss_scale: 1.0, max_norm: 0.0, limit: f64::INFINITY, skips_overflow: false },
                lr: 0.0,
                observe: match observe {
                    Some(observe) => Some(observe),
                    None => None,
                },
            },
        );
        self.evaluations.insert(count, program);
        outcome.inspect_err(|error| self.comm.abort(&error.to_string()))
    }
}
