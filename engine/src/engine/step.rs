//! Training steps: distributes a global batch to micro-batches and returns the result of the step.

use std::time::{Duration, Instant};

use zero_comm::{Buffer, ReduceOp};
use zero_optim::norm::Limits;
use zero_optim::schedule::Rate;
use zero_partition::Order;
use zero_pipeline::ZeroStage;

use super::Engine;
use crate::batch::Batch;
use crate::error::Error;
use crate::executor::activation_offload::ActivationOffload;
use crate::executor::{Context, StepOutput, run};
use crate::format::counted;
use crate::loss_weights::{LossWeights, Mean};
use crate::noise::GradientNoise;
use crate::settings::loss_gradient;

/// The result of one optimizer step. All fields except `duration` and `sent_bytes` are the same on every rank, or on
/// every rank of a replicate if replicates train independently (`training.local_steps`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Number of samples in the global batch.
    pub samples: usize,
    /// Mean loss before the update: of the global batch, or of the replicate's part of it if replicates train
    /// independently.
    pub loss: f32,
    /// The part of `loss` that `training.z_loss` adds; `None` without it.
    pub z_loss: Option<f32>,
    /// Learning rate of the update.
    pub lr: f64,
    /// Global L2 norm of the gradient before clipping, after division by the loss scale.
    pub grad_norm: f64,
    /// Signal and noise of the gradient; `None` without `training.gradient_noise_scale`, or if it is not finite.
    pub noise: Option<GradientNoise>,
    /// Factor that the loss was multiplied by before the backward; `None` without `fp16`.
    pub loss_scale: Option<f64>,
    /// Whether the update was skipped because the gradient was not finite or its norm exceeded [`Engine::skip_beyond`].
    pub skipped: bool,
    /// Whether an outer step followed, which makes all replicates equal; always `false` without `training.local_steps`.
    pub averaged: bool,
    /// Wall-clock time of the step on this rank.
    pub duration: Duration,
    /// Payload bytes that this rank sent.
    pub sent_bytes: u64,
}

impl Engine {
    /// Runs one optimizer step on a global batch of [`Engine::batch_size`] samples. This rank computes its share.
    ///
    /// If the loss has weights ([`Layers::loss_weight`]; for a language model, i64 targets), the loss of the global
    /// batch is the mean over all of its targets that are not ignored. The result does not depend on how the targets
    /// are distributed across micro-batches.
    ///
    /// [`Layers::loss_weight`]: zero_model::Layers::loss_weight
    ///
    /// Every rank passes the same batch, so the same program runs on one rank and on many.
    ///
    /// # Errors
    /// Fails if the batch has a different size, all of its targets are ignored, a layer fails or a rank is lost; with
    /// `fp16`, also if gradients overflow at the smallest loss scale. The engine is not usable after an error.
    pub fn train_batch(&mut self, batch: &Batch) -> Result<Step, Error> {
        let (rows, wanted) = (batch.rows()?, self.batch_size());
        if rows != wanted {
            let key = if self.config.training.rampup_batch_size.is_some() {
                "the next step of `training.rampup_batch_size` has"
            } else {
                "`train_batch_size` is"
            };
            return Err(Error::Batch(format!("it has {rows} samples, but {key} {wanted}")));
        }
        batch.fits(self.model().signature(), true)?;
        let size = self.settings.micro_batch_size;
        self.train_with(|micro_batch| batch.narrow(micro_batch * size, size))
    }

    /// Runs one optimizer step and loads each micro-batch when the program needs it. `load` takes the index of a
    /// micro-batch in the global batch, and returns `train_micro_batch_size_per_gpu` samples. The global batch has
    /// [`Engine::batch_size`] samples. If micro-batches have weights, the last pipeline stage loads all of its
    /// micro-batches at the beginning of the step.
    ///
    /// # Errors
    /// Fails in the same cases as [`Engine::train_batch`], and returns any error of `load`.
    pub fn train_with(&mut self, load: impl FnMut(usize) -> Result<Batch, Error>) -> Result<Step, Error> {
        let size = self.settings.micro_batch_size;
        self.train_micro_batches(&vec![size; self.batch_size() / size], load)
    }

