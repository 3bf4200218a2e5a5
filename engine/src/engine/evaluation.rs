//! Evaluation and inference: the forward alone.

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
    /// The mean loss over all replicas of one micro-batch each, without dropout and without an update; a collective. Ranks of
    /// one pipeline give the same batch.
    ///
    /// # Errors
    /// As [`Engine::train_batch`].
    pub fn eval_batch(&mut self, batch: &Batch) -> Result<f32, Error> {
        Ok(self.eval_with(1, |_| Ok(batch.clone()))?[0])
    }

    /// The mean losses over all replicas of `count` micro-batches each, which go through a pipeline one behind the other. `load`
    /// gives this replica's micro-batch of an index below `count`.
    ///
    /// # Errors
    /// As [`Engine::train_with`].
    pub fn eval_with(
        &mut self,
        count: usize,
        load: impl FnMut(usize) -> Result<Batch, Error>,
    ) -> Result<Vec<f32>, Error> {
        self.mean_losses(count, load, None)
    }

    /// [`Engine::eval_with`] that shows `observe` the outputs of each of this replica's micro-batches, on the ranks that have the last layer.
    /// Micro-batches may differ in their number of samples.
    ///
    /// # Errors
    /// As [`Engine::eval_with`], and what `observe` says.
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
        let mut load = |micro_batch: usize| load(micro_batch).map(|batch| (batch.inputs, Some(batch.targets)));
        let mut observe = observe.map(|observe| move |seen: Observed<'_>| observe(seen));
        let outcome = self.evaluate(count, &mut load, observe.as_mut().map(|observe| observe as &mut Observe<'_>))?;
        let losses = match self.has_last_layer() {
            true => self.sum_over_replicas(outcome.losses)?,
            false => vec![0.0; count],
        };
        let replicas = self.replicas() as f32;
        Ok(self.told_by_the_last(losses)?.into_iter().map(|loss| loss / replicas).collect())
    }

    /// Adds up numbers of all ranks, each sum without rounding but of its end: so the bits do not depend on which rank had which number. A
    /// collective, to which every rank gives as many sums.
    ///
    /// # Errors
    /// A lost rank.
    pub fn sum_exactly(&self, sums: &[ExactSum]) -> Result<Vec<f64>, Error> {
        let limbs = Buffer::I64(sums.iter().flat_map(ExactSum::limbs).copied().collect());
        let limbs = self.comm.all_reduce(limbs, ReduceOp::Sum).wait()?.into_i64()?;
        let total = |limbs: &[i64]| ExactSum::from_limbs(limbs).map_or(f64::NAN, |sum| sum.to_f64());
        Ok(limbs.chunks_exact(ExactSum::new().limbs().len()).map(total).collect())
    }

    /// The last layer's outputs, without dropout; a collective: every rank calls it, each replica with its own inputs, which all
    /// ranks of one pipeline give.
    ///
    /// # Errors
    /// A layer that fails, a lost rank.
    pub fn forward(&mut self, inputs: impl Into<Activations>) -> Result<Activations, Error> {
        let inputs = inputs.into();
        let mut outcome = self.evaluate(1, &mut |_| Ok((inputs.clone(), None)), None)?;
        let stages = &self.stage_plan.stages;
        share(self.zero.groups(), stages.stage_of(stages.layers() - 1), outcome.outputs.pop())
    }

    fn evaluate<'a>(
        &mut self,
        count: usize,
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