    /// Runs one optimizer step on a global batch whose micro-batches have `rows` samples each, in total
    /// [`Engine::batch_size`]. The number of micro-batches must be a multiple of [`Engine::replicas`], and may differ
    /// from step to step. `load` takes an index into `rows` and returns a micro-batch with that number of samples.
    /// Tensors of different micro-batches may have different lengths. The loss of the global batch is the same mean as
    /// in [`Engine::train_batch`]; without weights, it is the mean over samples.
    ///
    /// Every rank passes the same `rows`.
    ///
    /// # Errors
    /// Fails in the same cases as [`Engine::train_with`], and if `rows` does not meet these conditions. With several
    /// pipeline stages, all micro-batches must have `train_micro_batch_size_per_gpu` samples.
    pub fn train_micro_batches(
        &mut self,
        rows: &[usize],
        mut load: impl FnMut(usize) -> Result<Batch, Error>,
    ) -> Result<Step, Error> {
        let started = Instant::now();
        self.has_own_weights("a step")?;
        let switched = self.switch_program(rows).and_then(|()| {
            let programs = || self.stage_plan.training(self.zero.layout().shape());
            self.ahead.before_step(programs, &*self.comm, &**self.zero.groups().world())
        });
        switched.inspect_err(|error| self.comm.abort(&error.to_string()))?;
        let loss_scale = self.loss_scale();
        let scale = loss_scale.unwrap_or(1.0);
        let sent_before = self.stats().sent_bytes();
        let step = self.step + 1;
        let settings = &self.settings;
        let (ranks, rank) = (self.stage_plan.mesh.data_parallel(), self.zero.groups().data_rank());
        let rate = self.next_rate()?;
        let (order, micro_batches) = (settings.order, settings.micro_batches);
        // A replicate that trains independently has consecutive micro-batches, so that its micro-batches do not depend
        // on the number of ranks per replicate.
        let replicate = settings.zero.outer.map_or(0, |outer| outer.share.replicate);
        let own = replicate * ranks * micro_batches;
        let global = |local: usize| own + order.global(rank, ranks, local, micro_batches);
        let first = self.samples;
        let sample = |local: usize| first + rows[..global(local)].iter().sum::<usize>() as u64;
        let (model, sequence) = (self.zero.model().clone(), self.sequence.clone());
        let signature = model.signature().clone();
        let load_local = |local: usize| {
            let batch = load(global(local))?;
            let (found, expected) = (batch.rows()?, rows[global(local)]);
            if found != expected {
                return Err(Error::Batch(format!("a micro-batch has {found} samples, expected {expected}")));
            }
            batch.fits(&signature, true)?;
            batch.own_slice(sequence.as_ref(), model.whole_inputs().unwrap_or_default())
        };
        let (data, weights) = (self.zero.groups().data().clone(), LossWeights::default());
        let stage = (&*model, &*data, self.has_last_layer());
        let mean = if rows.iter().all(|&count| count == rows[0]) { Mean::Step } else { Mean::StepOfSamples };
        let mut load = weights.loader(stage, (mean, micro_batches), load_local);
        let mut outcome = run(
            &self.program,
            &mut Context {
                zero: &mut self.zero,
                timing: &mut self.timing,
                tracked: self.tracked,
                memory_limit: self.memory_limit,
                kept: self.kept.as_mut(),
                load: &mut load,
                sequence: self.sequence.as_ref(),
                sample: &sample,
                training: true,
                scored: true,
                seed: self.config.training.seed,
                step,
                loss_gradient: f64::from(settings.loss_gradient) * scale,
                weights: &weights,
                limits: Limits {
                    loss_scale: scale,
                    max_norm: self.config.gradient_clipping,
                    max_value: self.config.gradient_clipping_value.unwrap_or(0.0),
                    limit: self.norm_limit,
                    skips_overflow: settings.skips_overflow,
                },
                rate,
                observe: None,
            },
        )
        .inspect_err(|error| self.comm.abort(&error.to_string()))?;
        self.kept.iter().for_each(ActivationOffload::rest);
        self.step = step;
        let samples = self.batch_size();
        self.samples += samples as u64;
        self.boundaries = std::mem::take(&mut outcome.boundaries);
        self.settle_buffers(&outcome)?;
        let [loss, z_loss] = self.step_losses(&outcome)?;
        let (norm, is_admitted) =
            outcome.verdict.map_or((f64::NAN, false), |verdict| (verdict.norm, verdict.is_admitted));
        let noise = self.gradient_noise(norm, f64::from(self.settings.loss_gradient) * scale)?;
        let averaged = self.averages_after(step);
        if averaged {
            self.outer_step()?;
        }
        self.look_after_save()?;
        self.ahead.after_step();
        if let Some(scaler) = &mut self.scaler {
            // All ranks have the same norm, so their scalers stay equal.
            scaler.update(!norm.is_finite()).map_err(|exhausted| {
                let key = "`fp16.min_loss_scale`";
                Error::Diverged { reason: format!("step {step}: {exhausted} ({key}); the loss is {loss}") }
            })?;
        }
        Ok(Step {
            step,
            samples,
            loss,
            z_loss: self.model().has_z_loss().then_some(z_loss),
            lr: rate.lr,
            grad_norm: norm,
            noise,
            loss_scale,
            skipped: !is_admitted,
            averaged,
            duration: started.elapsed(),
            sent_bytes: self.stats().sent_bytes() - sent_before,
        })
    }

    /// Switches to the program for this distribution of a step's samples to micro-batches.
    fn switch_program(&mut self, rows: &[usize]) -> Result<(), Error> {
        let (replicas, wanted) = (self.replicas(), self.batch_size());
        let (count, samples) = (rows.len() / replicas, rows.iter().sum::<usize>());
        if count == 0 || !rows.len().is_multiple_of(replicas) || rows.contains(&0) || samples != wanted {
            return Err(Error::Batch(format!(
                "its micro-batches have {rows:?} samples; the number of micro-batches must be a multiple of {replicas}, no micro-batch may be empty, and all micro-batches together must have {wanted} samples"
            )));
        }
        if self.stage_plan.mesh.pipe() > 1 && rows.iter().any(|&count| count != self.settings.micro_batch_size) {
            let message = "micro-batches of different sizes cannot pass through pipeline stages";
            return Err(Error::setting("pipeline.stages", message, "use one pipeline stage"));
        }
        let now = self.settings.micro_batches;
        if count != now || rows.iter().any(|&rows| rows != self.settings.micro_batch_size) {
            self.ahead.agree(&*self.comm, "the samples of the micro-batches", &rows)?;
        }
        if count == now {
            return Ok(());
        }
        (self.settings.micro_batches, self.stage_plan.micro_batches) = (count, count);
        self.settings.loss_gradient = loss_gradient(&self.config, count);
        let program = match self.other_programs.remove(&count) {
            Some(program) => program,
            None => {
                let (shape, stage) = (self.zero.layout().shape(), self.zero.groups().at().stage);
                self.stage_plan.kept(self.stage_plan.training(shape), stage, shape)?
            }
        };
        self.other_programs.insert(now, std::mem::replace(&mut self.program, program));
        Ok(())
    }

    /// Estimates signal and noise from the squares of the gradients of all micro-batches of the step, and from the norm
    /// of their sum. Collective if the run measures the noise. Returns `None` if the run does not measure it, or if a
    /// gradient was not finite.
    fn gradient_noise(&mut self, norm: f64, loss_gradient: f64) -> Result<Option<GradientNoise>, Error> {
        if !self.settings.zero.sums_micro_batches {
            return Ok(None);
        }
        let own = self.zero.take_micro_batch_squares();
        let squares = self.sum_exactly(&[own])?[0];
        let count = (self.settings.micro_batches * self.replicas()) as f64;
        let small = self.settings.micro_batch_size as f64;
        // Each contribution to the sum is the gradient of a micro-batch's mean loss times this factor.
        let factor = f64::from(self.settings.loss_gradient);
        let squared_small = squares / count / loss_gradient.powi(2);
        let squared_big = (norm / (factor * count)).powi(2);
        let of = GradientNoise::estimate((small, squared_small), (small * count, squared_big));
        Ok((of.signal.is_finite() && of.noise.is_finite()).then_some(of))
    }

    /// Returns the values that the schedule sets for the next step. Rank 0 computes the factor of a program's
    /// `lr_lambda` for all ranks, because all shards must be updated with the same rate.
    fn next_rate(&self) -> Result<Rate, Error> {
        let (settings, updates) = (&self.settings, self.zero.updates());
        let rate = settings.schedule.rate(settings.base_lr, updates + 1);
        let Some(factor) = self.model().lr_lambda() else { return Ok(rate) };
        let world = self.zero.groups().world();
        let own = if world.rank() == 0 { factor(updates) } else { 0.0 };
        let told = world.broadcast(Buffer::I64(vec![own.to_bits() as i64]), 0).wait()?.into_i64()?;
        let factor = f64::from_bits(told[0] as u64);
        if factor.is_finite() && factor >= 0.0 {
            return Ok(Rate { lr: rate.lr * factor, ..rate });
        }
        let taken = counted(updates as usize, "optimizer step", "optimizer steps");
        let message = format!("`lr_lambda` returned {factor} after {taken}");
        Err(Error::setting("scheduler", message, "return a finite factor that is not negative"))
    }

    /// Computes the mean loss and z-loss of the global batch on the last pipeline stage and broadcasts them to all
    /// ranks.
    fn step_losses(&self, outcome: &StepOutput) -> Result<[f32; 2], Error> {
        let with_z = self.model().has_z_loss();
        let totals = match self.has_last_layer() {
            true => {
                let mut losses: Vec<Vec<f32>> = outcome.losses.iter().map(|&loss| vec![loss]).collect();
                losses.iter_mut().zip(&outcome.z_losses).for_each(|(losses, z)| losses.push(*z));
                self.sum_over_micro_batches(losses)?
            }
            false => vec![0.0; 1 + usize::from(with_z)],
        };
        let totals = self.told_by_the_last(Buffer::F32(totals))?.into_f32()?;
        let count = (self.settings.micro_batches * self.stage_plan.mesh.data()) as f32;
        Ok([totals[0] / count, totals.get(1).map_or(0.0, |z| z / count)])
    }

    /// Sums vectors, one per local micro-batch, over all micro-batches of the global batch, in the same order as the
    /// gradients. All vectors have the same length, on all replicas.
    pub(super) fn sum_over_micro_batches(&self, values: Vec<Vec<f32>>) -> Result<Vec<f32>, Error> {
        let add_up = |values: Vec<Vec<f32>>| match self.settings.zero.order {
            Order::Arrival => values.into_iter().reduce(sum).unwrap_or_default(),
            Order::Tree => tree(values),
        };
        if self.settings.layout.zero_stage < ZeroStage::Two {
            return self.sum_over_replicas(add_up(values));
        }
        let length = values.first().map_or(0, Vec::len);
        let sums = self.sum_over_replicas(values.concat())?;
        Ok(add_up(sums.chunks(length.max(1)).map(<[f32]>::to_vec).collect()))
    }

    pub(super) fn sum_over_replicas(&self, values: Vec<f32>) -> Result<Vec<f32>, Error> {
        let data = self.zero.groups().data();
        Ok(data.all_reduce(Buffer::F32(values), ReduceOp::Sum).wait()?.into_f32()?)
    }

    /// Broadcasts values from the stage of the last layer to all ranks, or to the ranks of the replicate if it trains
    /// independently. The other stages pass a buffer of the same length, whose values are ignored.
    pub(super) fn told_by_the_last(&self, values: Buffer) -> Result<Buffer, Error> {
        if self.stage_plan.mesh.pipe() == 1 {
            return Ok(values);
        }
        Ok(self.zero.groups().world().broadcast(values, self.stage_plan.last_rank()).wait()?)
    }

    pub(super) fn has_last_layer(&self) -> bool {
        let stages = &self.stage_plan.stages;
        stages.stage_of(stages.layers() - 1) == self.zero.groups().at().stage
    }
}

/// Sums the vectors over a binary tree: first pairs of neighbours, then pairs of these sums, and so on.
fn tree(mut values: Vec<Vec<f32>>) -> Vec<f32> {
    while values.len() > 1 {
        let mut level = values.into_iter();
        values = std::iter::from_fn(|| level.next().map(|a| (a, level.next())))
            .map(|(a, b)| match b {
                Some(b) => sum(a, b),
                None => a,
            })
            .collect();
    }
    values.pop().unwrap_or_default()
}

fn sum(mut a: Vec<f32>, b: Vec<f32>) -> Vec<f32> {
    a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
    a
}
